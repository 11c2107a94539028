"""A receipt as one screen of text, and two of them side by side. It imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from study.config.text import binary_size, rounded_seconds
from study.receipt.changes import change_lines
from study.receipt.document import (
    BUFFERS,
    MEMORY_PARTS,
    PASSES,
    TIME_PARTS,
    CollectiveTime,
    ForecastRow,
    ReceiptDocument,
)
from study.receipt.failures import WRONG_USE
from study.receipt.host_optimizer import read_host_optimizer
from study.receipt.unexplained import explain_attribution

WIDTH, HEIGHT = 100, 40
_BAR = 30
_MAX_FAULTS, _MAX_FAILURES = 5, 2
# Fraction of the memory or of a step from which a part has a line.
SHOWN_FRACTION = 0.001
_ENGINES = {"deepspeed": "DeepSpeed", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "ddp": "DDP", "none": "no engine"}
NAMES = {"other_tensors": "other tensors", "offload": "host and NVMe", "data": "waiting for data", "rest": "the rest"}


def receipt_lines(receipt: ReceiptDocument, name: str) -> list[str]:
    """Return at most 40 lines of at most 100 columns; what matters least is left out."""
    lines = [piece for line in _lines(receipt, name) for piece in _wrapped(line)]
    if len(lines) > HEIGHT:
        left_out = len(lines) - HEIGHT + 1
        lines[HEIGHT - 1 :] = [f"and {left_out} more lines: study receipt --details {name}"]
    return lines


def all_lines(receipt: ReceiptDocument, name: str) -> list[str]:
    return [piece for line in _lines(receipt, name) for piece in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, max_lines=3) or [""]


def _lines(receipt: ReceiptDocument, name: str) -> Iterator[str]:
    # Before the last measured step the engine is not read.
    yield f"receipt of {describe(receipt)}" if receipt.model.parameters else "receipt without a measured step"
    yield _work_text(receipt, name)
    for fault in receipt.faults[:_MAX_FAULTS]:
        yield f"FAULT {fault.says}. To fix it: {fault.fix}"
    if len(receipt.faults) > _MAX_FAULTS:
        yield f"and {len(receipt.faults) - _MAX_FAULTS} more faults: study receipt --json {name}"
    if receipt.combination is not None and receipt.combination.answer in ("untested", "pairs"):
        yield f"these features are not tested together with these releases; run: {receipt.combination.test}"
    yield from _memory(receipt)
    yield from _time(receipt)
    yield from _traffic(receipt)
    yield from _speed(receipt)
    yield from _ranks(receipt)
    yield from _forecast(receipt)
    yield from _host_optimizer(receipt)
    yield from change_lines(receipt)
    if receipt.unavailable:
        yield f"not available: {'; '.join(receipt.unavailable)}"
    for failure in receipt.failures[:_MAX_FAILURES]:
        yield failure if failure.startswith(WRONG_USE) else f"failed inside the receipt: {failure}"
    if len(receipt.failures) > _MAX_FAILURES:
        yield f"and {len(receipt.failures) - _MAX_FAILURES} more failures"
    yield from _cost(receipt)


def describe(receipt: ReceiptDocument) -> str:
    """Return engine, ranks, precision and model in one line."""
    engine, model = receipt.engine, receipt.model
    stage = f" stage {engine.zero_stage}" if engine.zero_stage is not None else ""
    offloads = [
        f"{what} on {'the host' if device == 'cpu' else 'NVMe'}"
        for what, device in (("optimizer", engine.offload_optimizer), ("parameters", engine.offload_param))
        if device
    ]
    computes = engine.compute_dtype or "?"
    precision = computes if computes == engine.param_dtype else f"{computes} over {engine.param_dtype} weights"
    extras = ["gradient checkpointing"] * engine.gradient_checkpointing + ["compiled"] * engine.compiled
    extras += [f"LoRA of rank {model.lora_rank}"] if model.lora_rank else []
    extras += ["4-bit weights"] * model.quantized
    device = "CPU" if engine.device == "cpu" else engine.device
    ranks = f"{engine.ranks} rank{'s' if engine.ranks > 1 else ''} on {device}"
    groups = (("a layer", engine.tensor_parallel), ("a sequence", engine.sequence_parallel))
    ranks += "".join(f", {count} for {what}" for what, count in groups if count > 1)
    parts = [f"{_ENGINES[engine.engine]}{stage}", *offloads, ranks, precision, *extras]
    return f"{', '.join(parts)}: {model.name}, {model.parameters / 1e6:,.2f} M parameters"


def _work_text(receipt: ReceiptDocument, name: str) -> str:
    work = receipt.work
    batch = "batch not seen"
    if work.micro_batches and work.samples:
        tokens = f" x {work.sequence_length} tokens" if work.sequence_length else ""
        batch = f"{work.samples} samples{tokens} x accumulation {work.micro_batches} a rank"
    measured = "no step measured"
    if work.measured_steps:
        measured = f"steps {work.measured_steps[0]} to {work.measured_steps[-1]} measured"
    return f"{batch}; {work.steps} steps, {measured}; {receipt.state.replace('_', ' ')}; {name}"


def _memory(receipt: ReceiptDocument) -> Iterator[str]:
    memory = receipt.memory
    if memory is None:
        return
    attributed = f", {memory.attributed:.1%} attributed" if receipt.counts_bytes_in_use else ""
    yield f"peak memory of rank 0, {memory.moment}: {binary_size(memory.total_bytes)} of tensors{attributed}"
    largest = max(memory.parts.values(), default=0)
    for part in MEMORY_PARTS:
        count, on_host = memory.parts.get(part, 0), memory.offloaded_bytes(part)
        if on_host or count >= SHOWN_FRACTION * memory.total_bytes:
            host = f"  ({binary_size(on_host)} offloaded)" if on_host else ""
            prediction = _prediction_text(receipt, f"memory: {part}")
            if part == "gathered" and not prediction:
                # Two parts may have one prediction.
                prediction = _prediction_text(receipt, f"memory: {BUFFERS}", " with buckets")
            bar = _bar(count, largest) if count else ""
            if prediction:
                bar = f"{bar:<{_BAR}}{prediction}"
            yield f"  {NAMES.get(part, part):<16}{binary_size(count):>12}  {bar}{host}"
    where = "" if receipt.engine.device == "cpu" else " of host memory"
    details = [f"process {binary_size(memory.process_peak_bytes)}{where} at its peak"]
    if memory.allocator_peak_bytes is not None:
        details.append(f"torch's peak of the run {binary_size(memory.allocator_peak_bytes)}")
    if memory.allocator_slack_bytes is not None:
        details.append(f"allocator's slack {binary_size(memory.allocator_slack_bytes)}")
    if memory.outside_torch_bytes is not None:
        what = "outside of torch" if receipt.engine.device != "cpu" else "heap without tensors"
        details.append(f"{what} {binary_size(memory.outside_torch_bytes)}")
    yield f"  in addition: {', '.join(details)}"
    if (cause := explain_attribution(receipt)) is not None:
        yield f"  {cause}"


def _time(receipt: ReceiptDocument) -> Iterator[str]:
    times = receipt.time
    total = sum(times.parts.values())
    if times.step_s is not None:
        # A step whose parts are timed waits for the device at both ends.
        parts = f"; parts of one of {rounded_seconds(total)}" if total else ""
        yield f"time of a step: {rounded_seconds(times.step_s)} (median of {times.steps}){parts}"
    if not total:
        return
    widest = len(_bar(max(times.parts.values()), total))
    for part in TIME_PARTS:
        seconds = times.parts.get(part, 0.0)
        prediction = _prediction_text(receipt, f"time: {part}")
        if part == "forward" and not prediction:
            prediction = _prediction_text(receipt, f"time: {PASSES}", " with backward")
        if prediction or seconds >= SHOWN_FRACTION * total:
            transfers = {"communication": times.collectives, "offload": times.offload}.get(part, {})
            fraction = f"{seconds / total:.0%}"
            bar = "" if transfers else f"{_bar(seconds, total):<{widest}}"
            line = f"  {NAMES.get(part, part):<16}{rounded_seconds(seconds):>12} {fraction:>4}  {bar}{prediction}"
            yield f"{line}{_transfer_text(transfers)}".rstrip()


def _transfer_text(transfers: Mapping[str, CollectiveTime]) -> str:
    """Return the exposed time of each kind of collective or copy, the longest first; empty without one."""
    rows = [
        f"{kind} {rounded_seconds(row.exposed_s)} of {rounded_seconds(row.in_flight_s)}"
        for kind, row in sorted(transfers.items(), key=lambda item: -item[1].exposed_s)
    ]
    return f"  exposed of in flight: {', '.join(rows)}" if rows else ""


def _traffic(receipt: ReceiptDocument) -> Iterator[str]:
    if receipt.traffic is None:
        return
    rows = [
        f"{kind} {binary_size(row.ring_bytes)} in {row.calls}{_prediction_text(receipt, f'ring bytes: {kind}')}"
        for kind, row in sorted(receipt.traffic.items(), key=lambda item: -item[1].ring_bytes)
        if row.payload_bytes
    ]
    total = sum(row.ring_bytes for row in receipt.traffic.values())
    yield f"ring bytes of a rank a step: {binary_size(total)}; {', '.join(rows) or 'none'}"


def _speed(receipt: ReceiptDocument) -> Iterator[str]:
    speed = receipt.speed
    parts = []
    if speed.tokens_per_s is not None:
        parts.append(f"{speed.tokens_per_s:,.0f} tokens/s of all ranks{_prediction_text(receipt, 'tokens/s')}")
    if speed.flops_per_step is not None:
        parts.append(f"{speed.flops_per_step / 1e12:,.4g} TFLOP a rank and step")
    if speed.mfu is not None:
        # Recomputed operations are counted as well.
        name = "HFU" if receipt.engine.gradient_checkpointing else "MFU"
        parts.append(f"{name} {speed.mfu:.1%}")
    elif speed.mfu_missing is not None:
        parts.append(f"no MFU: {speed.mfu_missing}")
    if parts:
        yield f"speed: {'; '.join(parts)}"


def _ranks(receipt: ReceiptDocument) -> Iterator[str]:
    if len(receipt.ranks) < 2:
        return
    parts = []
    busy = {row.rank: row.busy_s for row in receipt.ranks if row.busy_s is not None}
    if busy:
        slowest, fastest = max(busy, key=busy.__getitem__), min(busy, key=busy.__getitem__)
        parts.append(
            f"rank {slowest} is the slowest, busy {rounded_seconds(busy[slowest])} of a step"
            f" (rank {fastest} {rounded_seconds(busy[fastest])})"
        )
    peaks = {row.rank: row.peak_bytes for row in receipt.ranks if row.peak_bytes is not None}
    if peaks:
        fullest, emptiest = max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)
        most, least = binary_size(peaks[fullest]), binary_size(peaks[emptiest])
        parts.append(f"rank {fullest} is the fullest, {most} (rank {emptiest} {least})")
    yield f"ranks: {'; '.join(parts)}"


def _forecast(receipt: ReceiptDocument) -> Iterator[str]:
    forecast = receipt.forecast
    if forecast.missing is not None:
        yield f"no prediction: {forecast.missing}"
    if forecast.comparisons:
        repeated = " again (the file has an earlier prediction)" if forecast.differs_from_file else ""
        yield f"predicted{repeated} and measured:"
    for row in (*forecast.comparisons, *(row for row in forecast.parts if row.is_outside)):
        yield f"  {row.figure:<22}{_figure(row, row.predicted):>12} {_figure(row, row.measured):>12}  {_judged(row)}"


def _prediction_text(receipt: ReceiptDocument, figure: str, detail: str = "") -> str:
    """Return the prediction of a part as text behind the measured figure; empty without one."""
    row = next((row for row in receipt.forecast.parts if row.figure == figure), None)
    return "" if row is None else f" (predicted {_figure(row, row.predicted)}{detail})"


def _judged(row: ForecastRow) -> str:
    ratio = row.measured / row.predicted if row.predicted else 0.0
    cause = f": {row.cause}" if row.cause is not None else ""
    if row.low is None or row.high is None:
        return f"measured is {ratio:.3g} times the prediction, which states no error here{cause}"
    if row.is_outside:
        return f"OUTSIDE of its stated error: measured is {ratio:.3g} times the prediction{cause}"
    return "within its stated error"


def _figure(row: ForecastRow, value: float) -> str:
    if row.unit == "tokens/s":
        return f"{value:,.0f}"
    return rounded_seconds(value) if row.unit == "s" else binary_size(value)


def _host_optimizer(receipt: ReceiptDocument) -> Iterator[str]:
    host = read_host_optimizer(receipt)
    if host is not None:
        rate = f"{binary_size(host.moved_bytes)} in {rounded_seconds(host.step_s)}, {host.gb_per_s:.3g} GB/s"
        yield f"Adam on the host: {rate}; this machine has {host.cores} cores for {host.ranks} ranks"


def _cost(receipt: ReceiptDocument) -> Iterator[str]:
    cost = receipt.cost
    later = f", {cost.later_fraction:.3%} of each later step" if cost.later_fraction is not None else ""
    added = f"the receipt added {rounded_seconds(cost.added_s)} to the program; " if cost.added_s is not None else ""
    whose = "its" if added else "the receipt's"
    yield f"{added}{whose} functions took {rounded_seconds(cost.measured_s)} in the measured steps{later}"


def _bar(value: float, largest: float) -> str:
    return "█" * max(1, round(_BAR * value / largest)) if largest else ""
