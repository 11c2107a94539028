"""RunConfig: the flags of one run, its batches, and its name.

The launched Accelerate file alone decides which strategy runs. No module of study/config imports torch or
transformers, so a wrong flag fails before they are imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from study.config import other_names
from study.config.errors import UserError, clip, did_you_mean
from study.config.registry import REGISTRY
from study.config.strategy_names import parse_overrides
from study.config.yaml_sections import load_package_yaml

# Defaults that depend on other flags; constant ones are at their flag.
_DEFAULTS = load_package_yaml(Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8"))
# From its third step on, the steps of a virtual run are alike: the first allocates the optimizer state, and in the
# first two ZeRO-3 records the order of the layers, on which all ranks agree.
FIRST_STEADY_STEP = 3

MAX_WORLD_SIZE = 1024
# Up to here a float represents every integer, and a table or a plot may convert to float.
MAX_EXACT_INT = 2**53


def check_values(config: RunConfig) -> None:
    """Raise if a value that is set is invalid, whether or not the config is resolved."""
    for field in dataclasses.fields(config):
        _check_value(field.name, getattr(config, field.name), field.metadata["at_least"])
    if config.seed >= 2**32:
        raise _out_of_range("seed", config.seed, f"use {2**32 - 1} or less, the largest seed of numpy")
    cap, dropout = config.device_memory_cap_gib, config.dropout
    if cap is not None and cap <= 0:
        raise _out_of_range("device_memory_cap_gib", cap, "use the GiB of the smaller GPU, such as 16")
    if config.warmup_ratio and config.warmup_ratio > 1:
        raise _out_of_range("warmup_ratio", config.warmup_ratio, "use a fraction between 0 and 1")
    if config.warmup_ratio and config.lr_scheduler_type == "constant":
        problem = f"--lr_scheduler_type constant ignores --warmup_ratio {config.warmup_ratio}"
        raise UserError(problem, "use --lr_scheduler_type constant_with_warmup")
    if dropout is not None and not (0 <= dropout < 1 or dropout == -1):
        raise _out_of_range("dropout", dropout, "use at least 0 and less than 1, or -1 for the model's own values")
    parse_overrides(config.engine_override)
    _check_flags_together(config)


def _check_value(flag: str, value: Any, least: float | None) -> None:
    """Raise if a value is empty, cannot be printed or stored, or is less than the least one."""
    if value == "":
        # Usually an unset variable of a shell; as a path it would be the working directory.
        raise UserError(f"--{flag} is empty", "set a value, or leave it out")
    if isinstance(value, str) and not value.isprintable():
        problem = f"--{flag} {value!r} has characters that cannot be printed on one line"
        raise UserError(problem, "use another name")
    if isinstance(value, float) and not math.isfinite(value):
        raise _out_of_range(flag, value, "use a finite number")
    if value is not None and least is not None and value < least:
        raise _out_of_range(flag, value, f"use {least} or more")
    if isinstance(value, int) and value > MAX_EXACT_INT:
        problem = f"use {MAX_EXACT_INT} or less, the largest integer that a table stores exactly"
        raise _out_of_range(flag, value, problem)


def _check_flags_together(config: RunConfig) -> None:
    """Raise if two flags exclude each other, or if one lacks the other that it needs."""
    if config.bf16_states and config.precision not in (None, "bf16-engine"):
        raise UserError(f"--bf16_states does not support --precision {config.precision}", "use --precision bf16-engine")
    if config.optimizer == "muon" and config.max_grad_norm:
        raise UserError(
            f"--optimizer muon with --max_grad_norm {config.max_grad_norm:g}: DeepSpeed's stages would clip Muon's"
            " updates, and other engines the gradients",
            "use --max_grad_norm 0",
        )
    if config.virtual_world_size is not None:
        check_virtual_rank(config.virtual_world_size, config.virtual_rank)
    elif config.virtual_rank is not None:
        flag = f"--virtual_rank {config.virtual_rank}"
        raise UserError(f"{flag} needs a virtual job", f"add --virtual_world_size 2 to {MAX_WORLD_SIZE}")


def _out_of_range(flag: str, value: float, fix: str) -> UserError:
    return UserError(f"--{flag} {value} is out of range", fix)


def check_virtual_rank(
    ranks: int, rank: int | None, ranks_flag: str = "--virtual_world_size", rank_flag: str = "--virtual_rank"
) -> None:
    """Raise if a virtual job's world size or rank is out of range; `study virtual` has other names for both flags."""
    if not 2 <= ranks <= MAX_WORLD_SIZE:
        problem = f"{ranks_flag} {ranks} is out of range"
        raise UserError(problem, f"use 2 to {MAX_WORLD_SIZE}, or leave it out for one rank")
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(f"{rank_flag} {rank} is not one of {ranks} ranks", f"use 0 to {ranks - 1}")


