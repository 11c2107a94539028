"""Facts of records: keys of new ones, read from the words of older ones in study/records/older.py."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from study.config.errors import NotFinite
from study.config.places import REPOSITORY
from study.records.directory import RunWriter, read_status
from study.records.frames import read_parquet, read_records, read_runs_table, write_parquet
from study.records.older import read_reason, read_warnings
from study.records.outcome import Outcome, outcome_from_exception, outcome_from_log, outcome_from_status
from synthetic_records import write_run


def test_a_status_keeps_the_facts_of_its_outcome_and_needs_no_words(tmp_path: Path) -> None:
    ending = outcome_from_exception(NotFinite("the loss is NaN", "lower it", step=3))
    assert (ending.state, ending.cause, ending.not_finite_step) == ("failed", "not finite", 3)
    RunWriter(tmp_path).close(ending)
    assert outcome_from_status(read_status(tmp_path)) == ending
    full = outcome_from_log("OSError: [Errno 28] No space left on device")
    assert full is not None
    assert full.cause == "disk"


@pytest.mark.parametrize(
    ("reason", "cause", "step"),
    [
        ("the loss is NaN at step 12", "not finite", 12),
        ("the evaluation loss is infinite: the step before it left unusable weights", "not finite", None),
        ("3 of 3 optimizer steps were skipped because their gradients were not finite", "not finite", None),
        ("torch-2.1 is not installable: no wheel", "not installable", None),
        ("the device's memory ran out (CUDA out of memory)", "device memory", None),
        ("exit status 1: it printed nothing", None, None),
        (None, None, None),
    ],
)
def test_an_older_record_says_its_cause_in_words(reason: str | None, cause: str | None, step: int | None) -> None:
    assert read_reason(reason) == (cause, step)


def test_a_new_record_is_not_read_by_its_words() -> None:
    reason = "the loss is NaN at step 3"
    status = {"state": "failed", "reason": reason, "hint": "", "cause": None, "not_finite_step": None}
    assert outcome_from_status(status) == Outcome("failed", reason)


def test_committed_reports_of_before_the_column_have_the_causes() -> None:
    runs = read_runs_table(REPOSITORY / "reports" / "releases")
    diverged = runs[runs["status_cause"] == "not finite"]
    assert len(diverged) == 41
    assert diverged["status_not_finite_step"].value_counts().to_dict() == {1: 30, 2: 9, 3: 1, 6: 1}


def test_warnings_of_older_records_become_columns(tmp_path: Path) -> None:
    rounded = "DeepSpeed keeps the parameters on NVMe as bfloat16: they are rounded every step"
    alone = "with one rank stage 3 shards nothing"
    assert read_warnings([rounded, alone, "resumed: x"]) == (["resumed: x"], "bfloat16")
    old = write_run(tmp_path / "old", "zero3", ranks=1, engine={"warnings": [rounded, alone]})
    new = write_run(tmp_path / "new", "zero3", ranks=1, engine={"nvme_param_dtype": "bfloat16"})
    for runs in (read_records(path.parent).runs for path in (old, new)):
        # The note is a fact of the stage and the ranks.
        assert runs["notes"].tolist() == [alone]
        assert runs["confounded"].tolist() == [f"precision: {rounded}"]
        assert runs["nvme_param_dtype"].tolist() == ["bfloat16"]


def test_a_parquet_file_of_before_the_columns_is_read(tmp_path: Path) -> None:
    records = read_parquet(REPOSITORY / "reports" / "gpu")
    assert records.runs["status_cause"].value_counts().to_dict() == {"device memory": 3}
    write_parquet(records, tmp_path)
    pd.testing.assert_frame_equal(read_parquet(tmp_path).runs, records.runs)
