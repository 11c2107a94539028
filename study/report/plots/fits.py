"""The largest that fits: a panel per memory limit, a bar per way to hold the state."""

from __future__ import annotations

import math
from collections import defaultdict

from study.report.plots.canvas import Drawing, beside, drawings, finish, plain_ticks, rows_of_arms, sheet_of_rows
from study.report.plots.palette import style_of
from study.report.records.frames import Records
from study.report.records.searches import Fit, fits


def what_fits(records: Records) -> list[Drawing]:
    subjects: defaultdict[str, list[Fit]] = defaultdict(list)
    for fit in fits(records):
        if not math.isnan(fit.size):
            subjects[fit.subject].append(fit)
    return drawings("what_fits", subjects.items(), _bars)


def _bars(subject: str, found: list[Fit]) -> Drawing:
    limits = list(dict.fromkeys(fit.within for fit in found))
    arms = list(dict.fromkeys(fit.arm for fit in found))
    subtitle = "Each answer is bounded by a run that fitted and one that did not; with ≥ nothing larger was tried."
    figure, panels = sheet_of_rows(len(arms), 0.34, columns=len(limits), sharex=True, sharey=True)
    for axes, limit in zip(panels, limits, strict=True):
        for fit in (fit for fit in found if fit.within == limit):
            place = arms.index(fit.arm)
            axes.barh(place, fit.size, height=0.66, color=style_of(fit.any["strategy"]).colour)
            beside(axes, _label(fit), (fit.size, place))
        rows_of_arms(axes, arms, {})
        axes.margins(x=0.3)
        axes.set(xlim=(0, None), xlabel="samples" if found[0].axis == "largest_micro_batch" else "million parameters")
        axes.set_title(limit, size=9.5, loc="left")
        plain_ticks(axes.xaxis)
        axes.locator_params(axis="x", nbins=4)
    words = "; ".join(f"{fit.arm} within {fit.within} {fit.what_fits.answer}" for fit in found)
    return finish(figure, "What fits", subject, subtitle, words)


def _label(fit: Fit) -> str:
    if fit.largest is None:
        return "none"
    return f"{'≥ ' if fit.what_fits.is_open else ''}{fit.value(fit.largest).rsplit('/', 1)[-1]}"
