"""The pages of a report, in the browser that a reader has: Debian's Chromium, headless, driven by playwright."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from playwright.sync_api import Browser, Page

from report_folders import laptop, links_with_targets
from study.config.places import REPOSITORY
from study.records.frames import Records, read_parquet, write_parquet
from study.report.questions import answers
from study.report.questions.memory import MEMORY
from study.report.questions.time import TIME
from synthetic_records import answered

NAMES = ("loss_curves", "offload", "peak_memory", "runtime", "single_vs_multi")
PAGES = ("index", *NAMES)
DATA = REPOSITORY / "tests" / "data"
EVIL = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'> | `$x$` \\"
# With this on the path, torch and its importers cannot be imported.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "deepspeed", "accelerate", "transformers", "datasets"}:
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocker())
"""


def harmful(records: Records) -> Records:
    """Return the laptop's records with hostile text in every field, and with every kind of failure."""
    # One of its workloads: the others would multiply every figure.
    runs = records.runs[records.runs["model_name_or_path"] == "gpt-tiny"].copy()
    runs["workload_key"] = runs["workload_key"].map(lambda key: json.dumps(json.loads(key) | {"data": EVIL}))
    runs.loc[runs["strategy"] == "zero1", "arm"] = "zero1 " + EVIL
    confounded = runs["strategy"] == "zero2"
    runs.loc[confounded, ["confounded", "confounded_loss"]] = EVIL
    failed = runs["strategy"] == "zero3"
    runs.loc[failed, ["status_state", "status_reason", "status_hint"]] = ["oom", EVIL, EVIL]
    runs["cpu"] = EVIL
    refused = tuple(f"run-{number}/summary.json: {EVIL}" for number in range(60))
    steps = records.steps[records.steps["run"].isin(runs["run"])]
    return dataclasses.replace(records, runs=runs, steps=steps, refused=refused)


OPEN = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
# Texts whose contrast with the background is below WCAG AA and controls without a name; what is wider than the screen;
# of each table that scrolls the width of the screen, its shadows, and whether a cell covers them.
CONTRAST, OVERFLOW, SCROLLING = ((DATA / f"{name}.js").read_text() for name in ("contrast", "overflow", "scrolling"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build with a user's command, without torch, run directories, or a suite of that name."""
    work = tmp_path_factory.mktemp("work")
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(BLOCKER)
    write_parquet(harmful(laptop()), work / "reports" / "harmful")
    result = subprocess.run(
        [sys.executable, "-m", "study.cli", "report", "harmful"],
        cwd=work,
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(work / "site"), str(REPOSITORY)])},
        timeout=300,
    )
    assert (result.returncode, result.stdout) == (0, "reports/harmful/index.html\n"), result.stderr
    return work / "reports" / "harmful"


class Visit(NamedTuple):
    page: Page
    complaints: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def opened(report: Path, browser: Browser) -> dict[str, Visit]:
    """Open every page, with its console errors and requests: its figures take most of the time of a test."""
    return {name: visit(browser, report / f"{name}.html") for name in PAGES}


@pytest.fixture(scope="module", params=(400, 1400), ids=lambda width: f"{width}px")
def visits(request: pytest.FixtureRequest, opened: dict[str, Visit]) -> dict[str, Visit]:
    """Return the pages at one width, that of a phone or of a screen."""
    for page, _, _ in opened.values():
        page.set_viewport_size({"width": request.param, "height": 900})
    return opened


def visit(browser: Browser, file: Path) -> Visit:
    page = browser.new_context(viewport={"width": 400, "height": 900}).new_page()
    opened = Visit(page, [], [])
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(file.as_uri())
    return opened


def test_a_report_rebuilds_from_parquet_without_torch(report):
    names = {file.name for file in report.iterdir()}
    pages = {f"{name}.{kind}" for name in NAMES for kind in ("html", "ipynb")}
    records = {"runs.parquet", "steps.parquet"}
    assert names == {"files.json", "pages.json", "index.html", "summary.md", "figures", "images", *records, *pages}
    # The summary shows the first figure of each question of the full report, and every figure is a PNG and an SVG.
    svgs = {file.stem for file in report.glob("figures/*.svg")}
    assert svgs == {f"{file.stem[:-2]}_1" for file in (REPOSITORY / "reports/laptop/figures").iterdir()}
    pngs = {file.stem for file in report.glob("images/*.png")}
    assert pngs == svgs | {file.stem for file in report.glob("images/*.svg")} > svgs
    # Nothing names a place of this machine.
    places = [str(REPOSITORY), str(report.parents[1]), sys.prefix, str(Path.home()) + "/"]
    for file in (file for file in report.rglob("*") if file.suffix in {".html", ".ipynb", ".md", ".svg"}):
        text = file.read_text(encoding="utf-8")
        assert not [place for place in places if place in text], file.name


