"""Which parameters stage 3 holds whole, and how often it gathers them: its own rules over the calls of modules.

partitioned_param_coordinator.py of deepspeed 0.19: what a module needs is gathered when it is called, then what the
next ones need until the prefetch bucket is full or too many are live; after the call it lets go of what is not needed
again within `stage3_max_reuse_distance` elements, and has not been looked at for a later call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from study.host.memory import LARGEST_KEPT_BYTES
from study.predictor.request import ModelShape, Request
from study.predictor.shape import INFIX
from study.predictor.state import BEFORE, EngineSettings, Piece, kept_whole, makes_whole, pieces_of, weight_bytes

# The modules of each family as they are called: stage 3 gathers ahead at every one of them, also where it has no
# parameters of its own.


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


@dataclasses.dataclass(frozen=True)
class Gathers:
    """Of one micro-batch, in elements."""

    # Put out by all gathers of one forward and backward pass, padded, and how many calls these are.
    elements: int = 0
    calls: int = 0
    # The most that is whole at once at each place, forward and backward, and of that what lies in small tensors. Of the
    # forward pass only places after which there is less.
    live_forward: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    live_backward: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    # When the head has run, and what it was gathered through has been let go of.
    live_at_end: tuple[int, int] = (0, 0)
    # Just before the gradient of each tensor comes, by the tensor's id, while its module is made whole; and when it is
    # there, and what the gathers went through has been let go of.
    live_before: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    live_at: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    # The most parameters that are gathered at once, without the buffers that they come through.
    gathered_at_once: int = 0

    @property
    def most(self) -> int:
        return max((live for live, _ in [*self.live_forward.values(), *self.live_backward.values()]), default=0)


@dataclasses.dataclass
class _Group:
    """Gathered into one buffer. The first use copies all of it out, and the buffer stays until the last."""

    size: int
    left: set[int]
    is_open: bool = False


_KNOWN: dict[tuple[Any, ...], Gathers] = {}


class _Coordinator:
    def __init__(self, trace: Sequence[Call], whole: set[int], settings: EngineSettings, request: Request) -> None:
        self.settings, self.ranks, self.gloo = settings, request.box.ranks, request.box.gathers_into_copies
        self.sharded = [tuple(piece for piece in call.pieces if id(piece) not in whole) for call in trace]
        self.let_go_after = [tuple(piece for piece in call.lets_go if id(piece) not in whole) for call in trace]
        self.order = [(at, piece) for at, pieces in enumerate(self.sharded) for piece in pieces]
        self.place = 0
        # The latest call that a piece was looked at for.
        self.seen: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.together: list[_Group] = []
        self.total = self.gathered = self.gathered_at_once = self.calls = self.small = 0
        self.smaller_than = LARGEST_KEPT_BYTES / weight_bytes(request)
        self.sums = [0]
        for call in trace:
            self.sums.append(self.sums[-1] + sum(piece.elements for piece in call.pieces))
        self.next_use = _next_use(self.sharded)

    def gather(self, pieces: Sequence[Piece]) -> int:
        """The elements that come."""
        missing = [piece for piece in pieces if id(piece) not in self.live]
        size = sum(piece.elements for piece in missing)
        for piece in missing:
            self.live[id(piece)] = piece.elements
            self.small += piece.elements if piece.elements < self.smaller_than else 0
            self.gathered += math.ceil(piece.elements / self.ranks) * self.ranks
        # One rank copies each by itself.
        if len(missing) > 1 and self.ranks > 1:
            self.together.append(_Group(size, {id(piece) for piece in missing}))
        self.total += size
        self.gathered_at_once = max(self.gathered_at_once, self.total)
        self.calls += bool(missing)
        return size

    def copied(self, at: int) -> int:
        """Elements that are there twice while module `at` runs."""
        used, found = {id(piece) for piece in self.sharded[at]}, 0
        for group in self.together:
            group.is_open = group.is_open or bool(group.left & used)
            found += group.size if group.is_open else 0
            group.left -= used
        self.together = [group for group in self.together if group.left]
        return found

    def call(self, at: int) -> int:
        """Elements that are whole at the most while module `at` runs, copies of them included."""
        came = self.gather(self.sharded[at])
        # gloo gathers into a copy of the whole.
        peak = self.total + (came if self.gloo else 0)
        copied = self.copied(at)
        while self.place < len(self.order) and self.order[self.place][0] <= at:
            self.seen[id(self.order[self.place][1])] = self.order[self.place][0]
            self.place += 1
        room = min(self.settings.max_live - self.total, self.settings.prefetch_bucket)
        coming: list[Piece] = []
        elements = 0
        while self.place < len(self.order) and elements < room:
            when, piece = self.order[self.place]
            self.place += 1
            self.seen[id(piece)] = max(self.seen.get(id(piece), 0), when)
            if id(piece) not in self.live and piece not in coming:
                coming.append(piece)
                elements += piece.elements
        came = self.gather(coming)
        return max(peak, self.total + copied + (came if self.gloo else 0))

    @property
    def settled(self) -> int:
        """Elements that are whole once a module's own are there, with the buffers that are still to be copied out."""
        return self.total + sum(group.size for group in self.together if group.is_open)

    def release(self, at: int) -> None:
        for piece in self.sharded[at]:
            again = self.next_use[at].get(id(piece))
            near = again is not None and self.sums[again] - self.sums[at + 1] < self.settings.max_reuse_distance
            if id(piece) in self.live and not near and self.seen[id(piece)] <= at + 1:
                self.let_go(piece)
        for piece in self.let_go_after[at]:
            if id(piece) in self.live:
                self.let_go(piece)

    def let_go(self, piece: Piece) -> None:
        self.total -= self.live.pop(id(piece))
        self.small -= piece.elements if piece.elements < self.smaller_than else 0


