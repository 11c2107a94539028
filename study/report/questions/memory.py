"""Memory and communication of one rank, benefit and cost of offload, and alternatives to ZeRO."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pandas as pd

from study.config.strategies import WITH_GROUPS, WITH_REPLICAS
from study.config.text import format_number, percent
from study.host.memory import GIB, MIB
from study.records.frames import Records, drop_probes, real_runs, virtual_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.statistics import NOT_SIGNIFICANT, geometric_mean, paired_ratio
from study.records.strategy_runs import (
    NAN,
    Row,
    StrategyRuns,
    group_by_strategy,
    has_no_gpu,
    ratio_text,
    scarce_memory,
    state_bytes,
)
from study.report import canvas
from study.report.document import Answer, Question, change_text, format_or_dash, span_text, times_text
from study.report.questions.comparison import (
    Columns,
    Comparison,
    arm_table,
    by_arms,
    compare_with_reference,
    fair_arms,
    real_arms,
    side_by_side,
    without_offload,
    workloads,
)
from study.virtual.summaries import read_ring_bytes

STEP = "step_time_s_median"
_KINDS = {"params": "Parameters", "grads": "Gradients", "optimizer": "Optimizer"}


def step_s(arm: StrategyRuns) -> float:
    """Return the geometric mean over seeds of the median step time, in seconds."""
    return arm.geometric_mean(STEP).center


def sent_mib(arm: StrategyRuns) -> float:
    """Return ring bytes per step, in MiB: an all-reduce sends twice its size, a gather or a scatter once."""
    sent = arm.ok_runs["collectives"].map(read_ring_bytes)
    return float(sent.median()) / MIB if sent.notna().any() else NAN


def _memory_answer(records: Records) -> Answer | None:
    comparison = compare_with_reference(records, StrategyRuns.state_mib, on_any_ranks=True)
    if comparison is None:
        return None
    sentence = f"No sharding strategy here is comparable with {comparison.names} in model state."
    if comparison.ratios:
        ratio, leanest = comparison.ratios[0]
        base = comparison.references[leanest.workload].name
        sentence = f"Sharding reduces the model state of a rank to {percent(ratio)} of `{base}`'s (`{leanest.name}`)."
    columns: Columns = {
        f"State, % of {comparison.plain_names}": comparison.cell(percent),
        "Peak, GiB": lambda arm: arm.peak_gib[0],
    }
    peak = " or ".join(dict.fromkeys(base.peak_gib[1] for base in comparison.references.values()))
    note = f"State is parameters, gradients and optimizer states; the peak is that of the {peak}."
    return side_by_side(sentence, without_offload(comparison.workloads), columns, note)


def memory_table(records: Records) -> pd.DataFrame:
    """Return the memory of the rank with most of it, by strategy."""

    def figures(arm: StrategyRuns) -> Row:
        runs = arm.workload_runs
        base = state_bytes(runs[(runs["arm"] == arm.baseline) & (runs["status_state"] == "ok")], ("device",))
        places = {"device": "", "host": " (host)", "nvme": " (NVMe)"}
        return {
            **{f"{_KINDS[kind]}{places[place]}, MiB": arm.median(f"{kind}_bytes_{place}") / MIB
               for kind in STATE_KINDS for place in STATE_PLACES},
            "Engine buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Peak allocated, GiB": arm.median("peak_memory_gib_allocated"),
            "Peak reserved, GiB": arm.median("peak_memory_gib_reserved"),
            "Peak of the device, GiB": arm.median("peak_memory_gib_device"),
            "Average of the device, GiB": arm.median("avg_memory_gib_device"),
            "Peak of the host process, GiB": arm.median("host_peak_rss_gib"),
            "State on the device, x baseline": state_bytes(arm.ok_runs, ("device",)) / base if base else NAN,
        }  # fmt: skip

    return arm_table(group_by_strategy(drop_probes(records).runs), figures)


_WORDS = {
    "params": "parameters", "grads": "gradients", "optimizer": "optimizer", "rest": "activations and rest",
    "reserved": "reserved, not used", "outside": "outside torch",
    "device": "on the device", "host": "on the host", "nvme": "on NVMe",
}  # fmt: skip
# Each peak includes the previous one: tensors, torch's caching allocator, and all used memory of the device.
_DEVICE_PEAKS = {
    "rest": "peak_memory_gib_allocated", "reserved": "peak_memory_gib_reserved", "outside": "peak_memory_gib_device"
}  # fmt: skip
_HOST_PEAK = {"rest": "host_peak_rss_gib"}


def model_state(records: Records) -> list[canvas.Drawing]:
    """Draw bytes of model state on one rank, counted on live tensors: those of a virtual rank are real too."""
    runs = drop_probes(records).runs
    measured = runs[(runs["status_state"] == "ok") & runs["params_bytes_device"].notna()]
    return canvas.per_workload("model_state", measured, _state)


def peak_memory(records: Records) -> list[canvas.Drawing]:
    """Draw the peak memory of one rank, split into model state and the rest."""
    return canvas.per_workload("peak_memory", canvas.finished(records), _peak)


def _medians(runs: pd.DataFrame) -> pd.DataFrame:
    columns = [f"{kind}_bytes_{place}" for place in STATE_PLACES for kind in STATE_KINDS]
    numbers = runs[[*columns, *_DEVICE_PEAKS.values(), *_HOST_PEAK.values()]].apply(pd.to_numeric)
    return numbers.groupby(runs["arm"]).median().loc[list(canvas.arm_strategies(runs))]


def _state(workload: str, runs: pd.DataFrame) -> canvas.Drawing:
    state, notes = _medians(runs).filter(like="_bytes_"), canvas.find_confounds(runs)
    unit, size = canvas.unit_for(float(state.sum(axis="columns").max()))
    state /= size
    totals = {place: state.filter(like=f"_bytes_{place}").sum(axis="columns") for place in STATE_PLACES}
    device = totals["device"]
    fills = {f"{kind}_bytes_{place}": canvas.Fill(canvas.STATE[kind].colour, canvas.PLACES[place])
             for kind in STATE_KINDS for place in STATE_PLACES}  # fmt: skip
    figure, (axes,) = canvas.sheet_of_rows(len(state))
    xlabel = f"{unit} per rank; the number: on the device"
    canvas.bars(axes, state, fills, device.map(format_number), xlabel, notes, margin=0.08)
    subtitle = f"On the device: {_range(device, unit)}"
    if device.nunique() == 1:
        subtitle = f"All strategies have the same on the device: {format_number(device.iloc[0])} {unit}."
    kinds = {kind: canvas.STATE[kind] for kind in STATE_KINDS}
    if sum(map(any, totals.values())) > 1:
        kinds |= {place: canvas.Fill("#9aa2ab", canvas.PLACES[place]) for place, total in totals.items() if any(total)}
    words = "; ".join(
        f"{arm} " + ", ".join(f"{format_number(total[arm])} {unit} {_WORDS[place]}"
                              for place, total in totals.items() if total[arm])
        for arm in state.index
    )  # fmt: skip
    legend = canvas.legend_of_fills(kinds, _WORDS)
    return canvas.finish(figure, "Model state on one rank", workload, subtitle, words, notes, legend)


def _range(sizes: pd.Series, unit: str) -> str:
    ends = (f"{format_number(sizes[arm])} {unit} ({arm})" for arm in (sizes.idxmin(), sizes.idxmax()))
    return f"{' to '.join(ends)}."


def _peak(workload: str, runs: pd.DataFrame) -> canvas.Drawing | None:
    """Draw the peaks of device and host next to each other; without an accelerator only that of the process."""
    on_device = bool(runs["peak_memory_gib_allocated"].notna().any())
    if not on_device and runs["host_peak_rss_gib"].isna().all():
        return None
    medians, notes = _medians(runs), canvas.find_confounds(runs)
    panels: list[tuple[Sequence[str], dict[str, str], str]] = [
        (["device", "host"], _HOST_PEAK, "GiB per rank (resident set)")
    ]
    subtitle = "Without an accelerator, device and host are one memory, mostly of libraries."
    if on_device:
        panels = [(["device"], _DEVICE_PEAKS, "device, GiB"), (["host"], _HOST_PEAK, "host, GiB")]
        subtitle = "The number is the memory that torch allocated, and for the host the resident set."
    figure, sides = canvas.sheet_of_rows(len(medians), columns=len(panels), sharey=True)
    for axes, (places, peaks, xlabel) in zip(sides, panels, strict=True):
        # Model state first, then the rest of each peak above the previous one; the text is the first peak.
        columns = {kind: [f"{kind}_bytes_{place}" for place in places] for kind in STATE_KINDS}
        parts = pd.DataFrame({kind: medians[group].sum(axis="columns") / GIB for kind, group in columns.items()})
        for kind, column in peaks.items():
            parts[kind] = (medians[column] - parts.sum(axis="columns")).clip(lower=0)
        canvas.bars(axes, parts, canvas.STATE, medians[peaks["rest"]].map(format_number), xlabel, notes)
    peak = medians[panels[0][1]["rest"]]
    words = ", ".join(f"{arm} {format_number(size)} GiB" for arm, size in peak.items())
    legend = canvas.legend_of_fills({kind: canvas.STATE[kind] for kind in (*STATE_KINDS, *panels[0][1])}, _WORDS)
    subtitle = f"{_range(peak, 'GiB')} {subtitle}"
    return canvas.finish(figure, "Peak memory of one rank", workload, subtitle, words, notes, legend)


MEMORY = Question(
    "memory", "How much memory does a rank need?", _memory_answer,
    no_data="No run here succeeded with its model state measured.", tables={"memory": memory_table},
    figures={"model_state": model_state, "peak_memory": peak_memory}, notebook="peak_memory",
)  # fmt: skip


def _offload_answer(records: Records) -> Answer | None:
    moved = {workload: [arm for arm in arms if arm.is_offloaded] for workload, arms in workloads(records).items()}
    offloaded = {
        workload: arms for workload, arms in moved.items() if any(len(a.ok_runs) and a.unoffloaded for a in arms)
    }
    if not offloaded:
        return None
    times = Comparison(offloaded, STEP, lambda arm: arm.unoffloaded)
    fair = [arm for arms in offloaded.values() for arm in fair_arms(arms) if arm.unoffloaded]
    freed = [_freed(arm) for arm in fair]
    no_gpu = any(has_no_gpu(arms[0].workload_runs) for arms in offloaded.values())
    sentence = "No strategy with offload is comparable with the same stage without it."
    if not pd.isna(freed).all():
        sentence = f"Offload frees {span_text(freed, percent)} of the model state on the device and"
        if no_gpu:
            nvme = [fraction for fraction, arm in zip(freed, fair, strict=True)
                    if arm.value("offload_optimizer") == "nvme"]  # fmt: skip
            frees = f"NVMe offload frees {span_text(nvme, percent)} of the model state" if nvme else "NVMe was not used"
            sentence = f"Without a GPU, CPU offload frees nothing; {frees}; offload"
        if times.significant(fair):
            lead = f"{sentence} changes the step time by"
            sentence = times.sentence(fair, lambda ratio: change_text(ratio - 1), lead)
        else:
            sentence += f" changes the step time, but the change is {NOT_SIGNIFICANT}."
    columns: Columns = {
        "Freed": lambda arm: format_or_dash(round(_freed(arm), 4), percent),
        "Step time, x without": times.cell("{:.2f}".format),
    }
    notes = ["Compared with the same stage without offload.", *times.notes]
    if no_gpu:
        notes += ["There is no GPU: CPU offload stays in the same memory, and only NVMe offload leaves it."]
    return side_by_side(sentence, offloaded, columns, *notes)


def _freed(arm: StrategyRuns) -> float:
    """Return the fraction of the same stage's model state that offload removes from scarce memory."""
    runs = arm.workload_runs
    places = scarce_memory(arm.workload_runs)
    baseline_bytes = state_bytes(runs[(runs["arm"] == arm.unoffloaded) & (runs["status_state"] == "ok")], places)
    return 1 - state_bytes(arm.ok_runs, places) / baseline_bytes if baseline_bytes > 0 else NAN


