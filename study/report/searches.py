"""What fits: each search's answer, read off how its probes ended, as the sweep itself reads it."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from typing import Any

import pandas as pd

from study.records.arms import NAN
from study.records.frames import Records, probes
from study.records.workloads import strategy_order, word_for
from study.sweep.search import Bracket, WhatFits, examine
from study.sweep.verdict import CellState

_MICRO_BATCH = "largest_micro_batch"
_VALUE = {_MICRO_BATCH: "per_device_train_batch_size", "largest_model": "model_name_or_path"}
# Searches that differ in one of these are not of one kind.
_SETTINGS = (
    "precision", "seq_length", "world_size", "per_device_train_batch_size", "gradient_checkpointing", "torch_compile",
    "attn_implementation", "data", "weights", "peft", "optimizer", "bf16_states",
)  # fmt: skip
_WHAT = {_MICRO_BATCH: "largest micro-batch", "largest_model": "largest model"}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fit:
    """One search: its probes by their place on the ladder, and what they leave open."""

    id: str
    axis: str
    last: int
    rungs: dict[int, Row]
    bracket: Bracket
    # What it is about, and what tells it from other searches of its kind, beside the strategy and the memory limit.
    subject: str

    @property
    def any(self) -> Row:
        return next(iter(self.rungs.values()))

    @property
    def repeat(self) -> str:
        return self.id.rpartition("-r")[2]

    @property
    def cap_gib(self) -> float | None:
        cap = self.any["device_memory_cap_gib"]
        return None if pd.isna(cap) else float(cap)

    @property
    def within(self) -> str:
        return "the whole device" if self.cap_gib is None else f"{self.cap_gib:g} GiB"

    @property
    def arm(self) -> str:
        row = self.any
        parts = [row["strategy"], "" if row["trainer"] in (None, "study") else row["trainer"],
                 "virtual" if row["virtual"] else "", *json.loads(row["engine_override"] or "[]")]  # fmt: skip
        return ", ".join(part for part in parts if part)

    @property
    def largest(self) -> Row | None:
        return None if self.bracket.fits is None else self.rungs[self.bracket.fits]

    @property
    def too_large(self) -> Row | None:
        return None if self.bracket.too_large is None else self.rungs[self.bracket.too_large]

    def value(self, row: Row | None) -> str:
        return "" if row is None else f"{row[_VALUE[self.axis]]}"

    @property
    def what_fits(self) -> WhatFits:
        def state_at(place: int) -> CellState:
            return CellState(self.rungs[place]["status_state"], self.rungs[place]["status_reason"] or "")

        return WhatFits(self.bracket, self.last, lambda place: self.value(self.rungs[place]), state_at)

    @property
    def size(self) -> float:
        """How long its bar is: samples, or millions of parameters; 0 where nothing fits, NaN where nobody knows."""
        if self.largest is None:
            return 0.0 if self.bracket.too_large == 0 else NAN
        if self.axis == _MICRO_BATCH:
            return float(self.largest[_VALUE[self.axis]])
        held = self.largest["model_parameters"]
        return NAN if pd.isna(held) else held / 1e6


def fits(records: Records) -> list[Fit]:
    rungs: defaultdict[str, dict[int, Row]] = defaultdict(dict)
    about: dict[str, Row] = {}
    for row in probes(records).runs.to_dict("records"):
        for search in json.loads(row["searches"]):
            rungs[search["id"]][search["place"]] = row
            about[search["id"]] = search
    kinds: defaultdict[str, list[tuple[Row, Row]]] = defaultdict(list)
    for name, search in about.items():
        row = rungs[name][min(rungs[name])]
        model = f", {row['model_name_or_path']}" if search["axis"] == _MICRO_BATCH else ""
        kinds[f"{row['task']}{model}: {_WHAT[search['axis']]}"].append((search, row))
    found = []
    for kind, searches in kinds.items():
        settings = [key for key in _SETTINGS if key != _VALUE[searches[0][0]["axis"]]]
        differing = [key for key in settings if len({str(row[key]) for _, row in searches}) > 1]
        for search, row in searches:
            words = [word_for(key, row[key]) for key in differing if not pd.isna(row[key])]
            found.append(_fit(search, rungs[search["id"]], ", ".join([kind, *words])))
    return sorted(found, key=lambda fit: (
        fit.subject, fit.cap_gib or float("inf"), strategy_order(fit.any["strategy"]), fit.arm, fit.id,
    ))  # fmt: skip


def _fit(search: Row, rungs: dict[int, Row], subject: str) -> Fit:
    # What was cut off says nothing.
    states = {place: row["status_state"] for place, row in rungs.items() if row["status_state"] != "interrupted"}
    bracket = examine(states, search["last"])
    # The search may have begun elsewhere: where it stopped is told by the probe, not by what would come next from here.
    low, high = (-1 if bracket.fits is None else bracket.fits), bracket.too_large or search["last"] + 1
    stopped = [place for place, state in states.items() if low < place < high and state not in ("ok", "oom")]
    if bracket.next is not None and stopped:
        bracket = dataclasses.replace(bracket, next=None, stopped_by=min(stopped))
    return Fit(search["id"], search["axis"], search["last"], dict(sorted(rungs.items())), bracket, subject)
