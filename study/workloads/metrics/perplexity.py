"""Perplexity of a language model: exp of the mean negative log-likelihood per token, in nats."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np


class Perplexity(evaluate.Metric):
    """Local `evaluate` metric of perplexity."""

    def _build_data_dir(self) -> str:
        return ""  # The library would create a folder in HF_HOME, even for an in-memory metric.

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: the mean loss of each sample; all samples have equally many tokens.",
            features=datasets.Features({"predictions": datasets.Value("float64")}),
        )

    def _compute(self, predictions: Any) -> dict[str, float]:
        with np.errstate(over="ignore"):  # The perplexity of a diverged model is infinite.
            return {"perplexity": float(np.exp(np.mean(predictions)))}
