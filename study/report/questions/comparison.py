"""Comparison of strategies with a reference, and a small table over several workloads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from study.config.text import NOT_MEASURED, percent
from study.records.frames import Records, real_runs
from study.records.statistics import (
    MIN_SAMPLE,
    NOT_SIGNIFICANT_MARK,
    NOT_TESTED_MARK,
    Difference,
    Noise,
    estimate_noise,
)
from study.records.strategy_runs import Row, StrategyRuns, comparability, group_by_strategy, to_table
from study.records.workloads import BASELINES, read_arm, strategy_order
from study.report.document import Answer, cell_text, format_names, format_or_dash
from study.report.facts import Headline, caption, footnotes

STEP = "step_time_s_median"
# Workloads side by side on the first screen, and notes below them.
_MAX_WORKLOADS, _MAX_NOTES = 2, 6
_CONFOUNDED = " †"
Workloads = Mapping[str, Sequence[StrategyRuns]]


class MarkedText(NamedTuple):
    """A ratio as the text of a table cell, and the mark of its difference, if it has one."""

    text: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.mark}" if self.mark else self.text


Cell = str | float | MarkedText
# The function that computes a column's cells, by the column's heading.
Columns = Mapping[str, Callable[[StrategyRuns], Cell]]


@functools.lru_cache(maxsize=2)
def real_arms(records: Records) -> tuple[StrategyRuns, ...]:
    """Return the strategies of the real runs."""
    return tuple(group_by_strategy(real_runs(records).runs))


def workloads(records: Records) -> dict[str, list[StrategyRuns]]:
    """Return the strategies of each workload in which a run succeeded."""
    grouped: dict[str, list[StrategyRuns]] = {}
    for arm in real_arms(records):
        grouped.setdefault(arm.workload, []).append(arm)
    return {workload: arms for workload, arms in grouped.items() if any(len(arm.ok_runs) for arm in arms)}


def step_s(arm: StrategyRuns) -> float:
    """Return the geometric mean over seeds of the median step time, in seconds."""
    return arm.geometric_mean(STEP).center


def judge_speed(strategies: Iterable[StrategyRuns]) -> tuple[list[str], dict[str, str]]:
    """Return the fastest strategy with all that are not significantly slower, and the seeds of those that have too few.

    Without two that have three seeds, none is judged, and none is left out for its seeds.
    """
    fair = [arm for arm in strategies if arm.is_fair()]
    seeds = {arm.name: arm.geometric_mean(STEP).n for arm in fair}
    judged = [arm for arm in fair if seeds[arm.name] >= MIN_SAMPLE]
    if len(judged) < 2:
        return [], {}
    ranked = [arm.name for arm in sorted(judged, key=step_s)]
    tests = judged[0].differences(STEP)
    slower = {name for name in ranked[1:] if tests[ranked[0], name].is_significant}
    few = {name: f"{n} seed{'s' * (n > 1)}" for name, n in seeds.items() if 0 < n < MIN_SAMPLE}
    return [arm.name for arm in judged if arm.name not in slower], few


def not_judged(by_workload: Workloads) -> dict[tuple[str, str], str]:
    """Return the seeds of each strategy that has too few of them to be judged, by its workload and name."""
    return {
        (workload, name): seeds
        for workload, strategies in by_workload.items()
        for name, seeds in judge_speed(strategies)[1].items()
    }


def fair_arms(strategies: Iterable[StrategyRuns], confound: str = "confounded") -> list[StrategyRuns]:
    """Return the strategies that succeeded and violate no invariant, without the baseline."""
    return [arm for arm in strategies if arm.baseline is not None and not arm.is_baseline and arm.is_fair(confound)]


def _is_plain_ddp(arm: StrategyRuns) -> bool:
    name = read_arm(arm.name)
    return name.strategy == "ddp" and not name.settings


@dataclasses.dataclass(frozen=True)
class ReferenceComparison:
    """A figure of the sharding strategies relative to the reference, in the workloads whose reference has it.

    `sharding` is of the workloads with most of these strategies and seeds, which come first: answers are about them.
    A workload that leads comes before these.
    """

    workloads: dict[str, list[StrategyRuns]]
    references: dict[str, StrategyRuns]
    figure: Callable[[StrategyRuns], float]
    sharding: list[StrategyRuns]
    # Whether the largest workload of the page is among them.
    has_largest: bool

    def ratio(self, arm: StrategyRuns) -> float:
        """Return the figure over that of the reference in the same workload."""
        return self.figure(arm) / self.figure(self.references[arm.workload])

    @property
    def main(self) -> dict[str, list[StrategyRuns]]:
        """The workloads of `sharding`, with all their strategies."""
        return {arm.workload: self.workloads[arm.workload] for arm in self.sharding}

    @property
    def ratios(self) -> list[tuple[float, StrategyRuns]]:
        """Return the known ratios with their strategies, the smallest first."""
        pairs = [(ratio, arm) for arm in self.sharding if not pd.isna(ratio := self.ratio(arm))]
        return sorted(pairs, key=lambda entry: (entry[0], entry[1].name))

    @property
    def names(self) -> str:
        bases = [self.references[arm.workload] for arm in self.sharding] or self.references.values()
        return format_references(base.name for base in bases)

    @property
    def plain_names(self) -> str:
        return format_references(base.name for base in self.references.values()).replace("`", "")

    def cell(self, form: Callable[[float], str]) -> Callable[[StrategyRuns], str]:
        """Return a function that formats the ratio of a strategy for a table."""
        return lambda arm: format_or_dash(self.ratio(arm), form)


def compare_with_reference(
    records: Records,
    figure: Callable[[StrategyRuns], float],
    on_any_ranks: bool = False,
    leads: Callable[[StrategyRuns], bool] = lambda base: False,
) -> ReferenceComparison | None:
    """Return the comparison with fair DDP on the most ranks, else the baseline; None if no reference has the figure.

    Strategies that violate an invariant or offload are excluded, as are other numbers of ranks than the reference's.
    `on_any_ranks` includes these for figures that plain training has equal on any number of ranks. Workloads without
    plain training are included only if none has it. `leads` is whether a workload with this reference comes first.
    """
    grouped, references, sharding = workloads(records), {}, []
    for workload, strategies in grouped.items():
        ddp = [arm for arm in strategies if _is_plain_ddp(arm) and arm.is_fair()]
        baseline = next((arm for arm in strategies if arm.is_baseline and len(arm.ok_runs)), None)
        base = max(ddp, key=lambda arm: arm.ranks, default=baseline)
        if base is None or not figure(base) > 0:
            continue
        references[workload] = base
        takes_any = on_any_ranks and base.value("strategy") in BASELINES
        sharding += [
            arm
            for arm in strategies
            if arm.name != base.name
            and arm.is_fair()
            and not arm.is_offloaded
            and arm.value("strategy") not in BASELINES
            and (takes_any or arm.ranks == base.ranks)
        ]
    if not references:
        return None
    plain = {workload: base for workload, base in references.items() if base.value("strategy") in BASELINES}
    references = plain or references

    seeds_of: dict[str, list[int]] = {}
    for arm in sharding:
        seeds_of.setdefault(arm.workload, []).append(len(arm.ok_runs))

    def size(workload: str) -> tuple[bool, int, int]:
        seeds = seeds_of.get(workload, [])
        return leads(references[workload]), len(seeds), max(seeds, default=0)

    ordered = {workload: grouped[workload] for workload in sorted(references, key=size, reverse=True)}
    main = [arm for arm in sharding if arm.workload in references and size(arm.workload) == size(next(iter(ordered)))]
    return ReferenceComparison(ordered, references, figure, main, by_arms(grouped)[0] in references)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A figure of each strategy over another strategy's, seed by seed, and its significance within a workload."""

    by_workload: Workloads
    figure: str
    find_base: Callable[[StrategyRuns], str | None]
    # Whether the ratio is that of the other strategy: its time over a strategy's is that strategy's speed.
    is_inverse: bool = False

    def of(self, arm: StrategyRuns) -> Difference | None:
        """Return the difference of a strategy from its base; None without one."""
        base = self.find_base(arm)
        if base is None or not len(arm.ok_runs):
            return None
        return arm.differences(self.figure).get((base, arm.name) if self.is_inverse else (arm.name, base))

    def paired(self, arms: Iterable[StrategyRuns]) -> list[StrategyRuns]:
        """Return the strategies with a run of their base to compare with."""
        return [arm for arm in arms if (difference := self.of(arm)) and difference.ratio.n]

    def is_tested(self, arm: StrategyRuns) -> bool:
        """Whether the strategy and its base share enough seeds for a test."""
        difference = self.of(arm)
        return difference is not None and difference.is_tested

    def significant(self, arms: Iterable[StrategyRuns]) -> list[tuple[float, StrategyRuns]]:
        """Return the significant ratios, the smallest first."""
        return self._ratios(arms, lambda difference: difference.is_significant)

    def untested(self, arms: Iterable[StrategyRuns]) -> list[tuple[float, StrategyRuns]]:
        """Return the ratios of too few seeds for a test, the smallest first."""
        return self._ratios(arms, lambda difference: not (difference.is_tested or difference.is_confounded))

    def _ratios(
        self, arms: Iterable[StrategyRuns], is_chosen: Callable[[Difference], bool]
    ) -> list[tuple[float, StrategyRuns]]:
        differences = [(difference, arm) for arm in self.paired(arms) if (difference := self.of(arm))]
        chosen = [(difference.ratio.center, arm) for difference, arm in differences if is_chosen(difference)]
        return sorted(chosen, key=lambda pair: pair[0])

    def headline(
        self, arms: Sequence[StrategyRuns], form: Callable[[float], str], what: str, scope: str, unit: str = ""
    ) -> Headline:
        """Return the range of the significant ratios with the strategies at its ends.

        If none is significant, it is the number of those tested. If none is tested, it is the range of the ratios,
        which are named so. A single ratio has its workload instead of the scope.
        """
        tested = [arm for arm in arms if self.is_tested(arm)]
        ratios = self.significant(arms) if tested else self.untested(arms)
        differences = self.differences(arms)
        if not ratios and tested:
            words = caption("comparison", "significant")
            return Headline(f"0 of {len(tested)}", words, scope=scope, bounds=untested_text(differences))
        if not ratios:
            return Headline(f"0 of {len(arms)}", caption("comparison", "tested"), scope=scope)
        ends = find_ends(ratios, form)
        place = ratios[0][1].workload if len(ratios) == 1 else scope
        seeds = 0 if tested else common_seeds(differences)
        return Headline(ends.text + unit, what, ends.names, place, verdicts_text(differences), seeds)

    def differences(self, arms: Iterable[StrategyRuns]) -> list[Difference]:
        """Return the differences of the strategies that have a base."""
        return [difference for arm in arms if (difference := self.of(arm))]

    def cell(self, form: Callable[[float], str]) -> Callable[[StrategyRuns], Cell]:
        """Return a function that makes the cell of a strategy's ratio, with its interval and its mark."""

        def cell(arm: StrategyRuns) -> Cell:
            difference = self.of(arm)
            if difference is None:
                return form(1.0) if arm.name == self.find_base(arm) else NOT_MEASURED
            if not difference.ratio.n:
                return NOT_MEASURED
            return MarkedText(difference.ratio.brief(form), difference.mark)

        return cell

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the footnote that explains the intervals, if one includes 1."""
        arms = itertools.chain(*self.by_workload.values())
        marks = {difference.mark for difference in self.differences(arms)}
        return footnotes("comparison", {"interval": NOT_SIGNIFICANT_MARK in marks})


class Ends(NamedTuple):
    """The first and the last value as a text, and their strategies."""

    text: str
    names: str


def find_ends(pairs: Sequence[tuple[float, StrategyRuns]], form: Callable[[float], str]) -> Ends:
    """Return the ends of an ordered range; the first alone if both have the same text."""
    texts = {form(value): name_with_settings(arm.name) for value, arm in (pairs[-1], pairs[0])}
    in_order = list(reversed(texts.items()))
    return Ends(" to ".join(text for text, _ in in_order), " to ".join(dict.fromkeys(name for _, name in in_order)))


def name_with_settings(arm: str) -> str:
    """Return a strategy with the number of its changed settings, which are long."""
    name = read_arm(arm)
    return f"{name.label}, settings changed: {len(name.settings)}" if name.settings else name.label


def mark_notes(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the meaning of the marks in the cells of a table."""
    marks = {cell.mark for cell in cells if isinstance(cell, MarkedText)}
    return footnotes("comparison", {"unsure": NOT_SIGNIFICANT_MARK in marks, "few": NOT_TESTED_MARK in marks})


