"""Location and size of the first difference of a training from its reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from study.compositions.features import Combination
from study.compositions.own_figures import expect_figures
from study.compositions.reference import PlainReference, difference
from study.compositions.trace import FigureTrace, Place

# The basis of a figure that is compared with one process.
THE_REFERENCE = "the reference"
# A gradient is a combination of the micro-batches' gradients if this share of it is.
_EXPLAINED = 0.02


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """First difference of a rank from the reference."""

    step: int
    stage: str
    tensor: str
    rank: int
    # Relative to the reference, what rounding allows, and how many tensors of that stage differ.
    size: float
    allowed: float
    tensors: int
    compared_tensors: int
    # The factor to the reference, if the figure is a multiple of it.
    factor: float | None
    # Of a gradient: the weight of each micro-batch's gradient, by rank and micro-batch; 1 is right.
    weights: tuple[tuple[float, ...], ...] | None
    # Shapes of the figure and of the reference, if they are two.
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    # The figure is compared with one process, or with earlier figures of the same ranks.
    basis: str = THE_REFERENCE

    @property
    def describe(self) -> str:
        """Return the difference in one line."""
        where = f"step {self.step}, {self.stage}"
        if self.tensor:
            where += f" of {self.tensor}"
        if self.compared_tensors > 1:
            where += f" and {self.tensors - 1} more of {self.compared_tensors}" * (self.tensors > 1)
        return f"{where}: {self.what}"

    @property
    def what(self) -> str:
        if self.shapes is not None:
            return f"has the shape {self.shapes[0]}, {self.basis} {self.shapes[1]}"
        if self.factor is not None:
            return f"{self.factor:.3g} times {self.basis}"
        if self.weights is not None:
            return _shares_text(self.weights)
        size = (
            f"not finite, or above {'a reference' if self.basis == THE_REFERENCE else self.basis} of 0"
            if not np.isfinite(self.size)
            else f"differs by {self.size:.2g} of {'it' if self.basis == THE_REFERENCE else self.basis}"
        )
        return f"{size} (rounding: {self.allowed:.1g})"


def _shares_text(weights: tuple[tuple[float, ...], ...]) -> str:
    """Return which micro-batches count wrongly."""
    ranks = [
        f"rank {rank}: {' '.join(f'{round(weight, 2) + 0.0:g}' for weight in row)}" for rank, row in enumerate(weights)
    ]
    return f"each micro-batch counts ({'; '.join(ranks)}), right is 1"


@dataclasses.dataclass(frozen=True)
class _Deviation:
    """A figure that is further from its basis than rounding allows."""

    rank: int
    place: Place
    size: float
    allowed: float
    expected: np.ndarray[Any, Any]
    basis: str = THE_REFERENCE


def first_difference(
    traces: Mapping[int, FigureTrace], reference: PlainReference, combination: Combination | None = None
) -> FirstDifference | None:
    """Return the first place outside rounding over all ranks; None if there is none.

    With a combination the figures are also compared with earlier ones of the same ranks.
    """
    located = locate_differences(traces, reference, combination)
    return located[0] if located else None


def locate_differences(
    traces: Mapping[int, FigureTrace], reference: PlainReference, combination: Combination | None = None
) -> list[FirstDifference]:
    """Return the first difference, and the first later one of another stage that it cannot have caused, if there are
    any."""
    wrong = [
        _Deviation(rank, place, size, reference.allowed[rank][place], reference.traces[rank].figures[place])
        for rank, place, size in _differences(traces, reference)
        if size > reference.allowed[rank][place]
    ]
    inconsistencies = list(_inconsistencies(traces, reference, combination)) if combination is not None else []
    if not wrong and not inconsistencies:
        return []
    first = min(excess.place.order for excess in [*wrong, *inconsistencies])
    entries = [excess for excess in wrong if excess.place.order == first]
    located = [_describe(entries or _earliest(inconsistencies), traces, reference)]
    stage = located[0].stage
    if later := [excess for excess in inconsistencies if excess.place.order > first and excess.place.stage != stage]:
        located.append(_describe(_earliest(later), traces, reference))
    return located


def _earliest(excesses: list[_Deviation]) -> list[_Deviation]:
    first = min(excess.place.order for excess in excesses)
    return [excess for excess in excesses if excess.place.order == first]


def _inconsistencies(
    traces: Mapping[int, FigureTrace], reference: PlainReference, combination: Combination
) -> Iterator[_Deviation]:
    for expectation in expect_figures(traces, reference, combination):
        size = difference(traces[expectation.rank].figures[expectation.place], expectation.expected)
        if size > expectation.allowed:
            yield _Deviation(
                expectation.rank, expectation.place, size, expectation.allowed, expectation.expected, expectation.basis
            )


def _describe(
    entries: list[_Deviation], traces: Mapping[int, FigureTrace], reference: PlainReference
) -> FirstDifference:
    """Return the clearest of the differences of one place in the order."""
    # The forward pass has an order; of the rest the largest difference is the clearest.
    clearest = entries[0] if entries[0].place.stage == "forward" else max(entries, key=lambda entry: entry.size)
    place, trace = clearest.place, traces[clearest.rank]
    value, expected = trace.figures[place], clearest.expected
    compared_tensors = {other_place for other_place in trace.figures if other_place.order == place.order}
    return FirstDifference(
        place.step,
        place.stage,
        place.tensor,
        clearest.rank,
        clearest.size,
        clearest.allowed,
        len({entry.place for entry in entries}),
        len(compared_tensors),
        _factor(value, expected, clearest.allowed),
        _weights(entries, trace, reference) if _is_of_micro_batches(clearest) else None,
        (value.shape, expected.shape) if value.shape != expected.shape else None,
        clearest.basis,
    )


def _is_of_micro_batches(excess: _Deviation) -> bool:
    """Whether a difference is that of a gradient whose micro-batches the reference has."""
    return (excess.place.step, excess.place.stage, excess.basis) == (1, "gradient", THE_REFERENCE)


def largest_share_of_limit(
    traces: Mapping[int, FigureTrace], reference: PlainReference, combination: Combination | None = None
) -> float:
    """Return the largest difference of a figure as a share of its limit, which rounding gives; above 1 it differs."""
    shares = [size / reference.allowed[rank][place] for rank, place, size in _differences(traces, reference)]
    if combination is not None:
        for expectation in expect_figures(traces, reference, combination):
            if expectation.allowed:
                shares.append(
                    difference(traces[expectation.rank].figures[expectation.place], expectation.expected)
                    / expectation.allowed
                )
    return max(shares)


def _differences(traces: Mapping[int, FigureTrace], reference: PlainReference) -> Iterator[tuple[int, Place, float]]:
    """Yield rank, place and size of each difference to the reference, also those of rounding."""
    for rank, trace in traces.items():
        for place, value in trace.figures.items():
            expected = reference.traces[rank].figures.get(place)
            if expected is not None:
                yield rank, place, difference(value, expected)


def _factor(value: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], allowed: float) -> float | None:
    """Return c if the figure is c times the reference up to rounding, and not 0."""
    if value.shape != expected.shape or not np.isfinite(value).all():
        return None
    size = float((expected * expected).sum())
    if not size:
        return None
    factor = float((value * expected).sum()) / size
    rest = float(np.linalg.norm(value - factor * expected)) / size**0.5
    return factor if rest <= max(allowed, 1e-3 * abs(factor)) and factor else None


def _weights(
    wrong: Iterable[_Deviation], trace: FigureTrace, reference: PlainReference
) -> tuple[tuple[float, ...], ...] | None:
    """Solve for the weight with which each micro-batch's gradient entered the wrong tensors; None if they do not."""
    tensors = sorted({excess.place.tensor for excess in wrong})
    step = 1
    keys = sorted(reference.shares)
    # A rank with one of several experts has the gradient of that expert.
    tensors = [
        name
        for name in tensors
        if Place(step, "gradient", name) in trace.figures and all(name in reference.shares[key] for key in keys)
    ]
    if not tensors:
        return None
    values = np.concatenate([trace.figures[Place(step, "gradient", name)].ravel() for name in tensors])
    columns = np.stack(
        [np.concatenate([reference.shares[key][name].ravel() for name in tensors]) for key in keys], axis=1
    ) / len(keys)
    if not np.isfinite(values).all():
        return None
    solution, *_ = np.linalg.lstsq(columns, values, rcond=None)
    rest = np.linalg.norm(values - columns @ solution) / (np.linalg.norm(values) or 1.0)
    if rest > _EXPLAINED:
        return None
    ranks = sorted({rank for rank, _ in keys})
    return tuple(
        tuple(float(weight) for key, weight in zip(keys, solution, strict=True) if key[0] == rank) for rank in ranks
    )
