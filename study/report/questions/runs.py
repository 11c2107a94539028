"""Which runs stand behind a report: how they ended, how far like runs lie apart, and what was left out."""

from __future__ import annotations

import pandas as pd

from study.report.questions.comparing import real_arms, table_of, workloads
from study.report.questions.question import Answer, Question
from study.report.questions.traffic import sent_mib
from study.report.records.arms import MIB, against, peak_gib, state_mib
from study.report.records.frames import Records
from study.report.records.statistics import noise_floor, percent


def answer(records: Records) -> Answer | None:
    runs = records.runs
    if runs.empty:
        return None
    ended, lost, refused = runs[runs["status_state"] == "ok"], runs[runs["status_state"] != "ok"], len(records.refused)
    sentence = (
        f"{len(ended)} runs ended well and {len(lost)} did not; {refused} records are left out because they cannot be"
        " believed."
    )
    notes = []
    if unsealed := int((~ended["sealed"].astype(bool)).sum()):
        notes.append(
            f"{unsealed} of them closed without a digest of the record: a figure that was changed later, and stands in"
            " one file only, could not be noticed."
        )
    boxes = runs[["cpu", "cpu_cores", "devices"]].dropna(subset=["cpu"]).drop_duplicates()
    if len(boxes) > 1:
        notes.append(
            f"They come from {len(boxes)} different boxes; an arm from another box is marked where it is compared."
        )
    counts = [len(arm.ended) for found in workloads(records).values() for arm in found if len(arm.ended)]
    if counts:
        several = f"{min(counts)} to {max(counts)} runs of an arm."
        notes.append("One run of each arm: no interval." if max(counts) == 1 else several)
    return Answer(sentence, _outcomes(runs), tuple(notes))


def _outcomes(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per outcome, with a reason of the first run that has one."""
    rows = []
    for outcome, group in runs.groupby("status_state", sort=False):
        reason = next((text for text in group["status_reason"] if isinstance(text, str) and text), None)
        rows.append({"Outcome": outcome, "Runs": len(group), "Such as": reason})
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def summary_table(records: Records) -> pd.DataFrame:
    """Everything at a glance: one row per arm and workload."""
    return table_of(
        real_arms(records),
        lambda arm: {
            "Eval loss": arm.median("eval_loss_final"),
            "State per rank, MiB": state_mib(arm),
            "Peak memory, GiB": peak_gib(arm)[0],
            "Peak of": peak_gib(arm)[1],
            "Sent per step, MiB": sent_mib(arm),
            "Payload per step, MiB": arm.median("comm_bytes_per_step") / MIB,
            "Step time, ms": 1e3 * arm.median("step_time_s_median"),
            "Time, x baseline": against(arm, "step_time_s_median"),
        },
    )


def controls_table(records: Records) -> pd.DataFrame:
    """How far runs lie apart that should be alike; the engine's own part is no noise."""
    rows = []
    for workload, found in workloads(records).items():
        for figure, words in (("eval_loss_final", "evaluation loss"), ("step_time_s_median", "step time")):
            floor = noise_floor(found[0].beside, figure)
            rows.append({
                "Workload": workload, "Figure": words,
                "The same arm twice": _apart(floor.repeat, floor.repeats),
                "The same arm with other seeds": _apart(floor.seed, floor.seeds),
                "Stage 0 against no engine": _apart(floor.engine, floor.engines),
            })  # fmt: skip
    return pd.DataFrame(rows)


def _apart(share: float | None, n: int) -> str:
    return "not run" if share is None else f"up to {percent(share)} apart (n = {n})"


QUESTION = Question(
    name="runs",
    title="Which runs stand behind this?",
    answer=answer,
    nothing="There is no run here that can be read.",
    tables={"summary": summary_table, "controls": controls_table},
)
