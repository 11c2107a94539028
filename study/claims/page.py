"""docs/claims.md and the README's lines on claims, from the ledger and the committed records: `make claims`."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import get_args

import pandas as pd

from study.claims.board import Board, JudgedClaim, board
from study.claims.published import PublishedTable, published_tables
from study.claims.verdicts import Verdict
from study.config.strategies import REPOSITORY
from study.report.site.page import table_markdown

PAGE = REPOSITORY / "docs" / "claims.md"
README = REPOSITORY / "README.md"
_LINES = re.compile(r"(<!-- claims -->\n).*?(<!-- end of claims -->)", re.DOTALL)
_HEAD = """# Claims: what holds

<!-- Made by `make claims` from study/claims/ledger.yaml and the records in reports/. Change those. -->

The claims of the replicated documents, and six of the ZeRO paper's, with what the committed records and plain
arithmetic say of them. `study claims` makes all of it anew, without torch or a GPU. `study claims --page FILE` writes
one HTML page with plots, a filter by document and verdict, and what a sceptic asks of the records. The codes
of the documents are in the [README](../README.md#what-it-replicates).

"""
_RULE = """
How several checks make one verdict:

| verdict | when |
| --- | --- |
| supported | every check holds, one of them at the scale that the claim speaks of |
| contradicted | a check that the claim cannot do without fails; or all others do, one of them at the claim's scale |
| partly | some checks hold or fail, and others do not, could not be judged, or were made at another scale only |
| inside noise | nothing is decided, and an interval lies across what is claimed |
| inconclusive | no record here can judge it yet |
| untestable | no record of this study ever could; the ledger says what would |

What "Overturned if" names is what a failing check has shown of its part of the claim: where another part holds, or
could not be judged, the verdict is partly. A check that the claim cannot do without counts where it fails alone.

Where two claims disagree, a check is `disputed`: one of them is wrong, and it does not say which. Model state counts 16
bytes a parameter, as Adam in mixed precision keeps them, unless a check says otherwise.
"""
_TABLES = """
## Published tables

`study claims check-table FILE` holds a table of models, GPUs, strategies and gigabytes against arithmetic, row by row:

| verdict | when |
| --- | --- |
| impossible | it says less than 16-bit weights and gradients alone take on one GPU, or more than the device has |
| suspicious | it says less than these and Adam in mixed precision: another optimizer or precision, or an error |
| possible | it says that or more |

A row that trains adapters alone needs its frozen weights and no more; the column `trains` says so, and in how many bits
they are. A figure gets the benefit of its last digit, and of GiB written as GB. The tables are in
[study/claims/tables](../study/claims/tables).
"""


def address(claim: str, folder: Path) -> str:
    """Of a claim's entry as seen from a folder; nothing from one that is not in this repository."""
    here = folder.resolve()
    is_inside = here.is_relative_to(REPOSITORY.resolve())
    return f"{os.path.relpath(PAGE.resolve(), here)}#{anchor(claim)}" if is_inside else ""


def anchor(claim: str) -> str:
    return claim.lower()


def page(made: Board) -> str:
    verdicts = get_args(Verdict)
    rows = [[name, *(counts[each] or "-" for each in verdicts), counts.total()] for name, counts in made.counts()]
    text = _HEAD + table_markdown(pd.DataFrame(rows, columns=["document", *verdicts, "claims"])) + _RULE
    for document in made.ledger.documents:
        text += f"\n## {document.code}: {document.title}\n\n{document.scale}.\n"
        text += "".join(_claim(each, made) for each in made.judged if each.claim.document == document.code)
    return text + _corrections(made) + _TABLES + "".join(map(_table, published_tables()))


def _claim(judged: JudgedClaim, made: Board) -> str:
    claim = judged.claim
    lines = [
        f"\n### {claim.id}\n", f"{claim.says} ({claim.place})\n",
        f"**{judged.verdict.capitalize()}.** {judged.sentence}\n",
        f"- True if: {claim.holds_if} Overturned if: {claim.falls_if}",
    ]  # fmt: skip
    if claim.untestable:
        lines.append(f"- Not testable here: {claim.untestable}")
    for check, finding in zip(claim.checks, judged.findings, strict=True):
        lines.append(f"- {finding.kind}, {finding.answer}{check.role}: {finding.sentence}.")
        if finding.figure and finding.figure.records:
            runs = finding.figure.records
            more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
            lines.append(f"  Rests on `{runs[0]}`{more}.")
    if claim.protocol:
        lines.append(f"- Published protocol: {claim.protocol.published} Here: {claim.protocol.here}")
    lines += [f"- Another explanation: {each}" for each in claim.alternatives]
    lines += [f"- Contradicts {ids}: {why}" for ids, why in made.contradictions_of(claim.id)]
    if settle := claim.settle:
        lines.append(f"- Would say more: `{settle.command}`, about {settle.minutes:g} minutes on {settle.box}.")
    return "\n".join(lines) + "\n"


def _corrections(made: Board) -> str:
    rows = [f"- {each.date}, [{each.claim}](#{anchor(each.claim)}): {each.what} {each.why}\n"
            for each in made.ledger.corrections]  # fmt: skip
    return "\n## Corrections\n\n" + ("".join(rows) or "None yet.\n")


def _table(table: PublishedTable) -> str:
    rows = [
        {"model": row.model, "GPUs": str(row.gpus), "strategy": row.strategy, "trains": row.trains,
         "on one GPU": row.said_gb, "verdict": each.plausibility, "why": each.why}
        for each in table.rows for row in (each.row,)
    ]  # fmt: skip
    return f"\n### {table.title}\n\n{table.address}. {table.note}\n\n{table_markdown(pd.DataFrame(rows))}"


def front_page(made: Board) -> str:
    """The claims that the head of the ledger lists, each with its verdict and the figure that leads to it."""
    found = {each.claim.id: each for each in made.judged}
    counts = made.counts()[-1][1]
    said = [f"{counts[each]} {'are ' * (each == 'supported')}{each}" for each in get_args(Verdict) if counts[each]]
    head = (
        f"Of {counts.total()} published claims {', '.join(said)}, by `make claims` ([all of them](docs/{PAGE.name}))."
        ' "Partly" also stands where every check fails and none was made at the scale that the claim speaks of.'
        " Some of them:"
    )
    return _wrapped(head) + "\n" + "".join(map(_front_line, (found[name] for name in made.ledger.front_page)))


def _front_line(judged: JudgedClaim) -> str:
    claim = judged.claim
    link = f"[{claim.id}](docs/{PAGE.name}#{anchor(claim.id)})"
    return _wrapped(f"- **{judged.verdict.capitalize()}** ({link}): {claim.says} *{judged.sentence}*", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def rewritten(readme: str, made: Board) -> str:
    """A README whose marked lines are what the ledger says today."""
    return _LINES.sub(lambda match: f"{match[1]}\n{front_page(made)}\n{match[2]}", readme)


def main() -> None:
    made = board()
    PAGE.write_text(page(made), encoding="utf-8")
    README.write_text(rewritten(README.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
