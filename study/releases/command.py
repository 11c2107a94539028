"""`study releases [RELEASE]`: whether a release of DeepSpeed computes DDP's gradients, and the grid of tested releases.

It reads the document that `make releases` writes from the records, and imports neither pandas nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study.config.errors import UserError
from study.config.printing import TextTable, print_page
from study.host.stacks import package_version
from study.releases import bisect
from study.releases.causes import GRID, PACKAGES, Cause, known_faults, read_causes

# Marks strategies without a verdict in the grid.
NOT_RUN = "not run"
# Releases in README.md, and without --details.
LATEST_RELEASES = 8
EPILOG = "`study releases bisect STRATEGY` finds the release that introduced or fixed a fault, by training."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("release", nargs="?", metavar="RELEASE", help="a DeepSpeed release such as 0.18.9; default: the installed one")
    add("strategy", nargs="?", metavar="STRATEGY", help="only after the word bisect, in place of RELEASE")
    add("--details", action="store_true", help="print all tested releases")
    bisect.add_arguments(parser.add_argument_group("options of bisect"))


def run(options: argparse.Namespace) -> int:
    """Print the verdict, the grid and the causes; or bisect."""
    if options.release == "bisect":
        return bisect.run(options)
    if options.strategy:
        raise UserError(f"{options.strategy!r} follows a release", "name one release, or: study releases bisect zero1")
    if options.release and not re.fullmatch(r"\d+(\.\d+)+", options.release):
        raise UserError(f"{options.release!r} is not a release of DeepSpeed", "write a release such as 0.18.9")
    print_page(releases_text(json.loads(GRID.read_text(encoding="utf-8")), options.release, options.details))
    return 0


def releases_text(document: Mapping[str, Any], release: str | None, details: bool) -> list[str | TextTable]:
    """Return the verdict on a release, by default the installed one, then the grid and the causes in it."""
    rows = document["releases"][: None if details else LATEST_RELEASES]
    requested = [row for row in document["releases"] if row["DeepSpeed"] == release and row not in rows]
    rows = [*requested, *rows]
    table = TextTable(list(rows[0]), [[text.replace("`", "") for text in row.values()] for row in rows])
    muon = document["muon"]
    more = [] if details else ["--details prints all tested releases"]
    notes = [
        "tested with AdamW and one backward call per micro-batch",
        "with Muon: " + "; ".join(f"{name} {faults}" for name, faults in muon.items()).replace("`", ""),
        "faults that only CPUs have are left out; \N{DAGGER}: from DeepSpeed's source, since a CPU bug ends the run",
    ]
    verdict, faults = _verdict(document, release)
    by_letter = dict(shown_causes(document, [*rows, muon])) | faults
    causes = []
    for letter, cause in sorted(by_letter.items()):
        fixed = f"; fixed in {cause.left.release}" if cause.left.release else ""
        where = f"{cause.where}{_precisions(cause)}{fixed}"
        causes.append(f"{letter}: {cause.title} ({where}) {cause.left.change}".rstrip())
    return [verdict, "", table, "", *causes, *notes, document["tested"], *more]


def shown_causes(document: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, Cause]]:
    """Yield the letter and the cause of each fault in these rows of the grid."""
    letters = {match for row in rows for text in row.values() for match in re.findall(r"\b(\w): ", text)}
    for cause in read_causes():
        if (letter := document["letters"].get(cause.id)) in letters:
            yield letter, cause


def _verdict(document: Mapping[str, Any], release: str | None) -> tuple[str, dict[str, Cause]]:
    tested = [row["DeepSpeed"] for row in document["releases"]]
    installed = {name: package_version(name) for name in PACKAGES}
    deepspeed = release or installed["deepspeed"] or tested[0]
    versions = {name: installed[name] or document["versions"].get(name) for name in PACKAGES} | {"deepspeed": deepspeed}
    faults = {document["letters"][cause.id]: cause for cause in known_faults(versions, on_gpu=True)}
    # A release can mend one fault and bring another: only those after the last faulty one are a remedy.
    clean = list(itertools.takewhile(lambda row: set(list(row.values())[1:]) == {"no fault"}, document["releases"]))
    # Those of one precision alone come last.
    faults = dict(sorted(faults.items(), key=lambda item: (item[1].precisions, item[0])))
    when = " with accumulation" * all(cause.accumulation == "several" or cause.precisions for cause in faults.values())
    listed = ", ".join(f"{letter}{_precisions(cause)}" for letter, cause in faults.items())
    wrong = f"wrong gradients{when}: fault{'s' * (len(faults) > 1)} {listed}"
    wrong += f"; use {clean[-1]['DeepSpeed']} to {clean[0]['DeepSpeed']}" if clean else ""
    row = dict(zip(tested, document["releases"], strict=True)).get(deepspeed.partition("+")[0])
    notes = ["not tested"] if row is None else []
    if row and NOT_RUN in row.values():
        notes.append("does not run with the packages of the test")
    if not release and not installed["deepspeed"]:
        notes.append("not installed here, but the newest tested")
    right = ["no fault found"] * (row is not None and NOT_RUN not in row.values()) or ["run: study verify --quick"]
    muon = document["muon"].get(deepspeed, "no fault").replace("`", "")
    with_muon = [f"with Muon {muon}"] * (muon != "no fault")
    what = "; ".join([*notes, *([wrong] if faults else right), *with_muon])
    return f"deepspeed {deepspeed} with accelerate {versions['accelerate']}: {what}", faults


def _precisions(cause: Cause) -> str:
    return f" in {', '.join(cause.precisions)}" if cause.precisions else ""
