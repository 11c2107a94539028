"""Resolve a user's config for a model and a number of ranks: defaults and "auto" are replaced by values."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Literal

from study.advisor.fitted import loads_16_bits, usual_weights
from study.advisor.long_features import has_features, over_ranks
from study.advisor.prediction import PredictedStep
from study.advisor.user_settings import (
    NOT_MODELLED,
    OFFLOADS,
    ZERO,
    Finding,
    UserFile,
    known_settings,
    run_by_trainer,
)
from study.config.errors import UserError, WrongFile, clip
from study.config.flags import Precision
from study.config.strategies import ModelParallelGroup, Strategy
from study.predictor.hardware import ANY_DEVICE, MAX_JOB_GPUS, Hardware, box_of_ranks
from study.predictor.memory import predict_memory
from study.predictor.request import (
    MemoryUse,
    OptimizerName,
    Program,
    Request,
    auto_bucket_sizes,
    with_tensor_group,
)
from study.predictor.shape import USUAL_LENGTH, ModelShape, Parameter
from study.predictor.state import REPLACED, State, forces_cpu_adam, predict_state
from study.predictor.tensor_group import UNDER_FSDP2
from study.releases.causes import Loop

_ENGINES: dict[str, Precision] = {"bf16": "bf16-engine", "fp16": "fp16-engine"}
_SP_SIZE = "parallelism_config.sp_size"
MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclasses.dataclass(frozen=True)
class ProgramSettings(Program):
    """Sizes and precision that the training script sets, not the config."""

    sequence_length: int = USUAL_LENGTH
    # Used if the config leaves them to the script; None: 1.
    micro_batch: int | None = None
    accumulation: int | None = None
    gradient_checkpointing: bool = False
    # Value of --precision: no, bf16 or fp16.
    mixed_precision: str | None = None
    # Without DeepSpeed: the 16-bit type in which weights are loaded and trained, or frozen next to adapters.
    pure: Literal["bf16", "fp16"] | None = None
    # With DeepSpeed: the weights are loaded in 16 bits; None: with adapters.
    loads_16_bits: bool | None = None
    # The weights are loaded in fp32. Frozen ones stay so without DeepSpeed.
    loads_fp32: bool = False
    # The program is transformers' Trainer.
    is_trainer: bool = False


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    """A resolved config, with the request that predicts it and its findings."""

    file: UserFile
    # With defaults, and without "auto"; empty without DeepSpeed.
    zero: Mapping[str, Any]
    top: Mapping[str, Any]
    request: Request
    findings: tuple[Finding, ...]
    # Tokens that the program generates for each sample.
    generated_tokens: int | None = None
    # Lines about the settings of a trainer's file.
    read_from: tuple[str, ...] = ()
    # The release of TRL whose file it is, and the place of its vLLM: the same GPUs, or a server.
    trl: str | None = None
    vllm: Literal["colocate", "server"] | None = None
    # Of the packages of a run, whose settings these are; None: the installed ones.
    releases: Mapping[str, str | None] | None = None
    # Those of `study explain --release`, and the newest ones that a trainer's requirements take.
    stated_releases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The trainer, if the release of DeepSpeed is one that its requirements take.
    required_by: str = ""
    # The program's loop, if its file shows it.
    loop: Loop | None = None
    # The program loads weights in fp32, whatever the checkpoint's type.
    loads_fp32: bool = False

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 without DeepSpeed."""
        return int(self.zero.get("stage", 0))

    @property
    def ranks(self) -> int:
        return self.request.box.ranks

    @property
    def data_ranks(self) -> int:
        """Ranks with different samples."""
        return self.request.data_ranks

    @property
    def shape(self) -> ModelShape:
        """The shape of the model, or of a rank's part of it."""
        return self.request.shape

    @functools.cached_property
    def memory(self) -> MemoryUse:
        return predict_memory(self.request)

    @functools.cached_property
    def step(self) -> PredictedStep | None:
        """The step of a rank; None for any device, and if no step time is predicted."""
        is_timed = self.request.box.device is not ANY_DEVICE and not self.memory.missing
        return PredictedStep.predict(self.request) if is_timed and not has_features(self.request) else None

    @property
    def state(self) -> State:
        """Model state of one rank, in bytes; stages 2 and 3 without gradients that wait for their reduction, which the
        bucket accounts for."""
        return predict_state(self.request, unreduced=self.stage == 1)

    @property
    def weight(self) -> int:
        """Bytes per element of a weight, and of its gradient."""
        return self.request.weight_bytes

    @property
    def largest(self) -> Parameter:
        """Largest parameter of the model."""
        return max(self.shape.params, key=lambda param: param.elements)

    def offload(self, what: str) -> Mapping[str, Any] | None:
        """Return the settings of an offload section; None if it is off."""
        section: Mapping[str, Any] | None = self.zero.get(what)
        return section if section and section["device"] != "none" else None

    def at(self, ranks: int | None = None, **zero: Any) -> ConfigCase:
        """Return the same case with other settings or another number of ranks."""
        changed = {**self.zero, **zero}
        strategy, box = self.request.strategy, self.request.box
        if ranks is not None:
            box = box_of_ranks(box.name, box.device, ranks)
        if strategy.deepspeed is not None:
            strategy = dataclasses.replace(_strategy(self.file, self.top, changed), group=strategy.group)
        request = dataclasses.replace(self.request, strategy=strategy, box=box)
        return dataclasses.replace(self, zero=changed, request=request)


