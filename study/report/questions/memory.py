"""Memory and communication of one rank, benefit and cost of offload, and alternatives to ZeRO."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

import pandas as pd

from study.config.strategies import WITH_GROUPS, WITH_REPLICAS
from study.config.text import format_number, percent
from study.host.memory import GIB, MIB
from study.records import strategy_runs
from study.records.frames import Records, drop_probes, real_runs, virtual_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.statistics import interval
from study.records.strategy_runs import NAN, Row, StrategyRuns, group_by_strategy, scarce_memory, state_bytes
from study.records.workloads import BASELINES, strategy_order
from study.report import document
from study.report.document import Answer, Question, format_or_dash, paragraphs, span_text, times_text
from study.report.questions import comparison
from study.report.questions.comparison import Comparison, arm_table, real_arms, side_by_side, without_offload, workloads
from study.virtual.summaries import STAGES, ranks_per_group, read_ring_bytes, with_whole_models

STEP = "step_time_s_median"
_OPTIMIZER = [f"optimizer_bytes_{place}" for place in STATE_PLACES]
_KINDS = {"params": "Parameters", "grads": "Gradients", "optimizer": "Optimizer"}


def step_s(arm: StrategyRuns) -> float:
    """Return the geometric mean over seeds of the median step time, in seconds."""
    return arm.geometric_mean(STEP).center


def sent_mib(arm: StrategyRuns) -> float:
    """Return ring bytes per step, in MiB: an all-reduce sends twice its size, a gather or a scatter once."""
    sent = arm.ok_runs["collectives"].map(read_ring_bytes)
    return float(sent.median()) / MIB if sent.notna().any() else NAN


def format_scope(by_workload: comparison.Workloads) -> str:
    """Return the only workload, the size of the largest model, and whether there was no GPU, in brackets."""
    runs = [strategies[0].workload_runs for strategies in by_workload.values()]
    sizes = [size / 1e6 for some in runs if not pd.isna(size := strategy_runs.parameters(some))]
    lead = "" if len(runs) == 1 else "models of up to "
    words = [
        *(by_workload if len(runs) == 1 else ()),
        *(f"{lead}{format_number(max(sizes))} M parameters" for _ in sizes[:1]),
        *("no GPU" for _ in filter(strategy_runs.has_no_gpu, runs[:1])),
    ]
    return f" ({', '.join(words)})" if words else ""


def _is_mostly_state(base: StrategyRuns) -> bool:
    """Whether model state is most of the peak of a process without a GPU; with a tiny model, libraries are."""
    peak, place = base.peak_gib
    return place == "host process" and _state_gib(base) > peak / 2


def _state_gib(arm: StrategyRuns) -> float:
    return arm.state_mib() * MIB / GIB


def _memory_by_strategy(compared: comparison.ReferenceComparison, workload: str, ranks: int) -> dict[str, object]:
    """Return the state and the peak of each strategy on this many ranks as texts, and their ends; without a workload
    these are empty."""
    arms = [compared.references[workload]] if workload else []
    arms += [arm for arm in compared.sharding if arms and (arm.workload, arm.ranks) == (workload, ranks)]
    arms.sort(key=lambda arm: strategy_order(arm.value("strategy")))
    names = [with_settings(arm.name) for arm in arms]
    states, peaks = ([size(arm) for arm in arms] for size in (_state_gib, lambda arm: arm.peak_gib[0]))
    texts = (
        ", ".join(f"{format_number(size)} ({name})" for size, name in zip(sizes, names, strict=True))
        for sizes in (states, peaks)
    )
    ends = {"ends": [states[0], states[-1]], "peak_ends": [min(peaks), max(peaks)]} if arms else {}
    return {**dict(zip(("states", "all_peaks"), texts, strict=True)), **ends}


def _compare_state(records: Records) -> comparison.ReferenceComparison | None:
    return comparison.compare_with_reference(records, StrategyRuns.state_mib, True, _is_mostly_state)


def find_mostly_state(records: Records) -> str:
    """Return the workload without a GPU whose reference has most model state in its peak; empty if none has."""
    compared = _compare_state(records)
    return next((name for name in compared.main if _is_mostly_state(compared.references[name])), "") if compared else ""


def _memory_answer(records: Records) -> Answer | None:
    compared = _compare_state(records)
    if compared is None:
        return None
    columns: comparison.Columns = {
        f"State, % of {compared.plain_names}": compared.cell(percent),
        "Peak, GiB": lambda arm: arm.peak_gib[0],
    }
    only = find_mostly_state(records)
    if only:
        columns = {"State, GiB": _state_gib, **columns}
    if not compared.ratios:
        sentence = f"No sharding strategy here is comparable with {compared.names} in model state."
        return side_by_side(sentence, without_offload(compared.workloads), columns, only=only)
    # ZeRO's own figure, if a stage ran, on the most ranks.
    stages = [pair for pair in compared.ratios if pair[1].value("strategy") in STAGES] or compared.ratios
    leanest = max((arm for _, arm in stages), key=lambda arm: arm.ranks)
    ratios, arms = zip(*(pair for pair in stages if pair[1].name == leanest.name), strict=True)
    pairs = [(arm, compared.references[arm.workload]) for arm in arms]
    # A gathered weight is not state, but takes memory within a step.
    larger = [(arm.state_mib() + arm.median("forward_gathers_bytes") / MIB) / base.state_mib() for arm, base in pairs]
    excess = [_excess(arm, base) for arm, base in pairs]
    peaks = [ratio for arm, base in pairs if (ratio := _peak_ratio(arm, base)) > 0]
    sentence, note, *tiles = paragraphs(
        "memory_answer.j2",
        leanest=leanest,
        **_memory_by_strategy(compared, only, leanest.ranks),
        gib=format_number,
        # The buffers of stage 3 are its bucket of gradients, whose default size is that of 500 M elements.
        has_whole_bucket=leanest.median("buffer_bytes_device") > pairs[0][1].median("params_bytes_device"),
        ratios=ratios,
        names=compared.names,
        versus=document.versus_text,
        peaks=peaks,
        unclear=len(pairs) - len(peaks),
        larger=[] if math.isnan(sum(larger)) else larger,
        excess=[max(parts) for parts in zip(*excess, strict=True)],
        fsdp2=[ratio for ratio, arm in compared.ratios if arm.value("strategy") == "fsdp2"],
        share=percent(1 - 1 / leanest.ranks),
        scope=format_scope(compared.main),
        places=" or ".join(dict.fromkeys(base.peak_gib[1] for base in compared.references.values())),
    )
    numbers = [*zip(tiles[::2], tiles[1::2], strict=True)] if compared.has_largest else []
    return side_by_side(sentence, without_offload(compared.workloads), columns, note, numbers=numbers, only=only)


def _peak_ratio(arm: StrategyRuns, base: StrategyRuns) -> float:
    """Return the ratio of the peaks, seed by seed if there are enough; NaN if it is not significant or not known."""
    figure = "host_peak_rss_gib" if arm.peak_gib[1] == "host process" else "peak_memory_gib_device"
    difference = arm.differences(figure).get((arm.name, base.name))
    if difference is None or difference.p is None:
        return arm.peak_gib[0] / base.peak_gib[0]
    return difference.ratio.center if difference.is_significant else NAN


def _excess(arm: StrategyRuns, base: StrategyRuns) -> list[float]:
    """Return the state of a rank of stage 3 beyond its part of plain training's, as fractions of that; NaN for others.

    These are its small tensors, the fp32 weights of its optimizer, which plain training's has not, and the size of the
    remainder.
    """
    optimizer, plain = (of.ok_runs[_OPTIMIZER].median().sum() / MIB for of in (arm, base))
    small, weights = arm.median("kept_whole_bytes") / MIB, optimizer - plain / arm.ranks
    remainder = abs(arm.state_mib() - base.state_mib() / arm.ranks - small - weights)
    is_other = arm.value("strategy") != STAGES[-1] or base.value("strategy") not in BASELINES
    return [NAN if is_other else size / base.state_mib() for size in (small, weights, remainder)]


def memory_table(records: Records) -> pd.DataFrame:
    """Return the memory of the rank with most of it, by strategy."""

    def figures(arm: StrategyRuns) -> Row:
        runs = arm.workload_runs
        base = state_bytes(runs[(runs["arm"] == arm.baseline) & (runs["status_state"] == "ok")], ("device",))
        places = {"device": "", "host": " (host)", "nvme": " (NVMe)"}
        return {
            **{
                f"{_KINDS[kind]}{places[place]}, MiB": arm.median(f"{kind}_bytes_{place}") / MIB
                for kind in STATE_KINDS
                for place in STATE_PLACES
            },
            "Engine buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Peak allocated, GiB": arm.median("peak_memory_gib_allocated"),
            "Peak reserved, GiB": arm.median("peak_memory_gib_reserved"),
            "Peak of the device, GiB": arm.median("peak_memory_gib_device"),
            "Average of the device, GiB": arm.median("avg_memory_gib_device"),
            "Peak of the host process, GiB": arm.median("host_peak_rss_gib"),
            "State on the device, x baseline": state_bytes(arm.ok_runs, ("device",)) / base if base else NAN,
        }

    return arm_table(group_by_strategy(drop_probes(records).runs), figures)


MEMORY = Question(
    "memory",
    "How much memory does a rank need?",
    _memory_answer,
    tables={"memory": memory_table},
    figures=("model_state", "peak_memory"),
    notebook="peak_memory",
)


def _offload_answer(records: Records) -> Answer | None:
    moved = {workload: [arm for arm in arms if arm.is_offloaded] for workload, arms in workloads(records).items()}
    offloaded = {
        workload: arms for workload, arms in moved.items() if any(len(a.ok_runs) and a.unoffloaded for a in arms)
    }
    if not offloaded:
        return None
    times = Comparison(offloaded, STEP, lambda arm: arm.unoffloaded)
    fair = [arm for arms in offloaded.values() for arm in comparison.fair_arms(arms) if arm.unoffloaded]
    nvme = [_freed(arm) for arm in fair if arm.value("offload_optimizer") == "nvme"]
    timed = {workload: arms for workload, arms in offloaded.items() if any(step_s(arm) > 0 for arm in arms)}
    no_gpu = any(strategy_runs.has_no_gpu(arms[0].workload_runs) for arms in offloaded.values())
    sentence, about, *notes = paragraphs(
        "offload_answer.j2",
        freed=[part for arm in fair if (part := _freed(arm)) <= 1],
        no_gpu=no_gpu,
        nvme=nvme,
        span=lambda fractions: span_text(fractions, percent),
        scope=format_scope(timed or offloaded),
        times=times.sentence(
            fair,
            lambda ratio: document.change_text(ratio - 1),
            "It changes the step time by",
            "",
            "It changes no step time significantly.",
        ),
    )
    return side_by_side(
        sentence,
        offloaded,
        {
            "Freed": lambda arm: format_or_dash(round(_freed(arm), 4), percent),
            "Step time, x without": times.cell(times_text),
        },
        about,
        *times.notes,
        *notes,
    )


def _freed(arm: StrategyRuns) -> float:
    """Return the fraction of the same stage's model state that offload removes from scarce memory."""
    runs = arm.workload_runs
    places = scarce_memory(arm.workload_runs)
    baseline_bytes = state_bytes(runs[(runs["arm"] == arm.unoffloaded) & (runs["status_state"] == "ok")], places)
    return 1 - state_bytes(arm.ok_runs, places) / baseline_bytes if baseline_bytes > 0 else NAN


