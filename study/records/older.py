"""Facts that older records state only in words: the one place that reads them from these words.

Newer records have keys for them: `cause` and `not_finite_step` of status.json, and `nvme_param_dtype` of engine.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from study.records.schema import EndCause

# By cause: reasons of study/train.py and of a sweep.
_CAUSES: tuple[tuple[EndCause, re.Pattern[str]], ...] = (
    ("device memory", re.compile(r"^the device's memory ran out")),
    (
        "not finite",
        re.compile(r"the (evaluation )?loss is (NaN|infinite|not a num)|gradients (are|were) not finite"),
    ),
    ("not installable", re.compile(r" is not installable: ")),
)
_NOT_FINITE_STEP = re.compile(r"the loss is (?:NaN|infinite) at step (\d+)")
_ON_NVME = re.compile(r"DeepSpeed keeps the parameters on NVMe as (\w+): they are rounded every step")
# A fact of the stage and the ranks.
_ONE_RANK = re.compile(r"with one rank stage \d shards nothing")


class EndFacts(NamedTuple):
    """Facts in a reason; None for a fact that it does not have."""

    cause: EndCause | None
    not_finite_step: int | None


def read_reason(reason: str | None) -> EndFacts:
    """Return the facts of an older record's reason."""
    text = reason or ""
    step = _NOT_FINITE_STEP.search(text)
    cause = next((cause for cause, words in _CAUSES if words.search(text)), None)
    return EndFacts(cause, int(step[1]) if step else None)


class WarningFacts(NamedTuple):
    """Warnings without those that are facts of other columns, and the type of parameters on NVMe."""

    warnings: list[str]
    nvme_param_dtype: str | None


def read_warnings(warnings: Iterable[str]) -> WarningFacts:
    """Return the facts of an older record's warnings."""
    remaining: list[str] = []
    nvme_param_dtype = None
    for warning in warnings:
        if on_nvme := _ON_NVME.fullmatch(warning):
            nvme_param_dtype = on_nvme[1]
        elif not _ONE_RANK.fullmatch(warning):
            remaining.append(warning)
    return WarningFacts(remaining, nvme_param_dtype)
