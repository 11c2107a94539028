"""A user's file for a model on a number of ranks, with everything settled that the file leaves open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from study.advisor.user_settings import OFFLOADS, ZERO, Finding, UserFile, known_settings
from study.config.errors import UserError
from study.config.flags import Precision
from study.config.strategies import Strategy
from study.predictor.floor import ANY_DEVICE
from study.predictor.request import LARGEST_JOB, Hardware, ModelShape, Request, Tensor, box_of_ranks
from study.predictor.state import EngineSettings, State, engine_settings, sizes_of_width, state_of, weight_bytes

MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a program decides, and not its settings."""

    sequence_length: int = 1024
    # Where the file leaves them to the program; None: one.
    micro_batch: int | None = None
    accumulation: int | None = None
    gradient_checkpointing: bool = False
    # Of --precision: no, bf16 or fp16.
    mixed_precision: str | None = None


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    file: UserFile
    # With defaults, and without "auto"; empty without DeepSpeed.
    zero: Mapping[str, Any]
    top: Mapping[str, Any]
    request: Request
    findings: tuple[Finding, ...]

    @property
    def stage(self) -> int:
        return int(self.zero.get("stage", 0))

    @property
    def ranks(self) -> int:
        return self.request.box.ranks

    @property
    def shape(self) -> ModelShape:
        return self.request.shape

    @property
    def settings(self) -> EngineSettings:
        return engine_settings(self.request.strategy, self.shape.hidden)

    @property
    def state(self) -> State:
        return state_of(self.request)

    @property
    def weight(self) -> int:
        """Bytes of one weight, and of its gradient."""
        return weight_bytes(self.request)

    @property
    def largest(self) -> Tensor:
        return max(self.shape.tensors, key=lambda tensor: tensor.elements)

    def at(self, ranks: int | None = None, **zero: Any) -> ConfigCase:
        """The same with other settings, or as one of another number of ranks."""
        changed = {**self.zero, **zero}
        strategy, box = self.request.strategy, self.request.box if ranks is None else _box(ranks)
        if strategy.deepspeed is not None:
            strategy = _strategy(self.file, self.top, changed)
        request = dataclasses.replace(self.request, strategy=strategy, box=box)
        return dataclasses.replace(self, zero=changed, request=request)

    def offload(self, what: str) -> Mapping[str, Any] | None:
        section: Mapping[str, Any] | None = self.zero.get(what)
        return section if section and section["device"] != "none" else None


# torch's own order (ShardingStrategy), from 1.
SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def _box(ranks: int) -> Hardware:
    """Which device it is does not matter to bytes."""
    return box_of_ranks("any", ANY_DEVICE, ranks)


def _strategy(file: UserFile, top: Mapping[str, Any], zero: Mapping[str, Any]) -> Strategy:
    settings = {**top, ZERO: dict(zero)}
    return Strategy(file.name, "DEEPSPEED", settings, own_settings=settings)


def settle(file: UserFile, shape: ModelShape, ranks: int | None, work: Workload) -> ConfigCase:
    """Fill in what the file leaves to defaults and to "auto"; UserError where nothing says it."""
    precision = work.mixed_precision
    ranks = ranks or file.num_processes
    if ranks is None:
        raise UserError(f"{file.name} does not say on how many ranks it runs", "add --world-size N")
    if ranks > LARGEST_JOB:
        raise UserError(f"{ranks:,} ranks", f"give at most {LARGEST_JOB:,}")
    findings, batch = list(file.findings), _batch(file, ranks, work)
    if file.deepspeed is None:
        asked = precision or file.mixed_precision
        if asked == "fp8":
            findings.append(Finding("noted", "mixed_precision", "fp8 is counted as bf16: only products are in fp8"))
        computed: Any = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(asked or "no", "fp32")
        kind = "MULTI_GPU" if sharding_of(file) == "NO_SHARD" else file.distributed_type
        name = {"FSDP": "fsdp2", "NO": "single"}.get(kind, "ddp")
        mesh = _fitting_mesh(file, ranks, findings)
        strategy = Strategy(name, kind, own_settings={"mesh": mesh} if mesh else None, mesh=mesh)
        request = _request(shape, strategy, ranks, computed, batch, work)
        return ConfigCase(file, {}, {}, request, tuple(findings))
    zero, top = _without_old_names(file, findings), dict(file.deepspeed)
    chosen = _precision(file, precision, findings)
    for place, section in _sections(zero):
        for key, value in list(section.items()):
            if value == "auto":
                section[key] = _filled(file, shape, f"{place}{key}", key, findings)
    known = known_settings()
    full = {key: entry["default"] for key, entry in known[ZERO].items() if "default" in entry} | zero
    if full["overlap_comm"] is None:
        full["overlap_comm"] = full["stage"] == 3
    for what in OFFLOADS:
        if full[what] is not None:
            defaults = {key: entry["default"] for key, entry in known[f"{ZERO}.{what}"].items()}
            full[what] = {**defaults, **full[what]}
    request = _request(shape, _strategy(file, top, full), ranks, chosen, batch, work)
    return ConfigCase(file, full, top, request, tuple(findings))


