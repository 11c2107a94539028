"""Virtual ranks: model state compared with the ZeRO paper, effects of settings, and how the ranks were measured."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from study.config.text import full_model, percent
from study.host.memory import MIB
from study.predictor.communication import sent_bytes
from study.predictor.memory import kept_for_backward
from study.predictor.recorded_runs import request_if_any
from study.predictor.state import paper_state_bytes, paper_traffic, predict_state
from study.predictor.zero3_gathers import simulate_gathers
from study.records.frames import Records, virtual_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.virtual_summary import Summary
from study.report.document import Answer, Question, change_text, format_names, span_text
from study.report.facts import Headline, caption, footnotes
from study.report.questions.memory import held_text
from study.virtual import summaries
from study.virtual.summaries import AS_SHIPPED, BOOKKEEPING, GB, STAGES, figure_or_nan, rank_state_bytes

# Smaller differences in traffic or memory are padding and bookkeeping.
_NOTABLE = 0.01
# Cells of the paper's Table 1.
_CELLS = {*itertools.product(STAGES, ("gpt-7.5b", "gpt-128b", "gpt-1t"), (1, 4, 16, 64, 256, 1024))}


def _table1_answer(records: Records) -> Answer | None:
    rows = _table1_cases(records)
    if not rows:
        return None
    worst = max(rows, key=lambda row: abs(_difference(row)))
    agreeing = sum(abs(_difference(row)) <= _NOTABLE for row in rows)
    more = (rank_state_bytes(worst) - worst["paper_bytes"]) / GB
    headlines = (
        Headline(
            f"{agreeing} of {len(rows)}",
            caption("table1", "within"),
            bounds=_counted_cells(rows),
        ),
        Headline(
            change_text(_difference(worst)),
            caption("table1", "largest"),
            worst["strategy"],
            f"{worst['model']} at {worst['world_size']} ranks",
            f"{more:+.3g} GB",
        ),
    )
    return Answer(state_by_stage(rows), headlines, _table1_footnotes(records, rows, worst))


def _counted_cells(rows: Sequence[Summary]) -> str:
    """Return how many cells the paper's Table 1 has, if the cases are of it, and how many cases were not measured."""
    parts = [f"of {len(_CELLS)} in the paper's Table 1"] if _are_cells(rows) else []
    extrapolated = sum(row["extrapolated"] is not None for row in rows)
    if extrapolated:
        parts.append(f"{len(rows) - extrapolated} measured, {extrapolated} extrapolated over layers")
    return "; ".join(parts)


def _are_cells(rows: Sequence[Summary]) -> bool:
    """Whether each case is a cell of the paper's Table 1, and no cell has two cases."""
    cells = {(row["strategy"], row["model"], row["world_size"]) for row in rows}
    return cells <= _CELLS and len(cells) == len(rows)


def _table1_cases(records: Records) -> list[Summary]:
    """Return the cases whose state is known; of one stage the one with the largest difference is the last."""
    # Without the paper's models all as shipped, with the formula for their parameters: few settings change state.
    rows = [row for row in summaries.table1_rows(records) if not math.isnan(rank_state_bytes(row))] or [
        row | {"paper_bytes": paper_state_bytes(row["model_parameters"], row["stage"], row["world_size"])}
        for row in summaries.summaries(records)
        if row["strategy"] in STAGES
        and row["precision"] == "bf16-engine"
        and row["setting"] == AS_SHIPPED
        and not math.isnan(rank_state_bytes(row))
    ]
    # A run with another setting that moves no state would only be a second case that agrees.
    cases = {(row["strategy"], row["model"], row["world_size"], rank_state_bytes(row)): row for row in rows}
    return sorted(cases.values(), key=lambda row: (row["model_parameters"], row["world_size"], abs(_difference(row))))


