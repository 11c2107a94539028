"""Features for longer samples: the part of the memory that each of them divides or removes, and the peak with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from study.advisor.advise import Advice, AdviceRequest, Option, candidates
from study.advisor.fitted import fit_settings
from study.advisor.long_features import (
    HOST,
    LOSS,
    RANKS,
    SETTINGS,
    TILES,
    allows_features,
    divides_heads,
    has_window,
    unpredicted_reasons,
)
from study.config.printing import TextTable
from study.config.strategies import Strategy
from study.config.text import rounded, rounded_seconds
from study.host.memory import GIB
from study.predictor import time as timing
from study.predictor.losses import WITHOUT_LOGITS
from study.predictor.memory import checkpoints_on_host_bytes, predict_memory
from study.predictor.micro_batch import predict_activations
from study.predictor.request import MemoryUse, Request

# Parts of the peak that grow with the tokens of a sample.
_PARTS_OF_A_SAMPLE = ("logits", "activations", "attention")
# Lengths are multiples of this one, up to the largest.
_STEP_TOKENS, _MAX_STEPS = 1024, 2**15
_COLUMNS = (
    "with",
    "reduces",
    "strategy",
    "ranks of\na sample",
    "peak\nGiB",
    "90 %\nbound",
    "host\nGiB",
    "longest,\ntokens",
)
_REDUCES = {
    LOSS: "logits",
    RANKS: "activations, logits",
    HOST: "inputs of recomputed layers",
    TILES: "temporaries of the MLP",
}


@dataclasses.dataclass(frozen=True)
class LongerRow:
    """One feature with those of the rows before it, under the simplest strategy whose 90 % bound fits."""

    # None: without a feature.
    feature: str | None
    request: Request
    memory: MemoryUse
    # The most tokens of a sample whose bound fits; 0 if none does.
    longest: int

    @property
    def strategy(self) -> str:
        return self.request.strategy.name

    @property
    def is_safe(self) -> bool:
        """Whether the upper bound (90 %) of the predicted peak fits."""
        return timing.fits(self.memory, self.request.box, at_upper=True)

    @property
    def document(self) -> dict[str, Any]:
        """The row as in the document of --json."""
        return {
            "feature": self.feature,
            "reduces": self.feature and _REDUCES[self.feature],
            "settings": self.feature and SETTINGS[self.feature],
            "strategy": self.strategy,
            "sequence_ranks": self.request.sequence_ranks,
            "fits": timing.fits(self.memory, self.request.box),
            "sure_to_fit": self.is_safe,
            "device_bytes": timing.device_bytes(self.memory),
            "bound_bytes": timing.device_bytes(self.memory, at_upper=True),
            "host_bytes_per_node": self.memory.host_peak.value,
            "longest": self.longest,
        }


@dataclasses.dataclass(frozen=True)
class _Features:
    """A combination of features."""

    has_loss: bool = False
    over_ranks: bool = False
    on_host: bool = False
    tiled: bool = False

    def request(self, question: AdviceRequest, strategy: Strategy, ranks: int, length: int) -> Request:
        """Return the request of a sample, whose tokens are divided over ranks."""
        trainer = question.trainer
        if self.has_loss:
            trainer = dataclasses.replace(trainer, loss_kernel="liger", keeps_outputs=False)
        divided = dataclasses.replace(question, sequence_length=length // ranks, trainer=trainer)
        samples = max(1, round((question.global_batch or 0) * ranks / question.box.ranks))
        request = divided.configuration(strategy, 1, samples, checkpointing=True)
        return dataclasses.replace(
            request, sequence_ranks=ranks, checkpoints_on_host=self.on_host, tiled_mlp=self.tiled
        )


def longer_rows(advice: Advice) -> list[LongerRow]:
    """Return the features that make room for longer samples, each row with those of the rows before it.

    Empty unless one sample's tensors fill the memory, and for models and programs whose features are not predicted.
    """
    question = advice.question
    if not (_is_predicted(question) and _is_full_of_one_sample(advice)):
        return []
    steps: list[tuple[str | None, _Features]] = [(None, _Features())]
    for name, field in ((LOSS, "has_loss"), (RANKS, "over_ranks"), (HOST, "on_host"), (TILES, "tiled")):
        if _has_use(name, question):
            steps.append((name, dataclasses.replace(steps[-1][1], **{field: True})))
    rows = list[LongerRow]()
    for feature, features in steps:
        # Ranks that share a sample may need no offload: the strategy is chosen with them, and stays.
        is_settled = feature in (HOST, TILES) and bool(rows) and rows[-1].is_safe
        row = _same_row(rows[-1], question, feature, features) if is_settled else _row(question, feature, features)
        rows += [] if row is None else [row]
    return rows


def _is_predicted(question: AdviceRequest) -> bool:
    """Whether the parts of a sample are counted by the table of families, for a program of one model."""
    return next(unpredicted_reasons(question), None) is None


def _is_full_of_one_sample(advice: Advice) -> bool:
    """Whether one sample's tensors are the largest part of the peak, and not even recomputation makes room for two."""
    option = advice.best or min(advice.options, key=lambda option: timing.device_bytes(option.memory))
    parts = option.memory.device_parts
    sample_bytes = sum(parts[name] for name in _PARTS_OF_A_SAMPLE)
    if sample_bytes <= max(size for name, size in parts.items() if name not in _PARTS_OF_A_SAMPLE):
        return False
    return advice.best is None or (option.request.micro_batch == 1 and not _has_room_for_two(option))


