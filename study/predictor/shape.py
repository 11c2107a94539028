"""A model as far as memory, traffic and time depend on it: every tensor by its name, in the order the engines see.

Free of torch and transformers: that this is what transformers makes is tested, for every family.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.config.errors import UserError, brief, did_you_mean, first_line
from study.config.flags import RunConfig
from study.host.folders import folder_named
from study.predictor.families import FAMILIES, OTHER_FAMILIES, ModelFamily
from study.workloads.presets import PRESETS, Family, Preset, find_preset, refuse_depth


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Parameters of one name in every layer, or outside the layers where `count` is 1."""

    name: str
    elements: int
    count: int
    in_layer: bool
    # Of its first dimension, along which FSDP2 cuts.
    rows: int = 1
    # False: frozen, as all of a model besides LoRA's adapters.
    trained: bool = True


# The place of what comes before the layers.
BEFORE = -1


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model."""

    index: int
    name: str = dataclasses.field(hash=False)
    elements: int = dataclasses.field(hash=False)
    rows: int = dataclasses.field(hash=False)
    # Its layer; BEFORE the layers, and their number for what comes after them.
    place: int = dataclasses.field(hash=False)
    trained: bool = dataclasses.field(hash=False)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A transformer as far as memory, traffic and time depend on it."""

    name: str
    model_type: str
    family: Family
    layers: int
    hidden: int
    # Of the feed-forward block.
    inner: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    # Two matrices go in: SwiGLU and its like.
    gated: bool
    # The output layer is the embedding.
    tied: bool
    tensors: tuple[Tensor, ...]
    # None: the configuration sets no limit to a sequence.
    positions: int | None = None
    # Of LoRA's adapters, which are among the tensors; None: all of it is trained.
    lora_rank: int | None = None

    @property
    def table(self) -> ModelFamily:
        return FAMILIES[self.model_type]

    @functools.cached_property
    def params(self) -> tuple[Parameter, ...]:
        """Every parameter, in the order in which the engines meet them."""
        inside = [tensor for tensor in self.tensors if tensor.in_layer]
        before = list(itertools.takewhile(lambda tensor: not tensor.in_layer, self.tensors))
        after = [tensor for tensor in self.tensors[len(before) :] if not tensor.in_layer]
        placed = [(BEFORE, before), *((layer, inside) for layer in range(self.layers)), (self.layers, after)]
        every = ((place, tensor) for place, tensors in placed for tensor in tensors)
        return tuple(
            Parameter(index, tensor.name, tensor.elements, tensor.rows, place, tensor.trained)
            for index, (place, tensor) in enumerate(every)
        )

    @functools.cached_property
    def trained_params(self) -> tuple[Parameter, ...]:
        """Parameters with gradients and an optimizer; frozen ones are in no engine's groups."""
        return tuple(param for param in self.params if param.trained)

    @property
    def parameters(self) -> int:
        return sum(tensor.elements * tensor.count for tensor in self.tensors)

    @property
    def trained_parameters(self) -> int:
        return sum(tensor.elements * tensor.count for tensor in self.tensors if tensor.trained)

    @property
    def frozen_parameters(self) -> int:
        return self.parameters - self.trained_parameters

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(tensor.elements for tensor in self.tensors)

    @property
    def largest_trained(self) -> int:
        """Elements of the largest trained tensor."""
        return max(tensor.elements for tensor in self.tensors if tensor.trained)


# LoRA: adapters as further tensors of a shape, and all else frozen, as study/workloads/architecture.py makes them.
# peft's "all-linear" puts two matrices beside every linear layer, A (rank x in) and B (out x rank), in the weights'
# type. The output layer of a language model has none, and a classifier's new one is trained whole.
INFIX = ".lora_"
_WITHOUT_ADAPTERS = (
    "wte", "wpe", "word_embeddings", "position_embeddings", "token_type_embeddings", "embed_tokens", "embed_in",
    "lm_head", "classifier",
)  # fmt: skip


