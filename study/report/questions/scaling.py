"""Throughput by number of ranks, machines, batch and model size, relative to one device or the baseline."""

from __future__ import annotations

import functools

import pandas as pd

from study.config.text import format_number, percent
from study.host.memory import MIB
from study.predictor.run_predictions import PLANNED_DEVICE, PLANNED_LENGTH, PLANNED_MICRO_BATCH
from study.records import strategy_runs
from study.records.frames import Records, real_runs
from study.records.statistics import Interval, interval
from study.records.strategy_runs import NAN, Row, StrategyRuns, group_by_strategy, ratio_text, runs_with_several
from study.report.document import Answer, IntervalCell, Question, format_or_dash, span_text, times_text
from study.report.facts import Headline, caption, footnotes
from study.report.questions import comparison
from study.report.questions.comparison import (
    STEP,
    Comparison,
    answer_by_strategy,
    arm_table,
    name_with_settings,
    not_judged,
    real_arms,
    step_s,
    without_offload,
    workloads,
)
from study.report.questions.memory import describe_scope, held_text, sent_mib
from study.virtual.summaries import STAGES, STRONG, WEAK, over_nodes

# A larger part of the bytes that `fsdp2` sends is padding.
_PADDED = 0.1


def _ranks_answer(records: Records) -> Answer | None:
    by_workload = {workload: arms for workload, arms in workloads(records).items() if _has_several(arms[0])}
    speeds = Comparison(by_workload, STEP, _one_device, is_inverse=True)
    several = speeds.paired(arm for arms in by_workload.values() for arm in arms if arm.is_fair() and arm.ranks > 1)
    if not several:
        return None
    bases = [name for arms in by_workload.values() if (name := _one_device(arms[0]))]
    words = caption("ranks", "speed", references=comparison.format_references(bases))
    columns: comparison.Columns = {
        "x one device": speeds.cell(times_text),
        "Of the ideal": lambda arm: format_or_dash(_speedup(arm, speeds).center / arm.ranks, percent),
    }
    scope = describe_scope({arm.workload: by_workload[arm.workload] for arm in several})
    headline = speeds.headline(several, times_text, words, scope, unit=" x")
    return answer_by_strategy(without_offload(by_workload), columns, speeds.notes, [headline], leads=False)


def _has_several(arm: StrategyRuns) -> bool:
    runs = arm.workload_runs
    return bool(runs.loc[runs["status_state"] == "ok", "world_size"].nunique() > 1)


def _one_device(arm: StrategyRuns) -> str | None:
    """Return the reference strategy on one rank: plain training if it ran."""
    return arm.all_strategies.baseline_on_one_rank


def _speedup(arm: StrategyRuns, speeds: Comparison) -> Interval:
    difference = speeds.of(arm)
    return interval([1.0] if arm.name == speeds.find_base(arm) else []) if difference is None else difference.ratio


def single_vs_multi_table(records: Records, baseline: str = "") -> pd.DataFrame:
    """Return speed, efficiency and memory by number of ranks.

    Speeds are relative to `baseline` in the workloads that ran it, in others to the reference on the fewest ranks.
    """

    def reference(arm: StrategyRuns) -> str | None:
        return baseline if arm.all_strategies.has_ended(baseline) else arm.all_strategies.baseline_on_fewest_ranks

    by_workload = workloads(records)
    speeds = Comparison(by_workload, STEP, reference, is_inverse=True)
    ranks = {(workload, arm.name): arm.ranks for workload, arms in by_workload.items() for arm in arms}
    few = not_judged(by_workload)

    def figures(arm: StrategyRuns) -> Row:
        base = reference(arm)
        speedup = _speedup(arm, speeds)
        fraction = ranks.get((arm.workload, base or ""), NAN) / arm.ranks if arm.ranks else NAN
        text = "1 (reference)" if arm.name == base else ratio_text(None if base is None else speedup)
        return {
            "Ranks": arm.ranks or None,
            "Tokens/s": arm.geometric_mean("tokens_per_s").center,
            "Reference": base,
            "x reference": IntervalCell(speedup, text),
            "Efficiency": speedup.center * fraction,
            "State per rank, MiB": arm.state_mib(),
            "Peak memory, GiB": arm.peak_gib[0],
            "Not judged": few.get((arm.workload, arm.name)),
        }

    return arm_table(filter(_has_several, real_arms(records)), figures)


RANKS = Question(
    "ranks",
    "Are several ranks faster than one?",
    _ranks_answer,
    tables={"single_vs_multi": single_vs_multi_table},
    figures=("scaling",),
    notebook="single_vs_multi",
)


