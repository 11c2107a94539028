"""A sweep does what is not done, leaves a whole record of each cell, and says where it stands."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from study import cli
from study.host.box import Box, matmul_rates
from study.host.folders import COMPILES
from study.records.directory import RunWriter, read_json, read_run, read_status, write_json
from study.records.outcome import Ending
from study.records.schema import State
from study.sweep.execute import run_cells
from study.sweep.launch import clean_environment
from study.sweep.notes import append_attempt, earlier_durations, expected_s
from study.sweep.plan import plan_cells
from study.sweep.progress import StepTail, show_duration
from study.sweep.suite_file import read_suite
from study.sweep.verdict import cell_state
from sweeps import ROOT, TINY, contents, run, write_suite
from synthetic_records import write_run

# DeepSpeed's ranks on cores want it.
SHARED_MEMORY = "deepspeed_shm_comm"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A suite of two cells, done once, by somebody whose operators are compiled and not linked yet."""
    folder = tmp_path_factory.mktemp("swept")
    suite = write_suite(folder, {"strategy": ["single", "zero2"]})
    built = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / SHARED_MEMORY
    shutil.copytree(built, folder / "operators" / SHARED_MEMORY)
    (folder / "operators" / SHARED_MEMORY / f"{SHARED_MEMORY}.so").unlink()
    operators = {"TORCH_EXTENSIONS_DIR": str(folder / "operators")}
    result = run(suite, folder / "runs", env=os.environ | operators)
    assert result.returncode == 0, result.stderr
    return suite, folder / "runs", result


def test_what_is_compiled_before_a_run_begins_is_said_while_it_is(swept):
    _, _, result = swept
    lines = result.stderr.splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith(COMPILES))
    assert SHARED_MEMORY in lines[place]
    assert ("zero2" in lines[place - 1], lines[place + 1].split()[:2]) == (True, ["ok", "after"])


def cell_of(runs: Path, strategy: str) -> Path:
    (cell,) = (runs / "tiny").glob(f"*-{strategy}-*")
    return cell


def test_every_cell_leaves_a_whole_record_where_its_id_says(swept):
    suite, runs, _ = swept
    cells: list[Any] = plan_cells(read_suite(suite), Box((), 16.0))
    assert sorted(path.name for path in (runs / "tiny").iterdir() if path.is_dir()) == sorted(cell.id for cell in cells)
    for cell in cells:
        record = read_run(runs / "tiny" / cell.id)
        assert record.state == "ok"
        assert (record.engine["strategy"], record.engine["world_size"]) == (cell.strategy, cell.world_size)
        assert {**record.config, "output_dir": None} == {**cell.config.to_dict(), "output_dir": None}


def test_the_table_at_the_end_holds_the_records_figures(swept):
    _, runs, result = swept
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["strategy", "task"]
    for strategy, line in zip(("single", "zero2"), lines[1:], strict=True):
        summary = read_run(cell_of(runs, strategy)).summary
        assert line.split()[0] == strategy
        assert f"{summary['train_loss_final']:.4f}" in line
        assert f"{summary['host_peak_rss_gib']:.2f}" in line


def test_a_second_call_does_nothing_and_is_quick(swept):
    suite, runs, first = swept
    before = {file: file.stat().st_mtime_ns for file in runs.glob("tiny/*/*")}
    started = time.monotonic()
    again = run(suite, runs)
    assert time.monotonic() - started < 5
    assert again.returncode == 0
    assert again.stderr == ""
    assert again.stdout == first.stdout
    assert {file: file.stat().st_mtime_ns for file in runs.glob("tiny/*/*")} == before


def test_the_sweep_s_own_cost_is_recorded_with_each_cell(swept):
    _, runs, _ = swept
    for strategy in ("single", "zero2"):
        cell = cell_of(runs, strategy)
        (attempt,) = read_json(cell / "sweep.json")["attempts"]
        summary = read_run(cell).summary
        assert attempt["state"] == "ok"
        assert attempt["launcher_status"] == 0
        # From the launch it takes longer than from the script's first line.
        assert summary["startup_s"] + summary["runtime_s"] < attempt["wall_s"]
        assert attempt["foreign_gpu_processes"] == {"before": [], "after": []}
        assert attempt["matmul_rates"] == {}
    assert {read_json(cell_of(runs, name) / "sweep.json")["attempts"][0]["order"] for name in ("single", "zero2")} == {
        0,
        1,
    }


def test_the_log_holds_the_ranks_noise_and_the_launchers(swept):
    _, runs, _ = swept
    log = (cell_of(runs, "zero2") / "log.txt").read_text()
    assert "real_accelerator" in log
    assert "done: loss" in log
    assert "zero2 on 2 ranks" in log


