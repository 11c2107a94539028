"""ZeRO beside what else divides a model or its samples: what a rank holds, keeps for its backward pass, and sends."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from study.config.strategies import WITH_COPIES, WITH_TEAMS
from study.host.memory import MIB
from study.records.arms import NAN, Arm, arms, one_value, state_mib
from study.records.frames import Records, real, virtual
from study.report.questions.comparing import Columns, by_arms, ranks, side_by_side, table_of
from study.report.questions.question import Answer, Question
from study.report.questions.traffic import by_collective, sent_mib

_STAGES = ("zero1", "zero2", "zero3")


def answer(records: Records) -> Answer | None:
    found: dict[str, list[Arm]] = {}
    for arm in _arms(records):
        if len(arm.ended):
            found.setdefault(arm.workload, []).append(arm)
    # The arms on fewer ranks are in the details.
    shown = {workload: [arm for arm in of_it if ranks(arm) in (1, _most(of_it))] for workload, of_it in found.items()}
    sentences = [said for workload in by_arms(shown) if (said := _sentence(workload, shown[workload]))]
    if not sentences:
        return None
    columns: Columns = {
        "State, MiB": state_mib, "Kept for backward, MiB": _held, "Ring bytes (NCCL), MiB": sent_mib,
        "Calls": lambda arm: arm.median("comm_calls_per_step"),
    }  # fmt: skip
    return side_by_side(sentences[0], shown, columns, *_NOTES)


_NOTES = (
    "State: parameters, gradients and optimizer states of the fullest rank. Kept for backward: what its forward pass of"
    " one micro-batch leaves allocated, without parameters that stay gathered.",
    "All arms of a workload take the same samples in each step.",
)


def _arms(records: Records) -> Iterator[Arm]:
    """Of workloads in which a neighbour of ZeRO ran; real ones, or virtual ones where there are no real ones."""
    for runs in (real(records).runs, virtual(records).runs):
        found = [arm for arm in arms(runs) if arm.beside["strategy"].isin([*WITH_COPIES, *WITH_TEAMS]).any()]
        if found:
            yield from found
            return


def _most(of_it: list[Arm]) -> int:
    return max(ranks(arm) for arm in of_it)


def _held(arm: Arm, figure: str = "forward_holds_bytes") -> float:
    return NAN if _was_counted_wrong(arm) else arm.median(figure) / MIB


# Until then what FSDP's root had gathered was counted in neither, and a part that is the whole as gathered.
_COUNTED_RIGHT_SINCE = "2026-11-23T09"


def _was_counted_wrong(arm: Arm) -> bool:
    shares = ranks(arm) // int(one_value(arm.runs["team_ranks"]) or 1)
    is_whole = one_value(arm.runs["zero_stage"]) == 3 and shares == 1
    is_old = bool((arm.ended["status_started_at"] < _COUNTED_RIGHT_SINCE).any())
    return is_old and (is_whole or one_value(arm.runs["distributed_type"]) == "FSDP")


def _sentence(workload: str, of_it: list[Arm]) -> str | None:
    """What of ZeRO's stages and its neighbours has least, where some of both were measured."""
    many = [arm for arm in of_it if ranks(arm) > 1]
    names = {str(one_value(arm.runs["strategy"])) for arm in many}
    if not names & set(_STAGES) or not names & {*WITH_COPIES, *WITH_TEAMS}:
        return None
    said = []
    for figure, words in ((state_mib, "holds least state"), (_held, "keeps least for its backward pass"),
                          (sent_mib, "sends the fewest ring bytes (NCCL)")):  # fmt: skip
        measured = {arm.name: value for arm in many if not pd.isna(value := figure(arm))}
        if measured:
            least = min(measured, key=lambda name: measured[name])
            said.append(f"{words} under `{least}` ({measured[least]:.3g} MiB)")
    return f"{workload}: of {_most(of_it)} ranks each {', '.join(said)}." if said else None


def neighbours_table(records: Records) -> pd.DataFrame:
    def figures(arm: Arm) -> dict[str, object]:
        return {
            "Ranks": ranks(arm),
            **{f"{words}, MiB": sum(arm.median(f"{kind}_bytes_{place}") for place in ("device", "host")) / MIB
               for kind, words in (("params", "Parameters"), ("grads", "Gradients"), ("optimizer", "Optimizer"))},
            "Buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Kept for backward, MiB": _held(arm),
            "Still gathered then, MiB": _held(arm, "forward_gathers_bytes"),
            "Ring bytes (NCCL), MiB": sent_mib(arm),
            "Calls": arm.median("comm_calls_per_step"),
            "Payload by collective, MiB": by_collective(arm),
        }  # fmt: skip

    return table_of(_arms(records), figures)


QUESTION = Question(
    name="neighbours",
    title="What do ZeRO's neighbours hold and send?",
    answer=answer,
    nothing="No run here has ZeRO's stages beside tensor, sequence, context or hybrid sharding.",
    tables={"neighbours": neighbours_table},
    figures={},
    notebook="neighbours",
)
