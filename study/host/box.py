"""What this machine has, asked without importing torch: its GPUs, who else uses them, its memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from study.config.strategies import REPOSITORY
from study.host.memory import host_memory
from study.records.outcome import FreeMemory

try:
    import pynvml
except ModuleNotFoundError:
    # `study doctor` still answers, and says what is missing.
    pynvml = None

_MATMUL_LIMIT_S = 120
# What `measured_rates` may end with.
NOT_MEASURED = (OSError, subprocess.SubprocessError, ValueError, LookupError)
Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Box:
    """What a suite may ask for. Host memory is what may be used here: a container can have less than its machine."""

    # Of all nodes, as many on each; the host memory is one node's.
    gpu_memory_gib: tuple[float, ...]
    host_memory_gib: float
    nodes: int = 1

    @property
    def gpus(self) -> int:
        return len(self.gpu_memory_gib)

    def __str__(self) -> str:
        gpus = f"{self.gpus_per_node} GPU{'s'[: self.gpus_per_node != 1]}"
        return gpus if self.nodes == 1 else f"{self.nodes} nodes of {gpus}"

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    def nodes_for(self, ranks: int) -> int | None:
        """How many nodes a run of so many ranks takes, the same number on each; None where they do not fit.

        With GPUs as few as hold them. A core is a device for want of one, and there is no telling how many are enough:
        then as many nodes as can be.
        """
        shares = [nodes for nodes in range(1, self.nodes + 1) if ranks % nodes == 0]
        if not self.gpus:
            return shares[-1]
        return next((nodes for nodes in shares if ranks // nodes <= self.gpus_per_node), None)


def this_box(root: Path = Path("/")) -> Box:
    """`root` is where `proc` and `sys` are."""
    handles = visible_gpus()
    total = _asked(lambda: tuple(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30 for handle in handles))
    # Where the driver does not say: the GPUs are there all the same, and nothing that asks for a size may run.
    return Box(total or (0.0,) * len(handles), host_memory(root).total_gib)


def free_gpu_bytes(place: int) -> int | None:
    """What nobody holds of the GPU at this place among the visible ones; None where the driver does not say."""
    handles = visible_gpus()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handles[place]).free) if place < len(handles) else None
    except pynvml.NVMLError:
        return None


def free_memory(place: int) -> FreeMemory:
    """Of the visible GPU at this place, and of the host."""
    free = free_gpu_bytes(place)
    return FreeMemory(None if free is None else free / 2**30, host_memory().available_gib)


def gpu_processes() -> list[dict[str, Any]]:
    """The processes on the visible GPUs now. Between two runs there should be none."""
    try:
        return [
            {"gpu": gpu, "pid": process.pid, "memory_gib": used / 2**30 if (used := process.usedGpuMemory) else None}
            for gpu, handle in enumerate(visible_gpus())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
    except pynvml.NVMLError:
        # Some boxes do not let a guest ask, and no run depends on the answer.
        return []


@functools.cache
def matmul_rates(box: Box) -> dict[str, Any]:
    """How fast this very GPU multiplies matrices, to hold an MFU against; empty without a GPU."""
    if not box.gpus:
        return {}
    try:
        return measured_rates()
    except NOT_MEASURED as error:
        return {"error": f"not measured ({type(error).__name__})"}


def measured_rates(**environment: str) -> dict[str, Any]:
    """Measured in a process of its own, which is gone before the first cell begins."""
    answer = subprocess.run(
        [sys.executable, "-m", "study.metrics.matmul"], cwd=REPOSITORY, env=os.environ | environment,
        capture_output=True, text=True, timeout=_MATMUL_LIMIT_S, check=True,
    )  # fmt: skip
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def driver_version() -> str | None:
    return _asked(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def driver_cuda() -> str | None:
    """The newest CUDA that the driver runs, such as 12.4."""
    number = _asked(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def visible_gpus() -> list[Any]:
    """NVML's handle of each GPU that a run would see; none where there is no driver or no package for it."""
    return _asked(lambda: list(_handles())) or []


def gpu_names() -> list[str]:
    return _asked(lambda: [str(pynvml.nvmlDeviceGetName(handle)) for handle in visible_gpus()]) or []


def _asked(question: Callable[[], Answer]) -> Answer | None:
    if pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
        return question()
    except pynvml.NVMLError:
        return None


def _handles() -> Iterator[Any]:
    for name in _visible():
        try:
            handle = _handle(name)
            if name.isdigit() and (first := _first_slice(handle)) is not None:
                # Of cards that are divided and not named by slice CUDA shows one slice, and nothing beside it.
                yield first
                return
            yield handle
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            # As CUDA does: the first entry that names no GPU ends the list.
            return


def _first_slice(handle: Any) -> Any:
    """None of a card that is whole."""
    try:
        is_divided = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if is_divided else None
    except pynvml.NVMLError:
        return None


def _handle(name: str) -> Any:
    """By its place, or by its UUID or that of a MIG slice; CUDA takes the beginning of a GPU's for all of it."""
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        every = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        meant = [handle for handle in every if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(name)]
        if len(meant) != 1:
            raise
        return meant[0]


def _visible() -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    names = filter(None, (part.strip() for part in chosen.split(",")))
    return list(itertools.takewhile(lambda name: not name.startswith("-"), names))