@pytest.mark.long
def test_a_suite_can_have_another_trainer_s_loop_run_its_cells(swept, tmp_path):
    suite = write_suite(tmp_path, {"strategy": "single", "trainer": "hf_trainer"})
    assert run(suite, tmp_path / "runs").returncode == 0
    theirs, ours = read_run(cell_of(tmp_path / "runs", "single")), read_run(cell_of(swept[1], "single"))
    assert (theirs.engine["trainer"], ours.engine["trainer"]) == ("hf_trainer", "study")
    assert read_json(theirs.path / "sweep.json")["trainer"] == "hf_trainer"
    assert [row["samples_hash"] for row in theirs.steps] == [row["samples_hash"] for row in ours.steps]


def test_nothing_of_another_launch_reaches_a_run(swept, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RANKING", "kept")
    monkeypatch.setenv("PATH", "/usr/bin")
    environment = clean_environment(tmp_path, tmp_path / "refusal")
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"
    assert not [name for name in environment if environment[name] == "7"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["RANKING"] == "kept"


@pytest.mark.long
def test_a_pasted_command_of_the_dry_run_makes_the_same_run(swept, tmp_path, capsys):
    suite, runs, _ = swept
    assert cli.main(["run", str(suite), "--runs-dir", str(tmp_path), "--only", "*-single-*", "--dry-run"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(line, shell=True, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
    (pasted,) = (tmp_path / "tiny").iterdir()
    swept_cell = cell_of(runs, "single")
    assert pasted.name == swept_cell.name
    assert [row["loss"] for row in read_run(pasted).steps] == [row["loss"] for row in read_run(swept_cell).steps]
    assert Path(shlex.split(line)[0]).name == "accelerate"


DAMAGED = ("steps.jsonl", "summary.json", "status.json")


def damaged(swept, runs, name):
    shutil.copytree(swept[1], runs)
    cell = cell_of(runs, "single")
    text = (cell / name).read_text()
    # A row less, or half of a document.
    kept = "\n".join(text.splitlines()[:-1]) + "\n" if name.endswith("l") else text[: len(text) // 2]
    (cell / name).write_text(kept)
    return cell


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_not_taken_for_finished(swept, tmp_path, name):
    assert cell_state(damaged(swept, tmp_path / "runs", name)).state == "damaged"


@pytest.mark.long
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_made_again_on_request_alone(swept, tmp_path, name):
    cell = damaged(swept, tmp_path / "runs", name)
    kept = contents(cell)
    assert run(swept[0], tmp_path / "runs").returncode == 1
    assert contents(cell) == kept
    assert run(swept[0], tmp_path / "runs", "--retry").returncode == 0
    losses = [[row["loss"] for row in read_run(each).steps] for each in (cell_of(swept[1], "single"), cell)]
    assert losses[0] == losses[1]


def test_what_was_interrupted_or_failed_is_run_again_and_the_rest_is_not(tmp_path, capsys):
    suite = write_suite(tmp_path, {"strategy": ["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]})
    cells: list[Any] = plan_cells(read_suite(suite), Box((), 16.0))
    states: tuple[State, ...] = ("interrupted", "failed", "oom", "timeout", "unsupported")
    for cell, state in zip(cells, states, strict=False):
        RunWriter(tmp_path / "runs" / "tiny" / cell.id).close(state, f"why {state}", "do that")
    answered = {cell.id: cell_state(tmp_path / "runs" / "tiny" / cell.id).is_answered(retry=False) for cell in cells}
    assert [answered[cell.id] for cell in cells] == [False, False, True, True, True, False]
    retried = [cell_state(tmp_path / "runs" / "tiny" / cell.id).is_answered(retry=True) for cell in cells]
    assert not any(retried)

    assert cli.main(["status", str(suite), "--runs-dir", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    for state in states:
        assert f"why {state} (do that)" in said
    assert any(line.split() == ["to", "do", "1"] for line in said.splitlines())


def test_a_time_budget_stops_between_cells_and_says_what_is_left(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "single", "seed": [1, 2, 3, 4]})
    runs = tmp_path / "runs"
    started = time.monotonic()
    first = run(suite, runs, "--time-budget", "1s")
    elapsed = time.monotonic() - started
    # Nothing is known of how long a cell takes before the first: one runs, and then the budget is spent.
    assert first.returncode == 0
    assert "the time budget ends here" in first.stderr
    assert "3 of 4 cells are left" in first.stderr
    again = run(suite, runs, "--time-budget", f"{int(elapsed * 0.3) or 1}s")
    assert again.returncode == 0
    assert "3 of 4 cells are left" in again.stderr, (
        "what one cell took is known by now, and a budget below it starts none"
    )


def test_what_the_next_cell_takes_is_judged_by_those_like_it(tmp_path):
    suite = write_suite(
        tmp_path, {"strategy": ["single", "zero3"], "seed": [1, 2, 3, 4], "dropout": [0.0, 0.1]},
        overrides=[{"where": {"strategy": "zero3"}, "fixed": {"expected_s": 90}}],
    )  # fmt: skip
    planned: list[Any] = plan_cells(read_suite(suite), Box((), 16.0))
    cells = {(cell.strategy, cell.config.seed, cell.config.dropout): cell for cell in planned}

    def expected(*of: Any) -> float:
        return expected_s(cells[of], earlier_durations(tmp_path))

    def end(seconds: float, *of: Any) -> None:
        directory = tmp_path / cells[of].id
        directory.mkdir()
        write_json(directory / "config.json", cells[of].config.to_dict())
        append_attempt(directory, cells[of], ["accelerate"], {"state": "ok", "wall_s": seconds})

    assert expected("single", 1, 0.0) == 0.0
    assert expected("zero3", 1, 0.0) == 90.0, "what the suite says holds until a record is there"
    for seed, seconds in enumerate((10.0, 12.0, 50.0), start=1):
        end(seconds, "single", seed, 0.0)
    assert expected("single", 4, 0.0) == 12.0
    assert expected("single", 4, 0.1) == 12.0
    end(30.0, "zero3", 1, 0.1)
    assert expected("zero3", 2, 0.1) == 30.0
    assert expected("zero3", 2, 0.0) == 90.0


def test_a_world_larger_than_the_box_is_unsupported_without_a_launch(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "ddp", "world_size": 4})
    box = Box((80.0,), 64.0)
    cells = plan_cells(read_suite(suite), box)
    outcome = run_cells(cells, tmp_path / "runs", box)
    assert (outcome.finished, outcome.left) == (1, 0)
    status = read_status(tmp_path / "runs" / cells[0].id)
    assert (status["state"], status["reason"]) == ("unsupported", "4 ranks, and this box has 1 GPU")


@pytest.mark.parametrize(
    ("state", "retry"), [("failed", False), ("interrupted", False), ("damaged", True), ("timeout", True)]
)
def test_what_was_tried_before_is_run_last(tmp_path, capsys, state, retry):
    suite = write_suite(tmp_path, {"strategy": "ddp", "world_size": 4, "seed": [1, 2, 3]})
    box = Box((80.0,), 64.0)
    cells = plan_cells(read_suite(suite), box)
    written = "ok" if state == "damaged" else state
    tried = write_run(tmp_path / "runs", "ddp", name=cells[0].id, state=written, seed=1)
    if state == "damaged":
        (tried / "summary.json").write_text("{}")
    assert cell_state(tmp_path / "runs" / cells[0].id).state == state
    run_cells(cells, tmp_path / "runs", box, retry=retry)
    ran = re.findall(r"^\[\d/3\] (\S+)", capsys.readouterr().err, re.MULTILINE)
    assert ran == [cells[at].id for at in (1, 2, 0)]


def test_the_rate_of_matrix_products_is_measured_for_the_records_of_a_box_with_a_gpu():
    assert matmul_rates(Box((), 16.0)) == {}, "without a GPU there is nothing to hold an MFU against"
    # As on a box with one: measured for real, on whatever torch finds here.
    measured = matmul_rates(Box((80.0,), 64.0))
    assert measured["tflops"]["fp32"] > 0
    assert measured["device"]


@pytest.mark.parametrize(("scale", "is_measured"), [("laptop", False), ("paper", True)])
def test_it_is_measured_for_models_of_full_size_alone(tmp_path, scale, is_measured):
    box = Box((80.0,), 64.0)
    fixed = {**TINY, "scale": scale, "model_name_or_path": "gpt-tiny", "weights": "random", "time_limit_s": 0.1}
    suite = write_suite(tmp_path, {"strategy": "single"}, fixed)
    (cell,) = plan_cells(read_suite(suite), box)
    run_cells([cell], tmp_path / "runs", box)
    (attempt,) = read_json(tmp_path / "runs" / cell.id / "sweep.json")["attempts"]
    assert attempt["state"] == "timeout"
    assert ("tflops" in attempt["matmul_rates"]) == is_measured


def test_a_runs_dir_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = run(write_suite(tmp_path, {"strategy": "single"}), tmp_path / "file")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "--runs-dir" in result.stderr


# As when the clock of the box is set back while a sweep is at work: what its runs write is older than the sweep.
CLOCK_SET_BACK = """
import runpy, time
time_now = time.time
time.time = lambda: time_now() + 3600
runpy.run_module("study.cli", run_name="__main__", alter_sys=True)
"""


def test_on_a_terminal_the_display_shows_the_cell_its_step_and_what_is_left(tmp_path):
    fixed = {**TINY, "max_steps": 100, "logging_steps": 1}
    suite = write_suite(tmp_path, {"strategy": "single"}, fixed)
    parent, child = pty.openpty()
    command = [sys.executable, "-c", CLOCK_SET_BACK, "run", str(suite), "--runs-dir", str(tmp_path / "runs")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=child, stdout=subprocess.DEVNULL, stderr=child, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
    ) as process:  # fmt: skip
        os.close(child)
        shown = b""
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
    assert process.returncode == 0
    text = shown.decode()
    assert "0 done, 0 failed, 1 left" in text
    assert "starting" in text
    assert "/100" in text
    assert re.search(r"/100.*0:\d\d:\d\d.*0:\d\d:\d\d", text), "how long it still takes"


def test_the_tail_of_a_growing_file_counts_each_row_once(tmp_path):
    file = tmp_path / "steps.jsonl"
    tail = StepTail(file)
    assert tail.read() == 0
    file.write_text("{}\n{}\n{")
    assert tail.read() == 2
    with file.open("a") as stream:
        stream.write("}\n")
    assert tail.read() == 3


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (3700, "1h01m")])
def test_durations_are_shown_as_people_say_them(seconds, text):
    assert show_duration(seconds) == text


def test_nothing_heavy_is_imported_to_plan_and_to_look(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "all"})
    code = (
        "import sys, json; from study import cli\n"
        f"assert cli.main(['status', {str(suite)!r}, '--runs-dir', {str(tmp_path)!r}]) == 0\n"
        "print(json.dumps([name for name in ('torch', 'numpy', 'transformers', 'pandas') if name in sys.modules]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(said.splitlines()[-1]) == []


def test_an_attempt_record_that_is_damaged_is_begun_anew(tmp_path):
    suite = write_suite(tmp_path, {"strategy": "single"})
    cell: Any
    (cell,) = plan_cells(read_suite(suite), Box((), 16.0))
    write_json(tmp_path / "sweep.json", {"attempts": 3})
    append_attempt(tmp_path, cell, ["accelerate"], {"attempt": 4})
    assert read_json(tmp_path / "sweep.json")["attempts"] == [{"attempt": 4}]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_start_up_is_at_most_half_as_long_again_as_the_bare_libraries(tmp_path):
    """60 cells of two steps, beside a bare `accelerate launch` of a script that imports what a run must import."""
    floor_script = tmp_path / "floor.py"
    floor_script.write_text("import accelerate, deepspeed, torch, transformers\n")
    strategies = ["ddp", "zero1", "zero2", "zero3", "zero2_cpu"]
    suite = write_suite(tmp_path, {"strategy": strategies, "task": ["bert-imdb", "gpt-wikitext"]}, {
        key: value for key, value in TINY.items() if key != "task"
    }, repeats=6)  # fmt: skip
    floors = []
    for strategy in (*strategies, *strategies):
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            f"accelerate_configs/{strategy}.yaml",
        ]
        started = time.monotonic()
        subprocess.run([*command, str(floor_script)], cwd=ROOT, check=True, capture_output=True)
        floors.append(time.monotonic() - started)
    started = time.monotonic()
    result = run(suite, tmp_path / "runs", timeout=7000)
    per_cell = (time.monotonic() - started) / 60
    assert result.returncode == 0, result.stderr
    floor = sum(floors) / len(floors)
    print(f"{per_cell:.2f} s per cell, floor {floor:.2f} s: {per_cell / floor:.2f}x")
    assert per_cell <= 1.5 * floor


def test_a_sweep_whose_folder_was_renamed_stops_before_its_next_cell(tmp_path, monkeypatch, capsys):
    suite = write_suite(tmp_path, {"strategy": ["single"], "seed": [1, 2]})
    cells, root, moved = plan_cells(read_suite(suite), Box((), 16.0)), tmp_path / "runs", tmp_path / "moved"

    def renamed(sweep: Any, cell: Any, order: int) -> Ending:
        root.rename(moved)
        root.mkdir()
        return Ending("ok", "")

    monkeypatch.setattr("study.sweep.execute.Sweep.run_cell", renamed)
    sweep = run_cells(cells, root, Box((), 16.0))
    assert (len(cells), sweep.stopped, sweep.finished) == (2, True, 1)
    assert "was renamed or removed while this sweep ran" in "".join(capsys.readouterr())
    assert list(root.iterdir()) == []
