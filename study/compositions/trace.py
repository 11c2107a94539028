"""Figures of a training that are compared: those of every step, in the order in which a fault can first show."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# The order within a step; `resumed` are the weights after a checkpoint was loaded.
STAGES = ("forward", "loss", "gradient", "norm", "update", "weight", "evaluation", "resumed")
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
        return self.step, STAGES.index(self.stage)

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
        np.savez(file, **{place.key: value for place, value in self.figures.items()})  # type: ignore[arg-type]

    @classmethod
    def load(cls, file: Path) -> FigureTrace:
        with np.load(file, allow_pickle=False) as saved:
            return cls({Place.parse(key): saved[key] for key in saved.files})


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
