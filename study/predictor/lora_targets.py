"""Modules to which peft adds adapters by default, by the model_type of a config, and names of modules."""

from __future__ import annotations

from collections.abc import Sequence

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


def module_name(module: str) -> str:
    """Return the end of a module's name in transformers."""
    return f"{module}.dense" if module in _DENSE else module


def is_target(module: str, targets: Sequence[str]) -> bool:
    """Whether peft adds adapters to a module: one of the targets is its name, or the end of it
    (check_target_module_exists in peft's tuners_utils.py)."""
    name = f".{module_name(module)}"
    # A target may begin above the names of the table of families, as in self_attn.q_proj.
    return any(name.endswith(f".{target}") or f".{target}".endswith(name) for target in targets)