def check_virtual_run_flags(config: RunConfig) -> None:
    """Raise if a flag has no effect or meaning in a virtual run, or if the run is too short."""
    for name, without, why in (
        ("weights", "random", "loads no weights"),
        ("report_to", "none", "has no losses to report"),
        ("checkpointing_steps", 0, "has no state worth saving"),
        ("resume_from_checkpoint", None, "has no state to resume from"),
        ("eval_steps", 0, "has no losses to evaluate"),
        ("profile_steps", 0, "excludes communication, so its step time is not the job's"),
    ):
        if getattr(config, name) not in (None, without):
            raise UserError(f"--{name} {getattr(config, name)}: a virtual run {why}", "leave it out")
    steps = config.total_steps(config.train_samples or config.global_batch_size)
    if steps < FIRST_STEADY_STEP:
        problem = f"a virtual run of {steps} step{'s'[: steps > 1]} ends before its steps are alike"
        raise UserError(problem, f"use --max_steps {FIRST_STEADY_STEP} or more, or leave it out")


Task = Literal["bert-imdb", "gpt-wikitext"]
Scale = Literal["auto", "paper", "laptop"]
Weights = Literal["pretrained", "random"]
Precision = Literal["fp32", "bf16", "bf16-engine", "fp16", "fp16-engine"]
# transformers' schedules that need only the warm-up and the number of steps.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
Attention = Literal["eager", "sdpa", "sdpa_causal", "flash_attention_2"]
Peft = Literal["none", "lora"]
Optimizer = Literal["adamw", "muon"]
WikitextName = Literal["wikitext-2-raw-v1", "wikitext-103-raw-v1"]

# Flags that are not part of a run's identity: its output paths, and the checkpoint that it resumes from.
_NOT_IDENTITY = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to", "nvme_path"}
# Flags added later, with their defaults: a run that does not use them keeps the name that it had before.
_LATER_FLAGS = {
    "virtual_world_size": None,
    "virtual_rank": None,
    "profile_steps": 0,
    "group_size": None,
    "peft": "none",
    "lora_rank": 8,
    "lora_alpha": 16,
    "optimizer": "adamw",
    "bf16_states": False,
}
# Renamed flags by their former name, which stays in the hash of a run's name: its runs must keep their names.
_OLD_NAMES = {"group_size": "team_size"}


