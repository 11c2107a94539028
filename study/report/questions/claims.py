"""The published claims that these records can be held against: what each says, at which scale, and what ran here.

No verdict: that takes the scale the claim was made at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from study.report.questions.cells import change_text, span
from study.report.questions.comparing import (
    Judged,
    compared,
    compared_with,
    ranks,
    reference,
    same_stage,
    trains_plainly,
    workloads,
)
from study.report.questions.question import Answer, Question
from study.report.questions.traffic import sent_mib
from study.report.records.arms import NAN, Arm, one_value, state_bytes
from study.report.records.fairness import has_dropout
from study.report.records.frames import Records
from study.report.records.statistics import NOT_TOLD_APART

_EVALUATION = "eval_loss_final"
# Of the arms of one workload; nothing where none of them can show it.
Shown = Callable[[Sequence[Arm]], str]


def _beside_plain(
    strategies: Sequence[str], value: Callable[[Arm, Arm], float], form: str, *, most: int | None = None,
    also_plain: bool = False,
) -> Shown:  # fmt: skip
    """Of the arms of these strategies on as many ranks as plain training; one rank shards nothing."""

    def shown(found: Sequence[Arm]) -> str:
        base = reference(found)
        if base is None or not trains_plainly(base):
            return ""
        others = compared_with(base, found) if ranks(base) > 1 else []
        chosen = [arm for arm in others if one_value(arm.ended["strategy"]) in strategies][:most]
        values = [(value(arm, base), arm) for arm in ([base] if also_plain else []) + chosen]
        return ", ".join(form.format(it, arm.name, ranks(arm)) for it, arm in values if not pd.isna(it))

    return shown


def _over(size: float, whole: float) -> float:
    return size / whole if whole > 0 else NAN


def _optimizer_size(arm: Arm, base: Arm) -> float:
    """Beside the parameters; stage 1 holds its part of the optimizer's states only."""
    params, optimizer = (arm.median(f"{kind}_bytes_device") + arm.median(f"{kind}_bytes_host")
                         for kind in ("params", "optimizer"))  # fmt: skip
    return _over(optimizer * (ranks(arm) if one_value(arm.ended["zero_stage"]) else 1), params)


def _less_state(arm: Arm, base: Arm) -> float:
    return _over(state_bytes(base.ended), state_bytes(arm.ended))


def _gradients(arm: Arm, base: Arm) -> float:
    return _over(arm.median("grads_bytes_device"), base.median("grads_bytes_device"))


def _traffic(arm: Arm, base: Arm) -> float:
    return _over(sent_mib(arm), sent_mib(base))


def _evaluation_loss(found: Sequence[Arm]) -> str:
    base = reference(found)
    staged = [arm for arm in compared(found, "confounded_loss") if one_value(arm.ended["zero_stage"])]
    ratios = [ratio for arm in staged if (ratio := arm.ratio(_EVALUATION)) is not None and ratio.n]
    if base is None or not trains_plainly(base) or not ratios:
        return ""
    if has_dropout(base.ended):
        # Each arm draws masks of its own, so like arms differ too.
        apart = Judged({base.workload: staged}, _EVALUATION, lambda arm: arm.baseline).apart(staged)
        changes = ", ".join(f"{change_text(ratio - 1)} {arm.name}" for ratio, arm in apart)
        return f"{changes or NOT_TOLD_APART}, of {len(ratios)} arms (n = {ratios[0].n})"
    furthest = max(ratios, key=lambda ratio: abs(ratio.center - 1))
    return f"{change_text(furthest.center - 1)} at most, of {len(ratios)} arms (n = {furthest.n})"


