"""Time and price of a whole training: of the steps that its tokens or samples take."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from typing import Any, Literal

from study.config.errors import UserError
from study.config.text import rounded
from study.predictor import time as timing
from study.predictor.intervals import Ends, ends_text, is_known
from study.predictor.request import Request, StepTime

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
# Below a bound in seconds, the unit of a duration.
_DURATIONS = ((2 * _HOUR_S, _MINUTE_S, "minutes"), (3 * _DAY_S, _HOUR_S, "hours"), (math.inf, _DAY_S, "days"))


def parse_count(text: str) -> float:
    """Parse a number of tokens or samples, as an argparse type: 15B, 300M, 50k, 1.5T, 2e9 or 50000."""
    plain = text.strip().replace(",", "").replace("_", "")
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) *([kmbt]?)", plain, re.IGNORECASE)
    count = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= count < 1e18:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} cannot be read: write 15B, 300M, 50k or 50000")
    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a whole training."""
    tokens = "tokens of the whole training, such as 15B: adds its time in steps, and GPU hours"
    parser.add_argument("--train_tokens", type=parse_count, metavar="T", help=tokens)
    samples = "the same in samples of --seq_length tokens, of all epochs together: 3 epochs of 50k are 150k"
    parser.add_argument("--train_samples", type=parse_count, metavar="N", help=samples)


@dataclasses.dataclass(frozen=True)
class Amount:
    """The tokens or samples of a whole training."""

    count: float
    unit: Literal["tokens", "samples"]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Amount | None:
        """Return the amount of a parsed command line, None without one; raise UserError for two."""
        tokens, samples = options.train_tokens, options.train_samples
        if tokens is not None and samples is not None:
            raise UserError("--train_tokens and --train_samples are both given", "leave one of them out")
        if tokens is not None:
            return cls(tokens, "tokens")
        return None if samples is None else cls(samples, "samples")

    def __str__(self) -> str:
        for unit in "tbmk":
            if self.count >= _UNITS[unit]:
                return f"{self.count / _UNITS[unit]:.4g} {unit if unit == 'k' else unit.upper()} {self.unit}"
        return f"{self.count:.4g} {self.unit}"

    def tokens(self, request: Request) -> float:
        """Return the tokens that are trained, with the request's length of a sample."""
        return self.count * (request.sequence_length if self.unit == "samples" else 1)


@dataclasses.dataclass(frozen=True)
class WholeTraining:
    """The predicted steps of a training, without evaluation, saving and waiting for data."""

    amount: Amount
    steps: int
    seconds: float
    # Ends of the seconds, by those of a step; None if too few measurements validate it.
    ends: Ends | None
    gpus: int
    price_per_gpu_hour: float | None = None

    @classmethod
    def predict(cls, amount: Amount, request: Request, time: StepTime, price: float | None = None) -> WholeTraining:
        """Return the training of an amount with the steps of a request."""
        tokens, speed = amount.tokens(request), time.tokens_per_s_per_gpu.value * request.box.ranks
        ends = timing.speed_ends(request, time)
        return cls(
            amount,
            math.ceil(round(tokens / (speed * time.step_s.value), 6)),
            tokens / speed,
            ends and (tokens / ends[1], tokens / ends[0]),
            request.box.ranks,
            price,
        )

    @property
    def gpu_hours(self) -> float:
        return self.seconds / _HOUR_S * self.gpus

    @property
    def price(self) -> float | None:
        """The price of all GPU hours; None if that of one is not given."""
        return None if self.price_per_gpu_hour is None else self.gpu_hours * self.price_per_gpu_hour

    @property
    def line(self) -> str:
        """Time, steps, GPU hours and price."""
        unit_s, unit = next(row[1:] for row in _DURATIONS if self.seconds < row[0])
        figures = [
            f"{rounded(self.seconds / unit_s)} {unit}{self._range(1 / unit_s)} of steps alone",
            f"{self.steps:,} step{'s' * (self.steps != 1)}",
            f"{rounded(self.gpu_hours)} GPU hours",
        ]
        if self.price is not None:
            figures.append(f"price {rounded(self.price)}{self._range(self.price / self.seconds)}")
        return f"{self.amount}: {', '.join(figures)}"

    def _range(self, factor: float) -> str:
        """Return the ends of the seconds times a factor in brackets, or that they are not known well enough."""
        return ends_text(self.seconds, self.ends, lambda seconds: rounded(seconds * factor))

    @property
    def document(self) -> dict[str, Any]:
        """The training as in the document of --json."""
        return {
            self.amount.unit: self.amount.count,
            "steps": self.steps,
            "seconds": self.seconds,
            "seconds_ends": self.ends,
            "within_factor_2": is_known(self.seconds, self.ends),
            "gpu_hours": self.gpu_hours,
            "price": self.price,
        }
