"""`study claims --compare`: answers of other readers and the ledger's findings, with agreement and kappa."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from study.claims.blind import COLUMNS
from study.claims.verdicts import FindingKind
from study.config.errors import UserError, did_you_mean
from study.records.shares import share_interval

READINGS = Path(__file__).with_name("readings")
FINDINGS: tuple[str, ...] = get_args(FindingKind)
# A stored reading has the ledger's findings on its day, since an entry that a reading mends agrees with it later.
_THEN = "ledger_then"
Pairs = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class BlindReading:
    """One reader's findings by claim, with their reasons and objections to the form."""

    reader: str
    findings: Mapping[str, str]
    reasons: Mapping[str, str]
    objections: Mapping[str, str]
    # The ledger's findings when the reader answered; empty if the file has none.
    then: Mapping[str, str]

    def pairs(self, ledger: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return the ledger's finding and the reader's for each claim that both have."""
        return [(ledger[claim], finding) for claim, finding in self.findings.items() if claim in ledger]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The number of equal findings of two readers, with an interval and Cohen's kappa."""

    same: int
    claims: int
    kappa: float | None

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of the share of equal findings."""
        return share_interval(self.same, self.claims)

    @property
    def share_text(self) -> str:
        """Share in percent, with its interval."""
        low, high = self.interval
        return f"{100 * self.same / self.claims:.0f} % ({100 * low:.0f} to {100 * high:.0f})"

    @property
    def kappa_text(self) -> str:
        """Kappa with two decimals; a dash where both gave one finding to all claims."""
        return "-" if self.kappa is None else f"{self.kappa:.2f}"


def agreement(pairs: Pairs) -> Agreement:
    """Return the agreement of pairs of findings. Kappa is None if chance alone makes them equal."""
    total = len(pairs)
    same = sum(first == second for first, second in pairs)
    firsts, seconds = (Counter(side) for side in zip(*pairs, strict=True))
    by_chance = sum(firsts[finding] * seconds[finding] for finding in firsts) / total**2
    kappa = None if by_chance == 1 else (same / total - by_chance) / (1 - by_chance)
    return Agreement(same, total, kappa)


def read_answers(file: Path, claims: Iterable[str]) -> BlindReading:
    """Read a reader's table, alone or at the end of the form; raise UserError for an answer that is not understood."""
    ids = list(claims)
    rows: dict[str, dict[str, str]] = {}
    for place, cells in _read_table(file):
        claim = cells["claim"].upper()
        if claim not in ids:
            raise UserError(f"{place}: {claim[:40]!r} is not a claim", did_you_mean(claim, ids) or "see study claims")
        if claim in rows:
            raise UserError(f"{place}: {claim} has two answers", "remove one")
        for name in ("finding", _THEN):
            cells[name] = cells[name].lower()
            if cells[name] and cells[name] not in FINDINGS:
                raise UserError(f"{place}: {name} is {cells[name][:40]!r}", f"use one of {', '.join(FINDINGS)}")
        rows[claim] = cells
    columns = (
        {claim: cells[name] for claim, cells in rows.items() if cells["finding"] and cells[name]}
        for name in (*COLUMNS[1:], _THEN)
    )
    findings, reasons, objections, then = columns
    if not findings:
        raise UserError(f"{file} has no answers", "write a finding into each row")
    return BlindReading(file.stem, findings, reasons, objections, then)


def _read_table(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield FILE:LINE and the cells of each row below the last line of column names."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}", "name a file of answers") from None
    starts = [place for place, line in enumerate(lines) if line.startswith("claim,finding")]
    if not starts:
        raise UserError(f"{file} has no line `{','.join(COLUMNS)}`", "use the table of study claims --blind 20")
    table = csv.DictReader(lines[starts[-1] :])
    for row in table:
        place = f"{file}:{starts[-1] + table.line_num}"
        if None in row:
            raise UserError(f"{place}: more cells than columns", "write a text with commas in quotes")
        cells = {name: " ".join((row.get(name) or "").split()) for name in (*COLUMNS, _THEN)}
        if cells["claim"]:
            yield place, cells


@dataclasses.dataclass(frozen=True)
class ReadingComparison:
    """Answers of several readers and the ledger's findings."""

    readings: Sequence[BlindReading]
    # The claims of `study claims --json`, by id.
    claims: Mapping[str, Mapping[str, Any]]

    @property
    def ledger(self) -> dict[str, str]:
        """The ledger's findings by claim."""
        return {name: claim["finding"] for name, claim in self.claims.items()}

    def by_reader(self) -> list[tuple[BlindReading, Agreement, Agreement | None]]:
        """Return each reader's agreement with the ledger of today, and with that of the day of the reading."""
        return [
            (
                reading,
                agreement(reading.pairs(self.ledger)),
                agreement(reading.pairs(reading.then)) if reading.then else None,
            )
            for reading in self.readings
        ]

    def by_finding(self) -> dict[str, tuple[int, int, int]]:
        """Return for each of the ledger's findings how many claims, answers and equal answers there are."""
        rows: dict[str, tuple[int, int, int]] = {}
        for finding in FINDINGS:
            answers = [
                (claim, answer)
                for reading in self.readings
                for claim, answer in reading.findings.items()
                if self.ledger[claim] == finding
            ]
            if answers:
                same = sum(answer == finding for _, answer in answers)
                rows[finding] = (len({claim for claim, _ in answers}), len(answers), same)
        return rows

    def among_readers(self) -> list[tuple[str, str, Agreement]]:
        """Return the agreement of each pair of readers that answered the same claims."""
        return [
            (first.reader, second.reader, agreement(second.pairs(first.findings)))
            for first, second in itertools.combinations(self.readings, 2)
            if second.pairs(first.findings)
        ]

    def differences(self) -> list[dict[str, Any]]:
        """Return each claim that a reader found otherwise, with all answers, their reasons, and the ledger's."""
        rows = []
        for name, claim in self.claims.items():
            answers = {item.reader: item.findings[name] for item in self.readings if name in item.findings}
            if set(answers.values()) <= {claim["finding"]}:
                continue
            reasons = {
                item.reader: item.reasons.get(name, "")
                for item in self.readings
                if answers.get(item.reader, claim["finding"]) != claim["finding"]
            }
            rows.append(
                {
                    "claim": name,
                    "ledger": claim["finding"],
                    "ledger_reason": f"{claim['sentence']} {claim['finding_text']}.",
                    "answers": answers,
                    "reasons": reasons,
                }
            )
        return rows

    def objections(self) -> list[tuple[str, str, str]]:
        """Return what readers would set otherwise in the form: the claim, the reader and the text."""
        return [
            (claim, item.reader, text)
            for claim in self.claims
            for item in self.readings
            if (text := item.objections.get(claim))
        ]

    def document(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {
            "readers": [
                {"reader": reading.reader, **_document(today), "when_read": then and _document(then)}
                for reading, today, then in self.by_reader()
            ],
            "among_readers": [
                {"readers": [first, second], **_document(agreed)} for first, second, agreed in self.among_readers()
            ],
            "findings": {
                finding: {"claims": claims, "answers": answers, "same": same}
                for finding, (claims, answers, same) in self.by_finding().items()
            },
            "differences": self.differences(),
            "objections": [
                {"claim": claim, "reader": reader, "objection": text} for claim, reader, text in self.objections()
            ],
        }


def _document(agreed: Agreement) -> dict[str, Any]:
    return {"claims": agreed.claims, "same": agreed.same, "interval": agreed.interval, "kappa": agreed.kappa}


def compare(files: Sequence[Path], claims: Sequence[Mapping[str, Any]]) -> ReadingComparison:
    """Compare files of answers to claims of `study claims --json`."""
    by_id = {claim["id"]: claim for claim in claims}
    readings = [read_answers(file, by_id) for file in files]
    twice = [name for name, count in Counter(item.reader for item in readings).items() if count > 1]
    if twice:
        raise UserError(f"two files are named {twice[0]}", "name each file after its reader")
    return ReadingComparison(readings, by_id)


def store(file: Path, claims: Sequence[Mapping[str, Any]], folder: Path = READINGS) -> Path:
    """Write answers to a file of `folder`, with the ledger's findings of today; raise UserError if it exists."""
    ledger = {claim["id"]: claim["finding"] for claim in claims}
    reading = read_answers(file, ledger)
    target = folder / f"{reading.reader}.csv"
    if target.exists():
        raise UserError(f"{target} exists", "name the file after another reader")
    folder.mkdir(exist_ok=True)
    with target.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow([*COLUMNS, _THEN])
        for claim, finding in reading.findings.items():
            texts = reading.reasons.get(claim, ""), reading.objections.get(claim, "")
            table.writerow([claim, finding, *texts, reading.then.get(claim, ledger[claim])])
    return target


def stored_comparison(claims: Sequence[Mapping[str, Any]]) -> ReadingComparison:
    """Return the comparison of the committed readings."""
    return compare(sorted(READINGS.glob("*.csv")), claims)


def main() -> None:
    """Store the answers of readers: python -m study.claims.agreement FILE..."""
    from study.claims.scoreboard import build_scoreboard

    claims = build_scoreboard().document()["claims"]
    for name in sys.argv[1:]:
        print(store(Path(name), claims))


if __name__ == "__main__":
    main()