def fsdp_settings(file: UserFile) -> dict[str, Any]:
    """Under their full names, which Accelerate takes without the prefix too."""
    given = (file.fsdp or {}).items()
    return {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in given}


def sharding_of(file: UserFile) -> str | None:
    """What FSDP's first version is asked for, which has numbers for it too; None of the second."""
    said = fsdp_settings(file)
    if file.fsdp is None or str(said.get("fsdp_version", 1)) == "2":
        return None
    # The launcher says FULL_SHARD where the file says nothing, so fsdp_reshard_after_forward is not heard.
    asked = str(said.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    return SHARDINGS[int(asked) - 1] if asked in ("1", "2", "3", "4", "5") else asked


def _fitting_mesh(file: UserFile, ranks: int, findings: list[Finding]) -> tuple[int, int] | None:
    if file.mesh is None or file.mesh[0] * file.mesh[1] == ranks:
        return file.mesh
    copies, shards = file.mesh
    says = f"Accelerate ends with an error: {copies} copies of {shards} ranks are {copies * shards}, and not {ranks}"
    findings.append(Finding("refused", "parallelism_config", says))
    return None


def _request(
    shape: ModelShape, strategy: Strategy, ranks: int, precision: Precision, batch: tuple[int, int], work: Workload
) -> Request:
    return Request(
        shape=shape, strategy=strategy, box=_box(ranks), sequence_length=work.sequence_length,
        micro_batch=batch[0], accumulation=batch[1], precision=precision,
        gradient_checkpointing=work.gradient_checkpointing, attention="sdpa", autocast=not strategy.is_fsdp,
    )  # fmt: skip


def _batch(file: UserFile, ranks: int, work: Workload) -> tuple[int, int]:
    """Samples of a pass and passes of a step: by the file (_set_batch_related_parameters in DeepSpeed's config.py), and
    where it leaves them open by the flags."""
    top = file.deepspeed or {}
    said = [top.get(key) for key in ("train_batch_size", MICRO_BATCH, ACCUMULATION)]
    whole, micro, steps = (value if type(value) is int and value > 0 else None for value in said)
    if file.launcher == "deepspeed" and ACCUMULATION not in top and whole and micro:
        # Accelerate takes 1 there.
        steps = max(whole // micro // ranks, 1)
    elif whole and top.get(MICRO_BATCH) is None:
        if top.get(ACCUMULATION) is None:
            steps = 1
        micro = max(whole // ranks // (steps or work.accumulation or 1), 1)
    asked = (
        ("--micro-batch", work.micro_batch, MICRO_BATCH, micro),
        ("--accumulation", work.accumulation, ACCUMULATION, steps),
    )
    for flag, value, key, number in asked:
        if None not in (value, number) and value != number:
            fix = f'leave {flag} out, or make {key} "auto"'
            raise UserError(f"{file.name} makes {key} {number}, and {flag} says {value}", fix)
    return micro or work.micro_batch or 1, steps or work.accumulation or 1


def _sections(zero: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    nested = [(f"{ZERO}.{what}.", zero[what]) for what in OFFLOADS if isinstance(zero.get(what), dict)]
    return [(f"{ZERO}.", zero), *nested]


def _without_old_names(file: UserFile, findings: list[Finding]) -> dict[str, Any]:
    """DeepSpeed's short and old names under today's."""
    assert file.deepspeed is not None
    known, zero = known_settings()[ZERO], {}
    given: dict[str, Any] = file.deepspeed.get(ZERO, {})
    for key, value in given.items():
        name = key if key in known else f"stage3_{key}"
        now = known[name].get("is_now")
        if now is None:
            zero[name] = dict(value) if isinstance(value, dict) else value
            continue
        if now in given:
            findings.append(Finding("refused", f"{ZERO}.{key}", f"the engine refuses it beside {now}, its new name"))
        else:
            findings.append(Finding("ignored", f"{ZERO}.{key}", f"is deprecated, and read as {now}"))
            # The old switches of offloading.
            zero[now] = ({"device": "cpu"} if value else None) if now in OFFLOADS else value
    return zero


def _precision(file: UserFile, asked: str | None, findings: list[Finding]) -> Precision:
    """What the weights are in: the JSON's own types, and Accelerate's where the JSON leaves it open."""
    assert file.deepspeed is not None
    on = {}
    for kind in ("bf16", "fp16"):
        section = file.deepspeed.get(kind) or (file.deepspeed.get("bfloat16") if kind == "bf16" else None) or {}
        on[kind] = section.get("enabled", False)
    of_launcher = asked or file.mixed_precision
    if of_launcher == "fp8":
        findings.append(Finding("noted", "mixed_precision", "fp8 is counted as bf16, which Accelerate takes for it"))
        of_launcher = "bf16"
    open_kinds = [kind for kind, value in on.items() if value == "auto"]
    if open_kinds and of_launcher is None:
        of_launcher = "bf16"
        says = "auto: taken for what --precision says, bf16"
        findings += [Finding("filled", f"{kind}.enabled", says) for kind in open_kinds]
    on |= {kind: of_launcher == kind for kind in open_kinds}
    if on["bf16"] is True and on["fp16"] is True:
        findings.append(Finding("refused", "fp16", "the engine refuses bf16 and fp16 together"))
    if of_launcher in ("bf16", "fp16") and file.deepspeed.get(of_launcher) is None:
        other = "fp16" if of_launcher == "bf16" else "bf16"
        if on[other] is True:
            says = f"Accelerate refuses mixed_precision: {of_launcher} beside it"
            findings.append(Finding("refused", f"{other}.enabled", says))
        on[of_launcher] = True
    autocast = file.deepspeed.get("torch_autocast") or {}
    if autocast.get("enabled"):
        if on["bf16"] or on["fp16"]:
            says = "the weights have 16 bits already, so it has nothing to cast"
            findings.append(Finding("conflict", "torch_autocast", says))
        else:
            return "fp16" if autocast.get("dtype") in ("float16", "fp16", "half") else "bf16"
    return "bf16-engine" if on["bf16"] else "fp16-engine" if on["fp16"] else "fp32"


def _filled(file: UserFile, shape: ModelShape, key: str, name: str, findings: list[Finding]) -> Any:
    if (value := sizes_of_width(shape.hidden).get(name)) is not None:
        says = f"auto: Accelerate and the Trainer make it {value}, from a width of {shape.hidden}"
        if file.launcher == "deepspeed":
            says += "; deepspeed.initialize alone drops it and takes its default"
        findings.append(Finding("filled", key, says))
        return value
    section = key.removesuffix(f".{name}")
    default = known_settings()[section][name]["default"]
    if key in known_settings()["filled_by_accelerate"]:
        findings.append(Finding("filled", key, f"auto: taken for {default}, which is what nothing else says"))
        return default
    says = f"auto: Accelerate refuses it here; the Trainer and the engine take the default, {default}"
    findings.append(Finding("refused" if file.launcher == "accelerate" else "filled", key, says))
    return default
