from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import yaml

from study.claims.command import VERDICTS, records_digest
from study.claims.evidence import Evidence
from study.claims.forms import FORMS
from study.claims.ledger import ClaimCheck, ReadingRule, read_ledger
from study.claims.page import PAGE, page
from study.claims.scoreboard import REPORTS, JudgedClaim, Scoreboard, build_scoreboard, judge
from study.claims.verdicts import PROXY, CheckResult, ClaimFinding, Figure, PartFinding, Region, combine
from study.cli import main
from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.records.frames import Records, read_parquet
from study.records.statistics import all_differences

ANSWERS = ("holds", "fails", "inside noise", "disputed", "not judged")
FALSE = ("does not hold", "contradicts itself")
BOTH = (False, True)
LABELS = ("tests", "reading", "proxy", "necessary", "decides", "internal")


def outcome(answer: Any, **labels: Any) -> CheckResult:
    return CheckResult(ClaimCheck("virtual", "it", {}, at_most=1, **labels), answer)


OUTCOMES = [
    outcome(answer, **dict(zip(LABELS, labels, strict=True)))
    for answer, *labels in itertools.product(ANSWERS, ("P1", "P2"), ("", "R1", "R2"), BOTH, BOTH, BOTH, BOTH)
]


def list_facts(finding: ClaimFinding) -> set[tuple[str, str]]:
    """Return everything that a finding asserts: on each part, at each scale, and on the claim."""
    facts = {
        (part.words, "false" if part.status in FALSE else part.status)
        for part in finding.parts
        if part.status in ("holds", *FALSE)
    }
    facts |= {(part.words, part.proxy) for part in finding.parts if part.proxy in ("reproduced", "not reproduced")}
    if any(part.status in FALSE for part in finding.parts):
        facts.add(("the claim", "false"))
    return facts | ({("the claim", "holds")} if finding.kind == "holds" else set())


def find_claim(full_board: Scoreboard, claim: str) -> JudgedClaim:
    (match,) = [judged for judged in full_board.judged if judged.claim.id == claim]
    return match


def test_the_details_of_a_finding_do_not_repeat_it() -> None:
    part = PartFinding("the speed", "untested", "", "", ("derived",), True)
    undecided = ClaimFinding("undecided", (part,))
    assert (undecided.details, undecided.text) == ("untested: the speed", "undecided: untested: the speed")
    holds = ClaimFinding("holds", (dataclasses.replace(part, words="", status="holds"),))
    assert (holds.details, holds.text) == ("", "holds")


def test_the_rules_of_findings() -> None:
    draw = random.Random(0)
    samples: list[tuple[CheckResult, ...]] = [(first,) for first in OUTCOMES]
    samples += [tuple(draw.choices(OUTCOMES, k=k)) for k in (2, 3, 4) for _ in range(5000)]
    for outcomes in samples:
        finding = combine(outcomes)
        false = [part.words for part in finding.parts if part.status in FALSE]
        holding = [part.words for part in finding.parts if part.status == "holds"]
        # Every part is named with its status, a false and an untested one too.
        groups = finding.text.removeprefix("undecided: ").split("; ")
        for part in finding.parts if finding.kind != "holds" else ():
            assert any(group.startswith(part.label) and part.words in group for group in groups), finding.text
            assert part.status != "untested" or part.proxy or "untested: " in finding.text
        assert (finding.kind == "holds") == (len(holding) == len(finding.parts))
        assert finding.kind not in FALSE or false
        assert finding.kind != "holds in part" or holding
        # A part that decides is never false or open in a claim that holds in part.
        assert finding.kind != "holds in part" or all(part.status == "holds" for part in finding.parts if part.decides)
        if all(result.check.basis == PROXY for result in outcomes):
            assert finding.kind == "undecided"
        for place, result in enumerate(outcomes):
            less = [*outcomes[:place], dataclasses.replace(result, answer="not judged"), *outcomes[place + 1 :]]
            assert list_facts(combine(less)) <= list_facts(finding), outcomes


FINDINGS = yaml.safe_load((REPOSITORY / "tests" / "data" / "findings.yaml").read_text())


@pytest.mark.parametrize(("text", "checks"), FINDINGS)
def test_the_rule_that_combines_checks(text: str, checks: list[dict[str, Any]]) -> None:
    finding = combine([outcome(**check) for check in checks])
    assert (finding.text, text.startswith(finding.kind)) == (text, True)


