"""Share of predictions that equal their reference."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """Local `evaluate` metric of accuracy."""

    def _build_data_dir(self) -> str:
        return ""  # The library would create a folder in HF_HOME, even for an in-memory metric.

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: class indices, one each per sample.",
            features=datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
