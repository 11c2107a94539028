"""`--engine_override a.b=5e6`: read, and set in DeepSpeed's settings."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from study.errors import UserError, brief


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=5e6` lines as a mapping from dotted key to value."""
    parsed: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        try:
            value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError):
            value = None
        if not (equals and all(key.split("."))) or value is None:
            raise UserError(
                f"--engine_override {brief(item)} is not KEY=JSON",
                "write it as zero_optimization.reduce_bucket_size=5000000",
            )
        for other in parsed:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise UserError(f"--engine_override sets both {other} and {key}", "leave one of them out")
        parsed[key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return parsed


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not finite")
    return float(text)


def override(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """DeepSpeed settings with dotted keys replaced; the given ones stay as they are."""
    changed = copy.deepcopy(dict(settings))
    for key, value in parse_overrides(overrides).items():
        *sections, last = key.split(".")
        node = changed
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(f"--engine_override {key}: {section} is a value, not a section", "fix the key")
        node[last] = value
    return changed
