"""Step time and its profile, throughput against memory, and the recommended strategy for this machine."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from study.config.text import NOT_MEASURED, percent
from study.predictor.hardware import peak_flops
from study.records.frames import Records, real_runs
from study.records.schema import PROFILE_CATEGORIES
from study.records.statistics import MIN_SAMPLE, NOT_SIGNIFICANT, estimate_noise, seeds_needed
from study.records.strategy_runs import NAN, Row, StrategyRuns, group_by_strategy, has_no_gpu, scarce_memory, to_table
from study.report.document import Answer, Question, format_names, paragraphs, span_text, times_text
from study.report.questions import comparison
from study.report.questions.comparison import Comparison, arm_table, real_arms, side_by_side, without_offload, workloads
from study.report.questions.memory import STEP, format_scope, step_s


def _time_answer(records: Records) -> Answer | None:
    compared = comparison.compare_with_reference(records, step_s)
    if compared is None:
        return None
    times = Comparison(compared.workloads, STEP, lambda arm: compared.references[arm.workload].name)
    sentence = f"No sharding strategy here is comparable with {compared.names} in step time."
    numbers: list[tuple[str, str]] = []
    ratios, only = times.significant(compared.sharding)
    if compared.has_largest and ratios:
        total = len(compared.sharding)
        rest = f"; {total - len(ratios)} of {total} comparisons are {NOT_SIGNIFICANT}" if len(ratios) < total else ""
        texts = [f"{times_text(ratio)} (`{arm.name}`)" for ratio, arm in ratios]
        ends = only or f": {' to '.join(dict.fromkeys((texts[0], texts[-1])))}"
        words = f"step time with sharded state, in multiples of that of {compared.names}{ends}{rest}"
        numbers.append((f"{span_text((ratio for ratio, _ in ratios), times_text)} x", words))
    if compared.sharding:
        base = f"{compared.names}{format_scope(compared.main)}"
        least = [comparison.least_difference(arms, STEP)[1] for arms in compared.main.values()]
        known = [1 + size for size in least if size is not None]
        unseen = f"; the least that they can show is {span_text(known, times_text)} times as long" if known else ""
        sentence = times.sentence(
            compared.sharding,
            times_text,
            "A step with sharded state takes",
            f" times as long as one of {base}",
            f"No sharding strategy's step time differs significantly from that of {base}{unseen}.",
        )
    return side_by_side(
        sentence,
        without_offload(compared.workloads),
        {"Step, ms": lambda arm: 1e3 * step_s(arm), f"x {compared.plain_names}": times.cell(times_text)},
        "ms: median step of a run, geometric mean over a strategy's own seeds. Ratios: seed by seed. Tokens per second"
        " are of all steps.",
        *times.notes,
        *comparison.noise_notes(compared.main, STEP),
        numbers=numbers,
    )


def runtime_table(records: Records) -> pd.DataFrame:
    """Return step time, throughput and utilization by strategy."""

    def figures(arm: StrategyRuns) -> Row:
        runs = arm.ok_runs
        if arm.baseline is None or arm.is_baseline:
            words = arm.role if arm.is_baseline else "no baseline"
        else:
            words = arm.differences(STEP)[arm.name, arm.baseline].words if arm.is_fair() else "not judged"
        # Model FLOP/s, to be divided by the rate that the device reached in plain matrix products.
        steps_per_s = runs["tokens_per_s"] / (runs["global_batch_size"] * runs["seq_length"]).astype(float)
        flops_per_s = runs["model_flops_per_step"] * steps_per_s / runs["world_size"].astype(float)
        return {
            "Step time, ms": arm.geometric_mean(STEP).text(1, 1e3),
            "p10, ms": 1e3 * arm.median("step_time_s_p10"),
            "p90, ms": 1e3 * arm.median("step_time_s_p90"),
            "Tokens/s": arm.geometric_mean("tokens_per_s").center,
            "Tokens/s per device": arm.geometric_mean("tokens_per_s_per_device").center,
            "Samples/s": (runs["tokens_per_s"] / runs["seq_length"].astype(float)).median(),
            "Start-up, s": arm.median("startup_s"),
            "Run, s": arm.median("runtime_s"),
            "Calls per step": arm.median("comm_calls_per_step"),
            "Model FLOP utilization": arm.median("mfu"),
            "Of the measured matmul rate": (flops_per_s / (1e12 * runs["matmul_tflops"])).median(),
            "Energy of the GPUs over counted steps, J": arm.median("energy_j"),
            "Time, x baseline": arm.format_baseline_ratio(STEP),
            "In words": words,
        }

    return arm_table(real_arms(records), figures)


TIME = Question(
    "time",
    "How long does a step take?",
    _time_answer,
    tables={"runtime": runtime_table},
    figures=("step_time",),
    notebook="runtime",
)

_LABELS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise and norms",
    "optimizer": "optimizer",
    "copies": "copies, casts, fills",
    "collectives": "collectives",
    "other": "other",
    "idle": "idle",
}
_PRODUCTS = "Share in matrix products and attention"


def _profiled_arms(records: Records) -> Iterator[tuple[StrategyRuns, dict[str, Any]]]:
    """Yield each profiled strategy with the profile of its first run that has one: profiles are not averaged."""
    for arm in group_by_strategy(real_runs(records).runs):
        profiled = arm.ok_runs["profile"].dropna()
        if len(profiled):
            yield arm, json.loads(profiled.iloc[0])


def _profile_answer(records: Records) -> Answer | None:
    details = step_profile_table(records)
    if details.empty:
        return None
    step = details["Profiled step, ms"]
    shares = pd.DataFrame({"Matrix products and attention": details[_PRODUCTS], "Idle": details["Idle, ms"] / step})
    products, idle = (span_text(share, percent) for _, share in shares.items())
    table = details[["Workload", "Strategy"]].assign(**{"Step, ms": step}).join(shares.map(percent))
    sentence = f"Matrix products and attention take {products} of a step; {idle} of it is idle."
    return Answer(sentence, table, ("Profiled steps are slower, and excluded from all other times here.",))


def step_profile_table(records: Records) -> pd.DataFrame:
    """Return the time of a step by kind of work, and the FLOP rate of the model's own arithmetic."""

    def figures(arm: StrategyRuns, profile: dict[str, Any]) -> Row:
        parts = {**profile["categories_s_per_step"], "idle": profile["idle_s_per_step"]}
        # The kinds of work counted in a model's FLOPs.
        seconds = parts["matmul"] + parts["attention"]
        # With gradient checkpointing, that time includes recomputation, which is not counted in the model's FLOPs.
        has_rate = seconds and not arm.ok_runs["gradient_checkpointing"].any()
        rate = arm.median("model_flops_per_step") / arm.ok_runs["world_size"].iloc[0] / seconds if has_rate else NAN
        devices = json.loads(arm.value("devices") or "[]") if profile["device"] == "cuda" else []
        peak = peak_flops(devices[0], arm.value("precision")) if devices else None
        return {
            "Profiled step, ms": 1e3 * profile["wall_s_per_step"],
            "Timed step, ms": 1e3 * step_s(arm),
            **{f"{_LABELS[kind].capitalize()}, ms": 1e3 * parts[kind] for kind in (*PROFILE_CATEGORIES, "idle")},
            "Of it counted twice, ms": 1e3 * (profile["summed_s_per_step"] - profile["busy_s_per_step"]),
            "Model FLOP utilization": arm.median("mfu"),
            _PRODUCTS: seconds / profile["wall_s_per_step"],
            "TFLOP/s in matrix products and attention": rate / 1e12,
            "Of the device's peak": rate / peak if peak else NAN,
        }

    return to_table(arm.row(figures(arm, profile)) for arm, profile in _profiled_arms(records))


