"""The forms of checks. The types of their arguments are the valid values in the ledger."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pydantic

from study.claims.evidence import AUTOPSY, SETTINGS, Evidence, Levels, counted_bytes, virtual_bytes
from study.claims.verdicts import Figure, Kind, NotJudged, awaited, number
from study.config.flags import Precision
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.predictor.state import KINDS, State, bytes_per_parameter, paper_state_bytes, paper_traffic, split_by
from study.records.shares import CONFIDENCE
from study.records.statistics import Interval, PairTest, interval, paired_ratio, pivot_by_seed, t_quantile
from study.virtual.summaries import AS_SHIPPED


def _matching(*patterns: str) -> pydantic.StringConstraints:
    return pydantic.StringConstraints(pattern=f"^(?:{'|'.join(patterns)})$")


# The cell of the autopsy whose switches are all as the listing has them.
_AS_PRINTED = "ewpob"
_STATE = r"(state|params|grads|optimizer)(_(device|host|nvme))?"
_SIZE = rf"({_STATE}|sent|gathered|calls|forward)"
_SETTING = rf"(?:{'|'.join(SETTINGS)})=\S+"
# A row of a table: ranks, and the printed figures of stages 1, 2 and 3.
_CELLS = r"\d+: [\d.]+ [\d.]+ [\d.]+"
Strategy = Annotated[str, _matching(*STRATEGY_NAMES)]
Over = Annotated[str, _matching(*STRATEGY_NAMES, "paper")]
Virtual = Annotated[
    str,
    _matching(
        _STATE, "(state|grads)_before_step", "sent", "calls", "forward", "host_peak", "device_peak", r"collective\.\w+"
    ),
]
Counted = Annotated[str, _matching(f"{_SIZE}(/(tokens|parameters))?", "parameters", "tokens")]
Measured = Literal[
    "step_time_s_median",
    "tokens_per_s",
    "train_loss_final",
    "eval_loss_final",
    "host_peak_rss_gib",
    "memory_steady_host_gib",
    "avg_memory_gib_device",
    "energy_j",
]
Along = Literal["model_parameters", "seq_length", "global_batch_size", "micro_batch_size"]
Where = Annotated[str, _matching(f"{_SETTING}( {_SETTING})*")]
Printed = Annotated[str, _matching(f"{_CELLS}(; {_CELLS})*")]
SessionFigure = Literal["train_loss", "eval_loss", "whole_s"]


class Form(NamedTuple):
    """Kind of evidence and function of one form."""

    kind: Kind
    figure: Callable[..., Figure]


FORMS: dict[str, Form] = {}


def form(kind: Kind) -> Callable[[Callable[..., Figure]], Callable[..., Figure]]:
    """Register a function as the form of that name."""

    def register(figure: Callable[..., Figure]) -> Callable[..., Figure]:
        FORMS[figure.__name__] = Form(kind, figure)
        return figure

    return register


# Forms without records: arithmetic with the numbers of a document, and comparisons of its statements.

GB = 1e9
MIXED: Precision = "bf16-engine"


def parameter_bytes(strategy: str, ranks: int, precision: str = MIXED) -> State:
    """Return bytes per parameter; by default 2 + 2 + 12, as in mixed-precision Adam."""
    return bytes_per_parameter(read_strategy(strategy), precision, ranks)


def _sum(state: State) -> str:
    """Return bytes per parameter on one device as text: weight, gradient and optimizer state."""
    parts = [number(part) for part in (state.params_device, state.grads_device, state.optimizer_device) if part]
    return f"({' + '.join(parts)})" if len(parts) > 1 else "".join(parts) or "0"


@form("consistency")
def stated(_: Evidence, *, value: float) -> Figure:
    """Return a number that the document states, or that is counted in its listing."""
    return Figure(value, derivation=f"{value:.10g}")


@form("arithmetic")
def ratio(_: Evidence, *, of: float, to: float) -> Figure:
    """Return the ratio of two numbers."""
    return Figure(of / to, derivation=f"{of:.10g} / {to:.10g}")


@form("arithmetic")
def steps_per_hour(_: Evidence, *, tokens_per_s: float, gpus: int, batch: int, length: int) -> Figure:
    """Return steps per hour at a speed per GPU and a batch."""
    derivation = f"3600 s x {tokens_per_s:.10g} tokens/s x {gpus} GPUs / ({batch} x {length} tokens)"
    return Figure(3600 * tokens_per_s * gpus / (batch * length), derivation=derivation)


@form("arithmetic")
def state_gb(
    _: Evidence, *, parameters_b: float, strategy: Strategy, gpus: int, precision: Precision = MIXED
) -> Figure:
    """Return the model state on one device."""
    state = parameter_bytes(strategy, gpus, precision)
    return Figure(parameters_b * state.device, derivation=f"{parameters_b:.10g} B x {_sum(state)} bytes")


@form("arithmetic")
def state_ratio(
    _: Evidence, *, strategy: Strategy, gpus: int, over: Strategy, over_gpus: int, over_precision: Precision = MIXED
) -> Figure:
    """Return the ratio of the model state on one device under two strategies."""
    state, reference = parameter_bytes(strategy, gpus), parameter_bytes(over, over_gpus, over_precision)
    return Figure(state.device / reference.device, derivation=f"{_sum(state)} / {_sum(reference)} bytes")


@form("arithmetic")
def state_saved_gb(_: Evidence, *, parameters_b: float, strategy: Strategy, over: Strategy, gpus: int) -> Figure:
    """Return the difference of the model state on one device under two strategies."""
    state, reference = parameter_bytes(strategy, gpus), parameter_bytes(over, gpus)
    derivation = f"{parameters_b:.10g} B x ({_sum(reference)} - {_sum(state)} bytes)"
    return Figure(parameters_b * (reference.device - state.device), derivation=derivation)


@form("arithmetic")
def capacity_b(_: Evidence, *, device_gb: float, strategy: Strategy, gpus: int) -> Figure:
    """Return the parameters, in billions, whose model state fills the device; activations would reduce it."""
    state = parameter_bytes(strategy, gpus)
    return Figure(device_gb / state.device, derivation=f"{device_gb:.10g} GB / {_sum(state)} bytes")


@form("arithmetic")
def shares_gb(
    _: Evidence, *, params_gb: float, grads_gb: float, optimizer_gb: float, stage: int, gpus: int, rest_gb: float = 0
) -> Figure:
    """Return the sum of three sizes, sharded as the stage shards them, and of a rest that no stage shards."""
    sizes = {"optimizer": optimizer_gb, "grads": grads_gb, "params": params_gb}
    pairs = [(size, split_by(kind, stage, gpus)) for kind, size in sizes.items()]
    parts = " + ".join(f"{size:.10g} / {ranks}" for size, ranks in reversed(pairs))
    return Figure(rest_gb + sum(size / ranks for size, ranks in pairs), derivation=f"{parts} + {rest_gb:.10g} GB")


@form("consistency")
def settings_changed(_: Evidence, *, strategy: Strategy, over: Strategy) -> Figure:
    """Count the ZeRO keys of a DeepSpeed file that a second strategy's file lacks or sets to another value."""
    zero, over_zero = (dict((read_strategy(name).deepspeed or {})["zero_optimization"]) for name in (strategy, over))
    changed = [key for key in zero if key not in over_zero or zero[key] != over_zero[key]]
    return Figure(len(changed), records=tuple(f"accelerate_configs/{name}.yaml" for name in (over, strategy)))


