"""The runs behind one row of a table: one strategy of one workload, and the values of the row's cells."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from study.records.fairness import baseline_arm
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.statistics import Interval, differences, middle, paired_ratio
from study.records.workloads import BASELINES, texts_of

NAN = float("nan")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StrategyRuns:
    """The runs behind one row: all of them, and those that ended well."""

    workload: str
    name: str
    runs: pd.DataFrame
    ended: pd.DataFrame
    # All runs of the workload, and the strategy that they are compared with.
    workload_runs: pd.DataFrame
    baseline: str | None

    @property
    def is_baseline(self) -> bool:
        return self.name == self.baseline

    @property
    def role(self) -> str:
        """What a table calls the strategy that others are compared with: without plain training it is no baseline."""
        return "baseline" if self.value("strategy") in BASELINES else "reference"

    def is_fair(self, confound: str = "confounded") -> bool:
        """It ended well at least once, and no such run breaks an invariant."""
        return len(self.ended) > 0 and not (self.ended[confound] != "").any()

    def median(self, figure: str) -> float:
        """NaN where it was not measured."""
        return float(self.ended[figure].median()) if self.ended[figure].notna().any() else NAN

    def learned(self, figure: str) -> float:
        """The median of a loss or a metric over seeds: a repeat computes it again, and would count twice."""
        once = self.ended.drop_duplicates("seed")[figure]
        return float(once.median()) if once.notna().any() else NAN

    def middle(self, figure: str) -> Interval:
        """Return the interval of a time or a speed over seeds."""
        return middle(self.workload_runs, figure, self.name)

    def ratio(self, figure: str) -> Interval | None:
        """Against the baseline, seed by seed; None for the baseline itself."""
        if self.baseline is None or self.is_baseline:
            return None
        return paired_ratio(self.workload_runs, figure, self.name, self.baseline)

    def value(self, column: str) -> Any:
        """Return the first known value of what all runs have in common."""
        return one_value(self.runs[column])

    @property
    def ranks(self) -> int:
        return int(self.value("world_size") or 0)

    @property
    def is_offloaded(self) -> bool:
        return any(self.value(f"offload_{what}") for what in ("optimizer", "param"))

    @property
    def same_stage(self) -> str | None:
        """The strategy of the same stage and ranks without offload."""
        stage, runs = self.value("zero_stage"), self.workload_runs
        runs = runs[(runs["status_state"] == "ok") & (runs["world_size"] == self.ranks) & (runs["zero_stage"] == stage)]
        plain = runs.loc[runs["offload_optimizer"].isna() & runs["offload_param"].isna(), "arm"]
        return None if plain.empty else str(plain.iloc[0])

    def state_mib(self, places: Sequence[str] = STATE_PLACES) -> float:
        """Return parameters, gradients and optimizer states of the rank with most of them."""
        return state_bytes(self.ended, places) / 2**20

    @property
    def peak_gib(self) -> tuple[float, str]:
        """The peak memory and its owner: the device or, without one, the host process."""
        device = self.median("peak_memory_gib_device")
        return (self.median("host_peak_rss_gib"), "host process") if pd.isna(device) else (device, "device")

    def against(self, figure: str) -> str:
        """Return the paired ratio to the baseline, as a cell."""
        return f"1 ({self.role})" if self.is_baseline else ratio_text(self.ratio(figure))

    def row(self, figures: Row, confound: str = "confounded") -> Row:
        return {
            "Workload": self.workload, "Strategy": self.name, "Runs": len(self.runs), **figures,
            "Outcome": outcome(self.runs), "Comparable": comparable(self.runs, self.baseline, confound),
        }  # fmt: skip


def group_by_strategy(runs: pd.DataFrame) -> Iterator[StrategyRuns]:
    for (workload, _), of_workload in runs.groupby(["workload", "workload_key"], sort=False):
        baseline = baseline_arm(of_workload)
        for name, group in of_workload.groupby("arm", sort=False):
            yield StrategyRuns(workload, name, group, group[group["status_state"] == "ok"], of_workload, baseline)


def outcome(runs: pd.DataFrame) -> str:
    """Return how runs ended, with the reasons of those that did not end ok."""
    states = Counter(runs["status_state"])
    if set(states) == {"ok"}:
        return "ok"
    said = [
        f"{count} {state}" if len(runs) > 1 else state
        for state, count in sorted(states.items(), key=lambda item: item[0] != "ok")
    ]
    reasons = dict.fromkeys(reason for reason in runs[runs["status_state"] != "ok"]["status_reason"] if reason)
    return ", ".join(said) + (f": {'; '.join(reasons)}" if reasons else "")


def comparable(runs: pd.DataFrame, baseline: str | None, confound: str = "confounded") -> str | None:
    """`yes`, or which invariant is broken; None where no run ended well, so that there is nothing to compare."""
    reasons = dict.fromkeys(reason for text in runs[confound].dropna() for reason in text.split("; ") if reason)
    if reasons:
        return "; ".join(reasons)
    if baseline is None:
        return "no baseline: no run of this workload ended ok"
    return "yes" if (runs["status_state"] == "ok").any() else None


def one_value(values: pd.Series) -> Any:
    """Return the first known value, for what all runs of a strategy share; None if no run has it."""
    known = values.dropna()
    return known.iloc[0] if len(known) else None


def has_no_gpu(of_workload: pd.DataFrame) -> bool:
    return bool((of_workload["devices"].dropna() == "[]").any())


def fast_memory(of_workload: pd.DataFrame) -> tuple[str, ...]:
    """Return the places whose memory is scarce: the device, or without a GPU the host too."""
    return ("device", "host") if has_no_gpu(of_workload) else ("device",)


def state_bytes(ended: pd.DataFrame, places: Sequence[str] = STATE_PLACES) -> float:
    """NaN where nothing was measured; a place that a box does not have counts as 0."""
    columns = [f"{kind}_bytes_{place}" for kind in STATE_KINDS for place in places]
    return float(ended[columns].sum(axis=1, min_count=1).median()) if len(ended) else NAN


def ratio_text(ratio: Interval | None, digits: int = 2) -> str:
    if ratio is None:
        return "no baseline"
    return ratio.text(digits) if ratio.n else "no pair"


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Columns without any value are left out, except how the runs ended."""
    table = pd.DataFrame(list(rows))
    kept = [column for column in table if table[column].notna().any() or column in ("Outcome", "Comparable")]
    return table[kept]


