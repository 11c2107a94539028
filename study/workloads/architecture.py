"""A run's model architecture, adapters and tokenizer, and checks that they fit the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from study.config.errors import UserError, first_line
from study.config.flags import RunConfig
from study.workloads import presets
from study.workloads.presets import FAMILY_OF_TASK, OTHER_MODEL, OTHER_TOKENIZER, Preset, find_model, load_from

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def add_adapters(
    model: PreTrainedModel,
    config: RunConfig,
    targets: Sequence[str] = (),
    saved: Sequence[str] = (),
    dropout: float = 0.0,
    *,
    dora: bool = False,
) -> None:
    """Add the adapters in place, to modules with these names or, of one text, to those that it matches as a regular
    expression; by default to all linear layers. They are equal for every strategy: initialized on the host from the
    seed."""
    if config.peft == "none":
        return
    import torch
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    is_classifier = FAMILY_OF_TASK[config.task] == "sequence-classification"
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=dropout,
        # peft excludes the output layer: it is a language model's embedding, or a classifier's new layer.
        target_modules=targets if isinstance(targets, str) else list(targets) or "all-linear",
        modules_to_save=list(saved) or None,
        use_dora=dora,
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
    """Return the adapter settings of a run; None for full training."""
    if config.peft == "none":
        return None
    return {"kind": "lora", "rank": config.lora_rank, "alpha": config.lora_alpha}


def find_adapters(model: Any) -> Any:
    """Return the adapter settings of the live modules; a list if modules differ, None without adapters."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "lora_alpha")]
    settings = {(*layer.r.values(), *layer.lora_alpha.values()) for layer in layers}
    kinds = [{"kind": "lora", "rank": rank, "alpha": alpha} for rank, alpha in sorted(settings)]
    return kinds if len(kinds) > 1 else next(iter(kinds), None)


# This project's name for transformers' sdpa without masks, for samples without padding.
SDPA_CAUSAL = "sdpa_causal"


def model_config(config: RunConfig) -> PreTrainedConfig:
    """Return the transformers config of a run; UserError if the model does not fit the task or flags."""
    from transformers import AutoConfig

    source = find_model(config.model_name_or_path)
    options = {"attn_implementation": select_attention(config)}
    if isinstance(source, Preset):
        if config.weights == "pretrained" and not source.has_published_weights:
            raise UserError(f"no weights are published for {source.name}", "use --weights random")
        architecture = AutoConfig.for_model(source.model_type, **source.architecture, **options)
    else:
        architecture = load_from(source, AutoConfig.from_pretrained, "config", **options)
    _check_architecture(architecture, config)
    if config.attn_implementation == SDPA_CAUSAL:
        _check_mask(architecture, config)
    return with_run_settings(architecture, config)


def build_model(config: RunConfig) -> PreTrainedModel:
    """Build the model with random weights on the default device (`meta` only to count parameters).

    It is built by its class instead of from_config, which would partition it under an active ZeRO-3 configuration.
    """
    architecture = model_config(config)
    return model_class(config, architecture)(architecture)


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Sizes of a model, and its config in transformers."""

    parameters: int
    largest_parameter: int
    architecture: Any


def model_size(config: RunConfig) -> ModelSize:
    """Return the sizes of a run's model without allocating it; UserError if it cannot be built."""
    import torch

    with torch.device("meta"):
        try:
            model = build_model(config)
        except UserError:
            raise
        except Exception as error:
            # Nothing is allocated, so the architecture is invalid: heads that do not divide, for example.
            problem = f"the model that {config.model_name_or_path} describes cannot be built"
            raise UserError(f"{problem} ({type(error).__name__}: {first_line(error)})", OTHER_MODEL) from error
    sizes = [parameter.numel() for parameter in model.parameters()]
    return ModelSize(sum(sizes), max(sizes), model.config)


def select_attention(config: RunConfig) -> str | None:
    """Return `attn_implementation` for transformers; None selects sdpa if the model supports it, else eager.

    GPT-Neo and GPT-J do not support sdpa, and raise an error if it is requested by name.
    """
    from transformers.utils import is_flash_attn_2_available

    requested = config.attn_implementation
    if requested == "flash_attention_2":
        if not is_flash_attn_2_available():
            raise UserError("--attn_implementation flash_attention_2 needs flash-attn and a GPU for it", "use sdpa")
        if config.precision == "fp32":
            raise UserError("--attn_implementation flash_attention_2 does not compute in fp32", "use sdpa or bf16")
    elif requested == SDPA_CAUSAL:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # For a name without a mask function transformers creates no mask and passes `is_causal` to torch. With sdpa it
        # creates a mask under torch.compile, since it cannot read positions there, and with a mask torch does not use
        # its causal kernels.
        AttentionInterface.register(SDPA_CAUSAL, sdpa_attention_forward)
    elif requested not in ("sdpa", "eager"):
        fix = f"use eager, sdpa, {SDPA_CAUSAL} or flash_attention_2"
        raise UserError(f"--attn_implementation {requested} is not supported", fix)
    return None if requested == "sdpa" else requested


def resolve_attention(config: RunConfig, architecture: PreTrainedConfig) -> str:
    """Return the effective attention: from the model's files, the flag, or the default of transformers."""
    default = "sdpa" if model_class(config, architecture)._supports_sdpa else "eager"
    return architecture._attn_implementation or select_attention(config) or default


