"""What a rank holds of the model's state, where, and what its process took at its peak."""

from __future__ import annotations

import pandas as pd

from study.host.memory import MIB
from study.records.arms import NAN, Arm, Row, arms, peak_gib, state_bytes, state_mib
from study.records.frames import Records, without_probes
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.records.statistics import percent
from study.report.plots.memory import model_state, peak_memory
from study.report.questions.comparing import Columns, beside_reference, table_of
from study.report.questions.question import Answer, Question

_KINDS = {"params": "Parameters", "grads": "Gradients", "optimizer": "Optimizer"}
_AWAY = {"device": "", "host": " (host)", "nvme": " (NVMe)"}


def answer(records: Records) -> Answer | None:
    beside = beside_reference(records, state_mib, on_any_ranks=True)
    if beside is None:
        return None
    sentence = ""
    if beside.ratios:
        share, leanest = beside.ratios[0]
        base = beside.bases[leanest.workload].name
        kept = f"down to {percent(share)} (`{leanest.name}`) of what it holds under `{base}`"
        sentence = f"With its state sharded a rank keeps {kept}."
    columns: Columns = {
        f"State, % of {beside.plain_names}": beside.cell(percent),
        "Peak, GiB": lambda arm: peak_gib(arm)[0],
    }
    peak = " or ".join(dict.fromkeys(peak_gib(base)[1] for base in beside.bases.values()))
    about = f"State is parameters, gradients and optimizer; the peak is that of the {peak}."
    return beside.answer(sentence, "what a rank holds", columns, about)


def memory_table(records: Records) -> pd.DataFrame:
    return table_of(arms(without_probes(records).runs), _figures)


def _figures(arm: Arm) -> Row:
    """Per rank, the fullest one."""
    return {
        **{
            f"{_KINDS[kind]}{_AWAY[place]}, MiB": arm.median(f"{kind}_bytes_{place}") / MIB
            for kind in STATE_KINDS
            for place in STATE_PLACES
        },
        "Engine buffers, MiB": arm.median("buffer_bytes_device") / MIB,
        "Peak allocated, GiB": arm.median("peak_memory_gib_allocated"),
        "Peak reserved, GiB": arm.median("peak_memory_gib_reserved"),
        "Peak of the device, GiB": arm.median("peak_memory_gib_device"),
        "Average of the device, GiB": arm.median("avg_memory_gib_device"),
        "Peak of the host process, GiB": arm.median("host_peak_rss_gib"),
        "State on the device, x baseline": _state_ratio(arm),
    }


def _state_ratio(arm: Arm) -> float:
    its = arm.beside[(arm.beside["arm"] == arm.baseline) & (arm.beside["status_state"] == "ok")]
    whole = state_bytes(its, ("device",))
    return state_bytes(arm.ended, ("device",)) / whole if whole else NAN


QUESTION = Question(
    name="memory",
    title="How much memory does a rank need?",
    answer=answer,
    nothing="No run here that ended well says how much state a rank held.",
    tables={"memory": memory_table},
    figures={"model_state": model_state, "peak_memory": peak_memory},
    notebook="peak_memory",
)
