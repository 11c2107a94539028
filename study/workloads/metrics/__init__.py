"""Scores of an evaluation, by the local `evaluate` metrics in this folder: those of the library need the hub."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@functools.cache
def load_metric(name: str) -> Any:
    """Load a metric; only at the first evaluation, since importing `evaluate` takes most of a second."""
    # evaluate.load() would copy the module into HF_HOME first, which may be full or read-only.
    from study.workloads.metrics import local

    return getattr(local, name.title())(keep_in_memory=True)


def summarize_evaluation(
    task: str, sample_losses: Tensor, predictions: Tensor | None, references: Tensor | None
) -> dict[str, float]:
    """Return `eval_loss`, and `accuracy` (bert-imdb) or `perplexity` (gpt-wikitext), over all samples of the split.

    Losses are per sample: batches differ in size, so a mean of batch means is biased.
    """
    losses = sample_losses.double()
    result = {"eval_loss": float(losses.mean())}
    if task == "bert-imdb":
        return result | load_metric("accuracy").compute(predictions=predictions, references=references)
    return result | load_metric("perplexity").compute(predictions=losses)