def gathers_of(request: Request, settings: EngineSettings) -> Gathers:
    """It does not depend on the micro-batch, so a search over those asks once."""
    if not makes_whole(request, settings):
        return Gathers()
    key = (
        request.shape, settings, request.gradient_checkpointing, request.box.gathers_into_copies, request.box.ranks,
        weight_bytes(request),
    )  # fmt: skip
    if key not in _KNOWN:
        if len(_KNOWN) > 512:
            _KNOWN.clear()
        _KNOWN[key] = _gathers(request, settings)
    return _KNOWN[key]


def _gathers(request: Request, settings: EngineSettings) -> Gathers:
    forward, backward = calls_of(request.shape, request.gradient_checkpointing)
    whole = {id(piece) for piece in kept_whole(request, settings)}
    trace = (*forward, *backward)
    coordinator = _Coordinator(trace, whole, settings, request)
    live_forward: dict[int, tuple[int, int]] = {}
    live_backward: dict[int, tuple[int, int]] = {}
    live_before: dict[int, tuple[int, int]] = {}
    live_at: dict[int, tuple[int, int]] = {}
    place, since, at_end = BEFORE, (0, 0), (0, 0)
    for at, call in enumerate(trace):
        live, settled = (coordinator.call(at), coordinator.small), (coordinator.settled, coordinator.small)
        if at < len(forward):
            # What is around all layers is called before them.
            place = call.place if call.pieces else place
            live_forward[place] = max(live_forward.get(place, (0, 0)), live)
            at_end = settled
        else:
            live_backward[call.place] = max(live_backward.get(call.place, (0, 0)), live)
            # While frozen weights are whole no gradient comes: the next one stands for them.
            most = max(since, live)
            is_frozen = any(not piece.trained for piece in call.pieces)
            since = most if is_frozen else (0, 0) if call.pieces else since
            live_before |= dict.fromkeys(map(id, call.pieces), most)
            live_at |= dict.fromkeys(map(id, call.pieces), settled)
        coordinator.release(at)
    if not coordinator.gloo:
        # Two published rows of GPUs say that what the head was gathered through is there beside the logits (0.3 % off,
        # and 1.0 without). Why is not known: a block that waits for a stream (record_stream) is reserved, and no more.
        at_end = max(live_forward.values())
        live_forward = {request.shape.layers: at_end}
    return Gathers(
        coordinator.gathered,
        coordinator.calls,
        _before_less(live_forward),
        live_backward,
        at_end,
        live_before,
        live_at,
        coordinator.gathered_at_once,
    )


def _before_less(live: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """What a place keeps only grows, so one that has no more than a later one decides nothing."""
    kept, most = dict[int, tuple[int, int]](), (-1, -1)
    for place in sorted(live, reverse=True):
        larger = max(most[0], live[place][0]), max(most[1], live[place][1])
        if larger != most:
            kept[place], most = live[place], larger
    return kept


def _next_use(sharded: Sequence[Sequence[Piece]]) -> list[dict[int, int]]:
    coming: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for at in reversed(range(len(sharded))):
        found.append({id(piece): coming[id(piece)] for piece in sharded[at] if id(piece) in coming})
        coming |= dict.fromkeys(map(id, sharded[at]), at)
    return found[::-1]
