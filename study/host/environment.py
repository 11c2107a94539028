"""environment.json: on what a run ran. Versions, devices, the commit; never a token, a user or a host name."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from typing import Any

from study.host.box import driver_version
from study.host.cgroups import available_cores
from study.host.devices import processor
from study.host.releases import package_version
from study.host.stacks import describe_stack
from study.spec.strategies import REPOSITORY, STRATEGY_DIRECTORY

PACKAGES = (
    "zero-study", "torch", "deepspeed", "accelerate", "transformers", "datasets", "evaluate", "tokenizers",
    "peft", "safetensors", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
# Rooms of the package in which nothing of a run happens.
_NOT_RUN = ("report", "sweep", "suites", "doctor", "claims", "autopsy", "releases", "validation", "cli.py")


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
        "cpu": processor().get("model name") or platform.processor(),
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
    """Of what decides how a run trains and is measured: two commits that differ in a report alone are one code."""
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
