"""Causes of a wrong training by release, as causes.yaml tells them: read strictly, and found for a stack.

Each entry says which releases have it, under which strategies, and whether it takes more than one micro-step. Whose it
is, it says as `blame`: the engine's, or a pairing's of releases that were not made for each other.
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
# What is seen at once.
_NO_TRAINING = frozenset({"crash", "refuses"})
# What a release of it decides.
PACKAGES = ("deepspeed", "accelerate", "torch", "transformers")
_NEEDED = ("id", "title", "blame", "strategies", "deepspeed", "says", "gpu", "gpu_why")
_CHOICES: dict[str, tuple[str, ...]] = {
    "blame": get_args(Blame), "accumulation": ("any", "several"),
    "gpu": ("shows", "hidden", "unknown"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Change:
    release: str = ""
    change: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
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
    # What a verdict may call it; without any, whatever differs.
    differs: tuple[Differs, ...] = ()
    # Of a race, which one run may miss.
    sometimes: bool = False
    lines: tuple[Line, ...] = ()
    entered: Change = Change()
    left: Change = Change()
    threads: tuple[str, ...] = ()
    proof: str = ""
    instead: str = ""

    @property
    def where(self) -> str:
        return (
            f"{', '.join(self.strategies)}{', where steps are accumulated' if self.accumulation == 'several' else ''}"
        )

    def is_in(self, versions: Mapping[str, str | None]) -> bool:
        """Whether this stack has it. A build's own mark, such as +cu129, is no other release."""
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
    """Every entry that tells of a cell that `differs` so; of one that crashes or refuses, those that say so."""
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
    """What one run may miss, so that an equal one is no proof."""
    return tuple(
        each for each in known_faults(versions, on_gpu)
        if each.sometimes and each.shows_in(strategy, micro_steps, precision)
    )  # fmt: skip


@functools.cache
def read_causes(file: Path | None = None) -> tuple[Cause, ...]:
    file = file or FILE
    if not file.exists():
        return ()
    top = as_section(read_document(file, Section, _MOST), str(file), {"causes"}, Section)
    top.need("causes")
    causes = tuple(_cause(entry, top) for entry in top["causes"] or ())
    if len({cause.id for cause in causes}) < len(causes):
        raise top.refusal("causes", "has an id twice", "give each entry an id of its own")
    return causes


def _cause(entry: Any, top: Section) -> Cause:
    keys = {field.name for field in dataclasses.fields(Cause)} - {"releases"} | set(PACKAGES)
    section = as_section(entry, top.place_of("causes"), keys, Section)
    section.need(*_NEEDED)
    for key, choices in _CHOICES.items():
        if section.get(key, choices[0]) not in choices:
            raise section.refusal(key, f"is {section[key]!r}", f"use one of {', '.join(choices)}")
    lists = {"strategies": STRATEGY_NAMES, "precisions": get_args(Precision), "differs": get_args(Differs)}
    for key, known in lists.items():
        if isinstance(section.get(key, []), str):
            section[key] = [section[key]]
        if unknown := set(section.get(key, ())) - set(known):
            raise section.refusal(key, f"names {unknown.pop()!r}", f"use {', '.join(known)}")
    values: dict[str, Any] = {key: value for key, value in section.items() if key not in PACKAGES}
    values |= {key: tuple(values[key]) for key in (*lists, "threads") if key in values}
    for key in ("entered", "left"):
        if key in values:
            values[key] = Change(**as_section(values[key], section.place_of(key), {"release", "change"}, Section))
    fields = {field.name for field in dataclasses.fields(Line)}
    lines = [as_section(each, section.place_of("lines"), fields, Section) for each in values.pop("lines", ())]
    return Cause(
        **values, lines=tuple(Line(**line) for line in lines), releases=_releases(section),
    )  # fmt: skip


def _releases(section: Section) -> dict[str, str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    found = {package: section[package] for package in PACKAGES if package in section}
    for package, wanted in found.items():
        try:
            SpecifierSet(wanted)
        except (InvalidSpecifier, TypeError, AttributeError):
            raise section.refusal(package, f"is {wanted!r}", 'use releases such as ">=0.18.3,<0.19.4"') from None
    return found


def known_faults(versions: Mapping[str, str | None], on_gpu: bool) -> list[Cause]:
    """What a stack has on such a box."""
    return [each for each in read_causes() if each.is_in(versions) and not (on_gpu and each.gpu == "hidden")]
