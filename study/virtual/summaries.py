"""Virtual ranks in reports: one summary per model, strategy, world size and setting.

A model that fits a machine is measured. A model that ran at three depths is extrapolated, with its depths and its error
at the third. With fewer depths each depth has a separate summary.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from study.config.precisions import in_engine
from study.config.strategies import WITH_GROUPS, WITH_REPLICAS, read_strategy
from study.config.text import full_model, percent
from study.predictor.recorded_runs import request_if_any
from study.predictor.run_predictions import predict_run
from study.predictor.state import paper_state_bytes
from study.records.frames import Records, real_runs, virtual_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.strategy_runs import NAN, state_bytes
from study.records.virtual_summary import Summary, ring_bytes, summarize_row
from study.records.workloads import format_options, format_setting, name_workloads, read_arm
from study.virtual.extrapolation import COUNTS, extrapolate

GB = 1e9
AS_SHIPPED = "as shipped"
# Columns that are equal for runs of one model at several depths.
_SAME = (
    "task",
    "precision",
    "seq_length",
    "per_device_train_batch_size",
    "gradient_checkpointing",
    "strategy",
    "world_size",
    "virtual_rank",
    "group_ranks",
    "device_memory_cap_gib",
    "engine_override",
)
# Strategies of the paper's stages; tables also contain offload and other engines.
STAGES = ("zero1", "zero2", "zero3")
_SIZES = {"b": 1e9, "t": 1e12}
_NAMES = ["workload", "workload_key", "arm"]
# Collectives with less than this fraction of the weights are bookkeeping, such as that of a gradient norm.
BOOKKEEPING = 0.005


@functools.lru_cache(32)
def summaries(records: Records) -> tuple[Summary, ...]:
    """Return one summary per model, strategy, world size and setting; three depths of one are extrapolated.

    Once for each report's records, since most questions about virtual ranks ask for it.
    """
    results: list[Summary] = []
    for depths in groups(records):
        if (summary := full_depth_summary(depths) or extrapolate_from_depths(depths)) is not None:
            results.append(summary)
            continue
        for layers, entry in depths.items():
            model = format_setting("model_name_or_path", f"{entry['model']}-{layers}layers")
            results.append(entry | {"model": model, "alike": (model, *entry["alike"][1:])})
    ordered = sorted(
        results,
        key=lambda entry: (
            entry["model_parameters"],
            entry["world_size"],
            entry["strategy"],
            entry["setting"] != AS_SHIPPED,
            entry["setting"],
        ),
    )
    return tuple(ordered)


def with_whole_models(records: Records) -> Records:
    """Return the records with a run of each model that is extrapolated over layers, and the column `extrapolated`.

    A figure that is not extrapolated is empty. Columns without a figure are those of the shallowest depth.
    """
    runs, rows = records.runs.assign(extrapolated=False), []
    for summary in (entry for entry in summaries(records) if entry["extrapolated"]):
        row = runs[runs["run"] == summary["runs"][0]].iloc[0].to_dict()
        state = {
            f"{kind}_bytes_{place}": summary["state_bytes_per_rank"][kind][place]
            for kind in STATE_KINDS
            for place in STATE_PLACES
        }
        is_counted = all(counts["wire_bytes_per_rank"] is not None for counts in summary["collectives"].values())
        rows.append(
            row
            | {
                # Without one of its parts the state is unknown.
                **(dict.fromkeys(state) if None in state.values() else state),
                **{name: summary[name] for name in COUNTS},
                "collectives": json.dumps(summary["collectives"]) if is_counted else None,
                "buffer_bytes_device": None,
                "model_name_or_path": full_model(row["model_name_or_path"]),
                "model_layers": summary["model_layers"],
                "run": f"{row['run']}, extrapolated",
                "extrapolated": True,
            }
        )
    if rows:
        runs = pd.concat([runs, pd.DataFrame(rows, columns=runs.columns).astype(runs.dtypes)], ignore_index=True)
        # Names have the settings in which the workloads of a model differ.
        plain = runs[runs["virtual"] & ~runs["probe"].fillna(False).astype(bool)].astype(object)
        names = pd.DataFrame(name_workloads(plain.where(plain.notna(), None).to_dict("records")), index=plain.index)
        runs.loc[plain.index, _NAMES] = names[_NAMES]
    return dataclasses.replace(records, runs=runs.copy())


def ranks_per_group(run: pd.Series) -> float:
    """Return the ranks of a run's model-parallel group, or of those that share one replica; NaN without groups."""
    request = request_if_any(run) if run.strategy in WITH_REPLICAS else None
    ranks = request.ranks_per_replica if request else run.group_ranks
    return NAN if ranks is None or pd.isna(ranks) else float(ranks)


