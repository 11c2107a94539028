"""`study releases [RELEASE]`: whether a release of DeepSpeed computes DDP's gradients, and the grid of tested releases.

It reads the document that `make releases` writes from the records, and imports neither pandas nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study.config.errors import UserError
from study.config.printing import TextTable, print_page
from study.config.strategies import read_strategy
from study.host.stacks import package_version
from study.releases import bisect
from study.releases.causes import GRID, PACKAGES, Cause, known_faults, read_causes

# Marks strategies without a verdict in the grid.
NOT_RUN = "not run"
# Marks a verdict by DeepSpeed's source: a fault of CPUs crashed the run.
DAGGER = "\N{DAGGER}"
# Releases in README.md, and without --details.
LATEST_RELEASES = 8
EPILOG = "`study releases bisect STRATEGY` finds the release that introduced or fixed a fault, by training."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("release", nargs="?", metavar="RELEASE", help="a DeepSpeed release such as 0.18.9; default: the installed one")
    add("strategy", nargs="?", metavar="STRATEGY", help="judge this strategy alone; after the word bisect: bisect it")
    add("--details", action="store_true", help="print all tested releases")
    bisect.add_arguments(parser.add_argument_group("options of bisect"))


def run(options: argparse.Namespace) -> int:
    """Print the verdict, the grid and the causes; or bisect."""
    if options.release == "bisect":
        return bisect.run(options)
    if options.release and not re.fullmatch(r"\d+(\.\d+)+", options.release):
        raise UserError(f"{options.release!r} is not a release of DeepSpeed", "write a release such as 0.18.9")
    if options.strategy:
        read_strategy(options.strategy)
    document = json.loads(GRID.read_text(encoding="utf-8"))
    if any(row["DeepSpeed"] == f"{options.release}.0" for row in document["releases"]):
        options.release += ".0"
    print_page(releases_text(document, options.release, options.strategy, options.details))
    return 0


def releases_text(
    document: Mapping[str, Any], release: str | None, strategy: str | None = None, details: bool = False
) -> list[str | TextTable]:
    """Return the verdict on a release, by default the installed one, then rows and causes."""
    rows = document["releases"]
    if not details:
        rows = [row for row in rows if row["DeepSpeed"] == release] or rows[:LATEST_RELEASES]
    verdict, release_faults = _verdict(document, release, strategy)
    printed = {row["DeepSpeed"] for row in rows}
    muon = {name: faults.replace("`", "") for name, faults in document["muon"].items() if name in printed}
    by_letter = dict(shown_causes(document, [*rows, muon])) | release_faults
    notes = [
        "tested with AdamW and one backward call per micro-batch",
        *["bf16-engine: DeepSpeed's bf16 section, 16-bit weights with fp32 masters"]
        * any("bf16-engine" in cause.precisions for cause in by_letter.values()),
        *(["with Muon: " + "; ".join(f"{name} {faults}" for name, faults in muon.items())] if muon else []),
        f"faults that only CPUs have are left out; {DAGGER}: from DeepSpeed's source, since a CPU bug crashes the run",
    ]
    table = TextTable(list(rows[0]), [[text.replace("`", "") for text in row.values()] for row in rows])
    causes = []
    for letter, cause in sorted(by_letter.items()):
        # The grid has its strategies.
        change = re.sub(r"https://github.com/([^/]+/[^/]+)/(?:pull|issues)/(\d+)", r" by \1#\2", cause.left.change)
        fixed = f" (fixed in {cause.left.release}{change})" if cause.left.release else ""
        causes.append(f"{letter}: {cause.title}{_precisions(cause)}{fixed}")
    more = [] if details else ["--details prints all tested releases"]
    return [verdict, "", table, "", *causes, *notes, document["tested"], *more]


def shown_causes(document: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, Cause]]:
    """Yield the letter and the cause of each fault in these rows of the grid."""
    letters = {match for row in rows for text in row.values() for match in re.findall(r"\b(\w): ", text)}
    for cause in read_causes():
        if (letter := document["letters"].get(cause.id)) in letters:
            yield letter, cause


def _verdict(document: Mapping[str, Any], release: str | None, strategy: str | None) -> tuple[str, dict[str, Cause]]:
    """Return the first line, and the faults of the release by letter."""
    tested = {row["DeepSpeed"]: set(list(row.values())[1:]) for row in document["releases"]}
    installed = {name: package_version(name) for name in PACKAGES}
    deepspeed = (release or installed["deepspeed"] or next(iter(tested))).partition("+")[0]
    versions = {name: installed[name] or document["versions"].get(name) for name in PACKAGES} | {"deepspeed": deepspeed}

    def find_faults(name: str) -> dict[str, Cause]:
        return {
            document["letters"][cause.id]: cause
            for cause in known_faults(versions | {"deepspeed": name}, on_gpu=True)
            if strategy in (None, *cause.strategies)
        }

    faults = find_faults(deepspeed)
    cells = tested.get(deepspeed)
    printed = " ".join(cells or ()).replace("`", "")

    def marked(text: str) -> str:
        return text + DAGGER * (text + DAGGER in printed)

    wrong: dict[str, list[str]] = {}
    for letter, cause in sorted(faults.items()):
        condition = f"{' with accumulation' * (cause.accumulation == 'several')}{_precisions(cause)}"
        wrong.setdefault(condition, []).append(
            f"{', '.join(map(marked, [strategy] if strategy else cause.strategies))} ({letter})"
        )
    notes = ["not tested"] if cells is None else ["does not run with the packages of the test"] * (NOT_RUN in cells)
    if not release and not installed["deepspeed"]:
        notes.append("not installed here, but the newest tested")
    # Faults of one precision alone come last.
    in_order = sorted(wrong.items(), key=lambda item: (" in " in item[0], item[0]))
    faulty = [f"{condition} under {', '.join(places)}".strip() for condition, places in in_order]
    notes += [f"wrong gradients {'; '.join(faulty)}"] * bool(faulty)
    if strategy and faults and all(cause.accumulation == "several" for cause in faults.values()):
        notes.append("without accumulation no fault" + DAGGER * (DAGGER in marked(strategy)))
    if cells is None or NOT_RUN in cells:
        notes.append("run: study verify --quick")
    elif not wrong:
        notes.append("no fault found")
        # An upgrade may stop at a release that is worse.
        newer = list(tested)[: list(tested).index(deepspeed)]
        if strategy and (worse := [name for name in newer if find_faults(name)]):
            notes.append(f"stay, or use {newer[0]}: wrong in {worse[-1]} to {worse[0]}")
    muon = document["muon"].get(deepspeed, "not tested").replace("`", "")
    muon = re.sub(r"(\w): ([^;]+)", r"\2 (\1)", muon).replace(";", ",")
    if cells is not None and muon != "no fault":
        notes.append(f"Muon {muon if muon == 'not tested' else f'wrong under {muon}'}")
    notes += [f"use {next(iter(tested))}"] * bool(wrong)
    where = f", {strategy}" if strategy else ""
    verdict = f"deepspeed {deepspeed} with accelerate {versions['accelerate']}{where}: {'; '.join(notes)}"
    return verdict + f" ({DAGGER}: from its source, not from a run)" * (DAGGER in verdict), faults


def _precisions(cause: Cause) -> str:
    return f" in {', '.join(cause.precisions)}" if cause.precisions else ""
