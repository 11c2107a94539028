"""Causes of figures that a receipt does not explain: bytes of no part, a peak far above its prediction, and a step
outside of its stated error.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from study.config.text import binary_size, rounded_seconds
from study.receipt.document import PASSES, ForecastRow, PeakFacts, ReceiptDocument

MIN_ATTRIBUTED = 0.95
# A measured peak of more than this many times the predicted one has its cause with it.
FAR_FACTOR = 2
# Python's objects and temporaries within the growth of a process's heap; PeakWatch waits while more have no owner.
HEAP_BYTES = 2**18
# The predictor's parts, and those of a receipt, by their common name.
_STATE = ("parameters", "gradients", "optimizer")
_GROUPS = {
    "model state": (_STATE, _STATE),
    "gathered parameters and buckets": (("buffers",), ("gathered", "buckets")),
    "activations and logits": (("activations", "attention", "logits"), ("activations", "logits")),
}
# Parts of a step's time, in a sentence.
_WHERE = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    PASSES: "in both passes",
    "communication": "in exposed communication",
    "offload": "in host and NVMe traffic",
    "optimizer": "in the optimizer",
    "data": "in waiting for data, which no prediction has",
    "rest": "in the rest of a step, which no prediction has",
    "others": "in other steps than the one with these parts",
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
    return f"{largest} are {binary_size(excess[largest])} above their prediction"


def explain_step(receipt: ReceiptDocument, step: ForecastRow, times: Mapping[str, tuple[float, float]]) -> str | None:
    """Return the part with most of the difference between a step and its prediction, of predicted and measured seconds;
    None within the stated error, or without parts."""
    if not step.is_outside or not times:
        return None
    measured = receipt.time.parts
    differences = {part: measured_s - predicted_s for part, (predicted_s, measured_s) in times.items()}
    differences |= {part: measured.get(part, 0.0) for part in ("data", "rest")}
    differences["others"] = step.measured - sum(measured.values())
    sign = 1 if step.measured > step.predicted else -1
    largest = max(differences, key=lambda part: sign * differences[part])
    return f"most of the difference, {rounded_seconds(abs(differences[largest]))}, is {_WHERE[largest]}"


def _heap_cause() -> str:
    return f"on a CPU up to {binary_size(HEAP_BYTES)} of a peak are Python's objects and temporaries"


def _bytes_without_part(memory: PeakFacts) -> int:
    return memory.total_bytes - sum(memory.parts.values())


def _sum(parts: Mapping[str, float], names: tuple[str, ...]) -> float:
    return sum(parts.get(name, 0.0) for name in names)
