from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from scipy import special

from report.test_claims import OUTCOMES
from study.claims.agreement import FINDINGS, READINGS, agreement, compare, read_answers, store, stored_comparison
from study.claims.blind import COLUMNS, draw, form_lines, is_quoted
from study.claims.ledger import LEDGER, read_ledger
from study.claims.page import page
from study.claims.scoreboard import JudgedClaim, Scoreboard
from study.claims.verdicts import PROXY, CheckResult, combine
from study.cli import main
from study.config.errors import UserError
from study.records.shares import share_interval, share_text, share_upper_bound

CLAIMS = 82


@pytest.fixture(scope="module")
def form(full_board: Scoreboard) -> str:
    """Return the form with every claim."""
    return "\n".join(form_lines(full_board, draw(full_board.judged, CLAIMS, 1), 1))


@pytest.fixture
def judged_once(full_board: Scoreboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a command the findings that these tests have; to judge the records takes seconds."""
    monkeypatch.setattr("study.claims.scoreboard.build_scoreboard", lambda: full_board)


def with_answer(board: Scoreboard, answer: str) -> Scoreboard:
    """Return the scoreboard as if every judged check had this answer, with its figure as it is."""
    judged = tuple(
        JudgedClaim(
            item.claim,
            tuple(
                dataclasses.replace(result, answer=answer) if result.figure else result  # type: ignore[arg-type]
                for result in item.results
            ),
        )
        for item in board.judged
    )
    return dataclasses.replace(board, judged=judged)


def test_the_form_is_the_same_whatever_was_found(full_board: Scoreboard, form: str) -> None:
    for answer in ("holds", "fails", "disputed"):
        board = with_answer(full_board, answer)
        assert "\n".join(form_lines(board, board.judged, 1)) == form
    plain = " ".join(form.split())
    for claim in full_board.ledger.claims:
        assert claim.falls_if not in plain, "a condition of refutation often has the outcome"
        assert all(item.why not in plain for item in claim.rejected), claim.id


def test_the_form_has_the_words_the_parts_the_readings_and_the_evidence(full_board: Scoreboard, form: str) -> None:
    sections = {text.split()[0]: " ".join(text.split()) for text in form.split("\n## ")[1:]}
    for judged in full_board.judged:
        claim, text = judged.claim, sections[judged.claim.id]
        assert claim.says in text
        assert f"“{' '.join(claim.quote.split())}”" in text or not claim.quote
        readings = [item.reading for item in claim.rejected] + [check.reading for check in claim.checks]
        assert [words for words in (*readings, *claim.readings, *claim.not_judged) if words not in text] == []
        parts = dict.fromkeys(check.tests for check in claim.checks)
        assert text.count("Part ") >= len(parts)
        resting = sum(
            len(parts) == 1 or any(check.decides for check in claim.checks if check.tests == part) for part in parts
        )
        assert text.count("on which the claim rests") == resting
        assert [check.shows for check in claim.checks if " ".join(check.shows.split()) not in text] == []
        assert text.count(" limit: ") == sum(result.figure is not None for result in judged.results)
        reports = {report for result in judged.results for report in result.reports}
        assert [report for report in reports if f"reports/{report}" not in text] == []


def test_words_are_the_documents_or_this_projects() -> None:
    quote = 'CPU offloading\u2019s ~25%, with large embedding layers that benefit more; set "pin_memory"'
    assert is_quoted("CPU offloading's ~25%", quote)
    assert is_quoted("large embedding layers ... benefit more", quote)
    assert is_quoted("set pin_memory", quote)
    assert not is_quoted("small embedding layers ... benefit more", quote)
    assert not is_quoted("anything", "")


def as_the_rules_are_written(outcomes: Sequence[CheckResult]) -> str:
    """Return the finding by the rules of the form, written again from its text."""
    states = []
    for words in dict.fromkeys(item.check.tests for item in outcomes):
        lines = [item for item in outcomes if item.check.tests == words]
        large = [item for item in lines if item.check.basis != PROXY]
        readings = {item.check.reading for item in large} - {""} or {""}
        by_reading = set()
        for reading in readings:
            counting = [item for item in large if item.check.reading in ("", reading)]
            if any(item.answer == "fails" for item in counting):
                by_reading.add("false")
            elif all(item.answer == "holds" for item in counting) and any(
                not item.check.necessary for item in counting
            ):
                by_reading.add("true")
            else:
                by_reading.add("open")
        state = by_reading.pop() if len(by_reading) == 1 else "open"
        is_internal = state == "false" and all(item.check.internal for item in large if item.answer == "fails")
        states.append((state, any(item.check.decides for item in lines), is_internal))
    findings = [state for state, _, _ in states]
    resting = [state for state, rests, _ in states if rests or len(states) == 1]
    if any(is_internal for _, _, is_internal in states):
        return "contradicts itself"
    if "false" in resting or ("false" in findings and "true" not in findings):
        return "does not hold"
    if set(findings) == {"true"}:
        return "holds"
    return "holds in part" if "true" in findings and set(resting) <= {"true"} else "undecided"


def test_the_rules_of_the_form_are_those_of_the_ledger(full_board: Scoreboard) -> None:
    findings = {judged.claim.id: judged.finding.kind for judged in full_board.judged if judged.results}
    assert findings == {
        judged.claim.id: as_the_rules_are_written(judged.results) for judged in full_board.judged if judged.results
    }
    choose = random.Random(1)
    samples = [tuple(choose.choices(OUTCOMES, k=count)) for count in (1, 2, 3, 4) for _ in range(4000)]
    assert {combine(outcomes).kind for outcomes in samples} == set(FINDINGS)
    for outcomes in samples:
        assert as_the_rules_are_written(outcomes) == combine(outcomes).kind, outcomes


def test_a_larger_draw_of_a_seed_has_the_claims_of_a_smaller_one(full_board: Scoreboard) -> None:
    draws = {
        (count, seed): [item.claim.id for item in draw(full_board.judged, count, seed)]
        for count, seed in itertools.product((1, 20, CLAIMS), (1, 2))
    }
    assert [len(draws[count, 1]) for count in (1, 20, CLAIMS)] == [1, 20, CLAIMS]
    assert set(draws[1, 1]) < set(draws[20, 1])
    assert draws[20, 1] != draws[20, 2]
    assert draws[20, 1] == sorted(draws[20, 1])


def write_answers(file: Path, rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> Path:
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    file.write_text(text.getvalue(), encoding="utf-8")
    return file


def test_answers_in_the_form_itself_are_compared(full_board, judged_once, tmp_path, capsys):
    findings = {judged.claim.id: judged.finding.kind for judged in full_board.judged}
    assert main(["claims", "--blind", "4", "S0", "s1-12"]) == 0
    head, marker, table = capsys.readouterr().out.partition(",".join(COLUMNS))
    names = [line.split(",")[0] for line in table.split()]
    assert len(names) == 4
    assert all(name == "S1-12" or name.startswith("S0") for name in names)
    answers = dict.fromkeys(names, "Undecided") | {names[0]: "holds in part"}
    expected = sum(findings[name] == finding.lower() for name, finding in answers.items())
    rows = "\n".join(f'{name},{finding},"because, {name}",other limit' for name, finding in answers.items())
    (tmp_path / "ann.csv").write_text(f"{head}{marker}\n{rows}\n", encoding="utf-8")
    assert main(["claims", "--compare", str(tmp_path / "ann.csv"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (reader,) = document["readers"]
    assert (reader["reader"], reader["claims"], reader["same"]) == ("ann", 4, expected)
    different = {name for name, finding in answers.items() if findings[name] != finding.lower()}
    assert {row["claim"]: row["reasons"]["ann"] for row in document["differences"]} == {
        name: f"because, {name}" for name in different
    }
    assert [item["objection"] for item in document["objections"]] == ["other limit"] * 4
    assert main(["claims", "--compare", str(tmp_path / "ann.csv")]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}  ledger: {findings[name]}; ann: {answers[name].lower()}" in text for name in different)


def test_kappa_and_its_interval_are_those_of_textbooks() -> None:
    counts = {
        ("holds", "holds"): 20,
        ("holds", "undecided"): 5,
        ("undecided", "holds"): 10,
        ("undecided", "undecided"): 15,
    }
    pairs = [pair for pair, count in counts.items() for _ in range(count)]
    assert agreement(pairs).kappa == pytest.approx(0.4)
    assert agreement([("holds", "holds")] * 3).kappa is None
    # By the tables of Clopper and Pearson.
    assert agreement([("holds", "holds")] * 17 + [("holds", "undecided")] * 3).interval == pytest.approx(
        (0.6211, 0.9679), abs=1e-4
    )
    assert agreement([("holds", "holds")] * 20).interval == pytest.approx((0.8316, 1), abs=1e-4)
    assert agreement([("holds", "undecided")] * 20).interval == pytest.approx((0, 0.1684), abs=1e-4)


@pytest.mark.parametrize("trials", [1, 10, 88, 314])
def test_the_interval_of_a_share_is_that_of_the_beta_distribution(trials: int) -> None:
    for successes in sorted({0, 1, trials // 3, trials - 1, trials}):
        failures = trials - successes
        low = special.betaincinv(successes, failures + 1, 0.025) if successes else 0
        high = special.betaincinv(successes + 1, failures, 0.975) if failures else 1
        assert share_interval(successes, trials) == pytest.approx((low, high), abs=1e-12)
        bound = special.betaincinv(successes + 1, failures, 0.95) if failures else 1
        assert share_upper_bound(successes, trials) == pytest.approx(bound, abs=1e-12)
    assert share_text(7, 10) == "7 of 10 (35% to 93%)"
    assert share_text(0, 0) == "0 of 0"


def test_an_entry_that_a_reading_mended_keeps_the_agreement_of_its_day(full_board, tmp_path):
    claims = full_board.document()["claims"]
    findings = {claim["id"]: claim["finding"] for claim in claims}
    names = list(findings)[:4]
    rows = [[name, findings[name], "", "", findings[name]] for name in names[:3]]
    rows.append([names[3], findings[names[3]], "", "", "holds" if findings[names[3]] != "holds" else "undecided"])
    file = write_answers(tmp_path / "ann.csv", rows, [*COLUMNS, "ledger_then"])
    ((_, today, then),) = compare([file], claims).by_reader()
    assert then is not None
    assert (today.same, then.same) == (4, 3)


def test_a_stored_reading_has_the_findings_of_its_day(full_board, tmp_path):
    claims = full_board.document()["claims"]
    file = write_answers(tmp_path / "ann.csv", [["S0-01", "holds", "a, b", ""], ["S0-02", "undecided", "", "limit"]])
    stored = store(file, claims, tmp_path / "readings")
    reading = read_answers(stored, [claim["id"] for claim in claims])
    assert reading.then == {claim["id"]: claim["finding"] for claim in claims if claim["id"] in ("S0-01", "S0-02")}
    assert dataclasses.replace(reading, then={}) == read_answers(file, reading.then)
    with pytest.raises(UserError, match="exists"):
        store(file, claims, tmp_path / "readings")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["S9-01", "holds", "", ""]], "'S9-01' is not a claim"),
        ([["S0-01", "true", "", ""]], "finding is 'true'"),
        ([["S0-01", "holds", "", ""]] * 2, "S0-01 has two answers"),
        ([["S0-01", "holds", "a", "b", "c"]], "more cells than columns"),
        ([["S0-01", "", "", ""]], "has no answers"),
    ],
)
def test_an_answer_that_is_not_understood_is_refused_with_its_line(tmp_path, rows, message):
    file = write_answers(tmp_path / "ann.csv", rows)
    with pytest.raises(UserError) as refusal:
        read_answers(file, ["S0-01", "S0-02"])
    assert message in str(refusal.value)
    assert "has no answers" in message or f"ann.csv:{len(rows) + 1}" in str(refusal.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--blind", "83"],
        ["--blind", "5", "--finding", "holds"],
        ["--blind", "5", "--json"],
        ["--blind", "5", "--details"],
        ["--compare", "missing.csv"],
        ["--compare", "missing.csv", "--blind", "5"],
        ["S1", "--compare", "missing.csv"],
    ],
)
@pytest.mark.usefixtures("judged_once")
def test_a_form_is_not_mixed_with_findings(arguments, capsys):
    assert main(["claims", *arguments]) == 2
    assert capsys.readouterr().out == ""


def test_words_that_are_not_judged_are_in_the_quote(tmp_path: Path) -> None:
    text = LEDGER.read_text(encoding="utf-8")
    assert sum(bool(claim.not_judged) for claim in read_ledger().claims) > 30
    (tmp_path / "ledger.yaml").write_text(
        text.replace('not_judged: ["~7B params max"', 'not_judged: ["~8B params max"')
    )
    with pytest.raises(UserError, match="~8B params max"):
        read_ledger(tmp_path / "ledger.yaml")


def test_times_and_losses_at_scale_are_of_a_gpu(full_board: Scoreboard) -> None:
    figures = {
        (judged.claim.id, check.numbers.get("report"))
        for judged in full_board.judged
        for check in judged.claim.checks
        if check.form in ("paired", "ratio_slope", "growth", "gradient_norms", "utilization", "corrected")
        and check.basis != PROXY
    }
    assert {report for _, report in figures} == {"gpu"}, figures


def test_the_page_has_the_stored_readings(full_board, tmp_path, monkeypatch):
    assert "| ann |" not in page(full_board)
    claims = full_board.document()["claims"]
    differing = next(finding for finding in FINDINGS if finding != claims[0]["finding"])
    rows = [[claim["id"], claim["finding"], "as it is", ""] for claim in claims[1:4]]
    file = write_answers(tmp_path / "ann.csv", [[claims[0]["id"], differing, "| other bound", "a wider limit"], *rows])
    store(file, claims, tmp_path / "readings")
    monkeypatch.setattr("study.claims.agreement.READINGS", tmp_path / "readings")
    text = page(full_board)
    assert "| ann | 4 | 3 | 75 % (19 to 99) |" in text
    name = claims[0]["id"]
    assert f"| [{name}](#{name.lower()}) | {claims[0]['finding']} | ann: {differing} |" in text
    assert r"ann: \| other bound" in text, "a reason is escaped"
    assert f"| [{name}](#{name.lower()}) | ann | a wider limit |" in text


def test_stored_readings_are_of_this_ledger(full_board: Scoreboard) -> None:
    comparison = stored_comparison(full_board.document()["claims"])
    assert len(comparison.readings) == len(list(READINGS.glob("*.csv")))
    for reading in comparison.readings:
        assert set(reading.then) == set(reading.findings), "add the column ledger_then"
        assert all(reading.reasons.get(claim) for claim in reading.findings)
