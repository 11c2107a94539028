"""What is said of advice: how sure it is, what would change it, and what was left for more certainty."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from study.advisor.advise import (
    AS_FAST,
    Advice,
    AdviceRequest,
    Option,
    advise,
    asks_much_of_a_host,
    candidates,
    error_of_time,
)
from study.host.memory import GIB
from study.predictor.memory import predict_memory
from study.predictor.time import (
    device_bytes,
    excess_bytes,
    fits,
    left_share,
    predict_time,
    slowest_offload,
    usable_bytes,
)

ONE_RANK_NOTE = (
    "an engine for one GPU: nothing is sharded, but its weights are 16 bits with fp32 masters of what is trained, where"
    " single keeps fp32 weights and autocasts"
)
# And a process's own, which no rank takes from another.
_OF_A_SAMPLE = ("logits", "activations", "attention", "context")
_FAR_BEHIND = 0.5
_WORTH_TELLING = 0.05
# What a part of a step's time is, where it is what makes a choice slower.
_PARTS = {
    "compute": "computing",
    "communication_exposed": "waiting for communication", "offload": "moving state from and to the host",
    "cpu_adam": "the optimizer on the host", "nvme": "the drive",
}  # fmt: skip


def count_text(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def how_sure(advice: Advice) -> str:
    best, other = advice.best, advice.runner_up
    if best is None:
        return _nothing_fits(advice)
    memory = _of_memory(best)
    if other is None:
        return f"it is the only one that fits; {memory}"
    if best.is_sure and not other.is_sure:
        return f"it is the only one that is sure to fit; {memory}"
    gap = best.tokens_per_s / other.tokens_per_s - 1
    error = None if error_of_time(other) is None else error_of_time(best)
    if other.request.strategy.offloads and not best.request.strategy.offloads and gap < 0:
        ahead, off = other.tokens_per_s / best.tokens_per_s - 1, slowest_offload()
        return f"no offload: one is {ahead:.0%} ahead, and such steps took up to {off:.1f} x the prediction; {memory}"
    if gap <= AS_FAST and asks_much_of_a_host(other) and not asks_much_of_a_host(best):
        needed = other.memory.host_peak.value / GIB
        return f"as fast as the next, within {AS_FAST:.0%}, which takes {needed:,.0f} GiB of host memory; {memory}"
    if gap <= AS_FAST:
        return f"as fast as the next, within {AS_FAST:.0%}, and simpler; {memory}"
    if error is None:
        return f"{gap:.0%} ahead of the next, and nobody has validated times here; {memory}"
    sure = "more than" if gap > error else "but no more than"
    return f"{gap:.0%} ahead of the next, {sure} a step's time may be off ({error:.0%}); {memory}"


def _nothing_fits(advice: Advice) -> str:
    """Ranks divide a model's state, and not what a sample makes on its rank."""
    least = min(advice.options, key=lambda option: device_bytes(option.memory))
    request, parts = least.request, least.memory.device_parts
    whole = {name: parts[name] for name in _OF_A_SAMPLE if parts[name]}
    box = request.box
    elsewhere = dataclasses.replace(box, host_gib_per_node=None)
    if box.host_gib_per_node is not None and not box.in_host_memory:
        short = [option for option in advice.options if excess_bytes(option.memory, elsewhere) <= 0]
        if short:
            nearest = min(short, key=lambda option: option.memory.host_peak.value)
            needed = nearest.memory.host_peak.value / GIB
            return (
                f"nothing fits this host: {nearest.name} needs {needed:,.0f} GiB, the least of what its GPUs can hold"
            )
    if sum(whole.values()) <= (usable := usable_bytes(box)):
        return "nothing fits: more GPUs, fewer tokens a sample, or a smaller model"
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in whole.items())
    helps = ["fewer tokens a sample"]
    if not request.gradient_checkpointing:
        helps.append("gradient checkpointing")
    if parts["logits"] and not request.chunked_loss:
        helps.append("a loss in chunks (--chunked_loss)")
    return (
        f"nothing fits, and no number of GPUs helps: one sample makes {sum(whole.values()) / GIB:.1f} GiB on its rank"
        f" ({named}) of {usable / GIB:.1f}; what helps: {', '.join(helps)}, or its tokens divided over ranks"
        " (strategies cp and ulysses_zero1 to ulysses_zero3, which are not predicted)"
    )


