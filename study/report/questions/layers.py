"""How virtual figures were made: a model held whole was measured, a larger one is a line over its layers."""

from __future__ import annotations

import math

import pandas as pd

from study.records.frames import Records, virtual
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.report.questions.question import Answer, Question
from study.virtual.records import (
    GB,
    Summary,
    groups,
    line_over,
    rank_state_bytes,
    sent,
    sent_bytes,
    setting_of,
    summaries,
    whole,
)


def answer(records: Records) -> Answer | None:
    runs = virtual(records).runs
    if runs.empty:
        return None
    found = summaries(records)
    lines = [one for one in found if one["extrapolated"] is not None]
    lost = runs[runs["status_state"] != "ok"]
    sentence = (
        f"{len(found) - len(lines)} of {len(found)} cases are measured whole and {len(lines)} are lines over layers;"
        f" {len(lost)} of {len(runs)} runs did not end well."
    )
    table = pd.DataFrame(_of_model(model, found) for model in dict.fromkeys(one["model"] for one in found))
    notes = ["A virtual rank receives nothing that is real: here is no loss, no accuracy, and no throughput."]
    if lines:
        notes.append("Where no line holds there is no figure.")
    notes += [
        f"{len(group)} of `{model}` ended {state}, such as: {group['status_reason'].iloc[0]}."
        for (model, state), group in lost.groupby(["model_name_or_path", "status_state"])
    ]
    return Answer(sentence, table, tuple(notes))


def _of_model(model: str, found: list[Summary]) -> dict[str, object]:
    rows = [one for one in found if one["model"] == model]
    fits = [one["extrapolated"] for one in rows if one["extrapolated"] is not None]
    return {
        "Model": model,
        "Measured whole": len(rows) - len(fits),
        "Lines": len(fits),
        "Line off by at most": f"{max(fit['largest_residual_at_target'] for fit in fits):.1%}" if fits else "-",
        "No line holds for": ", ".join(sorted({_family(name) for fit in fits for name in fit["not_linear"]})) or "-",
        "Thresholds crossed": ", ".join(sorted({name for fit in fits for name in fit["crossed"]})) or "-",
    }


def _family(figure: str) -> str:
    """A collective's or a buffer's name without what was counted of it."""
    return figure.rsplit(".", 1)[0] if "." in figure else figure


def lines_table(records: Records) -> pd.DataFrame:
    """Where a model ran both whole and at three depths, its line against it."""
    rows = []
    for depths in groups(records):
        one, line = whole(depths), line_over(depths)
        if one is not None and line is not None:
            traffic = sent(line) / sent(one) - 1
            rows.append({
                "Model": one["model"], "Ranks": one["world_size"], "Strategy": one["strategy"],
                "Setting": one["setting"],
                "State of the line, x whole": f"{rank_state_bytes(line) / rank_state_bytes(one) - 1:+.2%}",
                "Ring bytes (NCCL), x whole": "-" if math.isnan(traffic) else f"{traffic:+.2%}",
            })  # fmt: skip
    return pd.DataFrame(rows)


def virtual_runs_table(records: Records) -> pd.DataFrame:
    """Every run as it ended; a model at three depths is three runs."""
    return pd.DataFrame(
        {
            "Strategy": run["strategy"],
            "Model": run["model_name_or_path"],
            "Precision": run["engine_precision"],
            "Rank": f"{run['virtual_rank']} of {run['world_size']}" if pd.notna(run["virtual_rank"]) else "",
            "Setting": setting_of(run) if isinstance(run["engine_override"], str) else "",
            "State, GB": sum(run[f"{kind}_bytes_{place}"] for kind in STATE_KINDS for place in STATE_PLACES) / GB,
            "Ring bytes (NCCL) per step, GB": sent_bytes(run["collectives"]) / GB,
            "Host peak, GiB": run["host_peak_rss_gib"],
            "Run, s": run["runtime_s"],
            "Outcome": f"{run['status_state']}: {run['status_reason']}" if run["status_state"] != "ok" else "ok",
        }
        for run in virtual(records).runs.to_dict("records")
    )


QUESTION = Question(
    name="layers",
    title="How were these virtual ranks measured, and what do they not say?",
    answer=answer,
    nothing="No run here is virtual.",
    tables={"lines_beside_whole_models": lines_table, "virtual_runs": virtual_runs_table},
    notebook="virtual_cluster",
)
