"""RunConfig: what one run is. Flags, defaults per scale, validation, identity.

Nothing here knows which strategy runs: that is the launched Accelerate file's business alone.
This module stays free of torch and transformers, so a wrong flag is refused before they are imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from study.errors import UserError
from study.spec.overrides import parse_overrides

Task = Literal["bert-imdb", "gpt-wikitext"]
Scale = Literal["auto", "paper", "laptop"]
Weights = Literal["pretrained", "random"]
Precision = Literal["fp32", "bf16", "bf16-engine", "fp16"]
# transformers' schedules that need nothing but the warm-up and the number of steps.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
Attention = Literal["eager", "sdpa", "flash_attention_2"]
WikitextName = Literal["wikitext-2-raw-v1", "wikitext-103-raw-v1"]


def _flag(help_text: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run as asked.

    A field without a default is None until `resolved()` has filled in the scale's; its type is what it then has.
    """

    task: Task = _flag("what is trained, and on which data", "bert-imdb")
    scale: Scale = _flag("paper: what the studied documents did; laptop: tiny; auto: paper with a GPU", "auto")
    model_name_or_path: str = _flag("a preset of study/models/presets.py, a hub id or a local folder")
    weights: Weights = _flag("start from the published weights, or from a seeded random draw")
    data: str = _flag("hub, builtin (generated here, needs no network) or the path of a local copy")
    dataset_config_name: WikitextName = _flag("which Wikitext `--data hub` means")
    tokenizer_name: str | None = _flag("a hub id or local folder, where the model's own tokenizer is not wanted")
    seq_length: int = _flag("tokens per sample")
    train_samples: int = _flag("training samples; 0 takes all there are")
    eval_samples: int = _flag("evaluation samples; 0 takes all there are")
    global_batch_size: int = _flag("samples per optimizer step over all ranks")
    per_device_train_batch_size: int | None = _flag("samples per forward pass on one rank; accumulation is derived")
    num_train_epochs: int = _flag("passes over the training samples, unless --max_steps says less or more")
    max_steps: int = _flag("optimizer steps; 0 leaves it to --num_train_epochs")
    learning_rate: float = _flag("AdamW's peak learning rate")
    weight_decay: float = _flag("AdamW's decoupled weight decay")
    warmup_ratio: float = _flag("share of the steps in which the learning rate rises from 0")
    lr_scheduler_type: Schedule = _flag("how the learning rate falls after the warm-up")
    max_grad_norm: float = _flag("clip the global gradient norm to this; 0 does not clip")
    dropout: float = _flag("every dropout probability of the model; -1 keeps the model's own")
    precision: Precision = _flag("bf16: autocast over fp32 weights; bf16-engine: DeepSpeed's own bf16")
    gradient_checkpointing: bool = _flag("recompute activations in the backward pass")
    attn_implementation: Attention = _flag("transformers' attention; sdpa means eager where a model has none")
    torch_compile: bool = _flag("compile the model with torch.compile")
    seed: int = _flag("seeds the initial weights, the order of the samples and dropout", 42)
    eval_steps: int = _flag("evaluate every so many steps and at the end; 0: only at the end")
    logging_steps: int = _flag("flush step rows, and notice a NaN, every so many steps")
    nvme_path: str = _flag("folder on the drive that NVMe strategies offload to")
    device_memory_cap_gib: float | None = _flag(
        "let this process use no more GPU memory, to stand in for a smaller GPU"
    )
    profile_steps: int = _flag("record where the time of so many last steps goes, with torch's profiler", 0)
    engine_override: tuple[str, ...] = _flag("KEY=JSON set in the DeepSpeed config, dotted: a.b=5e6; repeatable", ())
    output_dir: str | None = _flag("the run directory; by default runs/<run id>")
    overwrite_output_dir: bool = _flag("replace what an earlier run left in the run directory", False)
    checkpointing_steps: int = _flag("save a checkpoint every so many steps; 0: never")
    resume_from_checkpoint: str | None = _flag("a checkpoint folder of an earlier run, or `latest` in --output_dir")
    report_to: str = _flag("a tracker Accelerate knows (tensorboard, wandb, ...), or none")
    virtual_world_size: int | None = _flag("be one rank of a job of so many, without the others; losses mean nothing")
    virtual_rank: int | None = _flag("which of the virtual ranks this is; 0 unless said")

    def total_steps(self, train_samples: int) -> int:
        """Optimizer steps of this run; an incomplete last batch of an epoch is dropped."""
        steps_per_epoch = train_samples // self.global_batch_size
        if steps_per_epoch == 0:
            raise UserError(
                f"--global_batch_size {self.global_batch_size} is more than the {train_samples} training samples",
                f"use --global_batch_size {train_samples} or less, or more --train_samples",
            )
        return self.max_steps or self.num_train_epochs * steps_per_epoch

    def batch_plan(self, world_size: int) -> BatchPlan:
        """How the global batch is cut over ranks and accumulation steps, the same samples whatever the cut."""
        batch = self.global_batch_size
        forward = world_size * (self.per_device_train_batch_size or 1)
        if batch % world_size:
            raise UserError(
                f"--global_batch_size {batch} does not divide over {world_size} ranks",
                f"use a multiple of {forward}, such as {_next_multiple(batch, forward)}",
            )
        per_rank = batch // world_size
        micro = self.per_device_train_batch_size or per_rank
        if per_rank % micro:
            raise UserError(
                f"--per_device_train_batch_size {micro} on {world_size} ranks"
                f" does not divide --global_batch_size {batch}",
                f"use {_divisor_up_to(micro, per_rank)}, or --global_batch_size {_next_multiple(batch, forward)}",
            )
        return BatchPlan(batch, world_size, micro, per_rank // micro)

    def run_id(self, strategy: str, world_size: int) -> str:
        """A name a person can read, with a hash of everything that makes this run what it is."""
        not_identity = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to", "nvme_path"}
        # A real run is the run it was before there were virtual ones.
        not_identity |= {key for key in ("virtual_world_size", "virtual_rank") if getattr(self, key) is None}
        # Likewise one that is not profiled.
        not_identity |= set() if self.profile_steps else {"profile_steps"}
        identity = {key: value for key, value in self.to_dict().items() if key not in not_identity}
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        model = self.model_name_or_path.rstrip("/").rsplit("/", 1)[-1]
        return f"{self.task}-{model}-{strategy}-{world_size}x-{digest}"

    def scalars(self) -> dict[str, Any]:
        """For trackers, which take neither null nor lists."""
        return {key: value for key, value in self.to_dict().items() if isinstance(value, (bool, int, float, str))}

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> RunConfig:
        """Build from a record or a suite; unknown keys and wrong types are refused by name."""
        hints = typing.get_type_hints(cls)
        unknown = sorted(set(values) - set(hints))
        if unknown:
            raise UserError(f"unknown key {unknown[0]!r} in {where}", f"known keys: {', '.join(sorted(hints))}")
        # An explicit null is the same as a key left out.
        given = {key: value for key, value in values.items() if value is not None}
        checked = {key: _checked(value, hints[key], f"{key} in {where}") for key, value in given.items()}
        return cls(**checked)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """One optimizer step's samples over ranks and micro-batches."""

    global_batch_size: int
    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int

    def micro_batches(self, step_samples: Sequence[int], rank: int) -> list[list[int]]:
        """This rank's micro-batches out of one step's samples, in order."""
        size = self.per_device_train_batch_size
        starts = ((turn * self.world_size + rank) * size for turn in range(self.gradient_accumulation_steps))
        return [list(step_samples[start : start + size]) for start in starts]


# The values behind every flag left unsaid. `paper` repeats what the studied documents did.
_EVERYWHERE: dict[str, Any] = {
    "weight_decay": 0.0,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "precision": "fp32",
    "gradient_checkpointing": False,
    "attn_implementation": "sdpa",
    "torch_compile": False,
    "max_steps": 0,
    "logging_steps": 10,
    "nvme_path": "nvme_offload",
    "checkpointing_steps": 0,
    "report_to": "none",
    "dataset_config_name": "wikitext-2-raw-v1",
}
_DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("bert-imdb", "paper"): {
        "model_name_or_path": "bert-large-uncased", "weights": "pretrained", "data": "hub", "seq_length": 128,
        "train_samples": 800, "eval_samples": 200, "global_batch_size": 8, "num_train_epochs": 5,
        "learning_rate": 5e-5, "dropout": -1.0, "eval_steps": 50,
    },
    ("gpt-wikitext", "paper"): {
        "model_name_or_path": "gpt2", "weights": "pretrained", "data": "hub", "seq_length": 1024,
        "train_samples": 800, "eval_samples": 200, "global_batch_size": 8, "num_train_epochs": 1,
        "learning_rate": 5e-5, "dropout": -1.0, "eval_steps": 50,
    },
    ("bert-imdb", "laptop"): {
        "model_name_or_path": "bert-tiny", "weights": "random", "data": "builtin", "seq_length": 64,
        "train_samples": 1600, "eval_samples": 400, "global_batch_size": 16, "num_train_epochs": 1,
        "learning_rate": 1e-3, "dropout": 0.0, "eval_steps": 25,
    },
    ("gpt-wikitext", "laptop"): {
        "model_name_or_path": "gpt-tiny", "weights": "random", "data": "builtin", "seq_length": 64,
        "train_samples": 1600, "eval_samples": 200, "global_batch_size": 16, "num_train_epochs": 1,
        "learning_rate": 3e-3, "dropout": 0.0, "eval_steps": 25,
    },
}  # fmt: skip
# Gemma-2-9B was trained at 2048 tokens in bf16; nothing else in the documents asks for its own defaults.
_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {"gemma-2-9b": {"seq_length": 2048, "precision": "bf16"}}
LARGEST_WORLD = 1024
STEPS_UNTIL_ALIKE = 3


