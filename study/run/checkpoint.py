"""Checkpoints every N steps, and a resume that continues as if nothing had happened.

The manifest has a digest of every file, and they are held against it before a run goes on: with a random state that is
missing, or one bit that differs, an engine trains on to other numbers and says nothing.

Accelerate and DeepSpeed save with torch's pickle format. Loading is forced to weights_only, whatever the engine asks
for, so that a checkpoint can hold tensors and plain values and never code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config.errors import RunFailed, UserError
from study.config.flags import RunConfig
from study.config.launched import Launch
from study.host.environment import describe_environment
from study.host.folders import content_digest, sealed
from study.records.directory import ROW_FILES, read_json, read_rows, write_json
from study.records.lock import CHECKPOINTS
from study.records.schema import RecordError
from study.run.other_ranks import (
    check_indexes,
    check_other_ranks,
    load_universal,
    put_random_states,
    universal_checkpoint,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.run.open import OpenRun
    from study.workloads.blocks import TaskData
    from study.workloads.initial import InitialWeights

MANIFEST = "checkpoint.json"
# A resumed run may differ in these: where it writes and how often, not what it computes.
_FREE_KEYS = {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "checkpointing_steps", "report_to", "nvme_path",
    "logging_steps",
}  # fmt: skip
_MANIFEST_KEYS = {
    "step": int, "strategy": str, "world_size": int, "config": dict, "schedule": dict, "tokens_sha256": dict,
    "initial_weights_sha256": str, "environment": dict, "files": dict,
}  # fmt: skip
# Everything that Accelerate and the engines under it write here.
_OF_A_CHECKPOINT = re.compile(
    r"(steps|evals)\.jsonl|model(_\d+)?\.safetensors|scaler\.pt|random_states_\d+\.pkl"
    r"|(pytorch_model(_fsdp)?|optimizer|scheduler|sampler)(_\d+)?\.bin"
    r"|latest|zero_to_(fp32|torch)\.py|pytorch_model/\w+_states\.pt"
    r"|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata|\w+\.distcp)"
)


def save_checkpoint(run: OpenRun, accelerator: Accelerator, schedule: Any, step: int) -> None:
    """Model, optimizer, RNG and schedule after `step`; the manifest is written last and makes it whole."""
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
        # The rows that led here travel along, so that a resumed run's record is whole wherever it is written.
        for name in ROW_FILES:
            shutil.copyfile(run.output_dir / name, folder / name)
    accelerator.wait_for_everyone()
    # A share for each rank of a host: what its own host wrote is what it sees for certain.
    own = _files_of(folder)[launch.local_rank :: launch.local_world_size]
    digests = gather_object([digests_of(folder, own)])
    if accelerator.is_main_process:
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
        assert run.record is not None
        run.record.hint(goes_on_hint(folder))


def goes_on_hint(folder: Path) -> str:
    return f"--resume_from_checkpoint latest goes on from {folder.name}"


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: content_digest(folder / name), names), strict=True))


def _files_of(folder: Path) -> list[str]:
    """Those of a checkpoint that are there, and not what somebody keeps beside them."""
    files = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())
    return sorted(filter(_OF_A_CHECKPOINT.fullmatch, files))


def clear_checkpoint(folder: Path) -> None:
    """Take an earlier checkpoint away by the names of its files."""
    # First: without it the rest is no checkpoint.
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in _files_of(folder):
        (folder / name).unlink()


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
    folder = _latest(output_dir) if asked == "latest" else Path(asked)
    try:
        manifest = _read_manifest(folder)
    except RecordError as error:
        raise UserError(
            f"--resume_from_checkpoint {folder} is not a whole checkpoint ({error})",
            "name a folder that holds a checkpoint.json, or `latest`",
        ) from None
    # Flags that came later than the checkpoint are as if they had been left out.
    saved, was = RunConfig().to_dict() | manifest["config"], manifest["strategy"]
    if was != launch.strategy.name:
        raise UserError(
            f"the checkpoint was saved by {was}, this run is {launch.strategy.name}",
            f"run: accelerate launch --config_file accelerate_configs/{was}.yaml ...",
        )
    settings = launch.strategy.deepspeed
    if manifest.get("deepspeed") != (json.loads(json.dumps(settings)) if settings else None):
        raise UserError(
            f"the DeepSpeed settings of {launch.strategy.name} are not those that the checkpoint was saved under",
            "put the JSON file beside the launched one back, or start anew",
        )
    now = config.to_dict()
    changed = [key for key in now if key not in _FREE_KEYS and now[key] != saved.get(key)]
    if changed:
        key = changed[0]
        raise UserError(
            f"the checkpoint was saved with --{key} {saved.get(key)}, this run has {now[key]}",
            f"use --{key} {saved.get(key)}, or start anew",
        )
    check_other_ranks(config, launch, manifest["world_size"])
    if launch.local_rank == 0:
        # The others of this host wait for this one before they load it.
        _check_files(folder, manifest["files"])
    return folder, manifest


def last_checkpoint(output_dir: Path) -> Path | None:
    try:
        return _latest(output_dir)
    except UserError:
        return None


def _latest(output_dir: Path) -> Path:
    """The last one that led to the rows in the folder: those of a run that was overwritten are not taken."""
    try:
        rows, _ = read_rows(output_dir)
        whole = sorted(file.parent for file in (output_dir / CHECKPOINTS).glob(f"step_*/{MANIFEST}"))
        led_here = [folder for folder in whole if (steps := read_rows(folder)[0]) == rows[: len(steps)]]
    except RecordError as error:
        raise UserError(f"{output_dir} holds damaged rows ({error})", "name the folder of the checkpoint") from None
    if not whole:
        raise UserError(f"{output_dir} holds no whole checkpoint", "leave --resume_from_checkpoint out")
    if not led_here:
        raise UserError(
            f"{output_dir} holds no whole checkpoint of the run whose rows are there, only of an earlier one",
            f"leave --resume_from_checkpoint out, or name the folder: {whole[-1]}",
        )
    return led_here[-1]


def _check_files(folder: Path, saved: Mapping[str, str]) -> None:
    there = _files_of(folder)
    problems = [f"{name} is missing" for name in saved if name not in there]
    problems += [f"{name} was not saved with it" for name in there if name not in saved]
    # Whoever opens a pipe waits for its other end.
    problems += [f"{name} is not a file" for name in there if not (folder / name).is_file()]
    try:
        now = {} if problems else digests_of(folder, saved)
    except OSError as error:
        now = {}
        problems = [f"{error.filename} cannot be read ({error.strerror})"]
    problems += [f"{name} is not what was saved" for name in now if now[name] != saved[name]]
    if problems:
        earlier = sorted(file.parent for file in folder.parent.glob(f"step_*/{MANIFEST}") if file.parent < folder)
        raise UserError(
            f"the checkpoint {folder} is damaged: {problems[0]}",
            f"resume from an earlier one, such as {earlier[-1]}" if earlier else "start anew",
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
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


def check_goes_on(
    config: RunConfig, launch: Launch, checkpoint: tuple[Path, dict[str, Any]], data: TaskData, initial: InitialWeights
) -> None:
    """What only the data, the weights and the libraries can tell: is a step left, and is it the same training?"""
    folder, manifest = checkpoint
    total = config.total_steps(len(data.train))
    if manifest["step"] >= total:
        raise UserError(
            f"the checkpoint {folder} is at step {manifest['step']} of {total}: nothing is left to do",
            "resume from an earlier one, or start a longer run anew",
        )
    saved, now = manifest["tokens_sha256"], data.source["tokens_sha256"]
    if saved != now:
        changed = " and ".join(split for split in now if saved.get(split) != now[split])
        raise UserError(
            f"the {changed} samples are not those that the checkpoint {folder} was trained on: the data or the"
            " tokenizer was changed since",
            "put them back, or start anew",
        )
    if manifest["initial_weights_sha256"] != initial.sha256:
        raise UserError(
            f"the checkpoint {folder} began from other initial weights, which were changed or drawn anew since",
            "start anew",
        )
    before, here = (
        _box(environment, manifest["world_size"] == launch.world_size)
        for environment in (manifest["environment"], describe_environment())
    )
    if differ := [name for name in sorted({*before, *here}) if before.get(name) != here.get(name)]:
        name = differ[0]
        raise UserError(
            f"the checkpoint {folder} was saved on another box or stack: {name} was {before.get(name)}, and is"
            f" {here.get(name)}",
            "resume where it was saved, or start anew",
        )


def _box(environment: Mapping[str, Any], same_ranks: bool) -> dict[str, Any]:
    """What a record can say once only, of all its steps. Other ranks may be of another number of the same devices."""
    box = environment["packages"] | {key: environment[key] for key in ("threads_per_rank", "cpu", "devices")}
    if not same_ranks:
        box |= {"threads_per_rank": None, "devices": sorted({device["name"] for device in box["devices"]})}
    return box


def load_checkpoint(
    accelerator: Accelerator, schedule: Any, run: OpenRun, folder: Path, manifest: dict[str, Any]
) -> None:
    """Put everything back, and let nothing in but tensors and plain values."""
    import torch

    # For the whole process from here on: what else it may load holds no code either.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    check_indexes(folder)
    if accelerator.is_fsdp2:
        # As it was saved, whatever the launched file says of the next one.
        kind = "FULL" if "pytorch_model_fsdp.bin" in manifest["files"] else "SHARDED"
        accelerator.state.fsdp_plugin.set_state_dict_type(f"{kind}_STATE_DICT")
    same_ranks = manifest["world_size"] == run.launch.world_size
    with torch.serialization.safe_globals(_engine_classes() if run.launch.strategy.deepspeed else []):
        if same_ranks or not run.launch.strategy.zero_stage:
            accelerator.load_state(str(folder))
        else:
            with universal_checkpoint(run, accelerator, folder) as universal:
                load_universal(accelerator, universal)
    # It counts micro-batches over all steps, and a step of other ranks may have more or fewer of them.
    accelerator.step = 0
    _check_random_states(folder, accelerator, manifest["world_size"], same_ranks)
    schedule.load_state_dict(manifest["schedule"] | {"lr_lambdas": [None]})


def _check_random_states(folder: Path, accelerator: Accelerator, saved_by: int, same_ranks: bool) -> None:
    """Accelerate catches whatever is wrong with these, and goes on without them."""
    import torch
    from accelerate.utils import load

    rank = accelerator.process_index % saved_by
    states = load(folder / f"random_states_{rank}.pkl")
    if not same_ranks:
        put_random_states(states, rank)
    saved = [states.get("torch_manual_seed"), *(states.get("torch_cuda_manual_seed", []) if same_ranks else [])]
    now = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() and same_ranks else [])]
    if saved[0] is None or len(saved) != len(now) or not all(map(torch.equal, saved, now)):
        raise RunFailed(f"the random states in {folder} could not be put back", "start anew")


def _engine_classes() -> list[Any]:
    """The few plain classes DeepSpeed puts beside the tensors; anything else in a checkpoint is refused."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