def offload_table(records: Records) -> pd.DataFrame:
    """Return a row per strategy with offload, and the same stages without it."""

    def figures(arm: StrategyRuns) -> Row:
        moved, plain = arm.is_offloaded, arm.unoffloaded
        ratio = None if plain is None else paired_ratio(arm.workload_runs, STEP, arm.name, plain)
        return {
            "Stage": arm.value("zero_stage"),
            "Optimizer on": arm.value("offload_optimizer") or "device",
            "Parameters on": arm.value("offload_param") or "device",
            **{f"State on {place}, MiB": arm.state_mib((place,)) for place in STATE_PLACES},
            "Peak memory, GiB": arm.peak_gib[0],
            "Step time, ms": 1e3 * step_s(arm),
            "Without offload": plain or "not run" if moved else "this row",
            "Time, x without": ratio_text(ratio) if moved else "1",
        }

    strategies = list(real_arms(records))
    stages = {(arm.workload, arm.value("zero_stage")) for arm in strategies if arm.is_offloaded}
    return arm_table((arm for arm in strategies if (arm.workload, arm.value("zero_stage")) in stages), figures)


def offload(records: Records) -> list[canvas.Drawing]:
    """Draw the memory that offload frees against the time that it costs."""
    return canvas.per_workload("offload", canvas.finished(records), _offload)


