"""A model's architecture with a run's dropout and attention. What does not fit the run is refused here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from study.errors import UserError, first_line
from study.models.hub import OTHER_MODEL, load_from
from study.models.presets import DROPOUT_FIELDS, FAMILY_OF_TASK, Preset, find_model, refuse_depth
from study.spec.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


# transformers' sdpa for samples without padding, under a name of this study's.
SDPA_CAUSAL = "sdpa_causal"


def model_config(config: RunConfig) -> PreTrainedConfig:
    from transformers import AutoConfig

    source = find_model(config.model_name_or_path)
    options = {"attn_implementation": attention(config)}
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
    """The model with the architecture's own random weights, on the default device (`meta` to count, not to run).

    Built by its class rather than from_config, which under a live ZeRO-3 configuration would partition it.
    """
    architecture = model_config(config)
    return model_class(config, architecture)(architecture)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    parameters: int
    largest_parameter: int
    # Its config in transformers: num_hidden_layers, hidden_size and others.
    architecture: Any


def shape_of(config: RunConfig) -> Shape:
    import torch

    with torch.device("meta"):
        try:
            model = build_model(config)
        except UserError:
            raise
        except Exception as error:
            # Nothing is allocated here, so what fails is the architecture itself: heads that do not divide, or a
            # function nobody has.
            problem = f"the model that {config.model_name_or_path} describes cannot be built"
            raise UserError(f"{problem} ({type(error).__name__}: {first_line(error)})", OTHER_MODEL) from error
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Shape(sum(sizes), max(sizes), model.config)


def attention(config: RunConfig) -> str | None:
    """What transformers is told. None leaves it the choice: sdpa where the architecture has it, else eager.

    GPT-Neo and GPT-J have none, and asking for sdpa by name would be an error.
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

        # A name without a function for masks: transformers makes none, and torch is told `is_causal`. Under sdpa it
        # makes one wherever torch.compile traces, since it cannot look at positions there; then no kernel for causal
        # attention is taken.
        AttentionInterface.register(SDPA_CAUSAL, sdpa_attention_forward)
    elif asked not in ("sdpa", "eager"):
        known = f"use eager, sdpa, {SDPA_CAUSAL} or flash_attention_2"
        raise UserError(f"--attn_implementation {asked} is not known here", known)
    return None if asked == "sdpa" else asked


def attention_of(config: RunConfig, architecture: PreTrainedConfig) -> str:
    """What computes it: as the model's files say, as asked, or as transformers chooses."""
    chosen = "sdpa" if model_class(config, architecture)._supports_sdpa else "eager"
    return architecture._attn_implementation or attention(config) or chosen


def has_window(architecture: PreTrainedConfig) -> bool:
    """Whether any of its attention does not look at all that came before."""
    text = architecture.get_text_config()
    others = {one for one in getattr(text, "layer_types", None) or () if one != "full_attention"}
    return bool(others or (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)))


def _refuse_missing_mask(architecture: PreTrainedConfig, config: RunConfig) -> None:
    """Without its mask such a model would be trained as another one, without a word."""
    kind = model_class(config, architecture)
    if FAMILY_OF_TASK[config.task] != "causal-lm":
        why = "reads in both directions"
    elif getattr(architecture, "attn_logit_softcapping", None) is not None:
        why = "caps the scores of its attention, which sdpa does not"
    elif not kind._supports_sdpa or not kind._supports_attention_backend:
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
        # Some kinds transformers leaves out without a word, and trains on what is stored as if it were the weights.
        raise UserError(f"{name} holds quantized weights (quantization_config), and none are trained here", OTHER_MODEL)
    largest = getattr(architecture, "max_position_embeddings", None)
    if largest is not None and config.seq_length > largest:
        raise UserError(
            f"--seq_length {config.seq_length} is longer than {name} takes", f"use --seq_length {largest} or less"
        )


def with_run_settings(architecture: PreTrainedConfig, config: RunConfig) -> PreTrainedConfig:
    if FAMILY_OF_TASK[config.task] == "sequence-classification":
        architecture.num_labels = 2
        architecture.problem_type = "single_label_classification"
    architecture.use_cache = False
    if config.attn_implementation == "sdpa" and getattr(architecture, "attn_logit_softcapping", None) is not None:
        # sdpa has no softcapping: transformers 5.17 would leave it out without a warning and train another model.
        architecture._attn_implementation = "eager"
    if config.dropout >= 0:
        fields = DROPOUT_FIELDS.get(architecture.model_type)
        if fields is None:
            raise UserError(
                f"--dropout {config.dropout} cannot be set for {architecture.model_type} models, not known here",
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
