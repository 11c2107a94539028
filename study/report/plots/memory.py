"""Memory: what a rank holds, of which kind and where; and its peak, of which that state is a part."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from study.host.memory import GIB
from study.record.schema import STATE_KINDS, STATE_PLACES
from study.report.plots.canvas import (
    Drawing,
    arms_of,
    bars,
    finish,
    finished,
    legend_of_fills,
    notes_of,
    number,
    per_workload,
    sheet_of_rows,
    unit_for,
)
from study.report.plots.palette import PLACES, STATE, Fill
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
_HOST_PEAK = {"rest": "host_peak_rss_gib"}


def model_state(records: Records) -> list[Drawing]:
    """Bytes of model state on one rank, measured from the live tensors: also that of a virtual rank is real."""
    runs = without_probes(records).runs
    held = runs[(runs["status_state"] == "ok") & runs["params_bytes_device"].notna()]
    return per_workload("model_state", held, _state)


def peak_memory(records: Records) -> list[Drawing]:
    return per_workload("peak_memory", finished(records), _peak)


def _medians(runs: pd.DataFrame) -> pd.DataFrame:
    columns = [f"{kind}_bytes_{place}" for place in STATE_PLACES for kind in STATE_KINDS]
    numbers = runs[[*columns, *_DEVICE_PEAKS.values(), *_HOST_PEAK.values()]].apply(pd.to_numeric)
    return numbers.groupby(runs["arm"]).median().loc[list(arms_of(runs))]


def _held(held: pd.DataFrame, *places: str) -> pd.Series:
    return held[[f"{kind}_bytes_{place}" for kind in STATE_KINDS for place in places]].sum(axis="columns")


def _state(workload: str, runs: pd.DataFrame) -> Drawing:
    held = _medians(runs).filter(like="_bytes_")
    unit, size = unit_for(float(held.sum(axis="columns").max()))
    held /= size
    device, notes = _held(held, "device"), notes_of(runs)
    fills = {f"{kind}_bytes_{place}": Fill(STATE[kind].colour, PLACES[place])
             for kind in STATE_KINDS for place in STATE_PLACES}  # fmt: skip
    figure, (axes,) = sheet_of_rows(len(held))
    bars(axes, held, fills, device.map(number), f"{unit} per rank; the number: on the device", notes,
         margin=0.08)  # fmt: skip
    subtitle = f"On the device: {_range(device, unit)}"
    if device.nunique() == 1:
        subtitle = f"Every arm holds the same on the device: {number(device.iloc[0])} {unit}."
    totals = {place: _held(held, place) for place in STATE_PLACES}
    shown = {kind: STATE[kind] for kind in STATE_KINDS}
    if sum(map(any, totals.values())) > 1:
        shown |= {place: Fill("#9aa2ab", PLACES[place]) for place, total in totals.items() if any(total)}
    words = {arm: ", ".join(f"{number(total[arm])} {unit} {_WORDS[place]}" for place, total in totals.items() if
                            total[arm]) for arm in held.index}  # fmt: skip
    said = "; ".join(f"{arm} {parts}" for arm, parts in words.items())
    return finish(figure, "Model state on one rank", workload, subtitle, said, notes, legend_of_fills(shown, _WORDS))


def _range(sizes: pd.Series, unit: str) -> str:
    low, high = sizes.idxmin(), sizes.idxmax()
    return f"from {number(sizes[low])} {unit} ({low}) to {number(sizes[high])} {unit} ({high})."


def _peak(workload: str, runs: pd.DataFrame) -> Drawing | None:
    """With an accelerator the device and the host stand side by side; without one there is only the process."""
    on_device = bool(runs["peak_memory_gib_allocated"].notna().any())
    if not on_device and runs["host_peak_rss_gib"].isna().all():
        return None
    held, notes = _medians(runs), notes_of(runs)
    panels: list[tuple[Sequence[str], dict[str, str], str]] = [
        (["device", "host"], _HOST_PEAK, "GiB per rank (resident set)")
    ]
    shown, about = "host_peak_rss_gib", "Without an accelerator, device and host are one memory, and most of it is the"
    about += " libraries."
    if on_device:
        panels = [(["device"], _DEVICE_PEAKS, "device, GiB"), (["host"], _HOST_PEAK, "host, GiB")]
        shown = "peak_memory_gib_allocated"
        about = "The number is what torch had allocated, and for the host the resident set."
    figure, sides = sheet_of_rows(len(held), columns=len(panels), sharey=True)
    for axes, (places, peaks, xlabel) in zip(sides, panels, strict=True):
        # State first, then up to each peak what that peak has more; the first peak is the one in numbers.
        parts = pd.DataFrame({
            kind: held[[f"{kind}_bytes_{place}" for place in places]].sum(axis="columns") / GIB for kind in STATE_KINDS
        })  # fmt: skip
        for kind, column in peaks.items():
            parts[kind] = (held[column] - parts.sum(axis="columns")).clip(lower=0)
        bars(axes, parts, STATE, held[peaks["rest"]].map(number), xlabel, notes)
    subtitle = f"From{_range(held[shown], 'GiB').removeprefix('from')} {about}"
    words = ", ".join(f"{arm} {number(peak)} GiB" for arm, peak in held[shown].items())
    fills = {kind: STATE[kind] for kind in (*STATE_KINDS, *panels[0][1])}
    legend = legend_of_fills(fills, _WORDS)
    return finish(figure, "Peak memory of one rank", workload, subtitle, words, notes, legend)
