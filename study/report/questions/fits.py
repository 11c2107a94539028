"""What fits: the largest micro-batch or model that a memory holds, by how the probes of each search ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from study.records.arms import NAN
from study.records.frames import Records
from study.report.plots.scaling import what_fits
from study.report.questions.question import Answer, Question
from study.report.searches import Fit, fits


def answer(records: Records) -> Answer | None:
    found = fits(records)
    if not found:
        return None
    ratios = [(ratio, fit) for fit in found if (ratio := _against_plain(fit, found)) > 0 and fit.arm != "single"]
    sentence = f"{len(found)} searches ran, and none can be held against plain training under the same limit."
    if ratios:
        ratio, best = max(ratios, key=lambda entry: entry[0])
        holds = f"holds {ratio:.1f} times what plain training on one device holds"
        sentence = f"At best `{best.arm}` {holds} ({best.what_fits.answer} within {best.within})."
    table = pd.DataFrame(
        {"Workload": fit.subject, "Strategy": fit.arm, "within": fit.within, "answer": fit.what_fits.answer}
        for fit in found
    )
    table = table.pivot_table(
        index=["Workload", "Strategy"], columns="within", values="answer", aggfunc=", ".join, sort=False
    )
    notes = [
        f"`{fit.arm}` within {fit.within}: a larger one did fit, so what fits does not fit in order."
        for fit in found
        if fit.bracket.fits_against_the_order
    ]
    return Answer(sentence, table.reset_index().rename_axis(columns=None).fillna("-"), tuple(notes))


def fits_table(records: Records) -> pd.DataFrame:
    found = fits(records)
    return pd.DataFrame(
        {
            "Workload": fit.subject,
            "Strategy": fit.arm,
            "Held to": fit.within,
            "Precision": fit.any["precision"],
            "Largest that fits": fit.what_fits.answer,
            "x plain": _against_plain(fit, found),
            "Peak there, GiB": NAN if fit.largest is None else fit.largest["peak_memory_gib_reserved"],
            "Host peak there, GiB": NAN if fit.largest is None else fit.largest["host_peak_rss_gib"],
            "Smallest that does not": fit.value(fit.too_large) or "-",
            "Why not more": fit.what_fits.why_not_more or "-",
            "Probes": len(fit.rungs),
        }
        for fit in found
    )


def _against_plain(fit: Fit, found: Sequence[Fit]) -> float:
    """A share of two lower bounds would be none."""
    plain = [each for each in found if _beside(each) == _beside(fit) and each.arm == "single" and each.size > 0]
    return NAN if not plain or plain[0].what_fits.is_open or fit.what_fits.is_open else fit.size / plain[0].size


def _beside(fit: Fit) -> tuple[Any, ...]:
    return fit.subject, fit.cap_gib, fit.repeat, fit.any["devices"]


def probes_table(records: Records) -> pd.DataFrame:
    """Every probe as it ended: one that ran out of memory is a row like any other."""
    return pd.DataFrame(
        {
            "Workload": fit.subject,
            "Strategy": fit.arm,
            "Held to": fit.within,
            "Tried": fit.value(row),
            "Outcome": row["status_state"],
            "Peak, GiB": row["peak_memory_gib_reserved"],
            "Host peak, GiB": row["host_peak_rss_gib"],
            "Why": row["status_reason"] or "-",
        }
        for fit in fits(records)
        for row in fit.rungs.values()
    )


QUESTION = Question(
    name="fits",
    title="What is the largest that fits?",
    answer=answer,
    nothing="No run here was a probe of a search: nobody asked these records for the largest that fits.",
    tables={"fits": fits_table, "probes": probes_table},
    figures={"what_fits": what_fits},
    notebook="what_fits",
)
