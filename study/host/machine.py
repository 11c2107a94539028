"""Describe this machine without importing torch: its GPUs, their processes, its memory."""

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

from study.config.places import IMPORT_ROOT
from study.host.memory import host_memory, kernel_text
from study.records.outcome import FreeMemory

try:
    import pynvml
except ModuleNotFoundError:
    # `study doctor` must run without it, to report that it is missing.
    pynvml = None

_MATMUL_LIMIT_S = 120
# Errors of `measured_rates`.
MEASUREMENT_ERRORS = (OSError, subprocess.SubprocessError, ValueError, LookupError)
Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Resources that a suite may require. A container can have less host memory than its machine."""

    # GPUs of all nodes, the same number on each; host memory of one node.
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
        """Return the number of nodes of a run with equally many ranks on each; None if they do not fit.

        With GPUs it is the minimum. Without GPUs a rank is a process on a core, which always fits: the maximum.
        """
        counts = [nodes for nodes in range(1, self.nodes + 1) if ranks % nodes == 0]
        if not self.gpus:
            return counts[-1]
        return next((nodes for nodes in counts if ranks // nodes <= self.gpus_per_node), None)


def detect_machine(root: Path = Path("/")) -> Machine:
    """Return the resources of this machine; `root` is the folder of `proc` and `sys`."""
    handles = visible_gpus()
    total = _asked(lambda: tuple(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30 for handle in handles))
    # If the driver reports no size, GPUs count with size 0, so no suite that requires a size runs.
    return Machine(total or (0.0,) * len(handles), host_memory(root).total_gib)


def free_gpu_bytes(place: int) -> int | None:
    """Return the free memory of the visible GPU at this position; None if the driver does not report it."""
    handles = visible_gpus()[place : place + 1]
    return _asked(lambda: next((int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles), None))


def free_memory(place: int) -> FreeMemory:
    """Return the free memory of the visible GPU at this position, and of the host."""
    free = free_gpu_bytes(place)
    return FreeMemory(None if free is None else free / 2**30, host_memory().available_gib)


def gpu_processes() -> list[dict[str, Any]]:
    """Return the processes on the visible GPUs; empty on machines that forbid it. Between two runs there are none."""
    processes = _asked(
        lambda: [
            {"gpu": gpu, "pid": process.pid, "memory_gib": used / 2**30 if (used := process.usedGpuMemory) else None}
            for gpu, handle in enumerate(visible_gpus())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
    )
    return processes or []


@functools.cache
def matmul_rates(box: Machine) -> dict[str, Any]:
    """Return the rates of this GPU's matrix products, the reference of an MFU; empty without a GPU."""
    if not box.gpus:
        return {}
    try:
        return measured_rates()
    except MEASUREMENT_ERRORS as error:
        return {"error": f"not measured ({type(error).__name__})"}


def measured_rates(**environment: str) -> dict[str, Any]:
    """Return rates that a separate process measures, which ends before the first cell begins."""
    result = subprocess.run(
        [sys.executable, "-m", "study.metrics.flops", "rates"],
        cwd=IMPORT_ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=_MATMUL_LIMIT_S,
        check=True,
    )
    return dict(json.loads(result.stdout.splitlines()[-1]))


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    return _asked(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver supports, such as 12.4; None without a driver."""
    number = _asked(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def visible_gpus() -> list[Any]:
    """Return the NVML handle of each GPU that a run would see; empty without a driver or pynvml."""
    return _asked(lambda: list(_handles())) or []


def gpu_names() -> list[str]:
    """Return the product names of the visible GPUs."""
    return _asked(lambda: [str(pynvml.nvmlDeviceGetName(handle)) for handle in visible_gpus()]) or []


def oldest_capability() -> tuple[int, int] | None:
    """Return the least compute capability of the visible GPUs, such as (7, 0); None if it is not known."""
    return _asked(lambda: min((_capability(handle) for handle in visible_gpus()), default=None))


def _capability(handle: Any) -> tuple[int, int]:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return int(major), int(minor)


def _asked(query: Callable[[], Answer]) -> Answer | None:
    if pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
        return query()
    except pynvml.NVMLError:
        return None


def _handles() -> Iterator[Any]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(pynvml.nvmlDeviceGetCount())) if chosen is None else map(str.strip, chosen.split(","))
    for name in itertools.takewhile(lambda name: not name.startswith("-"), filter(None, names)):
        try:
            handle = _handle(name)
            if name.isdigit() and (first := _first_slice(handle)) is not None:
                # Of GPUs in MIG mode that are given by index, CUDA shows one instance, and no other GPU.
                yield first
                return
            yield handle
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            # As in CUDA, the first invalid entry ends the list.
            return


def _first_slice(handle: Any) -> Any:
    """Return the first MIG instance of a GPU; None if MIG is off."""
    try:
        is_mig = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if is_mig else None
    except pynvml.NVMLError:
        return None


def _handle(name: str) -> Any:
    """Return a GPU, as CUDA does, by position, UUID or unique prefix of it, or a MIG instance by UUID."""
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        matches = [handle for handle in handles if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(name)]
        if len(matches) != 1:
            raise
        return matches[0]


def cpu_info() -> dict[str, str]:
    """Return the fields of the first CPU in /proc/cpuinfo."""
    first = kernel_text(Path("/proc/cpuinfo")).partition("\n\n")[0]
    rows = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def operator_build_folder(cache: Path, stack: str = "") -> Path:
    """Return the build folder for this installation, stack, kind of CPU, and for visible GPUs or none.

    The compiler uses the CPU's instruction set, and DeepSpeed links CUDA if it finds a GPU; machines that share a cache
    may differ in both.
    """
    gpus = ["CUDA"] if visible_gpus() else []
    kind = [sys.prefix, platform.machine(), cpu_info().get("flags"), *gpus, *filter(None, [stack])]
    return cache / "operators" / hashlib.sha256(repr(kind).encode()).hexdigest()[:12]
