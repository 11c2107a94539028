"""Forecast of a cell before it runs: its time from earlier records, its memory and outcome from a prediction."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from study.config import errors, flags
from study.config.text import format_duration
from study.host.machine import Machine as Host
from study.host.memory import GIB
from study.predictor.hardware import ANY_DEVICE, Hardware
from study.predictor.memory import predict_memory
from study.predictor.request import MemoryUse, Request, request_for, unsupported_reason
from study.predictor.time import predict_time
from study.records import directory, schema
from study.sweep.cell import Cell
from study.sweep.search import Search, pending_runs

# The sweep's notes in a record's folder: the command, exit status and time of each attempt.
NOTES = "sweep.json"
# Used only for estimates of time.
PROBES_OF_A_SEARCH = 3
# Seconds of successful cells, by the keys of `_alike`.
Durations = Mapping[tuple[str, ...], list[float]]


def earlier_durations(root: Path) -> Durations:
    """Return the seconds of the successful cells below `root`."""
    durations = defaultdict(list)
    for file in root.glob(f"*/{NOTES}"):
        try:
            document = directory.read_json(file)
            config = flags.RunConfig.from_dict(directory.read_json(file.parent / "config.json"), str(file.parent))
            last = document["attempts"][-1]
            if last["state"] == "ok":
                ranks = config.virtual_world_size or document["world_size"]
                for key in _alike(config, document.get("arm", document["strategy"]), ranks):
                    durations[key].append(float(last["wall_s"]))
        except (schema.RecordError, errors.UserError, LookupError, TypeError, ValueError, AttributeError):
            continue
    return durations


def _alike(config: flags.RunConfig, arm: str, ranks: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two keys: one for runs that differ only in seed and repeat, one for the task, model and strategy."""
    return (dataclasses.replace(config, seed=0).run_id(arm, ranks),), (config.task, config.model_name_or_path, arm)


def expected_s(cell: Cell, durations: Durations) -> float:
    """Return the median seconds of equal runs, else the suite's estimate, else that of similar runs or all, else 0."""
    exactly, roughly = _alike(cell.config, cell.arm, cell.ranks)
    if exactly not in durations and cell.expected_s is not None:
        return cell.expected_s
    seconds = durations.get(exactly) or durations.get(roughly)
    seconds = seconds or [run_s for key, several in durations.items() if len(key) == 1 for run_s in several]
    return statistics.median(seconds) if seconds else 0.0


def pending_items(
    cells: Iterable[Cell | Search], root: Path, retry: bool = False
) -> Iterator[tuple[Cell | Search, float]]:
    """Yield the unanswered items, each with its expected seconds."""
    durations = earlier_durations(root)
    for item in cells:
        if (run := next(pending_runs(item, root, retry), None)) is not None:
            yield item, expected_s(run, durations) * (PROBES_OF_A_SEARCH if isinstance(item, Search) else 1)


