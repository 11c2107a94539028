"""A receipt's memory timeline as an SVG picture, for light and dark pages. It imports no torch."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from study.config.text import binary_size, rounded_seconds
from study.receipt.document import MemoryTimeline, Phase, PhaseSpan, ReceiptDocument
from study.receipt.page import NAMES, SHOWN_FRACTION, describe

UNATTRIBUTED = "not attributed"
# From the bottom up; parts that are the same during the whole step are below.
_ORDER = ("parameters", "optimizer", "buckets", "gathered", "gradients", "activations", "logits", "other_tensors")
# On light and on dark pages; the calculator has the same.
_COLORS = {
    "parameters": ("#0a35b3", "#7f9cff"),
    "optimizer": ("#db3502", "#ff7d52"),
    "buckets": ("#b07400", "#e0a83c"),
    "gathered": ("#7d4fb0", "#b48ce0"),
    "gradients": ("#2b98ff", "#2f86d9"),
    "activations": ("#018228", "#45b868"),
    "logits": ("#6e9a78", "#93bd9c"),
    "other_tensors": ("#767676", "#8d949c"),
    UNATTRIBUTED: ("#c9ced5", "#4b525b"),
}
_PHASES: dict[Phase, tuple[str, str]] = {
    "forward": ("#dbe0e5", "#3a4149"),
    "backward": ("#b9c1ca", "#56606b"),
    "optimizer": ("#eceff2", "#2a3037"),
}
_PAGE, _INK = ("#ffffff", "#0d1117"), ("#1f2328", "#e6edf3")
_QUIET, _GRID = ("#5b636e", "#9aa4af"), ("#dfe3e8", "#30363d")
_WIDTH, _LEFT, _RIGHT = 560, 48, 12
_PLOT_HEIGHT, _STRIP, _LINE = 240, 20, 21
_LETTER = 7.5
_COLUMNS = 72
_TICKS = 5


class _Scale:
    """Places of times and bytes in the picture."""

    def __init__(self, timeline: MemoryTimeline, top: float) -> None:
        self.end_s = max([timeline.at_s[-1], *(span.end_s for span in timeline.phases)]) or 1.0
        self.top, self.bottom = top, top + _PLOT_HEIGHT
        self.most_bytes = 1.06 * max(*timeline.total_bytes, *_cumulative(timeline)[-1][1], 1)

    def x(self, seconds: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.end_s, 1)

    def y(self, count: float) -> float:
        return round(self.bottom - _PLOT_HEIGHT * count / self.most_bytes, 1)


def draw_timeline(receipt: ReceiptDocument, timeline: MemoryTimeline) -> str:
    """Return the SVG document: memory by part over the step, its phases, and its peak."""
    peak = timeline.at_s.index(timeline.peak_at_s)
    heading = "Memory of rank 0 in one step, by part"
    lines = textwrap.wrap(describe(receipt), _COLUMNS, break_on_hyphens=False)
    scale = _Scale(timeline, top=34 + 17 * len(lines) + 26)
    legend_top = scale.bottom + _STRIP + 76
    bands = [(name, values) for name, values in _bands(timeline) if _is_shown(values, timeline)]
    height = legend_top + _LINE * math.ceil(len(bands) / 2) + 6
    body = [
        f'<rect width="{_WIDTH}" height="{height}" class="page"/>',
        _text(12, 24, heading, "heading"),
        *(_text(12, 42 + 17 * place, line, "quiet") for place, line in enumerate(lines)),
        *_grid(scale),
        *_areas(timeline, scale),
        *_phases(timeline.phases, scale),
        *_times(scale),
        *_peak(timeline, peak, scale),
        *_legend(bands, peak, legend_top),
    ]
    size = binary_size(timeline.total_bytes[peak])
    label = html.escape(f"{heading}, {size} at its peak: {describe(receipt)}", quote=True)
    # A page scales it, and a window that shows it alone.
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' style="max-width:100%;height:auto" role="img" aria-label="{label}" font-family="sans-serif">'
    )
    return "\n".join([opening, f"<style>{_style()}</style>", *body, "</svg>", ""])


def _style() -> str:
    fills = {name.replace(" ", "_"): colors for name, colors in _COLORS.items()}
    fills |= {f"phase_{phase}": colors for phase, colors in _PHASES.items()}

    def rules(place: int) -> str:
        return "".join(
            [
                *(f".{name}{{fill:{colors[place]}}}" for name, colors in fills.items()),
                f".page{{fill:{_PAGE[place]}}}text{{fill:{_INK[place]};font-size:14px}}",
                f".heading{{font-size:16px;font-weight:600}}.quiet{{fill:{_QUIET[place]};font-size:13px}}",
                f".grid{{stroke:{_GRID[place]}}}.peak{{stroke:{_INK[place]};stroke-dasharray:4 3}}",
                f".dot{{fill:{_INK[place]};stroke:{_PAGE[place]}}}",
            ]
        )

    anchors = ".end{text-anchor:end}.middle{text-anchor:middle}"
    return f"{rules(0)}{anchors}@media(prefers-color-scheme:dark){{{rules(1)}}}"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(text)}</text>'


def _bands(timeline: MemoryTimeline) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the parts from the bottom up, and the unattributed bytes on top."""
    none = (0,) * len(timeline.at_s)
    for part in _ORDER:
        yield part, timeline.parts.get(part, none)
    sums = [sum(column) for column in zip(none, *timeline.parts.values(), strict=True)]
    yield (
        UNATTRIBUTED,
        [max(0, total - attributed) for total, attributed in zip(timeline.total_bytes, sums, strict=True)],
    )