def formula_bytes(parameters: float, figure: str, stage: int, ranks: int) -> float:
    """Return a figure from the ZeRO paper's formula in mixed precision; raise NotJudged if there is none."""
    if figure == "state":
        return paper_state_bytes(parameters, stage, ranks)
    if figure == "sent":
        return parameters * KINDS["params"][0] * paper_traffic(stage, ranks)
    if figure not in KINDS:
        raise NotJudged(f"the paper has no formula for {figure}")
    return parameters * KINDS[figure][0] / split_by(figure, stage, ranks)


# Forms with records of virtual ranks, real runs, probes of the engine and sessions of the listing.


@form("virtual")
def virtual(
    evidence: Evidence,
    *,
    report: str,
    model: str,
    strategy: Strategy,
    ranks: int,
    figure: Virtual,
    setting: str = AS_SHIPPED,
    over: Over = "",
    over_ranks: int = 0,
    over_figure: Virtual = "",
) -> Figure:
    """Return a figure of one virtual rank, in GB or calls, or its ratio to another figure.

    `over` is a strategy, `paper` for the ZeRO paper's formula of the same stage, or `ddp` for its formula of DDP,
    which no virtual rank here ran.
    """
    summary = evidence.rank(report, model, strategy, ranks, setting)
    value, records = _known(summary, figure), summary["runs"]
    if not (over or over_ranks or over_figure):
        return Figure(value if figure == "calls" else value / GB, n=len(records), records=records)
    below_figure, below_ranks = over_figure or figure, over_ranks or ranks
    if over in ("paper", "ddp"):
        stage = int(summary["stage"]) if over == "paper" else 0
        below = formula_bytes(float(summary["model_parameters"]), below_figure, stage, below_ranks)
    else:
        reference = evidence.rank(report, model, over or strategy, below_ranks, setting)
        below, records = _known(reference, below_figure), (*records, *reference["runs"])
    return Figure(value / below, n=len(records), records=records)


