"""Adapters on the command line: --peft, --lora_rank, --lora_targets, --quantization, --with_reference."""

from __future__ import annotations

import argparse

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.predictor.lora_targets import ALL_LINEAR, DEFAULT_TARGETS
from study.predictor.shape import ModelShape, with_adapters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    qlora = "lora: train only adapters (QLoRA: with --quantization 4bit)"
    parser.add_argument("--peft", choices=("none", "lora"), default="none", help=qlora)
    dropout = "LoRA's dropout: with more than 0 each adapter keeps its own input and a mask; by default 0"
    parser.add_argument("--lora_dropout", type=float, metavar="P", help=dropout)
    rank = f"rank of the LoRA adapters; by default {RunConfig.lora_rank}"
    parser.add_argument("--lora_rank", type=int, metavar="R", help=rank)
    targets = f"modules with adapters, as peft's target_modules: q_proj,v_proj, or {ALL_LINEAR}; by default peft's own"
    parser.add_argument("--lora_targets", type=parse_targets, metavar="NAMES", help=targets)
    parser.add_argument("--quantization", choices=("none", "4bit"), default="none", help="4bit: QLoRA")
    double = "with 4bit: bnb_4bit_use_double_quant, 0.127 and not 0.5 bits of scales a weight"
    parser.add_argument("--double_quant", action="store_true", help=double)
    parser.add_argument("--with_reference", action="store_true", help="a frozen copy, as in DPO and GRPO")


def lora_text(shape: ModelShape) -> str:
    """Format LoRA's rank and trainable parameters, with a leading comma; empty without LoRA."""
    if shape.lora_rank is None:
        return ""
    where = ", ".join(shape.lora_targets) or "all linear layers"
    return f", LoRA of rank {shape.lora_rank} on {where}: {shape.trained_parameters / 1e6:,.3g} M trained"


def apply_lora_options(shape: ModelShape, options: argparse.Namespace) -> ModelShape:
    """Apply the command line's LoRA options to a shape; raise UserError for options that exclude each other."""
    if shape.quantized_by == "4bit" and options.quantization == "none":
        fix = "add --peft lora --quantization 4bit, or remove quantization_config from config.json to predict 16 bits"
        raise UserError(f"{shape.name} has 4-bit weights, which stay frozen", fix)
    if options.quantization != "none" and options.peft != "lora":
        raise UserError("--quantization 4bit is for frozen weights, and all are trained", "add --peft lora")
    if options.with_reference and options.peft == "lora":
        raise UserError("--with_reference: with LoRA the model without adapters is the reference", "leave it out")
    if options.peft == "lora":
        rank = RunConfig.lora_rank if options.lora_rank is None else options.lora_rank
        return with_adapters(shape, rank, _resolve_targets(shape, options.lora_targets))
    for flag in ("lora_rank", "lora_targets", "lora_dropout"):
        if (value := getattr(options, flag)) is not None:
            text = ",".join(value) if isinstance(value, tuple) else value
            raise UserError(f"--{flag} {text} has no effect without adapters", "add --peft lora")
    return shape


def parse_targets(text: str) -> tuple[str, ...]:
    """Return the names of --lora_targets; raise ArgumentTypeError without any."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as q_proj,v_proj")
    return names


def _resolve_targets(shape: ModelShape, targets: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the modules with adapters: by default peft's own of this model type; none for all linear layers."""
    if targets is None and shape.model_type not in DEFAULT_TARGETS:
        fix = f"add --lora_targets {ALL_LINEAR}, or the names of modules"
        raise UserError(f"peft has no default targets for adapters of a {shape.model_type}", fix)
    names = DEFAULT_TARGETS[shape.model_type] if targets is None else targets
    return () if ALL_LINEAR in names else names
