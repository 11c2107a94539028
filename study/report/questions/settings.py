"""Traffic and memory by stage and setting; nothing but the setting differs between two runs that are compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from study.predictor.floor import papers_traffic
from study.records.frames import Records
from study.report.plots.virtual import settings
from study.report.questions.question import Answer, Question, span
from study.virtual.records import (
    AS_SHIPPED,
    BOOKKEEPING,
    GB,
    STAGES,
    Summary,
    buffer_bytes,
    changes,
    held,
    known,
    made_by,
    rank_state_bytes,
    sent,
    shares,
    summaries,
)

# Below this a difference in traffic or memory is padding and bookkeeping.
_NOTABLE = 0.01
_THREE_DIGITS = "{:.3g}".format
_X_PAPER, _X_WEIGHTS = "Ring bytes (NCCL), x paper", "Ring bytes (NCCL), x weights"


def _sent_x_paper(one: Summary) -> float:
    paper = papers_traffic(one["stage"], one["world_size"])
    return sent(one) / paper if paper else math.nan


_FIGURES: dict[str, Callable[[Summary], float]] = {
    _X_PAPER: _sent_x_paper,
    _X_WEIGHTS: sent,
    "Calls": lambda one: known(one, "comm_calls_per_step"),
    "State, GB": lambda one: rank_state_bytes(one) / GB,
    "Params, GB": lambda one: held(one, "params") / GB,
    "Grads, GB": lambda one: held(one, "grads") / GB,
    "Optimizer, GB": lambda one: held(one, "optimizer") / GB,
    "Gradients in the bucket, GB": lambda one: known(one, "grads_in_bucket_bytes") / GB,
    "Buffers, GB": lambda one: buffer_bytes(one) / GB,
}
# Where all cases of a setting are one row, and where each is one.
_OF_A_SETTING = (_X_PAPER, "Calls", "State, GB", "Gradients in the bucket, GB", "Buffers, GB")
_OF_A_CASE = tuple(name for name in _FIGURES if name not in (_X_PAPER, "State, GB"))


def answer(records: Records) -> Answer | None:
    shipped: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for one in summaries(records):
        if one["setting"] == AS_SHIPPED and one["strategy"] in STAGES:
            shipped[one["strategy"]].append(_sent_x_paper(one))
    known_of = {stage: ratios for stage, ratios in shipped.items() if not all(map(math.isnan, ratios))}
    if not known_of:
        return None
    told = [f"{span(ratios, _THREE_DIGITS)} (`{stage}`)" for stage, ratios in known_of.items()]
    sentence = f"As shipped the engine sends {', '.join(told)} times the paper's traffic, in ring bytes (NCCL)."
    rows: list[dict[str, Any]] = [
        {"Strategy": stage, "Setting": AS_SHIPPED, "Cases": len(some), _X_PAPER: span(some, _THREE_DIGITS)}
        for stage, some in known_of.items()
    ]
    moved: defaultdict[tuple[str, str], list[tuple[Summary, Summary]]] = defaultdict(list)
    for before, after in changes(records):
        moved[after["strategy"], after["setting"]].append((before, after))
    for (strategy, setting), pairs in moved.items():
        effects = {name: moves for name in _OF_A_SETTING if (moves := _moves(pairs, _FIGURES[name]))}
        rows.append({"Strategy": strategy, "Setting": setting, "Cases": len(pairs)} | effects)
    rows.sort(key=lambda each: each["Strategy"])
    notes = ("Of a setting only what it moves by more than 1 % is shown, as shipped → changed.",) if moved else ()
    return Answer(sentence, pd.DataFrame(rows).fillna(""), notes)


def _moves(pairs: Sequence[tuple[Summary, Summary]], figure: Callable[[Summary], float]) -> str:
    """From which range to which; nothing where it did not move, or is not known of both."""
    figures = [(figure(before), figure(after)) for before, after in pairs]
    figures = [pair for pair in figures if not math.isnan(sum(pair))]
    if not any(abs(after - before) > _NOTABLE * max(abs(before), abs(after)) for before, after in figures):
        return ""
    return " → ".join(span((pair[place] for pair in figures), _THREE_DIGITS) for place in (0, 1))


def settings_table(records: Records) -> pd.DataFrame:
    """Memory in GB, and the ring bytes of one step as multiples of the model's weights."""
    return pd.DataFrame(
        {
            **_case(one),
            **{name: _FIGURES[name](one) for name in ("Params, GB", "Grads, GB", "Optimizer, GB")},
            "Parameters kept whole, GB": known(one, "kept_whole_bytes") / GB,
            **{name: _FIGURES[name](one) for name in ("Gradients in the bucket, GB", "Buffers, GB", _X_WEIGHTS)},
            "Paper, x weights": papers_traffic(one["stage"], one["world_size"]),
            "Payload, x weights": _payloads(one),
            "Calls": _FIGURES["Calls"](one),
            **made_by(one),
        }
        for one in summaries(records)
    )


def _case(one: Summary) -> dict[str, object]:
    return {
        "Model": one["model"], "Ranks": one["world_size"], "Strategy": one["strategy"], "Precision": one["precision"],
        "Setting": one["setting"],
    }  # fmt: skip


def _payloads(one: Summary) -> str:
    shown = [
        f"{name} {'?' if share is None else f'{share:.2f}'}"
        for name, share in shares(one, "payload_bytes").items()
        if share is None or share >= BOOKKEEPING
    ]
    return ", ".join(shown) or "nothing"


def setting_effects_table(records: Records) -> pd.DataFrame:
    rows = []
    for before, after in changes(records):
        moved = {name: _change(_FIGURES[name](before), _FIGURES[name](after)) for name in _OF_A_CASE}
        rows.append(_case(after) | moved | {"Collectives before": _payloads(before), "and after": _payloads(after)})
    return pd.DataFrame(rows)


def _change(before: float, after: float) -> str:
    """Nothing where nothing moved, a question mark where one of the two is not known."""
    if math.isnan(before + after):
        return "?"
    if abs(after - before) <= 1e-3 * max(abs(before), abs(after), 1e-9):
        return ""
    return f"{before:.4g} to {after:.4g}"


QUESTION = Question(
    name="settings",
    title="Where does the engine depart from the paper, and which setting does it?",
    answer=answer,
    nothing="No virtual run here is of a ZeRO stage as shipped, with its traffic.",
    tables={"settings": settings_table, "setting_effects": setting_effects_table},
    figures={"settings": settings},
    notebook="virtual_cluster",
)
