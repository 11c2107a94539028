"""`study explain CONFIG MODEL`: memory per rank by setting of a user's config, and settings without effect."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from study.advisor import predict_command, trainer_files, trainer_groups, trl_files
from study.advisor.explain_case import ConfigCase, ProgramSettings, resolve
from study.advisor.explain_check import check_file, checked_tree, in_file, is_config
from study.advisor.explain_combinations import (
    ENDS_WITH_ERROR,
    WRONG_ARGUMENT,
    group_keys,
    stored_answer,
    untested_line,
)
from study.advisor.explain_findings import findings
from study.advisor.explain_releases import (
    parse_releases,
    release_document,
    release_line,
    with_releases,
    with_trainer,
)
from study.advisor.fitted import precision_under
from study.advisor.long_features import has_features
from study.advisor.request_notes import MIXED_ADAPTERS, lacks_bf16
from study.advisor.user_settings import ZERO, Finding, UserFile, is_inside, known_settings, read_user_file
from study.advisor.workload import FSDP1_UNITS, FSDP_FLAGS, Workload, WorkloadError
from study.config.errors import UserError, clip
from study.config.precisions import computes_in_bf16, computing_type
from study.config.printing import TextTable, print_result, progress_line
from study.config.text import format_number, rounded, rounded_seconds
from study.host.folders import resolve_path
from study.host.memory import GIB, MIB
from study.predictor.communication import bus_bandwidth_gb_per_s, calls_s, leaving_bytes, network_notes, sent_bytes
from study.predictor.constants import FITTED
from study.predictor.hardware import ANY_DEVICE, Hardware, HardwareFlags, parse_int
from study.predictor.intervals import figure_document
from study.predictor.lora_targets import ALL_LINEAR, is_pattern
from study.predictor.memory import predict_memory
from study.predictor.models import model_shape
from study.predictor.request import FP32_BYTES, MemoryUse, Request, StepTime
from study.predictor.shape import USUAL_LENGTH, ModelShape, resolve_lengths, trained_text
from study.predictor.state import persistent_params, sub_groups
from study.predictor.time import device_bytes, excess_on_host, fits, predict_time, step_ends, usable_bytes, why
from study.predictor.zero3_gathers import simulate_gathers
from study.workloads.presets import find_preset

EPILOG = """\
CONFIG is a DeepSpeed JSON or an Accelerate YAML, with any setting of DeepSpeed 0.19.8, including "auto". As DeepSpeed
does, it reads Hjson, too: JSON with comments and names without quotes. Nothing is run, and nothing is fetched without
--hub. GiB are 2**30 bytes.

The file of a trainer (axolotl, LLaMA-Factory, TRL, TrainingArguments) sets model, batch, length, adapters and engine,
and flags replace its values: study explain ax.yaml --hardware 8xH100.

--strict checks files instead, for CI. It prints the lines of errors (refusals of the engine; exit status 1) and of
warnings (conflicts, and settings that are dropped or without effect; exit status 3), and as notes the combinations that
train something else if the program resumes, for instance. A file that is neither is an error
or, with --skip_others, left out by its content. Files outside of the repository are not read. Without MODEL or
--world_size it prints what holds for any.
"""
# Kinds of findings, the most important first, with the words that count them in the first line.
_FINDINGS = {
    "refused": "refused by the engine",
    "conflict": "in conflict",
    "ignored": "ignored",
    "ineffective": "without effect",
    "noted": "noted",
    "filled": 'filled in for "auto"',
}
# --details prints the others, too, and those below this fraction of the largest.
_MAX_COST_ROWS, _MIN_COST = 5, 0.001
_COUNT = functools.partial(parse_int, most=1_000_000, what="number")
_MAX_RANKS = 1024
_STATES = {"optimizer": "optimizer state", "parameters": "weights"}
_MAX_ALONE = 3
# Part of a step that another setting has to save, to be named.
_MIN_GAIN = 0.1
# A part that does not fall to this fraction on twice as many ranks is not sharded.
_FALLS_TO = 2 / 3
# The peak falls with more ranks if twice as many have less than this fraction of it.
_FALLS = 0.95
# Rules of settings that DeepSpeed's reader accepts and with which a run ends all the same.
LATE_ERRORS = (WRONG_ARGUMENT, ENDS_WITH_ERROR, MIXED_ADAPTERS)
# Flags with a default, which a trainer's file replaces.
_WITH_DEFAULT = ("peft", "optimizer", "quantization", "attn_implementation", "loss_kernel")


@dataclasses.dataclass(frozen=True)
class SettingCost:
    """Memory of one rank that a setting accounts for, in bytes."""

    key: str
    value: Any
    # False if it is the engine's default.
    is_said: bool
    device: float
    host: float
    nvme: float
    says: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Answer to a frequent question about a config, in bytes of this case."""

    question: str
    short: str
    because: tuple[str, ...]
    # Bytes, or counts of ranks.
    figures: Mapping[str, float]


def _mixed_precision(text: str) -> str:
    """Return Accelerate's name of a precision; fp32 is that of the other commands."""
    return "no" if text == "fp32" else text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    config_help = "a DeepSpeed JSON, an Accelerate YAML or a trainer's file; with --strict also several"
    add("config", metavar="CONFIG", help=config_help)
    model_help = (
        "a preset, a folder with config.json, or its sizes: layers=..,hidden=..,..; a trainer's file names its own"
    )
    add("model", nargs="*", metavar="MODEL", help=model_help)
    add("--model", "--model_name_or_path", dest="named_model", metavar="M", help="the same as MODEL")
    add("--world_size", type=_COUNT, metavar="N", help="ranks of the whole job; by default as in the Accelerate file")
    add(
        "--hardware", metavar="BOX", help="8xH100, 2x8xA100-40, this: whether the peak fits, by default on all its GPUs"
    )
    add(
        "--precision",
        type=_mixed_precision,
        choices=("no", "bf16", "fp16"),
        help="mixed precision if the file does not set it (no is not set)",
    )
    add("--micro_batch", type=_COUNT, metavar="B", help="if it is auto in the file; by default 1")
    add("--accumulation", type=_COUNT, metavar="N", help="micro-batches of an optimizer step, likewise; by default 1")
    add("--gradient_checkpointing", action="store_true", help="the program recomputes activations in the backward pass")
    predict_command.add_program_arguments(parser)
    Workload.add_arguments(parser, "optimizer")
    generated = "tokens that the program generates for each sample, as PPO and GRPO do"
    add("--generated_tokens", type=_COUNT, metavar="T", help=generated)
    release_help = (
        "of the program: deepspeed=0.17.5,accelerate=1.10; by default the installed ones, else the newest tested."
        " trl=1.9: of the trainer of a TRL file, by default the newest read"
    )
    add("--release", type=parse_releases, metavar="NAME=X", help=release_help)
    add("--engine", metavar="FILE", help="of a trainer's file: the DeepSpeed JSON or Accelerate YAML that it runs with")
    trainer_help = (
        'the program of the file is transformers\' Trainer or one over it, which fills in each "auto" and has its own'
        " loop"
    )
    add("--trainer", action="store_true", help=trainer_help)
    add("--details", action="store_true", help="print the reason of each cost and answer, and every part of the peak")
    add("--strict", action="store_true", help="check files, and fail on errors and warnings")
    skip_help = "of --strict: leave out the files of other programs"
    add("--skip_others", action="store_true", help=skip_help)
    add("--output_format", choices=("text", "github"), help="of --strict: github annotates the lines in GitHub Actions")
    parser.set_defaults(**{name: trainer_files.Unset(parser.get_default(name)) for name in _WITH_DEFAULT})


