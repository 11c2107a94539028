"""One figure with its interval against the region that the claim allows, as a strip that a page draws."""

from __future__ import annotations

import math
from collections.abc import Callable

from markupsafe import Markup

from study.claims.ledger import Finding
from study.claims.verdicts import Region, number
from study.report.site.page import render

# Of the width, left free on both sides of what is shown; labels nearer to an edge than the second stay inside.
_MARGIN, _EDGE = 12.0, 18.0
# A larger ratio of what is shown needs a log scale.
_LINEAR_UP_TO = 20.0
# Labels of two edges that are nearer than this would cover each other.
_APART = 26.0


def strip(finding: Finding, region: Region) -> Markup:
    figure = finding.figure
    assert figure is not None
    low, high = (figure.value if end is None else end for end in (figure.low, figure.high))
    edges = [edge for edge in (region.low, region.high) if math.isfinite(edge)]
    if not all(map(math.isfinite, (figure.value, low, high))):
        return Markup("")
    at = _scale([figure.value, low, high, *edges])
    start, end = (at(edge) if math.isfinite(edge) else side for edge, side in ((region.low, 0.0), (region.high, 100.0)))
    labels = [(*_side(at(figure.value)), number(figure.value, finding.unit))]
    shown = [(x, 12, side, text) for x, side, text in labels]
    shown += [(x, 43, side, text) for x, side, text in _edge_labels(region, edges, at, finding.unit)]
    return Markup(render(
        "strip.html.j2", alt=f"{finding.sentence}.", answer=finding.answer, point=_percent(at(figure.value)),
        region=(_percent(start), _percent(max(end - start, 0.6))), labels=shown,
        interval=(_percent(at(low)), _percent(at(high))) if low < high else None,
    ))  # fmt: skip


def _edge_labels(
    region: Region, edges: list[float], at: Callable[[float], float], unit: str
) -> list[tuple[float, str, str]]:
    if len(edges) == 2 and at(edges[1]) - at(edges[0]) < _APART:
        return [(*_side((at(edges[0]) + at(edges[1])) / 2), f"claimed: {region.words(unit)}")]
    return [
        (*_side(at(edge)), f"{'at least' if edge == region.low else 'at most'} {number(edge, unit)}") for edge in edges
    ]


def _scale(values: list[float]) -> Callable[[float], float]:
    """From a value to its place, in percent of the width."""
    least, most = min(values), max(values)
    if least > 0 and most / least > _LINEAR_UP_TO:
        inner = _scale([math.log(least), math.log(most)])
        return lambda value: inner(math.log(value))
    if least == most:
        return lambda _value: 50.0
    return lambda value: _MARGIN + (100 - 2 * _MARGIN) * (value - least) / (most - least)


def _side(place: float) -> tuple[float, str]:
    """Where a label stands that must not leave the strip."""
    if place < _EDGE:
        return 0.0, "start"
    return (100.0, "end") if place > 100 - _EDGE else (round(place, 2), "middle")


def _percent(place: float) -> float:
    return round(place, 2)