def verdicts_text(differences: Sequence[Difference]) -> str:
    """Return how many differences are not significant, and how many are not tested; empty if all are significant."""
    marks = [difference.mark for difference in differences]
    count = marks.count(NOT_SIGNIFICANT_MARK)
    others = caption("comparison", "others", count=count, total=len(marks)) if count else ""
    return "; ".join(filter(None, (others, untested_text(differences))))


def untested_text(differences: Sequence[Difference]) -> str:
    """Return how many differences are not tested; empty if all are."""
    marks = [difference.mark for difference in differences]
    count = marks.count(NOT_TESTED_MARK)
    if not count:
        return ""
    name = "untested" if count < len(marks) else "all_untested"
    return caption("comparison", name, count=count, total=len(marks))


def common_seeds(differences: Iterable[Difference]) -> int:
    """Return the number of seeds of each difference that has any; 0 if it is not the same for all."""
    counts = {difference.ratio.n for difference in differences if difference.ratio.n}
    return counts.pop() if len(counts) == 1 else 0


def format_references(names: Iterable[str]) -> str:
    """Return the reference; if workloads have different ones, that each has its own."""
    different = list(dict.fromkeys(names))
    return f"its workload's {format_names(different, 'or')}" if len(different) > 1 else format_names(different)


def noise_notes(by_workload: Workloads, figure: str) -> tuple[str, ...]:
    """Return the noise of each workload and what its seeds can show, each text once."""
    notes = dict[str, None]()
    for workload, strategies in by_workload.items():
        floor, smallest, seeds = least_difference(strategies, figure)
        if floor is None:
            notes[caption("noise", "one_run")] = None
            continue
        residual = {"workload": workload, "sd": percent(floor.log_sd), "df": floor.df}
        if smallest is None:
            notes[caption("noise", "few", **residual)] = None
        else:
            notes[caption("noise", "least", seeds=seeds, least=percent(smallest), **residual)] = None
    return tuple(notes)


