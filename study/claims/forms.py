"""Every form of check, and what the words of a check may be."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd

from study.autopsy.contrasts import corrected_ratio, engine_was_on, is_as_printed
from study.autopsy.design import RESPONSES
from study.claims.evidence import AUTOPSY, SETTINGS, Evidence, Levels, Pair, counted_bytes, virtual_bytes
from study.claims.verdicts import Figure, Kind, NotJudged, awaited
from study.config.flags import Precision
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.predictor.floor import KINDS, StateBytes, papers_state_bytes, papers_traffic, split_by, state_bytes
from study.records.statistics import interval
from study.virtual.records import AS_SHIPPED, Summary

# A form of check: it makes one figure of a claim's own numbers, or of records. Ledger entries fill it in.


class Form(NamedTuple):
    kind: Kind
    figure: Callable[..., Figure]


FORMS: dict[str, Form] = {}


def form(kind: Kind) -> Callable[[Callable[..., Figure]], Callable[..., Figure]]:
    def register(figure: Callable[..., Figure]) -> Callable[..., Figure]:
        FORMS[figure.__name__] = Form(kind, figure)
        return figure

    return register


# The forms that need no record: what a document's own numbers come to, and what it says of itself.

GB = 1e9
MIXED = "bf16-engine"


def held_bytes(strategy: str, ranks: int, precision: str = MIXED) -> StateBytes:
    """Per parameter; by default 2 + 2 + 12 bytes, as mixed-precision Adam keeps them."""
    return state_bytes(read_strategy(strategy), precision, ranks)


@form("consistency")
def stated(_: Evidence, *, value: float) -> Figure:
    """A number that the document itself gives, or that can be counted in its listing."""
    return Figure(value)


@form("arithmetic")
def ratio(_: Evidence, *, of: float, to: float) -> Figure:
    return Figure(of / to)


@form("arithmetic")
def saving(_: Evidence, *, before: float, after: float) -> Figure:
    """As a share."""
    return Figure(1 - after / before)


@form("arithmetic")
def steps_per_hour(_: Evidence, *, tokens_per_s: float, gpus: int, batch: int, length: int) -> Figure:
    """What a speed per GPU comes to with this batch."""
    return Figure(3600 * tokens_per_s * gpus / (batch * length))


@form("arithmetic")
def tflops(_: Evidence, *, parameters_b: float, tokens_per_s: float) -> Figure:
    """Six operations for each parameter and token."""
    return Figure(6 * parameters_b * tokens_per_s / 1e3)


@form("arithmetic")
def state_gb(_: Evidence, *, parameters_b: float, strategy: str, gpus: int, precision: str = MIXED) -> Figure:
    """Model state on one device."""
    return Figure(parameters_b * held_bytes(strategy, gpus, precision).device)


@form("arithmetic")
def state_ratio(
    _: Evidence, *, strategy: str, gpus: int, over: str, over_gpus: int, over_precision: str = MIXED
) -> Figure:
    """Model state on one device, of two ways to train one model."""
    return Figure(held_bytes(strategy, gpus).device / held_bytes(over, over_gpus, over_precision).device)


@form("arithmetic")
def state_saved_gb(_: Evidence, *, parameters_b: float, strategy: str, over: str, gpus: int) -> Figure:
    return Figure(parameters_b * (held_bytes(over, gpus).device - held_bytes(strategy, gpus).device))


@form("arithmetic")
def capacity_b(_: Evidence, *, device_gb: float, strategy: str, gpus: int) -> Figure:
    """Billions of parameters whose model state alone fills the device: activations make it less."""
    return Figure(device_gb / held_bytes(strategy, gpus).device)


@form("arithmetic")
def solved_bytes(
    _: Evidence, *, parameters_b: float, gpus: int, stage0_gb: float, stage2_gb: float, stage3_gb: float, what: str
) -> Figure:
    """Three peaks are three equations: of weights, of gradients with optimizer, and of a rest that no stage splits.

    `what` is `weights` or `sharded`, in bytes for each parameter, or `rest`, in GB.
    """
    kept = 1 - 1 / gpus
    sharded, weights = (stage0_gb - stage2_gb) / kept, (stage2_gb - stage3_gb) / kept
    solved = {"weights": weights / parameters_b, "sharded": sharded / parameters_b,
              "rest": stage0_gb - weights - sharded}  # fmt: skip
    return Figure(solved[what])


@form("arithmetic")
def shares_gb(_: Evidence, *, params_gb: float, grads_gb: float, optimizer_gb: float, stage: int, gpus: int) -> Figure:
    """Three sizes, split as the stage says."""
    sizes = {"optimizer": optimizer_gb, "grads": grads_gb, "params": params_gb}
    return Figure(sum(size / split_by(kind, stage, gpus) for kind, size in sizes.items()))


@form("consistency")
def settings_changed(_: Evidence, *, strategy: str, over: str) -> Figure:
    """DeepSpeed's ZeRO keys that the second strategy's file lacks or has another value for."""
    mine, others = (dict((read_strategy(name).deepspeed or {})["zero_optimization"]) for name in (strategy, over))
    changed = [key for key in mine if key not in others or mine[key] != others[key]]
    return Figure(len(changed), records=tuple(f"accelerate_configs/{name}.yaml" for name in (over, strategy)))


def formula_bytes(parameters: float, figure: str, stage: int, ranks: int) -> float:
    """The ZeRO paper's, in mixed precision."""
    if figure == "state":
        return papers_state_bytes(parameters, stage, ranks)
    if figure == "sent":
        return parameters * KINDS["params"][0] * papers_traffic(stage, ranks)
    if figure not in KINDS:
        raise NotJudged(f"the paper has no formula for {figure}")
    return parameters * KINDS[figure][0] / split_by(figure, stage, ranks)


