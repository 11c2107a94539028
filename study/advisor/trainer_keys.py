"""Keys of trainers' files: the flag of `study explain` that each amounts to, and the keys that are not modelled.

A row of `keys` is a key of the trainer, a field of Workload (or one of `OTHER_FIELDS`, or none) and the converter of
its value, which returns None for a value that sets nothing. Of several keys with one field the first that sets it is
used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from study.config.errors import clip
from study.predictor.lora_targets import ALL_LINEAR, is_pattern

# Fields without a flag: the type that weights are loaded in, in which a program without DeepSpeed trains them; and a
# micro-batch counts pairs of samples, with a reference model ("dpo") or without one ("pairs"), or completions with one
# ("kto", and "grpo" unless beta is 0).
OTHER_FIELDS = ("loaded", "objective")


# Keys of the engine, which every trainer has.
ENGINE_KEYS = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version")


# LLaMA-Factory's keys of frozen parts, and their defaults.
FREEZES = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False}
# Modules of these parts, by model_type (model_utils/visual.py, _register_composite_model); "" for other models.
LANGUAGE_MODEL = "language_model"
_QWEN_PARTS = (("visual.patch_embed", "visual.blocks"), ("visual.merger",), (LANGUAGE_MODEL, "lm_head"))
FROZEN_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN_PARTS),
    "": (("vision_tower",), ("multi_modal_projector",), (LANGUAGE_MODEL, "lm_head")),
}


class Counted(NamedTuple):
    """A value that that is only close to that of the file, with the difference as text."""

    value: Any
    text: str


Convert = Callable[[Any], Any]


# The key of TrainingArguments for Accelerate's groups of ranks, and those of axolotl for ring attention: the first one
# that is set (check_context_parallel_size in src/axolotl/utils/schemas/validation.py).
MESH_KEY = "parallelism_config"
RING_KEYS = ("context_parallel_size", "sequence_parallel_degree")
# Keys of features for longer samples by their flags of `study predict`, with their effect.
LONG_KEYS = {
    "offload_checkpoints": ("activation_offloading", "activations go to the host"),
    "tiled_mlp": ("tiled_mlp", "layers are computed in tiles of tokens"),
}

# Keys, some of them of several trainers, whose effect on the peak is large and not predicted.
CHANGE_THE_PEAK = frozenset(
    {
        *("quantization_bit", "quantization_method", "gptq", "finetuning_type"),
        *("lora_target_parameters", "unfrozen_parameters", "quantize_moe_experts", "reward_model", "use_vllm"),
        "center_rewards_coefficient",
        *("tensor_parallel_size", "expert_parallel_size", *RING_KEYS),
        *("activation_offloading", "layer_offloading", "tiled_mlp", "use_galore", "use_apollo", "use_badam"),
    }
)


class Key(NamedTuple):
    """One row of a trainer's table."""

    theirs: str
    ours: str
    convert: Convert


class Refusal(NamedTuple):
    """A key that the trainer refuses with an engine: DeepSpeed, stage 3, FSDP, FSDP1 with offload, FSDP2, distributed
    training, or the last without stage 3; with any engine if it is empty."""

    key: str
    engine: str
    # Of its values; by default any that is on.
    values: Callable[[Any], bool] = bool
    # A second key, and its values with which the trainer ends; None is the value of a missing key.
    also: str = ""
    also_values: Callable[[Any], bool] = bool


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The keys of one trainer's file."""

    name: str
    # A file with one of these is this trainer's, unless it has one of `without`.
    marks: frozenset[str]
    keys: tuple[Key, ...]
    # Values of keys that a file lacks, by field.
    defaults: Mapping[str, Any]
    # The same of adapters.
    lora_defaults: Mapping[str, Any]
    # The effect of a key that is not predicted, unless its value is false, empty or 1.
    not_modelled: Mapping[str, str]
    # Trained weights are cast to fp32 after they are loaded.
    casts_to_fp32: bool = False
    # Full training leaves parts of a model of images frozen, by the keys of FREEZES.
    freezes_parts: bool = False
    # FSDP2 trains the 16-bit weights that are loaded: the trainer replaces Accelerate's fsdp2_prepare_model.
    keeps_16_bits: bool = False
    # FSDP's version without a key for it; None: it depends on the release of transformers.
    fsdp_version: int | None = None
    refusals: tuple[Refusal, ...] = ()
    # Its other keys that resemble one above: they are not misspelt.
    similar: frozenset[str] = frozenset()
    # A key that it does not have ends a run; others drop it.
    refuses_unknown: bool = False
    # Keys of TrainingArguments are its own, too.
    has_hf_keys: bool = False
    # Of those that transformers removed: keys that it has all the same.
    kept_keys: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    # Bytes of each run that are not predicted.
    uncounted: str = ""
    # The newest DeepSpeed that its requirements take; empty: any.
    newest_deepspeed: str = ""
    # Its loss compares each sample with the others of a micro-batch.
    is_contrastive: bool = False
    # Values of the key stage whose losses have logits, whatever kernel of a fused loss is on.
    stages_with_logits: tuple[str, ...] = ()
    # The kernel of its loss with a reference, if it is one of these stages.
    preference_loss: str = "transformers"

    def matches(self, document: Mapping[str, Any]) -> bool:
        """Whether a file with these keys is this trainer's."""
        return not self.marks.isdisjoint(document) and self.without.isdisjoint(document)

    @property
    def has_mesh(self) -> bool:
        """Whether the trainer gives Accelerate the value of the key parallelism_config, as TrainingArguments do."""
        return any(key.theirs == MESH_KEY for key in self.keys)

    @property
    def read(self) -> frozenset[str]:
        """The keys that are read here."""
        return frozenset((*(key.theirs for key in self.keys), *self.not_modelled, *ENGINE_KEYS))