def resolved(config: RunConfig, accelerator_visible: bool) -> RunConfig:
    """Every flag left unsaid gets its value; what contradicts itself is refused."""
    scale = config.scale if config.scale != "auto" else ("paper" if accelerator_visible else "laptop")
    defaults = _EVERYWHERE | _DEFAULTS[config.task, scale]
    asked = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    model = asked.get("model_name_or_path", defaults["model_name_or_path"])
    defaults = defaults | _MODEL_DEFAULTS.get(model.rsplit("/", 1)[-1], {})
    if config.virtual_world_size:
        defaults = defaults | _virtual_defaults(asked, scale, accelerator_visible)
    config = RunConfig(**(defaults | asked | {"scale": scale}))
    _check(config)
    return config


def _virtual_defaults(asked: dict[str, Any], scale: str, accelerator_visible: bool) -> dict[str, Any]:
    """Nothing is learned, so nothing is downloaded or judged: one sample per rank, and steps until they are alike.

    The third step is like every later one: the first makes the optimizer's state, and over the first two ZeRO-3 learns
    and agrees on the order of the layers. On a GPU, whose time is a figure, some more follow after the warm-up.
    """
    samples = asked["virtual_world_size"] * asked.get("per_device_train_batch_size", 1)
    return {
        "weights": "random", "data": "builtin", "global_batch_size": samples, "eval_samples": 8,
        "max_steps": 8 if accelerator_visible else STEPS_UNTIL_ALIKE,
        "train_samples": asked.get("global_batch_size", samples), "eval_steps": 0, "logging_steps": 1,
        "virtual_rank": 0,
        # Without a GPU the sequences are short: what is held of the model's state does not depend on them.
        **({"seq_length": 16} if scale == "laptop" else {}),
    }  # fmt: skip


