"""Memory and communication of one rank, benefit and cost of offload, and alternatives to ZeRO."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from study.config.strategies import WITH_GROUPS, WITH_REPLICAS
from study.config.text import format_number, percent
from study.host.memory import GIB, MIB
from study.records import strategy_runs
from study.records.frames import Records, drop_probes, real_runs, virtual_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.statistics import Difference, interval
from study.records.strategy_runs import NAN, Row, StrategyRuns, group_by_strategy, scarce_memory, state_bytes
from study.records.workloads import BASELINES, read_arm, strategy_order
from study.report import canvas, document
from study.report.document import Answer, Question, format_or_dash, span_text, times_text
from study.report.facts import Headline, caption, footnotes
from study.report.questions import comparison
from study.report.questions.comparison import (
    STEP,
    Comparison,
    answer_by_strategy,
    arm_table,
    find_ends,
    name_with_settings,
    not_judged,
    real_arms,
    step_s,
    without_offload,
    workloads,
)
from study.virtual.summaries import STAGES, ranks_per_group, read_ring_bytes, with_whole_models

_OPTIMIZER = [f"optimizer_bytes_{place}" for place in STATE_PLACES]
_KINDS = {"params": "Parameters", "grads": "Gradients", "optimizer": "Optimizer"}
_PLACES = {"device": "", "host": " (host)", "nvme": " (NVMe)"}
# Columns of tables: the model state by its kind and place, and sent bytes by their collective.
STATE_COLUMNS = {
    (kind, place): f"{_KINDS[kind]}{_PLACES[place]}, MiB" for kind in STATE_KINDS for place in STATE_PLACES
}
RING_COLUMNS = {kind: f"Ring bytes of {kind.replace('_', '-')}, MiB" for kind in (*canvas.TRAFFIC, "send", "recv")}
# A smaller part of the state is padding and bookkeeping.
_NOTABLE = 0.01
# Stage 3 sends 1.00 times the bytes of plain training if it gathers each weight once, and 1.50 times if twice.
_GATHERED_ONCE = 1.25
# A strategy and its reference in the same workload.
_Pair = tuple[StrategyRuns, StrategyRuns]


def sent_mib(arm: StrategyRuns) -> float:
    """Return ring bytes per step, in MiB: an all-reduce sends twice its size, a gather or a scatter once."""
    sent = arm.ok_runs["collectives"].map(read_ring_bytes)
    return float(sent.median()) / MIB if sent.notna().any() else NAN


def describe_scope(by_workload: comparison.Workloads) -> str:
    """Return the only workload, the size of the largest model, and whether there was no GPU."""
    shown = [strategies[0].all_strategies for strategies in by_workload.values()]
    sizes = [workload.parameters / 1e6 for workload in shown if not pd.isna(workload.parameters)]
    largest = format_number(max(sizes, default=NAN))
    names = list(by_workload) if len(shown) == 1 else []
    about = footnotes(
        "scope",
        {
            "size": bool(sizes) and len(shown) == 1,
            "largest": bool(sizes) and len(shown) > 1,
            "no_gpu": any(strategy_runs.has_no_gpu(workload.runs) for workload in shown[:1]),
        },
        size=largest,
    )
    return ", ".join((*names, *about))


def _is_mostly_state(base: StrategyRuns) -> bool:
    """Whether model state is most of the peak of a process without a GPU; with a tiny model, libraries are."""
    peak, place = base.peak_gib
    return place == "host process" and _state_gib(base) > peak / 2


def _state_gib(arm: StrategyRuns) -> float:
    return arm.state_mib() * MIB / GIB


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
    only = find_mostly_state(records)
    shown = without_offload(compared.workloads)
    columns = _memory_columns(compared, shown, only)
    if not compared.ratios:
        base = next(iter(compared.references.values()))
        scope = describe_scope({base.workload: compared.workloads[base.workload]})
        headline = Headline(f"{format_number(_state_gib(base))} GiB", caption("memory", "sizes"), base.name, scope)
        notes = (
            *footnotes("comparison", {"none": True}, references=compared.names),
            *_about_memory(compared, base),
        )
        return answer_by_strategy(shown, columns, notes, [headline], only, leads=False)
    pairs = _leanest_pairs(compared)
    headlines = _size_headlines(compared, only, pairs[0][0].ranks) if only else _ratio_headlines(compared, pairs)
    notes = (*_about_memory(compared, pairs[0][1]), *_memory_footnotes(compared, pairs, has_sizes=bool(only)))
    return answer_by_strategy(shown, columns, notes, headlines, only, leads=compared.has_largest)


def _leanest_pairs(compared: comparison.ReferenceComparison) -> list[_Pair]:
    """Return the runs of the leanest strategy with those of their references.

    It is a stage of ZeRO, if one ran, on the most ranks.
    """
    stages = [pair for pair in compared.ratios if pair[1].value("strategy") in STAGES] or compared.ratios
    leanest = max((arm for _, arm in stages), key=lambda arm: arm.ranks)
    return [(arm, compared.references[arm.workload]) for _, arm in stages if arm.name == leanest.name]


def _memory_columns(
    compared: comparison.ReferenceComparison, shown: comparison.Workloads, only: str
) -> comparison.Columns:
    """Return the columns of state and peak, and of the weights that a pass gathers if they are known for a strategy."""

    def with_gathered(arm: StrategyRuns) -> str:
        return format_or_dash(_held_ratio(arm, compared.references[arm.workload]), percent)

    def peak(arm: StrategyRuns) -> comparison.Cell:
        base = compared.references[arm.workload]
        peaks = _compare_peaks(arm, base)
        if arm.name == base.name or math.isnan(peaks.ratio):
            return format_or_dash(peaks.ratio, percent)
        return comparison.MarkedText(percent(peaks.ratio), peaks.difference.mark)

    arms = [arm for workload in comparison.shown_workloads(shown, only) for arm in shown[workload]]
    is_gathered_known = any(arm.median("forward_gathers_bytes") > 0 for arm in arms)
    return {
        **({"State, GiB": _state_gib} if only else {}),
        f"State, % of {compared.plain_names}": compared.cell(percent),
        **({"State + gathered, %": with_gathered} if is_gathered_known else {}),
        "Peak, GiB": lambda arm: arm.peak_gib[0],
        "Peak, %": peak,
    }


def _size_headlines(compared: comparison.ReferenceComparison, workload: str, ranks: int) -> tuple[Headline, Headline]:
    """Return the state and the peak from the reference to the last strategy on this many ranks."""
    arms = [arm for arm in compared.sharding if (arm.workload, arm.ranks) == (workload, ranks)]
    arms.append(compared.references[workload])
    arms.sort(key=lambda arm: strategy_order(arm.value("strategy")))
    by_peak = sorted(arms, key=lambda arm: arm.peak_gib[0])
    states = find_ends([(_state_gib(arm), arm) for arm in arms], format_number)
    peaks = find_ends([(arm.peak_gib[0], arm) for arm in by_peak], format_number)
    scope = describe_scope(compared.main)
    bounds = caption("memory", "ranks", ranks=ranks)
    return (
        Headline(f"{states.text} GiB", caption("memory", "sizes"), states.names, scope, bounds),
        Headline(f"{peaks.text} GiB", caption("memory", "peaks"), peaks.names, scope, bounds),
    )


def _ratio_headlines(compared: comparison.ReferenceComparison, pairs: Sequence[_Pair]) -> list[Headline]:
    """Return the state of the leanest strategy relative to the reference, and its peak if that is significant."""
    leanest, _ = pairs[0]
    scope = describe_scope(compared.main)
    held = [_held_ratio(arm, base) for arm, base in pairs]
    # A gathered weight is not state, but takes memory within a step.
    is_more = not math.isnan(sum(held)) and max(held) > max(compared.ratio(arm) for arm, _ in pairs)
    bounds = [caption("memory", "ranks", ranks=leanest.ranks)]
    if is_more:
        bounds.append(caption("memory", "gathered", change=_change_span(held)))
    state = Headline(
        _change_span(compared.ratio(arm) for arm, _ in pairs),
        caption("memory", "state", references=compared.names),
        name_with_settings(leanest.name),
        scope,
        "; ".join(bounds),
    )
    peaks = [peak for arm, base in pairs if (peak := _compare_peaks(arm, base)).ratio > 0]
    shown = [peak.ratio for peak in peaks if not peak.is_not_significant]
    if not shown:
        return [state]
    differences = [peak.difference for peak in peaks]
    is_tested = any(difference.is_tested for difference in differences)
    words = caption("memory", "peak", places=_peak_places(compared), references=compared.names)
    verdicts = comparison.verdicts_text(differences)
    seeds = 0 if is_tested else comparison.common_seeds(differences)
    peak_change = Headline(_change_span(shown), words, state.strategy, bounds=verdicts, n=seeds)
    return [state, peak_change]


def _change_span(ratios: Iterable[float]) -> str:
    return span_text((ratio - 1 for ratio in ratios), document.change_text)


def _peak_places(compared: comparison.ReferenceComparison) -> str:
    return " or ".join(dict.fromkeys(base.peak_gib[1] for base in compared.references.values()))


def _about_memory(compared: comparison.ReferenceComparison, base: StrategyRuns) -> tuple[str, ...]:
    return footnotes(
        "memory",
        {"about": True},
        places=_peak_places(compared),
        state=format_number(_state_gib(base)),
        peak=format_number(base.peak_gib[0]),
        reference=base.name,
    )


def _memory_footnotes(
    compared: comparison.ReferenceComparison, pairs: Sequence[_Pair], has_sizes: bool
) -> tuple[str, ...]:
    leanest, base = pairs[0]
    parts = zip(*(_excess(arm, base) for arm, base in pairs), strict=True)
    excess = _Excess(*map(max, parts))
    # Small tensors and the copy explain the excess if nothing else is in it.
    is_explained = excess.remainder <= _NOTABLE
    is_small = is_explained and excess.small > _NOTABLE
    is_copied = is_explained and excess.copy > _NOTABLE
    # The buffers of stage 3 are its bucket of gradients, whose default size is that of 500 M elements.
    has_whole_bucket = leanest.median("buffer_bytes_device") > base.median("params_bytes_device")
    peak = _compare_peaks(leanest, base)
    return footnotes(
        "memory",
        {
            "small": is_small,
            "copy": is_copied,
            "divided": (is_small or is_copied) and leanest.ranks > 1,
            "bucket": has_sizes and has_whole_bucket and peak.ratio > 1 and not peak.is_not_significant,
        },
        references=compared.names,
        small=percent(excess.small),
        copy=percent(excess.copy),
        strategy=name_with_settings(leanest.name),
        ranks=leanest.ranks,
        share=percent(1 - 1 / leanest.ranks),
    )


def _held_ratio(arm: StrategyRuns, base: StrategyRuns) -> float:
    """Return state and gathered weights over the reference's state; NaN if it is not known."""
    return (arm.state_mib() + arm.median("forward_gathers_bytes") / MIB) / base.state_mib()