def _of_memory(best: Option) -> str:
    return _of_device(best) + "".join(f"; {line}" for line in unchecked(best))


def unchecked(option: Option) -> Iterator[str]:
    """What an offload needs that nobody said the box has."""
    box, strategy = option.request.box, option.request.strategy
    if strategy.offloads and box.host_gib_per_node is None:
        needed = option.memory.host_peak.value / GIB
        yield f"not checked: it needs {needed:,.0f} GiB of host memory; --host-memory says what there is"
    if strategy.uses_nvme:
        read, write = box.nvme_read_gb_per_s, box.nvme_write_gb_per_s
        yield f"its drives are taken to read {read:g} and write {write:g} GB/s (--nvme_gb_per_s)"


def _of_device(best: Option) -> str:
    memory, box = best.memory, best.request.box
    if (memory.process_peak or memory.peak_reserved).high is None:
        return f"{left_share(memory, box):.0%} of the memory is left, and nobody has validated peaks here"
    if not best.is_sure:
        return "it may not fit: the upper end of its peak's interval does not"
    return f"it fits at the upper end of its peak's interval too, with {left_share(memory, box, True):.0%} left"


def worth_trying(advice: Advice) -> Option | None:
    """Faster than what is recommended, and not as sure to fit."""
    best = advice.best
    if best is None or not best.is_sure:
        return None
    faster = advise(advice.question, _near(advice), surely=False).best
    enough = (1 + _WORTH_TELLING) * best.tokens_per_s
    return faster if faster is not None and faster.tokens_per_s >= enough else None


def _near(advice: Advice, question: AdviceRequest | None = None) -> list[str]:
    """Without the slowest ones, which are no better for another question."""
    slowest = 0.0 if advice.best is None else _FAR_BEHIND * advice.best.tokens_per_s
    slow = {option.name for option in advice.options if option.is_sure and option.tokens_per_s <= slowest}
    return [name for name in candidates(question or advice.question) if name not in slow]


def _is_as_good(alone: Option, best: Option) -> bool:
    """Fewer machines that are as fast; with an offload, as in `ranked`, only where it is far ahead."""
    is_offload = alone.request.strategy.offloads and not best.request.strategy.offloads
    least = slowest_offload() if is_offload else 1 - AS_FAST
    return (alone.is_sure or not best.is_sure) and alone.tokens_per_s >= least * best.tokens_per_s


def changes(advice: Advice) -> Iterator[str]:
    """Other questions near this one, where the answer is another."""
    question = advice.question
    box, best = question.box, advice.best
    more = "twice the nodes" if box.nodes > 1 else "a second such box" if box.ranks > 1 else "a second GPU"
    twice: dict[str, Any] = {"gpus_per_node": 2} if box.ranks == 1 else {"nodes": 2 * box.nodes}
    others: dict[str, dict[str, Any]] = {more: {"box": dataclasses.replace(box, **twice)}}
    if box.nodes > 1:
        alone = advise(dataclasses.replace(question, box=dataclasses.replace(box, nodes=1))).best
        if alone is not None and (best is None or _is_as_good(alone, best)):
            times = "enough" if best is None else f"{alone.tokens_per_s / best.tokens_per_s:.1f} x as fast"
            yield "; ".join([f"one of these machines alone is {times}, under {alone.name}", *unchecked(alone)])
        slower = dataclasses.replace(box, network_gb_per_s=box.network_gb_per_s / 8)
        others["an eighth of the network"] = {"box": slower}
    longer, positions = 2 * question.sequence_length, question.shape.positions
    if positions is None or longer <= positions:
        others[f"{longer} tokens a sample"] = {"sequence_length": longer}
    if box.gpus_per_node > 1:
        others["half the GPUs"] = {"box": dataclasses.replace(box, gpus_per_node=box.gpus_per_node // 2)}
    for label, changed in others.items():
        asked = dataclasses.replace(question, **changed)
        there = advise(asked, _near(advice, asked))
        still = best and there.option(best.name)
        if there.best is None:
            if best is not None:
                yield f"with {label} nothing would fit"
        elif best is not None and there.best.name == best.name:
            if best.is_sure and not there.best.is_sure:
                yield f"with {label} it may not fit"
        elif still is None or not still.is_sure or still.tokens_per_s < (1 - _WORTH_TELLING) * there.best.tokens_per_s:
            yield f"with {label} it would be {there.best.name}"


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
