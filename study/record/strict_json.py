"""JSON as a record may hold it: no key twice, and no number that is not finite."""

from __future__ import annotations

import json
import math
from typing import Any


def loads(text: str) -> Any:
    return json.loads(
        text, parse_constant=_number, parse_float=_number, parse_int=_number, object_pairs_hook=_unique_keys
    )


def _number(text: str) -> float:
    """A float's reach is the limit for whole numbers as well: what reads a record may divide."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key is there twice")
    return document