def offload_table(records: Records) -> pd.DataFrame:
    """Return a row per strategy with offload, and the same stages without it."""
    times = Comparison(workloads(records), STEP, lambda arm: arm.unoffloaded if arm.is_offloaded else None)

    def figures(arm: StrategyRuns) -> Row:
        moved, plain, difference = arm.is_offloaded, arm.unoffloaded, times.of(arm)
        ratio = None if plain is None else interval([]) if difference is None else difference.ratio
        return {
            "Stage": arm.value("zero_stage"),
            "Optimizer on": arm.value("offload_optimizer") or "device",
            "Parameters on": arm.value("offload_param") or "device",
            **{f"State on {place}, MiB": arm.state_mib((place,)) for place in STATE_PLACES},
            "Peak memory, GiB": arm.peak_gib[0],
            "Step time, ms": 1e3 * step_s(arm),
            "Without offload": plain or "not run" if moved else "this row",
            "Time, x without": strategy_runs.ratio_text(ratio) if moved else "1",
        }

    strategies = list(real_arms(records))
    stages = {(arm.workload, arm.value("zero_stage")) for arm in strategies if arm.is_offloaded}
    return arm_table((arm for arm in strategies if (arm.workload, arm.value("zero_stage")) in stages), figures)


OFFLOAD = Question(
    "offload",
    "What does offload free, and what does it cost?",
    _offload_answer,
    tables={"offload": offload_table},
    figures=("offload",),
    notebook="offload",
)


