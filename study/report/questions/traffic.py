"""What one rank sends in a step: bytes on the wire, and the payload that it hands to its collectives."""

from __future__ import annotations

import json

import pandas as pd

from study.report.plots.time import traffic
from study.report.questions.cells import known, names, span, times_text
from study.report.questions.comparing import first_screen, reference, sharding, side_by_side, workloads
from study.report.questions.question import Answer, Question
from study.report.records.arms import MIB, NAN, Arm, Row, arms, frame
from study.report.records.frames import Records, real
from study.report.records.virtual_ranks import sent_bytes


def sent_mib(arm: Arm) -> float:
    """On the wire: an all-reduce goes there and back, a gather or a scatter one way."""
    sent = arm.ended["collectives"].map(sent_bytes)
    return float(sent.median()) / MIB if sent.notna().any() else NAN


def answer(records: Records) -> Answer | None:
    found, bases = {}, {}
    for workload, of_workload in workloads(records).items():
        base = reference(of_workload)
        if base is not None and sent_mib(base) > 0:
            found[workload], bases[workload] = of_workload, base
    if not found:
        return None
    ratios = {
        (workload, arm.name): sent_mib(arm) / sent_mib(bases[workload])
        for workload, of_workload in found.items()
        for arm in sharding(bases[workload], of_workload)
    }
    measured = {key: ratio for key, ratio in ratios.items() if not pd.isna(ratio)}
    sent = [sent_mib(base) for base in bases.values()]
    most = max(measured, key=lambda key: measured[key], default=("", ""))[1]
    of = names([base.name for base in bases.values()])
    sentence = (
        f"With sharded state a step sends {span(measured.values(), times_text)} times the bytes of {of}, most"
        f" with `{most}`."
        if measured
        else f"A step of {of} sends {span(sent, '{:,.1f}'.format)} MiB, and no sharding arm can be compared with it."
    )
    columns = {
        "Sent, MiB": sent_mib,
        f"x {of.replace('`', '')}": lambda arm: known(sent_mib(arm) / sent_mib(bases[arm.workload]), times_text),
    }
    table, notes = side_by_side(first_screen(found), columns)
    return Answer(sentence, table, ("Bytes on the wire that one rank sends in one step.", *notes))


def traffic_table(records: Records) -> pd.DataFrame:
    rows = []
    for arm in arms(real(records).runs):
        figures: Row = {
            "Sent per step, MiB": sent_mib(arm),
            "Payload per step, MiB": arm.median("comm_bytes_per_step") / MIB,
            "Calls per step": arm.median("comm_calls_per_step"),
            "Payload by collective, MiB": _by_collective(arm),
        }
        rows.append(arm.row(figures))
    return frame(rows)


def _by_collective(arm: Arm) -> str:
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
