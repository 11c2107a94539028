"""What a finished run says twice must be the same both times: a damaged figure seldom stays plausible in both.

For records without a seal, which older versions of the study closed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from study.record.schema import PEAKS, STATE_KINDS, STATE_PLACES, RecordError

if TYPE_CHECKING:
    from study.record.directory import Run

Said = tuple[str, str, float | None]


def check_agreement(run: Run) -> None:
    for key, file, other in itertools.chain(_said_by_rows(run), _said_by_traffic(run), _said_by_ranks(run)):
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


def _said_by_rows(run: Run) -> Iterator[Said]:
    first, last = (run.steps[0], run.steps[-1]) if run.steps else ({}, {})
    evaluation = run.evals[-1] if run.evals else {}
    yield "steps", "steps.jsonl", len(run.steps)
    yield "tokens", "steps.jsonl", sum(row["tokens"] for row in run.steps)
    yield "train_loss_first", "steps.jsonl", first.get("loss")
    yield "train_loss_final", "steps.jsonl", last.get("loss")
    yield "eval_loss_final", "evals.jsonl", evaluation.get("eval_loss")
    yield "eval_accuracy", "evals.jsonl", evaluation.get("accuracy")
    yield "eval_perplexity", "evals.jsonl", evaluation.get("perplexity")


def _said_by_traffic(run: Run) -> Iterator[Said]:
    collectives = run.traffic["collectives"].values()
    for key, figure in (("comm_bytes_per_step", "payload_bytes"), ("comm_calls_per_step", "calls")):
        total = sum(collective[figure] for collective in collectives)
        yield key, "traffic.json", None if run.traffic["step"] is None else total


def _said_by_ranks(run: Run) -> Iterator[Said]:
    ranks = run.memory["ranks"]
    phases = [phase for rank in ranks for phase in rank["phases"].values()]
    for key, figure in PEAKS.items():
        yield key, "memory.json", _largest(phase[figure] for phase in phases)
    # The study's own loops keep the rest per rank; other writers need not.
    states = [rank["state"]["state_bytes"] for rank in ranks if rank["state"] is not None]
    if states and len(states) == len(ranks):
        for kind, place in itertools.product(STATE_KINDS, STATE_PLACES):
            yield (
                f"state_bytes_per_rank.{kind}.{place}",
                "memory.json",
                _largest(state[kind][place] for state in states),
            )
    time = (ranks[0].get("time") if ranks else None) or {}
    for key in ("step_time_s_median", "step_time_s_p10", "step_time_s_p90"):
        if key in time:
            yield key, "memory.json", time[key]


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