def run(options: argparse.Namespace) -> int:
    """Print the explanation; return 1 if the engine refuses the file, 3 with warnings under --strict, else 0."""
    if options.strict:
        _check_strict_flags(options)
        return _check(options)
    _check_flags(options)
    with progress_line("reading the file and predicting its settings ..."):
        case = read_case(options)
        page = [] if options.json else list(_page(case, options.details))
    print_result(options.json, lambda: _document(case), page, options.details)
    return 1 if any(finding.kind == "refused" for finding in case.findings) else 0


def _check_strict_flags(options: argparse.Namespace) -> None:
    """Raise UserError for a flag that --strict has no use for."""
    if options.hardware:
        raise UserError("--strict checks files, and --hardware is for an explanation", "leave one of them out")
    if options.named_model:
        raise UserError("--strict checks files, for any model", "leave --model out")
    if options.engine:
        raise UserError("--engine is for an explanation, and --strict checks files", f"check {options.engine} itself")


def _check_flags(options: argparse.Namespace) -> None:
    """Set the model of an explanation; raise UserError unless a file and a model are named, in this order."""
    if options.named_model is not None:
        if options.model:
            raise predict_command.two_models(" ".join(options.model), options.named_model)
        options.model = [options.named_model]
    for flag, is_given in (("--output_format", options.output_format), ("--skip_others", options.skip_others)):
        if is_given:
            raise UserError(f"{flag} is for --strict", f"add --strict, or leave {flag} out")
    if not options.model and not resolve_path(options.config).exists() and find_preset(options.config) is not None:
        command = shlex.join(["study", "explain", "ds.json", options.config])
        strategies = shlex.join(["study", "predict", options.config, "--strategy", "zero3"])
        raise UserError(f"{options.config} is a model, and no file is named", f"{command}; of a strategy: {strategies}")
    if not options.model:
        # Errors of the file go first.
        if (trainer := trainer_files.read_trainer_file(options.config)) is not None:
            options.model = [trainer_files.find_model(trainer, options.hub)]
        else:
            read_user_file(options.config)
    if len(options.model) != 1:
        problem = "the model is missing" if not options.model else "only --strict accepts several files"
        example = shlex.join(["study", "explain", options.config, "llama-3.1-8b"])
        raise UserError(problem, f"give one CONFIG and one MODEL: {example}; --strict needs no MODEL")
    config, model = options.config, options.model[0]
    if not resolve_path(config).exists() and resolve_path(model).is_file() and find_preset(config) is not None:
        command = shlex.join(["study", "explain", model, config])
        raise UserError(f"{config} is a model and {model} a file", f"name the file first: {command}")


def read_case(options: argparse.Namespace) -> ConfigCase:
    """Return the file of a command line for its model and hardware, with its findings in the order of the document."""
    box_options = (options.bus_gb_per_s, options.host_gb_per_s, options.network_gb_per_s, options.host_memory)
    if not options.hardware and box_options != (math.inf, None, None, None):
        raise UserError("a speed or a host memory is one of the hardware", "add --hardware BOX")
    if (trainer := trainer_files.read_trainer_file(options.config)) is not None:
        if options.trainer:
            problem = f"--trainer is for the file of an engine, and {options.config} is one of {trainer.trainer.name}"
            raise UserError(problem, "leave it out")
        return _read_trainer_case(trainer, options)
    if options.engine:
        raise UserError(f"--engine is for the file of a trainer, and {options.config} is none", "leave it out")
    if options.release and "trl" in options.release:
        raise trl_files.no_trl_file(options.config)
    file = _with_fsdp_version(read_user_file(options.config), options.fsdp_version)
    workload = _workload(options)
    _check_fsdp_flags(file, options)
    _check_precision(file, options.precision)
    model = model_shape(options.model[0], ask_hub=workload.hub, check_traced=workload.check_traced)
    shape = workload.adapt(model)
    box = HardwareFlags.from_options(options).box() if options.hardware else None
    work = dataclasses.replace(program_settings(workload, shape), is_trainer=options.trainer)
    case = resolve(file, shape, options.world_size, work, box)
    case = with_releases(case, options.release)
    text = resolve_path(options.config).read_text(encoding="utf-8")
    results = tuple(in_file(finding, file, text) for finding in findings(case))
    return dataclasses.replace(case, findings=results, generated_tokens=options.generated_tokens)


def _read_trainer_case(trainer: trainer_files.TrainerFile, line_options: argparse.Namespace) -> ConfigCase:
    """Return the case of a trainer's file: its values are flags that the command line does not set."""
    trl = trl_files.trl_release(trainer, line_options.release)
    if trl is not None:
        trainer = trl_files.with_loss(trainer, trl)
    options, replaced = trainer_files.merge(trainer, line_options)
    box = HardwareFlags.from_options(options).box() if options.hardware else None
    ranks = options.world_size or (box.ranks if box else None)
    engine = trainer_files.read_engine(trainer, options, options.engine, ranks)
    engine = trainer_groups.with_groups(trainer, engine)
    file, name = _with_fsdp_version(engine.file, options.fsdp_version), options.model[0]
    if file.fsdp is None and not line_options.sync_each_batch:
        # Without FSDP this key of a trainer changes no byte.
        options.sync_each_batch = False
    _check_fsdp_flags(file, options)
    try:
        workload = _workload(options)
    except UserError as refusal:
        raise trainer_files.values_error(trainer, refusal) from None
    model = _trainer_model(trainer, options, workload)
    if (script := trainer_files.reread_for(trainer, model)) is not None:
        return _read_trainer_case(script, line_options)
    trainer, workload = _for_model(trainer, workload, model, line_options)
    try:
        shape = workload.adapt(model)
        work = dataclasses.replace(
            program_settings(workload, shape),
            pure=trainer_files.trained_type(trainer, file, options.precision),
            loads_16_bits=trainer_files.loads_for_engine(trainer) or None,
            loads_fp32=trainer_files.loads_fp32(trainer),
        )
        keeps_16_bits = bool(work.pure) or trainer.trainer.keeps_16_bits
        case = resolve(file, shape, options.world_size, work, box)
        case = with_releases(case, options.release, keeps_16_bits)
        case = with_trainer(case, trainer.trainer.name, trainer.trainer.newest_deepspeed, trainer.loop)
    except UserError as refusal:
        raise trainer_files.values_error(trainer, refusal) from None
    case = dataclasses.replace(case, findings=tuple(trainer_files.place_findings(trainer, engine, findings(case))))
    case = trainer_groups.with_long_features(trainer, trainer_groups.with_rings(trainer, case))
    if trl is not None:
        case = trl_files.with_release(trainer, trl, case)
    return dataclasses.replace(
        case,
        generated_tokens=options.generated_tokens or case.generated_tokens,
        read_from=(*trainer_files.workload_lines(trainer, name, options, replaced), *engine.lines),
    )


