"""The answer of `study advise`: --json prints its document, and advice_text.py makes the page of it alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from study.advisor import advise
from study.advisor.advise import Advice, Option
from study.advisor.advised_files import AdvisedFiles
from study.advisor.longer import LongerSamples
from study.advisor.request_notes import input_gradient_notes, request_findings
from study.advisor.request_text import precision_name
from study.advisor.training import WholeTraining
from study.advisor.user_settings import Finding
from study.predictor.calibration import PredictedRun, run_document
from study.predictor.intervals import figure_document
from study.predictor.state import accumulated_bytes
from study.predictor.time import device_bytes, step_ends
from study.releases.causes import least_sound_release


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The recommended option, its alternatives, and the findings about its request."""

    advice: Advice
    best: Option
    # Faster, but its upper bound does not fit.
    riskier: Option | None
    # Its upper bound leaves more of the memory.
    roomier: Option | None
    # hsdp whose replica groups reduce once a step, in a custom loop.
    late_replicas: Option | None
    # Plain training of weights in bf16, without fp32 masters.
    plain: Option | None
    # Why the next option is slower; empty if it is about as fast.
    slowdown: str
    # Of FSDP's gradients if they were not reduced in each micro-batch; None if they are not.
    unsharded_gradient_bytes: float | None
    findings: Sequence[Finding]
    notes: Sequence[str]

    @classmethod
    def find(cls, advice: Advice) -> Recommendation | None:
        """Return the recommendation of some advice; None if nothing fits."""
        best = advice.best
        if best is None:
            return None
        return cls(
            advice=advice,
            best=best,
            riskier=advise.faster_riskier_option(advice),
            roomier=advise.roomier_option(advice),
            late_replicas=advise.option_of_late_replicas(advice),
            plain=advise.plain_option_in_16_bits(advice),
            slowdown=_slowdown(advice, best),
            unsharded_gradient_bytes=_unsharded_gradient_bytes(best),
            findings=[*request_findings(best.request)],
            notes=[*input_gradient_notes(best.request)],
        )


def _slowdown(advice: Advice, best: Option) -> str:
    """Return why the next option is slower, if it is as certain to fit and notably slower."""
    rival = advice.runner_up
    if rival is None or best.is_safe != rival.is_safe or -advise.speed_gap(rival, best) <= advise.SPEED_TOLERANCE:
        return ""
    return advise.explain_slowdown(rival, best)


def _unsharded_gradient_bytes(best: Option) -> float | None:
    if not best.request.sync_each_batch:
        return None
    return accumulated_bytes(dataclasses.replace(best.request, sync_each_batch=False))


@dataclasses.dataclass(frozen=True)
class AdviceAnswer:
    """The ranked options of a question, with the changes that would change the recommendation."""

    advice: Advice
    # None if nothing fits.
    recommendation: Recommendation | None
    how_sure: str
    # Lines: of adapters without an offload, of a bound that fits, and of other hardware and lengths.
    adapters: Sequence[str]
    safer: Sequence[str]
    what_ifs: Sequence[str]
    longer: LongerSamples
    # The effect of the optimizer on the host; None if the recommendation has an offload.
    optimizer_on_host: str | None
    # Lines about the nearest measurements, if they were asked for.
    nearest: Sequence[str]
    measured: Sequence[PredictedRun]
    training: WholeTraining | None
    files: AdvisedFiles | None
    nvme_path: str
    # The commands that predict the recommendation, and plain training; empty without them.
    predict_command: str
    plain_predict_command: str

    @property
    def document(self) -> dict[str, Any]:
        """The answer as --json prints it."""
        question, best, runner_up = self.advice.question, self.advice.best, self.advice.runner_up
        shape, files = question.shape, self.files
        riskier = self.recommendation and self.recommendation.riskier
        plain = self.recommendation and self.recommendation.plain
        return {
            "model": shape.name,
            "parameters": shape.parameters,
            "trained_parameters": shape.trained_parameters,
            "lora_rank": shape.lora_rank,
            "lora_targets": shape.lora_targets,
            "lora_modules_to_save": shape.lora_saved,
            "lora_dora": shape.lora_dora,
            "hardware": question.box.name,
            "ranks": question.box.ranks,
            "tensor_parallel": question.tensor_ranks,
            "sequence_length": question.sequence_length,
            "target_length": question.target_length,
            "precision": question.precision,
            "chunked_loss": question.trainer.loss_kernel == "liger",
            "compiled": question.trainer.compiled,
            "recommended": best and best.name,
            "training": self.training and self.training.document,
            "runner_up": runner_up and runner_up.name,
            "how_sure": self.how_sure,
            "faster_if_it_fits": riskier and option_document(riskier),
            "plain_in_16_bits": plain and option_document(plain),
            "changes": [*self.adapters, *self.safer, *self.what_ifs],
            "longer": [row.document for row in self.longer.rows],
            "optimizer_on_host": self.optimizer_on_host,
            "nearest": self.nearest,
            "measured": [run_document(run) for run in self.measured],
            "strategies": [option_document(option) for option in self.advice.options],
            "files": files and {key: value and str(value) for key, value in dataclasses.asdict(files).items()},
        }


def option_document(option: Option) -> dict[str, Any]:
    """Return an option as in the document of --json."""
    request, memory, time = option.request, option.memory, option.time
    return {
        "strategy": option.name,
        "fits": option.fits,
        "sure_to_fit": option.is_safe,
        "why": option.why,
        "micro_batch": request.micro_batch if option.fits else 0,
        "accumulation": request.accumulation,
        "gradient_checkpointing": request.gradient_checkpointing,
        "precision": precision_name(request),
        "loads_in_16_bits": request.pure or request.loads_16_bits,
        "sync_each_batch": request.sync_each_batch,
        "device_bytes": device_bytes(memory),
        "peak_reserved": dataclasses.asdict(memory.peak_reserved),
        "device_parts": dict(memory.device_parts),
        "host_bytes_per_node": dataclasses.asdict(memory.host_peak),
        "nvme_bytes_per_node": memory.nvme,
        "tokens_per_s": option.tokens_per_s,
        "step_s": time and figure_document(time.step_s, step_ends(request, time)),
        "mfu": time and time.mfu,
        "cost_per_million_tokens": option.cost_per_million_tokens,
        "deepspeed": request.strategy.deepspeed,
        "least_deepspeed_release": least_sound_release(option.name, request.accumulation, request.precision) or None,
    }
