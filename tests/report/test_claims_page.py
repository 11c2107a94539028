from __future__ import annotations

import dataclasses
import html
import json
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from study.claims.evidence import Evidence
from study.claims.forms import FORMS
from study.claims.ledger import LEDGER, read_ledger
from study.claims.page import page
from study.claims.preregistration import Order, preregistration_orders
from study.claims.scoreboard import REPORTS, Scoreboard, build_scoreboard, judge
from study.cli import main
from study.records.frames import Records, read_parquet, write_parquet

EVIL = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"


def test_text_of_a_record_is_escaped(tmp_path: Path) -> None:
    records = read_parquet(REPORTS / "laptop")
    runs = records.runs.assign(cpu=EVIL, devices=json.dumps([EVIL]))
    write_parquet(dataclasses.replace(records, runs=runs), tmp_path / "reports" / "laptop")
    text = page(build_scoreboard(tmp_path / "reports"))
    assert "window.harmed" in text
    assert ("<script" in text, "<img" in text) == (False, False)


def test_the_page_has_every_claim_with_its_words_checks_and_arithmetic(full_board: Scoreboard) -> None:
    plain = " ".join(html.unescape(page(full_board)).replace("\\", "").split())
    for judged in full_board.judged:
        assert " ".join(judged.claim.quote.split()) in plain, judged.claim.id
        for result in judged.results:
            assert result.figure is None or result.figure.derivation in plain


def test_a_derivation_comes_to_its_figure(full_board: Scoreboard) -> None:
    forms = set()
    for result in (result for judged in full_board.judged for result in judged.results):
        if result.figure and (text := result.figure.derivation):
            plain = re.sub(r"(?<=[\d)]) (?:B|GB|GPUs|tokens/s|tokens|bytes|s)\b", "", text).replace("x", "*")
            assert eval(plain) == pytest.approx(result.figure.value, rel=1e-3), text
            forms.add(result.check.form)
    assert {name for name, form in FORMS.items() if form.kind == "arithmetic"} <= forms


def test_the_count_of_checks_before_their_records_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--before_records", "S3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    total, before = map(int, re.findall(r"\d+", head))
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows if re.match(r"\s*S3-\d", row)]
    later = sum(int(cell) for row in cells for cell in row[2:] if cell != "-")
    assert before + later <= total
    # Claims whose checks are all older have no row.
    assert (len(cells) > 0) == (before < total)
    for line in ("claims --before_records --json", "claims --before_records check-table x.csv"):
        assert main(line.split()) == 2
        assert "--before_records" in capsys.readouterr().err


def orders_at(commit: str | None, repository: Path) -> list[Order]:
    """Return the order of the checks of S3-02 on laptop records if the given commit had made these."""
    records = read_parquet(REPORTS / "laptop")
    runs = records.runs.assign(git_commit=pd.array([commit] * len(records.runs), dtype="str"))
    evidence = Evidence(REPORTS).with_records("laptop", Records(runs, records.steps))
    (claim,) = [entry for entry in read_ledger().claims if entry.id == "S3-02"]
    checks = tuple(check for check in claim.checks if check.numbers.get("report") == "laptop")
    return preregistration_orders(judge(dataclasses.replace(claim, checks=checks), evidence), evidence, repository)


def commit_ledger(folder: Path, ledger: str) -> str:
    """Commit a ledger with this text to a repository, and return the commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (folder / "study" / "claims").mkdir(parents=True, exist_ok=True)
    (folder / "study" / "claims" / "ledger.yaml").write_text(ledger)
    for command in ("init -q", "add .", "commit -q -m x"):
        git(*command.split())
    return git("rev-parse", "HEAD")


LEDGER_TEXT = LEDGER.read_text(encoding="utf-8")
THRESHOLD = 'over_figure: params, about: 1, within: 0.1, tests: "optimizer states occupy 1 GB", reading: fp32'


def test_git_shows_whether_a_check_was_there_before_its_records(tmp_path):
    repository = tmp_path / "repository"
    for ledger, order in (
        (LEDGER_TEXT, "before"),
        (LEDGER_TEXT.replace("shows: optimizer bytes over", "shows: bytes of the optimizer over"), "before"),
        (LEDGER_TEXT.replace(THRESHOLD, THRESHOLD.replace("1", "2", 1)), "after"),
        ("claims: [", "after"),
    ):
        commit = commit_ledger(repository, ledger)
        assert orders_at(commit, repository)[0] == order
    # Without git or a commit it is unknown.
    for name, folder in ((commit, tmp_path), (None, repository), ("0" * 40, repository), ("--help", repository)):
        assert set(orders_at(name, folder)) == {"unknown"}, name


def test_a_measured_claim_has_other_explanations(full_board: Scoreboard) -> None:
    measured = [
        judged.claim
        for judged in full_board.judged
        if any(finding.check.kind == "measured" and finding.figure for finding in judged.results)
    ]
    assert [claim.id for claim in measured if not claim.alternatives] == [], "add alternatives:, such as *cpu_ranks"