# The forms that judge by records: of virtual ranks, of real runs, of probes and of the listing's sessions.


@form("virtual")
def virtual(
    evidence: Evidence, *, report: str, model: str, strategy: str, ranks: int, figure: str, setting: str = AS_SHIPPED,
    over: str = "", over_ranks: int = 0, over_figure: str = "",
) -> Figure:  # fmt: skip
    """A figure of one of N ranks, which had no others: GB, or calls; or as a multiple of another one.

    `over` is a strategy, `paper` for the ZeRO paper's formula of the same stage, or `ddp` for its formula of plain
    data parallelism, which no virtual rank here ran.
    """
    one = evidence.rank(report, model, strategy, ranks, setting)
    value, records = _known(one, figure), evidence.runs_of(report, one)
    if not (over or over_ranks or over_figure):
        return Figure(value if figure == "calls" else value / GB, n=len(records), records=records)
    below_figure, below_ranks = over_figure or figure, over_ranks or ranks
    if over in ("paper", "ddp"):
        stage = int(one["stage"]) if over == "paper" else 0
        below = formula_bytes(float(one["model_parameters"]), below_figure, stage, below_ranks)
    else:
        other = evidence.rank(report, model, over or strategy, below_ranks, setting)
        below, records = _known(other, below_figure), (*records, *evidence.runs_of(report, other))
    return Figure(value / below, n=len(records), records=records)


@form("virtual")
def virtual_furthest(evidence: Evidence, *, report: str, model: str, printed: str) -> Figure:
    """How far the furthest cell is from what is printed for stages 1, 2 and 3, as a share of it.

    A printed figure is rounded: half a unit of its last digit is not off.
    """
    furthest = 0.0
    records: tuple[str, ...] = ()
    for line in printed.split(";"):
        ranks, figures = line.split(":")
        for stage, figure in enumerate(figures.split(), start=1):
            one = evidence.rank(report, model, f"zero{stage}", int(ranks), AS_SHIPPED)
            half = 0.5 / 10 ** len(figure.partition(".")[2])
            off = max(0.0, abs(_known(one, "state") / GB - float(figure)) - half)
            furthest = max(furthest, off / float(figure))
            records += evidence.runs_of(report, one)
    return Figure(furthest, n=len(records), records=records)