def _table1_footnotes(records: Records, rows: Sequence[Summary], worst: Summary) -> tuple[str, ...]:
    # Gradients that are not reduced, and gathered parameters, leave the device after the backward pass.
    before_step = [abs(_difference(row, before_step=True)) <= _NOTABLE for row in rows]
    is_off = [abs(_difference(row)) > _NOTABLE for row in rows]
    lost = virtual_runs(records).runs.query("status_state != 'ok' and strategy in @STAGES")
    lost_models = lost["model_name_or_path"].map(full_model)
    missing = sorted({*lost_models} - {row["model"] for row in rows})
    measured = {(row["strategy"], row["model"], row["world_size"]) for row in rows}
    tried = measured.union(zip(lost["strategy"], lost_models, lost["virtual_world_size"], strict=True))
    is_unreduced = any(is_off) and all(before for before, off in zip(before_step, is_off, strict=True) if off)
    is_kept_whole = figure_or_nan(worst, "kept_whole_bytes") > rank_state_bytes(worst) - worst["paper_bytes"] > 0
    return footnotes(
        "table1",
        {
            "state": True,
            "unreduced": is_unreduced,
            "whole": is_kept_whole and not is_unreduced,
            "cells": _are_cells(rows),
            "missing": bool(missing),
        },
        cells=len(_CELLS),
        untried=len(_CELLS - tried),
        models=format_names(missing) if missing else "",
    )


def _difference(row: Summary, before_step: bool = False) -> float:
    return float(rank_state_bytes(row, before_step) / row["paper_bytes"] - 1)


def state_by_stage(rows: Iterable[Summary]) -> pd.DataFrame:
    """Return GB of state per stage by model and number of ranks, and in brackets by the paper's formula."""
    table: dict[tuple[str, int], dict[str, object]] = {}
    for row in rows:
        about = "" if row["extrapolated"] is None else "~ "
        line = table.setdefault((row["model"], row["world_size"]), {"Model": row["model"], "Ranks": row["world_size"]})
        off = f", {change_text(_difference(row))}" if abs(_difference(row)) > _NOTABLE else ""
        line[f"{row['strategy']}, GB"] = f"{about}{rank_state_bytes(row) / GB:.4g} ({row['paper_bytes'] / GB:.4g}{off})"
    return pd.DataFrame(table.values(), columns=["Model", "Ranks", *(f"{stage}, GB" for stage in STAGES)]).fillna("-")


def table1_table(records: Records) -> pd.DataFrame:
    """Return a row per case with its model state and that of the paper's formula."""
    return pd.DataFrame(
        {
            "Model": row["model"],
            "Ranks": row["world_size"],
            "Strategy": row["strategy"],
            "Paper, GB": row["paper_bytes"] / GB,
            "Here, GB": rank_state_bytes(row) / GB,
            "Difference": f"{_difference(row):+.2%}",
            "Parameters, B": row["model_parameters"] / GB,
            "Bytes per parameter here": rank_state_bytes(row) / row["model_parameters"],
            "Bytes per parameter, paper": paper_state_bytes(1, row["stage"], row["world_size"]),
            "Buffers, not state, GB": summaries.buffer_bytes(row) / GB,
            "Of it persistent parameters, GB": figure_or_nan(row, "kept_whole_bytes") / GB,
            **summaries.provenance_columns(row),
        }
        for row in summaries.table1_rows(records)
    )


TABLE1 = Question(
    "table1",
    "Does one of N ranks need the memory that the ZeRO paper predicts?",
    _table1_answer,
    tables={"table1": table1_table},
    figures=("table1",),
    notebook="virtual_cluster",
)

# A setting that changes the traffic by more than this is in the sentence.
_MUCH = 0.1
_THREE_DIGITS = "{:.3g}".format
_X_PAPER = "Ring bytes (NCCL), x paper"


def _sent_x_paper(row: Summary) -> float:
    paper = paper_traffic(row["stage"], row["world_size"])
    return summaries.relative_ring_bytes(row) / paper if paper else math.nan


# The figures of a setting, in the order of the answer's table.
_FIGURES: dict[str, Callable[[Summary], float]] = {
    _X_PAPER: _sent_x_paper,
    "Calls": lambda row: figure_or_nan(row, "comm_calls_per_step"),
    "State, GB": lambda row: rank_state_bytes(row) / GB,
    "Gradients in the bucket, GB": lambda row: figure_or_nan(row, "grads_in_bucket_bytes") / GB,
    "Buffers, GB": lambda row: summaries.buffer_bytes(row) / GB,
}


