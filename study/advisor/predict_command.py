"""`study predict`: memory, communication and step time of one strategy, before it is run."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

from study.advisor import measured, training
from study.advisor.fitted import fit_settings, loads_16_bits, precision_under, usual_weights
from study.advisor.long_features import feature_notes, features_text, has_features, with_features
from study.advisor.request_notes import kernels_text, lacks_flash, request_notes
from study.advisor.training import Amount, WholeTraining
from study.advisor.user_settings import NOT_MODELLED, UserFile, check_deepspeed
from study.advisor.workload import FSDP_FLAGS, LONG_FEATURES, Workload
from study.config import strategies
from study.config.errors import UserError, clip, require_extra
from study.config.flags import Parser, Precision, RunConfig
from study.config.precisions import computes_in_bf16, computing_type, in_engine
from study.config.printing import TextTable, print_result, progress_line
from study.config.text import format_parameters, rounded, rounded_seconds
from study.host.memory import GIB
from study.predictor.calibration import PredictedRun, calibration_lines, run_document
from study.predictor.communication import leaving_bytes, predict_payload, sent_bytes
from study.predictor.families import FAMILIES
from study.predictor.hardware import BOX_NAMES, WHICH_TFLOPS, Hardware, HardwareFlags, parse_int
from study.predictor.intervals import Ends, ends_text, estimate, figure_document
from study.predictor.memory import predict_memory
from study.predictor.models import model_shape
from study.predictor.request import (
    Estimate,
    MemoryUse,
    OptimizerName,
    Request,
    StepTime,
    TrainerSettings,
    with_tensor_group,
)
from study.predictor.shape import ModelShape, resolve_lengths, trained_text
from study.predictor.state import checkpoint_bytes, engine_refusal, quantization_refusal
from study.predictor.time import (
    device_bytes,
    excess_on_host,
    fits,
    host_limit,
    predict_time,
    range_causes,
    speed_ends,
    step_ends,
    usable_bytes,
    why,
)
from study.workloads.presets import PRESETS, known_models

if TYPE_CHECKING:
    from study.advisor.advise import AdviceRequest

EPILOG = """\
Nothing is run, and nothing is fetched without --hub. An interval covers 80 % of published measurements
(reports/prediction); a figure without one was not validated. Payload counts an all-reduce once; ring bytes are those
that a rank sends if each collective is a ring, as with NCCL.
"""
# Characters of the longest bar.
_BAR = 40
_PREDICTED = [name for name in strategies.STRATEGY_NAMES if name not in strategies.WITH_GROUPS]
# Those that may have groups by --tensor_parallel.
_ALLOW_TENSOR_GROUPS = ("fsdp2", "zero0", "zero1", "zero2", "zero3")
_HOST_PARTS = {
    "load": "while the model is loaded",
    "train": "in training",
    "save": "while it is saved",
    "state": "of that, model state",
    "pinned": "of that, pinned",
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of model, hardware and output, which `study advise` has, too."""
    add = parser.add_argument
    names = [*PRESETS, *(name for name, model in known_models().items() if model.config["model_type"] in FAMILIES)]
    traced = ", ".join(name for name in known_models() if name not in names)
    model = f"a preset ({', '.join(names)}), with torch also these, which are traced in up to a minute: {traced};"
    model += " a folder with config.json, or its sizes"
    add("model_name_or_path", nargs="?", metavar="MODEL", help=model)
    add("--model", "--model_name_or_path", dest="named_model", metavar="M", help="the same as MODEL")
    box = f"8xH100, 4x8xH100 for four nodes, A100-40, or this; known are {', '.join(BOX_NAMES)}; another GPU by its"
    box += f" figures: 8xmemory=192GiB,tflops=1300,bandwidth=5300GB/s ({WHICH_TFLOPS}), and if known"
    box += " nvlink=450 (without it: PCIe), pcie=55,"
    box += " network=50 (GB/s, one direction) and fp32=80"
    add("--hardware", metavar="BOX", help=box)
    add_program_arguments(parser)


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `study explain` has, too."""
    if isinstance(parser, Parser):
        parser.devices = BOX_NAMES
    Workload.add_arguments(parser)
    HardwareFlags.add_arguments(parser)
    Workload.add_arguments(parser, "hub")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")


@dataclasses.dataclass(frozen=True)
class PredictFlags:
    """Flags of `study predict`, as the request needs them."""

    workload: Workload
    hardware: HardwareFlags
    strategy: str
    engine_override: tuple[str, ...]
    fitted: bool
    amount: Amount | None = None

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> PredictFlags:
        """Return the flags of a parsed command line; raise UserError if one that is needed is missing, or for flags
        that exclude each other."""
        settle_model(options)
        check_required(options, "study predict MODEL --strategy zero3 --hardware BOX")
        workload, hardware = Workload.from_options(options), HardwareFlags.from_options(options)
        overrides, amount = tuple(options.engine_override), Amount.from_options(options)
        return cls(workload, hardware, options.strategy, overrides, options.fitted, amount)


def settle_model(options: argparse.Namespace) -> None:
    """Set the model that MODEL or --model names; raise UserError if both name one."""
    if options.named_model is None:
        return
    if options.model_name_or_path is not None:
        raise two_models(options.model_name_or_path, options.named_model)
    options.model_name_or_path = options.named_model


def two_models(model: str, named_model: str) -> UserError:
    """Return the error about a command line with MODEL and --model."""
    problem = f"MODEL and --model are both given: {clip(model)} and {clip(named_model)}"
    return UserError(problem, "leave one of them out")


def check_required(options: argparse.Namespace, example: str) -> None:
    """Raise UserError with all that is missing of strategy, model and hardware, and a complete command: `example` with
    the model and the hardware that are given."""
    names = {"strategy": "--strategy", "model_name_or_path": "MODEL", "hardware": "--hardware"}
    missing = [name for key, name in names.items() if getattr(options, key, "") is None]
    if not missing:
        return
    model, box = options.model_name_or_path or "llama-3.1-8b", options.hardware or "8xH100"
    command = example.replace("MODEL", shlex.quote(model)).replace("BOX", shlex.quote(box))
    chooses = f"; to choose one: study advise {shlex.quote(model)} --hardware {shlex.quote(box)}"
    problem = f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} missing"
    raise UserError(problem, f"for instance: {command}{chooses if '--strategy' in missing else ''}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--strategy", metavar="S", help=f"one of {', '.join([*_PREDICTED, *strategies.WITH_TENSOR_GROUPS])}")
    add_model_arguments(parser)
    add("--micro_batch", type=parse_int, metavar="B", help="samples of one forward pass on one rank")
    add("--accumulation", type=parse_int, metavar="A", help="micro-batches of an optimizer step")
    default = "default: bf16, else fp16, with 16-bit weights under DeepSpeed (--autocast: fp32 weights); fp32 on a CPU"
    add("--precision", choices=get_args(Precision), help=default)
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=False)
    Workload.add_arguments(parser, "optimizer", "tensor_parallel", "tensor_plan", *LONG_FEATURES)
    add("--autocast", action="store_true", help="fp32 weights under autocast, as study/train.py has them")
    add("--dropout", action="store_true", help="the model's dropout is on")
    pure = "without DeepSpeed: weights, gradients and moments in bf16, no masters; by default with --peft lora in bf16"
    add("--pure_bf16", action=argparse.BooleanOptionalAction, help=pure)
    fitted = "with the settings that `study advise` fits to model and hardware, not those of accelerate_configs/"
    add("--fitted", action="store_true", help=fitted)
    add("--engine_override", action="append", default=[], metavar="KEY=JSON", help="as in study/train.py; repeatable")
    add("--details", action="store_true", help="print every figure with its interval")
    add("--traced", action="store_true", help="count activations on transformers' own code, with fake tensors")
    training.add_arguments(parser)
    measured.add_arguments(parser)


def run(options: argparse.Namespace, read_run: measured.ReadRun | None = None) -> int:
    """Print the prediction, and return 0; `read_run` reads the files of --calibrate."""
    # A class outside the table is traced, on tensors without data.
    with progress_line("predicting memory and time ..."):
        flags = PredictFlags.from_options(options)
        request = make_request(flags)
        runs = measured.RunFlags.from_options(options).collect(functools.partial(_measured_request, flags), read_run)
        if has_features(request) and (runs or options.traced):
            problem = f"{'--traced' if options.traced else 'a measured run'} is not predicted with features for samples"
            raise UserError(problem, "leave out --sp, --offload_checkpoints and --tiled_mlp")
        request = dataclasses.replace(request, correction=measured.correct(request, runs))
        memory, traced = predict_memory(request), None
        time = predict_time(request, memory)
        if options.traced:
            with require_extra("train"):
                from study.predictor.traced_request import trace_activations

                traced = trace_activations(request).saved_bytes
    total = _whole_training(flags, request, memory, time)
    page = _page(request, memory, time, traced, options.details, runs, total)
    print_result(options.json, lambda: _document(request, memory, time, traced, runs, total), page, options.details)
    return 0


def _whole_training(flags: PredictFlags, request: Request, memory: MemoryUse, time: StepTime) -> WholeTraining | None:
    """Return the training that the flags name; None without one, or if it does not fit. Raise UserError if no step
    time is predicted."""
    if flags.amount is None:
        return None
    if has_features(request):
        problem = f"{flags.amount} take a time that is not predicted with --sp, --offload_checkpoints or --tiled_mlp"
        raise UserError(problem, f"leave out --train_{flags.amount.unit}")
    if memory.missing or not fits(memory, request.box):
        return None
    return WholeTraining.predict(flags.amount, request, time)


def _measured_request(flags: PredictFlags, run: measured.RunText) -> Request:
    """Return the request of a measured run: that of the flags, with the values of the run."""
    values = {
        "micro_batch": run.micro_batch,
        "accumulation": run.accumulation,
        "seq_length": run.seq_length,
        "gradient_checkpointing": run.checkpointing,
    }
    changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    workload = dataclasses.replace(flags.workload, **changes)
    return make_request(dataclasses.replace(flags, workload=workload, strategy=run.strategy or flags.strategy))


def precision_name(request: Request) -> str:
    """Return the precision as programs name it: a model that is loaded in 16 bits is predicted as an engine's."""
    return request.precision if request.strategy.deepspeed else computing_type(request.precision)


