"""`study advise`: recommend a strategy for a model on given hardware, with its confidence, what-ifs and files."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from study.advisor import advise, longer, measured, predict_command, request_text, training
from study.advisor.advise import Advice, Option
from study.advisor.fitted import fit_settings, usual_precision
from study.advisor.prediction import is_measured
from study.advisor.request_notes import ADAPTERS_IN_FP32, OVERFLOWS, request_findings, request_notes
from study.advisor.training import Amount, WholeTraining
from study.advisor.workload import Workload
from study.config.errors import UserError
from study.config.flags import changed_flags
from study.config.precisions import computes_in_fp16, computing_type, in_engine
from study.config.printing import TextTable, print_result, progress_line
from study.config.strategies import (
    STRATEGY_DIRECTORY,
    STRATEGY_NAMES,
    Strategy,
    read_strategy,
    read_yaml,
    spelled_strategy,
)
from study.config.text import format_parameters, rounded
from study.host.folders import folder_argument
from study.host.memory import GIB
from study.predictor.calibration import PredictedRun, calibration_lines, run_document
from study.predictor.communication import network_notes, pcie_notes
from study.predictor.hardware import Hardware, HardwareFlags, pair_notes, parse_int, real
from study.predictor.intervals import figure_document
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.shape import resolve_lengths, trained_text
from study.predictor.state import REPLACED, accumulated_bytes, unswapped_kind
from study.predictor.time import (
    device_bytes,
    excess_bytes,
    host_adam_note,
    host_limit,
    lora_note,
    max_offload_slowdown,
    step_ends,
    unvalidated_notes,
    usable_bytes,
)
from study.releases.causes import least_sound_release, unsound_releases
from study.workloads.presets import find_known, find_preset

EPILOG = """\
Each strategy of accelerate_configs/ is tried with its settings fitted to the model, with and without gradient
checkpointing, at the largest micro-batch that fits by the predicted peak. Nothing is run, and nothing is fetched
without --hub. docs/advice.md has the errors and the limits of the predictions.
"""
CONFIGS_EPILOG = """\
A file refers to its DeepSpeed JSON by its full path, so it can be launched from any folder:
accelerate launch --config_file DIR/zero3.yaml YOUR_PROGRAM.py, or -m study.train.
"""
# Default: at least this many samples per optimizer step, with one of these numbers per rank.
_BATCH, _SHARES = 64, (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LARGE_HOST_BYTES = 256 * GIB
# An option that needs at most this fraction of the recommended one's host memory is named as well.
_LIGHTER = 0.75
_COLUMNS = (
    "strategy",
    "micro-\nbatch",
    "accumu-\nlation",
    "check-\npointing",
    "peak\nGiB",
    "90 %\nbound",
    "tokens/s,\nall ranks",
    "host\nGiB",
    "NVMe\nGiB",
    "cost/M\ntokens",
    "",
)
_DETAILS = """\
micro-batch: samples of one forward pass on one rank; accumulation: micro-batches of an optimizer step; peak: predicted,
of one GPU; 90 % bound: upper bound of the peak; tokens/s: of all ranks, ~ under offload, whose time is the host's;
host and NVMe: of one node.
"""
# fsdp_config of version 1 that is what accelerate_configs/fsdp2.yaml is of version 2.
_FSDP1 = {
    "fsdp_version": 1,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_use_orig_params": True,
    "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
# Plain training of a model that was loaded in bf16.
_WITHOUT_MASTERS = (
    "AdamW then keeps weights and moments in 16 bits, and no fp32 masters: small updates are lost (OpenTau's issue 181:"
    " a policy that never succeeds). A model loaded with dtype=torch.bfloat16 is trained so, also with bf16=True of the"
    " Trainer"
)
_SYNCS_IN_TRAINER = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
_WIDTH = 120
SAVES_SHARDS = (
    "To save a model of stage 3 by accelerator.save_model, set stage3_gather_16bit_weights_on_model_save to true in the"
    " JSON file: the first rank then has all weights in host memory"
)
SUMS_WITHIN_GROUPS = (
    "with the loss of DeepSpeed's and Accelerate's documents, gradients are too large by the ranks that share a"
    " sequence (docs/compositions.md): divide your loss by that number, or use ulysses_zero3; study/train.py averages"
    " gradients itself"
)


@dataclasses.dataclass(frozen=True)
class AdviseFlags:
    """Flags of `study advise`, as the question needs them."""

    workload: Workload
    hardware: HardwareFlags
    runs: measured.RunFlags
    # None: the fewest samples that suit the ranks and the flags of a rank.
    global_batch_size: int | None
    price_per_gpu_hour: float | None
    nvme_path: str
    amount: Amount | None

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> AdviseFlags:
        """Return the flags of a parsed command line; raise UserError if one that is needed is missing, or for flags
        that exclude each other."""
        predict_command.settle_model(options)
        predict_command.check_required(options, "study advise MODEL --hardware BOX")
        checkpointing = {"auto": None, "on": True, "off": False}[options.gradient_checkpointing]
        return cls(
            Workload.from_options(options, gradient_checkpointing=checkpointing),
            HardwareFlags.from_options(options),
            measured.RunFlags.from_options(options),
            options.global_batch_size,
            options.price_per_gpu_hour,
            options.nvme_path,
            Amount.from_options(options),
        )


@dataclasses.dataclass(frozen=True)
class AdvisedFiles:
    """Files of the recommended strategy, and the launch commands of the user's program, and of study/train.py if it can
    train the same."""

    accelerate: Path
    deepspeed: Path | None
    command: str
    of_study: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    predict_command.add_model_arguments(parser)
    add("--precision", choices=("bf16", "fp16", "fp32"), help="by default bf16, else fp16; fp32 on a CPU")
    add("--gradient_checkpointing", choices=("auto", "on", "off"), default="auto", help="auto: the faster of the two")
    batch = "samples per optimizer step; by default 64, or one per rank"
    add("--global_batch_size", type=parse_int, metavar="B", help=batch)
    add("--micro_batch", type=parse_int, metavar="B", help="samples of one forward pass; by default the most that fit")
    add(
        "--accumulation",
        type=parse_int,
        metavar="A",
        help="micro-batches of an optimizer step; by default as few as fit",
    )
    training.add_arguments(parser)
    price = "price per GPU hour; adds the cost per million tokens, and that of a whole training"
    add("--price_per_gpu_hour", type=real, metavar="X", help=price)
    add("--nvme_path", default="nvme_offload", metavar="DIR", help="folder on NVMe, written to the files")
    Workload.add_arguments(parser, "optimizer", "tensor_parallel")
    add("--details", action="store_true", help="also print the legend, measurements and excluded strategies")
    add("--output", type=folder_argument, metavar="DIR", help="write the recommended strategy's files here")
    measured.add_arguments(parser)


def run(
    options: argparse.Namespace,
    nearest: Callable[[Request], Iterable[str]] | None = None,
    read_run: measured.ReadRun | None = None,
) -> int:
    """Print the advice and return the exit status.

    `nearest` yields lines about the nearest measurements, and `read_run` reads the files of --calibrate.
    """
    with _without_collections():
        # The first question about a class outside the table traces it, before anything is compared.
        with progress_line("comparing strategies, micro-batches and settings ..."):
            flags = AdviseFlags.from_options(options)
            question = build_advice_request(flags)
            runs = flags.runs.collect(functools.partial(_measured_request, question), read_run)
            question = _corrected(question, runs)
            advice = advise.advise(question)
            riskier, what_ifs = advise.faster_riskier_option(advice), list(advise.sensitivity_lines(advice))
            plain, safer = advise.plain_option_in_16_bits(advice), list(advise.safer_lines(advice))
        best, files = advice.best, None
        if best and options.output:
            files = write_files(best, options.output, flags.nvme_path, flags.workload.model_name_or_path)
        # Only a request that prints them reads the records, which takes as long as the advice.
        similar = list(nearest(best.request)) if nearest and best and (options.json or options.details) else []
        total = whole_training(flags, best)
        document = functools.partial(
            _document, advice, riskier, plain, [*safer, *what_ifs], similar, files, runs, total
        )
        lines = [*calibration_lines(runs), *what_ifs, *(similar if options.details else [])]
        # It compares adapters, too.
        page = _page(advice, riskier, plain, lines, files, flags, options.details, safer)
        print_result(options.json, document, page, options.details or files is not None)
    return 0 if best else 1


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no cyclic garbage meanwhile: there is next to none, and the search for it takes a seventh of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _measured_request(question: advise.AdviceRequest, run: measured.RunText) -> Request:
    """Return the request of a measured run; micro-batch and accumulation are 1 if it does not name them."""
    if run.strategy is None:
        raise UserError(f"--measured {run.text} names no strategy", "add strategy=zero2, or the name of another one")
    if run.strategy == "single":
        question = dataclasses.replace(question, box=dataclasses.replace(question.box, gpus_per_node=1, nodes=1))
    strategy = question.find_strategy(predict_command.predicted_strategy(run.strategy).name)
    batch = (run.micro_batch or 1, run.accumulation or 1)
    request = question.configuration(strategy, *batch, bool(run.checkpointing))
    return fit_settings(dataclasses.replace(request, sequence_length=run.seq_length or question.sequence_length))


def _corrected(question: advise.AdviceRequest, runs: Sequence[PredictedRun]) -> advise.AdviceRequest:
    """Return the question with the correction of measured runs."""
    if not runs:
        return question
    # Of any strategy: the setup is what all have in common.
    example = question.configuration(runs[0].run.request.strategy, 1, 1, False)
    return dataclasses.replace(question, correction=measured.correct(example, runs))


def build_advice_request(flags: AdviseFlags) -> advise.AdviceRequest:
    """Return the request that the flags make; raise UserError if it is impossible."""
    workload, box = flags.workload, flags.hardware.box()
    precision = workload.precision or usual_precision(box)
    predict_command.check_precision(box, precision)
    tensor_ranks = workload.tensor_parallel or 1
    if box.ranks % tensor_ranks:
        problem = f"--tensor_parallel {tensor_ranks} does not divide {box.ranks} ranks"
        raise UserError(problem, "use a divisor of the number of GPUs")
    data_ranks = box.ranks // tensor_ranks
    batch = _global_batch(flags, box, data_ranks)
    shape = workload.adapt(
        model_shape(workload.model_name_or_path, ask_hub=workload.hub, check_traced=workload.check_traced)
    )
    length, target = resolve_lengths(shape, workload.seq_length, workload.target_length)
    question = advise.AdviceRequest(
        shape=shape,
        box=box,
        sequence_length=length,
        target_length=target,
        precision=precision,
        gradient_checkpointing=workload.gradient_checkpointing,
        attention=workload.attn_implementation,
        global_batch=batch,
        is_default_batch=flags.global_batch_size is None and not (workload.micro_batch or workload.accumulation),
        micro_batch=workload.micro_batch or (workload.accumulation and batch // data_ranks // workload.accumulation),
        optimizer=workload.optimizer,
        price_per_gpu_hour=flags.price_per_gpu_hour,
        reference_model=workload.with_reference,
        quantized=workload.is_quantized,
        fsdp_version=workload.fsdp_version or Request.fsdp_version,
        trainer=workload.trainer,
        tensor_ranks=tensor_ranks,
    )
    _check_tensor_groups(question)
    predict_command.check_attention(question)
    return question


def _check_tensor_groups(question: advise.AdviceRequest) -> None:
    """Raise UserError if tensor-parallel groups cannot divide the model, or with a reference model."""
    if question.tensor_ranks > 1:
        if question.reference_model:
            raise UserError("a reference model is not predicted with --tensor_parallel", "leave one of them out")
        question.configuration(question.find_strategy(advise.WITH_AUTOTP[-1]), 1, 1, checkpointing=False)


def _global_batch(flags: AdviseFlags, box: Hardware, ranks: int) -> int:
    """Return the samples of an optimizer step; raise UserError if ranks with different samples and the flags of a rank
    do not divide it. By default all ranks can share it, with tensor-parallel groups and without."""
    per_rank = {"micro_batch": flags.workload.micro_batch, "accumulation": flags.workload.accumulation}
    fixed = {name: count for name, count in per_rank.items() if count}
    unit, batch = ranks * math.prod(fixed.values()), flags.global_batch_size
    if len(fixed) == 2:
        # Both leave nothing open.
        if batch not in (None, unit):
            problem = f"--micro_batch, --accumulation and {ranks} ranks make {unit} samples per step, not {batch}"
            raise UserError(problem, "leave --global_batch_size out")
        return unit
    if batch is None:
        by_all = box.ranks
        return unit * -(-_BATCH // unit) if fixed else next(n * by_all for n in _SHARES if n * by_all >= _BATCH)
    if batch % unit:
        what = "".join(f" with --{name} {count}" for name, count in fixed.items())
        problem = f"--global_batch_size {batch} is not a multiple of {ranks} ranks{what}"
        raise UserError(problem, f"use {-(-batch // unit) * unit}")
    return batch


def _document(
    advice: Advice,
    riskier: Option | None,
    plain: Option | None,
    what_ifs: list[str],
    similar: list[str],
    files: AdvisedFiles | None,
    runs: Sequence[PredictedRun] = (),
    total: WholeTraining | None = None,
) -> dict[str, Any]:
    question, best, runner_up = advice.question, advice.best, advice.runner_up
    return {
        "model": question.shape.name,
        "parameters": question.shape.parameters,
        "trained_parameters": question.shape.trained_parameters,
        "lora_rank": question.shape.lora_rank,
        "lora_targets": question.shape.lora_targets,
        "lora_modules_to_save": question.shape.lora_saved,
        "lora_dora": question.shape.lora_dora,
        "hardware": question.box.name,
        "ranks": question.box.ranks,
        "tensor_parallel": question.tensor_ranks,
        "sequence_length": question.sequence_length,
        "target_length": question.target_length,
        "precision": question.precision,
        "chunked_loss": question.trainer.loss_kernel == "liger",
        "compiled": question.trainer.compiled,
        "recommended": best and best.name,
        "training": total and total.document,
        "runner_up": runner_up and runner_up.name,
        "how_sure": advise.explain_best(advice),
        "faster_if_it_fits": riskier and entry(riskier),
        "plain_in_16_bits": plain and entry(plain),
        "changes": [*advise.adapters_lines(advice), *what_ifs],
        "longer": [row.document for row in longer.longer_rows(advice)],
        "optimizer_on_host": advise.offload_line(advice),
        "nearest": similar,
        "measured": [run_document(run) for run in runs],
        "strategies": [entry(option) for option in advice.options],
        "files": files and {key: value and str(value) for key, value in dataclasses.asdict(files).items()},
    }


def entry(option: Option) -> dict[str, Any]:
    """Return an option as in the document of --json."""
    request, memory, time = option.request, option.memory, option.time
    return {
        "strategy": option.name,
        "fits": option.fits,
        "sure_to_fit": option.is_safe,
        "why": option.why,
        "micro_batch": request.micro_batch if option.fits else 0,
        "accumulation": request.accumulation,
        "gradient_checkpointing": request.gradient_checkpointing,
        "precision": request_text.precision_name(request),
        "loads_in_16_bits": request.pure or request.loads_16_bits,
        "sync_each_batch": request.sync_each_batch,
        "device_bytes": device_bytes(memory),
        "peak_reserved": dataclasses.asdict(memory.peak_reserved),
        "device_parts": dict(memory.device_parts),
        "host_bytes_per_node": dataclasses.asdict(memory.host_peak),
        "nvme_bytes_per_node": memory.nvme,
        "tokens_per_s": option.tokens_per_s,
        "step_s": time and figure_document(time.step_s, step_ends(request, time)),
        "mfu": time and time.mfu,
        "cost_per_million_tokens": option.cost_per_million_tokens,
        "deepspeed": request.strategy.deepspeed,
        "least_deepspeed_release": least_sound_release(option.name, request.accumulation, request.precision) or None,
    }


def _page(
    advice: Advice,
    riskier: Option | None,
    plain: Option | None,
    lines: list[str],
    files: AdvisedFiles | None,
    flags: AdviseFlags,
    details: bool,
    safer: list[str],
) -> Iterator[str | TextTable]:
    question, best = advice.question, advice.best
    shape, box = question.shape, question.box
    program = request_text.program_text(question.trainer)
    yield from safer
    yield _verdict(advice)
    if total := whole_training(flags, best):
        yield f"  {total.line}"
    if best is not None:
        # Before the table: a screen may cut the last lines.
        yield from request_text.pair_notes(best.request)
        yield f"why {best.name}: {advise.explain_best(advice)}"
        yield from overflow_lines(best)
        yield from release_lines(best)
    yield ""
    count = format_parameters(shape.parameters)
    yield (
        f"{shape.name} ({count} parameters{trained_text(shape)}) on {box.name}:"
        f" {box.ranks} x {box.device.name}{_groups_text(question)}, global batch {question.global_batch},"
        f" {request_text.tokens_text(question)}, {question.precision}{program}"
        f"{request_text.optimizer_text(question.optimizer)}\n"
    )
    listed = [option for option in advice.options if option.fits or details or best is None]
    rows = _rows(listed, best, plain)
    filled = [place for place in range(len(_COLUMNS)) if not place or any(row[place] not in ("", "-") for row in rows)]
    yield TextTable([_COLUMNS[place] for place in filled], [[row[place] for place in filled] for row in rows])
    if details:
        yield f"\n{_DETAILS}"
    else:
        yield from _left_out_lines([option for option in advice.options if option not in listed], box)
        yield ""
    if best is not None:
        yield from _notes(advice, best, riskier)
        yield from _plain_lines(plain, best, flags)
    yield from lines
    yield from longer.longer_lines(advice)
    if details and (line := advise.offload_line(advice)) is not None:
        yield line
    if best and files:
        yield from _file_lines(files, best.request, flags.nvme_path)
    elif best:
        more = "" if details else "; --details has similar measurements"
        yield f"--output DIR writes files with fitted buckets{more}; the parts of these figures:"
        yield f"  {predict_words(best.request, flags)}"


def _groups_text(question: advise.AdviceRequest) -> str:
    """Return the ranks of a tensor-parallel group with a leading comma; empty without them."""
    return f" in tensor-parallel groups of {question.tensor_ranks}" * (question.tensor_ranks > 1)


# What stands for the reason of a missing part of the peak, after its first line.
_WITHOUT_VERDICT = "no verdict"


def _left_out_lines(options: Sequence[Option], box: Hardware) -> Iterator[str]:
    """Yield the options that do not fit, and their needs, by the limit that they exceed."""
    usable, needs = usable_bytes(box), dict[str, list[str]]()
    a_rank = f"do not fit {rounded(usable / GIB)} GiB a rank"
    for option in options:
        limit, need = "do not fit for another reason", option.why
        if (peak := device_bytes(option.memory)) > usable:
            limit, need = a_rank, rounded(peak / GIB)
        elif (loading := option.memory.loading) > usable:
            limit, need = f"{a_rank} while weights are loaded", rounded(loading / GIB)
        elif box.host_gib_per_node and excess_bytes(option.memory, box) > 0 and unswapped_kind(option.request) is None:
            limit = f"do not fit {host_limit(box)} GiB of host memory a node"
            need = f"{rounded(option.memory.host_peak.value / GIB)}, {advise.host_flag(option)}"
            if box.is_cpu_only:
                # Its ranks are there, too.
                limit += ", all ranks together"
                need = rounded(box.host_gib_per_node + excess_bytes(option.memory, box) / GIB)
        elif option.memory.missing:
            # The first line has the reason, which is that of all.
            limit, need = _WITHOUT_VERDICT, f"{rounded(peak / GIB)} GiB without it"
        needs.setdefault(limit, []).append(f"{option.name} ({need})")
    yield from (f"{limit}: {', '.join(names)}" for limit, names in needs.items())


def _verdict(advice: Advice) -> str:
    best = advice.best
    if best is None:
        reason = advise.explain_best(advice)
        return reason[0].upper() + reason[1:]
    request, memory = best.request, best.memory
    peak, bound = (rounded(device_bytes(memory, at_upper=upper) / GIB) for upper in (False, True))
    use = (
        f"Use {best.name}, micro-batch {request.micro_batch}, accumulation {request.accumulation},"
        f" {'' if request.gradient_checkpointing else 'no '}checkpointing:"
    )
    figures = [f"{peak} of {rounded(usable_bytes(request.box) / GIB)} GiB (90 % bound {bound})"]
    if not best.is_safe:
        figures.append("may not fit")
    if host := request_text.host_text(request, memory):
        figures.append(host)
    if memory.nvme:
        figures.append(f"{rounded(memory.nvme / GIB)} GiB on NVMe")
    if is_measured(request):
        figures.append(f"{rounded(best.tokens_per_s)} tokens/s, as measured")
    else:
        figures.append(f"about {rounded(best.tokens_per_s)} tokens/s{advise.speed_range(best)}, predicted")
    one_line = f"{use} {', '.join(figures)}"
    return one_line if len(one_line) <= _WIDTH else f"{use}\n  {', '.join(figures)}"


def whole_training(flags: AdviseFlags, option: Option | None) -> WholeTraining | None:
    """Return the training that the flags name, with the steps of an option; None without one, or if it does not fit."""
    if flags.amount is None or option is None or option.time is None or not option.fits:
        return None
    return WholeTraining.predict(flags.amount, option.request, option.time, flags.price_per_gpu_hour)


def _notes(advice: Advice, best: Option, riskier: Option | None) -> Iterator[str]:
    # Before other notes: a screen may cut the last ones.
    yield from advise.adapters_lines(advice)
    yield from advice_notes(advice, best, riskier)


def overflow_lines(best: Option) -> Iterator[str]:
    """Yield that a recommendation in fp16 does not train the model: the notes are too far down for it."""
    for finding in request_findings(best.request):
        if finding.rule == OVERFLOWS:
            yield f"but {finding.key}: {finding.says}"


def release_lines(best: Option) -> Iterator[str]:
    """Yield the release of DeepSpeed that a recommendation needs."""
    settings = best.name, best.request.accumulation, best.request.precision
    if release := least_sound_release(*settings):
        why = f"{unsound_releases(*settings)} compute wrong gradients with these settings (`study releases`)"
        yield f"needs DeepSpeed {release} or later: {why}"


def advice_notes(advice: Advice, best: Option, riskier: Option | None) -> Iterator[str]:
    """Yield the alternatives of a recommendation, and the assumptions of its figures."""
    if (roomier := advise.roomier_option(advice)) is not None:
        yield f"more room: {_named(roomier)}, {advise.roomier_text(roomier, best)}"
    yield from _alternative_notes(advice, best, riskier)
    yield from _program_notes(best)
    optimizer = advice.question.optimizer
    if optimizer != "adamw":
        yield f"no optimizer on the host is compared: DeepSpeed refuses {optimizer} there, and {REPLACED}"
    question = advice.question
    if refusal := advise.why_no_fsdp(question):
        yield f"no FSDP is compared: {refusal}"
    yield from question.shape.notes()
    yield from request_notes(best.request, without=OVERFLOWS)


def _alternative_notes(advice: Advice, best: Option, riskier: Option | None) -> Iterator[str]:
    """Yield the next option, one with less host memory, and a faster one whose bound does not fit."""
    runner_up = advice.runner_up
    is_rival = runner_up is not None and best.is_safe == runner_up.is_safe
    if runner_up is not None and is_rival and -advise.speed_gap(runner_up, best) > advise.SPEED_TOLERANCE:
        slower = advise.speed_text(runner_up, best)
        yield f"next {runner_up.name}, {slower}{advise.explain_slowdown(runner_up, best)}"
    limit = _LIGHTER * best.memory.host_peak.value
    lighter = [option for option in advice.fitting if option.memory.host_peak.value < limit]
    if best.request.strategy.offloads and advice.question.box.host_gib_per_node is None and lighter:
        option = max(lighter, key=lambda option: (option.is_safe, option.tokens_per_s))
        lower = f"{rounded(option.memory.host_peak.value / GIB)} GiB of host memory"
        yield f"with less host memory: {_named(option)}, {lower}, {advise.speed_text(option, best)}"
    if riskier is not None:
        faster = f"{advise.speed_text(riskier, best)}, but its 90 % bound does not fit: {_named(riskier)}"
        yield "; ".join([faster, *advise.unchecked_needs(riskier)])
    if (late := advise.option_of_late_replicas(advice)) is not None:
        # Gradients of a replica group's ranks, where between micro-batches all of them would not fit.
        plugin = f"GradientAccumulationPlugin(num_steps={late.request.accumulation}, sync_each_batch=True)"
        yield (
            f"{advise.speed_text(late, best)} in a custom loop: {_named(late)} with {plugin}, and"
            " model.set_requires_all_reduce(is_last) before each backward pass: replicas add up gradients once a step;"
            f" 90 % bound {rounded(device_bytes(late.memory, at_upper=True) / GIB)} GiB"
        )


def _program_notes(best: Option) -> Iterator[str]:
    """Yield assumptions about the user's program and machine."""
    request = best.request
    loading = best.memory.host_parts["load"]
    if loading > _LARGE_HOST_BYTES and advise.loads_whole_in_fp32(request):
        needed = f"{rounded(loading / GIB)} GiB of a node's host memory"
        yield f"loading needs {needed} if each process loads the full model in fp32"
    if (note := host_adam_note(request)) is not None:
        yield note
    if best.name in advise.PLAIN and request.autocast and request.precision == "bf16":
        yield f"{best.name} counts fp32 weights: load them with dtype=torch.float32, which transformers 5 does not"
    if best.name == "zero1" and request.box.ranks == 1:
        precision = "its weights are 16 bits with fp32 masters of trained parameters"
        yield f"ZeRO-1 on one GPU shards nothing, but {precision}; single keeps fp32 weights and autocasts"
    yield from _sync_notes(request)
    yield from _link_notes(request)
    yield from unvalidated_notes(request.box)
    half = "float16" if computes_in_fp16(request.precision) else "bfloat16"
    if request.pure:
        how = "BitsAndBytesConfig(load_in_8bit=True)" if request.in_8_bits else f"dtype=torch.{half}"
        if request.quantized:
            how = f"BitsAndBytesConfig({_in_4_bits(request, half)})"
        if request.loads_on_host:
            how += " and device_map={'': 'cpu'}"
        yield f"load the model with {how}; peft keeps the adapters in fp32{_cast_by_trl(request)}"
    elif request.loads_16_bits and request.strategy.zero_stage != 3 and not request.quantized:
        yield f"load the model with dtype=torch.{half}: fp32 weights would take twice the host memory in each process"
    if request.shape.lora_rank:
        yield lora_note()