def test_an_interval_that_spans_the_bound_of_a_claim_decides_nothing() -> None:
    for low, high, answer in ((0.9, 1.1, "inside noise"), (1.1, 1.2, "holds"), (0.8, 0.9, "fails")):
        for region in (Region(low=1), Region(1, 100)):
            assert region.judge(Figure(1, low, high)) == answer
        assert Region(high=-1).judge(Figure(-1, -high, -low)) == answer
    assert Region(high=1).judge(Figure(math.nan)) == "not judged"


def test_timed_and_trained_checks_are_corrected_as_one_family(
    full_board: Scoreboard, committed_evidence: Evidence
) -> None:
    answers = set()
    for judged in full_board.judged:
        for check, result in zip(judged.claim.checks, judged.results, strict=True):
            if result.p is not None and (alone := check.find(committed_evidence)).p is not None:
                # The p value and the 95 % interval of one check give the same answer.
                assert (alone.answer == "inside noise") == (alone.p > 0.05), check.shows
                assert (result.answer == "inside noise") == (result.p > 0.05), check.shows
                answers.add((judged.claim.id, alone.answer, result.answer))
    assert {("S1-10", "fails", "inside noise"), ("S2-01", "fails", "fails")} <= answers


def test_the_same_runs_are_not_significant_in_a_report_and_inside_noise_here(
    full_board: Scoreboard, committed_evidence: Evidence
) -> None:
    """A report asks whether two strategies differ, so these are the checks whose limit is an equal figure."""
    compared = set()
    for judged in full_board.judged:
        for check, result in zip(judged.claim.checks, judged.results, strict=True):
            numbers = check.numbers
            is_of_equality = check.form == "paired" and 1 in (check.region.low, check.region.high)
            if result.p is None or not is_of_equality or "over_where" in numbers:
                continue
            report, task, strategy, over = (str(numbers[name]) for name in ("report", "task", "strategy", "over"))
            pair = committed_evidence.pair(report, task, strategy, over, str(numbers.get("where", "")))
            assert pair.workload is not None
            arms = (pair.treatment["arm"].iloc[0], pair.control["arm"].iloc[0])
            difference = all_differences(pair.workload, str(numbers["figure"]))[arms]
            assert difference.is_significant == (result.answer != "inside noise"), (judged.claim.id, check.shows)
            compared.add((judged.claim.id, result.answer))
    assert {("S2-03", "fails"), ("S2-12", "inside noise"), ("S3-04", "fails"), ("S3-06", "holds")} <= compared


def test_a_minimum_and_a_maximum_are_not_printed_as_an_interval() -> None:
    assert Figure(1, 0.9, 1.2).spread == " [0.9, 1.2]"
    assert Figure(1, 0.9, 1.2, is_range=True).spread == " (minimum 0.9, maximum 1.2)"
    assert Figure(1, 1, 1, is_range=True).spread == ""


def test_a_test_that_two_claims_share_counts_once_in_the_family(committed_evidence: Evidence) -> None:
    ledger = read_ledger()
    (claim,) = [claim for claim in ledger.claims if claim.id == "S3-04"]
    (check,) = [check for check in claim.checks if check.form == "paired"]
    alone = build_scoreboard(ledger=dataclasses.replace(ledger, claims=(claim,)), evidence=committed_evidence)
    both = build_scoreboard(ledger=dataclasses.replace(ledger, claims=(claim, claim)), evidence=committed_evidence)
    ps = [result.p for judged in (*alone.judged, *both.judged) for result in judged.results if result.check == check]
    assert ps == [check.find(committed_evidence).p] * 3


def test_a_rejected_reading_judges_nothing_and_names_one_of_the_rules(full_board: Scoreboard) -> None:
    rejected = [(judged.claim, item) for judged in full_board.judged for item in judged.claim.rejected]
    assert len(rejected) > 10
    assert set(full_board.ledger.legend["readings"]) == set(get_args(ReadingRule))
    text = PAGE.read_text(encoding="utf-8")
    for claim, item in rejected:
        assert item.reading not in {check.reading for check in claim.checks}, claim.id
        assert f"Reading that does not count ({item.rule}): " in text