def _traffic_answer(records: Records) -> Answer | None:
    compared = comparison.compare_with_reference(records, sent_mib)
    if compared is None:
        return None
    # Of equal ends, the first.
    ends = {times_text(ratio): arm for ratio, arm in compared.ratios[::-1][:1] + compared.ratios[:1]}
    sentence, note, *tile = paragraphs(
        "traffic_answer.j2", ends=dict(reversed(ends.items())), names=compared.names, scope=format_scope(compared.main)
    )
    return side_by_side(
        sentence,
        without_offload(compared.workloads),
        {"Ring bytes (NCCL), MiB": sent_mib, f"x {compared.plain_names}": compared.cell(times_text)},
        note,
        numbers=[(tile[0], tile[1])] if tile and compared.has_largest else (),
    )


def traffic_table(records: Records) -> pd.DataFrame:
    """Return communication per step, by strategy."""
    return arm_table(
        real_arms(records),
        lambda arm: {
            "Ring bytes (NCCL) per step, MiB": sent_mib(arm),
            "Gloo bytes per step, MiB": arm.median("gloo_sent_bytes_per_step") / MIB,
            "Payload per step, MiB": arm.median("comm_bytes_per_step") / MIB,
            "Calls per step": arm.median("comm_calls_per_step"),
            "Payload by collective, MiB": _by_collective(arm),
        },
    )


