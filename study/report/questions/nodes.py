"""What more machines bring: speed beside the ideal, and what is sent within a machine and from one to another."""

from __future__ import annotations

import pandas as pd

from study.host.memory import MIB
from study.predictor.records import PLANNED_DEVICE, PLANNED_LENGTH, PLANNED_MICRO_BATCH
from study.records.frames import Records
from study.records.statistics import percent
from study.report.plots.scaling import efficiency
from study.report.questions.question import Answer, Question, names, span
from study.virtual.records import STRONG, WEAK, over_nodes


def answer(records: Records) -> Answer | None:
    rows = over_nodes(records)
    if rows.empty:
        return None
    table = _shown(rows)
    timed = rows[rows["efficiency"].notna() & (rows["machines"] > rows["fewest"])]
    if timed.empty:
        return Answer(
            "Nothing here was timed on several machines: what a rank holds and sends there is told by virtual ranks.",
            table,
            ("A virtual job has machines of eight ranks.", _ACROSS, _PLANNED),
        )
    said = [
        f"{span(of_it['efficiency'], percent)} of the ideal with {names(sorted(of_it['line'].unique()))} ({kind})"
        for kind in (STRONG, WEAK)
        if len(of_it := timed[timed["scaling"] == kind])
    ]
    most = f"{timed['machines'].max():.0f} machines"
    return Answer(f"On up to {most} a rank keeps {'; '.join(said)}.", table, _NOTES)


_ACROSS = "Across machines is what goes through groups that reach from one to another, whichever link carries it."
_PLANNED = (
    f"The predicted speed is that of {PLANNED_DEVICE}s in the same job, each with {PLANNED_MICRO_BATCH} samples of"
    f" {PLANNED_LENGTH} tokens a step; its efficiency is beside the fewest machines. Published bandwidths end at 64"
    " machines, and are taken to stay what they are there."
)
_NOTES = (
    "Strong: the global batch stays the same. Weak: each rank's share of it does.",
    "The ideal is the speed per rank on the fewest machines.",
    _ACROSS,
)


def nodes_table(records: Records) -> pd.DataFrame:
    return _shown(over_nodes(records))


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    shown = {
        "Model": rows["model"], "Arm": rows["line"], "Scaling": rows["scaling"], "Machines": rows["machines"],
        "Ranks": rows["world_size"], "Tokens/s": rows["tokens_per_s"],
        "Tokens/s, predicted": rows["predicted_tokens_per_s"], "Efficiency": rows["efficiency"],
        "Efficiency, predicted": rows["predicted_efficiency"],
        "State per rank, MiB": rows["state"] / MIB, "State, predicted": rows["predicted_state"] / MIB,
        "Ring bytes (NCCL) per rank, MiB": rows["sent"] / MIB,
        "Ring bytes (NCCL), predicted": rows["predicted_sent"] / MIB,
        "Of it across machines, MiB": rows["across"] / MIB,
        "Peak per rank, GiB": rows["peak"], "Peak, predicted": rows["predicted_peak"],
    }  # fmt: skip
    return pd.DataFrame(shown).dropna(axis="columns", how="all")


QUESTION = Question(
    name="nodes",
    title="What do more machines bring?",
    answer=answer,
    nothing="Nothing here ran on one machine and, otherwise alike, on several.",
    tables={"nodes": nodes_table},
    figures={"nodes": efficiency},
    notebook="scaling",
)
