"""The page of all claims: its scoreboard, its filter, its plots, and what a sceptic is told of the records."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
from playwright.sync_api import Page, sync_playwright

from study.claims.board import REPORTS, Board, JudgedClaim, board, judge
from study.claims.evidence import Evidence
from study.claims.forms import FORMS
from study.claims.ledger import LEDGER, ClaimFinding, read_ledger
from study.claims.published import derivation
from study.claims.sceptic import facts, order_text, orders
from study.claims.show import strip, write_page
from study.claims.verdicts import Figure, Region
from study.cli import main
from study.config.errors import UserError
from study.config.strategies import REPOSITORY
from study.records.frames import Records, read_parquet, write_parquet

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"


@pytest.fixture(scope="module")
def made() -> Board:
    return board()


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    """In the repository, so that its links lead somewhere; made by the command that a user types."""
    (REPOSITORY / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "runs") as folder:
        page = Path(folder) / "claims.html"
        assert main(["claims", "--page", str(page)]) == 0
        yield page


@pytest.fixture(scope="module", params=(400, 1400), ids=lambda width: f"{width}px")
def shown(request: pytest.FixtureRequest, file: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_context(viewport={"width": request.param, "height": 900}).new_page()
        page.goto(file.as_uri())
        yield page
        browser.close()


def visible(page: Page) -> list[str]:
    return list(page.eval_on_selector_all(
        ".claim", "all => all.filter(one => one.offsetParent).map(one => one.id.toUpperCase())"
    ))  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the page
@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["claims", "--json"]) == 0
    return dict(json.loads(said.getvalue())["counts"])


def test_the_scoreboard_has_the_counts_of_the_json(shown: Page, counts: dict[str, dict[str, int]]) -> None:
    head, *rows = shown.eval_on_selector_all(
        ".scoreboard tr", "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert {row[0]: {name: int(cell) for name, cell in zip(head[1:-1], row[1:-1], strict=True) if cell != "-"}
            for row in rows} == counts  # fmt: skip
    assert [int(row[-1]) for row in rows] == [sum(counts[row[0]].values()) for row in rows]


def test_each_number_of_the_scoreboard_shows_its_claims_alone_and_needs_no_script(shown: Page, made: Board) -> None:
    assert shown.evaluate("document.scripts.length") == 0
    links = shown.eval_on_selector_all(".scoreboard td a", "all => all.map(one => one.getAttribute('href'))")
    assert len(links) > 20
    for link in dict.fromkeys(links):
        shown.click(f'.scoreboard td a[href="{link}"]')
        code, verdict = re.fullmatch(r"#(?:only-)?([SZ]\d)?-?([a-z-]*)", link).groups()  # type: ignore[union-attr]
        assert visible(shown) == [
            each.claim.id for each in made.judged
            if code in (None, each.claim.document) and verdict in ("", "claims", each.verdict.replace(" ", "-"))
        ]  # fmt: skip
    shown.click(".scoreboard td a[href='#only-S1-contradicted']")
    shown.click(".filter:target a")
    assert len(visible(shown)) == len(made.judged)


def test_every_link_of_the_page_leads_to_what_is_there(shown: Page, file: Path) -> None:
    links = shown.eval_on_selector_all("a[href]", "all => all.map(one => one.getAttribute('href'))")
    elsewhere = {link for link in links if not link.startswith("#")}
    assert {Path(link).parts[-2] for link in elsewhere} >= {"laptop", "paper_table1", "virtual_settings"}
    for link in dict.fromkeys(links):
        parts = urlsplit(link)
        assert not parts.scheme
        target = file.parent / unquote(parts.path) if parts.path else file
        assert target.is_file(), link
        if parts.fragment:
            assert f'id="{parts.fragment}"' in target.read_text(encoding="utf-8"), link


def test_the_page_fits_the_screen_and_has_every_claim_with_its_plot(shown: Page, made: Board) -> None:
    assert shown.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    figures = sum(finding.figure is not None for each in made.judged for finding in each.findings)
    assert shown.locator("svg.strip").count() == figures > 80
    assert shown.locator(".claim").count() == len(made.judged)
    words = shown.eval_on_selector_all("svg.strip", "all => all.map(one => one.getAttribute('aria-label'))")
    assert all("the claim needs" in each for each in words)


def test_the_page_asks_for_nothing_outside_itself_and_names_no_place_of_this_machine(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    assert str(REPOSITORY) not in text
    assert str(file.parent) not in text


def hostile(folder: Path) -> Path:
    records = read_parquet(REPORTS / "laptop")
    runs = records.runs.assign(cpu=EVIL, torch_version=EVIL, status_state=records.runs["status_state"])
    write_parquet(dataclasses.replace(records, runs=runs), folder / "laptop")
    return folder


def test_what_a_record_says_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(page, hostile(tmp_path / "reports"))
    text = page.read_text(encoding="utf-8")
    assert "&lt;script&gt;window.harmed" in text
    assert "<script" not in text
    assert "<img" not in text
    # Elsewhere than in the repository a page leads nowhere else.
    assert re.findall(r"href=\"([^#d][^\"]*)\"", text) == []


@pytest.mark.parametrize("arguments", [["--json"], ["check-table", "x.csv"]])
def test_a_page_goes_with_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["claims", "--page", str(tmp_path / "page.html"), *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_page_replaces_a_page_of_claims_and_nothing_else(tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    for place in (mine, tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(UserError, match="--page"):
            write_page(place)
    assert mine.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["mine.html"]


# ----------------------------------------------------------------------------------------------------------- the plots
def test_a_point_lies_in_the_claimed_region_where_the_check_holds_and_else_does_not(made: Board) -> None:
    seen = set()
    for each in made.judged:
        for check, finding in zip(each.claim.checks, each.findings, strict=True):
            if finding.figure and finding.figure.low in (None, finding.figure.high):
                drawn = str(strip(finding, check.region))
                point = float(re.search(r'cx="([\d.]+)%"', drawn)[1])  # type: ignore[index]
                start, width = map(float, re.search(r'<rect.* x="([\d.]+)%" width="([\d.]+)%"', drawn).groups())  # type: ignore[union-attr]
                assert (start - 0.01 <= point <= start + width + 0.01) is (finding.answer == "holds"), check.shows
                seen.add(finding.answer)
    assert {"holds", "fails"} <= seen


def test_an_interval_across_the_edge_is_drawn_across_it() -> None:
    drawn = str(strip(ClaimFinding("measured", "inside noise", "it", Figure(1.0, 0.9, 1.2, 3)), Region(high=1.1)))
    low, high = (float(re.search(rf'interval.* {key}="([\d.]+)%"', drawn)[1]) for key in ("x1", "x2"))  # type: ignore[index]
    edge = float(re.search(r' width="([\d.]+)%" y="18"', drawn)[1])  # type: ignore[index]
    assert low < edge < high


def test_a_derivation_comes_to_its_figure(made: Board) -> None:
    forms = set()
    for each in made.judged:
        for check, finding in zip(each.claim.checks, each.findings, strict=True):
            if text := derivation(check):
                assert finding.figure is not None
                plain = re.sub(r"(?<=[\d)]) (?:B|GB|GPUs|tokens/s|tokens|bytes|s)\b", "", text).replace("x", "*")
                assert eval(plain) == pytest.approx(finding.figure.value, rel=1e-3), text
                forms.add(check.form)
    wanted = {check.form for each in made.judged for check in each.claim.checks
              if FORMS[check.form].kind == "arithmetic"}  # fmt: skip
    assert wanted <= forms


# ------------------------------------------------------------------------------------------------- what a sceptic asks
def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def committed(folder: Path, ledger: str | None) -> str:
    """A repository whose ledger says this, and the commit."""
    git(folder.parent, "init", "-q", str(folder))
    if ledger is not None:
        (folder / "study" / "claims").mkdir(parents=True, exist_ok=True)
        (folder / "study" / "claims" / "ledger.yaml").write_text(ledger)
        git(folder, "add", ".")
    git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


def judged_from(commit: object, claim: str = "S3-02") -> tuple[JudgedClaim, Evidence]:
    """A claim whose records of the laptop say that they come from this commit."""
    records = read_parquet(REPORTS / "laptop")
    runs = records.runs.assign(git_commit=pd.array([commit] * len(records.runs), dtype="str"))
    evidence = Evidence(REPORTS).instead("laptop", Records(runs, records.steps))
    (found,) = [each for each in read_ledger().claims if each.id == claim]
    laptop = tuple(check for check in found.checks if check.numbers["report"] == "laptop")
    return judge(dataclasses.replace(found, checks=laptop), evidence), evidence


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (lambda text: text, "before"),
        (lambda text: text.replace("shows: optimizer bytes over", "shows: bytes of the optimizer over"), "before"),
        (lambda text: text.replace("over_figure: params, about: 1, within: 0.1}",
                                   "over_figure: params, about: 2, within: 0.1}"), "after"),
        (lambda text: text.replace("id: S3-02", "id: S3-92"), "after"),
        (lambda _text: "claims: [", "after"),
        (lambda _text: None, "after"),
    ],
    ids=["the same", "other words", "another threshold", "no such claim", "no YAML", "no ledger"],
)  # fmt: skip
def test_git_tells_whether_a_check_was_there_before_its_records(tmp_path: Path, change: object, order: str) -> None:
    assert callable(change)
    commit = committed(tmp_path / "repository", change(LEDGER.read_text(encoding="utf-8")))
    found = orders(*judged_from(commit), tmp_path / "repository")
    assert found[0] == order
    assert len(found) == 2


def test_without_git_or_a_commit_it_cannot_be_told(tmp_path: Path) -> None:
    commit = committed(tmp_path / "repository", LEDGER.read_text(encoding="utf-8"))
    for said, where in (
        (commit, tmp_path), (None, tmp_path / "repository"), ("0" * 40, tmp_path / "repository"),
        ("HEAD", tmp_path / "repository"), ("--help", tmp_path / "repository"),
    ):  # fmt: skip
        assert set(orders(*judged_from(said), where)) == {"cannot be told"}, said
    assert order_text(["cannot be told"]).startswith("Of 1 check on records: 1 not to be told from git")


def one_of_each(records: Records) -> pd.DataFrame:
    """The laptop's runs without repeats."""
    return records.runs.drop_duplicates(["workload_key", "arm", "seed"]).reset_index(drop=True)


