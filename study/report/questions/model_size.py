"""What a larger model changes: memory and time of each arm beside the baseline of the same model."""

from __future__ import annotations

import pandas as pd

from study.records.arms import (
    Arm,
    Row,
    against,
    arms,
    one_value,
    parameters,
    peak_gib,
    runs_with_several,
    speed_beside_baseline,
    state_mib,
)
from study.records.frames import Records, real
from study.report.plots.scaling import model_size
from study.report.questions.batch_size import speed_answer
from study.report.questions.comparing import table_of
from study.report.questions.question import Answer, Question
from study.report.questions.time import step_s


def answer(records: Records) -> Answer | None:
    return speed_answer(speed_beside_baseline(real(records).runs, "model_name_or_path"), "{:.3g} M parameters")


def model_size_table(records: Records) -> pd.DataFrame:
    table = table_of(arms(runs_with_several(real(records).runs, "model_name_or_path")), _figures)
    known = "Parameters, millions" in table
    return table.sort_values("Parameters, millions", kind="stable", ignore_index=True) if known else table


def _figures(arm: Arm) -> Row:
    return {
        "Model": one_value(arm.runs["model_name_or_path"]),
        "Parameters, millions": parameters(arm.beside) / 1e6,
        "State per rank, MiB": state_mib(arm),
        "Peak memory, GiB": peak_gib(arm)[0],
        "Step time, ms": 1e3 * step_s(arm),
        "Time, x baseline": against(arm, "step_time_s_median"),
    }


QUESTION = Question(
    name="model_size",
    title="Does ZeRO pay more on a larger model?",
    answer=answer,
    nothing="No task here was run with more than one model.",
    tables={"model_size": model_size_table},
    figures={"model_size": model_size},
    first_figure="model_size",
    notebook="model_size",
)
