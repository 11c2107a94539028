from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from study.records.frames import read_records
from synthetic_records import as_never_started, reseal, write_run


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for strategy in ("single", "ddp", "zero3"):
        write_run(tmp_path / "runs", strategy, name=strategy, started="2026-03-01T10:00:00+00:00")
    return tmp_path / "runs"


def test_a_damaged_torn_or_missing_file_costs_its_sealed_record_and_no_other(study: Path) -> None:
    for file in sorted((study / "zero3").iterdir()):
        content, middle = file.read_bytes(), file.stat().st_size // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:middle], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            records = read_records(study)
            (reason,) = records.refused
            assert re.match(r"zero3(/[\w.]+)?: .", reason), (file, damaged)
            assert sorted(records.runs["run"]) == ["ddp", "single"]
        file.write_bytes(content)


def test_a_copy_under_another_name_is_one_run_and_two_runs_of_one_name_are_two_repeats(study: Path) -> None:
    shutil.copytree(study / "ddp", study / "a-copy")
    shutil.copytree(study / "ddp", study / "deeper" / "ddp")
    write_run(study / "other", "ddp", name="ddp", started="2026-03-02T10:00:00+00:00", time_factor=1.01)
    # Runs with the same failure before their engine started are no copies of each other.
    for strategy in ("zero2_cpu", "zero3_cpu"):
        as_never_started(write_run(study, strategy, state="oom", reason="x", started="2026-03-01T10:00:00+00:00"))
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
