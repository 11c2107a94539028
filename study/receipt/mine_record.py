"""Record of each rank of a program of `study verify --mine`: its schema. It imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pydantic

from study.config.errors import UserError
from study.receipt.document import Part
from study.records.directory import read_json, write_json
from study.records.schema import RecordError

# A receipt that finds the first of them in the environment compares instead of measuring.
RECORD_VARIABLE = "ZERO_STUDY_RECORD_DIR"
STEPS_VARIABLE = "ZERO_STUDY_RECORD_STEPS"
# The order in which a fault can first show within a step.
STAGES = ("start", "loss", "output", "gradient", "norm", "clipping", "update", "weight")
RecordedStage = Literal["start", "loss", "output", "gradient", "norm", "clipping", "update", "weight"]
RecordState = Literal["begun", "complete", "not comparable"]


def is_recording() -> bool:
    """Whether this process is a rank of a program of `study verify --mine`."""
    return bool(os.environ.get(RECORD_VARIABLE))


class RecordedDifference(Part):
    """The first figure of a rank that is not the one of plain training, beyond rounding."""

    step: int
    stage: RecordedStage
    # Empty for a figure of the whole model.
    tensor: str = ""
    # Relative to plain training, and the allowed rounding; None: plain training has zeros, or the figure is not finite.
    size: float | None
    allowed: float
    is_finite: bool = True
    # Tensors of this stage that differ, of those compared.
    tensors: int = 1
    compared: int = 1
    # The factor to plain training, if the figure is a multiple of it.
    factor: float | None = None
    # Of a gradient: the weight of each micro-batch's gradient, by rank; 1 is right.
    weights: tuple[tuple[float, ...], ...] | None = None
    # Of a gradient: it is the sum of that of plain training and that of the step before.
    keeps_last: bool = False


class RecordedStep(Part):
    """Figures of one optimizer step on one rank, and those of plain training."""

    # Mean of the micro-batches' losses, or their sum if tokens divide them; None if the model returns none.
    loss: float | None
    plain_loss: float | None
    # Before clipping; None if the program computes none.
    norm: float | None
    plain_norm: float
    # The weight with which the program's backward pass begins at each micro-batch's loss.
    loss_weights: tuple[float, ...] | None
    # Whether the model received the number of tokens by which it divides the loss.
    divides_by_tokens: bool
    # Of each micro-batch's inputs.
    inputs_sha256: tuple[str, ...]


class RankRecord(Part):
    """rank-N.json: figures of a rank's program and of plain training."""

    version: Literal[1] = 1
    rank: int
    ranks: int
    state: RecordState = "begun"
    # Why it is not comparable.
    reason: str = ""
    model: str = ""
    engine: str = ""
    precision: str = ""
    optimizer: str = ""
    trained_parameters: int = 0
    trained_tensors: int = 0
    # Trained tensors that are in no group of the optimizer, and that no step has changed.
    unchanged: tuple[str, ...] = ()
    # Figures without a comparison, and the reason.
    left_out: tuple[str, ...] = ()
    steps: tuple[RecordedStep, ...] = ()
    difference: RecordedDifference | None = None

    def write(self, folder: Path) -> None:
        write_json(folder / f"rank-{self.rank}.json", self.model_dump(mode="json"))


def read_records(folder: Path) -> list[RankRecord]:
    """Return the records of all ranks that wrote one, in their order."""
    records = []
    for file in folder.glob("rank-*.json"):
        try:
            records.append(RankRecord.model_validate(read_json(file)))
        except (RecordError, pydantic.ValidationError) as error:
            raise UserError(f"{file.name} is not a record of a rank: {error}", "run the command again") from None
    return sorted(records, key=lambda record: record.rank)
