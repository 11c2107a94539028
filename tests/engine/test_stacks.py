"""Cells that train with another release in a separate folder."""

from __future__ import annotations

import pytest

from study import cli
from study.host.machine import detect_machine
from study.host.stacks import VERIFIED
from study.records.directory import read_json, read_run
from study.sweep.execute import run_cells
from study.sweep.launch import run_cell
from sweeps import TINY
from unit.test_stacks import planned


@pytest.mark.long
@pytest.mark.parametrize("stack", ["0.14.5", "0.16.9"])
def test_under_an_older_release_the_trainer_runs_and_the_state_of_each_rank_is_measured(tmp_path, stack):
    assert cli.main(["prepare", "releases", "--only", f"stack={stack}"]) == 0
    for precision in ("fp32", "bf16"):
        cells = planned(tmp_path, {"strategy": ["single", "zero2"], "stack": stack}, {**TINY, "precision": precision})
        run_cells(cells, tmp_path / "runs", detect_machine())
        runs = {cell.strategy: read_run(tmp_path / "runs" / cell.id) for cell in cells}
        if precision == "bf16":
            assert runs["zero2"].state == "unsupported"
            assert f"DeepSpeed {stack} does not have" in runs["zero2"].status["reason"]
            continue
        assert {run.state for run in runs.values()} == {"ok"}
        engine = runs["zero2"].engine
        assert (engine["deepspeed"], engine["precision"]) == (stack, "fp32")
        assert "use_multi_rank_bucket_allreduce" in engine["buckets"]
        states = [rank["state"] for rank in runs["zero2"].memory["ranks"]]
        control = runs["single"].memory["ranks"][0]["state"]["state_bytes"]
        # The optimizer's part of each rank: an fp32 copy of the weights and Adam's moments.
        for state in states:
            params = sum(state["state_bytes"]["params"].values())
            assert params == pytest.approx(sum(control["params"].values()), rel=0.01)
            expected = 0.75 * sum(control["optimizer"].values())
            assert sum(state["state_bytes"]["optimizer"].values()) == pytest.approx(expected, rel=0.01)
        single, arm = ([row["loss"] for row in runs[name].steps] for name in ("single", "zero2"))
        assert arm == pytest.approx(single, rel=1e-5)


@pytest.mark.long
def test_a_forked_cell_has_the_losses_and_the_record_of_a_launched_one(tmp_path):
    stack = VERIFIED[-1][1]
    assert cli.main(["prepare", "releases", "--only", f"stack={stack}"]) == 0
    (cell,) = planned(tmp_path, {"strategy": "zero1", "stack": stack})
    launched = run_cell(cell, tmp_path / "launched")
    launched.write_end(tmp_path / "launched" / cell.id)
    run_cells([cell], tmp_path / "forked", detect_machine())
    runs = [read_run(tmp_path / launcher / cell.id) for launcher in ("launched", "forked")]
    assert [run.state for run in runs] == ["ok", "ok"]
    assert [row["loss"] for row in runs[0].steps] == [row["loss"] for row in runs[1].steps]
    for key in ("stack", "packages"):
        assert runs[0].environment[key] == runs[1].environment[key]
    assert runs[0].environment["stack"]["name"] == stack
    notes = read_json(tmp_path / "forked" / cell.id / "sweep.json")
    assert notes["attempts"][-1]["launcher"] == ("accelerate" if detect_machine().gpus else "forked")
    assert notes["command"] == [word.replace("/launched/", "/forked/") for word in launched.command]
