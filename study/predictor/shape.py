"""Shapes of models: every parameter by name, in the engines' order.

Does not import torch or transformers; tests compare every family with the model that transformers creates.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study.config.errors import UserError, clip, did_you_mean, first_line, require_extra
from study.config.flags import RunConfig
from study.host.folders import resolve_path
from study.predictor.families import FAMILIES, OTHER_FAMILIES, ModelFamily
from study.predictor.lora_targets import ALL_LINEAR, DEFAULT_TARGETS, is_target, module_name
from study.workloads.presets import PRESETS, Family, check_depth, find_base, find_preset, load_from

# Place of parameters before the layers.
BEFORE = -1


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model, in the engines' order."""

    index: int
    name: str = dataclasses.field(hash=False)
    elements: int = dataclasses.field(hash=False)
    # Size of the first dimension, which FSDP2 shards.
    rows: int = dataclasses.field(hash=False)
    # Its layer; BEFORE if it precedes the layers, and the number of layers if it follows them.
    place: int = dataclasses.field(hash=False)
    # False: frozen, as all parameters of a LoRA model other than the adapters.
    trained: bool = dataclasses.field(default=True, hash=False)
    # FSDP2 gathers it again for the backward pass: layers, and an untied embedding as its group.
    regathered: bool = dataclasses.field(default=False, hash=False)

    def shard_by_rows(self, ranks: int) -> int:
        """Return the elements of one rank's shard in FSDP2, with padding."""
        return math.ceil(self.rows / ranks) * (self.elements // self.rows)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes and parameters of a transformer, on which memory, traffic and time depend."""

    name: str
    model_type: str
    family: Family
    layers: int
    hidden: int
    # Width of the feed-forward block.
    inner: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    # The feed-forward block has two input matrices, as SwiGLU.
    gated: bool
    # The output layer shares the embedding's weight.
    tied: bool
    params: tuple[Parameter, ...] = dataclasses.field(hash=False)
    # None: the configuration does not limit the sequence length.
    positions: int | None = None
    # Rank of the LoRA adapters, which are among the tensors; None: full training.
    lora_rank: int | None = None
    # Names of the modules with adapters, as peft's target_modules; none: all linear layers.
    lora_targets: tuple[str, ...] = ()
    # Content of config.json, as JSON.
    document: str = ""
    # Integer buffers, which DDP broadcasts: BERT's positions and types.
    buffer_bytes: int = 0
    # Index of the embedding, whose weight a tied output layer shares.
    embedding_index: int = 0
    # Reason that FSDP2 does not train it, and FSDP1.
    fsdp_refusal: str | None = None
    fsdp1_refusal: str | None = None
    # Method of config.json's quantization_config; figures are those of the weights that it stands for.
    quantized_by: str = ""

    @property
    def embedding(self) -> Parameter:
        return self.params[self.embedding_index]

    @functools.cached_property
    def layer_elements(self) -> int:
        """Elements of the largest layer."""
        sizes = collections.Counter[int]()
        for param in self.params:
            sizes[param.place] += param.elements
        return max(sizes[layer] for layer in range(self.layers))

    def find_layer(self, param: Parameter) -> int:
        """The layer that contains a parameter; BEFORE if none does."""
        return param.place if 0 <= param.place < self.layers else BEFORE

    @property
    def table(self) -> ModelFamily:
        return FAMILIES[self.model_type]

    @functools.cached_property
    def trained_params(self) -> tuple[Parameter, ...]:
        """Trainable parameters in the engines' order; frozen ones are not in the optimizer's groups."""
        return tuple(param for param in self.params if param.trained)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(param.elements for param in self.params)

    @functools.cached_property
    def trained_parameters(self) -> int:
        return sum(param.elements for param in self.trained_params)

    @functools.cached_property
    def frozen_in_layers(self) -> int:
        """Frozen elements of all layers."""
        return sum(param.elements for param in self.params if self.find_layer(param) >= 0 and not param.trained)

    @functools.cached_property
    def layer_matrices(self) -> tuple[Parameter, ...]:
        """The matrices of the first layer, adapters included."""
        return tuple(param for param in self.params if param.place == 0 and param.elements > param.rows)

    @property
    def frozen_parameters(self) -> int:
        return self.parameters - self.trained_parameters

    @functools.cached_property
    def largest(self) -> int:
        return max(param.elements for param in self.params)

    @functools.cached_property
    def largest_trained(self) -> int:
        return max(param.elements for param in self.trained_params)


# LoRA: adapters are additional parameters of a shape, and all others are frozen, as in study/workloads/architecture.py.
# peft's "all-linear" adds two matrices to every linear layer, A (rank x in) and B (out x rank), in the weights' type.
# The output layer of a language model has none, and a classifier's new output layer is trained in full.
INFIX = ".lora_"


@functools.lru_cache(maxsize=64)
def with_adapters(shape: ModelShape, rank: int, targets: tuple[str, ...] = ()) -> ModelShape:
    """Return the shape with frozen base weights and LoRA adapters of a rank, by default on all linear layers; UserError
    if the rank is below 1, or if the model has no module of such a name."""
    if rank < 1:
        raise UserError(f"--lora_rank {rank} is out of range", "use 1 or more")
    modules = dict.fromkeys(param.name.rpartition(".")[0] for param in shape.params if _can_adapt(shape, param))
    for target in targets:
        if not any(is_target(module, [target]) for module in modules):
            names = dict.fromkeys(module_name(module).rpartition(".")[2] for module in modules)
            fix = f"{did_you_mean(target, names)}its linear layers are {', '.join(names)}; or {ALL_LINEAR}"
            raise UserError(f"{shape.name[:80]} has no layer {clip(target)} for --lora_targets", fix)
    if shape.model_type not in FAMILIES:
        from study.predictor.live import live_shape

        live = live_shape(shape.name, json.loads(shape.document), rank, targets)
        return dataclasses.replace(live, quantized_by=shape.quantized_by)
    params = list[Parameter]()
    # Each module's adapters follow its parameters.
    for (place, module), group in itertools.groupby(
        shape.params, key=lambda param: (param.place, param.name.rpartition(".")[0])
    ):
        matrix, *biases = (
            dataclasses.replace(param, index=len(params) + number, trained=module == "classifier")
            for number, param in enumerate(group)
        )
        params += [matrix, *biases]
        if not _can_adapt(shape, matrix) or (targets and not is_target(module, targets)):
            continue
        out, columns_in = matrix.rows, matrix.elements // matrix.rows
        if shape.table.transposed:
            out, columns_in = columns_in, out
        for letter, rows, columns in (("A", rank, columns_in), ("B", out, rank)):
            name = f"{module}{INFIX}{letter}.weight"
            params.append(Parameter(len(params), name, rows * columns, rows, place, regathered=matrix.regathered))
    return dataclasses.replace(shape, params=tuple(params), lora_rank=rank, lora_targets=targets)


def _can_adapt(shape: ModelShape, param: Parameter) -> bool:
    """Whether it is the matrix of a linear layer with adapters: outside the layers only BERT's pooler is one."""
    return param.elements > param.rows and (0 <= param.place < shape.layers or param.name.startswith("pooler."))


@functools.lru_cache(maxsize=64)
def in_4_bits(shape: ModelShape, width: int) -> ModelShape:
    """Return the shape with the layers' frozen matrices as bitsandbytes stores them: two weights to a byte, in elements
    of the other weights' width (bnb_4bit_quant_storage). Experts in one tensor are no Linear, and are not packed."""

    def packed(param: Parameter) -> Parameter:
        is_matrix = 0 <= param.place < shape.layers and param.name.endswith(".weight") and param.rows < param.elements
        size = math.ceil(param.elements / (2 * width))
        is_packed = is_matrix and not param.trained
        return dataclasses.replace(param, elements=size, rows=size) if is_packed else param

    return dataclasses.replace(shape, params=tuple(map(packed, shape.params)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    qlora = "lora: train only adapters (QLoRA: with --quantization 4bit)"
    parser.add_argument("--peft", choices=("none", "lora"), default="none", help=qlora)
    dropout = "LoRA's dropout: with more than 0 each adapter keeps its own input and a mask; by default 0"
    parser.add_argument("--lora_dropout", type=float, metavar="P", help=dropout)
    rank = f"rank of the LoRA adapters; by default {RunConfig.lora_rank}"
    parser.add_argument("--lora_rank", type=int, metavar="R", help=rank)
    targets = f"modules with adapters, as peft's target_modules: q_proj,v_proj, or {ALL_LINEAR}; by default peft's own"
    parser.add_argument("--lora_targets", type=parse_targets, metavar="NAMES", help=targets)
    parser.add_argument("--quantization", choices=("none", "4bit"), default="none", help="4bit: QLoRA")
    double = "with 4bit: bnb_4bit_use_double_quant, 0.127 and not 0.5 bits of scales a weight"
    parser.add_argument("--double_quant", action="store_true", help=double)
    parser.add_argument("--with_reference", action="store_true", help="a frozen copy, as in DPO and GRPO")


def lora_text(shape: ModelShape) -> str:
    """Format LoRA's rank and trainable parameters, with a leading comma; empty without LoRA."""
    if shape.lora_rank is None:
        return ""
    where = ", ".join(shape.lora_targets) or "all linear layers"
    return f", LoRA of rank {shape.lora_rank} on {where}: {shape.trained_parameters / 1e6:,.3g} M trained"


def apply_lora_options(shape: ModelShape, options: argparse.Namespace) -> ModelShape:
    """Apply the command line's LoRA options to a shape; raise UserError for options that exclude each other."""
    if shape.quantized_by == "4bit" and options.quantization == "none":
        fix = "add --peft lora --quantization 4bit, or remove quantization_config from config.json to predict 16 bits"
        raise UserError(f"{shape.name} has 4-bit weights, which stay frozen", fix)
    if options.quantization != "none" and options.peft != "lora":
        raise UserError("--quantization 4bit is for frozen weights, and all are trained", "add --peft lora")
    if options.with_reference and options.peft == "lora":
        raise UserError("--with_reference: with LoRA the model without adapters is the reference", "leave it out")
    if options.peft == "lora":
        rank = RunConfig.lora_rank if options.lora_rank is None else options.lora_rank
        return with_adapters(shape, rank, _resolve_targets(shape, options.lora_targets))
    for flag in ("lora_rank", "lora_targets", "lora_dropout"):
        if (value := getattr(options, flag)) is not None:
            text = ",".join(value) if isinstance(value, tuple) else value
            raise UserError(f"--{flag} {text} has no effect without adapters", "add --peft lora")
    return shape


def parse_targets(text: str) -> tuple[str, ...]:
    """Return the names of --lora_targets; raise ArgumentTypeError without any."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as q_proj,v_proj")
    return names


def _resolve_targets(shape: ModelShape, targets: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the modules with adapters: by default peft's own of this model type; none for all linear layers."""
    if targets is None and shape.model_type not in DEFAULT_TARGETS:
        fix = f"add --lora_targets {ALL_LINEAR}, or the names of modules"
        raise UserError(f"peft has no default targets for adapters of a {shape.model_type}", fix)
    names = DEFAULT_TARGETS[shape.model_type] if targets is None else targets
    return () if ALL_LINEAR in names else names


# Keys of transformers for each size, the most common one first.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size",),
}
_MAX_SIZE = 2**31 - 1
# Quantizations of published weights: transformers makes the first two 16-bit for training (dequantize=True), and 4-bit
# ones of bitsandbytes stay as the frozen base of adapters.
_TRAINED_FROM = ("mxfp4", "fp8", "4bit")
# Sizes on a command line, and their keys.
_WORDS = {word: keys[0] for word, keys in _KEYS.items()} | {
    "inner": "intermediate_size",
    "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "positions": "n_positions",
    "tied": "tie_word_embeddings",
    "type": "model_type",
}


_SYNONYMS = {"vocab": "vocabulary", "intermediate": "inner", "kv_heads": "key_value_heads"}
_SYNONYMS |= {key: word for word, keys in _KEYS.items() for key in keys}
_SYNONYMS |= {key: word for word, key in _WORDS.items() if word not in _KEYS}


def model_shape(name: str, *, ask_hub: bool = False) -> ModelShape:
    """Return the shape of a preset, a folder or file with config.json, a list of sizes, or with `ask_hub` a hub id."""
    # A tuned model has its base's shape; the trainer would load other weights. A folder of that name comes first.
    is_folder = resolve_path(name).exists()
    if (preset := find_preset(name) or (None if is_folder else find_base(name))) is not None:
        return shape_of_architecture(preset.name, preset.model_type, preset.architecture)
    if "=" in name:
        return _shape_of_words(name)
    path = resolve_path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return shape_of_document(_read(file), name)
    if ask_hub and name.count("/") == 1:
        with require_extra("train"):
            from huggingface_hub import hf_hub_download

        def download(repo_id: str, *, trust_remote_code: bool, **options: Any) -> dict[str, Any]:
            return _read(Path(hf_hub_download(repo_id, "config.json", **options)))

        return shape_of_document(load_from(name, download, "config"), name)
    if path.is_dir():
        raise UserError(f"there is no config.json in {name}", "name the folder with the model's config.json")
    if path.is_absolute() or name.startswith("."):
        raise UserError(f"there is no folder {name}", "name one with config.json, or a preset such as gpt2")
    # An architecture that is not modelled, or a mixture of experts (8x7b, 30b-a3b).
    plain, is_id = name.rpartition("/")[2].lower(), name.count("/") == 1
    has_experts = re.search(r"moe|\d+x\d+b|-a\d+(\.\d+)?b", plain)
    if has_experts or re.sub("[^a-z0-9]", "", plain).startswith(OTHER_FAMILIES):
        fix = f"give the folder of its config.json{', or add --hub' if is_id else ''}"
        raise UserError(f"{name!r} is of a family without presets", fix)
    hint = "add --hub to ask the hub for it, or " if is_id else "OWNER/NAME with --hub asks the hub; or "
    longer = [preset for preset in PRESETS if preset.startswith(f"{name.lower()}-")]
    suggestion = did_you_mean(name, PRESETS, cutoff=0.85) or did_you_mean(name.lower(), longer, cutoff=0.1)
    raise UserError(
        f"unknown model {clip(name)}",
        f"{suggestion}{hint}give a preset (`study predict --help` lists them), a folder with config.json, or sizes:"
        " layers=32,hidden=4096,heads=32,key_value_heads=8,vocabulary=128256,inner=14336 (without inner: a GPT-2)",
    )


# Default sequence length in tokens.
USUAL_LENGTH = 2048


def resolve_length(shape: ModelShape, requested: int | None, default: int = USUAL_LENGTH) -> int:
    """Return the sequence length: by default the model's maximum, up to `default`; UserError if it is too long."""
    if shape.positions is None:
        return requested or default
    if requested is not None and requested > shape.positions:
        raise UserError(
            f"{shape.name[:80]} has {shape.positions} positions, too few for sequences of {requested} tokens",
            f"use {shape.positions} or less",
        )
    return requested or min(default, shape.positions)


def shape_of_architecture(name: str, model_type: str, architecture: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a transformers config; UserError names missing or invalid keys."""
    if (family := FAMILIES.get(model_type)) is None:
        raise UserError(
            f"{name}: the family {model_type!r} is not modelled",
            f"use one of {', '.join(FAMILIES)}; or give the sizes of a dense model of such a family, as"
            " layers=32,hidden=4096,heads=32,key_value_heads=8,vocabulary=128256,inner=14336,head_dim=128",
        )
    get = {**dict(family.defaults), **{key: value for key, value in architecture.items() if value is not None}}
    needed = {field: next((get[key] for key in keys if key in get), None) for field, keys in _KEYS.items()}
    inner = get.get("n_inner") or get.get("intermediate_size")
    if not inner and family.inner_is_free:
        inner = 4 * (needed["hidden"] or 0)
    missing = [f"{field} ({' or '.join(_KEYS[field])})" for field, value in needed.items() if value is None]
    missing += ["inner (intermediate_size)"] if inner is None else []
    if missing:
        raise UserError(f"{name} does not set its {', '.join(missing)}", "add the missing keys")

    def check_size(key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise UserError(f"{name}: {key} is {value!r:.40}", f"use a whole number from 1 to {_MAX_SIZE:,}")
        return value

    layers, hidden, heads, vocabulary = (check_size(key, needed[key]) for key in _KEYS)
    inner = check_size("inner", inner)
    check_depth(layers, name)
    key_value_heads = check_size("num_key_value_heads", get.get("num_key_value_heads") or heads)
    if heads % key_value_heads:
        raise UserError(f"{name}: {key_value_heads} key heads do not divide {heads} heads", "use key heads that do")
    head_dim = check_size("head_dim", get.get("head_dim", hidden // heads))
    if hidden % heads and "head_dim" not in get:
        raise UserError(f"{name}: {heads} heads do not divide a width of {hidden}", "use heads that do")
    tied = get.get("tie_word_embeddings", family.tied)
    if tied not in (True, False):
        raise UserError(f"{name}: tie_word_embeddings is {clip(tied)}", "use true or false")
    if (positions := _positions(get)) is not None:
        check_size("max_position_embeddings", positions)
    is_classifier = model_type == "bert"
    sizes = {
        "h": hidden,
        "3h": 3 * hidden,
        "inner": inner,
        "vocabulary": vocabulary,
        "query": heads * head_dim,
        "key_value": key_value_heads * head_dim,
        "head_dim": head_dim,
        "positions": positions or 0,
        "two": 2,
        "types": get.get("type_vocab_size", 0),
        # Whether there are biases.
        "+": True,
        "+attention": bool(get.get("attention_bias", family.attention_bias)),
        "+mlp": bool(get.get("mlp_bias", False)),
    }
    is_tied = bool(tied) and not is_classifier
    return ModelShape(
        name=name,
        model_type=model_type,
        family="sequence-classification" if is_classifier else "causal-lm",
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        gated=family.gated,
        tied=is_tied,
        positions=positions,
        params=_parameters(model_type, layers, bool(tied), tuple(sizes.items())),
        document=json.dumps({**architecture, "model_type": model_type, "n_inner": inner}),
        # Positions and types, of 8 bytes each.
        buffer_bytes=2 * 8 * (positions or 0) if is_classifier else 0,
    )


@functools.lru_cache(maxsize=256)
def _parameters(
    model_type: str, layers: int, tied: bool, sizes_by_name: tuple[tuple[str, int], ...]
) -> tuple[Parameter, ...]:
    """Return the parameters by the family's table; cached, since many records are of one model."""
    family, sizes = FAMILIES[model_type], dict(sizes_by_name)

    def tensors(text: str) -> Iterator[tuple[str, int, int]]:
        """Yield name, elements and rows of the parameters in a text of the table."""
        for row in text.split(", "):
            module, *words = row.split()
            has_bias = words[-1].startswith("+") and sizes[words.pop()]
            dimensions = [sizes[word] for word in words]
            if not (tied and module == "lm_head"):
                yield f"{module}.weight", math.prod(dimensions), dimensions[0]
            if has_bias:
                out = dimensions[-1 if family.transposed else 0]
                yield f"{module}.bias", out, out

    before, inside, after = (list(tensors(text)) for text in family.parameters)
    placed = [(BEFORE, before), *((layer, inside) for layer in range(layers)), (layers, after)]
    entries = ((place, *tensor) for place, placed_tensors in placed for tensor in placed_tensors)
    # A tied embedding is in FSDP2's root, which stays gathered; BERT has no head to be tied.
    is_group = not tied or model_type == "bert"
    return tuple(
        Parameter(index, name, elements, rows, place, regathered=0 <= place < layers or (index == 0 and is_group))
        for index, (place, name, elements, rows) in enumerate(entries)
    )


def _positions(get: Mapping[str, Any]) -> Any:
    """Return the maximum positions, including the scaling of rotary embeddings (linear, dynamic, YaRN)."""
    positions = get.get("n_positions") or get.get("max_position_embeddings")
    stretched = get.get("rope_parameters") or get.get("rope_scaling") or {}
    if not isinstance(stretched, Mapping) or type(positions) is not int:
        return positions
    factor, kind = stretched.get("factor"), stretched.get("rope_type") or stretched.get("type")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float) or not 1 <= factor <= 1e4:
        return positions
    first = stretched.get("original_max_position_embeddings")
    return max(positions, int((first if type(first) is int else positions) * factor))


def _read(file: Path) -> dict[str, Any]:
    """Read a config.json; UserError if it is not a JSON object."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable as JSON ({first_line(error)})", "give a config.json") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} is not a transformers config", "give a config.json")
    return document


def shape_of_document(document: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a parsed config.json; UserError if its family or quantization is not supported."""
    if not isinstance(document.get("model_type"), str):
        raise UserError(f"{name} does not set its model_type", "add the one of its class in transformers")
    method = ""
    if quantization := document.get("quantization_config"):
        settings = quantization if isinstance(quantization, Mapping) else {}
        method = "4bit" if settings.get("load_in_4bit") else str(settings.get("quant_method"))
        if method not in _TRAINED_FROM:
            fix = "remove quantization_config from config.json to predict it in 16 bits"
            raise UserError(f"{name} is quantized, and {clip(method)} weights are not modelled", fix)
    document = {key: value for key, value in document.items() if key != "quantization_config"}
    name = name.rstrip("/").rsplit("/", 1)[-1]
    if document["model_type"] not in FAMILIES:
        from study.predictor.live import live_shape

        return dataclasses.replace(live_shape(name, document), quantized_by=method)
    shape = shape_of_architecture(name, document["model_type"], document)
    return dataclasses.replace(shape, quantized_by=method)


def _shape_of_words(text: str) -> ModelShape:
    """Parse layers=32,hidden=4096,heads=32,vocabulary=32000: a GPT-2, or a Llama if it has one of Llama's sizes."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    # A synonym of a size is that size.
    words = {_SYNONYMS.get(word, word): value for word, value in pairs}
    if len(words) < len(pairs):
        raise UserError(f"{text[:80]} sets a size twice", "set each once")
    if unknown := [word for word in words if word not in _WORDS]:
        fix = f"{did_you_mean(unknown[0], _WORDS)}known: {', '.join(_WORDS)}"
        raise UserError(f"{unknown[0][:40]!r} is not a size of a model", fix)
    if missing := [word for word in _KEYS if word not in words]:
        raise UserError(f"{text[:80]} does not set its {', '.join(missing)}", "add the missing sizes")
    model_type = words.pop("type", "llama" if {"inner", "key_value_heads", "head_dim"} & words.keys() else "gpt2")
    if "head_dim" in words and model_type in FAMILIES and not FAMILIES[model_type].gated:
        raise UserError(f"{text[:80]}: a {model_type[:20]} divides its width among its heads", "leave head_dim out")
    architecture: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    for word, value in words.items():
        try:
            architecture[_WORDS[word]] = json.loads(value)
        except ValueError:
            architecture[_WORDS[word]] = value
    # transformers rejects a number here.
    if (tied := architecture.get(_WORDS["tied"])) in (0, 1):
        architecture[_WORDS["tied"]] = bool(tied)
    if isinstance(hidden := architecture[_WORDS["hidden"]], int):
        architecture.setdefault("intermediate_size", 4 * hidden)
    return shape_of_architecture(text, model_type, architecture)
