"""Tables of virtual ranks: beside the ZeRO paper's Table 1, and stage by setting. Made from run directories.

A model that a box holds whole is measured; of one that was run at three depths the line over layers is shown, and says
so: with the depths, and with how far off it is at the third.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from study.records import STATE_PLACES, RecordError, Run, find_runs, read_run
from study.theory.paper import papers_state_bytes
from study.virtual_figures import extrapolate, summary_of

GB = 1e9
_AS_SHIPPED = "as shipped"
# What decides that two runs are one model at two depths, and nothing else.
_SAME = ("task", "precision", "seq_length", "per_device_train_batch_size", "engine_override", "gradient_checkpointing")


def read_summaries(root: Path) -> list[dict[str, Any]]:
    """One summary per model, strategy, world and setting; depths of one model become one that is extrapolated."""
    groups: defaultdict[tuple[Any, ...], dict[int, Run]] = defaultdict(dict)
    for run in _virtual_runs(root):
        groups[_key(run)][run.engine["model_layers"]] = run
    summaries = []
    for runs in groups.values():
        summary = _summary(runs)
        if summary is not None:
            example = next(iter(runs.values()))
            summary["setting"] = setting_of(example.config["engine_override"])
            summary["model"] = _base(example.config["model_name_or_path"])
            summaries.append(summary)
    return sorted(summaries, key=lambda one: (one["model"], one["world_size"], one["strategy"], one["setting"]))


def setting_of(overrides: list[str]) -> str:
    return ", ".join(item.removeprefix("zero_optimization.") for item in overrides) or _AS_SHIPPED


def table1(root: Path) -> pd.DataFrame:
    """Model state per rank against the paper's 2 + 2 + 12 bytes per parameter, of the size that the model is named."""
    rows = []
    for summary in read_summaries(root):
        size = re.fullmatch(r"gpt-([\d.]+)([bt])", summary["model"])
        stage = re.fullmatch(r"zero([123])", summary["strategy"])
        if size is None or stage is None or summary["setting"] != _AS_SHIPPED:
            continue
        named = float(size[1]) * {"b": 1e9, "t": 1e12}[size[2]]
        paper = papers_state_bytes(named, int(stage[1]), summary["world_size"])
        rows.append(
            {
                "model": summary["model"],
                "parameters, B": summary["model_parameters"] / GB,
                "ranks": summary["world_size"],
                "strategy": summary["strategy"],
                "paper, GB": paper / GB,
                "here, GB": summary["state_bytes_total"] / GB,
                "difference": summary["state_bytes_total"] / paper - 1,
                "per parameter as here": papers_state_bytes(
                    summary["model_parameters"], int(stage[1]), summary["world_size"]
                )
                / GB,
                "buffers, GB": sum(size or 0 for size in (summary["buffer_bytes"] or {}).values()) / GB,
                "made by": _made_by(summary),
            }
        )
    return pd.DataFrame(rows)


def settings_table(root: Path) -> pd.DataFrame:
    """Memory in GB, and what is sent in one step as multiples of the model's weights, by stage and setting."""
    rows = []
    for summary in read_summaries(root):
        weights = summary["model_parameters"] * _bytes_per_weight(summary["precision"])
        sent = {f"{name} x model": counts["payload_bytes"] / weights for name, counts in summary["collectives"].items()}
        rows.append(
            {
                "model": summary["model"],
                "ranks": summary["world_size"],
                "strategy": summary["strategy"],
                "setting": summary["setting"],
                **{f"{kind}, GB": _held(summary, kind) / GB for kind in ("params", "grads", "optimizer")},
                "gradients in the bucket, GB": _gb(summary["grads_in_bucket_bytes"]),
                "buffers, GB": sum(size or 0 for size in (summary["buffer_bytes"] or {}).values()) / GB,
                **{name: share for name, share in sent.items() if share >= 0.005},
                "calls": summary["comm_calls_per_step"],
                "made by": _made_by(summary),
            }
        )
    return pd.DataFrame(rows)


def effects(root: Path) -> pd.DataFrame:
    """Each setting beside the strategies as shipped: what it changes, in GB and in multiples of the model."""
    table = settings_table(root)
    if table.empty:
        return table
    keys = ["model", "ranks", "strategy"]
    figures = [column for column in table.columns if column not in (*keys, "setting", "made by")]
    known = {tuple(row[key] for key in keys): row for row in table.to_dict("records") if row["setting"] == _AS_SHIPPED}
    rows = []
    for row in table.to_dict("records"):
        shipped = known.get(tuple(row[key] for key in keys))
        if shipped is not None and row["setting"] != _AS_SHIPPED:
            # A collective that one of the two does not use at all is 0 of the model there.
            change = {figure: _number(row[figure]) - _number(shipped[figure]) for figure in figures}
            rows.append({**{key: row[key] for key in (*keys, "setting")}, **change})
    return pd.DataFrame(rows)


def _number(value: float) -> float:
    return 0.0 if pd.isna(value) else value


def _virtual_runs(root: Path) -> Iterator[Run]:
    for path in find_runs(root):
        try:
            run = read_run(path)
        except RecordError:
            continue
        if run.state == "ok" and run.engine["virtual"]:
            yield run


def _key(run: Run) -> tuple[Any, ...]:
    known = (run.engine["strategy"], run.engine["world_size"], run.engine["virtual_rank"])
    return (_base(run.config["model_name_or_path"]), *known, *(str(run.config[name]) for name in _SAME))


def _base(model: str) -> str:
    return re.sub(r"-\d+layers$", "", model.rsplit("/", 1)[-1])


def _summary(runs: Mapping[int, Run]) -> dict[str, Any] | None:
    """The whole model where it was run, else the line over its three smallest depths; nothing of fewer."""
    whole = [run for run in runs.values() if run.engine["model_layers"] == run.engine["preset_layers"]]
    if whole:
        return summary_of(whole[0])
    depths = sorted(runs)[:3]
    if len(depths) < 3:
        return None
    chosen = (depths[0], depths[1], depths[2])
    return extrapolate([runs[depth] for depth in chosen], chosen, runs[depths[0]].engine["preset_layers"])


def _held(summary: Mapping[str, Any], kind: str) -> float:
    return sum(summary["state_bytes_per_rank"][kind][place] or 0 for place in STATE_PLACES)


def _gb(size: float | None) -> float | None:
    return None if size is None else size / GB


def _bytes_per_weight(precision: str) -> int:
    return 2 if precision in ("bf16-engine", "fp16") else 4


def _made_by(summary: Mapping[str, Any]) -> str:
    fit = summary["extrapolated"]
    if fit is None:
        return "measured"
    depths = f"{fit['depths'][0]}, {fit['depths'][1]} of {fit['layers']} layers"
    return f"extrapolated from {depths}; off by {fit['largest_residual_of_state']:.1e} at {fit['checked_at_depth']}"