@form("measured")
def paired(
    evidence: Evidence, *, report: str, task: str, strategy: str, over: str, figure: str, least_pairs: int,
    where: str = "", over_where: str = "",
) -> Figure:  # fmt: skip
    """The ratio of a time, a loss or a peak of two strategies, seed by seed, with its interval.

    `where` chooses the runs by their settings; `over_where` has what the others have instead.
    """
    pair = evidence.pair(report, task, strategy, over, where, over_where, is_loss="loss" in figure)
    found = pair.ratio(figure)
    if found.low is None or found.n < least_pairs:
        raise NotJudged(_too_few(report, found.n, least_pairs, f"pairs of {strategy} and {over}"))
    return Figure(found.center, found.low, found.high, found.n, pair.records, pair.box)


@form("measured")
def largest(
    evidence: Evidence, *, report: str, task: str, strategy: str, over: str, cap_gib: float, precision: str
) -> Figure:
    """The largest micro-batch that a search found to fit, as a multiple of another strategy's."""
    mine, its = (evidence.fit(report, task, each, cap_gib, precision) for each in (strategy, over))
    sizes = [0 if fit.largest is None else int(fit.largest["per_device_train_batch_size"]) for fit in (mine, its)]
    if not sizes[1]:
        raise NotJudged(f"nothing fits with {over} in {report}")
    records = tuple(f"{report}/{row['run']}" for fit in (mine, its) for row in fit.rungs.values())
    return Figure(sizes[0] / sizes[1], n=len(records), records=records, note=f"{sizes[0]} over {sizes[1]}")


@form("measured")
def utilization(
    evidence: Evidence, *, report: str, task: str, strategy: str, least_runs: int, where: str = ""
) -> Figure:
    """The share of a GPU's peak that the model's own products take, with its interval over runs."""
    pair = evidence.pair(report, task, strategy, strategy, where)
    found = interval(pair.mine["mfu"])
    if found.low is None or found.n < least_runs:
        raise NotJudged(_too_few(report, found.n, least_runs, f"runs of {strategy} with a utilization"))
    return Figure(found.center, found.low, found.high, found.n, pair.records, pair.box)


@form("measured")
def gradient_norms(evidence: Evidence, *, report: str, task: str, strategy: str, over: str, where: str = "") -> Figure:
    """How far apart they are at the step where they differ most, as a share."""
    pair = evidence.pair(report, task, strategy, over, where, is_loss=True)
    apart, pairs = pair.norms_apart(evidence.records(report).steps)
    if not pairs:
        raise NotJudged(f"{report} has no gradient norms of both {strategy} and {over}")
    return Figure(apart, n=pairs, records=pair.records, note=pair.box)


@form("measured")
def counted(
    evidence: Evidence, *, report: str, task: str, strategy: str, over: str, figure: str, over_figure: str = "",
    times: float = 1, where: str = "", over_where: str = "",
) -> Figure:  # fmt: skip
    """The ratio of two sizes that live engines held or sent, with the extremes of all runs as its interval.

    `figure` may be `sent/tokens` or any other ratio. `times` undoes a split over ranks.
    """
    pair = evidence.pair(report, task, strategy, over, where, over_where)
    above = pair.mine.apply(_size, axis=1, figure=figure)
    below = pair.its.apply(_size, axis=1, figure=over_figure or figure)
    if above.isna().any() or below.isna().any() or not (below > 0).all():
        raise NotJudged(f"{report} has no {over_figure or figure} of {over}, or no {figure} of {strategy}")
    value = times * float(above.median() / below.median())
    low, high = times * float(above.min() / below.max()), times * float(above.max() / below.min())
    return Figure(value, low, high, len(above), pair.records, pair.box)


