"""However often a sweep is killed, it ends with the records that an undisturbed one leaves."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from study.records.directory import Run, read_json, read_run, read_status
from sweeps import TINY, processes_of, run, start, write_suite

KILLS = 20
AXES = {"strategy": ["single", "ddp", "zero2", "zero3"], "task": ["bert-imdb", "gpt-wikitext"], "seed": [1, 2]}
# How long a sweep lives, in cells: mostly into one's start-up or its few steps, now and then until some have finished.
# About half a cell is finished per kill, so these outlast the kills.
LIVES = ((0.01, 0.4), (0.4, 1.3), (1.3, 2.2))
SHORT = {**{key: value for key, value in TINY.items() if key != "task"}, "max_steps": 6, "logging_steps": 1}


def records(runs: Path) -> dict[str, Run]:
    return {file.parent.name: read_run(file.parent) for file in sorted((runs / "tiny").glob("*/status.json"))}


def finished(runs: Path) -> dict[str, dict[str, Any]]:
    """The status of every cell that ended ok, as it stands in its file."""
    statuses = {file.parent.name: read_status(file.parent) for file in (runs / "tiny").glob("*/status.json")}
    return {name: status for name, status in statuses.items() if status["state"] == "ok"}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_twenty_kills_at_random_moments_change_no_record(tmp_path):
    suite = write_suite(tmp_path, AXES, SHORT)
    children = psutil.Process().children(recursive=True)
    started = time.monotonic()
    assert run(suite, tmp_path / "undisturbed", timeout=1800).returncode == 0
    cell_s = (time.monotonic() - started) / len(records(tmp_path / "undisturbed"))
    runs = tmp_path / "killed"
    chance = random.Random(20191004)
    done: dict[str, dict[str, Any]] = {}
    kills = 0
    while kills < KILLS:
        sweep = start(suite, runs)
        time.sleep(cell_s * chance.uniform(*chance.choice(LIVES)))
        if sweep.poll() is not None:
            sweep.communicate()
            break
        victim = chance.choice(["sweep", "sweep", "any of its processes", "both at once"])
        family = processes_of(runs)
        if victim != "sweep" and family:
            chance.choice(family).kill()
        if victim != "any of its processes":
            sweep.kill()
        else:
            time.sleep(1)
            sweep.send_signal(signal.SIGKILL)
        sweep.communicate()
        kills += 1
        for name, status in done.items():
            assert finished(runs)[name] == status, f"{name} was finished, and was run again"
        done = finished(runs)
    assert kills == KILLS, "the sweep was done before it had been killed often enough: make its cells longer"
    for _ in range(3):
        last = run(suite, runs, timeout=1800)
        if last.returncode == 0:
            break
    assert last.returncode == 0, last.stderr
    for name, status in done.items():
        assert finished(runs)[name] == status, f"{name} was finished, and was run again"
    expected, found = records(tmp_path / "undisturbed"), records(runs)
    assert list(found) == list(expected)
    for name, record in expected.items():
        assert found[name].state == record.state == "ok"
        assert [row["loss"] for row in found[name].steps] == [row["loss"] for row in record.steps], name
        assert found[name].evals == record.evals
        # A sweep that was killed may not have come to write its own note of a run that had just finished.
        notes = found[name].path / "sweep.json"
        states = [attempt["state"] for attempt in read_json(notes)["attempts"]] if notes.exists() else []
        assert states.count("ok") <= 1
    assert processes_of(tmp_path) == []
    assert psutil.Process().children(recursive=True) == children
