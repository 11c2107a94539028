"""Question 2 for one workload: the published claims that its arms can be held against, and what was measured.

The ids are those of the claims ledger. Nothing here is a verdict: a claim made at another scale keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from study.report.questions.effects import compared, compared_with, plain_reference
from study.report.questions.scaling_tables import same_stage
from study.report.records.arms import Arm, one_value, state_bytes
from study.report.records.statistics import paired_ratio, percent

Bearing = Callable[[list[Arm]], str]


def claims_touched(found: list[Arm]) -> Iterator[tuple[str, str]]:
    for claim, measure in _CLAIMS:
        if measured := measure(found):
            yield claim, measured


def _beside(found: list[Arm], *strategies: str) -> tuple[Arm | None, list[Arm]]:
    """Plain training, and the arms of these strategies on as many ranks, where those are several."""
    base = plain_reference(found)
    if base is None or one_value(base.ended["world_size"]) == 1:
        return base, []
    return base, [arm for arm in compared_with(base, found) if one_value(arm.ended["strategy"]) in strategies]


def _stages_and_loss(found: list[Arm]) -> str:
    if plain_reference(found) is None:
        return ""
    said = []
    for arm in compared(found, "confounded_loss"):
        ratio = arm.ratio("eval_loss_final")
        if one_value(arm.ended["zero_stage"]) and ratio is not None and ratio.n:
            said.append((abs(ratio.center - 1), arm, ratio))
    if not said:
        return ""
    change, arm, ratio = max(said, key=lambda entry: entry[0])
    furthest = f"furthest: `{arm.name}`, {percent(ratio.center - 1, signed=True)}, n = {ratio.n}"
    arms = f"{len(said)} arm{'s'[: len(said) > 1]} at stages 1 to 3"
    return f"the evaluation loss of {arms} is within {percent(change)} of `{arm.baseline}` ({furthest})."


def _optimizer_size(found: list[Arm]) -> str:
    said = []
    base, beside = _beside(found, "zero0", "zero1")
    for arm in [base, *beside] if base else []:
        ranks = one_value(arm.ended["world_size"]) if one_value(arm.ended["zero_stage"]) else 1
        held = [sum(arm.ended[f"{kind}_bytes_{place}"].median() for place in ("device", "host")) for kind in _KINDS]
        if held[0] and not any(map(pd.isna, held)):
            said.append(f"`{arm.name}` {held[1] * ranks / held[0]:.1f}x")
    return f"optimizer states over all ranks are, beside the parameters, {', '.join(said)}." if said else ""


_KINDS = ("params", "optimizer")


def _state_of(strategy: str) -> Bearing:
    def measure(found: list[Arm]) -> str:
        base, beside = _beside(found, strategy)
        for arm in beside if base else []:
            assert base is not None
            held, ranks = state_bytes(arm.ended), one_value(arm.ended["world_size"])
            if held > 0:
                less = state_bytes(base.ended) / held
                return f"`{arm.name}` on {ranks} ranks holds {less:.2f}x less state than `{base.name}`."
        return ""

    return measure


def _gradients(found: list[Arm]) -> str:
    base, beside = _beside(found, "zero2", "zero3")
    if base is None or not beside:
        return ""
    whole = base.ended["grads_bytes_device"].median()
    arm, ranks = beside[0], one_value(beside[0].ended["world_size"])
    held = arm.ended["grads_bytes_device"].median()
    if pd.isna(held) or not whole > 0:
        return ""
    return f"`{arm.name}` holds {held / whole:.0%} of the gradients of `{base.name}`, on {ranks} ranks."


def _traffic(found: list[Arm]) -> str:
    base, beside = _beside(found, "zero0", "zero2", "zero3")
    if base is None or not base.median("comm_bytes_per_step") > 0:
        return ""
    sent = base.median("comm_bytes_per_step")
    said = [
        f"`{arm.name}` {arm.median('comm_bytes_per_step') / sent:.1f}x"
        for arm in beside
        if not pd.isna(arm.median("comm_bytes_per_step"))
    ]
    return f"bytes sent per step beside `{base.name}`: {', '.join(said)}." if said else ""


def _offload_cost(found: list[Arm]) -> str:
    said = []
    for arm in compared(found):
        if one_value(arm.ended["offload_optimizer"]) and (plain := same_stage(arm)):
            ratio = paired_ratio(arm.beside, "step_time_s_median", arm.name, plain)
            if ratio.n:
                said.append(f"`{arm.name}` {percent(ratio.center - 1, signed=True)} (n = {ratio.n})")
    return f"step time beside the same stage without offload: {', '.join(said)}." if said else ""


def _one_device(found: list[Arm]) -> str:
    said = []
    for arm in compared(found):
        stage, ranks = one_value(arm.ended["zero_stage"]), one_value(arm.ended["world_size"])
        ratio = arm.ratio("step_time_s_median")
        if stage and ranks == 1 and ratio is not None and ratio.n:
            said.append(f"`{arm.name}` {ratio.center:.2f}x (n = {ratio.n})")
    base = compared(found)[0].baseline if said else ""
    return f"step time on one device beside `{base}`: {', '.join(said)}." if said else ""


_CLAIMS: tuple[tuple[str, Bearing], ...] = (
    ("S3-03 says that stages do not change the training loss, S2-01 that ZeRO lowers it by 1.2 %.", _stages_and_loss),
    ("S3-02 says that Adam's states are as large as the parameters.", _optimizer_size),
    ("S1-01 says that ZeRO-1 is an 8x memory reduction.", _state_of("zero1")),
    ("S0-04 says that ZeRO-3 uses 2.7x less memory than DDP.", _state_of("zero3")),
    ("S1-07 says that each of N GPUs holds 1/N of the gradients.", _gradients),
    ("S0-07 says that ZeRO-2 sends 2x and ZeRO-3 4x, and ZeRO-0 parameters at the start only.", _traffic),
    ("S1-19 says that NVMe offload adds 15 % to a step and CPU offload 25 %.", _offload_cost),
    ("S2-03 says that ZeRO trains faster on one GPU.", _one_device),
)