def _nodes_answer(records: Records) -> Answer | None:
    rows, table = over_nodes(records), nodes_table(records)
    if rows.empty:
        return None
    timed = rows[rows["efficiency"].notna() & (rows["machines"] > rows["fewest"])]
    if timed.empty:
        title = "What does a rank hold and send on more machines?"
        return Answer(table, _virtual_nodes_headlines(rows), _virtual_nodes_footnotes(rows), title=title)
    headlines = [
        Headline(
            span_text(timed.loc[timed["scaling"] == scaling, "efficiency"], percent),
            caption("nodes", "speed", machines=timed["machines"].max(), scaling=scaling),
        )
        for scaling in (STRONG, WEAK)
        if (timed["scaling"] == scaling).any()
    ]
    return Answer(table, headlines, footnotes("nodes", {"scaling": True, "across": True}))


def _virtual_nodes_headlines(rows: pd.DataFrame) -> tuple[Headline, Headline]:
    """Return the memory of a rank of the last stage, else of the last strategy, and the bytes that leave a machine."""
    largest = rows[rows["machines"] == rows["machines"].max()]
    stages = largest[largest["line"].isin(STAGES)]
    row = (stages if len(stages) else largest).iloc[-1]
    strategy, scope = name_with_settings(row["line"]), f"{row['world_size']} virtual ranks of {row['model']}"
    memory_text = f"{held_text(row['state'] / MIB, row['gathered'] / MIB)} MiB"
    leaving = f"{format_number(row['leaving'] / MIB)} MiB"
    return (
        Headline(memory_text, caption("nodes", "held"), strategy, scope),
        Headline(leaving, caption("nodes", "leaving"), strategy, scope),
    )


def _virtual_nodes_footnotes(rows: pd.DataFrame) -> tuple[str, ...]:
    padded = rows[rows["line"] == "fsdp2"].sort_values("world_size")
    # More than the (N - 1) / N of a ring adds.
    growth = padded.groupby("model")["sent"].pct_change()
    first = rows.iloc[0]
    return footnotes(
        "nodes",
        {
            "rings": True,
            "hsdp": bool((rows["strategy"] == "hsdp").any()),
            "live": bool(rows["line"].str.contains("max_live_parameters=0").any()),
            "padding": bool((growth > _PADDED).any()),
            "planned": True,
        },
        per_machine=int(first["world_size"] / first["machines"]),
        device=PLANNED_DEVICE,
        batch=PLANNED_MICRO_BATCH,
        length=PLANNED_LENGTH,
    )


def nodes_table(records: Records) -> pd.DataFrame:
    """Return throughput, memory and communication by number of machines, measured and predicted."""
    rows = over_nodes(records)
    table = {
        "Model": rows["model"],
        "Strategy": rows["line"],
        "Scaling": rows["scaling"],
        "Machines": rows["machines"],
        "Ranks": rows["world_size"],
        "Tokens/s": rows["tokens_per_s"],
        "Tokens/s, predicted": rows["predicted_tokens_per_s"],
        "Efficiency": rows["efficiency"],
        "Efficiency, predicted": rows["predicted_efficiency"],
        "State per rank, MiB": rows["state"] / MIB,
        "State, predicted": rows["predicted_state"] / MIB,
        "Gathered per rank, MiB": rows["gathered"] / MIB,
        "Ring bytes (NCCL) per rank, MiB": rows["sent"] / MIB,
        "Ring bytes (NCCL), predicted": rows["predicted_sent"] / MIB,
        "Of it across machines, MiB": rows["across"] / MIB,
        "Out of a machine, MiB": rows["leaving"] / MIB,
        "Peak per rank, GiB": rows["peak"],
        "Peak, predicted": rows["predicted_peak"],
    }
    return pd.DataFrame(table).dropna(axis="columns", how="all")


NODES = Question(
    "nodes",
    "How much speed does a rank lose on more machines?",
    _nodes_answer,
    tables={"nodes": nodes_table},
    figures=("nodes",),
    notebook="scaling",
)


def speeds_by(column: str, records: Records) -> pd.DataFrame:
    """Return a row per strategy and place with its speed in percent of the baseline's, as the figure has it."""
    return strategy_runs.format_speed_ratio(real_runs(records).runs, column)


def _speed_answer(name: str, column: str, records: Records) -> Answer | None:
    """Return the answer for the subject with most strategies; the details have the others."""
    speed = speeds_by(column, records)
    if speed.empty:
        return None
    subject = speed["subject"].iloc[0]
    chosen = speed[speed["subject"] == subject].sort_values("place", kind="stable")
    cells = [_speed_cell(row) for _, row in chosen.iterrows()]
    texts = [f"{cell} †" if note else str(cell) for cell, note in zip(cells, chosen["note"], strict=True)]
    table = chosen.assign(cell=texts).pivot_table("cell", "arm", "place", aggfunc="first", sort=False)
    table.columns = [caption(name, "place", place=place) for place in table.columns]
    references = comparison.format_references(chosen["baseline"])
    confounded = chosen[chosen["note"] != ""]
    more = speed["subject"].nunique() - 1
    notes = (
        *footnotes("speeds", {"about": True}, references=references, subject=subject),
        *comparison.mark_notes(cells),
        *(
            caption("comparison", "unfair", names=f"`{arm}`", reason=reason)
            for arm, reason in zip(confounded["arm"], confounded["note"], strict=True)
        ),
        *footnotes("speeds", {"more": more > 0}, more=more),
    )
    return Answer(
        table.reset_index(names="Strategy").fillna("-"),
        _speed_headlines(name, chosen, references),
        tuple(dict.fromkeys(notes)),
        subject=subject,
        leads=False,
    )


