"""What is launched for a cell: the command that a person would type, and the environment it starts in."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from study.errors import REFUSAL_FILE_VARIABLE, UserError
from study.launch.cell import Cell, Trainer
from study.launch.lock import MARKER
from study.spec.strategies import REPOSITORY

_SCRIPTS: dict[Trainer, str] = {
    "study": "study/train.py",
    "hf_trainer": "study/baselines/hf_trainer.py",
    "bare_loop": "study/baselines/bare_loop.py",
}
# What a launcher exports for its ranks would make the next one believe that it is a rank itself.
_ANOTHER_LAUNCH = re.compile(
    r"ACCELERATE_|FSDP_|TORCHELASTIC_|DEEPSPEED_|(GROUP|ROLE)_|MASTER_(ADDR|PORT)$|(LOCAL_)?(RANK|WORLD_SIZE)$"
)


def launch_command(cell: Cell, output_dir: Path, *extra_flags: str) -> list[str]:
    """What a person would type in the repository root."""
    processes = [] if cell.strategy == "single" else ["--num_processes", str(cell.world_size)]
    configuration = f"accelerate_configs/{cell.strategy}.yaml"
    return [
        accelerate(), "launch", "--config_file", configuration, *processes, _SCRIPTS[cell.trainer],
        *cell.flags(_shortest(output_dir)), *extra_flags,
    ]  # fmt: skip


def _shortest(path: Path) -> Path:
    """As seen from the repository root, where every command runs."""
    path = path.absolute()
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path


def accelerate() -> str:
    """The word `accelerate` where the shell finds this installation's, else its path."""
    beside = Path(sys.executable).parent / "accelerate"
    found = shutil.which("accelerate")
    if found and (not beside.exists() or Path(found).samefile(beside)):
        return "accelerate"
    if beside.exists():
        return str(_shortest(beside))
    raise UserError("Accelerate is not installed here", "run: pip install -e '.[train]'")


def clean_environment(directory: Path, refusal_file: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _ANOTHER_LAUNCH.match(name)}
    # The environment need not be activated: ninja and the launcher's own children are looked for on PATH.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return {**kept, MARKER: str(directory.resolve()), REFUSAL_FILE_VARIABLE: str(refusal_file)}
