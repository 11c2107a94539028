"""The answers of records that are all virtual: what a rank holds and sends, beside the paper, and which setting is why.

Every figure is computed from the records.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from study.report.questions.finding import Finding
from study.report.questions.virtual_tables import (
    AS_SHIPPED,
    GB,
    STAGES,
    Summary,
    bucket_gradients,
    buffer_bytes,
    calls,
    changes,
    groups,
    is_whole,
    kept_whole,
    line_over,
    sent,
    state_bytes,
    summaries,
    table1_rows,
)
from study.report.records.frames import Records
from study.theory.paper import papers_state_bytes, papers_traffic

QUESTIONS = (
    "What does one of N ranks hold, beside the ZeRO paper?",
    "Where does the engine depart from the paper, and which setting does it?",
    "What do these records not say?",
)
# Below this a difference in traffic or memory is padding and bookkeeping.
_NOTABLE = 0.01


def virtual_findings(records: Records) -> list[Finding]:
    found = summaries(records)
    return [
        Finding(QUESTIONS[0], *_holds(records, found)),
        Finding(QUESTIONS[1], *_departs(records, found)),
        Finding(QUESTIONS[2], *_unsaid(records, found)),
    ]


def _holds(records: Records, found: Sequence[Summary]) -> tuple[str, tuple[str, ...]]:
    of_table1 = table1_rows(records)
    if not of_table1:
        return _state_of_others(found)
    models: defaultdict[str, list[Summary]] = defaultdict(list)
    for summary in of_table1:
        models[summary["model"]].append(summary)
    lines, details = [], []
    for model, rows in models.items():
        # A state of which no line holds is in the tables, as not known.
        rows = [row for row in rows if not math.isnan(state_bytes(row))]
        off = {_name(row): state_bytes(row) / row["paper_bytes"] - 1 for row in rows}
        if not off:
            continue
        worst = max(off, key=lambda name: abs(off[name]))
        measured = sum(row["extrapolated"] is None for row in rows)
        lines.append(
            f"`{model}`: of {_count(rows, 'cell')} of Table 1 ({measured} measured whole, {len(rows) - measured}"
            f" extrapolated over layers) {sum(abs(value) <= _NOTABLE for value in off.values())} are within"
            f" {_NOTABLE:.0%} of the paper. The furthest is {worst}, {off[worst]:+.2%}{_kept_whole(rows, worst)}."
        )
        details += [
            f"{_name(row)}: {state_bytes(row) / GB:.4g} GB here, {row['paper_bytes'] / GB:.4g} GB in the paper."
            for row in rows
        ]
    return "\n".join(lines), (*details, *_line_against_whole(records))


def _kept_whole(rows: Sequence[Summary], name: str) -> str:
    """The small parameters that stage 3 does not shard, where they are what is too much."""
    row = next(row for row in rows if _name(row) == name)
    kept, excess = kept_whole(row), state_bytes(row) - row["paper_bytes"]
    if not (kept > 0 and excess > 0):
        return ""
    return (
        f": {excess / 1e6:.2f} MB more, with {kept / 1e6:.2f} MB of parameters kept whole"
        " (`stage3_param_persistence_threshold`)"
    )


def _state_of_others(found: Sequence[Summary]) -> tuple[str, tuple[str, ...]]:
    """Against 16 bytes per parameter, which is what the paper counts in its mixed precision."""
    rows = [one for one in found if one["strategy"] in STAGES and one["precision"] == "bf16-engine"]
    if not rows:
        return "No run here is of a ZeRO stage in the paper's mixed precision.", ()
    off = {}
    for row in rows:
        paper = papers_state_bytes(row["model_parameters"], row["stage"], row["world_size"])
        if not math.isnan(state_bytes(row)):
            off[f"{_name(row)}, {row['setting']}"] = state_bytes(row) / paper - 1
    worst = max(off, key=lambda name: abs(off[name]))
    near = sum(abs(value) <= _NOTABLE for value in off.values())
    details = tuple(f"{name}: {value:+.2%}." for name, value in off.items() if abs(value) > _NOTABLE)
    return (
        f"{near} of {len(off)} hold what the paper's formula says for their number of parameters within {_NOTABLE:.0%};"
        f" the furthest is {worst} ({off[worst]:+.1%}).",
        details,
    )


def _line_against_whole(records: Records) -> Iterator[str]:
    """Where a model ran both whole and at three depths, the line can be held against it."""
    for depths in groups(records):
        whole = next((one for one in depths.values() if is_whole(one)), None)
        line = line_over(depths)
        if whole is not None and line is not None:
            state = state_bytes(line) / state_bytes(whole) - 1
            traffic = sent(line) / sent(whole) - 1
            yield (
                f"{_name(whole)}: the line over layers gives {state:+.2%} of the state of the whole model"
                + ("." if math.isnan(traffic) else f", and {traffic:+.2%} of what it sends.")
            )


def _departs(records: Records, found: Sequence[Summary]) -> tuple[str, tuple[str, ...]]:
    lines = [line for strategy in STAGES for line in _traffic_of(strategy, found)]
    moved: defaultdict[tuple[str, str], list[tuple[Summary, Summary]]] = defaultdict(list)
    for before, after in changes(records):
        moved[after["strategy"], after["setting"]].append((before, after))
    lines += [_effect(strategy, setting, pairs) for (strategy, setting), pairs in moved.items()]
    details = [
        f"{_name(one)}, {one['setting']}: sends {sent(one):.2f} x its weights (paper {_paper(one):.2f})"
        f" in {calls(one):,.0f} calls."
        for one in found
        if one["strategy"] in STAGES and not math.isnan(sent(one) + calls(one))
    ]
    return "\n".join(lines) or "No run here is of a ZeRO stage.", tuple(details)


def _traffic_of(strategy: str, found: Sequence[Summary]) -> Iterator[str]:
    rows = [one for one in found if one["strategy"] == strategy and one["setting"] == AS_SHIPPED]
    ratios = [sent(one) / _paper(one) for one in rows]
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    if known:
        yield f"`{strategy}` as shipped sends {_range(known)} times what the paper says ({_count(known, 'case')})."


def _effect(strategy: str, setting: str, pairs: Sequence[tuple[Summary, Summary]]) -> str:
    """What moved by more than padding, as ranges over models and worlds."""
    said = []
    traffic = [(sent(one) / _paper(one), sent(other) / _paper(other)) for one, other in pairs]
    traffic = [pair for pair in traffic if not math.isnan(sum(pair))]
    if _moves(traffic):
        said.append(f"it sends {_from_to(traffic)} times the paper's traffic")
    for name, figure in (
        ("calls", calls),
        ("GB of gradients in the bucket", lambda one: bucket_gradients(one) / GB),
        ("GB of buffers", lambda one: buffer_bytes(one) / GB),
        ("GB of model state", lambda one: state_bytes(one) / GB),
    ):
        figures = [(figure(one), figure(other)) for one, other in pairs]
        figures = [pair for pair in figures if not math.isnan(sum(pair))]
        if _moves(figures):
            said.append(f"{name} {_from_to(figures)}")
    what = "; ".join(said) if said else "nothing moves by more than 1 %"
    return f"`{strategy}` with `{setting}`: {what} ({_count(pairs, 'case')})."


def _unsaid(records: Records, found: Sequence[Summary]) -> tuple[str, tuple[str, ...]]:
    lines = ["A virtual rank receives nothing that is real: here is no loss, no accuracy, and no throughput."]
    fits = [one for one in found if one["extrapolated"] is not None]
    if fits:
        largest = max(one["extrapolated"]["largest_residual_of_state"] for one in fits)
        bent = sorted({_family(name) for one in fits for name in one["extrapolated"]["not_linear"]})
        crossed = sorted({name for one in fits for name in one["extrapolated"]["crossed"]})
        lines.append(
            f"{len(fits)} of {len(found)} models are extrapolated over layers; at the third depth their state is off by"
            f" {largest:.1e} at most."
            + (f" Where no line holds there is no figure; that happens to: {', '.join(bent)}." if bent else "")
            + (f" Thresholds between the depths and the model: {', '.join(crossed)}." if crossed else "")
        )
    runs = records.runs
    lost = runs[runs["status_state"] != "ok"]
    details = [
        f"{len(group)} of {model} ended {state}, such as: {group['status_reason'].iloc[0]}."
        for (model, state), group in lost.groupby(["model_name_or_path", "status_state"])
    ]
    if len(lost):
        models = sorted(set(lost["model_name_or_path"].dropna()))
        lines.append(f"{len(lost)} of {len(runs)} runs did not end well: {', '.join(models)}.")
    return "\n".join(lines), tuple(details)


def _family(figure: str) -> str:
    """A collective's or a buffer's name without what was counted of it."""
    return figure.rsplit(".", 1)[0] if "." in figure else figure


def _name(one: Summary) -> str:
    """The paper's mixed precision goes without saying; in another the same stage holds and sends something else."""
    precision = "" if one["precision"] == "bf16-engine" else f", {one['precision']}"
    return f"{one['strategy']} {one['model']} at {one['world_size']}{precision}"


def _paper(one: Summary) -> float:
    return papers_traffic(one["stage"], one["world_size"])


def _moves(pairs: Sequence[tuple[float, float]]) -> bool:
    return any(abs(after - before) > _NOTABLE * max(abs(before), abs(after)) for before, after in pairs)


def _from_to(pairs: Sequence[tuple[float, float]]) -> str:
    return f"{_range(after for _, after in pairs)} instead of {_range(before for before, _ in pairs)}"


def _range(values: Iterable[float]) -> str:
    known = list(values)
    low, high = (f"{value:.3g}" for value in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'s'[: len(things) > 1]}"
