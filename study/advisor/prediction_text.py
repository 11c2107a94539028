"""The page that `study predict` prints, of a `Prediction` alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from study.advisor.long_features import features_text
from study.advisor.prediction import Prediction, Traffic, has_room_on_device
from study.advisor.request_notes import finding_notes
from study.advisor.request_text import (
    dpo_notes,
    host_text,
    loading_remedy,
    need_text,
    precision_name,
    program_text,
    strategy_text,
    tokens_text,
    workload_text,
)
from study.config.precisions import computing_type
from study.config.printing import TextTable
from study.config.text import format_parameters, rounded, rounded_seconds
from study.host.memory import GIB
from study.predictor.calibration import calibration_lines
from study.predictor.request import Estimate, MemoryUse, Request
from study.predictor.shape import trained_text
from study.predictor.time import device_bytes, excess_on_host, usable_bytes, why

# Characters of the longest bar.
_BAR = 40
_HOST_PARTS = {
    "load": "while the model is loaded",
    "train": "in training",
    "save": "while it is saved",
    "state": "of that, model state",
    "pinned": "of that, pinned",
}


def page(prediction: Prediction, details: bool) -> Iterator[str | TextTable]:
    """Yield the parts of the printed answer."""
    request, memory = prediction.request, prediction.memory
    yield _verdict(prediction)
    yield from calibration_lines(prediction.measured)
    yield from dpo_notes(request)
    yield ""
    yield from _subject_lines(request)
    kind = "rank" if request.box.is_cpu_only else "GPU"
    yield f"\nmemory of one {kind} at its peak, {memory.moment}, GiB"
    yield TextTable(("", "", ""), _part_rows(memory, prediction.traced_activation_bytes), indent=2)
    yield ""
    yield TextTable(("", ""), [*_rows(prediction)])
    if details:
        yield "\nfigures with their interval, which covers 80 % of published measurements"
        yield _intervals(prediction)
    yield ""
    yield from _speed_lines(prediction)
    if prediction.training is not None:
        yield prediction.training.line
    yield from finding_notes(prediction.findings, details)
    yield from prediction.notes
    if prediction.step is not None:
        yield from prediction.step.time.notes
    yield from memory.notes


def _verdict(prediction: Prediction) -> str:
    """Return whether the memory fits, with its figures, and the speed of a step that fits."""
    request, memory = prediction.request, prediction.memory
    box, usable = request.box, rounded(usable_bytes(request.box) / GIB)
    if prediction.fit is None:
        verdict = why(memory, box)
        return f"{verdict[0].upper()}{verdict[1:]}, of {usable}; no step time; predicted"
    if prediction.fit == "does not fit" and has_room_on_device(request, memory):
        remedy = loading_remedy(request) if memory.loading > usable_bytes(box) else ""
        return f"Does not fit: {why(memory, box)}{remedy}; predicted"
    bound = rounded(device_bytes(memory, at_upper=True) / GIB)
    peak = rounded(prediction.device_bytes / GIB)
    need = f"{prediction.fit.capitalize()}: {peak} of {usable} GiB (90 % bound {bound}){_host_need(request, memory)}"
    if prediction.recomputed is not None:
        return f"{need}; with --gradient_checkpointing {need_text(request, prediction.recomputed)}; predicted"
    if prediction.fit == "does not fit":
        return f"{need}; predicted"
    return f"{need}; {_speed_text(prediction)}"


def _speed_text(prediction: Prediction) -> str:
    """Return the time of a step and the speed of a rank as the end of a verdict."""
    step, rank = prediction.step, "rank" if prediction.request.box.is_cpu_only else "GPU"
    if step is None:
        return "no step time; predicted"
    speed = rounded(step.time.tokens_per_s_per_gpu.value)
    return (
        f"about {rounded_seconds(step.time.step_s.value)} a step{step.range_text}, {speed} tokens/s per {rank};"
        f" {'as measured' if step.is_measured else 'predicted'}"
    )


def _host_need(request: Request, memory: MemoryUse) -> str:
    """Return a node's host memory as a part of a verdict; nothing if nothing is offloaded and the host has as much."""
    if host := host_text(request, memory):
        return f", {host}"
    return f", and {excess}" if (excess := excess_on_host(memory, request.box)) else ""


def _subject_lines(request: Request) -> Iterator[str]:
    """Yield model, strategy, hardware and precision, then the workload of a rank."""
    shape, base = request.shape, computing_type(request.precision)
    # FSDP2 sums the gradients of micro-batches in the precision of computation.
    kinds = "weights" if request.strategy.is_fsdp else "weights and gradients"
    state = f" ({kinds} {base if request.weight_bytes == 2 else 'fp32'})" if base != "fp32" else ""
    ranks = f"{request.box.ranks} rank{'s'[: request.box.ranks > 1]}"
    model = f"{shape.name} ({format_parameters(request.full_shape.parameters)}{trained_text(shape)})"
    yield f"{model}, {strategy_text(request)} on {request.box.name} ({ranks}), {precision_name(request)}{state},"
    program = f"{program_text(request)}{features_text(request)}"
    resharded = ", resharded after forward" * request.strategy.is_fsdp
    yield f"{workload_text(request)}, {tokens_text(request)}{program}{resharded}"


