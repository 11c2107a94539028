"""The forms that need no record: what a document's own numbers come to, and what it says of itself."""

from __future__ import annotations

from study.claims.evidence import Evidence
from study.claims.form import form
from study.claims.verdicts import Figure, NotJudged
from study.predict.floor import StateBytes, state_bytes
from study.spec.strategies import read_strategy
from study.theory.paper import KINDS, papers_state_bytes, papers_traffic, split_by

GB = 1e9
MIXED = "bf16-engine"


def held_bytes(strategy: str, ranks: int, precision: str = MIXED) -> StateBytes:
    """Per parameter; by default 2 + 2 + 12 bytes, as mixed-precision Adam keeps them."""
    return state_bytes(read_strategy(strategy), precision, ranks)


@form("consistency")
def stated(_: Evidence, *, value: float) -> Figure:
    """A number that the document itself gives, or that can be counted in its listing."""
    return Figure(value)


@form("arithmetic")
def ratio(_: Evidence, *, of: float, to: float) -> Figure:
    return Figure(of / to)


@form("arithmetic")
def saving(_: Evidence, *, before: float, after: float) -> Figure:
    """As a share."""
    return Figure(1 - after / before)


@form("arithmetic")
def steps_per_hour(_: Evidence, *, tokens_per_s: float, gpus: int, batch: int, length: int) -> Figure:
    """What a speed per GPU comes to with this batch."""
    return Figure(3600 * tokens_per_s * gpus / (batch * length))


@form("arithmetic")
def tflops(_: Evidence, *, parameters_b: float, tokens_per_s: float) -> Figure:
    """Six operations for each parameter and token."""
    return Figure(6 * parameters_b * tokens_per_s / 1e3)


@form("arithmetic")
def state_gb(_: Evidence, *, parameters_b: float, strategy: str, gpus: int, precision: str = MIXED) -> Figure:
    """Model state on one device."""
    return Figure(parameters_b * held_bytes(strategy, gpus, precision).device)


@form("arithmetic")
def state_ratio(
    _: Evidence, *, strategy: str, gpus: int, over: str, over_gpus: int, over_precision: str = MIXED
) -> Figure:
    """Model state on one device, of two ways to train one model."""
    return Figure(held_bytes(strategy, gpus).device / held_bytes(over, over_gpus, over_precision).device)


@form("arithmetic")
def state_saved_gb(_: Evidence, *, parameters_b: float, strategy: str, over: str, gpus: int) -> Figure:
    return Figure(parameters_b * (held_bytes(over, gpus).device - held_bytes(strategy, gpus).device))


@form("arithmetic")
def capacity_b(_: Evidence, *, device_gb: float, strategy: str, gpus: int) -> Figure:
    """Billions of parameters whose model state alone fills the device: activations make it less."""
    return Figure(device_gb / held_bytes(strategy, gpus).device)


@form("arithmetic")
def solved_bytes(
    _: Evidence, *, parameters_b: float, gpus: int, stage0_gb: float, stage2_gb: float, stage3_gb: float, what: str
) -> Figure:
    """Three peaks are three equations: of weights, of gradients with optimizer, and of a rest that no stage splits.

    `what` is `weights` or `sharded`, in bytes for each parameter, or `rest`, in GB.
    """
    kept = 1 - 1 / gpus
    sharded, weights = (stage0_gb - stage2_gb) / kept, (stage2_gb - stage3_gb) / kept
    solved = {"weights": weights / parameters_b, "sharded": sharded / parameters_b,
              "rest": stage0_gb - weights - sharded}  # fmt: skip
    return Figure(solved[what])


@form("arithmetic")
def shares_gb(_: Evidence, *, params_gb: float, grads_gb: float, optimizer_gb: float, stage: int, gpus: int) -> Figure:
    """Three sizes, split as the stage says."""
    sizes = {"optimizer": optimizer_gb, "grads": grads_gb, "params": params_gb}
    return Figure(sum(size / split_by(kind, stage, gpus) for kind, size in sizes.items()))


@form("consistency")
def settings_changed(_: Evidence, *, strategy: str, over: str) -> Figure:
    """DeepSpeed's ZeRO keys that the second strategy's file lacks or has another value for."""
    mine, others = (dict((read_strategy(name).deepspeed or {})["zero_optimization"]) for name in (strategy, over))
    changed = [key for key in mine if key not in others or mine[key] != others[key]]
    return Figure(len(changed), records=tuple(f"accelerate_configs/{name}.yaml" for name in (over, strategy)))


def formula_bytes(parameters: float, figure: str, stage: int, ranks: int) -> float:
    """The ZeRO paper's, in mixed precision."""
    if figure == "state":
        return papers_state_bytes(parameters, stage, ranks)
    if figure == "sent":
        return parameters * KINDS["params"][0] * papers_traffic(stage, ranks)
    if figure not in KINDS:
        raise NotJudged(f"the paper has no formula for {figure}")
    return parameters * KINDS[figure][0] / split_by(figure, stage, ranks)