def _offload_time(found: Sequence[Arm]) -> str:
    moved = [arm for arm in compared(found) if one_value(arm.ended["offload_optimizer"]) and same_stage(arm)]
    if not moved:
        return ""
    judged = Judged({moved[0].workload: moved}, "step_time_s_median", same_stage)
    apart = {arm.name: ratio - 1 for ratio, arm in judged.apart(moved)}
    said = []
    for words, on_drive in (("CPU", False), ("NVMe", True)):
        of_it = [arm for arm in moved if (one_value(arm.ended["offload_optimizer"]) == "nvme") is on_drive]
        changes = [apart[arm.name] for arm in of_it if arm.name in apart]
        if of_it:
            said.append(f"{span(changes, change_text) if changes else NOT_TOLD_APART} {words}")
    return ", ".join(said)


def _one_device_time(found: Sequence[Arm]) -> str:
    staged = [arm for arm in compared(found) if one_value(arm.ended["zero_stage"]) and ranks(arm) == 1]
    if not staged:
        return ""
    judged = Judged({staged[0].workload: staged}, "step_time_s_median", lambda arm: arm.baseline)
    apart = [f"{ratio:.2f}x {arm.name}" for ratio, arm in judged.apart(staged)]
    rest = len(staged) - len(apart)
    return ", ".join([*apart, *([f"{rest} arms {NOT_TOLD_APART}"] if rest else [])])


_FOUR_GPUS, _SEVERAL_GPUS, _ONE_GPU, _EIGHT_GPUS = (
    "an article, 4 GPUs", "an article, several GPUs", "one A100, BERT-large and GPT", "8 H100, Gemma-2-9B, bf16"
)  # fmt: skip
_CLAIMS: tuple[tuple[str, str, str, Shown], ...] = (
    ("S3-03", "Stages do not change the training loss", _FOUR_GPUS, _evaluation_loss),
    ("S2-01", "ZeRO lowers the training loss by 1.2 %", _ONE_GPU, _evaluation_loss),
    ("S3-02", "Adam's states are as large as the parameters", _FOUR_GPUS,
     _beside_plain(("zero0", "zero1"), _optimizer_size, "{:.1f}x {}", also_plain=True)),
    ("S1-01", "ZeRO-1 is an 8x memory reduction", _SEVERAL_GPUS,
     _beside_plain(("zero1",), _less_state, "{:.2f}x {} on {} ranks", most=1)),
    ("S0-04", "ZeRO-3 uses 2.7x less memory than DDP", _EIGHT_GPUS,
     _beside_plain(("zero3",), _less_state, "{:.2f}x {} on {} ranks", most=1)),
    ("S1-07", "Each of N GPUs holds 1/N of the gradients", _SEVERAL_GPUS,
     _beside_plain(("zero2", "zero3"), _gradients, "{:.0%} {} on {} ranks", most=1)),
    ("S0-07", "ZeRO-2 sends 2x and ZeRO-3 4x the bytes of ZeRO-0", _EIGHT_GPUS,
     _beside_plain(("zero0", "zero2", "zero3"), _traffic, "{:.1f}x {}")),
    ("S1-19", "NVMe offload adds 15 % to a step, CPU offload 25 %", _SEVERAL_GPUS, _offload_time),
    ("S2-03", "ZeRO trains faster on one GPU", _ONE_GPU, _one_device_time),
)  # fmt: skip


def answer(records: Records) -> Answer | None:
    """One row per claim, one column per workload."""
    found = workloads(records)
    rows = [
        {"Claim": claim, "It says": statement, "Made at": scale} | shown
        for claim, statement, scale, shown_by in _CLAIMS
        if (shown := {workload: said for workload, arms in found.items() if (said := shown_by(arms))})
    ]
    sentence = f"{len(rows)} published claims can be held against what ran here, at another scale: this is no verdict."
    notes = ("Fair comparisons only; multiples are of plain training.",)
    return Answer(sentence, pd.DataFrame(rows).fillna("-"), notes) if rows else None


QUESTION = Question(
    name="claims",
    title="What do these records show of the published claims?",
    answer=answer,
    nothing="No published claim can be held against these records.",
    tables={},
)