def flag(help_text: str | None, default: Any = None, at_least: int | None = None, **options: Any) -> Any:
    """Return the field of a dataclass that is a flag; `options` are those of add_argument that its type does not
    imply."""
    return dataclasses.field(default=default, metadata={"help": help_text, "at_least": at_least, "options": options})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of one run. Each field is a flag of study/train.py and a key of a suite.

    A field without a default is None until `resolved()` sets it to the default of its task and scale.
    """

    task: Task = flag("the training task: model head and data", "bert-imdb")
    scale: Scale = flag("paper: the setup of the studied documents; laptop: tiny; auto: paper with a GPU", "auto")
    model_name_or_path: str = flag("a preset of study/workloads/presets.yaml, a hub id or a local folder")
    weights: Weights = flag("initial weights: the published ones, or random ones from --seed")
    data: str = flag("hub, builtin (generated, no network), reviews (of films, by pip), or the path of a local copy")
    dataset_config_name: WikitextName = flag("which Wikitext `--data hub` means", "wikitext-2-raw-v1")
    tokenizer_name: str | None = flag("a hub id or local folder, instead of the model's own tokenizer")
    seq_length: int = flag("tokens per sample", at_least=2)
    train_samples: int = flag("training samples; 0: all there are", at_least=0)
    eval_samples: int = flag("evaluation samples; 0: all there are", at_least=0)
    global_batch_size: int = flag("samples per optimizer step over all ranks", at_least=1)
    per_device_train_batch_size: int | None = flag(
        "samples per forward pass on one rank; accumulation is derived", at_least=1
    )
    num_train_epochs: int = flag("epochs over the training samples, if --max_steps is 0", at_least=1)
    max_steps: int = flag("optimizer steps; 0: as many as --num_train_epochs needs", at_least=0)
    optimizer: Optimizer = flag("muon: DeepSpeed's, for the matrices of hidden layers; AdamW for the rest", "adamw")
    learning_rate: float = flag("peak learning rate", at_least=0)
    weight_decay: float = flag("AdamW's decoupled weight decay", 0.0, at_least=0)
    warmup_ratio: float = flag("fraction of the steps in which the learning rate rises from 0", at_least=0)
    lr_scheduler_type: Schedule = flag("learning rate schedule after the warm-up", "linear")
    max_grad_norm: float = flag("clip the global gradient norm to this; 0: no clipping", 1.0, at_least=0)
    dropout: float = flag("every dropout probability of the model; -1 keeps the model's own")
    precision: Precision = flag("bf16, fp16: autocast over fp32 weights; bf16-engine, fp16-engine: DeepSpeed's own")
    bf16_states: bool = flag("with bf16-engine: no fp32 master weights, and optimizer states in bf16", False)
    peft: Peft = flag("lora: train adapters of all linear layers, and freeze the model's weights", "none")
    lora_rank: int = flag("rank of the LoRA adapters", 8, at_least=1)
    lora_alpha: int = flag("LoRA's alpha: adapter outputs are scaled by alpha / rank", 16, at_least=1)
    gradient_checkpointing: bool = flag("recompute activations in the backward pass", False)
    attn_implementation: Attention = flag(
        "transformers' attention; sdpa: eager if a model does not support it; sdpa_causal: never builds a mask", "sdpa"
    )
    torch_compile: bool = flag("compile the model with torch.compile", False)
    seed: int = flag("seeds the initial weights, the order of the samples and dropout", 42, at_least=0)
    eval_steps: int = flag("evaluate every N steps and at the end; 0: only at the end", at_least=0)
    logging_steps: int = flag("write step rows, and check for NaN, every N steps", at_least=1)
    nvme_path: str = flag("folder on the NVMe that strategies offload to", "nvme_offload")
    group_size: int | None = flag(
        "ranks of one model-parallel group (tensor-, context- or sequence-parallel)", at_least=2
    )
    device_memory_cap_gib: float | None = flag("cap on GPU memory in GiB, to emulate a smaller GPU")
    profile_steps: int = flag("profile the last N steps with torch.profiler", 0, at_least=0)
    engine_override: tuple[str, ...] = flag("KEY=JSON set in the DeepSpeed config, dotted: a.b=5e6; repeatable", ())
    output_dir: str | None = flag("the run directory; by default runs/<run id>")
    overwrite_output_dir: bool = flag("replace an earlier run in the run directory", False)
    checkpointing_steps: int = flag("save a checkpoint every N steps; 0: never", 0, at_least=0)
    resume_from_checkpoint: str | None = flag("a checkpoint folder of an earlier run, or `latest` in --output_dir")
    report_to: str = flag("a tracker that Accelerate supports (tensorboard, wandb, ...), or none", "none")
    virtual_world_size: int | None = flag(
        "world size of a virtual job, of which one rank runs; its losses are meaningless"
    )
    virtual_rank: int | None = flag("rank of this process in the virtual job; 0 by default")

    def total_steps(self, train_samples: int) -> int:
        """Return the optimizer steps of this run; an incomplete last batch of an epoch is dropped."""
        steps_per_epoch = train_samples // self.global_batch_size
        if steps_per_epoch == 0:
            fix = f"use --global_batch_size {train_samples} or less, or more data"
            if train_samples == self.train_samples:
                fix = f"use --train_samples {self.global_batch_size} or more"
            problem = f"--global_batch_size {self.global_batch_size} is more than the {train_samples} training samples"
            raise UserError(problem, fix)
        return self.max_steps or self.num_train_epochs * steps_per_epoch

    def batch_plan(self, ranks: int, group_size: int = 1) -> BatchPlan:
        """Split the global batch over ranks and accumulation steps. Every split has the same samples."""
        if ranks % group_size:
            count = f"{ranks} rank{'s'[: ranks > 1]}"
            raise UserError(f"{count} cannot form model-parallel groups of {group_size}", "use a multiple of that")
        batch, groups = self.global_batch_size, ranks // group_size
        over = f"{ranks} ranks" if group_size == 1 else f"{groups} model-parallel groups of {group_size} ranks"
        forward = groups * (self.per_device_train_batch_size or 1)
        next_larger = -(-batch // forward) * forward
        if batch % groups:
            problem = f"--global_batch_size {batch} does not divide over {over}"
            raise UserError(problem, f"use a multiple of {forward}, such as {next_larger}")
        per_rank = batch // groups
        micro = self.per_device_train_batch_size or per_rank
        if per_rank % micro:
            smaller = next(size for size in range(min(micro, per_rank), 0, -1) if per_rank % size == 0)
            problem = f"--per_device_train_batch_size {micro} on {over} does not divide --global_batch_size {batch}"
            raise UserError(problem, f"use {smaller}, or --global_batch_size {next_larger}")
        return BatchPlan(batch, groups, micro, per_rank // micro)

    def run_id(self, strategy: str, world_size: int) -> str:
        """Return a readable name with a hash of all settings that identify this run."""
        identity = {
            _OLD_NAMES.get(key, key): value
            for key, value in self.to_dict().items()
            if key not in _NOT_IDENTITY and (key not in _LATER_FLAGS or value != _LATER_FLAGS[key])
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.task}-{self.model_name}-{strategy}-{world_size}x-{digest}"

    @property
    def model_name(self) -> str:
        """Name of the model without its owner or folder, short enough for a folder's name."""
        return self.model_name_or_path.rstrip("/").rsplit("/", 1)[-1][:96]

    def tracker_config(self) -> dict[str, Any]:
        """Return the flags for trackers, which accept neither null nor lists."""
        return {key: value for key, value in self.to_dict().items() if isinstance(value, (bool, int, float, str))}

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> RunConfig:
        """Build from a record or a suite; raise for unknown keys and wrong types. Null means the default."""
        hints = _hints()
        unknown = [key for key in values if key not in hints]
        if unknown:
            fix = f"{did_you_mean(str(unknown[0]), hints)}known keys: {', '.join(sorted(hints))}"
            raise UserError(f"unknown key {clip(unknown[0])} in {where}", fix)
        present = {key: value for key, value in values.items() if value is not None}
        return cls(**{key: _parse_as(hints[key], value, f"{key} in {where}") for key, value in present.items()})


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Split of one optimizer step's samples into ranks and micro-batches."""

    global_batch_size: int
    # Data-parallel groups: single ranks, or model-parallel groups, whose ranks process the same samples.
    groups: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int

    def micro_batches(self, step_samples: Sequence[int], group: int) -> list[list[int]]:
        """Return a group's micro-batches of one step's samples, in order."""
        size = self.per_device_train_batch_size
        starts = ((turn * self.groups + group) * size for turn in range(self.gradient_accumulation_steps))
        return [list(step_samples[start : start + size]) for start in starts]


