"""Checkpoints every N steps: their files, the manifest with each file's digest, and the search for the latest one.

After a lost random state or a single flipped bit an engine continues to different results without an error. Therefore
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
from study.host.folders import content_digest, with_digest
from study.records import lock, schema
from study.records.directory import ROW_FILES, read_json, read_rows, write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.run.context import RunContext

MANIFEST = "checkpoint.json"
# All files that Accelerate and its engines write to a checkpoint.
_FILE_OF_A_CHECKPOINT = re.compile(
    r"(steps|evals)\.jsonl|model(_\d+)?\.safetensors|scaler\.pt|random_states_\d+\.pkl"
    r"|(pytorch_model(_fsdp)?|optimizer|scheduler|sampler)(_\d+)?\.bin"
    r"|latest|zero_to_(fp32|torch)\.py|pytorch_model/\w+_states\.pt"
    r"|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata(\.tmp)?|\w+\.distcp)"
)


def save_checkpoint(run: RunContext, accelerator: Accelerator, schedule: Any, step: int) -> None:
    """Save model, optimizer, RNG and schedule after `step`; the manifest is written last and completes it."""
    from accelerate.utils import gather_object

    folder, launch = run.output_dir / lock.CHECKPOINTS / f"step_{step:07d}", run.launch
    if run.record is not None:
        if not run.record.is_in_place():
            raise RunFailed(f"{run.output_dir} was moved or replaced during this run, so it saves no checkpoint")
        clear_checkpoint(folder)
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        # The rows so far are saved with it, so that a resumed run's record is complete wherever it is written.
        for name in ROW_FILES:
            shutil.copyfile(run.output_dir / name, folder / name)
    accelerator.wait_for_everyone()
    # The ranks of each host divide the files, because a host is certain to see only the files that it wrote.
    local_files = _list_files(folder)[launch.local_rank :: launch.local_world_size]
    digests = gather_object([file_digests(folder, local_files)])
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
            "files": {name: digest for rank_digests in digests for name, digest in sorted(rank_digests.items())},
        }
        write_json(folder / MANIFEST, with_digest(manifest))
        run.record.set_crash_hint(resume_hint(folder))


def resume_hint(folder: Path) -> str:
    """Return the hint of a record to resume from this checkpoint."""
    return f"--resume_from_checkpoint latest resumes from {folder.name}"


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each named file in the folder."""
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: content_digest(folder / name), names), strict=True))


def _list_files(folder: Path) -> list[str]:
    """Return the files of a checkpoint, without a user's files in the same folder."""
    files = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())
    return sorted(filter(_FILE_OF_A_CHECKPOINT.fullmatch, files))


def clear_checkpoint(folder: Path) -> None:
    """Delete the files of an earlier checkpoint: the manifest first, which marks it as incomplete, then the others."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in _list_files(folder):
        (folder / name).unlink()


def remove_incomplete_checkpoints(output_dir: Path) -> None:
    """Remove checkpoints without a manifest, which a killed save has left."""
    for folder in (output_dir / lock.CHECKPOINTS).glob("step_*"):
        if not (folder / MANIFEST).exists():
            clear_checkpoint(folder)
            for place in (*sorted((place for place in folder.rglob("*") if place.is_dir()), reverse=True), folder):
                # A folder with a user's file stays.
                with suppress(OSError):
                    place.rmdir()


def latest_checkpoint(output_dir: Path) -> Path:
    """Return the latest checkpoint of the run whose rows are in the folder, not one of an overwritten run."""
    try:
        rows, _ = read_rows(output_dir)
        complete = sorted(file.parent for file in (output_dir / lock.CHECKPOINTS).glob(f"step_*/{MANIFEST}"))
        current = [folder for folder in complete if (steps := read_rows(folder)[0]) == rows[: len(steps)]]
    except schema.RecordError as error:
        raise UserError(f"{output_dir} has damaged rows ({error})", "name the folder of the checkpoint") from None
    if not complete:
        raise UserError(f"{output_dir} has no complete checkpoint", "leave --resume_from_checkpoint out")
    if not current:
        problem = f"{output_dir} has no complete checkpoint of its current run, only of an earlier one"
        raise UserError(problem, f"leave --resume_from_checkpoint out, or name the folder: {complete[-1]}")
    return current[-1]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise RecordError if it is missing, invalid or does not match the rows."""
    file = folder / MANIFEST
    manifest = read_json(file)
    schema.validate(file, manifest)
    if with_digest(manifest) != manifest:
        raise schema.RecordError(file, "was changed after the checkpoint was saved")
    steps, _ = read_rows(folder, complete=True)
    if len(steps) != manifest["step"]:
        raise schema.RecordError(folder / "steps.jsonl", f"{len(steps)} rows at step {manifest['step']}")
    return manifest


def check_files(folder: Path, saved: Mapping[str, str]) -> None:
    """Raise UserError if a checkpoint's files differ from the saved ones."""
    names = _list_files(folder)
    problems = [f"{name} is missing" for name in saved if name not in names]
    problems += [f"{name} was not saved with it" for name in names if name not in saved]
    if not problems:
        try:
            digests = file_digests(folder, saved)
            problems = [f"{name} differs from the saved file" for name in saved if digests[name] != saved[name]]
        except OSError as error:
            problems = [f"{error.filename} cannot be read ({error.strerror})"]
    if problems:
        earlier = sorted(file.parent for file in folder.parent.glob(f"step_*/{MANIFEST}") if file.parent < folder)
        fix = f"resume from an earlier one, such as {earlier[-1]}" if earlier else "start from scratch"
        raise UserError(f"the checkpoint {folder} is damaged: {problems[0]}", fix)