def _cast_by_trl(request: Request) -> str:
    """Return what TRL's trainers make of the adapters of a quantized model; empty for other models."""
    if not (request.quantized or request.in_8_bits):
        return ""
    cast = ", and TRL since 0.26.0 casts them to bf16"
    if not computes_in_fp16(request.precision):
        return cast
    return f"{cast}, which fp16's loss scaler refuses: {ADAPTERS_IN_FP32}"


def _in_4_bits(request: Request, half: str) -> str:
    """Return arguments of BitsAndBytesConfig, whose own defaults are FP4 and products in float32."""
    arguments = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.{half}'
    arguments += ", bnb_4bit_use_double_quant=True" * request.double_quantized
    return arguments + f", bnb_4bit_quant_storage=torch.{half}" * request.strategy.is_fsdp


def _sync_notes(request: Request) -> Iterator[str]:
    """Yield the setting with which FSDP reduces in each micro-batch, and the size of gradients without it."""
    if request.sync_each_batch:
        unsharded = rounded(accumulated_bytes(dataclasses.replace(request, sync_each_batch=False)) / GIB)
        plugin = f"GradientAccumulationPlugin(num_steps={request.accumulation}, sync_each_batch=True)"
        yield f"without Accelerator(gradient_accumulation_plugin={plugin}) gradients stay unsharded, {unsharded} GiB"


