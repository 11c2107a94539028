"""Activations and FLOPs of a class outside the table, from the traces of live_trace.py."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from study.config.strategies import Strategy
from study.predictor import live
from study.predictor.activations import Activations, LayerStack, computing_mode, is_fused, loss_bytes, saves_parameters
from study.predictor.adapters import dora_temporaries
from study.predictor.hardware import Hardware
from study.predictor.losses import LogitBytes
from study.predictor.request import Request


@dataclasses.dataclass(frozen=True)
class Trace:
    """Traced figures of a micro-batch of a class outside the table; `missing` names what could not be traced."""

    activations: Activations = dataclasses.field(default_factory=Activations)
    # FLOPs: forward, of fused attention, of the layers forward, and backward.
    forward: float = 0.0
    attention: float = 0.0
    layers_forward: float = 0.0
    backward: float = 0.0
    # Elements of the residual stream, summed over the layers.
    stream: float = 0.0
    missing: str | None = None


_ANY_STRATEGY = Strategy("any", "NO")


@functools.lru_cache(maxsize=2048)
def trace(request: Request) -> Trace:
    """Return the traced figures, which strategies and numbers of GPUs share."""
    box = Hardware(request.box.device.name, request.box.device, gpus_per_node=1)
    without_engine = dataclasses.replace(request, strategy=_ANY_STRATEGY, box=box, accumulation=1)
    return _traced(without_engine, has_casts=not saves_parameters(request))


@functools.lru_cache(maxsize=512)
def _traced(request: Request, has_casts: bool) -> Trace:
    """Return the figures. A layer has the mean of all, and its temporaries the difference to the largest one."""
    shape = request.shape
    assert isinstance(shape, live.LiveShape)
    answer = live.measure(
        shape,
        mode=computing_mode(request),
        dropout=request.dropout or request.drops_attention,
        fused=is_fused(request),
        cuda=not request.box.is_cpu_only,
        length=request.sequence_length,
        **({"lora_dropout": 0.1} if request.lora_dropout else {}),
        **({"target": request.target_length} if request.target_length else {}),
        **({"input_gradients": True} if shape.has_input_gradients(request.gradient_checkpointing) else {}),
    )
    if isinstance(answer, str):
        return Trace(missing=f"activations and FLOPs ({answer})")
    first_pass, second_pass = answer["passes"]
    passes = _TwoPasses(
        first=first_pass,
        second=second_pass,
        counts=answer["counts"],
        batch=request.micro_batch / answer["samples"],
    )
    layers = _TracedLayers(request, passes, answer["kinds"], has_casts)
    logits = _traced_loss(request, passes)
    first, second = (passes.outside(at) for at in (passes.first, passes.second))
    # The head's logits are apart; if they grow by less than 0, that part is freed among the rest.
    freed_logits = min(0.0, passes.grown("tail"))
    is_autocast = computing_mode(request) == "autocast"
    # The loss's part is freed with the output of the last layer.
    *lower, last = layers.stacks
    last = dataclasses.replace(last, tail=last.tail + freed_logits * request.gradient_checkpointing)
    activations = Activations(
        layer=layers.mean("saved"),
        checkpoint=layers.mean("checkpoint"),
        outside=passes.at_batch(first, second) + freed_logits,
        layer_forward=max(stack.forward for stack in layers.stacks),
        tail=last.tail,
        layer_working=max(stack.working for stack in layers.stacks),
        freed=layers.freed,
        weight_norm=dora_temporaries(request),
        unequal_stacks=(*lower, last),
        layer_kinds=layers.linear_kinds,
        cast_layer=layers.casts,
        logits=logits.saved,
        logits_forward=logits.forward,
        logits_backward=logits.backward,
        cast_head=has_casts * (2 * passes.first["tail"] - passes.second["tail"]),
        cast_cached=layers.casts * is_autocast * shape.trained_parameters / shape.parameters,
    )
    return Trace(
        activations,
        forward=passes.flops("forward"),
        attention=passes.flops("attention"),
        layers_forward=passes.batch * passes.total("forward", passes.first),
        backward=passes.flops("backward"),
        stream=passes.batch * passes.total("stream", passes.first, recomputed=False),
        missing=answer["missing"],
    )


@dataclasses.dataclass(frozen=True)
class _TwoPasses:
    """A traced pass of few samples, and one of twice as many.

    The part that grows between them is activations; the constant part is gradients of weights and autocast's copies.
    """

    first: Mapping[str, Any]
    second: Mapping[str, Any]
    # Layers of each kind, by the one that was traced.
    counts: Mapping[str, int]
    # The micro-batch, in units of the first pass.
    batch: float

    def growth(self, first: float, second: float) -> float:
        """Return a figure's part that grows with the micro-batch."""
        return (second - first) * self.batch

    def grown(self, figure: str) -> float:
        """Return the part of a figure outside the layers that grows with the micro-batch."""
        return self.growth(self.first[figure], self.second[figure])

    def at_batch(self, first: float, second: float) -> float:
        """Return a figure at the micro-batch, with its constant part."""
        return first + (second - first) * (self.batch - 1)

    def working(self, first: float, second: float, gradient: float) -> float:
        """Return temporaries without the gradient of a weight, which is constant and counted elsewhere."""
        constant = 2 * first - second
        return self.growth(first, second) + min(constant, max(0.0, constant - gradient))

    def total(self, figure: str, at: Mapping[str, Any], recomputed: bool = True) -> float:
        """Return the sum of a figure over the layers of a pass; with `recomputed` over those that can be."""
        traced = ((self.counts[name], layer) for name, layer in at["layers"].items() if layer)
        return float(sum(count * layer[figure] for count, layer in traced if layer["recomputed"] or not recomputed))

    def outside(self, at: Mapping[str, Any]) -> float:
        """Return the bytes of a pass that are saved outside the layers, and by layers that are never recomputed."""
        return float(at["outside"] + self.total("saved", at, recomputed=False) - self.total("saved", at))

    def flops(self, figure: str) -> float:
        """Return the FLOPs of a micro-batch, with all layers for those that were traced."""
        traced = sum(layer[figure] for layer in self.first["layers"].values() if layer)
        return float(self.batch * (self.first[figure] - traced + self.total(figure, self.first, recomputed=False)))