@form("measured")
def ratio_slope(
    evidence: Evidence, *, report: str, task: str, strategy: str, over: str, figure: str, along: str, levels: int,
    least_pairs: int, where: str = "",
) -> Figure:  # fmt: skip
    """How the ratio of two strategies changes with size, length or batch: the slope of its log over the log of that.

    0 where it stays, and 0.1 where it is 7 % larger for twice as much. Seed by seed, with the interval of the seeds.
    """
    pairs = evidence.levels(report, task, strategy, over, figure, along, where, levels, least_pairs)
    logs = _by_level(pairs, lambda pair: np.log(_of_both(pair, figure, "mine") / _of_both(pair, figure, "its")))
    found = interval(np.exp(_slopes(logs, np.log)))
    if found.low is None or found.high is None or found.n < least_pairs:
        raise NotJudged(_too_few(report, found.n, least_pairs, f"seeds with every {along}"))
    records, box = _of_levels(pairs)
    return Figure(math.log(found.center), math.log(found.low), math.log(found.high), found.n, records, box)


@form("measured")
def growth(
    evidence: Evidence, *, report: str, task: str, strategy: str, over: str, figure: str, along: str, levels: int,
    least_pairs: int, where: str = "",
) -> Figure:  # fmt: skip
    """What one strategy's figure grows by with size, length or batch, as a multiple of the other's growth."""
    pairs = evidence.levels(report, task, strategy, over, figure, along, where, levels, least_pairs)
    mine, its = (
        _slopes(_by_level(pairs, functools.partial(_of_both, figure=figure, side=side)), np.asarray)
        for side in ("mine", "its")
    )
    found = interval(mine / its)
    if found.low is None or found.n < least_pairs:
        raise NotJudged(_too_few(report, found.n, least_pairs, f"seeds with every {along}"))
    records, box = _of_levels(pairs)
    return Figure(found.center, found.low, found.high, found.n, records, box)


@form("measured")
def probed(evidence: Evidence, *, report: str, probe: str, figure: str, over: str = "") -> Figure:
    """What the engine made of one setting that it was given; or as a multiple of what it made of another one.

    With the extremes of several starts as its interval.
    """
    probes = evidence.keys(report)
    names = (probe, *filter(None, [over]))
    starts = []
    for name in names:
        starts.append(probes.get(name, {}).get("figures", {}).get(figure) or [None])
        if None in starts[-1]:
            raise NotJudged(f"{report} has no {figure} of {name}")
    mine, its = starts[0], starts[1] if over else [1]
    value, low, high = np.median(mine) / np.median(its), min(mine) / max(its), max(mine) / min(its)
    records = tuple(f"{report}/{name}" for name in names)
    return Figure(float(value), float(low), float(high), len(mine), records, str(probes[probe]["said"]))


@form("measured")
def corrected(evidence: Evidence, *, figure: str, least_sessions: int) -> Figure:
    """The ZeRO arm over the standard one, in sessions of the published listing with every switch corrected."""
    arms = evidence.arms()
    found = corrected_ratio(arms, figure)
    if found.low is None or found.n < least_sessions:
        raise NotJudged(_too_few(AUTOPSY, found.n, least_sessions, f"corrected sessions with {figure}"))
    sessions = arms[arms["kind"] == "corrected"]
    return Figure(found.center, found.low, found.high, found.n, _sessions(sessions), _scale(sessions))


@form("measured")
def engine_as_printed(evidence: Evidence, *, least_sessions: int) -> Figure:
    """In which share of the listing's sessions, exactly as printed, DeepSpeed was on."""
    arms = evidence.arms()
    on, of = engine_was_on(arms, is_as_printed)
    if of < least_sessions:
        raise NotJudged(_too_few(AUTOPSY, of, least_sessions, "sessions as printed"))
    sessions = arms[is_as_printed(arms)]
    return Figure(on / of, n=of, records=_sessions(sessions), note=_scale(sessions))


