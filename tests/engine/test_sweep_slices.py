from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from study import cli
from study.config.errors import UserError
from study.host.machine import Machine
from study.records.frames import read_parquet, read_runs, write_parquet
from study.report.questions import TABLES
from study.report.questions.runs import REMAINING
from study.sweep.cell import Cell
from study.sweep.command import _runnable, in_order
from study.sweep.forecast import pending_items
from study.sweep.plan import plan_suite
from study.sweep.suite_file import SUITE_DIRECTORY, read_suite
from study.sweep.tables import slice_progress
from sweeps import ROOT, TINY, write_files
from synthetic_records import answered, write_run

CPU_BOX = Machine((), 16.0)
SEED_FIRST: list[dict[str, object]] = [{"suite": "wide", "only": ["seed=2"]}, {"suite": "narrow"}, {"suite": "wide"}]


def write_series(folder: Path, slices: Sequence[Mapping[str, object]], **wide: Any) -> Path:
    """Write a series `whole` over two suites: `wide` with two seeds, and `narrow`, one cell of another model."""
    fixed = {**TINY, "strategy": "single"}
    documents: dict[str, dict[str, Any]] = {
        "wide": {"fixed": fixed, "grids": [{"axes": {"seed": [1, 2]}}], **wide},
        "narrow": {"fixed": {**fixed, "model_name_or_path": "gpt-tiny-1layers"}, "grids": [{"axes": {"seed": [1]}}]},
        "whole": {"slices": list(slices)},
    }
    for name, document in documents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "description": "a test's", **document}))
    return folder / "whole.yaml"


def planned(file: Path, runs: Path, *only: str, **how: bool) -> list[tuple[str, list[int]]]:
    """Return each slice as its suite and the seeds of its cells."""
    plan = plan_suite(str(file), CPU_BOX, runs, only, **how)
    slices: list[tuple[str, list[Any]]] = [(part.suite.name, part.cells) for part in plan.slices]
    return [(name, sorted(cell.config.seed for cell in cells)) for name, cells in slices]


def test_slices_come_in_their_order_with_each_cell_once_and_a_rehearsal_has_every_suite_whole(tmp_path):
    file = write_series(tmp_path, SEED_FIRST)
    assert planned(file, tmp_path) == [("wide", [2]), ("narrow", [1]), ("wide", [1])]
    assert planned(file, tmp_path, "seed=1") == [("narrow", [1]), ("wide", [1])]
    assert [part.root.name for part in plan_suite(str(file), CPU_BOX, tmp_path).slices] == ["wide", "narrow", "wide"]
    assert planned(file, tmp_path, rehearse=True) == [("wide-rehearsal", [1]), ("narrow-rehearsal", [1])]


