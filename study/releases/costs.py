"""`study releases costs`: memory, communication and host time of a step under each release, with causes of changes.

It reads the documents that tools/release_costs.py writes, and starts the engines only for --measure.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from study.compositions.features import Combination, make_combination
from study.compositions.session import RankServer
from study.config.errors import UserError
from study.config.places import install_command
from study.config.printing import TextTable, print_page, print_result
from study.host.stacks import package_version, release_key
from study.records.directory import compact_json

# By the package whose releases are measured, while the others are the installed ones.
COSTS = {
    "deepspeed": Path(__file__).with_name("costs.json"),
    "accelerate": Path(__file__).with_name("accelerate_costs.json"),
}
_CAUSES = Path(__file__).with_name("cost_causes.yaml")
_SERVER = "study.costs.server"
_PACKAGES = ("deepspeed", "torch", "accelerate", "transformers", "peft")
# Repetitions of a measurement: state, bytes and collectives are equal in all of them.
_REPEATS = 2
# Of a measurement, for the time of a step; one more is watched for the other figures.
_TIMED_STEPS = 6
# Its step is the unit of host time.
_UNIT = "ddp"
# Combinations between two measurements of the unit, since the machine's speed drifts.
_UNIT_EVERY = 6
# Strategies that are combinations as well.
MEASURED_STRATEGIES = ("zero0", "zero1", "zero2", "zero3")
FIGURES = ("state", "peak", "sent", "collectives", "host_time")
_LABELS = {
    "state": "state\nB/param",
    "peak": "peak\nB/param",
    "sent": "sent\nB/param",
    "collectives": "collectives",
    "host_time": "host time\n(ddp = 1)",
}
# Relative differences of figures up to which two releases count as equal. Tensors at the peak are the same to a byte if
# it is at the same operation; gloo's copies may move it to one with 7 % less. Host times, measured while other things
# ran, differ by up to a third.
_SAME = {"state": 0.001, "peak": 0.08, "sent": 0.001, "collectives": 0.0, "host_time": 0.5}
# Of the heap at its peak, with gloo's copies, which vary by 10 %.
_SAME_HEAP = 0.15
_SAME_COSTS, _OTHER_COSTS, _NOT_STORED = 0, 1, 3


@dataclasses.dataclass(frozen=True)
class CombinationCost:
    """Cost of one step on rank 0; without figures, why there are none."""

    kind: str
    says: str = ""
    parameters: int = 0
    state_bytes: int = 0
    # Of the heap, with the copies of gloo's threads, which are freed some time after a collective.
    peak_bytes: int = 0
    peak_moment: str = ""
    # Bytes of tensors at that moment.
    peak_parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sent_bytes: int = 0
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Time of the process's threads, in steps of DDP under the same release.
    host_time: float = 0.0

    @property
    def is_measured(self) -> bool:
        return self.kind == "measured"

    def figure(self, name: str) -> float:
        if name == "collectives":
            return float(sum(self.collectives.values()))
        if name == "host_time":
            return self.host_time
        if name == "peak":
            return sum(self.peak_parts.values()) / self.parameters
        return float(getattr(self, f"{name}_bytes")) / self.parameters

    def document(self) -> dict[str, Any]:
        """Return the fields that are not empty."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


@dataclasses.dataclass
class CostTable:
    """Costs by release of a package and by combination."""

    # The packages that are the same under every release.
    packages: dict[str, str]
    releases: dict[str, dict[str, CombinationCost]]
    package: str = "deepspeed"

    @property
    def names(self) -> list[str]:
        """The measured releases, the oldest first."""
        return sorted(self.releases, key=release_key)

    @classmethod
    def read(cls, file: Path) -> CostTable:
        document = json.loads(file.read_text(encoding="utf-8"))
        releases = {
            release: {name: CombinationCost(**fields) for name, fields in costs.items()}
            for release, costs in document["releases"].items()
        }
        return cls(document["packages"], releases, document["package"])

    def write(self, file: Path) -> None:
        # A line for each combination.
        releases = [
            f"{json.dumps(release)}:{{\n"
            + ",\n".join(f"{json.dumps(name)}:{compact_json(cost.document())}" for name, cost in costs.items())
            + "}"
            for release, costs in ((release, self.releases[release]) for release in self.names)
        ]
        head = json.dumps({"package": self.package, "packages": self.packages})[:-1]
        text = f'{head},\n"releases":{{\n' + ",\n".join(releases) + "}}\n"
        file.write_text(text, encoding="utf-8")