def _settings_answer(records: Records) -> Answer | None:
    unchanged = [row for row in summaries.summaries(records) if row["setting"] == AS_SHIPPED]
    by_stage = {stage: [_sent_x_paper(row) for row in unchanged if row["strategy"] == stage] for stage in STAGES}
    shipped = {stage: ratios for stage, ratios in by_stage.items() if not all(map(math.isnan, ratios))}
    if not shipped:
        return None
    changed: defaultdict[tuple[str, str], list[tuple[Summary, Summary]]] = defaultdict(list)
    for before, after in summaries.setting_pairs(records):
        changed[after["strategy"], after["setting"]].append((before, after))
    gathers = [
        summaries.shares(row, "payload_bytes").get("all_gather") or math.nan
        for row in unchanged
        if row["strategy"] == STAGES[-1]
    ]
    gather_counts = [count for count in gathers if not math.isnan(count)]
    has_much_changed = any(_changes_much(pairs) for (strategy, _), pairs in changed.items() if strategy in shipped)
    notes = footnotes(
        "settings",
        {
            "rings": True,
            "once": any(f"{count:.3g}" != "2" for count in gather_counts),
            "changed": bool(changed),
            "unknown": len(gather_counts) < len(gathers),
        },
    )
    models = [row["model"] for row in unchanged if row["strategy"] in STAGES and not math.isnan(_sent_x_paper(row))]
    return Answer(
        _effects_table(shipped, changed),
        tuple(_settings_headlines(shipped, gather_counts, format_names(models))),
        notes,
        title="" if has_much_changed else "Does one of N ranks send what the ZeRO paper predicts?",
    )


def _settings_headlines(
    shipped: Mapping[str, Sequence[float]], gathers: Sequence[float], models: str
) -> Iterator[Headline]:
    """Yield the bytes of all stages, and how often stage 3 gathers the weights if it is known."""
    ratios = itertools.chain(*shipped.values())
    stages = ", ".join(shipped)
    yield Headline(f"{span_text(ratios, _THREE_DIGITS)} x", caption("settings", "sent"), stages, models)
    if gathers:
        yield Headline(span_text(gathers, _THREE_DIGITS), caption("settings", "gathers"), STAGES[-1])


def _effects_table(
    shipped: Mapping[str, Sequence[float]], changed: Mapping[tuple[str, str], Sequence[tuple[Summary, Summary]]]
) -> pd.DataFrame:
    """Return the bytes of each stage as shipped, and the figures that each other setting changes."""
    rows: list[dict[str, Any]] = [
        {"Strategy": stage, "Setting": AS_SHIPPED, "Cases": len(ratios), _X_PAPER: _known_span(ratios)}
        for stage, ratios in shipped.items()
    ]
    for (strategy, setting), pairs in changed.items():
        effects = {name: effect for name, figure in _FIGURES.items() if (effect := _effect(pairs, figure))}
        rows.append({"Strategy": strategy, "Setting": setting, "Cases": len(pairs)} | effects)
    rows.sort(key=lambda entry: entry["Strategy"])
    return pd.DataFrame(rows).fillna("")


def _changes_much(pairs: Sequence[tuple[Summary, Summary]]) -> bool:
    """Whether a setting of the engine changes the bytes of each case; an option such as LoRA changes the training."""
    changes = [abs(_sent_x_paper(after) / _sent_x_paper(before) - 1) for before, after in pairs]
    return bool(pairs[0][1]["overrides_engine"]) and all(change > _MUCH for change in changes)


def _known_span(ratios: Sequence[float]) -> str:
    """Return the range of the known ratios, with their number if others are unknown."""
    count = len(ratios) - sum(map(math.isnan, ratios))
    scope = f" (known in {count} of {len(ratios)} cases)" if count < len(ratios) else ""
    return span_text(ratios, _THREE_DIGITS) + scope


