"""Resuming from a checkpoint, with the same world size or with another one, as if nothing had happened.

Accelerate and DeepSpeed save with torch's pickle format. Loading is forced to weights_only, whatever the engine
requests, so a checkpoint brings in tensors and plain values and never code.

With another world size unpartitioned tensors load as they are, and FSDP2's distributed checkpoint reshards itself.
DeepSpeed refuses its shards there: they are converted to its universal checkpoint first, with a folder for each
parameter, which is as large as the optimizer state and is deleted once it is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import types
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config.errors import RunFailed, UserError
from study.config.flags import RunConfig, command_line_of
from study.config.launched import Launch
from study.host.environment import describe_environment
from study.host.folders import swap_folder
from study.records.schema import RecordError, with_new_names
from study.run.checkpoint import check_files, latest_checkpoint, read_manifest

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.run.open import OpenRun
    from study.workloads.initial import InitialWeights
    from study.workloads.tasks import TaskData

# A resumed run may differ in these: where it writes and how often, not what it computes.
_FREE_KEYS = {
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "checkpointing_steps", "report_to", "nvme_path",
    "logging_steps",
}  # fmt: skip
# Accelerate's name of the model in every DeepSpeed checkpoint.
_TAG = "pytorch_model"
# The classes of FSDP2's index of shards, by module.
_CLASSES_OF_AN_INDEX = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}  # fmt: skip


def find_checkpoint(config: RunConfig, launch: Launch, output_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint asked for and its manifest; refuse one that this run would not continue."""
    asked = config.resume_from_checkpoint
    if launch.strategy.uses_nvme and (asked is not None or config.checkpointing_steps):
        raise UserError(
            f"{launch.strategy.name} cannot resume: DeepSpeed leaves what it swapped to NVMe out of its checkpoints, "
            "and continues with fresh optimizer states without an error",
            "leave the flag out, or use the *_cpu strategy",
        )
    if asked is None:
        return None
    folder = latest_checkpoint(output_dir) if asked == "latest" else Path(asked)
    try:
        manifest = read_manifest(folder)
    except RecordError as error:
        raise UserError(
            f"--resume_from_checkpoint {folder} is not a complete checkpoint ({error})",
            "name a folder that has a checkpoint.json, or `latest`",
        ) from None
    # Flags that are younger than the checkpoint had their defaults.
    saved, was = RunConfig().to_dict() | with_new_names(manifest["config"]), manifest["strategy"]
    if was != launch.strategy.name:
        raise UserError(
            f"the checkpoint was saved by {was}, this run is {launch.strategy.name}",
            f"run: accelerate launch --config_file accelerate_configs/{was}.yaml ...",
        )
    settings = launch.strategy.deepspeed
    if manifest.get("deepspeed") != (json.loads(json.dumps(settings)) if settings else None):
        raise UserError(
            f"the DeepSpeed settings of {launch.strategy.name} are not those that the checkpoint was saved under",
            "restore the JSON file that the launched one names, or start anew",
        )
    for key, value in config.to_dict().items():
        if key not in _FREE_KEYS and value != saved.get(key):
            raise UserError(
                f"the checkpoint was saved with {key} {saved.get(key)}, this run has {value}",
                f"{command_line_of(key, saved.get(key))}, or start anew",
            )
    saved_by = manifest["world_size"]
    if config.optimizer == "muon" and launch.strategy.zero_stage and saved_by != launch.world_size:
        raise UserError(
            f"the checkpoint was saved by {saved_by} ranks, and DeepSpeed's universal checkpoint has Adam's moments"
            " but not Muon's momentum",
            f"use --num_processes {saved_by}",
        )
    if launch.local_rank == 0:
        # The other ranks of this host wait for this one before they load it.
        check_files(folder, manifest["files"])
    return folder, manifest


def check_continues(
    config: RunConfig, launch: Launch, checkpoint: tuple[Path, dict[str, Any]], data: TaskData, initial: InitialWeights
) -> None:
    """Refuse where no step is left, or where data, initial weights, hardware or packages are others."""
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
    same_ranks = manifest["world_size"] == launch.world_size
    before, here = (_hardware(each, same_ranks) for each in (manifest["environment"], describe_environment()))
    if differ := [name for name in sorted({*before, *here}) if before.get(name) != here.get(name)]:
        name = differ[0]
        raise UserError(
            f"the checkpoint {folder} was saved on other hardware or packages: {name} was {before.get(name)}, and is"
            f" {here.get(name)}",
            "resume where it was saved, or start anew",
        )


def _hardware(environment: Mapping[str, Any], same_ranks: bool) -> dict[str, Any]:
    """Return what a record has once for all of its steps. Another world size may be of more of the same devices."""
    box = environment["packages"] | {key: environment[key] for key in ("threads_per_rank", "cpu", "devices")}
    if not same_ranks:
        box |= {"threads_per_rank": None, "devices": sorted({device["name"] for device in box["devices"]})}
    return box