class _TracedLayers:
    """Activations of the layers of a traced model. A layer of a stack has the mean of the stack."""

    def __init__(self, request: Request, passes: _TwoPasses, kinds: Mapping[str, str], has_casts: bool) -> None:
        shape = request.shape
        self.request = request
        # By layer, the one that was traced in its place.
        self.kinds = kinds
        totals = [passes.total("saved", at) for at in (passes.first, passes.second)]
        # autocast's copies do not grow.
        self.casts = has_casts * (2 * totals[0] - totals[1]) / shape.layers
        ends = itertools.accumulate(shape.stack_sizes)
        layers = list(kinds)
        self.parts = [
            _TracedStack(request, passes, [kinds[layer] for layer in layers[end - size : end]])
            for size, end in zip(shape.stack_sizes, ends, strict=True)
        ]
        self.stacks = [part.stack for part in self.parts]

    def mean(self, figure: Literal["saved", "checkpoint"]) -> float:
        """Return the mean of a figure over all layers."""
        total = sum(stack.layers * float(getattr(stack, figure)) for stack in self.stacks)
        return total / self.request.shape.layers

    @property
    def linear_kinds(self) -> tuple[str, ...]:
        """Names of the layers that were traced, by layer; above the last one of a stack no layer has left gradients."""
        last = {end - 1 for end in itertools.accumulate(self.request.shape.stack_sizes)}
        return tuple(f"{kind}{' (last)' * (place in last)}" for place, kind in enumerate(self.kinds.values()))

    @property
    def freed(self) -> dict[str, float]:
        """Bytes below the peak of a layer's stack after each gradient, by parameter."""
        params = self.request.shape.params
        gradients = {param.name: self.request.weight_bytes * param.elements for param in params}
        by_kind = {kind: part for part in self.parts for kind in part.kinds}
        freed = dict[str, float]()
        for layer, kind in self.kinds.items():
            for at, size in by_kind[kind].freed(kind, gradients):
                name = layer + at.removeprefix(kind) if at.startswith(kind) else at
                freed[name] = size
        return freed


