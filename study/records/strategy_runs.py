"""Runs of one strategy in one workload, and the table cells that are computed from them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from study.records import fairness, workloads
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.statistics import Difference, Interval, Pair, all_differences, interval, pivot_by_seed

NAN = float("nan")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class WorkloadRuns:
    """All runs of one workload, with the figures that its strategies share; each is computed once."""

    name: str
    runs: pd.DataFrame

    @functools.cached_property
    def baseline(self) -> str | None:
        """The strategy that others are compared with; None if all of its runs failed."""
        return fairness.baseline_arm(self.runs)

    @functools.cached_property
    def baseline_on_one_rank(self) -> str | None:
        """The reference strategy on one rank: plain training if it ran."""
        return fairness.baseline_arm(self.runs[self.runs["world_size"] == 1])

    @functools.cached_property
    def baseline_on_fewest_ranks(self) -> str | None:
        """The reference strategy on the fewest ranks that ended: plain training if it ran."""
        ended = self.runs[self.runs["status_state"] == "ok"]
        return fairness.baseline_arm(ended[ended["world_size"] == ended["world_size"].min()])

    def has_ended(self, arm: str) -> bool:
        """Whether a run of this strategy ended ok."""
        return bool((self.runs["status_state"] == "ok")[self.runs["arm"] == arm].any())

    @functools.cached_property
    def logs(self) -> Callable[[str], pd.DataFrame]:
        """Function that returns the logs of a figure by seed and strategy."""
        return functools.cache(functools.partial(pivot_by_seed, self.runs))

    @functools.cached_property
    def differences(self) -> Callable[[str], dict[Pair, Difference]]:
        """Function that returns the difference of each two strategies in a figure."""
        return functools.cache(functools.partial(all_differences, self.runs))

    @functools.cached_property
    def parameters(self) -> float:
        """Number of parameters of the model; NaN if no strategy ran that does not shard them."""
        return parameters(self.runs)


@dataclasses.dataclass(frozen=True, eq=False)
class StrategyRuns:
    """Runs of one strategy in one workload: all of them, and the successful ones."""

    all_strategies: WorkloadRuns
    name: str
    runs: pd.DataFrame
    ok_runs: pd.DataFrame

    @property
    def workload(self) -> str:
        return self.all_strategies.name

    @property
    def workload_runs(self) -> pd.DataFrame:
        return self.all_strategies.runs

    @property
    def baseline(self) -> str | None:
        return self.all_strategies.baseline

    def logs(self, figure: str) -> pd.DataFrame:
        return self.all_strategies.logs(figure)

    def differences(self, figure: str) -> dict[Pair, Difference]:
        return self.all_strategies.differences(figure)

    @property
    def is_baseline(self) -> bool:
        return self.name == self.baseline

    @property
    def role(self) -> str:
        """Label of the strategy that others are compared with: "baseline" only for plain training."""
        return "baseline" if self.value("strategy") in workloads.BASELINES else "reference"

    def is_fair(self, confound: str = "confounded") -> bool:
        """Whether there are successful runs, and none of them breaks an invariant."""
        return len(self.ok_runs) > 0 and not (self.ok_runs[confound] != "").any()

    @functools.cached_property
    def median(self) -> Callable[[str], float]:
        """Function that returns the median of a figure over successful runs; NaN if it was not measured."""
        return functools.cache(lambda figure: _median(_numbers(self.ok_runs[figure])))

    def median_over_seeds(self, figure: str) -> float:
        """Return the median of a loss or metric over seeds, without repeats, which only reproduce it."""
        once = self.ok_runs.loc[~self.ok_runs["seed"].duplicated(), figure]
        return float(once.median()) if once.notna().any() else NAN

    def geometric_mean(self, figure: str) -> Interval:
        """Return the geometric mean of a time or rate over seeds, with its interval."""
        return interval(np.exp(self.logs(figure).get(self.name, [])))

    @functools.cached_property
    def value(self) -> Callable[[str], Any]:
        """Function that returns the value of a column that all runs share; None if no run has recorded it."""
        return functools.cache(lambda column: first_known_value(self.runs[column]))

    @property
    def ranks(self) -> int:
        return int(self.value("world_size") or 0)

    @property
    def is_offloaded(self) -> bool:
        return any(self.value(f"offload_{what}") for what in ("optimizer", "param"))

    @property
    def unoffloaded(self) -> str | None:
        """Strategy of the same stage and world size without offload; None if it did not run."""
        stage, runs = self.value("zero_stage"), self.workload_runs
        # Only the column of names is filtered: to filter all two hundred columns takes most of the time of a table.
        is_alike = (runs["status_state"] == "ok") & (runs["world_size"] == self.ranks) & (runs["zero_stage"] == stage)
        plain = runs.loc[is_alike & runs["offload_optimizer"].isna() & runs["offload_param"].isna(), "arm"]
        return None if plain.empty else str(plain.iloc[0])

    @functools.cached_property
    def _state_bytes(self) -> Callable[[tuple[str, ...]], float]:
        return functools.cache(functools.partial(state_bytes, self.ok_runs))

    def state_bytes(self, places: Sequence[str] = STATE_PLACES) -> float:
        """Return the median model state of a rank in these places, in bytes."""
        return self._state_bytes(tuple(places))

    def state_mib(self, places: Sequence[str] = STATE_PLACES) -> float:
        return self.state_bytes(places) / 2**20

    @property
    def peak_gib(self) -> tuple[float, str]:
        """Peak memory in GiB, of the device or, without one, of the host process; with that name."""
        device = self.median("peak_memory_gib_device")
        return (self.median("host_peak_rss_gib"), "host process") if pd.isna(device) else (device, "device")

    def format_baseline_ratio(self, figure: str) -> str:
        if self.baseline is None or self.is_baseline:
            return f"1 ({self.role})" if self.is_baseline else ratio_text(None)
        return ratio_text(self.differences(figure)[self.name, self.baseline].ratio)

    def row(self, figures: Row, confound: str = "confounded") -> Row:
        return {
            "Workload": self.workload,
            "Strategy": self.name,
            "Runs": len(self.runs),
            **figures,
            "Outcome": outcome(self.runs),
            "Comparable": comparability(self.runs, self.baseline, confound),
        }


def group_by_strategy(runs: pd.DataFrame) -> Iterator[StrategyRuns]:
    """Yield the runs of each strategy of each workload."""
    for (workload, _), workload_runs in runs.groupby(["workload", "workload_key"], sort=False):
        all_strategies = WorkloadRuns(workload, workload_runs)
        for name, group in workload_runs.groupby("arm", sort=False):
            is_ok = group["status_state"] == "ok"
            # Mostly all are: a filter would copy two hundred columns.
            yield StrategyRuns(all_strategies, name, group, group if is_ok.all() else group[is_ok])


def outcome(runs: pd.DataFrame) -> str:
    """Return the outcomes of runs as text, with the reasons of failures."""
    states = Counter(runs["status_state"])
    if set(states) == {"ok"}:
        return "ok"
    counts = [
        f"{count} {state}" if len(runs) > 1 else state
        for state, count in sorted(states.items(), key=lambda item: item[0] != "ok")
    ]
    reasons = dict.fromkeys(reason for reason in runs.loc[runs["status_state"] != "ok", "status_reason"] if reason)
    return ", ".join(counts) + (f": {'; '.join(reasons)}" if reasons else "")


def comparability(runs: pd.DataFrame, baseline: str | None, confound: str = "confounded") -> str | None:
    """Return "yes" or the broken invariants; None if all runs failed."""
    reasons = dict.fromkeys(text for cell in runs[confound].dropna() for text in fairness.texts_of_confounds(cell))
    if reasons:
        return "; ".join(reasons)
    if baseline is None:
        return "no baseline: no run of this workload ended ok"
    return "yes" if (runs["status_state"] == "ok").any() else None


def first_known_value(values: pd.Series) -> Any:
    """Return the first recorded value of a column that all runs share; None if there is none."""
    recorded = values.dropna()
    return recorded.iloc[0] if len(recorded) else None


def has_no_gpu(workload_runs: pd.DataFrame) -> bool:
    """Whether runs of the workload had no GPU."""
    return bool((workload_runs["devices"].dropna() == "[]").any())


def scarce_memory(workload_runs: pd.DataFrame) -> tuple[str, ...]:
    """Return the places with scarce memory: the device and, without a GPU, the host."""
    return ("device", "host") if has_no_gpu(workload_runs) else ("device",)


def state_bytes(ended: pd.DataFrame, places: Sequence[str] = STATE_PLACES) -> float:
    """Return the median model state of a rank in bytes; NaN if it was not measured. Missing places count as 0."""
    measured = np.stack([_numbers(ended[f"{kind}_bytes_{place}"]) for kind in STATE_KINDS for place in places])
    return _median(np.where(np.isnan(measured).all(axis=0), NAN, np.nansum(measured, axis=0)))


def _numbers(column: pd.Series) -> np.ndarray:
    """Return a column with NaN for missing figures."""
    return np.asarray(column.to_numpy(dtype=float, na_value=NAN))


def _median(values: np.ndarray) -> float:
    """Return the median of the values that are known; NaN if none is."""
    known_values = values[~np.isnan(values)]
    return float(np.median(known_values)) if len(known_values) else NAN


def ratio_text(ratio: Interval | None) -> str:
    """Format a ratio to the baseline as a table cell."""
    if ratio is None:
        return "no baseline"
    return ratio.text() if ratio.n else "no pair"


def to_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Build a table without empty columns, except "Outcome" and "Comparable"."""
    table = pd.DataFrame(list(rows))
    columns = [column for column in table if table[column].notna().any() or column in ("Outcome", "Comparable")]
    return table[columns]


