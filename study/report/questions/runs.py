"""Which runs stand behind a report: how they ended, how far like runs lie apart, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from study.records.arms import Arm, against, one_value, peak_gib, state_mib
from study.records.frames import Records
from study.records.statistics import Noise, noise, paired_ratio, percent, repeat_noise
from study.report.questions.comparing import ranks, real_arms, table_of, workloads
from study.report.questions.question import Answer, Question
from study.report.questions.time import STEP, step_s
from study.report.questions.traffic import sent_mib


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
            "Eval loss": arm.learned("eval_loss_final"),
            "State per rank, MiB": state_mib(arm),
            "Peak memory, GiB": peak_gib(arm)[0],
            "Peak of": peak_gib(arm)[1],
            "Ring bytes (NCCL) per step, MiB": sent_mib(arm),
            "Step time, ms": 1e3 * step_s(arm),
            "Time, x baseline": against(arm, STEP),
        },
    )


def controls_table(records: Records) -> pd.DataFrame:
    """How far runs lie apart that should be alike, as standard deviations; the engine's own part is no noise."""
    rows = []
    for workload, found in workloads(records).items():
        runs = found[0].beside
        for figure, words in (("eval_loss_final", "evaluation loss"), (STEP, "step time")):
            rows.append({
                "Workload": workload, "Figure": words,
                "Noise, arms and seeds taken out": _noise_text(noise(runs, figure)),
                "The same arm and seed again": _noise_text(repeat_noise(runs, figure)),
                "Stage 0, x no engine": _engine(found, figure),
            })  # fmt: skip
    return pd.DataFrame(rows)


def _noise_text(found: Noise | None) -> str:
    return "not run" if found is None else f"{percent(found.share)} ({found.df} df)"


def _engine(found: Sequence[Arm], figure: str) -> str:
    """Of stage 0 beside plain training on as many ranks."""
    fair = [arm for arm in found if arm.is_fair()]
    plain = {ranks(arm): arm.name for arm in fair if one_value(arm.ended["strategy"]) in ("single", "ddp")}
    ratios = [
        ratio.brief("{:.4g}".format)
        for arm in fair
        if one_value(arm.ended["strategy"]) == "zero0" and ranks(arm) in plain
        and (ratio := paired_ratio(arm.beside, figure, arm.name, plain[ranks(arm)])).n
    ]  # fmt: skip
    return ", ".join(ratios) or "not run"


QUESTION = Question(
    name="runs",
    title="Which runs stand behind this?",
    answer=answer,
    nothing="There is no run here that can be read.",
    tables={"summary": summary_table, "controls": controls_table},
)