@functools.cache
def read_costs(package: str = "deepspeed") -> CostTable:
    return CostTable.read(COSTS[package])


def other_packages(package: str) -> dict[str, str]:
    """Return the installed packages that are the same under every measured release of one."""
    return {name: package_version(name) or "" for name in _PACKAGES if name != package}


@dataclasses.dataclass(frozen=True)
class CostCause:
    """One entry of cost_causes.yaml: why figures change in a release."""

    title: str
    package: str
    # Releases between which it came.
    after: str
    by: str
    figures: tuple[str, ...]
    # Every one of these features, or one of each list of alternatives.
    features: tuple[frozenset[str], ...]
    change: str

    def explains(self, change: CostChange) -> bool:
        levels = change.combination.levels
        return (
            change.package == self.package
            and change.figure in self.figures
            and release_key(self.after) <= release_key(change.before)
            and release_key(change.release) <= release_key(self.by)
            and all(levels & alternatives for alternatives in self.features)
        )


@dataclasses.dataclass(frozen=True)
class CostChange:
    """A figure that differs between two measured releases that follow each other."""

    combination: Combination
    figure: str
    # The last release with the old figure, and the first one with the new one.
    before: str
    release: str
    old: float
    new: float
    package: str = "deepspeed"

    @property
    def factor(self) -> float:
        return self.new / self.old if self.old else float("inf")

    @property
    def cause(self) -> CostCause | None:
        return next((cause for cause in read_cost_causes() if cause.explains(self)), None)


@functools.cache
def read_cost_causes() -> tuple[CostCause, ...]:
    entries = yaml.safe_load(_CAUSES.read_text(encoding="utf-8"))
    return tuple(
        CostCause(
            title=entry["title"],
            package=entry.get("package", "deepspeed"),
            after=entry["after"],
            by=entry["by"],
            figures=tuple(entry["figures"]),
            features=tuple(
                frozenset([feature] if isinstance(feature, str) else feature) for feature in entry["features"]
            ),
            change=entry["change"],
        )
        for entry in entries["causes"]
    )


def read_list(package: str = "deepspeed") -> list[str]:
    """Return the combinations that tools/release_costs.py measures under releases of a package."""
    return list(yaml.safe_load(_CAUSES.read_text(encoding="utf-8"))["measured"][package])


def find_changes(table: CostTable) -> Iterator[CostChange]:
    """Yield every changed figure, in the order of releases."""
    for before, release in itertools.pairwise(table.names):
        for name, cost in table.releases[release].items():
            earlier = table.releases[before].get(name)
            if earlier is None or not (earlier.is_measured and cost.is_measured):
                continue
            for figure in changed_figures(earlier, cost):
                combination = make_combination(name.split(","))
                old, new = earlier.figure(figure), cost.figure(figure)
                yield CostChange(combination, figure, before, release, old, new, table.package)


def changed_figures(earlier: CombinationCost, later: CombinationCost) -> list[str]:
    """Return the figures that differ by more than repeated measurements do."""
    return [figure for figure in FIGURES if _is_changed(figure, earlier, later)]


def _is_changed(figure: str, earlier: CombinationCost, later: CombinationCost) -> bool:
    old, new, same = earlier.figure(figure), later.figure(figure), _SAME[figure]
    if figure == "peak" and earlier.peak_moment != later.peak_moment:
        # The tensors of two moments are not compared, but the bytes by which these are the fullest.
        old, new, same = float(earlier.peak_bytes), float(later.peak_bytes), _SAME_HEAP
    return abs(new - old) > same * max(abs(old), abs(new))