def resolve_config(config: RunConfig, accelerator_visible: bool) -> RunConfig:
    """Return the config with all defaults set; raise if flags contradict each other."""
    scale = config.scale if config.scale != "auto" else ("paper" if accelerator_visible else "laptop")
    explicit = {key: value for key, value in vars(config).items() if value is not None}
    defaults = _DEFAULTS["everywhere"] | _DEFAULTS[explicit["task"]][scale]
    model = explicit.get("model_name_or_path", defaults["model_name_or_path"])
    defaults |= _DEFAULTS["models"].get(model.rsplit("/", 1)[-1], {})
    if explicit.get("lr_scheduler_type") == "constant":
        defaults["warmup_ratio"] = 0.0
    if ranks := explicit.get("virtual_world_size"):
        # One sample per rank, no download and no evaluation, and a few steps: on a GPU, where step time is measured,
        # some more after the warm-up.
        samples = ranks * explicit.get("per_device_train_batch_size", 1)
        defaults |= {
            "weights": "random",
            "data": "builtin",
            "global_batch_size": samples,
            "eval_samples": 8,
            "max_steps": 8 if accelerator_visible else FIRST_STEADY_STEP,
            "virtual_rank": 0,
            "train_samples": explicit.get("global_batch_size", samples),
            "eval_steps": 0,
            "logging_steps": 1,
        }
        if scale == "laptop":
            # Short sequences: the memory of the model state does not depend on them.
            defaults["seq_length"] = 16
    config = RunConfig(**(defaults | explicit | {"scale": scale}))
    check_values(config)
    return config


