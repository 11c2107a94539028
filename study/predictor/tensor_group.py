"""Tensor parallelism: the part of a model that a rank of a tensor-parallel group has, by the engines' plans.

DeepSpeed's AutoTP and transformers divide the input matrices of attention and of the feed-forward block by columns, and
their output matrices by rows (base_model_tp_plan of each family's configuration). Other tensors of a layer are on every
rank of the group. A sequence plan has the same parts of the weights, and each rank the residual stream and the norms of
its tokens alone (SequenceParallel and loss_parallel in torch.distributed.tensor.parallel, which torchtitan uses, and
Megatron's --sequence-parallel). Tests compare the parts with those of real ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from study.predictor.shape import INFIX, ModelShape, Parameter


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Modules of a family that are divided."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    # The first of the columns, which are attention's.
    attention_columns: int
    # transformers divides its vocabulary (_tp_plan in transformers' mixin.py, and the study's own plans).
    embedding: str | None = None
    # transformers has a plan for the family; the study's own are for its programs alone.
    is_published: bool = True


_LLAMA = _Plan(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj"), 3, "embed_tokens")
_PLANS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA),
    "gpt_neox": _Plan(("query_key_value", "dense_h_to_4h"), ("attention.dense", "dense_4h_to_h"), 1),
    # study/workloads/tensor_plans.py and study/engine/tensor_parallel.py.
    "gpt2": _Plan(("c_attn", "c_fc"), ("attn.c_proj", "mlp.c_proj"), 1, "wte", False),
    "bert": _Plan(
        ("query", "key", "value", "intermediate"), ("attention.output", "output"), 3, "word_embeddings", False
    ),
}
# _prepare_tp in Accelerate's accelerator.py, of a model that transformers has divided.
UNDER_FSDP2 = (
    "Accelerate 1.15.0 ends with an ImportError for it if transformers 5.23.0 loaded the model: its prepare() imports"
    " ReplicateParallel, which that release does not have"
)
# RowwiseParallel of transformers reads in_features, which peft sets to a rank's part (_get_in_out_features).
ADAPTERS_ON_ROWS = (
    "peft 0.21.2 ends with a RuntimeError for adapters on matrices by rows (o_proj, down_proj) under transformers"
    " 5.23.0, unless the program sets in_features of their lora_A to that of the whole matrix"
)
# The output layer: on every rank; divided, and its logits gathered; or divided with the loss.
Head = Literal["replicated", "gathered", "sharded"]
# Matrices alone are divided, as the engines' plans do, or also norms, residual stream and loss.
TensorPlan = Literal["plain", "sequence"]


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """The ranks that divide the tensors of each layer, and process the same samples."""

    ranks: int
    # The model that they divide.
    model: ModelShape = dataclasses.field(hash=False)
    # Matrices of a layer by columns and by rows: each all-reduces its input's gradient, or its output.
    columns: int
    rows: int
    divides_embedding: bool
    head: Head
    # Each rank has the residual stream of its part of the tokens.
    divides_stream: bool = False


def tensor_refusal(shape: ModelShape, ranks: int, *, is_deepspeed: bool) -> str | None:
    """Return why a group cannot divide a model, as study/engine/tensor_parallel.py and architecture.py check it; None
    if it can."""
    if shape.is_traced:
        return f"{shape.name} is outside the table of families, whose layers alone are divided"
    plan = _PLANS.get(shape.model_type)
    if plan is None or (is_deepspeed and shape.model_type == "bert"):
        return f"transformers has no tensor-parallel plan for {shape.model_type} models"
    if shape.lora_rank is not None and (refusal := _adapter_refusal(shape, plan, is_deepspeed=is_deepspeed)):
        return refusal
    counts = [("heads", shape.heads), ("heads of keys and values", shape.key_value_heads)]
    if is_deepspeed:
        counts.append(("columns of the MLP", shape.inner))
    for unit, count in counts:
        if count % ranks:
            return f"the {count:,} {unit} of {shape.name} do not divide over {ranks} ranks"
    return None


def _adapter_refusal(shape: ModelShape, plan: _Plan, *, is_deepspeed: bool) -> str | None:
    """Return why a group cannot divide a model with adapters; None if it can, as peft divides those of transformers'
    plans (_create_and_replace in its lora/model.py)."""
    if is_deepspeed:
        # _replace_module in its auto_tp.py takes peft's layer for a linear one: it has the base weight as `weight`.
        return "DeepSpeed 0.19.8 replaces a layer with adapters by one without them, and ends with a KeyError"
    if not plan.is_published:
        return f"peft divides adapters by transformers' plans, and there is none for {shape.model_type} models"
    if shape.lora_saved:
        return "trained copies of modules are not predicted with it"
    return None


def sequence_refusal(shape: ModelShape, ranks: int, tokens: int, *, is_deepspeed: bool) -> str | None:
    """Return why a group cannot divide the tokens of a sample between the layers' matrices; None if it can."""
    if is_deepspeed:
        return "DeepSpeed's AutoTP has every token's norms and residual stream on each rank"
    if _PLANS[shape.model_type] is not _LLAMA:
        return f"no program with such a plan of {shape.model_type} models is known"
    if shape.lora_rank is not None:
        return "adapters are not predicted with it"
    if tokens % ranks:
        return f"{tokens:,} tokens do not divide over {ranks} ranks"
    return None


