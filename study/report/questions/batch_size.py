"""What a larger batch pays back: traffic and time per token, each arm beside the baseline at the same batch."""

from __future__ import annotations

import pandas as pd

from study.report.plots.scaling import batch_size
from study.report.questions.comparing import table_of
from study.report.questions.question import Answer, Question
from study.report.records.arms import NAN, Arm, Row, against, arms, one_value, peak_gib
from study.report.records.frames import Records, real
from study.report.records.speed import runs_with_several, speed_beside_baseline


def answer(records: Records) -> Answer | None:
    return speed_answer(speed_beside_baseline(real(records).runs, "global_batch_size"), "a batch of {:g}")


def speed_answer(speed: pd.DataFrame, words: str) -> Answer | None:
    """Of the first subject; the others are in the details."""
    if speed.empty:
        return None
    subject = speed["subject"].iloc[0]
    one = speed[speed["subject"] == subject].sort_values("place")
    cells = one["percent"].map("{:.0f} %".format) + one["note"].map(lambda note: " †" if note else "")
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
        sentence = (
            f"`{arm}` reaches {first['percent']:.0f} % of the speed of `{baseline}` at {words.format(first['place'])}"
            f" and {last['percent']:.0f} % at {words.format(last['place'])}."
        )
    notes = [f"Throughput in percent of `{baseline}`, {subject}."]
    marked = one[one["note"] != ""]
    for name, note in zip(marked["arm"], marked["note"], strict=True):
        notes.append(f"`{name}`: not a fair comparison †, {note}.")
    if more := speed["subject"].nunique() - 1:
        notes.append(f"{more} more such comparisons are in the details.")
    return Answer(sentence, table.reset_index(names="Arm").fillna("-"), tuple(dict.fromkeys(notes)))


def batch_size_table(records: Records) -> pd.DataFrame:
    return table_of(arms(runs_with_several(real(records).runs, "global_batch_size")), _figures)


def _figures(arm: Arm) -> Row:
    batch = one_value(arm.runs["global_batch_size"])
    tokens = NAN if batch is None else batch * one_value(arm.runs["seq_length"])
    return {
        "Global batch": batch,
        "Accumulation": one_value(arm.ended["gradient_accumulation_steps"]),
        "Tokens/s per device": arm.median("tokens_per_s_per_device"),
        "Throughput, x baseline": against(arm, "tokens_per_s_per_device"),
        "Step time, ms": 1e3 * arm.median("step_time_s_median"),
        "Payload per token, KiB": arm.median("comm_bytes_per_step") / tokens / 1024,
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
