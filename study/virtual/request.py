"""What `study virtual` is asked for, as cells that study/launch can start."""

from __future__ import annotations

import argparse
import dataclasses
import re
from contextlib import suppress
from pathlib import Path
from typing import get_args

from study.errors import UserError
from study.host.box import Box, this_box
from study.host.folders import folder_argument, folder_named
from study.launch.cell import Cell
from study.models.presets import FAMILY_OF_TASK, Family, Preset, find_model, find_preset
from study.record.directory import read_json
from study.record.schema import RecordError
from study.spec.checks import check_virtual_rank, refuse_what_no_virtual_run_has
from study.spec.config import Precision, RunConfig, Task, add_flags, config_from_flags, resolved
from study.spec.strategies import STUDIED_STRATEGIES, read_strategy

TIME_LIMIT_S = 3600.0
# bf16 is what the papers call mixed precision: bf16 weights and gradients, and fp32 masters. DeepSpeed has it under
# the name bf16-engine; autocast over fp32 weights, which study/train.py calls bf16, is bf16-autocast here.
PRECISIONS = (*get_args(Precision), "bf16-autocast")
OWN_FLAGS = {"task", "precision", "virtual_world_size", "virtual_rank", "output_dir", "overwrite_output_dir"}


@dataclasses.dataclass(frozen=True)
class Request:
    strategies: tuple[str, ...]
    # With --precision by its name here.
    config: RunConfig
    depths: tuple[int, int, int] | None
    runs_dir: Path
    box: Box

    def cell(self, strategy: str, model: str | None = None) -> Cell:
        """One virtual rank under `strategy`, of the model asked for or of `model`."""
        asked = dataclasses.replace(
            self.config,
            precision=precision_of(self.config.precision, strategy),
            model_name_or_path=model or self.config.model_name_or_path,
        )
        config = resolved(asked, accelerator_visible=self.box.gpus > 0)
        refuse_what_no_virtual_run_has(config)
        read_strategy(strategy).check_engine_flags(config)
        asked = dataclasses.replace(asked, scale=config.scale)
        cell = Cell(strategy, 1, config, asked, repeat=1, time_limit_s=TIME_LIMIT_S)
        cell.plan  # noqa: B018 - refuses a batch that does not divide
        return cell


def precision_of(asked: str | None, strategy: str) -> Precision:
    """What study/train.py calls it. Without DeepSpeed the only bf16 is autocast."""
    if asked == "bf16":
        return "bf16-engine" if read_strategy(strategy).deepspeed else "bf16"
    return "bf16" if asked == "bf16-autocast" else asked  # type: ignore[return-value]  # argparse checked it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--strategy", required=True, metavar="S", help="a strategy, several with commas, or all")
    add("--world-size", required=True, type=int, metavar="N", dest="virtual_world_size", help="ranks of the whole job")
    add("--rank", type=int, default=0, metavar="R", dest="virtual_rank", help="which of them to be; shards are uneven")
    add("--task", choices=get_args(Task), help="what it trains; by default what the model is for")
    add(
        "--precision",
        choices=PRECISIONS,
        help="bf16: the papers' mixed precision where the strategy has it; bf16-autocast: fp32 weights under autocast",
    )
    add(
        "--layers-fit",
        type=_depths,
        metavar="A,B,C",
        help="run these depths; the line through the first two is extrapolated, the third checks it",
    )
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    add(
        "--runs-dir",
        type=folder_argument,
        default=Path("runs/virtual"),
        metavar="DIR",
        help="where the records go; a repeated run replaces its earlier record, even if it then fails",
    )
    add_flags(parser, without=OWN_FLAGS)


def read_request(options: argparse.Namespace) -> Request:
    """Whatever is wrong with it is refused here, before the first of several runs."""
    model = options.model_name_or_path
    if model == "":
        raise UserError("--model_name_or_path is empty", "name a model, or leave it out")
    check_virtual_rank(options.virtual_world_size, options.virtual_rank, "--world-size", "--rank")
    preset = find_preset(model or "")
    if options.task is None:
        family = preset.family if preset else _family_in(folder_named(model)) if model else None
        fits = (task for task, each in FAMILY_OF_TASK.items() if each == family)
        options.task = next(fits, RunConfig.task)
    config = _with_absolute_paths(config_from_flags(options))
    runs_dir = options.runs_dir.absolute()
    request = Request(_strategies(options.strategy), config, options.layers_fit, runs_dir, this_box())
    for cell in map(request.cell, request.strategies):
        for depth in request.depths or ():
            preset_of(cell).with_layers(depth)
    return request


def _family_in(folder: Path) -> Family | None:
    """Of a folder's config.json; None where there is none that can be read."""
    with suppress(RecordError):
        kind = read_json(folder / "config.json").get("model_type")
        return "sequence-classification" if kind == "bert" else "causal-lm"
    return None


def preset_of(cell: Cell) -> Preset:
    """Only a preset's number of layers can be changed."""
    model = find_model(cell.config.model_name_or_path)
    if not isinstance(model, Preset):
        raise UserError(f"{model} has one depth", "extrapolate a preset, whose number of layers can be changed")
    return model


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Runs start in the repository, and a relative path starts where the command was typed."""
    changed = {}
    for name in ("model_name_or_path", "tokenizer_name", "data", "nvme_path"):
        value = getattr(config, name)
        is_preset = name == "model_name_or_path" and find_preset(value or "")
        is_no_path = is_preset or value in (None, "", "hub", "builtin", RunConfig.nvme_path)
        # The folder on the drive need not exist yet.
        if not is_no_path and (name == "nvme_path" or folder_named(value).exists()):
            changed[name] = str(folder_named(value).absolute())
    return dataclasses.replace(config, **changed)  # type: ignore[arg-type]  # a str each


def _strategies(text: str) -> tuple[str, ...]:
    """Each once, however often it is named."""
    every = [name for name in STUDIED_STRATEGIES if name != "single"]
    names = [name for part in text.split(",") for name in (every if part == "all" else [part])]
    if "single" in names:
        raise UserError(
            "--strategy single is one rank alone, and cannot be one of many", "use ddp, zero0 to zero3, or fsdp2"
        )
    for name in names:
        read_strategy(name)
    return tuple(dict.fromkeys(names))


def _depths(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d{0,99},[1-9]\d{0,99},[1-9]\d{0,99}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not three depths such as 2,4,6")
    first, second, third = (int(part) for part in text.split(","))
    if not first < second < third:
        raise argparse.ArgumentTypeError(f"{text} does not rise")
    return first, second, third
