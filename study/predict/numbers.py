"""Numbers of a command line, refused in a few words."""

from __future__ import annotations

import argparse
import math


def whole(text: str, most: int = 10_000_000, what: str = "whole number") -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no {what} from 1 to {most}")
    return int(text)


def real(text: str, below: float = 1e9) -> float:
    """Above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < below:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number above 0")
    return number
