"""Local `evaluate` metrics."""

from __future__ import annotations

from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np


class _Local(evaluate.Metric):
    inputs: ClassVar[dict[str, str]]

    def _build_data_dir(self) -> str:
        return ""  # The library would create a folder in HF_HOME, even for an in-memory metric.

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value(kind) for name, kind in self.inputs.items()})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)


class Accuracy(_Local):
    """Share of predictions that equal their reference, both class indices."""

    inputs: ClassVar[dict[str, str]] = {"predictions": "int64", "references": "int64"}

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class Perplexity(_Local):
    """exp of the mean negative log-likelihood per token, in nats. Predictions are the mean losses of equal samples."""

    inputs: ClassVar[dict[str, str]] = {"predictions": "float64"}

    def _compute(self, predictions: Any) -> dict[str, float]:
        with np.errstate(over="ignore"):  # The perplexity of a diverged model is infinite.
            return {"perplexity": float(np.exp(np.mean(predictions)))}
