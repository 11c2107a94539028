"""What is asked of a prediction, and what it answers. Free of torch, so that advice comes in seconds."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Concatenate, Literal, ParamSpec, TypeVar

from study.config.flags import Precision
from study.config.strategies import RANKS_OF_A_MACHINE, Strategy
from study.predictor.hardware import Device
from study.workloads.presets import Family

Attention = Literal["eager", "sdpa", "sdpa_causal", "flash_attention_2"]
OptimizerName = Literal["adamw", "adamw_8bit"]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Parameters of one name in every layer, or outside the layers where `count` is 1."""

    name: str
    elements: int
    count: int
    in_layer: bool
    # Of its first dimension, along which FSDP2 cuts.
    rows: int = 1
    # False: frozen, as all of a model beside LoRA's adapters.
    trained: bool = True


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A transformer as far as memory, traffic and time depend on it."""

    name: str
    model_type: str
    family: Family
    layers: int
    hidden: int
    # Of the feed-forward block.
    inner: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    # Two matrices go in: SwiGLU and its like.
    gated: bool
    # The output layer is the embedding.
    tied: bool
    tensors: tuple[Tensor, ...]
    # None: the configuration sets no limit to a sequence.
    positions: int | None = None
    # Of LoRA's adapters, which are among the tensors; None: all of it is trained.
    lora_rank: int | None = None

    @property
    def parameters(self) -> int:
        return sum(tensor.elements * tensor.count for tensor in self.tensors)

    @property
    def trained_parameters(self) -> int:
        return sum(tensor.elements * tensor.count for tensor in self.tensors if tensor.trained)

    @property
    def frozen_parameters(self) -> int:
        return self.parameters - self.trained_parameters

    @property
    def largest(self) -> int:
        """Elements of one tensor."""
        return max(tensor.elements for tensor in self.tensors)

    @property
    def largest_trained(self) -> int:
        """Elements of one tensor."""
        return max(tensor.elements for tensor in self.tensors if tensor.trained)


# More ranks than any job has had.
LARGEST_JOB = 2**18


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What it runs on: `nodes` machines of `gpus_per_node` devices."""

    name: str
    device: Device
    gpus_per_node: int
    nodes: int = 1
    # Of one device to other nodes.
    network_gb_per_s: float = 50.0
    host_gib_per_node: float | None = None
    # What all ranks of a node read and write together in an optimizer on the host, where it was measured or given.
    host_memory_gb_per_s: float | None = None
    # DeepSpeed's asynchronous I/O on four drives of PCIe 4: "up to 10 GB/sec reads and 5 GB/secs writes" (DeepSpeed's
    # blog deepnvme, 08-2024).
    nvme_read_gb_per_s: float = 10.0
    nvme_write_gb_per_s: float = 5.0
    # gloo gathers into a copy of the whole, and scatters out of one; NCCL does neither.
    gathers_into_copies: bool = False

    @property
    def ranks(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def in_host_memory(self) -> bool:
        """No GPU: the ranks are processes, and compute where their offloaded state lies as well."""
        return self.device.memory_gib == 0

    @property
    def meets_over_pcie(self) -> bool:
        """Several GPUs of one node, none of which has NVLink."""
        return self.gpus_per_node > 1 and self.device.nvlink_gb_per_s is None and not self.in_host_memory


def box_of_ranks(name: str, device: Device, ranks: int) -> Hardware:
    """Where nobody says how they are spread: full machines, or one."""
    nodes, rest = divmod(ranks, RANKS_OF_A_MACHINE)
    return Hardware(name, device, ranks) if rest or not nodes else Hardware(name, device, RANKS_OF_A_MACHINE, nodes)


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
    # With bf16 and fp16. False: a trainer that leaves 16 bits to FSDP, as Accelerate does unless told otherwise. Norms
    # and the residual stream are as narrow then, and so is what is gathered. This study's own runs autocast.
    autocast: bool = True
    # torch.compile, or kernels written as one: what is no matrix product is read and written less often.
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

    @property
    def fsdp_gathers_16_bits(self) -> bool:
        return self.strategy.is_fsdp and self.precision != "fp32" and not self.autocast

    @property
    def gathered_again(self) -> float:
        """Parameters that stage 3 gathers a third time for a micro-batch: what is frozen of the layers that it
        recomputes, and lets go of with them (_recomputing_frozen in modules.py)."""
        if self.strategy.zero_stage != 3 or not self.gradient_checkpointing:
            return 0.0
        frozen = sum(tensor.elements for tensor in self.shape.tensors if tensor.in_layer and not tensor.trained)
        return frozen * self.shape.layers / self.checkpoint_every

    @property
    def ranks_of_a_copy(self) -> int | None:
        """As in Strategy, on this box. A virtual rank is alone on it, and the machines of its job have eight."""
        per_machine = self.box.gpus_per_node if self.box.gpus_per_node > 1 else RANKS_OF_A_MACHINE
        return self.strategy.ranks_of_a_copy(self.box.ranks, per_machine)


_BY_IDENTITY = ("shape", "strategy", "box")
_settings_of = operator.attrgetter(
    *(field.name for field in dataclasses.fields(Request)
      if field.name not in (*_BY_IDENTITY, "micro_batch", "accumulation"))
)  # fmt: skip
_KEPT = 64
_P = ParamSpec("_P")
_R = TypeVar("_R")


def same_for_any_micro_batch(answer: Callable[Concatenate[Request, _P], _R]) -> Callable[Concatenate[Request, _P], _R]:
    """A search over micro-batches asks it once. Of the accumulation it counts whether there is any."""
    known: dict[Hashable, tuple[Request, _R]] = {}

    @functools.wraps(answer)
    def asked(request: Request, *given: _P.args, **named: _P.kwargs) -> _R:
        same = tuple(id(getattr(request, name)) for name in _BY_IDENTITY)
        key = (same, _settings_of(request), request.accumulation > 1, given, tuple(named.items()))
        if key not in known:
            if len(known) >= _KEPT:
                known.clear()
            # With the request, so that no other object takes the place of one of its own.
            known[key] = request, answer(request, *given, **named)
        return known[key][1]

    return asked


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure and the interval that the validation gives it; None where nothing was validated."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, of one node's host memory, and of the drive."""

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
