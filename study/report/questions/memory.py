"""What a rank holds of the model's state, where, and what its process took at its peak."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from study.record.schema import STATE_KINDS, STATE_PLACES
from study.report.plots.memory import model_state, peak_memory
from study.report.questions.cells import known, names
from study.report.questions.comparing import (
    first_screen,
    reference,
    sharding,
    side_by_side,
    workloads,
)
from study.report.questions.question import Answer, Question
from study.report.records.arms import MIB, NAN, Arm, Row, arms, frame, peak_gib, state_bytes, state_mib
from study.report.records.frames import Records, without_probes
from study.report.records.statistics import percent

_KINDS = {"params": "Parameters", "grads": "Gradients", "optimizer": "Optimizer"}
_AWAY = {"device": "", "host": " (host)", "nvme": " (NVMe)"}
_ON_DEVICE = ("device",)


def answer(records: Records) -> Answer | None:
    found = {
        workload: arms
        for workload, arms in workloads(records).items()
        if (base := reference(arms)) is not None and state_mib(base, _ON_DEVICE) > 0
    }
    if not found:
        return None
    bases = {workload: base for workload, arms in found.items() if (base := reference(arms)) is not None}
    share, leanest = _least(found)
    of = names([base.name for base in bases.values()])
    sentence = (
        f"With its state sharded a rank keeps down to {percent(share)} (`{leanest}`) of what it holds under {of}."
        if leanest
        else f"No sharding arm here can be compared with {of} in what a rank holds."
    )

    def share_of_base(arm: Arm) -> str:
        return known(state_mib(arm) / state_mib(bases[arm.workload]), percent)

    columns: dict[str, Callable[[Arm], str | float]] = {
        f"State, % of {of.replace('`', '')}": share_of_base,
        "Peak, GiB": lambda arm: peak_gib(arm)[0],
    }
    table, notes = side_by_side(first_screen(found), columns)
    what = " or ".join({peak_gib(base)[1] for base in bases.values()})
    about = f"State is parameters, gradients and optimizer; the peak is that of the {what}."
    return Answer(sentence, table, (about, *notes))


def _least(found: dict[str, list[Arm]]) -> tuple[float, str]:
    """The smallest share, over all workloads, and its arm."""
    shares = [
        (state_mib(arm) / state_mib(base), arm.name)
        for arms in found.values()
        if (base := reference(arms)) is not None
        for arm in sharding(base, arms)
    ]
    return min((entry for entry in shares if not pd.isna(entry[0])), default=(NAN, ""))


def memory_table(records: Records) -> pd.DataFrame:
    """Per rank, the fullest one."""
    rows = []
    for arm in arms(without_probes(records).runs):
        figures: Row = {
            f"{_KINDS[kind]}{_AWAY[place]}, MiB": arm.median(f"{kind}_bytes_{place}") / MIB
            for kind in STATE_KINDS
            for place in STATE_PLACES
        }
        figures |= {
            "Engine buffers, MiB": arm.median("buffer_bytes_device") / MIB,
            "Peak allocated, GiB": arm.median("peak_memory_gib_allocated"),
            "Peak reserved, GiB": arm.median("peak_memory_gib_reserved"),
            "Peak of the device, GiB": arm.median("peak_memory_gib_device"),
            "Average of the device, GiB": arm.median("avg_memory_gib_device"),
            "Peak of the host process, GiB": arm.median("host_peak_rss_gib"),
            "State on the device, x baseline": _state_ratio(arm),
        }
        rows.append(arm.row(figures))
    return frame(rows)


def _state_ratio(arm: Arm) -> float:
    its = arm.beside[(arm.beside["arm"] == arm.baseline) & (arm.beside["status_state"] == "ok")]
    whole = state_bytes(its, _ON_DEVICE)
    return state_bytes(arm.ended, _ON_DEVICE) / whole if whole else NAN


QUESTION = Question(
    name="memory",
    title="How much memory does a rank need?",
    answer=answer,
    nothing="No run here that ended well says how much state a rank held.",
    tables={"memory": memory_table},
    figures={"model_state": model_state, "peak_memory": peak_memory},
    notebook="peak_memory",
)
