"""Measure the host memory of saving a checkpoint, loading it, and converting it to one file.

    python tools/checkpoint_memory.py measure [--runs-dir DIR]      18 launches, about 5 GiB of disk at a time
    python tools/checkpoint_memory.py table

`measure` trains GPT-2 for three steps, saves after the second, and resumes with the same number of ranks and with one.
It writes reports/checkpoints/memory.json; both actions write summary.md in the same folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from study.config.places import REPOSITORY
from study.config.strategies import STRATEGY_DIRECTORY
from study.host.environment import describe_environment
from study.records.directory import is_finished, read_run
from study.records.schema import STATE_KINDS
from study.report.document import table_markdown
from study.run.checkpoint import clear_checkpoint
from study.sweep.cell import accelerate
from study.sweep.launch import clean_environment

OUTPUT = REPOSITORY / "reports" / "checkpoints"
RANKS = 2
STEP = "step_0000002"
FLAGS = (
    "--task", "gpt-wikitext", "--scale", "laptop", "--model_name_or_path", "gpt2", "--weights", "random", "--data",
    "builtin", "--precision", "fp32", "--seq_length", "64", "--global_batch_size", "2", "--train_samples", "16",
    "--max_steps", "3", "--warmup_ratio", "0", "--eval_samples", "2", "--eval_steps", "0",
)  # fmt: skip
WHOLE_FSDP2 = "fsdp2, whole tensors"
ARMS = ("ddp", "zero2", "zero2_cpu", "zero3", "fsdp2", WHOLE_FSDP2)
# Runs DeepSpeed's script, then prints the process's peak memory.
_ONE_FILE = """\
import pathlib, runpy, sys
script = sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
print(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""


def measure(runs: Path) -> dict[str, Any]:
    """Return the measurements of all strategies; after an interruption it continues with the remaining ones."""
    arms = {}
    for arm in ARMS:
        folder = runs / arm.replace(", ", "-").replace(" ", "-")
        done = folder / "figures.json"
        if not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            figures = _measured(arm, folder)
            done.write_text(json.dumps(figures), encoding="utf-8")
            clear_checkpoint(folder / "save" / "checkpoints" / STEP)
        arms[arm] = json.loads(done.read_text(encoding="utf-8"))
    return {"environment": describe_environment(), "flags": FLAGS, "ranks": RANKS, "arms": arms}


def _measured(arm: str, folder: Path) -> dict[str, Any]:
    checkpoint = folder / "save" / "checkpoints" / STEP
    figures: dict[str, Any] = {"save": _launched(arm, folder / "save", RANKS, "--checkpointing_steps", "2")}
    figures["checkpoint_bytes"] = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    for ranks in (RANKS, 1):
        resumed = ("--resume_from_checkpoint", str(checkpoint))
        figures[f"load_by_{ranks}"] = _launched(arm, folder / f"load-{ranks}", ranks, *resumed)
    if (checkpoint / "zero_to_fp32.py").exists():
        figures["one_file_gib"] = _made_one_file(checkpoint, folder)
    return figures


def _launched(arm: str, folder: Path, ranks: int, *flags: str) -> list[dict[str, Any]]:
    """Return each rank's peaks of host memory by phase and its bytes of model state; a finished run is reused."""
    if not is_finished(folder):
        # The launch itself rejects a folder with files that are not a run's.
        _launch(arm, folder, ranks, "--overwrite_output_dir", *flags)
    return [
        {
            "phases_host_gib": {phase: peaks["host"] for phase, peaks in rank["phases"].items()},
            "state_bytes": sum(size for kind in STATE_KINDS for size in rank["state"]["state_bytes"][kind].values()),
        }
        for rank in read_run(folder).memory["ranks"]
    ]


def _launch(arm: str, folder: Path, ranks: int, *flags: str) -> None:
    file = STRATEGY_DIRECTORY / f"{arm}.yaml"
    if arm == WHOLE_FSDP2:
        document = yaml.safe_load((STRATEGY_DIRECTORY / "fsdp2.yaml").read_text(encoding="utf-8"))
        document["fsdp_config"]["fsdp_state_dict_type"] = "FULL_STATE_DICT"
        file = folder.parent / "fsdp2.yaml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
    launcher = [accelerate(), "launch", "--config_file", str(file), "--num_processes", str(ranks)]
    command = [*launcher, "study/train.py", *FLAGS, *flags, "--output_dir", str(folder.absolute())]
    environment = clean_environment(folder.parent, folder.parent / "refusal.json")
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)