class _Peaks(NamedTuple):
    """Ratio of two peaks, seed by seed if there are enough for a test."""

    ratio: float
    difference: Difference

    @property
    def is_not_significant(self) -> bool:
        """Whether a test was made and found no difference."""
        return self.difference.is_tested and not self.difference.is_significant


def _compare_peaks(arm: StrategyRuns, base: StrategyRuns) -> _Peaks:
    figure = "host_peak_rss_gib" if arm.peak_gib[1] == "host process" else "peak_memory_gib_device"
    difference = arm.differences(figure).get((arm.name, base.name), Difference(interval([]), None))
    if difference.is_tested:
        return _Peaks(difference.ratio.center, difference)
    return _Peaks(arm.peak_gib[0] / base.peak_gib[0], difference)


class _Excess(NamedTuple):
    """The state of a rank of stage 3 beyond its part of plain training's, as fractions of that; NaN for others."""

    small: float
    # The fp32 weights of its optimizer, which plain training's has not.
    copy: float
    remainder: float


def _excess(arm: StrategyRuns, base: StrategyRuns) -> _Excess:
    if arm.value("strategy") != STAGES[-1] or base.value("strategy") not in BASELINES:
        return _Excess(NAN, NAN, NAN)
    optimizer, plain = (of.ok_runs[_OPTIMIZER].median().sum() / MIB for of in (arm, base))
    state = base.state_mib()
    small = arm.median("kept_whole_bytes") / MIB
    copy = optimizer - plain / arm.ranks
    remainder = abs(arm.state_mib() - state / arm.ranks - small - copy)
    return _Excess(small / state, copy / state, remainder / state)