def usual_precision(box: Hardware) -> str:
    """Return the default precision of the hardware."""
    return "fp32" if box.is_cpu_only else "bf16" if box.device.peak_tflops["bf16"] else "fp16"


def check_precision(box: Hardware, precision: str) -> None:
    """Raise UserError if the device does not support the precision."""
    if computes_in_bf16(precision) and usual_precision(box) == "fp16":
        raise UserError(f"{box.device.name} has no bf16", "use --precision fp16 or --precision fp32")


def check_attention(request: Request | AdviceRequest) -> None:
    """Raise UserError if a fused attention that is asked for by name cannot run, or if its memory is not modelled."""
    device, shape = request.box.device, request.shape
    if request.attention not in ("flash_attention_2", "flex_attention"):
        return
    if request.attention not in shape.fused_attentions:
        problem = f"{request.attention} is not modelled for {shape.model_type}"
        raise UserError(problem, "use --attn_implementation eager")
    if request.attention == "flex_attention":
        return
    if usual_precision(request.box) != "bf16":
        raise UserError(f"{device.name} has no flash_attention_2", "use --attn_implementation sdpa")
    if request.precision == "fp32":
        raise UserError("flash_attention_2 does not compute in fp32", "use --attn_implementation sdpa, or 16 bits")
    if lacks_flash(shape, device):
        problem = f"{device.name} has no flash attention for {shape.model_type}: {kernels_text(shape)}"
        raise UserError(problem, "use --attn_implementation flex_attention, or eager")