def groups(records: Records) -> list[dict[int, Summary]]:
    """Group runs that differ only in depth; each group is keyed by the number of layers."""
    by_key: defaultdict[tuple[Any, ...], dict[int, Summary]] = defaultdict(dict)
    ended = virtual_runs(records).runs
    ended = ended[(ended["status_state"] == "ok") & ended["collectives"].notna() & ended["model_layers"].notna()]
    for row in ended.to_dict("records"):
        summary = _summary(row)
        by_key[(*summary["alike"], summary["setting"])][summary["model_layers"]] = summary
    return list(by_key.values())


def full_depth_summary(depths: Mapping[int, Summary]) -> Summary | None:
    """Return the summary of the model at full depth; None if it was not run."""
    return next((summary for summary in depths.values() if summary["model_layers"] == summary["preset_layers"]), None)


def extrapolate_from_depths(depths: Mapping[int, Summary]) -> Summary | None:
    """Extrapolate from the three smallest depths other than the full one; None if there are fewer.

    If more figures are linear in the three largest depths, these are used.
    """
    partial = [summary for layers, summary in sorted(depths.items()) if layers != summary["preset_layers"]]
    if len(partial) < 3:
        return None
    model, layers = partial[0]["model"], int(partial[0]["preset_layers"])
    lines = [
        extrapolate(chosen, model, layers) | {"runs": sum((summary["runs"] for summary in chosen), ())}
        for chosen in (partial[:3], partial[-3:])
    ]
    return min(lines, key=lambda line: len(line["extrapolated"]["not_linear"]))


def _summary(row: Mapping[Any, Any]) -> Summary:
    model = full_model(str(row["model_name_or_path"]).rsplit("/", 1)[-1])
    return {
        **summarize_row({column: None if pd.isna(cell) else cell for column, cell in row.items()}),
        "runs": (row["run"],),
        "model": model,
        "setting": setting_text(row),
        "overrides_engine": bool(json.loads(row["engine_override"])),
        # Equal for runs that differ only in setting or depth.
        "alike": (model, *(str(row[name]) for name in _SAME if name != "engine_override")),
        # The paper's stage with the same sharding; 0 without sharding.
        "stage": 3 if row["distributed_type"] == "FSDP" else 0 if pd.isna(stage := row["zero_stage"]) else int(stage),
        "preset_layers": row["preset_layers"],
    }


def setting_text(row: Mapping[Any, Any]) -> str:
    """Return the overrides and options of a run as text; "as shipped" if there are none."""
    overrides = [item.removeprefix("zero_optimization.") for item in json.loads(row["engine_override"])]
    return ", ".join([*overrides, *format_options(row)]) or AS_SHIPPED


def table1_rows(records: Records) -> list[Summary]:
    """Return summaries for the paper's Table 1, each with the paper's bytes for the model size."""
    rows = []
    for summary in summaries(records):
        size = re.fullmatch(r"gpt-([\d.]+)([bt])", summary["model"])
        if size is not None and summary["strategy"] in STAGES and summary["setting"] == AS_SHIPPED:
            parameters = float(size[1]) * _SIZES[size[2]]
            paper = paper_state_bytes(parameters, summary["stage"], summary["world_size"])
            rows.append(summary | {"paper_bytes": paper})
    return rows