def with_adapters(shape: ModelShape, rank: int) -> ModelShape:
    if rank < 1:
        raise UserError(f"--lora_rank {rank} is out of range", "use 1 or more")
    tensors = list[Tensor]()
    # Each module's adapters come behind its own tensors.
    for module, group in itertools.groupby(shape.tensors, key=lambda tensor: tensor.name.rpartition(".")[0]):
        own = [dataclasses.replace(tensor, trained=module == "classifier") for tensor in group]
        tensors += own
        matrix = own[0]
        if matrix.elements == matrix.rows or module in _WITHOUT_ADAPTERS:
            continue
        out, inside = matrix.rows, matrix.elements // matrix.rows
        if shape.table.transposed:
            out, inside = inside, out
        for letter, rows, columns in (("A", rank, inside), ("B", out, rank)):
            name = f"{module}{INFIX}{letter}.weight"
            tensors.append(Tensor(name, rows * columns, matrix.count, matrix.in_layer, rows=rows))
    return dataclasses.replace(shape, tensors=tuple(tensors), lora_rank=rank)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peft", choices=("none", "lora"), default="none", help="lora: adapters alone are trained")
    parser.add_argument(
        "--lora_rank",
        type=int,
        metavar="R",
        help=f"rows of each of LoRA's small matrices; by default {RunConfig.lora_rank}",
    )


def lora_text(shape: ModelShape) -> str:
    if shape.lora_rank is None:
        return ""
    return f", LoRA of rank {shape.lora_rank}: {shape.trained_parameters / 1e6:,.3g} M trained"


def shape_asked(shape: ModelShape, options: argparse.Namespace) -> ModelShape:
    if options.peft == "lora":
        return with_adapters(shape, RunConfig.lora_rank if options.lora_rank is None else options.lora_rank)
    if options.lora_rank is not None:
        raise UserError(f"--lora_rank {options.lora_rank} is of adapters, and there are none", "add --peft lora")
    return shape


# Keys of transformers for the same thing, the most common one first.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size",),
}
# transformers' ACT2FN, which refuses any other.
_ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu",
    "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
)  # fmt: skip
_LARGEST_SIZE = 2**31 - 1
_TIED = {"true": True, "false": False, "1": True, "0": False}
_WORDS = (*_KEYS, "inner", "key_value_heads", "head_dim", "positions", "tied", "type")