def _link_notes(request: Request) -> Iterator[str]:
    """Yield the assumed speed of the network, and of PCIe between the GPUs of a machine."""
    yield from network_notes(request.box)
    yield from pcie_notes(request)
    yield from pair_notes(request.box)


def plain_note(plain: Option, best: Option) -> str:
    """Return the gain and the loss by plain training of 16-bit weights."""
    peak, bound = (rounded(device_bytes(plain.memory, at_upper=upper) / GIB) for upper in (False, True))
    settings = f"{request_text.workload_text(plain.request)}; {peak} GiB, 90 % bound {bound}"
    return f"{_plain_title(plain)}: {advise.speed_text(plain, best)} ({settings}), but {_WITHOUT_MASTERS}"


def _plain_lines(plain: Option | None, best: Option, flags: AdviseFlags) -> Iterator[str]:
    """Yield the note on plain training of 16-bit weights, and the command that predicts it."""
    if plain is not None:
        yield plain_note(plain, best)
        yield f"  {predict_words(plain.request, flags)}"


def _plain_title(plain: Option) -> str:
    return f"{plain.name}, bf16 weights"


def _rows(options: Sequence[Option], best: Option | None, plain: Option | None) -> list[list[str]]:
    """Return a row per option, and one for plain training of 16-bit weights below the recommendation."""
    rows = [_row(option, best) for option in options]
    if best is not None and plain is not None:
        without_masters = f"{advise.speed_text(plain, best)}, without fp32 masters"
        rows.insert(1, [_plain_title(plain), *_row(plain, best)[1:-1], without_masters])
    return rows


