"""Checkpoints every N steps: their files, the manifest that has a digest of each, and where the latest one is.

With a random state that is missing, or one bit that differs, an engine trains on to other numbers without an error: so
every file is compared with its digest before a run resumes (study/run/resume.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config.errors import RunFailed, UserError
from study.host.folders import content_digest, sealed
from study.records.directory import ROW_FILES, read_json, read_rows, write_json
from study.records.lock import CHECKPOINTS
from study.records.schema import RecordError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.run.open import OpenRun

MANIFEST = "checkpoint.json"
_MANIFEST_KEYS = {
    "step": int, "strategy": str, "world_size": int, "config": dict, "schedule": dict, "tokens_sha256": dict,
    "initial_weights_sha256": str, "environment": dict, "files": dict,
}  # fmt: skip
# Everything that Accelerate and the engines under it write here.
_FILE_OF_A_CHECKPOINT = re.compile(
    r"(steps|evals)\.jsonl|model(_\d+)?\.safetensors|scaler\.pt|random_states_\d+\.pkl"
    r"|(pytorch_model(_fsdp)?|optimizer|scheduler|sampler)(_\d+)?\.bin"
    r"|latest|zero_to_(fp32|torch)\.py|pytorch_model/\w+_states\.pt"
    r"|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata(\.tmp)?|\w+\.distcp)"
)


def save_checkpoint(run: OpenRun, accelerator: Accelerator, schedule: Any, step: int) -> None:
    """Save model, optimizer, RNG and schedule after `step`; the manifest is written last and completes it."""
    from accelerate.utils import gather_object

    folder, launch = run.output_dir / CHECKPOINTS / f"step_{step:07d}", run.launch
    if run.record is not None:
        if not run.record.is_in_place():
            raise RunFailed(
                f"{run.output_dir} was moved or replaced while this run was at work, so it saves no checkpoint",
                f"the record up to step {step} is in {run.record.path}",
            )
        clear_checkpoint(folder)
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        # The rows so far are saved with it, so that a resumed run's record is complete wherever it is written.
        for name in ROW_FILES:
            shutil.copyfile(run.output_dir / name, folder / name)
    accelerator.wait_for_everyone()
    # Each rank of a host digests a share: what its own host wrote is what it sees for certain.
    own = _files_of(folder)[launch.local_rank :: launch.local_world_size]
    digests = gather_object([digests_of(folder, own)])
    if run.record is not None:
        assert run.initial is not None
        manifest = {
            "step": step,
            "strategy": launch.strategy.name,
            "world_size": launch.world_size,
            "config": run.config.to_dict(),
            "schedule": {key: value for key, value in schedule.state_dict().items() if key != "lr_lambdas"},
            "tokens_sha256": run.data.source["tokens_sha256"],
            "initial_weights_sha256": run.initial.sha256,
            "deepspeed": launch.strategy.deepspeed,
            "environment": read_json(run.output_dir / "environment.json"),
            "files": {name: digest for each in digests for name, digest in sorted(each.items())},
        }
        write_json(folder / MANIFEST, sealed(manifest))
        run.record.hint(resume_hint(folder))


def resume_hint(folder: Path) -> str:
    return f"--resume_from_checkpoint latest resumes from {folder.name}"


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: content_digest(folder / name), names), strict=True))


def _files_of(folder: Path) -> list[str]:
    """List the files of a checkpoint, and not a user's own files in the folder."""
    files = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())
    return sorted(filter(_FILE_OF_A_CHECKPOINT.fullmatch, files))


def clear_checkpoint(folder: Path) -> None:
    """Delete an earlier checkpoint by the names of its files; the manifest first, without which it is incomplete."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in _files_of(folder):
        (folder / name).unlink()


def remove_incomplete_checkpoints(output_dir: Path) -> None:
    """Remove what a save left that was killed: a checkpoint without its manifest."""
    for folder in (output_dir / CHECKPOINTS).glob("step_*"):
        if not (folder / MANIFEST).exists():
            clear_checkpoint(folder)
            for place in (*sorted((place for place in folder.rglob("*") if place.is_dir()), reverse=True), folder):
                # Where a user's own file is.
                with suppress(OSError):
                    place.rmdir()


def last_checkpoint(output_dir: Path) -> Path | None:
    try:
        return latest_checkpoint(output_dir)
    except UserError:
        return None


def latest_checkpoint(output_dir: Path) -> Path:
    """Return the last checkpoint that led to the rows in the folder, and none of a run that was overwritten."""
    try:
        rows, _ = read_rows(output_dir)
        complete = sorted(file.parent for file in (output_dir / CHECKPOINTS).glob(f"step_*/{MANIFEST}"))
        led_here = [folder for folder in complete if (steps := read_rows(folder)[0]) == rows[: len(steps)]]
    except RecordError as error:
        raise UserError(f"{output_dir} has damaged rows ({error})", "name the folder of the checkpoint") from None
    if not complete:
        raise UserError(f"{output_dir} has no complete checkpoint", "leave --resume_from_checkpoint out")
    if not led_here:
        raise UserError(
            f"{output_dir} has no complete checkpoint of the run whose rows are there, only of an earlier one",
            f"leave --resume_from_checkpoint out, or name the folder: {complete[-1]}",
        )
    return led_here[-1]


def read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    manifest = read_json(file)
    for key, kind in _MANIFEST_KEYS.items():
        if type(manifest.get(key)) is not kind:
            raise RecordError(file, f"{key} is {manifest.get(key)!r}, not a value of type {kind.__name__}")
    if sealed(manifest) != manifest:
        raise RecordError(file, "was changed after the checkpoint was saved")
    steps, _ = read_rows(folder, complete=True)
    if len(steps) != manifest["step"]:
        raise RecordError(folder / "steps.jsonl", f"{len(steps)} rows at step {manifest['step']}")
    return manifest


def check_files(folder: Path, saved: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose files are not the saved ones, bit by bit."""
    found = _files_of(folder)
    problems = [f"{name} is missing" for name in saved if name not in found]
    problems += [f"{name} was not saved with it" for name in found if name not in saved]
    # Opening a pipe would block until somebody writes to it.
    problems += [f"{name} is not a file" for name in found if not (folder / name).is_file()]
    if not problems:
        try:
            digests = digests_of(folder, saved)
            problems = [f"{name} is not what was saved" for name in saved if digests[name] != saved[name]]
        except OSError as error:
            problems = [f"{error.filename} cannot be read ({error.strerror})"]
    if problems:
        earlier = sorted(file.parent for file in folder.parent.glob(f"step_*/{MANIFEST}") if file.parent < folder)
        raise UserError(
            f"the checkpoint {folder} is damaged: {problems[0]}",
            f"resume from an earlier one, such as {earlier[-1]}" if earlier else "start anew",
        )
