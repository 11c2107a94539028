"""Memory: what a rank holds, of which kind and where; and its peak, of which that state is a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from study.record.schema import STATE_KINDS, STATE_PLACES
from study.report.plots.canvas import Drawing, footnote, in_house_style, legend_below, number, rows_of_arms, sheet
from study.report.plots.palette import PLACES, QUIET, STATE
from study.report.plots.select import arms_of, finished, notes_of, workloads
from study.report.records.frames import Records, without_probes

NOTHING = "No finished run here says how much state a rank held, so there is no memory to draw."
_WORDS = {
    "params": "parameters", "grads": "gradients", "optimizer": "optimizer", "rest": "activations and rest",
    "reserved": "reserved, not used", "outside": "outside torch",
    "device": "on the device", "host": "on the host", "nvme": "on NVMe",
}  # fmt: skip
# Each peak holds the one before it: tensors, torch's pool of them, and all that the device has in use.
_DEVICE_PEAKS = {
    "rest": "peak_memory_gib_allocated", "reserved": "peak_memory_gib_reserved", "outside": "peak_memory_gib_device"
}  # fmt: skip
_ROW_IN, _FRAME_IN = 0.27, 0.75
_GIB = 2**30
_UNITS = {"MiB": 2**20, "GiB": _GIB}


@in_house_style
def model_state(records: Records) -> list[Drawing] | str:
    """Bytes of model state on one rank, measured from the live tensors: also that of a virtual rank is real."""
    runs = without_probes(records).runs
    runs = runs[(runs["status_state"] == "ok") & runs["params_bytes_device"].notna()]
    drawings = [
        _state(f"model_state_{place}", workload, chosen) for place, (workload, chosen) in enumerate(workloads(runs), 1)
    ]
    return drawings or NOTHING


@in_house_style
def peak_memory(records: Records) -> list[Drawing] | str:
    drawings = []
    for place, (workload, runs) in enumerate(workloads(finished(records)), start=1):
        on_device = runs["peak_memory_gib_allocated"].notna().any()
        if on_device or runs["host_peak_rss_gib"].notna().any():
            drawings.append(_peak(f"peak_memory_{place}", workload, runs, on_device))
    return drawings or NOTHING


def _medians(runs: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    numbers = runs[list(columns)].apply(pd.to_numeric)
    return numbers.groupby(runs["arm"]).median().loc[arms_of(runs)]


def _unit(largest_bytes: float) -> tuple[str, int]:
    name = "GiB" if largest_bytes >= _GIB else "MiB"
    return name, _UNITS[name]


def _state(name: str, workload: str, runs: pd.DataFrame) -> Drawing:
    held = _medians(runs, [f"{kind}_bytes_{place}" for kind in STATE_KINDS for place in STATE_PLACES])
    unit, size = _unit(float(held.sum(axis="columns").max()))
    title = "Model state on one rank"
    figure, (axes,) = sheet(title, workload, _lightest(held, unit, size), _FRAME_IN + _ROW_IN * len(held))
    for row, (_, state) in enumerate(held.iterrows()):
        left = 0.0
        for place in STATE_PLACES:
            for kind in STATE_KINDS:
                width = float(state[f"{kind}_bytes_{place}"]) / size
                axes.barh(row, width, left=left, height=0.72, color=STATE[kind], hatch=PLACES[place],
                          edgecolor="white", linewidth=0.6)  # fmt: skip
                left += width
        device = sum(float(state[f"{kind}_bytes_device"]) for kind in STATE_KINDS) / size
        axes.annotate(number(device), (left, row), xytext=(4, 0), textcoords="offset points", va="center", size=9)
    rows_of_arms(axes, list(held.index), notes_of(runs))
    axes.set_xlabel(f"{unit} per rank; the number is what the device holds")
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    footnote(axes, notes_of(runs))
    places = [place for place in STATE_PLACES if held.filter(like=f"_{place}").to_numpy().any()]
    _legend(figure, STATE_KINDS, places if len(places) > 1 else [])
    parts = "; ".join(f"{arm} {_in_words(state, unit, size)}" for arm, state in held.iterrows())
    return Drawing(name, f"{title}, {workload}", f"{title}, {workload}: {parts}.", figure)


def _in_words(state: pd.Series, unit: str, size: int) -> str:
    totals = {place: sum(float(state[f"{kind}_bytes_{place}"]) for kind in STATE_KINDS) for place in STATE_PLACES}
    return ", ".join(f"{number(total / size)} {unit} {_WORDS[place]}" for place, total in totals.items() if total)


def _lightest(held: pd.DataFrame, unit: str, size: int) -> str:
    device = held[[f"{kind}_bytes_device" for kind in STATE_KINDS]].sum(axis="columns") / size
    least, most = device.idxmin(), device.idxmax()
    if device[least] == device[most]:
        return f"Every arm holds the same on the device: {number(device[least])} {unit}."
    return f"On the device: from {number(device[least])} {unit} ({least}) to {number(device[most])} {unit} ({most})."


def _legend(figure: Figure, kinds: Sequence[str], places: Sequence[str]) -> None:
    handles = [Patch(facecolor=STATE[kind], label=_WORDS[kind]) for kind in kinds]
    handles += [Patch(facecolor="#9aa2ab", hatch=PLACES[place], edgecolor="white", label=_WORDS[place])
                for place in places]  # fmt: skip
    legend_below(figure, handles, 3, columnspacing=1.3)


def _peak(name: str, workload: str, runs: pd.DataFrame, on_device: bool) -> Drawing:
    """With an accelerator the device and the host stand side by side; without one there is only the process."""
    columns = [f"{kind}_bytes_{place}" for kind in STATE_KINDS for place in ("device", "host")]
    columns += [*_DEVICE_PEAKS.values(), "host_peak_rss_gib"]
    held = _medians(runs, columns)
    title = "Peak memory of one rank"
    subtitle = _highest(held["peak_memory_gib_allocated" if on_device else "host_peak_rss_gib"])
    if on_device:
        subtitle += " The number is what torch had allocated, and for the host the resident set."
    else:
        subtitle += " Without an accelerator, device and host are one memory, and most of it is the libraries."
    figure, axes = sheet(title, workload, subtitle, _FRAME_IN + _ROW_IN * len(held), columns=1 + on_device, sharey=True)
    notes = notes_of(runs)
    if on_device:
        _stack(axes[0], held, ["device"], _DEVICE_PEAKS)
        axes[0].set_xlabel("device, GiB")
        _stack(axes[1], held, ["host"], {"rest": "host_peak_rss_gib"})
        axes[1].set_xlabel("host, GiB")
    else:
        _stack(axes[0], held, ["device", "host"], {"rest": "host_peak_rss_gib"})
        axes[0].set_xlabel("GiB per rank (resident set)")
    for place in axes:
        rows_of_arms(place, list(held.index), notes)
        place.margins(x=0.1)
        place.set_xlim(left=0)
    footnote(axes[0], notes)
    _legend(figure, [*STATE_KINDS, *(_DEVICE_PEAKS if on_device else ["rest"])], [])
    peaks = held["peak_memory_gib_allocated" if on_device else "host_peak_rss_gib"]
    words = ", ".join(f"{arm} {number(peak)} GiB" for arm, peak in peaks.items())
    return Drawing(name, f"{title}, {workload}", f"{title}, {workload}: {words}.", figure)


def _stack(axes: Axes, held: pd.DataFrame, places: Sequence[str], peaks: Mapping[str, str]) -> None:
    """State first, then up to each peak what that peak has more; the first peak is the one in numbers."""
    for row, (_, state) in enumerate(held.iterrows()):
        parts = [(kind, sum(float(state[f"{kind}_bytes_{place}"]) for place in places) / _GIB) for kind in STATE_KINDS]
        left = 0.0
        for kind, width in parts:
            axes.barh(row, width, left=left, height=0.72, color=STATE[kind], edgecolor="white", linewidth=0.4)
            left += width
        for kind, column in peaks.items():
            width = max(float(state[column]) - left, 0)
            axes.barh(row, width, left=left, height=0.72, color=STATE[kind], edgecolor="white", linewidth=0.4)
            left += width
        first = float(state[next(iter(peaks.values()))])
        axes.annotate(number(first), (left, row), xytext=(4, 0), textcoords="offset points", va="center", size=9,
                      color=QUIET)  # fmt: skip


def _highest(peaks: pd.Series) -> str:
    low, high = peaks.idxmin(), peaks.idxmax()
    return f"From {number(peaks[low])} GiB ({low}) to {number(peaks[high])} GiB ({high})."