def _with_underscores(flag: str) -> str:
    return f"--{flag[2:].replace('-', '_')}" if flag.startswith("--") else flag


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError, for one line and exit status 2, and accepts hyphens for underscores."""

    # A complete command, for a request that lacks arguments.
    example = ""
    # Names of GPUs, which are hardware also without a number before them.
    devices: Collection[str] = ()
    # Return the other commands that have a flag, to put before a fix.
    find_elsewhere: Callable[[str], str] = staticmethod(lambda flag: "")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        flags = {_with_underscores(flag): flag for flag in self._option_string_actions}
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        self._words = words[:end]
        for place, word in enumerate(words[:end]):
            flag, equals, value = word.partition("=")
            words[place] = flags.get(_with_underscores(flag), flag) + equals + value
        namespace, unknown = super().parse_known_args(words, namespace)
        for action in self._get_positional_actions():
            # Before Python 3.12.7 such a positional takes no words that follow a flag.
            if action.nargs in ("*", "?") and unknown and unknown[0][:1] != "-" and not getattr(namespace, action.dest):
                setattr(namespace, action.dest, unknown[0] if action.nargs == "?" else unknown)
                unknown = unknown[1:] if action.nargs == "?" else []
            words = getattr(namespace, action.dest)
            if action.nargs == "?" and words and getattr(namespace, "named_model", None) and self._find_flag(words):
                # The model is named, so this word is a strategy or hardware without its flag.
                setattr(namespace, action.dest, None)
                unknown = [words, *unknown]
            elif action.nargs == "*" and words:
                alone = [word for word in words if self._find_flag(word) and not Path(word).exists()]
                setattr(namespace, action.dest, [word for word in words if word not in alone])
                unknown = [*alone, *unknown]
        return namespace, unknown

    def raise_unknown(self, words: Sequence[str]) -> typing.NoReturn:
        """Raise UserError about words that no flag takes, with similar flags."""
        first = _with_underscores(words[0].partition("=")[0])
        flags = [flag for flag in self._option_string_actions if len(flag) > 3]
        inside = [flag for flag in flags if len(first) > 4 and (flag[2:] in first or first[2:] in flag)]
        # Two flags of few letters are alike by their hyphens.
        similar = did_you_mean(first, inside or flags, cutoff=0.3 if inside else 0.72)
        if same := other_names.find_flag(first, self._option_string_actions):
            similar = f"it is {same} here; "
        elif placed := self._place_words() or self._place_spaced_hardware(words):
            similar = f"write {placed}; "
        elif first[:2] == "--":
            judged = other_names.judge_flag(first, self._option_string_actions)
            # A flag with the meaning goes before one with a similar spelling.
            is_known = first.removeprefix("--") in other_names.FLAGS
            similar = judged or ("" if is_known else similar) or self.find_elsewhere(first) or similar
        raise UserError(f"unrecognized arguments: {' '.join(words)}", f"{similar}{self.prog} --help lists the options")

    def _place_words(self) -> str:
        """Return the words that were written without a flag, each with the flag that takes it; empty without any."""
        pairs = zip(["", *self._words], self._words, strict=False)
        # A number before a GPU is part of the hardware.
        alone = [word for before, word in pairs if before[:2] != "--" and not re.fullmatch("[0-9]+x?|x", before)]
        return " ".join(f"{flag} {word}" for word in alone if (flag := self._find_flag(word)) is not None)

    def _place_spaced_hardware(self, unknown: Sequence[str]) -> str:
        """Return the flag with hardware that was written with spaces and without quotes; empty for other words."""
        place = self._words.index("--hardware") + 1 if "--hardware" in self._words else None
        spaced = self._words[place:] if place else unknown
        name = [*itertools.takewhile(lambda word: word[:1] != "-", spaced)]
        is_spaced = len(name) > 1 and re.fullmatch("[0-9]+x?", name[0])
        joined = "".join(name)
        return f"--hardware {joined}" if is_spaced and self._find_flag(joined) else ""

    def _find_flag(self, word: str) -> str | None:
        """Return the flag that takes a word which was written without one: a strategy, or hardware such as 8xH100."""
        if word in REGISTRY and "--strategy" in self._option_string_actions:
            return "--strategy"
        is_hardware = re.fullmatch(r"([0-9]+x)+\w.*", word) or word.upper() in self.devices
        if is_hardware and "--hardware" in self._option_string_actions:
            return "--hardware"
        return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise UserError, with similar values, for a value that is not among the choices of an argument."""
        if action.choices is None or value in action.choices:
            return
        name, choices = "/".join(action.option_strings) or action.metavar or action.dest, list(map(str, action.choices))
        listed = f"use {' or '.join(choices)}" if len(choices) < 6 else f"{self.prog} --help lists all"
        likely = did_you_mean(str(value), choices) or did_you_mean(str(value).lower(), choices)
        meanings = other_names.VALUES.get(action.option_strings[-1] if action.option_strings else "", {})
        if (meant := meanings.get(str(value).lower().replace("-", "_"))) is not None:
            supported = [text for text in meant if text.partition(" ")[0] in choices]
            likely = f"it is {action.option_strings[-1]} {supported[0]} here; " if supported else ""
        fix = f"{likely}{listed}"
        raise UserError(f"argument {name}: there is no {clip(value)}", fix)

    def error(self, message: str) -> typing.NoReturn:
        """Raise UserError instead of printing the usage; a misspelt flag is named before the required one."""
        flags = {_with_underscores(flag) for flag in self._option_string_actions}
        unknown = [
            word for word in self._words if word[:2] == "--" and _with_underscores(word.split("=")[0]) not in flags
        ]
        if unknown and "are required" in message:
            self.raise_unknown(unknown)
        _required, colon, names = message.partition("arguments are required: ")
        fix = f"{self.prog} --help lists the options"
        if lone := re.fullmatch(r"argument (--\w+): expected one argument", message):
            choices = self._option_string_actions[lone[1]].choices
            fix = f"write {lone[1]} with {' or '.join(choices)}; {fix}" if choices else fix
        if colon and self.example:
            fix = f"for instance: {self.example}; {fix}"
        raise UserError(f"missing: {names}" if colon else message, fix)


