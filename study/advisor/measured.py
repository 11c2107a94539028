"""`--measured` and `--calibrate`: runs that correct the predictions of their setup."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from study.config.errors import UserError, did_you_mean
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
_SWITCH = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
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
    # Of all ranks.
    tokens_per_s: float | None = None
    peak_bytes: float | None = None
    peak_kind: PeakKind = "allocated"

    def measure(self, request: Request) -> MeasuredRun:
        """Return the run of a request with these figures."""
        step_s = self.step_s
        if step_s is None and self.tokens_per_s is not None:
            samples = request.micro_batch * request.accumulation * request.data_ranks
            step_s = samples * request.sequence_length / self.tokens_per_s
        return MeasuredRun(f"--measured {self.text}", request, step_s, self.peak_bytes, self.peak_kind)

    def complete(self, sequence_length: int) -> str:
        """Return the text with the defaults of `study advise`; those of `study predict` are its flags."""
        assumed = {
            "micro_batch=1": self.micro_batch,
            "accumulation=1": self.accumulation,
            "checkpointing=off": self.checkpointing,
            f"seq_length={sequence_length}": self.seq_length,
        }
        return ",".join([self.text, *(item for item, value in assumed.items() if value is None)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of measured runs."""
    add = parser.add_argument
    run = f"a measured run of this model and hardware, such as {_EXAMPLE}; keys: {', '.join(_PARSERS)} (tokens/s of all"
    run += " ranks; device_gib: nvidia-smi); repeatable"
    add("--measured", action="append", default=[], type=_parse_run, metavar="RUN", help=run)
    file = "a receipt.json of this model and hardware (docs/receipt.md); repeatable"
    add("--calibrate", action="append", default=[], metavar="FILE", help=file)


def _parse_run(text: str) -> RunText:
    """Return the run of a text; raise ArgumentTypeError for a wrong one."""
    values: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        parse = _PARSERS.get(key)
        if parse is None:
            hint = did_you_mean(key, _PARSERS) or f"keys are {', '.join(_PARSERS)}; "
            raise argparse.ArgumentTypeError(f"{item!r} is no KEY=VALUE of a run: {hint}such as {_EXAMPLE}")
        try:
            fields = parse(value)
        except argparse.ArgumentTypeError as error:
            unit = "; the unit is in the key: step_s=1.9, step_ms=812" if key in _STEPS else ""
            raise argparse.ArgumentTypeError(f"{key}: {error}{unit}") from None
        if repeated := fields.keys() & values.keys():
            raise argparse.ArgumentTypeError(f"{text!r} has two figures for {repeated.pop()}")
        values |= fields
    if {"step_s", "tokens_per_s"} <= values.keys():
        raise argparse.ArgumentTypeError(f"{text!r} has a step and tokens_per_s, which are one figure")
    return RunText(text, **values)


def _parse_switch(value: str) -> dict[str, Any]:
    if value.lower() not in _SWITCH:
        raise argparse.ArgumentTypeError(f"{value!r} is neither on nor off")
    return {"checkpointing": _SWITCH[value.lower()]}


_PARSERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "strategy": lambda value: {"strategy": value},
    "micro_batch": lambda value: {"micro_batch": parse_int(value)},
    "accumulation": lambda value: {"accumulation": parse_int(value)},
    "checkpointing": _parse_switch,
    "gradient_checkpointing": _parse_switch,
    "seq_length": lambda value: {"seq_length": parse_tokens(value)},
    "step_s": lambda value: {"step_s": real(value)},
    "step_ms": lambda value: {"step_s": real(value) * _STEPS["step_ms"]},
    "tokens_per_s": lambda value: {"tokens_per_s": real(value)},
    **{
        name: lambda value, kind=kind: {"peak_bytes": real(value) * GIB, "peak_kind": kind}  # type: ignore[misc]
        for name, kind in _PEAKS.items()
    },
}


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Flags of measured runs."""

    measured: tuple[RunText, ...] = ()
    # Names of files.
    calibrate: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> RunFlags:
        """Return the flags of a parsed command line."""
        return cls(tuple(options.measured), tuple(options.calibrate))

    def collect(self, make_request: Callable[[RunText], Request], read_run: ReadRun | None) -> list[PredictedRun]:
        """Return the runs with their predictions; raise UserError if one of them cannot be."""
        runs = [text.measure(make_request(text)) for text in self.measured]
        if self.calibrate and read_run is None:
            raise UserError("--calibrate reads a file, and there is none here", "use --measured")
        runs += [read_run(name) for name in self.calibrate if read_run is not None]
        for run in runs:
            check_run(run)
        return [PredictedRun.predict(run) for run in runs]

    def flags(self, sequence_length: int) -> list[str]:
        """Return the words of a command line of `study predict`, whose runs have this length if they name none."""
        words = [word for run in self.measured for word in ("--measured", run.complete(sequence_length))]
        return words + [word for file in self.calibrate for word in ("--calibrate", file)]


def correct(question: Request, runs: Sequence[PredictedRun]) -> SetupCorrection | None:
    """Return the correction of a question's predictions; None without a run. Raise UserError for a run of another
    setup."""
    for run in runs:
        check_setup(run.run, question)
    return make_correction(runs) if runs else None
