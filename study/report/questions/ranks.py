"""What more ranks bring: throughput beside one device, and beside what as many of it would do."""

from __future__ import annotations

import math

import pandas as pd

from study.report.plots.scaling import scaling
from study.report.questions.cells import known, times_text
from study.report.questions.comparing import first_screen, side_by_side, workloads
from study.report.questions.question import Answer, Question
from study.report.records.arms import NAN, Arm, Row, arms, frame, one_value, peak_gib, ratio_text, state_mib
from study.report.records.fairness import baseline_arm
from study.report.records.frames import Records, real
from study.report.records.statistics import Interval, paired_ratio, percent


def answer(records: Records) -> Answer | None:
    found = {name: of_workload for name, of_workload in workloads(records).items() if _has_several(of_workload[0])}
    fair = [arm for of_workload in found.values() for arm in of_workload if arm.is_fair() and _ranks(arm) > 1]
    fair = [arm for arm in fair if not math.isnan(_center(arm))]
    if not fair:
        return None
    best = max(fair, key=_center)
    sentence = (
        f"At best `{best.name}` on {_ranks(best)} ranks has {_center(best):.1f} times the throughput of"
        f" `{_one_device(best)}` on one device."
    )
    columns = {
        "x one device": lambda arm: "1" if arm.name == _one_device(arm) else known(_center(arm), times_text),
        "Of the ideal": lambda arm: known(_center(arm) / _ranks(arm), percent),
    }
    return Answer(sentence, *side_by_side(first_screen(found), columns))


def _ranks(arm: Arm) -> int:
    return int(one_value(arm.runs["world_size"]) or 0)


def _has_several(arm: Arm) -> bool:
    return bool(arm.beside.loc[arm.beside["status_state"] == "ok", "world_size"].nunique() > 1)


def _one_device(arm: Arm) -> str | None:
    """The arm on one rank that the others are measured against: plain training where it ran."""
    ended = arm.beside[(arm.beside["status_state"] == "ok") & (arm.beside["world_size"] == 1)]
    return baseline_arm(ended) if len(ended) else None


def _speedup(arm: Arm) -> Interval | None:
    one = _one_device(arm)
    return None if one is None else paired_ratio(arm.beside, "tokens_per_s", arm.name, one)


def _center(arm: Arm) -> float:
    speedup = _speedup(arm)
    return NAN if speedup is None else speedup.center


def single_vs_multi_table(records: Records) -> pd.DataFrame:
    rows = []
    for arm in arms(real(records).runs):
        if not _has_several(arm):
            continue
        ranks, speedup = _ranks(arm) or None, _speedup(arm)
        figures: Row = {
            "Ranks": ranks,
            "Tokens/s": arm.median("tokens_per_s"),
            "x one device": "1 (one device)" if arm.name == _one_device(arm) else ratio_text(speedup),
            "Ideal": ranks,
            "Efficiency": speedup.center / ranks if speedup and speedup.n and ranks else NAN,
            "State per rank, MiB": state_mib(arm),
            "Peak memory, GiB": peak_gib(arm)[0],
        }
        rows.append(arm.row(figures))
    return frame(rows)


QUESTION = Question(
    name="ranks",
    title="What do more ranks bring?",
    answer=answer,
    nothing="No workload here ran both on one device and on several ranks.",
    tables={"single_vs_multi": single_vs_multi_table},
    figures={"scaling": scaling},
    notebook="single_vs_multi",
)