def _trainer_model(trainer: trainer_files.TrainerFile, options: argparse.Namespace, workload: Workload) -> ModelShape:
    """Return the model of a trainer's file, or that of the command line."""
    name = options.model[0]
    try:
        return model_shape(name, ask_hub=options.hub, check_traced=workload.check_traced)
    except WorkloadError as refusal:
        raise trainer_files.values_error(trainer, refusal) from None
    except UserError as refusal:
        if name != trainer.values.get("model_name_or_path"):
            raise
        raise trainer_files.model_error(trainer, refusal) from None


def _for_model(
    trainer: trainer_files.TrainerFile, workload: Workload, model: ModelShape, line_options: argparse.Namespace
) -> tuple[trainer_files.TrainerFile, Workload]:
    """Return a trainer's file and its workload with the lengths of samples that a model has, its frozen parts, and the
    type of its checkpoint."""
    trainer = trainer_files.with_checkpoint_type(trainer_files.fit_length(trainer, model), model)
    if workload.freeze is None and (frozen := trainer_files.frozen_parts(trainer, model)):
        trainer = trainer_files.with_value(trainer, "freeze", frozen)
        workload = dataclasses.replace(workload, freeze=frozen, frozen_without_backward=True)
    if line_options.lora_targets is None:
        trainer, workload = _with_targets(trainer, workload, model)
    if trainer_files.has_text_alone(trainer, model):
        workload = dataclasses.replace(workload, text_only=True)
    if line_options.seq_length is None:
        workload = dataclasses.replace(workload, seq_length=trainer.values.get("seq_length"))
    if model.has_decoder:
        return trainer, workload
    workload = dataclasses.replace(workload, target_length=line_options.target_length)
    return trainer_files.without_value(trainer, "target_length"), workload


def _with_targets(
    trainer: trainer_files.TrainerFile, workload: Workload, model: ModelShape
) -> tuple[trainer_files.TrainerFile, Workload]:
    """Return a trainer's file and its workload with the modules that have adapters: those of the language model if the
    trainer leaves others out, and all linear layers, with a finding, for a pattern that is not predicted."""
    if (targets := trainer_files.language_targets(trainer, model)) is not None:
        trainer = trainer_files.with_value(trainer, "lora_targets", targets)
        return trainer, dataclasses.replace(workload, lora_targets=targets)
    if not any(map(is_pattern, workload.lora_targets or ())):
        return trainer, workload
    try:
        workload.adapt(model)
    except UserError as refusal:
        trainer = trainer_files.with_all_linear(trainer, refusal)
        workload = dataclasses.replace(workload, lora_targets=(ALL_LINEAR,))
    return trainer, workload


def _check_fsdp_flags(file: UserFile, options: argparse.Namespace) -> None:
    """Raise UserError for flags of an engine, or of a version of FSDP, that the file has not."""
    for name in FSDP_FLAGS:
        is_for_fsdp1 = name in FSDP1_UNITS
        if getattr(options, name) and (file.sharding if is_for_fsdp1 else file.fsdp) is None:
            raise UserError(f"--{name} is for FSDP{'1' * is_for_fsdp1}, and {file.name} is not", "leave it out")


def _check_precision(file: UserFile, precision: str | None) -> None:
    """Raise UserError if the file sets another mixed precision than --precision; "no" leaves it to the program."""
    # Accelerate uses bf16 for fp8.
    precision_of_file = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(file.mixed_precision or "no")
    if None not in (precision, precision_of_file) and precision != precision_of_file:
        flag = "fp32" if precision == "no" else precision
        problem = f"{file.name} sets mixed_precision: {file.mixed_precision}, and --precision is {flag}"
        raise UserError(problem, f"leave --precision out, or set mixed_precision: {precision} in the file")


def _with_fsdp_version(file: UserFile, version: int | None) -> UserFile:
    """Return the file with --fsdp_version, its default for an open version; raise UserError if it sets another."""
    if version is None:
        return file
    if file.fsdp is None:
        raise UserError(f"--fsdp_version {version}: {file.name} is not for FSDP", "leave --fsdp_version out")
    set_version = file.fsdp.get("fsdp_version", version)
    if str(set_version) != str(version):
        problem = f"{file.name} sets fsdp_version: {clip(set_version)}, and --fsdp_version is {version}"
        raise UserError(problem, "leave one of them out")
    return dataclasses.replace(file, fsdp={**file.fsdp, "fsdp_version": version})


def _workload(options: argparse.Namespace) -> Workload:
    """Return the workload of a command line; raise UserError for flags that exclude each other."""
    # Accelerate's default version of FSDP is 1; a file with another one has been refused.
    return Workload.from_options(options, usual_fsdp_version=1)


def program_settings(workload: Workload, shape: ModelShape | None) -> ProgramSettings:
    """Return the settings of the training script; the sequence length is checked only with a shape."""
    length, target = workload.seq_length or USUAL_LENGTH, workload.target_length
    if shape is not None:
        length, target = resolve_lengths(shape, workload.seq_length, target)
    return ProgramSettings(
        sequence_length=length,
        target_length=target,
        micro_batch=workload.micro_batch,
        accumulation=workload.accumulation,
        gradient_checkpointing=bool(workload.gradient_checkpointing),
        mixed_precision=workload.precision,
        optimizer=workload.optimizer,
        reference_model=workload.with_reference,
        quantized=workload.is_quantized,
        attention=workload.attn_implementation,
        trainer=workload.trainer,
    )


def _check(options: argparse.Namespace) -> int:
    names, model, results = [options.config, *options.model], None, list[Finding]()
    last = resolve_path(names[-1])
    # Of the files of a repository the last one may be a link to nowhere, or to a folder.
    is_model = not os.path.lexists(last) if options.skip_others else not last.is_file()
    if len(names) > 1 and is_model:
        model = model_shape(names.pop(), ask_hub=options.hub)
    for name in names:
        if not options.skip_others and not resolve_path(name).is_file():
            raise UserError(f"there is no file {name}", "name files, and at most one MODEL after them")
    work, checked = program_settings(_workload(options), model), names
    work = dataclasses.replace(work, is_trainer=options.trainer)
    if options.skip_others:
        checked = [name for name in names if not is_inside(name, checked_tree(name)) or is_config(name)]
    for name in checked:
        problems = check_file(name, model, options.world_size, work, options.release)
        results += sorted(problems, key=lambda problem: problem.line)
    levels = Counter[str](finding.severity for finding in results)
    total = f"errors: {levels['error']}, warnings: {levels['warning']}"
    total += f", notes: {levels['note']}" * bool(levels["note"])
    total += f"; {len(checked)} configuration files checked,"
    total += f" {len(names) - len(checked)} other files skipped"
    if options.output_format == "github" and not options.json:
        # An annotation is one line, and is never wrapped.
        print("\n".join([*(finding.annotation for finding in results), total]))
    else:
        document = {"checked": checked, "findings": [finding.document for finding in results]}
        lines = [f"{item.file}:{item.line}: {item.severity}: {item.kind}: {item.text}" for item in results]
        print_result(options.json, lambda: document, [*lines, total])
    return 1 if levels["error"] else 3 if levels["warning"] else 0


