"""The cgroups (version 1 and 2) that hold this process: their limits, and how often memory ran out in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class OomCounts:
    """The kernel's counters. Inside a cgroup both grow when a process is killed, whoever's memory ran out."""

    killed: int
    cgroup_limit_hit: int

    def __sub__(self, before: OomCounts) -> OomCounts:
        return OomCounts(self.killed - before.killed, self.cgroup_limit_hit - before.cgroup_limit_hit)


def memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes in all and bytes left, of this process's cgroup and of those above it."""
    for folder in _memory_cgroups(root):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            # "max" is no number, and without a limit version 1 shows a huge one.
            if total := _number(folder / limit):
                # The kernel drops cached files before it refuses memory.
                used = _number(folder / usage) - _counter(folder / "memory.stat", cache)
                yield total, max(0, total - used)


def oom_counts(root: Path = Path("/")) -> OomCounts:
    """Counters of this process's cgroup and of the host; 0 where the kernel keeps none."""
    killed = _counter(root / "proc/vmstat", "oom_kill")
    limit_hit = 0
    for folder in _memory_cgroups(root):
        killed += _counter(folder / "memory.events", "oom_kill") + _counter(folder / "memory.oom_control", "oom_kill")
        limit_hit += _counter(folder / "memory.events", "oom") + _number(folder / "memory.failcnt")
    return OomCounts(killed, limit_hit)


def _memory_cgroups(root: Path) -> Iterator[Path]:
    """Its own cgroup and those above it, as far as they can be seen."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")
        yield from (own, *(above for above in own.parents if above.is_relative_to(top)))


def _counter(file: Path, name: str) -> int:
    try:
        rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
