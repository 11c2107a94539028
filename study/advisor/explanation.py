"""The answer of `study explain`: --json prints its document, and explanation_text.py makes the page of it alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study.advisor.explain_answers import FrequentAnswer, find_answers
from study.advisor.explain_case import ConfigCase
from study.advisor.explain_combinations import stored_answer
from study.advisor.explain_costs import SettingCost, costs
from study.advisor.explain_releases import release_document, release_line
from study.advisor.fitted import precision_under, usual_precision
from study.advisor.prediction import PredictedStep
from study.advisor.request_text import memory_if_fitting, precision_name
from study.config.precisions import computing_type
from study.predictor.hardware import ANY_DEVICE, Hardware
from study.predictor.memory import predict_memory
from study.predictor.request import MemoryUse, Request
from study.predictor.time import fits, usable_bytes
from study.releases.feature_answers import FeatureAnswer

# Changes of the program, by name.
_CHANGES: dict[str, dict[str, Any]] = {
    "--gradient_checkpointing": {"gradient_checkpointing": True},
    "micro-batch 1": {"micro_batch": 1},
    "both --gradient_checkpointing and micro-batch 1": {"gradient_checkpointing": True, "micro_batch": 1},
}


@dataclasses.dataclass(frozen=True)
class InHalf:
    """The memory of a program in fp32 if it trained in 16 bits."""

    precision: str
    memory: MemoryUse


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of the program with which the same file fits."""

    says: str
    memory: MemoryUse


@dataclasses.dataclass(frozen=True)
class ConfigExplanation:
    """A user's config: its memory and time, the memory of each setting, and answers to frequent questions."""

    case: ConfigCase
    memory: MemoryUse
    # None for any device, and if no step time is predicted.
    step: PredictedStep | None
    # None for a program in 16 bits, and for hardware without them.
    in_half: InHalf | None
    # Of a peak that does not fit, also not in 16 bits.
    remedies: Sequence[Remedy]
    costs: Sequence[SettingCost]
    answers: Sequence[FrequentAnswer]
    # Of `study releases --features`; None if no run can have this combination.
    combination: FeatureAnswer | None
    # The releases that findings hold for, also in words.
    releases: Mapping[str, Any]
    release_line: str

    @classmethod
    def explain(cls, case: ConfigCase) -> ConfigExplanation:
        """Return the explanation of a resolved config."""
        in_half = _in_half(case)
        return cls(
            case=case,
            memory=case.memory,
            step=case.step,
            in_half=in_half,
            remedies=[*_remedies(case, in_half)],
            costs=costs(case),
            answers=[*find_answers(case)],
            combination=stored_answer(case),
            releases=release_document(case),
            release_line=release_line(case),
        )

    @property
    def hardware(self) -> Hardware | None:
        """The hardware; None if bytes are those of any device."""
        return _hardware(self.case)

    @property
    def training_memory(self) -> MemoryUse:
        """The memory without that of loading the weights."""
        return _training_memory(self.memory)

    @property
    def is_too_large_to_load(self) -> bool:
        """Whether the weights that each GPU has while they are loaded exceed it."""
        if self.hardware is None or self.memory.missing:
            return False
        return self.memory.loading > usable_bytes(self.hardware)

    @property
    def fits(self) -> bool | None:
        """Whether the memory fits; None for any device, and if a part of the memory is missing."""
        if self.hardware is None or self.memory.missing:
            return None
        return fits(self.memory, self.hardware)

    @property
    def document(self) -> dict[str, Any]:
        """The explanation as --json prints it."""
        case, request = self.case, self.case.request
        return {
            "file": case.file.name,
            "read_from": list(case.read_from),
            "launcher": case.file.launcher,
            "distributed_type": case.file.distributed_type,
            "model": case.shape.name,
            "parameters": request.full_shape.parameters,
            "trained_parameters": request.full_shape.trained_parameters,
            "world_size": case.ranks,
            "tensor_parallel": request.tensor_ranks,
            "hardware": self.hardware and self.hardware.name,
            "fits": self.fits,
            "precision": precision_name(request),
            "zero_stage": case.stage if case.file.deepspeed is not None else None,
            "sequence_length": request.sample_tokens,
            "sequence_ranks": request.sequence_ranks,
            "target_length": request.target_length,
            "micro_batch": request.micro_batch,
            "accumulation": request.accumulation,
            "gradient_checkpointing": request.gradient_checkpointing,
            "releases": self.releases,
            "settings": [dataclasses.asdict(cost) for cost in self.costs],
            "findings": [finding.document for finding in case.findings],
            "combination": self.combination and self.combination.document,
            "answers": [dataclasses.asdict(answer) for answer in self.answers],
            "memory": dataclasses.asdict(self.memory),
            "step_s": self.step and self.step.step_document,
        }


def _hardware(case: ConfigCase) -> Hardware | None:
    return None if case.request.box.device is ANY_DEVICE else case.request.box


def _training_memory(memory: MemoryUse) -> MemoryUse:
    return dataclasses.replace(memory, loading=0.0)


def _in_half(case: ConfigCase) -> InHalf | None:
    """Return the memory in 16 bits of a program in fp32; None of another one, and if the hardware is for fp32."""
    hardware, request = _hardware(case), case.request
    half = usual_precision(hardware) if hardware else "bf16"
    if computing_type(request.precision) != "fp32" or half == "fp32":
        return None
    in_16_bits = dataclasses.replace(request, precision=precision_under(request.strategy, half))
    return InHalf(half, predict_memory(in_16_bits))


def _remedies(case: ConfigCase, in_half: InHalf | None) -> Iterator[Remedy]:
    """Yield changes of the program with which the same file fits: checkpointing, a smaller micro-batch, or both."""
    hardware, memory = _hardware(case), _training_memory(case.memory)
    if hardware is None or memory.missing or fits(memory, hardware):
        return
    if in_half is not None and fits(in_half.memory, hardware, at_upper=True):
        return
    for says, changes in _CHANGES.items():
        if any(getattr(case.request, key) == value for key, value in changes.items()):
            continue
        remedied = memory_if_fitting(_changed(case.request, changes))
        if remedied is not None:
            yield Remedy(says, remedied)


def _changed(request: Request, changes: Mapping[str, Any]) -> Request:
    return dataclasses.replace(request, **changes)