def _document(case: ConfigCase) -> dict[str, Any]:
    box, memory = case.request.box, case.memory
    combination = stored_answer(case)
    return {
        "file": case.file.name,
        "read_from": list(case.read_from),
        "launcher": case.file.launcher,
        "distributed_type": case.file.distributed_type,
        "model": case.shape.name,
        "parameters": case.request.full_shape.parameters,
        "trained_parameters": case.request.full_shape.trained_parameters,
        "world_size": case.ranks,
        "tensor_parallel": case.request.tensor_ranks,
        "hardware": None if box.device is ANY_DEVICE else box.name,
        "fits": None if box.device is ANY_DEVICE or memory.missing else fits(memory, box),
        "precision": predict_command.precision_name(case.request),
        "zero_stage": case.stage if case.file.deepspeed is not None else None,
        "sequence_length": case.request.sample_tokens,
        "sequence_ranks": case.request.sequence_ranks,
        "target_length": case.request.target_length,
        "micro_batch": case.request.micro_batch,
        "accumulation": case.request.accumulation,
        "gradient_checkpointing": case.request.gradient_checkpointing,
        "releases": release_document(case),
        "settings": [dataclasses.asdict(cost) for cost in costs(case)],
        "findings": [finding.document for finding in case.findings],
        "combination": combination.document if combination is not None else None,
        "answers": [dataclasses.asdict(answer) for answer in find_answers(case)],
        "memory": dataclasses.asdict(memory),
        "step_s": _step_document(case),
    }


def _step_document(case: ConfigCase) -> dict[str, Any] | None:
    """Return the step with its ends; None if it is not predicted."""
    if not _is_timed(case):
        return None
    time = predict_time(case.request)
    return figure_document(time.step_s, step_ends(case.request, time))


def _is_timed(case: ConfigCase) -> bool:
    """Whether a step time is predicted."""
    return case.request.box.device is not ANY_DEVICE and not case.memory.missing and not has_features(case.request)


def _verdict(case: ConfigCase) -> str:
    """Return the peak of a rank in training, and whether it fits."""
    request, peak = case.request, device_bytes(case.memory)
    memory = dataclasses.replace(case.memory, loading=0.0)
    hardware = None if request.box.device is ANY_DEVICE else request.box
    precision, in_half = computing_type(request.precision), ""
    half = predict_command.usual_precision(hardware) if hardware else "bf16"
    if precision == "fp32" and half != "fp32":
        in_16_bits = precision_under(request.strategy, half)
        smaller = predict_memory(dataclasses.replace(request, precision=in_16_bits))
        if hardware is None:
            in_half = f" (in {half} {_about(device_bytes(smaller))})"
        elif fits(smaller, request.box, at_upper=True):
            in_half = f"; in {half} it fits: {_about(device_bytes(smaller))}"
    host = f"host {_about(memory.host_peak.value)} a node, predicted"
    if hardware is None:
        return f"Peak {_about(peak)} a GPU in {precision}{in_half}; {host}"
    if memory.missing:
        verdict = why(memory, request.box)
        return f"{verdict[0].upper()}{verdict[1:]}; {host}"
    if computes_in_bf16(request.precision) and lacks_bf16(request):
        precision = f"{precision}, which {request.box.device.name} emulates slowly"
    if fits(memory, request.box):
        bound, is_certain = device_bytes(memory, at_upper=True), fits(memory, request.box, at_upper=True)
        usable = _about(usable_bytes(request.box))
        return (
            f"{'Fits' if is_certain else 'May not fit'} in {precision}: {_peak_text(request, peak)} of {usable}"
            f" (90 % bound {rounded(bound / GIB)}){in_half * (not is_certain)}; {host}"
        )
    remedies = in_half or _remedies(request)
    return f"Does not fit in {precision}: {_excess(memory, request.box)}{remedies}; predicted"


def _peak_text(request: Request, peak: float) -> str:
    """Return the GiB of a peak, those of vLLM apart."""
    if not request.vllm_bytes:
        return rounded(peak / GIB)
    return f"{rounded((peak - request.vllm_bytes) / GIB)} + {rounded(request.vllm_bytes / GIB)} of vLLM"


def is_too_large_to_load(case: ConfigCase) -> bool:
    """Whether the weights that each GPU has while they are loaded exceed it."""
    box = case.request.box
    return box.device is not ANY_DEVICE and not case.memory.missing and case.memory.loading > usable_bytes(box)


def _remedies(request: Request) -> str:
    """Return changes of the program with which the same file fits: checkpointing, a smaller micro-batch, or both."""
    recomputed, small, remedies = {"gradient_checkpointing": True}, {"micro_batch": 1}, []
    for words, changes in (
        ("--gradient_checkpointing", recomputed),
        ("micro-batch 1", small),
        ("both --gradient_checkpointing and micro-batch 1", recomputed | small),
    ):
        need = predict_command.fitting_need(dataclasses.replace(request, **changes))
        if all(getattr(request, key) != value for key, value in changes.items()) and need is not None:
            remedies.append(f"{words} ({need})")
    return f"; it fits with {' or '.join(remedies[:2])}" if remedies else ""


def _excess(memory: MemoryUse, box: Hardware) -> str:
    """Return the few parts of the peak that exceed the device by themselves, or else why it does not fit."""
    usable, parts = usable_bytes(box), sorted(memory.device_parts.items(), key=lambda part: -part[1])
    for count in range(1, _MAX_ALONE + 1):
        size = sum(size for _, size in parts[:count])
        if size > usable and not box.is_cpu_only:
            names = " and ".join(_STATES.get(name, name) for name, _ in parts[:count])
            needs = "need" if names.endswith("s") or count > 1 else "needs"
            needed = f"alone {needs} {rounded(size / GIB)} of {_about(usable)}"
            on_host = f", and {excess}" if (excess := excess_on_host(memory, box)) else ""
            return f"{names} {needed}, all together {_about(device_bytes(memory))}{on_host}"
    return why(memory, box)


def first_line(case: ConfigCase) -> str:
    """Return what ends a run, then the peak of a rank and whether it fits."""
    verdict = _verdict(case)
    if is_too_large_to_load(case):
        loaded = rounded(case.memory.loading / GIB)
        room = _about(usable_bytes(case.request.box))
        remedy = predict_command.loading_remedy(case.request)
        problem = f"Does not fit while quantized weights are loaded: {loaded} of {room}{remedy}"
        verdict = f"{problem}. After that: {verdict[0].lower()}{verdict[1:]}"
    has_groups = case.request.tensor_group is not None or case.request.sequence_ranks > 1
    left_out = [] if has_groups else [key for _, key in group_keys(case)]
    left_out += [item.key for item in case.findings if item.rule == trainer_files.WITHOUT]
    if left_out:
        verdict = f"Without {', '.join(left_out)} (not modelled): {verdict[0].lower()}{verdict[1:]}"
    refusals = [item for item in case.findings if item.kind == "refused" and item.rule not in LATE_ERRORS]
    refused = [item.key for item in refusals if item.rule != trainer_files.BY_TRAINER]
    refused_by_trainer = [item.key for item in refusals if item.rule == trainer_files.BY_TRAINER]
    late_errors = [item.key for item in case.findings if item.rule in LATE_ERRORS]
    wrong_training = [item.key for item in case.findings if item.rule == "wrong-training" and item.kind == "conflict"]
    for problem, keys in (
        ("Refused by the engine", refused),
        ("Refused by the trainer", refused_by_trainer),
        ("Ends with an error", late_errors),
        ("Trains something else, silently", wrong_training),
    ):
        if keys:
            causes = ", ".join(dict.fromkeys(keys))
            return f"{problem}: {causes}. Apart from that: {verdict[0].lower()}{verdict[1:]}"
    return verdict