def _effect(pairs: Sequence[tuple[Summary, Summary]], figure: Callable[[Summary], float]) -> str:
    """Return the ranges before and after; empty if the figure did not change, or one of the two is unknown."""
    figures = [(figure(before), figure(after)) for before, after in pairs]
    figures = [pair for pair in figures if not math.isnan(sum(pair))]
    if not any(abs(after - before) > _NOTABLE * max(abs(before), abs(after)) for before, after in figures):
        return ""
    return " → ".join(span_text((pair[place] for pair in figures), _THREE_DIGITS) for place in (0, 1))


def settings_table(records: Records) -> pd.DataFrame:
    """Return memory in GB, and ring bytes of one step as multiples of the model's weights."""
    return pd.DataFrame(
        {
            "Model": row["model"],
            "Ranks": row["world_size"],
            "Strategy": row["strategy"],
            "Precision": row["precision"],
            "Setting": row["setting"],
            **{f"{kind.capitalize()}, GB": summaries.kind_bytes(row, kind) / GB for kind in STATE_KINDS},
            "Persistent parameters, GB": figure_or_nan(row, "kept_whole_bytes") / GB,
            **{name: _FIGURES[name](row) for name in ("Gradients in the bucket, GB", "Buffers, GB")},
            "Ring bytes (NCCL), x weights": summaries.relative_ring_bytes(row),
            "Paper, x weights": paper_traffic(row["stage"], row["world_size"]),
            "Payload, x weights": ", ".join(
                f"{name} {'?' if multiple is None else f'{multiple:.2f}'}"
                for name, multiple in summaries.shares(row, "payload_bytes").items()
                if multiple is None or multiple >= BOOKKEEPING
            )
            or "nothing",
            "Calls": _FIGURES["Calls"](row),
            **summaries.provenance_columns(row),
        }
        for row in summaries.summaries(records)
    )


SETTINGS = Question(
    "settings",
    "Where does the engine differ from the paper, and by which setting?",
    _settings_answer,
    tables={"settings": settings_table},
    figures=("settings",),
    notebook="virtual_cluster",
)


def lora_cases(records: Records) -> dict[str, list[Summary]]:
    """Return cases with LoRA under stage 3 and an earlier one, by a name; the largest on the fewest ranks first."""
    by_case: defaultdict[tuple[float, int, str], dict[str, Summary]] = defaultdict(dict)
    for row in summaries.summaries(records):
        if row["setting"] == "lora" and row["strategy"] in STAGES and not math.isnan(rank_state_bytes(row)):
            by_case[-row["model_parameters"], row["world_size"], row["precision"]].setdefault(row["strategy"], row)
    cases = [list(rows.values()) for _, rows in sorted(by_case.items()) if len(rows) > 1 and STAGES[-1] in rows]
    return {
        f"{row['model']}, {row['precision']}, one of {row['world_size']} virtual ranks": [row, *more]
        for row, *more in cases
    }


def held_parts(case: Sequence[Summary]) -> pd.DataFrame:
    """Return MiB of state by its kind, and of weights gathered at the end of the forward pass, a row per strategy."""
    parts = {
        **{kind: [summaries.kind_bytes(row, kind) / MIB for row in case] for kind in STATE_KINDS},
        "gathered": [figure_or_nan(row, "forward_gathers_bytes") / MIB for row in case],
    }
    return pd.DataFrame(parts, index=[row["strategy"] for row in case])


def _lora_answer(records: Records) -> Answer | None:
    if not (cases := lora_cases(records)):
        return None
    subject, (undivided, *_, divided) = next(iter(cases.items()))
    fraction = summaries.kind_bytes(undivided, "params") / rank_state_bytes(undivided)
    notes = footnotes(
        "lora",
        {"frozen": True, "live": figure_or_nan(divided, "forward_gathers_bytes") > 0, "largest": True},
        strategy=undivided["strategy"],
        share=percent(fraction),
    )
    headlines = tuple(_lora_headlines(records, undivided, divided))
    return Answer(_lora_table(records), headlines, notes, subject=subject)