def _row(option: Option, best: Option | None) -> list[str]:
    request, memory, cost = option.request, option.memory, option.cost_per_million_tokens
    return [
        option.name,
        *((f"{request.micro_batch}", f"{request.accumulation}") if option.fits else "--"),
        "yes" if request.gradient_checkpointing else "no",
        rounded(device_bytes(memory) / GIB),
        rounded(device_bytes(memory, at_upper=True) / GIB),
        f"{'~' * option.request.strategy.offloads}{rounded(option.tokens_per_s)}" if option.fits else "-",
        rounded(memory.host_peak.value / GIB),
        rounded(memory.nvme / GIB) if memory.nvme else "-",
        "-" if cost is None else f"{cost:.3f}",
        remark(option, best),
    ]


def remark(option: Option, best: Option | None) -> str:
    """Return why an option does not fit, or why it is not recommended although it is as fast."""
    if option.memory.missing and excess_bytes(option.memory, option.request.box) <= 0:
        return _WITHOUT_VERDICT
    if not option.fits or best is None:
        return option.why
    if option is best:
        return "recommended" + ", with sync_each_batch" * option.request.sync_each_batch
    gap, text = advise.speed_gap(option, best), advise.speed_text(option, best)
    if gap <= 0:
        # Without this the row looks as if the same work took longer.
        keeps_fp32 = option.request.weight_bytes > best.request.weight_bytes and option.request.autocast
        text = "fp32 weights under autocast, not 16-bit ones with fp32 masters" if keeps_fp32 else ""
        text = "; ".join(filter(None, [text, "sync_each_batch" * option.request.sync_each_batch]))
    if best.is_safe and not option.is_safe:
        return f"may not fit; {text}".removesuffix("; ")
    if gap <= 0:
        return text
    if option.request.strategy.offloads and not best.request.strategy.offloads:
        slowdown = max_offload_slowdown(option.request.correction)
        return f"predicted {text}; measured offload steps took up to {slowdown:.1f} x as long"
    return f"{text}, but {best.name} {advise.reason_against(option, best)}"


