"""A tampered runs directory: never a crash or a wrong number; each rejected file is named with the reason."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from damage import damaged_bytes
from study.records.frames import read_records
from synthetic_records import reseal, write_run


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for strategy in ("single", "ddp", "zero3"):
        write_run(tmp_path / "runs", strategy, name=strategy, started="2026-03-01T10:00:00+00:00")
    return tmp_path / "runs"


def test_mutations_of_a_sealed_record_never_change_a_number(tmp_path: Path) -> None:
    originals, runs = tmp_path / "originals", tmp_path / "runs"
    run, donor = (write_run(originals, strategy, name=strategy) for strategy in ("zero3", "ddp"))
    shutil.copytree(run, runs / "zero3")
    truth = read_records(runs)
    assert truth.runs["run"].tolist() == ["zero3"]
    rng, unharmed = random.Random(1), 0
    for number in range(200):
        # One change of one file: it is gone, that of another run, or damaged.
        file = rng.choice(sorted((runs / "zero3").iterdir()))
        kind = rng.randrange(20)
        if kind == 0:
            file.unlink()
        elif kind == 1:
            shutil.copy(donor / file.name, file)
        else:
            file.write_bytes(damaged_bytes(file.read_bytes(), rng))
        records = read_records(runs)
        if records.refused:
            assert len(records.refused) == 1, number
            assert re.match("zero3.*: .", records.refused[0]), (number, file)
            assert (len(records.runs), len(records.steps)) == (0, 0), (number, file)
        else:
            # The seal is no figure.
            unsealed = (table.runs.drop(columns="sealed") for table in (records, truth))
            pd.testing.assert_frame_equal(*unsealed)
            pd.testing.assert_frame_equal(records.steps, truth.steps)
            unharmed += 1
        shutil.rmtree(runs / "zero3")
        shutil.copytree(run, runs / "zero3")
    assert unharmed < 12


def test_a_copy_under_another_name_is_one_run_and_two_runs_of_one_name_are_two_repeats(study: Path) -> None:
    shutil.copytree(study / "ddp", study / "a-copy")
    shutil.copytree(study / "ddp", study / "deeper" / "ddp")
    write_run(study / "other", "ddp", name="ddp", started="2026-03-02T10:00:00+00:00", time_factor=1.01)
    # Runs with the same failure are no copies of each other.
    for strategy in ("zero2_cpu", "zero3_cpu"):
        write_run(study, strategy, state="oom", reason="CUDA out of memory", started="2026-03-01T10:00:00+00:00")
    records = read_records(study)
    assert records.refused == ("a-copy: is a copy of ddp", "deeper/ddp: is a copy of ddp")
    ddp = records.runs[records.runs["strategy"] == "ddp"]
    assert sorted(zip(ddp["run"], ddp["repeat"], strict=True)) == [("ddp", 1), ("other/ddp", 2)]
    assert set(records.steps["run"]) == {"ddp", "other/ddp", "single", "zero3"}


def test_flags_that_no_run_can_have_are_refused_and_cost_no_other_run(study: Path) -> None:
    """Flags are checked when a row is made, which is after the seal."""
    for key, value in {"sead": 1, "weight_decay": -1.0}.items():
        run = write_run(study, "ddp", name=key)
        file = run / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        reseal(run)
    records = read_records(study)
    assert sorted(records.runs["run"]) == ["ddp", "single", "zero3"]
    unknown, out_of_range = records.refused
    assert unknown.startswith("sead/config.json: unknown key 'sead'")
    assert out_of_range.startswith("weight_decay/config.json: ")
    assert "is out of range" in out_of_range