def strategy_text(request: Request) -> str:
    """Return the strategy's name, with FSDP's version if it is not that of its file, and the ranks of a tensor-parallel
    group."""
    name, version = request.strategy.name, request.fsdp_version
    groups = f" in tensor-parallel groups of {request.tensor_ranks}" * (request.tensor_group is not None)
    groups += ", by a sequence plan" * (request.stream_ranks > 1)
    return f"{name} as FSDP{version}" if version != Request.fsdp_version else f"{name}{groups}"


def program_text(settings: Request | TrainerSettings) -> str:
    """Return the loss with a leading comma, whether logits outlive it, and whether the model is compiled; empty for
    transformers' loss of a model that is not."""
    texts = []
    if settings.loss_kernel != "transformers":
        texts.append(f"loss: {settings.loss_kernel}")
    if settings.keeps_outputs:
        texts.append("keeps outputs")
    if settings.compiled:
        texts.append("compiled")
    return "".join(f", {text}" for text in texts)


def optimizer_text(optimizer: OptimizerName) -> str:
    """Return an optimizer with a leading comma; empty for AdamW."""
    return "" if optimizer == "adamw" else f", optimizer: {optimizer}"


def tokens_text(lengths: Request | AdviceRequest) -> str:
    """Return the tokens of a sample, and those of a decoder if they are others."""
    in_decoder = f" and {lengths.target_length} in the decoder" if lengths.target_length else ""
    if isinstance(lengths, Request) and lengths.sequence_ranks > 1:
        return f"{lengths.sample_tokens} tokens per sample over {lengths.sequence_ranks} ranks"
    return f"{lengths.sequence_length} tokens per sample{in_decoder}"


def workload_text(request: Request) -> str:
    """Return micro-batch, accumulation, checkpointing and sync_each_batch of a rank as text."""
    checkpointing = "gradient checkpointing" if request.gradient_checkpointing else "no gradient checkpointing"
    syncs = ", sync_each_batch" * request.sync_each_batch
    return f"micro-batch {request.micro_batch} x accumulation {request.accumulation}, {checkpointing}{syncs}"


def pair_notes(request: Request) -> Iterator[str]:
    """Yield how many pairs of DPO a micro-batch has, if there is a reference model."""
    if request.reference_model:
        count = {1: "half a pair", 2: "1 pair"}.get(request.micro_batch, f"{request.micro_batch / 2:g} pairs")
        counts = "it counts sequences, and TRL's per_device_train_batch_size counts pairs"
        yield f"DPO: micro-batch {request.micro_batch} is {count}: {counts}"