def predict_words(request: Request, flags: AdviseFlags) -> str:
    """Return the command that predicts an advised request, to the digit, with the parts of its memory and time."""
    is_fsdp, hardware = request.strategy.is_fsdp, flags.hardware.hardware
    workload = dataclasses.replace(
        flags.workload,
        micro_batch=request.micro_batch,
        accumulation=request.accumulation,
        gradient_checkpointing=request.gradient_checkpointing,
        # With adapters that is the default.
        pure_bf16=request.pure and not request.shape.lora_rank,
        # Another strategy does not accept these flags.
        fsdp_version=request.fsdp_version if is_fsdp else None,
        reentrant_units=is_fsdp and request.reentrant_units,
        fsdp_mixed_units=is_fsdp and request.fsdp_mixed_units,
        quantized_on_host=request.loads_on_host,
        sync_each_batch=is_fsdp and request.sync_each_batch,
    )
    words = ["study", "predict", workload.model_name_or_path, "--strategy", request.strategy.name, "--fitted"]
    words += ["--hardware", hardware]
    words += workload.flags(
        accumulation=1,
        gradient_checkpointing=False,
        pure_bf16=False,
        fsdp_version=Request.fsdp_version if is_fsdp else None,
    )
    words += changed_flags(flags.hardware, hardware=hardware)
    return shlex.join(words + flags.runs.flags(request.sequence_length))


