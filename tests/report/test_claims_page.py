from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from playwright.sync_api import Browser, Page

from report.test_report_pages import CONTRAST
from report_folders import links_with_targets
from study.claims.evidence import Evidence
from study.claims.forms import FORMS
from study.claims.ledger import LEDGER, read_ledger
from study.claims.page import page, write_page
from study.claims.provenance import Order, preregistration_orders
from study.claims.scoreboard import REPORTS, Scoreboard, build_scoreboard, judge
from study.cli import main
from study.config.places import REPOSITORY
from study.records.frames import Records, read_parquet, write_parquet

EVIL = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    """Write the page with the command, in the repository so that its links resolve."""
    (REPOSITORY / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "runs") as folder:
        page = Path(folder) / "claims.html"
        assert main(["claims", "--page", str(page)]) == 0
        yield page


@pytest.fixture(scope="module", params=(400, 1400), ids=lambda width: f"{width}px")
def open_page(request: pytest.FixtureRequest, file: Path, browser: Browser) -> Page:
    page = browser.new_context(viewport={"width": request.param, "height": 900}).new_page()
    page.goto(file.as_uri())
    return page


def visible(page: Page) -> list[str]:
    # Playwright's `:visible` takes a second on this page.
    visible_ids = "all => all.filter(one => one.checkVisibility()).map(one => one.id.toUpperCase())"
    return list(page.eval_on_selector_all(".claim", visible_ids))


def test_each_number_of_the_scoreboard_is_the_jsons_and_filters_its_claims_without_a_script(open_page, full_board):
    counts = full_board.document()["findings"]
    cells = "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
    head, *rows = open_page.eval_on_selector_all(".scoreboard tr", cells)
    found = {row[0][:3].strip(): dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    assert found == {
        code: {kind: str(kinds.get(kind, "-")) for kind in head[1:-1]} | {"claims": str(sum(kinds.values()))}
        for code, kinds in counts.items()
    }
    holding = [judged.claim.id for judged in full_board.judged if judged.finding.kind == "holds"]
    assert open_page.locator(".holding a").all_text_contents() == holding
    assert open_page.evaluate("document.scripts.length") == 0
    links = open_page.eval_on_selector_all(".scoreboard td a", "all => all.map(one => one.getAttribute('href'))")
    assert len(links) > 20
    for link in dict.fromkeys(links):
        open_page.click(f'.scoreboard td a[href="{link}"]')
        code, kind = re.fullmatch(r"#(?:only-)?([SZ]\d)?-?([a-z-]*)", link).groups()  # type: ignore[union-attr]
        assert visible(open_page) == [
            judged.claim.id
            for judged in full_board.judged
            if code in (None, judged.claim.document) and kind in ("", "claims", judged.finding.kind.replace(" ", "-"))
        ]
    open_page.click(".scoreboard td a[href='#only-S1-does-not-hold']")
    open_page.click(".filter:target a")
    assert len(visible(open_page)) == len(full_board.judged)


def test_every_link_of_the_page_has_a_target(open_page: Page, file: Path) -> None:
    elsewhere = {link for link in links_with_targets(open_page, file) if not link.startswith("#")}
    assert {Path(link).parts[-2] for link in elsewhere} >= {"laptop", "paper_table1", "virtual_settings"}


def test_the_page_fits_the_screen_and_has_every_claim_with_its_words_and_checks(open_page, file, full_board):
    size = open_page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert size[0] == open_page.viewport_size["width"]
    assert size[0] < 1400 or size[1] <= 8000, size
    # A segment of the chart is as long as its count, which is inside it.
    sizes = "all => all.map(one => [+one.textContent, one.clientWidth, one.scrollWidth])"
    counts, lengths, texts = np.array(open_page.eval_on_selector_all(".bar i", sizes)).T
    assert (counts.sum(), max(texts - lengths)) == (len(full_board.judged), 0)
    assert lengths == pytest.approx(counts * lengths.max() / counts.max(), abs=2)
    assert open_page.evaluate(CONTRAST) == []
    texts = [open_page.locator(f".claim .{part}").all_text_contents() for part in ("answer", "notes")]
    for judged, answer, notes in zip(full_board.judged, *texts, strict=True):
        assert answer.startswith(judged.sentence.partition(" the claim needs")[0]), "cards are cut after four lines"
        assert " ".join(judged.claim.quote.split()) in " ".join(notes.replace("\u00a0", " ").split())
        assert notes.count("the claim needs") >= sum(result.figure is not None for result in judged.results)
    # It is a single file without a path of this machine.
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    assert not [folder for folder in (REPOSITORY, file.parent) if str(folder) in text]


def test_text_of_a_record_is_shown_and_not_executed(tmp_path: Path) -> None:
    records = read_parquet(REPORTS / "laptop")
    runs = records.runs.assign(cpu=EVIL, torch_version=EVIL)
    write_parquet(dataclasses.replace(records, runs=runs), tmp_path / "reports" / "laptop")
    write_page(tmp_path / "page.html", tmp_path / "reports")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;window.harmed" in text
    assert ("<script" in text, "<img" in text) == (False, False)
    # Outside the repository a page has no links to files.
    assert re.findall(r"href=\"([^#d][^\"]*)\"", text) == []
    assert "<script" not in page(build_scoreboard(tmp_path / "reports"))


def test_a_derivation_comes_to_its_figure(full_board: Scoreboard) -> None:
    forms = set()
    for result in (result for judged in full_board.judged for result in judged.results):
        if result.figure and (text := result.figure.derivation):
            plain = re.sub(r"(?<=[\d)]) (?:B|GB|GPUs|tokens/s|tokens|bytes|s)\b", "", text).replace("x", "*")
            assert eval(plain) == pytest.approx(result.figure.value, rel=1e-3), text
            forms.add(result.check.form)
    assert {name for name, form in FORMS.items() if form.kind == "arithmetic"} <= forms


def test_a_page_is_refused_with_other_outputs_and_over_other_files(tmp_path, capsys):
    old = tmp_path / "mine.html"
    old.write_text("mine")
    new = tmp_path / "page.html"
    for place, *more in ((new, "--json"), (new, "check-table", "x.csv"), (old,), (tmp_path,), (new / "page.html",)):
        assert main(["claims", "--page", str(place), *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--page" in line
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine.html", "mine")]


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
