"""Sessions of the autopsy with the real Trainer: their engine, weights and losses, and their time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from study.experiments.autopsy.contrasts import Autopsy, read_sessions
from study.experiments.autopsy.design import AA, CORRECTED, SCALES, plan
from study.experiments.autopsy.run import SESSIONS, open_folder, run_sessions

TINY = dataclasses.replace(
    SCALES["laptop"], train_samples=96, eval_samples=8, wide_samples=16, eval_steps=3, logging_steps=3, limit_s=120
)


@pytest.mark.long
def test_sessions_have_the_engine_the_weights_and_the_losses_of_their_cells(tmp_path: Path) -> None:
    """The listing, the corrected protocol, ZeRO first in one process with carried weights, and a refused dictionary."""
    names = (
        "1-factorial-ewpob",
        "1-corrected-EWPOB",
        "1-factorial-EwpOb",
        "1-aa-eWPOB",
        "0-gate-given-with-a-launchers-environment",
    )
    sessions = [session for session in plan(TINY, (1,)) if session.id in names]
    assert len(sessions) == len(names)
    with open_folder(tmp_path, TINY):
        assert run_sessions(tmp_path, dataclasses.replace(TINY, lanes=1), sessions, lambda _line: None) == 0
    ran = read_sessions(tmp_path)
    study, arms = Autopsy(ran), ran.set_index(["session", "arm"]).sort_index()

    # As printed, the engine is off although the arguments request it.
    zero = arms.loc[("1-factorial-ewpob", "zero")]
    assert (zero["arguments_say_deepspeed"], zero["deepspeed_enabled"]) == (True, False)
    wrapped = (zero["wrapped_class"], json.loads(zero["optimizer_classes"])[-1])
    assert wrapped == ("BertForSequenceClassification", "AdamW")
    assert study.engine_was_on() == (0, 2)

    # Corrected, it is on and trains to the same loss from the same weights.
    zero, standard = (arms.loc[("1-corrected-EWPOB", arm)] for arm in ("zero", "standard"))
    assert (zero["deepspeed_enabled"], zero["zero_stage"], zero["clips_at"]) == (True, 3, 1.0)
    assert json.loads(zero["optimizer_classes"])[-1] == "DeepSpeedCPUAdam"
    assert zero["eval_loss"] == pytest.approx(standard["eval_loss"], rel=1e-4)
    assert study.ratio("eval_loss", "corrected", CORRECTED).n == 1
    assert zero["start_weights_abs_sum"] == standard["start_weights_abs_sum"]

    # Carried weights are those that the first arm ended with.
    for session in ("1-factorial-ewpob", "1-factorial-EwpOb"):
        assert arms.loc[session]["start_weights_abs_sum"].nunique() == 2
    carried = arms.loc[("1-factorial-EwpOb", "standard")]
    assert (carried["start"], carried["deepspeed_enabled"]) == ("file", False)

    # Two equal arms have one loss, and each phase its time.
    assert list(study.cell_gaps("train_loss", "aa", AA)) == [0.0]
    for _, arm in ran[ran["arm"].notna()].iterrows():
        parts = sum(arm[f"{phase}_s"] for phase in ("setup", "warm_up", "train", "eval", "save"))
        assert 0 < parts <= arm["whole_s"] + 1e-3
        assert arm["host_peak_reset"] <= arm["host_peak_never_reset"]

    # A refused dictionary is a row with its reason.
    (gate,) = ran[ran["kind"] == "gate"].to_dict("records")
    assert gate["state"] == "failed"
    assert "train_micro_batch_size_per_gpu" in gate["reason"]


def test_a_session_past_its_time_limit_is_a_row_and_its_processes_end(tmp_path, monkeypatch):
    def processes() -> Iterator[int]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("AUTOPSY_TEST") == str(tmp_path):
                    yield process.pid

    monkeypatch.setenv("AUTOPSY_TEST", str(tmp_path))
    (session,) = [session for session in plan(TINY, (1,)) if session.id == "1-corrected-EWPOB"]
    with open_folder(tmp_path, TINY):
        assert run_sessions(tmp_path, dataclasses.replace(TINY, limit_s=1), [session], lambda _line: None) == 1
    record = json.loads((tmp_path / SESSIONS / f"{session.id}.json").read_text())
    assert (record["state"], record["arms"]) == ("timeout", [])
    deadline = time.monotonic() + 5
    while running := list(processes()):
        assert time.monotonic() < deadline, running
        time.sleep(0.05)