def least_difference(strategies: Sequence[StrategyRuns], figure: str) -> tuple[Noise | None, float | None, int]:
    """Return a workload's noise, its least significant difference, None without a test, and the number of seeds."""
    floor, seeds = estimate_noise(strategies[0].workload_runs, figure), strategies[0].logs(figure).count()
    tested = sum(arm.is_fair() and seeds.get(arm.name, 0) >= MIN_SAMPLE for arm in strategies)
    count = int(seeds.max())
    smallest = None if floor is None else floor.least_significant_difference(count, math.comb(tested, 2))
    return floor, smallest, count


def without_offload(by_workload: Workloads) -> dict[str, list[StrategyRuns]]:
    """Return the workloads without offload, unless the same stage did not run without it."""
    return {
        workload: [arm for arm in arms if not (arm.is_offloaded and len(arm.ok_runs) and arm.unoffloaded)]
        for workload, arms in by_workload.items()
    }


def arm_table(
    strategies: Iterable[StrategyRuns], figures: Callable[[StrategyRuns], Row], confound: str = "confounded"
) -> pd.DataFrame:
    return to_table(arm.row(figures(arm), confound) for arm in strategies)


def by_arms(by_workload: Workloads) -> list[str]:
    """Return the workloads, the one with most strategies first."""
    return sorted(by_workload, key=lambda workload: -len(by_workload[workload]))