def model_shape(name: str, *, ask_hub: bool = False) -> ModelShape:
    """Return the shape of a preset, a folder or file with config.json, sizes in words, or with `ask_hub` a hub id."""
    if (preset := find_preset(name)) is not None:
        return shape_of_preset(preset)
    if "=" in name:
        return _shape_of_words(name)
    path = folder_named(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _shape_of_document(_read(file), name)
    if ask_hub and name.count("/") == 1:
        from study.workloads.presets import load_from

        return _shape_of_document(load_from(name, _hub_config, "config"), name)
    if path.is_dir():
        raise UserError(f"there is no config.json in {name}", "name the folder that holds the model's")
    if path.is_absolute() or name.startswith("."):
        raise UserError(f"there is no folder {name}", "name one with config.json, or a preset such as gpt2")
    if _is_of_another_family(name):
        raise UserError(f"{name!r} is of a family that is not modelled", f"name a model of {', '.join(FAMILIES)}")
    hint = "add --hub to ask the hub for it, or " if name.count("/") == 1 else ""
    near = did_you_mean(name, PRESETS, cutoff=0.4)
    raise UserError(
        f"unknown model {name!r}",
        f"{near}{hint}give a preset ({', '.join(PRESETS)}), a folder with config.json, or its sizes as"
        " layers=32,hidden=4096,heads=32,vocabulary=32000,inner=11008 (without inner: a GPT-2)",
    )


def _is_of_another_family(name: str) -> bool:
    """Whether it names an architecture that is not modelled, or a mixture of experts (8x7b, 30b-a3b)."""
    plain = name.rpartition("/")[2].lower()
    has_experts = re.search(r"moe|\d+x\d+b|-a\d+(\.\d+)?b", plain) is not None
    return has_experts or re.sub("[^a-z0-9]", "", plain).startswith(OTHER_FAMILIES)


# Tokens of a sample where the user does not say it.
USUAL_LENGTH = 2048


def sequence_length(shape: ModelShape, asked: int | None, default: int = USUAL_LENGTH) -> int:
    """Return the sequence length: by default as many tokens as the model takes, up to `default`."""
    if shape.positions is None:
        return asked or default
    if asked is not None and asked > shape.positions:
        raise UserError(
            f"{shape.name[:80]} has {shape.positions} positions, too few for sequences of {asked} tokens",
            f"use {shape.positions} or less",
        )
    return asked or min(default, shape.positions)


def shape_of_preset(preset: Preset) -> ModelShape:
    return shape_of_architecture(preset.name, preset.model_type, preset.architecture)


def shape_of_architecture(name: str, model_type: str, architecture: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a config of transformers; UserError names the keys that are missing."""
    if (family := FAMILIES.get(model_type)) is None:
        raise UserError(
            f"{name}: the family {model_type!r} is not modelled",
            f"use one of {', '.join(FAMILIES)}; or give the sizes of a dense model that is built like one of them, as"
            " layers=32,hidden=4096,heads=32,vocabulary=32000,inner=11008,key_value_heads=8,head_dim=128",
        )
    get = {**dict(family.defaults), **{key: value for key, value in architecture.items() if value is not None}}
    needed = {field: next((get[key] for key in keys if key in get), None) for field, keys in _KEYS.items()}
    inner = get.get("n_inner") or get.get("intermediate_size")
    if not inner and family.inner_is_free:
        inner = 4 * (needed["hidden"] or 0)
    missing = [f"{field} ({' or '.join(_KEYS[field])})" for field, value in needed.items() if value is None]
    missing += ["inner (intermediate_size)"] if inner is None else []
    if missing:
        raise UserError(f"{name} does not say its {', '.join(missing)}", "add what is missing")

    def whole(key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
            raise UserError(f"{name}: {key} is {value!r:.40}", f"use a whole number from 1 to {_LARGEST_SIZE:,}")
        return value

    layers, hidden, heads, vocabulary = (whole(key, needed[key]) for key in ("layers", "hidden", "heads", "vocabulary"))
    inner = whole("inner", inner)
    refuse_depth(layers, name)
    for key in ("hidden_act", "activation_function", "hidden_activation"):
        if get.get(key, "gelu") not in _ACTIVATIONS:
            raise UserError(f"{name}: {key} is {brief(get[key])}", f"use one of {', '.join(_ACTIVATIONS)}")
    key_value_heads = whole("num_key_value_heads", get.get("num_key_value_heads") or heads)
    if heads % key_value_heads:
        raise UserError(f"{name}: {key_value_heads} key heads do not divide {heads} heads", "use key heads that do")
    head_dim = whole("head_dim", get.get("head_dim", hidden // heads))
    if hidden % heads and "head_dim" not in get:
        raise UserError(f"{name}: {heads} heads do not divide a width of {hidden}", "use heads that do")
    tied = get.get("tie_word_embeddings", family.tied)
    if type(tied) is not bool:
        raise UserError(f"{name}: tie_word_embeddings is {brief(tied)}", "use true or false")
    positions = _positions(get)
    positions = None if positions is None else whole("max_position_embeddings", positions)
    is_classifier = model_type == "bert"
    sizes = {
        "h": hidden, "3h": 3 * hidden, "inner": inner, "vocabulary": vocabulary, "query": heads * head_dim,
        "key_value": key_value_heads * head_dim, "head_dim": head_dim, "positions": positions or 0, "two": 2,
        "types": get.get("type_vocab_size", 0),
    }  # fmt: skip
    biases = {
        "+": True, "+attention": bool(get.get("attention_bias", family.attention_bias)),
        "+mlp": bool(get.get("mlp_bias", False)),
    }  # fmt: skip
    tensors = list[Tensor]()
    # Before the layers, in each of them, and after them; rows of the families' table.
    for text, count in zip(family.parameters, (1, layers, 1), strict=True):
        in_layer = text is family.parameters[1]
        for row in text.split(", "):
            module, *words = row.split()
            has_bias = words[-1] in biases and biases[words.pop()]
            dimensions = [sizes[word] for word in words]
            tensors.append(Tensor(f"{module}.weight", math.prod(dimensions), count, in_layer, rows=dimensions[0]))
            if has_bias:
                out = dimensions[-1 if family.transposed else 0]
                tensors.append(Tensor(f"{module}.bias", out, count, in_layer, rows=out))
    if tied:
        tensors = [tensor for tensor in tensors if tensor.name != "lm_head.weight"]
    return ModelShape(
        name=name, model_type=model_type, family="sequence-classification" if is_classifier else "causal-lm",
        layers=layers, hidden=hidden, inner=inner, heads=heads, key_value_heads=key_value_heads, head_dim=head_dim,
        vocabulary=vocabulary, gated=family.gated, tied=tied and not is_classifier, tensors=tuple(tensors),
        positions=positions,
    )  # fmt: skip


def _positions(get: Mapping[str, Any]) -> Any:
    """Rotary ones can be stretched (linear, dynamic, YaRN), and the file then says by how much."""
    positions = get.get("n_positions") or get.get("max_position_embeddings")
    stretched = get.get("rope_parameters") or get.get("rope_scaling") or {}
    if not isinstance(stretched, Mapping) or type(positions) is not int:
        return positions
    factor = stretched.get("factor")
    kind = stretched.get("rope_type") or stretched.get("type")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float) or not 1 <= factor <= 1e4:
        return positions
    first = stretched.get("original_max_position_embeddings")
    return max(positions, int((first if type(first) is int else positions) * factor))


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable as JSON ({first_line(error)})", "give a config.json") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is not a config of transformers", "give a config.json")
    return document


def _hub_config(repo_id: str, **options: Any) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    options.pop("trust_remote_code")
    return _read(Path(hf_hub_download(repo_id, "config.json", **options)))


def _shape_of_document(document: Mapping[str, Any], name: str) -> ModelShape:
    if not isinstance(document.get("model_type"), str):
        raise UserError(f"{name} does not say its model_type", f"add one of {', '.join(FAMILIES)}")
    if document.get("quantization_config"):
        fix = "take quantization_config out of config.json to predict it in 16 bits"
        raise UserError(f"{name} is quantised, and weights of fewer bits are not predicted", fix)
    return shape_of_architecture(name.rstrip("/").rsplit("/", 1)[-1], document["model_type"], document)


def _shape_of_words(text: str) -> ModelShape:
    """layers=32,hidden=4096,heads=32,vocabulary=32000: a GPT-2, or a Llama where a size is given that only it has."""
    named = [part.partition("=")[::2] for part in text.split(",")]
    words = dict(named)
    if len(words) < len(named):
        raise UserError(f"{text[:80]} says a size twice", "say each once")
    if unknown := [word for word in words if word not in _WORDS]:
        fix = f"{did_you_mean(unknown[0], _WORDS)}known: {', '.join(_WORDS)}"
        raise UserError(f"{unknown[0][:40]!r} is not a size of a model", fix)
    if missing := [word for word in _KEYS if word not in words]:
        raise UserError(f"{text[:80]} does not say its {', '.join(missing)}", "add what is missing")
    model_type = words.pop("type", "llama" if {"inner", "key_value_heads", "head_dim"} & words.keys() else "gpt2")
    if "head_dim" in words and model_type in FAMILIES and not FAMILIES[model_type].gated:
        raise UserError(f"{text[:80]}: a {model_type[:20]} divides its width among its heads", "leave head_dim out")
    keys = {word: keys[0] for word, keys in _KEYS.items()} | {
        "inner": "intermediate_size", "key_value_heads": "num_key_value_heads", "positions": "n_positions",
        "head_dim": "head_dim", "tied": "tie_word_embeddings",
    }  # fmt: skip
    architecture: dict[str, Any] = {
        keys[word]: int(value) if value.isdecimal() and len(value) < 13 else value for word, value in words.items()
    }
    if (tied := words.get("tied")) is not None:
        if tied not in _TIED:
            raise UserError(f"tied={tied[:20]} in the sizes is neither true nor false", "use one of the two")
        architecture["tie_word_embeddings"] = _TIED[tied]
    if isinstance(hidden := architecture[keys["hidden"]], int):
        architecture.setdefault("intermediate_size", 4 * hidden)
    return shape_of_architecture(text, model_type, architecture)
