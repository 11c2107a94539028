"""A virtual rank's figures as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from study.record.schema import STATE_KINDS
from study.virtual.summary import Extrapolation, RankSummary, total

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
LEGEND = """\
GB are 1e9 bytes, GiB 2**30; ? is a figure that no line over layers gives. Ring bytes are what leaves a rank where each
collective is a ring, as with NCCL; payload counts an all-reduce once, and a gather by what it puts out. Losses of a
virtual rank mean nothing and are not kept."""


def page(summaries: Sequence[RankSummary]) -> Iterator[str]:
    for summary in summaries:
        yield from (*describe(summary), "")
    if len(summaries) > 1:
        yield from (*table(summaries), "")
    yield LEGEND


def describe(summary: RankSummary) -> Iterator[str]:
    micro, times = summary.per_device_train_batch_size, summary.gradient_accumulation_steps
    samples = f"{micro} x {times}" if times > 1 else f"{micro}"
    yield (
        f"{summary.strategy}: rank {summary.rank} of {summary.world_size}, {summary.model_name_or_path},"
        f" {summary.precision}, {samples} sample{'s'[: micro * times > 1]} of {summary.seq_length} tokens a step"
    )
    if summary.extrapolated:
        yield from _line(summary.extrapolated)
    yield f"  model state  {gb(summary.state_bytes_total)}"
    for kind, held in summary.state_bytes_per_rank.items():
        places = [f"{gb(size)} on {place}" for place, size in held.items() if size != 0]
        yield f"    {kind:<10} {', '.join(places) or '0'}"
    if buffers := summary.buffer_bytes:
        largest = sorted(buffers.items(), key=lambda item: -(item[1] or 0))[:3]
        named = ", ".join(f"{name} {gb(size)}" for name, size in largest)
        yield f"  buffers      {gb(total(buffers.values()))} ({named})"
    yield from _peaks(summary)
    yield (
        f"  ring bytes per step  {gb(summary.sent_bytes_per_step)} in {_count(summary.comm_calls_per_step)} calls,"
        f" payload {gb(summary.comm_bytes_per_step)}"
    )
    for name, counts in summary.collectives.items():
        yield (
            f"    {name:<15} {gb(counts['wire_bytes_per_rank'])} in {_count(counts['calls'])} calls,"
            f" payload {gb(counts['payload_bytes'])}"
        )
    if (seconds := summary.run_figures["step_time_s_median"]) is not None:
        yield f"  step time    {seconds:.4f} s of compute alone"


def _line(fit: Extrapolation) -> Iterator[str]:
    first, second = fit.depths
    yield (
        f"  EXTRAPOLATED to {fit.layers} layers from {first} and {second}; going by {fit.checked_at_depth} layers"
        f" no figure is off by more than {fit.largest_residual_at_target:.2%}"
        + (f" ({fit.furthest_figure})" if fit.largest_residual_at_target else "")
    )
    if fit.crossed:
        beyond = {name: at for name, at in fit.depths_beyond.items() if at + 2 < fit.layers}
        start = max(beyond.values(), default=0)
        yield (
            f"  on the way the engine crosses {', '.join(fit.crossed)}: what depends on it has no figure"
            + (f"; --layers-fit {start},{start + 1},{start + 2} starts beyond {', '.join(beyond)}" if beyond else "")
        )
    if fit.whole_model:
        yield f"  the whole model: {fit.whole_model['state']}: {fit.whole_model['reason']}"


def _peaks(summary: RankSummary) -> Iterator[str]:
    emulated = summary.emulated_device_memory_gib
    label = f" (emulated: held to {emulated} GiB)" if emulated else ""
    for phase, figures in summary.memory_gib_by_phase.items():
        said = ", ".join(
            f"{name} {'?' if size is None else f'{size:.2f} GiB'}"
            for name, size in figures.items()
            if size is not None or f"phase.{phase}.{name}" in summary.not_linear
        )
        yield f"  peak in {phase:<12}{said}{label}"


def table(summaries: Sequence[RankSummary]) -> Iterator[str]:
    """One line per strategy."""
    row = "{:<20} {:<11} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9} {:>6}  {}"
    names = ("strategy", "precision", *STATE_KINDS, "state", "ring bytes", "payload", "calls", "")
    yield row.format(*names).rstrip()
    for summary in summaries:
        sizes = (
            *(total(summary.state_bytes_per_rank[kind].values()) for kind in STATE_KINDS),
            summary.state_bytes_total,
            summary.sent_bytes_per_step,
            summary.comm_bytes_per_step,
        )
        label = "extrapolated" if summary.extrapolated else ""
        calls = _count(summary.comm_calls_per_step)
        yield row.format(summary.strategy, summary.precision, *map(gb, sizes), calls, label).rstrip()


def _count(number: float | None) -> str:
    return "?" if number is None else f"{number:.0f}"


def gb(size: float | None) -> str:
    """To four digits, in powers of 1000 bytes as the papers use them; ? where there is no figure."""
    if size is None:
        return "?"
    unit, name = next((known for known in _UNITS if size >= known[0]), _UNITS[-1])
    value = size / unit
    return f"{value:.0f} {name}" if unit == 1 or value >= 1e4 else f"{value:#.4g} {name}".replace(". ", " ")
