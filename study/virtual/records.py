"""Virtual ranks in reports: one summary per model, strategy, world and setting.

A model that fitted a box is measured. A model that ran at three depths is a line over layers, with its depths and its
error at the third. Fewer depths are summaries of their own.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from study.config.text import percent
from study.host.memory import GIB
from study.predictor.records import predicted
from study.predictor.state import papers_state_bytes
from study.records.frames import Records, real, virtual
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.strategy_runs import NAN, state_bytes
from study.records.virtual_summary import RankSummary, ring_bytes
from study.records.workloads import options_of
from study.virtual.lines import extrapolate

GB = 1e9
AS_SHIPPED = "as shipped"
Summary = dict[str, Any]
# Two runs with these alike are one model at two depths.
_SAME = ("task", "precision", "seq_length", "per_device_train_batch_size", "gradient_checkpointing", "strategy",
         "world_size", "virtual_rank", "device_memory_cap_gib", "engine_override")  # fmt: skip
# The paper's stages; tables have offload and other engines, too.
STAGES = ("zero1", "zero2", "zero3")
_SIZES = {"b": 1e9, "t": 1e12}
# Collectives that carry less than this share of the weights are bookkeeping, such as a gradient norm's.
BOOKKEEPING = 0.005


def summaries(records: Records) -> list[Summary]:
    """Return one per model, strategy, world and setting; three depths of one model become an extrapolated one."""
    found: list[Summary] = []
    for depths in groups(records):
        if (summary := whole(depths) or line_over(depths)) is not None:
            found.append(summary)
            continue
        for layers, one in depths.items():
            model = f"{one['model']}-{layers}layers"
            found.append(one | {"model": model, "alike": (model, *one["alike"][1:])})
    return sorted(
        found,
        key=lambda one: (one["model_parameters"], one["world_size"], one["strategy"], one["setting"] != AS_SHIPPED,
                         one["setting"]),
    )  # fmt: skip


def groups(records: Records) -> list[dict[int, Summary]]:
    """Return the runs of one model at several depths by number of layers, where everything else is alike."""
    found: defaultdict[tuple[Any, ...], dict[int, Summary]] = defaultdict(dict)
    ended = virtual(records).runs
    ended = ended[(ended["status_state"] == "ok") & ended["collectives"].notna() & ended["model_layers"].notna()]
    for row in ended.to_dict("records"):
        summary = _summary(row)
        found[(*summary["alike"], summary["setting"])][summary["model_layers"]] = summary
    return list(found.values())


def whole(depths: Mapping[int, Summary]) -> Summary | None:
    """Return the run of the model at its own depth."""
    return next((one for one in depths.values() if one["model_layers"] == one["preset_layers"]), None)


def line_over(depths: Mapping[int, Summary]) -> Summary | None:
    """Return the line over the three smallest depths other than the model's own; None with fewer."""
    partial = sorted(layers for layers, one in depths.items() if layers != one["preset_layers"])[:3]
    if len(partial) < 3:
        return None
    chosen = [depths[layers] for layers in partial]
    first = chosen[0]
    line = extrapolate([one["rank_summary"] for one in chosen], first["model"], int(first["preset_layers"]))
    return first | line.document() | {"rank_summary": line}


def _summary(row: Mapping[Any, Any]) -> Summary:
    """Return the rank of a row of the table of runs, with its names in reports."""
    model = re.sub(r"-\d+layers$", "", str(row["model_name_or_path"]).rsplit("/", 1)[-1])
    rank = RankSummary.of_row({column: None if pd.isna(cell) else cell for column, cell in row.items()})
    return {
        **rank.document(),
        "rank_summary": rank,
        "model": model,
        "setting": setting_of(row),
        # The same for two runs that differ in their setting or depth alone.
        "alike": (model, *(str(row[name]) for name in _SAME if name != "engine_override")),
        # The paper's stage of the same sharding, 0 where nothing is sharded.
        "stage": 3 if row["distributed_type"] == "FSDP" else 0 if pd.isna(stage := row["zero_stage"]) else int(stage),
        "preset_layers": row["preset_layers"],
    }


def setting_of(row: Mapping[Any, Any]) -> str:
    overrides = [item.removeprefix("zero_optimization.") for item in json.loads(row["engine_override"])]
    return ", ".join([*overrides, *options_of(row)]) or AS_SHIPPED


def table1_rows(records: Records) -> list[Summary]:
    """Return the rows of the paper's Table 1, each with the paper's bytes for the size in its name."""
    found = []
    for summary in summaries(records):
        size = re.fullmatch(r"gpt-([\d.]+)([bt])", summary["model"])
        if size is not None and summary["strategy"] in STAGES and summary["setting"] == AS_SHIPPED:
            named = float(size[1]) * _SIZES[size[2]]
            paper = papers_state_bytes(named, summary["stage"], summary["world_size"])
            found.append(summary | {"paper_bytes": paper})
    return found


def changes(records: Records) -> list[tuple[Summary, Summary]]:
    """Return pairs: the summary of a strategy as shipped, and one with a changed setting."""
    found = summaries(records)
    shipped = {one["alike"]: one for one in found if one["setting"] == AS_SHIPPED}
    return [(shipped[one["alike"]], one) for one in found if one["setting"] != AS_SHIPPED and one["alike"] in shipped]


def ring_bytes_of(collectives: Any) -> float:
    """Return ring bytes of a row's collectives; NaN where no step was watched."""
    if not isinstance(collectives, str):
        return math.nan
    return float(ring_bytes(json.loads(collectives)))