def test_a_notebook_shows_the_answer_of_its_question(report: Path) -> None:
    for name, question in (("runtime", TIME), ("peak_memory", MEMORY)):
        cells = nbformat.read(report / f"{name}.ipynb", as_version=4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", []) if "data" in output]
        shown = [output.data["text/markdown"] for output in outputs if "text/markdown" in output.data]
        answer = answered(question.answer(read_parquet(report)))
        assert answer._repr_markdown_() in shown
        assert "<script>" not in "".join(shown)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_whole_fits_the_screen_and_links_to_what_there_is(visits, report, name):
    page, complaints, requests = visits[name]
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [page.url]
    assert page.evaluate(OVERFLOW) == [0, []]
    pictures = page.eval_on_selector_all(
        "img", "all => all.map(one => [one.complete && one.naturalWidth, one.alt, one.clientWidth])"
    )
    assert pictures or name == "index"
    # A figure has 200 pixels per inch: a point of its text is a pixel of the page or more.
    assert all(width > 800 and len(words) > 40 and client > 72 * width / 200 for width, words, client in pictures)
    assert len(links_with_targets(page, report / f"{name}.html")) > len(PAGES)
    page.evaluate(OPEN)
    # A phone shows every number of a table, and a wide table shows that it scrolls.
    assert all(table == [1400, 4, True] for table in page.evaluate(SCROLLING))


@pytest.mark.parametrize("name", PAGES)
def test_text_of_a_record_is_shown_and_not_executed(visits, name):
    page = visits[name].page
    assert page.evaluate("document.scripts.length") == 0
    assert page.evaluate("'harmed' in window") is False
    assert not page.query_selector("img[onerror]")
    if name == "index":
        assert "<script>window.harmed = 1</script>" in page.inner_text("body")


def test_the_index_begins_with_the_answers_and_shows_failures(visits):
    page, by_question = visits["index"].page, answers(harmful(laptop()))
    titles = page.eval_on_selector_all(".card h2", "all => all.map(one => one.textContent)")
    assert titles == [question.title for question in by_question]
    assert all(page.eval_on_selector_all(".answer", "all => all.map(one => one.innerText.trim())"))
    numbers = [headline.value for answer in by_question.values() if answer.leads for headline in answer.headlines]
    assert page.eval_on_selector_all(".numbers dd", "all => all.map(one => one.innerText)") == numbers != []
    # A figure for each question with a page; tables are folded, and the versions are at the foot.
    assert page.locator(".card:has(.more) .picture").count() == page.locator(".card:has(.more)").count() == 7
    assert page.locator(".card:has(.picture) .table:not(details .table)").count() == 0
    assert page.locator("h2").last.inner_text() == "Versions and environment"
    page.evaluate(OPEN)
    rows = page.eval_on_selector_all("tr", "all => all.map(row => [...row.cells].map(cell => cell.textContent.trim()))")
    # Memory, time, traffic and ranks show it as a row without figures.
    assert [row[:3] for row in rows if row[1:2] == ["oom"]] == [["zero3", "oom", "-"]] * 4
    body = page.inner_text("body")
    assert ("run-0/summary.json: <script>" in body, "and 10 more" in body) == (True, True)


LIGHTNESS = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa_and_every_control_a_name(opened, scheme):
    for name in PAGES:
        page = opened[name].page
        page.set_viewport_size({"width": 1400, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.evaluate(OPEN)
        assert page.evaluate(CONTRAST) == [], name
        assert page.locator("h1").count() == page.locator("main").count() == 1
        assert (page.evaluate(LIGHTNESS) > 600) is (scheme == "light"), "dark if the reader prefers it"


def test_the_summary_is_markdown_that_no_record_can_break(report):
    text = (report / "summary.md").read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "run-59/summary.json" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) > 9
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, table[0]