# Converters. Each raises ValueError with the values that it accepts.


def to_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a name")
    return value.strip()


def to_count(value: Any) -> int:
    # OmegaConf and HfArgumentParser read a number in quotes, too.
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is not int or not 0 < number <= 10_000_000:
        raise ValueError("a whole number from 1 up")
    return number


def to_fraction(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError("a number from 0 to below 1")
    return float(value)


def is_on(value: Any) -> bool:
    """Return a switch, also one in quotes."""
    texts = {"true": True, "false": False}
    flag = texts.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError("true or false")
    return flag


def to_switch(value: Any) -> bool | None:
    return is_on(value) or None


def to_setting(value: Any) -> bool:
    """Return a switch whose default is on, so that false sets it, too."""
    return is_on(value)


def when_on(setting: Any, *also: str) -> Convert:
    """Return a converter of a switch that sets a field to a value, as these words do, too."""

    def convert(value: Any) -> Any:
        return setting if value in also or is_on(value) else None

    return convert


def to_choice(table: Mapping[str, Any]) -> Convert:
    """Return a converter by a table of values, whose names have any case."""

    def convert(value: Any) -> Any:
        name = str(value).lower()
        if not isinstance(value, str | bool) or name not in table:
            raise ValueError(f"one of {', '.join(table)}")
        return table[name]

    return convert


def to_targets(value: Any) -> tuple[str, ...] | Counted:
    """Return modules with adapters, or one pattern; peft finds no pattern in a list of several names."""
    if isinstance(value, str) and is_pattern(value):
        return (value.strip(),)
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("names of modules")
    if {name.lower() for name in names} & {"all", ALL_LINEAR, "all_linear"}:
        return (ALL_LINEAR,)
    if len(names) > 1 and any(is_pattern(name) for name in names):
        return Counted((ALL_LINEAR,), "peft takes none of several names as a pattern; counted as all linear layers")
    return tuple(dict.fromkeys(names))


def to_saved(value: Any) -> tuple[str, ...] | Counted | None:
    """Return the modules with a trained copy: embeddings and output layers. A classifier's own are always
    trained."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("names of modules")
    counted = tuple(dict.fromkeys(name for name in names if name in _WITH_COPIES))
    uncounted = [name for name in names if name not in (*_WITH_COPIES, "score", "classifier")]
    if uncounted:
        return Counted(counted or None, f"the copy of {clip(', '.join(uncounted))} is not counted")
    return counted or None


# Embeddings and output layers by their names in transformers.
_WITH_COPIES = ("embed_tokens", "lm_head", "wte", "embed_in")
_PAGED = "AdamW whose state may leave the GPU; it is counted there"
# Names of transformers (OptimizerNames in training_args.py), bitsandbytes and axolotl.
_OPTIMIZERS: dict[str, Any] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw", "adam"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), Counted("adamw", _PAGED)),
    "paged_adamw_8bit": "paged_adamw_8bit",
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), Counted("adamw_8bit", "counted as that of bitsandbytes")),
    "adafactor": "adafactor",
    **dict.fromkeys(("lion", "lion_32bit", "lion_pytorch"), "lion"),
}


def to_optimizer(value: Any) -> Any:
    name = to_text(value).lower()
    return _OPTIMIZERS.get(name) or Counted("adamw", f"{name[:40]}: bytes here are those of AdamW")


def to_attention(value: Any) -> Any:
    """Return the attention by a name of transformers; kernels of the hub are flash attention's."""
    name = to_text(value).lower()
    if name in ("eager", "sdpa", "flash_attention_2", "flex_attention"):
        return name
    similar = "flash_attention_2" if "flash" in name else "sdpa"
    return Counted(similar, f"{name[:60]}: counted as {similar}")


def to_bits(value: Any) -> Any:
    bits = to_count(value)
    return f"{bits}bit" if bits in (4, 8) else Counted(None, f"weights of {bits} bits; here they have 16")


# Types of torch, under both names of each.
_TYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16", "fp16": "fp16", "float32": "fp32"}


def to_loaded(value: Any) -> str | None:
    """Return the type that weights are loaded in; "auto" is the checkpoint's, which the file does not have."""
    name = to_text(value).lower().removeprefix("torch.")
    return name if name == "auto" else _TYPES.get(name)


def to_sync(value: Any) -> bool | None:
    """Return sync_each_batch of accelerator_config's gradient_accumulation_kwargs."""
    if not isinstance(value, dict):
        return None
    kwargs = value.get("gradient_accumulation_kwargs")
    return to_switch(kwargs["sync_each_batch"]) if isinstance(kwargs, dict) and "sync_each_batch" in kwargs else None


def in_kwargs(names: tuple[str, ...], convert: Convert) -> Convert:
    """Return a converter of the arguments of from_pretrained that reads the first one with a value of these names."""

    def read(value: Any) -> Any:
        stated = [value[name] for name in names if isinstance(value, Mapping) and value.get(name) is not None]
        return convert(stated[0]) if stated else None

    return read


def by_plugins(value: Any) -> str | None:
    """Return the loss that a plugin of axolotl sets by itself (integrations/cut_cross_entropy/args.py)."""
    names = value if isinstance(value, list) else [value]
    return "cut" if any("CutCrossEntropyPlugin" in str(name) for name in names) else None


# Effects that are not predicted. The sentence "not modelled: ..." follows.
_PACKED = "samples fill the whole length, as they are counted; attention within each sample alone takes less time"
_FP8 = "products in fp8"
_RESUMED = "adapters of an earlier run: rank and targets are those of its adapter_config.json"
_OFFLOADED = LONG_KEYS["offload_checkpoints"][1]
_OFFLOADING = ("offload", "offload_disk", "unsloth")
_OF_ENCODERS = "an encoder's figures are those of a classifier"
_SELF_SIZED = "the trainer halves the micro-batch until it fits"
_PROJECTED = "the optimizer's state is of projected gradients"
_KERNELS = "kernels of another library, with another memory of activations"
_SUPERVISED = "counted as supervised training on prompts and completions, without what generates them"
_TRL_LENGTH = 1024


class RemovedKey(NamedTuple):
    """The release that removed a key, of transformers from TrainingArguments or of TRL, and its replacement."""

    release: str
    fix: str


_TAKE_OUT = "take it out"
REMOVED_HF_KEYS = {
    "evaluation_strategy": RemovedKey("4.51", "set eval_strategy"),
    "dispatch_batches": RemovedKey("4.51", "set it in accelerator_config"),
    "split_batches": RemovedKey("4.51", "set it in accelerator_config"),
    "use_ipex": RemovedKey("4.57", _TAKE_OUT),
    "no_cuda": RemovedKey("5.0", "set use_cpu"),
    "per_gpu_train_batch_size": RemovedKey("5.0", "set per_device_train_batch_size"),
    "per_gpu_eval_batch_size": RemovedKey("5.0", "set per_device_eval_batch_size"),
    "include_inputs_for_metrics": RemovedKey("5.0", "set include_for_metrics: [inputs]"),
    "push_to_hub_token": RemovedKey("5.0", "set hub_token"),
    "push_to_hub_model_id": RemovedKey("5.0", "set hub_model_id"),
    "fsdp_transformer_layer_cls_to_wrap": RemovedKey("5.0", "set transformer_layer_cls_to_wrap in fsdp_config"),
    "fsdp_min_num_params": RemovedKey("5.0", "set min_num_params in fsdp_config"),
    **dict.fromkeys(
        (
            *("overwrite_output_dir", "half_precision_backend", "fp16_opt_level", "fp16_backend", "save_safetensors"),
            *("use_mps_device", "ray_scope", "torchdynamo", "include_tokens_per_second", "jit_mode_eval"),
            *("mp_parameters", "past_index", "adafactor", "tpu_num_cores"),
        ),
        RemovedKey("5.0", _TAKE_OUT),
    ),
    "group_by_length": RemovedKey("5.2", "set train_sampling_strategy: group_by_length"),
    "warmup_ratio": RemovedKey("5.15", "set warmup_steps to the fraction"),
    "logging_dir": RemovedKey("5.15", _TAKE_OUT),
}

# OptimizerNames of transformers 5.23 (training_args.py), with their letters' case.
HF_OPTIMIZERS = frozenset(
    {
        *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor"),
        *("adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad"),
        *("adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit"),
        *("paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit"),
        *("rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit"),
        *("galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
        *("lomo", "adalomo", "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
        *("apollo_adamw", "apollo_adamw_layerwise", "stable_adamw"),
    }
)


def has_value(*values: Any) -> Callable[[Any], bool]:
    """Return whether a value is one of these, whatever its case."""
    return lambda value: (value.lower() if isinstance(value, str) else value) in values


def lacks_value(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


def _is_set(value: Any) -> bool:
    return value is not None


# Keys of TrainingArguments.
_SIMILAR = frozenset(
    {
        *("per_device_eval_batch_size", "eval_accumulation_steps"),
        *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    }
)


def _shared(**effects: str) -> dict[str, str]:
    return {"auto_find_batch_size": _SELF_SIZED, **effects}


def to_compiled(value: Any) -> bool | None:
    """Return whether a mode or a backend, which turns torch_compile on, is one that fuses operations."""
    return to_text(value).lower() not in ("eager", "aot_eager") or None


_COMPILE = (
    Key("torch_compile", "compile", to_switch),
    Key("torch_compile_backend", "compile", to_compiled),
    Key("torch_compile_mode", "compile", to_compiled),
)

# src/axolotl/utils/schemas/ (config.py, training.py, peft.py, model.py, fsdp.py), axolotl at 067b021c. Weights are
# loaded in torch_dtype, bf16 by default (utils/config/__init__.py, resolve_dtype), and 4-bit ones with double
# quantization (loaders/model.py). FSDP's version is 1 without a key (schemas/validation.py).
AXOLOTL = Trainer(
    name="axolotl",
    marks=frozenset({"base_model"}),
    keys=(
        Key("base_model", "model_name_or_path", to_text),
        Key("sequence_len", "seq_length", to_count),
        Key("micro_batch_size", "micro_batch", to_count),
        Key("gradient_accumulation_steps", "accumulation", to_count),
        Key(
            "gradient_checkpointing",
            "gradient_checkpointing",
            lambda value: Counted(True, _OFFLOADED) if value in _OFFLOADING else to_switch(value),
        ),
        Key("adapter", "peft", lambda value: to_choice({"lora": "lora", "qlora": "lora"})(value) if value else None),
        Key("lora_r", "lora_rank", to_count),
        Key("lora_dropout", "lora_dropout", to_fraction),
        Key("peft_use_dora", "lora_dora", to_switch),
        Key("peft_autocast_adapter_dtype", "adapters_in_16_bits", lambda value: not is_on(value)),
        Key("lora_target_linear", "lora_targets", when_on((ALL_LINEAR,))),
        Key("lora_target_modules", "lora_targets", to_targets),
        Key("lora_modules_to_save", "lora_modules_to_save", to_saved),
        Key("load_in_4bit", "quantization", when_on("4bit")),
        Key("load_in_8bit", "quantization", when_on("8bit")),
        Key("optimizer", "optimizer", to_optimizer),
        Key("bf16", "precision", when_on("bf16", "auto", "full")),
        Key("bfloat16", "precision", when_on("bf16")),
        Key("fp16", "precision", when_on("fp16")),
        Key("float16", "precision", when_on("fp16")),
        Key("attn_implementation", "attn_implementation", to_attention),
        Key("flash_attention", "attn_implementation", when_on("flash_attention_2")),
        Key("eager_attention", "attn_implementation", when_on("eager")),
        Key("liger_fused_linear_cross_entropy", "loss_kernel", when_on("liger")),
        Key("cut_cross_entropy", "loss_kernel", when_on("cut")),
        Key("liger_glu_activation", "compile", to_switch),
        Key("torch_compile", "compile", when_on(True, "auto")),
        *_COMPILE[1:],
        Key("plugins", "loss_kernel", by_plugins),
        Key("precompute_ref_log_probs", "objective", when_on("pairs")),
        *(Key(name, "", to_count) for name in RING_KEYS),
        *(Key(name, "", lambda _: None) for name, _ in LONG_KEYS.values()),
        Key(
            "rl",
            "objective",
            to_choice(
                {
                    **dict.fromkeys(("dpo", "ipo"), "dpo"),
                    **dict.fromkeys(("orpo", "simpo"), "pairs"),
                    **dict.fromkeys(("kto", "grpo", "gdpo", "ebft"), Counted(None, "counted as supervised training")),
                }
            ),
        ),
    ),
    defaults={"seq_length": 512, "micro_batch": 1, "accumulation": 1, "precision": "bf16", "loaded": "bf16"},
    # patch_accelerate_fsdp2 in monkeypatch/accelerate/fsdp2.py, which patch_manager.py applies.
    keeps_16_bits=True,
    lora_defaults={"double_quant": True},
    not_modelled=_shared(
        sample_packing=_PACKED,
        batch_flattening="samples of a micro-batch are one row, without padding",
        gptq="weights in 4 bits of GPTQ",
        lora_target_parameters="adapters of these parameters",
        lora_model_dir=_RESUMED,
        peft_layers_to_transform="adapters of these layers alone; here all have them",
        relora="ReLoRA",
        unfrozen_parameters="the other parameters are frozen; here all are trained",
        tensor_parallel_size="ranks share layers",
        expert_parallel_size="a rank has the weights of some experts, and sends tokens in place of them",
        dp_replicate_size="FSDP in replica groups",
        layer_offloading="layers go to the host",
        selective_checkpointing="some outputs are saved, and not recomputed",
        chunked_cross_entropy="the loss in chunks of tokens (--chunked_loss is Liger's)",
        fp8=_FP8,
        qat="quantization-aware training",
        quantize_moe_experts="experts in fewer bits",
        reward_model="a model with a head of one value, and pairs of samples",
        process_reward_model="a model with a head of one value",
        lora_mlp_kernel=_KERNELS,
        lora_qkv_kernel=_KERNELS,
        trainer_cls="a custom trainer",
    ),
    fsdp_version=1,
    # check_fsdp_offload_w_8bit_optimizer and check_fsdp2_w_8bit_optimizer in schemas/validation.py
    refusals=(
        Refusal("optimizer", "FSDP1 with offload", lambda value: "8bit" in str(value)),
        Refusal("optimizer", "FSDP2", lambda value: value in ("adamw_8bit", "adamw_bnb_8bit")),
    ),
    similar=_SIMILAR
    | {
        *("eval_sample_packing", "eval_sequence_len", "sequence_length", "lora_rank", "peft_use_rslora", "trl"),
        *("flex_attention", "s2_attention", "sage_attention", "lora_o_kernel", "optim_target_modules"),
    },
)

# Engines that shard weights, and LLaMA-Factory's optimizers of projected gradients.
_SHARDED, _PROJECTING = ("stage 3", "FSDP"), ("galore", "apollo")
# src/llamafactory/hparams/ (model_args.py, data_args.py, finetuning_args.py), LLaMA-Factory at ff6d4d12, and the
# defaults of TrainingArguments. Checkpointing is on (model/model_utils/checkpointing.py), and trained weights are cast
# to fp32 (model/adapter.py).
LLAMA_FACTORY = Trainer(
    name="LLaMA-Factory",
    marks=frozenset(
        {
            *("finetuning_type", "cutoff_len", "lora_target", "quantization_bit", "enable_liger_kernel", "flash_attn"),
            *("template", "stage", "pure_bf16", "dataset_dir"),
        }
    ),
    keys=(
        Key("model_name_or_path", "model_name_or_path", to_text),
        Key("cutoff_len", "seq_length", to_count),
        Key("per_device_train_batch_size", "micro_batch", to_count),
        Key("gradient_accumulation_steps", "accumulation", to_count),
        Key("disable_gradient_checkpointing", "gradient_checkpointing", lambda value: not is_on(value)),
        Key(
            "finetuning_type",
            "peft",
            to_choice(
                {
                    "lora": "lora",
                    "full": "none",
                    "freeze": Counted("none", "most layers are frozen; here all are trained"),
                    "oft": Counted("lora", "OFT, counted as LoRA"),
                }
            ),
        ),
        Key("lora_rank", "lora_rank", to_count),
        Key("lora_dropout", "lora_dropout", to_fraction),
        Key("use_dora", "lora_dora", to_switch),
        Key("lora_target", "lora_targets", to_targets),
        Key("additional_target", "lora_modules_to_save", to_saved),
        Key("quantization_bit", "quantization", to_bits),
        Key("double_quantization", "double_quant", to_setting),
        Key("optim", "optimizer", to_optimizer),
        Key("pure_bf16", "loaded", when_on("bf16")),
        Key("bf16", "precision", when_on("bf16")),
        Key("fp16", "precision", when_on("fp16")),
        Key("pure_bf16", "precision", when_on("bf16")),
        Key(
            "flash_attn",
            "attn_implementation",
            to_choice(
                {
                    "auto": None,
                    **dict.fromkeys(("disabled", "false"), "eager"),
                    "sdpa": "sdpa",
                    "fa2": "flash_attention_2",
                    "fa3": Counted("flash_attention_2", "fa3: counted as flash_attention_2"),
                }
            ),
        ),
        Key("enable_liger_kernel", "loss_kernel", when_on("liger")),
        Key("enable_liger_kernel", "compile", to_switch),
        *_COMPILE,
        *(Key(name, "", lambda _: None) for name in FREEZES),
        Key("pref_loss", "objective", lambda value: "pairs" if value in ("orpo", "simpo") else None),
        Key(
            "stage",
            "objective",
            to_choice(
                {
                    **dict.fromkeys(("sft", "pt"), None),
                    "dpo": "dpo",
                    "rm": "pairs",
                    **dict.fromkeys(("kto", "ppo"), Counted(None, "counted as supervised training")),
                }
            ),
        ),
    ),
    defaults={
        "seq_length": 2048,
        "micro_batch": 8,
        "accumulation": 1,
        "gradient_checkpointing": True,
        "peft": "lora",
    },
    lora_defaults={"lora_rank": 8, "lora_targets": (ALL_LINEAR,), "double_quant": True},
    not_modelled=_shared(
        packing=_PACKED,
        neat_packing=_PACKED,
        adapter_name_or_path=_RESUMED,
        use_unsloth=_KERNELS,
        use_unsloth_gc=_OFFLOADED,
        use_galore=_PROJECTED,
        use_apollo=_PROJECTED,
        use_badam="one block of layers is trained at a time",
        use_adam_mini="one second moment for many parameters",
        use_muon="Muon's state is one moment",
        use_llama_pro="added layers alone are trained",
        shift_attn="shifted sparse attention",
        mixture_of_depths="tokens skip layers",
        use_kt="experts are on the host",
        use_mca="Megatron's engine",
        use_megatron_bridge="Megatron's engine",
        use_hyper_parallel="another engine",
        fp8=_FP8,
        upcast_layernorm="norms in fp32",
        upcast_lmhead_output="logits in fp32",
        resize_vocab="the vocabulary has another size",
    ),
    casts_to_fp32=True,
    freezes_parts=True,
    # require_logits in apply_liger_kernel (model/model_utils/liger_kernel.py), by load_model in model/loader.py
    stages_with_logits=("rm", "ppo", "dpo", "kto"),
    preference_loss="batch_logps",
    # requirements/deepspeed.txt; check_dependencies in extras/misc.py has no DeepSpeed.
    newest_deepspeed="0.18.4",
    refusals=(
        # get_train_args in hparams/parser.py, lines 485 to 536
        *(Refusal(name, "stage 3") for name in ("predict_with_generate", "pissa_init", "pure_bf16")),
        *(Refusal(name, "stage 3") for name in ("use_unsloth", "use_kt")),
        *(Refusal(f"use_{name}", "DeepSpeed") for name in _PROJECTING),
        *(Refusal(f"{name}_layerwise", "distributed training", also=f"use_{name}") for name in _PROJECTING),
        Refusal("use_badam", "distributed training", also="badam_mode", also_values=has_value("ratio")),
        Refusal(
            "use_badam", "distributed training without stage 3", also="badam_mode", also_values=has_value("layer", None)
        ),
        # _verify_model_args there, lines 235 to 243
        Refusal("quantization_bit", "", also="finetuning_type", also_values=has_value("full", "freeze")),
        Refusal("pissa_init", "", also="quantization_bit", also_values=_is_set),
        Refusal("resize_vocab", "", also="quantization_bit", also_values=_is_set),
        # configure_quantization in model/model_utils/quantization.py, lines 197 to 223
        *(
            Refusal("quantization_bit", engine, lacks_value(4, "4"), "quantization_method", has_value("bnb", None))
            for engine in _SHARDED
        ),
        *(
            Refusal("quantization_method", engine, has_value("hqq", "eetq"), "quantization_bit", _is_set)
            for engine in _SHARDED
        ),
    ),
    similar=_SIMILAR
    | {
        *("galore_rank", "galore_target", "local_rank", "quantization_method", "quantization_type"),
        *("export_quantization_bit", "use_liger_kernel", "gradient_checkpointing"),
    },
    refuses_unknown=True,
    has_hf_keys=True,
    # Its own (training_args.py), and those of transformers 5.8, the newest one that it takes (pyproject.toml).
    kept_keys=frozenset({"overwrite_output_dir", "warmup_ratio", "logging_dir"}),
)

_HF_KEYS = (
    Key("model_name_or_path", "model_name_or_path", to_text),
    Key("per_device_train_batch_size", "micro_batch", to_count),
    Key("gradient_accumulation_steps", "accumulation", to_count),
    Key("gradient_checkpointing", "gradient_checkpointing", to_setting),
    Key("activation_checkpointing", "gradient_checkpointing", to_setting),
    Key("optim", "optimizer", to_optimizer),
    Key("bf16", "precision", when_on("bf16")),
    Key("fp16", "precision", when_on("fp16")),
    Key("use_liger_kernel", "loss_kernel", when_on("liger")),
    Key("use_liger", "loss_kernel", when_on("liger")),
    # Its kernels of norms, rotary positions and gate are on by default, too.
    Key("use_liger_kernel", "compile", to_switch),
    Key("use_liger", "compile", to_switch),
    *_COMPILE,
    Key("dtype", "loaded", to_loaded),
    Key("torch_dtype", "loaded", to_loaded),
    Key("attn_implementation", "attn_implementation", to_attention),
    Key("accelerator_config", "sync_each_batch", to_sync),
    # Read in trainer_groups.py.
    Key(MESH_KEY, "", lambda _: None),
    Key("use_flash_attention_2", "attn_implementation", when_on("flash_attention_2")),
)
_HF_NOT_MODELLED = _shared(
    optim_target_modules=_PROJECTED,
)

# A file with one of these is for TRL's GRPOTrainer.
GRPO_KEYS = ("max_completion_length", "num_generations")
# Its whole numbers that a generation's completions follow from.
GRPO_COUNTS = ("num_generations", "steps_per_generation", "generation_batch_size")
# Tokens of its prompts and completions without a key: max_prompt_length is of TRL before 0.28, and prompts of later
# ones have any length. Completions have 256 before TRL 1.10.
GRPO_LENGTHS = {"max_prompt_length": 512, "max_completion_length": 512}

# transformers 5.23.0, training_args.py.
TRAINING_ARGUMENTS = Trainer(
    name="TrainingArguments",
    marks=frozenset({"per_device_train_batch_size", "model_name_or_path", "num_train_epochs"}),
    keys=(*_HF_KEYS, Key("max_length", "seq_length", to_count)),
    defaults={"micro_batch": 8, "accumulation": 1},
    lora_defaults={},
    not_modelled=_HF_NOT_MODELLED,
    similar=_SIMILAR,
    refuses_unknown=True,
    has_hf_keys=True,
)


def _example(
    script: str,
    length: int | None,
    *marks: str,
    target: int | None = None,
    extra_keys: tuple[Key, ...] = (),
    **changes: Any,
) -> Trainer:
    """Return the reader of the file of an example script of transformers, whose samples have at most `length` tokens by
    default and `target` in a decoder (examples/pytorch at 00d481d1); None: as many as the model, or none at all."""
    lengths = {"seq_length": length, "target_length": target}
    return dataclasses.replace(
        TRAINING_ARGUMENTS,
        name=f"transformers' {script}",
        marks=frozenset(marks),
        keys=(
            *_HF_KEYS,
            *(Key(name, "seq_length", to_count) for name in ("block_size", "max_seq_length", "max_source_length")),
            Key("max_target_length", "target_length", to_count),
            *extra_keys,
        ),
        defaults={**TRAINING_ARGUMENTS.defaults, **{name: value for name, value in lengths.items() if value}},
        similar=TRAINING_ARGUMENTS.similar | {"val_max_target_length", "max_answer_length"},
        **changes,
    )


_OF_TEXT = ("dataset_config_name", "validation_split_percentage", "train_file", "validation_file", "pad_to_max_length")
# Their names of a dataset are TRL's, too, so keys that TRL does not have decide.
_EXAMPLES = (
    # Of sounds and images, which have no length in tokens.
    _example(
        "run_speech_recognition_seq2seq.py",
        None,
        *("forced_decoder_ids", "suppress_tokens", "freeze_encoder"),
    ),
    _example(
        "run_speech_recognition_ctc.py",
        None,
        *("mask_time_prob", "mask_feature_prob", "layerdrop", "ctc_loss_reduction", "ctc_zero_infinity"),
        *("chars_to_ignore", "word_delimiter_token", "phoneme_language"),
    ),
    _example("run_audio_classification.py", None, "max_length_seconds"),
    _example("example script of speech", None, "audio_column_name", "max_duration_in_seconds"),
    _example(
        "run_clip.py",
        128,
        *("image_column", "caption_column", "freeze_vision_model", "freeze_text_model"),
        is_contrastive=True,
    ),
    _example("run_mae.py or run_mim.py", None, "mask_ratio", "norm_pix_loss", "mask_patch_size"),
    _example(
        "run_image_classification.py",
        None,
        *("train_dir", "validation_dir", "image_column_name", "train_val_split", "image_processor_name"),
    ),
    # Of text.
    _example("run_ner.py", None, "label_all_tokens", "return_entity_level_metrics"),
    _example("run_classification.py", 128, "text_column_names", "remove_splits", "shuffle_train_dataset"),
    _example("run_glue.py", 128, "task_name"),
    _example("run_qa.py", 384, "doc_stride", "n_best_size", "version_2_with_negative"),
    _example("run_summarization.py", 1024, "summary_column", target=128),
    _example("run_translation.py", 1024, "source_lang", "target_lang", target=128),
    _example(
        "run_translation.py or run_summarization.py",
        1024,
        *("max_source_length", "max_target_length", "source_prefix"),
        target=128,
    ),
    _example(
        "run_mlm.py",
        1024,
        *("mlm_probability", "line_by_line"),
        uncounted=f"logits of every token and word: {_OF_ENCODERS}",
    ),
    # run_clm.py has no max_seq_length, which those of encoders have.
    _example("run_clm.py", 1024, "block_size", "config_overrides", *_OF_TEXT, without=frozenset({"max_seq_length"})),
    _example("example script of text", None, *_OF_TEXT),
)
# A classifier's own script, whose keys are TRL's, too: of an encoder TRL trains a reward model alone.
OF_CLASSIFIERS = _example("example script of text", None, extra_keys=(Key("max_length", "seq_length", to_count),))
SHARED_WITH_TRL = frozenset({"dataset_name", "max_length", "max_seq_length"})
# sentence_transformers/training_args.py: the length of a text is a setting of its model.
SENTENCE_TRANSFORMERS = dataclasses.replace(
    TRAINING_ARGUMENTS,
    name="sentence-transformers",
    marks=frozenset({"batch_sampler", "multi_dataset_batch_sampler", "router_mapping", "learning_rate_mapping"}),
    is_contrastive=True,
)

# Keys of TRL's DPOConfig that its SFTConfig does not have, whatever their value, and the losses of its loss_type.
DPO_KEYS = (
    *("precompute_ref_log_probs", "precompute_ref_batch_size", "f_divergence_type", "f_alpha_divergence_coef"),
    *("label_smoothing", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "ld_alpha", "loss_weights"),
    *("use_weighting", "discopop_tau", "reference_free", "rpo_alpha"),
)
DPO_LOSSES = frozenset(
    {
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair"),
        *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    }
)
# Keys and losses of TRL's KTOConfig, whose samples are single completions.
KTO_KEYS = ("desirable_weight", "undesirable_weight")
KTO_LOSSES = frozenset({"kto", "apo_zero_unpaired"})
# A file with this key is for TRL's RewardTrainer.
REWARD_KEY = "center_rewards_coefficient"


_LONG_PROMPTS = "take it out, and filter prompts of the dataset: max_length cuts a whole sample"
# The first release of TRL in which no config of a trainer has the key, for which its parser ends with an error.
REMOVED_TRL_KEYS = {
    "max_target_length": RemovedKey("0.15.0", "set max_length"),
    "use_num_logits_to_keep": RemovedKey("0.17.0", _TAKE_OUT),
    "use_liger": RemovedKey("0.18.0", "set use_liger_kernel"),
    "vllm_max_model_len": RemovedKey("0.18.0", "set vllm_max_model_length"),
    **dict.fromkeys(
        (
            *("dataset_batch_size", "chars_per_token", "num_of_sequences"),
            *("vllm_device", "vllm_dtype", "vllm_enable_prefix_caching"),
        ),
        RemovedKey("0.18.0", _TAKE_OUT),
    ),
    "max_seq_length": RemovedKey("0.20.0", "set max_length"),
    "torch_dtype": RemovedKey("0.27.0", "set dtype"),
    "wandb_log_unique_prompts": RemovedKey("0.27.0", "set log_unique_prompts"),
    "gradient_checkpointing_use_reentrant": RemovedKey(
        "0.27.0", "set gradient_checkpointing_kwargs: {use_reentrant: ...}"
    ),
    "use_liger_loss": RemovedKey("0.28.0", "set use_liger_kernel"),
    "vllm_guided_decoding_regex": RemovedKey("0.28.0", "set vllm_structured_outputs_regex"),
    "max_prompt_length": RemovedKey("0.29.0", _LONG_PROMPTS),
    **dict.fromkeys(
        (
            *("reference_free", "rpo_alpha", "label_pad_token_id", "force_use_ref_model", "generate_during_eval"),
            *("model_adapter_name", "ref_adapter_name", "ref_model_init_kwargs", "base_model_attribute_name"),
            "use_logits_to_keep",
        ),
        RemovedKey("0.29.0", _TAKE_OUT),
    ),
}
# Of GRPO's config one is missing a release earlier.
REMOVED_GRPO_KEYS = {"max_prompt_length": RemovedKey("0.28.0", _LONG_PROMPTS)}
# Keys without a field, and their replacement.
NO_TRL_KEYS = {
    **dict.fromkeys(("tokenizer", "tokenizer_name_or_path"), "the model's is read; in a script set processing_class"),
    "use_flash_attention_2": "set attn_implementation: flash_attention_2",
    "max_steps_per_epoch": "set max_steps",
}
# A file with one of these is of programs over TRL with further fields: alignment-handbook and open-r1.
OVER_TRL = frozenset({"dataset_mixer", "dataset_mixture"})


def by_dpo_loss(value: Any) -> str | None:
    """Return the objective that the key loss_type, one loss or a list, means."""
    names = value if isinstance(value, list) else [value]
    return "dpo" if any(isinstance(name, str) and name in DPO_LOSSES for name in names) else None


_REWARD = "the model has a head of one value in place of the output layer, which is counted"

# trl/trainer/model_config.py, base_config.py, sft_config.py and dpo_config.py, TRL at f2cd5771; recipes of
# alignment-handbook at 925acdfe have the same keys, and names of earlier releases (max_seq_length, torch_dtype).
TRL = Trainer(
    name="TRL",
    marks=frozenset(
        {
            *("use_peft", "lora_r", "max_length", "max_seq_length", "dataset_name", "dataset_mixture", "dataset_mixer"),
            *("beta", "num_generations", "max_completion_length", "max_prompt_length", "packing", "load_in_4bit"),
            *(REWARD_KEY, *DPO_KEYS, *KTO_KEYS),
        }
    ),
    keys=(
        # They replace the keys of the file (trl/scripts/sft.py).
        Key("model_init_kwargs", "loaded", in_kwargs(("dtype", "torch_dtype"), to_loaded)),
        Key("model_init_kwargs", "attn_implementation", in_kwargs(("attn_implementation",), to_attention)),
        *_HF_KEYS,
        Key("max_length", "seq_length", to_count),
        Key("max_seq_length", "seq_length", to_count),
        Key("use_peft", "peft", when_on("lora")),
        Key("lora_r", "lora_rank", to_count),
        Key("lora_dropout", "lora_dropout", to_fraction),
        Key("use_dora", "lora_dora", to_switch),
        Key("lora_target_modules", "lora_targets", to_targets),
        Key("lora_modules_to_save", "lora_modules_to_save", to_saved),
        Key("load_in_4bit", "quantization", when_on("4bit")),
        Key("load_in_8bit", "quantization", when_on("8bit")),
        Key("use_bnb_nested_quant", "double_quant", to_switch),
        Key(REWARD_KEY, "objective", lambda value: Counted("pairs", f"{_REWARD}; not modelled")),
        Key("precompute_ref_log_probs", "objective", when_on("pairs")),
        *(Key(name, "objective", lambda value: Counted("grpo", _SUPERVISED)) for name in GRPO_KEYS),
        # Read in trainer_files.py.
        *(Key(name, "objective", lambda value: "kto") for name in KTO_KEYS),
        *(Key(name, "objective", lambda value: "dpo") for name in ("beta", *DPO_KEYS)),
        Key("loss_type", "objective", by_dpo_loss),
        # Read in trainer_groups.py.
        Key("activation_offloading", "", lambda _: None),
        # Read with the hardware, in trl_files.py.
        Key("vllm_mode", "", to_choice({"colocate": None, "server": None})),
        Key("vllm_gpu_memory_utilization", "", to_fraction),
        Key("vllm_enable_sleep_mode", "", to_switch),
    ),
    defaults={
        "seq_length": _TRL_LENGTH,
        "micro_batch": 8,
        "accumulation": 1,
        "gradient_checkpointing": True,
        "precision": "bf16",
        "loaded": "fp32",
    },
    lora_defaults={"lora_rank": 16, "lora_dropout": 0.05},
    not_modelled={
        **_HF_NOT_MODELLED,
        "packing": _PACKED,
        "padding_free": "samples of a micro-batch are one row, without padding",
        "lora_target_parameters": "adapters of these parameters",
        "use_vllm": "vLLM's copy of the weights, and its cache",
    },
    similar=_SIMILAR
    | {
        *("beta1", "beta2", "cache_implementation", "label_smoothing_factor", "num_iterations", "num_generations_eval"),
        *("teacher_model_name_or_path", "teacher_model_init_kwargs", "reward_model_name_or_path"),
        "gpu_memory_utilization",
    },
    refuses_unknown=True,
    has_hf_keys=True,
)

# The first whose mark a file has.
TRAINERS = (AXOLOTL, LLAMA_FACTORY, SENTENCE_TRANSFORMERS, *_EXAMPLES, TRL, TRAINING_ARGUMENTS)
