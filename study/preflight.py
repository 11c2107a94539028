"""What is settled before a run begins: threads, the cache, and that the run directory is free."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from study.config import RunConfig
from study.errors import UserError
from study.records import RecordError, read_rows, read_status
from study.strategies import Launch


def prepare_devices(launch: Launch) -> int:
    """Give this rank its share of the processor; returns how many GPUs are visible."""
    # An engine's own OpenMP library reads this once, when it is loaded; torch's is set below.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    gpus = torch.cuda.device_count()
    # Without a GPU a core is a device, so that N ranks have N times the machine of one. With GPUs the cores are shared
    # out: launchers set 1, which would starve an optimizer that runs on the host.
    threads = max(1, available_cores() // launch.local_world_size) if gpus else 1
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    return gpus


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_directory() -> Path:
    """Where initial weights are kept between runs; ZERO_STUDY_CACHE moves it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zero-study"
    folder = Path(os.environ.get("ZERO_STUDY_CACHE", default))
    _refuse_unwritable(folder, f"the cache {folder}", "let ZERO_STUDY_CACHE name a folder that you may write")
    return folder


def check_output_dir(config: RunConfig, output_dir: Path) -> None:
    """A finished run is never overwritten unasked, and a folder that is no run directory is never touched."""
    _refuse_unwritable(output_dir, f"--output_dir {output_dir}", "name a folder that you may write")
    if not (output_dir / "status.json").exists():
        # A run killed while it wrote its very first status leaves a part of it behind.
        foreign = output_dir.exists() and any(
            not file.name.startswith(".status.json.") for file in output_dir.iterdir()
        )
        if foreign:
            raise UserError(f"--output_dir {output_dir} holds files, and none is a run's", "name a new folder")
        return
    resumes = config.resume_from_checkpoint is not None
    if config.overwrite_output_dir and not resumes:
        return
    try:
        finished = read_status(output_dir)["state"] == "ok"
        if resumes:
            read_rows(output_dir)
    except RecordError as error:
        raise UserError(
            f"--output_dir holds a damaged run ({error})",
            "remove it, or start anew with --overwrite_output_dir and without --resume_from_checkpoint",
        ) from None
    if finished and not config.overwrite_output_dir:
        raise UserError(
            f"--output_dir {output_dir} holds a finished run",
            "name another, or add --overwrite_output_dir to replace it",
        )


def _refuse_unwritable(folder: Path, what: str, mend: str) -> None:
    """Tried in the nearest folder that exists, with a file that has no name: a refused request leaves nothing."""
    try:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise UserError(f"{what} cannot be a folder: {existing} is a file", mend)
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"{what} is not writable ({error.strerror})", mend) from None