def kernels_table(records: Records) -> pd.DataFrame:
    """Return the longest kernels or operators of each profiled strategy, the longest first."""
    return to_table(
        {
            "Workload": arm.workload,
            "Strategy": arm.name,
            "Kernel or operator": entry["name"],
            "Kind": _LABELS[entry["category"]],
            "Calls per step": entry["calls_per_step"],
            "Per step, ms": 1e3 * entry["s_per_step"],
            "Share of the step": entry["s_per_step"] / profile["wall_s_per_step"],
        }
        for arm, profile in _profiled_arms(records)
        for entry in profile["top"]
    )


PROFILE = Question(
    "profile",
    "Where does the time of a step go?",
    _profile_answer,
    tables={"step_profile": step_profile_table, "profile": kernels_table},
    figures=("step_profile",),
    notebook="runtime",
)


def _advice_answer(records: Records) -> Answer | None:  # noqa: PLR0914
    runs = real_runs(records).runs
    # Profiling slows a run down, so profiled runs are excluded.
    by_workload = workloads(dataclasses.replace(records, runs=runs[~runs["profile_steps"].fillna(0).gt(0)]))
    rows, best, judged, unjudged, unseen = [], [], [], [], []
    for workload, strategies in by_workload.items():
        timed = [arm for arm in strategies if arm.is_fair() and not math.isnan(step_s(arm))]
        if not timed:
            continue
        fastest, few = judge_speed(timed)
        if fastest:
            best.append(fastest)
            judged.append(timed)
            unjudged += list(few)
            unseen.append(comparison.least_difference(timed, STEP)[1] or math.nan)
        places = scarce_memory(timed[0].workload_runs)
        states = [
            (size, arm.name)
            for arm in without_offload({workload: timed})[workload]
            if not math.isnan(size := arm.state_mib(places))
        ]
        least = min(states, default=(0.0, ""))[0]
        noise = estimate_noise(timed[0].workload_runs, STEP)
        needed = None if noise is None else seeds_needed(math.log(1.05), noise.log_sd * math.sqrt(2))
        seeds = "not known" if noise is None else f"{needed or 'over ten thousand'}"
        # State is counted on tensors, not sampled: one run is enough.
        smallest = f"{', '.join(name for size, name in states if size == least)}, {least:.1f} MiB"
        rows.append(
            {
                "Workload": workload,
                "Fastest, or not shown to be slower": ", ".join(fastest) or "not judged",
                "Step, ms": ", ".join(f"{1e3 * step_s(arm):,.1f}" for arm in timed if arm.name in fastest)
                or NOT_MEASURED,
                # For 80 % power if these two strategies are the only ones; each further pair needs more.
                "Seeds to find a 5 % difference of two": seeds,
                "Least model state, no offload": smallest if states else NOT_MEASURED,
            }
        )
    if not rows:
        return None
    arms = [arm for strategies in by_workload.values() for arm in strategies]
    notes = ["For this model, batch and length only: for a model that does not fit, the order may be reversed."]
    if unjudged:
        notes.append(f"Fewer than three seeds, so not judged: {format_names(unjudged)}.")
    if any(has_no_gpu(arm.workload_runs) for arm in arms):
        notes.append("This machine has no GPU: these records do not show the cost or benefit of a stage on one.")
    everywhere = [name for name in best[0] if all(name in fastest for fastest in best)] if best else []
    peaks = [[(arm.peak_gib[0], arm.name) for arm in timed if arm.name in everywhere] for timed in judged]
    is_known = everywhere and not any(math.isnan(size) for sizes in peaks for size, _ in sizes)
    leanest = sorted({min(sizes)[1] for sizes in peaks}) if is_known else []
    sentence, *_ = paragraphs(
        "advice_answer.j2",
        best=best,
        everywhere=everywhere,
        leanest=leanest,
        format_names=format_names,
        timed=len(rows),
        unjudged=unjudged,
        scope=format_scope({row["Workload"]: by_workload[row["Workload"]] for row in rows}),
        unseen=unseen,
        percent=percent,
    )
    table = pd.DataFrame(rows)
    return Answer(sentence, table.loc[:, (table != NOT_MEASURED).any()], (*notes, *comparison.arm_notes(arms)))


def judge_speed(strategies: Iterable[StrategyRuns]) -> tuple[list[str], dict[str, str]]:
    """Return the fastest strategy with all that are not significantly slower, and the seeds of those that have too few.

    Without two that have three seeds, none is.
    """
    fair = [arm for arm in strategies if arm.is_fair()]
    seeds = {arm.name: arm.geometric_mean(STEP).n for arm in fair}
    few = {name: f"{n} seed{'s' * (n > 1)}" for name, n in seeds.items() if 0 < n < MIN_SAMPLE}
    judged = [arm for arm in fair if seeds[arm.name] >= MIN_SAMPLE]
    if len(judged) < 2:
        return [], few
    ranked = [arm.name for arm in sorted(judged, key=step_s)]
    tests = judged[0].differences(STEP)
    slower = {name for name in ranked[1:] if tests[ranked[0], name].is_significant}
    return [arm.name for arm in judged if arm.name not in slower], few


ADVICE = Question(
    "advice",
    "Which configuration should I use on this machine?",
    _advice_answer,
    figures=("frontier",),
    notebook="runtime",
)
