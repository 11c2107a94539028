"""Throughput by number of ranks, machines, batch and model size, relative to one device or the baseline."""

from __future__ import annotations

import functools

import pandas as pd

from study.config.text import format_number, percent
from study.host.memory import MIB
from study.predictor.run_predictions import PLANNED_DEVICE, PLANNED_LENGTH, PLANNED_MICRO_BATCH
from study.records import strategy_runs
from study.records.fairness import baseline_arm
from study.records.frames import Records, real_runs
from study.records.statistics import MIN_SAMPLE, NOT_SIGNIFICANT, Interval, interval
from study.records.strategy_runs import NAN, Row, StrategyRuns, group_by_strategy, ratio_text, runs_with_several
from study.report.document import Answer, Question, format_names, format_or_dash, paragraphs, span_text, times_text
from study.report.questions import comparison
from study.report.questions.comparison import Comparison, arm_table, real_arms, side_by_side, without_offload, workloads
from study.report.questions.memory import STEP, format_scope, held_text, sent_mib, step_s, with_settings
from study.virtual.summaries import STAGES, STRONG, WEAK, over_nodes


def _ranks_answer(records: Records) -> Answer | None:
    by_workload = {workload: arms for workload, arms in workloads(records).items() if _has_several(arms[0])}
    speeds = Comparison(by_workload, STEP, _one_device, is_inverse=True)
    several = [arm for arms in by_workload.values() for arm in arms if arm.is_fair() and arm.ranks > 1]
    several = [arm for arm in several if (difference := speeds.of(arm)) and difference.ratio.n]
    if not several:
        return None
    one = comparison.format_references([name for arms in by_workload.values() if (name := _one_device(arms[0]))])
    one += f" on one{format_scope(by_workload)}"
    ratios = [ratio for ratio, _ in speeds.significant(several)[0]] or [NAN]
    verdict = "No: several" if max(ratios) < 1 else "Yes: several" if min(ratios) > 1 else "In part: several"
    sentence = speeds.sentence(
        several,
        times_text,
        f"{verdict} ranks are",
        f" times as fast as {one}",
        f"Not shown: the speed of several ranks does not differ significantly from that of {one}.",
    )
    return side_by_side(
        sentence,
        without_offload(by_workload),
        {
            "x one device": speeds.cell(times_text),
            "Of the ideal": lambda arm: format_or_dash(_speedup(arm, speeds).center / arm.ranks, percent),
        },
        *speeds.notes,
    )


def _has_several(arm: StrategyRuns) -> bool:
    runs = arm.workload_runs
    return bool(runs.loc[runs["status_state"] == "ok", "world_size"].nunique() > 1)


def _one_device(arm: StrategyRuns) -> str | None:
    """Return the reference strategy on one rank: plain training if it ran."""
    return baseline_arm(arm.workload_runs[arm.workload_runs["world_size"] == 1])


def _speedup(arm: StrategyRuns, speeds: Comparison) -> Interval:
    difference = speeds.of(arm)
    return interval([1.0] if arm.name == _one_device(arm) else []) if difference is None else difference.ratio


