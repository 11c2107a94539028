"""The calculator: three commands of `study` in a browser, compared with the commands on this machine."""

from __future__ import annotations

import base64
import csv
import html.parser
import http.server
import json
import math
import os
import random
import re
import shlex
import shutil
import threading
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

import pytest
import yaml

from chromium import wait_for_page
from drawn_questions import FLAGS, drawn_questions
from firefox import find_firefox, firefox
from study import cli
from study.advisor import explain
from study.config.errors import UserError
from study.config.flags import Parser
from study.config.other_names import NOT_MODELLED, find_flag
from study.config.registry import REGISTRY
from study.config.text import rounded
from study.predictor.hardware import to_box
from study.predictor.intervals import FILE as INTERVALS
from study.predictor.intervals import NOT_KNOWN
from study.predictor.models import model_shape
from tools.calculator import build

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
# A question without a stored answer, with two more fields; and its command.
ADDRESS = "#model=gpt2-xl&gpus=2&device=4090&host_memory=64&seq_length=1024"
WORDS = ["gpt2-xl", "--hardware", "2x4090", "--host_memory", "64", "--seq_length", "1024"]
PYTHON_TIMEOUT_MS = 240_000
# As on the page.
FORM_ORDER = (
    *("model", "seq_length", "nodes", "gpus", "device"),
    *("host_memory", "host_gb_per_s", "nvme_gb_per_s", "nvme_path"),
    *("bus_gb_per_s", "network_gb_per_s", "price_per_gpu_hour"),
    *("train_tokens", "global_batch_size", "micro_batch", "accumulation", "tensor_parallel", "optimizer", "precision"),
    *("peft", "lora_rank", "lora_targets", "with_reference"),
    *("gradient_checkpointing", "attn_implementation", "compile", "loss_kernel"),
)
# A model of one's own.
OWN = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "_name_or_path": "mine/1b",
}
# One that no table describes; two layers are traced within seconds.
TRACED = {
    "model_type": "olmo2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "_name_or_path": "mine/olmo",
}
# The number of the question whose answer is whole.
ANSWERED = "body[data-done]:not([data-done=''])"


TYPES = {
    ".mjs": "text/javascript",
    ".js": "text/javascript",
    ".wasm": "application/wasm",
    ".html": "text/html",
    ".css": "text/css",
    ".json": "application/json",
    "": "application/zip",
}


