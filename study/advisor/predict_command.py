"""`study predict`: memory, communication and step time of one strategy, before it is run."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import re
import shlex
from typing import TYPE_CHECKING, Any, cast, get_args

from study.advisor import measured, training
from study.advisor.fitted import fit_settings, loads_16_bits, precision_under, usual_precision, usual_weights
from study.advisor.long_features import has_features, with_features
from study.advisor.prediction import Prediction
from study.advisor.prediction_text import page
from study.advisor.request_notes import kernels_text, lacks_flash
from study.advisor.training import Amount
from study.advisor.user_settings import UserFile, check_deepspeed
from study.advisor.workload import FSDP_FLAGS, LONG_FEATURES, Workload
from study.config import strategies
from study.config.errors import UserError, clip, require_extra
from study.config.flags import Parser, Precision, RunConfig
from study.config.precisions import computes_in_bf16, in_engine
from study.config.printing import print_result, progress_line
from study.predictor.families import FAMILIES
from study.predictor.hardware import BOX_NAMES, WHICH_TFLOPS, Hardware, HardwareFlags, parse_int
from study.predictor.models import model_shape
from study.predictor.request import Request, with_tensor_group
from study.predictor.shape import ModelShape, resolve_lengths
from study.predictor.state import engine_refusal, quantization_refusal
from study.workloads.presets import PRESETS, known_models

if TYPE_CHECKING:
    from study.advisor.advise import AdviceRequest

EPILOG = """\
Nothing is run, and nothing is fetched without --hub. An interval covers 80 % of published measurements
(reports/prediction); a figure without one was not validated. Payload counts an all-reduce once; ring bytes are those
that a rank sends if each collective is a ring, as with NCCL.
"""
_PREDICTED = [name for name in strategies.STRATEGY_NAMES if name not in strategies.WITH_GROUPS]
# Those that may have groups by --tensor_parallel.
_ALLOW_TENSOR_GROUPS = ("fsdp2", "zero0", "zero1", "zero2", "zero3")


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
        prediction = predict(options, read_run)
    print_result(options.json, lambda: prediction.document, page(prediction, options.details), options.details)
    return 0


def predict(options: argparse.Namespace, read_run: measured.ReadRun | None) -> Prediction:
    """Return the prediction of a parsed command line; raise UserError if its request is impossible."""
    flags = PredictFlags.from_options(options)
    request = make_request(flags)
    runs = measured.RunFlags.from_options(options).collect(functools.partial(_measured_request, flags), read_run)
    if has_features(request) and (runs or options.traced):
        problem = f"{'--traced' if options.traced else 'a measured run'} is not predicted with features for samples"
        raise UserError(problem, "leave out --sp, --offload_checkpoints and --tiled_mlp")
    request = dataclasses.replace(request, correction=measured.correct(request, runs))
    traced = _traced_bytes(request) if options.traced else None
    return Prediction.predict(request, flags.amount, runs, traced)


def _traced_bytes(request: Request) -> float:
    """Return the bytes of activations that transformers' own code saves."""
    with require_extra("train"):
        from study.predictor.traced_request import trace_activations

        return trace_activations(request).saved_bytes


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
        micro_batch=workload.micro_batch or 1,
        accumulation=workload.accumulation or 1,
        precision=cast(Precision, f"{half}-engine") if is_pure else precision,
        gradient_checkpointing=bool(workload.gradient_checkpointing),
        pure=is_pure,
        loads_16_bits=loads_16_bits(shape, strategy, precision),
        dropout=workload.dropout,
        autocast=workload.autocast or not strategy.is_fsdp,
        fsdp_version=version,
        **workload.program(target).request_fields,
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
        fix = "leave it out" if finding.rule == "not-modelled" else "fix the key"
        raise UserError(f"--engine_override: {finding.key} {finding.says}", fix)
    if changed.zero_stage != strategy.zero_stage:
        problem = f"--engine_override makes {strategy.name} a stage {changed.zero_stage}"
        raise UserError(problem, "use that stage's strategy")
    group = min(changed.deepspeed["zero_optimization"].get("zero_hpz_partition_size", 1), box.ranks)
    if group > 1 and box.ranks % group:
        raise UserError(f"zero_hpz_partition_size {group} does not divide {box.ranks} ranks", "set one that does")
    return changed
