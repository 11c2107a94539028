"""Combinations of features by name, and the rules for features that exclude each other."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from study.config.errors import UserError
from study.host.stacks import release_key

_FILE = Path(__file__).with_name("features.yaml")
_REPORTS = Path(__file__).with_name("reports.yaml")
# hsdp shards over two ranks and copies over two; groups that share samples are two of two.
_FOUR_RANKS, _RANKS = 4, 2
# Ranks of a group that shares samples.
GROUP_SIZE = 2
LISTED = "study verify --features list prints all"


@dataclasses.dataclass(frozen=True)
class Row:
    """One choice of a training: its levels by name, the default first."""

    name: str
    levels: Mapping[str, str]

    @property
    def default(self) -> str:
        return next(iter(self.levels))


@dataclasses.dataclass(frozen=True)
class Never:
    """Two sets of levels of which no two are combined, and why."""

    first: frozenset[str]
    second: frozenset[str]
    reason: str
    unless: frozenset[str]
    # A file of an installed package, and a text of it that shows the reason; empty if the levels exclude each other by
    # their meaning.
    line: tuple[str, ...] = ()

    def forbids(self, levels: frozenset[str]) -> bool:
        return bool(self.first & levels and self.second & levels and not self.unless & levels)


@dataclasses.dataclass(frozen=True)
class Combination:
    """One level of every row."""

    levels: frozenset[str]

    def has(self, *names: str) -> bool:
        """Whether it has one of these levels."""
        return not self.levels.isdisjoint(names)

    def level(self, row: str) -> str:
        return next(name for name in read_rows()[row].levels if name in self.levels)

    @functools.cached_property
    def features(self) -> tuple[str, ...]:
        """The levels that are not defaults, with the engine, in the order of the rows."""
        rows = read_rows().values()
        chosen = [(row, self.level(row.name)) for row in rows]
        return tuple(level for row, level in chosen if level != row.default or row.name == "engine")

    @property
    def name(self) -> str:
        return ",".join(self.features)

    @property
    def ranks(self) -> int:
        return _FOUR_RANKS if self.has("hsdp") or self.shares_samples else _RANKS

    @property
    def shares_samples(self) -> bool:
        """Whether the ranks of a group have the same samples, and divide the work on them."""
        return self.has("autotp", "tp", "ulysses", "cp")

    @property
    def has_local_gradients(self) -> bool:
        """Whether the gradient of a rank's own samples is of whole weights: ZenFlow transposes them."""
        return self.has("data_only") and not self.has("zenflow")

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, with different samples."""
        return self.ranks // GROUP_SIZE if self.shares_samples else self.ranks

    def data_rank(self, rank: int) -> int:
        """Return the number that a rank's samples have."""
        return rank // GROUP_SIZE if self.shares_samples else rank

    @property
    def micro_steps(self) -> int:
        return 4 if self.has("accumulation", "no_sync", "config_accumulation") else 1

    @property
    def uses_deepspeed(self) -> bool:
        return self.has("zero0", "zero1", "zero2", "zero3")

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that it runs in: the releases of others make no difference."""
        used = {
            "deepspeed": self.uses_deepspeed or self.has("cpu_adam"),
            "accelerate": self.has("accelerate"),
            "torch": True,
        }
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def stage(self) -> int | None:
        return int(self.level("engine")[-1]) if self.uses_deepspeed else None

    def replaced(self, row: str, level: str | None = None) -> Combination:
        """Return this combination with another level of a row; by default with the row's default."""
        new_level = level or read_rows()[row].default
        return Combination(self.levels - {self.level(row)} | {new_level})

    @property
    def conflict(self) -> Never | None:
        """The first rule that forbids it."""
        return next((rule for rule in read_rules() if rule.forbids(self.levels)), None)


def make_combination(names: Iterable[str]) -> Combination:
    """Return the combination with these levels and the defaults of the other rows; UserError for an unknown name."""
    chosen: dict[str, str] = {}
    for name in names:
        row = find_row(name)
        if chosen.get(row.name, name) != name:
            raise UserError(f"{chosen[row.name]} and {name} exclude each other", f"name one {row.name}")
        chosen[row.name] = name
    if "engine" not in chosen:
        raise UserError("the features lack an engine", _engines_to_name(list(chosen.values())))
    return Combination(frozenset(chosen.get(row.name, row.default) for row in read_rows().values()))


def _engines_to_name(features: list[str]) -> str:
    """Return the engines that take these features, with an example."""
    engines = _engines_with(features)
    if not engines:
        # They exclude each other, or need another feature.
        return f"add one of {', '.join(read_rows()['engine'].levels)}"
    return f"add one of {', '.join(engines)}, such as --features {name_with_engine(features or ['accumulation'])}"


def _engines_with(features: list[str]) -> list[str]:
    """Return the engines with which features may be combined."""
    levels = read_rows()["engine"].levels
    return [engine for engine in levels if make_combination([engine, *features]).conflict is None]


