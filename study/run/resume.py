"""Resume from a checkpoint, with the same world size or another one; the run continues as if uninterrupted.

Accelerate and DeepSpeed save with torch's pickle format. Loading is forced to weights_only, whatever the engine
requests, so a checkpoint contains tensors and plain values but no code.

With another world size unpartitioned tensors load unchanged, and FSDP2's distributed checkpoint reshards itself.
DeepSpeed does not load its shards then: they are first converted to its universal checkpoint, with a folder for each
parameter. It is as large as the optimizer state and is deleted once it is loaded.
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
from study.config.flags import RunConfig, format_flag
from study.config.launch_context import Launch
from study.host.environment import describe_environment
from study.host.folders import swap_folder
from study.records.schema import RecordError, with_new_names
from study.run.checkpoint import check_files, latest_checkpoint, read_manifest

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.run.context import RunContext

# Flags that a resumed run may change: they affect its files and output, not its results.
_FREE_KEYS = {
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "checkpointing_steps",
    "report_to",
    "nvme_path",
    "logging_steps",
}
# Accelerate's name for the model in every DeepSpeed checkpoint.
_TAG = "pytorch_model"
# The classes in FSDP2's index of shards, by module.
_CLASSES_OF_AN_INDEX = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}


def find_checkpoint(config: RunConfig, launch: Launch, output_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the requested checkpoint and its manifest, or None; raise UserError if this run cannot continue it."""
    requested = config.resume_from_checkpoint
    if launch.strategy.uses_nvme and (requested is not None or config.checkpointing_steps):
        raise UserError(
            f"{launch.strategy.name} cannot resume: DeepSpeed's checkpoints exclude tensors that it swapped to NVMe, "
            "and it would silently continue with new optimizer states",
            "leave the flag out, or use the *_cpu strategy",
        )
    if requested is None:
        return None
    folder = latest_checkpoint(output_dir) if requested == "latest" else Path(requested)
    try:
        manifest = read_manifest(folder)
    except RecordError as error:
        problem = f"--resume_from_checkpoint {folder} is not a complete checkpoint ({error})"
        raise UserError(problem, "name a folder that has a checkpoint.json, or `latest`") from None
    # Flags that were added after the checkpoint had their defaults.
    saved, saved_strategy = RunConfig().to_dict() | with_new_names(manifest["config"]), manifest["strategy"]
    if saved_strategy != launch.strategy.name:
        problem = f"the checkpoint was saved by {saved_strategy}, but this run is {launch.strategy.name}"
        raise UserError(problem, f"run: accelerate launch --config_file accelerate_configs/{saved_strategy}.yaml ...")
    settings = launch.strategy.deepspeed
    if manifest.get("deepspeed") != (json.loads(json.dumps(settings)) if settings else None):
        problem = f"the DeepSpeed settings of {launch.strategy.name} differ from those of the checkpoint"
        raise UserError(problem, "restore the JSON file that the launched file names, or start from scratch")
    for key, value in config.to_dict().items():
        if key not in _FREE_KEYS and value != saved.get(key):
            problem = f"the checkpoint was saved with {key} {saved.get(key)}, but this run has {value}"
            raise UserError(problem, f"{format_flag(key, saved.get(key))}, or start from scratch")
    saved_by = manifest["world_size"]
    if config.optimizer == "muon" and launch.strategy.zero_stage and saved_by != launch.world_size:
        raise UserError(
            f"the checkpoint was saved by {saved_by} ranks, and DeepSpeed's universal checkpoint has Adam's moments"
            " but not Muon's momentum",
            f"use --num_processes {saved_by}",
        )
    if launch.local_rank == 0:
        # The other ranks of this host wait for this rank before they load the checkpoint.
        check_files(folder, manifest["files"])
    return folder, manifest


def check_continues(run: RunContext) -> None:
    """Raise UserError if no step is left, or if data, initial weights, hardware or packages have changed."""
    assert run.checkpoint is not None
    assert run.initial is not None, "a virtual rank has no checkpoint"
    folder, manifest = run.checkpoint
    total = run.config.total_steps(len(run.data.train))
    if manifest["step"] >= total:
        problem = f"the checkpoint {folder} is at step {manifest['step']} of {total}: no step is left"
        raise UserError(problem, "resume from an earlier one, or start a longer run from scratch")
    saved, now = manifest["tokens_sha256"], run.data.source["tokens_sha256"]
    if saved != now:
        changed = " and ".join(split for split in now if saved.get(split) != now[split])
        raise UserError(
            f"the {changed} samples differ from those that the checkpoint {folder} was trained on: the data or the"
            " tokenizer has changed",
            "restore them, or start from scratch",
        )
    if manifest["initial_weights_sha256"] != run.initial.sha256:
        problem = f"the checkpoint {folder} began from other initial weights, which have changed or were drawn again"
        raise UserError(problem, "start from scratch")
    same_ranks = manifest["world_size"] == run.launch.world_size
    before, current = (_hardware(entry, same_ranks) for entry in (manifest["environment"], describe_environment()))
    if differ := [name for name in sorted({*before, *current}) if before.get(name) != current.get(name)]:
        name = differ[0]
        raise UserError(
            f"the checkpoint {folder} was saved on other hardware or packages: {name} was {before.get(name)}, and is"
            f" {current.get(name)}",
            "resume where it was saved, or start from scratch",
        )


