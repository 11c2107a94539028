from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from study.advisor.calculator import page_files
from study.claims.command import first_line
from study.claims.scoreboard import Scoreboard
from study.cli import COMMANDS, main
from study.config.errors import UserError
from study.config.flags import Parser, parse_command_line, resolve_config
from study.config.places import REPOSITORY
from study.config.strategies import STRATEGY_NAMES
from study.config.text import percent, rounded
from study.host.memory import GIB
from study.host.stacks import release_key
from study.predictor.recorded_runs import SENT, compare_run_figures
from study.predictor.run_predictions import ended_runs
from study.predictor.time import max_offload_slowdown
from study.records.frames import read_parquet
from study.records.statistics import BF16_SPACING, LOSS_MARGIN, MIN_SAMPLE
from study.releases.release_cells import release_cells
from study.releases.verdict import ROUNDING
from study.report.pages.memory_figure import MEMORY_FIGURE, memory_svg, predicted
from study.report.pages.readme import DOCUMENTS, rewritten
from study.report.pages.releases import latest_cells
from study.report.questions.releases import clipped, gpu_faults
from study.report.questions.virtual import TABLE1
from study.sweep.suite_file import find_suite
from tools.calculator import build

PAGES = sorted(
    str(file.relative_to(REPOSITORY))
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/decisions/*.md",
        ".github/*.md",
        "[!.]*/README.md",
        "reports/releases/causes.md",
    )
    for file in REPOSITORY.glob(pattern)
)
# Numbers of rooms as the map has them.
_NUMBERS = {19: "nineteen", 20: "twenty", 21: "twenty-one"}
FOLDERS = tuple(f"{folder.name}/" for folder in REPOSITORY.iterdir() if folder.is_dir())
# The link of the site to the calculator.
ASK_HERE = "Ask it here, in this browser"
STARTS = ("study ", "make ", "accelerate launch ", "python", ".venv/bin/", "bash ", "OUT=")


