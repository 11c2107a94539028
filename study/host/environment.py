"""Set up a run's devices, and describe its environment (environment.json) without tokens, users and host names."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from study.config import errors, launch_context, places, strategies
from study.host import machine, memory, stacks

# Constants of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 64 * 2**10
# Compute capability of the first GPUs that torch's builds for CUDA 12.8 and newer have code for (T4, RTX 20).
_TURING = (7, 5)


def prepare_devices(launch: launch_context.Launch) -> int:
    """Set this rank's number of threads and its allocator; return the number of visible GPUs."""
    # The OpenMP library of an engine reads this once, when it is loaded; torch's is set below.
    os.environ["OMP_NUM_THREADS"] = "1"
    # The order of NVML and nvidia-smi; by default CUDA begins with the fastest GPU.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if launch.virtual:
        # A virtual rank copies its shard N times instead of receiving: threads that spin between two small copies would
        # take most of the time, and more on shared cores.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with stacks.without_gc():
        import torch

    check_torch_supports_gpus()
    gpus = torch.cuda.device_count()
    # Without a GPU a core is a device, so that N ranks have N times the compute of one. With GPUs the cores are divided
    # among ranks: launchers set 1, too few for an optimizer on the host. A virtual rank uses all cores.
    threads = max(1, memory.available_cores() // launch.local_world_size) if gpus or launch.virtual else 1
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if not gpus:
        # Without a GPU host memory is device memory, and its allocator affects every step.
        if launch.virtual:
            set_low_mmap_threshold()
        else:
            _keep_freed_memory()
    return gpus


def check_torch_supports_gpus() -> None:
    """Raise Unsupported if the driver shows GPUs that this torch cannot use: with them every run would fail."""
    import torch

    gpus = len(machine.visible_gpus())
    if not gpus or torch.cuda.is_available():
        return
    built, runs = torch.version.cuda, machine.driver_cuda() or "of an unknown version"
    problem = (
        f"{gpus} GPU{'s'[: gpus > 1]} are visible, but torch {torch.__version__} can use none: it is built for"
        f" {f'CUDA {built}' if built else 'no CUDA'}, and the driver {machine.driver_version()} supports CUDA {runs}"
    )
    install = torch_for_driver(runs, torch.__version__, machine.oldest_capability())
    fix = f"{install}; or set an empty CUDA_VISIBLE_DEVICES, to train on CPU cores"
    raise errors.Unsupported(problem, fix)


def torch_for_driver(runs: str, version: str, capability: tuple[int, int] | None = None) -> str:
    """Return the command that installs a torch for the driver's major version of CUDA and the oldest GPU, or the advice
    to update the driver."""
    release = version.partition("+")[0]
    is_old = capability is not None and capability < _TURING
    if runs.startswith("12.") or (is_old and runs.startswith("13.")):
        # Drivers of CUDA 12 support all of its builds. cu129 exists up to torch 2.13 (issue 187834 of pytorch/pytorch),
        # and of 2.11 to 2.14 cu126 alone has code for GPUs before Turing (issue 190385).
        build = "cu126" if is_old else "cu129"
        index = f"https://download.pytorch.org/whl/{build}"
        return f"python -m pip install -c constraints.txt torch=={release}+{build} --extra-index-url {index}"
    if runs.startswith(("10.", "11.")):
        return "update the driver: every torch that this study runs on needs one of CUDA 12 or newer"
    return f"python -m pip install --force-reinstall torch=={release}"


@functools.cache
def set_low_mmap_threshold() -> None:
    """Make the C library return freed blocks of 64 KiB or more, so that peak memory has no cached blocks."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _keep_freed_memory() -> None:
    """Make the C library cache freed memory for the next step.

    By default it returns large blocks and allocates them page by page at every step. How often depends on the addresses
    of a process, so two equal runs would differ by percents.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, memory.MALLOC_MMAP_THRESHOLD_MAX_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


PACKAGES = (
    "zero-study",
    "torch",
    "deepspeed",
    "accelerate",
    "transformers",
    "datasets",
    "evaluate",
    "tokenizers",
    "peft",
    "psutil",
    "safetensors",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
# Names a file with the commit of a copy without .git, and the output of `git status --porcelain` below it.
COMMIT_VARIABLE = "ZERO_STUDY_COMMIT"
# Subpackages that no run imports.
_NOT_RUN = (
    "__main__.py",
    "advisor",
    "benchmark",
    "claims",
    "cli.py",
    "compositions",
    "costs",
    "receipt",
    "releases",
    "report",
    "sweep",
    "virtual",
)


def describe_environment() -> dict[str, Any]:
    """Return the content of environment.json."""
    import psutil
    import torch

    commit, has_changes = commit_of_checkout()
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := stacks.package_version(name)) is not None},
        "git_commit": commit,
        "git_dirty": has_changes,
        "code_sha256": code_sha256(),
        "platform": platform.platform(),
        "cpu": machine.cpu_info().get("model name") or platform.processor(),
        "cpu_cores": memory.available_cores(),
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
        "driver": machine.driver_version(),
        "stack": stacks.describe_stack(),
    }


def commit_of_checkout() -> tuple[str | None, bool]:
    """Return the commit, from git or from the file that COMMIT_VARIABLE names, and whether files differ from it."""
    commit = _git("rev-parse", "HEAD")
    if commit is not None:
        return commit, bool(_git("status", "--porcelain", "--untracked-files=no"))
    file = os.environ.get(COMMIT_VARIABLE)
    if not file:
        return None, False
    fix = "write the output of `git rev-parse HEAD` into its first line, or unset the variable"
    try:
        first, *changes = Path(file).read_text(encoding="utf-8").splitlines() or [""]
    except (OSError, UnicodeError):
        raise errors.UserError(f"{COMMIT_VARIABLE} is {file!r}, which cannot be read", fix) from None
    if not re.fullmatch("[0-9a-f]{40}", first):
        raise errors.UserError(f"{COMMIT_VARIABLE} is {file!r}, whose first line is {first[:50]!r}, not a commit", fix)
    return first, any(line.strip() for line in changes)


def code_sha256() -> str:
    """Return the digest of the code that trains and measures a run: of the subpackages that it imports."""
    digest = hashlib.sha256()
    files = [(file, places.IMPORT_ROOT) for file in sorted(places.PACKAGE.rglob("*.py"))]
    files += [(file, places.REPOSITORY) for file in sorted(strategies.STRATEGY_DIRECTORY.rglob("*.*"))]
    for file, root in files:
        place = file.relative_to(root)
        if place.parts[1] not in _NOT_RUN:
            digest.update(f"{place} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _git(*arguments: str) -> str | None:
    if not places.IS_CHECKOUT:
        # An environment may be in a repository of the user's own.
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(places.REPOSITORY), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
