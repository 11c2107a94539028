"""Words of a request that `study predict`, `study advise` and `study explain` share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from study.config.precisions import computing_type
from study.config.text import format_number, rounded
from study.host.memory import GIB, MIB
from study.predictor.memory import predict_memory
from study.predictor.request import MemoryUse, OptimizerName, Request, TrainerSettings
from study.predictor.time import device_bytes, fits, host_limit

if TYPE_CHECKING:
    from study.advisor.advise import AdviceRequest


def precision_name(request: Request) -> str:
    """Return the precision as programs name it: a model that is loaded in 16 bits is predicted as an engine's."""
    return request.precision if request.strategy.deepspeed else computing_type(request.precision)


def strategy_text(request: Request) -> str:
    """Return the strategy's name, with FSDP's version if it is not that of its file, and the ranks of a tensor-parallel
    group."""
    name, version = request.strategy.name, request.fsdp_version
    groups = f" in tensor-parallel groups of {request.tensor_ranks}" * (request.tensor_group is not None)
    groups += ", by a sequence plan" * (request.stream_ranks > 1)
    return f"{name} as FSDP{version}" if version != Request.fsdp_version else f"{name}{groups}"


def program_text(settings: Request | TrainerSettings) -> str:
    """Return the loss with a leading comma, whether logits outlive it, and whether the model is compiled; empty for
    transformers' loss of a model that is not."""
    texts = []
    if settings.loss_kernel != "transformers":
        texts.append(f"loss: {settings.loss_kernel}")
    if settings.keeps_outputs:
        texts.append("keeps outputs")
    if settings.compiled:
        texts.append("compiled")
    return "".join(f", {text}" for text in texts)


def optimizer_text(optimizer: OptimizerName) -> str:
    """Return an optimizer with a leading comma; empty for AdamW."""
    return "" if optimizer == "adamw" else f", optimizer: {optimizer}"


def tokens_text(lengths: Request | AdviceRequest) -> str:
    """Return the tokens of a sample, and those of a decoder if they are others."""
    in_decoder = f" and {lengths.target_length} in the decoder" if lengths.target_length else ""
    if isinstance(lengths, Request) and lengths.sequence_ranks > 1:
        return f"{lengths.sample_tokens} tokens per sample over {lengths.sequence_ranks} ranks"
    return f"{lengths.sequence_length} tokens per sample{in_decoder}"


def batch_text(request: Request) -> str:
    """Return micro-batch and accumulation of a rank as text."""
    return f"micro-batch {request.micro_batch} x accumulation {request.accumulation}"


def workload_text(request: Request) -> str:
    """Return micro-batch, accumulation, checkpointing and sync_each_batch of a rank as text."""
    checkpointing = "gradient checkpointing" if request.gradient_checkpointing else "no gradient checkpointing"
    syncs = ", sync_each_batch" * request.sync_each_batch
    return f"{batch_text(request)}, {checkpointing}{syncs}"


def dpo_notes(request: Request) -> Iterator[str]:
    """Yield how many pairs of DPO a micro-batch has, if there is a reference model."""
    if request.reference_model:
        count = {1: "half a pair", 2: "1 pair"}.get(request.micro_batch, f"{request.micro_batch / 2:g} pairs")
        counts = "it counts sequences, and TRL's per_device_train_batch_size counts pairs"
        yield f"DPO: micro-batch {request.micro_batch} is {count}: {counts}"


def host_text(request: Request, memory: MemoryUse) -> str:
    """Return a node's host memory and its limit, for a run that offloads to it; else nothing."""
    limit, needed = request.box.host_gib_per_node, rounded(memory.host_peak.value / GIB)
    if not (request.strategy.offloads or request.fsdp_offloads) or request.box.is_cpu_only:
        return ""
    if limit is None:
        return f"{needed} GiB of host memory (unchecked)"
    return f"{needed} of {host_limit(request.box)} GiB on the host"


def loading_remedy(request: Request) -> str:
    """Return the flag with which FSDP's GPUs load no whole 4-bit weights, as a remark; nothing of other engines."""
    has_remedy = request.strategy.is_fsdp and request.quantized and not request.loads_on_host
    return " (with --quantized_on_host in host memory)" if has_remedy else ""


def memory_if_fitting(request: Request) -> MemoryUse | None:
    """Return the memory of a hint's request; None if an upper bound exceeds the device or the host."""
    memory = predict_memory(request)
    return memory if fits(memory, request.box, at_upper=True) else None


def need_text(request: Request, memory: MemoryUse) -> str:
    """Return the memory that a hint's request needs, with host memory and NVMe that no flag limits."""
    needs = [f"{rounded(device_bytes(memory) / GIB)} GiB"]
    if request.box.host_gib_per_node is None and request.offloads:
        needs.append(f"{rounded(memory.host_peak.value / GIB)} GiB of host memory a node, unchecked")
    if memory.nvme:
        needs.append(f"{rounded(memory.nvme / GIB)} GiB of NVMe")
    return ", ".join(needs)


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB if they are few."""
    return f"{format_number(size / GIB)} GiB" if abs(size) >= GIB / 2 or not size else f"{size / MIB:.0f} MiB"


def about(size: float) -> str:
    """Return bytes in GiB, rounded."""
    return f"{rounded(size / GIB)} GiB"