def told(claim: str, records: Records) -> list[str]:
    """Of the laptop's records behind a claim."""
    evidence = Evidence(REPORTS).instead("laptop", records)
    (found,) = [each for each in read_ledger().claims if each.id == claim]
    laptop = tuple(check for check in found.checks if check.numbers.get("report") == "laptop")
    return [text for _, text in facts(judge(dataclasses.replace(found, checks=laptop), evidence), evidence)]


def test_a_sceptic_is_told_of_every_run_start_version_and_minute(made: Board) -> None:
    records = read_parquet(REPORTS / "laptop")
    runs = one_of_each(records)
    used = runs[(runs["task"] == "gpt-wikitext") & runs["strategy"].isin(["ddp", "zero2_cpu"])]
    others = runs["strategy"] == "zero2"
    runs.loc[others, "status_state"] = "oom"
    runs.loc[used.index, "status_started_at"] = "2026-11-20T10:00:00+00:00"
    runs.loc[used.index, "status_ended_at"] = "2026-11-20T10:12:00+00:00"
    _, ended, starts, made_with, again = told("S1-28", Records(runs, records.steps, ("a: broken", "b: broken")))
    ok = int((runs["status_state"] == "ok").sum())
    assert ended == (
        f"{len(used)} of {len(runs)}, which ended as: {ok} ok, {others.sum()} oom; 2 records were left out because they"
        " cannot be believed."
    )
    seeds = used["seed"].nunique()
    assert seeds == 3
    assert starts == f"{seeds} initializations from {seeds} seeds; runs that repeat a seed: 0."
    assert "DeepSpeed 0.19.8" in made_with
    assert "no GPU" in made_with
    assert again.startswith(f"`study run laptop`: these runs took {12 * len(used):.1f} minutes, all of laptop ")
    assert facts(next(each for each in made.judged if each.claim.id == "S0-06"), Evidence(REPORTS)) == []


