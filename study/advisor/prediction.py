"""The answer of `study predict`: --json prints its document, and prediction_text.py makes the page of it alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from study.advisor.long_features import feature_notes, has_features
from study.advisor.request_notes import input_gradient_notes, request_findings
from study.advisor.request_text import memory_if_fitting, precision_name
from study.advisor.training import Amount, WholeTraining
from study.advisor.user_settings import Finding
from study.config import strategies
from study.config.errors import UserError
from study.config.text import rounded_seconds
from study.host.memory import GIB
from study.predictor.calibration import PredictedRun, run_document
from study.predictor.communication import leaving_bytes, predict_payload, sent_bytes
from study.predictor.intervals import Ends, ends_text, estimate, figure_document
from study.predictor.memory import predict_memory
from study.predictor.request import Estimate, MemoryUse, Request, StepTime
from study.predictor.state import checkpoint_bytes
from study.predictor.time import (
    device_bytes,
    fits,
    predict_time,
    range_causes,
    speed_ends,
    step_ends,
    usable_bytes,
)


@dataclasses.dataclass(frozen=True)
class PredictedStep:
    """The time of an optimizer step, with the ends of its figures: with offload those of published hosts."""

    time: StepTime
    # None if too few measurements validate them.
    ends: Ends | None
    # Of the tokens per second of one GPU.
    speed_ends: Ends | None
    # Of the range, such as " by its host".
    range_causes: str
    # The step of this configuration was measured.
    is_measured: bool

    @classmethod
    def predict(cls, request: Request, memory: MemoryUse | None = None) -> PredictedStep:
        """Return the step of a request; `memory` only adds a note if it does not fit."""
        time, ranks = predict_time(request, memory), request.box.ranks
        ends = speed_ends(request, time)
        return cls(
            time=time,
            ends=step_ends(request, time),
            speed_ends=ends and (ends[0] / ranks, ends[1] / ranks),
            range_causes=range_causes(request),
            is_measured=is_measured(request),
        )

    @property
    def range_text(self) -> str:
        """The ends of the step in brackets, or that it is not known well enough; nothing of a measured one."""
        if self.is_measured:
            return ""
        return ends_text(self.time.step_s.value, self.ends, rounded_seconds, self.range_causes)

    @property
    def step_document(self) -> dict[str, Any]:
        """The seconds of the step as in the documents of --json."""
        return figure_document(self.time.step_s, self.ends)

    @property
    def document(self) -> dict[str, Any]:
        """The step as in the document of `study predict --json`."""
        return {
            **dataclasses.asdict(self.time),
            "step_s": self.step_document,
            "tokens_per_s_per_gpu": figure_document(self.time.tokens_per_s_per_gpu, self.speed_ends),
        }


def is_measured(request: Request) -> bool:
    """Whether the step of this configuration was measured."""
    return request.correction is not None and request.correction.find_measured_factor(request) is not None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that are sent in a step."""

    # Ring bytes of one rank.
    sent: Estimate
    # From one node to the others.
    leaving_bytes: float
    # Of one rank, by collective.
    payload: Mapping[str, float]

    @classmethod
    def predict(cls, request: Request) -> Traffic:
        return cls(estimate("sent", sent_bytes(request)), leaving_bytes(request), predict_payload(request))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Memory, traffic and time of a request, with the notes on it."""

    request: Request
    memory: MemoryUse
    # None if a part of the memory is missing, or with features for longer samples.
    step: PredictedStep | None
    # None with features for longer samples.
    traffic: Traffic | None
    # Of all ranks, on disk.
    checkpoint_bytes: float | None
    # Counted on transformers' own code, if that was asked for.
    traced_activation_bytes: float | None
    training: WholeTraining | None
    measured: Sequence[PredictedRun]
    # With gradient checkpointing, if its upper bound fits, and without checkpointing does not.
    recomputed: MemoryUse | None
    findings: Sequence[Finding]
    notes: Sequence[str]

    @classmethod
    def predict(
        cls, request: Request, amount: Amount | None, runs: Sequence[PredictedRun], traced: float | None
    ) -> Prediction:
        """Return the prediction of a request and, if it fits, of a training with its steps; raise UserError for a
        training whose step time is not predicted."""
        memory, is_usual = predict_memory(request), not has_features(request)
        if amount is not None and not is_usual:
            problem = f"{amount} take a time that is not predicted with --sp, --offload_checkpoints or --tiled_mlp"
            raise UserError(problem, f"leave out --train_{amount.unit}")
        step = PredictedStep.predict(request, memory) if is_usual and memory.missing is None else None
        training = None
        if amount is not None and step is not None and fits(memory, request.box):
            training = WholeTraining.predict(amount, request, step.time)
        return cls(
            request=request,
            memory=memory,
            step=step,
            traffic=Traffic.predict(request) if is_usual else None,
            checkpoint_bytes=checkpoint_bytes(request),
            traced_activation_bytes=traced,
            training=training,
            measured=runs,
            recomputed=_recomputed_memory(request, memory),
            findings=[*request_findings(request)],
            notes=[
                *input_gradient_notes(request),
                *adapted_notes(request),
                *feature_notes(request),
                *checkpoint_notes(request, memory),
            ],
        )

    @property
    def fit(self) -> Literal["fits", "may not fit", "does not fit"] | None:
        """Whether the memory fits: it may not if its upper bound does not; None if a part of it is missing."""
        if self.memory.missing is not None:
            return None
        if fits(self.memory, self.request.box, at_upper=True):
            return "fits"
        return "may not fit" if fits(self.memory, self.request.box) else "does not fit"

    @property
    def fits(self) -> bool | None:
        """Whether the memory fits; None if a part of it is missing."""
        return None if self.fit is None else self.fit != "does not fit"

    @property
    def device_bytes(self) -> float:
        """Memory of one GPU at its peak."""
        return device_bytes(self.memory)

    @property
    def document(self) -> dict[str, Any]:
        """The prediction as --json prints it."""
        request, traffic = self.request, self.traffic
        shape, model = request.shape, request.full_shape
        return {
            "model": shape.name,
            "parameters": model.parameters,
            "trained_parameters": model.trained_parameters,
            "lora_rank": shape.lora_rank,
            "lora_targets": shape.lora_targets,
            "lora_modules_to_save": shape.lora_saved,
            "lora_dora": shape.lora_dora,
            "strategy": request.strategy.name,
            "fsdp_version": request.fsdp_version if request.strategy.is_fsdp else None,
            "hardware": request.box.name,
            "ranks": request.box.ranks,
            "tensor_parallel": request.tensor_ranks,
            "tensor_plan": _tensor_plan(request),
            "precision": precision_name(request),
            "sequence_length": request.sample_tokens,
            "sequence_ranks": request.sequence_ranks,
            "checkpoints_on_host": request.checkpoints_on_host,
            "tiled_mlp": request.tiled_mlp,
            "target_length": request.target_length,
            "micro_batch": request.micro_batch,
            "accumulation": request.accumulation,
            "gradient_checkpointing": request.gradient_checkpointing,
            "chunked_loss": request.loss_kernel == "liger",
            "loss_kernel": request.loss_kernel,
            "keeps_outputs": request.keeps_outputs,
            "compiled": request.compiled,
            "fits": self.fits,
            "missing": self.memory.missing,
            "device_bytes": self.device_bytes,
            "memory": dataclasses.asdict(self.memory),
            "traced_activation_bytes": self.traced_activation_bytes,
            "time": self.step and self.step.document,
            "training": self.training and self.training.document,
            "measured": [run_document(run) for run in self.measured],
            "sent_bytes_per_step": traffic and dataclasses.asdict(traffic.sent),
            "leaving_node_bytes_per_step": traffic and traffic.leaving_bytes,
            "payload_bytes": traffic and traffic.payload,
        }


def _tensor_plan(request: Request) -> str | None:
    """Return what tensor-parallel ranks divide; None without them."""
    if request.tensor_group is None:
        return None
    return "sequence" if request.stream_ranks > 1 else "plain"


def has_room_on_device(request: Request, memory: MemoryUse) -> bool:
    """Whether the peak fits each GPU, so that what does not fit is elsewhere or at another time."""
    return not request.box.is_cpu_only and device_bytes(memory) <= usable_bytes(request.box)


def _recomputed_memory(request: Request, memory: MemoryUse) -> MemoryUse | None:
    """Return the memory with gradient checkpointing, if its upper bound fits, and without checkpointing does not."""
    box = request.box
    if request.gradient_checkpointing or memory.missing is not None or fits(memory, box, at_upper=True):
        return None
    if not fits(memory, box) and has_room_on_device(request, memory):
        return None
    return memory_if_fitting(dataclasses.replace(request, gradient_checkpointing=True))


def checkpoint_notes(request: Request, memory: MemoryUse) -> Iterator[str]:
    """Yield where saving and loading were measured, if one of them needs more host memory than a node has."""
    box, parts = request.box, memory.host_parts
    limit = (box.host_gib_per_node or math.inf) * GIB
    if not box.is_cpu_only and max(parts.get("load", 0.0), parts.get("save", 0.0)) > limit:
        yield "host memory of saving and loading checkpoints, measured by strategy: reports/checkpoints/summary.md"


def adapted_notes(request: Request) -> Iterator[str]:
    """Yield the settings of accelerate_configs/ that study/train.py adapts to model and ranks at its launch."""
    strategy = request.strategy
    if strategy.swap_buffers != (stock := strategies.read_strategy(strategy.name)).swap_buffers:
        assert strategy.swap_buffers is not None
        assert stock.swap_buffers is not None
        sizes = f"{strategy.swap_buffers[1]:,} elements, in its file {stock.swap_buffers[1]:,}"
        yield f"buffers for parameters on NVMe have {sizes}"
    if request.ranks_per_replica is not None:
        yield f"{request.ranks_per_replica} ranks share the weights, the file's number is adapted to {request.box.name}"