def parse_command_line(arguments: Sequence[str] | None = None) -> RunConfig:
    """Parse the flags of study/train.py, before any default."""
    parser = Parser(prog="study/train.py", description="Train under one strategy.", allow_abbrev=False)
    add_flags(parser)
    config = config_from_flags(parser.parse_args(arguments))
    check_values(config)
    return config


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add the fields of RunConfig to a parser as flags."""
    for field in dataclasses.fields(RunConfig):
        if field.name in without:
            continue
        options = _argument_options(field, _hints()[field.name])
        parser.add_argument(f"--{field.name}", **options)
        if field.name in _OLD_NAMES:
            hidden = options | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            parser.add_argument(f"--{_OLD_NAMES[field.name]}", dest=field.name, **hidden)


def add_fields(parser: argparse.ArgumentParser, contract: type, names: Collection[str]) -> None:
    """Add fields of a dataclass to a parser as flags, in the order of the fields."""
    hints = typing.get_type_hints(contract)
    for field in dataclasses.fields(contract):
        if field.name in names:
            parser.add_argument(f"--{field.name}", **_argument_options(field, hints[field.name]))


def _argument_options(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return the options of add_argument that a field's type implies, and those of its metadata."""
    kind, explicit = inner_type(hint), field.metadata["options"]
    options: dict[str, Any] = {"help": field.metadata["help"], "default": field.default}
    if typing.get_origin(kind) is Literal:
        options["choices"] = typing.get_args(kind)
    elif kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif "type" in explicit:
        pass
    elif typing.get_origin(kind) is tuple:
        options |= {"action": "append", "default": [], "metavar": "KEY=JSON"}
    else:
        options |= {"type": kind, "metavar": kind.__name__.upper()}
    return options | explicit


