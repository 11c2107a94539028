"""The request of a prediction, with every setting that follows from it, and the prediction itself.

Free of torch, so that advice comes in seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from study.config.errors import UserError
from study.config.flags import Precision, RunConfig
from study.config.strategies import RANKS_OF_A_MACHINE, WITH_GROUPS, Strategy, read_strategy
from study.predictor.hardware import Hardware
from study.predictor.shape import ModelShape, model_shape, with_adapters

Attention = Literal["eager", "sdpa", "sdpa_causal", "flash_attention_2"]
OptimizerName = Literal["adamw", "adamw_8bit"]
FP32_BYTES = 4


# What DeepSpeed makes of a strategy's JSON: each setting that costs bytes, with the engine's own default for it.


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
    # fp32 gradients are kept besides weights of 16 bits.
    accumulates_in_fp32: bool
    # Moments in the weights' 16 bits, or no fp32 masters at all: DeepSpeed's pure bf16.
    bf16_masters: bool
    bf16_moments: bool
    # Stage 3: the first rank has all weights on its host when a program saves the model.
    gathers_to_save: bool
    optimizer: Offload | None
    parameters: Offload | None

    @property
    def master_bytes(self) -> int:
        return 2 if self.bf16_masters else FP32_BYTES

    @property
    def gradients_by(self) -> Literal["all_reduce", "reduce", "reduce_scatter"]:
        """Stages 1 and 2 reduce a bucket to all ranks or, if that is off, each part to its owner (stage_1_and_2.py,
        average_tensor). Only stage 3 scatters."""
        if not self.reduce_scatter:
            return "all_reduce"
        if self.stage == 3:
            return "reduce_scatter"
        return "all_reduce" if self.reduces_to_all else "reduce"


def sizes_of_width(hidden: int) -> dict[str, int]:
    """Return Accelerate's values for three sizes that are `auto`."""
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


def _offload(strategy: Strategy, what: str, buffers: int) -> Offload | None:
    device = strategy.offload_device(what)
    if device is None or strategy.deepspeed is None:
        return None
    section: Mapping[str, Any] = strategy.deepspeed["zero_optimization"][f"offload_{what}"]
    return Offload(
        device=device,
        # deepspeed 0.19 pins by default.
        pinned=bool(section.get("pin_memory", True)),
        buffers=int(section.get("buffer_count", buffers)),
        buffer_size=int(section.get("buffer_size", 1e8)),
        ratio=float(section.get("ratio", 1.0)),
    )