def _adapted_notes(request: Request) -> Iterator[str]:
    """Yield the settings of accelerate_configs/ that study/train.py adapts to model and ranks at its launch."""
    strategy = request.strategy
    if strategy.swap_buffers != (stock := strategies.read_strategy(strategy.name)).swap_buffers:
        assert strategy.swap_buffers is not None
        assert stock.swap_buffers is not None
        sizes = f"{strategy.swap_buffers[1]:,} elements, in its file {stock.swap_buffers[1]:,}"
        yield f"buffers for parameters on NVMe have {sizes}"
    if request.ranks_per_replica is not None:
        yield f"{request.ranks_per_replica} ranks share the weights, the file's number is adapted to {request.box.name}"


def predicted_strategy(name: str) -> strategies.Strategy:
    """Return a strategy; raise UserError for one whose ranks share samples."""
    if re.fullmatch(r"fsdp[-_]?1", name, re.IGNORECASE):
        raise UserError(f"there is no strategy {name}", "use fsdp2 with --fsdp_version 1")
    strategy = strategies.read_strategy(strategies.spelled_strategy(name))
    if strategy.group is not None:
        command = f"study virtual --strategy {strategy.name} --world_size 8 --group_size 8 --task gpt-wikitext"
        fix = f"use another strategy, or measure memory and bytes of one rank without GPUs: {command}"
        raise UserError(f"{strategy.name} is not predicted: its ranks share samples", fix)
    return strategy


def _with_tensor_ranks(name: str, workload: Workload, box: Hardware) -> strategies.Strategy:
    """Return a strategy with the tensor-parallel groups that its file or --tensor_parallel sets; raise UserError if its
    engine does not allow them."""
    name = strategies.spelled_strategy(name)
    ranks = workload.tensor_parallel
    if ranks is None and name not in strategies.WITH_TENSOR_GROUPS:
        return predicted_strategy(name)
    strategy = strategies.read_strategy(name)
    if ranks is None:
        ranks = box.ranks if name == "tp" else strategy.group_size
    if ranks == 1 and name in _ALLOW_TENSOR_GROUPS:
        return strategy
    if reason := _tensor_refusal(strategy, ranks, workload, box):
        allowed = ", ".join([*_ALLOW_TENSOR_GROUPS, *strategies.WITH_TENSOR_GROUPS])
        fix = f"use one of {allowed}, or another number of ranks"
        raise UserError(f"tensor parallelism over {ranks} rank{'s' * (ranks > 1)} with {name}: {reason}", fix)
    return strategy.with_tensor_parallelism(ranks)


def _tensor_refusal(strategy: strategies.Strategy, ranks: int, workload: Workload, box: Hardware) -> str | None:
    """Return why a strategy does not run with tensor-parallel groups, or why that is not predicted; None if it is."""
    name = strategy.name
    if ranks == 1:
        return "a group has two ranks or more"
    if name in ("single", "ddp"):
        return "Accelerate has no ranks that only replicate the parts (ParallelismConfig); tp has one group of all"
    if name == "zero3_hpz":
        return "hpZ gathers layers from a rank with another part of them (docs/compositions.md)"
    if name not in (*_ALLOW_TENSOR_GROUPS, *strategies.WITH_TENSOR_GROUPS):
        return "it is not predicted, as no run of this project has both"
    if name == "tp" and ranks != box.ranks:
        return f"Accelerate has all {box.ranks} ranks in one group; fsdp2 shards over several"
    if name == "fsdp2" and ranks == box.ranks:
        return "Accelerate ends with an error, as FSDP has no ranks to shard over; tp has one group of all"
    if strategy.is_fsdp and workload.fsdp_version == 1:
        return "Accelerate's ParallelismConfig needs FSDP2"
    if name == "tp" and workload.precision == "fp16":
        return "torch cannot unscale divided and whole tensors in one call, so fp16 ends with an error"
    if workload.with_reference:
        return "a reference model is not predicted with it"
    return None