def _offload(workload: str, runs: pd.DataFrame) -> canvas.Drawing | None:
    """Draw an arrow from each stage without offload to the same stage with it: left is less memory, up is slower."""
    strategies, notes = canvas.arm_strategies(runs), canvas.find_confounds(runs)
    moved = {arm.name: plain for arm in group_by_strategy(runs) if arm.is_offloaded and (plain := arm.unoffloaded)}
    moves = {arm: moved[arm] for arm in strategies if arm in moved}
    if not moves:
        return None
    places = scarce_memory(runs)
    state = runs[[f"{kind}_bytes_{place}" for kind in STATE_KINDS for place in places]].sum(axis="columns")
    unit, size = canvas.unit_for(state.max())
    single = pd.DataFrame({"arm": runs["arm"], "state": state / size, "ms": runs[STEP] * 1e3}).set_index("arm")
    points = single.groupby("arm").agg({"state": "median", "ms": geometric_mean})
    figure, (axes,) = canvas.sheet(3.9)
    for arm, plain in moves.items():
        axes.annotate("", tuple(points.loc[arm]), xytext=tuple(points.loc[plain]), arrowprops={
            "arrowstyle": "->", "color": canvas.find_style(strategies[arm]).colour, "linewidth": 1.2,
            "shrinkA": 5, "shrinkB": 5, "alpha": 0.7,
        })  # fmt: skip
    listed = list(dict.fromkeys(arm for pair in moves.items() for arm in reversed(pair)))
    place = "on the device" if len(places) == 1 else "in memory"
    axes.set(xlabel=f"model state left {place}, {unit} per rank", ylabel="step time, ms")
    canvas.label_points(axes, points.loc[listed], strategies, notes, single)
    states, times = points["state"].map(format_number), points["ms"].map(format_number)
    words = ", ".join(
        f"{arm} leaves {states[arm]} of {states[plain]} {unit}, {times[arm]} ms instead of {times[plain]} ms"
        for arm, plain in moves.items()
    )
    subtitle = "An arrow leads from a stage without offload to the same stage with it."
    shown_notes = {arm: notes[arm] for arm in listed}
    return canvas.finish(figure, "Memory and time of offload", workload, subtitle, words, shown_notes)


