"""The modules of each family as they are called: stage 3 gathers ahead at every one of them, also where it has no
parameters of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from study.predict.adapters import INFIX
from study.predict.request import ModelShape
from study.predict.state import BEFORE, Piece, pieces_of


@dataclasses.dataclass(frozen=True)
class Call:
    """A module that runs, with its own parameters."""

    place: int
    pieces: tuple[Piece, ...]
    # After it, whoever needs them next.
    lets_go: tuple[Piece, ...] = ()


# A name is a module with parameters, "-" one without; a list is a module around others.
_Tree = list["str | _Tree"]
_LLAMA_BLOCK: _Tree = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LLAMA_MLP: _Tree = ["gate_proj", "-", "up_proj", "down_proj"]
_LLAMA: tuple[_Tree, _Tree, _Tree] = (
    ["embed_tokens", "-"], ["norm_0", _LLAMA_BLOCK, "norm_1", _LLAMA_MLP], ["norm"],
)  # fmt: skip
# What is called in the model before the layers, a layer, and after them in the model.
_CALLED: dict[str, tuple[_Tree, _Tree, _Tree]] = {
    "bert": (
        [["word_embeddings", "token_type_embeddings", "position_embeddings", "embeddings.LayerNorm", "-"], "-"],
        [[["query", "key", "value"], ["attention.output", "-", "attention.LayerNorm"]], ["intermediate", "-"],
         ["output", "-", "output.LayerNorm"]],
        [["pooler", "-"]],
    ),
    "gpt2": (
        ["wte", "wpe", "-"],
        ["ln_1", ["c_attn", "attn.c_proj", "-"], "ln_2", ["c_fc", "-", "mlp.c_proj", "-"]], ["ln_f"],
    ),
    "gpt_neo": (
        ["wte", "wpe", "-"],
        ["ln_1", [["q_proj", "k_proj", "v_proj", "-", "out_proj", "-"]], "ln_2", ["c_fc", "-", "c_proj", "-"]],
        ["ln_f"],
    ),
    "gptj": (
        ["wte", "-"],
        ["ln_1", ["q_proj", "k_proj", "v_proj", "-", "out_proj", "-"], ["fc_in", "-", "fc_out", "-"]], ["ln_f"],
    ),
    "gpt_neox": (
        ["embed_in", "-", "-"],
        ["input_layernorm", ["query_key_value", "attention.dense"], "-", "post_attention_layernorm",
         ["dense_h_to_4h", "-", "dense_4h_to_h"], "-"],
        ["final_layer_norm"],
    ),
    "mpt": (["wte"], ["norm_1", ["Wqkv", "out_proj"], "norm_2", ["up_proj", "-", "down_proj", "-"]], ["norm_f"]),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), _LLAMA),
    "qwen3": (
        _LLAMA[0],
        ["norm_0", ["q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj"], "norm_1", _LLAMA_MLP], ["norm"],
    ),
    "gemma2": (_LLAMA[0], ["norm_0", _LLAMA_BLOCK, "norm_1", "norm_2", _LLAMA_MLP, "norm_3"], ["norm"]),
}  # fmt: skip
# What reads a layer's own input, through no more than a norm.
_READS_INPUT = (
    "query", "key", "value", "c_attn", "q_proj", "k_proj", "v_proj", "query_key_value", "Wqkv", "fc_in",
    "post_attention_layernorm", "dense_h_to_4h",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Node:
    call: Call
    children: tuple[_Node, ...] = ()

    def calls(self, backward: bool = False) -> list[Call]:
        """A module around others comes before them in both directions."""
        children = self.children[::-1] if backward else self.children
        return [self.call, *(call for child in children for call in child.calls(backward))]


@functools.lru_cache(maxsize=64)
def calls_of(shape: ModelShape, recomputes: bool) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Forward and backward. A layer that is recomputed runs forward again before its backward pass."""
    owned: dict[tuple[int, str], list[Piece]] = {}
    for piece in pieces_of(shape):
        owned.setdefault((piece.place, piece.name.rpartition(".")[0]), []).append(piece)

    def node(tree: str | _Tree, place: int) -> _Node:
        if isinstance(tree, str):
            own = _Node(Call(place, tuple(owned.get((place, tree), ()))))
            adapters = [owned.get((place, f"{tree}{INFIX}{letter}"), ()) for letter in "AB"]
            if not all(adapters):
                return own
            # peft's layer around the model's own; its dropout is a module, too.
            around = (own, _Node(Call(place, ())), *(_Node(Call(place, tuple(pieces))) for pieces in adapters))
            return _Node(Call(place, ()), around)
        return _Node(Call(place, ()), tuple(node(child, place) for child in tree))

    (before, layer, after), end = _CALLED[shape.model_type], shape.layers
    layers = tuple(node(layer, number) for number in range(shape.layers))
    inside = (*(node(tree, BEFORE) for tree in before), *layers, *(node(tree, end) for tree in after))
    if shape.family == "sequence-classification":
        heads: tuple[_Node, ...] = (node("-", end), node("classifier", end))
    else:
        # A tied head is the embedding once more.
        tied = owned[BEFORE, str(before[0])] if shape.tied else []
        heads = (_Node(Call(end, (*tied, *owned.get((end, "lm_head"), ())))),)
    root = _Node(Call(end, ()), (_Node(Call(end, ()), inside), *heads))
    # Where layers are recomputed, transformers makes the embedding of words have a gradient.
    without = set[int]() if recomputes else _without_gradient(root.calls())
    backward = [call for call in root.calls(backward=True) if id(call) not in without]
    if recomputes and shape.lora_rank:
        backward = list(_recomputing_frozen(backward, {number: one.calls() for number, one in enumerate(layers)}))
    elif recomputes:
        first = {number: one.calls()[0] for number, one in enumerate(layers)}
        again = {id(call): layers[number].calls() for number, call in first.items()}
        backward = [each for call in backward for each in (*again.get(id(call), ()), call)]
    return tuple(root.calls()), tuple(backward)


def _recomputing_frozen(backward: Sequence[Call], layers: dict[int, list[Call]]) -> Iterator[Call]:
    """A layer runs again once its last adapter wants what it took. What is frozen of it is booked to that adapter's
    module, and let go of with it (update_recompute_parameters): the rest of the backward pass gathers it once more."""
    for call in backward:
        yield call
        if call.place in layers and any(piece.trained for piece in call.pieces):
            *again, last = layers.pop(call.place)
            frozen = (piece for one in (*again, last) for piece in one.pieces if not piece.trained)
            yield from (*again, dataclasses.replace(last, lets_go=tuple(frozen)))


def _without_gradient(forward: Sequence[Call]) -> set[int]:
    """What is called in no backward pass, since nothing before it is trained: parameter_offload.py hooks a module's
    output, and that has no gradient."""
    found: set[int] = set()
    seen = False
    for call in forward:
        seen = seen or any(piece.trained for piece in call.pieces)
        if call.pieces and not call.pieces[0].trained:
            module = call.pieces[0].name.rpartition(".")[0]
            if not seen or (call.place == 0 and module in _READS_INPUT):
                found.add(id(call))
    return found