def subject_lines(case: ConfigCase) -> Iterator[str]:
    """Yield which engine, model and training the file is explained for."""
    request = case.request
    engine = f"FSDP{1 if case.file.sharding else 2}" if request.strategy.is_fsdp else request.strategy.name
    if case.file.deepspeed is not None:
        engine = f"DeepSpeed, stage {case.stage}"
    yield from case.read_from
    if not case.read_from:
        # The line of a trainer's file counts pairs.
        yield from predict_command.pair_notes(request)
    unset = " by default" if request.precision == "fp32" else ""
    ranks = f"one of {case.ranks} ranks" if case.ranks > 1 else "1 rank"
    if request.tensor_group is not None:
        ranks += f" in tensor-parallel groups of {request.tensor_ranks}"
    yield f"{case.file.name}: {engine}, {predict_command.precision_name(request)}{unset}, {ranks}"
    yield (
        f"{case.shape.name}: {request.full_shape.parameters:,} parameters{trained_text(case.shape)}, micro-batch"
        f" {request.micro_batch} x accumulation {request.accumulation}, {predict_command.tokens_text(request)}"
        f"{predict_command.program_text(request)}"
        f"{', gradient checkpointing' if request.gradient_checkpointing else ''}"
    )
    yield release_line(case)


def _page(case: ConfigCase, details: bool) -> Iterator[str | TextTable]:
    memory = case.memory
    yield first_line(case)
    yield from subject_lines(case)
    listed = [finding for finding in case.findings if details or finding.rule not in known_settings()["details"]]
    counts = Counter[str](finding.kind for finding in listed)
    counted = [
        f"{counts[kind]} {'setting' if counts[kind] == 1 else 'settings'} {words}"
        for kind, words in _FINDINGS.items()
        if counts[kind]
    ]
    yield ", ".join(counted) or "every setting takes effect"
    if listed:
        listed.sort(key=lambda finding: [*_FINDINGS].index(finding.kind))
        yield TextTable(("", ""), finding_rows(listed), indent=2)
    if (untested := untested_line(case, details=details)) is not None:
        yield untested
    if setting_costs := costs(case):
        legend = "" if all(cost.is_said for cost in setting_costs) else "; * a default, not in your file"
        yield f"\nmemory of a rank by setting (- none{legend}{'' if details else '; --details has the reasons'})"
        yield TextTable(("device", "host", "NVMe", ""), cost_rows(setting_costs, details), indent=2)
    yield peak_line(case)
    yield from (f"  {note}" for note in (memory.notes if details else case.shape.notes()))
    for answer in find_answers(case):
        yield f"\n{answer.question}\n  {answer.short}" if details else f"{answer.question} {answer.short}"
        yield from (f"  - {line}" for line in answer.because if details)