OFFLOAD = Question(
    "offload", "What does offload free, and what does it cost?", _offload_answer,
    no_data="No workload here has a stage both with offload and without it.", tables={"offload": offload_table},
    figures={"offload": offload}, notebook="offload",
)  # fmt: skip


def _traffic_answer(records: Records) -> Answer | None:
    comparison = compare_with_reference(records, sent_mib)
    if comparison is None:
        return None
    sentence = f"No sharding strategy here is comparable with {comparison.names} in ring bytes."
    if comparison.ratios:
        ratios, most = span_text((ratio for ratio, _ in comparison.ratios), times_text), comparison.ratios[-1][1].name
        sentence = (
            f"Sharding sends {ratios} times the ring bytes (NCCL) of {comparison.names} per step, most with `{most}`."
        )
    columns: Columns = {"Ring bytes (NCCL), MiB": sent_mib, f"x {comparison.plain_names}": comparison.cell(times_text)}
    notes = [
        "Ring bytes: bytes that one rank sends per step if every collective is a ring, as with NCCL. Gloo differs."
    ]
    if any(arm.name.partition(" ")[0] == "zero3" and ratio < 1.25 for ratio, arm in comparison.ratios):
        notes.append(
            "`zero3` keeps tensors below `stage3_param_persistence_threshold` gathered, in a small model nearly all. It"
            " sends 1.5 times the bytes of `ddp` if it shards all of them."
        )
    return side_by_side(sentence, without_offload(comparison.workloads), columns, *notes)


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


