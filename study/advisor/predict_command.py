"""`study predict`: what one strategy would hold, send and take, before it is run."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_args

from study.advisor.advise import precision_under, refuse_attention, refuse_precision, usual_precision
from study.advisor.user_settings import UserFile, check_deepspeed
from study.config.errors import UserError
from study.config.flags import Precision, RunConfig
from study.config.strategies import (
    LEAST_RANKS_WITH_COPIES,
    STRATEGY_NAMES,
    WITH_COPIES,
    WITH_TEAMS,
    Strategy,
    read_strategy,
)
from study.host.memory import GIB
from study.predictor import shape as adapters
from study.predictor.boxes import add_speed_arguments, box_asked, whole
from study.predictor.communication import payload_of, sent_bytes
from study.predictor.memory import predict_memory
from study.predictor.request import Attention, Estimate, Hardware, OptimizerName, Prediction, Request
from study.predictor.shape import model_shape, sequence_length
from study.predictor.state import refused_accumulation
from study.predictor.time import device_bytes, estimate, fits, predict_time, usable_bytes

EPILOG = """\
Nothing is run, and nothing is fetched without --hub. Between the ends of an interval lie 80 % of what was
measured elsewhere (reports/prediction); a figure without one was not validated. An all-reduce counts once in
what collectives move; ring bytes are what leaves a rank where each collective is a ring, as with NCCL.
"""
CHUNKED_LOSS = "the output layer and its loss take a part of the tokens at a time, as Liger's kernel does"
_PREDICTED = [name for name in STRATEGY_NAMES if name not in WITH_TEAMS]
_WHAT = {
    "load": "while the model is loaded", "train": "in training", "save": "while it is saved",
    "state": "of that, the strategy's state", "pinned": "of that, locked in memory",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="M", help="a preset, a folder with config.json, or its sizes")
    add("--strategy", required=True, metavar="S", help=f"one of {', '.join(_PREDICTED)}")
    add("--hardware", required=True, metavar="BOX", help="8xH100, 4x8xH100 for four nodes, A100-40, or this")
    add("--seq_length", type=whole, metavar="T", help="tokens of a sample; by default 2048, or what the model takes")
    add("--micro_batch", type=whole, default=1, metavar="B", help="samples of one forward pass on one rank")
    add("--accumulation", type=whole, default=1, metavar="A", help="forward passes of an optimizer step")
    add(
        "--precision",
        choices=get_args(Precision),
        help="by default bf16, or what the device has; under DeepSpeed its own",
    )
    add("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=False)
    add("--attn_implementation", choices=get_args(Attention), default="sdpa")
    add("--optimizer", type=known_optimizer, choices=get_args(OptimizerName), default="adamw")
    adapters.add_arguments(parser)
    add_speed_arguments(parser)
    add("--autocast", action="store_true", help="under FSDP: fp32 weights are gathered, as this study trains")
    add("--dropout", action="store_true", help="the model's own dropout is on")
    add("--chunked_loss", action="store_true", help=CHUNKED_LOSS)
    add(
        "--pure_bf16", action="store_true", help="without DeepSpeed: weights, gradients and moments in bf16, no masters"
    )
    add("--engine_override", action="append", default=[], metavar="KEY=JSON", help="as in study/train.py; repeatable")
    add("--traced", action="store_true", help="count activations on transformers' own code, with fake tensors")
    add("--hub", action="store_true", help="ask the hub for the model's config.json")
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")


def known_optimizer(text: str) -> str:
    if text == "muon":
        raise argparse.ArgumentTypeError(
            "Muon is not predicted: `study virtual --optimizer muon --max_grad_norm 0` counts its bytes"
        )
    return text


def run(options: argparse.Namespace) -> int:
    request = _request(options)
    prediction = predict(request)
    traced = None
    if options.traced:
        from study.predictor.traced import traced as trace_of

        traced = trace_of(request).kept
    if options.json:
        print(json.dumps(_document(prediction, traced), indent=2))
    else:
        print("\n".join(_page(prediction, traced)))
    return 0


def predict(request: Request) -> Prediction:
    if refusal := refused_accumulation(request):
        raise UserError(f"data_types.grad_accum_dtype: {refusal}", "leave it out, or ask for zero1")
    memory = predict_memory(request)
    return Prediction(
        request=request,
        memory=memory,
        time=predict_time(request, memory),
        sent_bytes_per_step=estimate("sent", sent_bytes(request)),
        fits=fits(memory, request.box),
    )


def _request(options: argparse.Namespace) -> Request:
    strategy = read_strategy(options.strategy)
    if strategy.team is not None:
        raise UserError(f"nobody predicts {strategy.name}, whose ranks share their samples", "ask for another strategy")
    box = box_asked(options)
    default = precision_under(strategy, usual_precision(box))
    config = RunConfig(precision=options.precision or default, engine_override=tuple(options.engine_override))
    strategy.check_engine_flags(config)
    refuse_precision(box, "bf16" if options.pure_bf16 else config.precision or default)
    if strategy.name == "single":
        box = dataclasses.replace(box, gpus_per_node=1, nodes=1)
    if strategy.name in WITH_COPIES and (box.ranks < LEAST_RANKS_WITH_COPIES or box.ranks % 2):
        problem = f"{strategy.name} takes an even number of ranks from {LEAST_RANKS_WITH_COPIES} up, not {box.ranks}"
        raise UserError(problem, f"use {'fsdp2' if strategy.is_fsdp else 'zero3'}, which has one copy")
    if options.pure_bf16 and strategy.deepspeed is not None:
        raise UserError(
            f"--pure_bf16 is for strategies without DeepSpeed, and {strategy.name} has it",
            "use --engine_override bf16.bf16_master_weights_and_grads=true bf16.bf16_optimizer_states=true",
        )
    shape = adapters.shape_asked(model_shape(options.model_name_or_path, ask_hub=options.hub), options)
    asked = _asked(strategy.with_swap_buffers(-(-shape.largest // box.ranks)), config, box)
    request = Request(
        shape=shape, strategy=asked, box=box,
        sequence_length=sequence_length(shape, options.seq_length, 2048), micro_batch=options.micro_batch,
        accumulation=options.accumulation, precision="bf16-engine" if options.pure_bf16 else config.precision,
        gradient_checkpointing=options.gradient_checkpointing, attention=options.attn_implementation,
        pure=options.pure_bf16, optimizer=options.optimizer, dropout=options.dropout,
        autocast=options.autocast or not strategy.is_fsdp, chunked_loss=options.chunked_loss,
    )  # fmt: skip
    refuse_attention(request)
    return request


def _asked(strategy: Strategy, config: RunConfig, box: Hardware) -> Strategy:
    """With the settings of --engine_override, which DeepSpeed must know and heed."""
    asked = strategy.overridden(config)
    if asked.deepspeed is None or not config.engine_override:
        return asked
    file = UserFile("--engine_override", "deepspeed", "DEEPSPEED", copy.deepcopy(dict(asked.deepspeed)), ())
    check_deepspeed(file)
    if file.findings:
        raise UserError(f"--engine_override {file.findings[0].key}: {file.findings[0].says}", "fix the key")
    if asked.zero_stage != strategy.zero_stage:
        raise UserError(
            f"--engine_override makes {strategy.name} a stage {asked.zero_stage}", "ask for that stage's strategy"
        )
    group = min(asked.deepspeed["zero_optimization"].get("zero_hpz_partition_size", 1), box.ranks)
    if group > 1 and box.ranks % group:
        raise UserError(f"zero_hpz_partition_size {group} does not divide {box.ranks} ranks", "set one that does")
    return asked


def _document(prediction: Prediction, traced: float | None) -> dict[str, Any]:
    request, memory = prediction.request, prediction.memory
    return {
        "model": request.shape.name, "parameters": request.shape.parameters,
        "trained_parameters": request.shape.trained_parameters, "lora_rank": request.shape.lora_rank,
        "strategy": request.strategy.name, "hardware": request.box.name, "ranks": request.box.ranks,
        "precision": request.precision, "sequence_length": request.sequence_length, "micro_batch": request.micro_batch,
        "accumulation": request.accumulation, "gradient_checkpointing": request.gradient_checkpointing,
        "chunked_loss": request.chunked_loss,
        "fits": prediction.fits, "device_bytes": device_bytes(memory), "memory": dataclasses.asdict(memory),
        "traced_activation_bytes": traced, "time": dataclasses.asdict(prediction.time),
        "sent_bytes_per_step": dataclasses.asdict(prediction.sent_bytes_per_step),
        "payload_bytes": payload_of(request),
    }  # fmt: skip


def _page(prediction: Prediction, traced: float | None) -> Iterator[str]:
    request, memory, box = prediction.request, prediction.memory, prediction.request.box
    each = "rank" if box.in_host_memory else "GPU"
    yield (
        f"{request.shape.name} ({request.shape.parameters / 1e9:.2f} B{adapters.told(request.shape)}),"
        f" {request.strategy.name}"
        f" on {box.name} ({box.ranks} ranks), {request.precision}, {request.micro_batch}"
        f" x {request.sequence_length} tokens,"
        f" {request.accumulation} pass(es) a step{', checkpointed' if request.gradient_checkpointing else ''}"
        f"{', the loss in chunks' if request.chunked_loss else ''}"
    )
    yield from ("", f"memory of one {each} at its peak, GiB")
    parts = {name: size for name, size in memory.device_parts.items() if size >= 0.005 * GIB}
    yield from _rows(parts, GIB)
    yield _line("allocated between steps", memory.steady_allocated, GIB)
    yield _line("allocated at the peak", memory.peak_allocated, GIB)
    yield _line("reserved at the peak", memory.peak_reserved, GIB)
    if not box.in_host_memory:
        yield f"  {'and where there is room':<26} {memory.pool_with_room / GIB:>9.2f}"
    if memory.process_peak is not None:
        yield _line("its whole process", memory.process_peak, GIB)
    limit = f" of {usable_bytes(box) / GIB:.1f}"
    yield f"  {device_bytes(memory) / GIB:.1f} GiB in all{limit}: it {_verdict(prediction)}"
    if traced is not None:
        yield f"  activations on transformers' own code: {traced / GIB:.2f}"
    yield from ("", "host memory of one node, GiB")
    yield from _rows({_WHAT[name]: size for name, size in memory.host_parts.items() if name in _WHAT and size}, GIB)
    if memory.nvme:
        yield f"  {'on the drive':<26} {memory.nvme / GIB:>9.2f}"
    # Of adapters it is thousandths of a GB.
    name, unit = ("GB", 1e9) if prediction.sent_bytes_per_step.value >= 1e8 else ("MB", 1e6)
    yield from ("", f"sent by one rank in a step, {name}")
    yield from _rows(payload_of(request), unit)
    yield _line("ring bytes (NCCL)", prediction.sent_bytes_per_step, unit)
    time = prediction.time
    yield from ("", "time of a step, ms")
    yield from _rows(time.parts, 1e-3)
    yield _line("in all", time.step_s, 1e-3)
    rate = f"  {time.tokens_per_s_per_gpu.value:,.0f} tokens/s of one {each}"
    yield rate + (f", MFU {time.mfu:.1%}, HFU {time.hfu:.1%}" if time.mfu and time.hfu else "")
    for note in (*memory.notes, *time.notes):
        yield f"  {note}"


def _verdict(prediction: Prediction) -> str:
    if fits(prediction.memory, prediction.request.box, at_upper_end=True):
        return "fits"
    return "may not fit: the upper end does not" if prediction.fits else "does not fit"


def _rows(parts: Any, unit: float) -> Iterator[str]:
    for name, size in parts.items():
        yield f"  {name.replace('_', ' '):<26} {size / unit:>9.2f}"


def _line(name: str, figure: Estimate, unit: float) -> str:
    known = figure.low is not None and figure.high is not None
    between = f"  ({(figure.low or 0) / unit:.2f} to {(figure.high or 0) / unit:.2f})" if known else ""
    return f"  {name:<26} {figure.value / unit:>9.2f}{between}"
