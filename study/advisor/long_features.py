"""Features for longer samples as flags: what they reduce, the settings of programs that have them, and refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from study.advisor.workload import Workload
from study.config.errors import UserError
from study.config.strategies import WITH_REPLICAS, Strategy
from study.predictor.request import Request
from study.predictor.shape import ModelShape
from study.predictor.table_shape import find_family

if TYPE_CHECKING:
    from study.advisor.advise import AdviceRequest

LOSS, RANKS, HOST, TILES = (
    "a loss without logits",
    "tokens over ranks",
    "checkpoints on the host",
    "a tiled MLP",
)
# By feature, the settings of programs that have it.
SETTINGS = {
    LOSS: (
        "use_liger_kernel (Trainer, TRL), loss_type chunked_nll (TRL), cut_cross_entropy or"
        " liger_fused_linear_cross_entropy (axolotl)"
    ),
    RANKS: (
        'ParallelismConfig(sp_size=N, sp_backend="deepspeed") of Accelerate, the Trainer and TRL (Ulysses), with'
        " seq_parallel_communication_data_type bf16 in the DeepSpeed file; ParallelismConfig(cp_size=N) under FSDP2,"
        " context_parallel_size of axolotl (rings, whose gathered keys and values are not predicted)"
    ),
    HOST: (
        "activation_offloading (TRL, axolotl), enable_activation_offloading (torchtune),"
        " get_checkpoint_hidden_states_offloading_ctx_manager (DeepSpeed)"
    ),
    TILES: "tiled_mlp (axolotl), TiledMLP of deepspeed.runtime.sequence_parallel.ulysses_sp",
}


def allows_features(strategy: Strategy, over_ranks: bool) -> bool:
    """Whether a strategy is predicted with features for longer samples.

    With ranks that share a sample stages 1 and 2 of DeepSpeed sum gradients that it should average: stage 3 remains.
    """
    is_usual = not strategy.uses_nvme and strategy.name not in WITH_REPLICAS
    return is_usual and (strategy.zero_stage == 3 or not (over_ranks or strategy.is_fsdp))


def divides_heads(shape: ModelShape, ranks: int) -> bool:
    """Whether each rank has as many query heads, and as many key heads or one that others have, too."""
    keys = shape.key_value_heads
    return shape.heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def has_window(shape: ModelShape, tokens: int) -> bool:
    """Whether attention has a window shorter than a sample, whose mask Ulysses ignores."""
    text = json.loads(shape.document) if shape.document else {}
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    is_shorter = window is not None and window < tokens
    return is_shorter or find_family(shape).masks > 1


def unpredicted_reasons(question: Request | AdviceRequest) -> Iterator[str]:
    """Yield why the parts of a sample are not counted: the table of families has them, for a program of one model."""
    shape = question.shape
    if shape.is_traced or shape.family != "causal-lm":
        yield f"{shape.name} is not a language model of the table of families"
    if question.reference_model:
        yield "there is a reference model"
    if question.tensor_ranks > 1:
        yield "ranks share the tensors of a layer"
    if question.attention not in shape.fused_attentions:
        yield f"{question.attention} is not a fused attention of {shape.name}"
    if question.box.is_cpu_only:
        yield "the ranks are on CPUs"


def has_features(request: Request) -> bool:
    """Whether a request has a feature whose speed and sent bytes are not predicted."""
    return request.sequence_ranks > 1 or request.checkpoints_on_host or request.tiled_mlp


def with_features(request: Request, workload: Workload) -> Request:
    """Return the request of a whole sample with the features of the flags; raise UserError if they are impossible."""
    request = over_ranks(request, 1 if workload.sp is None else workload.sp, "--sp")
    for flag, is_set in (
        ("--offload_checkpoints", workload.offload_checkpoints),
        ("--tiled_mlp", workload.tiled_mlp),
    ):
        if is_set:
            _check_kind(request, flag)
    if workload.offload_checkpoints and not request.gradient_checkpointing:
        problem = "--offload_checkpoints has no effect without gradient checkpointing"
        raise UserError(problem, "add --gradient_checkpointing")
    if workload.tiled_mlp and request.shape.lora_rank is not None:
        raise UserError("--tiled_mlp is not predicted with adapters", "leave one of them out")
    return dataclasses.replace(request, checkpoints_on_host=workload.offload_checkpoints, tiled_mlp=workload.tiled_mlp)


def over_ranks(request: Request, ranks: int, setting: str) -> Request:
    """Return the request of a rank's part of each sample; raise UserError, which names the setting, if ranks cannot
    divide samples."""
    if ranks == 1:
        return request
    _check_kind(request, setting, over_ranks=True)
    _check_ranks(request, ranks, f"{setting} {ranks}")
    return dataclasses.replace(request, sequence_length=request.sequence_length // ranks, sequence_ranks=ranks)


def _check_kind(request: Request, setting: str, over_ranks: bool = False) -> None:
    """Raise UserError if the strategy, the model or the program is not predicted with a feature."""
    strategy = request.strategy
    # That of a user's file has its name.
    has_replicas = strategy.zero_stage and request.ranks_per_replica is not None
    if has_replicas or not allows_features(strategy, over_ranks):
        raise UserError(f"{setting} is not predicted with {strategy.name}", "use zero3")
    if reason := next(unpredicted_reasons(request), None):
        raise UserError(f"{setting} is not predicted: {reason}", "leave it out")


def _check_ranks(request: Request, ranks: int, setting: str) -> None:
    """Raise UserError if ranks cannot divide the samples of a request."""
    shape, box, tokens = request.shape, request.box, request.sequence_length
    if box.ranks % ranks:
        raise UserError(f"{setting} does not divide {box.ranks} ranks", "use a divisor of the number of GPUs")
    if not divides_heads(shape, ranks):
        heads = f"{shape.heads} query and {shape.key_value_heads} key heads"
        raise UserError(f"{setting} does not divide the {heads} of {shape.name}", "use another number of ranks")
    if tokens % ranks:
        fix = f"use --seq_length {-(-tokens // ranks) * ranks}"
        raise UserError(f"{setting} does not divide {tokens} tokens per sample", fix)
    if has_window(shape, tokens):
        problem = f"{setting} would train {shape.name} without the window of its attention, which Ulysses ignores"
        raise UserError(problem, "leave it out")


def feature_notes(request: Request) -> Iterator[str]:
    """Yield the settings of programs that have the features of a request."""
    if has_features(request):
        yield "no step time and no sent bytes are predicted with these features:"
    features = {RANKS: request.sequence_ranks > 1, HOST: request.checkpoints_on_host, TILES: request.tiled_mlp}
    for feature, is_set in features.items():
        if is_set:
            yield f"{feature}: {SETTINGS[feature]}"


def features_text(request: Request) -> str:
    """Return checkpoints on the host and tiles with a leading comma; empty without them."""
    features = {HOST: request.checkpoints_on_host, TILES: request.tiled_mlp}
    return "".join(f", {feature}" for feature, is_set in features.items() if is_set)
