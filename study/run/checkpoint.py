"""Checkpoints every N steps, and a resume that continues as if nothing had happened.

Accelerate and DeepSpeed save with torch's pickle format. Loading is forced to weights_only, whatever the engine asks
for, so that a checkpoint can hold tensors and plain values and never code.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import UserError
from study.record.directory import ROW_FILES, read_json, read_rows, write_json
from study.record.schema import RecordError
from study.spec.config import RunConfig
from study.spec.strategies import Launch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.run.open import OpenRun

FOLDER = "checkpoints"
MANIFEST = "checkpoint.json"
# A resumed run may differ in these: where it writes and how often, not what it computes.
_FREE_KEYS = {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "checkpointing_steps", "report_to", "nvme_path",
    "logging_steps",
}  # fmt: skip
# Everything that Accelerate and the engines under it write here.
_OF_A_CHECKPOINT = re.compile(
    r"(steps|evals)\.jsonl|model(_\d+)?\.safetensors|(pytorch_model|optimizer|scheduler|sampler)(_\d+)?\.bin|scaler\.pt"
    r"|random_states_\d+\.pkl|latest|zero_to_fp32\.py|pytorch_model/\w+_states\.pt"
    r"|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata|\w+\.distcp)"
)


def save_checkpoint(run: OpenRun, accelerator: Accelerator, schedule: Any, step: int) -> None:
    """Model, optimizer, RNG and schedule after `step`; the manifest is written last and makes it whole."""
    folder = run.output_dir / FOLDER / f"step_{step:07d}"
    if accelerator.is_main_process:
        _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # The rows that led here travel along, so that a resumed run's record is whole wherever it is written.
        for name in ROW_FILES:
            shutil.copyfile(run.output_dir / name, folder / name)
        manifest = {
            "step": step,
            "strategy": run.launch.strategy.name,
            "world_size": run.launch.world_size,
            "config": run.config.to_dict(),
            "schedule": {key: value for key, value in schedule.state_dict().items() if key != "lr_lambdas"},
        }
        write_json(folder / MANIFEST, manifest)


def _clear(folder: Path) -> None:
    """Take an earlier checkpoint away by the names of its files, and leave what else somebody keeps beside them."""
    # First: without it the rest is no checkpoint.
    (folder / MANIFEST).unlink(missing_ok=True)
    for file in sorted(folder.rglob("*")):
        if _OF_A_CHECKPOINT.fullmatch(file.relative_to(folder).as_posix()) and not file.is_dir():
            file.unlink()


def find_checkpoint(config: RunConfig, launch: Launch, output_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint asked for and its manifest, refused where this run would not continue that one."""
    asked = config.resume_from_checkpoint
    if launch.strategy.uses_nvme and (asked is not None or config.checkpointing_steps):
        raise UserError(
            f"{launch.strategy.name} cannot resume: DeepSpeed leaves what it swapped to NVMe out of its checkpoints, "
            "and goes on with fresh optimizer states without a word",
            "leave the flag out, or use the *_cpu strategy",
        )
    if asked is None:
        return None
    if asked == "latest":
        whole = sorted(file.parent for file in (output_dir / FOLDER).glob(f"*/{MANIFEST}"))
        if not whole:
            raise UserError(f"{output_dir} holds no whole checkpoint", "leave --resume_from_checkpoint out")
        folder = whole[-1]
    else:
        folder = Path(asked)
    try:
        manifest = _read_manifest(folder)
    except RecordError as error:
        raise UserError(
            f"--resume_from_checkpoint {folder} is not a whole checkpoint ({error})",
            "name a folder that holds a checkpoint.json, or `latest`",
        ) from None
    saved, was = manifest["config"], (manifest["strategy"], manifest["world_size"])
    if was != (launch.strategy.name, launch.world_size):
        raise UserError(
            f"the checkpoint was saved by {was[0]} on {was[1]} ranks, this run is {launch.strategy.name} on "
            f"{launch.world_size}",
            f"run: accelerate launch --config_file accelerate_configs/{was[0]}.yaml --num_processes {was[1]} ...",
        )
    now = config.to_dict()
    changed = [key for key in now if key not in _FREE_KEYS and now[key] != saved.get(key)]
    if changed:
        key = changed[0]
        raise UserError(
            f"the checkpoint was saved with --{key} {saved.get(key)}, this run has {now[key]}",
            f"use --{key} {saved.get(key)}, or start anew",
        )
    return folder, manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    manifest = read_json(file)
    for key, kind in {"step": int, "strategy": str, "world_size": int, "config": dict, "schedule": dict}.items():
        if type(manifest.get(key)) is not kind:
            raise RecordError(file, f"{key} is {manifest.get(key)!r}, not a value of type {kind.__name__}")
    steps, _ = read_rows(folder, complete=True)
    if len(steps) != manifest["step"]:
        raise RecordError(folder / "steps.jsonl", f"{len(steps)} rows at step {manifest['step']}")
    return manifest


def check_steps_are_left(config: RunConfig, checkpoint: tuple[Path, dict[str, Any]] | None, train_samples: int) -> None:
    total = config.total_steps(train_samples)
    if checkpoint and checkpoint[1]["step"] >= total:
        raise UserError(
            f"the checkpoint {checkpoint[0]} is at step {checkpoint[1]['step']} of {total}: nothing is left to do",
            "resume from an earlier one, or start a longer run anew",
        )


def load_checkpoint(accelerator: Accelerator, schedule: Any, folder: Path, manifest: dict[str, Any]) -> None:
    """Put everything back, and let nothing in but tensors and plain values."""
    import torch

    # For the whole process from here on: what else it may load holds no code either.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    classes = _engine_classes() if manifest["strategy"].startswith("zero") else []
    with torch.serialization.safe_globals(classes):
        accelerator.load_state(str(folder))
    schedule.load_state_dict(manifest["schedule"] | {"lr_lambdas": [None]})


def _engine_classes() -> list[Any]:
    """The few plain classes DeepSpeed puts beside the tensors; anything else in a checkpoint is refused."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