def _named(option: Option) -> str:
    return f"{option.name} ({request_text.workload_text(option.request)})"


def _file_lines(files: AdvisedFiles, request: Request, nvme_path: str) -> Iterator[str]:
    yield f"\nwritten: {files.accelerate}" + (f" and {files.deepspeed}" if files.deepspeed else "")
    # Settings that the prediction assumes and that no file contains.
    program = request_text.program_text(request)
    yield f"  {files.command}    ({request_text.workload_text(request)}{program})"
    yield f"  with the Trainer: {_trainer_arguments(request)}"
    if files.of_study is not None and not request.reference_model:
        yield f"  {files.of_study}"
    if files.deepspeed and _saves_shards(json.loads(files.deepspeed.read_text(encoding="utf-8"))):
        yield f"  {SAVES_SHARDS}"
    if request.strategy.uses_nvme and not Path(nvme_path).is_absolute():
        yield f"  nvme_path is {nvme_path} in the folder of the launch; --nvme_path DIR names a folder on NVMe"
    if files.of_study is None and request.fsdp_gathers_16_bits and not request.pure:
        yield "  study/train.py does not train this: under FSDP it gathers fp32 weights (study predict --autocast)"


def _kernel_arguments(request: Request) -> dict[str, bool]:
    """Return the arguments of fused kernels; those of Liger have its loss, too."""
    if request.loss_kernel == "liger":
        return {"use_liger_kernel": True}
    return {"torch_compile": True} if request.compiled else {}