def _hardware(environment: Mapping[str, Any], same_ranks: bool) -> dict[str, Any]:
    """Return the packages and hardware that all steps of a record share.

    Another world size may use a different number of the same devices.
    """
    hardware = environment["packages"] | {key: environment[key] for key in ("threads_per_rank", "cpu", "devices")}
    if not same_ranks:
        hardware |= {"threads_per_rank": None, "devices": sorted({device["name"] for device in hardware["devices"]})}
    return hardware


def load_checkpoint(run: RunContext, accelerator: Accelerator, schedule: Any) -> None:
    """Load model, optimizer, RNG and schedule from the run's checkpoint; raise RunFailed if it is damaged."""
    import torch

    assert run.checkpoint is not None
    folder, manifest = run.checkpoint
    # It applies to every later load of this process, none of which needs code.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    check_indexes(folder)
    if accelerator.is_fsdp2:
        # The format of this checkpoint, whatever the launched file sets for the next one.
        kind = "FULL" if "pytorch_model_fsdp.bin" in manifest["files"] else "SHARDED"
        accelerator.state.fsdp_plugin.set_state_dict_type(f"{kind}_STATE_DICT")
    same_ranks = manifest["world_size"] == run.launch.world_size
    with torch.serialization.safe_globals(engine_classes() if run.launch.strategy.deepspeed else []):
        if same_ranks or not run.launch.strategy.zero_stage:
            accelerator.load_state(str(folder))
        else:
            _load_universal(run.output_dir, accelerator, folder)
    # Accelerate counts micro-batches over all steps, and another world size may change their number per step.
    accelerator.step = 0
    _restore_random_states(folder, accelerator, manifest["world_size"], same_ranks)
    schedule.load_state_dict(manifest["schedule"] | {"lr_lambdas": [None]})


def engine_classes() -> list[Any]:
    """Return the plain classes that DeepSpeed saves with the tensors; any other class in a checkpoint is an error."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def _restore_random_states(folder: Path, accelerator: Accelerator, saved_world_size: int, same_ranks: bool) -> None:
    """Set the random states if the world size changed; else check them, as Accelerate ignores errors in loading."""
    import numpy
    import torch
    from accelerate.utils import load

    rank = accelerator.process_index % saved_world_size
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
            # That rank saved a state for each visible GPU, and drew from only one of them.
            torch.cuda.set_rng_state(on_gpus[rank % len(on_gpus)])
        now = [torch.get_rng_state()]
    if saved[0] is None or len(saved) != len(now) or not all(map(torch.equal, saved, now)):
        raise RunFailed(f"the random states in {folder} could not be restored", "start from scratch")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES_OF_AN_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def check_indexes(folder: Path) -> None:
    """Raise RunFailed if an index of a distributed checkpoint has unexpected classes: torch always unpickles it.

    Each rank may have an index, and torch treats a folder of a certain name as the inner checkpoint.
    """
    from torch.distributed.checkpoint import filesystem

    # Replaces the pickle module with which torch reads an index, for the rest of this process.
    safe_pickle = types.SimpleNamespace(dump=pickle.dump, load=lambda stream: _IndexUnpickler(stream).load())
    setattr(filesystem, "pickle", safe_pickle)  # noqa: B010 - its declared type is a module
    for file in sorted([*folder.glob("*.metadata"), *folder.glob("*/*.metadata")]):
        try:
            with file.open("rb") as stream:
                _IndexUnpickler(stream).load()
        except Exception as error:
            raise RunFailed(f"{file} is not an index of a checkpoint ({error})", "start from scratch") from None


def _load_universal(output_dir: Path, accelerator: Accelerator, folder: Path) -> None:
    """Load a universal checkpoint, which the main process writes to a temporary folder next to the record."""
    from accelerate.utils import broadcast_object_list

    from study.metrics.state import base_optimizer

    engine: Any = accelerator.deepspeed_engine_wrapped.engine
    with swap_folder(output_dir) if accelerator.is_main_process else nullcontext() as temporary_folder:
        if temporary_folder is not None:
            from deepspeed.checkpoint import ds_to_universal

            # DeepSpeed's script runs in this process, in which torch.load is always weights_only.
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(folder / _TAG),
                    output_folder=str(temporary_folder / _TAG),
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
        names = [temporary_folder.name if temporary_folder is not None else None]
        broadcast_object_list(names)
        universal = output_dir.resolve() / str(names[0])
        if not universal.is_dir():
            raise RunFailed(
                f"rank {accelerator.process_index} does not see the folder {universal}, in which the main process"
                " converted the checkpoint",
                "use an --output_dir that all machines share",
            )
        engine._config.load_universal_checkpoint = True
        engine.load_checkpoint(str(universal), _TAG)
        engine._config.load_universal_checkpoint = False
        accelerator.wait_for_everyone()
    # Stage 3 shares one step counter on the host between all groups, and each group would advance it.
    for parameter, state in base_optimizer(engine.optimizer).state.items():
        if hasattr(state.get("step"), "device"):
            state["step"] = state["step"].to(parameter.device, copy=True)
