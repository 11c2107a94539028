"""What a rank must hold at least: model state by strategy, and what a backward pass cannot do without.

Model state is what the engines really keep, as `study run laptop` measures it: DeepSpeed has fp32 masters also where
the weights are fp32, and plain training has none. Activations are a lower bound: what does not fit by it does not fit,
and what fits by it may not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from study.spec.strategies import Strategy

# Of AdamW, in fp32: two moments, and masters where an engine keeps its own.
MOMENTS_BYTES, MASTER_BYTES = 8, 4
# The type in which gradients wait on the host or the drive for an optimizer that is there.
WAITING_GRADIENT_BYTES = 4
# DeepSpeed swaps parameters to the drive as bfloat16, whatever they are.
SWAPPED_PARAMETER_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A transformer's, as far as memory depends on them."""

    parameters: int
    layers: int
    hidden: int
    # Of the feed-forward block.
    inner: int
    heads: int
    vocabulary: int
    # What a layer keeps for its backward pass: so many tensors of each width, and whether the scores of its attention,
    # as where transformers has no fused one.
    kept_hidden: int
    kept_inner: int
    keeps_scores: bool
    # False for a classifier, which has a few logits per sequence.
    predicts_tokens: bool


def sizes_of(model_type: str, architecture: Mapping[str, Any]) -> Sizes:
    """From the keys that transformers gives the architecture."""
    get = architecture.get
    hidden = get("n_embd") or architecture["hidden_size"]
    layers = get("n_layer") or get("num_layers") or architecture["num_hidden_layers"]
    heads = get("n_head") or get("num_heads") or architecture["num_attention_heads"]
    vocabulary, positions = architecture["vocab_size"], get("n_positions") or get("max_position_embeddings") or 0
    inner = get("intermediate_size") or 4 * hidden
    feed_forward = 2 * hidden * inner + inner + hidden
    square = hidden * hidden
    if model_type == "bert":
        layer = 4 * (square + hidden) + feed_forward + 4 * hidden
        around = (positions + architecture["type_vocab_size"] + 2) * hidden + square + hidden + 2 * hidden + 2
    elif model_type in ("gpt2", "gpt_neo"):
        # GPT-Neo's queries, keys and values have no bias.
        layer = 4 * square + (4 if model_type == "gpt2" else 1) * hidden + feed_forward + 4 * hidden
        around = (positions + 2) * hidden
    elif model_type == "gptj":
        layer = 4 * square + feed_forward + 2 * hidden
        # Its output layer is not tied to the embedding.
        around = 2 * hidden + vocabulary * (hidden + 1)
    elif model_type == "gemma2":
        of_heads = 2 * (heads + architecture["num_key_value_heads"]) * architecture["head_dim"]
        layer = of_heads * hidden + 3 * hidden * inner + 4 * hidden
        around = hidden
    else:
        raise ValueError(f"no arithmetic for {model_type}")
    return Sizes(
        parameters=vocabulary * hidden + around + layers * layer,
        layers=layers, hidden=hidden, inner=inner, heads=heads, vocabulary=vocabulary,
        # Into and out of each norm, queries, keys, values, and what attention makes of them. GPT-J has one norm.
        kept_hidden=6 if model_type == "gptj" else 8,
        # Into and out of the activation. GPT's is written as several operations, Gemma's has a gate.
        kept_inner={"bert": 2, "gemma2": 4}.get(model_type, 5),
        keeps_scores=model_type in ("gpt_neo", "gptj", "gemma2"),
        predicts_tokens=model_type != "bert",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Per parameter of the whole model, on one rank. The host's include gradients that wait there for the optimizer."""

    params_device: float
    grads_device: float
    optimizer_device: float
    host: float
    nvme: float
    # Through the drive in one optimizer step, and for every pass over the parameters.
    nvme_per_step: float
    nvme_per_pass: float

    @property
    def device(self) -> float:
        return self.params_device + self.grads_device + self.optimizer_device


def state_bytes(strategy: Strategy, precision: str, ranks: int) -> StateBytes:
    """The strategy's settings count with what a run overrides in them."""
    stage = strategy.zero_stage
    # Autocast leaves the weights as they are; DeepSpeed's own 16 bits do not.
    weight: float = 2 if precision.endswith("-engine") else 4
    of_a_copy = strategy.ranks_of_a_copy(ranks)
    if stage in (None, 0):
        shards = (of_a_copy or ranks) if strategy.is_fsdp else 1
        held = MOMENTS_BYTES + (MASTER_BYTES if weight == 2 else 0)
        return StateBytes(weight / shards, weight / shards, held / shards, 0, 0, 0, 0)
    assert strategy.deepspeed is not None
    optimizer = (MASTER_BYTES + MOMENTS_BYTES) / ranks
    params = weight / (ranks if stage == 3 else 1)
    # Beside its part of the whole, in the fast memory of its own machine.
    params += weight / of_a_copy if of_a_copy else 0
    grads = weight / (ranks if stage >= 2 else 1)
    place, params_place = strategy.offload_device("optimizer"), strategy.offload_device("param")
    host = nvme = per_step = per_pass = 0.0
    if place is not None:
        share = strategy.deepspeed["zero_optimization"]["offload_optimizer"].get("ratio", 1.0)
        gone, optimizer = share * optimizer, (1 - share) * optimizer
        grads = 0.0
        waiting = WAITING_GRADIENT_BYTES / ranks
        # Stage 3 keeps gradients on the host as they come, too.
        host = weight / ranks if stage == 3 else 0.0
        if place == "cpu":
            host += gone + waiting
        else:
            nvme = gone + waiting
            per_step = 2 * nvme
    if params_place is not None:
        if params_place == "cpu":
            host += params
        else:
            nvme += SWAPPED_PARAMETER_BYTES / ranks
            per_pass = SWAPPED_PARAMETER_BYTES / ranks
        params = 0.0
    return StateBytes(params, grads, optimizer, host, nvme, per_step, per_pass)


def activation_bytes(sizes: Sizes, sequences: int, length: int, precision: str, checkpointing: bool) -> int:
    """What one micro-batch leaves for its backward pass, at least.

    With checkpointing a layer keeps its input, and all the rest for one layer at a time. The loss keeps a log-softmax
    in fp32, and the first thing that the backward pass makes is the gradient of the logits.
    """
    tokens, width = sequences * length, 4 if precision == "fp32" else 2
    layer = tokens * width * (sizes.kept_hidden * sizes.hidden + sizes.kept_inner * sizes.inner)
    if sizes.keeps_scores:
        layer += sequences * sizes.heads * length * length * width
    kept = sizes.layers * tokens * sizes.hidden * width + layer if checkpointing else sizes.layers * layer
    logits = tokens * sizes.vocabulary * (width + 4) if sizes.predicts_tokens else 0
    return kept + logits


def least_device_bytes(state: StateBytes, parameters: int, activations: int) -> float:
    """Gradients are complete when the activations are gone, so the larger of the two counts."""
    always = parameters * (state.params_device + state.optimizer_device)
    return always + max(activations, parameters * state.grads_device)