def relative_ring_bytes(summary: Summary) -> float:
    """Ring bytes of one rank and step, in multiples of the model's weights; NaN without a line."""
    return known(summary, "sent_bytes_per_step") / _weights(summary)


def known(summary: Summary, figure: str) -> float:
    """Return a figure; NaN without a line over layers."""
    return _sum([summary[figure]])


def shares(summary: Summary, figure: str) -> dict[str, float | None]:
    """Return each collective's share, in multiples of the model's weights; None without a line over layers."""
    counted = {name: counts[figure] for name, counts in sorted(summary["collectives"].items())}
    return {name: None if size is None else size / _weights(summary) for name, size in counted.items()}


def buffer_bytes(summary: Summary) -> float:
    return _sum((summary["buffer_bytes"] or {}).values())


def rank_state_bytes(summary: Summary) -> float:
    return sum(state_bytes_of(summary, kind) for kind in STATE_KINDS)


def _sum(sizes: Iterable[float | None]) -> float:
    """Return the sum; NaN where one of them has no figure, such as one without a line over layers."""
    return float(sum(math.nan if size is None else size for size in sizes))


def _weights(summary: Summary) -> float:
    each = 2 if summary["precision"] in ("bf16-engine", "fp16-engine") else 4
    return float(summary["model_parameters"]) * each


def state_bytes_of(summary: Summary, kind: str) -> float:
    return _sum(summary["state_bytes_per_rank"][kind][place] for place in STATE_PLACES)


def made_by(summary: Summary) -> dict[str, str]:
    """Return two columns: measured, or the depths of the line; and the line's error."""
    fit = summary["extrapolated"]
    if fit is None:
        return {"Made by": "measured", "Line off by": ""}
    first, second = fit["depths"]
    return {
        "Made by": f"layers {first}, {second} of {fit['layers']}",
        "Line off by": f"{percent(fit['largest_residual_of_state'])} at {fit['checked_at_depth']}",
    }


STRONG, WEAK, PLANNED = "strong", "weak", "planned"
# Keys of runs that differ in the number of machines alone.
_ALIKE = ["task", "model_name_or_path", "line", "engine_precision", "seq_length"]
_COLUMNS = [
    "model", "line", "strategy", "scaling", "machines", "fewest", "world_size", "tokens_per_s", "efficiency", "state",
    "sent", "across", "peak", "predicted_state", "predicted_sent", "predicted_peak", "predicted_tokens_per_s",
    "predicted_efficiency",
]  # fmt: skip


def over_nodes(records: Records) -> pd.DataFrame:
    """Return a row per strategy and number of machines. Strong scaling keeps the global batch, weak a rank's share."""
    found = [
        *_rows(real(records).runs, "global_batch_size", STRONG),
        *_rows(real(records).runs, "share", WEAK),
        # State and traffic of a virtual rank do not depend on the batch; its time is not a figure.
        *_rows(virtual(records).runs, "virtual", PLANNED),
    ]
    return pd.DataFrame(found, columns=_COLUMNS)


def _rows(runs: pd.DataFrame, kept: str, scaling: str) -> list[dict[str, object]]:
    ended = runs[(runs["status_state"] == "ok") & (runs["confounded"].isna() | (runs["confounded"] == ""))]
    # Older records do not have the traffic between machines.
    ended = ended[(ended["machines"] == 1) | ended["across_machines_bytes_per_step"].notna()]
    if ended.empty:
        return []
    ended = ended.assign(
        line=ended["arm"].str.replace(r" x\d+", "", regex=True),
        share=ended["global_batch_size"].astype(float) / ended["world_size"].astype(float),
    )
    rows = []
    for (_, model, line, *_), alike in ended.groupby([*_ALIKE, kept], dropna=False, sort=False):
        # Two numbers of machines are not a plan: suites that vary settings have one small and one large job.
        if alike["machines"].nunique() < (3 if scaling == PLANNED else 2):
            continue
        first = alike[alike["machines"] == alike["machines"].min()]
        # The largest number of ranks, which fills these machines.
        first = first[first["world_size"] == first["world_size"].max()]
        per_rank = (first["tokens_per_s"] / first["world_size"].astype(float)).median()
        predicted_per_rank = predicted(first.iloc[0]).tokens_per_s / int(first["world_size"].iloc[0])
        for (machines, ranks), some in alike.groupby(["machines", "world_size"]):
            speed = NAN if scaling == PLANNED else some["tokens_per_s"].median()
            prediction = predicted(some.iloc[0])
            rows.append({
                "model": str(model).rsplit("/", 1)[-1], "line": str(line), "strategy": some["strategy"].iloc[0],
                "scaling": scaling, "machines": int(machines), "fewest": int(first["machines"].iloc[0]),
                "world_size": int(ranks), "tokens_per_s": speed, "efficiency": speed / ranks / per_rank,
                "state": state_bytes(some), "sent": some["collectives"].map(ring_bytes_of).median(),
                "across": 0.0 if machines == 1 else some["across_machines_bytes_per_step"].median(),
                "peak": some["peak_memory_gib_allocated"].median(), "predicted_state": prediction.state_bytes,
                "predicted_sent": prediction.sent_bytes, "predicted_peak": prediction.peak_bytes / GIB,
                "predicted_tokens_per_s": prediction.tokens_per_s,
                "predicted_efficiency": prediction.tokens_per_s / ranks / predicted_per_rank,
            })  # fmt: skip
    return rows
