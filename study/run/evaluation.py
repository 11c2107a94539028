"""Evaluation whose result does not depend on how many ranks share it.

Every rank makes the same number of equal forward passes (a sharded engine hangs otherwise), so the last batches are
padded with repeats; a loss per sample lets the repeats weigh nothing.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from study.errors import RunFailed
from study.run.steps import DIVERGED_FIX
from study.tasks.metrics import summarize_evaluation

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from study.run.open import OpenRun


def evaluate(run: OpenRun, accelerator: Accelerator, model: Any) -> dict[str, float | None]:
    """Loss, and accuracy or perplexity, over the whole split, on the main process; nothing on the others."""
    import torch

    task, split, batch_size = run.config.task, run.data.eval, run.plan.per_device_train_batch_size
    was_training = model.training
    model.eval()
    launch, teams = run.launch, run.plan.teams
    turns = -(-len(split) // (batch_size * teams))
    losses, predictions = [], []

    def gathered(own: torch.Tensor) -> torch.Tensor:
        """Of all teams, one after the other, as the indices below are; a team's ranks all have the same."""
        return accelerator.gather(own).unflatten(0, (teams, -1, batch_size))[:, 0].flatten(0, 1)

    # A compiled model would be compiled once more for this, without gradients.
    eager = torch.compiler.set_stance("force_eager") if run.config.torch_compile else contextlib.nullcontext()
    with torch.no_grad(), eager:
        for turn in range(turns):
            first = (turn * teams + launch.team) * batch_size
            indices = [index % len(split) for index in range(first, first + batch_size)]
            batch = {name: tensor.to(accelerator.device) for name, tensor in split.__getitems__(indices).items()}
            logits = model(**batch).logits
            losses.append(gathered(_sample_losses(task, logits, batch["labels"])))
            if task == "bert-imdb":
                predictions.append(gathered(logits.argmax(-1)))
    model.train(was_training)
    sample_losses = torch.cat(losses)[: len(split)].double().cpu()
    if not sample_losses.isfinite().all():
        raise RunFailed("the evaluation loss is not a number: the step before it left unusable weights", DIVERGED_FIX)
    if not accelerator.is_main_process:
        return {}
    figures = summarize_evaluation(
        task,
        sample_losses,
        torch.cat(predictions)[: len(split)].cpu() if predictions else None,
        split.tensors["labels"] if predictions else None,
    )
    # A hopeless model is infinitely perplexed, which JSON cannot say.
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _sample_losses(task: str, logits: Any, labels: Any) -> Any:
    """Mean loss of each sample; every sample has equally many scored tokens, so their mean is the token mean."""
    from torch.nn.functional import cross_entropy

    if task == "bert-imdb":
        return cross_entropy(logits.float(), labels, reduction="none")
    token_losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none")
    return token_losses.mean(dim=1)
