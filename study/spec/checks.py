"""Which values a run's flags may have. None of this needs torch, so a wrong value is refused at once."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from study.errors import UserError
from study.spec.defaults import STEPS_UNTIL_ALIKE
from study.spec.overrides import parse_overrides

if TYPE_CHECKING:
    from study.spec.config import RunConfig

LARGEST_WORLD = 1024
# Up to here every whole number is a float, which a table or a plot may make of it.
LARGEST = 2**53


def check_values(config: RunConfig) -> None:
    """What was given, whether or not the rest is resolved yet."""
    for field in dataclasses.fields(config):
        value, least = getattr(config, field.name), field.metadata["at_least"]
        if isinstance(value, str):
            _check_text(field.name, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise _out_of_range(field.name, value, "use a finite number")
        if value is not None and least is not None and value < least:
            raise _out_of_range(field.name, value, f"use {least} or more")
        if isinstance(value, int) and value > LARGEST:
            raise _out_of_range(field.name, value, f"use {LARGEST} or less, which is all that a table can hold")
    if config.seed >= 2**32:
        raise _out_of_range("seed", config.seed, f"use {2**32 - 1} or less, which is all numpy takes")
    cap, dropout = config.device_memory_cap_gib, config.dropout
    if cap is not None and cap <= 0:
        raise _out_of_range("device_memory_cap_gib", cap, "use the GiB of the smaller GPU, such as 16")
    if config.warmup_ratio and config.warmup_ratio > 1:
        raise _out_of_range("warmup_ratio", config.warmup_ratio, "use a share between 0 and 1")
    if config.warmup_ratio and config.lr_scheduler_type == "constant":
        raise UserError(
            f"--lr_scheduler_type constant ignores --warmup_ratio {config.warmup_ratio}",
            "use --lr_scheduler_type constant_with_warmup",
        )
    if dropout is not None and not (0 <= dropout < 1 or dropout == -1):
        raise _out_of_range("dropout", dropout, "use 0 up to below 1, or -1 for the model's own")
    parse_overrides(config.engine_override)
    _check_options(config)
    if config.virtual_world_size is not None:
        check_virtual_rank(config.virtual_world_size, config.virtual_rank)
    elif config.virtual_rank is not None:
        flag = f"--virtual_rank {config.virtual_rank}"
        raise UserError(f"{flag} names no virtual job", f"add --virtual_world_size 2 to {LARGEST_WORLD}")


def _check_options(config: RunConfig) -> None:
    if config.bf16_states and config.precision not in (None, "bf16-engine"):
        raise UserError(f"--bf16_states does not go with --precision {config.precision}", "use --precision bf16-engine")
    if config.optimizer == "muon" and config.max_grad_norm:
        raise UserError(
            f"--optimizer muon with --max_grad_norm {config.max_grad_norm:g}: DeepSpeed's stages would clip what Muon"
            " makes of the gradients, and other engines the gradients",
            "use --max_grad_norm 0",
        )


def _check_text(flag: str, value: str) -> None:
    if value == "":
        # As of a variable that is not set; as a path it would be the working directory.
        raise UserError(f"--{flag} is empty", "give it a value, or leave it out")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(f"--{flag} {value!r} is not UTF-8, as a record must be", "use another name")
    if not value.isprintable():
        raise UserError(f"--{flag} {value!r} holds what cannot be printed on a line", "use another name")


def _out_of_range(flag: str, value: float, fix: str) -> UserError:
    return UserError(f"--{flag} {value} is out of range", fix)


def check_virtual_rank(
    ranks: int, rank: int | None, ranks_flag: str = "--virtual_world_size", rank_flag: str = "--virtual_rank"
) -> None:
    """`study virtual` has both flags under names of its own."""
    if not 2 <= ranks <= LARGEST_WORLD:
        raise UserError(
            f"{ranks_flag} {ranks} is out of range",
            f"use 2 to {LARGEST_WORLD}: one rank is what `accelerate launch` starts without it",
        )
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(f"{rank_flag} {rank} is none of {ranks} ranks", f"use 0 to {ranks - 1}")


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
