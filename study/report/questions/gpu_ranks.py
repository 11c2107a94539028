"""Virtual ranks on a GPU, compared with their prediction and with virtual ranks on CPUs."""

from __future__ import annotations

import functools
import json
import math
from typing import Any, NamedTuple

import pandas as pd

from study.host.memory import GIB
from study.predictor import recorded_runs
from study.predictor.memory import predict_memory
from study.predictor.recorded_runs import request_if_any
from study.predictor.request import Request
from study.predictor.state import predict_state
from study.predictor.time import predict_time
from study.predictor.zero3_gathers import simulate_gathers
from study.records.frames import RUNS_FILE, Records, read_parquet, virtual_runs
from study.records.schema import STATE_KINDS, STATE_PLACES
from study.report.document import Answer, Question, change_text, format_or_dash
from study.report.facts import Headline, caption, footnotes
from study.virtual.summaries import GB, setting_text, with_whole_models

# Columns that, with the settings, are equal for runs with the same model state; weights gathered at the end of the
# forward pass also depend on checkpointing. Neither depends on the length of a sequence.
_SAME_STATE = ("model_name_or_path", "strategy", "world_size", "virtual_rank", "group_ranks", "engine_precision")
_SETTING, _IS_EXTRAPOLATED = "setting", "extrapolated"
_STATE = [f"{kind}_bytes_{place}" for kind in STATE_KINDS for place in STATE_PLACES]
_STATE_GB, _GATHERED_GB, _PEAK_GB = "State, GB", "Gathered, GB", "Peak, GB"
_LAYER_MS = "Step without communication, ms a layer"


class _Bytes(NamedTuple):
    """A figure of a virtual rank on a GPU, predicted and of a virtual rank on CPUs; NaN if there is none."""

    measured: float
    predicted: float
    on_cpus: float = math.nan

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1

    @property
    def difference_from_cpus(self) -> float:
        return self.measured / self.on_cpus - 1


class _Case(NamedTuple):
    run: Any
    request: Request
    state: _Bytes
    gathered: _Bytes
    peak: _Bytes
    is_extrapolated: bool

    @property
    def scope(self) -> str:
        return f"{self.run.model_name_or_path} at {self.run.world_size:.0f} ranks"


def cases(records: Records) -> list[_Case]:
    """Return the virtual ranks that trained on a GPU and can be predicted."""
    runs = _ended(records)
    runs = runs[_on_device(runs)]
    if runs.empty:
        return []
    on_cpus = pd.concat([_cpu_ranks(records), _committed_cpu_ranks()])
    requests = ((run, request_if_any(run)) for run in runs.itertuples())
    return [_case(run, request, on_cpus) for run, request in requests if request is not None]


def _ended(records: Records) -> pd.DataFrame:
    """Return the virtual ranks that succeeded, with a column of their settings."""
    runs = virtual_runs(records).runs.query("status_state == 'ok'")
    return runs.assign(**{_SETTING: [setting_text(run) for run in runs.to_dict("records")]})


def _on_device(runs: pd.DataFrame) -> pd.Series:
    """Whether each run has a GPU."""
    return runs["devices"].map(lambda devices: bool(json.loads(devices))).astype(bool)


def _cpu_ranks(records: Records) -> pd.DataFrame:
    """Return virtual ranks on CPUs; those of a model that ran completely come before extrapolated ones."""
    runs = _ended(with_whole_models(records))
    return runs[~_on_device(runs)].sort_values(_IS_EXTRAPOLATED, kind="stable")


@functools.cache
def _committed_cpu_ranks() -> pd.DataFrame:
    """Return the virtual ranks of this project's records on CPUs; no rows if there is no folder of records."""
    folders = (recorded_runs.REPORTS / suite for suite in recorded_runs.SUITES)
    tables = [_cpu_ranks(read_parquet(folder)) for folder in folders if (folder / RUNS_FILE).is_file()]
    return pd.concat(tables) if tables else pd.DataFrame()