def single_vs_multi_table(records: Records) -> pd.DataFrame:
    """Return speed, efficiency and memory by number of ranks."""
    speeds = Comparison(workloads(records), STEP, _one_device, is_inverse=True)

    def figures(arm: StrategyRuns) -> Row:
        speedup, count, base = _speedup(arm, speeds), arm.ranks or None, _one_device(arm)
        return {
            "Ranks": count,
            "Tokens/s": arm.geometric_mean("tokens_per_s").center,
            "x one device": "1 (one device)" if arm.name == base else ratio_text(None if base is None else speedup),
            "Efficiency": speedup.center / count if count else NAN,
            "State per rank, MiB": arm.state_mib(),
            "Peak memory, GiB": arm.peak_gib[0],
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


def _nodes_answer(records: Records) -> Answer | None:  # noqa: PLR0914
    rows, table = over_nodes(records), nodes_table(records)
    if rows.empty:
        return None
    timed = rows[rows["efficiency"].notna() & (rows["machines"] > rows["fewest"])]
    if timed.empty:
        largest = rows[rows["machines"] == rows["machines"].max()]
        stages = largest[largest["line"].isin(STAGES)]
        # The last stage, the leanest and the first strategy as shipped, and hsdp, which has separate rings.
        shipped = largest[~largest["line"].str.contains(", ")]
        shipped = largest if shipped.empty else shipped
        leanest = shipped.loc[(shipped["state"] + shipped["gathered"].fillna(0)).idxmin()]
        chosen = {row["line"]: row for row in ((stages if len(stages) else largest).iloc[-1], leanest, largest.iloc[0])}
        chosen |= {row["line"]: row for _, row in shipped[shipped["strategy"] == "hsdp"].iterrows()}
        releasing = largest[
            (largest["strategy"] == next(iter(chosen))) & largest["line"].str.contains("max_live_parameters=0")
        ]
        padded = rows[(rows["line"] == "fsdp2") & (rows["model"] == largest["model"].iloc[0])].sort_values("world_size")
        # More than the (N - 1) / N of a ring adds.
        growth = padded.set_index("machines")["sent"].pct_change()
        state, words, sentence, *notes = paragraphs(
            "nodes_virtual_answer.j2",
            chosen=chosen,
            padding=growth[growth > 0.1],
            percent=percent,
            ranks=largest["world_size"].max(),
            again=releasing.nlargest(1, "sent").itertuples(),
            with_settings=with_settings,
            mib=lambda size: f"{format_number(size / MIB)} MiB",
            held=lambda row: f"{held_text(row.state / MIB, row.gathered / MIB)} MiB",
            models=largest["model"].unique(),
            planned=(PLANNED_DEVICE, PLANNED_MICRO_BATCH, PLANNED_LENGTH),
        )
        title = "What does a rank hold and send on more machines?"
        return Answer(sentence, table, tuple(notes), [(state, words)], title=title)
    sentence, *notes = paragraphs(
        "nodes_answer.j2",
        machines=timed["machines"].max(),
        percent=percent,
        span_text=span_text,
        groups=[(kind, timed[timed["scaling"] == kind]) for kind in (STRONG, WEAK)],
        format_names=format_names,
    )
    return Answer(sentence, table, tuple(notes))


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


def _speed_answer(column: str, words: str, records: Records) -> Answer | None:
    """Return the answer for the subject with most strategies; the details have the others."""
    speed = strategy_runs.format_speed_ratio(real_runs(records).runs, column)
    if speed.empty:
        return None
    subject = speed["subject"].iloc[0]
    chosen = speed[speed["subject"] == subject].sort_values("place", kind="stable")
    sign = (chosen["significant"] | (chosen["arm"] == chosen["baseline"])).map({True: "", False: comparison.UNSURE})
    cells = chosen["percent"].map("{:.0f} %".format) + sign + chosen["note"].map(lambda note: " †" if note else "")
    table = chosen.assign(cell=cells).pivot_table("cell", "arm", "place", aggfunc="first", sort=False)
    table.columns = [words.format(place) for place in table.columns]
    fair = chosen[(chosen["note"] == "") & (chosen["arm"] != chosen["baseline"])]
    several = fair[fair.groupby("arm")["place"].transform("nunique") > 1]
    # The sentence is about the strategy that shards most.
    ends = list(several[several["arm"] == several["arm"].iloc[-1]].itertuples()) if len(several) else []
    sentence, *notes = paragraphs(
        "speed_answer.j2",
        references=comparison.format_references(chosen["baseline"]),
        words=words,
        subject=subject,
        ends=ends and [ends[0], ends[-1]],
        is_unsure=sign.str.len().any(),
        not_significant=NOT_SIGNIFICANT,
        not_tested="" if any(len(end.points) >= MIN_SAMPLE for end in ends) else comparison.NOT_TESTED,
        confounded=list(chosen[chosen["note"] != ""].itertuples()),
        more=speed["subject"].nunique() - 1,
    )
    table = table.reset_index(names="Strategy").fillna("-")
    return Answer(sentence, table, tuple(dict.fromkeys(notes)), subject=subject)


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
            "Parameters, millions": strategy_runs.parameters(arm.workload_runs) / 1e6,
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
    functools.partial(_speed_answer, "global_batch_size", "batch {:g}"),
    tables={"batch_size": batch_size_table},
    figures=("batch_size",),
    notebook="batch_size",
)
MODEL_SIZE = Question(
    "model_size",
    "Does ZeRO cost more on a larger model?",
    functools.partial(_speed_answer, "model_name_or_path", "{:.3g} M parameters"),
    tables={"model_size": model_size_table},
    figures=("model_size",),
    notebook="model_size",
)
