"""Activations of a family of the table: families.py counts the tensors that autograd saves per layer, by width."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from study.predictor.activations import (
    Activations,
    computing_mode,
    is_fused,
    lacks_kernel,
    loss_bytes,
    saves_parameters,
)
from study.predictor.adapters import dora_saved, dora_saved_weights, dora_temporaries
from study.predictor.families import READS_INPUT, Kept
from study.predictor.products import adapter_products
from study.predictor.request import Request, cache_by_request
from study.predictor.shape import INFIX, ModelShape, Parameter, trains_embedding, trains_head
from study.predictor.table_shape import find_family, has_head

# Tensors of the hidden width that are queries, keys, values and the attention's output, in families that count none of
# the width of the query heads.
_ATTENTION_TENSORS = 4
# Inputs of attention and of the feed-forward block, which a group that divides the residual stream gathers.
_GATHERED_INPUTS = 2
# Score tensors in fp32 of torch's attention without a kernel. It saves weights, factors of dropout, their product.
# In its _safe_softmax are live scores, weights, a mask of a byte an element, and the result.
_MATH_SCORES, _MATH_SCORES_FORWARD = 3, 3.25
# Its queries, keys and values are in fp32.
_MATH_INPUTS = 3
# Tensors of the hidden width that a norm's backward pass has at once.
_NORM_GRADIENTS = 5


def count_activations(request: Request) -> Activations:
    """Return the activations of a micro-batch of a family of the table."""
    layer = _TableLayer(request)
    ends = _TableEnds(layer)
    logits = loss_bytes(request, ends.logits, layer.width)
    return Activations(
        layer=layer.saved,
        scores=layer.scores,
        checkpoint=layer.checkpoint,
        input=layer.saved_input,
        outside=ends.saved,
        tail=ends.tail,
        layer_forward=layer.forward_temporaries,
        layer_working=layer.backward_temporaries,
        logits=logits.saved,
        logits_forward=logits.forward,
        logits_backward=logits.backward,
        cast_layer=layer.cast_bytes(layer.shape.layer_matrices) + dora_saved_weights(request),
        cast_head=ends.cast,
        cast_cached=layer.cast_bytes(matrix for matrix in layer.shape.layer_matrices if matrix.trained),
        weight_norm=dora_temporaries(request),
        freed={name: layer.backward_temporaries - size for name, size in layer.bytes_after().items()},
    )


class _HiddenTensors(NamedTuple):
    """Tensors of the hidden width that a layer saves: in fp32 whatever the mode, and in the computing type."""

    in_fp32: int
    in_computing_type: float


class _TableLayer:
    """One layer of a family of the table, for one micro-batch. A property is one term, in bytes.

    The tensors are counted in families.py. The source of a term is a module of transformers 5.17 (Llama's
    modeling_llama.py stands for its family), or a function of torch whose saved tensors derivatives.yaml lists.

    The backward pass begins with the feed-forward block, and `bytes_after` follows it from gradient to gradient:

        gradient of                         memory above that of the whole layer
        down_proj                           in_block
         |  up_proj                         in_block, without the activation, the product and a gradient
         |   |  gate_proj                   norm, without the block's saved tensors
         |   |   |  o_proj and the norms    in_attention, without the block's saved tensors
         |   |   |   |  q, k and v_proj     norms of the input, without the layer's saved tensors
        -+---+---+---+---+---------------->  time
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.shape = request.shape
        self.family = find_family(request.shape)
        self.mode = computing_mode(request)
        self.is_fused = is_fused(request)
        # torch's attention without a kernel computes in fp32.
        self.lacks_kernel = lacks_kernel(request)
        self.is_autocast_on_cuda = self.mode == "autocast" and not request.box.is_cpu_only
        self.has_dropout = request.dropout and self.family.has_dropout
        self.tokens = request.micro_batch * request.sequence_length
        # Bytes per element of matrix products, and of the residual stream, which autocast leaves in fp32.
        self.width = request.computing_bytes
        self.stream = 4 if self.mode == "autocast" else self.width
        self.adapters = _adapter_difference(request, self.mode)
        # Elements per token of all query heads, and of all key heads.
        self.query = self.shape.heads * self.shape.head_dim
        self.key = self.shape.key_value_heads * self.shape.head_dim

    @functools.cached_property
    def kernels(self) -> Kept | None:
        """Tensors that fused kernels of norms, rotary positions and gate save; None without such kernels."""
        if not (self.request.compiled and self.is_fused and self.family.in_kernels):
            return None
        saved = self.family.in_kernels
        # torch's product of the gate saves the activation, too.
        return dataclasses.replace(saved, inner=saved.inner + self.request.torch_gate)

    @functools.cached_property
    def saved_tensors(self) -> Kept:
        """Tensors that the layer saves, by width."""
        if self.kernels is not None:
            return self.kernels
        return self.family.fused if self.is_fused and self.family.fused else self.family.eager

    @functools.cached_property
    def hidden_tensors(self) -> _HiddenTensors:
        """Norms compute in fp32 (LlamaRMSNorm.forward), and under autocast layer_norm does (autocast_mode.h)."""
        if self.mode == "fp32":
            return _HiddenTensors(0, self.saved_tensors.hidden)
        if self.mode == "autocast":
            return _HiddenTensors(self.saved_tensors.autocast_wide, self.saved_tensors.autocast_hidden)
        return _HiddenTensors(self.saved_tensors.engine_wide, self.saved_tensors.engine_hidden)

    @property
    def inner_tensors(self) -> float:
        """Tensors of the feed-forward width (LlamaMLP.forward, GPT2MLP.forward). On CUDA autocast computes the powers
        of a GELU by formula in fp32 (NewGELUActivation in activations.py, autocast_mode.h)."""
        return self.saved_tensors.inner + (self.family.inner_on_cuda if self.is_autocast_on_cuda else 0.0)

    # Saved for the backward pass, per token.

    @property
    def fp32_hidden_per_token(self) -> float:
        """Inputs of the norms in fp32, and the tensors that they multiply (LlamaRMSNorm.forward)."""
        return 4 * self.hidden_tensors.in_fp32 * self.shape.hidden / self.request.stream_ranks

    @property
    def hidden_per_token(self) -> float:
        """Inputs of the matrix products and outputs of the norms (LlamaDecoderLayer.forward; torch: linear). Each rank
        of a tensor-parallel group has all of them, and of the attention's tensors those of its heads."""
        divided = self.hidden_tensors.in_computing_type - self.other_ranks_tensors - self.gathered_tensors
        return self.width * (self.gathered_tensors + divided / self.request.stream_ranks) * self.shape.hidden

    @property
    def gathered_tensors(self) -> float:
        """Tensors of all tokens in a group that divides the residual stream: inputs of matrices. Under autocast all
        tensors in 16 bits are copies of such inputs."""
        if self.request.stream_ranks == 1:
            return 0.0
        return self.hidden_tensors.in_computing_type if self.mode == "autocast" else _GATHERED_INPUTS

    @property
    def other_ranks_tensors(self) -> float:
        """Tensors of the hidden width that the other ranks of a tensor-parallel group have."""
        if self.saved_tensors.query:
            return 0.0
        return _ATTENTION_TENSORS * (1 - 1 / self.request.tensor_ranks)

    @property
    def inner_per_token(self) -> float:
        """Gate, activation and input of the last product (LlamaMLP.forward; torch: silu, gelu, mul, linear). A tiled
        block saves its input alone, which the norm's output is (TiledMLP.forward in DeepSpeed's ulysses_sp.py)."""
        if self.request.tiled_mlp:
            return 0.0
        return self.width * self.inner_tensors * self.shape.inner

    @property
    def query_per_token(self) -> float:
        """Queries and attention output; with eager attention keys and values, too, repeated for each query head
        (repeat_kv; torch: matmul, and _scaled_dot_product_flash_attention)."""
        return self.width * self.saved_tensors.query * self.query

    @property
    def key_per_token(self) -> float:
        """Keys and values of fused attention (torch: _scaled_dot_product_flash_attention)."""
        return self.width * self.saved_tensors.key * self.key

    @property
    def exchanged_per_token(self) -> float:
        """Tensors of Ulysses: the exchange makes a second one of attention's output, which the output matrix reads, and
        copies of each key head if there are fewer than ranks (UlyssesSPAttentionHF.forward in ulysses_sp.py)."""
        ranks = self.request.sequence_ranks
        if ranks == 1:
            return 0.0
        copies = max(1, ranks // self.shape.key_value_heads) - 1
        return float(self.width * (self.query + 2 * copies * self.key))

    @property
    def head_norms_per_token(self) -> float:
        """Norms of queries and keys: the input in fp32, and the product that trained weights multiply
        (Qwen3Attention.forward, Qwen3RMSNorm.forward); a kernel saves its input alone."""
        if not self.family.head_norms:
            return 0.0
        if self.kernels is not None:
            per_element = self.width
        elif self.shape.lora_rank is None:
            per_element = 4 + self.width
        else:
            per_element = 4
        return float(per_element * (self.shape.heads + self.shape.key_value_heads) * self.shape.head_dim)

    @property
    def dropout_masks_per_token(self) -> int:
        """Masks of two outputs (BertSelfOutput and BertOutput)."""
        return 2 * self.mask_width * self.shape.hidden if self.has_dropout else 0

    @property
    def mask_width(self) -> int:
        """Bytes per element of a mask of dropout: one on a GPU (torch: native_dropout), and on a CPU those of its
        factors (_dropout_impl in Dropout.cpp)."""
        return self.width if self.request.box.is_cpu_only else 1

    @property
    def cached_per_token(self) -> float:
        """Copies of keys and values in a cache, which transformers does not fill under gradient checkpointing."""
        has_cache = self.request.uses_cache and self.is_fused and not self.request.gradient_checkpointing
        return self.width * self.family.cached * self.query if has_cache else 0.0

    @property
    def fp32_inputs_per_token(self) -> int:
        """Queries, keys and values of torch's attention without a kernel, above those in the computing type."""
        return _MATH_INPUTS * (4 - self.width) * self.query if self.lacks_kernel else 0

    @functools.cached_property
    def saved(self) -> float:
        """All that a layer saves for its backward pass."""
        per_token = (
            self.fp32_hidden_per_token
            + self.hidden_per_token
            + self.inner_per_token
            + self.query_per_token
            + self.key_per_token
            + self.exchanged_per_token
            + self.head_norms_per_token
            + self.adapters.layer
            + self.dropout_masks_per_token
            + self.fp32_inputs_per_token
            + self.cached_per_token
        )
        return self.tokens * per_token + self.scores

    # Attention scores.

    @property
    def score_rows(self) -> int:
        """Queries of all heads."""
        return self.request.micro_batch * self.shape.heads * self.request.sequence_length

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key of which eager attention has a score."""
        return 0.0 if self.is_fused else float(self.score_rows * self.request.sequence_length)

    @property
    def softmax_in_fp32(self) -> bool:
        """Whether the softmax is in fp32 (eager_attention_forward; autocast_mode.h)."""
        if self.lacks_kernel:
            return True
        on_cuda = self.is_autocast_on_cuda and self.family.softmax_in_fp32_on_cuda
        return self.mode in self.family.softmax_in_fp32 or on_cuda

    @property
    def bytes_per_pair(self) -> float:
        """Eager attention's scores: the softmax's output, its fp32 copy, and with dropout a mask, and dropout's output
        in addition to its input, which an fp32 softmax does not save (eager_attention_forward; torch: softmax)."""
        if self.lacks_kernel:
            return 4.0 * _MATH_SCORES
        per_pair = self.family.scores * self.width + (4 if self.softmax_in_fp32 else 0)
        if self.request.drops_attention:
            per_pair += self.mask_width + (0 if self.softmax_in_fp32 else self.width)
        return per_pair

    @property
    def scores(self) -> float:
        """Fused attention saves one number per token and head, its logsumexp
        (torch: _scaled_dot_product_flash_attention); eager attention saves every pair."""
        if self.is_fused:
            return 4.0 * self.score_rows
        return self.bytes_per_pair * self.pairs

    @property
    def largest_scores(self) -> float:
        """One tensor of scores in the softmax's type."""
        return self.pairs * (4 if self.softmax_in_fp32 else self.width)

    # With recomputation, and in a pass that saves nothing.

    @property
    def kept_products(self) -> float:
        """torchtitan's selective option (apply_ac) saves products 1, 3 and so on, and its fused attention."""
        if not self.request.saves_matmul_outputs:
            return 0.0
        hidden, inner = self.shape.hidden, self.shape.inner
        gates = [inner] * (2 if self.shape.gated else 1)
        outputs = [self.query, self.key, self.key, hidden, *gates, hidden]
        return self.tokens * self.width * (sum(outputs[::2]) + self.query) + 4.0 * self.score_rows

    @property
    def checkpoint(self) -> float:
        """A recomputed layer saves its input (GradientCheckpointingLayer in modeling_layers.py)."""
        return self.tokens * self.shape.hidden * self.stream / self.request.stream_ranks + self.kept_products

    @property
    def saved_input(self) -> float:
        """Bytes of a recomputed layer's input that are among the tensors that it saves: a norm in fp32 or a matrix in
        the computing type saves the input itself, and otherwise a copy of it in the other type."""
        if not self.request.gradient_checkpointing:
            return 0.0
        if not self.family.begins_with_norm:
            is_saved = self.mode != "autocast" and self.reads_input_itself
        elif self.kernels is not None or self.mode != "engine":
            is_saved = True
        else:
            is_saved = not self.hidden_tensors.in_fp32
        return is_saved * self.residual / self.request.stream_ranks

    @property
    def reads_input_itself(self) -> bool:
        """Whether a matrix or an adapter saves the attention's input."""
        if self.shape.lora_rank is None:
            return True
        return not self.request.lora_dropout and not adapted_modules(self.shape).isdisjoint(READS_INPUT)

    @property
    def widened(self) -> int:
        """The last product's input, which peft casts to fp32 for its adapter (_cast_input_dtype in peft's
        tuners/tuners_utils.py), and autocast back to 16 bits."""
        last = self.family.block[-1]
        is_cast = self.mode == "autocast" and last in adapted_modules(self.shape)
        return self.tokens * (4 + 2) * self.shape.inner if is_cast else 0

    @property
    def forward_temporaries(self) -> float:
        """The larger of the feed-forward block's tensors (LlamaMLP.forward) and the scores that are live at once."""
        in_block = self.block_tokens * self.width * (2 * self.shape.inner + self.shape.hidden) + self.widened
        if self.request.tiled_mlp:
            # The outputs of all tiles, and the tensor that joins them.
            in_block += 2 * self.hidden_gradient
        scores = _MATH_SCORES_FORWARD if self.lacks_kernel else self.family.scores_forward
        return max(in_block, scores * self.largest_scores)

    # The backward pass.

    @functools.cached_property
    def block_tokens(self) -> int:
        """Tokens of the feed-forward block's tensors at once: all, or those of a tile, at most as many as the hidden
        width of each sample (tiled_mlp_forward in ulysses_sp.py)."""
        if not self.request.tiled_mlp:
            return self.tokens
        return math.ceil(self.tokens / math.ceil(self.request.sequence_length / self.shape.hidden))

    @property
    def inner_gradients(self) -> float:
        """Gradients of the feed-forward width that are live at once. The fused gate's kernel writes both over the
        tensors that it saved (swiglu.py of Liger)."""
        if self.kernels is not None and not self.request.torch_gate:
            return 1.0
        in_fp32 = self.is_autocast_on_cuda and self.family.inner_on_cuda
        return self.family.inner_gradients + (3.0 if in_fp32 else 0.0)

    @property
    def hidden_gradient(self) -> int:
        """The gradient of a layer's input or output."""
        return self.tokens * self.width * self.shape.hidden

    @property
    def last_is_adapted(self) -> bool:
        """Whether the block's last matrix has an adapter."""
        return self.family.block[-1] in adapted_modules(self.shape)

    @property
    def unsaved_product(self) -> float:
        """The last matrix's input if nothing saves it: the matrix is frozen, and has no adapter."""
        if self.shape.lora_rank is None:
            return 0.0
        return self.tokens * max(0.0, -_shared_input(self.request, self.family.block[-1:], self.shape.inner))

    @property
    def at_product(self) -> float:
        """Temporaries at the gradient of the last matrix's input: with an adapter the gradients of both products and
        their sum, when that input is freed."""
        inner = self.tokens * self.width * self.shape.inner
        return (2 if self.last_is_adapted else 1) * inner

    @property
    def at_gate(self) -> float:
        """Temporaries at the gradients of gate or activation: the last matrix's input is freed, if it was saved, and
        autocast's copy of the matrix."""
        inner = self.tokens * self.width * self.shape.inner
        if self.kernels is not None and not self.request.torch_gate:
            # Both are written over saved tensors.
            return inner
        last = (matrix for matrix in self.shape.layer_matrices if matrix.name.startswith(self.family.block[-1]))
        return self.inner_gradients * inner + self.unsaved_product - self.cast_bytes(last)

    @property
    def residual(self) -> int:
        """The residual stream, or its gradient."""
        return self.tokens * self.stream * self.shape.hidden

    @property
    def before_gradients(self) -> float:
        """Temporaries at the end of a recomputation: of its last matrix what peft casts, the outputs of matrix and
        adapter with their sum (Linear.forward in peft's layer.py), and the norm's output in fp32, still an argument;
        of a norm after it the matrix's input, still a variable (BertLayer.feed_forward_chunk), outputs and its own."""
        if not self.request.gradient_checkpointing:
            return 0.0
        norm_output = self.residual if self.family.begins_with_norm else 0
        in_matrix = self.widened + 3 * self.hidden_gradient + norm_output if self.widened else 0
        if self.family.begins_with_norm:
            return in_matrix
        return max(in_matrix, self.unsaved_product + 2 * self.hidden_gradient + self.residual)

    @functools.cached_property
    def in_block(self) -> float:
        """Temporaries of the feed-forward block: gradients of its width, and that of its output."""
        largest = self.in_tile if self.request.tiled_mlp else max(self.at_product, self.at_gate, self.before_gradients)
        return largest + self.residual

    @property
    def in_tile(self) -> float:
        """Temporaries of a tile, whose tensors are temporary, too, and the gradient of the block's input, which is one
        tensor (TiledMLP.backward)."""
        inner = self.block_tokens * self.width * (self.inner_gradients + self.inner_tensors) * self.shape.inner
        return inner + self.hidden_gradient + self.widened

    @property
    def norm(self) -> float:
        """Temporaries of a norm (torch: native_layer_norm_backward; LlamaRMSNorm's operations one by one)."""
        per_element = 4 if self.hidden_tensors.in_fp32 else self.width
        return self.tokens * _NORM_GRADIENTS * per_element * self.shape.hidden / self.request.stream_ranks

    @functools.cached_property
    def block_saved(self) -> float:
        """Tensors that the feed-forward block saved, half of the layer's hidden ones among them. They are freed before
        the attention's backward pass."""
        gathered = self.gathered_tensors / 2
        divided = (self.hidden_tensors.in_computing_type / 2 - gathered) / self.request.stream_ranks
        narrow = (gathered + divided) * self.shape.hidden
        in_computing_type = self.inner_per_token + self.width * narrow
        in_fp32 = 2 * self.hidden_tensors.in_fp32 * self.shape.hidden / self.request.stream_ranks
        return self.tokens * (in_computing_type + in_fp32) + self.tokens * _adapter_inputs(self.request).block

    @functools.cached_property
    def in_attention(self) -> float:
        """Temporaries of a norm, or of the scores and their gradient, above the block's freed tensors."""
        working = max(self.norm, self.score_gradients)
        if self.request.tiled_mlp:
            # These exceed a tile's tensors, and are less than those of a whole block: the gradients of the norm's
            # output and of the residual stream, or of attention.
            working = max(working + 2 * self.hidden_gradient, self.attention_gradients)
        return working - self.block_saved

    @property
    def attention_gradients(self) -> float:
        """Gradients in a fused attention's backward pass: of its output, queries, keys and values, and of the residual
        stream. On a GPU that of the queries accumulates in fp32, and those of grouped keys and values have the width of
        the queries (mha_bwd in flash_api.cpp of flash-attention 2, which torch has, too)."""
        queries, is_gpu = 2.0, not self.request.box.is_cpu_only
        if is_gpu:
            queries += 4 / self.width + (2 if self.shape.key_value_heads < self.shape.heads else 0)
        per_token = self.width * (queries * self.query + 2 * self.key)
        return self.tokens * per_token + self.hidden_gradient

    @property
    def score_gradients(self) -> float:
        """Eager attention's scores and their gradient, with those of the residual stream and of the values."""
        if self.is_fused:
            return 0.0
        # Without a kernel the product of weights and dropout is freed before the second gradient.
        second = 0.0 if self.lacks_kernel else self.pairs * self.width
        return self.largest_scores + second + self.residual + self.hidden_gradient

    @functools.cached_property
    def backward_temporaries(self) -> float:
        """The larger of both parts of the layer."""
        return max(self.in_block, self.in_attention)

    def bytes_after(self) -> dict[str, float]:
        """Return the bytes above those of the layer after the gradient of a module has arrived, by `phase`."""
        block = self.family.block
        block_casts = self.cast_bytes(matrix for matrix in self.shape.layer_matrices if matrix.name.startswith(block))
        after = {
            block[-1]: self.in_block,
            "": self.in_attention - block_casts,
            "reads": _NORM_GRADIENTS * 2 * self.hidden_gradient / self.request.stream_ranks
            + self.saved_input
            - self.saved,
        }
        if self.family.gated:
            # The activation, the product and a gradient are freed before the gate's matrix.
            freed = (self.inner_gradients + 1) * self.block_tokens * self.width * self.shape.inner
            after[block[1]] = self.in_block - freed + self.hidden_gradient
        after[block[0]] = self.norm - self.block_saved - block_casts
        return after

    # autocast's 16-bit copies of weights.

    @property
    def cast_width(self) -> int:
        """Bytes per element of autocast's copies. Stage 3's own function of linear layers has none, and Conv1D does not
        use it (transformers' pytorch_utils.py)."""
        if self.mode != "autocast":
            return 0
        return 2 if self.family.transposed or not saves_parameters(self.request) else 0

    def cast_bytes(self, matrices: Iterable[Parameter]) -> int:
        """Return the bytes of autocast's copies of a layer's matrices."""
        return self.cast_width * sum(matrix.elements for matrix in matrices)


class _TableEnds:
    """Parts outside the layers: embedding, last norm, and head. A property is one term."""

    def __init__(self, layer: _TableLayer) -> None:
        self.layer = layer
        self.request, self.shape, self.family = layer.request, layer.shape, layer.family
        self.is_classifier = layer.shape.family == "sequence-classification"

    @property
    def logits(self) -> int:
        """Elements of a language model's logits (LlamaForCausalLM.forward)."""
        return self.layer.tokens * self.shape.vocabulary if has_head(self.shape) and not self.is_classifier else 0

    @property
    def head_input(self) -> int:
        """Bytes per element of the head's input; a classifier reads a part of the layers' output."""
        if not has_head(self.shape) or (self.is_classifier and self.layer.stream > self.layer.width):
            return 0
        return self.layer.width

    @property
    def last_norm(self) -> int:
        """Bytes per element of the last norm's input in fp32 (LlamaRMSNorm.forward), and of the product in 16 bits of a
        norm that is in fp32 throughout (GemmaRMSNorm.forward)."""
        product = 2 if self.family.norm_in_fp32 and self.layer.mode == "engine" else 0
        return 4 * self.shape.gated + product

    @property
    def bytes_per_element(self) -> float:
        """Bytes of the first layer's input, or of the last output if that input is a checkpoint; and of the head."""
        return self.stream + self.head_input + self.last_norm / self.request.stream_ranks

    @property
    def stream(self) -> float:
        """Bytes per element of the residual stream, of which each rank of a group may have a part."""
        return self.layer.stream / self.request.stream_ranks

    @property
    def masks(self) -> float:
        """Causal masks over every pair of tokens, which a recomputed layer saves as one of its inputs
        (eager_mask in masking_utils.py)."""
        has_mask = not (self.layer.is_fused or self.layer.lacks_kernel or self.is_classifier)
        if not (has_mask and self.request.gradient_checkpointing):
            return 0.0
        pairs = self.request.micro_batch * self.request.sequence_length**2
        return float(pairs * self.layer.stream * self.family.masks)

    @property
    def saved(self) -> float:
        """All that is saved outside the layers, without the logits."""
        adapters = self.layer.adapters
        per_token = self.shape.hidden * (self.bytes_per_element + self.embedding_mask) + adapters.tail + adapters.first
        return self.layer.tokens * per_token + self.masks

    @property
    def embedding_mask(self) -> float:
        """Bytes per element of the factors of dropout behind the embedding on a CPU; the byte of a GPU is left out."""
        return self.stream if self.layer.has_dropout and self.request.box.is_cpu_only else 0.0

    @property
    def tail(self) -> float:
        """Tensors that the head's backward pass frees: a language model's last norm, its head's input, and the last
        layer's output, which is not a checkpoint. A classifier's head reads a part of that output."""
        per_element = self.bytes_per_element
        if not self.request.gradient_checkpointing:
            per_element = 0 if self.is_classifier else per_element - self.stream
        elif self.is_classifier:
            per_element -= self.stream
        return self.layer.tokens * (self.shape.hidden * per_element + self.layer.adapters.tail)

    @property
    def cast(self) -> int:
        """autocast's copy of the head, or of a classifier's pooler."""
        if self.layer.mode != "autocast" or saves_parameters(self.request):
            return 0
        columns = self.shape.hidden if self.is_classifier else math.ceil(self.shape.vocabulary / self.shape.head_parts)
        return 2 * self.shape.hidden * columns


@dataclasses.dataclass(frozen=True)
class _AdapterDifference:
    """Bytes per token that a model with LoRA saves in addition: in each layer, after the layers, and before them."""

    layer: float = 0.0
    tail: float = 0.0
    first: float = 0.0


def _adapter_difference(request: Request, mode: str) -> _AdapterDifference:
    """Return LoRA's difference. An adapter saves the input of its layer, so a frozen layer saves nothing itself."""
    shape, family, width = request.shape, find_family(request.shape), request.computing_bytes
    if shape.lora_rank is None:
        return _AdapterDifference()
    stream = 4 if mode == "autocast" else width
    # A trained norm saves the product that its weight multiplies (LlamaRMSNorm.forward), a frozen one does not.
    norm_product = 4 if family.norm_in_fp32 else stream
    inputs = _adapter_inputs(request)
    # Outputs of the A matrices.
    outputs = float(width * shape.lora_rank * len(adapter_products(shape)) // 2)
    layer = outputs + (inputs.attention + inputs.block) - family.multiplying_norms * norm_product * shape.hidden
    if mode == "autocast" and is_fused(request) and family.keeps_output and _adapts_output(shape):
        # The attention output is cast to fp32 for the adapter and back to 16 bits, which makes a second tensor.
        layer += width * shape.heads * shape.head_dim
    # The frozen head does not save its input, nor the frozen last norm its product.
    has_frozen_head = shape.family == "causal-lm" and not shape.headless_class and not trains_head(shape)
    head_input = width if has_frozen_head else 0
    last_product = norm_product if family.multiplying_norms else 0
    # Without recomputation the first norm saves nothing: the frozen embeddings have no gradient.
    first = 0 if trains_embedding(shape) else -(4 if family.multiplying_norms else stream)
    if request.gradient_checkpointing and not trains_embedding(shape):
        first = stream if family.sums_embeddings else 0
    has_frozen_pooler = not any(param.trained for param in _pooler_params(shape))
    if shape.family == "sequence-classification" and has_frozen_pooler and stream <= width:
        # Nothing else saves the last layer's output.
        first -= width
    return _AdapterDifference(layer, -(head_input + last_product) * shape.hidden, first * shape.hidden)


def _pooler_params(shape: ModelShape) -> list[Parameter]:
    return [param for param in shape.params if param.name.startswith("pooler")]


@functools.lru_cache(maxsize=64)
def adapted_modules(shape: ModelShape) -> frozenset[str]:
    """Return the modules of a layer that have adapters."""
    inside = (param.name for param in shape.params if param.place == 0)
    return frozenset(name.partition(INFIX)[0] for name in inside if INFIX in name)


def _adapts_output(shape: ModelShape) -> bool:
    """Whether the matrix that reads the attention's output has an adapter."""
    return any(
        module not in READS_INPUT and module not in find_family(shape).block for module in adapted_modules(shape)
    )


class _AdapterInputs(NamedTuple):
    """Bytes of adapters' inputs, and of DoRA's outputs, per token and layer, in attention and in the feed-forward
    block."""

    attention: float = 0.0
    block: float = 0.0


@cache_by_request
def _adapter_inputs(request: Request) -> _AdapterInputs:
    """Return the bytes above those of adapters on all linear layers without dropout, which share the tensor that their
    layers read."""
    shape, family = request.shape, find_family(request.shape)
    if shape.lora_rank is None:
        return _AdapterInputs()
    block = family.block
    inside = (param.name.removesuffix(".weight") for param in shape.layer_matrices if INFIX not in param.name)
    in_attention = [module for module in inside if module not in block]
    read_input = [module for module in in_attention if module in READS_INPUT]
    read_output = [module for module in in_attention if module not in READS_INPUT]
    query = shape.heads * shape.head_dim
    # The attention saves its output itself.
    is_kept = is_fused(request) and family.keeps_output
    inputs = _shared_input(request, read_input, shape.hidden)
    outputs = _shared_input(request, read_output, query, is_kept)
    block_inputs = _shared_input(request, block[:-1], shape.hidden)
    last_inputs = _shared_input(request, block[-1:], shape.inner)
    in_layer = _AdapterInputs(inputs + outputs, block_inputs + last_inputs)
    for module, size in dora_saved(request).items():
        is_in_block = module in block
        in_layer = _AdapterInputs(in_layer.attention + size * (not is_in_block), in_layer.block + size * is_in_block)
    return in_layer


def _shared_input(request: Request, modules: Iterable[str], size: int, is_saved: bool = False) -> float:
    """Return the bytes of the inputs of adapters on modules that read the same tensor, above that tensor; `is_saved`:
    something else saves it, as the product of 8-bit weights does (MatMul8bitLt in bitsandbytes' _functions.py)."""
    is_saved = is_saved or request.in_8_bits
    width, adapters = request.computing_bytes, len(adapted_modules(request.shape).intersection(modules))
    if not request.lora_dropout:
        return 0.0 if adapters or is_saved else -float(width * size)
    # Dropout saves its output and a mask: a byte an element on a GPU, and on a CPU the factors (Dropout.cpp).
    dropped = width + (width if request.box.is_cpu_only else 1)
    return float(size * (dropped * adapters - (0 if is_saved else width)))