def shown_workloads(by_workload: Workloads, only: str = "") -> list[str]:
    """Return the workloads of an answer's table: this one, or those with most strategies."""
    return [only] if only else by_arms(by_workload)[:_MAX_WORKLOADS]


def answer_by_strategy(
    by_workload: Workloads,
    columns: Columns,
    notes: Iterable[str] = (),
    headlines: Sequence[Headline] = (),
    only: str = "",
    leads: bool = True,
) -> Answer:
    """Return an answer with one row per strategy and one column per figure and workload.

    Its notes name the strategies that are not comparable.
    """
    chosen = shown_workloads(by_workload, only)
    strategies = [arm for workload in chosen for arm in by_workload[workload]]
    places = {arm.name: strategy_order(arm.value("strategy")) for arm in strategies}
    order = sorted(places, key=lambda name: places[name])

    def cell(arm: StrategyRuns, heading: str) -> Cell:
        if len(arm.ok_runs):
            return columns[heading](arm)
        return str(arm.value("status_state")) if heading == next(iter(columns)) else NOT_MEASURED

    def text(arm: StrategyRuns, cell: Cell) -> str:
        written = cell_text(cell)
        has_figure = len(arm.ok_runs) and written != NOT_MEASURED
        return written + _CONFOUNDED if has_figure and not arm.is_fair() else written

    cells: list[Cell] = []
    texts = {("", "Strategy"): order}
    for workload, heading in ((workload, heading) for workload in chosen for heading in columns):
        by_name = {arm.name: (arm, cell(arm, heading)) for arm in by_workload[workload]}
        cells += [value for _, value in by_name.values()]
        texts[workload, heading] = [text(*by_name[name]) if name in by_name else NOT_MEASURED for name in order]
    table = pd.DataFrame(texts)
    if len(chosen) == 1:
        table.columns = table.columns.droplevel(0)
    more = len(by_workload) - len(chosen)
    hidden = footnotes("comparison", {"workloads": more > 0}, more=more)
    all_notes = (*notes, *mark_notes(cells), *arm_notes(strategies), *hidden)
    return Answer(table, headlines, all_notes, subject=chosen[0], leads=leads)


def arm_notes(strategies: Iterable[StrategyRuns], confound: str = "confounded") -> tuple[str, ...]:
    """Return the reasons against a comparison and the runs that did not succeed: each once, with its strategies."""
    reasons: dict[tuple[str, str, str], dict[str, None]] = {}
    for arm in strategies:
        if len(arm.ok_runs) and not arm.is_fair(confound):
            why = str(comparability(arm.ok_runs, arm.baseline, confound))
            reasons.setdefault(("unfair", "", why), {})[arm.name] = None
        for state, reason in zip(arm.runs["status_state"], arm.runs["status_reason"], strict=True):
            if state != "ok":
                why = reason if isinstance(reason, str) else ""
                reasons.setdefault(("ended_why" if why else "ended", state, why), {})[arm.name] = None
    notes = [
        caption("comparison", name, names=", ".join(f"`{arm}`" for arm in arms), state=state, reason=why)
        for (name, state, why), arms in reasons.items()
    ]
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [caption("comparison", "notes", more=len(notes) - _MAX_NOTES)]
    return tuple(notes)
