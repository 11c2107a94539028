"""Causes of bytes that a receipt does not explain: those without a part, and a peak far above its prediction.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from study.config.text import binary_size
from study.receipt.document import PeakFacts, ReceiptDocument

MIN_ATTRIBUTED = 0.95
# A measured peak of more than this many times the predicted one has its cause with it.
FAR_FACTOR = 2
# Python's objects and temporaries within the growth of a process's heap; PeakWatch waits while more have no owner.
HEAP_BYTES = 2**18
# In a config of transformers.
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
# The predictor's parts, and those of a receipt, by their common name.
_STATE = ("parameters", "gradients", "optimizer")
_GROUPS = {
    "model state": (_STATE, _STATE),
    "gathered parameters and buckets": (("buffers",), ("gathered", "buckets")),
    "activations and logits": (("activations", "attention", "logits"), ("activations", "logits")),
}


def explain_attribution(receipt: ReceiptDocument) -> str | None:
    """Return why less than 95 % of the bytes at the peak are attributed; None if more are, or nothing counts them."""
    memory = receipt.memory
    if memory is None or not receipt.counts_bytes_in_use or memory.attributed >= MIN_ATTRIBUTED:
        return None
    missing = _bytes_without_part(memory)
    usual = f"only {memory.attributed:.1%} of the peak is attributed, and usually at least {MIN_ATTRIBUTED:.0%}:"
    if missing < 0:
        return f"{usual} the parts have {binary_size(-missing)} more than are in use, and are counted too high"
    if receipt.engine.device == "cpu" and missing <= HEAP_BYTES:
        return f"{usual} {binary_size(missing)} have no part; {_heap_cause()}"
    return f"{usual} {binary_size(missing)} have no part; they are of kernels, or of libraries other than torch"


def explain_peak(receipt: ReceiptDocument, predicted: Mapping[str, float]) -> str | None:
    """Return the part with most of the bytes by which a measured peak exceeds predicted parts; None without one."""
    memory = receipt.memory
    if memory is None:
        return None
    excess = {name: _sum(memory.parts, ours) - _sum(predicted, theirs) for name, (theirs, ours) in _GROUPS.items()}
    without_part = "bytes without a part"
    excess[without_part] = max(0, _bytes_without_part(memory)) if receipt.counts_bytes_in_use else 0
    largest = max(excess, key=excess.__getitem__)
    if excess[largest] <= 0:
        return None
    if largest == without_part and receipt.engine.device == "cpu" and excess[largest] <= HEAP_BYTES:
        return f"{binary_size(excess[largest])} of it have no part; {_heap_cause()}, which no prediction has"
    cause = f"{largest} are {binary_size(excess[largest])} above their prediction"
    if largest == "activations and logits" and _stores_dropped_attention(receipt):
        cause += ": torch's attention on a CPU stores scores, weights and dropped weights if dropout is on"
    return cause


def _stores_dropped_attention(receipt: ReceiptDocument) -> bool:
    """Whether torch's attention runs without a fused kernel: on a CPU none has dropout."""
    config = receipt.model.config or {}
    has_dropout = any(config.get(key) for key in _ATTENTION_DROPOUT)
    return receipt.engine.device == "cpu" and receipt.model.attention == "sdpa" and has_dropout


def _heap_cause() -> str:
    return f"on a CPU up to {binary_size(HEAP_BYTES)} of a peak are Python's objects and temporaries"


def _bytes_without_part(memory: PeakFacts) -> int:
    return memory.total_bytes - sum(memory.parts.values())


def _sum(parts: Mapping[str, float], names: tuple[str, ...]) -> float:
    return sum(parts.get(name, 0.0) for name in names)
