"""The arithmetic behind a figure that comes from no record, with its numbers, as a reader would write it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from study.claims.arithmetic import MIXED, held_bytes
from study.claims.ledger import Check
from study.claims.verdicts import number
from study.theory.paper import KINDS, split_by

_FORMS = {
    "stated": "{value}",
    "ratio": "{of} / {to}",
    "saving": "1 - {after} / {before}",
    "steps_per_hour": "3600 s x {tokens_per_s} tokens/s x {gpus} GPUs / ({batch} x {length} tokens)",
    "tflops": "6 x {parameters_b} B x {tokens_per_s} tokens/s / 1000",
    "state_gb": "{parameters_b} B x {bytes} bytes",
    "state_ratio": "{bytes} / {over_bytes} bytes",
    "state_saved_gb": "{parameters_b} B x ({over_bytes} - {bytes} bytes)",
    "capacity_b": "{device_gb} GB / {bytes} bytes",
    "solved_bytes weights": "({stage2_gb} - {stage3_gb} GB) / (1 - 1 / {gpus}) / {parameters_b} B",
    "solved_bytes sharded": "({stage0_gb} - {stage2_gb} GB) / (1 - 1 / {gpus}) / {parameters_b} B",
    "solved_bytes rest": "{stage0_gb} GB - ({stage0_gb} - {stage3_gb} GB) / (1 - 1 / {gpus})",
    "shares_gb": "{params_gb} / {params_by} + {grads_gb} / {grads_by} + {optimizer_gb} / {optimizer_by} GB",
}


def derivation(check: Check) -> str:
    """Nothing for a figure that is made of records or of files."""
    form = _FORMS.get(f"{check.form} {check.numbers.get('what', '')}".strip())
    return form.format_map({key: _plain(value) for key, value in _values(check).items()}) if form else ""


def _values(check: Check) -> Mapping[str, Any]:
    numbers = dict(check.numbers)
    gpus = numbers.get("gpus", 1)
    if "strategy" in numbers:
        numbers["bytes"] = _bytes(numbers["strategy"], gpus, numbers.get("precision", MIXED))
    if "over" in numbers:
        numbers["over_bytes"] = _bytes(
            numbers["over"], numbers.get("over_gpus", gpus), numbers.get("over_precision", MIXED)
        )
    if "stage" in numbers:
        numbers |= {f"{kind}_by": split_by(kind, numbers["stage"], gpus) for kind in KINDS}
    return numbers


def _bytes(strategy: str, gpus: int, precision: str) -> str:
    """Of a parameter on one device: its weight, its gradient, and what the optimizer keeps of it."""
    held = held_bytes(strategy, gpus, precision)
    parts = [number(part) for part in (held.params_device, held.grads_device, held.optimizer_device) if part]
    return f"({' + '.join(parts)})" if len(parts) > 1 else "".join(parts) or "0"


def _plain(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, (int, float)) else str(value)
