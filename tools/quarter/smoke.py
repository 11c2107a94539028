"""Check that a run can work on this machine: driver, collectives of one rank, imports. One line per check.

    python tools/quarter/smoke.py [--no_gpu]

Exit status 1 if a check fails that every later step needs. Rates of the host link and of memory are figures only.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

MODULES = ("accelerate", "transformers.modeling_utils", "datasets", "evaluate", "deepspeed", "study.cli")


class Smoke:
    """Checks that run one after another."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.faults: list[str] = []

    def check(self, name: str, function: Callable[[], str], is_needed: bool = True) -> None:
        """Run a check and print its result or its error; after a fault, needed checks are left out."""
        if self.faults and is_needed:
            return
        started = time.perf_counter()
        try:
            result = function()
        except Exception as error:
            result = f"FAILED: {type(error).__name__}: {error}"
            if is_needed:
                self.faults.append(name)
                traceback.print_exc()
        print(f"smoke {name:14} {time.perf_counter() - started:6.1f} s  {result}", flush=True)


def name_of_this_machine() -> str:
    """Return what the machine's name resolves to: a launch asks for it, and may hang without an answer."""
    name = socket.gethostname()
    return f"{name} is {socket.gethostbyname(name)}; cores: {os.cpu_count()}"


def import_torch() -> str:
    import torch

    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.get_num_threads()} threads"


def compute_on_device() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch.cuda.is_available() is False")
    gpu = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    if not torch.isfinite((matrix @ matrix).float().sum()).item():
        raise RuntimeError("a product of matrices is not finite")
    return f"{gpu.name}, {total / 2**30:.2f} GiB, {free / 2**30:.2f} free, sm_{gpu.major}{gpu.minor}"


def run_collectives(on_gpu: bool) -> str:
    """Run an all-reduce, a reduce-scatter and an all-gather in a group of one rank."""
    import torch
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    backend = "nccl" if on_gpu else "gloo"
    place = torch.device("cuda:0" if on_gpu else "cpu")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1, device_id=place if on_gpu else None)
    try:
        tensor = torch.arange(1024.0, device=place)
        expected = tensor.clone()
        dist.all_reduce(tensor)
        shard = torch.empty(1024, device=place)
        dist.reduce_scatter_tensor(shard, tensor)
        gathered = torch.empty(1024, device=place)
        dist.all_gather_into_tensor(gathered, shard)
        if not torch.equal(gathered, expected):
            raise RuntimeError("a collective of one rank changed its data")
    finally:
        dist.destroy_process_group()
    release = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else ""
    return f"{backend} {release}: one rank reduces, scatters and gathers"


def import_modules() -> str:
    found = []
    for name in MODULES:
        importlib.import_module(name)
        package = name.partition(".")[0]
        found.append(f"{package} {getattr(sys.modules[package], '__version__', '')}")
    return ", ".join(found)


def measure_link() -> str:
    """Copy 1 GiB between pinned host memory and the device, both ways."""
    import torch

    host = torch.empty(2**28, dtype=torch.float32, pin_memory=True).fill_(1)
    device = torch.empty(2**28, dtype=torch.float32, device="cuda")
    rates = []
    for source, target in ((host, device), (device, host)):
        best = 0.0
        for _ in range(3):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            best = max(best, 2**30 / start.elapsed_time(end) / 1e6)
        rates.append(best)
    return f"{rates[0]:.1f} GB/s to the device, {rates[1]:.1f} GB/s back (pinned)"


def measure_first_touch() -> str:
    """Touch 1 GiB of the host's memory, which a virtual machine may get only then."""
    started = time.perf_counter()
    block = mmap.mmap(-1, 2**30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    seconds = time.perf_counter() - started
    block.close()
    total_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{1 / seconds:.2f} GiB/s at the first touch on one core, of {total_gib:.1f} GiB"


def read_meters() -> str:
    """Read what the driver reports about the GPU; an answer that it does not have is its error."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    meters = {
        "MiB used": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20,
        "J": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
        "processes": lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        "MHz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    }
    readings = []
    for unit, read in meters.items():
        try:
            readings.append(f"{read():.0f} {unit}")
        except pynvml.NVMLError as error:
            readings.append(f"{unit}: {error}")
    return ", ".join(readings)


def main() -> int:
    """Run all checks; return 1 if a needed one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no_gpu", action="store_true", help="check the rest on a machine without a GPU")
    on_gpu = not parser.parse_args().no_gpu
    smoke = Smoke()
    smoke.check("name", name_of_this_machine, is_needed=False)
    smoke.check("torch", import_torch)
    if on_gpu:
        smoke.check("device", compute_on_device)
    smoke.check("collectives", lambda: run_collectives(on_gpu))
    smoke.check("imports", import_modules)
    smoke.check("memory", measure_first_touch, is_needed=False)
    if on_gpu and not smoke.faults:
        smoke.check("link", measure_link, is_needed=False)
        smoke.check("meters", read_meters, is_needed=False)
    verdict = f"FAILED: {', '.join(smoke.faults)}" if smoke.faults else "ok"
    print(f"smoke {verdict} after {time.perf_counter() - smoke.started:.0f} s", flush=True)
    return int(bool(smoke.faults))


if __name__ == "__main__":
    status = main()
    # The interpreter's teardown can abort in threads of NCCL.
    os._exit(status)
