"""Scores of an evaluation, by the local `evaluate` metrics in this folder: those of the library need the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def summarize_evaluation(
    task: str, sample_losses: Tensor, predictions: Tensor | None, references: Tensor | None
) -> dict[str, float]:
    """Return `eval_loss`, and `accuracy` (bert-imdb) or `perplexity` (gpt-wikitext), over all samples of the split.

    Losses are per sample: batches differ in size, so a mean of batch means is biased.
    """
    # Imported here, since importing `evaluate` takes most of a second. Its load() would copy the module into HF_HOME
    # first, which may be full or read-only.
    from study.workloads.metrics.local import Accuracy, Perplexity

    losses = sample_losses.double()
    result = {"eval_loss": float(losses.mean())}
    if task == "bert-imdb":
        return result | Accuracy(keep_in_memory=True).compute(predictions=predictions, references=references)
    return result | Perplexity(keep_in_memory=True).compute(predictions=losses)