def _by_collective(arm: StrategyRuns) -> str:
    watched = arm.ok_runs["collectives"].dropna()
    counted = json.loads(watched.iloc[0]) if len(watched) else {}
    return ", ".join(f"{kind} {counts['payload_bytes'] / MIB:.4g}" for kind, counts in sorted(counted.items())) or "-"


TRAFFIC = Question(
    "traffic",
    "How much does a rank send in one step?",
    _traffic_answer,
    tables={"traffic": traffic_table},
    figures=("traffic",),
    notebook="runtime",
)

_NEIGHBOURS = {*WITH_REPLICAS, *WITH_GROUPS}
# FSDP2 alone makes no study of alternatives.
_ALTERNATIVES = {*_NEIGHBOURS, "fsdp2"}
# Columns that are equal for runs that differ in the length of samples.
_SAME_BUT_LENGTH = (
    "strategy",
    "world_size",
    "group_ranks",
    "model_name_or_path",
    "precision",
    "engine_override",
    "peft",
    "optimizer",
    "gradient_checkpointing",
    "global_batch_size",
    "micro_batch_size",
)


def with_settings(arm: str) -> str:
    """Return a strategy with the number of its changed settings, which are long."""
    strategy, *settings = arm.split(", ")
    return f"`{strategy}`" + (f" with {len(settings)} changed setting{'s'[: len(settings) > 1]}" if settings else "")


def held_text(state: float, gathered: float) -> str:
    """Return MiB of model state and, behind a plus, of weights still gathered at the end of the forward pass."""
    return format_number(state) + (f" + {format_number(gathered)}" if gathered > 0 else "")


def _leanest(arms: Iterable[StrategyRuns], strategies: Container[str]) -> StrategyRuns | None:
    """Return the strategy with the least model state, of several the one that sends least; None if none has it."""
    measured = [arm for arm in arms if arm.value("strategy") in strategies and not pd.isna(arm.state_mib())]
    return min(measured, key=lambda arm: (round(arm.state_mib(), 2), sent_mib(arm)), default=None)