def _part_rows(memory: MemoryUse, traced: float | None) -> list[tuple[str, str, str]]:
    """Return a row per part of the peak, with a bar; activations and logits have one even if the peak has none."""
    largest = max(memory.device_parts.values())
    rows = []
    for name, size in sorted(memory.device_parts.items(), key=lambda part: -part[1]):
        most = memory.most_parts.get(name, size)
        if size >= 0.005 * device_bytes(memory):
            rows.append((name, rounded(size / GIB), "█" * max(1, round(_BAR * size / largest))))
        elif size < 0:
            rows.append((name, rounded(size / GIB), ""))
        elif name in ("activations", "logits") and most:
            rows.append((name, rounded(size / GIB) if size else "0", f"at most {rounded(most / GIB)} at other moments"))
    if traced is not None:
        rows.append(("activations on transformers' own code", rounded(traced / GIB), ""))
    return rows


def _rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield host memory, communication, and the parts of a step."""
    memory, traffic, box = prediction.memory, prediction.traffic, prediction.request.box
    host = {_HOST_PARTS[name]: memory.host_parts.get(name, 0.0) for name in ("load", "train")}
    host |= {"on NVMe": memory.nvme} if memory.nvme else {}
    yield "host memory of one node", ", ".join(f"{rounded(size / GIB)} GiB {when}" for when, size in host.items())
    yield "communication of one rank per step", _sent_text(traffic)
    if traffic is not None and box.nodes > 1:
        leaving, by_all = (rounded(size / 1e9) for size in (traffic.leaving_bytes, _sent_by_node(prediction, traffic)))
        yield "network traffic of one node per step", f"{leaving} of the {by_all} GB that its ranks send"
    if prediction.step is not None:
        seconds_of_parts = prediction.step.time.parts.items()
        parts = ((part.replace("_", " "), seconds) for part, seconds in seconds_of_parts if seconds)
        yield "time of one step", ", ".join(f"{part} {rounded_seconds(seconds)}" for part, seconds in parts)


def _sent_by_node(prediction: Prediction, traffic: Traffic) -> float:
    return prediction.request.box.gpus_per_node * traffic.sent.value


def _sent_text(traffic: Traffic | None) -> str:
    """Return the communication of one rank per step as text."""
    if traffic is None:
        return "not predicted"
    if not traffic.sent.value:
        return "none"
    name, unit = _unit_of_sent(traffic)
    payload = [f"{kind.replace('_', ' ')} {rounded(size / unit)}" for kind, size in traffic.payload.items()]
    return f"{rounded(traffic.sent.value / unit)} {name} in ring bytes (NCCL); payload: {', '.join(payload)}"


def _unit_of_sent(traffic: Traffic) -> tuple[str, float]:
    """Return the name and the bytes of the unit of sent bytes: adapters send little."""
    return ("GB", 1e9) if traffic.sent.value >= 1e8 else ("MB", 1e6)


def _speed_lines(prediction: Prediction) -> Iterator[str]:
    """Yield the speed of all ranks and MFU. The speed of an option that does not fit would be compared with others."""
    if prediction.step is None:
        return
    time, figures = prediction.step.time, []
    if prediction.fits:
        by_all = time.tokens_per_s_per_gpu.value * prediction.request.box.ranks
        figures.append(f"{rounded(by_all)} tokens/s of all ranks")
    if time.mfu and time.hfu:
        figures.append(f"MFU {time.mfu:.0%}, HFU {time.hfu:.0%}")
    if figures:
        yield "; ".join(figures)


def _intervals(prediction: Prediction) -> TextTable:
    """Return each figure with its interval."""
    rows = [
        (title, *_with_interval(figure, functools.partial(_in_unit, size)))
        for title, figure, size in _figures(prediction)
        if figure is not None
    ]
    if (step := prediction.step) is not None:
        rows.append(("step", rounded_seconds(step.time.step_s.value), step.range_text.lstrip()))
    return TextTable(("", "", ""), rows, indent=2)


def _figures(prediction: Prediction) -> Iterator[tuple[str, Estimate | None, float]]:
    """Yield title, figure and unit of memory and traffic."""
    memory, traffic = prediction.memory, prediction.traffic
    host = {_HOST_PARTS[name]: size for name, size in memory.host_parts.items() if name in _HOST_PARTS and size}
    has_device = not prediction.request.box.is_cpu_only
    saved = prediction.checkpoint_bytes
    yield "allocated between steps, GiB", memory.steady_allocated, GIB
    yield "peak allocated, GiB", memory.peak_allocated, GIB
    yield "peak reserved, GiB", memory.peak_reserved, GIB
    yield "reserved if memory is ample, GiB", Estimate(memory.pool_with_room) if has_device else None, GIB
    yield "whole process, GiB", memory.process_peak, GIB
    yield from ((f"host, {what}, GiB", Estimate(part), GIB) for what, part in host.items())
    yield "checkpoint on disk, of all ranks, GiB", None if saved is None else Estimate(saved), GIB
    if traffic is not None and traffic.sent.value:
        name, unit = _unit_of_sent(traffic)
        yield f"ring bytes (NCCL), {name}", traffic.sent, unit


def _in_unit(unit: float, value: float) -> str:
    return rounded(value / unit)


def _with_interval(figure: Estimate, text: Callable[[float], str]) -> tuple[str, str]:
    """Return a figure and its interval, the latter empty if there is none."""
    ends = [text(end) for end in (figure.low, figure.high) if end is not None]
    return text(figure.value), f"({' to '.join(ends)})" if ends else ""