class _TracedStack:
    """Similar layers that follow each other: their mean, and each kind's difference to it."""

    def __init__(self, request: Request, passes: _TwoPasses, kinds: Sequence[str]) -> None:
        self.request, self.passes = request, passes
        self.kinds = Counter(kinds)
        # Both passes of each kind that was called.
        self.pairs = {
            name: (passes.first["layers"][name], passes.second["layers"][name])
            for name in self.kinds
            if passes.first["layers"][name]
        }

    def _means(self, figure: str) -> tuple[float, float]:
        """Return the mean of a figure over the layers in both passes, 0 for those that are never recomputed."""
        first = second = 0.0
        for name, (layer, double) in self.pairs.items():
            if layer["recomputed"]:
                first += self.kinds[name] * layer[figure]
                second += self.kinds[name] * double[figure]
        layers = self.kinds.total()
        return first / layers, second / layers

    @functools.cached_property
    def saved(self) -> float:
        """Bytes that a layer saves, in the mean."""
        return self.passes.growth(*self._means("saved"))

    @property
    def stack(self) -> LayerStack:
        checkpoints = self._means("checkpoint")
        return LayerStack(
            layers=self.kinds.total(),
            saved=self.saved,
            checkpoint=self.passes.at_batch(*checkpoints),
            forward=max(self.grown.values(), default=0.0),
            working=self.peak,
            # The first layer's input is among the checkpoints.
            tail=self.passes.growth(*checkpoints) * self.request.gradient_checkpointing,
            shared=self._total("masks"),
            carried=self._total("carried"),
        )

    def _total(self, figure: str) -> float:
        """Return the sum of a figure over the kinds of layers, of bytes that one layer adds for all."""
        pairs = self.pairs.values()
        return self.passes.at_batch(
            sum(layer[figure] for layer, _ in pairs), sum(double[figure] for _, double in pairs)
        )

    @functools.cached_property
    def grown(self) -> dict[str, float]:
        """Bytes that a layer of each kind saves, if it can be recomputed."""
        return {
            name: self.passes.growth(layer["saved"], double["saved"]) * layer["recomputed"]
            for name, (layer, double) in self.pairs.items()
        }

    @functools.cached_property
    def above(self) -> dict[str, float]:
        """Bytes that a recomputed layer of each kind has above the mean."""
        return {name: (size - self.saved) * self.request.gradient_checkpointing for name, size in self.grown.items()}

    @functools.cached_property
    def temporaries(self) -> dict[str, dict[str, float]]:
        """Temporaries by kind of layer, from each gradient to the next; "" before the first one."""
        return {name: self._layer_temporaries(*pair) for name, pair in self.pairs.items()}

    def _layer_temporaries(self, layer: Mapping[str, Any], double: Mapping[str, Any]) -> dict[str, float]:
        sizes = {
            at: self.passes.working(size, double["working"].get(at, size), layer["gradient"])
            for at, size in layer["working"].items()
        }
        if self.request.gradient_checkpointing:
            repeated = self.passes.growth(layer["recomputing"], double["recomputing"])
            sizes[""] = max(repeated, sizes.get("", repeated))
        return sizes

    @functools.cached_property
    def peak(self) -> float:
        """The largest temporaries of any layer."""
        peaks = (self.above[name] + max(sizes.values(), default=0.0) for name, sizes in self.temporaries.items())
        return max(peaks, default=0.0)

    def freed(self, kind: str, gradients: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Yield the bytes below the peak after each gradient of a traced layer, by parameter."""
        temporaries = self.temporaries.get(kind, {})
        # Those before a layer's first gradient are without it.
        before = temporaries.get("", -math.inf)
        for at, size in temporaries.items():
            if at:
                yield at, self.peak - self.above[kind] - max(size, before - gradients[at])
                before = -math.inf


def _traced_loss(request: Request, passes: _TwoPasses) -> LogitBytes:
    """Return the bytes of the traced loss, or of another loss by its formula."""
    shape = request.shape
    if request.loss_kernel != "transformers" and shape.family == "causal-lm":
        tokens = request.micro_batch * request.sequence_length
        return loss_bytes(request, tokens * shape.vocabulary, request.computing_bytes)
    first, second = passes.first, passes.second
    backward = passes.working(first["tail_backward"], second["tail_backward"], first["gradient"])
    return LogitBytes(
        saved=max(0.0, passes.grown("tail")),
        forward=max(0.0, passes.grown("tail_forward")),
        backward=max(0.0, backward),
    )
