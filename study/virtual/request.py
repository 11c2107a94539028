"""What `study virtual` is asked for, as cells that study/launch can start."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

from study.errors import UserError
from study.host.box import Box
from study.launch.cell import Cell
from study.models.presets import FAMILY_OF_TASK, Preset, find_model, preset_family, without_depth
from study.spec.checks import LARGEST_WORLD, refuse_what_no_virtual_run_has
from study.spec.config import Precision, RunConfig, Task, resolved
from study.spec.flags import add_flags, config_from_flags
from study.spec.strategies import STRATEGY_NAMES, read_strategy

TIME_LIMIT_S = 3600.0
# bf16 is what the papers call mixed precision: bf16 weights and gradients, and fp32 masters. DeepSpeed has it under
# the name bf16-engine; autocast over fp32 weights, which study/train.py calls bf16, is bf16-autocast here.
PRECISIONS = (*get_args(Precision), "bf16-autocast")
OWN_FLAGS = {"task", "precision", "virtual_world_size", "virtual_rank", "output_dir", "overwrite_output_dir"}


@dataclasses.dataclass(frozen=True)
class Request:
    strategies: tuple[str, ...]
    world_size: int
    rank: int
    precision: str | None
    config: RunConfig
    depths: tuple[int, int, int] | None
    runs_dir: Path

    def cell(self, strategy: str, box: Box, model: str | None = None) -> Cell:
        """One virtual rank under `strategy`, of the model asked for or of `model`."""
        asked = dataclasses.replace(
            self.config,
            virtual_world_size=self.world_size,
            virtual_rank=self.rank,
            precision=precision_of(self.precision, strategy) or self.config.precision,
            model_name_or_path=model or self.config.model_name_or_path,
        )
        config = resolved(asked, accelerator_visible=box.gpus > 0)
        refuse_what_no_virtual_run_has(config)
        read_strategy(strategy).check_engine_flags(config)
        config.batch_plan(self.world_size)
        asked = dataclasses.replace(asked, scale=config.scale)
        return Cell(strategy, 1, config, asked, repeat=1, time_limit_s=TIME_LIMIT_S)


def precision_of(asked: str | None, strategy: str) -> Precision | None:
    """What study/train.py calls it. Without DeepSpeed the only bf16 is autocast."""
    if asked == "bf16":
        return "bf16-engine" if read_strategy(strategy).deepspeed else "bf16"
    return "bf16" if asked == "bf16-autocast" else asked  # type: ignore[return-value]  # argparse checked it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", required=True, metavar="S", help="a strategy, several with commas, or all")
    parser.add_argument("--world-size", required=True, type=int, metavar="N", help="how many ranks the job has")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them to be; shards are uneven")
    parser.add_argument("--task", choices=get_args(Task), help="what it trains; by default what the model is for")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="bf16: the papers' mixed precision where the strategy has it; bf16-autocast: fp32 weights under autocast",
    )
    parser.add_argument(
        "--layers-fit",
        type=_depths,
        metavar="A,B,C",
        help="run these depths; the line through the first two is extrapolated, the third checks it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=Path("runs/virtual"),
        metavar="DIR",
        help="where the records go; a repeated run replaces its earlier record, even if it then fails",
    )
    add_flags(parser, without=OWN_FLAGS)


def read_request(options: argparse.Namespace) -> Request:
    if options.model_name_or_path == "":
        raise UserError("--model_name_or_path is empty", "name a model, or leave it out")
    # The same ranges as in study/spec/config.py, by the names that the flags have here.
    if not 2 <= options.world_size <= LARGEST_WORLD:
        raise UserError(
            f"--world-size {options.world_size} is out of range",
            f"use 2 to {LARGEST_WORLD}: one rank is what `accelerate launch` starts",
        )
    if not 0 <= options.rank < options.world_size:
        raise UserError(
            f"--rank {options.rank} is none of {options.world_size} ranks", f"use 0 to {options.world_size - 1}"
        )
    options.task = options.task or task_of(options.model_name_or_path)
    return Request(
        strategies=_strategies(options.strategy),
        world_size=options.world_size,
        rank=options.rank,
        precision=options.precision,
        config=_with_absolute_paths(config_from_flags(options)),
        depths=options.layers_fit,
        runs_dir=options.runs_dir.absolute(),
    )


def task_of(model: str | None) -> str:
    """The task that a preset is for, else the default."""
    family = preset_family(model) if model else None
    return next((task for task, asked in FAMILY_OF_TASK.items() if asked == family), RunConfig.task)


def base_model(config: RunConfig) -> str:
    """A preset's name without its depth. Only a preset's number of layers can be changed."""
    name = config.model_name_or_path
    base = without_depth(name)
    if base is None:
        find_model(name)
        raise UserError(f"{name} has one depth", "extrapolate a preset, whose number of layers can be changed")
    return base


def depth_of(config: RunConfig) -> int | None:
    """How many layers a preset is asked for; None for any other model."""
    model = find_model(config.model_name_or_path)
    return model.layers if isinstance(model, Preset) else None


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Runs start in the repository, and a relative path starts where the command was typed."""
    kept = {"hub", "builtin"}
    if config.model_name_or_path and without_depth(config.model_name_or_path):
        kept.add(config.model_name_or_path)
    paths: dict[str, Any] = {}
    for name in ("model_name_or_path", "tokenizer_name", "data", "nvme_path"):
        value = getattr(config, name)
        # The folder on the drive need not exist yet.
        if value and value not in kept and (name == "nvme_path" or Path(value).expanduser().exists()):
            paths[name] = str(Path(value).expanduser().absolute())
    return dataclasses.replace(config, **paths)


def _strategies(text: str) -> tuple[str, ...]:
    """Each once, however often it is named."""
    every = tuple(name for name in STRATEGY_NAMES if name != "single")
    names: list[str] = []
    for name in text.split(","):
        if name == "single":
            raise UserError(
                "--strategy single is one rank alone, and cannot be one of many", "use ddp, zero0 to zero3, or fsdp2"
            )
        if name != "all":
            read_strategy(name)
        names += every if name == "all" else [name]
    return tuple(dict.fromkeys(names))


def _depths(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d*,[1-9]\d*,[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not three depths such as 2,4,6")
    first, second, third = (int(part) for part in text.split(","))
    if not first < second < third:
        raise argparse.ArgumentTypeError(f"{text} does not rise")
    return first, second, third