def test_figures_that_rest_on_records_name_them(full_board: Scoreboard) -> None:
    record_names = {
        f"{report.name}/{run}"
        for report in REPORTS.iterdir()
        if (report / "runs.parquet").is_file()
        for run in read_parquet(report).runs["run"]
    }
    record_names |= {f"engine_keys/{probe}" for probe in Evidence(REPORTS).keys("engine_keys")}
    record_names |= {f"autopsy/{session}" for session in Evidence(REPORTS).arms["session"]}
    for judged in full_board.judged:
        for check, finding in zip(judged.claim.checks, judged.results, strict=True):
            if finding.figure and FORMS[check.form].kind in ("virtual", "measured"):
                assert finding.figure.records
                if check.form in ("paired", "gradient_norms", "ratio_slope", "growth", "corrected"):
                    assert check.proxy or check.numbers["report"] == "gpu", "tiny models decide nothing alone"
                assert set(finding.figure.records) <= record_names
                assert finding.figure.n


@pytest.mark.parametrize("report", ["claims", "virtual_claims"])
def test_removing_a_record_never_strengthens_a_finding(
    full_board: Scoreboard, committed_evidence: Evidence, report: str
) -> None:
    records = committed_evidence.records(report)
    resting: dict[str, list[JudgedClaim]] = {}
    for on_board in full_board.judged:
        figures = [finding.figure for finding in on_board.results if finding.figure]
        names = {run for figure in figures for run in figure.records if run.startswith(f"{report}/")}
        # Without the correction of all checks as one family, as it is judged below.
        judged = judge(on_board.claim, committed_evidence) if names else on_board
        for run in names:
            resting.setdefault(run.removeprefix(f"{report}/"), []).append(judged)
    assert resting
    # Each depth of a virtual rank is needed for its extrapolation; a sample of the runs is enough.
    for run in random.Random(0).sample(sorted(resting), min(8, len(resting))):
        less = Records(records.runs[records.runs["run"] != run].reset_index(drop=True), records.steps)
        without = committed_evidence.with_records(report, less)
        for before in resting[run]:
            after = judge(before.claim, without)
            assert list_facts(after.finding) <= list_facts(before.finding), (run, before.claim.id)
            assert after.sentence


def test_without_any_record_verdicts_fall_back_to_arithmetic(full_board: Scoreboard, tmp_path: Path) -> None:
    bare = build_scoreboard(reports=tmp_path)
    for full, less in zip(full_board.judged, bare.judged, strict=True):
        assert list_facts(less.finding) <= list_facts(full.finding)
        assert not {"virtual", "measured"} & set(less.kinds)
        assert all(run.startswith("accelerate_configs/") for run in less.document()["records"])
    assert find_claim(bare, "S1-15").finding == find_claim(full_board, "S1-15").finding
    assert find_claim(bare, "S1-02").finding.text == "undecided: untested"
    assert find_claim(bare, "S1-02").sentence.startswith("There are no records of paper_table1")
    # A file without the probe has no record of it.
    (tmp_path / "engine_keys").mkdir()
    (tmp_path / "engine_keys" / "keys.json").write_text('{"probes": []}')
    probed = find_claim(bare, "S1-24")
    assert judge(probed.claim, Evidence(tmp_path)).finding == probed.finding