def load_checkpoint(
    accelerator: Accelerator, schedule: Any, run: OpenRun, folder: Path, manifest: dict[str, Any]
) -> None:
    import torch

    # For the whole process from here on: nothing else that it may load brings in code either.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    check_indexes(folder)
    if accelerator.is_fsdp2:
        # In the format it was saved in, whatever the launched file asks of the next one.
        kind = "FULL" if "pytorch_model_fsdp.bin" in manifest["files"] else "SHARDED"
        accelerator.state.fsdp_plugin.set_state_dict_type(f"{kind}_STATE_DICT")
    same_ranks = manifest["world_size"] == run.launch.world_size
    with torch.serialization.safe_globals(engine_classes() if run.launch.strategy.deepspeed else []):
        if same_ranks or not run.launch.strategy.zero_stage:
            accelerator.load_state(str(folder))
        else:
            _load_universal(run, accelerator, folder)
    # It counts micro-batches over all steps, and with another world size a step may have more or fewer of them.
    accelerator.step = 0
    _restore_random_states(folder, accelerator, manifest["world_size"], same_ranks)
    schedule.load_state_dict(manifest["schedule"] | {"lr_lambdas": [None]})


def engine_classes() -> list[Any]:
    """The few plain classes that DeepSpeed saves with the tensors; any other class in a checkpoint is refused."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def _restore_random_states(folder: Path, accelerator: Accelerator, saved_by: int, same_ranks: bool) -> None:
    """Set the random states of another world size; check those of the same one, where Accelerate ignores all errors."""
    import numpy
    import torch
    from accelerate.utils import load

    rank = accelerator.process_index % saved_by
    states = load(folder / f"random_states_{rank}.pkl")
    saved = [states.get("torch_manual_seed")]
    on_gpus = states.get("torch_cuda_manual_seed", [])
    if same_ranks:
        saved += on_gpus
        now = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
    else:
        random.setstate(states["random_state"])
        numpy.random.set_state(states["numpy_random_seed"])  # noqa: NPY002 - the state that libraries draw from
        torch.set_rng_state(states["torch_manual_seed"])
        if torch.cuda.is_available() and on_gpus:
            # That rank saw as many GPUs as it saved states, and drew from one of them alone.
            torch.cuda.set_rng_state(on_gpus[rank % len(on_gpus)])
        now = [torch.get_rng_state()]
    if saved[0] is None or len(saved) != len(now) or not all(map(torch.equal, saved, now)):
        raise RunFailed(f"the random states in {folder} could not be put back", "start anew")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES_OF_AN_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def check_indexes(folder: Path) -> None:
    """Refuse an index of a distributed checkpoint with other classes in it: torch unpickles it, weights_only or not.

    Each rank may have an index, and torch takes a folder of a certain name for the inner one.
    """
    from torch.distributed.checkpoint import filesystem

    # Where torch reads an index it uses this for the pickle module, for the whole process from here on.
    safe_pickle = types.SimpleNamespace(dump=pickle.dump, load=lambda stream: _IndexUnpickler(stream).load())
    setattr(filesystem, "pickle", safe_pickle)  # noqa: B010 - a type checker knows it as a module
    for file in sorted([*folder.glob("*.metadata"), *folder.glob("*/*.metadata")]):
        try:
            if not file.is_file():
                raise OSError("not a regular file")
            with file.open("rb") as stream:
                _IndexUnpickler(stream).load()
        except Exception as error:
            raise RunFailed(f"{file} is not an index of a checkpoint ({error})", "start anew") from None


def _load_universal(run: OpenRun, accelerator: Accelerator, folder: Path) -> None:
    """Load through a temporary folder next to the record, which the main process makes for all ranks."""
    from accelerate.utils import broadcast_object_list

    from study.metrics.state import base_optimizer

    engine: Any = accelerator.deepspeed_engine_wrapped.engine
    with swap_folder(run.output_dir) if accelerator.is_main_process else nullcontext() as made:
        if made is not None:
            from deepspeed.checkpoint import ds_to_universal

            # DeepSpeed's script, in this process, where torch.load is weights_only whatever the script asks for.
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(folder / _TAG), output_folder=str(made / _TAG), num_extract_workers=1,
                    num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
                )
            )  # fmt: skip
        names = [made.name if made is not None else None]
        broadcast_object_list(names)
        universal = run.output_dir.resolve() / str(names[0])
        if not universal.is_dir():
            raise RunFailed(
                f"rank {accelerator.process_index} does not see the folder {universal}, where the main process has"
                " converted the checkpoint",
                "let --output_dir name a folder that all machines share",
            )
        engine._config.load_universal_checkpoint = True
        engine.load_checkpoint(str(universal), _TAG)
        engine._config.load_universal_checkpoint = False
        accelerator.wait_for_everyone()
    # Stage 3 gives all its groups one step counter, on the host, which each group would advance.
    for parameter, state in base_optimizer(engine.optimizer).state.items():
        if hasattr(state.get("step"), "device"):
            state["step"] = state["step"].to(parameter.device, copy=True)
