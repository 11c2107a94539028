from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import synthetic_records
from engines import ROOT
from study.config.errors import RunFailed, UserError, first_line
from study.records import directory
from study.records.directory import RunWriter, end_interrupted_run, is_finished, read_json, read_run, read_status
from study.records.frames import read_records
from study.records.lock import lock_run_directory
from study.records.models import FILES as MODELS
from study.records.models import SummaryRecord
from study.records.outcome import Outcome
from study.records.schema import RecordError, validate
from study.run.checkpoint import save_checkpoint
from study.sweep.cell_outcome import cell_state
from sweeps import contents
from synthetic_records import required_keys, without_seal

STEPS = 6
SEAL = "was changed after the run had closed its record"
DOCUMENTS = ("status", "config", "environment", "engine", "summary", "memory", "traffic")
FILES = (*(f"{name}.json" for name in DOCUMENTS), "steps.jsonl", "evals.jsonl")
with tempfile.TemporaryDirectory() as _folder:
    _RUN = read_run(synthetic_records.write_run(Path(_folder), "zero3_cpu", steps=STEPS))
CONFIG, ENVIRONMENT, ENGINE, SUMMARY = _RUN.config, _RUN.environment, _RUN.engine, _RUN.summary
MEMORY, TRAFFIC, ROWS, EVALS = _RUN.memory, _RUN.traffic, _RUN.steps, _RUN.evals


def write_run(path: Path, steps: int = STEPS, end: bool = True) -> Path:
    writer = RunWriter(path)
    writer.write("config.json", CONFIG)
    writer.write("environment.json", ENVIRONMENT)
    writer.write("engine.json", ENGINE)
    for row in ROWS[:steps]:
        writer.append("steps.jsonl", row)
        for evaluation in EVALS:
            if evaluation["step"] == row["step"]:
                writer.append("evals.jsonl", evaluation)
    writer.flush()
    if end:
        writer.write("memory.json", MEMORY)
        writer.write("traffic.json", TRAFFIC)
        writer.write("summary.json", SUMMARY)
        writer.close(Outcome("ok"))
    return path


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def rewrite(file: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def test_a_run_reads_back_as_it_was_written(run_directory: Path) -> None:
    run = read_run(run_directory)
    assert (run.config, run.environment, run.engine) == (CONFIG, ENVIRONMENT, ENGINE)
    assert (run.summary, run.memory, run.traffic, run.steps, run.evals) == (SUMMARY, MEMORY, TRAFFIC, ROWS, EVALS)
    assert (run.state, run.status["attempt"], is_finished(run_directory)) == ("ok", 1, True)
    assert run.status["started_at"] <= run.status["ended_at"]
    assert {*required_keys(SummaryRecord), "sent_bytes_per_step", "gloo_sent_bytes_per_step"} <= set(SUMMARY)
    # The files of the design and no leftover.
    assert {file.name for file in run_directory.iterdir()} == {*FILES}
    assert {file.stat().st_mode & 0o777 for file in run_directory.glob("*.json")} == {0o644}


def test_a_figure_that_is_not_finite_is_none_and_never_written(tmp_path: Path) -> None:
    figures = [directory.finite_or_none(value) for value in (float("nan"), float("inf"), None, 0, 2.5)]
    assert figures == [None, None, None, 0, 2.5]
    directory.write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        directory.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert read_json(tmp_path / "x.json") == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


KILLED_BEFORE_THE_RENAME = """
import os, signal, sys
from pathlib import Path
from study.records.directory import write_json
file = Path(sys.argv[1])
write_json(file, {"state": "first"})
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_json(file, {"state": "second"})
"""


def test_a_writer_killed_in_the_middle_leaves_a_whole_document_and_a_file_that_the_next_attempt_removes(tmp_path):
    file = tmp_path / "summary.json"
    assert subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_RENAME, file], cwd=ROOT).returncode == -9
    assert read_json(file) == {"state": "first"}
    (leftover,) = (path for path in tmp_path.iterdir() if path != file)
    RunWriter(tmp_path).close(Outcome("failed"))
    assert not leftover.exists()


