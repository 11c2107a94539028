"""What a larger batch pays back: traffic and time per token, each arm beside the baseline at the same batch."""

from __future__ import annotations

import pandas as pd

from study.records.arms import (
    NAN,
    Arm,
    Row,
    against,
    arms,
    one_value,
    peak_gib,
    runs_with_several,
    speed_beside_baseline,
)
from study.records.frames import Records, real
from study.records.statistics import NOT_TOLD_APART
from study.report.plots.scaling import batch_size
from study.report.questions.comparing import UNSURE, table_of
from study.report.questions.question import Answer, Question
from study.report.questions.time import step_s
from study.report.questions.traffic import sent_mib


def answer(records: Records) -> Answer | None:
    return speed_answer(speed_beside_baseline(real(records).runs, "global_batch_size"), "a batch of {:g}")


def speed_answer(speed: pd.DataFrame, words: str) -> Answer | None:
    """Of the first subject; the others are in the details."""
    if speed.empty:
        return None
    subject = speed["subject"].iloc[0]
    one = speed[speed["subject"] == subject].sort_values("place")
    sign = (one["told_apart"] | (one["arm"] == one["baseline"])).map(lambda is_so: "" if is_so else UNSURE)
    cells = sign + one["percent"].map("{:.0f} %".format) + one["note"].map(lambda note: " †" if note else "")
    table = one.assign(cell=cells).pivot_table(index="arm", columns="place", values="cell", aggfunc="first", sort=False)
    table.columns = [words.format(place) for place in table.columns]
    baseline = " or ".join(dict.fromkeys(one["baseline"]))
    fair = one[(one["note"] == "") & (one["arm"] != one["baseline"])]
    ends = fair[fair.groupby("arm")["place"].transform("nunique") > 1]
    sentence = f"No arm beside `{baseline}` can be compared at more than one place."
    if len(ends):
        # The one that shards most is the one that the question is about.
        arm = ends.iloc[-1]["arm"]
        first, last = (ends[ends["arm"] == arm].iloc[place] for place in (0, -1))
        said = " and ".join(
            f"{f'{end.percent:.0f} %' if end.told_apart else NOT_TOLD_APART} at {words.format(end.place)}"
            for end in (first, last)
        )
        sentence = f"Of the speed of `{baseline}` `{arm}` reaches {said}."
        if not (first["told_apart"] or last["told_apart"]):
            sentence = f"The speed of `{arm}` is {NOT_TOLD_APART} at either end, beside `{baseline}`."
    notes = [f"Throughput in percent of `{baseline}`, {subject}."]
    if sign.str.len().any():
        notes.append(f"{UNSURE.strip()}: {NOT_TOLD_APART}.")
    marked = one[one["note"] != ""]
    for name, note in zip(marked["arm"], marked["note"], strict=True):
        notes.append(f"`{name}`: not a fair comparison †, {note}.")
    if more := speed["subject"].nunique() - 1:
        notes.append(f"In the details: {more} more of these comparisons.")
    return Answer(sentence, table.reset_index(names="Arm").fillna("-"), tuple(dict.fromkeys(notes)))


def batch_size_table(records: Records) -> pd.DataFrame:
    return table_of(arms(runs_with_several(real(records).runs, "global_batch_size")), _figures)


def _figures(arm: Arm) -> Row:
    batch = one_value(arm.runs["global_batch_size"])
    tokens = NAN if batch is None else batch * one_value(arm.runs["seq_length"])
    return {
        "Global batch": batch,
        "Accumulation": one_value(arm.ended["gradient_accumulation_steps"]),
        "Tokens/s per device": arm.middle("tokens_per_s_per_device").center,
        "Throughput, x baseline": against(arm, "tokens_per_s_per_device"),
        "Step time, ms": 1e3 * step_s(arm),
        "Ring bytes (NCCL) per token, KiB": 1024 * sent_mib(arm) / tokens,
        "Peak memory, GiB": peak_gib(arm)[0],
    }


QUESTION = Question(
    name="batch_size",
    title="Does a larger batch pay for the traffic?",
    answer=answer,
    nothing="No workload here ran with more than one global batch.",
    tables={"batch_size": batch_size_table},
    figures={"batch_size": batch_size},
    first_figure="batch_size",
    notebook="batch_size",
)
