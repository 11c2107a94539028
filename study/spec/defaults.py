"""What a flag is by default where that depends on others. `paper` repeats what the studied documents did."""

from __future__ import annotations

from typing import Any

# What a model or a virtual run has its own value for; what nothing changes stands beside its flag.
_EVERYWHERE: dict[str, Any] = {"precision": "fp32", "max_steps": 0, "logging_steps": 10, "warmup_ratio": 0.0}
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
        "learning_rate": 6e-4, "warmup_ratio": 0.1, "dropout": 0.0, "eval_steps": 25,
    },
    ("gpt-wikitext", "laptop"): {
        "model_name_or_path": "gpt-tiny", "weights": "random", "data": "builtin", "seq_length": 64,
        "train_samples": 1600, "eval_samples": 200, "global_batch_size": 16, "num_train_epochs": 1,
        "learning_rate": 4e-3, "warmup_ratio": 0.2, "dropout": 0.0, "eval_steps": 25,
    },
}  # fmt: skip
# Gemma-2-9B was trained at 2048 tokens in bf16; nothing else in the documents asks for its own defaults.
_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {"gemma-2-9b": {"seq_length": 2048, "precision": "bf16"}}
# A virtual run's third step is like every later one: the first makes the optimizer's state, and over the first two
# ZeRO-3 learns and agrees on the order of the layers.
STEPS_UNTIL_ALIKE = 3


def default_values(asked: dict[str, Any], scale: str, accelerator_visible: bool) -> dict[str, Any]:
    """The values behind what was not asked for; `scale` is paper or laptop."""
    defaults = _EVERYWHERE | _DEFAULTS[asked["task"], scale]
    model = asked.get("model_name_or_path", defaults["model_name_or_path"])
    defaults |= _MODEL_DEFAULTS.get(model.rsplit("/", 1)[-1], {})
    if asked.get("lr_scheduler_type") == "constant":
        defaults["warmup_ratio"] = 0.0
    if asked.get("virtual_world_size"):
        defaults |= _virtual_values(asked, scale, accelerator_visible)
    return defaults


def _virtual_values(asked: dict[str, Any], scale: str, accelerator_visible: bool) -> dict[str, Any]:
    """Nothing is learned, so nothing is downloaded or evaluated: one sample per rank, and steps until they are alike.

    On a GPU, whose time is a figure, some more steps follow after the warm-up.
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