def measure_costs(
    combinations: Iterable[Combination],
    *,
    environment: Mapping[str, str] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, CombinationCost]:
    """Measure combinations in one process with the engines; the environment is that of a stack, or this process's."""
    costs: dict[str, CombinationCost] = {}
    unit = make_combination(_UNIT.split(","))
    unit_s = 0.0
    with RankServer(_SERVER, environment) as server:
        for place, combination in enumerate(combinations):
            if place % _UNIT_EVERY == 0:
                unit_s = _unit_s(_ask_repeatedly(unit, server))
            cost = costs[combination.name] = _cost(_ask_repeatedly(combination, server), unit_s)
            if cost.is_measured:
                figures = ", ".join(f"{name} {cost.figure(name):.2f}" for name in FIGURES)
                report(f"{combination.name}: {figures}")
            else:
                report(f"{combination.name}: {cost.kind}: {cost.says}")
    return costs


def _unit_s(answers: list[dict[str, Any]]) -> float:
    """Return the shortest time of the unit's steps."""
    failed = next((answer for answer in answers if answer["kind"] != "measured"), None)
    if failed is not None:
        problem = f"{_UNIT}, the unit of host time, {failed['kind']}: {failed['says']}"
        raise UserError(problem, f"study verify --features {_UNIT}")
    return float(min(answer["host_s"] for answer in answers))


def _ask_repeatedly(combination: Combination, server: RankServer) -> list[dict[str, Any]]:
    """Return the answers of repeated measurements; that of the first one that fails alone."""
    answers = []
    for _ in range(_REPEATS):
        answers.append(server.ask({"features": list(combination.features), "timed_steps": _TIMED_STEPS}))
        if answers[-1]["kind"] != "measured":
            return answers[-1:]
    return answers


def _cost(answers: list[dict[str, Any]], unit_s: float) -> CombinationCost:
    """Return the figures of the highest peak, and the shortest time."""
    highest = max(answers, key=lambda answer: int(answer.get("peak_bytes", 0)))
    names = [field.name for field in dataclasses.fields(CombinationCost) if field.name in highest]
    cost = CombinationCost(**{name: highest[name] for name in names})
    if not cost.is_measured:
        return cost
    return dataclasses.replace(cost, host_time=round(min(answer["host_s"] for answer in answers) / unit_s, 2))


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of `study releases costs`."""
    group.add_argument("--measure", action="store_true", help="measure the installed release, and compare it")


def run(options: argparse.Namespace) -> int:
    """Print the costs of the stored releases, or compare the installed one with them; return the exit status."""
    if options.strategy is not None:
        raise UserError(f"costs takes no {options.strategy!r}", "name a combination: --features zero3,accumulation")
    combination: Combination | None = getattr(options, "features", None)
    if options.measure:
        listed = [make_combination(name.split(",")) for package in COSTS for name in read_list(package)]
        return _compare_installed([combination] if combination else listed, options.json)
    if combination is None:
        tables = [read_costs(package) for package in COSTS]
        print_result(options.json, lambda: _document_of_all(tables), _page_of_all(tables))
        return _SAME_COSTS
    table = select_table(combination)
    document = _document(table, table.names, combination)
    if not document["releases"]:
        command = f"study releases costs --measure --features {combination.name}"
        document["command"] = command
        print_result(options.json, lambda: document, [f"{combination.name}: not measured; run: {command}"])
        return _NOT_STORED
    print_result(options.json, lambda: document, history(table, combination))
    return _SAME_COSTS


def select_table(combination: Combination) -> CostTable:
    """Return the table of a combination: that of Accelerate's releases if it is trained in Accelerate's loop."""
    return read_costs("accelerate" if combination.has("accelerate") else "deepspeed")


def _document_of_all(tables: Iterable[CostTable]) -> dict[str, Any]:
    """Return the newest releases' costs and every change: DeepSpeed's, with the other packages' by their names."""
    documents = {table.package: _document(table, table.names[-1:]) for table in tables}
    return documents.pop("deepspeed") | documents


def _page_of_all(tables: Iterable[CostTable]) -> list[str | TextTable]:
    pages = [overview(table) for table in tables]
    return [part for page in pages for part in (*page, "")][:-1]


