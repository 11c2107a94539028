"""Intervals of predicted figures by kind of training, from errors on published pages, and their words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from study.config.text import rounded
from study.config.yaml_sections import load_package_yaml
from study.predictor.request import Estimate, Request

FILE = Path(__file__).with_name("intervals.yaml")
_INTERVALS = load_package_yaml(FILE.read_text(encoding="utf-8"))
# Logarithm up to which an error of a step time is that of a single configuration, and not of its setup.
SINGLE_ERROR = float(_INTERVALS.get("single_error", 0.0))
# Devices with published or own step times.
TIMED_DEVICES = frozenset(_INTERVALS.get("timed_devices", ()))
# An end further from its figure is of no use.
MAX_FACTOR = 2.0
NOT_KNOWN = f"not known within a factor of {MAX_FACTOR:g}"
# More GPUs than these, or several nodes, are the kind "scale".
_MAX_GPUS = 64
Kind = Literal["full", "adapters", "offload", "scale"]
# Both ends of a figure.
Ends = tuple[float, float]


def kind_of_training(request: Request, *, counts_offload: bool = True) -> Kind:
    """Return the kind of training whose errors a request has, or those of its part on the device."""
    if request.shape.lora_rank is not None:
        return "adapters"
    if counts_offload and request.offloads:
        return "offload"
    return "scale" if request.box.nodes > 1 or request.box.ranks > _MAX_GPUS else "full"


def interval_name(kind: Kind, figure: str) -> str:
    """Return the name of a figure's interval for a kind of training: that of full training is the figure's."""
    return figure if kind == "full" else f"{kind}_{figure}"


def estimate(figure: str, value: float, certain: float = 0.0) -> Estimate:
    """Add an interval to a value, except its exact part `certain`; no interval if the figure was not validated.

    It contains the value: a measurement equal to its prediction is within the stated error, also of a figure that is
    mostly predicted too low, as peaks of adapters.
    """
    if (row := _INTERVALS.get(figure)) is None:
        return Estimate(value)
    factors = min(row["low"], 1.0), max(row["high"], 1.0)
    return Estimate(value, *(certain + (value - certain) * factor for factor in factors))


def describe_error(figure: Literal["sent", "host", "nvme"]) -> dict[str, str]:
    """Return how far a predicted figure was off, and over which records."""
    if figure == "host":
        row = _INTERVALS["host_error"]
        median, worst = 100 * row["median"], round(100 * row["worst"])
        return {
            "size": f"\u00b1\u00a0{median:.1f}\u00a0%, worst {worst}\u00a0%",
            "of": f"median of {row['rows']} runs on one GPU",
        }
    row = _INTERVALS[figure]
    # Its ends have three digits.
    spread = max(1 - row["low"], row["high"] - 1) + 0.0005
    return {"size": f"\u00b1\u00a0{100 * spread:.2f}\u00a0%", "of": f"80 % of {row['rows']} runs on CPUs"}


def few_ratios(figure: str) -> dict[str, float] | None:
    """Return the least and the largest measured over predicted figure of a kind with too few pages for an interval, and
    how many rows and pages it has; None if there are none."""
    row: dict[str, float] | None = _INTERVALS.get("too_few_pages", {}).get(figure)
    return row


def is_known(value: float, ends: Ends | None) -> bool:
    """Whether a figure has both ends, and neither differs from it by more than `MAX_FACTOR`."""
    return ends is not None and ends[0] * MAX_FACTOR >= value and ends[1] <= value * MAX_FACTOR


def ends_words(value: float, ends: Ends | None, text: Callable[[float], str] = rounded, causes: str = "") -> str:
    """Return the ends of a figure as every command and page writes them, or that it is not known well enough.

    `causes`: of the range, with a leading blank, such as " by its host".
    """
    if ends is None or not is_known(value, ends):
        return NOT_KNOWN
    return f"{text(ends[0])} to {text(ends[1])}{causes}"


def ends_text(value: float, ends: Ends | None, text: Callable[[float], str] = rounded, causes: str = "") -> str:
    """Return `ends_words` in brackets, with a leading blank."""
    return f" ({ends_words(value, ends, text, causes)})"


def figure_document(figure: Estimate, ends: Ends | None = None) -> dict[str, Any]:
    """Return a figure as in the documents of --json: with its ends, and whether it is known within a factor of 2."""
    if ends is None and figure.low is not None and figure.high is not None:
        ends = figure.low, figure.high
    low, high = ends or (figure.low, figure.high)
    return {"value": figure.value, "low": low, "high": high, "within_factor_2": is_known(figure.value, ends)}
