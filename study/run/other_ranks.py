"""Going on from a checkpoint with another number of ranks than it was saved by.

Whole tensors are cut anew by whoever loads them, and so are FSDP2's, whose distributed checkpoint knows of every shard
where it belongs. DeepSpeed refuses its own shards there: they are made into its universal checkpoint first, with a
folder for each parameter, which takes as much room as the optimizer's state and is gone once it is loaded.
"""

from __future__ import annotations

import argparse
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config.errors import RunFailed, UserError
from study.config.flags import RunConfig
from study.config.launched import Launch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from study.run.open import OpenRun

# What Accelerate calls the model in every checkpoint of DeepSpeed's.
_TAG = "pytorch_model"
# Modules whose classes FSDP2's index of shards is made of, and what it takes from torch itself.
_OF_AN_INDEX = {
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


def check_other_ranks(config: RunConfig, launch: Launch, saved_by: int) -> None:
    if config.optimizer == "muon" and launch.strategy.zero_stage and saved_by != launch.world_size:
        raise UserError(
            f"the checkpoint was saved by {saved_by} ranks, and DeepSpeed's universal checkpoint knows Adam's moments"
            " but not Muon's momentum",
            f"use --num_processes {saved_by}",
        )


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _OF_AN_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _IndexPickle:
    """Stands for the module where torch reads an index."""

    dump = staticmethod(pickle.dump)

    @staticmethod
    def load(stream: Any) -> Any:
        return _IndexUnpickler(stream).load()


def check_indexes(folder: Path) -> None:
    """Torch unpickles the index of a distributed checkpoint, whatever it holds: nothing but what belongs there may.

    It has names for each rank's own, and takes a folder of a certain name for the inner one.
    """
    from torch.distributed.checkpoint import filesystem

    # For the whole process from here on, wherever torch may find one.
    setattr(filesystem, "pickle", _IndexPickle)  # noqa: B010 - a type checker knows it as a module
    for file in sorted([*folder.glob("*.metadata"), *folder.glob("*/*.metadata")]):
        try:
            if not file.is_file():
                raise OSError("not a regular file")
            with file.open("rb") as stream:
                _IndexUnpickler(stream).load()
        except Exception as error:
            raise RunFailed(f"{file} is no index of a checkpoint ({error})", "start anew") from None


@contextmanager
def universal_checkpoint(run: OpenRun, accelerator: Accelerator, folder: Path) -> Iterator[Path]:
    """Made beside the record by the main process, for all; and gone again."""
    from accelerate.utils import broadcast_object_list

    from study.host.folders import swap_folder

    with swap_folder(run.output_dir) if accelerator.is_main_process else _nothing() as made:
        if made is not None:
            _convert(folder / _TAG, made / _TAG)
        names = [made.name if made is not None else None]
        broadcast_object_list(names)
        universal = run.output_dir.resolve() / str(names[0])
        if not universal.is_dir():
            raise RunFailed(
                f"rank {accelerator.process_index} does not see the folder {universal}, where the main process has put"
                " the checkpoint together",
                "let --output_dir name a folder that all machines share",
            )
        yield universal
        accelerator.wait_for_everyone()


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def _convert(folder: Path, universal: Path) -> None:
    """As DeepSpeed's script does, in this process, where torch.load lets no code in, whatever the script asks for."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder), output_folder=str(universal), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def load_universal(accelerator: Accelerator, universal: Path) -> None:
    from study.metrics.state import base_optimizer

    engine: Any = accelerator.deepspeed_engine_wrapped.engine
    engine._config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(universal), _TAG)
    finally:
        engine._config.load_universal_checkpoint = False
    # Stage 3 gives all its groups one tensor that counts the steps, on the host: each would count for all.
    for parameter, state in base_optimizer(engine.optimizer).state.items():
        if hasattr(state.get("step"), "device"):
            state["step"] = state["step"].to(parameter.device, copy=True)


def put_random_states(states: dict[str, Any], rank: int) -> None:
    """Of `rank`, which saw as many GPUs as it saved states, and drew from those of one alone."""
    import numpy
    import torch

    random.setstate(states["random_state"])
    numpy.random.set_state(states["numpy_random_seed"])  # noqa: NPY002 - the state that libraries draw from
    torch.set_rng_state(states["torch_manual_seed"])
    if torch.cuda.is_available() and (of_gpus := states.get("torch_cuda_manual_seed")):
        torch.cuda.set_rng_state(of_gpus[rank % len(of_gpus)])