def test_repeats_of_a_seed_are_no_independent_starts() -> None:
    records = read_parquet(REPORTS / "laptop")
    once = one_of_each(records)
    again = once.assign(run=once["run"] + "-again", repeat=2)
    runs = pd.concat([once, again], ignore_index=True).astype(once.dtypes)
    used = once[(once["task"] == "gpt-wikitext") & once["strategy"].isin(["ddp", "zero2_cpu"])]
    starts = told("S1-28", Records(runs, records.steps))[2]
    assert starts == f"3 initializations from 3 seeds; runs that repeat a seed: {len(used)}."


# ---------------------------------------------------------------------------------------------- reports and the ledger
def test_a_report_names_the_claims_that_rest_on_it_and_links_to_them(tmp_path: Path) -> None:
    from study.claims.command import resting

    records = read_parquet(REPORTS / "laptop")
    rows = {row.claim: row for row in resting(records, "laptop", REPORTS / "laptop")}
    assert {"S0-07", "S1-28", "S2-09", "S3-02"} <= rows.keys()
    assert rows["S3-02"].verdict == "contradicted"
    assert rows["S3-02"].address == "../../docs/claims.md#s3-02"
    assert "And 1 more." in rows["S3-02"].found
    assert resting(records, "laptop", tmp_path)[0].address == ""
    assert resting(records, "another", tmp_path) == []
    failed = Records(records.runs.assign(status_state="failed"), records.steps)
    assert resting(failed, "laptop", tmp_path) == []
    headings = re.findall(r"^### (\S+)$", (REPOSITORY / "docs" / "claims.md").read_text(), re.MULTILINE)
    assert {row.address.partition("#")[2] for row in rows.values()} <= {name.lower() for name in headings}