# Speed against the baseline, where one workload ran with several batches or one task with several models.

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def runs_with_several(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """The runs of tasks that were run with more than one value of a column."""
    groups = ["task"] if column == "model_name_or_path" else ["task", "model_name_or_path"]
    return runs[runs.groupby(groups)[column].transform("nunique") > 1] if len(runs) else runs


def speed_beside_baseline(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the throughput of each strategy in percent of the baseline of its workload and number of ranks.

    `place` is where it stands among the values of the column: the batch, or millions of parameters.
    """
    rows, judged = [], {}
    runs = runs_with_several(runs, column)
    # All that a workload is, but for what is looked at.
    rests = {key: json.dumps(json.loads(key) | {column: None}) for key in runs["workload_key"].unique()}
    words = texts_of(sorted(set(rests.values())))
    for arm in group_by_strategy(runs):
        first = arm.runs.iloc[0]
        of_workload = arm.workload_runs[arm.workload_runs["world_size"] == first["world_size"]]
        baseline = baseline_arm(of_workload)
        if baseline is None or not len(arm.ended) or of_workload["arm"].nunique() < 2:
            continue
        family = first["workload_key"], first["world_size"]
        if family not in judged:
            judged[family] = differences(
                of_workload, "tokens_per_s", ((name, baseline) for name in of_workload["arm"].unique())
            )
        difference = judged[family][arm.name, baseline]
        by_model = column == "model_name_or_path"
        of_it, ranks = words[rests[first["workload_key"]]], int(first["world_size"])
        rows.append({
            "subject": f"{of_it} on {ranks} rank{'s' if ranks > 1 else ''} of_workload {baseline}",
            "place": parameters(arm.workload_runs) / 1e6 if by_model else float(first[column]),
            "arm": arm.name, "strategy": first["strategy"], "baseline": baseline,
            "percent": 100 * difference.ratio.center, "significant": difference.is_significant,
            "points": tuple(100 * ratio for ratio in difference.ratio.points),
            "note": "; ".join(dict.fromkeys(text for text in arm.ended["confounded"] if text)),
        })  # fmt: skip
    columns = ["subject", "place", "arm", "strategy", "baseline", "percent", "significant", "points", "note"]
    speed = pd.DataFrame(rows, columns=columns).dropna(subset=["place", "percent"])
    of_several = speed[speed.groupby("subject")["place"].transform("nunique") > 1]
    # The subject with most of it comes first: an answer is of that.
    most = of_several.groupby("subject")["subject"].transform("count")
    return of_several.assign(most=-most).sort_values(["most", "subject"], kind="stable").drop(columns="most")


def parameters(of_workload: pd.DataFrame) -> float:
    """Parameters of a workload's model, from strategies with unpartitioned parameters; NaN if none ran."""
    whole = of_workload[(of_workload["status_state"] == "ok") & (of_workload["distributed_type"] != "FSDP")]
    whole = whole[whole["zero_stage"].fillna(0) < 3]
    held = whole[[f"params_bytes_{place}" for place in STATE_PLACES]].sum(axis=1, min_count=1)
    return float((held / whole["param_dtype"].map(_BYTES)).max()) if len(whole) else NAN