def read(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Yield every command of a code block or in backticks, as words."""
    lines = [line for block in code_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in lines:
        words = shlex.split(line, comments=True) if line.startswith(STARTS) else []
        while words and re.fullmatch(r"[A-Z]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


def unwrapped(page: str) -> str:
    return " ".join(read(page).split())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_blocks_of_a_document_match_the_records(document: str) -> None:
    text = read(document)
    assert text.count("<!-- end of ") == {"README.md": 4, "docs/method.md": 1, "reports/README.md": 4}[document]
    assert rewritten(text, REPOSITORY) == text, "run `make readme`"
    stale = text.replace("0.19.6 | no fault | no fault |", "0.19.6 | safe | safe |").replace("1.871", "1.875")
    stale = stale.replace("](laptop/summary.md)", "](reviews/summary.md)")
    assert stale != text
    assert rewritten(stale, REPOSITORY) == text


def test_the_table_of_host_memory_around_checkpoints_is_that_of_its_measurements() -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "checkpoint_memory.py"))
    measured = json.loads(read("reports/checkpoints/memory.json"))
    assert tool["summary"](measured) == read("reports/checkpoints/summary.md")
    assert set(measured["arms"]) == set(tool["ARMS"])


def test_the_readme_is_short_and_its_strategies_have_a_page() -> None:
    # A marker of a block is not shown.
    assert len([line for line in read("README.md").splitlines() if not line.startswith("<!--")]) <= 110
    # Generated lines, images and rows of tables have the width that they need.
    lines_by_hand = re.sub(r"<!-- (\w+): .*?<!-- end of \1 -->", "", read("README.md"), flags=re.DOTALL).splitlines()
    assert [line for line in lines_by_hand if len(line) > 120 and not line.startswith(("|", "<img"))] == []
    strategies = read("accelerate_configs/README.md")
    assert all(f"`{strategy}.yaml`" in strategies for strategy in STRATEGY_NAMES)
    assert f"[{len(STRATEGY_NAMES)} strategies](accelerate_configs/README.md)" in unwrapped("README.md")


def test_the_page_of_strategies_names_the_processes_that_its_files_start() -> None:
    files = (REPOSITORY / "accelerate_configs").glob("*.yaml")
    counts = Counter(yaml.safe_load(file.read_text(encoding="utf-8"))["num_processes"] for file in files)
    ((usual, _), *_) = counts.most_common()
    text = unwrapped("accelerate_configs/README.md")
    assert f"Most files start two processes (`num_processes: {usual}`), whatever the number of GPUs" in text
    assert "add `--num_processes 8` before the script" in text


def test_the_figure_of_memory_is_that_of_the_command_and_its_text_names_the_bars() -> None:
    assert (REPOSITORY / MEMORY_FIGURE).read_text(encoding="utf-8") == memory_svg(), "run `make readme`"
    (alt,) = re.findall(rf'<img src="{MEMORY_FIGURE}" [^>]*alt="Predicted memory[^:]*: ([^"]*)"', read("README.md"))
    in_text = dict(part.removesuffix(" GiB").split(" ") for part in alt.split(", "))
    assert in_text == {name: rounded(predicted(name)["device_bytes"] / GIB) for name in in_text}
    assert set(in_text) == {"ddp", "zero1", "zero2", "zero3"}


def test_figures_of_other_pages_are_those_of_the_records() -> None:
    rows = [line.split("\t") for line in read("tests/data/public_files.tsv").splitlines()[1:]]
    files = f"For {len(rows)} files of {len({row[0] for row in rows})} public repositories the exit status"
    for sentence in (files, f"predicted to be {max_offload_slowdown():.1f} times as fast"):
        assert sentence in unwrapped("docs/advice.md")


def test_the_finding_on_loss_matches_the_records_and_both_tasks_learn() -> None:
    laptop = read_parquet(REPOSITORY / "reports" / "laptop")
    # The others, of three steps, are for memory.
    runs = laptop.runs[laptop.runs["steps"] > laptop.runs["warmup_steps"]]
    steps = laptop.steps.merge(runs[["run", "task", "strategy", "seed"]], on="run")
    losses = steps.pivot_table(index=["task", "seed", "step"], columns="strategy", values="loss")
    largest_difference = losses.sub(losses["ddp"], axis=0).div(losses["ddp"], axis=0).abs().max(axis=None)
    reviews = read_parquet(REPOSITORY / "reports" / "reviews")
    on_reviews = reviews.steps.merge(reviews.runs[["run", "task", "strategy", "seed"]], on="run").pivot_table(
        index=["task", "seed", "step"], columns="strategy", values="loss"
    )
    from_plain = on_reviews.sub(on_reviews["single"], axis=0).div(on_reviews["single"], axis=0).abs().max(axis=None)
    text = (
        f"within {100 * from_plain:.3f} % of plain training for {on_reviews.shape[1]} strategies on"
        f" [film reviews](reports/reviews/summary.md), within {100 * largest_difference:.4f} % of DDP for"
        f" {losses.shape[1] - 1} on [built-in text]"
    )
    assert text in unwrapped("README.md")
    assert (set(steps["step"]), set(runs["precision"])) == (set(range(1, 81)), {"fp32"})
    # Strategies that do not learn agree, too: BERT once ended at 0.7146, where ln 2 is 0.6931. A first loss is a guess.
    learned = (runs["train_loss_first"] - runs["eval_loss_final"]) / (runs["train_loss_first"] - runs["floor_loss"])
    least = learned.groupby(runs["task"]).min()
    assert (least["bert-imdb"] > 0.5, least["gpt-wikitext"] > 0.9) == (True, True)


def test_the_findings_on_releases_match_the_records() -> None:
    records = read_parquet(REPOSITORY / "reports" / "releases")
    cells = latest_cells(records)
    releases = yaml.safe_load(read("study/releases/stacks.yaml"))["today"][-8:]
    assert {cell.release for cell in cells} == set(releases)
    struck = [release for release in releases if any(gpu_faults(cell) for cell in cells if cell.release == release)]
    assert struck == releases[: len(struck)]
    wrong_at = {
        name: {
            cell.release
            for cell in clipped(release_cells(records))
            if cell.strategy == name
            and gpu_faults(cell)
            and not cell.is_contemporary
            and cell.precision == "fp32"
            and cell.micro_steps > 1
        }
        for name in ("zero0", "zero1", "zero2", "zero2_cpu", "zero3")
    }
    assert wrong_at.pop("zero3") == set()
    first = {name: min(wrong, key=release_key) for name, wrong in wrong_at.items()}
    earliest = min(first.values(), key=release_key)
    right = releases[len(struck) :]
    assert f"**{right[0]} to {right[-1]}: no fault in the strategies below**" in unwrapped("README.md")
    # Later ones were not tested.
    assert f"in fp32 (with Muon {right[-1]} alone)" in unwrapped("README.md")
    muon = json.loads(read("study/releases/grid.json"))["muon"]
    assert [release for release in reversed(right) if muon[release] == "no fault"] == right[-1:]
    headline = (
        f"**DeepSpeed {earliest} to {struck[-1]}: wrong gradients with accumulation in Accelerate's loop (a stage of"
        f" 0 to 2). Use {right[-1]}.**"
    )
    # In one line of the first ten.
    assert headline in read("README.md").splitlines()[:10]

    cells = [
        cell
        for cell in clipped(release_cells(records))
        if not cell.is_contemporary and cell.verdict.kind in ("equal", "different")
    ]
    wrong = [cell for cell in cells if cell.precision == "fp32" and gpu_faults(cell)]
    releases = sorted({cell.release for cell in wrong}, key=release_key)
    ran = {cell.release for cell in cells}
    sentence = (
        f"{len(releases)} of {len(ran)} tested releases are wrong ({releases[0]} to {releases[-1]}), stage 3 in none"
    )
    assert sentence in unwrapped("README.md")
    # Once is enough: the table of releases has it by stage.
    by_hand = re.sub(r"<!-- (\w+): .*?<!-- end of \1 -->", "", read("README.md"), flags=re.DOTALL)
    assert by_hand.count("wrong gradients") == 1
    assert releases[-1] == struck[-1]
    assert {cell.micro_steps for cell in wrong} == {4}, "with accumulation only"
    assert {cell.strategy for cell in wrong} == {"zero0", "zero1", "zero2", "zero2_cpu"}


def test_the_number_of_silent_faults_is_that_of_the_page_of_combinations() -> None:
    (count,) = re.findall(r"\*\*(\d+) faults of the newest releases train something else", read("docs/compositions.md"))
    sentence = f"[{count} combinations](docs/compositions.md) of features silently train something else"
    assert sentence in unwrapped("README.md")


def test_the_finding_on_communication_matches_the_records() -> None:
    sent = [
        (run, request, figure)
        for run, request in ended_runs()
        for figure in compare_run_figures(run)
        if figure.figure == SENT and figure.measured > 1000
    ]
    virtual = [row for row in sent if row[0].virtual and row[0].model_name_or_path.startswith("llama-3.1-8b")]
    accumulating = [row for row in sent if row[1].accumulation > 1]
    assert (
        f"({len(virtual) + len(accumulating)} records of virtual ranks and tiny models are predicted within 0.001 %)"
        in unwrapped("README.md")
    )
    assert 0 < max(abs(figure.error) for _, _, figure in [*virtual, *accumulating]) < 0.00001, "0.001 %"


def test_the_quickstart_shows_the_first_lines_of_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    commands, first_lines = (block.splitlines() for block in code_blocks(read("docs/quickstart.md"))[:2])
    assert commands[-1].startswith("study advise ")
    main(commands[-1].split()[1:])
    assert capsys.readouterr().out.splitlines()[:2] == first_lines


def test_the_finding_on_model_state_matches_the_records() -> None:
    answer = TABLE1.answer(read_parquet(REPOSITORY / "reports" / "paper_table1"))
    assert answer is not None
    within = answer.headlines[0]
    agreeing, ran = re.fullmatch(r"(\d+) of (\d+)", within.value).groups()  # type: ignore[union-attr]
    cells, complete, extrapolated = re.fullmatch(
        r".*of (\d+).*; (\d+) measured, (\d+) extrapolated over layers", within.bounds
    ).groups()  # type: ignore[union-attr]
    readme = unwrapped("README.md")
    assert f"{ran} of the {cells} cells of the ZeRO paper's [Table 1]" in readme
    ranks = f"ran on virtual ranks, {complete} with all layers and {extrapolated} extrapolated over layers"
    assert f"{ranks}: its formula holds within 1 % for {agreeing} of them" in readme


def test_the_hours_of_the_suite_for_eight_gpus_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "h100x8", "--dry_run", "--hardware", "8xH100"])
    cells, hours, minutes = re.findall(r"# (\d+) cells.*steps: (\d+)h(\d+)m", capsys.readouterr().err)[0]
    text = f"{int(hours) + int(minutes) / 60:.1f} hours of predicted training"
    assert text in unwrapped("README.md")
    assert f"({cells} runs; {text}," in unwrapped("docs/gpus.md")


def test_the_finding_on_claims_is_the_first_line_of_study_claims(full_board: Scoreboard) -> None:
    count, findings = re.fullmatch(r"(\d+) claims: (.*)", first_line(full_board.document())).groups()  # type: ignore[union-attr]
    assert f"**[{count} claims](docs/claims.md)** of four documents and the ZeRO paper: {findings}" in unwrapped(
        "README.md"
    )
    assert f"which of {count} published claims hold" in unwrapped("README.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_targets_for_its_links_its_files_and_code_that_a_shell_reads(page: str) -> None:
    text = read(page)
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)
    local = [link for pair in links for link in pair if link and "://" not in link]
    # The site has no pages of folders.
    files = {link: link.partition("#")[0] for link in local if not link.startswith("#")}
    assert [link for link, file in files.items() if not (REPOSITORY / page).parent.joinpath(file).is_file()] == []
    names = [name for name in re.findall(r"`([\w.*-]+/[\w./*-]*)`", text) if name.startswith(FOLDERS)]
    committed_names = [name for name in names if "NAME" not in name and not name.startswith("runs/")]
    assert [name for name in committed_names if not any(REPOSITORY.glob(name.rstrip("/")))] == []
    for block in code_blocks(text):
        if any(line.startswith(STARTS) for line in block.splitlines()):
            subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_valid(page: str) -> None:
    targets = re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)
    for words in commands(read(page)):
        program, *arguments = words
        if program == "make":
            assert arguments[0] in targets, words
        elif Path(program).name == "study" or arguments[:2] == ["-m", "study.cli"]:
            name, *flags = arguments if Path(program).name == "study" else arguments[2:]
            parser = Parser()
            COMMANDS[name].add_arguments(parser)
            options = parser.parse_args(flags) if flags else None
            if options is not None and hasattr(options, "suite"):
                find_suite(options.suite)
        elif program == "accelerate":
            place = next(place for place, word in enumerate(words) if word.endswith(".py"))
            assert all((REPOSITORY / word).exists() for word in (words[place], words[3])), words
            run, flags = parse_command_line(words[place + 1 :]), words[:place]
            if "--num_processes" in flags and not run.virtual_world_size:
                # Commands with more ranks than a laptop has are for machines with GPUs, whose defaults differ.
                ranks = int(flags[flags.index("--num_processes") + 1])
                assert resolve_config(run, accelerator_visible=True).batch_plan(ranks), words
        elif program == "bash":
            assert (REPOSITORY / arguments[0]).exists(), words
            if "--suite" in arguments:
                find_suite(arguments[arguments.index("--suite") + 1])


def test_the_files_that_the_readme_explains_are_in_the_clone() -> None:
    explained = [words[2] for words in commands(read("README.md")) if words[1:2] == ["explain"]]
    assert explained
    assert [name for name in explained if not (REPOSITORY / name).is_file()] == []


def test_files_for_other_programs_are_yaml_and_scripts_of_a_shell() -> None:
    other_files = (REPOSITORY / ".pre-commit-config.yaml", REPOSITORY / "CITATION.cff")
    for file in (*REPOSITORY.glob(".github/**/*.yml"), *other_files):
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict), file
    for script in (REPOSITORY / ".ci" / "run", *(REPOSITORY / "tools").glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_citation_and_the_command_name_the_version_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    version = capsys.readouterr().out.removeprefix("zero-study ").strip()
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == version
    parts = re.findall(r"^## \[(\S+)\](?: - (\S+))?$(.*?)(?=^## |\Z)", read("CHANGELOG.md"), re.DOTALL | re.MULTILINE)
    released = {release: date for release, date, _ in parts[1:]}
    assert parts[0][0] == "Unreleased"
    assert str(released.get(version)) == str(citation.get("date-released"))
    assert "\n- " not in parts[0][2] or version not in released, "a change after a release has a new version"


def test_the_changelog_and_the_contributing_page_are_read_in_one_go() -> None:
    """Details of a change are in the history."""
    for page, most in (("CHANGELOG.md", 100), ("CONTRIBUTING.md", 45)):
        assert len(read(page).splitlines()) <= most, page


def test_the_map_has_every_room_in_the_order_of_its_imports() -> None:
    section = read("docs/map.md").partition("## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)
    rooms = {folder.parent.name for folder in REPOSITORY.glob("study/*/__init__.py")}
    assert sorted(rows) == sorted(rooms)
    pattern = r'name = "Each room knows only those below it".*?^layers = \[\n(.*?)^\]'
    (contract,) = re.findall(pattern, read("pyproject.toml"), re.DOTALL | re.MULTILINE)
    layers = [re.findall(r"study\.(\w+)", line) for line in contract.splitlines()]
    places = {room: place for place, layer in enumerate(reversed(layers)) for room in layer}
    order = [places[room] for room in rows]
    assert order == sorted(order), "a room imports only those above it in the table"
    assert f"has {_NUMBERS[len(rooms)]} rooms" in unwrapped("docs/map.md")


DECISIONS = sorted(file.name for file in REPOSITORY.glob("docs/decisions/[0-9]*.md"))


def test_the_index_of_decisions_has_each_of_them_once_in_their_order() -> None:
    assert re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", read("docs/decisions/README.md")) == DECISIONS
    assert [int(name[:4]) for name in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_is_one_screen_with_what_would_change_it(name: str) -> None:
    lines = read(f"docs/decisions/{name}").splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith(f"# {name[:4]}: ")
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert headings == ["Context", "Decision", "Consequences", "What would change it", "Held by"]


def test_the_decisions_have_the_figures_of_the_code() -> None:
    fp32, bf16, engine = (ROUNDING[name] for name in ("fp32", "bf16", "bf16-engine"))
    equal = unwrapped("docs/decisions/0005-plain-training-is-the-reference.md")
    assert f"| {fp32.loss:.0e} of a loss, {fp32.norm:.0e} of a norm, in fp32 |".replace("e-0", "e-") in equal
    assert (bf16.loss, bf16.norm, engine.loss, engine.norm) == (2**-9, 2**-6, 2**-7, 2**-4)
    assert "| 2⁻⁹ and 2⁻⁶; 2⁻⁷ and 2⁻⁴ |" in equal
    assert f"| {percent(LOSS_MARGIN)} of the loss of that step |" in equal
    assert f"| {percent(BF16_SPACING)} |" in equal
    seeds = unwrapped("docs/decisions/0013-three-seeds-and-one-family-of-tests.md")
    assert f"| least number of seeds for a test | {MIN_SAMPLE} (`MIN_SAMPLE`) |" in seeds
    names = re.findall(r"`(test_\w+)`", "".join(read(f"docs/decisions/{name}") for name in DECISIONS))
    code = "".join(file.read_text(encoding="utf-8") for file in REPOSITORY.glob("tests/*/test_*.py"))
    assert [name for name in names if f"def {name}(" not in code] == []


def test_the_site_has_every_page_of_the_docs_and_every_argument_of_every_command() -> None:
    site = runpy.run_path(str(REPOSITORY / "tools" / "site.py"))
    in_nav = set(re.findall(r"[\w./-]+\.md", str(yaml.safe_load(read("mkdocs.yml"))["nav"])))
    assert in_nav - set(PAGES) == {site["COMMANDS"], "reports/LOG.md"}
    listed = re.findall(r"^### .*\((\w+)/summary.md\)$", read("reports/README.md"), re.MULTILINE)
    assert sorted(listed) == sorted(file.parent.name for file in REPOSITORY.glob("reports/*/summary.md"))
    assert set(PAGES) - in_nav == {".github/PULL_REQUEST_TEMPLATE.md", "reports/releases/causes.md"}
    reference = {part.partition("\n")[0]: part for part in site["commands_markdown"]().split("\n## ")}
    for name, command in COMMANDS.items():
        parser = Parser(prog=f"study {name}", add_help=False)
        command.add_arguments(parser)
        groups = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
        for program in [child for group in groups for child in group.values()] or [parser]:
            for word in re.findall(r"--?[a-z]\w+", program.format_usage()):
                assert word in reference[program.prog], (program.prog, word)
    # Python-Markdown wants an empty line before a list and four spaces below an item.
    written, indented = "Text:\n- one\n  more\n1. two\n   ```\n", "Text:\n\n- one\n    more\n1. two\n     ```\n"
    assert "\n".join(site["_reindented"](written)) == indented.rstrip("\n")


def test_the_site_has_the_images_of_its_pages() -> None:
    linked = runpy.run_path(str(REPOSITORY / "tools" / "site.py"))["linked_files"](PAGES)
    shown = {image for page in PAGES for image in re.findall(r'<img src="([^":]+)"', read(page)) if "/" not in page}
    assert shown
    assert shown <= linked


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `site` is not installed")
    build_site(tmp_path / "site", with_calculator=False)
    assert (tmp_path / "site" / "docs" / "memory.svg").exists()
    assert not (tmp_path / "site" / "docs" / "calculator").exists()
    assert ASK_HERE not in (tmp_path / "site" / "index.html").read_text()


def build_site(folder: Path, *, with_calculator: bool) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = os.environ | {"SITE_CALCULATOR": str(int(with_calculator)), "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=REPOSITORY, env=variables, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.long
def test_the_site_has_the_calculator_and_the_readme_links_it(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `site` is not installed")
    try:
        build.fetch(build.PYODIDE)
        build.wheels()
    except UserError as refusal:
        pytest.skip(f"{refusal.problem}: {refusal.fix}")
    site = tmp_path / "site"
    build_site(site, with_calculator=True)
    assert f'<a href="docs/calculator/index.html">{ASK_HERE}</a>' in (site / "index.html").read_text()
    assert f'<a href="calculator/index.html">{ASK_HERE}</a>' in (site / "docs" / "advice.html").read_text()
    built = {file.relative_to(site / "docs/calculator").as_posix() for file in (site / "docs/calculator").rglob("*.*")}
    names = {file.name for file in page_files("static")}
    assert built >= {*names, *(f"pyodide/{name}" for name in build.RUNTIME), "study.zip", "wheels.zip", "stored.json"}