def setting_pairs(records: Records) -> list[tuple[Summary, Summary]]:
    """Return pairs of summaries: a strategy as shipped, and the same with a changed setting."""
    entries = summaries(records)
    shipped = {entry["alike"]: entry for entry in entries if entry["setting"] == AS_SHIPPED}
    return [
        (shipped[entry["alike"]], entry)
        for entry in entries
        if entry["setting"] != AS_SHIPPED and entry["alike"] in shipped
    ]


def read_ring_bytes(collectives: Any) -> float:
    """Return the ring bytes of a row's collectives; NaN if no step was instrumented."""
    if not isinstance(collectives, str):
        return math.nan
    return float(ring_bytes(json.loads(collectives)))


def relative_ring_bytes(summary: Summary) -> float:
    """Ring bytes of one rank and step, in multiples of the model's weights; NaN if not linear."""
    return figure_or_nan(summary, "sent_bytes_per_step") / _weights(summary)


def figure_or_nan(summary: Summary, figure: str) -> float:
    """Return a figure of a summary; NaN if it is not linear in depth."""
    return _sum([summary[figure]])


def shares(summary: Summary, figure: str) -> dict[str, float | None]:
    """Return the bytes of each collective in multiples of the model's weights; None if not linear in depth."""
    counted = {name: counts[figure] for name, counts in sorted(summary["collectives"].items())}
    return {name: None if size is None else size / _weights(summary) for name, size in counted.items()}


def buffer_bytes(summary: Summary) -> float:
    """Bytes of the engine's buffers on one rank; NaN if one of them is unknown."""
    return _sum((summary["buffer_bytes"] or {}).values())


def rank_state_bytes(summary: Summary, before_step: bool = False) -> float:
    """Bytes of a rank's model state, at its largest or before the optimizer step; NaN if a part is unknown."""
    return sum(kind_bytes(summary, kind, before_step) for kind in STATE_KINDS)


def _sum(sizes: Iterable[float | None]) -> float:
    return float(sum(math.nan if size is None else size for size in sizes))


def _weights(summary: Summary) -> float:
    bytes_per_weight = 2 if in_engine(summary["precision"]) else 4
    return float(summary["model_parameters"]) * bytes_per_weight


def kind_bytes(summary: Summary, kind: str, before_step: bool = False) -> float:
    """Bytes of one kind of model state on a rank; NaN if a part is unknown."""
    if before_step and kind == "grads":
        gradients = (summary["grads_by_moment"] or {}).get("grads_before_step")
        return math.nan if gradients is None else _sum(gradients.values())
    return _sum(summary["state_bytes_per_rank"][kind][place] for place in STATE_PLACES)


def provenance_columns(summary: Summary) -> dict[str, str]:
    """Return two table columns: "measured" or the depths of the extrapolation, and its error."""
    fit = summary["extrapolated"]
    if fit is None:
        return {"Made by": "measured", "Line off by": ""}
    first, second = fit["depths"]
    return {
        "Made by": f"layers {first}, {second} of {fit['layers']}",
        "Line off by": f"{percent(fit['largest_residual_of_state'])} at {fit['checked_at_depth']}",
    }


STRONG, WEAK, PLANNED = "strong", "weak", "virtual ranks"
# Columns that are equal for runs that differ only in the number of machines.
_ALIKE = ["task", "model_name_or_path", "line", "engine_precision", "seq_length"]
_COLUMNS = [
    "model", "line", "strategy", "precision", "scaling", "machines", "fewest", "world_size", "tokens_per_s",
    "efficiency", "state", "gathered", "sent", "across", "leaving", "within", "peak", "predicted_state",
    "predicted_sent", "predicted_peak", "predicted_tokens_per_s", "predicted_efficiency",
]  # fmt: skip


