"""What moving state off the device frees there, and what it costs, beside the same stage without offload."""

from __future__ import annotations

import pandas as pd

from study.record.schema import STATE_PLACES
from study.report.plots.time import offload
from study.report.questions.cells import change_text, known, span
from study.report.questions.comparing import (
    certainty,
    compared,
    freed_share,
    moves_state,
    same_stage,
    side_by_side,
    workloads,
)
from study.report.questions.question import Answer, Question
from study.report.questions.time import STEP
from study.report.records.arms import NAN, Arm, Row, arms, frame, has_no_gpu, one_value, peak_gib, ratio_text, state_mib
from study.report.records.frames import Records, real
from study.report.records.statistics import paired_ratio, percent


def answer(records: Records) -> Answer | None:
    found = {}
    for workload, of_workload in workloads(records).items():
        moved = [arm for arm in of_workload if moves_state(arm)]
        if any(len(arm.ended) and same_stage(arm) for arm in moved):
            found[workload] = moved
    if not found:
        return None
    fair = [arm for moved in found.values() for arm in compared(moved) if same_stage(arm)]
    freed, slower = [_freed(arm) for arm in fair], [_slower(arm) for arm in fair]
    sentence = (
        f"Offload frees {span(freed, percent)} of the model state on the device and changes the step time by"
        f" {span(slower, change_text)}; {certainty(found.values(), STEP)}."
        if any(not pd.isna(share) for share in slower)
        else "No arm with offload can be compared with the same stage without it."
    )
    columns = {
        "Freed": lambda arm: known(_freed(arm), percent),
        "Step time": lambda arm: known(_slower(arm), change_text),
    }
    table, notes = side_by_side(found, columns)
    if any(has_no_gpu(moved[0].beside) for moved in found.values()):
        notes = ("There is no GPU here: device and host are the same memory, so nothing is freed on this box.", *notes)
    return Answer(sentence, table, ("Beside the same stage without offload.", *notes))


def _freed(arm: Arm) -> float:
    plain = same_stage(arm)
    return NAN if plain is None else freed_share(arm, plain)


def _slower(arm: Arm) -> float:
    plain = same_stage(arm)
    return NAN if plain is None else paired_ratio(arm.beside, STEP, arm.name, plain).center - 1


def offload_table(records: Records) -> pd.DataFrame:
    rows = []
    for arm in arms(real(records).runs):
        places = [one_value(arm.runs[f"offload_{what}"]) for what in ("optimizer", "param")]
        base = same_stage(arm)
        if not any(places) and not _is_base(arm):
            continue
        ratio = paired_ratio(arm.beside, STEP, arm.name, base) if base else None
        figures: Row = {
            "Stage": one_value(arm.runs["zero_stage"]),
            "Optimizer on": places[0] or "device",
            "Parameters on": places[1] or "device",
            **{f"State on {place}, MiB": state_mib(arm, (place,)) for place in STATE_PLACES},
            "Peak memory, GiB": peak_gib(arm)[0],
            "Step time, ms": 1e3 * arm.median(STEP),
            "Without offload": "this row" if not any(places) else base or "not run",
            "Time, x without": ratio_text(ratio) if any(places) else "1",
        }
        rows.append(arm.row(figures))
    offloads = {each["Workload"] for each in rows if each["Without offload"] != "this row"}
    return frame([each for each in rows if each["Workload"] in offloads])


def _is_base(arm: Arm) -> bool:
    stage = one_value(arm.runs["zero_stage"])
    offloads = arm.beside[arm.beside["offload_optimizer"].notna() | arm.beside["offload_param"].notna()]
    return stage is not None and stage in set(offloads["zero_stage"].dropna())


QUESTION = Question(
    name="offload",
    title="What does offload free, and what does it cost?",
    answer=answer,
    nothing="No workload here has a stage both with offload and without it.",
    tables={"offload": offload_table},
    figures={"offload": offload},
    notebook="offload",
)
