"""docs/claims.md from the ledger and the committed records.

python -m study.claims.page            writes it
python -m study.claims.page --check    exit status 1 when it is stale
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from study.claims.board import Board, Judged, board
from study.claims.verdicts import Verdict
from study.spec.strategies import REPOSITORY

PAGE = REPOSITORY / "docs" / "claims.md"
_HEAD = """# Claims: what holds

<!-- Made by `make claims` from study/claims/ledger.yaml and the records in reports/. Change those. -->

Every claim of the replicated documents and of the ZeRO paper, with what the committed records and plain arithmetic say
of it. `study claims` makes all of it anew, without torch or a GPU, and `study claims check-table FILE` holds any other
table of models, GPUs, strategies and gigabytes against the same arithmetic. The codes of the documents are in the
[README](../README.md#what-it-replicates).

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

Where two claims disagree, a check is `disputed`: one of them is wrong, and it does not say which. Model state counts 16
bytes a parameter, as Adam in mixed precision keeps them, unless a check says otherwise.
"""


def page(made: Board) -> str:
    verdicts = get_args(Verdict)
    lines = ["| document | " + " | ".join(verdicts) + " | claims |", "| --- " * (len(verdicts) + 2) + "|"]
    for name, counts in made.counts():
        lines.append(f"| {name} | " + " | ".join(str(counts[each] or "-") for each in verdicts)
                     + f" | {counts.total()} |")  # fmt: skip
    text = _HEAD + "\n".join(lines) + "\n" + _RULE
    for document in made.ledger.documents:
        text += f"\n## {document.code}: {document.title}\n\n{document.scale}.\n"
        text += "".join(_claim(each, made) for each in made.judged if each.claim.document == document.code)
    return text


def _claim(judged: Judged, made: Board) -> str:
    claim = judged.claim
    lines = [
        f"\n### {claim.id}: {judged.verdict}\n", f"{claim.says} ({claim.place})\n", f"**{judged.sentence}**\n",
        f"- True if: {claim.holds_if} Overturned if: {claim.falls_if}",
    ]  # fmt: skip
    if claim.untestable:
        lines.append(f"- Not testable here: {claim.untestable}")
    for check, finding in zip(claim.checks, judged.findings, strict=True):
        role = ", cannot do without it" if check.necessary else ", at another scale" if check.elsewhere else ""
        lines.append(f"- {finding.kind}, {finding.answer}{role}: {finding.sentence}.")
        if finding.figure and finding.figure.records:
            runs = finding.figure.records
            more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
            lines.append(f"  Rests on `{runs[0]}`{more}.")
    lines += [f"- Contradicts {ids}: {why}" for ids, why in made.contradictions_of(claim.id)]
    if settle := claim.settle:
        lines.append(f"- Would say more: `{settle.command}`, about {settle.minutes:g} minutes on {settle.box}.")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when it is stale")
    options = parser.parse_args()
    made = page(board())
    if Path(PAGE).is_file() and PAGE.read_text(encoding="utf-8") == made:
        return 0
    if options.check:
        print(f"{PAGE.relative_to(REPOSITORY)} is stale: run `make claims`", file=sys.stderr)
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
