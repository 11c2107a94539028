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


def same_figures(records: Records, truth: Records) -> None:
    """Compare everything that a report is made of; the seal is no figure."""
    pd.testing.assert_frame_equal(records.runs.drop(columns="sealed"), truth.runs.drop(columns="sealed"))
    pd.testing.assert_frame_equal(records.steps, truth.steps)


def mutate(run: Path, donor: Path, rng: random.Random) -> str:
    """Apply one change to one file of a run and return the file's name."""
    file = rng.choice(sorted(run.iterdir()))
    kind = rng.randrange(20)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        shutil.copy(donor / file.name, file)
    else:
        file.write_bytes(damaged_bytes(file.read_bytes(), rng))
    return file.name


def test_mutations_of_a_sealed_record_never_change_a_number(tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    run, donor = (write_run(originals, strategy, name=strategy) for strategy in ("zero3", "ddp"))
    runs = tmp_path / "runs"
    shutil.copytree(run, runs / "zero3")
    truth = read_records(runs)
    assert believed(truth) == ["zero3"]
    rng = random.Random(1)
    unharmed = 0
    for number in range(200):
        name = mutate(runs / "zero3", donor, rng)
        records = read_records(runs)
        if records.refused:
            assert len(records.refused) == 1, number
            file, _, reason = records.refused[0].partition(": ")
            assert file.startswith("zero3"), (number, name)
            assert reason, (number, name)
            assert records.runs.empty, (number, name)
            assert records.steps.empty, (number, name)
        else:
            same_figures(records, truth)
            unharmed += 1
        for leftover in (runs / "zero3").iterdir():
            leftover.unlink()
        shutil.copytree(run, runs / "zero3", dirs_exist_ok=True)
    assert unharmed < 12


def test_a_copy_under_another_name_is_one_run(study: Path) -> None:
    shutil.copytree(study / "ddp", study / "a-copy")
    shutil.copytree(study / "ddp", study / "deeper" / "ddp")
    records = read_records(study)
    assert believed(records) == ["ddp", "single", "zero3"]
    assert records.refused == ("a-copy: is a copy of ddp", "deeper/ddp: is a copy of ddp")


def test_two_runs_of_one_name_are_two_repeats(study: Path) -> None:
    write_run(study / "other", "ddp", name="ddp", started="2026-03-02T10:00:00+00:00", time_factor=1.01)
    records = read_records(study)
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
