"""`study advise`: recommend a strategy for a model on given hardware, with its confidence, what-ifs and files."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from study.advisor import advise, measured, predict_command, training
from study.advisor.advice_answer import AdviceAnswer, Recommendation
from study.advisor.advice_text import page
from study.advisor.advise import Option
from study.advisor.advised_files import AdvisedFiles, write_files
from study.advisor.fitted import fit_settings, usual_precision
from study.advisor.longer import LongerSamples
from study.advisor.training import Amount, WholeTraining
from study.advisor.workload import Workload
from study.config.errors import UserError
from study.config.flags import changed_flags
from study.config.printing import print_result, progress_line
from study.host.folders import folder_argument
from study.predictor.calibration import PredictedRun
from study.predictor.hardware import Hardware, HardwareFlags, parse_int, real
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.shape import resolve_lengths

EPILOG = """\
Each strategy of accelerate_configs/ is tried with its settings fitted to the model, with and without gradient
checkpointing, at the largest micro-batch that fits by the predicted peak. Nothing is run, and nothing is fetched
without --hub. docs/advice.md has the errors and the limits of the predictions.
"""
# Default: at least this many samples per optimizer step, with one of these numbers per rank.
_BATCH, _SHARES = 64, (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


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
    # Only an answer that prints them reads the records, which takes as long as the advice.
    reads_records = options.json or options.details
    answer = make_answer(options, nearest if reads_records else None, read_run)
    has_all = options.details or answer.files is not None
    print_result(options.json, lambda: answer.document, page(answer, options.details), has_all)
    return 0 if answer.recommendation else 1


def make_answer(
    options: argparse.Namespace,
    nearest: Callable[[Request], Iterable[str]] | None = None,
    read_run: measured.ReadRun | None = None,
) -> AdviceAnswer:
    """Return the answer to a parsed command line, and write its files; raise UserError if its question is
    impossible."""
    # The first question about a class outside the table traces it, before anything is compared.
    with _without_collections(), progress_line("comparing strategies, micro-batches and settings ..."):
        flags = AdviseFlags.from_options(options)
        question = build_advice_request(flags)
        runs = flags.runs.collect(functools.partial(_measured_request, question), read_run)
        advice = advise.advise(_corrected(question, runs))
        recommendation = Recommendation.find(advice)
        best, plain = advice.best, recommendation and recommendation.plain
        return AdviceAnswer(
            advice=advice,
            recommendation=recommendation,
            how_sure=advise.explain_best(advice),
            adapters=[*advise.adapters_lines(advice)],
            safer=[*advise.safer_lines(advice)],
            what_ifs=[*advise.sensitivity_lines(advice)],
            longer=LongerSamples.find(advice),
            optimizer_on_host=advise.offload_line(advice),
            nearest=[*nearest(best.request)] if nearest and best else [],
            measured=runs,
            training=whole_training(flags, best),
            files=_written_files(flags, best, options.output),
            nvme_path=flags.nvme_path,
            predict_command=predict_words(best.request, flags) if best else "",
            plain_predict_command=predict_words(plain.request, flags) if plain else "",
        )


def _written_files(flags: AdviseFlags, best: Option | None, folder: Path | None) -> AdvisedFiles | None:
    """Write the files of the recommendation to the folder of --output, if there are both."""
    if best is None or folder is None:
        return None
    return write_files(best, folder, flags.nvme_path, flags.workload.model_name_or_path)


def whole_training(flags: AdviseFlags, option: Option | None) -> WholeTraining | None:
    """Return the training that the flags name, with the steps of an option; None without one, or if it does not fit."""
    if flags.amount is None or option is None or option.time is None or not option.fits:
        return None
    return WholeTraining.predict(flags.amount, option.request, option.time, flags.price_per_gpu_hour)


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
        precision=precision,
        gradient_checkpointing=workload.gradient_checkpointing,
        global_batch=batch,
        is_default_batch=flags.global_batch_size is None and not (workload.micro_batch or workload.accumulation),
        micro_batch=workload.micro_batch or (workload.accumulation and batch // data_ranks // workload.accumulation),
        price_per_gpu_hour=flags.price_per_gpu_hour,
        fsdp_version=workload.fsdp_version or Request.fsdp_version,
        tensor_ranks=tensor_ranks,
        **vars(workload.program(target)),
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
