"""What a finished run says twice must be the same both times: a damaged figure seldom stays plausible in both.

For records without a seal, which older versions of the study closed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from study.record.schema import PEAKS, STATE_KINDS, STATE_PLACES, SUMMARY_MAY_HAVE, RecordError

if TYPE_CHECKING:
    from study.record.directory import Run


def check_agreement(run: Run) -> None:
    for file, figures in _said_elsewhere(run).items():
        for key, other in figures.items():
            if key in SUMMARY_MAY_HAVE and key not in run.summary:
                continue
            value: Any = run.summary
            for part in key.split("."):
                value = value[part]
            if value != other and (value is None or other is None or not math.isclose(value, other, rel_tol=1e-9)):
                raise RecordError(run.path / "summary.json", f"{key} is {value}, and {file} says {other}")
    for row in run.steps:
        if row["loss"] is None and not run.engine["virtual"]:
            raise RecordError(run.path / "steps.jsonl", f"step {row['step']} of a run that ended ok has no loss")
    # The last steps of a run, and as many as were asked for; older records know neither the flag nor the file.
    asked = run.config.get("profile_steps") or 0
    if type(asked) is not int or asked < 0:
        raise RecordError(run.path / "config.json", f"profile_steps is {asked!r}, not a whole number from 0 up")
    profiled, last = run.profile.get("steps", []), [row["step"] for row in run.steps[-asked:]] if asked else []
    if profiled != last:
        reason = f"tells of steps {profiled}, and the last {asked} were asked for"
        raise RecordError(run.path / "profile.json", reason[:300])


def _said_elsewhere(run: Run) -> dict[str, dict[str, float | None]]:
    """By file, what it says of figures of summary.json."""
    first, last = (run.steps[0], run.steps[-1]) if run.steps else ({}, {})
    evaluation = run.evals[-1] if run.evals else {}
    collectives, was_watched = run.traffic["collectives"].values(), run.traffic["step"] is not None
    return {
        "steps.jsonl": {
            "steps": len(run.steps), "tokens": sum(row["tokens"] for row in run.steps),
            "train_loss_first": first.get("loss"), "train_loss_final": last.get("loss"),
            "steps_skipped": sum("skipped" in row for row in run.steps),
        },
        "evals.jsonl": {
            "eval_loss_final": evaluation.get("eval_loss"), "eval_accuracy": evaluation.get("accuracy"),
            "eval_perplexity": evaluation.get("perplexity"),
        },
        "traffic.json": {
            key: sum(collective[figure] for collective in collectives) if was_watched else None
            for key, figure in (("comm_bytes_per_step", "payload_bytes"), ("comm_calls_per_step", "calls"),
                                ("sent_bytes_per_step", "wire_bytes_per_rank"))
        },
        "memory.json": _said_by_ranks(run.memory["ranks"]),
    }  # fmt: skip


def _said_by_ranks(ranks: list[dict[str, Any]]) -> dict[str, float | None]:
    phases = [phase for rank in ranks for phase in rank["phases"].values()]
    said = {key: _largest(phase[figure] for phase in phases) for key, figure in PEAKS.items()}
    # The study's own loops keep the rest per rank; other writers need not.
    states = [rank["state"]["state_bytes"] for rank in ranks if rank["state"] is not None]
    if states and len(states) == len(ranks):
        for kind, place in itertools.product(STATE_KINDS, STATE_PLACES):
            said[f"state_bytes_per_rank.{kind}.{place}"] = _largest(state[kind][place] for state in states)
    time = (ranks[0].get("time") if ranks else None) or {}
    measured = ("step_time_s_median", "step_time_s_p10", "step_time_s_p90")
    return said | {key: time[key] for key in measured if key in time}


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
