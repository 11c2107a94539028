"""A virtual rank's figures as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study.records import STATE_KINDS, STATE_PLACES

GIB = 2**30


def describe(summary: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{summary['strategy']}: rank {summary['rank']} of {summary['world_size']}, {summary['model_name_or_path']},"
        f" {summary['precision']}"
    )
    if fit := summary["extrapolated"]:
        yield (
            f"  EXTRAPOLATED to {fit['layers']} layers from {fit['depths'][0]} and {fit['depths'][1]};"
            f" at {fit['checked_at_depth']} the line is off by {fit['largest_residual_of_state']:.2%} of state at most"
        )
    yield f"  model state  {gb(summary['state_bytes_total'])}"
    for kind in STATE_KINDS:
        held = summary["state_bytes_per_rank"][kind]
        places = [f"{gb(held[place])} on {place}" for place in STATE_PLACES if held[place]]
        yield f"    {kind:<10} {', '.join(places) or '0'}"
    buffers = {name: size for name, size in (summary["buffer_bytes"] or {}).items() if size is not None}
    if buffers:
        largest = sorted(buffers.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {gb(size)}" for name, size in largest)
        yield f"  buffers      {gb(sum(buffers.values()))} ({named})"
    yield from _peaks(summary)
    yield f"  sent per step  {gb(summary['comm_bytes_per_step'])} in {_count(summary['comm_calls_per_step'])} calls"
    for name, counts in summary["collectives"].items():
        yield f"    {name:<15} {gb(counts['payload_bytes'])} in {_count(counts['calls'])} calls"
    if summary.get("step_time_s_median") is not None:
        yield f"  step time    {summary['step_time_s_median']:.4f} s of compute alone"


def _peaks(summary: Mapping[str, Any]) -> Iterator[str]:
    emulated = summary["emulated_device_memory_gib"]
    label = f" (emulated: held to {emulated} GiB)" if emulated else ""
    phases = summary.get("memory_gib_by_phase")
    if phases is None:
        yield f"  peak memory  host {_gib(summary['host_peak_rss_gib'])}"
        return
    for phase, figures in phases.items():
        said = ", ".join(f"{name} {_gib(size)}" for name, size in figures.items() if size is not None)
        yield f"  peak in {phase:<12}{said}{label}"


def table(summaries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per strategy."""
    row = "{:<20} {:>11} {:>11} {:>11} {:>11} {:>12} {:>7}  {}"
    yield row.format("strategy", "params", "grads", "optimizer", "state", "sent/step", "calls", "")
    for summary in summaries:
        state = summary["state_bytes_per_rank"]
        kinds = [gb(sum(state[kind][place] or 0 for place in STATE_PLACES)) for kind in STATE_KINDS]
        label = "extrapolated" if summary["extrapolated"] else ""
        yield row.format(
            summary["strategy"], *kinds, gb(summary["state_bytes_total"]), gb(summary["comm_bytes_per_step"]),
            _count(summary["comm_calls_per_step"]), label,
        ).rstrip()  # fmt: skip


def _count(number: float | None) -> str:
    return "?" if number is None else f"{number:.0f}"


def gb(size: float | None) -> str:
    """The papers count in GB of 1e9 bytes, and these figures stand beside theirs; ? where no line could be drawn."""
    if size is None:
        return "?"
    return f"{size / 1e9:.3f} GB" if size >= 1e7 else f"{size / 1e6:.3f} MB"


def _gib(size: float | None) -> str:
    return "?" if size is None else f"{size:.2f} GiB"
