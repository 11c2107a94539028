"""What moving state off the device frees there, and what it costs, beside the same stage without offload."""

from __future__ import annotations

import pandas as pd

from study.record.schema import STATE_PLACES
from study.report.plots.time import offload
from study.report.questions.cells import change_text, known, span
from study.report.questions.comparing import (
    Columns,
    certainty,
    compared,
    moves_state,
    real_arms,
    same_stage,
    side_by_side,
    table_of,
    workloads,
)
from study.report.questions.question import Answer, Question
from study.report.questions.time import STEP
from study.report.records.arms import (
    NAN,
    Arm,
    Row,
    has_no_gpu,
    one_value,
    peak_gib,
    ratio_text,
    state_bytes,
    state_mib,
)
from study.report.records.frames import Records
from study.report.records.statistics import Interval, paired_ratio, percent


def answer(records: Records) -> Answer | None:
    moved = {workload: [arm for arm in found if moves_state(arm)] for workload, found in workloads(records).items()}
    found = {workload: arms for workload, arms in moved.items() if any(len(a.ended) and same_stage(a) for a in arms)}
    if not found:
        return None
    fair = [arm for arms in found.values() for arm in compared(arms) if same_stage(arm)]
    freed, slower = [_freed(arm) for arm in fair], [_slower(arm) for arm in fair]
    sentence = "No arm with offload can be compared with the same stage without it."
    if any(not pd.isna(share) for share in slower):
        sentence = (
            f"Offload frees {span(freed, percent)} of the model state on the device and changes the step time by"
            f" {span(slower, change_text)}; {certainty(found.values(), STEP)}."
        )
    columns: Columns = {
        "Freed": lambda arm: known(_freed(arm), percent),
        "Step time": lambda arm: known(_slower(arm), change_text),
    }
    notes = ["Beside the same stage without offload."]
    if any(has_no_gpu(arms[0].beside) for arms in found.values()):
        notes += ["There is no GPU here: device and host are the same memory, so nothing is freed on this box."]
    return side_by_side(sentence, found, columns, *notes)


def _freed(arm: Arm) -> float:
    """Of the model state that the same stage holds on the device, what this arm does not."""
    kept = arm.beside[(arm.beside["arm"] == same_stage(arm)) & (arm.beside["status_state"] == "ok")]
    whole = state_bytes(kept, ("device",))
    return 1 - state_bytes(arm.ended, ("device",)) / whole if whole > 0 else NAN


def _ratio(arm: Arm) -> Interval | None:
    plain = same_stage(arm)
    return None if plain is None else paired_ratio(arm.beside, STEP, arm.name, plain)


def _slower(arm: Arm) -> float:
    ratio = _ratio(arm)
    return NAN if ratio is None else ratio.center - 1


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
        "Step time, ms": 1e3 * arm.median(STEP),
        "Without offload": same_stage(arm) or "not run" if moved else "this row",
        "Time, x without": ratio_text(_ratio(arm)) if moved else "1",
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