def _check_virtual(config: RunConfig) -> None:
    ranks, rank = config.virtual_world_size, config.virtual_rank
    if not ranks:
        if ranks == 0 or rank is not None:
            flag = "--virtual_world_size 0" if ranks == 0 else f"--virtual_rank {rank}"
            raise UserError(f"{flag} names no virtual job", f"add --virtual_world_size 2 to {LARGEST_WORLD}")
        return
    if not 2 <= ranks <= LARGEST_WORLD:
        raise UserError(
            f"--virtual_world_size {ranks} is out of range",
            f"use 2 to {LARGEST_WORLD}: one rank is what `accelerate launch` starts without it",
        )
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(f"--virtual_rank {rank} is none of {ranks} ranks", f"use 0 to {ranks - 1}")


def refuse_what_no_virtual_run_has(config: RunConfig) -> None:
    for name, without, why in (
        ("weights", "random", "loads no weights"), ("report_to", "none", "has no losses to report"),
        ("checkpointing_steps", 0, "has no state worth saving"),
        ("resume_from_checkpoint", None, "goes on from nothing"), ("eval_steps", 0, "has no losses to judge"),
        ("profile_steps", 0, "waits for nobody, so its step is not the job's"),
    ):  # fmt: skip
        if getattr(config, name) not in (None, without):
            raise UserError(f"--{name} {getattr(config, name)}: a virtual run {why}", "leave it out")
    steps = config.total_steps(config.train_samples or config.global_batch_size)
    if steps < STEPS_UNTIL_ALIKE:
        raise UserError(
            f"a virtual run of {steps} step{'s'[: steps > 1]} would watch one that is not like all later ones",
            f"use --max_steps {STEPS_UNTIL_ALIKE} or more, or leave it out",
        )