def finding_rows(listed: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return a row per finding; settings with the same text, such as those that are "auto", are one row."""
    keys: dict[tuple[str, str], list[str]] = {}
    for finding in listed:
        keys.setdefault((finding.kind, finding.says), []).append(finding.key)
    return [(kind, f"{', '.join(names)}: {says}") for (kind, says), names in keys.items()]


def peak_line(case: ConfigCase) -> str:
    """Return the peak of a rank, its 90 % bound if peaks are validated there, its moment and its larger parts."""
    parts = sorted(case.memory.device_parts.items(), key=lambda part: -part[1])
    peak = ", ".join(f"{part} {rounded(size / GIB)}" for part, size in parts if size > GIB / 20)
    has_bound = (case.memory.process_peak or case.memory.peak_reserved).high is not None
    bound = f" (90 % bound {rounded(device_bytes(case.memory, at_upper=True) / GIB)})" * has_bound
    return f"peak memory of a rank, {_about(device_bytes(case.memory))}{bound}, {case.memory.moment}: {peak}"


def costs_error(case: ConfigCase) -> str:
    """Return the bound of memory by setting as a sentence: the bound of the peak, if peaks are validated there."""
    if (case.memory.process_peak or case.memory.peak_reserved).high is None:
        return "memory by setting is computed; no peak was measured that could bound it"
    bound = rounded(device_bytes(case.memory, at_upper=True) / GIB)
    return f"memory by setting is computed, as parts of the peak, whose 90 % bound is {bound} GiB"


class _CostRow(NamedTuple):
    """A setting in the table of costs, with its largest size in bytes."""

    is_of_stage: bool
    size: float
    cells: tuple[str, ...]


def cost_rows(setting_costs: Sequence[SettingCost], details: bool) -> list[tuple[str, ...]]:
    """Return a row per cost with its reason or, without details, a row for each of the most expensive settings."""
    by_key: dict[str, list[SettingCost]] = {}
    for cost in setting_costs:
        by_key.setdefault(f"{cost.key} {cost.says if details else ''}", []).append(cost)
    rows = list[_CostRow]()
    for group in by_key.values():
        sizes = [sum(getattr(cost, place) for cost in group) for place in ("device", "host", "nvme")]
        cost = group[0]
        text = f"{cost.key.removeprefix(f'{ZERO}.')}={json.dumps(cost.value)}{'' if cost.is_said else '*'}"
        columns = ("-" if abs(size) < MIB / 2 else gib(size) for size in sizes)
        cells = (*columns, f"{text}: {cost.says}" if details else text)
        rows.append(_CostRow(cost.key == f"{ZERO}.stage", max(map(abs, sizes)), cells))
    if rows and not details:
        # The state comes first: the offloads move parts of it.
        largest = max(row.size for row in rows)
        rows = [row for row in rows if row.size >= _MIN_COST * largest]
        rows = sorted(rows, key=lambda row: (not row.is_of_stage, -row.size))[:_MAX_COST_ROWS]
    return [row.cells for row in rows]


def gib(size: float) -> str:
    return f"{format_number(size / GIB)} GiB" if abs(size) >= GIB / 2 or not size else f"{size / MIB:.0f} MiB"


def _about(size: float) -> str:
    return f"{rounded(size / GIB)} GiB"


# Memory that each setting accounts for.


def costs(case: ConfigCase) -> list[SettingCost]:
    """Return the memory that each setting accounts for, the largest first."""
    if case.file.deepspeed is None:
        return []
    setting_costs = [*_stage_costs(case), *(_stage3_costs(case) if case.stage == 3 else ()), *_offload_costs(case)]
    return sorted(setting_costs, key=lambda cost: -(cost.device + cost.host + cost.nvme))


def _cost(case: ConfigCase, key: str, reason: str, device: float = 0, host: float = 0, nvme: float = 0) -> SettingCost:
    value: Any = case.zero
    for part in key.split("."):
        value = value[part]
    names = {key, key.removeprefix("stage3_")}
    # A deprecated switch sets an offload's device, and other settings by an older name.
    now = key.removesuffix(".device")
    names |= {old for old, entry in known_settings()[ZERO].items() if entry.get("is_now") == now}
    is_said = {f"{ZERO}.{name}" for name in names} & {*case.file.explicit_keys}
    return SettingCost(f"{ZERO}.{key}", value, bool(is_said), device, host, nvme, reason)


def bucket_bytes(case: ConfigCase) -> float:
    """Return the device memory that buckets reserve, in bytes, full or not."""
    settings = case.request.settings
    if case.stage == 0 or not settings.contiguous_gradients:
        return 0.0
    buckets = 2 if settings.overlap_comm and case.stage < 3 else 1
    return float(buckets * settings.reduce_bucket_size * case.weight)


def _stage_costs(case: ConfigCase) -> Iterator[SettingCost]:
    # Without offloads, whose own rows have the state that they move.
    state, count = case.at(offload_optimizer=None, offload_param=None).state, case.request.full_shape.parameters
    parameters, gradients, optimizer = (
        size / count for size in (state.params_device, state.grads_device, state.optimizer_device)
    )
    reason = (
        f"for each of {count:,} parameters a rank's device has {parameters:.4g} bytes of weights, {gradients:.4g} of"
        f" gradients and {optimizer:.4g} of optimizer"
    )
    yield _cost(case, "stage", reason, state.device)
    if case.stage == 0:
        return
    size, reserved = case.zero["reduce_bucket_size"], bucket_bytes(case)
    reason = f"{size:,.0f} elements of {case.weight} bytes are reserved, full or not"
    if reserved > size * case.weight:
        reason += ", twice: overlap_comm fills one while the other is reduced"
    if size >= case.shape.parameters:
        reason += "; all of this model's gradients fit, so they are there at once and no gradient is released early"
    yield _cost(case, "reduce_bucket_size", reason, reserved)
    largest = case.largest.elements
    # Stage 1 keeps all gradients unpartitioned, which its own row has.
    if largest > size and case.stage > 1:
        reason = f"the gradient of {case.largest.name} ({largest:,}) is larger, and stays unpartitioned outside it"
        yield _cost(case, "reduce_bucket_size", reason, float(largest * case.weight))


def _stage3_costs(case: ConfigCase) -> Iterator[SettingCost]:
    elements, weight = case.request.stored.parameters, case.weight
    persistent = sum(param.elements for param in persistent_params(case.request))
    threshold = case.zero["stage3_param_persistence_threshold"]
    reason = f"tensors of up to {threshold:,.0f} elements stay unpartitioned, {persistent:,} elements of this model"
    yield _cost(case, "stage3_param_persistence_threshold", reason, persistent * weight * (1 - 1 / case.data_ranks))
    released = case.at(stage3_max_live_parameters=0, stage3_max_reuse_distance=0)
    gathers, least = simulate_gathers(case.request), simulate_gathers(released.request).gathered_at_once
    reason = (
        f"{gathers.gathered_at_once:,} elements are gathered at once: the current layer, prefetched ones, and those"
        " reused soon; the figure includes the buffers that they are copied from"
    )
    if least < gathers.gathered_at_once:
        reason += f"; {least:,} elements with this and stage3_max_live_parameters at 0, and each is gathered twice"
    yield _cost(case, "stage3_max_reuse_distance", reason, gathers.max_live_elements * weight)
    if (group := min(case.zero["zero_hpz_partition_size"], case.ranks)) > 1:
        reason = f"each {group:,.0f} ranks have a secondary partition of all weights"
        yield _cost(case, "zero_hpz_partition_size", reason, elements * weight / group)
    if case.zero["stage3_gather_16bit_weights_on_model_save"]:
        reason = "when the model is saved, the first rank has all of its weights in host memory"
        yield _cost(case, "stage3_gather_16bit_weights_on_model_save", reason, host=elements * weight)
    # If the optimizer is offloaded, a rank's device has no such gradients.
    if not case.offload("offload_optimizer"):
        groups = sub_groups(case.request)
        reason = f"a step makes fp32 gradients of one of {len(groups)} sub-groups at a time, {max(groups):,} elements"
        yield _cost(case, "sub_group_size", reason, max(groups) * FP32_BYTES)


def _offload_costs(case: ConfigCase) -> Iterator[SettingCost]:
    def moved(before: ConfigCase, after: ConfigCase) -> tuple[float, float, float]:
        old, new = before.state, after.state
        return new.device - old.device, new.host - old.host, new.nvme - old.nvme

    optimizer = case.offload("offload_optimizer")
    if optimizer is not None and case.stage:
        whole_optimizer = case.at(offload_param=None, offload_optimizer={**optimizer, "ratio": 1.0})
        reason = "the optimizer is moved off the device, and gradients go to the same place"
        before = whole_optimizer.at(offload_optimizer=None)
        yield _cost(case, "offload_optimizer.device", reason, *moved(before, whole_optimizer))
        groups = sub_groups(case.request)
        if optimizer["device"] == "nvme" and case.stage == 3:
            reason = f"these buffers of the largest sub-group, {max(groups):,} elements in fp32, are pinned host memory"
            size = optimizer["buffer_count"] * max(groups) * FP32_BYTES
            yield _cost(case, "offload_optimizer.buffer_count", reason, host=size)
        elif optimizer["ratio"] < 1 and case.stage == 3:
            remaining = int((1 - optimizer["ratio"]) * len(groups))
            reason = f"whole sub-groups move, {remaining} of a rank's {len(groups)} stay on the device"
            figures = moved(whole_optimizer, case.at(offload_param=None))
            yield _cost(case, "offload_optimizer.ratio", reason, *figures)
    parameters = case.offload("offload_param")
    if parameters is not None and case.stage == 3:
        reason = "this rank's shard of the weights is moved off the device"
        yield _cost(case, "offload_param.device", reason, *moved(case.at(offload_param=None), case))
        if parameters["device"] == "nvme":
            reason = f"these buffers of {parameters['buffer_size']:,.0f} elements are pinned host memory"
            size = parameters["buffer_count"] * parameters["buffer_size"] * case.weight
            yield _cost(case, "offload_param.buffer_count", reason, host=size)


# Answers to frequent questions.


def find_answers(case: ConfigCase) -> Iterator[Explanation]:
    """Yield the answers to the frequent questions that apply to this case."""
    if _is_timed(case):
        yield _explain_time(case)
    if case.stage in (1, 2) and case.data_ranks > 1:
        yield _compare_stages(case, 1, 2)
    if case.stage and case.data_ranks > 1:
        yield _compare_stages(case, 2, 3)
    if case.stage == 3:
        yield from _explain_loading(case)
    if case.generated_tokens:
        yield _explain_generation(case, case.generated_tokens)
    if case.file.distributed_type != "NO" and case.request.strategy.name != "tp":
        yield _compare_ranks(case)
    if case.stage >= 2 and case.offload("offload_optimizer"):
        yield _compare_host_memory(case)


def _explain_time(case: ConfigCase) -> Explanation:
    """Name the parts of a step's time, and the time with a lower stage or without an offload."""
    request, (time, text) = case.request, _time_text(case, has_ends=True)
    parts = sorted(time.parts.items(), key=lambda part: -part[1])
    shares = [f"{name.replace('_', ' ')} {rounded_seconds(size)}" for name, size in parts if size > parts[0][1] / 50]
    short = f"{text}: {', '.join(shares)}"
    short += "".join(f"; {alternative}" for alternative in _other_times(case, time.step_s.value))
    short += "".join(f"; {note}" for note in network_notes(request.box))
    because = list(time.notes[1:])
    if case.ranks > 1 and not request.box.is_cpu_only:
        rate = bus_bandwidth_gb_per_s(request.box, "all_gather", request.shape.parameters * case.weight)
        slower = "PCIe, NCCL_P2P_DISABLE=1, GPUs of several kinds and slow networks lower it"
        because.append(f"ranks communicate at {rounded(rate)} GB/s; {slower} (--bus_gb_per_s, --network_gb_per_s)")
    return Explanation("What takes the time of a step?", short, tuple(because), dict(parts))


def _other_times(case: ConfigCase, seconds: float) -> Iterator[str]:
    """Yield the time without an offload or at a lower stage; of several machines what takes less, with its memory."""
    request = case.request
    if request.strategy.offloads:
        bare = case.at(offload_param=None, offload_optimizer=None)
        yield f"without an offload {_time_text(bare)[1]}, {_about(device_bytes(bare.memory))}"
    elif case.stage == 3:
        yield f"stage 2 {_time_text(case.at(stage=2))[1]}"
    machines, group = request.box.nodes, request.box.gpus_per_node
    if machines == 1 or request.tensor_ranks > group:
        return
    if case.stage == 3 and group > 1 and request.tensor_group is None and case.zero["zero_hpz_partition_size"] == 1:
        within = case.at(zero_hpz_partition_size=group)
        time, text = _time_text(within)
        if time.step_s.value < (1 - _MIN_GAIN) * seconds:
            yield f"zero_hpz_partition_size={group} {text}, {_about(device_bytes(within.memory))}"
    alone = dataclasses.replace(request, box=dataclasses.replace(request.box, nodes=1))
    one_machine = dataclasses.replace(case, request=alone)
    time, text = _time_text(one_machine)
    if time.step_s.value * machines < seconds:
        memory = _about(device_bytes(one_machine.memory))
        yield f"faster on one machine alone, {text} for 1/{machines} of the batch, {memory}"
    if request.shape.active_experts and (tokens := _expert_tokens_bytes(request)) < sent_bytes(request):
        sizes = f"at most {rounded(tokens / 1e9)} GB of tokens in place of the experts' weights and gradients"
        yield f"expert parallelism, which is not predicted, sends {sizes}"


def _expert_tokens_bytes(request: Request) -> float:
    """Return the bytes that a rank sends at most in a step if each expert has its own rank: a token's states reach its
    experts in each layer and return, and so do their gradients; a recomputed layer sends the states again."""
    shape = request.shape
    tokens = request.micro_batch * request.accumulation * request.sequence_length
    states = tokens * shape.active_experts * shape.hidden * request.computing_bytes * shape.layers
    exchanges = 6 if request.gradient_checkpointing else 4
    return states * exchanges * (request.box.ranks - 1) / request.box.ranks


def _time_text(case: ConfigCase, *, has_ends: bool = False) -> tuple[StepTime, str]:
    request = case.request
    time, sent = predict_time(request), sent_bytes(request)
    sends = f" and {rounded(sent / 1e9)} GB sent by a rank" if sent else ""
    if sent and request.box.nodes > 1:
        sends += f" ({rounded(leaving_bytes(request) / 1e9)} leave each node)"
    ends = predict_command.step_range_text(request, time) if has_ends else ""
    return time, f"{rounded_seconds(time.step_s.value)}{ends}{sends}"


def _explain_loading(case: ConfigCase) -> Iterator[Explanation]:
    """Compare loading a model in shards, as stage 3 does, and whole in each process."""
    shards, full = (variant.memory.host_parts["load"] for variant in (case, case.at(stage=2)))
    because = (
        "from_pretrained creates shards only if transformers has the configuration: create TrainingArguments, or"
        " HfDeepSpeedConfig in a custom loop, before the model, and keep the object",
        f"otherwise each of a node's {case.request.box.gpus_per_node} processes creates the whole model, in fp32 or in"
        " the checkpoint's type, next to the weights that it reads; more GPUs in a node do not help",
    )
    short = f"{gib(shards)} a node; {gib(full)} if the model is created before TrainingArguments"
    if full > shards:
        figures = {"shards": shards, "whole": full}
        yield Explanation("How much host memory does loading need?", short, because, figures)


def _explain_generation(case: ConfigCase, tokens: int) -> Explanation:
    """Compare gathering the weights for each token and once."""
    shape, box, batch = case.shape, case.request.box, case.request.micro_batch
    weights = float(case.request.stored.parameters * case.weight)
    cache = 2.0 * 2 * shape.layers * shape.key_value_heads * shape.head_dim * batch * tokens
    short = f"a KV cache of {gib(cache)} for {batch} x {tokens:,} tokens in 16 bits"
    figures = {"weights": weights, "cache": cache}
    if case.vllm is not None:
        where = "these GPUs" if case.vllm == "colocate" else "its server"
        short = f"vLLM generates on {where}, with its own weights: {gib(weights)} leave the training after each step"
        if case.stage == 3 and not shape.lora_rank:
            largest = gib(max(param.elements for param in shape.params) * float(case.weight))
            short += f", gathered one parameter after another, at most {largest} at once"
    elif case.stage == 3 or case.request.strategy.is_fsdp:
        short = f"each token gathers {gib(weights)}; if that is gathered once (TRL's default), as much more and {short}"
        if box.device is not ANY_DEVICE:
            # Each layer is gathered by its hooks, and its kernels are launched.
            per_token = calls_s(box, "all_gather", weights, weights / (shape.layers + 1))
            launches = shape.layers * FITTED.launch_s + len(shape.params) * FITTED.gather_hook_s
            figures["gather_s"] = tokens * (per_token + launches)
            short = f"at least {figures['gather_s'] / 60:,.1f} min for each batch: {short}"
    because: tuple[str, ...] = (
        "a sharded model gathers each layer for each token of a batch, with TRL's ds3_gather_for_generation once (since"
        " 0.15.0 in GRPO)",
        "vLLM next to the training (TRL's use_vllm; vllm_mode=colocate since 0.18.0) keeps a copy of the weights that"
        " ZeRO does not shard; vllm_enable_sleep_mode, since 0.23.0, moves it to the host during a step",
    )
    if case.stage == 3 and shape.lora_rank:
        # sync_weights in trl/generation/vllm_generation.py.
        gathered = f"all weights gathered on each rank, {gib(weights)} next to the rest"
        parts = "ms-swift does it in parts with --move_model_batches"
        because = (*because, f"with LoRA TRL merges adapters for it with {gathered}; {parts}")
    return Explanation(f"What does generating {tokens:,} tokens cost?", short, because, figures)


def _at_stage(case: ConfigCase, stage: int, ranks: int | None = None, **zero: Any) -> ConfigCase:
    """Return the case at a stage, without offloading parameters or a part of the optimizer, as stage 2 cannot."""
    optimizer = case.offload("offload_optimizer")
    zero = {"offload_param": None, "offload_optimizer": optimizer and {**optimizer, "ratio": 1.0}, **zero}
    return case.at(ranks, stage=stage, **zero)


def _compared_text(case: ConfigCase) -> str:
    """Return the settings of the file that a comparison of stages leaves out, with a leading comma."""
    optimizer = case.offload("offload_optimizer")
    texts = ["without offload_param"] if case.offload("offload_param") is not None else []
    if optimizer and optimizer.get("ratio", 1.0) != 1.0:
        texts.append("with offload_optimizer.ratio=1")
    return "".join(f", {text}" for text in texts)


def _compare_stages(case: ConfigCase, lower: int, higher: int) -> Explanation:
    at_lower, at_higher = (_at_stage(case, stage, case.ranks).memory for stage in (lower, higher))
    before, after = device_bytes(at_lower), device_bytes(at_higher)
    if _about(after) == _about(before):
        short = f"as much: {_about(after)}"
    else:
        short = f"{'yes' if after > before else 'no'}: {_about(after)}, stage {lower} {_about(before)}"
    short += _compared_text(case)
    figures: dict[str, float] = {f"stage_{lower}": before, f"stage_{higher}": after}
    count = case.ranks
    while after >= before and count < _MAX_RANKS and "less_from_ranks" not in figures:
        count *= 2
        lower_bytes, higher_bytes = (device_bytes(_at_stage(case, stage, count).memory) for stage in (lower, higher))
        if higher_bytes < lower_bytes:
            short += f"; no from {count} ranks"
            figures["less_from_ranks"] = count
    parts = ("parameters", "gradients", "optimizer", "buffers")
    shares = (f"{part} {gib(at_lower.device_parts[part])} and {gib(at_higher.device_parts[part])}" for part in parts)
    reasons = _stage_reasons(_at_stage(case, higher))
    because = (f"at the peaks of stage {lower} and stage {higher}: {', '.join(shares)}", *reasons)
    return Explanation(f"Does stage {higher} need more memory than stage {lower}?", short, because, figures)


def _stage_reasons(case: ConfigCase) -> Iterator[str]:
    """Yield what decides whether the higher stage of a comparison saves memory, from the case at that stage."""
    elements, bucket = case.shape.parameters, case.zero["reduce_bucket_size"]
    if case.stage == 2:
        parts = case.memory.device_parts
        sizes = (elements * case.weight, bucket_bytes(case), parts["activations"] + parts["logits"])
        saved = "stage 2 shards {} of gradients as buckets of {} fill; few exist where activations and logits need {}"
        yield saved.format(*map(gib, sizes))
    elif gathered := (gathers := simulate_gathers(case.request)).gathered_at_once:
        yield (
            f"stage 3 gathers {gathered:,} elements at once, {gathered / elements:.1%} of the model:"
            " prefetching goes ahead up to stage3_max_live_parameters, and stage3_max_reuse_distance keeps reused"
            f" ones; with their buffers that is {gib(gathers.max_live_elements * case.weight)}"
        )
    largest = case.largest.elements
    if bucket >= elements:
        yield f"all of this model's gradients fit into reduce_bucket_size ({bucket:,.0f}), so neither stage saves any"
    elif largest > bucket:
        yield (
            f"{case.largest.name} ({largest:,}) does not fit into reduce_bucket_size ({bucket:,.0f}): its gradient"
            f" stays unpartitioned, {gib(largest * case.weight)}; a bucket of {largest:,} has room for it"
        )
    if case.stage == 3 and (fixed := sum(param.elements for param in persistent_params(case.request))):
        yield f"{fixed:,} elements in small tensors stay unpartitioned, {gib(fixed * case.weight)} on every rank"


def _compare_ranks(case: ConfigCase) -> Explanation:
    """Compare the peak at half, the same and twice the number of ranks."""
    half = max(case.data_ranks // 2, 1) * case.request.tensor_ranks
    counts = sorted({half, case.ranks, 2 * case.ranks})
    memories = {count: case.at(count).memory for count in counts}
    now, twice = memories[case.ranks], memories[2 * case.ranks]
    fixed = ", ".join(
        f"{part} {gib(size)}"
        for part, size in sorted(now.device_parts.items(), key=lambda item: -item[1])
        if size > 2**20 and twice.device_parts.get(part, 0) > _FALLS_TO * size
    )
    activations = "activations depend on the micro-batch of one rank, which more ranks do not change"
    because = [f"parts that do not fall with more ranks: {fixed}", activations]
    bucket = case.zero.get("reduce_bucket_size", 0)
    if case.stage and bucket >= case.shape.parameters:
        because.append(f"the bucket is {bucket:,.0f} elements wide for any model and number of ranks")
    if not case.stage and not case.request.strategy.is_fsdp:
        because.append("without ZeRO every rank has a copy of the whole state")
    if case.request.strategy.mesh is not None:
        because.append(f"each replica has {case.request.ranks_per_replica} ranks: more ranks are more replicas")
    peaks = {count: device_bytes(memory) for count, memory in memories.items()}
    fraction = peaks[2 * case.ranks] / peaks[case.ranks]
    falls = "hardly" if fraction < 1 else "no"
    if fraction < _FALLS:
        falls = "yes"
    short = ", ".join(f"{count} rank{'s'[: count > 1]} {gib(peak)}" for count, peak in peaks.items())
    short = f"{falls}: {short}"
    figures = {f"ranks_{count}": peak for count, peak in peaks.items()}
    return Explanation("Does memory per rank fall with more ranks?", short, tuple(because), figures)


def _compare_host_memory(case: ConfigCase) -> Explanation:
    optimizer = {**(case.offload("offload_optimizer") or {}), "device": "cpu", "ratio": 1.0}
    at_2, at_3 = (_at_stage(case, stage, offload_optimizer=optimizer).memory for stage in (2, 3))
    peaks = [at_2.host_peak.value, at_3.host_peak.value]
    per_node, largest, phases = case.request.box.gpus_per_node, case.largest.elements, ("load", "train", "save")
    because = (
        ", ".join(f"{name} {gib(at_2.host_parts[name])} and {gib(at_3.host_parts[name])}" for name in phases),
        f"outside stage 3 each of a node's {per_node} processes creates the full model, assumed in fp32"
        f" ({gib(4 * case.request.full_shape.parameters)} each; transformers 5 loads in the checkpoint's type)",
        f"stage 2 has a pinned copy of the largest tensor, {gib(largest * case.weight)} a rank, next to its shard and,"
        " with accumulation, the gradients of its shard as full tensors",
        "pinned memory is allocated in powers of two, so a tensor just above one needs twice as much",
        f"state alone is {gib(at_2.host_parts['state'])} and {gib(at_3.host_parts['state'])} on a node",
    )
    compared = _compared_text(case) or " on a node"
    short = f"{'yes' if peaks[0] > peaks[1] else 'no'}: {gib(peaks[0])} and {gib(peaks[1])}{compared}"
    question = "Does offload need more host memory with stage 2 than with stage 3?"
    return Explanation(question, short, because, {"stage_2": peaks[0], "stage_3": peaks[1]})
