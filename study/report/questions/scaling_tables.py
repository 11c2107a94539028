"""What changes with ranks, batch, model and the place of the state: the tables that need several of them."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from study.record.schema import STATE_PLACES
from study.report.records.arms import NAN, Arm, Row, against, arms, frame, one_value, peak_gib, ratio_text, state_mib
from study.report.records.fairness import baseline_arm
from study.report.records.frames import Records, real
from study.report.records.statistics import paired_ratio

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def single_vs_multi_table(records: Records) -> pd.DataFrame:
    """What more ranks bring: throughput beside one device, and beside what as many of it would do."""
    rows = []
    for arm in arms(real(records).runs):
        world = arm.runs["world_size"].dropna()
        one = _single(arm.beside)
        speedup = paired_ratio(arm.beside, "tokens_per_s", arm.name, one) if one else None
        ranks = int(world.iloc[0]) if len(world) else None
        figures: Row = {
            "Ranks": ranks,
            "Tokens/s": arm.median("tokens_per_s"),
            "x one device": "1 (one device)" if arm.name == one else ratio_text(speedup),
            "Ideal": ranks,
            "Efficiency": speedup.center / ranks if speedup and speedup.n and ranks else NAN,
            "State per rank, MiB": state_mib(arm),
            "Peak memory, GiB": peak_gib(arm)[0],
        }
        rows.append(arm.row(figures))
    has_both = {workload for workload, found in _worlds(real(records).runs).items() if len(found) > 1}
    return frame([row for row in rows if row["Workload"] in has_both])


def _worlds(runs: pd.DataFrame) -> dict[str, set[int]]:
    ended = runs[runs["status_state"] == "ok"]
    return {workload: set(group["world_size"].dropna()) for workload, group in ended.groupby("workload")}


def _single(beside: pd.DataFrame) -> str | None:
    """The arm on one rank that the others are measured against: plain training where it ran."""
    ended = beside[(beside["status_state"] == "ok") & (beside["world_size"] == 1)]
    return baseline_arm(ended) if len(ended) else None


def offload_table(records: Records) -> pd.DataFrame:
    """What moving state off the device costs and frees, against the same stage without offload."""
    rows = []
    for arm in arms(real(records).runs):
        places = [one_value(arm.runs[f"offload_{what}"]) for what in ("optimizer", "param")]
        base = same_stage(arm)
        if not any(places) and not _is_base(arm):
            continue
        ratio = paired_ratio(arm.beside, "step_time_s_median", arm.name, base) if base else None
        figures: Row = {
            "Stage": one_value(arm.runs["zero_stage"]),
            "Optimizer on": places[0] or "device",
            "Parameters on": places[1] or "device",
            **{f"State on {place}, MiB": state_mib(arm, (place,)) for place in STATE_PLACES},
            "Peak memory, GiB": peak_gib(arm)[0],
            "Step time, ms": 1e3 * arm.median("step_time_s_median"),
            "Without offload": "this row" if not any(places) else base or "not run",
            "Time, x without": ratio_text(ratio) if any(places) else "1",
        }
        rows.append(arm.row(figures))
    offloads = {row["Workload"] for row in rows if row["Without offload"] != "this row"}
    return frame([row for row in rows if row["Workload"] in offloads])


def same_stage(arm: Arm) -> str | None:
    """The arm of the same stage and ranks that keeps its state on the device."""
    stage, world = one_value(arm.runs["zero_stage"]), one_value(arm.runs["world_size"])
    beside = arm.beside
    plain = beside[
        (beside["zero_stage"] == stage) & (beside["world_size"] == world) & (beside["status_state"] == "ok")
        & beside["offload_optimizer"].isna() & beside["offload_param"].isna()
    ] if stage is not None else beside.iloc[:0]  # fmt: skip
    return None if plain.empty else str(plain["arm"].iloc[0])


def _is_base(arm: Arm) -> bool:
    stage = one_value(arm.runs["zero_stage"])
    offloads = arm.beside[arm.beside["offload_optimizer"].notna() | arm.beside["offload_param"].notna()]
    return stage is not None and stage in set(offloads["zero_stage"].dropna())


def batch_size_table(records: Records) -> pd.DataFrame:
    """What a larger batch pays back: traffic and time per token, each arm beside the baseline at the same batch."""
    rows = []
    for arm in arms(_where_several(real(records).runs, "global_batch_size")):
        batch = one_value(arm.runs["global_batch_size"])
        tokens = NAN if batch is None else batch * one_value(arm.runs["seq_length"])
        figures: Row = {
            "Global batch": batch,
            "Accumulation": one_value(arm.ended["gradient_accumulation_steps"]),
            "Tokens/s per device": arm.median("tokens_per_s_per_device"),
            "Throughput, x baseline": against(arm, "tokens_per_s_per_device"),
            "Step time, ms": 1e3 * arm.median("step_time_s_median"),
            "Sent per token, KiB": arm.median("comm_bytes_per_step") / tokens / 1024,
            "Peak memory, GiB": peak_gib(arm)[0],
        }
        rows.append(arm.row(figures))
    return frame(rows)


def model_size_table(records: Records) -> pd.DataFrame:
    """What a larger model changes: memory and time of each arm beside the baseline of the same model."""
    rows = []
    for arm in arms(_where_several(real(records).runs, "model_name_or_path")):
        figures: Row = {
            "Model": one_value(arm.runs["model_name_or_path"]),
            "Parameters, millions": parameters(arm.beside) / 1e6,
            "State per rank, MiB": state_mib(arm),
            "Peak memory, GiB": peak_gib(arm)[0],
            "Step time, ms": 1e3 * arm.median("step_time_s_median"),
            "Time, x baseline": against(arm, "step_time_s_median"),
        }
        rows.append(arm.row(figures))
    return frame(sorted(rows, key=lambda row: _last_if_missing(row["Parameters, millions"])))


def _last_if_missing(value: float) -> float:
    return float("inf") if pd.isna(value) else value


def parameters(beside: pd.DataFrame) -> float:
    """Parameters of a workload's model, from the arms that hold them whole; NaN where none ran."""
    whole = beside[(beside["status_state"] == "ok") & (beside["strategy"] != "fsdp2")]
    whole = whole[whole["zero_stage"].fillna(0) < 3]
    held = whole[[f"params_bytes_{place}" for place in STATE_PLACES]].sum(axis=1, min_count=1)
    return float((held / whole["param_dtype"].map(_BYTES)).max()) if len(whole) else NAN


def _where_several(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """The runs of tasks that were run with more than one value of a column."""
    groups = ["task"] if column == "model_name_or_path" else ["task", "model_name_or_path"]
    return runs[runs.groupby(groups)[column].transform("nunique") > 1] if len(runs) else runs


def has_several_worlds(runs: pd.DataFrame) -> bool:
    return any(len(worlds) > 1 for worlds in _worlds(runs).values())


def has_several_batches(runs: pd.DataFrame) -> bool:
    return not _where_several(runs, "global_batch_size").empty


def has_several_models(runs: pd.DataFrame) -> bool:
    return not _where_several(runs, "model_name_or_path").empty


def has_offload(runs: pd.DataFrame) -> bool:
    return bool(runs[["offload_optimizer", "offload_param"]].notna().any(axis=None))


SCALING_TABLES: dict[str, Callable[[Records], pd.DataFrame]] = {
    "single_vs_multi": single_vs_multi_table,
    "batch_size": batch_size_table,
    "model_size": model_size_table,
    "offload": offload_table,
}