# Speed relative to the baseline, for a workload with several batch sizes or a task with several models.

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def runs_with_several(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the runs of tasks that ran with more than one value of a column."""
    groups = ["task"] if column == "model_name_or_path" else ["task", "model_name_or_path"]
    return runs[runs.groupby(groups)[column].transform("nunique") > 1] if len(runs) else runs


def format_speed_ratio(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return each strategy's speed by batch size or millions of parameters, in percent of one baseline."""
    runs = runs_with_several(runs, column)
    subjects = _Subjects(runs, column)
    rows = [subjects.speed_row(arm) for arm in group_by_strategy(runs)]
    columns = ["subject", "place", "arm", "strategy", "baseline", "percent", "difference", "points", "note"]
    speed = pd.DataFrame([row for row in rows if row is not None], columns=columns).dropna(subset=["place", "percent"])
    comparable_speed = speed[speed.groupby("subject")["place"].transform("nunique") > 1]
    # The subject with the most rows is first, because the answer uses it.
    most = comparable_speed.groupby("subject")["subject"].transform("count")
    return comparable_speed.assign(most=-most).sort_values(["most", "subject"], kind="stable").drop(columns="most")


class _Subjects:
    """Workloads without one of their columns, on a number of ranks, each with one baseline."""

    def __init__(self, runs: pd.DataFrame, column: str) -> None:
        self.column = column
        # Keys of workloads without the column.
        self.rests = {key: json.dumps(json.loads(key) | {column: None}) for key in runs["workload_key"].unique()}
        self.words = workloads.workload_names(sorted(set(self.rests.values())))
        subjects = runs.groupby([runs["workload_key"].map(self.rests), "world_size"])
        self.baselines = {subject: fairness.baseline_arm(group) or "" for subject, group in subjects}

    def speed_row(self, arm: StrategyRuns) -> dict[str, Any] | None:
        """Return a strategy's speed; None if there is nothing to compare it with."""
        first = arm.runs.iloc[0]
        rest, ranks = self.rests[first["workload_key"]], int(first["world_size"])
        baseline = self.baselines[rest, ranks]
        names = set(arm.workload_runs.loc[arm.workload_runs["world_size"] == ranks, "arm"])
        if baseline not in names or not len(arm.ok_runs) or len(names) < 2:
            return None
        # The speed is the baseline's step time over a strategy's, as in all questions about time.
        difference = arm.differences("step_time_s_median").get((baseline, arm.name), Difference(interval([1.0]), None))
        by_model = self.column == "model_name_or_path"
        return {
            "subject": f"{self.words[rest]} on {ranks} rank{'s' if ranks > 1 else ''}",
            "place": arm.all_strategies.parameters / 1e6 if by_model else float(first[self.column]),
            "arm": arm.name,
            "strategy": first["strategy"],
            "baseline": baseline,
            "percent": 100 * difference.ratio.center,
            "difference": difference,
            "points": tuple(100 * ratio for ratio in difference.ratio.points),
            "note": "; ".join(dict.fromkeys(text for text in arm.ok_runs["confounded"] if text)),
        }


def parameters(workload_runs: pd.DataFrame) -> float:
    """Number of parameters of a workload's model, from strategies that do not shard them; NaN if none ran."""
    whole = _bytes_of_whole_parameters(workload_runs)
    types = workload_runs.loc[whole.index, "param_dtype"]
    return float((whole / types.map(_BYTES)).max()) if len(whole) else NAN


def parameter_mib(workload_runs: pd.DataFrame) -> float:
    """MiB of all parameters of a workload's model, from strategies that do not shard them; NaN if none ran."""
    largest = _bytes_of_whole_parameters(workload_runs).max()
    return NAN if pd.isna(largest) else float(largest) / 2**20


def _bytes_of_whole_parameters(workload_runs: pd.DataFrame) -> pd.Series:
    """Return the bytes of the parameters of a rank in each run that ended and does not shard them."""
    has_ended, stage = workload_runs["status_state"] == "ok", workload_runs["zero_stage"].fillna(0)
    is_unsharded = has_ended & (workload_runs["distributed_type"] != "FSDP") & (stage < 3)
    # A filter of whole rows would copy two hundred columns.
    return workload_runs.loc[is_unsharded, [f"params_bytes_{place}" for place in STATE_PLACES]].sum(axis=1, min_count=1)