def _has_room_for_two(option: Option) -> bool:
    larger = dataclasses.replace(option.request, micro_batch=2, gradient_checkpointing=True)
    return timing.fits(predict_memory(larger), option.request.box, at_upper=True)


def _has_use(feature: str, question: AdviceRequest) -> bool:
    """Whether a feature changes the memory of a request, and its program has it."""
    if feature == LOSS:
        return question.trainer.loss_kernel not in WITHOUT_LOGITS
    if feature == RANKS:
        return not has_window(question.shape, question.sequence_length) and any(_sequence_ranks(question, True))
    # Adapters of a tile are not counted.
    return feature != TILES or question.shape.lora_rank is None


def _sequence_ranks(question: AdviceRequest, over_ranks: bool) -> Iterator[int]:
    """Yield the numbers of ranks that can divide a sample: within a machine, or whole machines."""
    if not over_ranks:
        yield 1
        return
    shape, box = question.shape, question.box
    for ranks in range(2, box.ranks + 1):
        in_machines = box.gpus_per_node % ranks == 0 or ranks % box.gpus_per_node == 0
        if (
            divides_heads(shape, ranks)
            and in_machines
            and box.ranks % ranks == 0
            and question.sequence_length % ranks == 0
        ):
            yield ranks


def _strategies(question: AdviceRequest, over_ranks: bool) -> Iterator[Strategy]:
    """Yield the strategies of a row, the simplest first."""
    for name in candidates(question):
        strategy = question.find_strategy(name)
        if allows_features(strategy, over_ranks):
            yield strategy


def _row(question: AdviceRequest, feature: str | None, features: _Features) -> LongerRow | None:
    """Return the first configuration whose bound fits, or else that with the lowest one; None without any."""
    rows = list[LongerRow]()
    for strategy in sorted(_strategies(question, features.over_ranks), key=lambda strategy: strategy.offloads):
        for ranks in _sequence_ranks(question, features.over_ranks):
            row = _configured(question, feature, features.request(question, strategy, ranks, question.sequence_length))
            if row.is_safe:
                return _with_longest(row, question, features)
            rows.append(row)
    if not rows:
        return None
    lowest = min(rows, key=lambda row: timing.excess_bytes(row.memory, question.box, at_upper=True))
    return _with_longest(lowest, question, features)