def estimate(items: Sequence[tuple[Cell | Search, float]], has_searches: bool) -> str:
    """Describe the remaining items and their time, with an assumed number of probes per search."""
    searches = sum(isinstance(item, Search) for item, _ in items)
    seconds = [item_s for _, item_s in items]
    text = f"{len(items) - searches} cells to run" + (f" and {searches} searches to finish" if has_searches else "")
    if not any(seconds):
        return f"{text}; no estimate of the time until a cell has run here"
    assumed = f", with {PROBES_OF_A_SEARCH} probes per search" if searches else ""
    return f"{text}, about {format_duration(sum(seconds))} (an estimate{assumed})"


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Forecasts for cells on given hardware."""

    # The machine that the cells are planned for, without speeds.
    host: Host
    durations: Durations
    # From --hardware, or the GPUs of this machine; None without either.
    box: Hardware | None

    def _device_gib(self, cell: Cell) -> float | None:
        """Return a rank's GPU memory: its cap, else that of one GPU; None if it uses host memory."""
        if cell.config.device_memory_cap_gib is not None:
            return cell.config.device_memory_cap_gib
        return (self.box.device.memory_gib if self.box else min(self.host.gpu_memory_gib, default=0.0)) or None

    @property
    def _host_gib(self) -> float:
        return (self.box and self.box.host_gib_per_node) or self.host.host_memory_gib

    def _nodes(self, cell: Cell) -> int:
        if self.box is not None:
            return -(-cell.world_size // self.box.gpus_per_node)
        return self.host.nodes_for(cell.world_size) or 1

    def describe(self, cell: Cell) -> list[str]:
        """Return memory, time and, last, the outcome of a cell as texts."""
        texts, request = [], self.request(cell)
        if self.box is not None and self._nodes(cell) > self.box.nodes:
            texts.append(f"{cell.world_size} ranks need as many GPUs, and {self.box.name} has {self.box.ranks}")
        device, verdict = self._device_gib(cell), ""
        if request is None:
            texts.append(f"no memory for {unsupported_reason(cell.strategy, cell.config)}")
        else:
            memory = predict_memory(request)
            texts.append(
                f"{memory.peak_allocated.value / GIB:.2f} GiB a rank" + (f" (of {device:g})" if device else "")
            )
            texts.append(f"{memory.host_peak.value / GIB:.1f} GiB of host memory")
            exceeded = self._exceeded(cell, memory)
            verdict = f"exceeds the {exceeded}" if exceeded else "fits"
        # Records and the suite's estimate come first: a predicted step excludes start-up, evaluation and saving.
        if seconds := expected_s(cell, self.durations):
            texts.append(f"about {format_duration(seconds)}")
        elif request is None or self.box is None:
            texts.append("no time without --hardware")
        else:
            step, steps = predict_time(request).step_s.value, cell.total_steps
            texts.append(f"{step:.3g} s a step" + (f", {format_duration(step * steps)} for {steps}" if steps else ""))
        return [*texts, *[verdict] * bool(verdict)]

    def training_s(self, cell: Cell) -> float | None:
        """Return the predicted seconds of a cell's training steps; None without hardware or a prediction."""
        request = self.request(cell) if self.box is not None and cell.expect != "oom" else None
        return predict_time(request).step_s.value * (cell.total_steps or 0) if request is not None else None

    def last_that_fits(self, cells: Iterable[Cell]) -> int:
        """Return the position of the largest cell that fits its cap or GPU; the cells are in ascending size.

        Without a cap or GPU it is the first position, because a cell that is too large may block the machine.
        """

        def fits(cell: Cell) -> bool:
            request = self.request(cell) if self._device_gib(cell) else None
            return request is not None and not self._exceeded(cell, predict_memory(request))

        return max(0, sum(1 for _ in itertools.takewhile(fits, cells)) - 1)

    def _exceeded(self, cell: Cell, memory: MemoryUse) -> str:
        """Return the memory that a cell exceeds; empty if it fits."""
        device, on_host = self._device_gib(cell), memory.host_peak.value
        if device is None:
            on_host += cell.world_size / self._nodes(cell) * memory.peak_reserved.value
        if device is not None and memory.peak_reserved.value + self._context(cell, memory) > device * GIB:
            return "memory of a GPU"
        return "" if on_host <= self._host_gib * GIB else f"{self._host_gib:.0f} GiB of host memory"

    def too_large(self, cell: Cell) -> MemoryUse | None:
        """Return the predicted memory of a cell whose lower bounds exceed the hardware; None if it may fit."""
        request, device = self.request(cell), self._device_gib(cell)
        if request is None:
            return None
        memory = predict_memory(request)
        lower_bound = (memory.peak_reserved.low or memory.peak_allocated.value) + self._context(cell, memory)
        on_host = memory.host_parts["load"]
        if device is None:
            on_host = max(on_host, request.box.gpus_per_node * memory.peak_allocated.value)
        exceeds = on_host > self._host_gib * GIB or (device is not None and lower_bound > device * GIB)
        return memory if exceeds else None

    def _context(self, cell: Cell, memory: MemoryUse) -> float:
        """Return the bytes of the CUDA context, which a cap does not limit: it is one of the allocator."""
        return 0.0 if cell.config.device_memory_cap_gib is not None else memory.device_parts["context"]

    def request(self, cell: Cell) -> Request | None:
        if unsupported_reason(cell.strategy, cell.config):
            return None
        plan = cell.plan
        # A virtual rank is the only process of its machine, whatever the size of its job.
        per_node = -(-cell.world_size // self._nodes(cell))
        # A device with 0 GiB means that the process uses host memory.
        device = dataclasses.replace(ANY_DEVICE, memory_gib=self._device_gib(cell) or 0.0)
        box = self.box or Hardware("any", device, per_node)
        box = dataclasses.replace(box, gpus_per_node=per_node, nodes=-(-cell.ranks // per_node))
        return request_for(
            cell.strategy, cell.config, box, plan.per_device_train_batch_size, plan.gradient_accumulation_steps
        )


def oom_warnings(cells: Iterable[Cell], host: Host) -> Iterator[str]:
    """Yield a warning for each cell that will run out of memory here, except cells that demonstrate it."""
    forecast = Forecast(host, {}, None)
    for cell in cells:
        if cell.expect != "oom" and (memory := forecast.too_large(cell)):
            yield (
                f"warning: {cell.id} is predicted to run out of memory: a rank needs about"
                f" {memory.peak_reserved.value / GIB:.1f} GiB, and the host {memory.host_peak.value / GIB:.1f}."
                " Leave it out with --only, or use a smaller micro-batch"
            )