def _trainer_arguments(request: Request) -> str:
    """Return the arguments of the Trainer, or of TRL's DPO, of the predicted configuration."""
    precision = computing_type(request.precision)
    optimizer = {"lion": "lion_32bit"}.get(request.optimizer, request.optimizer)
    # TRL counts pairs.
    samples = request.micro_batch // 2 if request.reference_model else request.micro_batch
    values = {
        "per_device_train_batch_size": max(samples, 1),
        "gradient_accumulation_steps": request.accumulation,
        "gradient_checkpointing": request.gradient_checkpointing,
        **({precision: True} if precision != "fp32" else {}),
        **({"optim": optimizer} if optimizer != "adamw" else {}),
        **_kernel_arguments(request),
        **({"accelerator_config": _SYNCS_IN_TRAINER} if request.sync_each_batch else {}),
    }
    config = "DPOConfig" if request.reference_model else "TrainingArguments"
    return f"{config}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


# The recommended strategy's Accelerate file and DeepSpeed JSON, for use with `accelerate launch`.


def write_files(option: Option, folder: Path, nvme_path: str, model: str) -> AdvisedFiles:
    """Write the files of an option and return them; `model` is --model_name_or_path."""
    request = option.request
    outer = folder / f"{option.name}-fitted.yaml"
    settings: Any = copy.deepcopy(request.strategy.deepspeed)
    changes: dict[str, Any] = {"num_machines": request.box.nodes, "num_processes": request.box.ranks}
    if request.box.nodes > 1:
        # The rank of the machine and the main address are flags of the launch, below.
        changes["main_process_port"] = 29500
    if request.strategy.mesh is not None:
        shards = request.ranks_per_replica or request.box.ranks
        changes["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": request.box.ranks // shards,
            "parallelism_config_dp_shard_size": shards,
        }
    if request.strategy.is_fsdp and request.fsdp_version == 1:
        outer = folder / "fsdp1-fitted.yaml"
        changes["fsdp_config"] = _FSDP1
    precision = request_text.precision_name(request)
    if settings is None:
        changes["mixed_precision"] = "no" if precision == "fp32" else precision
    else:
        # Accelerate refuses a precision in its own file if there is a DeepSpeed JSON.
        if in_engine(precision):
            settings[computing_type(precision)] = {"enabled": True}
        for what in ("offload_optimizer", "offload_param"):
            section = settings["zero_optimization"].get(what)
            if section and section["device"] == "nvme":
                section["nvme_path"] = nvme_path
    texts = _strategy_texts(option.name, outer, settings, changes)
    _write_texts(texts, folder, "--output")
    inner = None if settings is None else outer.with_suffix(".json")
    launch = ["accelerate", "launch", "--config_file", str(outer)]
    if request.box.nodes > 1:
        launch += ["--machine_rank", "RANK", "--main_process_ip", "ADDRESS"]
    return AdvisedFiles(outer, inner, shlex.join([*launch, "YOUR_PROGRAM.py"]), _study_command(request, model, launch))


