"""Virtual ranks: model state compared with the ZeRO paper, effects of settings, and how the ranks were measured."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from study.config.text import format_number, full_model, percent
from study.host.memory import MIB
from study.predictor.communication import sent_bytes
from study.predictor.memory import kept_for_backward
from study.predictor.run_predictions import request_if_any
from study.predictor.state import paper_state_bytes, paper_traffic, predict_state
from study.predictor.zero3_gathers import simulate_gathers
from study.records.frames import Records, virtual_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.virtual_summary import Summary
from study.report.document import Answer, Question, change_text, format_names, format_or_dash, paragraphs, span_text
from study.report.questions.memory import held_text
from study.virtual import summaries
from study.virtual.summaries import AS_SHIPPED, BOOKKEEPING, GB, STAGES, figure_or_nan, rank_state_bytes

# Smaller differences in traffic or memory are padding and bookkeeping.
_NOTABLE = 0.01
# Cells of the paper's Table 1.
_CELLS = {*itertools.product(STAGES, ("gpt-7.5b", "gpt-128b", "gpt-1t"), (1, 4, 16, 64, 256, 1024))}


def _table1_answer(records: Records) -> Answer | None:  # noqa: PLR0914
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
    # Of one stage, the table has the case with the largest difference.
    rows = sorted(cases.values(), key=lambda row: (row["model_parameters"], row["world_size"], abs(_difference(row))))
    if not rows:
        return None
    worst = max(rows, key=lambda row: abs(_difference(row)))
    # Gradients that are not reduced, and gathered parameters, leave the device after the backward pass.
    off_rows = [row for row in rows if abs(_difference(row)) > _NOTABLE]
    before_step = [abs(_difference(row, before_step=True)) <= _NOTABLE for row in off_rows]
    lost = virtual_runs(records).runs.query("status_state != 'ok' and strategy in @STAGES")
    lost_models = lost["model_name_or_path"].map(full_model)
    # Models without a case here, and whether each of their runs was too large.
    too_large = lost["status_reason"].str.contains("of host memory").groupby(lost_models).all()
    missing = too_large.drop([row["model"] for row in rows], errors="ignore")
    measured = {case[:3] for case in cases}
    tried = measured.union(zip(lost["strategy"], lost_models, lost["virtual_world_size"], strict=True))
    is_kept_whole = figure_or_nan(worst, "kept_whole_bytes") > rank_state_bytes(worst) - worst["paper_bytes"] > 0
    agreeing, total = len(rows) - len(off_rows), len(rows)
    sentence, words, note = paragraphs(
        "table1_answer.j2",
        agreeing=agreeing,
        total=total,
        before_step=before_step,
        extrapolated=sum(row["extrapolated"] is not None for row in rows),
        cause="unreduced" if before_step and all(before_step) else "whole" if is_kept_whole else "",
        table=_CELLS,
        measured=measured,
        tried=tried,
        worst=worst,
        missing=missing.to_dict(),
        larger=off_rows and _larger_than_bucket(records, rows, off_rows),
        difference=change_text(_difference(worst)),
        more=(rank_state_bytes(worst) - worst["paper_bytes"]) / GB,
    )
    numbers = [(f"{agreeing} of {total}", words)] if total > 1 else []
    return Answer(sentence, state_by_stage(rows), (note,), numbers)


def _larger_than_bucket(records: Records, rows: Sequence[Summary], off_rows: Sequence[Summary]) -> dict[str, str]:
    """Return the bucket, the largest tensor of each model that is off, if larger, and of the others, in M elements."""
    runs = {run.run: run for run in virtual_runs(records).runs.itertuples()}
    largest = {
        row["model"]: max(param.elements for param in request.shape.params) / 1e6
        for row in rows
        if (request := request_if_any(runs[row["runs"][0]])) is not None
    }
    bucket = max((row["buckets"] or {}).get("reduce_bucket_size", math.inf) for row in rows) / 1e6
    off = [largest.get(row["model"], 0) for row in off_rows]
    small = {model: size for model, size in largest.items() if size <= bucket}
    names, most = format_names(list(small)) if small else "", format_number(max(small.values(), default=0))
    words = {"size": span_text(off, format_number), "bucket": format_number(bucket), "models": names, "most": most}
    return words if off and min(off) > bucket else {}


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


def _settings_answer(records: Records) -> Answer | None:  # noqa: PLR0914
    unchanged = [row for row in summaries.summaries(records) if row["setting"] == AS_SHIPPED]
    by_stage = {stage: [_sent_x_paper(row) for row in unchanged if row["strategy"] == stage] for stage in STAGES}
    shipped = {stage: ratios for stage, ratios in by_stage.items() if not all(map(math.isnan, ratios))}
    if not shipped:
        return None
    models = [row["model"] for row in unchanged if row["strategy"] in STAGES and not math.isnan(_sent_x_paper(row))]
    gathers = [
        summaries.shares(row, "payload_bytes").get("all_gather") or math.nan
        for row in unchanged
        if row["strategy"] == STAGES[-1]
    ]
    rows: list[dict[str, Any]] = [
        {"Strategy": stage, "Setting": AS_SHIPPED, "Cases": len(ratios), _X_PAPER: _known_span(ratios)}
        for stage, ratios in shipped.items()
    ]
    changed: defaultdict[tuple[str, str], list[tuple[Summary, Summary]]] = defaultdict(list)
    for before, after in summaries.setting_pairs(records):
        changed[after["strategy"], after["setting"]].append((before, after))
    for (strategy, setting), pairs in changed.items():
        effects = {name: effect for name, figure in _FIGURES.items() if (effect := _effect(pairs, figure))}
        rows.append({"Strategy": strategy, "Setting": setting, "Cases": len(pairs)} | effects)
    rows.sort(key=lambda entry: entry["Strategy"])
    after_changes: defaultdict[str, list[str]] = defaultdict(list)
    for (strategy, setting), pairs in changed.items():
        # An option such as LoRA changes the training, not the engine.
        is_setting = strategy in shipped and pairs[0][1]["overrides_engine"]
        if is_setting and all(abs(_sent_x_paper(after) / _sent_x_paper(before) - 1) > _MUCH for before, after in pairs):
            span = span_text((_sent_x_paper(after) for _, after in pairs), _THREE_DIGITS)
            after_changes[strategy].append(f"{span} with {format_names(setting.split(', '))}")
    # Stages with equal figures are named together.
    stages: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for stage, ratios in shipped.items():
        stages[(_known_span(ratios), *after_changes[stage])].append(stage)
    sentence, words, *notes = paragraphs(
        "settings_answer.j2",
        stages={figures: format_names(names) for figures, names in stages.items()},
        gathers="" if all(map(math.isnan, gathers)) else span_text(gathers, _THREE_DIGITS),
        models=format_names(models),
        changed=changed,
        has_unknown=any(map(math.isnan, gathers)),
    )
    title = "" if any(after_changes.values()) else "Does one of N ranks send what the ZeRO paper predicts?"
    span = span_text((ratio for ratios in shipped.values() for ratio in ratios), _THREE_DIGITS)
    numbers = [(f"{span} x", words)] if " to " in span else []
    return Answer(sentence, pd.DataFrame(rows).fillna(""), tuple(notes), numbers, title=title)


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


def _lora_answer(records: Records) -> Answer | None:  # noqa: PLR0914
    if not (cases := lora_cases(records)):
        return None
    subject, (whole, *_, divided) = next(iter(cases.items()))
    held = [(rank_state_bytes(row), figure_or_nan(row, "forward_gathers_bytes")) for row in (whole, divided)]
    sizes = [f"{held_text(state / MIB, gathered / MIB)} MiB" for state, gathered in held]
    sent = summaries.relative_ring_bytes(divided) / summaries.relative_ring_bytes(whole)
    runs = virtual_runs(records).runs.set_index("run", drop=False).loc[[whole["runs"][0], divided["runs"][0]]]
    predicted = _predict_full_depth(runs) if whole["model_layers"] < whole["preset_layers"] else None
    all_layers, sent_by_all = [], 0.0
    if predicted is not None:
        undivided, sharded = predicted[["state", "gathered", _SENT]].to_numpy()
        all_layers = [f"{held_text(row[0] / MIB, row[1] / MIB)} MiB" for row in (undivided, sharded)]
        sent_by_all = sharded[2] / undivided[2]
    sentence, words = paragraphs(
        "lora_answer.j2",
        whole=whole,
        divided=divided,
        sizes=sizes,
        all_layers=all_layers,
        sent_by_all=format_number(sent_by_all),
        sent=format_or_dash(sent, format_number),
        parameters=percent(summaries.kind_bytes(whole, "params") / rank_state_bytes(whole)),
        is_more=sum(held[1]) > held[0][0],
    )
    table = settings_table(records)
    columns = ["Model", "Ranks", "Strategy", "Precision", "Setting", "Params, GB", "Grads, GB", "Optimizer, GB"]
    # An option that changes none of these bytes gives no further row.
    table = table.loc[table["Strategy"].isin(STAGES), columns].round(9).drop_duplicates()
    table = table.loc[:, (table.nunique() > 1) | table.columns.str.endswith("GB")]
    return Answer(sentence, table, numbers=[(all_layers[1] if all_layers else sizes[1], words)], subject=subject)


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


def _tuning_answer(records: Records) -> Answer | None:  # noqa: PLR0914
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
    run, case = runs.iloc[0], ["model_name_or_path", "world_size", "precision", "zero_stage", *_TUNED]
    by_layers = {f"{run['model_layers']:.0f}": runs}
    figures, error = [_HELD, _KEPT, _SENT], 0.0
    if run["model_layers"] < run["preset_layers"] and (predicted := _predict_full_depth(runs)) is not None:
        by_layers[f"{run['preset_layers']}, predicted"] = predicted
        same_layers = _predict_figures(runs)
        error = 0.0 if same_layers is None else (same_layers[figures] / runs[figures] - 1).abs().max().max()

    def cell(changes: pd.Series) -> str:
        """Return the changes in percent, each with its strategies if there are several."""
        texts = [f"{100 * change:+.1f} %" if abs(change) > _NOTABLE else "no change" for change in changes]
        by_text = (changes.index.to_series() + "`").groupby(texts, sort=False).agg(lambda names: ", `".join(names))
        return texts[0] if len(by_text) == 1 else ", ".join(f"{text} (`{names})" for text, names in by_text.items())

    # The effects of the settings, by the figure that each changes most.
    effects: defaultdict[str, list[tuple[float, str, list[dict[str, str]]]]] = defaultdict(list)
    rows = []
    for key, words in _TUNED.items():
        most, at_depths = "", list[pd.Series]()
        for layers, depth_runs in by_layers.items():
            usual = depth_runs[key] == depth_runs[key].mode()[0]
            same = [name for name in case if name != key]
            pairs = depth_runs[usual].merge(depth_runs[~usual], on=same, suffixes=("", " then"))
            if pairs.empty:
                break
            pairs = pairs.set_index("strategy then")
            changes = {name: pairs[f"{name} then"] / pairs[name] - 1 for name in figures}
            setting = words.format(pairs[f"{key} then"].iloc[0], pairs[key].iloc[0])
            rows.append({"Change": setting, "Layers": layers} | {name: cell(changes[name]) for name in changes})
            # By the case in which a figure falls least, of the measured layers.
            most = most or min(changes, key=lambda name: changes[name].max())
            at_depths.append(changes[most])
        if at_depths:
            ends = [{percent(-change[at]): at for at in (change.idxmax(), change.idxmin())} for change in at_depths]
            effects[most].append((at_depths[0].max(), setting, ends))
    sentence, number, words, note = paragraphs(
        "tuning_answer.j2",
        effects={name: sorted(settings) for name, settings in effects.items()},
        largest=min((min(settings), name) for name, settings in effects.items()),
        run=run,
        error=percent(error),
        model=full_model(str(run["model_name_or_path"]).rsplit("/", 1)[-1]),
    )
    return Answer(sentence, pd.DataFrame(rows), (note,), [(number, words)])


def _predict_figures(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Return the runs with predicted figures; None if one cannot be predicted."""
    figures = []
    for run in runs.itertuples():
        if (request := request_if_any(run)) is None:
            return None
        gathered = simulate_gathers(request).live_at_end if request.strategy.zero_stage == 3 else 0
        held = predict_state(request).device, gathered * request.gathered_bytes
        figures.append((*held, kept_for_backward(request), sent_bytes(request)))
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
    lines = sum(row["extrapolated"] is not None for row in cases)
    sentence = (
        f"{len(cases) - lines} of {len(cases)} cases are measured completely and {lines} are extrapolated over layers;"
        " there is no loss, no accuracy and no throughput, since a virtual rank receives no real data."
    )
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
                "Max residual": f"{residual:.1%}" if fits else "-",
                "Not linear in layers": ", ".join(bent) or "-",
                "Thresholds crossed": ", ".join(sorted({name for fit in fits for name in fit["crossed"]})) or "-",
            }
        )
    notes = ["A figure that is not linear in layers is not extrapolated."] if lines else []
    notes += [
        f"{len(group)} of `{model}` ended {state}, such as: {group['status_reason'].iloc[0]}."
        for (model, state), group in runs[runs["status_state"] != "ok"].groupby(["model_name_or_path", "status_state"])
    ]
    return Answer(sentence, pd.DataFrame(table), tuple(notes))


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
