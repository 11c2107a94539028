"""Formats of numbers, sizes and durations, shared by pages, figures and the command line."""

from __future__ import annotations

import math
import re
from decimal import Decimal

NOT_MEASURED = "-"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits; integers and numbers above 1,000 have no decimals."""
    if math.isnan(value):
        return NOT_MEASURED
    if math.isinf(value):
        return str(value)
    size = abs(value)
    if size and not 1e-3 <= size < 1e9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}·{power_of_ten(int(exponent))}"
    if size >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"


def rounded(value: float, digits: int = 3) -> str:
    """Return a prediction with this many significant digits: one rounding for a figure wherever it is printed."""
    number = float(f"{value:.{digits}g}")
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:#.{digits}g}"


def format_parameters(count: int) -> str:
    """Return a number of parameters in the unit that fits it: 8.03 B, 0.124 B, 33.2 M."""
    return f"{rounded(count / 1e9)} B" if count >= 1e8 else f"{rounded(count / 1e6)} M"


def rounded_seconds(seconds: float) -> str:
    """Return a predicted time in the unit that fits it: milliseconds, and from 1,000 of them seconds."""
    return f"{rounded(1e3 * seconds)} ms" if float(f"{1e3 * seconds:.3g}") < 1e3 else f"{rounded(seconds)} s"


def power_of_ten(exponent: int) -> str:
    """Return 10 with a superscript exponent."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def full_model(name: str) -> str:
    """Return the name of a model without the suffix of a preset with fewer layers."""
    return re.sub(r"-\d+layers$", "", name)


def percent(fraction: float, signed: bool = False) -> str:
    """Return a fraction in percent, with fewer decimals the larger it is; a small one is not rounded to 0."""
    size = abs(100 * fraction)
    sign = "+" if signed else ""
    if 0 < size < 0.01:
        return f"{Decimal(f'{100 * fraction:.0e}'):{sign}f} %"
    return f"{100 * fraction:{sign}.{0 if size >= 10 else 1 if size >= 1 else 2}f} %"


def format_bytes(size: float | None) -> str:
    """Return a size with four digits and a decimal unit, as papers use it; ? if it is unknown."""
    if size is None:
        return "?"
    unit, name = next((row for row in _UNITS if size >= row[0]), _UNITS[-1])
    value = size / unit
    return f"{value:.0f} {name}" if unit == 1 or value >= 1e4 else f"{value:#.4g} {name}".replace(". ", " ")


def binary_size(count: float) -> str:
    """Return a number of bytes in the largest binary unit that leaves a digit before the point: 13.86 MiB."""
    for unit, bytes_of_unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= bytes_of_unit:
            return f"{count / bytes_of_unit:,.2f} {unit}"
    return f"{count:,.0f} B"


def format_duration(seconds: float) -> str:
    """Return seconds as `1h05m`, `3m20s` or `45s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
