"""`study advise`: which strategy for a model on a box, and its files."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from study.advisor.advise import (
    AS_FAST,
    Advice,
    AdviceRequest,
    Option,
    advise,
    refuse_attention,
    refuse_precision,
    usual_precision,
)
from study.advisor.advise_files import Files, write_files
from study.advisor.advise_words import ONE_RANK_NOTE, because, changes, count_text, how_sure, unchecked, worth_trying
from study.advisor.predict_command import CHUNKED_LOSS, known_optimizer
from study.config.errors import UserError
from study.host.folders import folder_argument
from study.host.memory import GIB
from study.predictor import shape as adapters
from study.predictor.boxes import add_speed_arguments, box_asked, real, whole
from study.predictor.request import Request
from study.predictor.shape import model_shape, sequence_length
from study.predictor.time import LORA_NOTE, device_bytes, host_adam_note

# What validation knows of a request's neighbours, in lines for the reader.
Nearest = Callable[[Request], Iterable[str]]
EPILOG = """\
Each strategy of accelerate_configs/ is taken with its settings fitted to the model, with and without gradient
checkpointing, at the largest micro-batch that fits by the predicted peak. Nothing is run, and nothing is fetched
without --hub. docs/advice.md says what the errors are and what this cannot know.
"""
# Samples of a step, where nobody says it: strategies are compared at the same batch.
# Of a step, at least; and a rank's share of them, which a micro-batch divides.
_BATCH, _SHARES = 64, (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MUCH_FOR_A_HOST_BYTES = 256 * GIB
_ROW = "{:<20} {:>8} {:>6} {:>8} {:>6} {:>10} {:>8} {:>8} {:>7}  {}"


@dataclasses.dataclass(frozen=True)
class _Told:
    """Beside the advice itself."""

    # Faster, and not as sure to fit.
    riskier: Option | None
    others: list[str]
    nearest: list[str]
    files: Files | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="M", help="a preset, a folder with config.json, or its sizes")
    add("--hardware", required=True, metavar="BOX", help="8xH100, 4x8xH100 for four nodes, A100-40, or this")
    add("--seq_length", type=whole, metavar="T", help="tokens of a sample; by default 2048, or all that it takes")
    add(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="by default bf16, or what the device has",
    )
    add("--gradient_checkpointing", choices=("auto", "on", "off"), default="auto", help="auto: whatever is faster")
    add("--attn_implementation", choices=("sdpa", "eager", "flash_attention_2"), default="sdpa")
    add("--chunked_loss", action="store_true", help=CHUNKED_LOSS)
    add("--global_batch_size", type=whole, metavar="B", help="samples of a step; by default 64, or one a rank")
    add("--host-memory", type=real, metavar="GIB", help="host memory of each node; without it the host is not checked")
    add("--price-per-gpu-hour", type=real, metavar="X", help="what a GPU costs in an hour, for the cost of tokens")
    add("--nvme_path", default="nvme_offload", metavar="DIR", help="the folder on the drive that the files name")
    add_speed_arguments(parser)
    add("--optimizer", type=known_optimizer, choices=("adamw",), help=argparse.SUPPRESS)
    adapters.add_arguments(parser)
    add("--output", type=folder_argument, metavar="DIR", help="write the recommended strategy's files here")
    add("--hub", action="store_true", help="ask the hub for the model's config.json")
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")


def run(options: argparse.Namespace, nearest: Nearest | None = None) -> int:
    advice = advise(question_of(options))
    best = advice.best
    files = None
    if best and options.output:
        files = write_files(best, options.output, options.nvme_path, options.model_name_or_path)
    near = list(nearest(best.request)) if nearest and best else []
    told = _Told(worth_trying(advice), list(changes(advice)), near, files)
    if options.json:
        print(json.dumps(_document(advice, told), indent=2))
    else:
        print("\n".join(_page(advice, told)))
    return 0 if best else 1


def question_of(options: argparse.Namespace) -> AdviceRequest:
    box = box_asked(options)
    if options.host_memory is not None:
        box = dataclasses.replace(box, host_gib_per_node=options.host_memory)
    precision = options.precision or usual_precision(box)
    refuse_precision(box, precision)
    batch = options.global_batch_size or next(share * box.ranks for share in _SHARES if share * box.ranks >= _BATCH)
    if batch % box.ranks:
        more = -(-batch // box.ranks) * box.ranks
        raise UserError(f"--global_batch_size {batch} is no multiple of {box.ranks} ranks", f"use {more}")
    shape = adapters.shape_asked(model_shape(options.model_name_or_path, ask_hub=options.hub), options)
    question = AdviceRequest(
        shape=shape, box=box, sequence_length=sequence_length(shape, options.seq_length, 2048),
        precision=precision,
        gradient_checkpointing={"auto": None, "on": True, "off": False}[options.gradient_checkpointing],
        attention=options.attn_implementation, chunked_loss=options.chunked_loss, global_batch=batch,
        price_per_gpu_hour=options.price_per_gpu_hour,
    )  # fmt: skip
    refuse_attention(question)
    return question


def _document(advice: Advice, told: _Told) -> dict[str, Any]:
    question, best, other, files = advice.question, advice.best, advice.runner_up, told.files
    return {
        "model": question.shape.name, "parameters": question.shape.parameters,
        "trained_parameters": question.shape.trained_parameters, "lora_rank": question.shape.lora_rank,
        "hardware": question.box.name, "ranks": question.ranks,
        "sequence_length": question.sequence_length, "precision": question.precision,
        "chunked_loss": question.chunked_loss,
        "recommended": best and best.name, "runner_up": other and other.name, "how_sure": how_sure(advice),
        "faster_if_it_fits": told.riskier and _row(told.riskier), "changes": told.others, "nearest": told.nearest,
        "strategies": [_row(option) for option in advice.options],
        "files": files and {key: value and str(value) for key, value in dataclasses.asdict(files).items()},
    }  # fmt: skip


def _row(option: Option) -> dict[str, Any]:
    request, memory, time = option.request, option.memory, option.time
    return {
        "strategy": option.name, "fits": option.fits, "sure_to_fit": option.is_sure, "why": option.why,
        "micro_batch": request.micro_batch if option.fits else 0, "accumulation": request.accumulation,
        "gradient_checkpointing": request.gradient_checkpointing, "precision": request.precision,
        "device_bytes": device_bytes(memory), "peak_reserved": dataclasses.asdict(memory.peak_reserved),
        "device_parts": dict(memory.device_parts),
        "host_bytes_per_node": dataclasses.asdict(memory.host_peak), "nvme_bytes_per_node": memory.nvme,
        "tokens_per_s": option.tokens_per_s, "step_s": time and dataclasses.asdict(time.step_s),
        "mfu": time and time.mfu, "cost_per_million_tokens": option.cost_per_million_tokens if option.fits else None,
        "deepspeed": request.strategy.deepspeed,
    }  # fmt: skip


def _page(advice: Advice, told: _Told) -> Iterator[str]:
    question, best, other = advice.question, advice.best, advice.runner_up
    yield (
        f"{question.shape.name} ({count_text(question.shape.parameters)} parameters{adapters.told(question.shape)})"
        f" on {question.box.name}:"
        f" {question.ranks} x {question.box.device.name}, {question.global_batch} samples of {question.sequence_length}"
        f" tokens a step, {question.precision}{', the loss in chunks' * question.chunked_loss}\n"
    )
    yield (
        "The advised one, what is about as fast, then the others by speed. a rank: samples of a batch x batches before"
        "\na step. again: gradient checkpointing. up to: the upper end of the peak's interval. tokens/s are of all"
        "\nranks, host and NVMe of one node, cost/M of a million tokens. GiB are 2**30 bytes.\n"
    )
    yield _ROW.format(
        "strategy", "a rank", "again", "peak GiB", "up to", "tokens/s", "host GiB", "NVMe GiB", "cost/M", ""
    )
    for option in advice.options:
        yield _line(option)
    if best is None:
        yield f"\n{how_sure(advice)}"
    else:
        yield f"\ntake {_named(best)}: {how_sure(advice)}"
        if other is not None:
            yield "; ".join([f"next best {_named(other)}, {_apart(best, other)}", *unchecked(other)])
        if told.riskier is not None:
            faster = told.riskier.tokens_per_s / best.tokens_per_s - 1
            said = f"{faster:.0%} faster, and not as sure to fit: {_named(told.riskier)}"
            yield "; ".join([said, *unchecked(told.riskier)])
        yield from _of_loading(best)
        if (of_host := host_adam_note(best.request)) is not None:
            yield of_host
        if best.name == "zero1" and question.ranks == 1:
            yield ONE_RANK_NOTE
        if question.box.nodes > 1:
            yield f"each GPU is taken to have {question.box.network_gb_per_s:g} GB/s of network (--network_gb_per_s)"
        if question.shape.lora_rank:
            yield LORA_NOTE
    yield from told.others
    yield from told.nearest
    if told.files is not None and best is not None:
        files = told.files
        yield f"\nwritten: {files.accelerate}" + (f" and {files.deepspeed}" if files.deepspeed else "")
        yield f"  {files.command}    ({_of_program(best.request)})"
        if files.of_study is not None:
            yield f"  {files.of_study}"


def _of_loading(best: Option) -> Iterator[str]:
    loading = best.memory.host_parts["load"]
    if loading > _MUCH_FOR_A_HOST_BYTES and best.request.strategy.zero_stage != 3:
        only = "; fsdp_cpu_ram_efficient_loading: true leaves that to one" if best.request.strategy.is_fsdp else ""
        yield f"while loading a node's host holds {loading / GIB:,.0f} GiB: each process makes all of it in fp32{only}"


def _apart(best: Option, other: Option) -> str:
    if best.is_sure and not other.is_sure:
        return "not as sure to fit"
    gap = other.tokens_per_s / best.tokens_per_s - 1
    return f"{abs(gap):.0%} {'faster' if gap > 0 else 'slower'}" + (because(other, best) if -gap > AS_FAST else "")


def _of_program(request: Request) -> str:
    """What is in no file, and the figures rest on."""
    several = f", {request.accumulation} of them before each step" if request.accumulation > 1 else ""
    again = "on" if request.gradient_checkpointing else "off"
    chunks = ", the loss in chunks" * request.chunked_loss
    return f"batches of {request.micro_batch}{several}, gradient checkpointing {again}{chunks}"


def _named(option: Option) -> str:
    again = "with" if option.request.gradient_checkpointing else "without"
    return f"{option.name} ({option.batches} a rank, {again} checkpointing)"


def _line(option: Option) -> str:
    request, memory = option.request, option.memory
    cost = option.cost_per_million_tokens
    return _ROW.format(
        option.name, option.batches if option.fits else "-", "yes" if request.gradient_checkpointing else "no",
        f"{device_bytes(memory) / GIB:.1f}", f"{device_bytes(memory, at_upper_end=True) / GIB:.0f}",
        f"{option.tokens_per_s:,.0f}" if option.fits else "-", f"{memory.host_peak.value / GIB:.0f}",
        f"{memory.nvme / GIB:.0f}" if memory.nvme else "-",
        f"{cost:.3f}" if cost is not None and option.fits else "-", option.why,
    )  # fmt: skip
