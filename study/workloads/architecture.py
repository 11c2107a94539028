"""The model's architecture with a run's dropout and attention, its adapters and its tokenizer; misfits are refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError, first_line
from study.config.flags import RunConfig
from study.workloads.presets import (
    DROPOUT_FIELDS,
    FAMILY_OF_TASK,
    OTHER_MODEL,
    OTHER_TOKENIZER,
    Preset,
    find_model,
    load_from,
    refuse_depth,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def add_adapters(model: PreTrainedModel, config: RunConfig) -> None:
    """Add the adapters in place. They are the same for every strategy: drawn on the host, from the seed alone."""
    if config.peft == "none":
        return
    import torch
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    is_classifier = FAMILY_OF_TASK[config.task] == "sequence-classification"
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        # peft leaves the output layer out: of a language model it is the embedding, of a classifier it is new.
        target_modules="all-linear",
        task_type=TaskType.SEQ_CLS if is_classifier else TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        inject_adapter_in_model(settings, model)
    if is_classifier:
        for child in model.children():
            if child is not model.base_model:
                child.requires_grad_(True)


def requested_adapters(config: RunConfig) -> dict[str, Any] | None:
    if config.peft == "none":
        return None
    return {"kind": "lora", "rank": config.lora_rank, "alpha": config.lora_alpha}


def find_adapters(model: Any) -> Any:
    """Return the settings of the live adapters; a list where modules differ."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "lora_alpha")]
    found = {(*layer.r.values(), *layer.lora_alpha.values()) for layer in layers}
    kinds = [{"kind": "lora", "rank": rank, "alpha": alpha} for rank, alpha in sorted(found)]
    return kinds if len(kinds) > 1 else next(iter(kinds), None)


# transformers' sdpa for samples without padding, under a name of this project.
SDPA_CAUSAL = "sdpa_causal"


def model_config(config: RunConfig) -> PreTrainedConfig:
    from transformers import AutoConfig

    source = find_model(config.model_name_or_path)
    options = {"attn_implementation": select_attention(config)}
    if isinstance(source, Preset):
        if config.weights == "pretrained" and not source.has_published_weights:
            raise UserError(f"no weights are published for {source.name}", "use --weights random")
        architecture = AutoConfig.for_model(source.model_type, **source.architecture, **options)
    else:
        architecture = load_from(source, AutoConfig.from_pretrained, "config", **options)
    _refuse_misfit(architecture, config)
    if config.attn_implementation == SDPA_CAUSAL:
        _refuse_missing_mask(architecture, config)
    return with_run_settings(architecture, config)


def build_model(config: RunConfig) -> PreTrainedModel:
    """Build the model with the architecture's own random weights, on the default device (`meta` to count only).

    It is built by its class rather than from_config, which under a live ZeRO-3 configuration would partition it.
    """
    architecture = model_config(config)
    return model_class(config, architecture)(architecture)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model, and its config in transformers."""

    parameters: int
    largest_parameter: int
    architecture: Any


def shape_of(config: RunConfig) -> Shape:
    import torch

    with torch.device("meta"):
        try:
            model = build_model(config)
        except UserError:
            raise
        except Exception as error:
            # Nothing is allocated here, so the architecture itself is wrong: heads that do not divide, for example.
            problem = f"the model that {config.model_name_or_path} describes cannot be built"
            raise UserError(f"{problem} ({type(error).__name__}: {first_line(error)})", OTHER_MODEL) from error
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Shape(sum(sizes), max(sizes), model.config)


def select_attention(config: RunConfig) -> str | None:
    """Return `attn_implementation` for transformers. None lets it choose sdpa where the model has it, else eager.

    GPT-Neo and GPT-J have no sdpa, and asking for it by name would be an error.
    """
    from transformers.utils import is_flash_attn_2_available

    asked = config.attn_implementation
    if asked == "flash_attention_2":
        if not is_flash_attn_2_available():
            raise UserError("--attn_implementation flash_attention_2 needs flash-attn and a GPU for it", "use sdpa")
        if config.precision == "fp32":
            raise UserError("--attn_implementation flash_attention_2 does not compute in fp32", "use sdpa or bf16")
    elif asked == SDPA_CAUSAL:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # A name without a mask function: transformers makes no mask and passes `is_causal` to torch. Under sdpa it
        # makes a mask wherever torch.compile traces, since it cannot look at positions there, and with a mask torch
        # uses no kernel for causal attention.
        AttentionInterface.register(SDPA_CAUSAL, sdpa_attention_forward)
    elif asked not in ("sdpa", "eager"):
        known = f"use eager, sdpa, {SDPA_CAUSAL} or flash_attention_2"
        raise UserError(f"--attn_implementation {asked} is not known here", known)
    return None if asked == "sdpa" else asked


def resolve_attention(config: RunConfig, architecture: PreTrainedConfig) -> str:
    """Return the attention in use: from the model's files, the flag, or the default of transformers."""
    default = "sdpa" if model_class(config, architecture)._supports_sdpa else "eager"
    return architecture._attn_implementation or select_attention(config) or default