def _lora_headlines(records: Records, undivided: Summary, divided: Summary) -> Iterator[Headline]:
    """Yield the memory of a rank with stage 3 and the other strategy; predicted for all layers if only some ran."""
    sizes = [(rank_state_bytes(row), figure_or_nan(row, "forward_gathers_bytes")) for row in (divided, undivided)]
    layers = ""
    if undivided["model_layers"] < undivided["preset_layers"]:
        runs = virtual_runs(records).runs.set_index("run", drop=False).loc[[divided["runs"][0], undivided["runs"][0]]]
        predicted = _predict_full_depth(runs)
        if predicted is not None:
            sizes = list(predicted[["state", "gathered"]].itertuples(index=False, name=None))
            layers = f"predicted for all {undivided['preset_layers']:.0f} layers"
    for row, (state, gathered) in zip((divided, undivided), sizes, strict=True):
        scope = f"{row['world_size']} virtual ranks of {full_model(row['model'].split(' of ')[-1])}"
        size = f"{held_text(state / MIB, gathered / MIB)} MiB"
        yield Headline(size, caption("lora", "held"), row["strategy"], scope, layers)


def _lora_table(records: Records) -> pd.DataFrame:
    table = settings_table(records)
    columns = ["Model", "Ranks", "Strategy", "Precision", "Setting", "Params, GB", "Grads, GB", "Optimizer, GB"]
    columns.append("Ring bytes (NCCL), x weights")
    # An option that changes none of these bytes gives no further row.
    table = table.loc[table["Strategy"].isin(STAGES), columns].round(9).drop_duplicates(columns[:-1])
    return table.loc[:, (table.nunique() > 1) | table.columns.str.endswith("GB")]


LORA = Question(
    "lora",
    "What does ZeRO divide where only LoRA's adapters are trained?",
    _lora_answer,
    figures=("lora",),
    notebook="virtual_cluster",
)


# Settings in which the cases of a model differ, and the words for a change from the usual value.
_TUNED = {
    "peft": "LoRA instead of full fine-tuning",
    "offload": "offload to the host instead of none",
    "gradient_checkpointing": "gradient checkpointing instead of none",
    "micro_batch_size": "micro-batch {} instead of {}",
}


_HELD, _KEPT, _SENT = "State + gathered weights on the device", "Kept for backward", "Ring bytes (NCCL)"
_TUNED_FIGURES = [_HELD, _KEPT, _SENT]