def tensor_group(
    shape: ModelShape,
    ranks: int,
    *,
    is_deepspeed: bool,
    vocab_parallel: bool | None = None,
    divides_stream: bool = False,
) -> TensorGroup:
    """Return the group of ranks that divides a model; `vocab_parallel`: AutoTP's vocab_parallel_lm_head, whose default
    divides a tied output layer, with the loss (_apply_autotp_partitioning in DeepSpeed's engine.py)."""
    plan, is_causal = _PLANS[shape.model_type], shape.family == "causal-lm"
    if divides_stream:
        return TensorGroup(ranks, shape, len(plan.columns), len(plan.rows), True, "sharded", divides_stream=True)
    head: Head = "gathered" if is_causal else "replicated"
    divides_embedding = plan.embedding is not None
    if is_deepspeed:
        by_default = shape.tied and plan.is_published and plan.embedding is not None
        if is_causal and (by_default if vocab_parallel is None else vocab_parallel):
            head = "sharded"
        elif shape.tied or not plan.is_published:
            # A tied weight whose output is gathered is not divided (_configure_gathered_column_tie_fallbacks).
            head = "replicated"
        divides_embedding = head == "sharded" and shape.tied
    return TensorGroup(ranks, shape, len(plan.columns), len(plan.rows), divides_embedding, head)


@functools.lru_cache(maxsize=64)
def part_of_model(group: TensorGroup) -> ModelShape:
    """Return the shape of the part that the first rank of a group has. No rank has more."""
    shape, ranks = group.model, group.ranks
    vocabulary = math.ceil(shape.vocabulary / ranks)
    return dataclasses.replace(
        shape,
        heads=shape.heads // ranks,
        key_value_heads=shape.key_value_heads // ranks,
        inner=math.ceil(shape.inner / ranks),
        params=tuple(_part(param, group) for param in shape.params),
        head_parts=ranks if group.head == "gathered" else 1,
        vocabulary=vocabulary if group.head == "sharded" else shape.vocabulary,
    )


def _part(param: Parameter, group: TensorGroup) -> Parameter:
    """Return the part of a parameter that the first rank has."""
    shape, plan = group.model, _PLANS[group.model.model_type]
    module, _, kind = param.name.rpartition(".")
    adapted, infix, letter = module.partition(INFIX)
    if infix:
        # The other matrix of each adapter is on every rank (_create_and_replace in peft's lora/model.py).
        is_divided = adapted in (plan.columns if letter == "B" else plan.rows)
        return _divided(param, group.ranks, by_columns=letter == "B") if is_divided else param
    is_bias = kind == "bias"
    is_vocabulary = (module == plan.embedding and group.divides_embedding) or (
        module == "lm_head" and group.head != "replicated"
    )
    in_layer = 0 <= param.place < shape.layers
    by_columns = is_vocabulary or (in_layer and module in plan.columns)
    by_rows = in_layer and module in plan.rows and not is_bias
    if not (by_columns or by_rows):
        return param
    # The first dimension of GPT-2's matrices is that of the input.
    is_transposed = shape.model_type == "gpt2" and in_layer and not is_bias
    return _divided(param, group.ranks, by_columns=by_columns != is_transposed)


def _divided(param: Parameter, ranks: int, *, by_columns: bool) -> Parameter:
    """Return the first rank's part of a matrix, whose rows are the columns of the product that it makes."""
    if by_columns:
        rows = math.ceil(param.rows / ranks)
        return dataclasses.replace(param, rows=rows, elements=rows * (param.elements // param.rows))
    columns = math.ceil(param.elements // param.rows / ranks)
    return dataclasses.replace(param, elements=param.rows * columns)


@dataclasses.dataclass(frozen=True)
class GroupAdapters:
    """The adapters of a layer that a group divides."""

    # Those on matrices by columns and by rows: each all-reduces the gradient between its matrices, or the output.
    columns: int
    rows: int
    # On the layer's last matrix, and on one of attention, whose matrices by columns are so many.
    on_last: bool
    in_attention: bool
    attention_columns: int


@functools.lru_cache(maxsize=64)
def group_adapters(group: TensorGroup) -> GroupAdapters:
    """Return the adapters of the first layer of a model that a group divides."""
    plan = _PLANS[group.model.model_type]
    names = {param.name.partition(INFIX)[0] for param in group.model.params if param.place == 0 and INFIX in param.name}
    return GroupAdapters(
        columns=len(names.intersection(plan.columns)),
        rows=len(names.intersection(plan.rows)),
        on_last=plan.rows[-1] in names,
        in_attention=not names.isdisjoint((*plan.columns[: plan.attention_columns], plan.rows[0])),
        attention_columns=plan.attention_columns,
    )
