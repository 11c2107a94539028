"""Speed beside the baseline, where one workload ran with several batches or one task with several models."""

from __future__ import annotations

import json

import pandas as pd

from study.record.schema import STATE_PLACES
from study.report.records.arms import NAN, arms
from study.report.records.fairness import baseline_arm
from study.report.records.statistics import differences
from study.report.records.workloads import texts_of

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def runs_with_several(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """The runs of tasks that were run with more than one value of a column."""
    groups = ["task"] if column == "model_name_or_path" else ["task", "model_name_or_path"]
    return runs[runs.groupby(groups)[column].transform("nunique") > 1] if len(runs) else runs


def speed_beside_baseline(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Throughput of each arm in percent of the baseline of its workload and number of ranks; of several places only.

    `place` is where it stands among the values of the column: the batch, or millions of parameters.
    """
    rows, judged = [], {}
    runs = runs_with_several(runs, column)
    # All that a workload is, but for what is looked at.
    rests = {key: json.dumps(json.loads(key) | {column: None}) for key in runs["workload_key"].unique()}
    words = texts_of(sorted(set(rests.values())))
    for arm in arms(runs):
        first = arm.runs.iloc[0]
        beside = arm.beside[arm.beside["world_size"] == first["world_size"]]
        baseline = baseline_arm(beside)
        if baseline is None or not len(arm.ended) or beside["arm"].nunique() < 2:
            continue
        family = first["workload_key"], first["world_size"]
        if family not in judged:
            judged[family] = differences(beside, "tokens_per_s", ((name, baseline) for name in beside["arm"].unique()))
        difference = judged[family][arm.name, baseline]
        by_model = column == "model_name_or_path"
        of_it, ranks = words[rests[first["workload_key"]]], int(first["world_size"])
        rows.append({
            "subject": f"{of_it} on {ranks} rank{'s' if ranks > 1 else ''} beside {baseline}",
            "place": parameters(arm.beside) / 1e6 if by_model else float(first[column]),
            "arm": arm.name, "strategy": first["strategy"], "baseline": baseline,
            "percent": 100 * difference.ratio.center, "told_apart": difference.is_told_apart,
            "points": tuple(100 * ratio for ratio in difference.ratio.points),
            "note": "; ".join(dict.fromkeys(text for text in arm.ended["confounded"] if text)),
        })  # fmt: skip
    columns = ["subject", "place", "arm", "strategy", "baseline", "percent", "told_apart", "points", "note"]
    speed = pd.DataFrame(rows, columns=columns).dropna(subset=["place", "percent"])
    of_several = speed[speed.groupby("subject")["place"].transform("nunique") > 1]
    # The subject with most of it comes first: an answer is of that.
    most = of_several.groupby("subject")["subject"].transform("count")
    return of_several.assign(most=-most).sort_values(["most", "subject"], kind="stable").drop(columns="most")


def parameters(beside: pd.DataFrame) -> float:
    """Parameters of a workload's model, from the arms that hold them whole; NaN where none ran."""
    whole = beside[(beside["status_state"] == "ok") & (beside["distributed_type"] != "FSDP")]
    whole = whole[whole["zero_stage"].fillna(0) < 3]
    held = whole[[f"params_bytes_{place}" for place in STATE_PLACES]].sum(axis=1, min_count=1)
    return float((held / whole["param_dtype"].map(_BYTES)).max()) if len(whole) else NAN
