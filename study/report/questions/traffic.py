"""What one rank sends in a step: the bytes of a ring and of gloo, and the payload that it hands to its collectives."""

from __future__ import annotations

import json

import pandas as pd

from study.host.memory import MIB
from study.records.arms import NAN, Arm
from study.records.frames import Records
from study.report.plots.time import traffic
from study.report.questions.comparing import Columns, beside_reference, real_arms, table_of
from study.report.questions.question import Answer, Question, span, times_text
from study.virtual.records import sent_bytes


def sent_mib(arm: Arm) -> float:
    """Of a ring: an all-reduce goes there and back, a gather or a scatter one way."""
    sent = arm.ended["collectives"].map(sent_bytes)
    return float(sent.median()) / MIB if sent.notna().any() else NAN


def answer(records: Records) -> Answer | None:
    beside = beside_reference(records, sent_mib)
    if beside is None:
        return None
    sentence = ""
    if beside.ratios:
        sent, (_, most) = span((ratio for ratio, _ in beside.ratios), times_text), beside.ratios[-1]
        sentence = f"With sharded state a step sends {sent} times the ring bytes (NCCL) of {beside.names}"
        sentence += f", most with `{most.name}`."
    columns: Columns = {"Ring bytes (NCCL), MiB": sent_mib, f"x {beside.plain_names}": beside.cell(times_text)}
    about = "What one rank sends in one step, where every collective is a ring, as with NCCL. Gloo sends other amounts."
    return beside.answer(sentence, "what a rank sends", columns, about)


def traffic_table(records: Records) -> pd.DataFrame:
    return table_of(
        real_arms(records),
        lambda arm: {
            "Ring bytes (NCCL) per step, MiB": sent_mib(arm),
            "Sent by gloo per step, MiB": arm.median("gloo_sent_bytes_per_step") / MIB,
            "Payload per step, MiB": arm.median("comm_bytes_per_step") / MIB,
            "Calls per step": arm.median("comm_calls_per_step"),
            "Payload by collective, MiB": by_collective(arm),
        },
    )


def by_collective(arm: Arm) -> str:
    watched = arm.ended["collectives"].dropna()
    counted = json.loads(watched.iloc[0]) if len(watched) else {}
    return ", ".join(f"{kind} {counts['payload_bytes'] / MIB:.4g}" for kind, counts in sorted(counted.items())) or "-"


QUESTION = Question(
    name="traffic",
    title="How much does a rank send in one step?",
    answer=answer,
    nothing="No run here of several ranks watched its collectives.",
    tables={"traffic": traffic_table},
    figures={"traffic": traffic},
    notebook="runtime",
)