def _document(table: CostTable, releases: Iterable[str], combination: Combination | None = None) -> dict[str, Any]:
    """Return the costs of these releases, of one combination or all, and every change."""
    changes = [change for change in find_changes(table) if combination in (None, change.combination)]
    costs = {
        release: {
            name: cost.document()
            for name, cost in table.releases[release].items()
            if combination is None or name == combination.name
        }
        for release in releases
    }
    return {
        "packages": table.packages,
        "releases": {release: by_name for release, by_name in costs.items() if by_name},
        "changes": [
            {
                "features": change.combination.features,
                "figure": change.figure,
                "before": change.before,
                "release": change.release,
                "old": change.old,
                "new": change.new,
                "cause": change.cause.title if change.cause else None,
                "change": change.cause.change if change.cause else None,
            }
            for change in changes
        ],
    }


def overview(table: CostTable) -> list[str | TextTable]:
    """Return the newest release's costs, and every change of an earlier one."""
    newest = table.names[-1]
    rows = [[name, *_texts(cost)] for name, cost in table.releases[newest].items()]
    page: list[str | TextTable] = [
        f"one training step with {table.package} {newest}: rank 0 of 2 on CPUs; {_packages(table)}",
        "",
        TextTable(["combination", *_LABELS.values()], rows),
        "",
        f"what changed in {len(table.names)} releases from {table.names[0]} on:",
    ]
    for change in group_changes(find_changes(table)):
        page.append(f"  {change.before} to {change.release}: {change.text}: {change.reason}")
        page.append(f"    {' '.join(change.features)}")
    return [*page, "", *_notes(table)]


def _notes(table: CostTable) -> list[str]:
    parameters = next(cost.parameters for cost in table.releases[table.names[-1]].values() if cost.is_measured)
    return [
        f"in bytes for each of the {parameters / 1e6:.2f} M parameters; peak: all tensors at the fullest moment",
        f"host time: CPU time of the process, in steps of ddp; only differences above {_SAME['host_time']:.0%} count "
        "as changes",
    ]


def history(table: CostTable, combination: Combination) -> list[str | TextTable]:
    """Return one combination's costs under every release, and why they changed."""
    name = combination.name
    measured = [(release, table.releases[release][name]) for release in table.names if name in table.releases[release]]
    rows = [[release, *_texts(cost)] for release, cost in reversed(measured)]
    page: list[str | TextTable] = [
        f"one training step of {name}: rank 0 of 2 on CPUs; {_packages(table)}",
        "",
        TextTable([table.package, *_LABELS.values()], rows),
    ]
    page += [f"{release}: {cost.kind}: {cost.says}" for release, cost in measured if not cost.is_measured]
    changes = group_changes(change for change in find_changes(table) if change.combination == combination)
    page += [f"{change.before} to {change.release}: {change.text}: {change.reason}" for change in changes]
    return [*page, *_notes(table)]


def later_changes(table: CostTable, release: str, strategy: str, precision: str) -> list[str]:
    """Return the changes after a release in memory or communication of a strategy, with and without accumulation."""
    plain = [strategy, *(["bf16"] if precision == "bf16" else [])]
    combinations = [make_combination(plain), make_combination([*plain, "accumulation"])]
    changes = group_changes(
        change
        for change in find_changes(table)
        if change.combination in combinations
        and change.figure != "host_time"
        and release_key(release) <= release_key(change.before)
    )
    return [
        f"in later releases a step from {change.before} to {change.release}: {change.text}: {change.reason}"
        for change in changes
    ]


@dataclasses.dataclass(frozen=True)
class ChangeGroup:
    """Changes of one release by one cause."""

    before: str
    release: str
    reason: str
    features: tuple[str, ...]
    # Of each figure, as text.
    text: str


def group_changes(changes: Iterable[CostChange]) -> list[ChangeGroup]:
    """Return the changes by release and cause, the newest release first."""
    groups: dict[tuple[str, str], list[CostChange]] = {}
    for change in changes:
        reason = f"{change.cause.title} ({change.cause.change})" if change.cause else "no cause found"
        groups.setdefault((change.release, reason), []).append(change)
    grouped = []
    for (release, reason), members in groups.items():
        features = tuple(dict.fromkeys(change.combination.name for change in members))
        spans = [_span(figure, [change for change in members if change.figure == figure]) for figure in FIGURES]
        grouped.append(ChangeGroup(members[0].before, release, reason, features, ", ".join(filter(None, spans))))
    return sorted(grouped, key=lambda group: release_key(group.release), reverse=True)


