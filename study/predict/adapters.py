"""LoRA's adapters as further tensors of a shape, and all else of it frozen: as study/models/adapters.py makes them.

peft's "all-linear" puts two matrices beside every linear layer, A (rank x in) and B (out x rank), in the weights' type.
The output layer of a language model has none, and a classifier's new one is trained whole.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from study.errors import UserError
from study.predict.request import ModelShape, Tensor
from study.spec.config import RunConfig

INFIX = ".lora_"
_NO_LINEAR = (
    "wte",
    "wpe",
    "word_embeddings",
    "position_embeddings",
    "token_type_embeddings",
    "embed_tokens",
    "embed_in",
)
_OUTPUTS = ("lm_head", "classifier")
# transformers' Conv1D holds (in, out).
_TURNED = ("gpt2",)


def with_adapters(shape: ModelShape, rank: int) -> ModelShape:
    if rank < 1:
        raise UserError(f"--lora_rank {rank} is out of range", "use 1 or more")
    return dataclasses.replace(shape, tensors=tuple(_tensors(shape, rank)), lora_rank=rank)


def _tensors(shape: ModelShape, rank: int) -> Iterator[Tensor]:
    """Each layer's adapters come behind its own tensors."""
    modules = [tensor.name.rpartition(".")[0] for tensor in shape.tensors]
    for place, tensor in enumerate(shape.tensors):
        module = modules[place]
        yield dataclasses.replace(tensor, trained=module == "classifier")
        if place + 1 < len(modules) and modules[place + 1] == module:
            continue
        matrix = next(one for one, of in zip(shape.tensors, modules, strict=True) if of == module)
        if matrix.elements > matrix.rows and module not in (*_NO_LINEAR, *_OUTPUTS):
            out, inside = matrix.rows, matrix.elements // matrix.rows
            if shape.model_type in _TURNED:
                out, inside = inside, out
            for letter, rows, columns in (("A", rank, inside), ("B", out, rank)):
                name = f"{module}{INFIX}{letter}.weight"
                yield Tensor(name, rows * columns, tensor.count, tensor.in_layer, rows=rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peft", choices=("none", "lora"), default="none", help="lora: adapters alone are trained")
    parser.add_argument(
        "--lora_rank",
        type=int,
        metavar="R",
        help=f"rows of each of LoRA's small matrices; by default {RunConfig.lora_rank}",
    )


def told(shape: ModelShape) -> str:
    if shape.lora_rank is None:
        return ""
    return f", LoRA of rank {shape.lora_rank}: {shape.trained_parameters / 1e6:,.3g} M trained"


def shape_asked(shape: ModelShape, options: argparse.Namespace) -> ModelShape:
    if options.peft == "lora":
        rank = RunConfig.lora_rank if options.lora_rank is None else options.lora_rank
        return with_adapters(shape, rank)
    if options.lora_rank is not None:
        raise UserError(f"--lora_rank {options.lora_rank} is of adapters, and there are none", "add --peft lora")
    return shape
