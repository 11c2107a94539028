"""The largest micro-batch or model that fits, from the outcomes of each search's probes."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pandas as pd

from study.records.frames import Records, probe_runs
from study.records.outcome import Outcome
from study.records.strategy_runs import NAN
from study.records.workloads import data_name, format_setting, strategy_order
from study.report.document import Answer, Question
from study.report.facts import Headline, caption
from study.sweep.search import SearchAnswer, find_answer

_MICRO_BATCH = "largest_micro_batch"
_VALUE = {_MICRO_BATCH: "per_device_train_batch_size", "largest_model": "model_name_or_path"}
_WHAT = {_MICRO_BATCH: "largest micro-batch", "largest_model": "largest model"}
# Settings that distinguish kinds of searches.
_SETTINGS = (
    "precision",
    "seq_length",
    "world_size",
    "per_device_train_batch_size",
    "gradient_checkpointing",
    "torch_compile",
    "attn_implementation",
    "data",
    "weights",
    "peft",
    "optimizer",
    "bf16_states",
)
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fit:
    """One search: its probes by their position on the ladder, and the resulting answer."""

    id: str
    axis: str
    rungs: dict[int, Row]
    what_fits: SearchAnswer
    # The model, and the settings other than strategy and memory limit that differ between searches of this kind.
    subject: str

    @property
    def probe(self) -> Row:
        """Record of one probe, for the settings that all of them share."""
        return next(iter(self.rungs.values()))

    @property
    def cap_gib(self) -> float | None:
        """Memory limit in GiB; None without a limit."""
        cap = self.probe["device_memory_cap_gib"]
        return None if pd.isna(cap) else float(cap)

    @property
    def limit(self) -> str:
        return "the whole device" if self.cap_gib is None else f"{self.cap_gib:g} GiB"

    @property
    def arm(self) -> str:
        row = self.probe
        parts = [
            row["strategy"],
            "" if row["trainer"] in (None, "study") else row["trainer"],
            "virtual" if row["virtual"] else "",
            *json.loads(row["engine_override"] or "[]"),
        ]
        return ", ".join(part for part in parts if part)

    @property
    def largest(self) -> Row | None:
        """Return the record of the largest probe that fitted; None if none did."""
        return None if self.what_fits.fits is None else self.rungs[self.what_fits.fits]

    def value(self, place: int | None) -> str:
        return "" if place is None else f"{self.rungs[place][_VALUE[self.axis]]}"

    @property
    def size(self) -> float:
        """Return the length of its bar: samples, or millions of parameters; 0 if nothing fits, NaN if unknown."""
        if self.largest is None:
            return 0.0 if self.what_fits.too_large == 0 else NAN
        if self.axis == _MICRO_BATCH:
            return float(self.largest[_VALUE[self.axis]])
        return float(self.largest["model_parameters"]) / 1e6

    @property
    def label(self) -> str:
        """The largest value that fits, after a sign if nothing larger was tried."""
        at_least = "≥ " * (self.size > 0 and self.what_fits.is_open)
        return at_least + (self.value(self.what_fits.fits) or "none")

    def over_plain(self, results: Sequence[Fit]) -> float:
        """Return its size over that of plain training; NaN if either is only a lower bound."""

        def limits(fit: Fit) -> tuple[Any, ...]:
            return fit.subject, fit.cap_gib, fit.id.rpartition("-r")[2], fit.probe["devices"]

        plain = [fit for fit in results if limits(fit) == limits(self) and fit.arm == "single" and fit.size > 0]
        return NAN if not plain or plain[0].what_fits.is_open or self.what_fits.is_open else self.size / plain[0].size


@dataclasses.dataclass(frozen=True)
class _LadderSearch:
    """A search as the notes of its probes have it, with its probes by their position on the ladder."""

    about: Row
    rungs: dict[int, Row]

    @property
    def row(self) -> Row:
        """The smallest probe."""
        return self.rungs[min(self.rungs)]

    @property
    def kind(self) -> str:
        model = f"{self.row['model_name_or_path']}, " if self.about["axis"] == _MICRO_BATCH else ""
        return f"{model}{data_name(self.row)}: {_WHAT[self.about['axis']]}"

    def answer(self) -> SearchAnswer:
        """Return the answer of the probes so far."""
        # An interrupted probe is not evidence.
        states = {
            at: Outcome(row["status_state"], row["status_reason"] or "")
            for at, row in self.rungs.items()
            if row["status_state"] != "interrupted"
        }
        sizes = {at: row[_VALUE[self.about["axis"]]] for at, row in self.rungs.items()}
        result = find_answer(states, self.about["last"], sizes.__getitem__)
        # The search may have started at another rung: a failed probe ended it, so there is no next one.
        low = -1 if result.fits is None else result.fits
        high = result.too_large or self.about["last"] + 1
        stopped = [at for at, probe in states.items() if low < at < high and probe.state not in ("ok", "oom")]
        if result.next is not None and stopped:
            return dataclasses.replace(result, next=None, stopped_by=stopped[0])
        return result


def fits(records: Records) -> list[Fit]:
    """Return the searches, by workload, memory limit and strategy."""
    by_kind: defaultdict[str, list[_LadderSearch]] = defaultdict(list)
    for search in _searches(records):
        by_kind[search.kind].append(search)
    results = []
    for kind, searches in by_kind.items():
        differing = _differing_settings(searches)
        for search in searches:
            words = [format_setting(key, search.row[key]) for key in differing if not pd.isna(search.row[key])]
            subject = ", ".join([kind, *words])
            results.append(Fit(search.about["id"], search.about["axis"], search.rungs, search.answer(), subject))
    return sorted(
        results,
        key=lambda fit: (
            fit.subject,
            fit.cap_gib or float("inf"),
            strategy_order(fit.probe["strategy"]),
            fit.arm,
            fit.id,
        ),
    )


def _searches(records: Records) -> list[_LadderSearch]:
    rungs: defaultdict[str, dict[int, Row]] = defaultdict(dict)
    about: dict[str, Row] = {}
    for row in probe_runs(records).runs.to_dict("records"):
        for search in json.loads(row["searches"]):
            rungs[search["id"]][search["place"]] = row
            about[search["id"]] = search
    return [_LadderSearch(search, dict(sorted(rungs[name].items()))) for name, search in about.items()]


def _differing_settings(searches: Sequence[_LadderSearch]) -> list[str]:
    """Return the settings, other than the searched one, that differ between searches of a kind."""
    settings = [key for key in _SETTINGS if key != _VALUE[searches[0].about["axis"]]]
    return [key for key in settings if len({str(search.row[key]) for search in searches}) > 1]


def answer(records: Records) -> Answer | None:
    """Return the sizes that fit, by strategy and memory limit; None without a search."""
    if not (results := fits(records)):
        return None
    table = fits_table(records).pivot_table(
        "Largest that fits", ["Workload", "Strategy"], "Memory limit", aggfunc=", ".join, sort=False
    )
    notes = [
        caption("fits", "not_monotonic", names=f"`{fit.arm}` within {fit.limit}")
        for fit in results
        if fit.what_fits.non_monotonic_fits
    ]
    table = table.reset_index().rename_axis(columns=None).fillna("-")
    return Answer(table, (_headline(results),), tuple(notes))


def _headline(results: Sequence[Fit]) -> Headline:
    """Return the largest ratio to plain training; the number of searches if none has one."""
    ratios = [(ratio, fit) for fit in results if (ratio := fit.over_plain(results)) > 0 and fit.arm != "single"]
    if not ratios:
        return Headline(f"{len(results)}", caption("fits", "searches"))
    ratio, best = max(ratios, key=lambda entry: entry[0])
    within = f"{best.what_fits.answer} within {best.limit}"
    return Headline(f"{ratio:.1f} x", caption("fits", "ratio"), best.arm, bounds=within)


def sizes_table(records: Records) -> pd.DataFrame:
    """Return a row per search whose size is known, as the figure has it."""
    rows = [
        {
            "subject": fit.subject,
            "limit": fit.limit,
            "arm": fit.arm,
            "strategy": fit.probe["strategy"],
            "unit": "samples" if fit.axis == _MICRO_BATCH else "million parameters",
            "size": fit.size,
            "label": fit.label,
            "answer": fit.what_fits.answer,
        }
        for fit in fits(records)
    ]
    columns = ["subject", "limit", "arm", "strategy", "unit", "size", "label", "answer"]
    return pd.DataFrame(rows, columns=columns).dropna(subset=["size"])


def fits_table(records: Records) -> pd.DataFrame:
    """Return a row per search with the largest size that fits and the smallest that does not."""
    results = fits(records)
    return pd.DataFrame(
        {
            "Workload": fit.subject,
            "Strategy": fit.arm,
            "Memory limit": fit.limit,
            "Precision": fit.probe["precision"],
            "Largest that fits": fit.what_fits.answer,
            "x plain": fit.over_plain(results),
            "Peak there, GiB": NAN if fit.largest is None else fit.largest["peak_memory_gib_reserved"],
            "Host peak there, GiB": NAN if fit.largest is None else fit.largest["host_peak_rss_gib"],
            "Smallest that does not": fit.value(fit.what_fits.too_large) or "-",
            "Why not more": fit.what_fits.limiting_reason or "-",
            "Probes": len(fit.rungs),
        }
        for fit in results
    )


def probes_table(records: Records) -> pd.DataFrame:
    """Return a row per probe with its outcome, including those that ran out of memory."""
    return pd.DataFrame(
        {
            "Workload": fit.subject,
            "Strategy": fit.arm,
            "Memory limit": fit.limit,
            "Tried": fit.value(place),
            "Outcome": row["status_state"],
            "Peak, GiB": row["peak_memory_gib_reserved"],
            "Host peak, GiB": row["host_peak_rss_gib"],
            "Why": row["status_reason"] or "-",
        }
        for fit in fits(records)
        for place, row in fit.rungs.items()
    )


QUESTION = Question(
    "fits",
    "What is the largest that fits?",
    answer,
    tables={"fits": fits_table, "probes": probes_table},
    figures=("what_fits",),
    notebook="what_fits",
)
