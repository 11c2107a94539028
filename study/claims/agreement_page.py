"""The comparison of readings as tables, for the terminal and for docs/claims.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from study.claims.agreement import Agreement, ReadingComparison
from study.config.printing import TextTable


class ReadingTable(NamedTuple):
    """A table of texts, with a title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def reading_tables(comparison: ReadingComparison) -> list[ReadingTable]:
    """Return the tables of a comparison that have rows: readers, findings, differences and objections."""
    by_reader = comparison.by_reader()
    has_then = any(then for _, _, then in by_reader)
    readers = [
        (
            reading.reader,
            *_columns(today),
            *(([then.share_text, then.kappa_text] if then else ["-", "-"]) if has_then else []),
        )
        for reading, today, then in by_reader
    ]
    then_columns = ("same when read (95 %)", "kappa when read") if has_then else ()
    findings = [
        (finding, str(claims), str(answers), f"{same} ({100 * same / answers:.0f} %)")
        for finding, (claims, answers, same) in comparison.by_finding().items()
    ]
    differences = [
        (
            row["claim"],
            row["ledger"],
            "; ".join(f"{reader}: {finding}" for reader, finding in row["answers"].items()),
            "; ".join(f"{reader}: {reason}" for reader, reason in row["reasons"].items()),
            row["ledger_reason"],
        )
        for row in comparison.differences()
    ]
    tables = [
        ReadingTable("By reader", ("reader", *_AGREEMENT, *then_columns), readers),
        ReadingTable(
            "Readers among themselves",
            ("readers", *_AGREEMENT),
            [(f"{first}, {second}", *_columns(agreed)) for first, second, agreed in comparison.among_readers()],
        ),
        ReadingTable("By the ledger's finding", ("finding", "claims", "answers", "same"), findings),
        ReadingTable(
            "Differences",
            ("claim", "ledger", "readers", "reasons of those who differ", "the ledger's reason"),
            differences,
        ),
        ReadingTable("What readers would set otherwise", ("claim", "reader", "objection"), comparison.objections()),
    ]
    return [table for table in tables if table.rows]


_AGREEMENT = ("claims", "same", "share (95 %)", "kappa")


def _columns(agreed: Agreement) -> tuple[str, ...]:
    return str(agreed.claims), str(agreed.same), agreed.share_text, agreed.kappa_text


def comparison_text(comparison: ReadingComparison) -> Iterator[str | TextTable]:
    """Yield the lines and tables of `study claims --compare`; each long text is a line."""
    for table in reading_tables(comparison):
        yield f"{table.title}:"
        if table.title == "Differences":
            for claim, ledger, readers, reasons, ours in table.rows:
                yield f"  {claim}  ledger: {ledger}; {readers}"
                yield f"    Readers: {reasons}"
                yield f"    Ledger:  {ours}"
        else:
            yield TextTable(table.columns, table.rows, indent=2)
        yield ""
    yield "Kappa: agreement beyond chance, 1 if all are the same (Cohen). Shares have exact binomial intervals."
