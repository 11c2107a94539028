"""The trained workload of `study predict`, `study advise` and `study explain`, whose flags are made from its fields."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Literal

from study.config.errors import UserError
from study.config.flags import Peft, RunConfig, add_fields, changed_flags, flag
from study.predictor.hardware import parse_int, parse_tokens
from study.predictor.live import with_frozen, without_media
from study.predictor.lora_targets import ALL_LINEAR, DEFAULT_TARGETS, is_pattern
from study.predictor.losses import WITHOUT_LOGITS, LossKernel
from study.predictor.request import Attention, OptimizerName, Program, Request, TrainerSettings
from study.predictor.shape import USUAL_LENGTH, ModelShape, with_adapters
from study.predictor.tensor_group import TensorPlan
from study.workloads.presets import split_4_bits

Quantization = Literal["none", "4bit", "8bit"]
# Flags for a program that wraps adapters under FSDP1 in another way.
FSDP1_UNITS = ("reentrant_units", "fsdp_mixed_units")
# Flags that no other engine than FSDP uses.
FSDP_FLAGS = ("sync_each_batch", *FSDP1_UNITS, "quantized_on_host")


def parse_targets(text: str) -> tuple[str, ...]:
    """Return the names of modules, or a regular expression; raise ArgumentTypeError without any."""
    if is_pattern(text):
        return (text.strip(),)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as q_proj,v_proj")
    return names


def known_optimizer(text: str) -> str:
    """Return the text; raise ArgumentTypeError for muon, with the command that supports it."""
    if text == "muon":
        instead = "`study virtual --optimizer muon --max_grad_norm 0` counts its bytes"
        # single_partition_of_fp32_groups in stage_1_and_2.py; under zero.Init a parameter has no elements.
        shards = "ZeRO gives a program's own Muon flat shards, not matrices: set optimizer.type in the DeepSpeed file"
        raise argparse.ArgumentTypeError(f"Muon is not predicted: {instead}; {shards}")
    return text


class WorkloadError(UserError):
    """A refusal of how a model is trained, not of the model."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The trained model and its settings. Each field with `flag` is a flag of all three commands, in the order of help.

    The other fields are flags, too, which each command adds itself: their choices, defaults or help differ.
    """

    model_name_or_path: str = ""
    micro_batch: int | None = None
    accumulation: int | None = None
    # None: `study advise` tries both.
    gradient_checkpointing: bool | None = None
    pure_bf16: bool | None = None
    autocast: bool = False
    dropout: bool = False
    seq_length: int | None = flag(
        f"tokens of a sample; by default {USUAL_LENGTH}, or the model's maximum", type=parse_tokens, metavar="T"
    )
    target_length: int | None = flag(
        "tokens of the decoder of an encoder-decoder model (T5, BART); by default as many as --seq_length",
        type=parse_tokens,
        metavar="T",
    )
    precision: str | None = None
    attn_implementation: Attention = flag(None, "sdpa")
    chunked_loss: bool = flag(
        "compute the output layer and its loss in chunks of tokens, as Liger's kernel does", False, action="store_true"
    )
    loss_kernel: LossKernel = flag(
        "the loss: transformers' (logits in fp32), torch's in the logits' type, or a fused kernel; docs/advice.md",
        "transformers",
    )
    keeps_outputs: bool = flag(
        "the loop keeps the model's output (logits, loss = model(...)) through the backward pass, as nanoGPT's does",
        False,
        action="store_true",
    )
    compile: bool = flag(
        "torch.compile, or fused kernels of norms, rotary positions and gate (Liger's): less memory traffic and, of"
        " models like Llama, fewer activations",
        False,
        action="store_true",
    )
    fsdp_version: int | None = flag(
        "of FSDP; by default 2, and for study explain that of the file, where Accelerate's default is 1",
        type=int,
        choices=(1, 2),
    )
    sync_each_batch: bool = flag(
        "FSDP reduces gradients in each micro-batch (GradientAccumulationPlugin's), and keeps only shards between them",
        False,
        action="store_true",
    )
    reentrant_units: bool = flag(
        "FSDP1 with adapters: reentrant checkpoints enclose its units, as in transformers before 4.52",
        False,
        action="store_true",
    )
    fsdp_mixed_units: bool = flag(
        "FSDP1 with adapters: a custom loop without peft's fsdp_auto_wrap_policy, which the Trainer sets",
        False,
        action="store_true",
    )
    peft: Peft = flag("lora: train only adapters (QLoRA: with --quantization 4bit)", "none")
    adapters_in_16_bits: bool = flag(
        "adapters have the type of 16-bit weights (torchtune, LitGPT, NeMo, peft's autocast_adapter_dtype=False)",
        False,
        action="store_true",
    )
    lora_dropout: float | None = flag(
        "LoRA's dropout: with more than 0 each adapter keeps its own input and a mask; by default 0", metavar="P"
    )
    lora_rank: int | None = flag(f"rank of the LoRA adapters; by default {RunConfig.lora_rank}", metavar="R")
    lora_targets: tuple[str, ...] | None = flag(
        "modules with adapters, as peft's target_modules: names or their ends (q_proj,v_proj), a regular expression of"
        f" full names ('.*_attn\\.[qv]_proj'), or {ALL_LINEAR}; by default peft's own",
        type=parse_targets,
        metavar="NAMES",
    )
    lora_modules_to_save: tuple[str, ...] | None = flag(
        "modules with a trained copy next to the adapters: embed_tokens,lm_head; by default none",
        type=parse_targets,
        metavar="NAMES",
    )
    lora_dora: bool = flag(
        "the adapters are DoRA's (peft's use_dora): trained magnitudes, and the norm of each weight in every pass",
        False,
        action="store_true",
    )
    freeze: tuple[str, ...] | None = flag(
        "modules whose weights are frozen, without adapters: visual (of Qwen-VL), vision_tower, model.layers.0",
        type=parse_targets,
        metavar="NAMES",
    )
    frozen_without_backward: bool = flag(
        "with --freeze and gradient checkpointing: frozen modules before all trained ones have no backward pass, as"
        " after model.disable_input_require_grads() or in LLaMA-Factory",
        False,
        action="store_true",
    )
    text_only: bool = flag(
        "samples of a model of images or sounds have none: its towers are in memory, and do not run",
        False,
        action="store_true",
    )
    tensor_parallel: int | None = flag(
        "ranks that divide the tensors of each layer, and process the same samples: with fsdp2, zero0 to zero3 or tp",
        type=parse_int,
        metavar="N",
    )
    tensor_plan: TensorPlan = flag(
        "what such ranks divide. plain: matrices, as AutoTP and transformers do; sequence: norms, residual stream and"
        " loss, too, as torchtitan's programs do",
        "plain",
    )
    sp: int | None = flag(
        "ranks that divide the tokens of a sample by DeepSpeed's Ulysses (sp_size of Accelerate), under zero3;"
        " --seq_length is the whole sample's",
        type=parse_int,
        metavar="N",
    )
    offload_checkpoints: bool = flag(
        "the inputs of recomputed layers are in host memory (activation_offloading of TRL and axolotl)",
        False,
        action="store_true",
    )
    tiled_mlp: bool = flag(
        "the feed-forward block has the tokens of one tile at a time (tiled_mlp of axolotl, DeepSpeed's TiledMLP)",
        False,
        action="store_true",
    )
    optimizer: OptimizerName = flag(None, "adamw", type=known_optimizer)
    quantization: Quantization = flag("of the frozen weights under adapters; 4bit: QLoRA; 8bit: LLM.int8", "none")
    double_quant: bool = flag(
        "with 4bit: bnb_4bit_use_double_quant, 0.127 and not 0.5 bits of scales a weight", False, action="store_true"
    )
    quantized_on_host: bool = flag(
        "with 4bit under FSDP: processes load the model with device_map={'': 'cpu'}, and GPUs receive shards alone",
        False,
        action="store_true",
    )
    with_reference: bool = flag(
        "a reference, as in DPO and GRPO: a frozen copy or, with LoRA, a forward pass", False, action="store_true"
    )
    hub: bool = flag("ask the hub for the model's config.json", False, action="store_true")

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
        """Add the named fields to a parser as flags; without names all that have the same place in each help."""
        add_fields(parser, Workload, names or _SAME_PLACE)

    @classmethod
    def from_options(
        cls, options: argparse.Namespace, usual_fsdp_version: int = Request.fsdp_version, **values: Any
    ) -> Workload:
        """Return the workload of a parsed command line, with these values of fields that it names differently.

        Raise UserError for flags that exclude each other, lack another one, or have no effect.
        """
        parsed = vars(options) | values
        names = [field.name for field in dataclasses.fields(cls) if field.name in parsed]
        workload = cls(**{name: parsed[name] for name in names})
        workload._check_adapters()
        workload._check_frozen()
        workload._check_trainer(workload.fsdp_version or usual_fsdp_version)
        workload._check_quantization()
        return workload

    def _check_adapters(self) -> None:
        if self.quantization != "none" and self.peft != "lora":
            problem = f"--quantization {self.quantization} is for frozen weights, and all are trained"
            raise UserError(problem, "add --peft lora")
        if self.adapters_in_16_bits and self.peft != "lora":
            raise UserError("--adapters_in_16_bits has no effect without adapters", "add --peft lora")
        if self.lora_dora and self.peft != "lora":
            raise UserError("--lora_dora has no effect without adapters", "add --peft lora")
        for name in ("lora_rank", "lora_targets", "lora_modules_to_save", "lora_dropout"):
            if self.peft != "lora" and (value := getattr(self, name)) is not None:
                text = ",".join(value) if isinstance(value, tuple) else value
                raise UserError(f"--{name} {text} has no effect without adapters", "add --peft lora")

    def _check_frozen(self) -> None:
        if self.freeze and self.peft == "lora":
            problem = "--freeze is for training without adapters, next to which all weights are frozen"
            raise UserError(problem, "leave one of them out")
        if self.frozen_without_backward and not self.freeze:
            raise UserError("--frozen_without_backward has no effect without frozen modules", "add --freeze")

    def _check_trainer(self, fsdp_version: int) -> None:
        for name in FSDP1_UNITS:
            if getattr(self, name) and fsdp_version != 1:
                raise UserError(f"--{name} is for FSDP1", "add --fsdp_version 1")
            if getattr(self, name) and self.peft != "lora":
                problem = f"--{name} is about FSDP1's units with adapters, and all weights are trained"
                raise UserError(problem, "add --peft lora")
        if self.reentrant_units and self.fsdp_mixed_units:
            problem = "--reentrant_units is about frozen units, and --fsdp_mixed_units has none"
            raise UserError(problem, "leave one of them out")
        if self.fsdp_mixed_units and self.is_quantized:
            problem = "4-bit weights are not predicted with --fsdp_mixed_units"
            raise UserError(problem, "leave out --quantization 4bit, or --fsdp_mixed_units")
        if not 0 <= self.trainer.lora_dropout < 1:
            problem = f"--lora_dropout {self.trainer.lora_dropout:g} is out of range"
            raise UserError(problem, "use 0 or more, and less than 1")
        if self.chunked_loss and self.loss_kernel not in ("transformers", "liger"):
            problem = f"--chunked_loss is liger, and --loss_kernel is {self.loss_kernel}"
            raise UserError(problem, "leave one of them out")
        if self.keeps_outputs and self.trainer.loss_kernel in WITHOUT_LOGITS:
            problem = f"--keeps_outputs is about logits, and the loss {self.trainer.loss_kernel} returns none"
            raise UserError(problem, "leave it out")

    def _check_quantization(self) -> None:
        if self.double_quant and not self.is_quantized:
            raise UserError("--double_quant is about the scales of 4-bit weights", "add --quantization 4bit")
        if self.quantized_on_host and not self.is_quantized:
            raise UserError("--quantized_on_host is about 4-bit weights", "add --quantization 4bit")

    @property
    def is_quantized(self) -> bool:
        return self.quantization == "4bit"

    @property
    def trainer(self) -> TrainerSettings:
        """The settings of the user's trainer."""
        kernel: LossKernel = "liger" if self.chunked_loss else self.loss_kernel
        return TrainerSettings(
            reentrant_units=self.reentrant_units,
            fsdp_mixed_units=self.fsdp_mixed_units,
            adapters_in_16_bits=self.adapters_in_16_bits,
            lora_dropout=self.lora_dropout or 0.0,
            double_quantized=self.double_quant,
            quantized_on_host=self.quantized_on_host,
            loss_kernel=kernel,
            keeps_outputs=self.keeps_outputs,
            compiled=self.compile,
            sync_each_batch=self.sync_each_batch,
            in_8_bits=self.quantization == "8bit",
        )

    def program(self, target_length: int | None) -> Program:
        """Return the settings of the program that no strategy changes, with the tokens of a decoder."""
        return Program(
            target_length=target_length,
            attention=self.attn_implementation,
            optimizer=self.optimizer,
            reference_model=self.with_reference,
            quantized=self.is_quantized,
            trainer=self.trainer,
        )

    def adapt(self, shape: ModelShape) -> ModelShape:
        """Return the model's shape, with adapters if they are trained; raise UserError if it cannot be trained so."""
        if shape.quantized_by.endswith("4bit") and not self.is_quantized:
            base, kind = split_4_bits(self.model_name_or_path)
            name = base if kind else shape.name
            in_16_bits = f"name {name}" if kind else "remove quantization_config from config.json"
            fix = f"add --peft lora --quantization 4bit, or {in_16_bits} to predict 16 bits"
            raise UserError(f"{shape.name} has 4-bit weights, which stay frozen", fix)
        if self.text_only:
            shape = without_media(shape)
        if self.freeze:
            return with_frozen(shape, self.freeze, stops=self.frozen_without_backward)
        if self.peft != "lora":
            return shape
        if shape.is_traced:
            self.check_traced(shape.name, shape.model_type)
        rank = RunConfig.lora_rank if self.lora_rank is None else self.lora_rank
        targets, saved = self._find_targets(shape.model_type), self.lora_modules_to_save or ()
        return with_adapters(shape, rank, targets, saved, dora=self.lora_dora)

    def check_traced(self, name: str, model_type: str) -> None:
        """Raise WorkloadError if a model outside the table of families cannot be trained so: a trace takes seconds."""
        if self.peft != "lora":
            return
        if self.quantization == "8bit":
            problem = f"{name} is outside the table of families, whose 8-bit weights are not predicted"
            raise WorkloadError(problem, "use --quantization 4bit, or leave it out")
        self._find_targets(model_type)

    def _find_targets(self, model_type: str) -> tuple[str, ...]:
        """Return the modules with adapters: by default peft's own of a model type; none for all linear layers."""
        if self.lora_targets is None and model_type not in DEFAULT_TARGETS:
            fix = f"add --lora_targets {ALL_LINEAR}, or the names of modules"
            raise WorkloadError(f"peft has no default targets for adapters of a {model_type}", fix)
        names = DEFAULT_TARGETS[model_type] if self.lora_targets is None else self.lora_targets
        return () if ALL_LINEAR in names else names

    def flags(self, **defaults: Any) -> list[str]:
        """Return the words of a command line that set all but the model, and no default; `defaults` are those of the
        command that differ from the fields'."""
        return changed_flags(self, model_name_or_path=self.model_name_or_path, **defaults)


# Of `study predict` alone.
LONG_FEATURES = ("sp", "offload_checkpoints", "tiled_mlp")
_ELSEWHERE = ("hub", "optimizer", "tensor_parallel", "tensor_plan", *LONG_FEATURES)
_SAME_PLACE = [field.name for field in dataclasses.fields(Workload) if field.metadata and field.name not in _ELSEWHERE]