def _span(figure: str, changes: list[CostChange]) -> str:
    """Return the change of one combination as figures, or the range of several as percentages; empty without one."""
    if not changes:
        return ""
    name = figure.replace("_", " ")
    if len(changes) == 1:
        digits = 0 if figure == "collectives" else 1
        return f"{name} {changes[0].old:.{digits}f} to {changes[0].new:.{digits}f}"
    factors = sorted(change.factor - 1 for change in changes)
    ends = dict.fromkeys(f"{factor:+.0%}" for factor in (factors[0], factors[-1]))
    return f"{name} {' to '.join(ends)}"


def _texts(cost: CombinationCost) -> list[str]:
    if not cost.is_measured:
        return ["-"] * len(FIGURES)
    digits = {"collectives": 0, "host_time": 1}
    return [f"{cost.figure(name):.{digits.get(name, 1)}f}" for name in FIGURES]


def _packages(table: CostTable) -> str:
    return ", ".join(f"{name} {version}" for name, version in table.packages.items())


def _compare(name: str, measured: CombinationCost) -> _Comparison:
    """Return a measurement with the stored one of the installed release, or else of the newest."""
    table = select_table(make_combination(name.split(",")))
    installed = package_version(table.package)
    release = installed if installed in table.releases else table.names[-1]
    return _Comparison(measured, table.releases[release].get(name), f"{table.package} {release}")


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Costs of a combination under the installed release and as stored; None if it is not stored."""

    measured: CombinationCost
    stored: CombinationCost | None
    # Package and release of the stored ones.
    release: str

    @property
    def is_compared(self) -> bool:
        return self.stored is not None and self.stored.is_measured and self.measured.is_measured

    @property
    def differs_in(self) -> list[str]:
        """The figures that differ."""
        return changed_figures(self.stored, self.measured) if self.stored is not None and self.is_compared else []

    @property
    def status(self) -> int:
        if not self.is_compared:
            return _NOT_STORED if self.stored is None else _OTHER_COSTS
        # A machine's speed is not the release's.
        return _OTHER_COSTS if set(self.differs_in) - {"host_time"} else _SAME_COSTS

    def rows(self, name: str) -> list[list[str]]:
        if self.stored is None or not self.is_compared:
            return [[name, self.measured.says or "measured", "", *_texts(self.measured)]]
        return [
            [name, "here", ", ".join(self.differs_in), *_texts(self.measured)],
            ["", self.release, "", *_texts(self.stored)],
        ]

    def document(self) -> dict[str, Any]:
        stored = self.stored.document() if self.stored is not None else None
        return {
            "measured": self.measured.document(),
            "release": self.release,
            "stored": stored,
            "differs_in": self.differs_in,
        }


def _compare_installed(combinations: list[Combination], as_json: bool) -> int:
    """Measure the installed release, and print its figures next to those of the newest stored release."""
    if missing := [name for name in ("torch", "deepspeed") if package_version(name) is None]:
        fix = f"install the release to measure, or those of this study: {install_command('train', missing=missing)}"
        raise UserError(f"not installed here: {' and '.join(missing)}", fix)
    measured = measure_costs(combinations, report=lambda line: print_page([line], sys.stderr))
    compared = {name: _compare(name, cost) for name, cost in measured.items()}
    rows = [row for name, comparison in compared.items() for row in comparison.rows(name)]
    document = {
        "installed": {package: package_version(package) for package in COSTS},
        "combinations": {name: comparison.document() for name, comparison in compared.items()},
    }
    columns = ["combination", "release", "differs in", *_LABELS.values()]
    print_result(as_json, lambda: document, [TextTable(columns, rows)])
    return max((comparison.status for comparison in compared.values()), default=_SAME_COSTS)