def make_request(flags: PredictFlags) -> Request:
    """Return the request that the flags make; raise UserError if it is impossible."""
    workload = flags.workload
    box = flags.hardware.box()
    strategy = _with_tensor_ranks(flags.strategy, workload, box)
    _check_tensor_plan(workload, strategy)
    shape = workload.adapt(
        model_shape(workload.model_name_or_path, ask_hub=workload.hub, check_traced=workload.check_traced)
    )
    precision, is_pure = _precision(workload, strategy, shape, box)
    config = RunConfig(precision=precision, engine_override=flags.engine_override)
    strategy.check_engine_flags(config)
    half = "bf16" if workload.pure_bf16 else precision
    check_precision(box, half)
    if strategy.name == "single":
        box = dataclasses.replace(box, gpus_per_node=1, nodes=1)
    _check_replicas(strategy, box)
    if is_pure and strategy.deepspeed is not None:
        raise UserError(
            f"--pure_bf16 is for strategies without DeepSpeed, and {strategy.name} has it",
            "use --engine_override bf16.bf16_master_weights_and_grads=true bf16.bf16_optimizer_states=true",
        )
    version = _fsdp_version(workload, strategy)
    if strategy.is_fsdp and (refusal := shape.why_no_fsdp(version)):
        raise UserError(f"FSDP{version} does not train {shape.name}: {refusal}", "use zero3")
    length, target = resolve_lengths(shape, workload.seq_length, workload.target_length)
    request = Request(
        shape=shape,
        strategy=_overridden(strategy.with_swap_buffers(-(-shape.largest // box.ranks)), config, box),
        box=box,
        sequence_length=length,
        target_length=target,
        micro_batch=workload.micro_batch or 1,
        accumulation=workload.accumulation or 1,
        precision=cast(Precision, f"{half}-engine") if is_pure else precision,
        gradient_checkpointing=bool(workload.gradient_checkpointing),
        attention=workload.attn_implementation,
        pure=is_pure,
        loads_16_bits=loads_16_bits(shape, strategy, precision),
        optimizer=workload.optimizer,
        dropout=workload.dropout,
        autocast=workload.autocast or not strategy.is_fsdp,
        reference_model=workload.with_reference,
        quantized=workload.is_quantized,
        fsdp_version=version,
        **vars(workload.trainer),
    )
    request = with_features(with_tensor_group(request, workload.tensor_plan), workload)
    if flags.fitted:
        stock = dataclasses.replace(request, strategy=strategy)
        fitted = fit_settings(stock)
        request = dataclasses.replace(request, strategy=_overridden(fitted.strategy, config, box))
    check_attention(request)
    if refusal := quantization_refusal(request):
        raise UserError(refusal, "use zero2, ddp or single, or --quantization 4bit")
    if reasons := engine_refusal(request):
        fix = "use --optimizer adamw, or another strategy" if reasons[0] == "optimizer" else "leave it out"
        raise UserError(f"{reasons[0]}: {reasons[1]}", fix)
    return request


def _check_tensor_plan(workload: Workload, strategy: strategies.Strategy) -> None:
    """Raise UserError for a tensor plan of a strategy without tensor-parallel groups."""
    if workload.tensor_plan != "plain" and strategy.group is None:
        problem = f"--tensor_plan {workload.tensor_plan} has no effect without tensor-parallel groups"
        raise UserError(problem, "add --tensor_parallel")


def _check_replicas(strategy: strategies.Strategy, box: Hardware) -> None:
    """Raise UserError if the ranks do not make replica groups."""
    least = strategies.MIN_RANKS_WITH_REPLICAS
    if strategy.name in strategies.WITH_REPLICAS and (box.ranks < least or box.ranks % 2):
        problem = f"{strategy.name} needs an even number of ranks from {least} up, not {box.ranks}"
        raise UserError(problem, f"use {'fsdp2' if strategy.is_fsdp else 'zero3'}, which has one replica")


def _fsdp_version(workload: Workload, strategy: strategies.Strategy) -> int:
    """Return the version of FSDP; raise UserError for a flag that has no effect on this strategy."""
    for name in ("fsdp_version", *FSDP_FLAGS):
        if getattr(workload, name) and not strategy.is_fsdp:
            raise UserError(
                f"--{name} is for FSDP, and {strategy.name} is not", "use --strategy fsdp2, or leave it out"
            )
    return workload.fsdp_version or Request.fsdp_version


def _precision(
    workload: Workload, strategy: strategies.Strategy, shape: ModelShape, box: Hardware
) -> tuple[Precision, bool]:
    """Return the precision, and whether the weights are loaded in 16 bits without an engine, as advice assumes them."""
    requested = cast(Precision, workload.precision or usual_precision(box))
    is_pure = bool(workload.pure_bf16)
    if in_engine(requested) or (workload.precision and workload.autocast):
        return requested, is_pure
    if workload.pure_bf16 is not None or workload.autocast:
        return precision_under(strategy, requested), is_pure
    precision, is_pure = usual_weights(shape, strategy, requested)
    # The request of a program that loads 16-bit weights has an engine's precision; its flag has not.
    return requested if is_pure else precision, is_pure


def _overridden(strategy: strategies.Strategy, config: RunConfig, box: Hardware) -> strategies.Strategy:
    """Return the strategy with --engine_override; raise UserError if DeepSpeed does not use one of its settings."""
    changed = strategy.with_overrides(config)
    if changed.deepspeed is None or not config.engine_override:
        return changed
    file = UserFile("--engine_override", "deepspeed", "DEEPSPEED", copy.deepcopy(dict(changed.deepspeed)), ())
    check_deepspeed(file)
    if file.findings:
        finding = file.findings[0]
        fix = "leave it out" if NOT_MODELLED in finding.message else "fix the key"
        raise UserError(f"--engine_override: {finding.key} {finding.says}", fix)
    if changed.zero_stage != strategy.zero_stage:
        problem = f"--engine_override makes {strategy.name} a stage {changed.zero_stage}"
        raise UserError(problem, "use that stage's strategy")
    group = min(changed.deepspeed["zero_optimization"].get("zero_hpz_partition_size", 1), box.ranks)
    if group > 1 and box.ranks % group:
        raise UserError(f"zero_hpz_partition_size {group} does not divide {box.ranks} ranks", "set one that does")
    return changed


def _document(
    request: Request,
    memory: MemoryUse,
    time: StepTime,
    traced: float | None,
    runs: Sequence[PredictedRun] = (),
    total: WholeTraining | None = None,
) -> dict[str, Any]:
    return {
        "model": request.shape.name,
        "parameters": request.full_shape.parameters,
        "trained_parameters": request.full_shape.trained_parameters,
        "lora_rank": request.shape.lora_rank,
        "lora_targets": request.shape.lora_targets,
        "lora_modules_to_save": request.shape.lora_saved,
        "lora_dora": request.shape.lora_dora,
        "strategy": request.strategy.name,
        "fsdp_version": request.fsdp_version if request.strategy.is_fsdp else None,
        "hardware": request.box.name,
        "ranks": request.box.ranks,
        "tensor_parallel": request.tensor_ranks,
        "tensor_plan": None if request.tensor_group is None else "sequence" if request.stream_ranks > 1 else "plain",
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
        "fits": None if memory.missing else fits(memory, request.box),
        "missing": memory.missing,
        "device_bytes": device_bytes(memory),
        "memory": dataclasses.asdict(memory),
        "traced_activation_bytes": traced,
        "time": time_document(request, time) if _is_timed(request, memory) else None,
        "training": total and total.document,
        "measured": [run_document(run) for run in runs],
        **_sent_document(request),
    }


def time_document(request: Request, time: StepTime) -> dict[str, Any]:
    """Return a predicted step with its ends, which with offload are those of published hosts."""
    return {
        **dataclasses.asdict(time),
        "step_s": figure_document(time.step_s, step_ends(request, time)),
        "tokens_per_s_per_gpu": figure_document(time.tokens_per_s_per_gpu, _speed_ends_of_gpu(request, time)),
    }


def _speed_ends_of_gpu(request: Request, time: StepTime) -> Ends | None:
    ends, ranks = speed_ends(request, time), request.box.ranks
    return ends and (ends[0] / ranks, ends[1] / ranks)


def _sent_document(request: Request) -> dict[str, Any]:
    """Return the bytes that ranks send, None with features for longer samples."""
    is_known = not has_features(request)
    return {
        "sent_bytes_per_step": dataclasses.asdict(estimate("sent", sent_bytes(request))) if is_known else None,
        "leaving_node_bytes_per_step": leaving_bytes(request) if is_known else None,
        "payload_bytes": predict_payload(request) if is_known else None,
    }


def _is_timed(request: Request, memory: MemoryUse) -> bool:
    """Whether a step time is predicted."""
    return memory.missing is None and not has_features(request)


def _leaving_row(request: Request) -> Iterator[tuple[str, str]]:
    """Yield the bytes that leave a node, of several."""
    if request.box.nodes > 1 and not has_features(request):
        by_all = request.box.gpus_per_node * sent_bytes(request)
        figures = f"{rounded(leaving_bytes(request) / 1e9)} of the {rounded(by_all / 1e9)} GB that its ranks send"
        yield "network traffic of one node per step", figures


def fitting_need(request: Request) -> str | None:
    """Return the memory that a hint's request needs, as text; None if an upper bound exceeds the device or the host.

    Host memory and NVMe that no flag limits are part of the text.
    """
    memory = predict_memory(request)
    if not fits(memory, request.box, at_upper=True):
        return None
    needs = [f"{rounded(device_bytes(memory) / GIB)} GiB"]
    if request.box.host_gib_per_node is None and (request.strategy.offloads or request.fsdp_offloads):
        needs.append(f"{rounded(memory.host_peak.value / GIB)} GiB of host memory a node, unchecked")
    if memory.nvme:
        needs.append(f"{rounded(memory.nvme / GIB)} GiB of NVMe")
    return ", ".join(needs)


def host_text(request: Request, memory: MemoryUse) -> str:
    """Return a node's host memory and its limit, for a run that offloads to it; else nothing."""
    limit, needed = request.box.host_gib_per_node, rounded(memory.host_peak.value / GIB)
    if not (request.strategy.offloads or request.fsdp_offloads) or request.box.is_cpu_only:
        return ""
    if limit is None:
        return f"{needed} GiB of host memory (unchecked)"
    return f"{needed} of {host_limit(request.box)} GiB on the host"


def step_range_text(request: Request, time: StepTime) -> str:
    """Return the ends of a step in brackets, or that it is not known well enough; nothing of a measured one."""
    if is_measured(request):
        return ""
    return ends_text(time.step_s.value, step_ends(request, time), rounded_seconds, range_causes(request))


def is_measured(request: Request) -> bool:
    """Whether the step of this configuration was measured."""
    return request.correction is not None and request.correction.find_measured_factor(request) is not None


def _host_need(request: Request, memory: MemoryUse) -> str:
    """Return a node's host memory as the end of a verdict; nothing if nothing is offloaded and the host has as much."""
    if host := host_text(request, memory):
        return f", {host}"
    return f", and {excess}" if (excess := excess_on_host(memory, request.box)) else ""


def loading_remedy(request: Request) -> str:
    """Return the flag with which FSDP's GPUs load no whole 4-bit weights, as a remark; nothing of other engines."""
    has_remedy = request.strategy.is_fsdp and request.quantized and not request.loads_on_host
    return " (with --quantized_on_host in host memory)" if has_remedy else ""


def _verdict(request: Request, memory: MemoryUse, time: StepTime) -> str:
    box, bound, is_fit = request.box, device_bytes(memory, at_upper=True), fits(memory, request.box)
    if memory.missing:
        verdict = why(memory, box)
        return f"{verdict[0].upper()}{verdict[1:]}, of {rounded(usable_bytes(box) / GIB)}; no step time; predicted"
    verdict = "Does not fit" if not is_fit else "May not fit"
    if fits(memory, box, at_upper=True):
        verdict = "Fits"
    if not is_fit and not box.is_cpu_only and device_bytes(memory) <= usable_bytes(box):
        remedy = loading_remedy(request) if memory.loading > usable_bytes(box) else ""
        return f"Does not fit: {why(memory, box)}{remedy}; predicted"
    usable = rounded(usable_bytes(box) / GIB)
    need = f"{verdict}: {rounded(device_bytes(memory) / GIB)} of {usable} GiB (90 % bound {rounded(bound / GIB)})"
    need += _host_need(request, memory)
    if verdict != "Fits" and not request.gradient_checkpointing:
        recomputed = fitting_need(dataclasses.replace(request, gradient_checkpointing=True))
        if recomputed is not None:
            return f"{need}; with --gradient_checkpointing {recomputed}; predicted"
    if not is_fit:
        return f"{need}; predicted"
    if has_features(request):
        return f"{need}; no step time; predicted"
    speed, rank = rounded(time.tokens_per_s_per_gpu.value), "rank" if box.is_cpu_only else "GPU"
    return (
        f"{need}; about {rounded_seconds(time.step_s.value)} a step{step_range_text(request, time)},"
        f" {speed} tokens/s per {rank}; {'as measured' if is_measured(request) else 'predicted'}"
    )


def _page(
    request: Request,
    memory: MemoryUse,
    time: StepTime,
    traced: float | None,
    details: bool,
    runs: Sequence[PredictedRun] = (),
    total: WholeTraining | None = None,
) -> Iterator[str | TextTable]:
    shape, base = request.shape, computing_type(request.precision)
    # FSDP2 sums the gradients of micro-batches in the precision of computation.
    kinds = "weights" if request.strategy.is_fsdp else "weights and gradients"
    state = f" ({kinds} {base if request.weight_bytes == 2 else 'fp32'})" if base != "fp32" else ""
    yield _verdict(request, memory, time)
    yield from calibration_lines(runs)
    yield from pair_notes(request)
    yield ""
    program = f"{program_text(request)}{features_text(request)}"
    yield (
        f"{shape.name} ({format_parameters(request.full_shape.parameters)}{trained_text(shape)}),"
        f" {strategy_text(request)} on {request.box.name} ({request.box.ranks} rank{'s'[: request.box.ranks > 1]}),"
        f" {precision_name(request)}{state},\n{workload_text(request)}, {tokens_text(request)}"
        f"{program}{', resharded after forward' * request.strategy.is_fsdp}"
    )
    kind = "rank" if request.box.is_cpu_only else "GPU"
    yield f"\nmemory of one {kind} at its peak, {memory.moment}, GiB"
    yield TextTable(("", "", ""), _part_rows(memory, traced), indent=2)
    host = {_HOST_PARTS[name]: memory.host_parts.get(name, 0.0) for name in ("load", "train")}
    host |= {"on NVMe": memory.nvme} if memory.nvme else {}
    yield ""
    yield TextTable(
        ("", ""),
        [
            ("host memory of one node", ", ".join(f"{rounded(size / GIB)} GiB {when}" for when, size in host.items())),
            ("communication of one rank per step", _sent_text(request)),
            *_leaving_row(request),
            *_time_row(request, memory, time),
        ],
    )
    if details:
        yield "\nfigures with their interval, which covers 80 % of published measurements"
        yield _intervals(request, memory, time)
    yield ""
    yield from (
        *_speed_lines(request, memory, time),
        *([total.line] if total else []),
        *request_notes(request, details),
        *_adapted_notes(request),
        *feature_notes(request),
        *(time.notes if _is_timed(request, memory) else []),
        *_checkpoint_notes(request, memory),
        *memory.notes,
    )


def _time_row(request: Request, memory: MemoryUse, time: StepTime) -> Iterator[tuple[str, str]]:
    """Yield the parts of a step, if nothing is missing of them."""
    if not _is_timed(request, memory):
        return
    parts = ((part.replace("_", " "), seconds) for part, seconds in time.parts.items() if seconds)
    yield "time of one step", ", ".join(f"{part} {rounded_seconds(seconds)}" for part, seconds in parts)


def _speed_lines(request: Request, memory: MemoryUse, time: StepTime) -> Iterator[str]:
    """Yield the speed of all ranks and MFU. The speed of an option that does not fit would be compared with others."""
    if not _is_timed(request, memory):
        return
    figures = []
    if fits(memory, request.box):
        figures.append(f"{rounded(time.tokens_per_s_per_gpu.value * request.box.ranks)} tokens/s of all ranks")
    if time.mfu and time.hfu:
        figures.append(f"MFU {time.mfu:.0%}, HFU {time.hfu:.0%}")
    if figures:
        yield "; ".join(figures)


def _part_rows(memory: MemoryUse, traced: float | None) -> list[tuple[str, str, str]]:
    """Return a row per part of the peak, with a bar; activations and logits have one even if the peak has none."""
    largest = max(memory.device_parts.values())
    rows = []
    for name, size in sorted(memory.device_parts.items(), key=lambda part: -part[1]):
        most = memory.most_parts.get(name, size)
        if size >= 0.005 * device_bytes(memory):
            rows.append((name, rounded(size / GIB), "█" * max(1, round(_BAR * size / largest))))
        elif size < 0:
            rows.append((name, rounded(size / GIB), ""))
        elif name in ("activations", "logits") and most:
            rows.append((name, rounded(size / GIB) if size else "0", f"at most {rounded(most / GIB)} at other moments"))
    if traced is not None:
        rows.append(("activations on transformers' own code", rounded(traced / GIB), ""))
    return rows


def _unit_of_sent(request: Request) -> tuple[str, float]:
    """Return the name and the bytes of the unit of sent bytes: adapters send little."""
    return ("GB", 1e9) if sent_bytes(request) >= 1e8 else ("MB", 1e6)


def _sent_text(request: Request) -> str:
    """Return the communication of one rank per step as text."""
    if has_features(request):
        return "not predicted"
    sent, (name, unit) = sent_bytes(request), _unit_of_sent(request)
    if not sent:
        return "none"
    payload = [f"{kind.replace('_', ' ')} {rounded(size / unit)}" for kind, size in predict_payload(request).items()]
    return f"{rounded(sent / unit)} {name} in ring bytes (NCCL); payload: {', '.join(payload)}"


def _checkpoint_notes(request: Request, memory: MemoryUse) -> Iterator[str]:
    """Yield where saving and loading were measured, if one of them needs more host memory than a node has."""
    box, parts = request.box, memory.host_parts
    limit = (box.host_gib_per_node or math.inf) * GIB
    if not box.is_cpu_only and max(parts.get("load", 0.0), parts.get("save", 0.0)) > limit:
        yield "host memory of saving and loading checkpoints, measured by strategy: reports/checkpoints/summary.md"


def _intervals(request: Request, memory: MemoryUse, time: StepTime) -> TextTable:
    name_of_unit, unit = _unit_of_sent(request)
    host = {_HOST_PARTS[name]: size for name, size in memory.host_parts.items() if name in _HOST_PARTS and size}
    ample = Estimate(memory.pool_with_room)
    is_sent = sent_bytes(request) and not has_features(request)
    sent = estimate("sent", sent_bytes(request)) if is_sent else None
    saved = checkpoint_bytes(request)
    rows = []
    for title, figure, size in (
        ("allocated between steps, GiB", memory.steady_allocated, GIB),
        ("peak allocated, GiB", memory.peak_allocated, GIB),
        ("peak reserved, GiB", memory.peak_reserved, GIB),
        ("reserved if memory is ample, GiB", None if request.box.is_cpu_only else ample, GIB),
        ("whole process, GiB", memory.process_peak, GIB),
        *((f"host, {what}, GiB", Estimate(part), GIB) for what, part in host.items()),
        ("checkpoint on disk, of all ranks, GiB", None if saved is None else Estimate(saved), GIB),
        (f"ring bytes (NCCL), {name_of_unit}", sent, unit),
    ):
        if figure is not None:
            rows.append((title, *_with_interval(figure, functools.partial(_in_unit, size))))
    if _is_timed(request, memory):
        rows.append(("step", rounded_seconds(time.step_s.value), step_range_text(request, time).lstrip()))
    return TextTable(("", "", ""), rows, indent=2)


def _in_unit(unit: float, value: float) -> str:
    return rounded(value / unit)


def _with_interval(figure: Estimate, text: Callable[[float], str]) -> tuple[str, str]:
    """Return a figure and its interval, the latter empty if there is none."""
    ends = [text(end) for end in (figure.low, figure.high) if end is not None]
    return text(figure.value), f"({' to '.join(ends)})" if ends else ""
