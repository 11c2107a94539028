"""Memory: what a rank holds, of which kind and where; and its peak, of which that state is a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.record.schema import STATE_KINDS, STATE_PLACES
from study.report.plots.canvas import (
    Drawing,
    beside_bar,
    end_rows,
    footnote,
    in_house_style,
    legend_of_fills,
    number,
    rows_of_arms,
    sheet,
    stack,
)
from study.report.plots.palette import PLACES, QUIET, STATE, Fill
from study.report.plots.select import arms_of, finished, notes_of, per_workload
from study.report.records.frames import Records, without_probes

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
def model_state(records: Records) -> list[Drawing]:
    """Bytes of model state on one rank, measured from the live tensors: also that of a virtual rank is real."""
    runs = without_probes(records).runs
    return per_workload(
        "model_state", runs[(runs["status_state"] == "ok") & runs["params_bytes_device"].notna()], _state
    )


@in_house_style
def peak_memory(records: Records) -> list[Drawing]:
    return per_workload("peak_memory", finished(records), _peak)


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
                axes.barh(row, width, left=left, height=0.72, color=STATE[kind].colour, hatch=PLACES[place],
                          edgecolor="white", linewidth=0.6)  # fmt: skip
                left += width
        device = sum(float(state[f"{kind}_bytes_device"]) for kind in STATE_KINDS) / size
        beside_bar(axes, number(device), left, row)
    end_rows(
        axes, list(held.index), notes_of(runs), f"{unit} per rank; the number is what the device holds", margin=0.08
    )
    places = [place for place in STATE_PLACES if held.filter(like=f"_{place}").to_numpy().any()]
    _legend(figure, STATE_KINDS, places if len(places) > 1 else [])
    parts = "; ".join(f"{arm} {_in_words(state, unit, size)}" for arm, state in held.iterrows())
    return Drawing.of(name, title, workload, parts, figure)


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
    fills = {kind: STATE[kind] for kind in kinds} | {place: Fill("#9aa2ab", PLACES[place]) for place in places}
    legend_of_fills(figure, fills, _WORDS)


def _peak(name: str, workload: str, runs: pd.DataFrame) -> Drawing | None:
    """With an accelerator the device and the host stand side by side; without one there is only the process."""
    on_device = bool(runs["peak_memory_gib_allocated"].notna().any())
    if not on_device and runs["host_peak_rss_gib"].isna().all():
        return None
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
    for one in axes:
        rows_of_arms(one, list(held.index), notes)
        one.margins(x=0.1)
        one.set_xlim(left=0)
    footnote(axes[0], notes)
    _legend(figure, [*STATE_KINDS, *(_DEVICE_PEAKS if on_device else ["rest"])], [])
    peaks = held["peak_memory_gib_allocated" if on_device else "host_peak_rss_gib"]
    words = ", ".join(f"{arm} {number(peak)} GiB" for arm, peak in peaks.items())
    return Drawing.of(name, title, workload, words, figure)


def _stack(axes: Axes, held: pd.DataFrame, places: Sequence[str], peaks: Mapping[str, str]) -> None:
    """State first, then up to each peak what that peak has more; the first peak is the one in numbers."""
    for row, (_, state) in enumerate(held.iterrows()):
        widths = {kind: sum(float(state[f"{kind}_bytes_{place}"]) for place in places) / _GIB for kind in STATE_KINDS}
        for kind, column in peaks.items():
            widths[kind] = max(float(state[column]) - sum(widths.values()), 0)
        end = stack(axes, row, widths, STATE)
        beside_bar(axes, number(float(state[next(iter(peaks.values()))])), end, row, QUIET)


def _highest(peaks: pd.Series) -> str:
    low, high = peaks.idxmin(), peaks.idxmax()
    return f"From {number(peaks[low])} GiB ({low}) to {number(peaks[high])} GiB ({high})."
