"""The committed records that claims are judged by: what virtual ranks held and sent, and what real runs did."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from study.claims.verdicts import Figure, NotJudged
from study.record.schema import STATE_KINDS, STATE_PLACES
from study.report.records.frames import RUNS_FILE, STEPS_FILE, Records, read_parquet, real, virtual
from study.report.records.statistics import paired_ratio
from study.report.records.virtual_ranks import (
    Summary,
    held,
    known,
    sent_bytes,
    setting_of,
    state_bytes,
    summaries,
)

# The precision of the ZeRO paper, and of every virtual rank that a claim is judged by.
_PRECISION = "bf16-engine"


class Evidence:
    """The reports below one folder; each is read when the first check asks for it."""

    def __init__(self, root: Path):
        self.root = root
        self._records: dict[str, Records] = {}
        self._summaries: dict[str, list[Summary]] = {}

    def records(self, report: str) -> Records:
        if report not in self._records:
            if not all((self.root / report / name).is_file() for name in (RUNS_FILE, STEPS_FILE)):
                raise NotJudged(f"there are no records of {report}")
            self._records[report] = read_parquet(self.root / report)
        return self._records[report]

    def instead(self, report: str, records: Records) -> Evidence:
        """The same, with other records in one report."""
        other = Evidence(self.root)
        other._records = self._records | {report: records}
        other._summaries = {name: made for name, made in self._summaries.items() if name != report}
        return other

    def rank(self, report: str, model: str, strategy: str, ranks: int, setting: str) -> Summary:
        """One virtual rank; measured whole, or a line over layers."""
        if report not in self._summaries:
            self._summaries[report] = summaries(self.records(report))
        wanted = (model, strategy, ranks, setting, _PRECISION)
        for one in self._summaries[report]:
            if (one["model"], one["strategy"], one["world_size"], one["setting"], one["precision"]) == wanted:
                return one
        raise NotJudged(f"{report} has no {strategy} of {model} at {ranks} ranks")

    def runs_of(self, report: str, one: Summary) -> tuple[str, ...]:
        """The runs that a virtual rank was made of."""
        runs = virtual(self.records(report)).runs
        runs = runs[(runs["status_state"] == "ok") & (runs["precision"] == _PRECISION)]
        runs = runs[(runs["strategy"] == one["strategy"]) & (runs["world_size"] == one["world_size"])]
        models = runs["model_name_or_path"].str.replace(r".*/|-\d+layers$", "", regex=True)
        mine = runs[(models == one["model"]) & (runs["engine_override"].map(setting_of) == one["setting"])]
        is_whole = mine["model_layers"] == mine["preset_layers"]
        mine = mine[is_whole] if one["extrapolated"] is None else mine[~is_whole].nsmallest(3, "model_layers")
        return tuple(f"{report}/{run}" for run in mine["run"])

    def pair(self, report: str, task: str, strategy: str, over: str, confound: str = "confounded") -> pd.DataFrame:
        """The fair runs of two strategies on as many ranks in one workload: the one that most of them share."""
        runs = real(self.records(report)).runs
        runs = runs[(runs["task"] == task) & (runs["status_state"] == "ok") & (runs[confound] == "")]
        runs = runs[runs["strategy"].isin([strategy, over])]
        place = ["workload_key", "world_size"]
        runs = runs[runs.groupby(place)["strategy"].transform("nunique") == len({strategy, over})]
        if runs.empty:
            raise NotJudged(f"{report} has no fair pair of {strategy} and {over} in {task}")
        largest = runs.groupby(place)["run"].transform("count")
        first = runs[largest == largest.max()].sort_values(place).iloc[0]
        return runs[(runs[place] == first[place]).all(axis=1)].assign(arm=lambda both: both["strategy"])

    def paired(self, report: str, task: str, strategy: str, over: str, figure: str) -> Figure:
        """The ratio of a time or a loss, seed by seed."""
        both = self.pair(report, task, strategy, over, "confounded_loss" if "loss" in figure else "confounded")
        ratio = paired_ratio(both, figure, strategy, over)
        if not ratio.n:
            raise NotJudged(f"{report} has no pair of {strategy} and {over} with {figure}")
        names = tuple(f"{report}/{run}" for run in both["run"])
        return Figure(ratio.center, ratio.low, ratio.high, ratio.n, names, _box(both))

    def gradient_norms(self, report: str, task: str, strategy: str, over: str) -> Figure:
        """How far apart two strategies' norms are where they differ most, as a share, step by step and seed by seed."""
        both = self.pair(report, task, strategy, over, "confounded_loss").drop_duplicates(["seed", "strategy"])
        steps = self.records(report).steps
        norms = both[["run", "seed", "strategy"]].merge(
            steps[["run", "step", "grad_norm"]].astype({"run": str}), on="run"
        )
        table = norms.pivot(index=["seed", "step"], columns="strategy", values="grad_norm").dropna()
        if table.empty:
            raise NotJudged(f"{report} has no gradient norms of both {strategy} and {over}")
        apart = float((table[strategy] / table[over] - 1).abs().max())
        pairs = table.index.get_level_values("seed").nunique()
        return Figure(apart, n=pairs, records=tuple(f"{report}/{run}" for run in both["run"]), note=_box(both))

    def counted(self, report: str, task: str, strategy: str, over: str, figure: str, over_figure: str) -> Figure:
        """The ratio of two sizes that were counted and not timed, with the extremes of all runs as its interval."""
        both = self.pair(report, task, strategy, over)
        above, below = (
            both[both["strategy"] == name].apply(counted_bytes, axis=1, figure=of)
            for name, of in ((strategy, figure), (over, over_figure))
        )
        if above.isna().any() or below.isna().any() or not (below > 0).all():
            raise NotJudged(f"{report} has no {over_figure} of {over}, or no {figure} of {strategy}")
        names = tuple(f"{report}/{run}" for run in both["run"])
        value = float(above.median() / below.median())
        return Figure(
            value, float(above.min() / below.max()), float(above.max() / below.min()), len(above), names, _box(both)
        )


def _box(runs: pd.DataFrame) -> str:
    first = runs.iloc[0]
    device = "no GPU" if first["devices"] == "[]" else str(first["devices"])
    return f"{first['model_name_or_path']} on {runs['world_size'].max():.0f} ranks, {first['cpu']}, {device}"


def virtual_bytes(one: Summary, figure: str) -> float:
    """NaN where no line over layers holds."""
    if figure in STATE_KINDS:
        return held(one, figure)
    if figure == "state":
        return state_bytes(one)
    if figure in ("sent", "calls"):
        return known(one, "sent_bytes_per_step" if figure == "sent" else "comm_calls_per_step")
    counted = one["collectives"].get(figure.removeprefix("collective."), {"wire_bytes_per_rank": 0.0})
    return math.nan if counted["wire_bytes_per_rank"] is None else float(counted["wire_bytes_per_rank"])


def counted_bytes(run: pd.Series, figure: str) -> float:
    """Of a real run: `sent`, `calls`, or `state`, `params`, `grads`, `optimizer`, in all places or in one of them."""
    if figure == "sent":
        return sent_bytes(run["collectives"])
    if figure == "calls":
        return float(run["comm_calls_per_step"])
    what, _, place = figure.partition("_")
    kinds = STATE_KINDS if what == "state" else (what,)
    return float(sum(run[f"{kind}_bytes_{at}"] for kind in kinds for at in ([place] if place else STATE_PLACES)))
