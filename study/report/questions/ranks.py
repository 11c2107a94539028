"""What more ranks bring: throughput beside one device, and beside what as many of it would do."""

from __future__ import annotations

import pandas as pd

from study.records.arms import NAN, Arm, Row, peak_gib, ratio_text, state_mib
from study.records.fairness import baseline_arm
from study.records.frames import Records
from study.records.statistics import NOT_TOLD_APART, Interval, interval, paired_ratio, percent
from study.report.plots.scaling import scaling
from study.report.questions.comparing import (
    Columns,
    Comparison,
    first_screen,
    ranks,
    real_arms,
    side_by_side,
    table_of,
    workloads,
)
from study.report.questions.question import Answer, Question, known, names, span, times_text

SPEED = "tokens_per_s"


def answer(records: Records) -> Answer | None:
    found = {workload: of_it for workload, of_it in workloads(records).items() if _has_several(of_it[0])}
    judged = Comparison(found, SPEED, _one_device)
    several = [arm for of_it in found.values() for arm in of_it if arm.is_fair() and ranks(arm) > 1]
    several = [arm for arm in several if (difference := judged.of(arm)) and difference.ratio.n]
    if not several:
        return None
    one = names([name for of_it in found.values() if (name := _one_device(of_it[0]))])
    apart = judged.apart(several)
    sentence = f"The throughput of several ranks is {NOT_TOLD_APART}, beside {one} on one device."
    if apart:
        ratios, rest = span((ratio for ratio, _ in apart), times_text), len(several) - len(apart)
        sentence = f"Several ranks have {ratios} times the throughput of {one} on one device"
        sentence += f"; {rest} of {len(several)} arms are {NOT_TOLD_APART}." if rest else "."
    columns: Columns = {
        "x one device": judged.cell(times_text),
        "Of the ideal": lambda arm: known(_speedup(arm).center / ranks(arm), percent),
    }
    return side_by_side(sentence, first_screen(found), columns, *judged.notes)


def _has_several(arm: Arm) -> bool:
    return bool(arm.beside.loc[arm.beside["status_state"] == "ok", "world_size"].nunique() > 1)


def _one_device(arm: Arm) -> str | None:
    """The arm on one rank that the others are measured against: plain training where it ran."""
    return baseline_arm(arm.beside[arm.beside["world_size"] == 1])


def _speedup(arm: Arm) -> Interval:
    """Of no pair where nothing ran on one device."""
    one = _one_device(arm)
    return interval([]) if one is None else paired_ratio(arm.beside, SPEED, arm.name, one)


def single_vs_multi_table(records: Records) -> pd.DataFrame:
    return table_of(filter(_has_several, real_arms(records)), _figures)


def _figures(arm: Arm) -> Row:
    speedup, count, one = _speedup(arm), ranks(arm) or None, _one_device(arm)
    return {
        "Ranks": count,
        "Tokens/s": arm.middle(SPEED).center,
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