def _same_row(above: LongerRow, question: AdviceRequest, feature: str | None, features: _Features) -> LongerRow:
    """Return a row of the strategy and the ranks of the one above it."""
    strategy, ranks = question.find_strategy(above.strategy), above.request.sequence_ranks
    request = features.request(question, strategy, ranks, question.sequence_length)
    return _with_longest(_configured(question, feature, request), question, features)


def _configured(question: AdviceRequest, feature: str | None, request: Request) -> LongerRow:
    fitted = fit_settings(request)
    return LongerRow(feature, fitted, predict_memory(fitted), longest=0)


def _with_longest(row: LongerRow, question: AdviceRequest, features: _Features) -> LongerRow:
    return dataclasses.replace(row, longest=_longest(question, features, row.request))


def _longest(question: AdviceRequest, features: _Features, chosen: Request) -> int:
    """Return the most tokens with which the bound of a row's strategy fits, a multiple of `_STEP_TOKENS`."""
    ranks = chosen.sequence_ranks
    step = math.lcm(_STEP_TOKENS, ranks)

    def fits(count: int) -> bool:
        request = features.request(question, question.find_strategy(chosen.strategy.name), ranks, count * step)
        return timing.fits(predict_memory(fit_settings(request)), question.box, at_upper=True)

    low, high = 0, 1
    while high < _MAX_STEPS and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 128):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


@dataclasses.dataclass(frozen=True)
class LongerSamples:
    """Features that make room for longer samples, with their settings."""

    tokens: int
    rows: Sequence[LongerRow]
    # No peak is predicted, and one sample fills the memory all the same: the settings are named alone.
    is_unpredicted: bool
    # Bytes and time of checkpoints on the host, if a row has them.
    copies: Sequence[str]

    @classmethod
    def find(cls, advice: Advice) -> LongerSamples:
        """Return the features for the question of some advice."""
        question, rows = advice.question, longer_rows(advice)
        is_full = not rows and question.shape.family == "causal-lm" and _is_full_of_one_sample(advice)
        copies = [_copies_line(row.request) for row in rows if row.feature == HOST]
        return cls(question.sequence_length, rows, is_full, copies)

    def lines(self) -> Iterator[str | TextTable]:
        """Yield the table of rows, and the settings of their features; without rows the settings alone."""
        if self.rows:
            length = f"at {self.tokens:,} tokens, micro-batch 1 and checkpointing"
            yield f"\nfor longer samples, {length}, each row with those above it (no speed is predicted):"
            yield TextTable(_COLUMNS, [_texts(row) for row in self.rows])
        elif self.is_unpredicted:
            yield "for longer samples, without a predicted peak for this model or program:"
        else:
            return
        for feature in [row.feature for row in self.rows] or SETTINGS:
            if feature is not None:
                yield f"{feature}: {SETTINGS[feature]}"
        yield from self.copies


def _texts(row: LongerRow) -> list[str]:
    return [
        "checkpointing alone" if row.feature is None else f"+ {row.feature}",
        "" if row.feature is None else _REDUCES[row.feature],
        row.strategy,
        f"{row.request.sequence_ranks}",
        rounded(timing.device_bytes(row.memory) / GIB),
        rounded(timing.device_bytes(row.memory, at_upper=True) / GIB),
        rounded(row.memory.host_peak.value / GIB),
        f"{row.longest:,}" if row.longest else "-",
    ]


def _copies_line(request: Request) -> str:
    """Return the bytes and the time of a micro-batch's checkpoints on their way to the host and back."""
    size, device = checkpoints_on_host_bytes(request), request.box.device
    text = f"{rounded(size / GIB)} GiB of pinned memory a rank"
    if device.pcie_gb_per_s is None:
        return f"{HOST} take {text}"
    copied = 2 * request.shape.layers * predict_activations(request).checkpoint
    duration = rounded_seconds(copied / (device.pcie_gb_per_s * 1e9))
    return f"{HOST} take {text}, and PCIe copies those of a micro-batch out and back in {duration}"