def add_configs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study configs`."""
    parser.add_argument("folder", type=folder_argument, metavar="DIR", help="the folder to write; created if missing")
    parser.add_argument("names", nargs="*", default=(), metavar="NAME", help="strategies; default: all")


# Settings that depend on the machines, by strategy.
_SIZED_BY_MACHINES = {
    "zero3_hpz": "zero_hpz_partition_size to the GPUs of one machine",
    "hsdp": (
        "parallelism_config_dp_replicate_size to the machines, parallelism_config_dp_shard_size to the GPUs of one"
    ),
}


def write_configs(options: argparse.Namespace) -> int:
    """Write the Accelerate files of strategies for use with any script, and print their paths; return 0."""
    if str(options.folder) in STRATEGY_NAMES and not options.folder.exists():
        command = shlex.join(["study", "configs", "mine", str(options.folder), *options.names])
        raise UserError(f"{options.folder} is a strategy, and DIR comes first", f"for instance: {command}")
    folder, texts = options.folder.absolute(), dict[Path, str]()
    names = [spelled_strategy(name) for name in options.names] or STRATEGY_NAMES
    for name in names:
        texts |= _strategy_texts(name, folder / f"{name}.yaml", read_strategy(name).deepspeed, {})
    _write_texts(texts, folder, "DIR")
    print("\n".join(map(str, texts)))
    launched = next(file for file in texts if file.suffix == ".yaml")
    line = shlex.join(["accelerate", "launch", "--config_file", str(launched), "--num_processes", "GPUS"])
    # Standard output has paths alone, for scripts.
    print(f"launch: {line} YOUR_PROGRAM.py", file=sys.stderr)
    print("The precision is that of your program: Accelerator(mixed_precision=...), or bf16=True", file=sys.stderr)
    if any(file.suffix == ".json" and _saves_shards(json.loads(text)) for file, text in texts.items()):
        print(SAVES_SHARDS, file=sys.stderr)
    for name, settings in _SIZED_BY_MACHINES.items():
        if name in names:
            print(f"{name}: set {settings}", file=sys.stderr)
    doubled = [name for name in names if _sums_within_groups(read_strategy(name))]
    if doubled:
        print(f"{', '.join(doubled)}: {SUMS_WITHIN_GROUPS}", file=sys.stderr)
    return 0


def _sums_within_groups(strategy: Strategy) -> bool:
    """Whether DeepSpeed sums gradients over the ranks that share a sequence, instead of averaging them."""
    return strategy.group is not None and strategy.group.divides == "sequence" and strategy.zero_stage in (1, 2)


def _saves_shards(deepspeed: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed file keeps the weights sharded when the model is saved."""
    zero = deepspeed["zero_optimization"]
    return zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save", False)


def _strategy_texts(
    name: str, file: Path, deepspeed: Mapping[str, Any] | None, changes: dict[str, Any]
) -> dict[Path, str]:
    """Return a strategy's Accelerate file with these changes, and its DeepSpeed JSON next to it, by path."""
    texts, document = dict[Path, str](), read_yaml(STRATEGY_DIRECTORY / f"{name}.yaml") | changes
    if deepspeed is not None:
        inner = file.with_suffix(".json")
        document["deepspeed_config"]["deepspeed_config_file"] = str(inner.absolute())
        texts[inner] = json.dumps(deepspeed, indent=2) + "\n"
    return texts | {file: yaml.safe_dump(document, sort_keys=False)}


def _write_texts(texts: Mapping[Path, str], folder: Path, argument: str) -> None:
    """Write files into a folder; raise UserError that names the argument rather than change an existing file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            if file.exists() and file.read_bytes() != text.encode():
                raise UserError(f"{file} exists with other contents", f"name another {argument}")
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"the files cannot be written to {folder} ({error.strerror})"
        raise UserError(problem, f"name another {argument}") from None


def _study_command(request: Request, model: str, launch: list[str]) -> str | None:
    """Return the command that trains this with study/train.py; None if that would train something else.

    study/train.py has transformers' loss and 32-bit AdamW alone, cannot load a model given by its sizes, and gathers
    fp32 weights under FSDP, whose gradients it reduces once a step. It keeps fp32 weights without DeepSpeed, and adds
    adapters to all linear layers, without dropout.
    """
    shape = request.shape
    if shape.lora_targets or shape.lora_saved or shape.lora_dora or request.lora_dropout or shape.has_decoder:
        return None
    if shape.headless_class:
        return None
    if request.loss_kernel != "transformers":
        return None
    if request.optimizer != "adamw" or request.sync_each_batch or request.tensor_group is not None:
        return None
    preset, is_loaded = find_preset(model), "=" not in model and not Path(model).expanduser().is_file()
    if (known_model := find_known(model)) is not None:
        model = known_model.hub_id
    if request.pure or request.fsdp_gathers_16_bits or not is_loaded:
        return None
    task = "gpt-wikitext" if request.shape.family == "causal-lm" else "bert-imdb"
    flags = ["--task", task, "--model_name_or_path", model]
    flags += ["--weights", "random"] * (preset is not None and not preset.has_published_weights)
    flags += ["--precision", request.precision, "--seq_length", str(request.sequence_length)]
    flags += ["--per_device_train_batch_size", str(request.micro_batch)]
    flags += ["--global_batch_size", str(request.micro_batch * request.accumulation * request.box.ranks)]
    # The model's dropout stores masks, which the prediction does not include.
    flags += ["--attn_implementation", request.attention, "--dropout", "0"]
    flags += ["--gradient_checkpointing"] * request.gradient_checkpointing
    flags += ["--torch_compile"] * request.compiled
    if request.shape.lora_rank:
        flags += ["--peft", "lora", "--lora_rank", str(request.shape.lora_rank)]
    return shlex.join([*launch, "study/train.py", *flags])