def uses_sliding_window(architecture: PreTrainedConfig) -> bool:
    text = architecture.get_text_config()
    windowed = {kind for kind in getattr(text, "layer_types", None) or () if kind != "full_attention"}
    return bool(windowed or (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)))


def check_heads(model: str, architecture: PreTrainedConfig, ranks: int, may_repeat: bool = False) -> None:
    """Raise UserError if attention heads do not divide over ranks; `may_repeat`: ranks may share a key-value head."""
    text = architecture.get_text_config()
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks or (shared % ranks and not (may_repeat and ranks % shared == 0)):
        counted = f"{heads} heads" if shared == heads else f"{heads} heads over {shared} of keys and values"
        raise UserError(f"{model}: {counted} do not divide over {ranks} ranks", "set --group_size to a divisor")


def _check_mask(architecture: PreTrainedConfig, config: RunConfig) -> None:
    """Raise UserError for models that would silently compute another attention without their mask."""
    cls = model_class(config, architecture)
    if FAMILY_OF_TASK[config.task] != "causal-lm":
        reason = "has bidirectional attention"
    elif getattr(architecture, "attn_logit_softcapping", None) is not None:
        reason = "caps its attention scores, which sdpa does not"
    elif not cls._supports_sdpa or not cls._supports_attention_backend:
        reason = "has a custom attention"
    elif uses_sliding_window(architecture):
        reason = "has sliding-window attention"
    else:
        return
    problem = f"--attn_implementation {SDPA_CAUSAL} uses no masks, but {config.model_name_or_path} {reason}"
    raise UserError(problem, "use sdpa")


def _check_architecture(architecture: PreTrainedConfig, config: RunConfig) -> None:
    from transformers.models.auto import modeling_auto

    model_type, name = architecture.model_type, config.model_name_or_path
    # A family with a masked-language head is an encoder. BERT has a causal head as well, but is used as an encoder.
    encoder = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if FAMILY_OF_TASK[config.task] == "causal-lm":
        fits = model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not encoder
        expected = "a causal language model such as gpt2"
    else:
        fits = model_type in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and encoder
        expected = "an encoder such as bert-large-uncased"
    if not fits:
        raise UserError(f"{name} (a {model_type} model) does not fit --task {config.task}", f"use {expected}")
    presets.check_depth(getattr(architecture, "num_hidden_layers", 1), name)
    if getattr(architecture, "quantization_config", None) is not None:
        # transformers silently ignores some quantization methods and trains on the stored integers as weights.
        raise UserError(f"{name} has quantized weights (quantization_config), which are not supported", OTHER_MODEL)
    largest = getattr(architecture, "max_position_embeddings", None)
    if largest is not None and config.seq_length > largest:
        problem = f"--seq_length {config.seq_length} is longer than the context of {name}"
        raise UserError(problem, f"use --seq_length {largest} or less")


def with_run_settings(architecture: PreTrainedConfig, config: RunConfig) -> PreTrainedConfig:
    """Set the run's task head, attention and dropout in a transformers config, and return it."""
    if FAMILY_OF_TASK[config.task] == "sequence-classification":
        architecture.num_labels = 2
        architecture.problem_type = "single_label_classification"
    architecture.use_cache = False
    if config.attn_implementation == "sdpa" and getattr(architecture, "attn_logit_softcapping", None) is not None:
        # sdpa has no softcapping: transformers 5.17 would silently omit it.
        architecture._attn_implementation = "eager"
    if config.dropout >= 0:
        if (model_type := architecture.model_type) not in presets.DROPOUT_FIELDS:
            raise UserError(
                f"--dropout {config.dropout} cannot be set for {model_type} models",
                f"use --dropout -1 for the model's default, or one of: {', '.join(sorted(presets.DROPOUT_FIELDS))}",
            )
        for field in presets.DROPOUT_FIELDS[model_type]:
            setattr(architecture, field, config.dropout)
    return architecture


def model_class(config: RunConfig, architecture: PreTrainedConfig) -> Any:
    """Return transformers' model class for the run's task."""
    import transformers

    family = "CAUSAL_LM" if FAMILY_OF_TASK[config.task] == "causal-lm" else "SEQUENCE_CLASSIFICATION"
    return getattr(transformers, f"MODEL_FOR_{family}_MAPPING")[type(architecture)]


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model or of `--tokenizer_name`, with a pad token; UserError if it does not fit."""
    from transformers import AutoTokenizer

    where = config.tokenizer_name or config.model_name_or_path
    source = find_model(where)
    if isinstance(source, Preset) and source.hub_id is None:
        raise UserError(f"{source.name} is a model for the built-in corpora and has no tokenizer", OTHER_TOKENIZER)
    tokenizer = load_from(source, AutoTokenizer.from_pretrained, "tokenizer")
    # Without a vocabulary file, transformers silently creates a tokenizer of special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"there is no tokenizer vocabulary in {where}", OTHER_TOKENIZER)
    entries = model_config(config).vocab_size
    if len(tokenizer) > entries:
        problem = f"the tokenizer of {where} has {len(tokenizer)} entries, {config.model_name_or_path} only {entries}"
        raise UserError(problem, "use the model's own tokenizer, or a model with a larger vocabulary")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {where} has neither a pad token nor an end token", OTHER_TOKENIZER)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
