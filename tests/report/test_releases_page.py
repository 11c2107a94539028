"""The pages of releases match the committed records, and no fault is attributed to the wrong project."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from importlib.metadata import version

import pandas as pd
import pytest
import yaml

from study.cli import main
from study.config.places import REPOSITORY
from study.host.stacks import release_key
from study.records.frames import Records, read_parquet
from study.releases.causes import GRID, PACKAGES, read_causes
from study.releases.release_cells import release_cells
from study.report.facts import caption
from study.report.pages.releases import DETAILS, PAGE, REPORT, details, document, page, read_control
from study.report.questions import releases
from study.report.questions.releases import answer, lettered


@pytest.fixture(scope="module")
def records() -> Records:
    return read_parquet(REPORT)


def test_the_pages_are_made_of_the_committed_records(records: Records) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(records), "run `make releases`"
    assert DETAILS.read_text(encoding="utf-8") == details(records, read_control()), "run `make releases`"
    assert json.loads(GRID.read_text(encoding="utf-8")) == document(records), "run `make releases`"


def test_text_of_a_record_is_no_markup_of_the_page(records: Records) -> None:
    runs = records.runs.assign(status_reason=records.runs["status_reason"].where(lambda text: text == "", "<i>no key"))
    text = details(dataclasses.replace(records, runs=runs), [])
    assert ("| crashes | &lt;i&gt;no key |" in text, "<i>" in text) == (True, False)


def test_every_wrong_cell_has_a_cause_and_each_strategy_its_own_count(records: Records) -> None:
    wrong = [cell for cell in release_cells(records) if cell.verdict.kind == "different"]
    assert [cell.runs[0] for cell in wrong if not cell.causes] == []
    assert {cell.release for cell in wrong} >= {"0.17.6", "0.18.6", "0.19.0"}
    assert "0.19.8" not in {cell.release for cell in wrong}
    contemporary = records.runs["stack"].str.endswith("-then", na=False)
    today, then = answer(records), answer(dataclasses.replace(records, runs=records.runs[contemporary]))
    assert today
    assert then
    assert [headline.value for headline in then.headlines] == ["0"]
    assert [headline.value for headline in today.headlines] == ["5 of 24", "1 of 24"]
    table = today.table.set_index("Strategy")
    assert table.loc["zero1"].tolist() == ["7 of 24", "a: 0.18.3 to 0.19.5", "c: 0.16.0 to 0.18.2", "h: 0.18.9", "none"]
    assert table.loc["zero3"].tolist() == ["24 of 24", "none", "none", "e: 0.14.5 to 0.19.7", "none"]


def test_a_letter_is_explained_if_a_fault_of_the_table_has_it() -> None:
    causes = {letter: cause for cause, letter in lettered().items()}
    cases = [
        ("zero1", "0.1.0", True, "a", "Faults of DeepSpeed"),
        ("zero1", "0.2.0", True, "", "right"),
        # Without accumulation: not in the table.
        ("zero2", "0.1.0", False, "b", "Faults of DeepSpeed"),
        # A name with the sign of an unknown cause.
        ("mine: ?", "0.2.0", True, "", "right"),
    ]
    verdicts = pd.DataFrame(cases, columns=["strategy", "release", "several", "letter", "kind"])
    verdicts = verdicts.assign(from_source=False)
    in_half = pd.DataFrame({"strategy": ["zero1"], "release": ["0.2.0"], "letter": ["c"]})
    faults = releases._shown_faults(verdicts, in_half)
    notes = releases._fault_notes(verdicts, faults)
    titles = {letter for letter, cause in causes.items() if any(note.startswith(f"{letter}: ") for note in notes)}
    assert titles == {"a", "c"}
    assert caption("releases", "unknown") not in notes
    assert caption("releases", "half") in notes
    row = releases._strategy_table(verdicts, faults).set_index("Strategy").loc["zero1"]
    assert row.tolist() == ["1 of 2", "a: 0.1.0", "none", "none", "c: 0.2.0"]


def test_a_release_recommended_against_one_cause_has_no_other() -> None:
    """The release in `instead`, and later ones, with the other installed packages."""
    causes = read_causes()
    mended = [cause.left.release for cause in causes if cause.left.release[:1].isdigit()]
    conflicts = []
    for cause in causes:
        if not (match := re.search(r"DeepSpeed ([\d.]+) or later", cause.instead)):
            continue
        for release in (match[1], *(fixed for fixed in mended if release_key(fixed) > release_key(match[1]))):
            versions = {"deepspeed": release, **{name: version(name) for name in PACKAGES if name != "deepspeed"}}
            conflicts += [
                (cause.id, release, second.id)
                for second in causes
                for strategy in cause.strategies
                if second.optimizer == cause.optimizer
                and second.gpu != "hidden"
                and second.is_in(versions)
                and second.shows_in(strategy, 4, "bf16-engine")
            ]
    assert conflicts == []


VERDICTS = yaml.safe_load((REPOSITORY / "tests" / "data" / "verdicts_of_releases.yaml").read_text())


@pytest.mark.parametrize("arguments", VERDICTS)
def test_a_release_is_judged_in_the_first_line_and_the_exit_status(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, verdict = VERDICTS[arguments]
    assert main(["releases", *arguments.split()]) == status
    out = capsys.readouterr().out.splitlines()
    release, *flags = arguments.split()
    versions = {name: version(name) for name in ("accelerate", "torch")}
    versions |= {name: flags[flags.index(f"--{name}") + 1] for name in versions if f"--{name}" in flags}
    packages = f"deepspeed {release} with accelerate {versions['accelerate']} and torch {versions['torch']}"
    assert re.match(re.escape(packages) + verdict, out[0])
    table = list(itertools.takewhile(bool, out[3:]))
    # Of one strategy a cell has the letters alone.
    letters = set(re.findall(r"\b([a-z])\b", "\n".join(table))) | set(re.findall(r"\(([a-z])\)", out[0]))
    legend = {line[0] for line in out if re.match("[a-z]: ", line)}
    assert letters <= legend
    elsewhere = "\n".join(line for line in out if "with Muon:" in line or line.startswith("with accelerate"))
    assert legend - letters <= {*re.findall(r"\b([a-z]): ", elsewhere), *re.findall(r" also ([a-z]) ", elsewhere)}


@pytest.mark.parametrize(
    ("release", "releases"),
    [
        ("0.17.5", ["0.18.0", "0.17.6", "0.17.5", "0.17.2", "0.17.0"]),
        ("0.18.8", ["0.19.0", "0.18.9", "0.18.6", "0.18.5", "0.18.4"]),
        ("0.10.1", ["0.15.4", "0.15.2", "0.15.1", "0.14.5", "0.14.0"]),
        ("99.0", ["0.19.8", "0.19.7", "0.19.6", "0.19.5", "0.19.2"]),
    ],
)
def test_the_rows_are_those_around_the_release(
    release: str, releases: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["releases", release])
    table = itertools.takewhile(bool, capsys.readouterr().out.splitlines()[3:])
    assert [line.split()[0] for line in table] == releases


@pytest.mark.parametrize("arguments", ["0.14.4", "0.14.4 zero2"])
def test_a_release_that_was_not_run_is_named_so_with_a_strategy_as_well(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["releases", *arguments.split()])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["0.14.0"])
    assert row.split() == ["0.14.0", "not", "run", "not", "run"]


@pytest.mark.parametrize("arguments", ["", "0.19.8", "0.19.8 zero3", "0.17.5 zero3_nvme", "0.19.8 --details"])
def test_the_grid_names_the_command_that_answers_for_a_combination(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["releases", *arguments.split()])
    printed = capsys.readouterr().out
    (command,) = re.findall(r"^combinations .*: study (releases \S+ --features \S+)", printed, re.MULTILINE)
    assert command.split()[1] == (arguments.split() or ["0.19.8"])[0]
    assert ("zero3," in command) == (arguments == "0.19.8 zero3")
    # An answer, or that there is none.
    assert main(command.split()) in (0, 1, 3)
    assert "combinations of features" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["stage2", "zero-2", "ZeRO_stage_2", "z2"])
def test_a_stage_by_another_name_is_suggested(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["releases", "0.17.5", name]) == 2
    assert "did you mean zero2?" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "meant"), [("zero2_offload", "zero2_cpu"), ("ds_z3_offload", "zero3_cpu")])
def test_a_stage_with_an_offload_is_suggested(name: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "gpt2", "--strategy", name, "--hardware", "8xH100"]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_release_is_read_as_tags_and_requirements_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    releases = ("0.19.5", "v0.19.5", "deepspeed==0.19.5", "0.19.5+cu128", "deepspeed==0.19.5+git.1a2b3c")
    for release in releases:
        assert main(["releases", release, "zero2"]) == 1
        answers.append(capsys.readouterr().out)
    assert answers == [answers[0]] * len(releases)
    assert main(["releases", "version", "zero2"]) == 2
    assert "'version' is not a release of DeepSpeed" in capsys.readouterr().err
