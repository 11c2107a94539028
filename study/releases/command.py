"""`study releases [RELEASE]`: whether a release of DeepSpeed computes DDP's gradients, and the grid of tested releases.

It reads the document that `make releases` writes from the records, and imports neither pandas nor DeepSpeed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study.compositions.command import parse_features
from study.compositions.features import read_rows
from study.config.printing import TextTable, print_page
from study.releases import bisect, bisect_features, combinations, costs
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
from study.releases.races import gpu_races

# Marks strategies without a verdict in the grid.
NOT_RUN = "not run"
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
    print_page(releases_text(document, stack, verdict, options.release, options.details))
    return verdict.status


def releases_text(
    document: Mapping[str, Any], stack: JudgedStack, verdict: ReleaseVerdict, release: str | None, details: bool = False
) -> list[str | TextTable]:
    """Return the verdict, then rows and causes: those around a release that was asked for, else the latest."""
    rows = document["releases" if stack.precision == "fp32" else "bf16"]
    if not details:
        rows = nearest_rows(rows, release) if release else rows[:LATEST_RELEASES]
    cells, by_letter = judge_rows(document, stack, rows)
    by_letter |= verdict.faults
    # These matter for one release.
    elsewhere = faults_of_other_pairs(stack) if release or details else []
    by_letter |= {document["letters"][cause.id]: cause for cause in (*elsewhere, *faults_in_bf16(stack))}
    notes = [
        *other_pair_lines(document, stack, elsewhere),
        TESTED_WITH,
        *["bf16-engine: DeepSpeed's bf16 section, 16-bit weights with fp32 masters"]
        * any("bf16-engine" in cause.precisions for cause in by_letter.values()),
        *_muon_lines(document, stack, rows),
        CPU_FAULTS,
    ]
    causes = [cause_line(letter, cause) for letter, cause in sorted(by_letter.items())]
    races = [race.line for race in gpu_races(stack.versions, stack.strategy)] if release else []
    tested = document["tested" if stack.precision == "fp32" else "tested_in_bf16"]
    engine = stack.strategy if stack.strategy in read_rows()["engine"].levels else "zero2"
    combined = f"study releases {stack.deepspeed} --features {engine},accumulation,clipping"
    all_releases = "" if details else "; all releases: --details"
    more = [f"combinations of features are not in the grid: {combined} (all: --features list){all_releases}"]
    changed_costs = []
    if stack.strategy in costs.MEASURED_STRATEGIES:
        changed_costs = costs.later_changes(costs.read_costs(), stack.deepspeed, stack.strategy, stack.short_precision)
    return [
        verdict.text,
        "",
        TextTable(list(rows[0]), cells),
        "",
        *causes,
        *races,
        *notes,
        tested,
        *changed_costs,
        *more,
    ]


def _muon_lines(document: Mapping[str, Any], stack: JudgedStack, rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the faults of DeepSpeed's Muon in these releases; nothing if one strategy was asked for."""
    printed = {row["DeepSpeed"] for row in rows}
    muon = {name: faults.replace("`", "") for name, faults in document["muon"].items() if name in printed}
    if muon and not stack.strategy:
        yield "with Muon: " + "; ".join(f"{name} {faults}" for name, faults in muon.items())