def name_with_engine(features: list[str]) -> str:
    """Return the name of a combination with an engine: its own, or else one that takes its features."""
    if not read_rows()["engine"].levels.keys().isdisjoint(features):
        return ",".join(features)
    engines = _engines_with(features)
    usual = next((engine for engine in ("zero2", *engines) if engine in engines), "zero2")
    return ",".join([usual, *features])


# Other words for features.
_ALIASES = {
    "moe": "ep",
    "cpu_offload": "optimizer_cpu",
    "offload": "optimizer_cpu",
    "nvme": "optimizer_nvme",
    "context_parallel": "cp",
    "context_parallelism": "cp",
    "tensor_parallel": "tp",
    "tensor_parallelism": "tp",
    "sequence_parallel": "ulysses",
    "sequence_parallelism": "ulysses",
    "sp": "ulysses",
}
# Strategies that are an engine with an offload.
_STRATEGIES = {
    "zero2_cpu": "zero2,optimizer_cpu,cpu_adam",
    "zero3_cpu_optimizer": "zero3,optimizer_cpu,cpu_adam",
    "zero3_cpu": "zero3,all_cpu,cpu_adam",
    "zero3_nvme_optimizer": "zero3,optimizer_nvme,cpu_adam",
    "zero3_nvme": "zero3,all_nvme,cpu_adam",
}


def combination_of_strategy(name: str, *features: str) -> Combination | None:
    """Return the combination of a strategy with further features; None if no combination is it.

    Accelerate makes DeepSpeedCPUAdam of AdamW; in the engine's own loop the program does.
    """
    names = _STRATEGIES.get(name, name).split(",")
    if names[0] not in read_rows()["engine"].levels:
        return None
    names = [level for level in names if level != "cpu_adam" or "accelerate" not in features]
    combination = make_combination([*names, *features])
    return combination if combination.conflict is None else None


def find_row(level: str) -> Row:
    """Return the row that has a level."""
    for row in read_rows().values():
        if level in row.levels:
            return row
    names = [name for row in read_rows().values() for name in row.levels]
    close = difflib.get_close_matches(_ALIASES.get(level.lower(), level.lower()), names, n=1)
    likely = f"did you mean {close[0]}? " if close else ""
    if level in _STRATEGIES:
        likely = f"did you mean {_STRATEGIES[level]}? "
    raise UserError(f"no feature is called {level[:40]!r}", f"{likely}{LISTED}")


@functools.cache
def read_rows() -> dict[str, Row]:
    return {entry["row"]: Row(entry["row"], entry["levels"]) for entry in _read()["rows"]}


@functools.cache
def read_chosen() -> tuple[Combination, ...]:
    """Return the combinations that are run whatever pairs they cover."""
    return tuple(make_combination(names) for names in _read()["chosen"])


@dataclasses.dataclass(frozen=True)
class CommonGroup:
    """Features that are about as common in trainings as each other."""

    title: str
    levels: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of a fault in a combination, by others."""

    # OWNER/NAME#NUMBER
    report: str
    says: str
    combination: Combination
    # The reason of an equal run, or of a missing one.
    because: str = ""
    # The releases that mend it, and the features with which older ones have it.
    before: tuple[tuple[str, str], ...] = ()
    needs: frozenset[str] = frozenset()
    # Of a report on memory: the combination whose step needs more, and the one that it is compared with.
    more_than: tuple[Combination, ...] = ()

    def is_in(self, combination: Combination, versions: Mapping[str, str | None]) -> bool:
        """Whether a combination has it with these releases; an unknown one is taken as a newer one."""
        return self.needs <= combination.levels and any(
            (version := versions.get(package)) and release_key(version) < release_key(release)
            for package, release in self.before
        )

    @property
    def address(self) -> str:
        return f"https://github.com/{self.report.replace('#', '/issues/')}"


@functools.cache
def read_reports() -> tuple[Report, ...]:
    """Read reports.yaml."""
    entries = yaml.safe_load(_REPORTS.read_text(encoding="utf-8"))["reports"]
    return tuple(
        Report(
            entry["report"],
            entry["says"],
            make_combination(entry["features"]),
            entry.get("because", ""),
            tuple(entry.get("before", {}).items()),
            frozenset(entry.get("with", ())),
            tuple(map(make_combination, entry.get("more_than", ()))),
        )
        for entry in entries
    )


@functools.cache
def read_common_groups() -> tuple[CommonGroup, ...]:
    """Return all features by how common they are, the commonest first."""
    return tuple(CommonGroup(entry["title"], frozenset(entry["levels"])) for entry in _read()["common"])


def rarity(combination: Combination) -> tuple[int, int, int]:
    """Return a key that orders combinations: the group of the rarest feature, then the sum of groups."""
    groups = read_common_groups()
    places = [
        next(number for number, group in enumerate(groups) if feature in group.levels)
        for feature in combination.features
    ]
    return max(places), sum(places), len(places)


@functools.cache
def read_rules() -> tuple[Never, ...]:
    return tuple(
        Never(
            frozenset(entry["if"]),
            frozenset(entry["and"]),
            entry["reason"],
            frozenset(entry.get("unless", ())),
            tuple(entry.get("line", ())),
        )
        for entry in _read()["never"]
    )


@functools.cache
def _read() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return document
