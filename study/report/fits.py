"""What fits: each search's answer, read off how its probes ended, as the sweep itself reads it."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pandas as pd

from study.report.arms import NAN
from study.report.finding import Finding
from study.report.frames import Records, probes
from study.report.workloads import strategy_order
from study.sweep.search import Bracket, examine

NO_PROBES = "No run here was a probe of a search: nobody asked these records for the largest that fits."
QUESTION = "What is the largest that fits?"
_MICRO_BATCH = "largest_micro_batch"
_VALUE = {_MICRO_BATCH: "per_device_train_batch_size", "largest_model": "model_name_or_path"}
_WHAT = {_MICRO_BATCH: "largest micro-batch", "largest_model": "largest model"}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fit:
    """One search: its probes by their place on the ladder, and what they leave open."""

    axis: str
    last: int
    rungs: dict[int, Row]
    bracket: Bracket

    @property
    def any(self) -> Row:
        return next(iter(self.rungs.values()))

    @property
    def subject(self) -> str:
        """What its answer may be compared with: the same ladder on the same task."""
        model = f", {self.any['model_name_or_path']}" if self.axis == _MICRO_BATCH else ""
        return f"{self.any['task']}{model}: {_WHAT[self.axis]}"

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
    def is_open(self) -> bool:
        """More might fit: the ladder ended first, or the search did."""
        return self.bracket.fits == self.last or self.bracket.next is not None or self.bracket.stopped_by is not None

    @property
    def answer(self) -> str:
        if self.largest is None:
            return "-" if self.too_large is None else f"none, {self.value(self.too_large)} is too large"
        return f"{'at least ' if self.is_open else ''}{self.value(self.largest)}"

    @property
    def size(self) -> float:
        """What a bar of it is long: samples, or millions of parameters; 0 where nothing fits."""
        if self.largest is None:
            return 0.0
        if self.axis == _MICRO_BATCH:
            return float(self.largest[_VALUE[self.axis]])
        held = self.largest["model_parameters"]
        return NAN if pd.isna(held) else held / 1e6


def fits(records: Records) -> list[Fit]:
    grouped: defaultdict[str, dict[int, Row]] = defaultdict(dict)
    about: dict[str, Row] = {}
    for row in probes(records).runs.to_dict("records"):
        search = json.loads(row["search"])
        grouped[search["id"]][search["place"]] = row
        about[search["id"]] = search
    found = []
    for name, rungs in grouped.items():
        # What was cut off says nothing.
        states = {place: row["status_state"] for place, row in rungs.items() if row["status_state"] != "interrupted"}
        bracket = examine(states, about[name]["last"])
        found.append(Fit(about[name]["axis"], about[name]["last"], dict(sorted(rungs.items())), bracket))
    return sorted(
        found, key=lambda fit: (fit.subject, fit.cap_gib or float("inf"), strategy_order(fit.any["strategy"]), fit.arm)
    )


def fits_table(records: Records) -> pd.DataFrame:
    found = fits(records)
    rows = []
    for fit in found:
        largest, too_large = fit.largest, fit.too_large
        rows.append(
            {
                "Workload": fit.subject,
                "Strategy": fit.arm,
                "Held to": fit.within,
                "Precision": fit.any["precision"],
                "Largest that fits": fit.answer,
                "x plain": _against_plain(fit, found),
                "Peak there, GiB": NAN if largest is None else largest["peak_memory_gib_reserved"],
                "Host peak there, GiB": NAN if largest is None else largest["host_peak_rss_gib"],
                "Smallest that does not": fit.value(too_large) or "-",
                "Why not": "-" if too_large is None else too_large["status_reason"],
                "Probes": len(fit.rungs),
            }
        )
    return pd.DataFrame(rows)


def _against_plain(fit: Fit, found: Sequence[Fit]) -> float:
    """A share of two lower bounds would be none."""
    plain = [each for each in found if _beside(each) == _beside(fit) and each.arm == "single" and each.size > 0]
    return NAN if not plain or plain[0].is_open or fit.is_open else fit.size / plain[0].size


def _beside(fit: Fit) -> tuple[Any, ...]:
    return fit.subject, fit.cap_gib, fit.any["precision"], fit.any["seq_length"], fit.any["repeat"]


def probes_table(records: Records) -> pd.DataFrame:
    """Every probe as it ended: one that ran out of memory is a row like any other."""
    return pd.DataFrame(
        [
            {
                "Workload": fit.subject,
                "Strategy": fit.arm,
                "Held to": fit.within,
                "Tried": fit.value(row),
                "Outcome": row["status_state"],
                "Peak, GiB": row["peak_memory_gib_reserved"],
                "Host peak, GiB": row["host_peak_rss_gib"],
                "Why": row["status_reason"] or "-",
            }
            for fit in fits(records)
            for row in fit.rungs.values()
        ]
    )


def fits_finding(records: Records) -> list[Finding]:
    found = fits(records)
    if not found:
        return []
    lines: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for fit in found:
        lines[fit.subject, fit.within].append(f"`{fit.arm}` {fit.answer}")
    answer = "\n".join(f"{subject} within {within}: {', '.join(said)}." for (subject, within), said in lines.items())
    details = [
        f"{fit.subject} within {fit.within}, `{fit.arm}`: {fit.value(row)} ended {row['status_state']}"
        f" ({row['status_reason']})."
        for fit in found
        if (row := fit.too_large) is not None
    ]
    against = [
        f"{fit.subject} within {fit.within}, `{fit.arm}`: a larger one did fit, so what fits does not fit in order."
        for fit in found
        if fit.bracket.fits_against_the_order
    ]
    return [Finding(QUESTION, answer, (*details, *against))]