def _is_part_of_model(arm: StrategyRuns) -> bool:
    return (arm.value("model_layers") or 0) < (arm.value("preset_layers") or 0)


class _Neighbours(NamedTuple):
    """Strategies on the most ranks of a workload: the leanest stage of ZeRO, and the alternatives to it."""

    workload: str
    arms: list[StrategyRuns]
    stage: StrategyRuns
    # With the least model state and gathered weights, and the alternative with the fewest ring bytes.
    lean: StrategyRuns
    frugal: StrategyRuns


def _find_neighbours(grouped: dict[str, list[StrategyRuns]]) -> _Neighbours | None:
    """Return those of the whole model with most strategies, else of a part of one; None without a stage of ZeRO."""
    candidates = []
    for workload, strategies in grouped.items():
        most = max(arm.ranks for arm in strategies)
        arms = [arm for arm in strategies if arm.ranks == most > 1]
        least = _leanest(arms, _ALTERNATIVES)
        stage = _leanest([arm for arm in arms if arm.name in STAGES], STAGES) or _leanest(arms, STAGES)
        if least and stage:
            lean = min(arms, key=_all_held_mib)
            frugal = min((arm for arm in arms if arm.value("strategy") in _ALTERNATIVES), key=_known_bytes_first)
            order = (math.isnan(sent_mib(stage) + sent_mib(frugal)), _is_part_of_model(stage), -len(arms), -most)
            candidates.append((order, _Neighbours(workload, arms, stage, lean, frugal)))
    return min(candidates, key=lambda candidate: candidate[0], default=(None, None))[1]


def _known_bytes_first(arm: StrategyRuns) -> tuple[bool, float]:
    return math.isnan(sent_mib(arm)), round(sent_mib(arm), 2)


def _neighbours_answer(records: Records) -> Answer | None:  # noqa: PLR0914
    grouped: dict[str, list[StrategyRuns]] = {}
    for arm in _neighbour_arms(records):
        if len(arm.ok_runs):
            grouped.setdefault(arm.workload, []).append(arm)
    if (compared := _find_neighbours(grouped)) is None:
        return None
    workload, arms, stage, lean, frugal = compared
    # What it sends by the tokens of a sample, if its group divides tensors or tokens: a constant and a share per token.
    lengths = {
        int(arm.value("seq_length")): sent_mib(arm)
        for strategies in grouped.values()
        for arm in strategies
        if all(arm.value(name) == frugal.value(name) for name in _SAME_BUT_LENGTH)
    }
    (short, few), *_, (long, many) = sorted(2 * [*lengths.items()])
    turn = short + (long - short) * (sent_mib(stage) - few) / (many - few) if many > few else NAN
    stages = [arm for arm in arms if arm.value("strategy") in STAGES]
    cheap = min(stages, key=lambda arm: (*_known_bytes_first(arm), _all_held_mib(arm)))
    is_least, is_less = (sent_mib(frugal) < sent_mib(arm) for arm in (cheap, stage))
    is_part = _is_part_of_model(stage)
    sentence, number, words, lean_number, lean_words, *notes = paragraphs(
        "neighbours_answer.j2",
        **compared._asdict(),
        cheap=cheap,
        is_least=is_least,
        is_less=is_less,
        is_part=is_part,
        all_held=_all_held_mib,
        held_unknown=any(math.isinf(_all_held_mib(arm)) for arm in arms),
        strategies={arm.value("strategy"): arm for arm in reversed(arms)},
        bytes_of=sent_mib,
        held=_held_by,
        tied=[arm for arm in arms if arm is not lean and _held_by(arm) == _held_by(lean)],
        lengths=lengths if frugal.value("strategy") in WITH_GROUPS else {},
        is_beyond=turn > long,
        turn="" if math.isnan(turn) else f"{round(turn, -1):,.0f}",
        sent=lambda arm: format_or_dash(sent_mib(arm), format_number),
        name=lambda arm: with_settings(arm.name.replace(f" x{arm.ranks}", "")),
        group=lambda arm: format_or_dash(ranks_per_group(arm.ok_runs.iloc[0]), "{:g}".format),
        fewer_ranks=sorted({arm.ranks for strategies in grouped.values() for arm in strategies} - {1, stage.ranks}),
    )
    # The details have the other numbers of ranks, and parts of a whole model.
    chosen = {
        name: [arm for arm in grouped[name] if arm.ranks in (1, max(arm.ranks for arm in grouped[name]))]
        for name in dict.fromkeys((workload, *grouped))
        if _is_part_of_model(grouped[name][0]) == is_part
    }
    figures = {
        "State, MiB": StrategyRuns.state_mib,
        "Gathered, MiB": lambda arm: arm.median("forward_gathers_bytes") / MIB,
        "Kept for backward, MiB": lambda arm: arm.median("forward_holds_bytes") / MIB,
        "Ring bytes (NCCL), MiB": sent_mib,
        "Calls": lambda arm: arm.median("comm_calls_per_step"),
    }
    columns = {name: _mark_extrapolated(figure) for name, figure in figures.items()}
    columns |= {"Group": lambda arm: ranks_per_group(arm.ok_runs.iloc[0])}
    numbers = [*[(number, words)] * is_least, *[(lean_number, lean_words)] * (lean is not stage)]
    return dataclasses.replace(side_by_side(sentence, chosen, columns, *notes, numbers=numbers), subject=workload)