def _check(config: RunConfig) -> None:
    """What is given, resolved or not: a wrong value is refused before torch is imported to resolve the rest."""
    at_least = {
        "seq_length": 2, "train_samples": 0, "eval_samples": 0, "global_batch_size": 1, "num_train_epochs": 1,
        "max_steps": 0, "learning_rate": 0, "weight_decay": 0, "max_grad_norm": 0, "eval_steps": 0,
        "logging_steps": 1, "checkpointing_steps": 0, "profile_steps": 0, "seed": 0,
    }  # fmt: skip
    given = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name} {value} is out of range", "use a finite number")
        if name in at_least and value < at_least[name]:
            raise UserError(f"--{name} {value} is out of range", f"use {at_least[name]} or more")
    if config.seed >= 2**32:
        raise UserError(f"--seed {config.seed} is out of range", f"use {2**32 - 1} or less, which is all numpy takes")
    if config.output_dir == "":
        raise UserError("--output_dir is empty", "name a folder, or leave it out")
    micro, cap = config.per_device_train_batch_size, config.device_memory_cap_gib
    if micro is not None and micro < 1:
        raise UserError(f"--per_device_train_batch_size {micro} is out of range", "use 1 or more, or leave it out")
    if cap is not None and cap <= 0:
        raise UserError(f"--device_memory_cap_gib {cap} is out of range", "use the GiB of the smaller GPU, such as 16")
    if not 0 <= given.get("warmup_ratio", 0) <= 1:
        raise UserError(f"--warmup_ratio {config.warmup_ratio} is out of range", "use a share between 0 and 1")
    if config.warmup_ratio and config.lr_scheduler_type == "constant":
        raise UserError(
            f"--lr_scheduler_type constant ignores --warmup_ratio {config.warmup_ratio}",
            "use --lr_scheduler_type constant_with_warmup",
        )
    dropout = given.get("dropout", 0)
    if not (0 <= dropout < 1 or dropout == -1):
        raise UserError(f"--dropout {config.dropout} is out of range", "use 0 up to below 1, or -1 for the model's own")
    parse_overrides(config.engine_override)
    _check_virtual(config)


def parse_command_line(arguments: Sequence[str] | None = None) -> RunConfig:
    """The flags of study/train.py. Unknown and malformed ones end in one line and exit status 2."""
    parser = _OneLineParser(prog="study/train.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_flags(parser)
    config = config_from_flags(parser.parse_args(arguments))
    _check(config)
    return config


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """One flag per field of RunConfig."""
    hints = typing.get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        if field.name in without:
            continue
        kind = _inner_type(hints[field.name])
        options: dict[str, Any] = {"help": field.metadata["help"], "default": field.default}
        if typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is tuple:
            options |= {"action": "append", "default": [], "metavar": "KEY=JSON"}
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        parser.add_argument(f"--{field.name}", **options)


def config_from_flags(options: argparse.Namespace) -> RunConfig:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    values = {name: value for name, value in vars(options).items() if name in names}
    return RunConfig(**(values | {"engine_override": tuple(values["engine_override"])}))


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message, "study/train.py --help lists the flags")


def _inner_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(member for member in typing.get_args(hint) if member is not type(None))
    return hint


def _checked(value: Any, hint: Any, where: str) -> Any:
    kind = _inner_type(hint)
    if typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        raise UserError(f"{where} is {value!r}", f"use one of {', '.join(typing.get_args(kind))}")
    if typing.get_origin(kind) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UserError(f"{where} is {value!r}", "use a list of KEY=JSON strings")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    raise UserError(f"{where} is {value!r}", f"use a value of type {kind.__name__}")


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _divisor_up_to(limit: int, value: int) -> int:
    """The largest divisor of `value` up to `limit`, without trying more than its square root's worth of numbers."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return max(divisor for n in small for divisor in (n, value // n) if divisor <= limit)


def default_output_dir(config: RunConfig, strategy: str, world_size: int) -> Path:
    return Path("runs") / config.run_id(strategy, world_size)