def test_the_command_prints_one_document_in_time_and_without_torch() -> None:
    code = (
        "import sys; from study.cli import main; status = main(['claims', '--json']);"
        " assert not {'torch', 'transformers', 'deepspeed'} & sys.modules.keys(); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    document, claims = json.loads(done.stdout), len(read_ledger().claims)
    assert (len(document["claims"]), sum(document["counts"]["all"].values())) == (claims, claims)
    assert {"id", "place", "quote", "says", "finding", "evidence", "parts", "verdict", "sentence", "figure", "interval",
            "n", "records", "checks", "contradicts", "settle", "rests_on"} <= document["claims"][0].keys()  # fmt: skip


def test_the_page_is_made_of_the_ledger_and_the_records(full_board: Scoreboard) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(full_board), "run `make claims`"


def test_the_committed_findings_are_those_of_the_records_and_are_printed_while_these_stay(
    full_board: Scoreboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed = json.loads(VERDICTS.read_text(encoding="utf-8"))
    assert committed["records_sha256"] == records_digest(), "run `make claims`"

    def texts(claims: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(claim["id"], claim["finding_text"], claim["sentence"], claim["evidence"]) for claim in claims]

    judged = json.loads(json.dumps(full_board.document()))
    assert texts(committed["claims"]) == texts(judged["claims"])
    assert {key: committed[key] for key in ("findings", "evidence", "counts")} == {
        key: judged[key] for key in ("findings", "evidence", "counts")
    }
    code = "import sys; from study.cli import main; main(['claims', 'S1']); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    # One record changes: it is judged again.
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "runs.parquet").write_bytes(b"changed")
    before = records_digest(tmp_path)
    (tmp_path / "laptop" / "runs.parquet").write_bytes(b"changes")
    assert records_digest(tmp_path) != before
    changed = tmp_path / "verdicts.json"
    changed.write_text(json.dumps(committed | {"records_sha256": before, "claims": []}))
    monkeypatch.setattr("study.claims.command.VERDICTS", changed)
    monkeypatch.setattr("study.claims.scoreboard.build_scoreboard", lambda: full_board)
    assert main(["claims", "S1-04"]) == 0
    assert capsys.readouterr().out.startswith("S1-04 ")
    # Without pandas the committed ones are printed, with a notice.
    changed.write_text(json.dumps(committed | {"records_sha256": before}))
    monkeypatch.setitem(sys.modules, "study.claims.scoreboard", None)
    assert main(["claims", "S1-04"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("S1-04 ")
    assert "so the records were not read" in printed.err


def test_the_command_prints_the_counts_first_and_the_claims_that_are_named(full_board, monkeypatch, capsys):
    # `--json` above judges; these only print.
    monkeypatch.setattr("study.claims.scoreboard.build_scoreboard", lambda: full_board)

    def lines(*words: str) -> list[str]:
        assert main(["claims", *words]) == 0
        return capsys.readouterr().out.splitlines()

    every, details = [row.claim.id for row in full_board.judged], lines("--details")
    assert sum(int(count) for count in re.findall(r"\d+", details[0])[1:]) == len(every)
    assert max(map(len, details)) <= 120
    assert [line[:5] for line in details if re.match(r"[SZ]\d-\d\d", line)] == every
    assert [line[:5] for line in lines("s3") if line[:1] != " "][2:] == [f"S3-{number:02}" for number in range(1, 13)]
    printed = "\n".join(lines("S1-04"))
    assert re.findall(r"^  (\w+): ", printed, re.MULTILINE) == ["Claim", "Finding", "Figure", "Evidence"]
    assert printed.endswith("  Evidence: reports/laptop (6 records); every check: docs/claims.md#s1-04")
    assert [claim["id"] for claim in json.loads("".join(lines("S0-06", "--json")))["claims"]] == ["S0-06"]
    # A wrong name is refused without pandas too, and before the notice that records are not read.
    monkeypatch.setitem(sys.modules, "study.claims.scoreboard", None)
    for name, nearest in (("S5", "S3"), ("check-tabel", "check-table")):
        assert main(["claims", name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(f"error: '{name}' is neither a document nor a claim.*did you mean .*{nearest}.*?", line)


def test_words_find_the_claims_with_them(
    full_board: Scoreboard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word was refused as neither a document nor a claim."""
    monkeypatch.setattr("study.claims.scoreboard.build_scoreboard", lambda: full_board)

    def find_claims(*words: str, status: int = 0) -> list[str]:
        assert main(["claims", *words]) == status
        return capsys.readouterr().out.splitlines()

    first, *rows = find_claims("stage", "OFFLOAD")
    assert first == f"{len(rows)} claims have 'stage' and 'OFFLOAD'; study claims {rows[0][:5]} prints one"
    by_id = {row.claim.id: row for row in full_board.judged}
    for row in rows:
        claim, finding, says = re.split(r" {2,}", row, maxsplit=2)
        assert (finding, says) == (by_id[claim].finding.kind, by_id[claim].claim.says)
    assert [row[:5] for row in find_claims("Gemma-2-9B", "peaks")[1:]] == ["S0-02"]
    # In the title and the source of a document, and in the source of a check.
    assert {row[:2] for row in find_claims("Guelph")[1:]} == {"S2"}
    assert {row[:2] for row in find_claims("newmind.ai")[1:]} == {"S3"}
    paper = "arxiv.org/abs/2101.06840"
    sourced = {row.claim.id for row in full_board.judged if any(paper in item.source for item in row.claim.checks)}
    assert sourced
    assert {row[:5] for row in find_claims(paper)[1:]} == sourced
    # In one document, as JSON and in full.
    offload_claims = [row[:5] for row in find_claims("s1", "offload")[1:]]
    assert offload_claims
    assert [
        claim["id"] for claim in json.loads("".join(find_claims("s1", "offload", "--json")))["claims"]
    ] == offload_claims
    assert [
        line[:5] for line in find_claims("s1", "offload", "--details") if re.match(r"S1-\d\d ", line)
    ] == offload_claims
    # As `study why` without a known message.
    (none,) = find_claims("zebra", status=3)
    assert none.startswith("no claim has 'zebra' in its title, text or source")


def minimal(contradictions: str = "[]", **changes: str) -> str:
    claim = {
        "id": "S0-01",
        "place": "there",
        "says": "so",
        "holds_if": "so",
        "falls_if": "not so",
        "checks": "[{form: ratio, shows: it, of: 1, to: 2, at_most: 1}]",
        "settle": "{command: study doctor, minutes: 1, box: any}",
    } | changes
    lines = "".join(f"    {key}: {value}\n" for key, value in claim.items() if value)
    return f"documents:\n  - {{code: S0, title: a, scale: b}}\nclaims:\n  -\n{lines}contradictions: {contradictions}\n"


def test_the_smallest_ledger_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ledger.yaml"
    file.write_text(minimal())
    (only,) = build_scoreboard(ledger=read_ledger(file)).judged
    assert (only.finding.kind, only.sentence) == ("holds", "0.5; the claim needs at most 1: it.")
    assert only.document()["verdict"] == "supported"


WRONG_LEDGERS = yaml.safe_load((REPOSITORY / "tests" / "data" / "wrong_ledgers.yaml").read_text())


@pytest.mark.parametrize(("says", "line", "change"), WRONG_LEDGERS)
def test_a_malformed_ledger_is_refused_with_its_line(tmp_path: Path, says: str, line: int, change: Any) -> None:
    file = tmp_path / "ledger.yaml"
    file.write_text(minimal(**change))
    with pytest.raises(UserError) as refused:
        read_ledger(file)
    assert says in str(refused.value)
    assert f"{file}:{line}:" in refused.value.problem


Change = Callable[[pd.DataFrame], pd.DataFrame]


def changed(committed_evidence: Evidence, report: str, change: Change, records: Records | None = None) -> Evidence:
    before = records or committed_evidence.records(report)
    runs = change(before.runs.copy()).reset_index(drop=True).astype(before.runs.dtypes)
    return committed_evidence.with_records(report, Records(runs, before.steps))


def column(name: str, value: Callable[[pd.Series], object]) -> Change:
    return lambda runs: runs.assign(**{name: runs.apply(value, axis=1)})


def multiplied(name: str, factor: float, *strategies: str) -> Change:
    return column(name, lambda run: run[name] * (factor if run["strategy"] in strategies else 1))


def where(strategy: str, name: str, value: object) -> Change:
    return column(name, lambda run: value if run["strategy"].startswith(strategy) else run[name])


def seeded(committed_evidence: Evidence) -> Records:
    """Return the committed laptop records with three seeds per strategy and a little noise in times and losses."""
    records = committed_evidence.records("laptop")
    first_runs = records.runs.sort_values(["seed", "repeat"]).groupby(["workload_key", "arm"], sort=False).head(1)
    draw = np.random.default_rng(0)
    copies = []
    for seed in (42, 43, 44):
        copy = first_runs.assign(seed=seed, repeat=1, run=first_runs["run"] + f"-seed{seed}")
        copy["step_time_s_median"] *= 1 + 0.001 * draw.standard_normal(len(copy))
        copy[["eval_loss_final", "train_loss_final"]] *= 1 + 0.02 * (seed - 43)
        copies.append(copy)
    return Records(pd.concat(copies, ignore_index=True).astype(records.runs.dtypes), records.steps)


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        (lambda runs: runs, {"S3-03": "reproduced", "S3-04": "not reproduced"}),
        (multiplied("train_loss_final", 1.01, "zero3"), {"S3-03": "not reproduced"}),
        (multiplied("step_time_s_median", 0.5, "zero1"), {"S3-04": "reproduced"}),
        # Runs with other rank counts do not pair; confounded or failed runs are not judged.
        (where("zero3", "world_size", 4), {"S3-03": ""}),
        (where("zero3", "confounded_loss", "other samples"), {"S3-03": ""}),
        (where("", "status_state", "failed"), {"S1-28": "", "S3-02": "", "S3-03": ""}),
    ],
)
def test_a_finding_follows_the_runs(
    full_board: Scoreboard, committed_evidence: Evidence, change: Change, labels: dict[str, str]
) -> None:
    edited = changed(committed_evidence, "laptop", change, seeded(committed_evidence))
    claims = [find_claim(full_board, name).claim for name in labels]
    laptop_results = [[check for check in claim.checks if check.numbers.get("report") == "laptop"] for claim in claims]
    findings = {
        claim.id: judge(dataclasses.replace(claim, checks=tuple(checks)), edited).finding
        for claim, checks in zip(claims, laptop_results, strict=True)
    }
    assert {claim: finding.parts[0].proxy for claim, finding in findings.items()} == labels


def test_fewer_pairs_than_the_ledger_asks_for_decide_nothing(
    full_board: Scoreboard, committed_evidence: Evidence
) -> None:
    checks = find_claim(full_board, "S1-19").claim.checks
    (check,) = [check for check in checks if check.numbers.get("least_pairs") == 10]
    nine = changed(committed_evidence, "claims", lambda runs: runs[runs["seed"] < 51])
    assert check.find(nine).sentence.endswith(f"are needed, and claims has 9: {check.shows}")
    assert check.find(committed_evidence).answer == "fails"


def test_a_reason_that_begins_with_a_report_names_its_folder(
    full_board: Scoreboard, committed_evidence: Evidence
) -> None:
    other_rates = changed(committed_evidence, "claims", smallest_micro_batch("learning_rate", lambda _: 0.5))
    checks = [check for check in find_claim(full_board, "S3-07").claim.checks if check.form == "paired"]
    sentences = {check.find(other_rates).sentence.partition(" of ")[0] for check in checks}
    assert sentences == {"reports/claims has no fair pair"}


def host_peak(fraction: float) -> Change:
    """Return a change to peaks that grow with the sequence length, under stage 3 by this fraction."""

    def peak(run: pd.Series) -> float:
        wobble = 0.001 * (zlib.crc32(run["run"].encode()) % 11 - 5)
        return 0.5 * (1 + wobble) + run["seq_length"] / 512 * (fraction if run["strategy"] == "zero3" else 1)

    return column("host_peak_rss_gib", peak)


def smallest_micro_batch(name: str, value: Callable[[pd.Series], object]) -> Change:
    return column(name, lambda run: value(run) if run["micro_batch_size"] == 1 else run[name])


@pytest.mark.parametrize(
    ("claim", "form", "change", "answer"),
    [
        # The checks would detect a stage that shards activations, and a loss that depends on the micro-batch size.
        ("S3-05", "growth", host_peak(1), "holds"),
        ("S3-05", "growth", host_peak(0.5), "fails"),
        ("S3-07", "paired", lambda runs: runs, "holds"),
        (
            "S3-07",
            "paired",
            smallest_micro_batch("train_loss_final", lambda run: 1.01 * run["train_loss_final"]),
            "fails",
        ),
        # Two settings are compared only if nothing else differs.
        ("S3-07", "paired", smallest_micro_batch("learning_rate", lambda _: 0.5), "not judged"),
        # A seed without one of the sizes has no slope.
        ("S2-02", "ratio_slope", lambda runs: runs[(runs["model_layers"] != 14) | (runs["seed"] != 43)], "not judged"),
    ],
)
def test_an_answer_follows_the_runs(full_board, committed_evidence, claim, form, change, answer):
    judged = judge(find_claim(full_board, claim).claim, changed(committed_evidence, "claims", change))
    pairs = zip(judged.claim.checks, judged.results, strict=True)
    matches = [finding for check, finding in pairs if check.form == form]
    assert {finding.answer for finding in (matches[-1:] if claim == "S3-05" else matches)} == {answer}


@pytest.mark.parametrize(
    "flags",
    [("--finding", "undecided"), ("--evidence", "published"), ("--finding", "holds-in-part", "--evidence", "at scale")],
)
def test_claims_are_chosen_by_finding_and_strongest_evidence_as_the_scoreboard_counts_them(
    flags, full_board, capsys, monkeypatch
):
    from study.cli import main

    monkeypatch.setattr("study.claims.scoreboard.build_scoreboard", lambda: full_board)
    assert main(["claims", *flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    chosen = dict(zip(flags[::2], (text.replace("-", " ") for text in flags[1::2]), strict=True))
    findings = [chosen["--finding"]] if "--finding" in chosen else list(document["evidence"])
    expected = sum(
        count
        for finding in findings
        for kind, count in document["evidence"][finding].items()
        if chosen.get("--evidence") in (None, kind)
    )
    assert 0 < len(document["claims"]) == expected < sum(document["findings"]["all"].values())
    assert {claim["finding"] for claim in document["claims"]} <= set(findings)
    assert main(["claims", *flags]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{expected} of ")
    assert page.count("  Finding:  ") == expected


def test_an_unknown_finding_is_refused_with_the_known_ones(capsys):
    from study.cli import main

    assert main(["claims", "--finding", "open"]) == 2
    assert "'holds in part'" in capsys.readouterr().err
