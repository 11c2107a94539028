"""Figures of a rank as its earlier figures give them: a fault shows here also after the training has gone wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from study.compositions.features import Combination
from study.compositions.reference import MIN_HALF_ULPS, MIN_HALF_ULPS_OF_WEIGHT, PlainReference
from study.compositions.trace import FigureTrace, Place


@dataclasses.dataclass(frozen=True)
class OwnExpectation:
    """A figure of a rank as earlier figures give it."""

    rank: int
    place: Place
    expected: np.ndarray[Any, Any]
    allowed: float
    # The name of `expected` in a message.
    basis: str


def expect_figures(
    traces: Mapping[int, FigureTrace], reference: PlainReference, combination: Combination
) -> Iterator[OwnExpectation]:
    """Yield the figures of every rank that earlier figures of these ranks, or the first weights, give."""
    sums = _mean_local_gradients(traces)
    for rank, trace in traces.items():
        for place in trace.figures:
            if place.stage == "gradient" and place in sums and not combination.has("quantized_gradients"):
                yield _expect_reduced(rank, place, sums[place], traces)
            elif place.stage == "weight" and _is_frozen(place, reference.traces[rank], combination):
                yield OwnExpectation(rank, place, reference.traces[rank].figures[place], 0.0, "the first weights")
            elif place.stage in _SAVED and (saved := trace.figures.get(_saved_place(place))) is not None:
                allowed = MIN_HALF_ULPS_OF_WEIGHT * _half_ulp_of_weights(combination)
                yield OwnExpectation(rank, place, saved, allowed, "the saved weights")


# The stage of the weights in a checkpoint, by that of the weights that are loaded from it.
_SAVED = {"resumed": "weight", "resumed master": "saved master"}


def _saved_place(place: Place) -> Place:
    return Place(place.step, _SAVED[place.stage], place.tensor)


def _half_ulp_of_weights(combination: Combination) -> float:
    return {"fp16": 2.0**-11, "bf16": 2.0**-9, "fp32_accumulation": 2.0**-9}.get(
        combination.level("precision"), 2.0**-24
    )


def _is_frozen(place: Place, reference: FigureTrace, combination: Combination) -> bool:
    """Whether no step may change a weight; quantized ones are read with their rounding."""
    is_trained = Place(place.step, "update", place.tensor) in reference.figures
    return place in reference.figures and not is_trained and not combination.has("quantized_weights")


def _mean_local_gradients(traces: Mapping[int, FigureTrace]) -> dict[Place, list[np.ndarray[Any, Any]]]:
    """Return the gradients that all ranks have before they reduce them, by the place of the reduced one."""
    gradients: dict[Place, list[np.ndarray[Any, Any]]] = {}
    for trace in traces.values():
        for place, value in trace.figures.items():
            if place.stage == "local gradient":
                gradients.setdefault(Place(place.step, "gradient", place.tensor), []).append(value)
    return {place: values for place, values in gradients.items() if len(values) == len(traces)}


def _expect_reduced(
    rank: int, place: Place, gradients: list[np.ndarray[Any, Any]], traces: Mapping[int, FigureTrace]
) -> OwnExpectation:
    """Return the mean of all ranks' gradients, with the rounding of the type in which the engine adds them."""
    mean = np.mean(gradients, axis=0)
    # Terms that cancel each other leave their rounding.
    terms, size = float(np.mean([np.linalg.norm(value) for value in gradients])), float(np.linalg.norm(mean))
    half_ulp = float(traces[rank].figures[Place(place.step, "reduction rounding")])
    allowed = MIN_HALF_ULPS * half_ulp * (terms / size if size else 1.0)
    return OwnExpectation(rank, place, mean, allowed, "the mean of the ranks' gradients")
