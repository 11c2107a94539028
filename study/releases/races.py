"""Race conditions of DeepSpeed's releases that only GPUs have, read from races.yaml, whose head explains its keys."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path

from study.config.yaml_sections import load_package_yaml
from study.releases.causes import Change

FILE = Path(__file__).with_name("races.yaml")
_PACKAGES = ("deepspeed", "torch")


@dataclasses.dataclass(frozen=True)
class GpuRace:
    """One entry of races.yaml."""

    id: str
    title: str
    strategies: tuple[str, ...]
    # Affected releases by package, as PEP 440 specifiers.
    releases: Mapping[str, str]
    fix: Change
    condition: str = ""
    threads: tuple[str, ...] = ()

    def is_in(self, versions: Mapping[str, str | None]) -> bool:
        """Whether this stack is affected; a package of unknown release is."""
        from packaging.specifiers import SpecifierSet

        return all(
            (version := versions.get(package)) is None or SpecifierSet(specifier).contains(version, prereleases=True)
            for package, specifier in self.releases.items()
        )

    @property
    def line(self) -> str:
        """The race as one line, with its condition and the change that fixed it."""
        change = re.sub(r"https://github.com/([^/]+/[^/]+)/pull/(\d+)", r"\1#\2", self.fix.change)
        needs = f" and {self.condition}" * bool(self.condition)
        torch = f"torch {self.releases['torch']}; " if "torch" in self.releases else ""
        return (
            f"on GPUs, by the source: with overlap_comm{needs} {self.title}, which may give NaN"
            f" ({torch}fixed in {self.fix.release} by {change})"
        )


@functools.cache
def read_races() -> tuple[GpuRace, ...]:
    """Return the entries of races.yaml."""
    return tuple(
        GpuRace(
            id=row["id"],
            title=row["title"],
            strategies=tuple(row["strategies"]),
            releases={name: row[name] for name in _PACKAGES if name in row},
            fix=Change(**row["fix"]),
            condition=row.get("with", ""),
            threads=tuple(row.get("threads", ())),
        )
        for row in load_package_yaml(FILE.read_text(encoding="utf-8"))["races"]
    )


def gpu_races(versions: Mapping[str, str | None], strategy: str | None) -> list[GpuRace]:
    """Return the races of a stack under a strategy, or under any."""
    return [race for race in read_races() if race.is_in(versions) and strategy in (None, *race.strategies)]
