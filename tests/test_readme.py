"""The documents say what the committed records say, and point at what is there."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from study.advisor.predict_command import precision_under
from study.claims.board import board
from study.claims.page import rewritten as rewritten_claims
from study.cli import COMMANDS, main
from study.config.flags import Parser, parse_command_line, resolved
from study.config.strategies import REPOSITORY, STRATEGY_NAMES, STUDIED_STRATEGIES, read_strategy
from study.predictor.communication import sent_bytes
from study.predictor.hardware import box_of
from study.predictor.request import Request
from study.predictor.shape import model_shape
from study.predictor.time import slowest_offload
from study.records.frames import read_parquet
from study.records.rows import STATE_COLUMNS
from study.report.questions.virtual import TABLE1
from study.report.site.readme import DOCUMENTS, rewritten
from study.sweep.suite_file import find_suite
from study.virtual.records import ring_bytes_of

PAGES = sorted(
    str(file.relative_to(REPOSITORY))
    for pattern in ("*.md", "docs/*.md", ".github/*.md", "[!.]*/README.md", "reports/releases/causes.md")
    for file in REPOSITORY.glob(pattern)
)
FOLDERS = tuple(f"{folder.name}/" for folder in REPOSITORY.iterdir() if folder.is_dir())
STARTS = ("study ", "make ", "accelerate launch ", "python", ".venv/bin/", "bash ", "OUT=")


def read(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Every command of a code block, and whatever else in backticks begins like one."""
    lines = [line for block in code_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in lines:
        words = shlex.split(line, comments=True) if line.startswith(STARTS) else []
        while words and re.fullmatch(r"[A-Z]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_tables_of_a_document_are_those_the_records_give(document: str) -> None:
    text = read(document)
    assert "<!-- table: " in text
    assert rewritten(text, REPOSITORY) == text


def test_the_table_of_host_memory_around_checkpoints_is_that_of_its_measurements() -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "checkpoint_memory.py"))
    measured = json.loads(read("reports/checkpoints/memory.json"))
    assert tool["summary"](measured) == read("reports/checkpoints/summary.md")
    assert set(measured["arms"]) == set(tool["ARMS"])


def test_the_readme_shows_every_strategy() -> None:
    text = read("README.md")
    assert all(f"`{strategy}`" in text for strategy in STRATEGY_NAMES)
    assert all(f"| `{strategy}` | " in text for strategy in STUDIED_STRATEGIES), "a row of figures for each"


def test_the_short_answer_is_what_the_records_say() -> None:
    laptop = read_parquet(REPOSITORY / "reports" / "laptop")
    gpt = laptop.runs[laptop.runs["task"] == "gpt-wikitext"].drop_duplicates("strategy").set_index("strategy")
    held = gpt[list(STATE_COLUMNS)].sum(axis=1)
    shares = [round(100 * held[name] / held["ddp"]) for name in ("zero1", "zero2", "zero3")]
    assert "hold {}, {} and {} %".format(*shares) in " ".join(read("README.md").split())
    steps = laptop.steps.merge(laptop.runs[["run", "task", "strategy", "seed"]], on="run")
    losses = steps.pivot_table(index=["task", "seed", "step"], columns="strategy", values="loss")
    apart = losses.sub(losses["ddp"], axis=0).div(losses["ddp"], axis=0).abs().max(axis=None)
    assert 0 < apart < 0.0000125, "0.001 % after rounding"


def test_the_short_answer_tells_releases_as_their_page_does() -> None:
    found = re.search(r"(\d+) of (\d+) releases that run diverge from one process", read("docs/releases.md"))
    assert found is not None
    ran = f"Of {found[2]} releases of DeepSpeed that run with the same Accelerate on a CPU, {found[1]} diverge"
    assert f"{ran} from one process" in " ".join(read("README.md").split())
    laptop = read_parquet(REPOSITORY / "reports" / "laptop").runs
    (versions,) = {(row["deepspeed_version"], row["accelerate_version"]) for _, row in laptop.iterrows()}
    assert "With DeepSpeed {} and Accelerate {} every strategy".format(*versions) in " ".join(read("README.md").split())


def test_what_more_micro_batches_send_is_as_recorded() -> None:
    runs = read_parquet(REPOSITORY / "reports" / "releases").runs
    of_four = runs[runs["workload"].str.endswith("DeepSpeed 0.19.8, fp32, micro-batch 2, clipping 1")
                   & (runs["gradient_accumulation_steps"] == 4)]  # fmt: skip
    sent = of_four.drop_duplicates("strategy").set_index("strategy")["collectives"].map(ring_bytes_of)
    times = {name: f"{sent[name] / sent['ddp']:.1f}" for name in ("zero1", "zero2", "zero3")}
    assert {*of_four["model_name_or_path"], *of_four["world_size"]} == {"gpt-tiny", 2}
    said = "`zero1` sends {zero1} times what `ddp` sends, `zero2` {zero2} and `zero3` {zero3}, in ring bytes"
    scope, text = "With four micro-batches a step of a tiny GPT in fp32 on 2 ranks", " ".join(read("README.md").split())
    assert f"{scope} {said.format(**times)}" in text

    def predicted(name: str) -> float:
        strategy, shape = read_strategy(name), model_shape("llama-3.1-8b")
        precision = precision_under(strategy, "bf16")
        return sent_bytes(Request(shape, strategy, box_of("4xA100"), 2048, 1, 4, precision, False, "sdpa"))

    ddp = predicted("ddp")
    times = {name: f"{predicted(name) / ddp:.2f}" for name in ("zero1", "zero2", "zero3")}
    said = "the prediction is {zero1}, {zero2} and {zero3} times the {ddp:.0f} GB of `ddp`"
    assert said.format(**times, ddp=ddp / 1e9) in text