@form("measured")
def missing(_: Evidence, *, needs: str) -> Figure:
    """A part of the claim that no record here can judge yet."""
    raise NotJudged(awaited(needs))


def _too_few(report: str, have: int, needed: int, of: str) -> str:
    return f"{needed} {of} are needed, and {report} has {have or 'none'}"


def _size(run: pd.Series, figure: str) -> float:
    above, _, below = figure.partition("/")
    return counted_bytes(run, above) / (counted_bytes(run, below) if below else 1)


def _of_both(pair: Pair, figure: str, side: str) -> pd.Series:
    return pair.by_seed(figure)[side]


def _by_level(pairs: Levels, figure: Callable[[Pair], pd.Series]) -> pd.DataFrame:
    """One row per seed that has every level, and one column per level."""
    return pd.DataFrame({level: figure(pair) for level, pair in pairs.items()}).dropna()


def _slopes(table: pd.DataFrame, scale: Callable[[Any], Any]) -> np.ndarray:
    return np.array([np.polyfit(scale(list(table)), row, 1)[0] for row in table.to_numpy(dtype=float)])


def _of_levels(pairs: Levels) -> tuple[tuple[str, ...], str]:
    return tuple(run for pair in pairs.values() for run in pair.records), next(reversed(pairs.values())).box


def _sessions(arms: pd.DataFrame) -> tuple[str, ...]:
    return tuple(f"{AUTOPSY}/{session}" for session in arms.loc[arms["state"] == "ok", "session"].unique())


def _scale(arms: pd.DataFrame) -> str:
    return f"{arms['session'].nunique()} sessions on one rank, scale {', '.join(arms['scale'].unique())}"


def _known(one: Summary, figure: str) -> float:
    value = virtual_bytes(one, figure)
    if math.isnan(value):
        where = f"{one['strategy']} of {one['model']} at {one['world_size']} ranks"
        raise NotJudged(f"no line over layers holds for {figure} of {where}")
    return value


__all__ = ["FORMS", "WORDS"]

_STRATEGIES = "|".join(STRATEGY_NAMES)
_PRECISIONS = "|".join(get_args(Precision))
_STATE = r"(state|params|grads|optimizer)(_(device|host|nvme))?"
_VIRTUAL = rf"{_STATE}|sent|calls|host_peak|device_peak|collective\.\w+"
_SIZE = rf"({_STATE}|sent|gathered|calls|forward)"
# Of a table: ranks, and what is printed for stages 1, 2 and 3.
_CELLS = r"\d+: [\d.]+ [\d.]+ [\d.]+"
_COUNTED = rf"{_SIZE}(/(tokens|parameters))?|parameters|tokens"
_MEASURED = "|".join(
    ("step_time_s_median", "tokens_per_s", "train_loss_final", "eval_loss_final", "host_peak_rss_gib",
     "memory_steady_host_gib", "avg_memory_gib_device", "energy_j")
)  # fmt: skip
_WHERE = rf"(?:{'|'.join(SETTINGS)})=\S+"
_ALONG = "model_parameters|seq_length|global_batch_size|micro_batch_size"
# What a word of a check must be, by its key or by its form and key; other words are free.
WORDS = {
    "strategy": _STRATEGIES, "over": f"{_STRATEGIES}|paper", "precision": _PRECISIONS, "over_precision": _PRECISIONS,
    "what": "weights|sharded|rest", "virtual.figure": _VIRTUAL, "virtual.over_figure": _VIRTUAL,
    "counted.figure": _COUNTED, "counted.over_figure": _COUNTED, "virtual_furthest.printed": rf"{_CELLS}(; {_CELLS})*",
    "paired.figure": _MEASURED, "ratio_slope.figure": _MEASURED, "growth.figure": _MEASURED, "along": _ALONG,
    "where": f"{_WHERE}( {_WHERE})*", "over_where": f"{_WHERE}( {_WHERE})*", "probed.over": ".+",
    "corrected.figure": "|".join(each.name for each in RESPONSES),
}  # fmt: skip