class Files(http.server.SimpleHTTPRequestHandler):
    """Static files, with the types that a web server gives them."""

    extensions_map = TYPES

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the calculator and serve it; return its address."""
    folder = tmp_path_factory.mktemp("calculator")
    try:
        build.fetch(build.PYODIDE)
        build.wheels()
    except UserError as refusal:
        pytest.skip(f"{refusal.problem}: {refusal.fix}")
    build.build(folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def requests() -> list[str]:
    """Return the addresses that pages asked for since the beginning of the test."""
    return []


@pytest.fixture(scope="module")
def errors() -> list[str]:
    """Return the errors of pages since the beginning of the test."""
    return []


def open_tab(browser: Browser, requests: list[str], errors: list[str]) -> Page:
    """Return an empty tab, 1,250 wide, whose requests and errors are noted."""
    page = browser.new_page(viewport={"width": 1250, "height": 1000})
    page.set_default_timeout(PYTHON_TIMEOUT_MS)
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return page


@pytest.fixture
def tab(browser: Browser, requests: list[str], errors: list[str]) -> Iterator[Page]:
    """Return a tab in which no page was opened."""
    requests.clear()
    errors.clear()
    page = open_tab(browser, requests, errors)
    yield page
    page.close()


@pytest.fixture(scope="module")
def python_tab(browser: Browser, site: str, requests: list[str], errors: list[str]) -> Iterator[Page]:
    """Return a tab with the page, whose Python has started: that takes most of the time of a test."""
    page = open_tab(browser, requests, errors)
    page.goto(f"{site}/index.html")
    page.wait_for_selector("body[data-started=yes]")
    page.evaluate("import('./common.js').then((module) => module.call({}, 'releases', '[\"0.19.8\"]'))")
    yield page
    page.close()


# The page as it is when it is opened without a question.
FIRST_STATE = """
async () => {
  history.replaceState(null, "", location.pathname);
  for (const id of ["file-form", "releases-form"]) {
    const form = document.getElementById(id);
    form.reset();
    delete form.dataset.done;
  }
  document.querySelector("#file-form [name=text]").dispatchEvent(new Event("input"));
  document.querySelector("#features").dispatchEvent(new Event("change"));
  document.querySelectorAll("details").forEach((element) => { element.open = false; });
  for (const id of ["explain-status", "releases-status"]) document.getElementById(id).textContent = "";
  for (const id of ["explain-answer", "releases-answer"]) document.getElementById(id).hidden = true;
  document.body.dataset.done = "";
  await (await import("./page.js")).open();
}
"""


@pytest.fixture
def page(python_tab: Page, requests: list[str], errors: list[str]) -> Page:
    """Return the tab with Python, and the page as it is when it is opened: nothing of the tests before."""
    python_tab.set_viewport_size({"width": 1250, "height": 1000})
    python_tab.emulate_media(color_scheme="light")
    python_tab.evaluate(FIRST_STATE)
    requests.clear()
    errors.clear()
    return python_tab


def ask(page: Page) -> None:
    page.click("#form button")
    page.wait_for_selector(ANSWERED)


def visit(page: Page, address: str) -> None:
    """Follow a link within the open page, and wait for its answer."""
    # The address of the page is no navigation.
    page.evaluate(
        """(address) => {
          document.body.dataset.done = '';
          if (location.hash === address) dispatchEvent(new PopStateEvent("popstate"));
          location.hash = address;
        }""",
        address,
    )
    page.wait_for_selector(ANSWERED)


def rows(page: Page) -> dict[str, list[str]]:
    """Return the cells of each row, by strategy."""
    lines: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('#table tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return {name: cells for name, *cells in lines}


def advised(capsys: pytest.CaptureFixture[str], words: list[str]) -> Any:
    capsys.readouterr()
    cli.main(["advise", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_stored_answer_is_shown_before_python_is_asked_for(
    tab: Page, site: str, requests: list[str], errors: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = tab
    page.goto(f"{site}/index.html")
    page.wait_for_selector("body[data-started=yes]")
    document = advised(capsys, ["llama-3.1-8b", "--hardware", "8xH100"])
    assert page.inner_text("#answer") == f"Use {document['recommended']}: {document['how_sure']}"
    assert list(rows(page)) == [option["strategy"] for option in document["strategies"]]
    # With its notes as printed.
    capsys.readouterr()
    cli.main(["advise", "llama-3.1-8b", "--hardware", "8xH100"])
    printed = capsys.readouterr().out.splitlines()
    notes = page.locator("#notes li").all_inner_texts()
    assert any(note.startswith("needs DeepSpeed 0.19.6 or later") for note in notes)
    assert {*notes} <= {line.replace("`", "") for line in printed}
    assert not any("pyodide" in url or "study.zip" in url for url in requests)
    assert not errors


def test_python_starts_with_the_first_input_and_a_stored_answer_stays_until_it_has_the_whole_one(
    tab: Page, site: str, requests: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = tab
    page.goto(f"{site}/index.html#gpus=1&device=4090&peft=qlora")
    page.wait_for_selector("body[data-started=yes]")
    document = advised(capsys, ["llama-3.1-8b", "--hardware", "1x4090", "--peft", "lora", "--quantization", "4bit"])
    answer = f"Use {document['recommended']}: {document['how_sure']}"
    assert page.inner_text("#answer") == answer
    assert not any("pyodide" in url for url in requests)
    requests.clear()
    # The same values again, so that the question stays. The request may end before the second field is filled.
    with page.expect_event("requestfinished", lambda request: request.url.endswith("study.zip")):
        page.fill("[name=gpus]", "1")
        page.fill("[name=model]", "llama-3.1-8b")
    assert page.is_hidden("#progress")
    page.click("#form button")
    assert page.is_visible("#progress")
    assert page.inner_text("#answer") == answer
    page.wait_for_selector(ANSWERED)
    assert page.is_hidden("#progress")
    assert page.inner_text("#answer") == answer
    assert page.locator("#table button").count() == len(document["strategies"])
    assert sum(url.endswith("study.zip") for url in requests) == 1


def test_files_and_changes_of_a_stored_answer_are_computed_when_they_are_asked_for(
    tab: Page, site: str, requests: list[str], errors: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, words = tab, ["gpt2-xl", "--hardware", "1x4090"]
    page.goto(f"{site}/index.html#model=gpt2-xl&gpus=1&device=4090")
    page.wait_for_selector("body[data-started=yes]")
    document = advised(capsys, [*words, "--output", str(tmp_path)])
    assert page.locator("#table tbody button").count() == len(document["strategies"])
    assert page.is_visible("#what-if")
    says = "stored with the page: its files and changes are computed when they are asked for"
    assert page.inner_text("#status").endswith(says)
    assert not any("pyodide" in url for url in requests)
    # A new question is typed, and not asked yet.
    page.fill("[name=model]", "bert-base-uncased")
    page.click(f"button[aria-label='files of {document['recommended']}']")
    page.wait_for_selector("#files pre")
    texts = [text.replace("\n", "") for text in page.locator("#files pre").all_inner_texts()]
    for file in tmp_path.iterdir():
        assert file.read_text().replace(f"{tmp_path}/", "").replace("\n", "") in texts
    assert page.inner_text("#command") == f"study advise {' '.join(words)}"
    assert says not in page.inner_text("#status")
    page.click("#what-if")
    page.wait_for_selector("#what-if:enabled")
    changes = page.locator("#changes li").all_inner_texts()
    assert changes[: len(document["changes"])] == document["changes"]
    # The same for the changes of another stored answer; a new question ends the old one.
    visit(page, "#model=llama-3.1-8b&gpus=8")
    assert not page.is_disabled("#what-if")
    assert page.locator("#changes li").count() == 0
    assert not errors


def test_a_link_asks_its_question_and_the_answer_is_that_of_the_command(
    tab: Page, site: str, requests: list[str], errors: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = tab
    page.goto(f"{site}/index.html{ADDRESS}")
    page.wait_for_selector(ANSWERED)
    document = advised(capsys, WORDS)
    assert page.inner_text("#answer") == f"Use {document['recommended']}: {document['how_sure']}"
    assert page.inner_text("#command") == f"study advise {' '.join(WORDS)}"
    entries = page.evaluate("import('./page.js').then((module) => module.answer())")
    assert [entry["strategy"] for entry in entries] == [entry["strategy"] for entry in document["strategies"]]
    drawn = page.evaluate("import('./bars.js').then((module) => module.PARTS)")
    assert all(entry["device_parts"].keys() <= {*drawn} for entry in entries)
    for ours, theirs in zip(entries, document["strategies"], strict=True):
        assert_same({name: ours[name] for name in theirs}, theirs)
    # Nothing left this machine.
    assert {url.rpartition("/")[0].removesuffix("/pyodide") for url in requests} == {site}
    assert not errors


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare two documents; sum() rounds floats differently before Python 3.12, in the last digits."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_same(ours[name], value)
    elif isinstance(theirs, float) and not isinstance(ours, str):
        assert math.isclose(ours, theirs, rel_tol=1e-12), (ours, theirs)
    else:
        assert ours == theirs


def test_files_and_changes_are_those_of_the_command(
    page: Page, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    visit(page, ADDRESS)
    document = advised(capsys, [*WORDS, "--output", str(tmp_path)])
    page.click(f"button[aria-label='files of {document['recommended']}']")
    page.wait_for_selector("#files pre")
    # The keyboard goes on at the files.
    assert page.evaluate("document.activeElement.ariaLabel") == "commands"
    texts = [text.replace("\n", "") for text in page.locator("#files pre").all_inner_texts()]
    for file in tmp_path.iterdir():
        assert file.read_text().replace(f"{tmp_path}/", "").replace("\n", "") in texts
    launch = page.inner_text("#files pre[aria-label=commands]").splitlines()[0]
    assert launch == document["files"]["command"].replace(f"{tmp_path}/", "")
    assert launch.startswith("accelerate launch --config_file ")
    page.click("#what-if")
    page.wait_for_selector("#what-if:enabled")
    changes = page.locator("#changes li").all_inner_texts()
    what_ifs = []
    for label, hardware, flags in (
        ("one more GPU, 66 samples per step", "3x4090", [*WORDS[3:], "--global_batch_size", "66"]),
        ("512 tokens per sample", "2x4090", [*WORDS[3:-1], "512"]),
    ):
        advice = advised(capsys, [WORDS[0], "--hardware", hardware, *flags])
        (row,) = [row for row in advice["strategies"] if row["strategy"] == advice["recommended"]]
        checkpointing = f"{'' if row['gradient_checkpointing'] else 'no '}gradient checkpointing"
        settings = f"micro-batch {row['micro_batch']} x accumulation {row['accumulation']}, {checkpointing}"
        # The first lines of the command have the same bound, speed and range.
        capsys.readouterr()
        cli.main(["advise", WORDS[0], "--hardware", hardware, *flags])
        first = " ".join(capsys.readouterr().out.partition("\nwhy ")[0].split())
        (bound,) = re.findall(r"\(90 % bound (\S+)\)", first)
        (speed,) = re.findall(r" about (\S+ tokens/s(?: \([^)]+\))?), predicted", first)
        figures = f"{rounded(row['device_bytes'] / 2**30)} GiB, 90 % bound {bound}, {speed}"
        what_ifs.append(f"with {label}: {advice['recommended']} ({settings}), {figures}")
    assert changes == [
        *(document["changes"] or ["nothing of: more or fewer GPUs, a slower network, longer samples"]),
        *what_ifs,
        *([document["optimizer_on_host"]] if document["optimizer_on_host"] else []),
    ]
    with page.expect_download() as download:
        page.click("#save-csv")
    table = [*csv.DictReader(Path(download.value.path()).read_text().splitlines())]
    assert [row["strategy"] for row in table] == [row["strategy"] for row in document["strategies"]]
    assert_csv_row_is_of_advice(table[0], document["strategies"][0], WORDS, capsys)
    with page.expect_download() as download:
        page.click("#save-svg")
    assert_drawing_has_the_parts(Path(download.value.path()).read_text(), document["strategies"])
    with page.expect_download() as download:
        page.click("#save-plot")
    drawing = Path(download.value.path()).read_text()
    assert drawing.count("<circle") == sum(option["fits"] for option in document["strategies"])
    assert drawing.count(" tokens/s") >= drawing.count("<circle")


def assert_csv_row_is_of_advice(row: dict[str, str], option: dict[str, Any], words: list[str], capsys: Any) -> None:
    """Compare each cell of a saved table with the documents of `study advise` and `study predict`."""
    capsys.readouterr()
    flags = ["--micro_batch", str(option["micro_batch"]), "--accumulation", str(option["accumulation"])]
    flags += ["--gradient_checkpointing"] * option["gradient_checkpointing"]
    cli.main(["predict", *words, "--strategy", option["strategy"], "--fitted", *flags, "--json"])
    predicted = json.loads(capsys.readouterr().out)
    memory, speed, ranks = predicted["memory"], predicted["time"]["tokens_per_s_per_gpu"], predicted["ranks"]
    intervals = yaml.safe_load(INTERVALS.read_text())
    host = intervals["host_error"]
    texts = {
        "strategy": option["strategy"],
        "micro-batch": str(option["micro_batch"]),
        "accumulation": str(option["accumulation"]),
        "checkpointing": "yes" if option["gradient_checkpointing"] else "no",
        "NVMe GiB (\u00b1 0.05 %)": "-",
        "remark": "recommended",
    }
    bound = memory["peak_reserved"]["high"] + memory["device_parts"]["context"]
    figures = {
        "peak GiB": option["device_bytes"] / 2**30,
        "90 % bound": bound / 2**30,
        "tokens/s, all GPUs": option["tokens_per_s"],
        "sent a step and GPU, GB (\u00b1 0.05 %)": predicted["sent_bytes_per_step"]["value"] / 1e9,
        f"host GiB (\u00b1 {100 * host['median']:.1f} %, worst {100 * host['worst']:.0f} %)": (
            memory["host_peak"]["value"] / 2**30
        ),
    }
    interval = "80 % of runs, ~ by host"
    assert row.keys() == {*texts, *figures, interval}
    assert {name: row[name] for name in texts} == texts
    assert {name: number(row[name]) for name in figures} == pytest.approx(figures, rel=THREE_DIGITS)
    if not speed["within_factor_2"]:
        assert row[interval] == NOT_KNOWN
    else:
        assert numbers(row[interval]) == pytest.approx([speed["low"] * ranks, speed["high"] * ranks], rel=THREE_DIGITS)


def assert_drawing_has_the_parts(text: str, options: list[dict[str, Any]]) -> None:
    """Compare the parts of the bars, their texts and their widths, with the document of `study advise`."""
    drawing = ElementTree.fromstring(text)
    pieces: dict[str, dict[str, tuple[str, float]]] = {}
    for piece in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        ((name, part, size),) = re.findall(r"^(\w+), (\w+): (\S+) GiB$", piece[0].text or "")
        pieces.setdefault(name, {})[part] = size, float(piece.attrib["width"])
    assert [*pieces] == [option["strategy"] for option in options]
    # Bars that do not fit may be cut.
    best = options[0]
    parts = {name: size for name, size in best["device_parts"].items() if size > 0}
    drawn = pieces[best["strategy"]]
    assert drawn.keys() == parts.keys()
    for name, size in parts.items():
        assert number(drawn[name][0]) * 2**30 == pytest.approx(size, rel=THREE_DIGITS)
    widths = {name: width / sum(width for _, width in drawn.values()) for name, (_, width) in drawn.items()}
    assert widths == pytest.approx({name: size / sum(parts.values()) for name, size in parts.items()}, rel=1e-3)


# The answer of Python in the browser to the words of a question: its rows, rank and changes, or its refusal.
ASK = """
async ([words, withChanges]) => {
  const { call } = await import("./common.js");
  const status = document.createElement("p");
  const about = await call(status, "ask", JSON.stringify(words));
  if (about.refused) return { about };
  const rows = {};
  for (const name of about.names) rows[name] = await call(status, "best", name);
  const rank = await call(status, "rank");
  return { about, rows, rank, changes: withChanges ? await call(status, "changes") : {} };
}
"""


def test_the_draw_has_every_flag_and_value_and_models_of_7_b() -> None:
    questions = [" ".join(words) for words in drawn_questions(1000)]
    sizes = [model_shape(text.split()[0]).parameters for text in questions[:30]]
    assert sum(size > 7e9 for size in sizes) == 10
    assert max(sizes) > 70e9
    for flag, values in FLAGS.items():
        assert all(any(f" {flag} {value}".rstrip() in text for text in questions) for value in values), flag


@pytest.mark.parametrize(
    ("count", "with_changes"),
    [
        # Without the changes, so that it takes less than a minute.
        pytest.param(8, False, id="eight"),
        pytest.param(40, True, id="forty", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_drawn_questions_have_the_answers_of_the_command(
    page: Page, capsys: pytest.CaptureFixture[str], count: int, with_changes: bool
) -> None:
    seed = int(os.environ.get("ZERO_STUDY_DRAWN_SEED") or random.randrange(1_000_000))
    with capsys.disabled():
        print(f"ZERO_STUDY_DRAWN_SEED={seed}", end=" ", flush=True)
    refused = 0
    for words in drawn_questions(count, seed):
        ours = page.evaluate(ASK, [words, with_changes])
        about = ours["about"]
        if "refused" in about:
            refused += 1
            capsys.readouterr()
            assert cli.main(["advise", *words]) == 2
            assert capsys.readouterr().err == f"error: {about['refused']}. To fix it: {about['fix']}.\n"
            continue
        document = advised(capsys, words)
        answer = {**about, **ours["rank"], **ours["changes"]}
        shared = {name: value for name, value in answer.items() if name in document}
        assert shared.keys() >= {"model", "parameters", "hardware", "recommended", "how_sure", *ours["changes"]}
        assert_same(shared, {name: document[name] for name in shared})
        assert ours["rank"]["order"] == [row["strategy"] for row in document["strategies"]], words
        for row in document["strategies"]:
            assert_same({name: ours["rows"][row["strategy"]][name] for name in row}, row)
    assert refused <= count // 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "llama-9-8b"}, "llama-9-8b"),
        ({"global_batch_size": "7"}, "--global_batch_size 7 is not a multiple of 2 ranks"),
        ({"config": '{"model_type": "<img src=x onerror=alert(1)>"}'}, "traced with transformers' own code"),
        ({"model": "<img src=x onerror=alert(1)>"}, "'<img src' is not a size of a model"),
        ({"config": "not JSON"}, "config.json"),
        ({"config": '{"model_type": "llama", "hidden_size": 1e300}'}, "does not set its layers"),
    ],
)
def test_an_impossible_question_is_refused_with_its_remedy(
    page: Page, fields: dict[str, str], says: str, requests: list[str], site: str
) -> None:
    page.evaluate("document.querySelector('#form details').open = true")
    for name in ("model", "global_batch_size", "config"):
        page.fill(f"[name={name}]", fields.get(name, "gpt2" if name == "model" else ""))
    page.fill("[name=gpus]", "2")
    ask(page)
    status = page.inner_text("#status")
    assert says in status
    assert "To fix it: " in status
    assert page.locator("#status.refused").count() == 1
    assert page.is_hidden("#result")
    assert page.locator("img").count() == 0
    assert all(url.startswith(site) for url in requests)


def test_each_strategy_of_the_advice_is_described(tab: Page, site: str) -> None:
    tab.goto(f"{site}/index.html")
    described = tab.locator("#strategies dt").all_text_contents()
    assert sorted(described) == sorted(name for name, entry in REGISTRY.items() if entry.simplicity is not None)
    assert all(tab.locator("#strategies dd").all_text_contents())


class Lists(html.parser.HTMLParser):
    """The values of each list of the page by its name and, for two lists of one name, the form; the items of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[str, str], list[str]] = {}
        self.items: list[str] = []
        self._form = self._list = ""
        self._select: list[str] | None = None
        self._is_text = False
        self.feed((ROOT / "study/advisor/page/index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "form":
            self._form = attributes["id"] or ""
        elif tag == "ul":
            self._list = attributes.get("id") or ""
        elif tag == "li" and self._list == "not-modelled":
            self.items.append("")
        elif tag == "select":
            self._select = self.values[self._form, attributes["name"] or ""] = []
        elif tag == "option" and self._select is not None:
            # Without a value it is its text.
            self._is_text = "value" not in attributes
            self._select.append(attributes.get("value") or "")

    def handle_data(self, data: str) -> None:
        if self._is_text and self._select is not None:
            self._select[-1] += data
        elif self._list == "not-modelled" and self.items:
            self.items[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._is_text = False
        self._list = "" if tag == "ul" else self._list
        self._select = None if tag == "select" else self._select


def test_each_list_of_the_page_has_the_choices_of_the_command() -> None:
    parsers = cli.build_parser(cli.COMMANDS)[1].choices
    choices = {
        (form, action.dest): list(action.choices)
        for form, command in (("form", "advise"), ("releases-form", "releases"))
        for action in parsers[command]._actions
        if action.choices and not isinstance(action.choices, dict)
    }
    lists = Lists().values
    # These are filled by Python.
    assert lists.pop(("form", "device")) == []
    assert lists.pop(("releases-form", "strategy")) == [""]
    assert lists.pop(("form", "with_reference")) == lists.pop(("form", "compile")) == ["", "yes"]
    # One list for two flags.
    trained = lists.pop(("form", "peft"))
    script = (ROOT / "study/advisor/page/page.js").read_text(encoding="utf-8")
    (pairs,) = re.findall(r"const quantization = \{ (.*) \}\[value", script)
    quantization = dict(re.findall(r'(\w+): "(\w+)"', pairs))
    assert trained == ["", "lora", *quantization]
    assert {"none", *quantization.values()} == {*choices["form", "quantization"]}
    assert {"none", "lora"} == {*choices["form", "peft"]}
    # An empty value is the command's default.
    defaults = {"precision": (), "loss_kernel": ("transformers",)}
    for (form, name), values in lists.items():
        listed = [*(value for value in values if value), *(defaults.get(name, ()) if form == "form" else ())]
        assert sorted(listed) == sorted(choices[form, name]), (form, name)
    assert {name for _, name in lists} >= {*defaults, "optimizer", "attn_implementation", "gradient_checkpointing"}


def test_the_page_names_all_that_the_commands_call_not_modelled() -> None:
    page = " ".join(" ".join(Lists().items).split()).lower()
    meant = {text for meanings in NOT_MODELLED.values() for text in meanings}
    assert [text for text in meant if text.lower() not in page] == []
    assert len(meant) >= 4
    parsers = cli.build_parser(cli.COMMANDS)[1].choices
    for command in ("advise", "predict"):
        flags = parsers[command]._option_string_actions
        assert [name for name in NOT_MODELLED if f"--{name}" in flags or find_flag(f"--{name}", flags)] == []
        # Its rates and, for files, its folder.
        assert {flag for flag in flags if "nvme" in flag} <= {"--nvme_gb_per_s", "--nvme_path"}
    assert "the capacity of nvme: it is not asked" in page
    assert find_flag("--load_in_8bit", parsers["advise"]._option_string_actions) == "--peft lora --quantization 8bit"


# What people ask, what they enter, and the command of the same request.
QUESTIONS = {
    "Mistral 7B on four A100s of 40 GB": (
        {"model": "mistralai/Mistral-7B-v0.3", "gpus": "4", "device": "A100-40"},
        "mistralai/Mistral-7B-v0.3 --hardware 4xA100-40",
    ),
    "GPT-2 XL: stage 0, stage 1 or DDP": (
        {"model": "gpt2-xl", "gpus": "4", "device": "A100-40"},
        "gpt2-xl --hardware 4xA100-40",
    ),
    "65 B on two nodes of eight, with the accumulation of 64 samples": (
        {"model": "llama-65b", "nodes": "2", "gpus": "8", "device": "A100"},
        "llama-65b --hardware 2x8xA100",
    ),
    "3.6 B at 1,024 tokens: is DDP faster than ZeRO": (
        {
            "model": "layers=26,hidden=3200,heads=32,vocabulary=32000,inner=8640",
            "gpus": "8",
            "device": "A100",
            "seq_length": "1024",
        },
        "layers=26,hidden=3200,heads=32,vocabulary=32000,inner=8640 --hardware 8xA100 --seq_length 1024",
    ),
    "Qwen3 8B at 4,096 tokens on two 4090s with 128 GiB": (
        {"model": "qwen3-8b", "gpus": "2", "device": "4090", "host_memory": "128", "seq_length": "4096"},
        "qwen3-8b --hardware 2x4090 --host_memory 128 --seq_length 4096",
    ),
    "Llama 3 8B at 4k tokens on eight 3090s of a host with 512 GB": (
        {"model": "Meta-Llama-3-8B-Instruct", "device": "3090", "seq_length": "4k", "host_memory": "512GB"},
        "Meta-Llama-3-8B-Instruct --hardware 8x3090 --host_memory 512GB --seq_length 4k",
    ),
    "32 GPUs of one machine, or of four": (
        {"model": "llama-3.1-8b", "gpus": "32", "device": "H100"},
        "llama-3.1-8b --hardware 32xH100",
    ),
    "LoRA of 70 B under FSDP and stage 3": (
        {"model": "llama-3.1-70b", "gpus": "8", "device": "A100-40", "peft": "lora"},
        "llama-3.1-70b --hardware 8xA100-40 --peft lora",
    ),
}
# Figures of the page have three digits.
THREE_DIGITS = 0.005


def number(text: str) -> float:
    return float(text.removeprefix("~ ").replace(",", ""))


def numbers(interval: str) -> list[float]:
    return [number(end) for end in interval.split(" to ")]


COLUMNS = (
    *("micro_batch", "accumulation", "checkpointing", "peak", "bound", "speed", "interval"),
    *("sent", "host", "nvme", "remark", "files"),
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_people_ask_has_the_figures_of_the_commands(
    page: Page, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    fields, words = QUESTIONS[question]
    for name, value in fields.items():
        field = page.locator(f"#form [name={name}]")
        field.select_option(value) if name in {"device", "peft"} else field.fill(value)
    ask(page)
    assert page.inner_text("#command") == f"study advise {words}"
    document = advised(capsys, shlex.split(words))
    assert page.inner_text("#answer") == f"Use {document['recommended']}: {document['how_sure']}"
    cells = {name: dict(zip(COLUMNS, texts, strict=True)) for name, texts in rows(page).items()}
    assert [*cells] == [option["strategy"] for option in document["strategies"]]
    for option in document["strategies"]:
        assert_row_is_of_advice(cells[option["strategy"]], option)
    page.click(f"button[aria-label='files of {document['recommended']}']")
    page.wait_for_selector("#files pre")
    (predict,) = re.findall("^study (predict .*)$", page.inner_text("#files pre[aria-label=commands]"), re.MULTILINE)
    capsys.readouterr()
    cli.main([*shlex.split(predict), "--json"])
    predicted = json.loads(capsys.readouterr().out)
    cli.main(shlex.split(predict))
    assert_row_is_of_prediction(cells[document["recommended"]], predicted, capsys.readouterr().out)


def assert_row_is_of_advice(row: dict[str, str], option: dict[str, Any]) -> None:
    assert row["checkpointing"] == ("yes" if option["gradient_checkpointing"] else "no")
    assert number(row["peak"]) * 2**30 == pytest.approx(option["device_bytes"], rel=THREE_DIGITS)
    assert number(row["host"]) * 2**30 == pytest.approx(option["host_bytes_per_node"]["value"], rel=THREE_DIGITS)
    assert (row["nvme"] == "-") == (not option["nvme_bytes_per_node"])
    if not option["fits"]:
        assert (row["micro_batch"], row["accumulation"], row["speed"]) == ("-", "-", "-")
        return
    batch = (int(row["micro_batch"]), int(row["accumulation"]))
    assert batch == (option["micro_batch"], option["accumulation"])
    assert number(row["speed"]) == pytest.approx(option["tokens_per_s"], rel=THREE_DIGITS)


def assert_row_is_of_prediction(row: dict[str, str], predicted: dict[str, Any], printed: str) -> None:
    memory, speed = predicted["memory"], predicted["time"]["tokens_per_s_per_gpu"]
    bound = memory["peak_reserved"]["high"] + memory["device_parts"]["context"]
    ranks = predicted["ranks"]
    assert number(row["peak"]) * 2**30 == pytest.approx(predicted["device_bytes"], rel=THREE_DIGITS)
    assert number(row["bound"]) * 2**30 == pytest.approx(bound, rel=THREE_DIGITS)
    assert number(row["host"]) * 2**30 == pytest.approx(memory["host_peak"]["value"], rel=THREE_DIGITS)
    assert number(row["sent"]) * 1e9 == pytest.approx(predicted["sent_bytes_per_step"]["value"], rel=THREE_DIGITS)
    assert number(row["speed"]) == pytest.approx(speed["value"] * ranks, rel=THREE_DIGITS)
    # One wording in the page and in the command.
    assert (f"a step ({NOT_KNOWN})" in printed) == (not speed["within_factor_2"])
    if not speed["within_factor_2"]:
        assert row["interval"] == NOT_KNOWN
    else:
        ends = [speed[end] * ranks for end in ("low", "high")]
        assert numbers(row["interval"]) == pytest.approx(ends, rel=THREE_DIGITS)


# Files that people ask about, for the model and the hardware that they name.
QUESTION_FILES = {
    "FSDP2 without a wrap policy": (
        "mine.yaml",
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n",
        {"model": "llama-3.1-8b", "gpus": "4", "device": "A100"},
    ),
    "stage 2 with a parameter offload, and an optimizer offload by its old name": (
        "mine.json",
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization":'
        ' {"stage": 2, "cpu_offload": true, "offload_param": {"device": "cpu"}}}',
        {"model": "gpt2-xl", "gpus": "2", "device": "4090", "host_memory": "128"},
    ),
}


def _split_releases(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the line of the releases that findings hold for, and the others."""
    releases = [line for line in lines if line.startswith("findings hold for ")]
    return releases, [line for line in lines if line not in releases]


@pytest.mark.parametrize("question", QUESTION_FILES)
def test_files_that_people_ask_about_have_the_lines_of_the_command(
    page: Page, capsys: pytest.CaptureFixture[str], question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text, fields = QUESTION_FILES[question]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    page.evaluate("(hash) => { location.hash = hash; }", f"#{urllib.parse.urlencode(fields)}")
    page.wait_for_selector(ANSWERED)
    verdict = give(page, tmp_path / name)
    words = shlex.split(page.inner_text("#explain-command"))[1:]
    findings = explained(capsys, words[1:])
    cli.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert verdict == lines[0]
    # Nothing is installed in a browser.
    releases, subject = _split_releases(page.inner_text("#explain-subject").split("; "))
    assert len(releases) == 1
    assert {*subject} <= {*lines}
    peak = page.inner_text("#explain-peak")
    assert peak.lower() in {line.lower() for line in lines}
    bound = re.search(r"90 % bound ([\d.]+)", peak)
    error = page.inner_text("#costs-error")
    if not page.is_visible("#costs"):
        assert error == ""
    elif bound:
        assert error == f"Memory by setting is computed, as parts of the peak, whose 90 % bound is {bound[1]} GiB"
    else:
        assert error == "Memory by setting is computed; no peak was measured that could bound it"
    assert page.locator("#explained tbody tr").count() == len(findings) > 0
    cells = page.inner_text("#explained")
    assert all(finding["message"] in cells for finding in findings)
    # No column is empty.
    assert ("fix" in page.locator("#explained thead th").all_inner_texts()) == any(item["fix"] for item in findings)
    columns = page.evaluate(
        "[...document.querySelectorAll('#costs tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert all({*column} != {"-"} for column in zip(*columns[1:], strict=True))


def test_a_release_that_people_ask_about_has_the_lines_of_the_command(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not every strategy was tested, and other releases of Accelerate have other faults.
    for strategy, precision in (("zero3_nvme", "fp32"), ("zero2", "fp32"), ("zero2", "bf16")):
        page.evaluate("delete document.querySelector('#releases-form').dataset.done")
        link = f"releases.release=0.17.5&releases.strategy={strategy}&releases.precision={precision}"
        visit(page, f"#model=gpt2&gpus=1&{link}")
        page.wait_for_selector("#releases-form[data-done]")
        words = shlex.split(page.inner_text("#releases-command"))[1:]
        capsys.readouterr()
        cli.main(words)
        printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert page.inner_text("#releases-status").endswith(printed[0])
        cells = page.locator("#faults li, #other-faults li").all_inner_texts()
        assert {*cells} <= {*printed}
        # The letters of the grid are explained.
        parts = [part for text in page.locator("#nearest td").all_inner_texts() for part in text.split(", ")]
        letters = {part[0] for part in parts if re.fullmatch("[a-z]†?", part)}
        assert letters or strategy == "zero3_nvme"
        assert letters <= {line[0] for line in cells if re.match("[a-z]: ", line)}
        assert [line for line in printed if line.startswith("with accelerate")] == [
            line for line in cells if line.startswith("with accelerate")
        ]


def test_a_model_that_is_traced_is_refused_with_commands_that_the_package_takes(
    page: Page, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TRACED))
    (tmp_path / "pasted.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    fields: dict[str, Any] = {"gpus": 2, "device": "4090", "seq_length": 64, "micro_batch": 1}
    fields["config"] = packed(json.dumps(TRACED).encode())
    visit(page, f"#{urllib.parse.urlencode(fields)}")
    problem, _, fix = page.inner_text("#status").partition(". To fix it: ")
    assert problem == "this kind of model is traced with transformers' own code, which a browser does not have"
    commands = re.findall(r"`([^`]+)`", fix)
    assert commands == ["study serve", "make install"]
    parser, _ = cli.build_parser(cli.COMMANDS)
    assert parser.parse_args(shlex.split(commands[0])[1:])
    assert re.search(r"^install:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # The command below, in the folder of the config.json.
    words = shlex.split(page.inner_text("#command"))
    assert words[:2] == ["study", "advise"]
    document = advised(capsys, words[2:])
    assert document["model"] == "config.json"
    assert document["sequence_length"] == 64
    assert {row["micro_batch"] for row in document["strategies"] if row["fits"]} == {1}
    # The same of a file.
    give(page, tmp_path / "pasted.json")
    assert page.inner_text("#explain-status").startswith(problem)
    words = shlex.split(page.inner_text("#explain-command"))
    assert words[:2] == ["study", "explain"]
    assert explained(capsys, words[2:]) is not None


def test_a_model_of_ones_own_is_read_from_its_config(page: Page) -> None:
    page.evaluate("document.querySelector('#form details').open = true")
    page.fill("[name=config]", json.dumps(OWN))
    ask(page)
    assert "mine-1b" in page.inner_text("#status")
    assert page.inner_text("#answer").startswith("Use ")


def test_what_does_not_fit_has_the_changes_that_make_it_fit(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    visit(page, "#model=llama-3.1-70b&gpus=1&device=T4&host_memory=64")
    assert page.inner_text("#answer").startswith("nothing fits")
    document = advised(capsys, ["llama-3.1-70b", "--hardware", "1xT4", "--host_memory", "64"])
    assert len(document["changes"]) >= 2
    page.click("#what-if")
    page.wait_for_selector("#what-if:enabled")
    lines = page.locator("#changes li").all_inner_texts()
    assert lines[: len(document["changes"])] == document["changes"]


def test_adapters_on_8_bit_weights_are_a_choice(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    visit(page, "#model=llama-2-7b&gpus=2&device=3090&peft=lora8")
    document = advised(capsys, page.inner_text("#command").split()[2:])
    assert "--peft lora --quantization 8bit" in page.inner_text("#command")
    assert page.inner_text("#answer") == f"Use {document['recommended']}: {document['how_sure']}"
    assert {"fsdp2", "zero3"}.isdisjoint(rows(page))


def test_every_field_is_in_the_command_and_in_the_link(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "model": "gpt2",
        "nodes": "2",
        "gpus": "4",
        "device": "A10",
        "host_memory": "64",
        "host_gb_per_s": "20",
        "nvme_gb_per_s": "7,3",
        "nvme_path": "/scratch/state",
        "bus_gb_per_s": "4",
        "network_gb_per_s": "3",
        "price_per_gpu_hour": "2.5",
        "train_tokens": "20M",
        "seq_length": "256",
        "global_batch_size": "32",
        "micro_batch": "2",
        "accumulation": "2",
        "precision": "fp16",
        "peft": "qlora",
        "lora_rank": "16",
        "lora_targets": "c_attn",
        "gradient_checkpointing": "on",
        "attn_implementation": "eager",
        "loss_kernel": "liger",
        "compile": "yes",
    }
    visit(page, f"#{urllib.parse.urlencode(fields)}")
    assert page.evaluate("[...document.querySelector('#form').elements].filter((field) => field.name).length") == 28
    command = page.inner_text("#command").split()[2:]
    document = advised(capsys, command)
    # The micro-batch and the accumulation are those that were asked for.
    assert {(row["micro_batch"], row["accumulation"]) for row in document["strategies"] if row["fits"]} == {(2, 2)}
    assert page.inner_text("#answer") == f"Use {document['recommended']}: {document['how_sure']}"
    assert {*fields.values()} - {"gpt2", "2", "4", "A10", "qlora", "yes"} | {"--compile"} <= {*command}
    training = document["training"]
    assert page.inner_text("#notes li:first-child").startswith(
        f"20 M tokens: {rounded(training['seconds'] / 60)} minutes"
    )
    # Only a price has a column of costs.
    titles = page.evaluate(TITLES)[1:]
    cells = {name: dict(zip(titles, texts, strict=True)) for name, texts in rows(page).items()}
    for row in document["strategies"]:
        cost, costs, speeds = (cells[row["strategy"]][title] for title in COST_COLUMNS)
        assert (cost == "-") == (not row["fits"])
        assert not row["fits"] or number(cost) == pytest.approx(row["cost_per_million_tokens"], rel=THREE_DIGITS)
        assert (costs == "-") == (speeds == "-")
        assert (costs == NOT_KNOWN) == (speeds == NOT_KNOWN)
        if costs not in ("-", NOT_KNOWN):
            # The faster, the cheaper.
            ends = [2.5 * document["ranks"] / 3600 / speed * 1e6 for speed in reversed(numbers(speeds))]
            assert numbers(costs) == pytest.approx(ends, rel=2 * THREE_DIGITS)
    assert {texts[COST_COLUMNS[1]] for texts in cells.values()} > {"-"}
    # Files have the folder on NVMe.
    page.click("button[aria-label='files of zero3_nvme_optimizer']")
    page.wait_for_selector("#files pre")
    (file,) = [text for text in page.locator("#files pre").all_inner_texts() if text.startswith("{")]
    assert json.loads(file)["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/scratch/state"
    # A link has the version of the code; that of another version is named.
    assert "the link is of version" not in page.inner_text("#status")
    ask(page)
    assert page.evaluate("[...new URLSearchParams(location.hash.slice(1))]") == [
        *([name, value] for name, value in sorted(fields.items(), key=lambda item: FORM_ORDER.index(item[0]))),
        [
            "version",
            page.evaluate("fetch('stored.json').then((answer) => answer.json()).then(({ version }) => version)"),
        ],
    ]
    visit(page, "#model=gpt2&gpus=1&device=4090&optimizer=lion&with_reference=yes&version=0123abcd")
    assert "the link is of version 0123abcd, these figures of " in page.inner_text("#status")
    assert page.inner_text("#command") == "study advise gpt2 --hardware 1x4090 --optimizer lion --with_reference"


def test_tensor_parallel_ranks_are_those_of_the_command(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    visit(page, "#model=llama-3.1-8b&gpus=8&device=A100-40&tensor_parallel=4")
    words = ["llama-3.1-8b", "--hardware", "8xA100-40", "--tensor_parallel", "4"]
    assert page.inner_text("#command") == f"study advise {' '.join(words)}"
    document = advised(capsys, words)
    assert document["tensor_parallel"] == 4
    assert page.inner_text("#answer") == f"Use {document['recommended']}: {document['how_sure']}"
    entries = page.evaluate("import('./page.js').then((module) => module.answer())")
    for ours, theirs in zip(entries, document["strategies"], strict=True):
        assert_same({name: ours[name] for name in theirs}, theirs)
    # A file has its own groups.
    assert "tensor_parallel" not in page.inner_text("#explain-command")
    refusals = {"3": "--tensor_parallel 3 does not divide 8 ranks", "0": "'0' is not a whole number from 1"}
    for value, says in refusals.items():
        visit(page, f"#model=llama-3.1-8b&gpus=8&device=A100-40&tensor_parallel={value}")
        assert says in page.inner_text("#status")
        assert page.is_hidden("#result")
    # One GPU has no group, and the field has numbers alone.
    for address in ("#model=gpt2&gpus=1&device=4090&tensor_parallel=2", "#model=gpt2&gpus=2&tensor_parallel=<b>"):
        visit(page, address)
        assert "tensor_parallel" not in page.inner_text("#command")
    assert page.is_visible("[name=tensor_parallel]")


COST_COLUMNS = ("cost of 1 M tokens", "range of the cost", "80 % of runs, ~ by host")


# Fields hidden from questions without an effect of theirs, each with a value that changes an answer of the others.
SOMETIMES = {
    "host_gb_per_s": "0.5",
    "nvme_gb_per_s": "1,0.5",
    "bus_gb_per_s": "0.5",
    "network_gb_per_s": "0.1",
    "lora_rank": "64",
    "lora_targets": "all-linear",
}


@pytest.mark.parametrize(
    ("nodes", "gpus", "optimizer", "peft"),
    [(1, 1, "adamw", ""), (1, 2, "lion", ""), (2, 1, "adamw", ""), (2, 2, "adamw", "lora")],
)
def test_a_field_is_shown_and_asked_where_it_changes_the_answer(
    page: Page, capsys: pytest.CaptureFixture[str], nodes: int, gpus: int, optimizer: str, peft: str
) -> None:
    page.fill("[name=model]", "gpt2")
    page.select_option("[name=device]", "4090")
    # All are shown, and have values.
    page.fill("[name=nodes]", "2")
    page.select_option("[name=peft]", "lora")
    for name, value in SOMETIMES.items():
        page.fill(f"[name={name}]", value)
    page.fill("[name=nodes]", str(nodes))
    page.fill("[name=gpus]", str(gpus))
    page.select_option("[name=optimizer]", optimizer)
    page.select_option("[name=peft]", peft)
    words = ["gpt2", "--hardware", f"{nodes}x{gpus}x4090", "--optimizer", optimizer]
    words += ["--peft", peft] if peft else []
    usual = advised(capsys, words)["strategies"]
    effective = set()
    for name, value in SOMETIMES.items():
        is_refused = name.startswith("lora") and not peft
        if not is_refused and advised(capsys, [*words, f"--{name}", value])["strategies"] != usual:
            effective.add(name)
    # The files of NVMe strategies have it.
    assert page.is_visible("[name=nvme_path]") == ("nvme_gb_per_s" in effective)
    assert {name for name in SOMETIMES if page.is_visible(f"#form [name={name}]")} == effective
    ask(page)
    command = page.inner_text("#command").split()
    assert {name for name in SOMETIMES if f"--{name}" in command} == effective
    wait_for_page(page, "location.hash.includes('gpt2')")
    assert {name for name in SOMETIMES if f"{name}=" in page.evaluate("location.hash")} == effective


def packed(text: bytes) -> str:
    """Return a text as a link has it."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    code = compressor.compress(text) + compressor.flush()
    return base64.urlsafe_b64encode(code).decode().rstrip("=")


# The visible parts of an answer.
VIEW = """
() => ["answer", "status", "command", "notes", "table", "bars"].map((id) => document.getElementById(id).textContent)
"""


def test_a_link_has_the_config_or_the_sizes_and_shows_the_same(page: Page, tab: Page) -> None:
    page.evaluate("document.querySelector('#form details').open = true")
    text = json.dumps(OWN, indent=2)
    for name, value in (("config", text), ("gpus", "2"), ("micro_batch", "1")):
        page.fill(f"#form [name={name}]", value)
    ask(page)
    wait_for_page(page, "location.hash.includes('config=')")
    view = page.evaluate(VIEW)
    assert view[2] == "study advise config.json --hardware 2xH100 --micro_batch 1"
    # Another browser: tabs of these tests share nothing.
    tab.goto(page.url)
    tab.wait_for_selector(ANSWERED)
    assert tab.evaluate(VIEW) == view
    assert tab.input_value("[name=config]") == text
    sizes = "layers=12,hidden=768,heads=12,vocabulary=50257"
    page.fill("[name=config]", "")
    page.fill("[name=model]", sizes)
    ask(page)
    wait_for_page(page, "location.hash.includes('layers')")
    view = page.evaluate(VIEW)
    assert view[2] == f"study advise {sizes} --hardware 2xH100 --micro_batch 1"
    visit(tab, page.evaluate("location.hash"))
    assert tab.evaluate(VIEW) == view


def test_a_config_that_is_too_long_for_a_link_is_named(tab: Page, site: str, requests: list[str]) -> None:
    tab.goto(f"{site}/index.html")
    tab.wait_for_selector("body[data-started=yes]")
    tab.evaluate("document.querySelector('#form details').open = true")
    # Random text is hardly compressed; each of its bytes is two characters.
    tab.evaluate("document.querySelector('[name=config]').value = TEXT".replace("TEXT", json.dumps(NOISE)))
    tab.click("#copy-link")
    wait_for_page(tab, "location.hash.includes('config=left-out')")
    tab.wait_for_selector(
        "#status:has-text('It is without config.json, which would make it longer than 8000 characters')"
    )
    # The open link names the missing file, and shows no answer about another model.
    tab.reload()
    tab.wait_for_selector("body[data-started=yes]")
    assert tab.inner_text("#status") == (
        "this link is without its config.json, which was too long for it. To fix it: paste the config.json, and press"
        " Predict."
    )
    assert tab.is_hidden("#result")
    assert tab.inner_text("#answer") == ""
    assert not any("pyodide" in url for url in requests)


NOISE = random.Random(1).randbytes(8_000).hex()
DAMAGED_LINKS = {
    "!": "is damaged",
    "AAAA": "is damaged",
    packed(b"{}" * 500)[:-4]: "is damaged",
    packed(b"\xff\xfe{}"): "is damaged",
    "A" * 8_001: "is longer than 8000 characters",
    # A thousand times as large as its link.
    packed(b" " * 4_000_000): "is larger than 1 MB",
}


def test_a_damaged_config_in_a_link_is_named_before_python_starts(
    tab: Page, site: str, requests: list[str], errors: list[str]
) -> None:
    tab.goto(f"{site}/index.html")
    tab.wait_for_selector("body[data-started=yes]")
    for code, says in DAMAGED_LINKS.items():
        visit(tab, f"#model=gpt2&config={code}")
        assert says in tab.inner_text("#status"), code[:20]
        assert tab.is_hidden("#result")
    assert not any("pyodide" in url for url in requests)
    assert not errors


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "To fix it: "),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "To fix it: "),
        ('{"model_type": "llama", "num_hidden_layers": 1e400}', "To fix it: "),
        (json.dumps({**OWN, "auto_map": {"AutoModel": "../evil.py--Model"}, "_name_or_path": "../../x"}), "..-..-x, "),
        (json.dumps({**OWN, "_name_or_path": "<img src=x onerror=alert(1)>"}), "-img-src-x-onerror-alert-1-, "),
        (json.dumps({**OWN, "num_hidden_layers": 10**9}), "To fix it: "),
    ],
    ids=["open", "deep", "infinite", "names", "html", "many"],
)
def test_a_hostile_config_in_a_link_is_text(
    page: Page, site: str, requests: list[str], errors: list[str], text: str, says: str
) -> None:
    visit(page, f"#gpus=1&config={packed(text.encode())}")
    assert says in page.inner_text("#status")
    assert page.locator("main img, main script").count() == 0
    assert all(url.startswith(site) for url in requests)
    assert not errors


# Note the rows of the table whenever it changes, and whether the answer is whole.
ROWS_OVER_TIME = """
() => {
  window.changes = [];
  new MutationObserver(() => {
    window.changes.push([document.querySelectorAll("#table tbody tr").length, Boolean(document.body.dataset.done)]);
  }).observe(document.querySelector("#table"), { childList: true });
}
"""


def test_rows_are_shown_before_the_answer_is_whole(page: Page) -> None:
    page.evaluate(ROWS_OVER_TIME)
    # Its answer is not stored.
    visit(page, ADDRESS)
    strategies = len(rows(page))
    before = [count for count, is_whole in page.evaluate("window.changes") if count and not is_whole]
    assert before[:strategies] == [*range(1, strategies + 1)]
    assert strategies > 5


# The places of the limit and of the parts of bars in the drawing; the ends of each name, size and bar, and of texts.
LAYERS = """
() => {
  const drawing = document.querySelector("#bars svg");
  const drawn = [...drawing.querySelectorAll("*")];
  const places = (selector) => drawn.flatMap((element, place) => (element.matches(selector) ? [place] : []));
  const ends = (element) => [element.getBoundingClientRect().left, element.getBoundingClientRect().right];
  return {
    parts: places("g rect"), limit: places(".limit"), drawing: ends(drawing),
    texts: [...drawing.querySelectorAll("text")].map(ends),
    rows: [...drawing.querySelectorAll(".label")].map((size) => {
      const [name, bar] = [size.previousSibling, size.previousSibling.previousSibling];
      return [...ends(name), ...ends(size), ends(bar)[0]];
    }),
    faded: drawn.filter((element) => element.matches("g.out text")).length,
  };
}
"""


def test_the_limit_is_above_the_bars_and_no_label_is_below_either(page: Page) -> None:
    for width in (400, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        # Some of these do not fit, and the limit crosses their bars.
        visit(page, "#model=llama-3.1-8b&gpus=4&device=4090&micro_batch=1")
        layers = page.evaluate(LAYERS)
        assert page.locator("#bars g.out").count() > 2
        (limit,) = layers["limit"]
        assert max(layers["parts"]) < limit
        assert len(layers["rows"]) == len(rows(page))
        for ends in layers["rows"]:
            assert ends == sorted(ends)
        start, end = layers["drawing"]
        assert all(start <= text[0] and text[1] <= end for text in layers["texts"])
        assert layers["faded"] == 0
    legend = page.locator("#legend li").all_inner_texts()
    assert legend[-1] == "90 % bound of the peak"
    assert len(legend) == 1 + len(page.evaluate("import('./bars.js').then((module) => module.PARTS)"))
    assert page.locator("#legend svg .bound").count() == 2


def test_columns_without_a_range_state_the_error_of_their_kind(page: Page) -> None:
    visit(page, ADDRESS)
    titles = dict(zip(page.evaluate(TITLES), page.locator("#table thead th").all_inner_texts(), strict=True))
    intervals = yaml.safe_load(INTERVALS.read_text())
    host, within = intervals["host_error"], "\u00b1 0.05 %"
    assert {
        title: text.removeprefix(title).strip().replace("\u00a0", " ")
        for title, text in titles.items()
        if text != title
    } == {
        "sent a step and GPU, GB": within,
        "host GiB": f"\u00b1 {100 * host['median']:.1f} %, worst {100 * host['worst']:.0f} %",
        "NVMe GiB": within,
    }
    assert page.inner_text("#errors") == (
        f"Errors below names of columns: bytes sent, 80 % of {intervals['sent']['rows']} runs on CPUs; host, median of"
        f" {host['rows']} runs on one GPU; NVMe, 80 % of {intervals['nvme']['rows']} runs on CPUs."
    )


# The first text of each heading of the table, without the error below it.
TITLES = "[...document.querySelectorAll('#table thead th')].map((cell) => cell.firstChild.textContent)"


def test_the_texts_of_drawings_are_readable_at_any_width(page: Page) -> None:
    for width in (400, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        wait_for_page(page, "document.querySelector('#bars svg').getBoundingClientRect().width <= innerWidth")
        heights = page.evaluate(
            "[...document.querySelectorAll('#result svg text')].map((text) => text.getBoundingClientRect().height)"
        )
        assert min(heights) > 11


@pytest.mark.parametrize("address", ["", "#model=llama-3.1-70b&nodes=8&price_per_gpu_hour=2.5"])
def test_the_table_needs_no_scrolling_in_a_wide_window(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 1400, "height": 900})
    if address:
        visit(page, address)
    assert page.evaluate("document.querySelector('#table').scrollWidth") <= page.evaluate(
        "document.querySelector('#table').parentElement.clientWidth"
    )


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_no_width_scrolls_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


REFUSED = ROOT / "tests" / "data" / "hook" / "wrong.json"


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_no_explained_file_and_no_release_scrolls_the_page_sideways(
    page: Page, width: int, is_refused: bool, tmp_path: Path
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for name, text in PAIR.items():
        (tmp_path / name).write_text(text)
    files = [REFUSED] if is_refused else [tmp_path / name for name in PAIR]
    releases = "releases.release=0.19.5&releases.strategy=zero2&releases.precision=fp32"
    # Its notes name a class of Accelerate with an argument.
    visit(page, f"#model=llama-3.1-8b&gpus=8&device=H100&seq_length=4096&{releases}")
    page.wait_for_selector("#releases-form[data-done]")
    # Of a refused file the line above the findings has a setting's whole name, and its table has NVMe.
    give(page, *files)
    page.click("#table button >> nth=0")
    page.wait_for_selector("#files pre")
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    for part in ("#explained tbody tr", "#costs tbody tr", "#answers dt", "#nearest tbody tr", "#faults li"):
        assert page.locator(part).first.is_visible(), part
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Texts are read without scrolling also in their own part of the page.
    for part in ("#explained", "#costs", "#nearest"):
        assert page.evaluate("(part) => document.querySelector(part).scrollWidth", part) <= page.evaluate(
            "(part) => document.querySelector(part).clientWidth", part
        ), part


def accessible(page: Page) -> list[dict[str, Any]]:
    """Return role, name, ancestors and properties of each element, as chromium gives them to a screen reader."""
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    by_id = {node["nodeId"]: node for node in nodes}

    def above(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
        while parent := by_id.get(node.get("parentId", "")):
            yield str(parent.get("role", {}).get("value")), str(parent.get("name", {}).get("value"))
            node = parent

    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            "above": [role for role, _ in above(node)],
            "groups": tuple(name for role, name in above(node) if role in {"form", "group"}),
            **{item["name"]: item["value"].get("value") for item in node.get("properties", [])},
        }
        for node in nodes
        if not node["ignored"]
    ]


def test_a_screen_reader_has_names_headers_and_the_answer(page: Page) -> None:
    elements = accessible(page)
    tags = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter((field) => field.checkVisibility()).map((field) => field.tagName)"
    )
    fields = [item for item in elements if item["role"] in {"textbox", "spinbutton", "combobox", "button"}]
    assert len(fields) == len(tags) > 35
    assert [item["role"] for item in fields if not item["name"].strip()] == []
    # With the names of its form and its group the name of a field is unique.
    names = [(*item["groups"], item["name"]) for item in fields if item["role"] != "button"]
    assert len({*names}) == len(names)
    # A change of both texts is announced.
    regions = [item for item in elements if item["role"] == "status"]
    assert len(regions) == 4
    assert {item["live"] for item in regions} == {"polite"}
    texts = [item["name"] for item in elements if "status" in item["above"] and item["role"] == "StaticText"]
    assert any(text.startswith("llama-3.1-8b, 8.03 B parameters") for text in texts)
    assert page.inner_text("#answer") in texts
    headers = [item["role"] for item in elements if "table" in item["above"]]
    rows = page.locator("#table tbody tr").count()
    assert rows > 5
    assert (headers.count("columnheader"), headers.count("rowheader")) == (13, rows)
    drawings = [item["name"] for item in elements if item["role"] in {"image", "img"}]
    assert drawings[0].startswith("Predicted memory of one GPU, usable 78.8 GiB: zero1 ")
    # A refusal is announced, and the answer that no longer holds is gone.
    visit(page, "#model=nothing")
    elements = accessible(page)
    texts = [item["name"] for item in elements if "status" in item["above"] and item["role"] == "StaticText"]
    assert any("unknown model 'nothing'" in text for text in texts)
    assert not any(text.startswith("Use ") for text in texts)


def test_the_keyboard_reaches_everything(page: Page) -> None:
    assert page.evaluate("[...document.querySelectorAll('[tabindex]')].every((element) => element.tabIndex === 0)")


def press_to(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus; it is in view then."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"no Tab reaches {selector}")


def test_keys_alone_reach_an_answer_its_files_its_changes_and_an_explained_file(page: Page) -> None:
    press_to(page, "#form [name=model]")
    page.keyboard.press("Control+A")
    page.keyboard.type("gpt2-xl")
    for name, value in (("gpus", "2"), ("device", "4090"), ("seq_length", "512")):
        press_to(page, f"#form [name={name}]")
        if name != "device":
            page.keyboard.press("Control+A")
        page.keyboard.type(value)
    page.keyboard.press("Enter")
    page.wait_for_selector(ANSWERED)
    assert page.inner_text("#command") == "study advise gpt2-xl --hardware 2x4090 --seq_length 512"
    assert page.inner_text("#answer").startswith("Use ")
    press_to(page, "#table button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#files pre")
    press_to(page, "#files button")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert Path(download.value.path()).read_text() == page.inner_text("#files button + pre")
    press_to(page, "#what-if")
    page.keyboard.press("Enter")
    page.wait_for_selector("#changes li:has-text('with one more GPU')")
    press_to(page, "#explain summary")
    page.keyboard.press("Enter")
    press_to(page, "#file-form [name=text]")
    page.keyboard.type('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "nothing": 1}')
    # In a text Enter is a line.
    press_to(page, "#file-form button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#file-form[data-done]")
    assert "nothing" in page.inner_text("#explained")
    press_to(page, "#releases summary")
    page.keyboard.press("Enter")
    press_to(page, "#releases-form [name=release]")
    page.keyboard.press("Control+A")
    page.keyboard.type("0.19.5")
    page.keyboard.press("Enter")
    page.wait_for_selector("#releases-form[data-done]")
    assert page.inner_text("#releases-status").startswith("Wrong. ")


def test_a_fragment_is_text(page: Page, errors: list[str]) -> None:
    visit(page, "#model=gpt2&device=%3Cb%3E")
    assert page.inner_text("#status").startswith("this link's device is not in the list of this page. To fix it: ")
    visit(page, "#model=%3Cscript%3Ealert(1)%3C/script%3E&gpus=x&unknown=1")
    assert "To fix it: " in page.inner_text("#status")
    assert page.locator("main script").count() == 0
    assert not errors


EXPLAINED = ["llama-3.1-8b", "--hardware", "8xH100"]


def explained(capsys: pytest.CaptureFixture[str], words: list[str]) -> Any:
    """Return the findings of `study explain`, or its refusal."""
    capsys.readouterr()
    cli.main(["explain", *words, "--json"])
    printed = capsys.readouterr()
    return json.loads(printed.out)["findings"] if printed.out else printed.err.removeprefix("error: ").strip()


def ask_about(page: Page, words: list[str], *files: Path) -> Any:
    contents = {file.name: base64.b64encode(file.read_bytes()).decode() for file in files}
    question = "(words) => import('./common.js').then((module) => module.call({}, 'explain', ...words))"
    answer = page.evaluate(question, [json.dumps(words), json.dumps(contents)])
    return f"{answer['refused']}. To fix it: {answer['fix']}." if "refused" in answer else answer["findings"]


def give(page: Page, *files: Path) -> str:
    """Choose files on the page; return the line above the findings."""
    page.evaluate("document.querySelector('#explain').open = true")
    page.evaluate("delete document.querySelector('#file-form').dataset.done")
    page.set_input_files("[name=files]", files)
    page.wait_for_selector("#file-form[data-done]")
    return page.inner_text("#explain-status")


def test_files_are_explained_as_by_the_command(
    page: Page, site: str, requests: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = yaml.safe_load((ROOT / "tests/data/config_files.yaml").read_text())
    for entry in entries:
        (tmp_path / entry["name"]).write_text(entry["text"])
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    for file in tmp_path.glob("accelerate_configs/*.yaml"):
        shutil.copy(file, tmp_path)
    # A third of them, since each takes tenths of a second in the browser.
    for file in sorted(tmp_path.glob("*.*"))[::3]:
        # An Accelerate file is given with the JSON that it names.
        inner_files = re.findall(r"deepspeed_config_file: (\S+\.json)", file.read_text())
        words = [file.name, *EXPLAINED]
        theirs = explained(capsys, words)
        if "there is no file of that name" in theirs:
            theirs = theirs.partition(" To fix it: ")[0] + " To fix it: choose that file, too."
        assert ask_about(page, words, file, *map(Path, inner_files)) == theirs, words
    # Nothing left this machine.
    assert all(url.startswith(site) for url in requests)


HOSTILE = {
    "text.json": '{"a": "' + "x" * 999_000 + '"}',
    "larger.json": " " * 1_000_001,
    "empty.yaml": "",
    "deep.json": "[" * 400_000,
    "mapping.json": '{"a":' * 900 + "1" + "}" * 900,
    "deep.yaml": "a: " + "[" * 900,
    "wide.json": json.dumps({f"key {number}": number for number in range(2_100)}),
    "bomb.yaml": "a: &a [1]\n" + "".join(f"{y}: &{y} [{f'*{x}, ' * 9}]\n" for x, y in pairwise("abcdefghi")),
    "itself.yaml": "distributed_type: &a [*a]",
    "twice.json": '{"train_batch_size": 8, "train_batch_size": 16}',
    "comment.json": '{// Hjson\n"zero_optimization": {"stage": 2}}',
    "number.json": '{"gradient_clipping": 1e400}',
    "html.json": '{"<img src=x onerror=alert(1)>": 1, "zero_optimization": {"stage": "<script>alert(1)</script>"}}',
}


REFUSALS = {
    "larger": "larger than 1 MB",
    "binary": "is not readable",
    "deep": "nested",
    "mapping": "more than 50 levels deep",
    "wide": "more than 2,000 keys",
    "bomb": "after its aliases are expanded",
    "itself": "recursive",
    "empty": "empty",
}


def test_hostile_files_are_refused_or_explained_as_by_the_command(
    page: Page, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in HOSTILE.items():
        (tmp_path / name).write_text(text)
    for name in ("binary.json", "binary.yaml"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 100)
    for file in sorted(tmp_path.iterdir()):
        words = [file.name, *EXPLAINED]
        theirs = explained(capsys, words)
        assert ask_about(page, words, file) == theirs, file.name
        assert REFUSALS.get(file.stem, "") in str(theirs)


def test_findings_are_shown_as_text_with_their_lines(
    page: Page, errors: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "--<b>.json"
    file.write_text(HOSTILE["html.json"].replace(": ", ":\n"))
    page.evaluate("document.querySelector('#form details').open = true")
    for name, value in (("config", ""), ("model", "gpt2"), ("gpus", "2")):
        page.fill(f"[name={name}]", value)
    page.select_option("[name=device]", "H100")
    page.evaluate("document.querySelector('#explain').open = true")
    page.fill("[name=world_size]", "1")
    assert give(page, file).startswith("Refused by the engine: ")
    assert page.inner_text("#explain-command").startswith("study explain './--<b>.json' gpt2 --hardware 2xH100")
    assert page.locator("main img, main script, main b").count() == 0
    page.fill("[name=world_size]", "")
    page.click("#file-form button")
    page.wait_for_selector("#file-form[data-done]")
    assert page.inner_text("#explain-status").startswith("Refused by the engine: ")
    words = page.inner_text("#explain-command").replace("'", "").split()[2:]
    cells = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
    lines: list[list[str]] = page.locator("#explained tbody tr").evaluate_all(cells)
    cells_by_row = [[line, kind, key.partition("\n")[0], message, fix] for line, kind, key, message, fix in lines]
    documents = explained(capsys, words)
    assert sorted(cells_by_row) == sorted(
        [str(item["line"]), item["id"].partition("/")[0], item["key"], item["message"], item["fix"]]
        for item in documents
    )
    # A pasted text is explained, too.
    page.fill("[name=text]", "distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    page.click("#file-form button")
    page.wait_for_selector("#file-form[data-done]")
    assert "pasted.yaml" in page.inner_text("#explain-command")
    assert page.inner_text("#explain-status").startswith("Fits in bf16")
    assert not errors


def choose_features(page: Page, features: Iterable[str]) -> None:
    """Choose the levels of a combination, its engine first: the other features are hidden before."""
    for choice in page.locator("#features select").all():
        names = choice.evaluate("(select) => [...select.options].map((option) => option.value)")
        choice.select_option(next((name for name in features if name in names), names[0]))


def drop(page: Page, *files: Path) -> None:
    """Drag files over the page, and drop them: events of the browser itself, as of a file manager."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 300, "data": data})
    session.detach()


def test_files_that_are_dragged_onto_the_page_are_explained(
    page: Page, site: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner, outer = tmp_path / "zero.json", tmp_path / "accelerate.yaml"
    inner.write_text('{"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}, "bf16": {"enabled": true}}')
    outer.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero.json\nnum_processes: 8\n"
    )
    visit(page, "#model=gpt2")
    assert page.is_hidden("#explain-status")
    # The Accelerate file is read first, in any order.
    drop(page, inner, outer)
    page.wait_for_selector("#file-form[data-done]")
    assert page.is_visible("#explain-status")
    assert page.input_value("[name=text]") == outer.read_text()
    words = page.inner_text("#explain-command").split()[2:]
    assert words == ["accelerate.yaml", "gpt2", "--hardware", "8xH100"]
    keys = page.locator("#explained tbody tr td:nth-child(3) > code:first-child").all_inner_texts()
    assert sorted(keys) == sorted(item["key"] for item in explained(capsys, words))
    assert any("stage3_max_live_parameters" in key for key in keys)
    # The browser did not open the file in place of the page.
    assert page.url.startswith(site)


# Files that name each other, one of them with a sign outside of ASCII.
PAIR = {
    "accelerate.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n"
    "num_processes: 2  # ✓\n",
    "zero.json": '{"zero_optimization": {"stage": 3, "stage2_nothing": 1}, "bf16": {"enabled": true}}',
}


def test_a_link_has_the_explained_file_and_shows_the_same(
    page: Page, tab: Page, requests: list[str], site: str, tmp_path: Path
) -> None:
    for name, text in PAIR.items():
        (tmp_path / name).write_text(text)
    page.fill("[name=model]", "gpt2")
    page.fill("[name=gpus]", "2")
    page.fill("[name=bus_gb_per_s]", "3")
    page.evaluate("document.querySelector('#explain').open = true")
    page.fill("[name=generated_tokens]", "64")
    give(page, *(tmp_path / name for name in PAIR))
    view = page.inner_text("#explain")
    assert "stage2_nothing" in view
    assert "What does generating 64 tokens cost?" in view
    words = "accelerate.yaml gpt2 --hardware 2xH100 --bus_gb_per_s 3 --generated_tokens 64"
    assert page.inner_text("#explain-command") == f"study explain {words}"
    page.click("#copy-explain")
    wait_for_page(page, "location.hash.includes('explain.file=')")
    page.wait_for_selector("#explain-copied:not(:empty)")
    page.evaluate("document.querySelector('#explain-copied').textContent = ''")
    requests.clear()
    tab.goto(page.url)
    tab.wait_for_selector("#file-form[data-done]")
    assert tab.inner_text("#explain") == view
    assert tab.input_value("[name=text]") == PAIR["accelerate.yaml"]
    # No request has a text of the file: browsers keep this part of an address.
    assert all(url.startswith(site) and "zero_opt" not in url for url in requests)
    # A pasted text, in the same tab.
    tab.fill("[name=text]", PAIR["zero.json"])
    tab.fill("[name=generated_tokens]", "")
    tab.click("#file-form button")
    tab.wait_for_selector("#file-form[data-done]")
    view = tab.inner_text("#explain")
    assert tab.inner_text("#explain-copied") == ""
    tab.click("#copy-explain")
    tab.wait_for_selector("#explain-copied:not(:empty)")
    address = tab.evaluate("location.hash")
    visit(page, "#model=gpt2")
    page.evaluate("delete document.querySelector('#file-form').dataset.done")
    visit(page, address)
    page.wait_for_selector("#file-form[data-done]")
    assert page.inner_text("#explain") == view
    assert page.input_value("[name=generated_tokens]") == ""


def test_a_file_that_no_link_has_room_for_is_named(page: Page, tab: Page, site: str, tmp_path: Path) -> None:
    (tmp_path / "long.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "nothing": NOISE}))
    (tmp_path / "binary.json").write_bytes(b'{"a": "\xff\xfe"}')
    page.evaluate("document.querySelector('#explain').open = true")
    give(page, tmp_path / "long.json")
    page.click("#copy-explain")
    page.wait_for_selector("#explain-copied:has-text('It is without the file, which would make it longer than 8000')")
    tab.goto(page.url)
    tab.wait_for_selector("#file-form[data-done]")
    message = (
        "this link is without its file, which was too long for it. To fix it: drop the file here, or paste its text."
    )
    assert tab.inner_text("#explain-status") == message
    give(page, tmp_path / "binary.json")
    # Python refuses it, so that there is nothing to copy.
    assert page.is_hidden("#copy-explain")
    # A config.json and a file share the room.
    page.evaluate("document.querySelector('#form details').open = true")
    page.evaluate(
        "(text) => { document.querySelector('[name=config]').value = text; }", json.dumps({**OWN, "x": NOISE[:9_000]})
    )
    page.fill("[name=text]", json.dumps({"zero_optimization": {"stage": 2}, "x": NOISE[:9_000]}))
    page.click("#file-form button")
    page.wait_for_selector("#file-form[data-done]")
    page.click("#copy-explain")
    wait_for_page(page, "location.hash.includes('explain.file=left-out')")
    assert "config=left-out" not in page.url


DAMAGED_FILES = {
    **DAMAGED_LINKS,
    "left-out": "is without its file",
    packed(b"[" * 100_000): "is damaged",
    packed(b"[]"): "is damaged",
    packed(b"null"): "is damaged",
    packed(b'"text"'): "is damaged",
    packed(b'["{}"]'): "is damaged",
    packed(b'{"a.json": 1}'): "is damaged",
    packed(b'{"a.json": "{}", "b.json": {}}'): "is damaged",
    packed(b'{"../a.json": "{}"}'): "is damaged",
    packed(b'{"..": "{}"}'): "is damaged",
    packed(b'{"a\\u0000": "{}"}'): "is damaged",
    packed(b'{"two\\nlines.json": "{}"}'): "is damaged",
    packed(json.dumps({f"{number}.json": "{}" for number in range(9)}).encode()): "is damaged",
}


def test_a_damaged_file_in_a_link_is_named_before_python_starts(
    tab: Page, site: str, requests: list[str], errors: list[str]
) -> None:
    for number, (code, says) in enumerate(DAMAGED_FILES.items()):
        tab.goto(f"{site}/index.html?{number}#explain.file={code}")
        tab.wait_for_selector("#file-form[data-done]")
        status = tab.inner_text("#explain-status")
        assert says in status, code[:20]
        assert "\n" not in status
        assert tab.is_hidden("#explain-answer")
    assert not any("pyodide" in url for url in requests)
    assert not errors


@pytest.mark.parametrize(
    ("name", "text", "counts", "says"),
    [
        ("<img src=x onerror=alert(1)>.json", HOSTILE["html.json"], "", "Refused by the engine: "),
        ("__proto__", '{"zero_optimization": {"stage": 2}}', "", "Refused by the engine: train_micro_batch"),
        ("--help", '{"zero_optimization": {"stage": 2}}', "", "Refused by the engine: train_micro_batch"),
        ("deep.json", HOSTILE["mapping.json"], "", "more than 50 levels deep"),
        ("bomb.yaml", HOSTILE["bomb.yaml"], "", "after its aliases are expanded"),
        ("usual.json", "{}", "&explain.micro_batch=-5", "To fix it: "),
        ("usual.json", "{}", "&explain.world_size=1e9&explain.accumulation=%3Cb%3E", "To fix it: "),
    ],
)
def test_a_hostile_file_in_a_link_is_text(
    page: Page, requests: list[str], site: str, errors: list[str], name: str, text: str, counts: str, says: str
) -> None:
    visit(page, f"#gpus=1&model=gpt2&explain.file={packed(json.dumps({name: text}).encode())}{counts}")
    page.wait_for_selector("#file-form[data-done]")
    status = page.inner_text("#explain-status")
    assert says in status
    assert "\n" not in status
    assert page.locator("main img, main script").count() == 0
    assert all(url.startswith(site) for url in requests)
    assert not errors


@pytest.mark.parametrize(
    "values",
    [
        {"release": "0.19.5", "strategy": "zero2", "precision": "bf16"},
        {"release": "0.10.1", "accelerate": "1.14.0"},
        {"release": "0.19.8", "features": "zero2,muon,clipping"},
    ],
)
def test_a_link_has_the_question_about_releases_and_shows_the_same(
    page: Page, python_tab: Page, values: dict[str, str]
) -> None:
    page.evaluate("document.querySelector('#releases').open = true")
    for name, value in {"accelerate": "1.15.0", "torch": "2.13.0", **values}.items():
        if name == "features":
            choose_features(page, value.split(","))
        elif name in ("strategy", "precision"):
            page.select_option(f"#releases-form [name={name}]", value)
        else:
            page.fill(f"#releases-form [name={name}]", value)
    page.click("#releases-form button")
    page.wait_for_selector("#releases-form[data-done]")
    view = page.inner_text("#releases")
    page.click("#copy-releases")
    wait_for_page(page, "location.hash.includes('releases.release=')")
    address = page.evaluate("location.hash")
    in_link = dict(urllib.parse.parse_qsl(address.removeprefix("#")))
    in_link = {name.removeprefix("releases."): text for name, text in in_link.items() if name != "version"}
    usual = {"accelerate": "1.15.0", "torch": "2.13.0"} | ({} if "features" in values else {"precision": "fp32"})
    assert in_link == usual | values
    page.evaluate(FIRST_STATE)
    assert page.is_hidden("#releases-status")
    visit(page, address)
    page.wait_for_selector("#releases-form[data-done]")
    assert page.inner_text("#releases") == view


@pytest.mark.parametrize(
    ("fragment", "says"),
    [
        ("strategy=%3Cb%3E", "this link's strategy is not in the list of this page. To fix it: choose one, and press"),
        ("precision=fp8", "this link's precision is not in the list of this page"),
        ("release=0.19.8&features=nothing", "this link's features is not in the list of this page"),
        ("release=0.19.8&features=zero2,zero3", "this link's features is not in the list of this page"),
        ("release=0.19.8&features=muon", "this link's features is not in the list of this page"),
        ("release=%3Cscript%3Ealert(1)%3C/script%3E", "is not a release of DeepSpeed. To fix it: "),
        (f"release={'1' * 5_000}.1", "is not a release of DeepSpeed. To fix it: "),
        (f"release=0.19.8&torch={'1' * 5_000}.1", "is not a release such as 1.15.0"),
    ],
)
def test_a_hostile_question_about_releases_in_a_link_is_refused(
    page: Page, errors: list[str], fragment: str, says: str
) -> None:
    visit(page, "#model=gpt2&gpus=1&" + "&".join(f"releases.{part}" for part in fragment.split("&")))
    page.wait_for_selector("#releases-form[data-done]")
    status = page.inner_text("#releases-status")
    assert says in status
    assert len(status) < 300
    assert "\n" not in status
    assert page.locator("main script, main b").count() == 0
    assert not errors


# Questions of people that are entered on the page as their threads have them, by their place in tests/threads.yaml.
ASKED_THREADS = (
    *(
        "huggingface/open-r1#579",
        "hiyouga/LlamaFactory#3499",
        "deepspeedai/DeepSpeed#1635",
        "deepspeedai/DeepSpeed#6834",
    ),
    *(
        "deepspeedai/DeepSpeed#4298",
        "huggingface/accelerate#3481",
        "deepspeedai/DeepSpeed#5405",
        "huggingface/trl#2062",
    ),
    *("deepspeedai/DeepSpeed#6666", "FlagOpen/FlagEmbedding#1487", "huggingface/trl#3858", "EleutherAI/gpt-neox#1166"),
    "huggingface/transformers#24395",
)
THREADS = {thread["thread"]: thread for thread in yaml.safe_load((ROOT / "tests/threads.yaml").read_text())}
# The findings on a file as the page has them, in the order of the command: each finding as key, message and fix.
EXPLAINED_TEXTS = """
() => [
  ...["explain-status", "explain-peak", "costs", "answers"].map((id) => document.getElementById(id).innerText),
  ...[...document.querySelectorAll("#explained tbody tr")].map(({ cells }) =>
    `${cells[2].firstChild.innerText}: ${[...cells].slice(3).map((cell) => cell.innerText).join(" ")}`),
]
"""


def fill_fields(page: Page, form: str, values: dict[str, Any]) -> None:
    """Enter the settings, each value as a person would."""
    for name, value in values.items():
        field = page.locator(f"{form} [name={name}]")
        if value in (None, math.inf, ""):
            continue
        if field.evaluate("(field) => Boolean(field.options)"):
            field.select_option(str(value))
        else:
            field.fill(f"{value:g}" if isinstance(value, float) else str(value))


def enter_thread(page: Page, words: list[str], folder: Path) -> None:
    """Enter the words of `study explain` in the fields of the page, and give it the files of a folder."""
    parser = Parser(prog="study explain")
    explain.add_arguments(parser)
    options = parser.parse_args(words)
    box = to_box(options.hardware or "8xH100")
    question = {
        "model": options.model[0],
        "nodes": box.nodes,
        "gpus": box.gpus_per_node,
        "device": box.device.names[0],
        "peft": "qlora" if options.quantization == "4bit" else options.peft.replace("none", ""),
        "lora_targets": ",".join(options.lora_targets or ()),
        "with_reference": "yes" if options.with_reference else "",
        "compile": "yes" if options.compile else "",
        "gradient_checkpointing": "on" if options.gradient_checkpointing else "auto",
        **{name: getattr(options, name) for name in ("seq_length", "optimizer", "host_gb_per_s", "bus_gb_per_s")},
    }
    fill_fields(page, "#form", question)
    page.evaluate("document.querySelector('#explain').open = true")
    counts = ("world_size", "micro_batch", "accumulation", "generated_tokens")
    fill_fields(page, "#file-form", {name: getattr(options, name) for name in counts})
    give(page, *folder.iterdir())


@pytest.mark.parametrize("name", ASKED_THREADS)
def test_the_page_answers_what_people_asked(page: Page, name: str, tmp_path: Path) -> None:
    thread = THREADS[name]
    command, *words = shlex.split(thread["command"])
    if command == "releases":
        page.evaluate("document.querySelector('#releases').open = true")
        page.fill("#releases-form [name=release]", words[0])
        page.click("#releases-form button")
        page.wait_for_selector("#releases-form[data-done]")
        texts = [page.inner_text("#releases")]
    else:
        for file, document in thread["files"].items():
            (tmp_path / file).write_text(json.dumps(document))
        enter_thread(page, words, tmp_path)
        texts = page.evaluate(EXPLAINED_TEXTS)
    text = " ".join(" ".join(texts).split())
    assert [phrase for phrase in thread["says"] if not re.search(phrase, text)] == [], text


def test_the_page_says_that_the_host_is_too_small(page: Page) -> None:
    # axolotl-ai-cloud/axolotl#1439: a 70 B model on eight A100 whose host has 1 TB.
    visit(page, "#model=llama-3.1-70b&device=A100&host_memory=1024")
    assert page.inner_text("#answer").startswith("Use zero3_nvme_optimizer")
    assert re.search(r"host memory", rows(page)["zero3_cpu"][-2])


@pytest.mark.parametrize(
    ("release", "strategy", "flags", "says"),
    [
        ("0.19.8", "", {}, "Right. deepspeed 0.19.8 with accelerate 1.15.0 and torch 2.13.0, every tested strategy"),
        ("0.19.5", "zero2", {}, "Wrong. deepspeed 0.19.5"),
        ("0.19.5", "zero2", {"precision": "bf16"}, "Wrong. "),
        ("0.19.8", "zero3_nvme", {}, "Right. "),
        ("0.19.6", "zero1", {"accelerate": "1.14.0"}, "Not tested. "),
        ("<b>", "", {}, "'<b>' is not a release of DeepSpeed. To fix it: "),
        ("0.19.6", "", {"torch": "new"}, "'new' is not a release such as 1.15.0"),
    ],
)
def test_a_release_is_judged_as_by_the_command(
    page: Page, capsys: pytest.CaptureFixture[str], release: str, strategy: str, flags: dict[str, str], says: str
) -> None:
    page.evaluate("document.querySelector('#releases').open = true")
    choices = {"precision": "fp32", "strategy": strategy} | flags
    for name, value in ({"release": release, "accelerate": "1.15.0", "torch": "2.13.0"} | choices).items():
        field = page.locator(f"#releases-form [name={name}]")
        field.select_option(value) if name in ("precision", "strategy") else field.fill(value)
    page.click("#releases-form button")
    page.wait_for_selector("#releases-form[data-done]")
    status = page.inner_text("#releases-status")
    assert says in status
    capsys.readouterr()
    code = cli.main([word.strip("'") for word in page.inner_text("#releases-command").split()[1:]])
    printed = capsys.readouterr()
    if code == 2:
        assert status == printed.err.removeprefix("error: ").strip()
        return
    first, *lines = printed.out.splitlines()
    assert status.partition(". ")[0] == {0: "Right", 1: "Wrong", 3: "Not tested"}[code]
    assert status.partition(". ")[2] == first
    assert {*page.locator("#faults li").all_inner_texts()} <= {*lines}
    assert bool(page.locator("#faults li").count()) == (code == 1)


@pytest.mark.parametrize(
    ("release", "features", "verdict"),
    [
        ("0.19.8", ("zero2", "muon", "clipping"), "Wrong"),
        ("0.19.8", ("zero2", "accumulation"), "Right"),
        ("0.19.5", ("zero2", "accumulation"), "Wrong"),
        ("0.14.0", ("zero3",), "Not tested"),
        ("0.19.8", ("zero0", "fp16", "zero_init"), None),
    ],
)
def test_a_combination_of_features_is_judged_as_by_the_command(
    page: Page, capsys: pytest.CaptureFixture[str], release: str, features: tuple[str, ...], verdict: str | None
) -> None:
    page.evaluate("document.querySelector('#releases').open = true")
    for name, version in (("release", release), ("accelerate", "1.15.0"), ("torch", "2.13.0")):
        page.fill(f"#releases-form [name={name}]", version)
    choose_features(page, features)
    assert page.is_disabled("#releases-form [name=strategy]")
    page.click("#releases-form button")
    page.wait_for_selector("#releases-form[data-done]")
    words = page.inner_text("#releases-command").split()[1:]
    assert words[words.index("--features") + 1] == ",".join(features)
    capsys.readouterr()
    code = cli.main(words)
    printed = capsys.readouterr()
    status = page.inner_text("#releases-status")
    if verdict is None:
        assert (code, status) == (2, printed.err.removeprefix("error: ").strip())
    else:
        assert {0: "Right", 1: "Wrong", 3: "Not tested"}[code] == verdict
        first, *lines = printed.out.splitlines()
        assert status == f"{verdict}. {first}"
        assert page.locator("#faults li").all_inner_texts() == lines
    page.locator("#features select").first.select_option("")
    assert page.is_enabled("#releases-form [name=strategy]")


def test_the_wheels_have_the_versions_of_this_installation() -> None:
    pinned = re.findall(r"^(\S+==\S+) --hash", build.WHEELS.read_text(), re.MULTILINE)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert len(pinned) == 6
    assert set(pinned) <= {*constraints}


def test_another_archive_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "other.tgz").write_bytes(b"something else")
    monkeypatch.setenv("PYODIDE", str(tmp_path / "other.tgz"))
    monkeypatch.setattr("sys.argv", ["build.py", str(tmp_path / "site")])
    assert build.main() == 2
    assert "its digest is another one. To fix it: name the archive of npm's package" in capsys.readouterr().err


AXE = build.Package(
    "axe-core", "4.14.1", "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
GUIDELINES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# Rules that a page broke, each with its elements.
VIOLATIONS = """
(tags) => axe.run({ runOnly: tags }).then(({ violations }) => violations.flatMap(
  ({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id}: ${target.join(" ")}: ${failureSummary}`)))
"""


# The least contrast of a placeholder with its field, which axe-core does not check: relative luminances of WCAG 1.4.3.
PLACEHOLDERS = """
Math.min(...[...document.querySelectorAll("[placeholder]")].map((field) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d");
  const luminance = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((byte) => byte / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const text = luminance(getComputedStyle(field, "::placeholder").color);
  const back = luminance(getComputedStyle(field).backgroundColor);
  return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
}))
"""


@pytest.fixture(scope="module")
def axe() -> str:
    """Fetch axe-core, which checks the guidelines for accessibility, and return its code."""
    try:
        archive = build.fetch(AXE)
    except UserError as refusal:
        pytest.skip(f"{refusal.problem}: {refusal.fix}")
    return build.read_member(archive, "axe.min.js").decode()


def list_violations(page: Page) -> Any:
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    return page.evaluate(VIOLATIONS, GUIDELINES)


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_meets_the_guidelines_for_accessibility(
    browser: Browser, site: str, axe: str, scheme: Literal["light", "dark"], width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    # With a stored answer, its table and drawings.
    page.goto(f"{site}/index.html")
    page.wait_for_selector("body[data-started=yes]")
    page.evaluate(axe)
    assert page.locator("#table tbody tr").count() > 5
    assert list_violations(page) == []
    assert page.evaluate(PLACEHOLDERS) >= 4.5
    # Refused, so without a table.
    page.evaluate("location.hash = '#config=left-out'")
    page.wait_for_selector("#status:has-text('To fix it')")
    assert page.is_hidden("#result")
    assert list_violations(page) == []
    page.close()


def test_what_python_adds_to_the_page_meets_the_guidelines_for_accessibility(page: Page, axe: str) -> None:
    """Buttons, changes, files, findings and faults."""
    page.set_viewport_size({"width": 400, "height": 900})
    page.emulate_media(color_scheme="dark")
    page.evaluate(axe)
    page.fill("[name=model]", "gpt2")
    ask(page)
    page.click("#what-if")
    page.wait_for_selector("#what-if:enabled")
    page.locator("#table button").first.click()
    page.wait_for_selector("#files pre")
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    page.fill("[name=text]", '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "nothing": 1}')
    page.click("#file-form button")
    page.wait_for_selector("#file-form[data-done]")
    page.fill("[name=release]", "0.19.5")
    page.click("#releases-form button")
    page.wait_for_selector("#faults li")
    assert list_violations(page) == []


# A question to Python as the page asks it: the rows of the table, by strategy.
ASKED = """new Promise((done, fail) => {
  const [worker, rows] = [new Worker("worker.js", { type: "module" }), {}];
  worker.onerror = ({ message }) => fail(message);
  worker.onmessage = ({ data }) => {
    if (data.failed) fail(data.failed);
    if (data.row) rows[data.strategy] = JSON.parse(data.row);
    if (data.rank) done({ rows, rank: JSON.parse(data.rank) });
  };
  worker.postMessage({ id: 1, call: "compare", words: WORDS });
})"""


def test_firefox_has_the_answer_of_the_command(site: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    executable = find_firefox()
    if executable is None:
        pytest.skip("no Firefox is installed: apt-get install firefox-esr")
    document = advised(capsys, WORDS)
    with firefox(executable, tmp_path) as window:
        window.open(f"{site}/index.html{ADDRESS}")
        window.wait("document.body.dataset.done", 240)
        assert "Firefox" in window.evaluate("navigator.userAgent")
        answer = f"Use {document['recommended']}: {document['how_sure']}"
        assert window.evaluate("document.querySelector('#answer').innerText") == answer
        order = "[...document.querySelectorAll('#table tbody th')].map((cell) => cell.innerText)"
        assert window.evaluate(order) == [row["strategy"] for row in document["strategies"]]
        ours = window.evaluate(ASKED.replace("WORDS", json.dumps(WORDS)))
        assert ours["rank"]["recommended"] == document["recommended"]
        for row in document["strategies"]:
            assert_same({name: ours["rows"][row["strategy"]][name] for name in row}, row)
        # No width scrolls sideways; 500 is the least of Firefox.
        for width in (500, 1600):
            window.resize(width, 900)
            assert window.evaluate("innerWidth") == width
            assert window.evaluate("document.documentElement.scrollWidth") <= window.evaluate("innerWidth")