def traffic(records: Records) -> list[canvas.Drawing]:
    """Draw the ring bytes of one rank in one step; those of a virtual rank are real too."""
    runs = drop_probes(records).runs
    return canvas.per_workload("traffic", runs[(runs["status_state"] == "ok") & runs["collectives"].notna()], _traffic)


def _traffic(workload: str, runs: pd.DataFrame) -> canvas.Drawing:
    first, notes = runs.drop_duplicates("arm").set_index("arm"), canvas.find_confounds(runs)
    counted = {arm: json.loads(first.loc[arm, "collectives"]) for arm in canvas.arm_strategies(runs)}
    sizes = {arm: {kind: row["wire_bytes_per_rank"] for kind, row in kinds.items()} for arm, kinds in counted.items()}
    sent = pd.DataFrame(sizes).T.fillna(0)
    sent = sent[[*(kind for kind in canvas.TRAFFIC if kind in sent), *sorted(set(sent) - set(canvas.TRAFFIC))]]
    unit, size = canvas.unit_for(sent.sum(axis="columns").max())
    sent /= size
    totals = sent.sum(axis="columns")
    # Bytes of all parameters, from the runs that do not partition them.
    unpartitioned = runs[(runs["zero_stage"].fillna(0) < 3) & (runs["distributed_type"] != "FSDP")]
    weights = float(unpartitioned["params_bytes_device"].max()) / size
    subtitle = "Ring bytes (NCCL) of one rank; an all-reduce sends twice its size."
    figure, (axes,) = canvas.sheet_of_rows(len(sent))
    if weights > 0:
        subtitle += f" The dashed lines are multiples of the parameters ({format_number(weights)} {unit})."
        for copy in range(1, min(int(totals.max() / weights + 0.01), 6) + 1):
            axes.axvline(copy * weights, zorder=0, **canvas.GUIDE)
    canvas.bars(axes, sent, canvas.TRAFFIC, totals.map(format_number), f"{unit} per rank and step", notes)
    words = ", ".join(f"{arm} {format_number(total)} {unit}" for arm, total in totals.items())
    legend = canvas.legend_of_fills({kind: canvas.TRAFFIC.get(kind, canvas.OTHER) for kind in sent}, {})
    return canvas.finish(figure, "Communication of one step", workload, subtitle, words, notes, legend)


TRAFFIC = Question(
    "traffic", "How much does a rank send in one step?", _traffic_answer,
    no_data="No run of several ranks here recorded its collectives.", tables={"traffic": traffic_table},
    figures={"traffic": traffic}, notebook="runtime",
)  # fmt: skip

_STAGES = {"zero1", "zero2", "zero3"}
_NEIGHBOURS = {*WITH_REPLICAS, *WITH_GROUPS}


