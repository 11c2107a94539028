"""Modules to which peft adds adapters by default, by the model_type of a config, and names of modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from study.config.errors import UserError

# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of peft 0.21 (peft/utils/constants.py), which a prediction does not
# import; a test compares them. Without gemma4, whose entry is a pattern.
DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "bart",
            "opt",
            "gptj",
            "gpt_neo",
            "llama",
            "llama4",
            "mistral",
            "mixtral",
            "stablelm",
            "gemma",
            "gemma2",
            "gemma3_text",
            "qwen2",
            "qwen3",
        ),
        ("q_proj", "v_proj"),
    ),
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "layoutlm"), ("query", "value")),
    **dict.fromkeys(("bloom", "gpt_neox", "chatglm", "RefinedWebModel", "RefinedWeb", "falcon"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "blip-2": ("q", "v", "q_proj", "v_proj"),
    "deberta-v2": ("query_proj", "value_proj"),
    "deberta": ("in_proj",),
    "mpt": ("Wqkv",),
    "btlm": ("c_proj", "c_attn"),
    "codegen": ("qkv_proj",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "rwkv": ("key", "value", "receptance", "output"),
    "rwkv7": ("r_proj", "k_proj", "v_proj", "o_proj", "key", "value"),
}
ALL_LINEAR = "all-linear"
# Linear layers of BERT's blocks, which the table of families names after their blocks.
_DENSE = ("attention.output", "intermediate", "output", "pooler")
# Characters that no name of a module has: with one of them peft's target_modules is a regular expression.
_OF_PATTERNS = set("*+?^$|()[]{}\\")
_ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn")
_LLAMA = ("model.layers", _ATTENTION | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"))
# Of the families of the table in transformers: the list of layers, and the module around each linear layer.
_PATHS: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA),
    "bert": ("bert.encoder.layer", dict.fromkeys(("query", "key", "value"), "attention.self")),
    "gpt2": ("transformer.h", {"c_attn": "attn", "c_fc": "mlp"}),
    "gpt_neo": (
        "transformer.h",
        dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), "attn.attention") | {"c_fc": "mlp", "c_proj": "mlp"},
    ),
    "gptj": (
        "transformer.h",
        dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), "attn") | {"fc_in": "mlp", "fc_out": "mlp"},
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        {"query_key_value": "attention", "dense_h_to_4h": "mlp", "dense_4h_to_h": "mlp"},
    ),
    "mpt": (
        "transformer.blocks",
        {"Wqkv": "attn", "out_proj": "attn", "up_proj": "ffn", "down_proj": "ffn"},
    ),
}
# The output layer and the embeddings, whose adapters are not predicted.
_OUTSIDE = {
    "bert": ("bert.embeddings.word_embeddings",),
    "gpt_neox": ("embed_out", "gpt_neox.embed_in"),
    **dict.fromkeys(("gpt2", "gpt_neo"), ("lm_head", "transformer.wte", "transformer.wpe")),
    **dict.fromkeys(("gptj", "mpt"), ("lm_head", "transformer.wte")),
}
_USUAL_OUTSIDE = ("lm_head", "model.embed_tokens")


def module_name(module: str) -> str:
    """Return the end of a module's name in transformers."""
    return f"{module}.dense" if module in _DENSE else module


def module_path(model_type: str, layer: int | None, module: str) -> str:
    """Return the name of a linear layer in transformers' model, by its name in the table of families; without a layer
    that of one outside the layers."""
    layers, parents = _PATHS[model_type]
    if layer is None:
        return f"bert.{module_name(module)}"
    return ".".join(filter(None, (layers, str(layer), parents.get(module, ""), module_name(module))))


def outside_modules(model_type: str) -> tuple[str, ...]:
    """Return the output layer and the embeddings of a family of the table in transformers' model."""
    return _OUTSIDE.get(model_type, _USUAL_OUTSIDE)


def is_pattern(target: str) -> bool:
    """Whether peft's target_modules is a regular expression: with characters that no name has."""
    return not _OF_PATTERNS.isdisjoint(target)


def peft_targets(targets: Sequence[str]) -> Sequence[str]:
    """Return peft's target_modules: names, or a regular expression as one text."""
    return targets[0] if len(targets) == 1 and is_pattern(targets[0]) else targets


def is_target(path: str, targets: Sequence[str]) -> bool:
    """Whether peft adds adapters to the module of this full name: one of the targets is its name, or the end of it
    after a dot, or a regular expression of all of it (check_target_module_exists in peft's tuners_utils.py)."""
    return any(
        re.fullmatch(target, path) is not None if is_pattern(target) else f".{path}".endswith(f".{target}")
        for target in targets
    )


def check_pattern(target: str, paths: Sequence[str], outside: Sequence[str]) -> None:
    """Raise UserError for a regular expression that is none, or that matches more than linear layers of the layers."""
    if not is_pattern(target):
        return
    try:
        re.compile(target)
    except re.error as error:
        raise UserError(f"--lora_targets {target[:60]!r} is not a regular expression ({error})", "correct it") from None
    for container in dict.fromkeys(name for path in paths for name in _containers(path)):
        if is_target(container, [target]):
            problem = f"--lora_targets {target[:60]!r} matches {container}, which is not a linear layer"
            raise UserError(f"{problem}: peft ends with an error", "end it with names of linear layers")
    for path in outside:
        if is_target(path, [target]):
            problem = f"--lora_targets {target[:60]!r} matches {path}, whose adapters are not predicted"
            raise UserError(problem, "match linear layers within the layers alone")


def _containers(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path