def test_the_status_of_a_suite_names_the_gpus_that_are_missing(tmp_path, capsys):
    assert cli.main(["status", "one_gpu", "--runs_dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "needs 1 GPU, and this machine shows 0" in lines[0]
    assert len(lines) <= 25
    assert lines[-1].endswith(" more; --details prints all")


WRONG_SERIES = yaml.safe_load((ROOT / "tests" / "data" / "wrong_series.yaml").read_text())


@pytest.mark.parametrize(("says", "slices"), WRONG_SERIES)
def test_a_wrong_series_is_refused_with_its_place(tmp_path, says, slices):
    file = write_series(tmp_path, slices)
    (tmp_path / "namesake.yaml").write_text((tmp_path / "wide.yaml").read_text())
    with pytest.raises(UserError) as refusal:
        plan_suite(str(file), CPU_BOX, tmp_path)
    assert says in refusal.value.problem


def test_slices_that_need_another_machine_are_left_out_and_refused_if_none_is_left(tmp_path, capsys):
    file = write_series(tmp_path, SEED_FIRST, requires={"gpus": 1, "gpu_memory_gib": 8})
    series = ["run", str(file), "--runs_dir", str(tmp_path / "runs")]
    assert cli.main([*series, "--only", "seed=2"]) == 2
    assert "wide needs 1 GPU, and this machine shows 0" in capsys.readouterr().err
    # Without time for any cell, it prints only which slices there are.
    assert cli.main([*series, "--time_budget", "0"]) == 0
    notices = capsys.readouterr().err
    assert "notice: wide needs 1 GPU, and this machine shows 0: left out" in notices
    assert "narrow:" in notices


def test_a_slice_requires_only_what_its_cells_require_and_a_plan_is_for_the_suite_s_hardware(tmp_path):
    slices: list[dict[str, object]] = [{"suite": "wide", "only": ["world_size=1"]}, {"suite": "wide"}]
    fixed, grids = {**TINY, "strategy": "zero2"}, [{"axes": {"world_size": [1, 2]}}]
    file, box = write_series(tmp_path, slices, requires={"gpus": 2}, fixed=fixed, grids=grids), Machine((16.0,), 16.0)
    assert [part.only for part in _runnable(plan_suite(str(file), box, tmp_path), box)] == [("world_size=1",)]
    # Without this, `--dry_run` and the list of remaining runs on another machine would name other runs.
    file = write_series(tmp_path, [{"suite": "wide"}], requires={"gpus": 4}, fixed={**TINY, "strategy": "zero3"})
    cells: list[Any] = [cell for part in plan_suite(str(file), CPU_BOX, tmp_path).slices for cell in part.cells]
    assert {cell.ranks for cell in cells} == {4}


def test_a_series_runs_until_its_time_is_over_and_continues_there(tmp_path, capsys):
    file = write_series(tmp_path, SEED_FIRST)
    runs = tmp_path / "runs"
    base = [str(file), "--runs_dir", str(runs)]
    runs.mkdir()
    plan = plan_suite(str(file), CPU_BOX, runs)
    answer = answered(REMAINING.answer(read_runs(runs, plan.roots(), slice_progress(plan))))
    assert (answer.headlines[0].value, answer.headlines[1].what) == ("0 of 3", "estimated for the 3 that remain")
    assert cli.main(["run", *base, "--only", "seed=2"]) == 0
    (first,) = runs.glob("*/*/status.json")
    assert first.parent.parent.name == "wide"
    # No remaining cell fits into no time; finished cells are not started again and do not stop the others.
    capsys.readouterr()
    assert cli.main(["run", *base, "--time_budget", "0"]) == 0
    printed = capsys.readouterr().err
    assert "narrow:" in printed
    assert "wide" not in printed
    assert cli.main(["status", *base]) == 0
    verdict, _, _, *rows = capsys.readouterr().out.splitlines()
    assert re.match(r"whole: 1 of 3 cells done; about \d+s left; next: study run ", verdict)
    assert verdict.endswith(f"study run {file} --runs_dir {runs}")
    assert [row.split()[:6] for row in rows] == [
        ["wide", "seed=2", "1", "1", "0", "0"],
        ["narrow", "-", "1", "0", "0", "1"],
        ["wide", "-", "1", "0", "0", "1"],
    ]
    # If nothing is left to run, it prints the status of all slices.
    assert cli.main(["run", *base, "--only", "seed=2"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split() == ["wide", "seed=2", "1", "1", "0", "0", "0s"]
    # The remaining runs are in the report's first answer and in its parquet files.
    plan = plan_suite(str(file), CPU_BOX, runs)
    records = read_runs(runs, plan.roots(), slice_progress(plan))
    assert records.runs["status_state"].tolist() == ["ok"]
    write_parquet(records, tmp_path / "kept")
    reread = read_parquet(tmp_path / "kept")
    answer = answered(REMAINING.answer(reread))
    assert (answer.headlines[0].value, answer.headlines[1].what) == ("1 of 3", "estimated for the 2 that remain")
    assert answer.table[["Suite", "Planned", "Left"]].to_numpy().tolist() == [["wide", 2, 1]]
    assert answer.notes[0] == "Without a run yet: narrow."
    remaining, slices = TABLES["left"](reread)[["Suite", "Left"]], TABLES["slices"](reread)[["Part", "Left"]]
    assert remaining.to_numpy().tolist() == [["narrow", "single"], ["wide", "single, seed 1"]]
    assert slices.to_numpy().tolist() == [["seed=2", 0], ["all", 1], ["the rest", 1]]


def test_interrupted_cells_come_after_untried_ones(tmp_path, capsys):
    file = write_series(tmp_path, SEED_FIRST)
    (hung,) = plan_suite(str(file), CPU_BOX, tmp_path, ["seed=2"]).slices
    write_run(hung.root, name=hung.cells[0].id, state="interrupted", gpu=False)
    started = ["run", str(file), "--runs_dir", str(tmp_path), "--time_budget", "0"]
    cli.main(started)
    assert "narrow:" in capsys.readouterr().err
    cli.main([*started, "--only", "seed=2"])
    assert "wide seed=2, tried before:" in capsys.readouterr().err, "it is still to do"
    # `study weights` prepares the first cells of that call.
    begun = in_order(plan_suite(str(file), CPU_BOX, tmp_path).slices, None)
    assert [(cell.config.model_name, cell.config.seed) for cell, _ in begun if isinstance(cell, Cell)] == [
        ("gpt-tiny-1layers", 1),
        ("gpt-tiny", 1),
        ("gpt-tiny", 2),
    ]


def test_records_of_a_series_are_found_where_a_user_keeps_them(tmp_path, monkeypatch):
    """A relative `runs` is below the working directory."""
    file = write_series(tmp_path, SEED_FIRST)
    for seed, suite in enumerate(("wide", "narrow", "another")):
        write_run(tmp_path / "runs" / suite, "single", ranks=1, seed=seed)
    write_files(tmp_path, {"runs/wide/broken/status.json": "{"})
    monkeypatch.chdir(tmp_path)
    plan = plan_suite(str(file), CPU_BOX, Path("runs"))
    records = read_runs(Path("runs"), plan.roots(), slice_progress(plan))
    # A folder that belongs to no suite is left out.
    assert sorted(records.runs["seed"]) == [0, 1]
    assert records.refused[0].startswith("wide/broken/status.json: ")


def test_one_gpu_has_every_cell_of_every_rented_suite_in_slices_of_nine_minutes(tmp_path):
    suites = [read_suite(file) for file in SUITE_DIRECTORY.glob("*.yaml")]
    # Suites for another machine with one GPU are not rented, and fp16 has no figure of a large model.
    others = {"a100", "a100_6b", "colab", "offload", "gpu_fp16"}
    names = {suite.name for suite in suites if suite.requires.gpus == 1} - others
    plan = plan_suite("one_gpu", CPU_BOX, tmp_path)
    counts = Counter((part.suite.name, cell.id) for part in plan.slices for cell in part.cells)
    alone = (part for name in names for part in plan_suite(name, CPU_BOX, tmp_path).slices)
    assert counts == Counter((part.suite.name, cell.id) for part in alone for cell in part.cells)
    assert set(counts.values()) == {1}
    for part in plan.slices:
        seconds = sum(seconds for _, seconds in pending_items(part.cells, tmp_path))
        # Nine minutes minus the preparation of a new machine.
        assert 0 < seconds <= 8 * 60, part.title
    assert sum(len(row.left) for row in slice_progress(plan)) > 200