def _neighbours_answer(records: Records) -> Answer | None:
    grouped: dict[str, list[StrategyRuns]] = {}
    for arm in _neighbour_arms(records):
        if len(arm.ok_runs):
            grouped.setdefault(arm.workload, []).append(arm)
    # The details have the other numbers of ranks.
    most = {workload: max(arm.ranks for arm in arms) for workload, arms in grouped.items()}
    chosen = {workload: [arm for arm in arms if arm.ranks in (1, most[workload])] for workload, arms in grouped.items()}
    sentences = []
    for workload in by_arms(chosen):
        # The strategies with the least memory and traffic, if both ZeRO and an alternative to it ran.
        many = [arm for arm in chosen[workload] if arm.ranks > 1]
        strategies = {str(arm.value("strategy")) for arm in many}
        least = []
        for figure, words in ((StrategyRuns.state_mib, "state"), (_kept_mib, "memory kept for backward"),
                              (sent_mib, "ring bytes (NCCL)")):  # fmt: skip
            measured = {arm.name: value for arm in many if not pd.isna(value := figure(arm))}
            if measured:
                name = min(measured, key=lambda name: measured[name])
                least.append(f"{words} under `{name}` ({measured[name]:.3g} MiB)")
        if strategies & _STAGES and strategies & _NEIGHBOURS and least:
            sentences.append(f"{workload}: least per rank, of {most[workload]} ranks: {', '.join(least)}.")
    if not sentences:
        return None
    columns: Columns = {
        "State, MiB": StrategyRuns.state_mib, "Kept for backward, MiB": _kept_mib, "Ring bytes (NCCL), MiB": sent_mib,
        "Calls": lambda arm: arm.median("comm_calls_per_step"),
    }  # fmt: skip
    notes = (
        "State: parameters, gradients and optimizer states of the rank with most. Kept for backward: bytes that the"
        " forward pass of one micro-batch leaves allocated, without gathered parameters.",
        "All strategies of a workload use the same samples in each step.",
    )
    return side_by_side(sentences[0], chosen, columns, *notes)


def _neighbour_arms(records: Records) -> Iterator[StrategyRuns]:
    """Yield strategies of workloads that ran an alternative to ZeRO: real ones, or virtual ones if there are none."""
    for runs in (real_runs(records).runs, virtual_runs(records).runs):
        strategies = [arm for arm in group_by_strategy(runs) if arm.workload_runs["strategy"].isin(_NEIGHBOURS).any()]
        if strategies:
            yield from strategies
            return


# Earlier records omit parameters that FSDP's root had gathered, and those of a shard group of one rank.
_COUNTED_RIGHT_SINCE = "2026-11-23T09"


def _kept_mib(arm: StrategyRuns, figure: str = "forward_holds_bytes") -> float:
    shards = arm.ranks // int(arm.value("group_ranks") or 1)
    counted_wrong = arm.value("distributed_type") == "FSDP" or (arm.value("zero_stage") == 3 and shards == 1)
    is_old = (arm.ok_runs["status_started_at"] < _COUNTED_RIGHT_SINCE).any()
    return NAN if is_old and counted_wrong else arm.median(figure) / MIB


def neighbours_table(records: Records) -> pd.DataFrame:
    """Return memory and communication of ZeRO and its alternatives, by strategy."""
    return arm_table(
        _neighbour_arms(records),
        lambda arm: {
            "Ranks": arm.ranks,
            **{f"{words}, MiB": sum(arm.median(f"{kind}_bytes_{place}") for place in ("device", "host")) / MIB
               for kind, words in _KINDS.items()},
            "Buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Kept for backward, MiB": _kept_mib(arm),
            "Still gathered then, MiB": _kept_mib(arm, "forward_gathers_bytes"),
            "Ring bytes (NCCL), MiB": sent_mib(arm),
            "Calls": arm.median("comm_calls_per_step"),
            "Payload by collective, MiB": _by_collective(arm),
        },
    )  # fmt: skip


NEIGHBOURS = Question(
    "neighbours", "How much memory and communication do alternatives to ZeRO need?", _neighbours_answer,
    no_data="No run here has ZeRO's stages next to tensor, sequence, context or hybrid sharding.",
    tables={"neighbours": neighbours_table}, notebook="neighbours",
)  # fmt: skip