def test_ring_bytes_are_nowhere_called_bytes_on_the_wire() -> None:
    files = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "study").rglob("*.py"),
             *(REPOSITORY / "study").rglob("*.yaml"), *(REPOSITORY / "notebooks").glob("*.ipynb")]  # fmt: skip
    said = re.compile(r"on the wire|wire bytes", re.IGNORECASE)
    assert [file.name for file in files if said.search(file.read_text(encoding="utf-8"))] == []


def test_how_far_ahead_an_offload_must_be_is_told() -> None:
    assert f"predicted to be {slowest_offload():.1f} times as fast" in " ".join(read("docs/advice.md").split())


def test_the_quickstart_shows_the_first_lines_of_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    main(["advise", "--model_name_or_path", "llama-3.1-8b", "--hardware", "4xA100"])
    assert capsys.readouterr().out.splitlines()[:2] == code_blocks(read("docs/quickstart.md"))[1].splitlines()


def test_both_tasks_of_the_laptop_study_learn() -> None:
    """Arms that are all at chance agree, too: BERT once ended at 0.7146, where ln 2 is 0.6931."""
    runs = read_parquet(REPOSITORY / "reports" / "laptop").runs
    # A new model's first loss is that of a guess.
    learned = (runs["train_loss_first"] - runs["eval_loss_final"]) / (runs["train_loss_first"] - runs["floor_loss"])
    least = learned.groupby(runs["task"]).min()
    assert least["bert-imdb"] > 0.5
    assert least["gpt-wikitext"] > 0.9


def test_the_short_answer_has_a_cell_of_table_1() -> None:
    assert "1.871 (1.875)" in read("docs/method.md")
    text = " ".join(read("README.md").split())
    assert "holds 1.871 GB" in text
    found = TABLE1.answer(read_parquet(REPOSITORY / "reports" / "virtual_models"))
    assert found is not None
    off = re.search(r"max difference \+(\d+ %) \(`zero3` of `qwen3-8b` at 64 ranks\)", found.sentence)
    assert off is not None
    assert f"Of Qwen3-8B it holds {off[1]} more" in text


def test_the_readme_tells_five_claims_as_the_ledger_has_them() -> None:
    text, made = read("README.md"), board()
    assert rewritten_claims(text, made) == text, "run `make claims`"
    assert len(made.ledger.front_page) == 5
    for name in made.ledger.front_page:
        (judged,) = [each for each in made.judged if each.claim.id == name]
        assert f"- **{judged.verdict.capitalize()}** ([{name}](docs/claims.md#{name.lower()}))" in text
        assert f"\n### {name}\n" in read("docs/claims.md")


def test_a_readme_whose_claims_are_stale_is_seen(tmp_path: Path) -> None:
    """Without records the verdicts that rest on them fall back, and the lines with them."""
    text = read("README.md")
    assert rewritten_claims(text, board(tmp_path)) != text
    assert rewritten_claims(text.replace("**Contradicted**", "**Supported**"), board()) == text


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", read(page))
    local = [link for pair in links for link in pair if link and "://" not in link]
    assert [link for link in local if not (REPOSITORY / page).parent.joinpath(link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = [name for name in re.findall(r"`([\w.*-]+/[\w./*-]*)`", read(page)) if name.startswith(FOLDERS)]
    kept = [name for name in named if "NAME" not in name and not name.startswith("runs/")]
    assert [name for name in kept if not any(REPOSITORY.glob(name.rstrip("/")))] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_taken(page: str) -> None:
    targets = re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)
    for words in commands(read(page)):
        program, *arguments = words
        if program == "make":
            assert arguments[0] in targets, words
        elif Path(program).name == "study" or arguments[:2] == ["-m", "study.cli"]:
            name, *flags = arguments if Path(program).name == "study" else arguments[2:]
            parser = Parser()
            COMMANDS[name].add_arguments(parser)
            asked = parser.parse_args(flags) if flags else None
            if asked is not None and hasattr(asked, "suite"):
                find_suite(asked.suite)
        elif program == "accelerate":
            place = next(place for place, word in enumerate(words) if word.endswith(".py"))
            assert all((REPOSITORY / word).exists() for word in (words[place], words[3])), words
            run = parse_command_line(words[place + 1 :])
            flags = words[:place]
            if "--num_processes" in flags and not run.virtual_world_size:
                # More ranks than a laptop has are of a box with GPUs, where other values are the default.
                ranks = int(flags[flags.index("--num_processes") + 1])
                assert resolved(run, accelerator_visible=True).batch_plan(ranks), words
        elif program == "bash":
            script, suite, *_ = arguments
            assert (REPOSITORY / script).exists(), words
            if f'"$suite" = {suite} ' not in read(script):
                find_suite(suite)


@pytest.mark.parametrize("page", PAGES)
def test_a_shell_reads_every_code_block(page: str) -> None:
    for block in code_blocks(read(page)):
        if any(line.startswith(STARTS) for line in block.splitlines()):
            subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_a_shell_reads_every_script() -> None:
    for script in (REPOSITORY / ".ci" / "run", *(REPOSITORY / "tools").glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    "file", [*REPOSITORY.glob(".github/**/*.yml"), REPOSITORY / ".pre-commit-config.yaml", REPOSITORY / "CITATION.cff"],
    ids=lambda file: file.name,
)  # fmt: skip
def test_a_file_for_other_programs_is_yaml(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def test_the_citation_names_the_version_there_is() -> None:
    from study import __version__

    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
