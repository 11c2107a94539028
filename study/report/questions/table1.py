"""Model state of one of N ranks against the ZeRO paper: 2 + 2 + 12 bytes per parameter, sharded by stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from study.predictor.floor import papers_state_bytes
from study.records.frames import Records
from study.report.plots.virtual import table1
from study.report.questions.question import Answer, Question, change_text
from study.virtual.records import (
    AS_SHIPPED,
    GB,
    STAGES,
    Summary,
    buffer_bytes,
    known,
    made_by,
    rank_state_bytes,
    summaries,
    table1_rows,
)

_NEAR = 0.01


def answer(records: Records) -> Answer | None:
    of_table1 = [one for one in table1_rows(records) if not math.isnan(rank_state_bytes(one))]
    rows = of_table1 or _in_the_papers_precision(records)
    if not rows:
        return None
    worst = max(rows, key=lambda one: abs(_off(one)))
    which = f"`{worst['strategy']}` of `{worst['model']}` at {worst['world_size']} ranks"
    sentence = (
        f"What the paper's formula says: {_near(rows)} cases are within 1 % of it, and the furthest, {which}, is"
        f" {change_text(_off(worst))} off."
    )
    lines = sum(one["extrapolated"] is not None for one in rows)
    made = f"Measured whole: {len(rows) - lines} of these. Lines over layers: {lines}."
    if not of_table1:
        return Answer(sentence, _by_strategy(rows), (made,))
    notes = ["GB of model state, in brackets the paper's formula, not rounded; a line over layers is marked ~.", made]
    excess, kept = rank_state_bytes(worst) - worst["paper_bytes"], known(worst, "kept_whole_bytes")
    if excess > 0 and kept > 0:
        notes.append(
            f"The furthest holds {excess / 1e6:.2f} MB more than the paper says, with {kept / 1e6:.2f} MB of parameters"
            " kept whole (`stage3_param_persistence_threshold`)."
        )
    return Answer(sentence, state_beside_paper(rows), tuple(notes))


def _near(rows: Sequence[Summary]) -> str:
    return f"{sum(abs(_off(one)) <= _NEAR for one in rows)} of {len(rows)}"


def _off(one: Summary) -> float:
    return float(rank_state_bytes(one) / one["paper_bytes"] - 1)


def _in_the_papers_precision(records: Records) -> list[Summary]:
    """Of any other model the paper's formula for its number of parameters; few settings move state, so as shipped."""
    return [
        one | {"paper_bytes": papers_state_bytes(one["model_parameters"], one["stage"], one["world_size"])}
        for one in summaries(records)
        if one["strategy"] in STAGES
        and one["precision"] == "bf16-engine"
        and one["setting"] == AS_SHIPPED
        and not math.isnan(rank_state_bytes(one))
    ]


def _by_strategy(rows: Sequence[Summary]) -> pd.DataFrame:
    table = []
    for strategy in dict.fromkeys(one["strategy"] for one in rows):
        of_strategy = [one for one in rows if one["strategy"] == strategy]
        worst = max(of_strategy, key=lambda one: abs(_off(one)))
        table.append({
            "Strategy": strategy,
            "Within 1 %": _near(of_strategy),
            "Furthest": change_text(_off(worst)),
            "Which is": f"{worst['model']} at {worst['world_size']}",
        })  # fmt: skip
    return pd.DataFrame(table)


def state_beside_paper(rows: Sequence[Summary]) -> pd.DataFrame:
    """One row per model and number of ranks: GB per stage, and in brackets what the paper says."""
    table: dict[tuple[str, int], dict[str, object]] = {}
    for one in rows:
        about = "" if one["extrapolated"] is None else "~ "
        line = table.setdefault((one["model"], one["world_size"]), {"Model": one["model"], "Ranks": one["world_size"]})
        line[f"{one['strategy']}, GB"] = f"{about}{rank_state_bytes(one) / GB:.4g} ({one['paper_bytes'] / GB:.4g})"
    return pd.DataFrame(table.values(), columns=["Model", "Ranks", *(f"{stage}, GB" for stage in STAGES)]).fillna("-")


def table1_table(records: Records) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Model": one["model"],
            "Ranks": one["world_size"],
            "Strategy": one["strategy"],
            "Paper, GB": one["paper_bytes"] / GB,
            "Here, GB": rank_state_bytes(one) / GB,
            "Difference": f"{_off(one):+.2%}",
            "Parameters, B": one["model_parameters"] / GB,
            "Bytes per parameter here": rank_state_bytes(one) / one["model_parameters"],
            "Bytes per parameter, paper": papers_state_bytes(1, one["stage"], one["world_size"]),
            "Buffers beside the state, GB": buffer_bytes(one) / GB,
            "Of it parameters kept whole, GB": known(one, "kept_whole_bytes") / GB,
            **made_by(one),
        }
        for one in table1_rows(records)
    )


QUESTION = Question(
    name="table1",
    title="What does one of N ranks hold, beside the ZeRO paper?",
    answer=answer,
    nothing="No virtual run here is of a ZeRO stage in the paper's mixed precision.",
    tables={"table1": table1_table},
    figures={"table1": table1},
    notebook="virtual_cluster",
)
