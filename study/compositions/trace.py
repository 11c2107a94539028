"""Figures of a training that are compared: those of every step, in the order in which a fault can first show."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# The order within a step. `local gradient` is that of one rank's micro-batches, before ranks reduce it to `gradient`;
# `resumed` are the weights after a checkpoint was loaded, `resumed master` the same in fp32.
STAGES = (
    "forward",
    "loss",
    "local gradient",
    "gradient",
    "norm",
    "update",
    "weight",
    "evaluation",
    "resumed",
    "resumed master",
)
# What own_figures.py compares those with: fp32 weights before a checkpoint is loaded, and half a unit in the last place
# of the type in which ranks reduce.
BASES = ("saved master", "reduction rounding")
# Prefixes that wrappers add to the names of parameters and modules.
_WRAPPERS = re.compile(
    r"\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_orig_mod|base_model\.model)\."
    r"|^(module|_fsdp_wrapped_module)\."
)


def plain_name(name: str) -> str:
    """Return the name of a parameter or module in the plain model."""
    previous = ""
    while previous != name:
        previous, name = name, _WRAPPERS.sub("", name)
    return name


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a figure: a step, a stage of it, and a tensor, which is empty for a figure of the model."""

    step: int
    stage: str
    tensor: str = ""

    @property
    def key(self) -> str:
        return f"{self.step}|{self.stage}|{self.tensor}"

    @property
    def order(self) -> tuple[int, int]:
        return self.step, (STAGES + BASES).index(self.stage)

    @classmethod
    def parse(cls, key: str) -> Place:
        step, stage, tensor = key.split("|")
        return cls(int(step), stage, tensor)


@dataclasses.dataclass
class FigureTrace:
    """Figures by place, in the order in which they were observed."""

    figures: dict[Place, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict)

    def note(self, place: Place, value: torch.Tensor | float | None) -> None:
        """Keep a copy of a figure in 64 bits; None is a figure that the engine does not report."""
        if value is None:
            return
        figure = value if isinstance(value, (int, float)) else value.detach().double().cpu().numpy()
        self.figures[place] = np.array(figure, dtype=np.float64)

    def save(self, file: Path) -> None:
        save_arrays(file, {place.key: value for place, value in self.figures.items()})

    @classmethod
    def load(cls, file: Path) -> FigureTrace:
        return cls({Place.parse(key): value for key, value in load_arrays(file).items()})


def save_arrays(file: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays in 64 bits by their names, as one array in the file: each array costs more time than its bytes."""
    shapes = {name: array.shape for name, array in arrays.items()}
    values = np.concatenate([array.ravel() for array in arrays.values()])
    np.savez(file, shapes=np.frombuffer(json.dumps(shapes).encode(), dtype=np.uint8), values=values)


def load_arrays(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that `save_arrays` has written."""
    with np.load(file, allow_pickle=False) as saved:
        shapes: dict[str, list[int]] = json.loads(saved["shapes"].tobytes())
        values = saved["values"]
    arrays, start = dict[str, np.ndarray[Any, Any]](), 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        arrays[name] = values[start:end].reshape(shape)
        start = end
    return arrays


def watch_modules(
    model: torch.nn.Module,
    trace: FigureTrace,
    find_place: Callable[[str], Place | None],
    complete: Callable[[torch.Tensor], torch.Tensor] = lambda output: output,
) -> None:
    """Note the outputs of layers, embeddings and head for which `find_place(module name)` is a place.

    `complete` returns the output for whole samples from that of a rank's part.
    """
    import torch

    def watch(name: str) -> Any:
        def note_output(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            place = find_place(name)
            # Gradient checkpointing runs a layer again in the backward pass.
            if place is not None and place not in trace.figures:
                tensor = output[0] if isinstance(output, tuple) else output
                if torch.is_tensor(tensor):
                    trace.note(place, complete(tensor))

        return note_output

    for name, module in model.named_modules():
        if re.search(r"(embed_tokens|embed_positions|layers\.\d+|final_layer_norm|lm_head)$", name):
            module.register_forward_hook(watch(plain_name(name)))


class LocalGradients:
    """Sums of a rank's gradients by plain name, from hooks on weights: before any engine reduces them.

    `replaces_weights`: the engine computes with other tensors than the model's, as FSDP does, and each layer's hook is
    set before it computes. Under stage 3 reading a layer's weight at that time would gather it.
    """

    def __init__(self, model: torch.nn.Module, *, replaces_weights: bool = False) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._sums: dict[str, torch.Tensor] = {}
        self._hooked: Any = WeakIdKeyDictionary()
        # A tied weight has one name, that of its first layer.
        plain_names = {weight: plain_name(name) for name, weight in model.named_parameters()}
        if not replaces_weights:
            for weight, name in plain_names.items():
                self._watch(weight, name)
            return
        for module in model.modules():
            layer_names = {name: plain_names[weight] for name, weight in module.named_parameters(recurse=False)}
            if layer_names:
                module.register_forward_pre_hook(self._make_hook(layer_names))

    def take(self) -> dict[str, torch.Tensor]:
        """Return the sums since the last call."""
        sums, self._sums = self._sums, {}
        return sums

    def _make_hook(self, layer_names: dict[str, str]) -> Any:
        def watch_weights(module: torch.nn.Module, inputs: Any) -> None:
            for attribute, name in layer_names.items():
                self._watch(getattr(module, attribute), name)

        return watch_weights

    def _watch(self, weight: torch.Tensor, name: str) -> None:
        if weight.requires_grad and weight not in self._hooked:
            self._hooked[weight] = name
            weight.register_hook(lambda gradient: self._add(name, gradient))

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        exact = gradient.detach().double()
        self._sums[name] = self._sums[name] + exact if name in self._sums else exact.clone()
