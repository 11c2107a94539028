"""The model and the samples of every combination: a decoder of three layers, small enough for milliseconds a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from study.compositions.features import Combination

if TYPE_CHECKING:
    import torch

STEPS = 3
# After this step a combination with `resume` saves, and new objects load.
RESUMED_AFTER = 2
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
# Adam divides a gradient by its size. Its default would make a whole step out of the rounding of a zero gradient, and
# would hide a wrong factor.
EPSILON = 1e-2
MOMENTUM = 0.9
MUON_MOMENTUM = 0.95
# Of Muon's rate over AdamW's, where DeepSpeed's configuration names both.
MUON_RATE_FACTOR = 2.0
# DeepSpeed's warm-up: from this rate on, over these steps.
WARMUP_MIN_RATE, WARMUP_STEPS = 2e-3, 2
# Less than the norm of any step.
MAX_NORM = 0.25
LOSS_SCALE = 256.0
SAMPLES = 2


@dataclasses.dataclass(frozen=True)
class DecoderSize:
    """Sizes of the decoder, and of its samples."""

    vocabulary: int
    length: int
    width: int
    feed_forward: int
    heads: int
    layers: int
    # Elements of a bucket.
    bucket: int
    # Elements that stage 3 keeps gathered; None: DeepSpeed's default, which is more than the model has.
    live: int | None = None


# With one bucket for all. The width of the feed-forward layers is such that two ranks share a matrix that Muon trains.
TINY = DecoderSize(vocabulary=96, length=12, width=32, feed_forward=80, heads=4, layers=3, bucket=100_000)


def make_model(
    combination: Combination,
    seed: int = 0,
    size: DecoderSize = TINY,
    rebuild: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> torch.nn.Module:
    """Return the plain model; equal seeds give equal weights in every process.

    `rebuild` returns a model with the weights of the plain one, before weights are frozen or adapters added.
    """
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        word_embed_proj_dim=size.width,
        ffn_dim=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=2 * size.length,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        use_cache=False,
        tie_word_embeddings=combination.has("tied"),
        init_std=0.1,
        activation_function="gelu",
    )
    model: Any = OPTForCausalLM(config)
    with torch.no_grad():
        # Weights that start as ones and zeros would hide a factor or a permutation.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if combination.has("ep"):
        _add_experts(model, size.width)
    if rebuild is not None:
        # Adapters are drawn as without it.
        with torch.random.fork_rng(devices=[]):
            model = rebuild(model)
    if combination.has("frozen"):
        decoder = model.model.decoder
        for module in (decoder.embed_tokens, decoder.embed_positions, decoder.layers[0]):
            module.requires_grad_(False)
    if combination.has("lora"):
        model = _with_adapters(model)
    model.train()
    return model


def _with_adapters(model: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    # PEFT draws A and leaves B at zero, where A has no gradient.
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _add_experts(model: Any, width: int) -> None:
    import torch

    from study.compositions.experts import PlainExperts

    layer = model.model.decoder.layers[-1]
    layer.fc1 = PlainExperts(width)
    layer.fc2 = torch.nn.Linear(width, width)


def is_hidden_matrix(name: str) -> bool:
    """Whether Muon trains this weight."""
    return ".layers." in name and name.endswith(".weight") and "norm" not in name


def make_batch(
    combination: Combination,
    step: int,
    micro_step: int,
    rank: int,
    ranks: int,
    size: DecoderSize = TINY,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the samples of one micro-batch on one rank; step 0 is the evaluation's."""
    import torch

    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_step + 1000 * step + 10_000 * seed)
    samples = 1 if combination.has("uneven") and rank == ranks - 1 else SAMPLES
    tokens = torch.randint(0, size.vocabulary, (samples, size.length), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def learning_rate(combination: Combination, step: int, highest: float = LEARNING_RATE) -> float:
    """Return the rate of a step, counted from 1, of weights with this highest rate."""
    if combination.has("warmup_lr", "warmup_cosine_lr"):
        return _warmed_up_rate(combination, step, highest)
    if not combination.has("schedule"):
        return highest
    # Accelerate counts samples: its schedule advances by the number of ranks with different samples in each step.
    pace = combination.data_ranks if combination.has("accelerate") else 1
    return highest * _share(pace * (step - 1))


def _warmed_up_rate(combination: Combination, step: int, highest: float) -> float:
    """Return the rate of DeepSpeed's linear warm-up, which counts from the second step on."""
    lowest = WARMUP_MIN_RATE
    if combination.has("warmup_cosine_lr"):
        # Its ratio is not the rate of the first step, which is 0.
        lowest = 0.0 if step == 1 else highest * WARMUP_MIN_RATE / LEARNING_RATE
    return lowest + (highest - lowest) * max(0, step - 2) / WARMUP_STEPS


def schedule_settings(combination: Combination) -> dict[str, Any]:
    """Return DeepSpeed's scheduler section; empty without one."""
    warmup = {"warmup_num_steps": WARMUP_STEPS, "warmup_type": "linear"}
    if combination.has("warmup_lr"):
        return {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": WARMUP_MIN_RATE, **warmup}}}
    if combination.has("warmup_cosine_lr"):
        ratio = WARMUP_MIN_RATE / LEARNING_RATE
        params = {"total_num_steps": 100, "warmup_min_ratio": ratio, **warmup}
        return {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    return {}


def _share(advanced: int) -> float:
    return 1 - 0.1 * min(advanced, 9)


def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule with the rate of `learning_rate`."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, _share)
