"""What DeepSpeed makes of a strategy's JSON: each setting that costs bytes, with the engine's own default for it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, Literal

from study.predict.request import Request
from study.spec.strategies import Strategy

# deepspeed/runtime/swap_tensor/constants.py and utils.py: the smallest piece that is swapped, and its alignment.
SMALLEST_SWAPPED_BYTES, SWAP_ALIGNMENT_BYTES = 2**20, 1024


@dataclasses.dataclass(frozen=True)
class Offload:
    device: str
    pinned: bool
    buffers: int
    # In elements; of parameters alone.
    buffer_size: int
    # Of the optimizer's: the share of it that goes to the host.
    ratio: float


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes are in elements, as DeepSpeed has them."""

    stage: int
    reduce_bucket: int
    overlaps: bool
    contiguous_gradients: bool
    reduce_scatter: bool
    # Stages 1 and 2 reduce a bucket to everybody, and each rank keeps its part.
    reduces_to_all: bool
    sub_group: int
    prefetch_bucket: int
    persistence_threshold: int
    model_persistence_threshold: int
    max_live: int
    max_reuse_distance: int
    # fp32 gradients are kept beside weights of 16 bits.
    accumulates_in_fp32: bool
    # Moments in the weights' 16 bits, or no fp32 masters at all: DeepSpeed's pure bf16.
    bf16_masters: bool
    bf16_moments: bool
    # Stage 3: the first rank has all weights on its host when a program saves the model.
    gathers_to_save: bool
    optimizer: Offload | None
    parameters: Offload | None

    @property
    def gradients_by(self) -> Literal["all_reduce", "reduce", "reduce_scatter"]:
        """stage_1_and_2.py, average_tensor: stages 1 and 2 reduce a bucket to everybody or, told not to, each part to
        its owner. Only stage 3 scatters."""
        if not self.reduce_scatter:
            return "all_reduce"
        if self.stage == 3:
            return "reduce_scatter"
        return "all_reduce" if self.reduces_to_all else "reduce"


def sizes_of_width(hidden: int) -> dict[str, int]:
    """What Accelerate makes of three sizes that are `auto`."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


def engine_settings(strategy: Strategy, hidden: int) -> EngineSettings:
    """Any other `auto` is the engine's default."""
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    auto = sizes_of_width(hidden)

    def number(name: str, default: float) -> int:
        value = zero.get(name, default)
        return int(auto.get(name, default)) if value == "auto" else int(value)

    def switch(name: str, default: bool) -> bool:
        value = zero.get(name, default)
        return default if value in ("auto", None) else bool(value)

    stage = int(zero["stage"])
    bf16 = strategy.deepspeed.get("bf16")
    bf16 = bf16 if isinstance(bf16, Mapping) else {}
    types = strategy.deepspeed.get("data_types")
    kept_in = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    return EngineSettings(
        stage=stage,
        reduce_bucket=number("reduce_bucket_size", 5e8),
        overlaps=switch("overlap_comm", stage == 3),
        contiguous_gradients=switch("contiguous_gradients", True),
        reduce_scatter=switch("reduce_scatter", True),
        reduces_to_all=switch("use_multi_rank_bucket_allreduce", True),
        sub_group=number("sub_group_size", 1e9),
        prefetch_bucket=number("stage3_prefetch_bucket_size", 5e7),
        persistence_threshold=number("stage3_param_persistence_threshold", 1e5),
        model_persistence_threshold=number("stage3_model_persistence_threshold", sys.maxsize),
        max_live=number("stage3_max_live_parameters", 1e9),
        max_reuse_distance=number("stage3_max_reuse_distance", 1e9),
        accumulates_in_fp32=kept_in == "fp32",
        bf16_masters=bool(bf16.get("bf16_master_weights_and_grads", False)),
        bf16_moments=bool(bf16.get("bf16_optimizer_states", False)),
        gathers_to_save=switch("stage3_gather_16bit_weights_on_model_save", False),
        optimizer=_offload(strategy, "optimizer", 4),
        parameters=_offload(strategy, "param", 5),
    )


def refused_accumulation(request: Request) -> str | None:
    """Stage 0 adds gradients up in the type of its weights alone (engine.py, _do_optimizer_sanity_check).

    What it says of another one; None where it runs.
    """
    if request.strategy.zero_stage != 0:
        return None
    settings, is_16_bit = engine_settings(request.strategy, request.shape.hidden), request.precision.endswith("-engine")
    if settings.accumulates_in_fp32 and is_16_bit:
        return "stage 0 adds 16-bit gradients up in no other type: DeepSpeed ends with NotImplementedError"
    return None


def _offload(strategy: Strategy, what: str, buffers: int) -> Offload | None:
    device = strategy.offload_device(what)
    if device is None or strategy.deepspeed is None:
        return None
    section: Mapping[str, Any] = strategy.deepspeed["zero_optimization"][f"offload_{what}"]
    return Offload(
        device=device,
        # deepspeed 0.19 pins unless told otherwise.
        pinned=bool(section.get("pin_memory", True)),
        buffers=int(section.get("buffer_count", buffers)),
        buffer_size=int(section.get("buffer_size", 1e8)),
        ratio=float(section.get("ratio", 1.0)),
    )
