"""Records that judge claims: model state and traffic of virtual ranks, and measurements of real runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from study.claims.verdicts import NoRecords, NotJudged
from study.host.memory import GIB
from study.records.fairness import differences_between
from study.records.frames import RUNS_FILE, STEPS_FILE, Records, read_parquet, real_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.statistics import Interval, PairTest, pair_tests, paired_ratio, pivot_by_seed
from study.records.virtual_summary import Summary, ring_bytes
from study.report.questions.fits import Fit, fits
from study.virtual.summaries import figure_or_nan, kind_bytes, rank_state_bytes, summaries

# The precision of the ZeRO paper, and of all virtual ranks that judge claims.
_PRECISION = "bf16-engine"
# Made by study/advisor/engine_keys.py, which is in the history up to 7ff8d96.
KEYS_FILE = "keys.json"
# Folder with the sessions of the published listing; `study autopsy report` writes the table of their trainings.
AUTOPSY, ARMS_FILE = "autopsy", "arms.parquet"
_COLUMNS = {"calls": "comm_calls_per_step", "forward": "forward_holds_bytes", "parameters": "model_parameters"}
_VIRTUAL_COLUMNS = {
    "sent": "sent_bytes_per_step",
    "calls": "comm_calls_per_step",
    "forward": "forward_holds_bytes",
}
_PEAKS = {"host_peak": "host_peak_rss_gib", "device_peak": "peak_memory_gib_allocated"}
# The invariants that each changed setting breaks intentionally.
_INTENDED = {
    "precision": ("precision", "parameter type"),
    "dropout": ("dropout",),
    "global_batch_size": ("global batch",),
    "seq_length": ("sequence length", "training data", "evaluation set"),
}
# The settings by which a check may select its runs.
SETTINGS = (
    "world_size",
    "model_name_or_path",
    "seq_length",
    "precision",
    "dropout",
    "global_batch_size",
    "micro_batch_size",
    "train_samples",
    "max_steps",
    "engine_override",
)


class Evidence:
    """The records of all reports in a folder; each report is read on first use."""

    def __init__(self, root: Path):
        self.root = root
        self._records: dict[str, Records] = {}

    def records(self, report: str) -> Records:
        """Return the records of one report; raise NoRecords if it has none."""
        if report not in self._records:
            if not all((self.root / report / name).is_file() for name in (RUNS_FILE, STEPS_FILE)):
                raise NoRecords(f"there are no records of {report}")
            self._records[report] = read_parquet(self.root / report)
        return self._records[report]

    def with_records(self, report: str, records: Records) -> Evidence:
        """Return evidence with one report's records replaced."""
        copy = Evidence(self.root)
        copy._records = self._records | {report: records}
        return copy

    def rank(self, report: str, model: str, strategy: str, ranks: int, setting: str) -> Summary:
        """Return one virtual rank, run with all layers or extrapolated from fewer, and the names of its runs."""
        key = (model, strategy, ranks, setting, _PRECISION)
        for rank in summaries(self.records(report)):
            if (rank["model"], rank["strategy"], rank["world_size"], rank["setting"], rank["precision"]) == key:
                return rank | {"runs": tuple(f"{report}/{run}" for run in rank["runs"])}
        raise NotJudged(f"has no {strategy} of {model} at {ranks} ranks", report)

    def pair(
        self,
        report: str,
        task: str,
        strategy: str,
        over: str,
        where: str = "",
        over_where: str = "",
        is_loss: bool = False,
    ) -> Pair:
        """Return the comparable runs of two strategies, seed by seed.

        Both come from the workload with the most common runs. With `over_where` they come from two workloads that
        differ only in that setting.
        """
        runs = _ended_runs(self.records(report), task)
        workload = None
        if over_where:
            treatment, control = _across(runs, strategy, over, where, over_where, not is_loss)
        else:
            fair = runs[runs["confounded_loss" if is_loss else "confounded"] == ""]
            treatment, control = _within(_with(fair, where), strategy, over)
            workload = fair[fair["workload_key"].isin(treatment["workload_key"])]
        if treatment.empty:
            at = f" with {where}" if where else ""
            raise NotJudged(f"has no fair pair of {strategy} and {over} in {task}{at}", report)
        return Pair(report, treatment, control, workload)

    def levels(
        self,
        report: str,
        task: str,
        strategy: str,
        over: str,
        figure: str,
        along: str,
        where: str,
        least: int,
        least_pairs: int,
    ) -> Levels:
        """Return the pairs at each value of a setting or model size with enough seeds, in ascending order."""
        runs = _with(_ended_runs(self.records(report), task), where)
        pairs = {}
        for level in sorted(runs.loc[runs["strategy"].isin([strategy, over]), along].dropna().unique()):
            with contextlib.suppress(NotJudged):
                pair = self.pair(report, task, strategy, over, f"{where} {along}={level:.0f}".strip())
                if len(pair.by_seed(figure)) >= least_pairs:
                    pairs[float(level)] = pair
        if len(pairs) < least:
            at = f"{least} values of {along} with {least_pairs} pairs of {strategy} and {over} each"
            raise NotJudged(f"{at} are needed, and {report} has {len(pairs) or 'none'}")
        return pairs

    def fit(self, report: str, task: str, strategy: str, cap_gib: float, precision: str) -> Fit:
        """Return the finished search for the largest micro-batch that fits."""
        for search in fits(self.records(report)):
            row = search.probe
            match = (row["task"], search.arm, search.cap_gib, row["precision"]) == (task, strategy, cap_gib, precision)
            if search.axis == "largest_micro_batch" and match:
                if search.what_fits.is_open:
                    raise NotJudged(f"has not found the largest of {strategy}: {search.what_fits.answer}", report)
                return search
        raise NotJudged(f"has no search of {strategy} in {task} under {cap_gib:g} GiB", report)

    @functools.cached_property
    def arms(self) -> pd.DataFrame:
        """The trainings of the autopsy's sessions, a row each: both `arm`s of a `session`, with its `kind`."""
        file = self.root / AUTOPSY / ARMS_FILE
        if not file.is_file():
            raise NotJudged(f"there is no {AUTOPSY}/{ARMS_FILE}")
        return pd.read_parquet(file)

    def keys(self, report: str) -> dict[str, Any]:
        """Return the effect of each setting on the engine, by the name of the probe."""
        file = self.root / report / KEYS_FILE
        if not file.is_file():
            raise NotJudged(f"there is no {report}/{KEYS_FILE}")
        return {probe["name"]: probe for probe in json.loads(file.read_text(encoding="utf-8"))["probes"]}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Runs of a strategy and of the one that it is compared with, which may be the same."""

    report: str
    treatment: pd.DataFrame
    control: pd.DataFrame
    # All fair runs of the workload that both are of; None if they are of two.
    workload: pd.DataFrame | None = None

    @property
    def records(self) -> tuple[str, ...]:
        """Names of all runs of the pair."""
        return tuple(f"{self.report}/{run}" for run in dict.fromkeys([*self.treatment["run"], *self.control["run"]]))

    @property
    def box(self) -> str:
        """Model, ranks and hardware of the runs, as text."""
        first = self.treatment.iloc[0]
        device = ", ".join(dict.fromkeys(json.loads(first["devices"]))) or "no GPU"
        ranks = int(self.treatment["world_size"].max())
        return f"{first['model_name_or_path']} on {ranks} rank{'s' if ranks > 1 else ''}, {first['cpu']}, {device}"

    @property
    def _both(self) -> pd.DataFrame:
        return pd.concat([self.treatment.assign(arm="mine"), self.control.assign(arm="its")])

    def ratio(self, figure: str) -> Interval:
        """Return the ratio of a figure, paired by seed."""
        return paired_ratio(pivot_by_seed(self._both, figure), "mine", "its")

    def test(self, figure: str) -> PairTest | None:
        """Return the test by which the report of these runs compares them, with the noise of all its strategies.

        None for runs of two workloads, and for losses, which a report compares pair by pair.
        """
        if self.workload is None or "loss" in figure:
            return None
        pair = (str(self.treatment["arm"].iloc[0]), str(self.control["arm"].iloc[0]))
        return pair_tests(pivot_by_seed(self.workload, figure), [pair]).get(pair)

    def by_seed(self, figure: str) -> pd.DataFrame:
        """Return a figure in columns `mine` and `its`, for the seeds that both have."""
        return pivot_by_seed(self._both, figure, np.asarray).reindex(columns=["mine", "its"]).dropna()

    def max_norm_difference(self, steps: pd.DataFrame) -> tuple[float, int]:
        """Return the largest relative difference of the gradient norms, and the number of seeds."""
        steps = steps[["run", "step", "grad_norm"]].astype({"run": str})
        treatment, control = (
            runs.drop_duplicates("seed")[["run", "seed"]]
            .merge(steps, on="run")
            .set_index(["seed", "step"])["grad_norm"]
            for runs in (self.treatment, self.control)
        )
        differences = (treatment / control - 1).abs().dropna()
        return float(differences.max()), differences.index.get_level_values("seed").nunique()


Levels = dict[float, Pair]


@functools.lru_cache(32)
def _ended_runs(records: Records, task: str) -> pd.DataFrame:
    runs = real_runs(records).runs
    return runs[(runs["status_state"] == "ok") & (runs["task"] == task)]


def _with(runs: pd.DataFrame, where: str) -> pd.DataFrame:
    """Select the runs with the settings of a check, `key=value key=value`; a later one replaces an earlier one."""
    for key, value in dict(item.split("=", 1) for item in where.split()).items():
        is_text = not pd.api.types.is_numeric_dtype(runs[key])
        runs = runs[runs[key] == value] if is_text else runs[(runs[key] == float(value)).fillna(False)]
    return runs


def _within(runs: pd.DataFrame, strategy: str, over: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    runs = runs[runs["strategy"].isin([strategy, over])]
    place = ["workload_key", "world_size"]
    runs = runs[runs.groupby(place)["strategy"].transform("nunique") == len({strategy, over})]
    if not runs.empty:
        largest = runs.groupby(place)["run"].transform("count")
        first = runs[largest == largest.max()].sort_values(place).iloc[0]
        runs = runs[(runs[place] == first[place]).all(axis=1)]
    return runs[runs["strategy"] == strategy], runs[runs["strategy"] == over]


def _across(
    runs: pd.DataFrame, strategy: str, over: str, where: str, changed: str, same_code: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    treatment = _with(runs[runs["strategy"] == strategy], where)
    control = _with(runs[runs["strategy"] == over], f"{where} {changed}")
    keys = ["seed", "repeat"]
    pairs = treatment.merge(control, on=keys, suffixes=("", "_its"))[[*keys, "run", "run_its"]]
    allowed = {name for item in changed.split() for name in _INTENDED.get(item.split("=")[0], ())}
    rows = {row["run"]: row for row in pd.concat([treatment, control]).drop_duplicates("run").to_dict("records")}
    by_run = {run: {key: None if pd.isna(value) else value for key, value in row.items()} for run, row in rows.items()}
    differences = (
        differences_between(by_run[run], by_run[control_run], same_code)
        for run, control_run in zip(pairs["run"], pairs["run_its"], strict=True)
    )
    pairs = pairs[[{reason.name for reason in reasons} <= allowed for reasons in differences]]
    if pairs.empty or pairs.duplicated(keys).any():
        return treatment[:0], control[:0]
    return treatment[treatment["run"].isin(pairs["run"])], control[control["run"].isin(pairs["run_its"])]


def virtual_bytes(summary: Summary, figure: str) -> float:
    """Return a figure of a virtual rank; NaN if it cannot be extrapolated over layers."""
    if figure in _PEAKS:
        return figure_or_nan(summary, _PEAKS[figure]) * GIB
    if figure in _VIRTUAL_COLUMNS:
        return figure_or_nan(summary, _VIRTUAL_COLUMNS[figure])
    if figure.startswith("collective."):
        counted = summary["collectives"].get(figure.removeprefix("collective."), {"wire_bytes_per_rank": 0.0})
        return math.nan if counted["wire_bytes_per_rank"] is None else float(counted["wire_bytes_per_rank"])
    what, _, place = figure.partition("_")
    if place in ("", "before_step"):
        before = place == "before_step"
        return rank_state_bytes(summary, before) if what == "state" else kind_bytes(summary, what, before)
    sizes = [summary["state_bytes_per_rank"][kind][place] for kind in (STATE_KINDS if what == "state" else (what,))]
    return math.nan if None in sizes else float(sum(sizes))


def counted_bytes(run: pd.Series, figure: str) -> float:
    """Return a figure of a real run: bytes sent or gathered, state in all memories or one, or a size to divide by."""
    if figure in ("sent", "gathered"):
        if pd.isna(run["collectives"]):
            return math.nan
        counted = json.loads(run["collectives"])
        used = {name: counts for name, counts in counted.items() if figure == "sent" or name.startswith("all_gather")}
        return float(ring_bytes(used))
    if figure == "tokens":
        return float(run["global_batch_size"] * run["seq_length"])
    if figure in _COLUMNS:
        return float(run[_COLUMNS[figure]])
    what, _, place = figure.partition("_")
    kinds = STATE_KINDS if what == "state" else (what,)
    return float(sum(run[f"{kind}_bytes_{at}"] for kind in kinds for at in ([place] if place else STATE_PLACES)))