def _box(file: UserFile, ranks: int, hardware: Hardware | None) -> Hardware:
    """Return the part of the hardware with this number of ranks, or any device, on which bytes do not depend."""
    if hardware is None:
        machines = file.num_machines or 1
        if machines > 1 and ranks % machines == 0:
            return Hardware("any", ANY_DEVICE, ranks // machines, machines)
        return box_of_ranks("any", ANY_DEVICE, ranks)
    nodes = _nodes(file, ranks, hardware)
    if (ranks, nodes) == (hardware.ranks, hardware.nodes):
        return hardware
    if ranks > hardware.ranks or ranks % nodes:
        problem = f"runs {ranks} ranks, and {hardware.name} has {hardware.ranks} GPUs"
        fix = "change --hardware, or the number of ranks with --world_size"
        raise WrongFile(file.name, problem, fix, key="num_processes")
    return dataclasses.replace(hardware, gpus_per_node=ranks // nodes, nodes=nodes)


def _nodes(file: UserFile, ranks: int, hardware: Hardware) -> int:
    """Return the number of machines that the ranks are on: the file's if it suits the hardware, else the fewest."""
    machines = file.num_machines
    if (
        machines
        and machines <= hardware.nodes
        and ranks % machines == 0
        and ranks // machines <= hardware.gpus_per_node
    ):
        return machines
    return max(ranks // hardware.gpus_per_node, 1)


def _strategy(file: UserFile, top: Mapping[str, Any], zero: Mapping[str, Any]) -> Strategy:
    # A stage that ignores an offload has none in its time and memory.
    unused = {what: None for what, least in (("offload_optimizer", 1), ("offload_param", 3)) if zero["stage"] < least}
    settings = {**top, ZERO: {**zero, **unused}}
    return Strategy(file.name, "DEEPSPEED", settings, custom_settings=settings)


def resolve(
    file: UserFile, shape: ModelShape, ranks: int | None, work: ProgramSettings, hardware: Hardware | None = None
) -> ConfigCase:
    """Return the config with defaults and values for "auto"; raise UserError if the number of ranks is open."""
    file = run_by_trainer(file) if work.is_trainer else file
    findings = list(file.findings)
    ranks = _rank_count(file, ranks, hardware, findings)
    box = _box(file, ranks, hardware)
    zero: dict[str, Any] = {}
    is_pure = False
    if file.deepspeed is None:
        strategy, precision = _strategy_without_engine(file, box, work)
        if not (shape.lora_rank and work.loads_fp32):
            precision, is_pure = usual_weights(shape, strategy, precision)
        if work.pure is not None:
            precision, is_pure = _ENGINES[work.pure], True
    else:
        precision, zero = _precision(file, work.mixed_precision, findings), _resolved_zero(file, shape, findings)
        strategy = _strategy(file, file.deepspeed, zero)
    micro_batch, accumulation = _batch(file, ranks, work)
    checkpoints, offloads = (
        strategy.is_fsdp and file.is_on(name) for name in ("fsdp_activation_checkpointing", "fsdp_offload_params")
    )
    request = Request(
        shape=shape,
        strategy=strategy,
        box=box,
        sequence_length=work.sequence_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision=precision,
        gradient_checkpointing=work.gradient_checkpointing or checkpoints,
        pure=is_pure,
        loads_16_bits=_loads_16_bits(shape, strategy, precision, work),
        autocast=not strategy.is_fsdp and (work.pure is None or work.mixed_precision != "no"),
        fsdp_offloads=offloads,
        fsdp_keeps_gathered=_keeps_gathered(file),
        fsdp_unwrapped=strategy.is_fsdp and _is_unwrapped(file, shape),
        fsdp_version=1 if strategy.is_fsdp and file.sharding else 2,
        **_program(file, strategy, work, findings).request_fields,
    )
    request, notes = _divide_tensors(file, request)
    request, sample_notes = _divide_samples(file, request)
    return ConfigCase(
        file,
        zero,
        dict(file.deepspeed or {}),
        request,
        (*findings, *notes, *sample_notes),
        loop="trainer" if work.is_trainer else None,
        loads_fp32=work.loads_fp32,
    )


def _program(file: UserFile, strategy: Strategy, work: ProgramSettings, findings: list[Finding]) -> Program:
    """Return the program with the optimizer and the compilation of the file; add findings about the optimizer."""
    compiled = work.trainer.compiled or file.compiled
    trainer = dataclasses.replace(work.trainer, compiled=compiled)
    return dataclasses.replace(work, optimizer=_optimizer(file, strategy, work, findings), trainer=trainer)


def _divide_samples(file: UserFile, request: Request) -> tuple[Request, list[Finding]]:
    """Return the request of a rank with its part of each sample if the file sets DeepSpeed's Ulysses, and a finding
    that the figures are those of it, or why they are not."""
    ranks = file.group_sizes.get("sp_size", 1)
    if ranks == 1 or file.deepspeed is None:
        return request, []
    stage, reason = request.strategy.zero_stage, None
    if len(file.group_sizes) > 1:
        reason = "with groups of another kind"
    elif stage != 3:
        reason = f"at stage {stage}"
    else:
        try:
            request = over_ranks(request, ranks, "sp_size")
        except UserError as refusal:
            reason = refusal.problem
    if reason is not None:
        return request, [Finding("noted", _SP_SIZE, f"{reason}; {NOT_MODELLED}", rule="not-modelled")]
    count = f"{request.box.ranks // ranks} rank{'s' * (request.box.ranks > ranks)}"
    message = f"{ranks} ranks divide the tokens of each sample: a step trains on the samples of {count}"
    return request, [Finding("noted", _SP_SIZE, f"{message}; no step time is predicted")]


def _divide_tensors(file: UserFile, request: Request) -> tuple[Request, list[Finding]]:
    """Return the request of a rank with its part of each layer if the file sets tensor-parallel groups, and a finding
    that the figures are those of it, or why they are not."""
    section = (file.deepspeed or {}).get("tensor_parallel")
    key, ranks = "parallelism_config.tp_size", file.group_sizes.get("tp_size", 1)
    if file.deepspeed is not None:
        key = "tensor_parallel.autotp_size"
        ranks = section.get("autotp_size", 0) if isinstance(section, Mapping) else 0
    if type(ranks) is not int or ranks < 2:
        return request, []
    strategy = dataclasses.replace(request.strategy, group=ModelParallelGroup("tensors", ranks))
    if not strategy.is_fsdp and strategy.deepspeed is None:
        # Accelerate does not wrap such a model with DDP.
        strategy = dataclasses.replace(strategy, name="tp")
    reason = _undivided_reason(file, request, ranks)
    if reason is None:
        try:
            request = with_tensor_group(dataclasses.replace(request, strategy=strategy))
        except UserError as refusal:
            reason = refusal.problem
    if reason is not None:
        return request, [Finding("noted", key, f"{reason}; {NOT_MODELLED}", rule="not-modelled")]
    if file.deepspeed is not None:
        # A rule of known_settings.yaml has the samples of its groups.
        return request, []
    count = f"{request.data_ranks} rank{'s' * (request.data_ranks > 1)}"
    message = f"{ranks} ranks divide each layer and share samples: a step trains on those of {count}"
    if strategy.is_fsdp:
        message += f"; {UNDER_FSDP2}"
    return request, [Finding("noted", key, message)]


def _undivided_reason(file: UserFile, request: Request, ranks: int) -> str | None:
    """Return why the figures do not divide layers; None if the model decides it."""
    zero, section = request.strategy.deepspeed or {}, (file.deepspeed or {}).get("tensor_parallel") or {}
    checkpointing = zero.get("activation_checkpointing") or {}
    for holds, reason in (
        (set(file.group_sizes) - {"tp_size"} or zero.get("sequence_parallel_size"), "with groups of another kind"),
        (file.mesh_ranks not in (1, request.box.ranks), "its groups do not make all ranks"),
        (file.distributed_type == "MULTI_GPU" and ranks != request.box.ranks, "without FSDP in groups of some ranks"),
        (request.strategy.is_fsdp and request.fsdp_version == 1, "under FSDP1, which Accelerate refuses with it"),
        (request.has_reference_copy or request.reference_model, "with a reference model"),
        (request.offloads, "with an offload"),
        (bool(section.get("partition_config") or section.get("preset_model")), "with a custom plan"),
        (bool(checkpointing.get("partition_activations")), "with partitioned activations"),
        (request.ranks_per_replica is not None and zero != {}, "with zero_hpz_partition_size"),
    ):
        if holds:
            return reason
    return None


def _loads_16_bits(shape: ModelShape, strategy: Strategy, precision: Precision, work: ProgramSettings) -> bool:
    if work.loads_16_bits is None:
        return loads_16_bits(shape, strategy, precision) and not work.loads_fp32
    return work.loads_16_bits and strategy.deepspeed is not None and precision == "bf16-engine"


def _rank_count(file: UserFile, ranks: int | None, hardware: Hardware | None, findings: list[Finding]) -> int:
    """Return the number of ranks that flag, file or hardware set, and add a finding if it leaves GPUs unused.

    Raise UserError without a number, above the maximum, or if the file starts one process and the flag asks for more.
    """
    if file.distributed_type == "NO":
        # simple_launcher of Accelerate's launch.py.
        if ranks is not None and ranks > 1:
            problem = f"sets distributed_type: NO, which starts one process, and --world_size is {ranks}"
            raise WrongFile(file.name, problem, "leave --world_size out, or set MULTI_GPU in the file")
        ranks = 1
    ranks = ranks or file.num_processes or (hardware.ranks if hardware else None)
    if ranks is None:
        problem = "does not set the number of ranks"
        if any(finding.kind == "refused" for finding in findings):
            problem += f", and has wrong settings, which study explain --strict {file.name} lists"
        raise WrongFile(file.name, problem, "add --world_size N, or --hardware BOX")
    if hardware is not None and file.num_processes == ranks < hardware.ranks:
        message = f"{ranks} of the {hardware.ranks} GPUs are used: --world_size {hardware.ranks} explains all"
        if hardware.nodes > 1:
            message = f"{ranks} is the number of all machines together: {message}"
        findings.append(Finding("noted", "num_processes", message))
    if ranks > MAX_JOB_GPUS:
        raise UserError(f"{ranks:,} ranks", f"give at most {MAX_JOB_GPUS:,}")
    return ranks


def _strategy_without_engine(file: UserFile, box: Hardware, work: ProgramSettings) -> tuple[Strategy, Precision]:
    """Return the strategy of a file without DeepSpeed, and its mixed precision."""
    mesh = file.mesh if file.mesh_ranks in (1, box.ranks) else None
    if file.sharding in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        mesh = (box.nodes, box.gpus_per_node)
    kind = "MULTI_GPU" if file.sharding == "NO_SHARD" else file.distributed_type
    name = {"FSDP": "fsdp2", "NO": "single"}.get(kind, "ddp")
    strategy = Strategy(name, kind, custom_settings={"mesh": mesh} if mesh else None, mesh=mesh)
    mixed_precision = work.mixed_precision or file.mixed_precision
    precisions: dict[str | None, Precision] = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}
    return strategy, precisions.get(mixed_precision, "fp32")


def _keeps_gathered(file: UserFile) -> bool:
    if file.sharding is not None:
        return file.sharding in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    return (file.fsdp or {}).get("fsdp_reshard_after_forward") is False


def _is_unwrapped(file: UserFile, shape: ModelShape) -> bool:
    """Whether no policy wraps layers; under version 1 adapters need peft's own."""
    policy = (file.fsdp or {}).get("fsdp_auto_wrap_policy") or "NO_WRAP"
    return str(policy).upper() == "NO_WRAP" and (shape.lora_rank is None or file.sharding is None)


def _optimizer(file: UserFile, strategy: Strategy, work: ProgramSettings, findings: list[Finding]) -> OptimizerName:
    """Return the optimizer of the file, or the program's unless Accelerate replaces it on the host, as all but Lion."""
    kind = ((file.deepspeed or {}).get("optimizer") or {}).get("type")
    if kind is not None:
        # Others have a finding, that bytes are those of AdamW.
        names: dict[str, OptimizerName] = {"lion": "lion", "adafactor": "adafactor"}
        engines = names.get(str(kind).lower(), "adamw")
        if work.optimizer not in ("adamw", engines):
            message = f"{work.optimizer} has no effect: the engine makes the {clip(kind)} of the section optimizer"
            findings.append(Finding("ignored", "optimizer", message, "take one of them out", "optimizer-twice"))
        return engines
    name = work.optimizer
    if file.launcher != "deepspeed" and name == work.optimizer not in ("adamw", "lion") and forces_cpu_adam(strategy):
        findings.append(Finding("conflict", "optimizer", f"{name} does not step on the host: {REPLACED}"))
        return "adamw"
    return name


def ranks_of_a_batch(top: Mapping[str, Any], ranks: int) -> float:
    """Return the number of ranks that share a batch in DeepSpeed: a sequence-parallel group counts as one rank
    (deepspeed.initialize, and DeepSpeedConfig.__init__, which accepts any quotient)."""
    data, sequence = (top.get(f"{what}_parallel_size") for what in ("data", "sequence"))
    if type(sequence) is not int or sequence < 1:
        return ranks
    if type(data) is int and data >= 1:
        return data
    return ranks / sequence if ranks % sequence else ranks // sequence


def _batch(file: UserFile, ranks: int, work: ProgramSettings) -> tuple[int, int]:
    """Return micro-batch and accumulation from the file (_set_batch_related_parameters in DeepSpeed's config.py), or
    from the flags if the file leaves them open."""
    top = file.deepspeed or {}
    values = [top.get(key) for key in ("train_batch_size", MICRO_BATCH, ACCUMULATION)]
    global_batch, micro, steps = (value if type(value) is int and value > 0 else None for value in values)
    # Accelerate's Ulysses makes DeepSpeed count a group as one rank (DeepSpeedConfig.__init__ with an mpu).
    sharing = max(ranks_of_a_batch(top, ranks) // file.group_sizes.get("sp_size", 1), 1)
    # Without this key Accelerate sets 1. With "auto" no other value fits.
    is_without = file.launcher == "deepspeed" and ACCUMULATION not in top
    if (is_without or (top.get(ACCUMULATION) == "auto" and not work.accumulation)) and global_batch and micro:
        steps = max(int(global_batch // micro // sharing), 1)
    elif global_batch and top.get(MICRO_BATCH) is None:
        if top.get(ACCUMULATION) is None:
            steps = 1
        micro = max(int(global_batch // sharing // (steps or work.accumulation or 1)), 1)
    for flag, value, key, number in (
        ("--micro_batch", work.micro_batch, MICRO_BATCH, micro),
        ("--accumulation", work.accumulation, ACCUMULATION, steps),
    ):
        if None not in (value, number) and value != number:
            fix = f'leave {flag} out, or make {key} "auto"'
            raise WrongFile(file.name, f"makes {key} {number}, and {flag} is {value}", fix, key=key)
    return micro or work.micro_batch or 1, steps or work.accumulation or 1


def _resolved_zero(file: UserFile, shape: ModelShape, findings: list[Finding]) -> dict[str, Any]:
    """Return ZeRO's settings with defaults, under their current names in DeepSpeed."""
    assert file.deepspeed is not None
    reference, zero, file_zero = known_settings(), dict[str, Any](), file.deepspeed.get(ZERO, {})
    for key, value in file_zero.items():
        name = key if key in reference[ZERO] else f"stage3_{key}"
        now = reference[ZERO][name].get("is_now")
        if now is None:
            zero[name] = dict(value) if isinstance(value, dict) else value
        elif now in file_zero:
            message = f"the engine ends with an error if {now}, its new name, is set, too"
            findings.append(Finding("refused", f"{ZERO}.{key}", message))
        else:
            findings.append(Finding("noted", f"{ZERO}.{key}", f"is deprecated, and read as {now}"))
            # Deprecated switches of offloading.
            zero[now] = ({"device": "cpu"} if value else None) if now in OFFLOADS else value
    nested = [(f"{ZERO}.{what}", zero[what]) for what in OFFLOADS if isinstance(zero.get(what), dict)]
    for place, section in [(ZERO, zero), *nested]:
        section.update({key: _auto(file, shape, place, key, findings) for key in section if section[key] == "auto"})
    full = {key: entry["default"] for key, entry in reference[ZERO].items() if "default" in entry} | zero
    if full["overlap_comm"] is None:
        full["overlap_comm"] = full["stage"] == 3
    for what in [what for what in OFFLOADS if full[what] is not None]:
        full[what] = {key: entry["default"] for key, entry in reference[f"{ZERO}.{what}"].items()} | full[what]
    return full


def _auto(file: UserFile, shape: ModelShape, place: str, name: str, findings: list[Finding]) -> Any:
    """Return the value that replaces "auto"."""
    key = f"{place}.{name}"
    if (value := auto_bucket_sizes(shape.hidden).get(name)) is not None:
        message = f"auto: Accelerate and the Trainer make it {value}, from a width of {shape.hidden}"
        if file.launcher == "deepspeed":
            message += "; deepspeed.initialize alone drops it and uses its default"
        findings.append(Finding("filled", key, message))
        return value
    default = known_settings()[place][name]["default"]
    if key in known_settings()["filled_by_accelerate"]:
        findings.append(Finding("filled", key, f"auto: assumed to be {default}, since nothing else sets it"))
        return default
    text = "true at stage 3, else false" if default is None else json.dumps(default)
    if file.launcher == "deepspeed":
        message = f"auto: deepspeed.initialize drops it and uses the default, {text}; Accelerate and the Trainer do not"
        findings.append(Finding("filled", key, f"{message}, and end with an error"))
    else:
        # deepspeed_config_process in Accelerate's utils/dataclasses.py, which the Trainer calls, too.
        message = "auto: neither Accelerate nor the Trainer fills it in, and the run ends with an error"
        findings.append(Finding("refused", key, message, f"take it out: the default is {text}"))
    return default


def _precision(file: UserFile, precision_flag: str | None, findings: list[Finding]) -> Precision:
    """Return the precision of the weights: the type that the JSON sets or, if it leaves that open, Accelerate's."""
    top = file.deepspeed or {}
    sections = {"bf16": top.get("bf16") or top.get("bfloat16"), "fp16": top.get("fp16")}
    on = {kind: (section or {}).get("enabled", False) for kind, section in sections.items()}
    mixed = precision_flag or file.mixed_precision
    # Accelerate uses bf16 for fp8.
    mixed = "bf16" if mixed == "fp8" else mixed
    open_kinds = [kind for kind, value in on.items() if value == "auto"]
    if open_kinds and mixed is None:
        # A file that leaves only fp16 open was written for fp16, unless it sets bf16.
        mixed = "fp16" if open_kinds == ["fp16"] and on["bf16"] is not True else "bf16"
        message = f"auto: assumed to be the value of --precision, {mixed}"
        findings += [Finding("filled", f"{kind}.enabled", message) for kind in open_kinds]
    on |= {kind: mixed == kind for kind in open_kinds}
    if on["bf16"] is True and on["fp16"] is True:
        fix = "turn one of them off"
        findings.append(Finding("refused", "fp16", "the engine refuses bf16 and fp16 together", fix))
    if mixed in ("bf16", "fp16") and top.get(mixed) is None:
        opposite = "fp16" if mixed == "bf16" else "bf16"
        if on[opposite] is True:
            message = f"Accelerate refuses mixed_precision: {mixed} together with it"
            findings.append(Finding("refused", f"{opposite}.enabled", message))
        on[mixed] = True
    autocast = top.get("torch_autocast") or {}
    if autocast.get("enabled") and not (on["bf16"] or on["fp16"]):
        return "fp16" if autocast.get("dtype") in ("float16", "fp16", "half") else "bf16"
    return "bf16-engine" if on["bf16"] else "fp16-engine" if on["fp16"] else "fp32"
