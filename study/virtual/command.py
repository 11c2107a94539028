"""`study virtual`: measure one rank of N under one or several strategies; extrapolate over depth if it does not fit."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from study.config import flags
from study.config.errors import ModelTooLarge, Unsupported, UserError
from study.config.printing import TextTable, print_result
from study.config.strategies import STUDIED_STRATEGIES, read_strategy
from study.config.text import format_bytes
from study.host.folders import folder_argument, resolve_path
from study.host.machine import Machine, detect_machine
from study.host.stacks import check_training_packages
from study.records import lock, outcome
from study.records.directory import read_json, read_run
from study.records.schema import STATE_KINDS, RecordError
from study.records.virtual_summary import Summary, summarize_record, total
from study.sweep.cell import Cell
from study.sweep.launch import lock_sweep_directory, run_cell
from study.virtual.extrapolation import extrapolate
from study.workloads.presets import FAMILY_OF_TASK, Preset, find_model, find_preset

EPILOG = """\
One process runs the real Accelerate and the real engine on PyTorch's fake process group. The rank's memory and
communication are real. Received data is not, so there are no losses. Flags of study/train.py may be added, except
those of evaluations, checkpoints and profiles. The equivalent launch: accelerate launch --config_file
accelerate_configs/zero3.yaml --num_processes 1 study/train.py --virtual_world_size 64
The default micro-batch is one sample of 16 tokens. Peaks depend on it; model state and communication do not.
"""
LEGEND = """\
GB are 1e9 bytes, GiB 2**30; ?: not linear in the number of layers. Ring bytes: bytes that one rank sends with ring
collectives, as in NCCL; payload counts an all-reduce once, and a gather by its output. Losses of a virtual rank are
meaningless and are not recorded."""
TIME_LIMIT_S = 3600.0
# Here bf16 is the papers' mixed precision: bf16 weights and gradients with fp32 master weights, as in bf16-engine.
# Autocast over fp32 weights, which is bf16 in study/train.py, is bf16-autocast here.
PRECISIONS = (*get_args(flags.Precision), "bf16-autocast")
OWN_FLAGS = {"task", "precision", "virtual_world_size", "virtual_rank", "output_dir", "overwrite_output_dir"}
# Depths to extrapolate from; the first that fit are used.
_DEPTHS = ((2, 4, 6), (2, 3, 4), (1, 2, 3))


@dataclasses.dataclass(frozen=True)
class VirtualRequest:
    """Parsed command line of `study virtual`."""

    strategies: tuple[str, ...]
    # Its precision is one of PRECISIONS.
    config: flags.RunConfig
    depths: tuple[int, int, int] | None
    runs_dir: Path
    box: Machine

    def cell(self, strategy: str, model: str | None = None) -> Cell:
        # Of PRECISIONS, which has a name more than a run.
        requested_precision: str = self.config.precision
        precision = self.config.precision
        if requested_precision == "bf16":
            # Without DeepSpeed bf16 is always autocast.
            precision = "bf16-engine" if read_strategy(strategy).deepspeed else "bf16"
        elif requested_precision == "bf16-autocast":
            precision = "bf16"
        name = model or self.config.model_name_or_path
        requested = dataclasses.replace(self.config, precision=precision, model_name_or_path=name)
        config = flags.resolve_config(requested, accelerator_visible=self.box.gpus > 0)
        flags.check_virtual_run_flags(config)
        read_strategy(strategy).check_engine_flags(config)
        requested = dataclasses.replace(requested, scale=config.scale)
        cell = Cell(strategy, 1, config, requested, repeat=1, time_limit_s=TIME_LIMIT_S)
        cell.plan  # noqa: B018 - raises UserError for a batch that does not divide
        return cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--strategy", required=True, metavar="S", help="a strategy, a comma-separated list, or all")
    add("--world_size", required=True, type=int, metavar="N", dest="virtual_world_size", help="world size of the job")
    add("--rank", type=int, default=0, metavar="R", dest="virtual_rank", help="rank to run; shards can be uneven")
    add("--task", choices=get_args(flags.Task), help="training task; default: the task of the model")
    precision = "bf16: the papers' mixed precision if the strategy has it; bf16-autocast: autocast over fp32 weights"
    add("--precision", choices=PRECISIONS, help=precision)
    fit = "depths: extrapolate linearly from the first two, and check with the third"
    add("--layers_fit", type=_depths, metavar="A,B,C", help=fit)
    add("--json", action="store_true", help="print only one JSON document on stdout")
    runs_dir = "folder of records; a repeated run replaces its record, even if it fails"
    add("--runs_dir", type=folder_argument, default=Path("runs/virtual"), metavar="DIR", help=runs_dir)
    flags.add_flags(parser, without=OWN_FLAGS)


def read_request(options: argparse.Namespace) -> VirtualRequest:
    """Parse and check the whole request before the first of several runs; raises UserError."""
    model = options.model_name_or_path
    if model == "":
        raise UserError("--model_name_or_path is empty", "name a model, or leave it out")
    flags.check_virtual_rank(options.virtual_world_size, options.virtual_rank, "--world_size", "--rank")
    if options.task is None:
        preset = find_preset(model or "")
        family: str | None = preset.family if preset else None
        if model and preset is None:
            with suppress(RecordError):
                kind = read_json(resolve_path(model) / "config.json").get("model_type")
                family = "sequence-classification" if kind == "bert" else "causal-lm"
        tasks = (task for task, task_family in FAMILY_OF_TASK.items() if task_family == family)
        options.task = next(tasks, flags.RunConfig.task)
    config = _with_absolute_paths(flags.config_from_flags(options))
    runs_dir = options.runs_dir.absolute()
    request = VirtualRequest(_strategies(options.strategy), config, options.layers_fit, runs_dir, detect_machine())
    for cell in map(request.cell, request.strategies):
        for depth in request.depths or ():
            _find_preset(cell).with_layers(depth)
    return request


def _find_preset(cell: Cell) -> Preset:
    model = find_model(cell.config.model_name_or_path)
    if not isinstance(model, Preset):
        raise UserError(f"the number of layers of {model} is fixed", "extrapolate a preset instead")
    return model


def _with_absolute_paths(config: flags.RunConfig) -> flags.RunConfig:
    """Return the config with absolute paths: runs start in the repository, not in the current folder."""
    changed = {}
    for name in ("model_name_or_path", "tokenizer_name", "data", "nvme_path"):
        value = getattr(config, name)
        is_preset = name == "model_name_or_path" and find_preset(value or "")
        has_no_path = is_preset or value in (None, "", "hub", "builtin", "reviews", flags.RunConfig.nvme_path)
        # nvme_path may not exist yet.
        if not has_no_path and (name == "nvme_path" or resolve_path(value).exists()):
            changed[name] = str(resolve_path(value).absolute())
    return dataclasses.replace(config, **changed)  # type: ignore[arg-type]  # a str each


def _strategies(text: str) -> tuple[str, ...]:
    studied = [name for name in STUDIED_STRATEGIES if name != "single"]
    names = [name for part in text.split(",") for name in (studied if part == "all" else [part])]
    if "single" in names:
        problem = "--strategy single has one rank and cannot run as a virtual rank"
        raise UserError(problem, "use ddp, zero0 to zero3, or fsdp2")
    for name in names:
        read_strategy(name)
    return tuple(dict.fromkeys(names))


def _depths(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d{0,99},[1-9]\d{0,99},[1-9]\d{0,99}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not three depths such as 2,4,6")
    first, second, third = (int(part) for part in text.split(","))
    if not first < second < third:
        raise argparse.ArgumentTypeError(f"{text} is not increasing")
    return first, second, third


class VirtualRunFailed(Exception):
    """A virtual rank that started and failed."""

    def __init__(self, ending: outcome.Outcome):
        self.ending = ending
        super().__init__(f"{ending.state}: {ending.reason}")


def run(options: argparse.Namespace) -> int:
    """Run the virtual ranks and print their figures; return exit status 1 if one of them failed."""
    request = read_request(options)
    check_training_packages()
    summaries: list[Summary] = []
    failed: list[Summary] = []
    state: str
    with lock_sweep_directory(request.runs_dir):
        for strategy in request.strategies:
            try:
                summaries.append(_summary(request, strategy))
                continue
            except VirtualRunFailed as failure:
                state, reason = failure.ending.state, failure.ending.reason
                message = f"{state}: {failure.ending.why}"
            except UserError as refusal:
                if len(request.strategies) == 1:
                    raise
                # If one strategy is rejected, the others still run.
                state = "unsupported" if isinstance(refusal, Unsupported) else "refused"
                reason, message = refusal.problem, f"{state}: {refusal.problem}. To fix it: {refusal.fix}."
            except KeyboardInterrupt:
                state, reason = "interrupted", "stopped from the keyboard"
                message = f"{reason}; all of its processes have ended"
            _print_status(f"{strategy}: {message}")
            failed.append({"strategy": strategy, "state": state, "reason": reason})
            if state == "interrupted":
                break
    document = {"runs": summaries, "failed": failed}
    if len(request.strategies) == 1:
        document = (summaries + failed)[0]
    if options.json or summaries:
        print_result(options.json, lambda: document, page(summaries))
    return 1 if failed else 0


def _summary(request: VirtualRequest, strategy: str) -> Summary:
    cell = request.cell(strategy)
    if request.depths:
        return _line(request, cell, request.depths)
    error: Exception
    try:
        return _measure(request, cell)
    except ModelTooLarge as refusal:
        largest = refusal.layers_that_fit
        error, ended = refusal, {"state": "unsupported", "reason": refusal.problem}
    except VirtualRunFailed as failure:
        if failure.ending.state != "oom" or not request.box.gpus:
            raise
        # The number of layers that fit the GPU is unknown, so only the model's own depth is a limit.
        preset = find_preset(cell.config.model_name_or_path)
        largest = preset.layers - 1 if preset else 0
        error, ended = failure, {"state": failure.ending.state, "reason": failure.ending.reason}
    depths = next((depths for depths in _DEPTHS if depths[2] <= largest), None)
    if depths is None:
        raise error
    _print_status(f"{ended['reason']}: extrapolating from {depths[0]}, {depths[1]} and {depths[2]} layers")
    summary = _line(request, cell, depths, ended)
    # If thresholds lie between these depths and the model, extrapolate from depths beyond them, if those fit.
    depths_beyond = summary["extrapolated"]["depths_beyond"].items()
    if beyond := {name: depth for name, depth in depths_beyond if depth + 2 <= largest}:
        start, names = max(beyond.values()), " and ".join(beyond)
        _print_status(
            f"{names} between {depths[0]} layers and the model: extrapolating from {start} to {start + 2} layers"
        )
        try:
            deeper = _line(request, cell, (start, start + 1, start + 2), ended)
            summary = min(deeper, summary, key=lambda candidate: len(candidate["extrapolated"]["not_linear"]))
        except (VirtualRunFailed, ModelTooLarge) as failure:
            _print_status(f"{failure}: keeping the extrapolation from {depths[0]} to {depths[2]} layers")
    return summary


def _line(
    request: VirtualRequest, cell: Cell, depths: tuple[int, int, int], ended: dict[str, str] | None = None
) -> Summary:
    preset = _find_preset(cell)
    cells = [request.cell(cell.strategy, preset.with_layers(depth).name) for depth in depths]
    summaries = [_measure(request, shallow) for shallow in cells]
    return extrapolate(summaries, cell.config.model_name_or_path, preset.layers, ended)


def _measure(request: VirtualRequest, cell: Cell) -> Summary:
    """Run one virtual rank; raises UserError if it is rejected and VirtualRunFailed if it fails."""
    directory = request.runs_dir / cell.id
    ended = run_cell(cell, request.runs_dir)
    if ended.refusal is not None:
        raise ended.refusal
    with lock.lock_run_directory(directory, str(directory)):
        ended.write_end(directory)
    if ended.stopped_by == "user":
        raise KeyboardInterrupt
    if ended.ending.state == "oom":
        raise VirtualRunFailed(dataclasses.replace(ended.ending, hint="extrapolate over depth: --layers_fit A,B,C"))
    if ended.ending.state != "ok":
        raise VirtualRunFailed(ended.ending)
    _print_status(f"{cell.strategy}, {cell.config.model_name_or_path}: {ended.wall_s:.0f} s -> {directory}")
    return summarize_record(read_run(directory))


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def page(summaries: Sequence[Summary]) -> Iterator[str | TextTable]:
    """Yield the parts of the printed page: each summary, their table, and the legend."""
    for summary in summaries:
        yield from (*describe(summary), "")
    if len(summaries) > 1:
        yield from (table(summaries), "")
    yield LEGEND


def describe(summary: Summary) -> Iterator[str]:
    """Yield the lines that describe one summary."""
    accumulation = summary["gradient_accumulation_steps"]
    yield (
        f"{summary['strategy']}: rank {summary['rank']} of {summary['world_size']}, {summary['model_name_or_path']},"
        f" {summary['precision']}, micro-batch {summary['per_device_train_batch_size']}"
        + (f", accumulation {accumulation}" if accumulation > 1 else "")
        + f", {summary['seq_length']} tokens a sample"
    )
    if fit := summary["extrapolated"]:
        yield (
            f"  EXTRAPOLATED to {fit['layers']} layers from {fit['depths'][0]} and {fit['depths'][1]};"
            f" max difference at {fit['checked_at_depth']} layers, scaled to the model:"
            f" {fit['largest_residual_at_target']:.2%}"
            + (f" ({fit['furthest_figure']})" if fit["largest_residual_at_target"] else "")
        )
        if fit["crossed"]:
            beyond = {name: depth for name, depth in fit["depths_beyond"].items() if depth + 2 < fit["layers"]}
            start = max(beyond.values(), default=0)
            deeper = f"; --layers_fit {start},{start + 1},{start + 2} avoids {', '.join(beyond)}"
            crossed = f"  engine thresholds in between: {', '.join(fit['crossed'])}; figures that depend on them are ?"
            yield crossed + (deeper if beyond else "")
        if fit["whole_model"]:
            yield f"  run of the whole model: {fit['whole_model']['state']}: {fit['whole_model']['reason']}"
    yield f"  model state  {format_bytes(summary['state_bytes_total'])}"
    for kind, sizes in summary["state_bytes_per_rank"].items():
        places = [f"{format_bytes(size)} on {place}" for place, size in sizes.items() if size != 0]
        yield f"    {kind:<10} {', '.join(places) or '0'}"
    if buffers := summary["buffer_bytes"]:
        largest = sorted(buffers.items(), key=lambda item: -(item[1] or 0))[:3]
        sizes_text = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        yield f"  buffers      {format_bytes(total(buffers.values()))} ({sizes_text})"
    cap = summary["emulated_device_memory_gib"]
    for phase, figures in summary["memory_gib_by_phase"].items():
        figures_text = ", ".join(
            f"{name} {'?' if size is None else f'{size:.2f} GiB'}"
            for name, size in figures.items()
            if size is not None or (fit and f"phase.{phase}.{name}" in fit["not_linear"])
        )
        yield f"  peak in {phase:<12}{figures_text}" + (f" (emulated: limited to {cap} GiB)" if cap else "")
    yield (
        f"  ring bytes per step  {format_bytes(summary['sent_bytes_per_step'])} in"
        f" {_count(summary['comm_calls_per_step'])} calls, payload {format_bytes(summary['comm_bytes_per_step'])}"
    )
    for name, counts in summary["collectives"].items():
        yield (
            f"    {name:<15} {format_bytes(counts['wire_bytes_per_rank'])} in {_count(counts['calls'])} calls,"
            f" payload {format_bytes(counts['payload_bytes'])}"
        )
    if (seconds := summary["step_time_s_median"]) is not None:
        yield f"  step time    {seconds:.4f} s, computation only"


def table(summaries: Sequence[Summary]) -> TextTable:
    """Return the table that compares strategies, one row each."""
    rows = []
    for summary in summaries:
        sizes = (
            *(total(summary["state_bytes_per_rank"][kind].values()) for kind in STATE_KINDS),
            summary["state_bytes_total"],
            summary["sent_bytes_per_step"],
            summary["comm_bytes_per_step"],
        )
        calls, label = _count(summary["comm_calls_per_step"]), "extrapolated" if summary["extrapolated"] else ""
        rows.append([summary["strategy"], summary["precision"], *map(format_bytes, sizes), calls, label])
    return TextTable(("strategy", "precision", *STATE_KINDS, "state", "ring bytes", "payload", "calls", ""), rows)


def _count(number: float | None) -> str:
    return "?" if number is None else f"{number:.0f}"
