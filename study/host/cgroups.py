"""What Linux lets this process have: the files of its control group (version 1 or 2), and of those above that one."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Its own cgroup of this controller and those above it, as far as they can be seen. `root` has `proc` and `sys`."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = top / path.lstrip("/")
        yield from (own, *(above for above in own.parents if above.is_relative_to(top)))


def allowed_cores(root: Path) -> float:
    """How many cores' worth of time the tightest of them gives; infinite without a limit."""
    shares = [float("inf")]
    for folder in cgroups(root, "cpu"):
        quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # version 1, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
        # Version 1 says -1 where there is no limit.
        if quota > 0 and period > 0:
            shares.append(quota / period)
    return min(shares)


def available_cores(root: Path = Path("/")) -> int:
    """Those that this process may run on, or as many as its container's share of time is worth.

    More threads than that are stopped together for the rest of each period. `root` is where `proc` and `sys` are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, allowed_cores(root))))


def counter(file: Path, name: str) -> int:
    try:
        rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


def number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