@form("virtual")
def virtual_furthest(evidence: Evidence, *, report: str, model: str, printed: Printed) -> Figure:
    """Return the largest relative difference from the figures printed for stages 1, 2 and 3.

    A printed figure is rounded, so up to half a unit of its last digit counts as equal.
    """
    worst = 0.0
    records: tuple[str, ...] = ()
    for line in printed.split(";"):
        ranks, figures = line.split(":")
        for stage, figure in enumerate(figures.split(), start=1):
            summary = evidence.rank(report, model, f"zero{stage}", int(ranks), AS_SHIPPED)
            half = 0.5 / 10 ** len(figure.partition(".")[2])
            error = max(0.0, abs(_known(summary, "state") / GB - float(figure)) - half)
            worst = max(worst, error / float(figure))
            records += summary["runs"]
    return Figure(worst, n=len(records), records=records)


@form("measured")
def paired(
    evidence: Evidence,
    *,
    report: str,
    task: str,
    strategy: Strategy,
    over: Strategy,
    figure: Measured,
    least_pairs: int,
    where: Where = "",
    over_where: Where = "",
    learned: float = 0,
) -> Figure:
    """Return the ratio of a time, a loss or a peak of two strategies, paired by seed, with its interval.

    `where` selects the runs by their settings; `over_where` has the settings that differ in the reference's runs.
    `learned` is the loss that the reference's median run must reach: two models that learned nothing have equal losses.
    """
    pair = evidence.pair(report, task, strategy, over, where, over_where, is_loss="loss" in figure)
    reached = float(pair.control[figure].median())
    if learned and reached > learned:
        raise NotJudged(f"runs of {over} in {report} learned too little: {reached:.3g}, where {learned:g} is asked for")
    of = f"pairs of {strategy} and {over}"
    alone = _estimate(pair.ratio(figure), least_pairs, report, of, pair.records, pair.box)
    return _with_test(alone, pair.test(figure))


@form("measured")
def largest(
    evidence: Evidence,
    *,
    report: str,
    task: str,
    strategy: Strategy,
    over: Strategy,
    cap_gib: float,
    precision: Precision,
) -> Figure:
    """Return the largest micro-batch that a search found to fit, as a multiple of another strategy's."""
    treatment, control = (evidence.fit(report, task, name, cap_gib, precision) for name in (strategy, over))
    size, over_size = (
        0 if fit.largest is None else int(fit.largest["per_device_train_batch_size"]) for fit in (treatment, control)
    )
    if not over_size:
        raise NotJudged(f"no micro-batch fits with {over} in {report}")
    records = tuple(f"{report}/{row['run']}" for fit in (treatment, control) for row in fit.rungs.values())
    return Figure(size / over_size, n=len(records), records=records, note=f"{size} over {over_size}")


@form("measured")
def utilization(
    evidence: Evidence, *, report: str, task: str, strategy: Strategy, least_runs: int, where: Where = ""
) -> Figure:
    """Return the model FLOP utilization, with its interval over runs."""
    pair = evidence.pair(report, task, strategy, strategy, where)
    of = f"runs of {strategy} with a utilization"
    return _estimate(interval(pair.treatment["mfu"]), least_runs, report, of, pair.records, pair.box)