def _all_held_mib(arm: StrategyRuns) -> float:
    """Return the model state and gathered weights; infinite if not known."""
    gathered = arm.median("forward_gathers_bytes") / MIB
    total = arm.state_mib() + (0 if pd.isna(gathered) and not arm.value("extrapolated") else gathered)
    return math.inf if pd.isna(total) else round(total, 2)


def _held_by(arm: StrategyRuns) -> str:
    gathered = arm.median("forward_gathers_bytes") / MIB
    return held_text(arm.state_mib(), gathered) + (" + ?" if arm.value("extrapolated") and pd.isna(gathered) else "")


def _mark_extrapolated(figure: Callable[[StrategyRuns], float]) -> Callable[[StrategyRuns], str | float]:
    return lambda arm: (
        f"~ {format_number(figure(arm))}" if arm.value("extrapolated") and figure(arm) > 0 else figure(arm)
    )


def _neighbour_arms(records: Records) -> Iterator[StrategyRuns]:
    """Yield strategies of workloads that ran an alternative to ZeRO: real ones, or virtual ones if there are none."""
    for chosen in (real_runs(records), virtual_runs(records)):
        runs = with_whole_models(chosen).runs
        strategies = [arm for arm in group_by_strategy(runs) if arm.workload_runs["strategy"].isin(_NEIGHBOURS).any()]
        if strategies:
            yield from strategies
            return


def neighbours_table(records: Records) -> pd.DataFrame:
    """Return memory and communication of ZeRO and its alternatives, by strategy."""
    return arm_table(
        _neighbour_arms(records),
        lambda arm: {
            "Ranks": arm.ranks,
            "Ranks per group": ranks_per_group(arm.ok_runs.iloc[0]) if len(arm.ok_runs) else NAN,
            **{
                f"{words}, MiB": sum(arm.median(f"{kind}_bytes_{place}") for place in ("device", "host")) / MIB
                for kind, words in _KINDS.items()
            },
            "Buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Kept for backward, MiB": arm.median("forward_holds_bytes") / MIB,
            "Gathered, MiB": arm.median("forward_gathers_bytes") / MIB,
            "Ring bytes (NCCL), MiB": sent_mib(arm),
            "Calls": arm.median("comm_calls_per_step"),
            "Payload by collective, MiB": _by_collective(arm),
            "Extrapolated over layers": "yes" if arm.value("extrapolated") else None,
        },
    )


NEIGHBOURS = Question(
    "neighbours",
    "How much memory and communication do alternatives to ZeRO need?",
    _neighbours_answer,
    tables={"neighbours": neighbours_table},
    figures=("neighbours",),
    notebook="neighbours",
)
