"""environment.json: versions, devices and commit of a run, without tokens, users and host names; devices' set-up."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
from typing import Any

from study.config.errors import Unsupported
from study.config.launch_context import Launch
from study.config.strategies import REPOSITORY, STRATEGY_DIRECTORY
from study.host.machine import cpu_info, driver_cuda, driver_version, visible_gpus
from study.host.memory import MALLOC_MMAP_THRESHOLD_MAX_BYTES, available_cores
from study.host.stacks import describe_stack, package_version, without_gc

# malloc.h's numbers for these.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 64 * 2**10


def prepare_devices(launch: Launch) -> int:
    """Give this rank its share of the CPU; return the number of visible GPUs."""
    # An engine's OpenMP library reads this once, when it is loaded; torch's is set below.
    os.environ["OMP_NUM_THREADS"] = "1"
    # NVML and nvidia-smi number the GPUs so; CUDA by itself begins with the fastest.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if launch.virtual:
        # It copies its shard into N places where a real rank receives: threads that spin between two small copies would
        # cost most of the time, and more where the cores are shared.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with without_gc():
        import torch

    check_torch_supports_gpus()
    gpus = torch.cuda.device_count()
    # Without a GPU a core is a device, so that N ranks have N times the machine of one. With GPUs cores are divided:
    # launchers set 1, which would starve an optimizer on the host. A virtual rank has the machine to itself.
    threads = max(1, available_cores() // launch.local_world_size) if gpus or launch.virtual else 1
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if not gpus:
        # There host memory is device memory, and its allocator part of every step.
        if launch.virtual:
            set_low_mmap_threshold()
        else:
            _keep_freed_memory()
    return gpus


def check_torch_supports_gpus() -> None:
    """Refuse GPUs that the driver shows and this torch cannot use: torch counts them, and every run would fail."""
    import torch

    gpus = len(visible_gpus())
    if not gpus or torch.cuda.is_available():
        return
    built, runs = torch.version.cuda, driver_cuda() or "of an unknown version"
    problem = (
        f"{gpus} GPU{'s'[: gpus > 1]} are here and torch {torch.__version__} can use none: it is built for"
        f" {f'CUDA {built}' if built else 'no CUDA'}, and the driver {driver_version()} runs CUDA {runs}"
    )
    raise Unsupported(
        problem, f"{torch_for_driver(runs, torch.__version__)}; or let CUDA_VISIBLE_DEVICES be empty, to train on cores"
    )


def torch_for_driver(runs: str, version: str) -> str:
    """Return how to get a torch for the driver's major version of CUDA, or an older one."""
    release = version.partition("+")[0]
    if runs.startswith("12."):
        # Every driver of CUDA 12 runs every build of it, and this one exists for the newest torch, too.
        index = "https://download.pytorch.org/whl/cu129"
        return f"python -m pip install -c constraints.txt torch=={release}+cu129 --extra-index-url {index}"
    if runs.startswith(("10.", "11.")):
        return "update the driver: every torch that this study runs on needs one of CUDA 12 or newer"
    return f"python -m pip install --force-reinstall torch=={release}"


@functools.cache
def set_low_mmap_threshold() -> None:
    """Return freed blocks under 32 MiB to the system, so that a peak is what a rank had at once."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one.

    By default it returns large blocks and gets them anew, page by page, at every step. How often depends on the
    addresses of a process, so two equal runs would differ by percents.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, MALLOC_MMAP_THRESHOLD_MAX_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


PACKAGES = (
    "zero-study", "torch", "deepspeed", "accelerate", "transformers", "datasets", "evaluate", "tokenizers",
    "peft", "safetensors", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
# Rooms of the package that no run imports.
_NOT_RUN = ("advisor", "autopsy", "claims", "cli.py", "releases", "report", "sweep", "virtual")


def describe_environment() -> dict[str, Any]:
    import psutil
    import torch

    return {
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := package_version(name)) is not None},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "code_sha256": code_sha256(),
        "platform": platform.platform(),
        "cpu": cpu_info().get("model name") or platform.processor(),
        "cpu_cores": available_cores(),
        "threads_per_rank": torch.get_num_threads(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 2),
        "devices": [
            {
                "name": torch.cuda.get_device_name(index),
                "memory_gib": round(torch.cuda.get_device_properties(index).total_memory / 2**30, 2),
            }
            for index in range(torch.cuda.device_count())
        ],
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "stack": describe_stack(),
    }


def code_sha256() -> str:
    """Digest of the code that decides how a run trains and is measured: of the rooms that a run imports."""
    digest = hashlib.sha256()
    for file in sorted((REPOSITORY / "study").rglob("*.py")) + sorted(STRATEGY_DIRECTORY.rglob("*.*")):
        place = file.relative_to(REPOSITORY)
        if place.parts[1] not in _NOT_RUN:
            digest.update(f"{place} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
