from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from study import cli
from study.host.machine import Machine
from study.records.directory import RunWriter, read_status
from study.records.frames import read_runs, real_runs
from study.records.outcome import Outcome
from study.records.schema import State
from study.report.questions.fits import fits
from study.sweep.execute import append_attempt, note_searches, run_cells
from study.sweep.plan import plan_cells
from study.sweep.search import Search, SearchAnswer, find_answer
from study.sweep.suite_file import read_suite
from sweeps import TINY, write_suite
from synthetic_records import write_run

CPU_BOX = Machine((), 16.0)
LADDER = {"search": {"largest_micro_batch": {"from": 1, "to": 512}}}
UNSIZED = {key: value for key, value in TINY.items() if key not in ("global_batch_size", "max_steps", "train_samples")}


def plan_search(file: Path) -> Search:
    (search,) = plan_cells(read_suite(file), CPU_BOX)
    assert isinstance(search, Search)
    return search


def end_probe(search: Search, root: Path, value: int, state: State, reason: str = "") -> None:
    """Write the record of a run that ended before its first step."""
    place = list(search.rungs).index(value)
    RunWriter(root / search.probe_at(place).id).close(Outcome(state, reason))


def answer_to(states: dict[int, str], last: int, start: int = 0) -> SearchAnswer:
    return find_answer({place: Outcome(state) for place, state in states.items()}, last, str, start)


@pytest.mark.parametrize(
    ("rungs", "start"), [*((rungs, 0) for rungs in (2, 3, 7, 16, 100, 512)), *((10, start) for start in (1, 4, 8, 9))]
)
def test_the_largest_that_fits_is_found_with_few_probes_and_none_twice(rungs, start):
    """A search begins at its guess, and a right one needs two probes."""
    for fitting in {0, 1, rungs - 1, rungs, *random.Random(rungs).sample(range(rungs + 1), min(rungs, 20))}:
        states: dict[int, str] = {}
        while (place := answer_to(states, rungs - 1, start).next) is not None:
            assert place not in states
            # No probe but the first exceeds twice the largest size that fitted.
            largest = max((size + 1 for size, state in states.items() if state == "ok"), default=1)
            assert place + 1 <= 2 * largest or place <= start
            states[place] = "ok" if place < fitting else "oom"
        answer = answer_to(states, rungs - 1)
        assert answer.fits == (fitting - 1 if fitting else None)
        assert answer.too_large == (fitting if fitting < rungs else None)
        assert (answer.stopped_by, next(iter(states))) == (None, start)
        distance = abs(fitting - 1 - start)
        assert len(states) <= 2 + 2 * distance.bit_length()
        assert distance or len(states) == 2 - (fitting == rungs)


@pytest.mark.parametrize("state", ["failed", "timeout", "unsupported"])
def test_a_probe_that_neither_fits_nor_runs_out_of_memory_ends_the_search(state):
    answer = answer_to({0: "ok", 1: "ok", 3: state}, 511)
    assert (answer.next, answer.stopped_by, answer.fits, answer.too_large) == (None, 3, 1, None)
    # A probe that bisection no longer needs does not stop it.
    assert answer_to({0: "ok", 1: "oom", 3: state}, 511).stopped_by is None


def test_a_size_that_fits_above_one_that_does_not_is_named():
    answer = answer_to({0: "ok", 1: "oom", 3: "ok", 7: "oom"}, 511)
    assert (answer.fits, answer.too_large, answer.non_monotonic_fits) == (0, 1, (3,))


def test_a_probe_trains_without_accumulation_on_the_samples_of_a_step_or_with_the_batch_as_given(tmp_path):
    cell = plan_search(write_suite(tmp_path, {"strategy": "zero2"}, UNSIZED, **LADDER)).probe_at(31)
    assert cell.config.batch_plan(2).gradient_accumulation_steps == 1
    assert (cell.config.per_device_train_batch_size, cell.config.global_batch_size) == (32, 64)
    assert (cell.config.train_samples, cell.config.max_steps) == (64, 3)
    fixed = {**UNSIZED, "per_device_train_batch_size": 2}
    names = ["gpt-tiny-1layers", "gpt-tiny", "gpt-tiny-4layers"]
    search = plan_search(write_suite(tmp_path, {"strategy": "zero3"}, fixed, search={"largest_model": names}))
    assert [search.probe_at(place).config.model_name_or_path for place in range(3)] == names
    assert search.probe_at(2).config.global_batch_size == 4


