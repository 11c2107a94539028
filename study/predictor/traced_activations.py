"""Activations and FLOPs of a class outside the table, from the traces of live_trace.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from study.config.strategies import Strategy
from study.predictor import live
from study.predictor.activations import Activations, computing_mode, is_fused, loss_bytes, saves_parameters
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
    # Elements of the hidden states of all layers, which are what their inputs have.
    hidden_elements: float = 0.0
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
        dropout=request.dropout,
        fused=is_fused(request),
        cuda=not request.box.is_cpu_only,
        length=request.sequence_length,
        **({"lora_dropout": 0.1} if request.lora_dropout else {}),
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
    layers = _TracedLayers(request, passes, has_casts)
    logits = _traced_loss(request, passes)
    first, second = (passes.outside(at) for at in (passes.first, passes.second))
    # The head's logits are apart; if they grow by less than 0, that part is freed among the rest.
    freed_logits = min(0.0, passes.grown("tail"))
    activations = Activations(
        layer=layers.saved,
        checkpoint=passes.at_batch(*layers.checkpoints),
        outside=passes.at_batch(first, second) + freed_logits,
        layer_forward=max(layers.grown.values()),
        # The first layer's input is among the checkpoints.
        tail=(passes.growth(*layers.checkpoints) + freed_logits) * request.gradient_checkpointing,
        layer_working=layers.peak,
        freed=layers.freed(answer["kinds"]),
        cast_layer=layers.casts,
        logits=logits.saved,
        logits_forward=logits.forward,
        logits_backward=logits.backward,
        cast_head=has_casts * (2 * passes.first["tail"] - passes.second["tail"]),
        cast_cached=layers.casts * shape.trained_parameters / shape.parameters,
    )
    return Trace(
        activations,
        forward=passes.flops("forward"),
        attention=passes.flops("attention"),
        layers_forward=passes.batch * passes.total("forward", passes.first),
        backward=passes.flops("backward"),
        hidden_elements=passes.batch * passes.total("elements", passes.first, recomputed=False),
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
    """Activations of the layers of a traced model: of their mean, and the largest one's difference to it."""

    def __init__(self, request: Request, passes: _TwoPasses, has_casts: bool) -> None:
        self.request, self.passes = request, passes
        layers = request.shape.layers
        totals = [passes.total("saved", at) for at in (passes.first, passes.second)]
        self.saved = passes.growth(*totals) / layers
        # autocast's copies do not grow.
        self.casts = has_casts * (2 * totals[0] - totals[1]) / layers
        self.checkpoints = [passes.total("checkpoint", at) / layers for at in (passes.first, passes.second)]
        # By kind of layer, in both passes.
        self.pairs = {
            name: (layer, passes.second["layers"][name]) for name, layer in passes.first["layers"].items() if layer
        }

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
        return max(0.0, *peaks)

    def freed(self, kinds: Mapping[str, str]) -> dict[str, float]:
        """Return the bytes below the peak after each gradient, by parameter; `kinds` has the traced kind of a layer."""
        freed = dict[str, float]()
        params = self.request.shape.params
        gradients = {param.name: self.request.weight_bytes * param.elements for param in params}
        for layer, kind in kinds.items():
            temporaries = self.temporaries.get(kind, {})
            # Those before a layer's first gradient are without it.
            before = temporaries.get("", -math.inf)
            for at, size in temporaries.items():
                if at:
                    name = layer + at.removeprefix(kind) if at.startswith(kind) else at
                    freed[name] = self.peak - self.above[kind] - max(size, before - gradients[name])
                    before = -math.inf
        return freed


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
