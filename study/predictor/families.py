"""Table of model families: parameters, modules in call order, and tensors that autograd saves per layer.

The entries follow the modelling code of transformers 5.17. Tests compare them with the models, and the saved tensors
with those that study/predictor/live_trace.py counts on the live code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Kept:
    """Number of tensors that autograd saves per layer, by width: always fp32 (`wide`), or in the computing type."""

    hidden: float
    inner: float
    # Width of all query heads, and of all key heads.
    query: float = 0.0
    key: float = 0.0
    # With autocast norms return fp32 and linear layers cast it: tensors of the hidden width in each type.
    autocast_wide: int = 0
    autocast_hidden: float = 0.0
    # In 16 bits the norms of some families compute in fp32.
    engine_wide: int = 0
    engine_hidden: float = 0.0


# A name is a module with parameters, "-" one without; a list is a module that contains others.
Tree = list["str | Tree"]


@dataclass(frozen=True)
class ModelFamily:
    """One architecture: its parameters, call order and saved tensors."""

    # Before the layers, of one layer, and after them, in model order: a module, the sizes of its weight, and its bias:
    # "+" always, "+attention" and "+mlp" if the configuration sets it.
    parameters: tuple[str, str, str]
    # Modules in call order: stage 3 prefetches at each of them, including those without parameters.
    calls: tuple[Tree, Tree, Tree]
    # With a fused attention (None: transformers has none that is counted here), and with eager attention, which saves
    # its scores, and key heads repeated for every query head.
    fused: Kept | None
    eager: Kept
    # Norms, rotary positions and the gate in one kernel each: a norm saves its input and output, the gate its two
    # inputs and their product, as Liger's rms_norm.py and swiglu.py and torch.compile's min-cut partitioner do.
    in_kernels: Kept | None = None
    # The feed-forward block has two input matrices.
    gated: bool = False
    tied: bool = True
    attention_bias: bool = False
    # Without a configured feed-forward width it is four times the hidden width.
    inner_is_free: bool = False
    # Weights are (in, out), as in transformers' Conv1D.
    transposed: bool = False
    # Values of transformers for keys that config.json leaves out.
    defaults: tuple[tuple[str, int], ...] = ()
    # Queries and keys are normalized per head.
    head_norms: bool = False
    # Score tensors in the computing type: saved for backward, and live at once in a forward pass.
    scores: float = 1.0
    scores_forward: float = 2.1
    # Modes in which the softmax computes in fp32, which saves one more tensor of scores. Autocast on CUDA, but not on a
    # CPU, computes powers and softmax in fp32 (aten/src/ATen/autocast_mode.h): this adds BERT's scores, and for GELU by
    # formula `inner_on_cuda` 16-bit tensors of the feed-forward width.
    softmax_in_fp32: tuple[str, ...] = ("autocast", "engine")
    softmax_in_fp32_on_cuda: bool = False
    inner_on_cuda: float = 0.0
    # Gradients of feed-forward width that are live at once, without the three more of that GELU, of which two are fp32.
    inner_gradients: float = 2.0
    # Norms per layer that multiply by their weights last: if frozen, they save no product for the weight gradient.
    multiplying_norms: int = 0
    # The last norm computes in fp32 throughout.
    norm_in_fp32: bool = False
    # The logits are capped by a tanh, which saves its output.
    caps_logits: bool = False
    # Two if some layers use a sliding window.
    masks: int = 1
    # A norm reads the layer's input; if not, the attention's matrices do.
    begins_with_norm: bool = True
    # The next layer's input is a view of the fused attention's output.
    keeps_output: bool = False
    # The word embedding's output is saved in addition to the first layer's input, if it requires a gradient:
    # transformers sets that with gradient checkpointing (_gradient_checkpointing_enable).
    sums_embeddings: bool = False
    has_dropout: bool = False
    # Tensors of the hidden width that a fused attention saves in addition with use_cache: its keys and values are then
    # copies (DynamicLayer.update in cache_utils.py), and no views of the product that queries or values still refer to.
    cached: float = 0.0
    # Sines and cosines of each position are in a table.
    has_sine_table: bool = False

    @functools.cached_property
    def block(self) -> tuple[str, ...]:
        """Matrices of the feed-forward block, the last one first in the backward pass."""
        return tuple(row.split()[0] for row in self.parameters[1].split(", ") if " inner" in row)


_BERT = Kept(8, 2, 0, 0, 2, 8, 0, 8)
_GPT2 = Kept(8, 5, 0, 0, 2, 6, 0, 8)
_MPT = Kept(8, 2, 0, 0, 2, 6, 0, 8)
_LLAMA_BLOCK: Tree = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LLAMA_MLP: Tree = ["gate_proj", "-", "up_proj", "down_proj"]
_LLAMA_PARAMETERS = (
    "q_proj query h +attention, k_proj key_value h +attention, v_proj key_value h +attention,"
    " o_proj h query +attention, gate_proj inner h +mlp, up_proj inner h +mlp, down_proj h inner +mlp,"
    " norm_0 h, norm_1 h"
)
_LLAMA = ModelFamily(
    parameters=("embed_tokens vocabulary h", _LLAMA_PARAMETERS, "norm h, lm_head vocabulary h"),
    calls=(["embed_tokens", "-"], ["norm_0", _LLAMA_BLOCK, "norm_1", _LLAMA_MLP], ["norm"]),
    fused=Kept(6, 4, 2, 2, 4, 5, 2, 4),
    eager=Kept(6, 4, 4, 0, 4, 5, 2, 4),
    in_kernels=Kept(4, 3, 2, 2, 2, 2, 0, 4),
    gated=True,
    tied=False,
    multiplying_norms=2,
    keeps_output=True,
)
_GEMMA = replace(
    _LLAMA,
    tied=True,
    defaults=(("head_dim", 256),),
    fused=Kept(6, 4, 2, 2, 4, 5, 4, 2),
    eager=Kept(6, 4, 4, 0, 4, 5, 4, 2),
    in_kernels=None,
    norm_in_fp32=True,
)
# Modules that read a layer's input, directly or after a norm.
READS_INPUT = (
    "query",
    "key",
    "value",
    "c_attn",
    "q_proj",
    "k_proj",
    "v_proj",
    "query_key_value",
    "Wqkv",
    "fc_in",
    "post_attention_layernorm",
    "dense_h_to_4h",
)
# Name prefixes, without hyphens, of architectures that are not modelled: the nearest name would give a wrong figure.
OTHER_FAMILIES = (
    "albert", "bart", "bloom", "clip", "cohere", "dbrx", "deberta", "deepseek", "distilbert", "electra", "falcon",
    "gemma3", "gemma4", "glm", "gptoss", "granite", "jamba", "llama4", "mamba", "mbart", "mixtral", "modernbert", "mt5",
    "olmo", "opt", "phi", "qwen2moe", "qwen35", "qwen3moe", "qwen3next", "roberta", "stablelm", "starcoder", "t5",
    "umt5", "vit", "whisper",
)  # fmt: skip
FAMILIES = {
    "bert": ModelFamily(
        # The head of this study's task has two classes.
        parameters=(
            "word_embeddings vocabulary h, position_embeddings positions h, token_type_embeddings types h,"
            " embeddings.LayerNorm h +",
            "query h h +, key h h +, value h h +, attention.output h h +, attention.LayerNorm h +,"
            " intermediate inner h +, output h inner +, output.LayerNorm h +",
            "pooler h h +, classifier two h +",
        ),
        calls=(
            [["word_embeddings", "token_type_embeddings", "position_embeddings", "embeddings.LayerNorm", "-"], "-"],
            [
                [["query", "key", "value"], ["attention.output", "-", "attention.LayerNorm"]],
                ["intermediate", "-"],
                ["output", "-", "output.LayerNorm"],
            ],
            [["pooler", "-"]],
        ),
        fused=_BERT,
        eager=_BERT,
        defaults=(("max_position_embeddings", 512), ("type_vocab_size", 2)),
        softmax_in_fp32=(),
        softmax_in_fp32_on_cuda=True,
        inner_gradients=1.0,
        begins_with_norm=False,
        keeps_output=True,
        sums_embeddings=True,
        has_dropout=True,
    ),
    "gpt2": ModelFamily(
        parameters=(
            "wte vocabulary h, wpe positions h",
            "ln_1 h +, c_attn h 3h +, attn.c_proj h h +, ln_2 h +, c_fc h inner +, mlp.c_proj inner h +",
            "ln_f h +, lm_head vocabulary h",
        ),
        calls=(
            ["wte", "wpe", "-"],
            ["ln_1", ["c_attn", "attn.c_proj", "-"], "ln_2", ["c_fc", "-", "mlp.c_proj", "-"]],
            ["ln_f"],
        ),
        fused=_GPT2,
        eager=_GPT2,
        defaults=(("n_positions", 1024),),
        inner_is_free=True,
        transposed=True,
        softmax_in_fp32=("autocast",),
        inner_on_cuda=3.0,
        keeps_output=True,
        sums_embeddings=True,
        has_dropout=True,
        cached=2.0,
    ),
    "gpt_neo": ModelFamily(
        parameters=(
            "wte vocabulary h, wpe positions h",
            "ln_1 h +, k_proj h h, v_proj h h, q_proj h h, out_proj h h +, ln_2 h +, c_fc inner h +, c_proj h inner +",
            "ln_f h +, lm_head vocabulary h",
        ),
        calls=(
            ["wte", "wpe", "-"],
            ["ln_1", [["q_proj", "k_proj", "v_proj", "-", "out_proj", "-"]], "ln_2", ["c_fc", "-", "c_proj", "-"]],
            ["ln_f"],
        ),
        fused=None,
        eager=Kept(8, 5, 0, 0, 2, 8, 2, 6),
        defaults=(("max_position_embeddings", 2048),),
        inner_is_free=True,
        scores_forward=3.2,
        inner_on_cuda=3.0,
        sums_embeddings=True,
    ),
    "gptj": ModelFamily(
        parameters=(
            "wte vocabulary h",
            "ln_1 h +, k_proj h h, v_proj h h, q_proj h h, out_proj h h, fc_in inner h +, fc_out h inner +",
            "ln_f h +, lm_head vocabulary h +",
        ),
        calls=(
            ["wte", "-"],
            ["ln_1", ["q_proj", "k_proj", "v_proj", "-", "out_proj", "-"], ["fc_in", "-", "fc_out", "-"]],
            ["ln_f"],
        ),
        fused=None,
        eager=Kept(6, 5, 0, 0, 1, 8, 2, 4),
        tied=False,
        inner_is_free=True,
        scores_forward=3.2,
        inner_on_cuda=3.0,
        has_sine_table=True,
    ),
    "gpt_neox": ModelFamily(
        parameters=(
            "embed_in vocabulary h",
            "input_layernorm h +, post_attention_layernorm h +, query_key_value 3h h +attention,"
            " attention.dense h h +attention, dense_h_to_4h inner h +, dense_4h_to_h h inner +",
            "final_layer_norm h +, lm_head vocabulary h",
        ),
        calls=(
            ["embed_in", "-", "-"],
            [
                "input_layernorm",
                ["query_key_value", "attention.dense"],
                "-",
                "post_attention_layernorm",
                ["dense_h_to_4h", "-", "dense_4h_to_h"],
                "-",
            ],
            ["final_layer_norm"],
        ),
        fused=Kept(10, 2, 0, 0, 1, 9, 0, 10),
        eager=Kept(7, 2, 0, 0, 1, 6, 0, 7),
        tied=False,
        attention_bias=True,
        inner_gradients=1.0,
        cached=-2.0,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": replace(
        _LLAMA,
        attention_bias=True,
        parameters=(
            _LLAMA.parameters[0],
            _LLAMA_PARAMETERS.replace("h query +attention", "h query"),
            _LLAMA.parameters[2],
        ),
    ),
    "qwen3": replace(
        _LLAMA,
        defaults=(("head_dim", 128),),
        head_norms=True,
        parameters=(
            _LLAMA.parameters[0],
            _LLAMA_PARAMETERS.replace(" gate_proj", " q_norm head_dim, k_norm head_dim, gate_proj"),
            _LLAMA.parameters[2],
        ),
        calls=(
            _LLAMA.calls[0],
            ["norm_0", ["q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj"], "norm_1", _LLAMA_MLP],
            ["norm"],
        ),
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        fused=None,
        eager=Kept(10, 4, 4, 0, 8, 5, 8, 2),
        scores=2.0,
        multiplying_norms=4,
        caps_logits=True,
        masks=2,
        keeps_output=False,
        parameters=(_LLAMA.parameters[0], f"{_LLAMA_PARAMETERS}, norm_2 h, norm_3 h", _LLAMA.parameters[2]),
        calls=(_LLAMA.calls[0], ["norm_0", _LLAMA_BLOCK, "norm_1", "norm_2", _LLAMA_MLP, "norm_3"], ["norm"]),
    ),
    # No biases, and ALiBi for positions. It saves the same tensors as GPT-NeoX, apart from rotary positions.
    "mpt": ModelFamily(
        parameters=(
            "wte vocabulary h",
            "norm_1 h, Wqkv 3h h, out_proj h h, norm_2 h, up_proj inner h, down_proj h inner",
            "norm_f h, lm_head vocabulary h",
        ),
        calls=(["wte"], ["norm_1", ["Wqkv", "out_proj"], "norm_2", ["up_proj", "-", "down_proj", "-"]], ["norm_f"]),
        fused=_MPT,
        eager=_MPT,
        inner_is_free=True,
        inner_gradients=1.0,
    ),
}
