"""The first difference of one rank's figures from those of plain training."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from study.receipt.mine_record import RecordedDifference, RecordedStage
from study.receipt.passes import RecordedPass
from study.receipt.replay import PlainStep, find_factor, relative_difference
from study.receipt.whole_tensors import Tensors

# A gradient is a combination of the micro-batches' gradients if this share of it is.
_EXPLAINED = 0.02


class StepComparison:
    """Comparison of a rank's figures, in the order of the stages, until one differs."""

    def __init__(self) -> None:
        self.step = 0
        self.difference: RecordedDifference | None = None

    def compare(
        self,
        stage: RecordedStage,
        values: Mapping[str, torch.Tensor],
        reference: Tensors,
        allowed: Mapping[str, float],
    ) -> None:
        """Note the first tensor of a stage that differs, unless an earlier stage has differed."""
        if self.difference is not None:
            return
        sizes = {name: relative_difference(values[name], reference[name]) for name in reference if name in values}
        wrong = [name for name, size in sizes.items() if size > allowed[name]]
        if not wrong:
            return
        first = wrong[0]
        self.difference = RecordedDifference(
            step=self.step,
            stage=stage,
            tensor=first,
            size=sizes[first] if sizes[first] != float("inf") else None,
            allowed=allowed[first],
            is_finite=bool(torch.isfinite(values[first]).all()),
            tensors=len(wrong),
            compared=len(sizes),
            factor=find_factor(values[first], reference[first], allowed[first]),
        )

    def compare_outputs(self, passes: list[RecordedPass], plain: PlainStep) -> None:
        """Compare the outputs of the model, the losses first."""
        rows = list(zip(passes, plain.outputs, plain.allowed_outputs, strict=True))
        stages: tuple[RecordedStage, ...] = ("loss", "output")
        for stage in stages:
            for number, (recorded, exact, allowed) in enumerate(rows, start=1):
                names = [name for name in exact if (name in recorded.losses) is (stage == "loss")]
                labels = {name: f"{name} of micro-batch {number}" for name in names}
                self.compare(
                    stage,
                    {labels[name]: recorded.outputs[name] for name in names},
                    {labels[name]: exact[name] for name in names},
                    {labels[name]: allowed[name] for name in names},
                )

    def compare_norm(self, norm: float | None, plain_norm: float, allowed: float) -> None:
        if norm is not None:
            self.compare("norm", {"": torch.tensor([norm])}, {"": torch.tensor([plain_norm])}, {"": allowed})

    @property
    def wrong_gradient(self) -> str | None:
        """Name of the first gradient that differs; None if there is none."""
        difference = self.difference
        is_gradient = difference is not None and difference.stage == "gradient" and difference.step == self.step
        return difference.tensor if difference is not None and is_gradient else None

    def explain_gradient(self, values: torch.Tensor, parts: torch.Tensor) -> None:
        """Note the weight with which each micro-batch's gradient entered the first gradient that differs."""
        assert self.difference is not None
        weights = solve_weights(values, parts)
        self.difference = self.difference.model_copy(update={"weights": weights})

    def explain_by_last_step(self, excess: torch.Tensor, last: torch.Tensor) -> None:
        """Note whether the first gradient that differs is too large by that of the step before."""
        assert self.difference is not None
        size = float(torch.linalg.vector_norm(last))
        if size and float(torch.linalg.vector_norm(excess - last)) < _EXPLAINED * size:
            self.difference = self.difference.model_copy(update={"keeps_last": True})


def solve_weights(values: torch.Tensor, parts: torch.Tensor) -> tuple[tuple[float, ...], ...] | None:
    """Return by rank and micro-batch how much each gradient counts, 1 being right; None if they do not explain it.

    `values` are elements of the wrong gradient, `parts` those of each micro-batch's (rank, micro-batch, element).
    """
    ranks, most, elements = parts.shape
    columns = parts.reshape(ranks * most, elements).double().T.cpu() / ranks
    target = values.double().cpu()
    # Micro-batches with the same gradient have no separate weights.
    if not torch.isfinite(target).all() or int(torch.linalg.matrix_rank(columns)) < ranks * most:
        return None
    solution = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
    if bool(((solution - 1).abs() < _EXPLAINED).all()):
        return None
    rest = float(torch.linalg.vector_norm(target - columns @ solution))
    if rest > _EXPLAINED * float(torch.linalg.vector_norm(target)):
        return None
    return tuple(tuple(row) for row in solution.reshape(ranks, most).tolist())
