from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engines import run_in_terminal
from study import cli
from study.host.folders import COMPILES
from study.host.machine import Machine, matmul_rates
from study.records.directory import RunWriter, read_json, read_run, read_status, write_json
from study.records.outcome import Outcome
from study.records.schema import State
from study.sweep.cell_outcome import cell_state
from study.sweep.execute import append_attempt, run_cells
from study.sweep.forecast import earlier_durations, expected_s
from study.sweep.plan import plan_cells
from study.sweep.suite_file import read_suite
from sweeps import TINY, WITH_STUBS, contents, run, write_suite
from synthetic_records import write_run

# DeepSpeed's ranks on CPU cores need this operator.
SHARED_MEMORY = "deepspeed_shm_comm"
ONE_GPU = Machine((80.0,), 64.0)


def list_cells(file: Path, box: Machine | None = None) -> list[Any]:
    return list(plan_cells(read_suite(file), box or Machine((), 16.0)))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Run a suite of two cells once, as a user whose operators are compiled but not linked, inside another launch."""
    folder = tmp_path_factory.mktemp("swept")
    suite = write_suite(folder, {"strategy": ["single", "zero2"]})
    built = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / SHARED_MEMORY
    shutil.copytree(built, folder / "operators" / SHARED_MEMORY)
    (folder / "operators" / SHARED_MEMORY / f"{SHARED_MEMORY}.so").unlink()
    # No variable of another launch may reach a run.
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED", "TORCHELASTIC_RUN_ID")
    variables = dict.fromkeys(names, "7") | {"TORCH_EXTENSIONS_DIR": str(folder / "operators")}
    result = run(suite, folder / "runs", env=os.environ | variables)
    assert result.returncode == 0, result.stderr
    return suite, folder / "runs", result


def find_cell(runs: Path, strategy: str) -> Path:
    (cell,) = (runs / "tiny").glob(f"*-{strategy}-*")
    return cell


def test_every_cell_leaves_a_complete_record_a_note_of_its_cost_and_a_row_and_compiling_is_reported_at_once(swept):
    suite, runs, result = swept
    lines = result.stderr.splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith(COMPILES))
    assert SHARED_MEMORY in lines[place]
    assert ("zero2" in lines[place - 1], lines[place + 1].split()[:2]) == (True, ["ok", "after"])
    cells = list_cells(suite)
    assert sorted(path.name for path in (runs / "tiny").iterdir() if path.is_dir()) == sorted(cell.id for cell in cells)
    verdict, _, *rows = result.stdout.splitlines()
    assert verdict.startswith("tiny: 2 of 2 cells done; next: study report ")
    assert rows[0].split()[:2] == ["strategy", "task"]
    assert len(rows) == 1 + len(cells)
    orders = set()
    for cell, row in zip(sorted(cells, key=lambda cell: cell.strategy), rows[1:], strict=False):
        record = read_run(runs / "tiny" / cell.id)
        assert record.state == "ok"
        assert (record.engine["strategy"], record.engine["world_size"]) == (cell.strategy, cell.world_size)
        assert {**record.config, "output_dir": None} == {**cell.config.to_dict(), "output_dir": None}
        assert row.split()[0] == cell.strategy
        assert f"{record.summary['eval_loss_final']:.4f}" in row
        # A column without any figure is left out; such a short run has no step time.
        assert ("step ms" in rows[0]) is (record.summary["step_time_s_median"] is not None)
        (attempt,) = read_json(record.path / "sweep.json")["attempts"]
        assert (attempt["state"], attempt["launcher_status"], attempt["matmul_rates"]) == ("ok", 0, {})
        assert attempt["foreign_gpu_processes"] == {"before": [], "after": []}
        # The wall time includes the launch, before the script's first line.
        assert record.summary["startup_s"] + record.summary["runtime_s"] < attempt["wall_s"]
        orders.add(attempt["order"])
    assert orders == {0, 1}
    log = (find_cell(runs, "zero2") / "log.txt").read_text()
    assert all(words in log for words in ("real_accelerator", "done: loss", "zero2 on 2 ranks"))


def test_a_second_call_does_nothing_and_is_quick(swept):
    suite, runs, first = swept
    before = {file: file.stat().st_mtime_ns for file in runs.glob("tiny/*/*")}
    started = time.monotonic()
    second = run(suite, runs)
    assert time.monotonic() - started < 5
    assert (second.returncode, second.stderr, second.stdout) == (0, "", first.stdout)
    assert {file: file.stat().st_mtime_ns for file in runs.glob("tiny/*/*")} == before


@pytest.mark.long
def test_a_damaged_record_does_not_count_as_finished_and_is_repeated_only_on_request(swept, tmp_path):
    shutil.copytree(swept[1], tmp_path / "runs")
    cell = find_cell(tmp_path / "runs", "single")
    rows = (cell / "steps.jsonl").read_text().splitlines(keepends=True)
    (cell / "steps.jsonl").write_text("".join(rows[:-1]))
    before = contents(cell)
    assert run(swept[0], tmp_path / "runs").returncode == 1
    assert contents(cell) == before
    assert run(swept[0], tmp_path / "runs", "--retry").returncode == 0
    losses = [[row["loss"] for row in read_run(path).steps] for path in (find_cell(swept[1], "single"), cell)]
    assert losses[0] == losses[1]


def test_interrupted_and_failed_cells_run_again_and_status_shows_why(tmp_path, capsys):
    suite = write_suite(tmp_path, {"strategy": ["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]})
    states: tuple[State, ...] = ("interrupted", "failed", "oom", "timeout", "unsupported")
    folders = [tmp_path / "runs" / "tiny" / cell.id for cell in list_cells(suite)]
    for folder, state in zip(folders, states, strict=False):
        RunWriter(folder).close(Outcome(state, f"why {state}", "do that"))
    assert [cell_state(folder).is_final(retry=False) for folder in folders] == [False] * 2 + [True] * 3 + [False]
    assert [cell.is_final(retry=True) for cell in (*map(cell_state, folders), Outcome("ok"))] == [False] * 6 + [True]

    assert cli.main(["status", str(suite), "--runs_dir", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    assert all(f"why {state} (do that)" in printed for state in states)
    assert printed.splitlines()[0] == (
        "tiny: 0 of 6 cells done, 1 interrupted, 1 failed, 1 oom, 1 timeout, 1 unsupported;"
        f" next: study run {suite} --runs_dir {tmp_path / 'runs'}"
    )


def test_the_verdict_of_a_suite_names_the_next_command(tmp_path, capsys):
    suite = write_suite(tmp_path, {"strategy": ["single", "ddp"]})
    finished, too_large = (tmp_path / "tiny" / cell.id for cell in list_cells(suite))
    write_run(finished.parent, "single", name=finished.name)
    RunWriter(too_large).close(Outcome("oom", "why", "do that"))
    for command, status in (("status", 0), ("run", 1)):
        assert cli.main([command, str(suite), "--runs_dir", str(tmp_path)]) == status
        assert capsys.readouterr().out.splitlines()[0] == (
            f"tiny: 1 of 2 cells done, 1 oom; next: study report {suite} --runs_dir {tmp_path};"
            " after a fix, study run --retry runs those again"
        )


def test_the_expected_time_is_that_of_similar_cells_and_a_time_budget_starts_none_beyond_it(tmp_path, capsys):
    suite = write_suite(
        tmp_path,
        {"strategy": ["single", "zero3"], "seed": [1, 2, 3, 4], "dropout": [0.0, 0.1]},
        overrides=[{"where": {"strategy": "zero3"}, "fixed": {"expected_s": 90}}],
    )
    cells = {(cell.strategy, cell.config.seed, cell.config.dropout): cell for cell in list_cells(suite)}

    def expected(*key: Any) -> float:
        return expected_s(cells[key], earlier_durations(tmp_path))

    def end(seconds: float, *key: Any) -> None:
        directory = tmp_path / cells[key].id
        directory.mkdir()
        write_json(directory / "config.json", cells[key].config.to_dict())
        append_attempt(directory, cells[key], ["accelerate"], {"state": "ok", "wall_s": seconds})

    assert expected("single", 1, 0.0) == 0.0
    assert expected("zero3", 1, 0.0) == 90.0, "the suite's estimate is used until there is a record"
    for seed, seconds in enumerate((10.0, 12.0, 50.0), start=1):
        end(seconds, "single", seed, 0.0)
    assert expected("single", 4, 0.0) == expected("single", 4, 0.1) == 12.0
    end(30.0, "zero3", 1, 0.1)
    assert (expected("zero3", 2, 0.1), expected("zero3", 2, 0.0)) == (30.0, 90.0)
    sweep = run_cells([cells["single", 4, 0.0]], tmp_path, Machine((), 16.0), time_budget_s=11.0)
    assert (sweep.finished, sweep.pending, sweep.stopped) == (0, 1, False)
    printed = capsys.readouterr().err
    assert "the time budget ends here: the next cell takes about 12s\n1 of 1 cells are left" in printed


@pytest.mark.parametrize(
    ("state", "retry"), [("failed", False), ("interrupted", False), ("damaged", True), ("timeout", True)]
)
def test_cells_tried_before_run_last_and_a_world_larger_than_the_box_is_unsupported(tmp_path, capsys, state, retry):
    cells = list_cells(write_suite(tmp_path, {"strategy": "ddp", "world_size": 4, "seed": [1, 2, 3]}), ONE_GPU)
    written = "ok" if state == "damaged" else state
    tried = write_run(tmp_path / "runs", "ddp", name=cells[0].id, state=written, seed=1)
    if state == "damaged":
        (tried / "summary.json").write_text("{}")
    assert cell_state(tmp_path / "runs" / cells[0].id).state == state
    assert run_cells(cells, tmp_path / "runs", ONE_GPU, retry=retry).pending == 0
    ran = re.findall(r"^\[\d/3\] (\S+)", capsys.readouterr().err, re.MULTILINE)
    assert ran == [cells[at].id for at in (1, 2, 0)]
    statuses = [read_status(tmp_path / "runs" / cell.id) for cell in cells]
    assert {(status["state"], status["reason"]) for status in statuses} == {
        ("unsupported", "4 ranks, and this machine has 1 GPU")
    }


def test_a_gpu_s_matrix_products_are_timed_for_models_of_full_size_alone(tmp_path, monkeypatch):
    assert matmul_rates(Machine((), 16.0)) == {}, "without a GPU there is no MFU"
    # The measurement itself: test_measure.py.
    monkeypatch.setattr("study.host.machine.matmul_rates", lambda _: {"tflops": {"fp32": 1.0}})
    for scale, rates in (("laptop", {}), ("paper", {"tflops": {"fp32": 1.0}})):
        fixed = {**TINY, "scale": scale, "model_name_or_path": "gpt-tiny", "weights": "random", "time_limit_s": 0.1}
        (cell,) = list_cells(write_suite(tmp_path, {"strategy": "single"}, fixed), ONE_GPU)
        run_cells([cell], tmp_path / scale, ONE_GPU)
        (attempt,) = read_json(tmp_path / scale / cell.id / "sweep.json")["attempts"]
        assert (attempt["state"], attempt["matmul_rates"]) == ("timeout", rates)


def test_a_call_can_end_cells_before_the_limit_of_their_suite(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "single"}, {**TINY, "time_limit_s": 600})
    command = ["run", str(suite), "--runs_dir", str(tmp_path), "--time_limit", "1"]
    assert cli.main(command) == 1
    (cell,) = list_cells(suite, Machine((), 16.0))
    record = read_json(tmp_path / "tiny" / cell.id / "sweep.json")
    assert (record["time_limit_s"], record["attempts"][-1]["state"]) == (1, "timeout")
    assert read_status(tmp_path / "tiny" / cell.id)["reason"] == "ended after its 1 s"


def test_on_a_terminal_the_display_shows_the_cell_its_step_and_what_is_left(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "single"}, {**TINY, "max_steps": 100, "logging_steps": 1})
    command = [sys.executable, "-c", WITH_STUBS, "run", str(suite), "--runs_dir", str(tmp_path / "runs")]
    text = run_in_terminal(command, COLUMNS="160")
    assert all(words in text for words in ("0 done, 0 failed, 1 left", "starting"))
    assert re.search(r"step \d+/100.*0:\d\d:\d\d.*0:\d\d:\d\d", text), "the time so far, and what remains"


def test_status_imports_nothing_heavy(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "all"})
    code = (
        "import sys; from study import cli\n"
        f"assert cli.main(['status', {str(suite)!r}, '--runs_dir', {str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'numpy', 'transformers', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