def _made_one_file(checkpoint: Path, folder: Path) -> float:
    command = [sys.executable, "-c", _ONE_FILE, str(checkpoint / "zero_to_fp32.py"), str(checkpoint)]
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command += [output, "--tag", "pytorch_model"]
        process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    return int(process.stderr.split()[-1]) / 2**20


def summary(document: Mapping[str, Any]) -> str:
    """Return the page of reports/checkpoints for the measurements."""
    import pandas as pd

    environment, ranks = document["environment"], document["ranks"]
    rows = [{"strategy": f"`{arm}`", **_row(figures)} for arm, figures in document["arms"].items()]
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in ("torch", "deepspeed"))
    above = _above_the_steps(document["arms"])
    answer = f"No, but for {', '.join(above)}" if above else "No"
    return f"""# Does a checkpoint need more host memory than training?

**{answer}: {"the other" if above else "all"} peaks of saving and loading are below those of the same run's steps.**

GPT-2 (124 M parameters) in fp32 on {ranks} ranks, {environment["cpu"]}, no GPU, {versions}. Each figure
is the peak of one process in GiB, of rank 0 and of rank 1, and one alone where both have it. Without a GPU the model
state is in it. Made by `python tools/checkpoint_memory.py`.

{table_markdown(pd.DataFrame(rows))}
- *start*: the model is read and given to the engine.
- *goes on with one rank*: what the {ranks} saved is loaded by one, which then holds all of the state. DeepSpeed's
  shards are made into its universal checkpoint first.
- *one file*: DeepSpeed's `zero_to_fp32.py`, a process by itself, which holds no training state.
- *whole tensors*: `fsdp_state_dict_type: FULL_STATE_DICT`, where rank 0 gathers all. The shipped file saves shards.
"""


def _row(figures: Mapping[str, Any]) -> dict[str, str]:
    saved, loaded, alone = (figures[key] for key in ("save", f"load_by_{RANKS}", "load_by_1"))
    return {
        "state of a rank": _each(rank["state_bytes"] / 2**30 for rank in saved),
        "checkpoint": f"{figures['checkpoint_bytes'] / 2**30:.2f}",
        "start": _phase(saved, "init"),
        "steps": _each(_steps(rank) for rank in saved),
        "save": _phase(saved, "save"),
        f"load by {RANKS} ranks": _phase(loaded, "load"),
        "goes on with one rank: load": _phase(alone, "load"),
        "its steps": _each(_steps(rank) for rank in alone),
        "one file": f"{figures['one_file_gib']:.2f}" if "one_file_gib" in figures else "-",
    }


def _above_the_steps(arms: Mapping[str, Any]) -> list[str]:
    """Return the strategies and phases in which a checkpoint needs more memory than the steps."""
    return [
        f"`{arm}`, {label}"
        for arm, figures in arms.items()
        for label, key, phase in (
            ("save", "save", "save"),
            ("load", f"load_by_{RANKS}", "load"),
            ("load by one rank", "load_by_1", "load"),
        )
        if any(rank["phases_host_gib"][phase] > _steps(rank) for rank in figures[key])
    ]


def _steps(rank: Mapping[str, Any]) -> float:
    return max(rank["phases_host_gib"][phase] for phase in ("first_step", "steady") if phase in rank["phases_host_gib"])


def _phase(ranks: list[Any], phase: str) -> str:
    return _each(rank["phases_host_gib"][phase] for rank in ranks)


def _each(sizes: Any) -> str:
    return ", ".join(dict.fromkeys(f"{size:.2f}" for size in sizes))


def main() -> int:
    """Measure, if requested, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("--runs-dir", type=Path, default=REPOSITORY / "runs" / "checkpoints")
    options = parser.parse_args()
    file = OUTPUT / "memory.json"
    if options.what == "measure":
        document = measure(options.runs_dir)
        OUTPUT.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (OUTPUT / "summary.md").write_text(summary(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