class _Change(NamedTuple):
    """A setting that is not the usual one: its effects by figure and strategy, at each number of layers."""

    setting: str
    at_depths: dict[str, pd.DataFrame]

    @property
    def figure(self) -> str:
        """The figure that it changes most: the one that falls most in its case with the least effect, as it ran."""
        changes = next(iter(self.at_depths.values()))
        return str(changes.max().idxmin())

    @property
    def least(self) -> float:
        return float(next(iter(self.at_depths.values()))[self.figure].max())

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield a row of the table per number of layers."""
        for layers, changes in self.at_depths.items():
            cells = {name: _change_cell(changes[name]) for name in changes}
            yield {"Change": self.setting, "Layers": layers, **cells}

    def span(self, layers: str) -> str:
        """Return how much less it makes its figure, over strategies."""
        changes = self.at_depths[layers][self.figure]
        return " to ".join(dict.fromkeys(percent(-change) for change in (changes.max(), changes.min())))


def _tuning_answer(records: Records) -> Answer | None:
    """Compare the cases that differ in one of these settings; None without checkpointing and LoRA in some."""
    runs = virtual_runs(records).runs.query("status_state == 'ok'")
    if runs[["gradient_checkpointing", "peft"]].nunique().min() < 2:
        return None
    is_offloaded = runs["offload_optimizer"].fillna("none") != "none"
    runs = runs.assign(
        **{
            "offload": runs["strategy"].where(is_offloaded, "none"),
            _KEPT: runs["forward_holds_bytes"],
            _HELD: sum(runs[f"{kind}_bytes_device"] for kind in STATE_KINDS) + runs["forward_gathers_bytes"],
            _SENT: runs["collectives"].map(summaries.read_ring_bytes),
        }
    )
    by_layers, error = _with_all_layers(runs)
    changes = [change for key, words in _TUNED.items() if (change := _find_change(by_layers, key, words)).at_depths]
    largest = min(changes, key=lambda change: change.least)
    *measured, last = largest.at_depths
    model = full_model(str(runs.iloc[0]["model_name_or_path"]).rsplit("/", 1)[-1])
    ran = "".join(f"; {largest.span(layers)} with the {layers} that ran" for layers in measured)
    headline = Headline(
        largest.span(last),
        caption("tuning", largest.figure, setting=largest.setting),
        scope=f"one of {runs.iloc[0]['world_size']:.0f} virtual ranks of {model}",
        bounds=f"layers: {last}{ran}",
    )
    notes = footnotes("tuning", {"cases": True, "error": len(by_layers) > 1}, error=percent(error))
    return Answer(pd.DataFrame([row for change in changes for row in change.rows()]), (headline,), notes)


def _with_all_layers(runs: pd.DataFrame) -> tuple[dict[str, pd.DataFrame], float]:
    """Return the runs by number of layers, with those predicted for all layers, and the largest error of the rules."""
    run = runs.iloc[0]
    by_layers = {f"{run['model_layers']:.0f}": runs}
    if run["model_layers"] >= run["preset_layers"] or (predicted := _predict_full_depth(runs)) is None:
        return by_layers, 0.0
    same_layers = _predict_figures(runs)
    error = 0.0 if same_layers is None else (same_layers[_TUNED_FIGURES] / runs[_TUNED_FIGURES] - 1).abs().max().max()
    by_layers[f"{run['preset_layers']}, predicted"] = predicted
    return by_layers, float(error)


def _find_change(by_layers: Mapping[str, pd.DataFrame], key: str, words: str) -> _Change:
    """Return the effects of a setting on cases that differ in it alone; without such cases there are none."""
    setting, at_depths = "", dict[str, pd.DataFrame]()
    same = [name for name in ("model_name_or_path", "world_size", "precision", "zero_stage", *_TUNED) if name != key]
    for layers, runs in by_layers.items():
        usual = runs[key] == runs[key].mode()[0]
        pairs = runs[usual].merge(runs[~usual], on=same, suffixes=("", " then"))
        if pairs.empty:
            break
        pairs = pairs.set_index("strategy then")
        setting = words.format(pairs[f"{key} then"].iloc[0], pairs[key].iloc[0])
        at_depths[layers] = pd.DataFrame({name: pairs[f"{name} then"] / pairs[name] - 1 for name in _TUNED_FIGURES})
    return _Change(setting, at_depths)


def _change_cell(changes: pd.Series) -> str:
    """Return the changes in percent, each with its strategies if there are several."""
    texts = [f"{100 * change:+.1f} %" if abs(change) > _NOTABLE else "no change" for change in changes]
    by_text = (changes.index.to_series() + "`").groupby(texts, sort=False).agg(lambda names: ", `".join(names))
    return texts[0] if len(by_text) == 1 else ", ".join(f"{text} (`{names})" for text, names in by_text.items())


def _predict_figures(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Return the runs with predicted figures; None if one cannot be predicted."""
    figures = []
    for run in runs.itertuples():
        if (request := request_if_any(run)) is None:
            return None
        gathered = simulate_gathers(request).live_at_end if request.strategy.zero_stage == 3 else 0
        memory = predict_state(request).device, gathered * request.gathered_bytes
        figures.append((*memory, kept_for_backward(request), sent_bytes(request)))
    runs = runs.copy()
    runs[["state", "gathered", _KEPT, _SENT]] = figures
    return runs.assign(**{_HELD: runs["state"] + runs["gathered"]})


