"""Causes of other gradients than DDP's, by release, as causes.yaml has them.

Each entry says which releases have it, under which strategies, and whether it needs several micro-batches per step.
`blame` says whose it is: the engine's, or a pairing's of releases that were not made for each other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from study.config.flags import Precision
from study.config.strategies import STRATEGY_NAMES
from study.config.yaml_sections import Section, as_section, read_document

FILE = Path(__file__).with_name("causes.yaml")
_MOST = 5_000
Blame = Literal["engine", "pairing"]
Differs = Literal["weights", "gradient", "scale", "clipping", "update", "norm", "loss", "crash", "refuses"]
# A run that ends so trains nothing.
_NO_TRAINING = frozenset({"crash", "refuses"})
# A cause depends on their releases.
PACKAGES = ("deepspeed", "accelerate", "torch", "transformers")
_NEEDED = ("id", "title", "blame", "strategies", "deepspeed", "says", "gpu", "gpu_why")
_CHOICES: dict[str, tuple[str, ...]] = {
    "blame": get_args(Blame), "accumulation": ("any", "several"), "gpu": ("shows", "hidden", "unknown"),
    "strategies": STRATEGY_NAMES, "precisions": get_args(Precision), "differs": get_args(Differs),
}  # fmt: skip
_LISTS = ("strategies", "precisions", "differs")


@dataclasses.dataclass(frozen=True)
class Change:
    release: str = ""
    change: str = ""


@dataclasses.dataclass(frozen=True)
class SourceLines:
    package: str
    release: str
    file: str
    lines: str
    says: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    id: str
    title: str
    blame: Blame
    strategies: tuple[str, ...]
    says: str
    # By package, the releases that have it, as a PEP 440 specifier; a package that is left out may be any.
    releases: Mapping[str, str]
    gpu: Literal["shows", "hidden", "unknown"]
    gpu_why: str
    accumulation: Literal["any", "several"] = "any"
    precisions: tuple[str, ...] = ()
    # What a verdict may find different; empty: anything.
    differs: tuple[Differs, ...] = ()
    # A race, which one run may miss.
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
        """Whether this stack has it. A build's own mark, such as +cu129, is not another release."""
        from packaging.specifiers import SpecifierSet

        return all(
            (version := versions.get(package)) and SpecifierSet(wanted).contains(version, prereleases=True)
            for package, wanted in self.releases.items()
        )

    def shows_in(self, strategy: str, micro_steps: int, precision: str) -> bool:
        return (
            strategy in self.strategies
            and (self.accumulation == "any" or micro_steps > 1)
            and (not self.precisions or precision in self.precisions)
        )


def causes_of(
    versions: Mapping[str, str | None], strategy: str, micro_steps: int, precision: str, differs: str | None
) -> tuple[Cause, ...]:
    """Return the causes of a run that `differs` so; one that crashes or refuses needs causes that say so."""
    return tuple(
        each
        for each in read_causes()
        if differs
        and each.is_in(versions)
        and each.shows_in(strategy, micro_steps, precision)
        and (differs in each.differs if each.differs else differs not in _NO_TRAINING)
    )


def races_of(
    versions: Mapping[str, str | None], strategy: str, micro_steps: int, precision: str, on_gpu: bool
) -> tuple[Cause, ...]:
    """Return the causes that one run may miss, so that an equal one proves nothing."""
    return tuple(
        each for each in known_faults(versions, on_gpu)
        if each.sometimes and each.shows_in(strategy, micro_steps, precision)
    )  # fmt: skip


def known_faults(versions: Mapping[str, str | None], on_gpu: bool) -> list[Cause]:
    """Return the causes that a stack has on such a box."""
    return [each for each in read_causes() if each.is_in(versions) and not (on_gpu and each.gpu == "hidden")]


@functools.cache
def read_causes(file: Path | None = None) -> tuple[Cause, ...]:
    file = file or FILE
    top = as_section(read_document(file, Section, _MOST), str(file), {"causes"}, Section)
    return tuple(_cause(entry, top.place_of("causes")) for entry in top["causes"])


def _cause(entry: Any, place: str) -> Cause:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    keys = {field.name for field in dataclasses.fields(Cause)} - {"releases"} | set(PACKAGES)
    section = as_section(entry, place, keys, Section)
    section.need(*_NEEDED)
    for key in PACKAGES:
        try:
            SpecifierSet(section.get(key, ""))
        except (InvalidSpecifier, TypeError, AttributeError):
            raise section.refusal(key, f"is {section[key]!r}", 'use releases such as ">=0.18.3,<0.19.4"') from None
    values: dict[str, Any] = {key: value for key, value in section.items() if key not in PACKAGES}
    for key, choices in _CHOICES.items():
        given = section.get(key, ())
        named = (given,) if isinstance(given, str) else tuple(given)
        if unknown := set(named) - set(choices):
            raise section.refusal(key, f"names {unknown.pop()!r}", f"use {', '.join(choices)}")
        if key in _LISTS:
            values[key] = named
    values["threads"] = tuple(section.get("threads", ()))
    for key in ("entered", "left"):
        values[key] = Change(**as_section(section.get(key, Section("")), place, {"release", "change"}, Section))
    fields = {field.name for field in dataclasses.fields(SourceLines)}
    lines = [as_section(each, section.place_of("lines"), fields, Section) for each in section.get("lines", ())]
    values["lines"] = tuple(SourceLines(**each) for each in lines)
    return Cause(**values, releases={package: section[package] for package in PACKAGES if package in section})
