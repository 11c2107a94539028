"""`study explain CONFIG MODEL`: memory per rank by setting of a user's config, and settings without effect."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import shlex

from study.advisor import predict_command, trainer_files, trainer_groups, trl_files
from study.advisor.explain_case import ConfigCase, ProgramSettings, resolve
from study.advisor.explain_check import CheckedFiles, check_file, checked_tree, in_file, is_config
from study.advisor.explain_findings import findings
from study.advisor.explain_releases import (
    parse_releases,
    with_releases,
    with_trainer,
)
from study.advisor.explanation import ConfigExplanation
from study.advisor.explanation_text import page
from study.advisor.user_settings import Finding, UserFile, is_inside, read_user_file
from study.advisor.workload import FSDP1_UNITS, FSDP_FLAGS, Workload, WorkloadError
from study.config.errors import UserError, clip
from study.config.printing import print_result, progress_line
from study.host.folders import resolve_path
from study.predictor.hardware import HardwareFlags, parse_int
from study.predictor.lora_targets import ALL_LINEAR, is_pattern
from study.predictor.models import model_shape
from study.predictor.shape import USUAL_LENGTH, ModelShape, resolve_lengths
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
_COUNT = functools.partial(parse_int, most=1_000_000, what="number")
# Flags with a default, which a trainer's file replaces.
_WITH_DEFAULT = ("peft", "optimizer", "quantization", "attn_implementation", "loss_kernel")


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
        explanation = ConfigExplanation.explain(read_case(options))
    print_result(options.json, lambda: explanation.document, page(explanation, options.details), options.details)
    return 1 if any(finding.kind == "refused" for finding in explanation.case.findings) else 0


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
        micro_batch=workload.micro_batch,
        accumulation=workload.accumulation,
        gradient_checkpointing=bool(workload.gradient_checkpointing),
        mixed_precision=workload.precision,
        **vars(workload.program(target)),
    )


def _check(options: argparse.Namespace) -> int:
    """Print the findings about files, and return the exit status."""
    checked = check_files(options)
    if options.output_format == "github" and not options.json:
        # An annotation is one line, and is never wrapped.
        print("\n".join(checked.annotations()))
    else:
        print_result(options.json, lambda: checked.document, checked.page())
    return checked.status


def check_files(options: argparse.Namespace) -> CheckedFiles:
    """Return the findings about the files of a command line; raise UserError if one of them is not there."""
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
    return CheckedFiles(checked, len(names) - len(checked), results)