def _speed_cell(speed: pd.Series) -> comparison.MarkedText:
    """Return the cell of one strategy at one place; the baseline's has no mark."""
    mark = "" if speed["arm"] == speed["baseline"] else speed["difference"].mark
    return comparison.MarkedText(f"{speed['percent']:.0f} %", mark)


def _speed_headlines(name: str, speed: pd.DataFrame, references: str) -> list[Headline]:
    """Return the significant speeds of the strategy that shards most, at the ends of its places.

    If no end is tested, return both speeds, which are named so.
    """
    subject = speed["subject"].iloc[0]
    others = speed[speed["arm"] != speed["baseline"]]
    fair = others[others["note"] == ""]
    several = fair[fair.groupby("arm")["place"].transform("nunique") > 1]
    if several.empty:
        words = caption("speeds", "several", references=references)
        return [Headline(f"0 of {others['arm'].nunique()}", words, scope=subject)]
    strategy = several["arm"].iloc[-1]
    places = several[several["arm"] == strategy]
    ends = [places.iloc[0], places.iloc[-1]]
    tested = [end for end in ends if end["difference"].is_tested]
    differences = [end["difference"] for end in ends]
    if tested:
        shown = [end for end in tested if end["difference"].is_significant]
    else:
        shown = [end for end in ends if not end["difference"].is_confounded]
    if not shown:
        words = caption("comparison", "significant" if tested else "tested")
        return [Headline(f"0 of {len(tested) or len(ends)}", words, name_with_settings(strategy), subject)]
    bounds = comparison.verdicts_text(differences)
    seeds = 0 if tested else comparison.common_seeds(differences)
    return [
        Headline(
            f"{end['percent']:.0f} %",
            caption("speeds", "speed", references=references, place=caption(name, "place", place=end["place"])),
            name_with_settings(strategy),
            subject,
            bounds,
            seeds,
        )
        for end in shown
    ]


def batch_size_table(records: Records) -> pd.DataFrame:
    """Return throughput and communication by global batch."""

    def figures(arm: StrategyRuns) -> Row:
        batch = arm.value("global_batch_size")
        return {
            "Global batch": batch,
            "Accumulation": arm.value("gradient_accumulation_steps"),
            "Tokens/s per device": arm.geometric_mean("tokens_per_s_per_device").center,
            "Throughput, x baseline": arm.format_baseline_ratio("tokens_per_s_per_device"),
            "Step time, ms": 1e3 * step_s(arm),
            "Ring bytes (NCCL) per token, KiB": NAN
            if batch is None
            else 1024 * sent_mib(arm) / (batch * arm.value("seq_length")),
            "Peak memory, GiB": arm.peak_gib[0],
        }

    return arm_table(group_by_strategy(runs_with_several(real_runs(records).runs, "global_batch_size")), figures)


def model_size_table(records: Records) -> pd.DataFrame:
    """Return memory and step time by model size."""

    def figures(arm: StrategyRuns) -> Row:
        return {
            "Model": arm.value("model_name_or_path"),
            "Parameters, millions": arm.all_strategies.parameters / 1e6,
            "State per rank, MiB": arm.state_mib(),
            "Peak memory, GiB": arm.peak_gib[0],
            "Step time, ms": 1e3 * step_s(arm),
            "Time, x baseline": arm.format_baseline_ratio("step_time_s_median"),
        }

    table = arm_table(group_by_strategy(runs_with_several(real_runs(records).runs, "model_name_or_path")), figures)
    order = "Parameters, millions"
    return table.sort_values(order, kind="stable", ignore_index=True) if order in table else table


BATCH_SIZE = Question(
    "batch_size",
    "Does a larger batch reduce the cost of communication?",
    functools.partial(_speed_answer, "batch_size", "global_batch_size"),
    tables={"batch_size": batch_size_table},
    figures=("batch_size",),
    notebook="batch_size",
)
MODEL_SIZE = Question(
    "model_size",
    "Does ZeRO cost more on a larger model?",
    functools.partial(_speed_answer, "model_size", "model_name_or_path"),
    tables={"model_size": model_size_table},
    figures=("model_size",),
    notebook="model_size",
)