def has_window(architecture: PreTrainedConfig) -> bool:
    """Whether any layer attends to less than the whole context before a token."""
    text = architecture.get_text_config()
    others = {one for one in getattr(text, "layer_types", None) or () if one != "full_attention"}
    return bool(others or (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)))


def _refuse_missing_mask(architecture: PreTrainedConfig, config: RunConfig) -> None:
    """Refuse models that would silently train as another model without their mask."""
    cls = model_class(config, architecture)
    if FAMILY_OF_TASK[config.task] != "causal-lm":
        why = "reads in both directions"
    elif getattr(architecture, "attn_logit_softcapping", None) is not None:
        why = "caps the scores of its attention, which sdpa does not"
    elif not cls._supports_sdpa or not cls._supports_attention_backend:
        why = "computes its attention itself"
    elif has_window(architecture):
        why = "has attention with a window"
    else:
        return
    problem = f"--attn_implementation {SDPA_CAUSAL} leaves out all masks, and {config.model_name_or_path} {why}"
    raise UserError(problem, "use sdpa")


def _refuse_misfit(architecture: PreTrainedConfig, config: RunConfig) -> None:
    from transformers.models.auto import modeling_auto

    model_type, name = architecture.model_type, config.model_name_or_path
    # A family that fills in masked words is an encoder. BERT has a causal head as well, but it is not used as one.
    encoder = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if FAMILY_OF_TASK[config.task] == "causal-lm":
        fits = model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not encoder
        wanted = "a causal language model such as gpt2"
    else:
        fits = model_type in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and encoder
        wanted = "an encoder such as bert-large-uncased"
    if not fits:
        raise UserError(f"{name} (a {model_type} model) does not fit --task {config.task}", f"use {wanted}")
    refuse_depth(getattr(architecture, "num_hidden_layers", 1), name)
    if getattr(architecture, "quantization_config", None) is not None:
        # transformers silently ignores some kinds and trains on the stored integers as if they were the weights.
        raise UserError(f"{name} has quantized weights (quantization_config), which are not trained here", OTHER_MODEL)
    largest = getattr(architecture, "max_position_embeddings", None)
    if largest is not None and config.seq_length > largest:
        problem = f"--seq_length {config.seq_length} is longer than the context of {name}"
        raise UserError(problem, f"use --seq_length {largest} or less")


def with_run_settings(architecture: PreTrainedConfig, config: RunConfig) -> PreTrainedConfig:
    if FAMILY_OF_TASK[config.task] == "sequence-classification":
        architecture.num_labels = 2
        architecture.problem_type = "single_label_classification"
    architecture.use_cache = False
    if config.attn_implementation == "sdpa" and getattr(architecture, "attn_logit_softcapping", None) is not None:
        # sdpa has no softcapping: transformers 5.17 would silently leave it out and train another model.
        architecture._attn_implementation = "eager"
    if config.dropout >= 0:
        fields = DROPOUT_FIELDS.get(architecture.model_type)
        if fields is None:
            raise UserError(
                f"--dropout {config.dropout} cannot be set for {architecture.model_type} models",
                "use --dropout -1 for the model's own, or one of: " + ", ".join(sorted(DROPOUT_FIELDS)),
            )
        for field in fields:
            setattr(architecture, field, config.dropout)
    return architecture


def model_class(config: RunConfig, architecture: PreTrainedConfig) -> Any:
    import transformers

    if FAMILY_OF_TASK[config.task] == "causal-lm":
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)]
    return transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(architecture)]


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the model's own tokenizer, or `--tokenizer_name`. It always has a pad token."""
    from transformers import AutoTokenizer

    source = find_model(config.tokenizer_name or config.model_name_or_path)
    if isinstance(source, Preset) and source.hub_id is None:
        raise UserError(f"{source.name} is a model for the built-in corpora and has no tokenizer", OTHER_TOKENIZER)
    tokenizer = load_from(source, AutoTokenizer.from_pretrained, "tokenizer")
    where = config.tokenizer_name or config.model_name_or_path
    # Without a vocabulary file, transformers silently makes a tokenizer of special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"there is no tokenizer vocabulary in {where}", OTHER_TOKENIZER)
    entries = model_config(config).vocab_size
    if len(tokenizer) > entries:
        raise UserError(
            f"the tokenizer of {where} has {len(tokenizer)} entries, more than the {entries} of"
            f" {config.model_name_or_path}",
            "use the model's own tokenizer, or a model with a larger vocabulary",
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {where} has neither a pad token nor an end token", OTHER_TOKENIZER)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
