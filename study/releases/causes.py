"""Known causes of divergence from DDP by release, read from causes.yaml.

Each entry lists the affected releases and strategies, and whether the cause needs several micro-batches per step.
`blame` is the engine, or the pairing of releases that were not made for each other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from study.config.flags import Optimizer, Precision
from study.config.strategies import STRATEGY_NAMES
from study.config.yaml_sections import Section, as_section, read_document

FILE = Path(__file__).with_name("causes.yaml")
# The tested releases, and the letter of each fault in them.
GRID = FILE.with_name("grid.json")
Blame = Literal["engine", "pairing"]
Differs = Literal["weights", "gradient", "scale", "clipping", "update", "norm", "loss", "crash", "refuses"]
# Outcomes without any training step.
_NO_TRAINING = frozenset({"crash", "refuses"})
# Packages whose releases a cause depends on.
PACKAGES = ("deepspeed", "accelerate", "torch", "transformers")
_NEEDED = ("id", "title", "blame", "strategies", "deepspeed", "says", "gpu", "gpu_why")
_CHOICES: dict[str, tuple[str, ...]] = {
    "blame": get_args(Blame), "accumulation": ("any", "several"), "gpu": ("shows", "hidden", "unknown"),
    "strategies": STRATEGY_NAMES, "precisions": get_args(Precision), "differs": get_args(Differs),
    "optimizer": get_args(Optimizer),
}  # fmt: skip
_LISTS = ("strategies", "precisions", "differs")


@dataclasses.dataclass(frozen=True)
class Change:
    """Release that introduced or fixed a cause, and the link to the change."""

    release: str = ""
    change: str = ""


@dataclasses.dataclass(frozen=True)
class SourceLines:
    """Source lines of a package that show a cause."""

    package: str
    release: str
    file: str
    lines: str
    says: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    """One entry of causes.yaml."""

    id: str
    title: str
    blame: Blame
    strategies: tuple[str, ...]
    says: str
    # Affected releases by package, as PEP 440 specifiers; a missing package matches any release.
    releases: Mapping[str, str]
    gpu: Literal["shows", "hidden", "unknown"]
    gpu_why: str
    accumulation: Literal["any", "several"] = "any"
    precisions: tuple[str, ...] = ()
    # muon: a fault of Muon's update alone, which no run with AdamW has.
    optimizer: Optimizer = "adamw"
    # Verdicts that this cause explains; empty: all.
    differs: tuple[Differs, ...] = ()
    # A race condition, which a single run may not show.
    sometimes: bool = False
    lines: tuple[SourceLines, ...] = ()
    entered: Change = Change()
    left: Change = Change()
    threads: tuple[str, ...] = ()
    proof: str = ""
    instead: str = ""

    @property
    def where(self) -> str:
        return ", ".join(self.strategies) + ", with accumulation" * (self.accumulation == "several")

    def is_in(self, versions: Mapping[str, str | None]) -> bool:
        """Whether this stack is affected. A local version label, such as +cu129, does not change the release."""
        from packaging.specifiers import SpecifierSet

        return all(
            (version := versions.get(package)) and SpecifierSet(specifier).contains(version, prereleases=True)
            for package, specifier in self.releases.items()
        )

    def shows_in(self, strategy: str, micro_steps: int, precision: str) -> bool:
        return (
            strategy in self.strategies
            and (self.accumulation == "any" or micro_steps > 1)
            and (not self.precisions or precision in self.precisions)
        )


def find_causes(
    versions: Mapping[str, str | None], strategy: str, micro_steps: int, precision: str, differs: str | None,
    optimizer: str = "adamw",
) -> tuple[Cause, ...]:  # fmt: skip
    """Return the known causes of a run's divergence; for a crash or a refusal only causes that list it in `differs`.

    The causes of AdamW's runs change gradients, of which Muon's update keeps the direction alone. With Muon only those
    apply that precede the update.
    """
    return tuple(
        cause
        for cause in read_causes()
        if differs
        and (cause.optimizer == optimizer or (cause.optimizer == "adamw" and differs in ("weights", "crash")))
        and cause.is_in(versions)
        and cause.shows_in(strategy, micro_steps, precision)
        and (differs in cause.differs if cause.differs else differs not in _NO_TRAINING)
    )


def find_races(
    versions: Mapping[str, str | None], strategy: str, micro_steps: int, precision: str, on_gpu: bool
) -> tuple[Cause, ...]:
    """Return the race conditions that affect a run, so that an equal result proves nothing."""
    return tuple(
        cause for cause in known_faults(versions, on_gpu)
        if cause.sometimes and cause.shows_in(strategy, micro_steps, precision)
    )  # fmt: skip


def known_faults(versions: Mapping[str, str | None], on_gpu: bool) -> list[Cause]:
    """Return the causes that affect a stack with AdamW, without those that a GPU hides if `on_gpu`."""
    return [
        cause for cause in read_causes()
        if cause.optimizer == "adamw" and cause.is_in(versions) and not (on_gpu and cause.gpu == "hidden")
    ]  # fmt: skip


def least_sound_release(strategy: str, micro_steps: int, precision: str) -> str:
    """Return the release of DeepSpeed that fixed the last known fault of a run with AdamW on GPUs; empty if none is."""
    from packaging.version import Version

    fixed = [
        cause.left.release for cause in read_causes()
        if cause.optimizer == "adamw" and cause.gpu != "hidden" and cause.shows_in(strategy, micro_steps, precision)
        and cause.left.release[:1].isdigit() and not (cause.differs and set(cause.differs) <= _NO_TRAINING)
    ]  # fmt: skip
    return max(fixed, key=Version, default="")


@functools.cache
def read_causes(file: Path | None = None) -> tuple[Cause, ...]:
    """Read and check causes.yaml; raises UserError with the line of an invalid entry."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    file = file or FILE
    top = as_section(read_document(file, Section), str(file), {"causes"}, Section)
    place, causes = top.key_place("causes"), list[Cause]()
    for entry in top["causes"]:
        keys = {field.name for field in dataclasses.fields(Cause)} - {"releases"} | set(PACKAGES)
        section = as_section(entry, place, keys, Section)
        section.require_keys(*_NEEDED)
        for key in PACKAGES:
            try:
                SpecifierSet(section.get(key, ""))
            except (InvalidSpecifier, TypeError, AttributeError):
                raise section.refusal(key, f"is {section[key]!r}", 'use releases such as ">=0.18.3,<0.19.4"') from None
        values: dict[str, Any] = {key: value for key, value in section.items() if key not in PACKAGES}
        for key, choices in _CHOICES.items():
            setting = section.get(key, ())
            names = (setting,) if isinstance(setting, str) else tuple(setting)
            if unknown := set(names) - set(choices):
                raise section.refusal(key, f"names {unknown.pop()!r}", f"use {', '.join(choices)}")
            if key in _LISTS:
                values[key] = names
        values["threads"] = tuple(section.get("threads", ()))
        for key in ("entered", "left"):
            values[key] = Change(**as_section(section.get(key, Section("")), place, {"release", "change"}, Section))
        fields = {field.name for field in dataclasses.fields(SourceLines)}
        lines = [as_section(line, section.key_place("lines"), fields, Section) for line in section.get("lines", ())]
        values["lines"] = tuple(SourceLines(**line) for line in lines)
        releases = {package: section[package] for package in PACKAGES if package in section}
        causes.append(Cause(**values, releases=releases))
    return tuple(causes)
