"""A tampered runs directory: never a crash or a wrong number; each rejected file is named with the reason."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pandas as pd
import pytest

from damage import damaged_bytes
from study.records.frames import Records, read_records
from synthetic_records import reseal, write_run

STRATEGIES = ("single", "ddp", "zero3")


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for strategy in STRATEGIES:
        write_run(tmp_path / "runs", strategy, name=strategy, started="2026-03-01T10:00:00+00:00")
    return tmp_path / "runs"


def believed(records: Records) -> list[str]:
    return sorted(records.runs["run"])


def test_mutations_of_a_sealed_record_never_change_a_number(tmp_path: Path) -> None:
    originals, runs = tmp_path / "originals", tmp_path / "runs"
    run, donor = (write_run(originals, strategy, name=strategy) for strategy in ("zero3", "ddp"))
    shutil.copytree(run, runs / "zero3")
    truth = read_records(runs)
    assert believed(truth) == ["zero3"]
    rng = random.Random(1)
    unharmed = 0
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
            place, _, reason = records.refused[0].partition(": ")
            assert place.startswith("zero3"), (number, file)
            assert reason, (number, file)
            assert records.runs.empty, (number, file)
            assert records.steps.empty, (number, file)
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
    records = read_records(study)
    assert records.refused == ("a-copy: is a copy of ddp", "deeper/ddp: is a copy of ddp")
    ddp = records.runs[records.runs["strategy"] == "ddp"]
    assert sorted(zip(ddp["run"], ddp["repeat"], strict=True)) == [("ddp", 1), ("other/ddp", 2)]
    assert set(records.steps["run"]) == {"ddp", "other/ddp", "single", "zero3"}


def test_runs_with_the_same_failure_are_no_copies_of_each_other(tmp_path: Path) -> None:
    for strategy in ("zero2_cpu", "zero3_cpu"):
        write_run(tmp_path, strategy, state="oom", reason="CUDA out of memory", started="2026-03-01T10:00:00+00:00")
    records = read_records(tmp_path)
    assert records.refused == ()
    assert sorted(records.runs["strategy"]) == ["zero2_cpu", "zero3_cpu"]


def test_flags_that_no_run_can_have_are_refused_and_cost_no_other_run(study: Path) -> None:
    """Flags are checked when a row is made, which is after the seal."""
    flags = {"max_steps": 10**25, "train_samples": 2**60, "weight_decay": -1.0, "sead": 1}
    for key, value in flags.items():
        run = write_run(study, "ddp", name=key)
        file = run / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        reseal(run)
    records = read_records(study)
    assert believed(records) == ["ddp", "single", "zero3"]
    assert sorted(refused.split(": ")[0] for refused in records.refused) == sorted(
        f"{key}/config.json" for key in flags
    )
    assert all("is out of range" in refused or "unknown key 'sead'" in refused for refused in records.refused)