@dataclasses.dataclass(frozen=True)
class Request:
    shape: ModelShape
    strategy: Strategy
    box: Hardware
    sequence_length: int
    micro_batch: int
    accumulation: int
    precision: Precision
    gradient_checkpointing: bool
    attention: Attention
    optimizer: OptimizerName = "adamw"
    # With checkpointing one layer of so many is recomputed, and the others are kept.
    checkpoint_every: int = 1
    # A recomputed layer keeps what its attention puts out and every other product: torchtitan's selective option.
    keeps_products: bool = False
    # The model's own dropout is on: masks are kept, and attention by hand keeps its scores twice.
    dropout: bool = False
    # With bf16 and fp16. False: a trainer that leaves 16 bits to FSDP, as Accelerate does by default. Norms
    # and the residual stream are as narrow then, and so is what is gathered. This study's own runs autocast.
    autocast: bool = True
    # torch.compile, or kernels written as one: everything but matrix products is read and written less often.
    compiled: bool = False
    # The loss's gradient takes the logits' place, in 16 bits: flash-attention's cross entropy, as llm-foundry trains.
    fused_loss: bool = False
    # The output layer and its loss for a part of the tokens at a time: Liger's fused linear cross entropy.
    chunked_loss: bool = False
    # Copies that torch's AdamW makes of what it steps at once: none as one kernel, as this study asks for it; by
    # foreach a root (torch/optim/adamw.py, _multi_tensor_adamw), and before torch 2.1 its sum with eps besides.
    step_copies: int = 0
    # Without an engine: the model was loaded in 16 bits, and its gradients and moments are as narrow. No masters.
    pure: bool = False
    # PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True.
    expandable_segments: bool = False

    @functools.cached_property
    def settings(self) -> EngineSettings:
        """DeepSpeed's; other strategies have none."""
        return engine_settings(self.strategy, self.shape.hidden)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Autocast leaves the weights as they are; DeepSpeed's own 16 bits do not."""
        return 2 if self.precision.endswith("-engine") else FP32_BYTES

    @property
    def computing_bytes(self) -> int:
        return FP32_BYTES if self.precision == "fp32" else 2

    @property
    def moments_bytes(self) -> float:
        """Both of AdamW's. 8-bit states have a float of 4 bytes for every 256 numbers (bitsandbytes)."""
        if self.optimizer == "adamw_8bit":
            return 2 * (1 + 4 / 256)
        return 4.0 if self.pure or (self.strategy.zero_stage and self.settings.bf16_moments) else 8.0

    @functools.cached_property
    def without_micro_batch(self) -> Request:
        """The same for any micro-batch, and for any accumulation above 1."""
        return dataclasses.replace(self, micro_batch=1, accumulation=min(2, self.accumulation))

    @property
    def fsdp_gathers_16_bits(self) -> bool:
        return self.strategy.is_fsdp and self.precision != "fp32" and not self.autocast

    @property
    def swapped(self) -> list[str]:
        """What DeepSpeed sends to NVMe, which it does at stage 3 alone: others leave it in host memory (engine.py,
        zero_use_cpu_optimizer)."""
        strategy = self.strategy
        return [what for what in ("optimizer", "param")
                if strategy.zero_stage == 3 and strategy.offload_device(what) == "nvme"]  # fmt: skip

    @property
    def gathered_again(self) -> float:
        """Parameters that stage 3 gathers a third time for a micro-batch: what is frozen of the layers that it
        recomputes, and frees with them (_recomputing_frozen in gathers.py)."""
        if self.strategy.zero_stage != 3 or not self.gradient_checkpointing:
            return 0.0
        frozen = sum(tensor.elements for tensor in self.shape.tensors if tensor.in_layer and not tensor.trained)
        return frozen * self.shape.layers / self.checkpoint_every

    @property
    def ranks_per_replica(self) -> int | None:
        """Ranks of a replica group. A virtual rank is alone on its box, and the machines of its job have eight."""
        per_machine = self.box.gpus_per_node if self.box.gpus_per_node > 1 else RANKS_OF_A_MACHINE
        return self.strategy.ranks_per_replica(self.box.ranks, per_machine)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def same_for_any_micro_batch(answer: Callable[Concatenate[Request, _P], _R]) -> Callable[Concatenate[Request, _P], _R]:
    """A search over micro-batches asks it once. Of the accumulation it counts whether there is any."""
    cached = functools.lru_cache(maxsize=64)(answer)

    @functools.wraps(answer)
    def asked(request: Request, *given: _P.args, **named: _P.kwargs) -> _R:
        return cached(request.without_micro_batch, *given, **named)  # type: ignore[arg-type]

    return asked


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and the interval that the validation gives it; None where nothing was validated."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, of one node's host memory, and of NVMe."""

    # parameters, gradients, optimizer, buffers, activations, logits, attention, context, fragmentation.
    device_parts: Mapping[str, float]
    steady_allocated: Estimate
    peak_allocated: Estimate
    # By torch's pool, at least.
    peak_reserved: Estimate
    # And where there is room.
    pool_with_room: float
    # state, pinned, load, save.
    host_parts: Mapping[str, float]
    host_peak: Estimate
    nvme: float
    # Without a GPU: a rank's whole process, its libraries and freed blocks that the C library keeps included.
    process_peak: Estimate | None = None
    # What makes a part what it is, in words for the reader: "gradients of the embedding exceed the bucket".
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of one optimizer step, and what follows from them."""

    # compute, communication_exposed, communication_overlapped, offload, cpu_adam, nvme.
    parts: Mapping[str, float]
    step_s: Estimate
    tokens_per_s_per_gpu: Estimate
    mfu: float | None
    hfu: float | None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Prediction:
    request: Request
    memory: Memory
    time: Time
    sent_bytes_per_step: Estimate
    fits: bool


def unpredicted(strategy: str, config: RunConfig) -> str | None:
    """Return what has no arithmetic; None if all of it has."""
    if strategy in WITH_GROUPS:
        return f"{strategy}, whose ranks share their samples"
    if config.optimizer != "adamw":
        return config.optimizer
    try:
        model_shape(config.model_name_or_path)
    except UserError:
        return f"{config.model_name_or_path}, of which only the name is known"
    return None


def request_for(strategy: str, config: RunConfig, box: Hardware, micro_batch: int, accumulation: int) -> Request:
    """Return a run's request; what `unpredicted` names is refused."""
    if what := unpredicted(strategy, config):
        raise UserError(f"there is no prediction of {what}", "leave it out")
    shape = model_shape(config.model_name_or_path)
    buffered = read_strategy(strategy).with_swap_buffers(-(-shape.largest // box.ranks))
    return Request(
        shape=shape if config.peft == "none" else with_adapters(shape, config.lora_rank),
        strategy=buffered.overridden(config), box=box, sequence_length=config.seq_length,
        micro_batch=micro_batch, accumulation=accumulation, precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing, attention=config.attn_implementation,
        dropout=config.dropout != 0, compiled=config.torch_compile,
    )  # fmt: skip
