"""Step time and its profile, throughput against memory, and the recommended strategy for this machine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from study.config.text import NOT_MEASURED, format_number, percent
from study.predictor.hardware import peak_flops
from study.records.frames import Records, real_runs
from study.records.schema import PROFILE_CATEGORIES
from study.records.statistics import estimate_noise, seeds_needed
from study.records.strategy_runs import NAN, Row, StrategyRuns, group_by_strategy, has_no_gpu, scarce_memory, to_table
from study.report.document import Answer, IntervalCell, Question, format_names, span_text, times_text
from study.report.facts import Headline, caption, footnotes
from study.report.questions import comparison
from study.report.questions.comparison import (
    STEP,
    Comparison,
    ReferenceComparison,
    answer_by_strategy,
    arm_table,
    judge_speed,
    not_judged,
    real_arms,
    step_s,
    without_offload,
    workloads,
)
from study.report.questions.memory import describe_scope


def _time_answer(records: Records) -> Answer | None:
    compared = comparison.compare_with_reference(records, step_s)
    if compared is None:
        return None
    times = Comparison(compared.workloads, STEP, lambda arm: compared.references[arm.workload].name)
    ratios = times.significant(compared.sharding)
    headlines = _time_headlines(compared, times, ratios) if compared.sharding else [_reference_time(compared)]
    columns: comparison.Columns = {
        "Step, ms": lambda arm: 1e3 * step_s(arm),
        f"x {compared.plain_names}": times.cell(times_text),
    }
    notes = (caption("time", "ms"), *times.notes, *comparison.noise_notes(compared.main, STEP))
    leads = compared.has_largest and bool(ratios)
    return answer_by_strategy(without_offload(compared.workloads), columns, notes, headlines, leads=leads)


def _time_headlines(
    compared: ReferenceComparison, times: Comparison, ratios: Sequence[tuple[float, StrategyRuns]]
) -> list[Headline]:
    """Return the range of the significant ratios, if any, and how many of the tested comparisons these are.

    If none is tested, return the range of all ratios alone.
    """
    references = format_names([compared.references[arm.workload].name for arm in compared.sharding])
    scope = describe_scope(compared.main)
    tested = [arm for arm in compared.sharding if times.is_tested(arm)]
    if not tested:
        what = caption("time", "untested", references=references)
        return [times.headline(compared.sharding, times_text, what, scope, unit=" x")]
    headlines = []
    if ratios:
        (_, first), (_, last) = ratios[0], ratios[-1]
        ratio = Headline(
            f"{span_text((ratio for ratio, _ in ratios), times_text)} x",
            caption("time", "ratio", references=references),
            " to ".join(dict.fromkeys((first.name, last.name))),
            first.workload if len(ratios) == 1 else scope,
        )
        headlines.append(ratio)
    sizes = [comparison.least_difference(arms, STEP)[1] for arms in compared.main.values()]
    known = [size for size in sizes if size is not None]
    least = caption("time", "least", size=span_text(known, percent)) if known else ""
    untested = comparison.untested_text(times.differences(compared.sharding))
    count = Headline(
        f"{len(ratios)} of {len(tested)}",
        caption("time", "significant", references=references),
        scope="" if ratios else scope,
        bounds="; ".join(filter(None, (least, untested))),
    )
    return [*headlines, count]


def _reference_time(compared: ReferenceComparison) -> Headline:
    """Return the step time of the reference, of which no sharding strategy has a ratio."""
    bases = compared.references.values()
    milliseconds = span_text((1e3 * step_s(base) for base in bases), format_number)
    references = format_names([base.name for base in bases])
    what = caption("time", "alone", references=references)
    return Headline(f"{milliseconds} ms", what, scope=describe_scope(compared.workloads))


def runtime_table(records: Records) -> pd.DataFrame:
    """Return step time, throughput and utilization by strategy."""
    few = not_judged(workloads(records))

    def figures(arm: StrategyRuns) -> Row:
        runs = arm.ok_runs
        step = arm.geometric_mean(STEP).scaled(1e3)
        if arm.baseline is None or arm.is_baseline:
            words = arm.role if arm.is_baseline else "no baseline"
        else:
            words = arm.differences(STEP)[arm.name, arm.baseline].words if arm.is_fair() else "not judged"
        # Model FLOP/s, to be divided by the rate that the device reached in plain matrix products.
        steps_per_s = runs["tokens_per_s"] / (runs["global_batch_size"] * runs["seq_length"]).astype(float)
        flops_per_s = runs["model_flops_per_step"] * steps_per_s / runs["world_size"].astype(float)
        return {
            "Step time, ms": IntervalCell(step, step.text(1)),
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
            "Not judged": few.get((arm.workload, arm.name)),
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

LABELS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise and norms",
    "optimizer": "optimizer",
    "copies": "copies, casts, fills",
    "collectives": "collectives",
    "other": "other",
    "idle": "idle",
}
# Columns of the table by kind of work.
PROFILE_COLUMNS = {kind: f"{label.capitalize()}, ms" for kind, label in LABELS.items()}
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
    shares = pd.DataFrame(
        {"Matrix products and attention": details[_PRODUCTS], "Idle": details[PROFILE_COLUMNS["idle"]] / step}
    )
    products, idle = (span_text(fractions, percent) for _, fractions in shares.items())
    table = details[["Workload", "Strategy"]].assign(**{"Step, ms": step}).join(shares.map(percent))
    headlines = (
        Headline(products, caption("profile", "products")),
        Headline(idle, caption("profile", "idle")),
    )
    return Answer(table, headlines, (caption("profile", "profiled"),))


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
            **{PROFILE_COLUMNS[kind]: 1e3 * parts[kind] for kind in (*PROFILE_CATEGORIES, "idle")},
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
            "Kind": LABELS[entry["category"]],
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


@functools.lru_cache(maxsize=2)
def _without_profiles(records: Records) -> comparison.Workloads:
    """Return the strategies of each workload without profiled runs, which profiling slows down."""
    runs = real_runs(records).runs
    return workloads(dataclasses.replace(records, runs=runs[~runs["profile_steps"].fillna(0).gt(0)]))


def _advice_answer(records: Records) -> Answer | None:
    by_workload = _without_profiles(records)
    timed = {
        workload: [arm for arm in arms if arm.is_fair() and not math.isnan(step_s(arm))]
        for workload, arms in by_workload.items()
    }
    timed = {workload: arms for workload, arms in timed.items() if arms}
    if not timed:
        return None
    judged = {workload: judge_speed(arms) for workload, arms in timed.items()}
    table = pd.DataFrame([_advice_row(timed[workload], fastest) for workload, (fastest, _) in judged.items()])
    best = {workload: fastest for workload, (fastest, _) in judged.items() if fastest}
    everywhere = [name for name in next(iter(best.values()), []) if all(name in names for names in best.values())]
    arms = list(itertools.chain(*by_workload.values()))
    few = list(itertools.chain(*(few for _, few in judged.values())))
    notes = footnotes(
        "advice",
        {
            "not_judged": not best,
            "none": bool(best) and not everywhere,
            "not_equal": len(everywhere) > 1,
            "scope": True,
            "few": bool(few),
            "no_gpu": any(has_no_gpu(arm.workload_runs) for arm in arms),
        },
        names=format_names(few) if few else "",
    )
    headlines = _advice_headlines({workload: timed[workload] for workload in best}, everywhere)
    table = table.loc[:, (table != NOT_MEASURED).any()]
    return Answer(table, headlines, (*notes, *comparison.arm_notes(arms)))


def _advice_row(timed: Sequence[StrategyRuns], fastest: Sequence[str]) -> Row:
    """Return the fastest strategies of a workload, what its seeds can show, and the least model state."""
    workload, places = timed[0].workload, scarce_memory(timed[0].workload_runs)
    noise = estimate_noise(timed[0].workload_runs, STEP)
    needed = None if noise is None else seeds_needed(math.log(1.05), noise.log_sd * math.sqrt(2))
    unseen = comparison.least_difference(timed, STEP)[1] if fastest else None
    # State is counted on tensors, not sampled: one run is enough.
    sizes = {arm.name: arm.state_mib(places) for arm in without_offload({workload: timed})[workload]}
    counted = {name: size for name, size in sizes.items() if not math.isnan(size)}
    least = min(counted.values(), default=NAN)
    leanest = [name for name, size in counted.items() if size == least]
    return {
        "Workload": workload,
        "Fastest, or not shown to be slower": ", ".join(fastest) or "not judged",
        "Step, ms": ", ".join(f"{1e3 * step_s(arm):,.1f}" for arm in timed if arm.name in fastest) or NOT_MEASURED,
        "Least significant difference": NOT_MEASURED if unseen is None else percent(unseen),
        # For 80 % power if these two strategies are the only ones; each further pair needs more.
        "Seeds to find a 5 % difference of two": "not known" if noise is None else f"{needed or 'over ten thousand'}",
        "Least model state, no offload": f"{', '.join(leanest)}, {least:.1f} MiB" if counted else NOT_MEASURED,
    }


def _advice_headlines(timed: Mapping[str, Sequence[StrategyRuns]], everywhere: Sequence[str]) -> list[Headline]:
    """Return the strategies that are among the fastest everywhere and, of several, the one with the least peak."""
    if not everywhere:
        return []
    fastest = Headline(", ".join(everywhere), caption("advice", "fastest"), scope=describe_scope(timed))
    peaks = [{arm.name: arm.peak_gib[0] for arm in arms if arm.name in everywhere} for arms in timed.values()]
    is_known = not any(math.isnan(size) for sizes in peaks for size in sizes.values())
    if len(everywhere) == 1 or not is_known:
        return [fastest]
    leanest = sorted({min(sizes, key=lambda name: (sizes[name], name)) for sizes in peaks})
    return [fastest, Headline(" or ".join(leanest), caption("advice", "leanest"))]


def frontier_table(records: Records) -> pd.DataFrame:
    """Return speed and peak memory by strategy, and which is the fastest in its memory."""
    by_workload = _without_profiles(records)
    few = not_judged(by_workload)
    best = {
        (workload, name)
        for workload, strategies in by_workload.items()
        for name in _fastest_in_memory([arm for arm in strategies if (workload, arm.name) not in few])
    }

    def figures(arm: StrategyRuns) -> Row:
        peak, place = _tensor_peak_gib(arm)
        return {
            "Tokens/s": arm.geometric_mean("tokens_per_s").center,
            "Peak memory, GiB": peak,
            "Peak of": place,
            "Not judged": few.get((arm.workload, arm.name)),
            "Fastest in its memory": "yes" if (arm.workload, arm.name) in best else None,
        }

    return arm_table(itertools.chain(*by_workload.values()), figures)


def _tensor_peak_gib(arm: StrategyRuns) -> tuple[float, str]:
    """Return the peak of a rank's tensors, without other processes of the device; without a device its process's."""
    allocated = arm.median("peak_memory_gib_allocated")
    if math.isnan(allocated):
        return arm.median("host_peak_rss_gib"), "resident set"
    return allocated, "device memory"


def _fastest_in_memory(strategies: Sequence[StrategyRuns]) -> list[str]:
    """Return the comparable strategies that are faster than each with less memory; of all, if none is comparable."""
    points = [(_tensor_peak_gib(arm)[0], -arm.geometric_mean("tokens_per_s").center, arm) for arm in strategies]
    measured = [point for point in points if not math.isnan(point[0] + point[1])]
    fair = [point for point in measured if point[2].is_fair()]
    best: list[str] = []
    fastest = 0.0
    for _, slowness, arm in sorted(fair or measured, key=lambda point: point[:2]):
        if slowness < fastest:
            fastest = slowness
            best.append(arm.name)
    return best


ADVICE = Question(
    "advice",
    "Which configuration should I use on this machine?",
    _advice_answer,
    tables={"frontier": frontier_table},
    figures=("frontier",),
    notebook="runtime",
)
