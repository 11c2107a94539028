"""The published claims that these records can be held against: what each says, at which scale, and what ran here.

No verdict: that takes the scale the claim was made at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd

from study.report.questions.cells import change_text, span
from study.report.questions.comparing import (
    compared,
    compared_with,
    plain_reference,
    ranks,
    same_stage,
    workloads,
)
from study.report.questions.question import Answer, Question
from study.report.questions.traffic import sent_mib
from study.report.records.arms import Arm, one_value, state_bytes
from study.report.records.frames import Records
from study.report.records.statistics import paired_ratio

_ARTICLE_0 = "8 H100, Gemma-2-9B, bf16"
_ARTICLE_1 = "an article, several GPUs"
_ARTICLE_2 = "one A100, BERT-large and GPT"
_ARTICLE_3 = "an article, 4 GPUs"


class _Claim(NamedTuple):
    id: str
    statement: str
    scale: str
    # Of the arms of one workload; nothing where none of them can show it.
    shown_by: Callable[[list[Arm]], str]


def _by_arm(values: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{value} {arm}" for arm, value in values)


def _beside(found: list[Arm], *strategies: str) -> tuple[Arm | None, list[Arm]]:
    """Plain training, and the arms of these strategies on as many ranks, where those are several."""
    base = plain_reference(found)
    if base is None or ranks(base) == 1:
        return base, []
    return base, [arm for arm in compared_with(base, found) if one_value(arm.ended["strategy"]) in strategies]


def _evaluation_loss(found: list[Arm]) -> str:
    if plain_reference(found) is None:
        return ""
    staged = [arm for arm in compared(found, "confounded_loss") if one_value(arm.ended["zero_stage"])]
    ratios = [ratio for arm in staged if (ratio := arm.ratio("eval_loss_final")) is not None and ratio.n]
    if not ratios:
        return ""
    furthest = max(ratios, key=lambda ratio: abs(ratio.center - 1))
    return f"{change_text(furthest.center - 1)} at most, of {len(ratios)} arms (n = {furthest.n})"


def _optimizer_size(found: list[Arm]) -> str:
    base, beside = _beside(found, "zero0", "zero1")
    said = []
    for arm in [base, *beside] if base else []:
        # Stage 1 holds its part of the optimizer's states only.
        parts = ranks(arm) if one_value(arm.ended["zero_stage"]) else 1
        params, optimizer = (
            sum(arm.ended[f"{kind}_bytes_{place}"].median() for place in ("device", "host"))
            for kind in ("params", "optimizer")
        )
        if params > 0 and not pd.isna(optimizer):
            said.append((arm.name, f"{optimizer * parts / params:.1f}x"))
    return _by_arm(said)


def _less_state(strategy: str) -> Callable[[list[Arm]], str]:
    def shown(found: list[Arm]) -> str:
        base, beside = _beside(found, strategy)
        return _by_arm(
            (f"{arm.name} on {ranks(arm)} ranks", f"{state_bytes(base.ended) / held:.2f}x")
            for arm in beside[:1]
            if base is not None and (held := state_bytes(arm.ended)) > 0
        )

    return shown


def _gradients(found: list[Arm]) -> str:
    base, beside = _beside(found, "zero2", "zero3")
    whole = base.ended["grads_bytes_device"].median() if base is not None else 0
    shares = [(arm, arm.ended["grads_bytes_device"].median() / whole) for arm in beside[:1]] if whole > 0 else []
    return _by_arm((f"{arm.name} on {ranks(arm)} ranks", f"{share:.0%}") for arm, share in shares if not pd.isna(share))


def _traffic(found: list[Arm]) -> str:
    base, beside = _beside(found, "zero0", "zero2", "zero3")
    if base is None or not sent_mib(base) > 0:
        return ""
    multiples = [(arm.name, sent_mib(arm) / sent_mib(base)) for arm in beside]
    return _by_arm((arm, f"{multiple:.1f}x") for arm, multiple in multiples if not pd.isna(multiple))


def _offload_time(found: list[Arm]) -> str:
    changes: dict[str, list[float]] = {"CPU": [], "NVMe": []}
    for arm in compared(found):
        plain, place = same_stage(arm), one_value(arm.ended["offload_optimizer"])
        if place and plain and (ratio := paired_ratio(arm.beside, "step_time_s_median", arm.name, plain)).n:
            changes["NVMe" if place == "nvme" else "CPU"].append(ratio.center - 1)
    return _by_arm((place, span(shares, change_text)) for place, shares in changes.items() if shares)


def _one_device_time(found: list[Arm]) -> str:
    staged = [arm for arm in compared(found) if one_value(arm.ended["zero_stage"]) and ranks(arm) == 1]
    ratios = [(arm.name, ratio) for arm in staged if (ratio := arm.ratio("step_time_s_median")) is not None]
    return _by_arm((arm, f"{ratio.center:.2f}x (n = {ratio.n})") for arm, ratio in ratios if ratio.n)


_CLAIMS = (
    _Claim("S3-03", "Stages do not change the training loss", _ARTICLE_3, _evaluation_loss),
    _Claim("S2-01", "ZeRO lowers the training loss by 1.2 %", _ARTICLE_2, _evaluation_loss),
    _Claim("S3-02", "Adam's states are as large as the parameters", _ARTICLE_3, _optimizer_size),
    _Claim("S1-01", "ZeRO-1 is an 8x memory reduction", _ARTICLE_1, _less_state("zero1")),
    _Claim("S0-04", "ZeRO-3 uses 2.7x less memory than DDP", _ARTICLE_0, _less_state("zero3")),
    _Claim("S1-07", "Each of N GPUs holds 1/N of the gradients", _ARTICLE_1, _gradients),
    _Claim("S0-07", "ZeRO-2 sends 2x and ZeRO-3 4x the bytes of ZeRO-0", _ARTICLE_0, _traffic),
    _Claim("S1-19", "NVMe offload adds 15 % to a step, CPU offload 25 %", _ARTICLE_1, _offload_time),
    _Claim("S2-03", "ZeRO trains faster on one GPU", _ARTICLE_2, _one_device_time),
)


def answer(records: Records) -> Answer | None:
    """One row per claim, one column per workload."""
    rows = [
        {"Claim": claim.id, "It says": claim.statement, "Made at": claim.scale} | shown
        for claim in _CLAIMS
        if (shown := {name: said for name, arms in workloads(records).items() if (said := claim.shown_by(arms))})
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
