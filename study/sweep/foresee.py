"""What a cell will hold, how long it will take and how it will end, told before it is run; and what cannot fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from study.host.box import Box as Host
from study.host.memory import GIB, LIBRARIES_BYTES
from study.predictor.boxes import box_of
from study.predictor.floor import ANY_DEVICE, least_activation_bytes, least_device_bytes, state_bytes
from study.predictor.memory import predict_memory
from study.predictor.request import Hardware, Memory, Request
from study.predictor.runs import request_for, unpredicted
from study.predictor.time import device_bytes, predict_time
from study.sweep.cell import Cell
from study.sweep.notes import Durations, expected_s
from study.sweep.progress import show_duration
from study.sweep.suite_file import Suite


@dataclasses.dataclass(frozen=True)
class Needs:
    """The device's of one rank, the host's of all processes."""

    processes: int
    device_bytes: float
    host_bytes: float


def needs_of(cell: Cell, on_gpu: bool = True) -> Needs | None:
    """None for what nobody predicts."""
    if unpredicted(cell.strategy, cell.config):
        return None
    plan, device = cell.plan, ANY_DEVICE if on_gpu else dataclasses.replace(ANY_DEVICE, memory_gib=0.0)
    request = request_for(
        cell.strategy, cell.config, Hardware(cell.strategy, device, cell.ranks), plan.per_device_train_batch_size,
        plan.gradient_accumulation_steps,
    )  # fmt: skip
    strategy, shape = request.strategy, request.shape
    state = state_bytes(strategy, request.precision, cell.ranks)
    frozen = state_bytes(strategy, request.precision, cell.ranks, trained=False)
    activations = least_activation_bytes(request)
    processes, parameters = cell.world_size, shape.parameters
    trained, still = shape.trained_parameters, shape.frozen_parameters
    # Outside stage 3 every process makes the whole model in fp32 on the host first, and moves it from there.
    loaded = 4 * parameters if strategy.zero_stage != 3 else 0
    return Needs(
        processes=processes,
        device_bytes=least_device_bytes(state, trained, activations) + still * frozen.device,
        host_bytes=processes * (LIBRARIES_BYTES + max(loaded, trained * state.host + still * frozen.host)),
    )


@dataclasses.dataclass(frozen=True)
class Foresight:
    suite: Suite
    host: Host
    durations: Durations
    # Asked for with --hardware, or the GPUs that are here.
    box: Hardware | None

    def device_gib(self, cell: Cell) -> float | None:
        """What a rank may have: its cap, or a GPU's of the box, or of one that the suite asks for."""
        if cell.config.device_memory_cap_gib is not None:
            return cell.config.device_memory_cap_gib
        if self.box is not None:
            return self.box.device.memory_gib or None
        return self.suite.requires.gpu_memory_gib or None

    @property
    def host_gib(self) -> float:
        """Of the box that the cells are for."""
        if self.box is not None and self.box.host_gib_per_node is not None:
            return self.box.host_gib_per_node
        is_elsewhere = self.suite.requires.gpus > self.host.gpus
        return self.suite.requires.host_memory_gib if is_elsewhere else self.host.host_memory_gib

    def nodes(self, cell: Cell) -> int:
        """That the cell takes, of the box that it is for."""
        if self.box is not None:
            return -(-cell.world_size // self.box.gpus_per_node)
        wanted = self.suite.requires
        if wanted.gpus > self.host.gpus:
            return -(-cell.world_size // (wanted.gpus_per_node or wanted.gpus))
        return self.host.nodes_for(cell.world_size) or 1

    def told(self, cell: Cell) -> str:
        """In a few words."""
        said, request = [], self.request(cell)
        if self.box is not None and self.nodes(cell) > self.box.nodes:
            said.append(f"{cell.world_size} ranks need as many GPUs, of which {self.box.name} has {self.box.ranks}")
        device, fits = self.device_gib(cell), None
        if request is None:
            said.append(f"no memory for {unpredicted(cell.strategy, cell.config)}")
        if request is not None:
            memory = predict_memory(request)
            said.append(f"{memory.peak_allocated.value / GIB:.2f} GiB a rank" + (f" of {device:g}" if device else ""))
            said.append(f"{memory.host_peak.value / GIB:.1f} GiB of host memory")
            fits = self._fits(cell, memory)
        said.append(self._time(cell, request))
        if is_certain_to_run_out(needs_of(cell, device is not None), device, self.host_gib, self.nodes(cell)):
            said.append("certain to run out of memory")
        elif fits is not None:
            said.append("fits" if fits else "runs out of memory")
        return "predicted: " + ", ".join(said)

    def last_that_fits(self, cells: Iterable[Cell]) -> int:
        """Of ever larger ones, in a cap or a GPU that the suite asks for; the first one without, where one that is too
        large may hold up the whole machine."""

        def fits(cell: Cell) -> bool:
            request = self.request(cell) if self.device_gib(cell) else None
            return request is not None and self._fits(cell, predict_memory(request))

        return max(0, sum(1 for _ in itertools.takewhile(fits, cells)) - 1)

    def _fits(self, cell: Cell, memory: Memory) -> bool:
        device, held = self.device_gib(cell), memory.host_peak.value
        if device is None:
            held += cell.world_size / self.nodes(cell) * memory.peak_reserved.value
        # A cap is the allocator's, and does not see the context.
        is_cap = cell.config.device_memory_cap_gib is not None
        on_device = memory.peak_reserved.value if is_cap else device_bytes(memory)
        return held <= self.host_gib * GIB and (device is None or on_device <= device * GIB)

    def _time(self, cell: Cell, request: Request | None) -> str:
        """By earlier runs or the suite where they say it: a prediction has no start, evaluation or saving in it."""
        if seconds := expected_s(cell, self.durations):
            return f"about {show_duration(seconds)}"
        if request is None or self.box is None:
            return "no time without --hardware"
        step = predict_time(request).step_s.value
        steps = cell.total_steps
        return f"{step:.3g} s a step" + (f", {show_duration(step * steps)} for {steps}" if steps else "")

    def request(self, cell: Cell) -> Request | None:
        """None for what `unpredicted` says."""
        if unpredicted(cell.strategy, cell.config):
            return None
        plan = cell.plan
        # A virtual rank stands alone on its box, whatever the size of its job.
        per_node = -(-cell.world_size // self.nodes(cell))
        # A device of no memory is a process in the host's.
        device = dataclasses.replace(ANY_DEVICE, memory_gib=self.device_gib(cell) or 0.0)
        box = self.box or Hardware("any", device, per_node)
        box = dataclasses.replace(box, gpus_per_node=per_node, nodes=-(-cell.ranks // per_node))
        return request_for(
            cell.strategy, cell.config, box, plan.per_device_train_batch_size, plan.gradient_accumulation_steps
        )


def foresight(suite: Suite, host: Host, durations: Durations, hardware: str | None) -> Foresight:
    name = hardware or ("this" if host.gpus else None)
    return Foresight(suite, host, durations, None if name is None else box_of(name))


def is_certain_to_run_out(needs: Needs | None, device_gib: float | None, host_gib: float, nodes: int = 1) -> bool:
    """By what no run of it can do without: never said of a cell that fits. Without a GPU the host is the device."""
    if needs is None:
        return False
    on_host = needs.host_bytes if device_gib is not None else needs.processes * needs.device_bytes
    return on_host / nodes > host_gib * GIB or (device_gib is not None and needs.device_bytes > device_gib * GIB)


def warnings(cells: Iterable[Cell], host: Host) -> Iterator[str]:
    """On this very box, of cells that are not there to show it."""
    for cell in cells:
        device = cell.config.device_memory_cap_gib or (min(host.gpu_memory_gib) if host.gpus else None)
        nodes = host.nodes_for(cell.world_size) or 1
        needs = needs_of(cell, device is not None) if cell.expect != "oom" else None
        if needs is not None and is_certain_to_run_out(needs, device, host.host_memory_gib, nodes):
            yield (
                f"warning: {cell.id} is certain to run out of memory: a rank needs at least"
                f" {needs.device_bytes / GIB:.1f} GiB, and the host {needs.host_bytes / GIB:.1f}."
                " Leave it out with --only, or give it a smaller micro-batch"
            )
