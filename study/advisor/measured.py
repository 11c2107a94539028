"""`--measured` and `--calibrate`: runs that correct the predictions of their setup."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from study.config.errors import UserError
from study.host.memory import GIB
from study.predictor.calibration import (
    MeasuredRun,
    PeakKind,
    PredictedRun,
    check_run,
    check_setup,
    make_correction,
)
from study.predictor.hardware import parse_int, parse_tokens, real
from study.predictor.request import Request, SetupCorrection

# Reads the run of a file: a receipt.
ReadRun = Callable[[str], MeasuredRun]
_PEAKS: dict[str, PeakKind] = {
    "peak_gib": "allocated",
    "allocated_gib": "allocated",
    "reserved_gib": "reserved",
    "device_gib": "device",
}
_STEPS = {"step_ms": 1e-3, "step_s": 1.0}
_SWITCH = {"on": True, "off": False}
_EXAMPLE = "strategy=zero2,micro_batch=8,step_ms=812,peak_gib=31.4"


@dataclasses.dataclass(frozen=True)
class RunText:
    """A run of `--measured`; fields that its text does not name are None."""

    text: str
    strategy: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    seq_length: int | None = None
    checkpointing: bool | None = None
    step_s: float | None = None
    peak_bytes: float | None = None
    peak_kind: PeakKind = "allocated"

    def measure(self, request: Request) -> MeasuredRun:
        """Return the run of a request with these figures."""
        return MeasuredRun(f"--measured {self.text}", request, self.step_s, self.peak_bytes, self.peak_kind)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of measured runs."""
    add = parser.add_argument
    run = f"a measured run of this model and hardware: {_EXAMPLE}; also accumulation, seq_length, checkpointing=on,"
    run += " step_s, reserved_gib, device_gib (nvidia-smi); repeatable"
    add("--measured", action="append", default=[], type=_parse_run, metavar="RUN", help=run)
    file = "a receipt.json of this model and hardware (docs/receipt.md); repeatable"
    add("--calibrate", action="append", default=[], metavar="FILE", help=file)


def _parse_run(text: str) -> RunText:
    """Return the run of a text; raise ArgumentTypeError for a wrong one."""
    values: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        try:
            fields = _parse_item(key, value)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{item!r} is not part of a run such as {_EXAMPLE}") from None
        if repeated := fields.keys() & values.keys():
            raise argparse.ArgumentTypeError(f"{text!r} has two figures for {repeated.pop()}")
        values |= fields
    return RunText(text, **values)


def _parse_item(key: str, value: str) -> dict[str, Any]:
    """Return the fields that one item gives; raise ValueError or KeyError for a wrong one."""
    if key == "strategy":
        return {"strategy": value}
    if key in ("micro_batch", "accumulation"):
        return {key: parse_int(value)}
    if key == "seq_length":
        return {key: parse_tokens(value)}
    if key == "checkpointing":
        return {key: _SWITCH[value]}
    if key in _STEPS:
        return {"step_s": real(value) * _STEPS[key]}
    return {"peak_bytes": real(value) * GIB, "peak_kind": _PEAKS[key]}


def collect_runs(
    options: argparse.Namespace, make_request: Callable[[RunText], Request], read_run: ReadRun | None
) -> list[PredictedRun]:
    """Return the measured runs of the flags with their predictions; raise UserError if one of them cannot be."""
    runs = [text.measure(make_request(text)) for text in options.measured]
    if options.calibrate and read_run is None:
        raise UserError("--calibrate reads a file, and there is none here", "use --measured")
    runs += [read_run(name) for name in options.calibrate if read_run is not None]
    for run in runs:
        check_run(run)
    return [PredictedRun.predict(run) for run in runs]


def correct(question: Request, runs: Sequence[PredictedRun]) -> SetupCorrection | None:
    """Return the correction of a question's predictions; None without a run. Raise UserError for a run of another
    setup."""
    for run in runs:
        check_setup(run.run, question)
    return make_correction(runs) if runs else None