def test_a_running_run_is_not_interrupted_and_in_no_report(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", end=False)
    with lock_run_directory(path, "the run"):
        assert (cell_state(path).state, cell_state(path).is_final(retry=False)) == ("at work", False)
        assert read_records(tmp_path).refused == (
            "run/status.json: its run is still active; a later report will include it",
        )
    assert cell_state(path).state == "interrupted"
    assert list(read_records(tmp_path).runs["status_state"]) == ["interrupted"]


def test_messages_of_libraries_are_recorded_without_private_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://alice:SECRET@mirror.example:18933/")
    error = OSError("no connection to 'http://alice:SECRET@mirror.example:18933' for\x1b[31m this")
    assert first_line(error) == "no connection to '$HF_ENDPOINT' for\x1b[31m this"
    assert RunFailed(str(error), "ask https://bob:pw@other.example/x").hint == "ask https://other.example/x"
    assert UserError(str(error), "").problem == "no connection to '$HF_ENDPOINT' for\N{REPLACEMENT CHARACTER}[31m this"


def test_a_report_prints_no_private_folder(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", end=False)
    rewrite(path / "status.json", methodcaller("update", {"reason": "no room at /home/alice/secret/run\x1b]0;title"}))
    rewrite(path / "config.json", methodcaller("update", {"data": "/home/alice/secret/local"}))
    row = read_records(tmp_path).runs.iloc[0]
    assert (row["status_reason"], row["data"]) == ("no room at run\N{REPLACEMENT CHARACTER}]0;title", "local")
    assert cell_state(path).reason == "no room at /home/alice/secret/run\N{REPLACEMENT CHARACTER}]0;title"


def test_a_row_that_was_cut_off_is_dropped_unless_the_run_succeeded(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=4, end=False)
    with (path / "steps.jsonl").open("a") as rows:
        rows.write('{"step": 5, "loss"')
    assert read_run(path).steps == ROWS[:4]
    finished = write_run(tmp_path / "finished")
    text = (finished / "steps.jsonl").read_text()
    (finished / "steps.jsonl").write_text(text.rstrip("\n"))
    with pytest.raises(RecordError, match=r"steps\.jsonl: its last line is cut off"):
        read_run(finished)


def test_an_attempt_is_counted_and_starts_from_nothing_after_any_other(run_directory: Path) -> None:
    RunWriter(run_directory)
    run = read_run(run_directory)
    assert (run.state, run.status["attempt"]) == ("interrupted", 2)
    assert (run.steps, run.evals, run.engine, run.summary, run.memory, run.traffic) == ([], [], {}, {}, {}, {})
    for name in ("status.json", "steps.jsonl", "summary.json", ".summary.json.k1lled_0"):
        (run_directory / name).write_text('{"torn')
    (run_directory / ".summary.json.bak").write_text("a user's")
    write_run(run_directory)
    assert read_run(run_directory).status["attempt"] == 1
    assert [file.name for file in run_directory.iterdir() if file.name.startswith(".")] == [".summary.json.bak"]


def test_a_moved_run_leaves_the_record_and_the_checkpoints_of_its_successor_alone(tmp_path: Path) -> None:
    first = RunWriter(tmp_path / "run")
    first.append("steps.jsonl", ROWS[0])
    first.flush()
    (tmp_path / "run").rename(tmp_path / "moved")
    successor = write_run(tmp_path / "run")
    (successor / "checkpoints" / "step_0000004").mkdir(parents=True)
    (successor / "checkpoints" / "step_0000004" / "scheduler.bin").write_text("another run's")
    before = contents(successor)
    run: Any = SimpleNamespace(output_dir=successor, record=first, launch=None)
    accelerator: Any = None
    with pytest.raises(RunFailed, match="was moved or replaced during this run"):
        save_checkpoint(run, accelerator, None, 4)
    first.append("evals.jsonl", EVALS[0])
    first.close(Outcome("failed", "why"))
    assert contents(successor) == before
    assert (read_run(tmp_path / "moved").state, len(read_run(tmp_path / "moved").steps)) == ("failed", 1)


def test_the_first_reason_of_a_failed_run_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = RunWriter(path)
    writer.set_crash_hint("from the checkpoint")
    assert read_status(path)["hint"] == "from the checkpoint"
    end_interrupted_run(path, Outcome("oom", "rank 1: out of memory", "use less"))
    writer.set_crash_hint("from a later one")
    first = read_status(path)
    assert (first["state"], first["reason"], first["hint"]) == ("oom", "rank 1: out of memory", "use less")
    end_interrupted_run(path, Outcome("interrupted", "ended by SIGTERM", ""))
    assert read_status(path) == first
    # A rank may fail before there is a record.
    end_interrupted_run(tmp_path / "none", Outcome("failed", "reason", ""))
    assert not (tmp_path / "none").exists()
    # The next attempt writes its own reason, and a run that has ended stays so.
    write_run(path, steps=1, end=False)
    end_interrupted_run(path, Outcome("failed", "another reason", ""))
    assert (read_status(path)["reason"], read_status(path)["attempt"]) == ("another reason", 2)
    end_interrupted_run(write_run(path), Outcome("failed", "teardown", ""))
    assert read_run(path).state == "ok"


def test_ranks_that_fail_at_once_leave_one_complete_reason(tmp_path: Path) -> None:
    for number in range(20):
        path, barrier = write_run(tmp_path / str(number), steps=1, end=False), threading.Barrier(4)

        def fail(rank: int, path: Path = path, barrier: threading.Barrier = barrier) -> dict[str, Any]:
            barrier.wait()
            end_interrupted_run(path, Outcome("failed", f"rank {rank}", f"hint {rank}"))
            return read_status(path)

        with ThreadPoolExecutor(4) as pool:
            statuses = list(pool.map(fail, range(4)))
        assert len({status["reason"] for status in statuses if status["ended_at"] is not None}) == 1


# Invalid records. Each entry damages one file, and the error must name that file.


def assert_refused(path: Path, file: str, reason: str = "") -> None:
    with pytest.raises(RecordError) as refusal:
        read_run(path)
    assert (refusal.value.file.name, reason in refusal.value.reason) == (file, True)
    # The seal detects every change: the tested check must fail for its specific reason.
    assert (SEAL in reason) == (SEAL in refusal.value.reason)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_torn_or_no_text_is_refused(name: str, run_directory: Path) -> None:
    file = run_directory / name
    content = file.read_bytes()
    for damaged in (
        content[:-3],
        b"",
        b"[]\n",
        b"3\n",
        b"null\n",
        b"{}\n",
        b'"x"\n',
        b"\xff\xfe{}",
        b"\0" * 50,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
    ):
        file.write_bytes(damaged)
        # An empty list of rows, and empty flags or an empty environment, are valid documents.
        empty = (name.endswith("l") and not damaged) or (name[:3] in ("con", "env") and damaged == b"{}\n")
        assert_refused(run_directory, name, SEAL if empty else "")
    file.unlink()
    assert_refused(run_directory, name, "is missing")
    file.mkdir()
    assert_refused(run_directory, name, "is not readable")


WRONG = yaml.safe_load((ROOT / "tests" / "data" / "wrong_records.yaml").read_text())


def test_a_key_or_a_value_that_no_run_writes_is_refused(run_directory: Path) -> None:
    shutil.copytree(run_directory, run_directory.parent / "other")
    profile = synthetic_records.PROFILE | {"device": "cpu", "steps": [4, 5, 6]}
    (run_directory / "profile.json").write_text(json.dumps(profile))
    for name, values in WRONG["documents"].items():
        file = run_directory / name
        before = file.read_text()
        changes = [(key, methodcaller("update", {key: value})) for key, several in values.items() for value in several]
        for key, change in [*changes, *((key, methodcaller("pop", key)) for key in required_keys(MODELS[name]))]:
            rewrite(file, change)
            assert_refused(run_directory, name, key)
            file.write_text(before)
    for name, changes in WRONG["rows"].items():
        file = run_directory / name
        first, second, *rest = (before := file.read_text()).splitlines()
        for change in changes:
            file.write_text("\n".join([first, json.dumps(json.loads(second) | change), *rest]))
            assert_refused(run_directory, name)
        file.write_text(before)
    # It hides no other record.
    (run_directory / "summary.json").write_text("{}")
    records = read_records(run_directory.parent)
    assert (list(records.runs["run"]), len(records.refused)) == (["other"], 1)


@pytest.mark.parametrize(("name", "content", "reason"), WRONG["reasons"])
def test_a_refusal_says_in_a_line_what_is_wrong_where_and_what_is_right(name: str, content: Any, reason: str) -> None:
    with pytest.raises(RecordError) as refusal:
        validate(Path(name), content)
    assert (refusal.value.file, refusal.value.reason) == (Path(name), reason)


@pytest.mark.parametrize("token", ["NaN", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_refused(token: str, run_directory: Path) -> None:
    rows = run_directory / "steps.jsonl"
    rows.write_text(re.sub(r'(loss": )[\d.]+', rf"\g<1>{token}", rows.read_text(), count=1))
    assert_refused(run_directory, rows.name, "row 1")


def test_a_successful_run_without_a_seal_is_refused(run_directory: Path) -> None:
    without_seal(run_directory)
    assert_refused(run_directory, "status.json", "its seal is missing")
    # A killed run cannot close its record.
    rewrite(run_directory / "status.json", methodcaller("update", {"state": "interrupted", "ended_at": None}))
    assert read_run(run_directory).steps == ROWS
