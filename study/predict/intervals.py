"""A figure with the interval that its validation gave it: study/predict/intervals.yaml, written by study/validation."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from study.predict.request import Estimate
from study.spec.yaml_sections import read_own

FILE = Path(__file__).with_name("intervals.yaml")


@functools.cache
def _table() -> dict[str, Any]:
    return read_own(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def slowest_offload() -> float:
    """How many times as long as predicted a step with offload was at most."""
    return float(_table().get("offload_step_s", {}).get("high", math.inf))


def estimate(what: str, value: float, certain: float = 0.0) -> Estimate:
    """`low` and `high` as shares of what is not certain of the value; none where nothing was validated."""
    row, rest = _table().get(what), value - certain
    return (
        Estimate(value) if row is None else Estimate(value, certain + rest * row["low"], certain + rest * row["high"])
    )
