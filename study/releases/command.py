"""`study releases [RELEASE]`: whether a release of DeepSpeed computes DDP's gradients, and the grid of tested releases.

It reads the document that `make releases` writes from the records, and imports neither pandas nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study.compositions.command import parse_features
from study.compositions.features import read_rows
from study.config.printing import TextTable, print_result
from study.releases import bisect, bisect_features, combinations, costs
from study.releases.causes import LOOPS, Cause
from study.releases.judge import (
    CPU_FAULTS,
    TESTED_WITH,
    ReleaseVerdict,
    add_stack_arguments,
    cause_line,
    check_words,
    faults_in_bf16,
    faults_of_other_pairs,
    judge_request,
    judge_rows,
    nearest_rows,
    other_pair_lines,
)
from study.releases.judged_stack import JudgedStack
from study.releases.races import GpuRace, gpu_races

# Releases in README.md, and without a release on the command line.
LATEST_RELEASES = 8
EPILOG = """\
The grid is of strategies alone; `study releases RELEASE --features A,B,...` answers for a combination of features.
`study releases bisect STRATEGY`, or with --features A,B,..., finds the release that introduced or fixed a fault, by
training. `study releases costs [--features A,B,...]` prints memory, communication and host time of a step by release,
with all changes. The exit status is 0 if no fault was found, 1 with a known fault, and 3 if this was not tested.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stack_arguments(parser)
    # Words that are too many: the refusal has a complete command.
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--details", action="store_true", help="print all tested releases")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    parser.add_argument(
        "--features",
        type=parse_features,
        metavar="A,B,...",
        default=argparse.SUPPRESS,
        help="judge a combination such as zero2,muon,accumulation; `--features list` prints all features",
    )
    bisect.add_arguments(parser.add_argument_group("options of bisect"))
    costs.add_arguments(parser.add_argument_group("options of costs"))


def run(options: argparse.Namespace) -> int:
    """Print the verdict, the grid and the causes, and return the verdict's exit status; or bisect."""
    check_words(options)
    if options.release == "bisect":
        return bisect_features.run(options) if hasattr(options, "features") else bisect.run(options)
    bisect.check_flags(options)
    if options.release == "costs":
        return costs.run(options)
    if hasattr(options, "features"):
        return combinations.judge_features(options)
    document, stack, verdict = judge_request(options)
    answer = find_answer(document, stack, verdict, options.release, options.details)
    print_result(options.json, answer.document, answer.page())
    return verdict.status


@dataclasses.dataclass(frozen=True)
class ReleaseAnswer:
    """The verdict on a stack, with rows of the grid and the causes in them."""

    stack: JudgedStack
    verdict: ReleaseVerdict
    columns: list[str]
    rows: list[list[str]]
    # Of the verdict and of the rows, by letter.
    causes: Mapping[str, Cause]
    races: list[GpuRace]
    notes: list[str]
    # Of memory and communication, in later releases.
    changed_costs: list[str]
    # Further commands.
    more: str

    def document(self) -> dict[str, Any]:
        """Return the answer as --json prints it."""
        return {
            "packages": self.stack.versions,
            "strategy": self.stack.strategy,
            "precision": self.stack.short_precision,
            "status": self.verdict.status,
            "verdict": self.verdict.text,
            "untested": self.verdict.untested,
            "faults": sorted(self.verdict.faults),
            "wrong_combinations": dict(self.verdict.wrong_combinations),
            "grid": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "causes": {
                letter: _cause_document(cause, self.stack.versions) for letter, cause in sorted(self.causes.items())
            },
            "races": [_race_document(race) for race in self.races],
            "notes": self.notes,
            "changed_costs": self.changed_costs,
        }

    def page(self) -> list[str | TextTable]:
        """Return the parts of the printed answer."""
        return [
            self.verdict.text,
            "",
            TextTable(self.columns, self.rows),
            "",
            *(cause_line(letter, cause) for letter, cause in sorted(self.causes.items())),
            *(race.line for race in self.races),
            *self.notes,
            *self.changed_costs,
            self.more,
        ]


def _cause_document(cause: Cause, versions: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        "id": cause.id,
        "title": cause.title,
        "strategies": cause.strategies,
        "precisions": cause.precisions,
        "needs_accumulation": cause.accumulation == "several",
        "loops": [loop for loop in LOOPS if cause.is_in_loop(loop, versions)],
        "ends_training": cause.ends_training,
        "optimizer": cause.optimizer,
        "releases": dict(cause.releases),
        "fixed_in": cause.left.release or None,
        "fixed_by": cause.left.change or None,
    }


def _race_document(race: GpuRace) -> dict[str, Any]:
    return {
        "id": race.id,
        "title": race.title,
        "strategies": race.strategies,
        "releases": dict(race.releases),
        "condition": race.condition or None,
        "fixed_in": race.fix.release or None,
        "fixed_by": race.fix.change or None,
    }


def find_answer(
    document: Mapping[str, Any], stack: JudgedStack, verdict: ReleaseVerdict, release: str | None, details: bool = False
) -> ReleaseAnswer:
    """Return a verdict and the rows around the requested release, else the latest; `details`: all rows."""
    rows = document["releases" if stack.precision == "fp32" else "bf16"]
    if not details:
        rows = nearest_rows(rows, release) if release else rows[:LATEST_RELEASES]
    cells, by_letter = judge_rows(document, stack, rows)
    by_letter |= verdict.faults
    # These matter for one release.
    elsewhere = faults_of_other_pairs(stack) if release or details else []
    by_letter |= {document["letters"][cause.id]: cause for cause in (*elsewhere, *faults_in_bf16(stack))}
    has_bf16 = any("bf16-engine" in cause.precisions for cause in by_letter.values())
    notes = [
        *other_pair_lines(document, stack, elsewhere),
        TESTED_WITH,
        *["bf16-engine: DeepSpeed's bf16 section, 16-bit weights with fp32 masters"] * has_bf16,
        *_muon_lines(document, stack, rows),
        CPU_FAULTS,
        document["tested" if stack.precision == "fp32" else "tested_in_bf16"],
    ]
    engine = stack.strategy if stack.strategy in read_rows()["engine"].levels else "zero2"
    combined = f"study releases {stack.deepspeed} --features {engine},accumulation,clipping"
    all_releases = "" if details else "; all releases: --details"
    changed_costs = []
    if stack.strategy in costs.MEASURED_STRATEGIES:
        changed_costs = costs.later_changes(costs.read_costs(), stack.deepspeed, stack.strategy, stack.short_precision)
    return ReleaseAnswer(
        stack=stack,
        verdict=verdict,
        columns=list(rows[0]),
        rows=cells,
        causes=by_letter,
        races=gpu_races(stack.versions, stack.strategy) if release else [],
        notes=notes,
        changed_costs=changed_costs,
        more=f"combinations of features are not in the grid: {combined} (all: --features list){all_releases}",
    )


def _muon_lines(document: Mapping[str, Any], stack: JudgedStack, rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the faults of DeepSpeed's Muon in these releases; nothing if one strategy was asked for."""
    printed = {row["DeepSpeed"] for row in rows}
    muon = {name: faults.replace("`", "") for name, faults in document["muon"].items() if name in printed}
    if muon and not stack.strategy:
        yield "with Muon: " + "; ".join(f"{name} {faults}" for name, faults in muon.items())
