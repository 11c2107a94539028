"""Memory: what a rank holds, of which kind and where; and its peak, of which that state is a part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from study.host.memory import GIB
from study.records.arms import NAN, Arm, arms
from study.records.frames import Records, real, without_probes
from study.records.schema import PROFILE_CATEGORIES, STATE_KINDS, STATE_PLACES
from study.report.plots.canvas import (
    MOST_WORKLOADS,
    PLACES,
    PROFILE,
    STATE,
    Drawing,
    Fill,
    arms_of,
    bars,
    drawings,
    finish,
    finished,
    legend_of_fills,
    notes_of,
    number,
    per_workload,
    sheet_of_rows,
    unit_for,
)

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


Profiled = tuple[Arm, dict[str, Any]]
LABELS = {
    "matmul": "matrix products", "attention": "attention", "elementwise": "elementwise and norms",
    "optimizer": "optimizer", "copies": "copies, casts, fills", "collectives": "collectives", "other": "other",
    "idle": "idle",
}  # fmt: skip
_DEVICES = {
    "cuda": "Kernels of one GPU; idle is the GPU without one, waiting for the host.",
    "cpu": "Operators of one rank; idle is what lies between them, which is Python and waiting.",
}
# As a share of the step; less than this nobody sees.
_OVERLAP_THAT_SHOWS = 0.01


def profiled_arms(records: Records) -> Iterator[Profiled]:
    """Each with the profile of its first run that has one: profiles are looked at, and not averaged."""
    for arm in arms(real(records).runs):
        profiled = arm.ended["profile"].dropna()
        if len(profiled):
            yield arm, json.loads(profiled.iloc[0])


def parts_ms(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by kind of work, and those in which nothing ran."""
    seconds = {**profile["categories_s_per_step"], "idle": profile["idle_s_per_step"]}
    return {kind: 1e3 * seconds[kind] for kind in (*PROFILE_CATEGORIES, "idle")}


def step_profile(records: Records) -> list[Drawing]:
    profiled: dict[str, dict[str, Profiled]] = {}
    for arm, profile in profiled_arms(records):
        profiled.setdefault(arm.workload, {})[arm.name] = (arm, profile)
    return drawings("step_profile", sorted(profiled.items())[:MOST_WORKLOADS], _step_profile)


def _step_profile(workload: str, found: dict[str, Profiled]) -> Drawing:
    runs = next(iter(found.values()))[0].beside
    names = [arm for arm in arms_of(runs) if arm in found]
    notes = {arm: note for arm, note in notes_of(runs).items() if arm in found}
    profiles = pd.DataFrame([found[arm][1] for arm in names], index=names)
    parts = pd.DataFrame([parts_ms(found[arm][1]) for arm in names], index=names)
    wall = 1e3 * profiles["wall_s_per_step"]
    overlaps = profiles["summed_s_per_step"] - profiles["busy_s_per_step"] > _OVERLAP_THAT_SHOWS * wall / 1e3
    subtitle = " ".join(_DEVICES[device] for device in sorted(set(profiles["device"])))
    if overlaps.any():
        subtitle += " Work that overlaps is drawn side by side: the black line is where the step ends."
    mfu = {arm: found[arm][0].median("mfu") for arm in names}
    texts = [f"{number(wall[arm])} ms" + ("" if pd.isna(mfu[arm]) else f"\nMFU {mfu[arm]:.0%}") for arm in names]
    figure, (axes,) = sheet_of_rows(len(names), 0.36)
    bars(axes, parts, PROFILE, texts, "ms per optimizer step, rank 0", notes, marks=wall.where(overlaps, NAN).tolist(),
         margin=0.16)  # fmt: skip
    told = []
    for arm in names:
        shares = ", ".join(f"{LABELS[str(kind)]} {number(part)}" for kind, part in parts.loc[arm].items() if part)
        told.append(f"{arm} {number(wall[arm])} ms, of which {shares}")
    legend = legend_of_fills({kind: fill for kind, fill in PROFILE.items() if parts[kind].any()}, LABELS)
    return finish(figure, "Where the time of a step goes", workload, subtitle, "; ".join(told), notes, legend)
