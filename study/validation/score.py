"""Every measurement beside what is predicted of it."""

from __future__ import annotations

import dataclasses

from study.host.memory import GIB
from study.predict.request import Request
from study.predict.state import state_of
from study.validation.measured import Measured, impossible, predicted_fit, predicted_peak, predicted_step_s


@dataclasses.dataclass(frozen=True)
class Scored:
    source: str
    name: str
    strategy: str
    offloads: bool
    precision: str
    device: str
    ranks: int
    use: str
    use_memory: str
    refused: str | None
    peak_kind: str
    peak_gib: float | None
    predicted_peak_gib: float | None
    # Of that, weights and the optimizer.
    state_gib: float | None
    step_s: float | None
    predicted_step_s: float | None
    fits: bool | None
    predicted_fits: bool | None
    url: str

    @property
    def peak_error(self) -> float | None:
        return _error(self.predicted_peak_gib, self.peak_gib)

    @property
    def step_error(self) -> float | None:
        return _error(self.predicted_step_s, self.step_s)


def score(row: Measured) -> Scored:
    request, refused = row.request, impossible(row)
    counts = refused is None
    return Scored(
        source=row.source,
        name=row.name,
        strategy=request.strategy.name,
        offloads=request.strategy.offloads,
        precision=request.precision,
        device=request.box.device.name,
        ranks=request.box.ranks,
        use=row.use,
        use_memory=row.use_memory,
        refused=refused,
        peak_kind=row.peak_kind,
        peak_gib=None if row.peak_bytes is None else row.peak_bytes / GIB,
        predicted_peak_gib=predicted_peak(row) / GIB if counts and row.peak_bytes is not None else None,
        state_gib=_held(request) / GIB if counts and row.peak_bytes is not None else None,
        step_s=row.step_s,
        predicted_step_s=predicted_step_s(row) if counts and row.step_s is not None else None,
        fits=row.fits,
        predicted_fits=predicted_fit(row)
        if counts and row.fits is not None and request.box.device.memory_gib
        else None,
        url=row.url,
    )


def _held(request: Request) -> float:
    state = state_of(request)
    return state.params_device + state.optimizer_device


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None