def _has_rings_of_groups(strategy: str) -> bool:
    """Whether each rank of a group has a separate ring over all groups: of a replica, or of tensors under ZeRO."""
    if strategy not in WITH_GROUPS:
        return strategy == "hsdp"
    group, engine = read_strategy(strategy).group, read_strategy(strategy).deepspeed
    return engine is not None and group is not None and group.divides == "tensors"


def over_nodes(records: Records) -> pd.DataFrame:
    """Return one row per strategy and number of machines; strong scaling fixes the batch, weak that of a rank."""
    rows = [
        *_rows(real_runs(records).runs, "global_batch_size", STRONG),
        *_rows(real_runs(records).runs, "share", WEAK),
        # State and traffic of a virtual rank do not depend on the batch; its step time is not valid.
        *_rows(virtual_runs(records).runs, "virtual", PLANNED),
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _rows(runs: pd.DataFrame, fixed: str, scaling: str) -> list[dict[str, object]]:
    ended = runs[(runs["status_state"] == "ok") & (runs["confounded"].isna() | (runs["confounded"] == ""))]
    # Older records lack the traffic between machines.
    ended = ended[(ended["machines"] == 1) | ended["across_machines_bytes_per_step"].notna()]
    if ended.empty:
        return []
    ended = ended.assign(
        line=ended["arm"].map(lambda name: read_arm(name).without_ranks),
        share=ended["global_batch_size"].astype(float) / ended["world_size"].astype(float),
    )
    rows = []
    for (_, model, line, precision, *_), group in ended.groupby([*_ALIKE, fixed], dropna=False, sort=False):
        # Two machine counts are not a scaling plan: suites that vary settings have one small and one large job.
        if group["machines"].nunique() < (3 if scaling == PLANNED else 2):
            continue
        first = group[group["machines"] == group["machines"].min()]
        # The job that uses all ranks of these machines.
        first = first[first["world_size"] == first["world_size"].max()]
        per_rank = (first["tokens_per_s"] / first["world_size"].astype(float)).median()
        predicted_per_rank = predict_run(first.iloc[0])["predicted_tokens_per_s"] / int(first["world_size"].iloc[0])
        for (machines, ranks), runs_of_size in group.groupby(["machines", "world_size"]):
            speed = NAN if scaling == PLANNED else runs_of_size["tokens_per_s"].median()
            prediction = predict_run(runs_of_size.iloc[0])
            sent = runs_of_size["collectives"].map(read_ring_bytes).median()
            across = 0.0 if machines == 1 else runs_of_size["across_machines_bytes_per_step"].median()
            # A ring over all ranks in order leaves a machine once. Replicas and tensor groups within a machine have a
            # separate ring over all machines for each of their ranks.
            run, machine_ranks = runs_of_size.iloc[0], ranks / machines
            strategy = str(run["strategy"])
            rings = ranks_per_group(run) if _has_rings_of_groups(strategy) else 1
            leaving = across * rings if rings <= machine_ranks or not across else NAN
            rows.append(
                {
                    "model": str(model).rsplit("/", 1)[-1],
                    "line": str(line),
                    "strategy": strategy,
                    "precision": precision,
                    "scaling": scaling,
                    "machines": int(machines),
                    "fewest": int(first["machines"].iloc[0]),
                    "world_size": int(ranks),
                    "tokens_per_s": speed,
                    "efficiency": speed / ranks / per_rank,
                    "state": state_bytes(runs_of_size),
                    "gathered": runs_of_size["forward_gathers_bytes"].median(),
                    "sent": sent,
                    "across": across,
                    "leaving": leaving,
                    "within": sent * machine_ranks - leaving,
                    "peak": runs_of_size["peak_memory_gib_allocated"].median(),
                    **prediction,
                    "predicted_efficiency": prediction["predicted_tokens_per_s"] / ranks / predicted_per_rank,
                }
            )
    return rows
