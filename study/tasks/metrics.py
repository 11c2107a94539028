"""The figures of one evaluation, through the `evaluate` metric modules in study/metrics (a hub fetch otherwise)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

METRICS = Path(__file__).parent.parent / "metrics"


@functools.cache
def load_metric(name: str) -> Any:
    """Importing `evaluate` costs most of a second, so nothing does before the first evaluation."""
    import evaluate

    # In memory: evaluations of runs side by side would share one temporary file otherwise.
    return evaluate.load(str(METRICS / name), keep_in_memory=True)


def summarize_evaluation(
    task: str,
    sample_losses: Tensor,
    predictions: Tensor | None,
    references: Tensor | None,
    weights: Tensor | None = None,
) -> dict[str, float]:
    """`eval_loss`, and `accuracy` (bert-imdb) or `perplexity` (gpt-wikitext), over all samples of the split.

    Losses are per sample, not per batch: batches differ in size, and a mean of their means is biased. `weights` are the
    scored tokens (or samples) behind each loss, where they differ; repeats that only pad a batch weigh nothing.
    """
    losses = sample_losses.double()
    scored = weights.double() if weights is not None else losses.new_ones(losses.shape)
    result = {"eval_loss": float((losses * scored).sum() / scored.sum())}
    if task == "bert-imdb":
        assert predictions is not None
        assert references is not None
        counted = scored.bool()
        return result | load_metric("accuracy").compute(
            predictions=predictions[counted], references=references[counted]
        )
    return result | load_metric("perplexity").compute(predictions=losses, references=scored)