def test_the_dry_run_and_the_status_show_the_next_probe_the_answer_and_why_it_is_not_more(tmp_path, capsys):
    file = write_suite(tmp_path, {"strategy": "zero2"}, UNSIZED, **LADDER)
    search, root = plan_search(file), tmp_path / "runs" / "tiny"

    def lines(command: str, *flags: str) -> list[str]:
        assert cli.main([command, str(file), "--runs_dir", str(tmp_path / "runs"), *flags]) == 0
        return capsys.readouterr().out.splitlines()

    note, command = lines("run", "--dry_run")
    assert note == f"# {search.id} searches 1 to 512: its next probe, which decides those after it"
    assert "--per_device_train_batch_size 1 " in command
    assert lines("status")[-1].split()[6:8] == ["to", "do"]
    end_probe(search, root, 1, "timeout", "ended after its 5 s")
    assert "stopped at 1: timeout, ended after its 5 s" in " ".join(lines("status")[-1].split())
    end_probe(search, root, 1, "oom", "the cgroup's memory limit was reached")
    assert re.search("found .*none, 1 is too large .*1: the cgroup's memory limit was reached", lines("status")[-1])
    assert lines("run", "--dry_run") == [f"# {search.id} is answered: none, 1 is too large"]


def test_retry_repeats_the_record_that_sets_the_limit_and_every_call_a_failed_probe(tmp_path):
    search = plan_search(write_suite(tmp_path, {"strategy": "zero2"}, UNSIZED, **LADDER))

    def sizes(retry: bool, state: State | None = None) -> list[int | None]:
        tried = []
        for probe in search.probes(tmp_path, retry=retry):
            tried.append(probe.config.per_device_train_batch_size)
            if state:
                end_probe(search, tmp_path, 1, state, "no luck")
        return tried

    assert [sizes(False, "failed"), sizes(False, "failed")] == [[1], [1]]
    assert search.what_fits(tmp_path).state == "stopped"
    end_probe(search, tmp_path, 1, "oom")
    assert sizes(False) == []
    # Once repeated, it is the answer.
    assert sizes(True) == [1]


@pytest.mark.parametrize("order", [0, 1])
def test_a_probe_that_another_grid_names_too_is_run_once_and_ends_its_search_if_the_box_cannot_run_it(tmp_path, order):
    same = {"per_device_train_batch_size": 1, "global_batch_size": 2, "train_samples": 2, "max_steps": 3}
    grids = [{"axes": {"strategy": "zero2"}, **LADDER}, {"axes": {"strategy": "zero2"}, "fixed": same}]
    # Without the size of its GPU the search starts at the first rung.
    file, box, runs = tmp_path / "tiny.yaml", Machine((0.0,), 64.0), tmp_path / "runs"
    document = {"name": "tiny", "description": "a test's", "order_seed": order, "grids": grids}
    file.write_text(yaml.safe_dump({**document, "fixed": {**UNSIZED, "world_size": 2}}))
    cells = plan_cells(read_suite(file), box)
    assert run_cells(cells, runs, box).pending == 0
    (search,) = (cell for cell in cells if isinstance(cell, Search))
    assert search.what_fits(runs).state == "stopped"
    (directory,) = [path for path in runs.iterdir() if path.is_dir()]
    assert read_status(directory)["attempt"] == 1


def test_a_probe_answers_every_search_that_includes_it(tmp_path):
    """The second search finds the probe answered and runs nothing; its answer is still in the report."""
    tiny = {**UNSIZED, "strategy": "single", "world_size": 1, "max_steps": 3}
    grids = [
        {"fixed": {"model_name_or_path": "gpt-tiny-1layers"}, "search": {"largest_micro_batch": [1, 2]}},
        {"fixed": {"per_device_train_batch_size": 1}, "search": {"largest_model": ["gpt-tiny-1layers", "gpt-tiny"]}},
    ]
    file, root = tmp_path / "tiny.yaml", tmp_path / "runs"
    file.write_text(yaml.safe_dump({"name": "tiny", "description": "a test's", "fixed": tiny, "grids": grids}))
    cells: list[Any] = plan_cells(read_suite(file), CPU_BOX)
    assert len({search.probe_at(place).id for search in cells for place in (0, 1)}) == 3, "the smallest is shared"
    for search in cells:
        for place, state in ((0, "ok"), (1, "oom")):
            probe = search.probe_at(place)
            if not (root / probe.id).exists():
                flags = {key: value for key, value in probe.requested.to_dict().items() if key != "scale"}
                write_run(root, "single", name=probe.id, config=flags, steps=3, state=state, reason="full")
                append_attempt(root / probe.id, probe, ["accelerate"], {"attempt": 1})

    def answers() -> dict[str, str]:
        return {fit.axis: fit.what_fits.answer for fit in fits(read_runs(root))}

    expected = {search.axis: search.what_fits(root).answer for search in cells}
    # The notes of all searches stay when only some are examined again.
    for noted in (cells, cells[:1]):
        note_searches(noted, root)
        assert answers() == expected
    # A probe that is also a cell of the suite counts as a run.
    assert real_runs(read_runs(root)).runs.empty
    note_searches([*cells, cells[0].probe_at(0)], root)
    assert real_runs(read_runs(root)).runs["run"].tolist() == [cells[0].probe_at(0).id]
