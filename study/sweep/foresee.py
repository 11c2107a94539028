"""What a cell will hold and how long it will take, told before it is run; and what is certain not to fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from study.errors import UserError
from study.host.box import Box as Host
from study.launch.cell import Cell
from study.predict.memory import predict_memory
from study.predict.request import Box, Memory, Request
from study.predict.shape import model_shape
from study.spec.strategies import read_strategy
from study.sweep.needs import needs_of
from study.sweep.notes import Durations, expected_s
from study.sweep.progress import show_duration
from study.sweep.suite_file import Suite
from study.theory.hardware import Device

_GIB = 2**30


def device_gib(cell: Cell, suite: Suite, host: Host) -> float | None:
    """What a rank may have on its device: the cell's cap, this box's GPUs, or those that the suite asks for."""
    if cell.config.device_memory_cap_gib is not None:
        return cell.config.device_memory_cap_gib
    if host.gpus:
        return min(host.gpu_memory_gib) or None
    return suite.requires.gpu_memory_gib or None


def is_certain_to_run_out(cell: Cell, suite: Suite, host: Host) -> bool:
    """By what no run of it can do without, so this is never said of a cell that fits."""
    needs, device = needs_of(cell), device_gib(cell, suite, host)
    if needs is None:
        return False
    if device is not None:
        return needs.device_bytes > device * _GIB
    return cell.world_size * needs.device_bytes > host.host_memory_gib * _GIB


def warnings(cells: Iterable[Cell], suite: Suite, host: Host) -> Iterator[str]:
    """Of cells that are not there to show that."""
    for cell in cells:
        if cell.expect != "oom" and is_certain_to_run_out(cell, suite, host):
            needs = needs_of(cell)
            assert needs is not None
            yield (
                f"warning: {cell.id} is certain to run out of memory: a rank needs at least"
                f" {needs.device_bytes / _GIB:.1f} GiB; leave it out with --only, or take a smaller micro-batch"
            )


def foreseen(cell: Cell, suite: Suite, host: Host, durations: Durations) -> str:
    """In a few words: memory of a rank, time of the cell, and how it should end."""
    memory = _memory(cell)
    device = device_gib(cell, suite, host)
    said = []
    if memory is not None:
        peak = memory.peak_allocated.value / _GIB
        said.append(f"{peak:.2f} GiB a rank" + (f" of {device:g}" if device else ""))
        said.append(f"{memory.host_peak.value / _GIB:.1f} GiB of host memory")
    seconds = expected_s(cell, durations)
    said.append(f"about {show_duration(seconds)} by earlier runs" if seconds else "time not known")
    if is_certain_to_run_out(cell, suite, host):
        said.append("certain to run out of memory")
    elif memory is not None and device:
        said.append("should fit" if memory.peak_reserved.value <= device * _GIB else "should run out of memory")
    return "predicted: " + ", ".join(said)


def _memory(cell: Cell) -> Memory | None:
    """None for a model of which only its name is known."""
    config = cell.config
    try:
        shape = model_shape(config.model_name_or_path)
    except UserError:
        return None
    ranks, plan = cell.ranks, config.batch_plan(cell.ranks)
    per_node = min(ranks, cell.world_size) if not config.virtual_world_size else 1
    # Which device it is does not matter to bytes.
    device = Device("any", "", dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1.0), 1.0, 80.0)
    return predict_memory(
        Request(
            shape=shape, strategy=read_strategy(cell.strategy).overridden(config),
            box=Box("any", device, per_node, ranks // per_node), sequence_length=config.seq_length,
            micro_batch=plan.per_device_train_batch_size, accumulation=plan.gradient_accumulation_steps,
            precision=config.precision, gradient_checkpointing=config.gradient_checkpointing,
            attention=config.attn_implementation,
        )
    )  # fmt: skip