@form("measured")
def gradient_norms(
    evidence: Evidence,
    *,
    report: str,
    task: str,
    strategy: Strategy,
    over: Strategy,
    where: Where = "",
    first_steps: int = 0,
) -> Figure:
    """Return the largest relative difference of the gradient norms over all steps, or over the first ones."""
    pair = evidence.pair(report, task, strategy, over, where, is_loss=True)
    steps = evidence.records(report).steps
    difference, pairs = pair.max_norm_difference(steps[steps["step"] <= first_steps] if first_steps else steps)
    if not pairs:
        raise NotJudged(f"has no gradient norms of both {strategy} and {over}", report)
    return Figure(difference, n=pairs, records=pair.records, note=pair.box)


@form("measured")
def counted(
    evidence: Evidence,
    *,
    report: str,
    task: str,
    strategy: Strategy,
    over: Strategy,
    figure: Counted,
    over_figure: Counted = "",
    times: float = 1,
    where: Where = "",
    over_where: Where = "",
) -> Figure:
    """Return the ratio of two measured sizes, with the minimum and maximum over runs as its range.

    `figure` may be a ratio such as `sent/tokens`. `times` multiplies it, to undo a split over ranks.
    """
    pair = evidence.pair(report, task, strategy, over, where, over_where)
    above = pair.treatment.apply(_size, axis=1, figure=figure)
    below = pair.control.apply(_size, axis=1, figure=over_figure or figure)
    if above.isna().any() or below.isna().any() or not (below > 0).all():
        raise NotJudged(f"has no {over_figure or figure} of {over}, or no {figure} of {strategy}", report)
    value = times * float(above.median() / below.median())
    low, high = times * float(above.min() / below.max()), times * float(above.max() / below.min())
    return Figure(value, low, high, len(above), pair.records, pair.box, is_range=True)


@form("measured")
def ratio_slope(
    evidence: Evidence,
    *,
    report: str,
    task: str,
    strategy: Strategy,
    over: Strategy,
    figure: Measured,
    along: Along,
    levels: int,
    least_pairs: int,
    where: Where = "",
) -> Figure:
    """Return the log-log slope of the ratio of two strategies over size, length or batch.

    A slope of 0 means that the ratio stays the same, and 0.1 that it grows by 7 % per doubling. It is fitted for each
    seed, with an interval over the seeds.
    """
    pairs = evidence.levels(report, task, strategy, over, figure, along, where, levels, least_pairs)
    estimate = interval(np.exp(_slopes(pairs, figure, lambda both: np.log(both["mine"] / both["its"]), np.log)))
    exponential = _estimate(estimate, least_pairs, report, f"seeds with every {along}", *_level_runs(pairs))
    low, high = (math.log(end) for end in (exponential.low, exponential.high) if end is not None)
    return dataclasses.replace(exponential, value=math.log(exponential.value), low=low, high=high, is_slope=True)


@form("measured")
def growth(
    evidence: Evidence,
    *,
    report: str,
    task: str,
    strategy: Strategy,
    over: Strategy,
    figure: Measured,
    along: Along,
    levels: int,
    least_pairs: int,
    where: Where = "",
) -> Figure:
    """Return the growth of one strategy's figure with size, length or batch, as a multiple of the other's."""
    pairs = evidence.levels(report, task, strategy, over, figure, along, where, levels, least_pairs)
    treatment, control = (_slopes(pairs, figure, operator.itemgetter(side), np.asarray) for side in ("mine", "its"))
    of = f"seeds with every {along}"
    return _estimate(interval(treatment / control), least_pairs, report, of, *_level_runs(pairs))


@form("measured")
def probed(evidence: Evidence, *, report: str, probe: str, figure: str, over: str = "") -> Figure:
    """Return the effect of one setting on the engine, or its ratio to another setting's effect.

    Its range is the minimum and maximum of several starts.
    """
    probes = evidence.keys(report)
    names = (probe, *filter(None, [over]))
    starts = [probes.get(name, {}).get("figures", {}).get(figure) or [None] for name in names]
    for name, values in zip(names, starts, strict=True):
        if None in values:
            raise NotJudged(f"has no {figure} of {name}", report)
    above, below = (*starts, [1])[:2]
    value, low, high = np.median(above) / np.median(below), min(above) / max(below), max(above) / min(below)
    records = tuple(f"{report}/{name}" for name in names)
    note = str(probes[probe]["said"])
    return Figure(float(value), float(low), float(high), len(above), records, note, is_range=True)


