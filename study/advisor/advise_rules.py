"""What two published guides would choose, beside what is predicted for each of their choices.

S0 is the decision tree of "ZeRO Optimization Strategies for Large-Scale Model Training", and its rule by size; S1 the
rules of "DeepSpeed ZeRO-3 Architecture". docs/claims.md judges their claims.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from study.advisor.advise import Advice, Option, advise, error_of_time
from study.advisor.advise_words import count_text
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.time import fits, predict_time, slowest_offload

# Billions of parameters.
_S0_SMALL, _S0_MIDDLE, _S1_LARGE = 7e9, 13e9, 10e9
_S1_OFFLOAD_BELOW = 1.5
# What a part of a step's time is, where it is what makes a choice slower.
_PARTS = {
    "compute": "computing",
    "communication_exposed": "waiting for communication", "offload": "moving state from and to the host",
    "cpu_adam": "the optimizer on the host", "nvme": "the drive",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rule:
    document: str
    says: str
    choice: str
    # Empty where it does as well as what is advised.
    misleads: str


def rules(advice: Advice) -> list[Rule]:
    """None for LoRA: both guides speak of training all of a model."""
    if advice.question.shape.lora_rank:
        return []
    option = functools.cache(functools.partial(_option, advice))
    count = advice.question.shape.parameters
    size = f"{count_text(count)} parameters"
    asked = [
        ("S0", "the decision tree: stage 0 if that fits, else stage 2, else stage 3", _tree(option)),
        ("S0", f"by size: {size}", "zero0" if count <= _S0_SMALL else "zero2" if count <= _S0_MIDDLE else "zero3"),
        ("S1", f"by size: {size}", "zero3_cpu" if count > _S1_LARGE else "zero2"),
    ]
    device, weights = advice.question.box.device.memory_gib * GIB, 2 * count
    if 0 < device < _S1_OFFLOAD_BELOW * weights:
        asked.append(("S1", "offload where a GPU has less than 1.5 times the model", "zero3_cpu"))
    return [Rule(document, says, choice, _misleads(advice, option(choice))) for document, says, choice in asked]


def _tree(option: Callable[[str], Option | None]) -> str:
    """Its first question is of plain data parallelism, which it calls stage 0."""
    for name in ("zero0", "zero2"):
        tried = option(name)
        if tried is not None and tried.fits:
            return name
    return "zero3"


def _option(advice: Advice, name: str) -> Option | None:
    """Stage 0 cannot be in fp16: plain training is what is meant. On one rank most stages were not tried."""
    alone = advice.question.ranks == 1
    if name == "zero0" and advice.question.precision == "fp16":
        name = "single" if alone else "ddp"
    tried = advice.option(name)
    return advise(advice.question, [name]).options[0] if tried is None and alone else tried


def _misleads(advice: Advice, option: Option | None) -> str:
    best = advice.best
    if option is None:
        return ""
    if not option.fits:
        return f"does not fit: {option.why}"
    if best is None:
        return ""
    if best.is_sure and not option.is_sure:
        return "may not fit: the upper end of its peak's interval does not"
    # Times without an interval are taken to be off by as much as those of offloads were seen to be.
    if option.tokens_per_s < (1 - (error_of_time(best) or 1 - 1 / slowest_offload())) * best.tokens_per_s:
        return f"{1 - option.tokens_per_s / best.tokens_per_s:.0%} slower than {best.name}{because(option, best)}"
    return ""


def because(option: Option, best: Option) -> str:
    """By what it would do with the same micro-batch and checkpointing: what strategies differ in by themselves."""
    ours, box = best.request, best.request.box
    size, again = ours.micro_batch, ours.gradient_checkpointing
    same = dataclasses.replace(
        option.request, micro_batch=size, accumulation=ours.accumulation, gradient_checkpointing=again
    )
    if not fits(predict_memory(same), box, at_upper_end=best.is_sure):
        return f": {size} a rank {'with' if again else 'without'} checkpointing, as {best.name} trains, does not fit"
    assert best.time is not None
    time, bests = predict_time(same), best.time
    part = max(_PARTS, key=lambda name: time.parts[name] - bests.parts[name])
    its, other = (f"{each.parts[part] / each.step_s.value:.0%}" for each in (time, bests))
    return f": trained as {best.name} is, {_PARTS[part]} takes {its} of its step, and {other} of {best.name}'s"
