"""Share of predictions that equal their reference."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np

from study.workloads.metrics.in_memory import InMemory


class Accuracy(InMemory):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: class indices, one each per sample.",
            features=datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
