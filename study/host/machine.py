"""This machine without importing torch: its GPUs, their other users, its memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
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
    # `study doctor` still works, and reports what is missing.
    pynvml = None

_MATMUL_LIMIT_S = 120
# Errors of `measured_rates`.
MEASUREMENT_ERRORS = (OSError, subprocess.SubprocessError, ValueError, LookupError)
Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Resources that a suite may require. A container can have less host memory than its machine."""

    # GPUs of all nodes, as many on each; host memory of one node.
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
        """Return the number of nodes of a run with as many ranks on each; None where they do not fit.

        With GPUs the fewest nodes. Without, a core is a device and any number is enough: the most nodes.
        """
        shares = [nodes for nodes in range(1, self.nodes + 1) if ranks % nodes == 0]
        if not self.gpus:
            return shares[-1]
        return next((nodes for nodes in shares if ranks // nodes <= self.gpus_per_node), None)


def detect_machine(root: Path = Path("/")) -> Machine:
    """`root` is the folder of `proc` and `sys`."""
    handles = visible_gpus()
    total = _asked(lambda: tuple(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30 for handle in handles))
    # If the driver gives no size, the GPUs are there, and nothing that requires a size may run.
    return Machine(total or (0.0,) * len(handles), host_memory(root).total_gib)


def free_gpu_bytes(place: int) -> int | None:
    """Free memory of the visible GPU at this position; None where the driver does not give it."""
    handles = visible_gpus()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handles[place]).free) if place < len(handles) else None
    except pynvml.NVMLError:
        return None


def free_memory(place: int) -> FreeMemory:
    """Free memory of the visible GPU at this position, and of the host."""
    free = free_gpu_bytes(place)
    return FreeMemory(None if free is None else free / 2**30, host_memory().available_gib)


def gpu_processes() -> list[dict[str, Any]]:
    """Processes on the visible GPUs. Between two runs there should be none."""
    try:
        return [
            {"gpu": gpu, "pid": process.pid, "memory_gib": used / 2**30 if (used := process.usedGpuMemory) else None}
            for gpu, handle in enumerate(visible_gpus())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
    except pynvml.NVMLError:
        # Some boxes refuse guests, and no run depends on the answer.
        return []


@functools.cache
def matmul_rates(box: Machine) -> dict[str, Any]:
    """Rates of this GPU's matrix products, the reference of an MFU; empty without a GPU."""
    if not box.gpus:
        return {}
    try:
        return measured_rates()
    except MEASUREMENT_ERRORS as error:
        return {"error": f"not measured ({type(error).__name__})"}


def measured_rates(**environment: str) -> dict[str, Any]:
    """Measure in a separate process, which is gone before the first cell begins."""
    answer = subprocess.run(
        [sys.executable, "-m", "study.metrics.flops", "rates"], cwd=REPOSITORY, env=os.environ | environment,
        capture_output=True, text=True, timeout=_MATMUL_LIMIT_S, check=True,
    )  # fmt: skip
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def driver_version() -> str | None:
    return _asked(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def driver_cuda() -> str | None:
    """Newest CUDA version that the driver runs, such as 12.4."""
    number = _asked(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def visible_gpus() -> list[Any]:
    """NVML's handle of each GPU that a run would see; none without a driver or its package."""
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
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = map(str, range(pynvml.nvmlDeviceGetCount())) if chosen is None else map(str.strip, chosen.split(","))
    for name in itertools.takewhile(lambda name: not name.startswith("-"), filter(None, every)):
        try:
            handle = _handle(name)
            if name.isdigit() and (first := _first_slice(handle)) is not None:
                # CUDA shows one slice, and no other GPU, of divided cards that are not named by slice.
                yield first
                return
            yield handle
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            # In CUDA, too, the first entry that names no GPU ends the list.
            return


def _first_slice(handle: Any) -> Any:
    """The first MIG slice of a card; None if it is not divided."""
    try:
        is_divided = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if is_divided else None
    except pynvml.NVMLError:
        return None


def _handle(name: str) -> Any:
    """Find a GPU by position, by its UUID or its unique beginning, as CUDA does, or by the UUID of a MIG slice."""
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


def cpu_info() -> dict[str, str]:
    """Linux's description of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def operator_build_folder(cache: Path, stack: str = "") -> Path:
    """Folder of an installation, a stack, a kind of CPU, and whether GPUs are visible.

    The compiler uses the CPU's instructions, DeepSpeed links with CUDA where it finds a GPU, and machines that share a
    cache may differ in both.
    """
    gpus = ["CUDA"] if visible_gpus() else []
    kind = [sys.prefix, platform.machine(), cpu_info().get("flags"), *gpus, *filter(None, [stack])]
    return cache / "operators" / hashlib.sha256(repr(kind).encode()).hexdigest()[:12]