def _case(run: Any, request: Request, on_cpus: pd.DataFrame) -> _Case:
    predicted = predict_state(request)
    state = predicted.device + predicted.host + predicted.nvme
    gathered = simulate_gathers(request).live_at_end * request.gathered_bytes if request.strategy.zero_stage == 3 else 0
    peak = predict_memory(request).peak_allocated.value
    same = _like(run, on_cpus, *_SAME_STATE, _SETTING)
    return _Case(
        run,
        request,
        _Bytes(sum(getattr(run, name) for name in _STATE), state, _first(same[_STATE].sum(axis=1, skipna=False))),
        _Bytes(
            run.forward_gathers_bytes,
            gathered,
            _first(_like(run, same, "gradient_checkpointing")["forward_gathers_bytes"]),
        ),
        _Bytes(run.peak_memory_gib_allocated * GIB, peak),
        bool(same[_IS_EXTRAPOLATED].iloc[0]) if len(same) else False,
    )


def _like(run: Any, runs: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Return the runs that have the values of a run in these columns; two missing values are equal."""
    for column in columns:
        value = getattr(run, column)
        runs = runs[runs[column].isna() if pd.isna(value) else runs[column].eq(value).fillna(False)]
    return runs


def _first(figures: pd.Series) -> float:
    measured = figures.dropna()
    return float(measured.iloc[0]) if len(measured) else math.nan


def _answer(records: Records) -> Answer | None:
    ranks = cases(records)
    if not ranks:
        return None
    has_cpu_ranks = any(not math.isnan(case.state.on_cpus) for case in ranks)
    notes = footnotes("gpu_ranks", {"about": True, "on_cpus": has_cpu_ranks, "layer": True})
    return Answer(_table(ranks), tuple(_headlines(ranks)), notes)


def _headlines(ranks: list[_Case]) -> list[Headline]:
    """Return the largest difference of a peak from its prediction, and of the state from that of a rank on CPUs."""
    worst = max(ranks, key=lambda case: abs(case.peak.error))
    peak = change_text(worst.peak.error)
    headlines = [Headline(peak, caption("gpu_ranks", "peak"), worst.run.strategy, worst.scope)]
    compared = [case for case in ranks if not math.isnan(case.state.on_cpus)]
    if compared:
        furthest = max(compared, key=lambda case: abs(case.state.difference_from_cpus))
        state = change_text(furthest.state.difference_from_cpus)
        headlines.append(Headline(state, caption("gpu_ranks", "state"), furthest.run.strategy, furthest.scope))
    return headlines


def _table(ranks: list[_Case]) -> pd.DataFrame:
    rows = []
    for case in ranks:
        run = case.run
        rows.append(
            {
                "Model": run.model_name_or_path,
                "Ranks": int(run.world_size),
                "Strategy": run.strategy,
                "Precision": run.precision,
                "Tokens": int(run.seq_length * run.micro_batch_size),
                _STATE_GB: _bytes_text(case.state, case.is_extrapolated),
                _GATHERED_GB: _bytes_text(case.gathered, case.is_extrapolated),
                _PEAK_GB: _bytes_text(case.peak, False),
                _LAYER_MS: _layer_text(case),
            }
        )
    return pd.DataFrame(rows)


def _bytes_text(figure: _Bytes, is_extrapolated: bool) -> str:
    """Return GB as measured, and in brackets as predicted and of a rank on CPUs."""
    about = "~ " if is_extrapolated else ""
    texts = [f"predicted {_gb(figure.predicted)}"]
    if not math.isnan(figure.on_cpus):
        texts.append(f"CPUs {about}{_gb(figure.on_cpus)}")
    return f"{format_or_dash(figure.measured, _gb)} ({', '.join(texts)})"


def _gb(size: float) -> str:
    return f"{size / GB:.4g}"


def _layer_text(case: _Case) -> str:
    """Return the milliseconds of a step for each layer, and in brackets as predicted without exposed communication."""
    predicted = predict_time(case.request)
    computed_s = predicted.step_s.value - predicted.parts["communication_exposed"]
    layers = case.run.model_layers
    measured_ms = 1000 * case.run.step_time_s_median / layers
    return f"{measured_ms:.3g} (predicted {1000 * computed_s / layers:.3g})"


QUESTION = Question(
    "gpu_ranks",
    "How much memory does one of N ranks use on a GPU, measured, predicted and on CPUs?",
    _answer,
)
