from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from study.claims.evidence import Evidence
from study.claims.forms import FORMS
from study.claims.gpu_checks import (
    PAGE,
    REPORT,
    GpuCheck,
    example,
    gpu_checks,
    gpu_places,
    page,
    with_figures,
)
from study.claims.ledger import LEDGER, read_ledger
from study.claims.scoreboard import JudgedClaim, Scoreboard
from study.claims.verdicts import NotJudged, Region
from study.host.machine import Machine
from study.records.frames import read_runs, write_parquet
from study.sweep.cell import Cell
from study.sweep.execute import append_attempt, note_searches
from study.sweep.plan import plan_suite
from study.sweep.search import Search
from synthetic_records import write_run

PARAMETERS = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}


@pytest.fixture(scope="module")
def checks(full_board: Scoreboard) -> list[GpuCheck]:
    return gpu_checks(full_board)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Return evidence in which every cell of the single-GPU series has a record with invented figures."""
    folder = tmp_path_factory.mktemp("reports")
    root = folder / "made"
    for part in plan_suite("one_gpu", Machine((141.0,), 128.0), folder).slices:
        for item in part.cells:
            probes = [item] if isinstance(item, Cell) else [item.probe_at(place) for place in range(3)]
            for place, cell in enumerate(probes):
                if (root / cell.id).exists() or cell.trainer != "study":
                    continue
                flags = {key: value for key, value in cell.requested.to_dict().items() if key != "scale"}
                parameters = PARAMETERS.get(cell.config.model_name_or_path, 10**8)
                write_run(
                    root,
                    cell.strategy,
                    name=cell.id,
                    ranks=cell.ranks,
                    virtual=bool(cell.config.virtual_world_size),
                    steps=cell.config.max_steps or 9,
                    state="oom" if len(probes) > 1 and place == 2 else "ok",
                    config=flags | {"eval_steps": 4},
                    samples=f"{cell.config.train_samples}",
                    engine={"model_layers": 24, "preset_layers": 24, "model_parameters": parameters},
                    environment={"devices": [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.2}]},
                )
                append_attempt(root / cell.id, cell, ["accelerate"], {"attempt": 1})
        note_searches(part.cells, root)
    records = read_runs(root)
    runs = records.runs.assign(mfu=0.1, energy_j=10.0 * records.runs["runtime_s"])
    for figure in ("train_loss_final", "eval_loss_final"):
        runs[figure] /= 10
    write_parquet(dataclasses.replace(records, runs=runs), folder / REPORT)
    return Evidence(folder)


def test_the_page_is_made_of_the_ledger_and_the_suites(full_board: Scoreboard) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(full_board), "run `make claims`"


def outcomes(judged: JudgedClaim, place: int) -> set[tuple[str, ...]]:
    """Return the findings without the figure, with one that passes and with one that fails, for all other figures."""
    regions = {number: check.region for number, check in enumerate(judged.claim.checks)}
    rest = [number for number in gpu_places(judged) if number != place]
    findings: set[tuple[str, ...]] = set()
    for answers in itertools.product((None, True, False), repeat=len(rest)):
        figures = {
            number: None if passes is None else example(regions[number], passes)
            for number, passes in zip(rest, answers, strict=True)
        }
        examples = (None, example(regions[place], True), example(regions[place], False))
        findings.add(tuple(with_figures(judged, figures | {place: figure}).kind for figure in examples))
    return findings


def test_a_figure_of_one_gpu_can_change_the_finding(checks: list[GpuCheck]) -> None:
    assert len(checks) > 10
    for item in checks:
        changes = [kinds for kinds in outcomes(item.judged, item.place) if len(set(kinds)) > 1]
        assert changes, f"no outcome of {item.check.shows!r} changes the finding of {item.judged.claim.id}"


def test_the_examples_are_inside_the_region_and_outside_it(checks: list[GpuCheck]) -> None:
    regions = [item.check.region for item in checks]
    for region in [*regions, Region(low=0), Region(high=0), Region(0.3, 0.5), Region(-2, -1)]:
        assert [region.judge(example(region, passes)) for passes in (True, False)] == ["holds", "fails"]


def test_a_check_reads_the_records_of_the_cells_that_the_page_names(checks: list[GpuCheck], evidence: Evidence) -> None:
    waiting = [check for claim in read_ledger(LEDGER).claims for check in claim.checks if check.needs]
    assert [item.check for item in checks] == waiting
    for item in checks:
        result = item.check.find(evidence)
        assert result.answer != "not judged", result.sentence
        assert result.figure is not None
        read = {record.removeprefix(f"{REPORT}/") for record in result.figure.records}
        cell_ids: set[str] = set()
        for feed in item.feeds:
            cells = [feed.item.probe_at(place) for place in range(3)] if isinstance(feed.item, Search) else [feed.cell]
            cell_ids |= {cell.id for cell in cells}
        if item.check.form == "virtual":
            # Of repeats, which count the same bytes, the page names the first and the form reads any.
            read, cell_ids = ({name.rpartition("-r")[0] for name in names} for names in (read, cell_ids))
        assert read == cell_ids, item.check.shows
        if FORMS[item.check.form].kind == "measured" and item.check.form != "largest":
            assert result.sentence.endswith("NVIDIA H100 80GB HBM3)"), "the device is named as text"


def test_without_records_a_check_says_what_it_needs(tmp_path: Path, checks: list[GpuCheck]) -> None:
    for item in checks:
        says = f"No record yet; it needs {item.check.needs}: {item.check.shows}"
        assert item.check.find(Evidence(tmp_path)).sentence == says


def test_equal_losses_of_models_that_learned_nothing_are_not_judged(evidence: Evidence) -> None:
    (claim,) = [claim for claim in read_ledger().claims if claim.id == "S2-01"]
    check = next(check for check in claim.checks if check.numbers.get("report") == REPORT)
    pair = evidence.pair(REPORT, "bert-imdb", "single", "single", check.numbers["where"])
    loss = float(pair.control["eval_loss_final"].median())
    FORMS["paired"].figure(evidence, **(dict(check.numbers) | {"learned": 1.01 * loss}))
    with pytest.raises(NotJudged, match="learned too little"):
        FORMS["paired"].figure(evidence, **(dict(check.numbers) | {"learned": 0.99 * loss}))


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "(None, False)"),
        (f"{COMMIT}\n", f"('{COMMIT}', False)"),
        (f"{COMMIT}\n M study/train.py\n", f"('{COMMIT}', True)"),
        ("main\n", "UserError"),
        ("", "UserError"),
    ],
)
def test_a_copy_without_git_records_the_commit_that_a_file_names(tmp_path, text, expected):
    # Without a PATH there is no git.
    variables: dict[str, Any] = {"PATH": str(tmp_path)}
    if text is not None:
        (tmp_path / "commit.txt").write_text(text)
        variables["ZERO_STUDY_COMMIT"] = str(tmp_path / "commit.txt")
    code = "from study.host.environment import commit_of_checkout; print(commit_of_checkout())"
    environment = {key: value for key, value in os.environ.items() if key != "ZERO_STUDY_COMMIT"} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    if expected == "UserError":
        assert "UserError: ZERO_STUDY_COMMIT is " in done.stderr
    else:
        assert done.stdout.strip() == expected