@form("measured")
def corrected(evidence: Evidence, *, figure: SessionFigure, least_sessions: int) -> Figure:
    """Return the ratio of the ZeRO arm to the standard one, in sessions of the listing with all switches corrected."""
    arms = evidence.arms[evidence.arms["kind"] == "corrected"]
    runs = arms.rename(columns={"state": "status_state"}).assign(repeat=1)
    estimate = paired_ratio(pivot_by_seed(runs, figure), "zero", "standard")
    return _estimate(estimate, least_sessions, AUTOPSY, f"corrected sessions with {figure}", *_sessions(arms))


@form("measured")
def engine_as_printed(evidence: Evidence, *, least_sessions: int) -> Figure:
    """Return the fraction of the sessions of the listing exactly as printed in which DeepSpeed was active."""
    arms = evidence.arms
    printed = arms[(arms["cell"] == _AS_PRINTED) & arms["kind"].isin(["factorial", "listing"])]
    ended_with_zero = printed[(printed["state"] == "ok") & printed["arm"].astype(str).str.startswith("zero")]
    was_on = ended_with_zero.groupby("session")["deepspeed_enabled"].any()
    if len(was_on) < least_sessions:
        raise NotJudged(f"{least_sessions} sessions as printed are needed, and {AUTOPSY} has {len(was_on) or 'none'}")
    records, scale = _sessions(printed)
    return Figure(was_on.sum() / len(was_on), n=len(was_on), records=records, note=scale)


@form("measured")
def missing(_: Evidence, *, needs: str) -> Figure:
    """Raise NotJudged: this part of the claim has no records yet."""
    raise NotJudged(awaited(needs))


def _estimate(estimate: Interval, least: int, report: str, of: str, records: tuple[str, ...], note: str) -> Figure:
    """Return an interval as a figure; raise NotJudged if it has fewer than `least` pairs, runs or sessions."""
    if estimate.low is None or estimate.n < least:
        raise NotJudged(f"{least} {of} are needed, and {report} has {estimate.n or 'none'}")
    error = float(np.log(estimate.points).std(ddof=1) / math.sqrt(estimate.n))
    return Figure(estimate.center, estimate.low, estimate.high, estimate.n, records, note, error, estimate.n - 1)


def _with_test(figure: Figure, test: PairTest | None) -> Figure:
    """Return the figure with the interval and the error of the test of its report, if it has one."""
    if test is None:
        return figure
    reach = test.error * t_quantile((1 + CONFIDENCE) / 2, test.df)
    low, high = math.exp(test.mean - reach), math.exp(test.mean + reach)
    return dataclasses.replace(figure, low=low, high=high, standard_error=test.error, df=test.df)


def _size(run: pd.Series, figure: str) -> float:
    above, _, below = figure.partition("/")
    return counted_bytes(run, above) / (counted_bytes(run, below) if below else 1)


def _slopes(
    pairs: Levels, figure: str, select: Callable[[pd.DataFrame], pd.Series], scale: Callable[[Any], Any]
) -> np.ndarray:
    """Return the slope over the levels for each seed that has all of them."""
    table = pd.DataFrame({level: select(pair.by_seed(figure)) for level, pair in pairs.items()}).dropna()
    return np.array([np.polyfit(scale(list(table)), row, 1)[0] for row in table.to_numpy(dtype=float)])


def _level_runs(pairs: Levels) -> tuple[tuple[str, ...], str]:
    return tuple(run for pair in pairs.values() for run in pair.records), next(reversed(pairs.values())).box


def _sessions(arms: pd.DataFrame) -> tuple[tuple[str, ...], str]:
    ended = arms.loc[arms["state"] == "ok", "session"].unique()
    scale = f"{arms['session'].nunique()} sessions on one rank, scale {', '.join(arms['scale'].unique())}"
    return tuple(f"{AUTOPSY}/{session}" for session in ended), scale


def _known(summary: dict[str, Any], figure: str) -> float:
    value = virtual_bytes(summary, figure)
    if math.isnan(value):
        where = f"{summary['strategy']} of {summary['model']} at {summary['world_size']} ranks"
        raise NotJudged(f"{figure} of {where} cannot be extrapolated over layers")
    return value