def _predict_full_depth(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Return the runs with figures predicted for all layers of their model; None if one cannot be predicted."""
    return _predict_figures(runs.assign(model_name_or_path=runs["model_name_or_path"].map(full_model)))


TUNING = Question("tuning", "What do LoRA, offload, checkpointing and the micro-batch change?", _tuning_answer)


def _layers_answer(records: Records) -> Answer | None:
    runs = virtual_runs(records).runs
    if runs.empty:
        return None
    cases = summaries.summaries(records)
    lines = [row["extrapolated"] for row in cases if row["extrapolated"] is not None]
    complete = Headline(
        f"{len(cases) - len(lines)} of {len(cases)}",
        caption("layers", "complete"),
        bounds=caption("layers", "extrapolated", count=len(lines)),
    )
    headlines = [complete]
    if lines:
        residual = max(fit["largest_residual_at_target"] for fit in lines)
        headlines.append(Headline(f"{100 * residual:.1f} %", caption("layers", "residual")))
    table = []
    for model in dict.fromkeys(row["model"] for row in cases):
        rows = [row for row in cases if row["model"] == model]
        fits = [row["extrapolated"] for row in rows if row["extrapolated"] is not None]
        # The name of a collective or a buffer, without the suffix of the counted quantity.
        bent = sorted({name.rsplit(".", 1)[0] for fit in fits for name in fit["not_linear"]})
        residual = max((fit["largest_residual_at_target"] for fit in fits), default=0.0)
        table.append(
            {
                "Model": model,
                "Measured completely": len(rows) - len(fits),
                "Extrapolated": len(fits),
                "Max residual": f"{100 * residual:.1f} %" if fits else "-",
                "Not linear in layers": ", ".join(bent) or "-",
                "Thresholds crossed": ", ".join(sorted({name for fit in fits for name in fit["crossed"]})) or "-",
            }
        )
    lost = runs[runs["status_state"] != "ok"].groupby(["model_name_or_path", "status_state"])
    notes = (
        *footnotes("layers", {"no_data": True, "not_linear": bool(lines)}),
        *(
            caption("layers", "lost", count=len(group), model=model, state=state, reason=group["status_reason"].iloc[0])
            for (model, state), group in lost
        ),
    )
    return Answer(pd.DataFrame(table), headlines, notes, leads=False)


def lines_table(records: Records) -> pd.DataFrame:
    """Compare extrapolated models with completely measured ones, for the cases that have both."""
    rows = []
    for depths in summaries.groups(records):
        complete, line = summaries.full_depth_summary(depths), summaries.extrapolate_from_depths(depths)
        if complete is not None and line is not None:
            state = rank_state_bytes(line) / rank_state_bytes(complete) - 1
            traffic = summaries.relative_ring_bytes(line) / summaries.relative_ring_bytes(complete) - 1
            rows.append(
                {
                    "Model": complete["model"],
                    "Ranks": complete["world_size"],
                    "Strategy": complete["strategy"],
                    "Setting": complete["setting"],
                    "State, extrapolated over measured": f"{state:+.2%}",
                    "Ring bytes (NCCL), extrapolated over measured": "-" if math.isnan(traffic) else f"{traffic:+.2%}",
                }
            )
    return pd.DataFrame(rows)


def virtual_runs_table(records: Records) -> pd.DataFrame:
    """Return a row per run; an extrapolated model has three runs, one per depth."""
    return pd.DataFrame(
        {
            "Strategy": run["strategy"],
            "Model": run["model_name_or_path"],
            "Precision": run["engine_precision"],
            "Rank": f"{run['virtual_rank']} of {run['world_size']}" if pd.notna(run["virtual_rank"]) else "",
            "Setting": summaries.setting_text(run) if isinstance(run["engine_override"], str) else "",
            "State, GB": sum(run[f"{kind}_bytes_{place}"] for kind in STATE_KINDS for place in STATE_PLACES) / GB,
            "Ring bytes (NCCL) per step, GB": summaries.read_ring_bytes(run["collectives"]) / GB,
            "Host peak, GiB": run["host_peak_rss_gib"],
            "Run, s": run["runtime_s"],
            "Outcome": f"{run['status_state']}: {run['status_reason']}" if run["status_state"] != "ok" else "ok",
        }
        for run in virtual_runs(records).runs.to_dict("records")
    )


LAYERS = Question(
    "layers",
    "How were these virtual ranks measured, and what do they not show?",
    _layers_answer,
    tables={"lines_beside_whole_models": lines_table, "virtual_runs": virtual_runs_table},
    notebook="virtual_cluster",
)