def _is_shown(values: Sequence[int], timeline: MemoryTimeline) -> bool:
    return max(values) >= SHOWN_FRACTION * max(timeline.total_bytes)


def _cumulative(timeline: MemoryTimeline) -> list[tuple[str, list[int]]]:
    """Return the upper edge of each band."""
    edges: list[tuple[str, list[int]]] = []
    below = [0] * len(timeline.at_s)
    for name, values in _bands(timeline):
        below = [low + value for low, value in zip(below, values, strict=True)]
        edges.append((name, below))
    return edges


def _areas(timeline: MemoryTimeline, scale: _Scale) -> Iterator[str]:
    """Yield the bands from the top down: each covers the lower part of the one before it."""
    large_parts = {name for name, values in _bands(timeline) if _is_shown(values, timeline)}
    for name, edge in reversed(_cumulative(timeline)):
        if name not in large_parts:
            continue
        title = html.escape(NAMES.get(name, name))
        path = _steps(timeline.at_s, edge, scale)
        yield f'<path class="{name.replace(" ", "_")}" d="{path}"><title>{title}</title></path>'


def _steps(times: Sequence[float], values: Sequence[int], scale: _Scale) -> str:
    """Return the path below values that last until the next time."""
    pieces = [f"M{scale.x(times[0]):g} {scale.bottom:g}V{scale.y(values[0]):g}"]
    last_y = scale.y(values[0])
    for at_s, value in zip(times[1:], values[1:], strict=True):
        y = scale.y(value)
        if y != last_y:
            pieces.append(f"H{scale.x(at_s):g}V{y:g}")
            last_y = y
    pieces.append(f"H{scale.x(scale.end_s):g}V{scale.bottom:g}z")
    return "".join(pieces)


def _grid(scale: _Scale) -> Iterator[str]:
    unit, unit_bytes = _unit(scale.most_bytes)
    yield _text(_LEFT - 6, scale.top - 10, unit, "quiet end")
    for tick in _ticks(scale.most_bytes / unit_bytes):
        y = scale.y(tick * unit_bytes)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}" class="grid"/>'
        yield _text(_LEFT - 6, y + 5, f"{tick:,.6g}", "quiet end")


def _times(scale: _Scale) -> Iterator[str]:
    factor, unit = (1, "s") if scale.end_s >= 2 else (1e3, "ms")
    y = scale.bottom + _STRIP + 18
    for tick in _ticks(factor * scale.end_s):
        yield _text(scale.x(tick / factor), y, f"{tick:,.6g}", "quiet middle")
    yield _text(_WIDTH - _RIGHT, y + 17, f"{unit} in the watched step, without the receipt's own work", "quiet end")


def _phases(spans: Sequence[PhaseSpan], scale: _Scale) -> Iterator[str]:
    y = scale.bottom + 2
    for span in spans:
        begin, end = scale.x(span.begin_s), scale.x(span.end_s)
        if span.phase == "between":
            continue
        label = f"{span.phase} {rounded_seconds(span.end_s - span.begin_s)}"
        # A phase of less than a pixel is shown as well.
        box = f'x="{begin:g}" y="{y:g}" width="{max(0.8, end - begin):.3g}" height="{_STRIP - 2}"'
        yield f'<rect {box} class="phase_{span.phase}"><title>{label}</title></rect>'
        if end - begin > _LETTER * len(span.phase):
            yield _text((begin + end) / 2, y + 13, span.phase, "middle")


def _peak(timeline: MemoryTimeline, peak: int, scale: _Scale) -> Iterator[str]:
    x, y = scale.x(timeline.at_s[peak]), scale.y(timeline.total_bytes[peak])
    text = f"peak {binary_size(timeline.total_bytes[peak])}"
    half = _LETTER * len(text) / 2
    middle = min(max(x, _LEFT + half), _WIDTH - _RIGHT - half)
    yield f'<line x1="{x:g}" x2="{x:g}" y1="{scale.top - 4:g}" y2="{scale.bottom:g}" class="peak"/>'
    yield f'<circle cx="{x:g}" cy="{y:g}" r="4" class="dot"/>'
    yield _text(middle, scale.top - 10, text, "middle")


def _legend(bands: Sequence[tuple[str, Sequence[int]]], peak: int, top: float) -> Iterator[str]:
    """Yield two columns: each part with its bytes at the peak, from the top of the picture down."""
    column_width = (_WIDTH - 24) / 2
    rows = math.ceil(len(bands) / 2)
    yield _text(12, top - 10, "at the peak:", "quiet")
    for place, (name, values) in enumerate(reversed(bands)):
        x, y = 12 + column_width * (place // rows), top + _LINE * (place % rows)
        yield f'<rect x="{x:g}" y="{y:g}" width="12" height="12" class="{name.replace(" ", "_")}"/>'
        yield _text(x + 18, y + 11, NAMES.get(name, name))
        yield _text(x + column_width - 16, y + 11, binary_size(values[peak]), "end")


def _unit(count: float) -> tuple[str, int]:
    units: Mapping[str, int] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    # Below a fifth of a unit the axis would have ticks of several decimals.
    return next(((name, width) for name, width in units.items() if count >= width / 5), ("B", 1))


def _ticks(most: float) -> list[float]:
    """Return round numbers from zero up, at most five of them above it."""
    exact = most / _TICKS
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= exact * (1 - 1e-9))
    return [step * place for place in range(int(most / step) + 1)]
