"""Offload: what it frees, and what it costs, beside the same stage without offload."""

from __future__ import annotations

import pandas as pd

from study.records.arms import (
    NAN,
    Arm,
    Row,
    fast_memory,
    has_no_gpu,
    moves_state,
    one_value,
    peak_gib,
    ratio_text,
    same_stage,
    state_bytes,
    state_mib,
)
from study.records.frames import Records
from study.records.schema import STATE_PLACES
from study.records.statistics import NOT_TOLD_APART, paired_ratio, percent
from study.report.plots.time import offload
from study.report.questions.comparing import Columns, Comparison, compared, real_arms, side_by_side, table_of, workloads
from study.report.questions.question import Answer, Question, change_text, known, span
from study.report.questions.time import STEP, step_s


def answer(records: Records) -> Answer | None:
    moved = {workload: [arm for arm in found if moves_state(arm)] for workload, found in workloads(records).items()}
    found = {workload: arms for workload, arms in moved.items() if any(len(a.ended) and same_stage(a) for a in arms)}
    if not found:
        return None
    judged = Comparison(found, STEP, same_stage)
    fair = [arm for arms in found.values() for arm in compared(arms) if same_stage(arm)]
    freed, apart = [_freed(arm) for arm in fair], judged.apart(fair)
    no_gpu = any(has_no_gpu(arms[0].beside) for arms in found.values())
    sentence = "No arm with offload can be compared with the same stage without it."
    if any(not pd.isna(share) for share in freed):
        sentence = f"Offload frees {span(freed, percent)} of the model state on the device and "
        if no_gpu:
            to_drive = [share for share, arm in zip(freed, fair, strict=True) if _uses_drive(arm)]
            drive = f"a drive takes {span(to_drive, percent)} of the model state" if to_drive else "no drive takes any"
            sentence = f"Without a GPU the host frees nothing, {drive} out of memory, and offload "
        rest = len(fair) - len(apart)
        if apart:
            changes = span((ratio - 1 for ratio, _ in apart), change_text)
            sentence += f"changes the step time by {changes}"
            sentence += f"; {rest} of {len(fair)} arms are {NOT_TOLD_APART}." if rest else "."
        else:
            sentence += f"has a cost in time {NOT_TOLD_APART}."
    columns: Columns = {
        "Freed": lambda arm: known(round(_freed(arm), 4), percent),
        "Step time, x without": judged.cell("{:.2f}".format),
    }
    notes = ["Beside the same stage without offload.", *judged.notes]
    if no_gpu:
        notes += ["There is no GPU here: what goes to the host stays in the same memory. Only a drive takes it out."]
    return side_by_side(sentence, found, columns, *notes)


def _freed(arm: Arm) -> float:
    """Of the model state that the same stage holds in the memory that is scarce, what this arm does not."""
    places = fast_memory(arm.beside)
    kept = arm.beside[(arm.beside["arm"] == same_stage(arm)) & (arm.beside["status_state"] == "ok")]
    whole = state_bytes(kept, places)
    return 1 - state_bytes(arm.ended, places) / whole if whole > 0 else NAN


def _uses_drive(arm: Arm) -> bool:
    return one_value(arm.ended["offload_optimizer"]) == "nvme"


def _time_ratio(arm: Arm) -> str:
    plain = same_stage(arm)
    return ratio_text(None if plain is None else paired_ratio(arm.beside, STEP, arm.name, plain))


def offload_table(records: Records) -> pd.DataFrame:
    """Each arm with offload, and those of the same stages without it."""
    stages = {(arm.workload, one_value(arm.runs["zero_stage"])) for arm in real_arms(records) if moves_state(arm)}
    return table_of(
        (arm for arm in real_arms(records) if (arm.workload, one_value(arm.runs["zero_stage"])) in stages), _figures
    )


def _figures(arm: Arm) -> Row:
    moved = moves_state(arm)
    return {
        "Stage": one_value(arm.runs["zero_stage"]),
        "Optimizer on": one_value(arm.runs["offload_optimizer"]) or "device",
        "Parameters on": one_value(arm.runs["offload_param"]) or "device",
        **{f"State on {place}, MiB": state_mib(arm, (place,)) for place in STATE_PLACES},
        "Peak memory, GiB": peak_gib(arm)[0],
        "Step time, ms": 1e3 * step_s(arm),
        "Without offload": same_stage(arm) or "not run" if moved else "this row",
        "Time, x without": _time_ratio(arm) if moved else "1",
    }


QUESTION = Question(
    name="offload",
    title="What does offload free, and what does it cost?",
    answer=answer,
    nothing="No workload here has a stage both with offload and without it.",
    tables={"offload": offload_table},
    figures={"offload": offload},
    notebook="offload",
)
