"""What more ranks bring: throughput beside one device, and beside what as many of it would do."""

from __future__ import annotations

import pandas as pd

from study.report.plots.scaling import scaling
from study.report.questions.cells import known, times_text
from study.report.questions.comparing import (
    Columns,
    first_screen,
    ranks,
    real_arms,
    side_by_side,
    table_of,
    workloads,
)
from study.report.questions.question import Answer, Question
from study.report.records.arms import NAN, Arm, Row, peak_gib, ratio_text, state_mib
from study.report.records.fairness import baseline_arm
from study.report.records.frames import Records
from study.report.records.statistics import Interval, interval, paired_ratio, percent


def answer(records: Records) -> Answer | None:
    found = {workload: of_it for workload, of_it in workloads(records).items() if _has_several(of_it[0])}
    fair = [arm for of_it in found.values() for arm in of_it if arm.is_fair() and ranks(arm) > 1]
    best = max((arm for arm in fair if _speedup(arm).n), key=lambda arm: _speedup(arm).center, default=None)
    if best is None:
        return None
    sentence = (
        f"At best `{best.name}` on {ranks(best)} ranks has {_speedup(best).center:.1f} times the throughput of"
        f" `{_one_device(best)}` on one device."
    )
    columns: Columns = {
        "x one device": lambda arm: "1" if arm.name == _one_device(arm) else known(_speedup(arm).center, times_text),
        "Of the ideal": lambda arm: known(_speedup(arm).center / ranks(arm), percent),
    }
    return side_by_side(sentence, first_screen(found), columns)


def _has_several(arm: Arm) -> bool:
    return bool(arm.beside.loc[arm.beside["status_state"] == "ok", "world_size"].nunique() > 1)


def _one_device(arm: Arm) -> str | None:
    """The arm on one rank that the others are measured against: plain training where it ran."""
    return baseline_arm(arm.beside[arm.beside["world_size"] == 1])


def _speedup(arm: Arm) -> Interval:
    """Of no pair where nothing ran on one device."""
    one = _one_device(arm)
    return interval([]) if one is None else paired_ratio(arm.beside, "tokens_per_s", arm.name, one)


def single_vs_multi_table(records: Records) -> pd.DataFrame:
    return table_of(filter(_has_several, real_arms(records)), _figures)


def _figures(arm: Arm) -> Row:
    speedup, count, one = _speedup(arm), ranks(arm) or None, _one_device(arm)
    return {
        "Ranks": count,
        "Tokens/s": arm.median("tokens_per_s"),
        "x one device": "1 (one device)" if arm.name == one else ratio_text(None if one is None else speedup),
        "Ideal": count,
        "Efficiency": speedup.center / count if count else NAN,
        "State per rank, MiB": state_mib(arm),
        "Peak memory, GiB": peak_gib(arm)[0],
    }


QUESTION = Question(
    name="ranks",
    title="What do more ranks bring?",
    answer=answer,
    nothing="No workload here ran both on one device and on several ranks.",
    tables={"single_vs_multi": single_vs_multi_table},
    figures={"scaling": scaling},
    notebook="single_vs_multi",
)