def test_what_was_measured_has_other_explanations(made: Board) -> None:
    for each in made.judged:
        measured = [finding for finding in each.findings if finding.kind == "measured" and finding.figure]
        if measured:
            assert each.claim.alternatives, f"{each.claim.id} is measured: add alternatives: to it, such as *cpu_ranks"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("front_page: [", "front_page: [S9-01, "), "front_page names 'S9-01'"),
        (("front_page: [", "front_page: [[], "), "front_page is"),
        (("corrections:\n", "corrections:\n  - {date: 2026, claim: S0-01, what: a, why: b}\n"), "write text"),
        (
            ("corrections:\n", 'corrections:\n  - {date: "2026", claim: S0-01, what: a, why: b}\n'),
            "holds 2026 of S0-01",
        ),
        (("corrections:\n", 'corrections:\n  - {date: "2026-11-21", claim: S9-01, what: a, why: b}\n'), "S9-01"),
        (("corrections:\n", 'corrections:\n  - {date: "2026-11-21", claim: S0-01, what: a}\n'), "why is missing"),
        (("protocol: {published:", "protocol: {printed:"), "unknown key 'printed'"),
    ],
)
def test_new_parts_of_the_ledger_are_read_strictly(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    ledger = tmp_path / "ledger.yaml"
    text = LEDGER.read_text(encoding="utf-8")
    assert change[0] in text
    ledger.write_text(text.replace(*change, 1))
    with pytest.raises(UserError) as refused:
        read_ledger(ledger)
    assert said in str(refused.value)


def test_a_correction_stands_in_the_page_and_the_json(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.yaml"
    entry = 'corrections:\n  - {date: "2026-11-21", claim: S0-01, what: It was wrong., why: A slip.}\n'
    ledger.write_text(LEDGER.read_text(encoding="utf-8").replace("corrections:\n", entry))
    changed = board(ledger=read_ledger(ledger))
    from study.claims.page import page

    assert "- 2026-11-21, [S0-01](#s0-01): It was wrong. A slip." in page(changed)
    told = {"date": "2026-11-21", "claim": "S0-01", "what": "It was wrong.", "why": "A slip."}
    assert changed.document()["corrections"][0] == told
