"""Known causes of divergence from DDP by release, read from causes.yaml, whose head explains their keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from study.config.flags import Optimizer
from study.config.yaml_sections import load_package_yaml

if TYPE_CHECKING:
    from packaging.version import Version

FILE = Path(__file__).with_name("causes.yaml")
# The tested releases, and the letter of each fault in them.
GRID = FILE.with_name("grid.json")
Blame = Literal["engine", "pairing"]
Differs = Literal["weights", "gradient", "scale", "clipping", "update", "norm", "loss", "crash", "refuses"]
# Loops that call an engine: that of Accelerate's guide (accumulate, backward), transformers' Trainer, and that of
# DeepSpeed's guide (forward, backward, step).
Loop = Literal["accelerate", "trainer", "engine"]
LOOPS: dict[Loop, str] = {
    "accelerate": "Accelerate's loop",
    "engine": "DeepSpeed's own loop",
    "trainer": "transformers' Trainer",
}
# Outcomes without any training step.
_NO_TRAINING = frozenset({"crash", "refuses"})
# Packages whose releases a cause depends on.
PACKAGES = ("deepspeed", "accelerate", "torch", "transformers")


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


def _is_older(version: str, release: str) -> bool:
    """Whether a version is older than a release."""
    from packaging.version import Version

    return Version(version) < Version(release)


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
    # Loops that have it in all affected releases.
    loops: tuple[Loop, ...] = tuple(LOOPS)
    # Releases by package: the Trainer has it if any package is older.
    trainer_before: Mapping[str, str] = dataclasses.field(default_factory=dict)
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
    def ends_training(self) -> bool:
        """Whether it ends a run with an error, and changes no gradient."""
        return bool(self.differs) and set(self.differs) <= _NO_TRAINING

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

    def is_in_loop(self, loop: Loop, versions: Mapping[str, str | None]) -> bool:
        """Whether a loop with these releases has it; an unknown release is taken as a newer one."""
        return loop in self.loops or any(
            loop == "trainer" and (version := versions.get(package)) and _is_older(version, release)
            for package, release in self.trainer_before.items()
        )

    def loop_words(self, versions: Mapping[str, str | None]) -> str:
        """Return the loops that have it with these releases, such as "in A's loop, not in B"; empty for all."""
        having = [name for loop, name in LOOPS.items() if self.is_in_loop(loop, versions)]
        if len(having) == len(LOOPS):
            return ""
        lacking = [name for name in LOOPS.values() if name not in having]
        return f"in {' and '.join(having)}, not in {' or '.join(lacking)}"

    @property
    def loops_text(self) -> str:
        """The loops that have it, and the releases up to which the Trainer has; empty for all loops."""
        if len(self.loops) == len(LOOPS):
            return ""
        older = " or ".join(f"{package} {release}" for package, release in self.trainer_before.items())
        return f"in {' and '.join(LOOPS[loop] for loop in self.loops)}; in {LOOPS['trainer']} only before {older}"

    def shows_in(self, strategy: str, micro_steps: int, precision: str) -> bool:
        return (
            strategy in self.strategies
            and (self.accumulation == "any" or micro_steps > 1)
            and (not self.precisions or precision in self.precisions)
        )


def find_causes(
    versions: Mapping[str, str | None],
    strategy: str,
    micro_steps: int,
    precision: str,
    differs: str | None,
    optimizer: str = "adamw",
) -> tuple[Cause, ...]:
    """Return the known causes of a run's divergence; for a crash or a refusal only causes that list it in `differs`.

    The causes of AdamW's runs change gradients, of which Muon's update keeps the direction alone. With Muon only those
    apply that precede the update.
    """
    return tuple(
        cause
        for cause in read_causes()
        if differs
        and (cause.optimizer == optimizer or (cause.optimizer == "adamw" and differs in ("weights", "crash")))
        and cause.shows_in(strategy, micro_steps, precision)
        and cause.is_in(versions)
        and (differs in cause.differs if cause.differs else differs not in _NO_TRAINING)
    )


def find_races(
    versions: Mapping[str, str | None], strategy: str, micro_steps: int, precision: str, on_gpu: bool
) -> tuple[Cause, ...]:
    """Return the race conditions that affect a run, so that an equal result proves nothing."""
    return tuple(
        cause
        for cause in known_faults(versions, on_gpu)
        if cause.sometimes and cause.shows_in(strategy, micro_steps, precision)
    )


def known_faults(versions: Mapping[str, str | None], on_gpu: bool, optimizer: str = "adamw") -> list[Cause]:
    """Return the causes that affect a stack, without those that a GPU hides if `on_gpu`; with Muon also its own."""
    return [
        cause
        for cause in read_causes()
        if cause.optimizer in ("adamw", optimizer) and cause.is_in(versions) and not (on_gpu and cause.gpu == "hidden")
    ]


def least_sound_release(strategy: str, micro_steps: int, precision: str, loop: Loop = "accelerate") -> str:
    """Return the release of DeepSpeed that fixed the last known fault of a run with AdamW on GPUs; empty if none is."""
    spans = _unsound_spans(strategy, micro_steps, precision, loop)
    return str(spans[-1][1]) if spans else ""


@functools.cache
def unsound_releases(strategy: str, micro_steps: int, precision: str, loop: Loop = "accelerate") -> str:
    """Return the releases with a known fault of a run with AdamW on GPUs, such as "0.17.6 to before 0.19.6"."""
    spans = _unsound_spans(strategy, micro_steps, precision, loop)
    return " and ".join(f"{entered} to before {fixed}" for entered, fixed in spans)


def _unsound_spans(strategy: str, micro_steps: int, precision: str, loop: Loop) -> list[tuple[Version, Version]]:
    """Return the release that introduced a fault and the one that fixed it, of faults that overlap the outer ones."""
    from packaging.version import Version

    faults = sorted(
        (Version(cause.entered.release), Version(gone))
        for cause in read_causes()
        if (gone := _fixed_in(cause, loop))
        and cause.optimizer == "adamw"
        and cause.gpu != "hidden"
        and cause.shows_in(strategy, micro_steps, precision)
        and not cause.ends_training
    )
    spans = list[tuple[Version, Version]]()
    for entered, fixed in faults:
        if spans and entered <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], fixed))
        else:
            spans.append((entered, fixed))
    return spans


def _fixed_in(cause: Cause, loop: Loop) -> str:
    """Return the release of DeepSpeed in which a loop has no fault; empty if it never has it with a newer transformers,
    or if no release of DeepSpeed fixed it."""
    if loop not in cause.loops:
        return cause.trainer_before.get("deepspeed", "") if loop == "trainer" else ""
    return cause.left.release if cause.left.release[:1].isdigit() else ""


@functools.cache
def read_causes() -> tuple[Cause, ...]:
    """Read causes.yaml; tests/unit/test_causes.py checks its values."""
    causes = []
    for entry in load_package_yaml(FILE.read_text(encoding="utf-8"))["causes"]:
        values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in entry.items()}
        values |= {key: Change(**entry.get(key, {})) for key in ("entered", "left")}
        values["lines"] = tuple(SourceLines(**line) for line in entry.get("lines", ()))
        releases = {package: values.pop(package) for package in PACKAGES if package in values}
        causes.append(Cause(**values, releases=releases))
    return tuple(causes)