def memory_table(records: Records) -> pd.DataFrame:
    """Return the memory of the rank with most of it, by strategy."""

    def figures(arm: StrategyRuns) -> Row:
        runs = arm.workload_runs
        is_base = (runs["arm"] == arm.baseline) & (runs["status_state"] == "ok")
        base = state_bytes(runs.loc[is_base, [f"{kind}_bytes_device" for kind in STATE_KINDS]], ("device",))
        return {
            **{column: arm.median(f"{kind}_bytes_{place}") / MIB for (kind, place), column in STATE_COLUMNS.items()},
            "Engine buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Peak allocated, GiB": arm.median("peak_memory_gib_allocated"),
            "Peak reserved, GiB": arm.median("peak_memory_gib_reserved"),
            "Peak of the device, GiB": arm.median("peak_memory_gib_device"),
            "Average of the device, GiB": arm.median("avg_memory_gib_device"),
            "Peak of the host process, GiB": arm.median("host_peak_rss_gib"),
            "State on the device, x baseline": arm.state_bytes(("device",)) / base if base else NAN,
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
    timed = {workload: arms for workload, arms in offloaded.items() if any(step_s(arm) > 0 for arm in arms)}
    scope = describe_scope(timed or offloaded)
    no_gpu = any(strategy_runs.has_no_gpu(arms[0].workload_runs) for arms in offloaded.values())
    known = [(part, arm) for arm in fair if (part := _freed(arm)) <= 1]
    is_on_nvme = any(arm.value("offload_optimizer") == "nvme" for _, arm in known)
    count = sum(map(len, offloaded.values()))
    headlines = [Headline(f"0 of {count}", caption("offload", "comparable"), scope=scope)]
    compared = times.paired(fair)
    if known:
        headlines = [_freed_headline(known, no_gpu, is_on_nvme, scope)]
    if known and compared:
        words = caption("offload", "time")
        headlines.append(times.headline(compared, lambda ratio: document.change_text(ratio - 1), words, scope))
    columns: comparison.Columns = {
        "Freed": lambda arm: format_or_dash(round(_freed(arm), 4), percent),
        "Step time, x without": times.cell(times_text),
    }
    about = footnotes("offload", {"same": True, "no_gpu": no_gpu, "not_run": no_gpu and not is_on_nvme})
    return answer_by_strategy(offloaded, columns, (*about, *times.notes), headlines, leads=False)


def _freed_headline(
    known: Sequence[tuple[float, StrategyRuns]], no_gpu: bool, is_on_nvme: bool, scope: str
) -> Headline:
    """Return the freed part of the state; without a GPU that with the optimizer on NVMe, if it ran."""
    name = "freed"
    chosen = list(known)
    if no_gpu and is_on_nvme:
        name = "nvme"
        chosen = [(part, arm) for part, arm in known if arm.value("offload_optimizer") == "nvme"]
    elif no_gpu:
        name = "host"
    chosen.sort(key=lambda pair: pair[0])
    ends = find_ends(chosen, percent)
    return Headline(ends.text, caption("offload", name), ends.names, scope)


def _left_mib(arm: StrategyRuns) -> float:
    """Return the model state that is left in scarce memory, in MiB."""
    return arm.state_mib(scarce_memory(arm.workload_runs))


def _freed(arm: StrategyRuns) -> float:
    """Return the fraction of the same stage's model state that offload removes from scarce memory."""
    runs = arm.workload_runs
    places = scarce_memory(arm.workload_runs)
    baseline_bytes = state_bytes(runs[(runs["arm"] == arm.unoffloaded) & (runs["status_state"] == "ok")], places)
    return 1 - arm.state_bytes(places) / baseline_bytes if baseline_bytes > 0 else NAN


def offload_table(records: Records, baseline: str = "") -> pd.DataFrame:
    """Return a row per strategy with offload, and the same stages without it.

    In a workload that ran `baseline`, a strategy on as many ranks is compared with that one.
    """
    by_workload = workloads(records)
    ranks = {(workload, arm.name): arm.ranks for workload, arms in by_workload.items() for arm in arms}
    few = not_judged(by_workload)

    def without(arm: StrategyRuns) -> str | None:
        if not arm.is_offloaded:
            return None
        is_named = arm.all_strategies.has_ended(baseline) and ranks[arm.workload, baseline] == arm.ranks
        return baseline if is_named else arm.unoffloaded

    times = Comparison(by_workload, STEP, without)

    def figures(arm: StrategyRuns) -> Row:
        moved, plain, difference = arm.is_offloaded, without(arm), times.of(arm)
        ratio = None if plain is None else interval([]) if difference is None else difference.ratio
        return {
            "Stage": arm.value("zero_stage"),
            "Optimizer on": arm.value("offload_optimizer") or "device",
            "Parameters on": arm.value("offload_param") or "device",
            **{f"State on {place}, MiB": arm.state_mib((place,)) for place in STATE_PLACES},
            "State left, MiB": _left_mib(arm),
            "Peak memory, GiB": arm.peak_gib[0],
            "Step time, ms": 1e3 * step_s(arm),
            "Without offload": plain or "not run" if moved else "this row",
            "Time, x without": strategy_runs.ratio_text(ratio) if moved else "1",
            "Not judged": few.get((arm.workload, arm.name)),
        }

    strategies = list(real_arms(records))
    stages = {(arm.workload, arm.value("zero_stage")) for arm in strategies if arm.is_offloaded}
    references = {(arm.workload, without(arm)) for arm in strategies}
    rows = (
        arm
        for arm in strategies
        if (arm.workload, arm.value("zero_stage")) in stages or (arm.workload, arm.name) in references
    )
    return arm_table(rows, figures)


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
    shown = without_offload(compared.workloads)
    arms = [arm for workload in comparison.shown_workloads(shown) for arm in shown[workload]]
    has_several = any(_micro_batches(arm) > 1 for arm in arms)
    columns: comparison.Columns = {
        "Ring bytes (NCCL), MiB": sent_mib,
        f"x {compared.plain_names}": compared.cell(times_text),
        **({"Micro-batches": _micro_batches} if has_several else {}),
    }
    is_once = any(arm.value("strategy") == STAGES[-1] and ratio < _GATHERED_ONCE for ratio, arm in compared.ratios)
    notes = (
        *footnotes("traffic", {"rings": True}),
        *footnotes("neighbours", {"gathers_once": is_once}),
        *footnotes("comparison", {"none": not compared.ratios}, references=compared.names),
    )
    headline = _sent_headline(compared)
    leads = compared.has_largest and bool(compared.ratios)
    return answer_by_strategy(shown, columns, notes, [headline], leads=leads)


def _sent_headline(compared: comparison.ReferenceComparison) -> Headline:
    """Return the range of the bytes relative to the reference; without a comparison the reference's."""
    if not compared.ratios:
        base = next(iter(compared.references.values()))
        scope = describe_scope({base.workload: compared.workloads[base.workload]})
        return Headline(f"{format_number(sent_mib(base))} MiB", caption("traffic", "plain"), base.name, scope)
    ends = find_ends(compared.ratios, times_text)
    most = max(_micro_batches(arm) for _, arm in compared.ratios)
    return Headline(
        f"{ends.text} x",
        caption("traffic", "sent", references=compared.names),
        ends.names,
        describe_scope(compared.main),
        caption("traffic", "micro_batches", count=most) if most > 1 else "",
    )


def _micro_batches(arm: StrategyRuns) -> int:
    return int(arm.value("gradient_accumulation_steps") or 1)


def traffic_table(records: Records) -> pd.DataFrame:
    """Return communication per step, by strategy; that of a virtual rank is real, too."""

    def figures(arm: StrategyRuns) -> Row:
        counted = _collectives(arm)
        return {
            "Ring bytes (NCCL) per step, MiB": sent_mib(arm),
            **{
                column: counted[kind]["wire_bytes_per_rank"] / MIB
                for kind, column in RING_COLUMNS.items()
                if kind in counted
            },
            "Gloo bytes per step, MiB": arm.median("gloo_sent_bytes_per_step") / MIB,
            "Payload per step, MiB": arm.median("comm_bytes_per_step") / MIB,
            "Calls per step": arm.median("comm_calls_per_step"),
            "Payload by collective, MiB": _by_collective(arm),
            "All parameters, MiB": strategy_runs.parameter_mib(arm.workload_runs),
        }

    return arm_table(group_by_strategy(drop_probes(records).runs), figures)


def _collectives(arm: StrategyRuns) -> dict[str, dict[str, float]]:
    """Return the counts of a strategy's watched step by collective; empty if none was watched."""
    watched = arm.ok_runs["collectives"].dropna()
    counted: dict[str, dict[str, float]] = json.loads(watched.iloc[0]) if len(watched) else {}
    return counted


def _by_collective(arm: StrategyRuns) -> str:
    counted = sorted(_collectives(arm).items())
    return ", ".join(f"{kind} {counts['payload_bytes'] / MIB:.4g}" for kind, counts in counted) or "-"


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

    @property
    def cheap(self) -> StrategyRuns:
        """The stage of ZeRO with the fewest ring bytes."""
        stages = [arm for arm in self.arms if arm.value("strategy") in STAGES]
        return min(stages, key=lambda arm: (*_known_bytes_first(arm), _all_held_mib(arm)))

    @property
    def ranks(self) -> str:
        """The ranks of the workload, for a headline."""
        virtual = "virtual " if self.stage.value("virtual") else ""
        return f"one of {self.stage.ranks} {virtual}ranks of {self.workload}"


class _Turn(NamedTuple):
    """The tokens of a sample from which an alternative sends more than ZeRO, and those between which it is drawn."""

    tokens: float
    short: int
    long: int


def _find_turn(compared: _Neighbours, grouped: dict[str, list[StrategyRuns]]) -> _Turn | None:
    """Return it for an alternative whose group divides tensors or tokens: a constant and a share per token."""
    frugal = compared.frugal
    sent = {
        int(arm.value("seq_length")): sent_mib(arm)
        for strategies in grouped.values()
        for arm in strategies
        if all(arm.value(name) == frugal.value(name) for name in _SAME_BUT_LENGTH)
    }
    short, long = min(sent), max(sent)
    rise = sent[long] - sent[short]
    if frugal.value("strategy") not in WITH_GROUPS or long <= compared.stage.value("seq_length") or not rise > 0:
        return None
    tokens = short + (long - short) * (sent_mib(compared.stage) - sent[short]) / rise
    return None if math.isnan(tokens) else _Turn(tokens, short, long)


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


def _grouped_neighbours(records: Records) -> dict[str, list[StrategyRuns]]:
    """Return the strategies that ended, by workload."""
    grouped: dict[str, list[StrategyRuns]] = {}
    for arm in _neighbour_arms(records):
        if len(arm.ok_runs):
            grouped.setdefault(arm.workload, []).append(arm)
    return grouped


def _shown_neighbours(compared: _Neighbours, grouped: dict[str, list[StrategyRuns]]) -> dict[str, list[StrategyRuns]]:
    """Return the strategies of the answer; the details have the other numbers of ranks, and parts of a whole model."""
    is_part = _is_part_of_model(compared.stage)
    return {
        name: [arm for arm in grouped[name] if arm.ranks in (1, max(arm.ranks for arm in grouped[name]))]
        for name in dict.fromkeys((compared.workload, *grouped))
        if _is_part_of_model(grouped[name][0]) == is_part
    }


def _neighbours_answer(records: Records) -> Answer | None:
    grouped = _grouped_neighbours(records)
    if (compared := _find_neighbours(grouped)) is None:
        return None
    chosen = _shown_neighbours(compared, grouped)
    figures = {
        "State, MiB": StrategyRuns.state_mib,
        "Gathered, MiB": lambda arm: arm.median("forward_gathers_bytes") / MIB,
        "Kept for backward, MiB": lambda arm: arm.median("forward_holds_bytes") / MIB,
        "Ring bytes (NCCL), MiB": sent_mib,
        "Calls": lambda arm: arm.median("comm_calls_per_step"),
    }
    columns = {name: _mark_extrapolated(figure) for name, figure in figures.items()}
    columns |= {"Group": lambda arm: ranks_per_group(arm.ok_runs.iloc[0])}
    turn = _find_turn(compared, grouped)
    notes = _neighbours_footnotes(compared, grouped, turn)
    answer = answer_by_strategy(chosen, columns, notes, _neighbours_headlines(compared, turn))
    return dataclasses.replace(answer, subject=compared.workload)


def _neighbours_headlines(compared: _Neighbours, turn: _Turn | None) -> list[Headline]:
    """Return the strategy that sends least, up to which length if an alternative does, and that of least memory."""
    lean = compared.lean
    memory = Headline(f"{_held_by(lean)} MiB", caption("neighbours", "held"), _short_name(lean), compared.ranks)
    is_least = sent_mib(compared.frugal) < sent_mib(compared.cheap)
    least = compared.frugal if is_least else compared.cheap
    if math.isnan(sent_mib(least)):
        return [memory]
    sent = Headline(
        f"{format_number(sent_mib(least))} MiB",
        caption("neighbours", "sent"),
        _short_name(least),
        compared.ranks,
        "extrapolated over layers" if least.value("extrapolated") else "",
    )
    if is_least and turn is not None:
        tokens = f"~{round(turn.tokens, -1):,.0f} tokens"
        words = caption("neighbours", "turn", stage=_short_name(compared.stage))
        sent = dataclasses.replace(sent, value=tokens, what=words)
    return [sent, memory]


def _short_name(arm: StrategyRuns) -> str:
    return name_with_settings(read_arm(arm.name).without_ranks)


def _neighbours_footnotes(
    compared: _Neighbours, grouped: dict[str, list[StrategyRuns]], turn: _Turn | None
) -> tuple[str, ...]:
    stage = compared.stage
    by_strategy = {arm.value("strategy"): arm for arm in reversed(compared.arms)}
    # Stage 1 sends what three passes over the weights do, stage 3 one for each gather and one for the gradients.
    sent_by_first = sent_mib(by_strategy["zero1"]) if "zero1" in by_strategy else NAN
    return footnotes(
        "neighbours",
        {
            "state": True,
            "group": bool(_NEIGHBOURS & {*by_strategy}),
            "part": _is_part_of_model(stage),
            "extrapolated": any(arm.value("extrapolated") for arm in compared.arms) and not _is_part_of_model(stage),
            "samples": True,
            "between": turn is not None,
            "gathers_once": stage.value("strategy") == "zero3" and sent_by_first > 1.2 * sent_mib(stage),
            "fewer_ranks": bool({arm.ranks for arms in grouped.values() for arm in arms} - {1, stage.ranks}),
        },
        layers=stage.value("preset_layers"),
        batch=stage.value("global_batch_size"),
        length=stage.value("seq_length"),
        short=turn.short if turn else "",
        long=turn.long if turn else "",
    )


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


@functools.lru_cache(2)
def _neighbour_arms(records: Records) -> tuple[StrategyRuns, ...]:
    """Return strategies of workloads that ran an alternative to ZeRO: real ones, or virtual ones if there are none."""
    for chosen in (real_runs(records), virtual_runs(records)):
        runs = with_whole_models(chosen).runs
        strategies = [arm for arm in group_by_strategy(runs) if arm.workload_runs["strategy"].isin(_NEIGHBOURS).any()]
        if strategies:
            return tuple(strategies)
    return ()


def neighbours_table(records: Records) -> pd.DataFrame:
    """Return memory and communication of ZeRO and its alternatives, by strategy."""
    return arm_table(_neighbour_arms(records), _neighbour_row)


def shown_neighbours_table(records: Records) -> pd.DataFrame:
    """Return the rows of the strategies that the answer has; empty if these records do not answer the question."""
    grouped = _grouped_neighbours(records)
    compared = _find_neighbours(grouped)
    by_workload = _shown_neighbours(compared, grouped) if compared else {}
    return arm_table(itertools.chain(*by_workload.values()), _neighbour_row)


def _neighbour_row(arm: StrategyRuns) -> Row:
    return {
        "Ranks": arm.ranks,
        "Ranks per group": ranks_per_group(arm.ok_runs.iloc[0]) if len(arm.ok_runs) else NAN,
        **{STATE_COLUMNS[kind, "device"]: _kind_mib(arm, kind) for kind in STATE_KINDS},
        "State on the device, MiB": arm.state_mib(("device",)),
        "Buffers, MiB": arm.median("buffer_bytes_device") / MIB,
        "Kept for backward, MiB": arm.median("forward_holds_bytes") / MIB,
        "Gathered, MiB": arm.median("forward_gathers_bytes") / MIB,
        "Ring bytes (NCCL), MiB": sent_mib(arm),
        "Calls": arm.median("comm_calls_per_step"),
        "Payload by collective, MiB": _by_collective(arm),
        "Layers": arm.value("model_layers"),
        "Extrapolated over layers": "yes" if arm.value("extrapolated") else None,
    }


def _kind_mib(arm: StrategyRuns, kind: str) -> float:
    """Return one kind of state on device and host, in MiB; records that lack the host's have none there."""
    host = arm.median(f"{kind}_bytes_host")
    return (arm.median(f"{kind}_bytes_device") + (0.0 if math.isnan(host) else host)) / MIB


NEIGHBOURS = Question(
    "neighbours",
    "How much memory and communication do alternatives to ZeRO need?",
    _neighbours_answer,
    tables={"neighbours": neighbours_table},
    figures=("neighbours",),
    notebook="neighbours",
)