def changed_flags(values: Any, **defaults: Any) -> list[str]:
    """Return the words that set a dataclass's fields on a command line, without those at their defaults; `defaults` are
    those of the command that differ from the dataclass's."""
    words = list[str]()
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if value == defaults.get(field.name, field.default):
            continue
        if isinstance(value, bool):
            words.append(f"--{field.name}" if value else f"--no-{field.name}")
        else:
            words += [f"--{field.name}", _flag_text(value)]
    return words


def _flag_text(value: Any) -> str:
    """Return a flag's value as text."""
    if isinstance(value, tuple):
        return ",".join(map(_flag_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_flag(flag: str, value: Any) -> str:
    """Return the advice that sets a flag to this value on a command line."""
    if isinstance(value, bool):
        return f"use --{flag}" if value else f"use --no-{flag}"
    if value is None or value == []:
        return f"leave --{flag} out"
    values = value if isinstance(value, list) else [value]
    return f"use {' '.join(f'--{flag} {shlex.quote(str(item))}' for item in values)}"


def config_from_flags(options: argparse.Namespace) -> RunConfig:
    """Build a RunConfig from parsed flags."""
    values = {field.name: getattr(options, field.name, field.default) for field in dataclasses.fields(RunConfig)}
    return RunConfig(**(values | {"engine_override": tuple(options.engine_override)}))


@functools.cache
def _hints() -> dict[str, Any]:
    """Return the evaluated type hints of RunConfig, cached: a suite of a thousand cells uses them a thousand times."""
    return typing.get_type_hints(RunConfig)


def inner_type(hint: Any) -> Any:
    """Return X of `X | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(member for member in typing.get_args(hint) if member is not type(None))
    return hint


def _parse_as(hint: Any, value: Any, where: str) -> Any:
    kind = inner_type(hint)
    if typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        raise UserError(f"{where} is {clip(value)}", f"use one of {', '.join(typing.get_args(kind))}")
    if typing.get_origin(kind) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UserError(f"{where} is {clip(value)}", "use a list of KEY=JSON strings")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    raise UserError(f"{where} is {clip(value)}", f"use a value of type {kind.__name__}")
