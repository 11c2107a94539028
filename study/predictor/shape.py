"""A model as far as memory, traffic and time depend on it: every tensor by its name, in the order the engines see.

Free of torch and transformers: that this is what transformers makes is tested, for every family.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from study.config.errors import UserError, brief, first_line
from study.config.flags import RunConfig
from study.host.folders import folder_named
from study.predictor.request import ModelShape, Tensor
from study.workloads.presets import PRESETS, Preset, find_preset, refuse_depth

# LoRA's adapters as further tensors of a shape, and all else of it frozen: as study/workloads/architecture.py makes
# them.
# peft's "all-linear" puts two matrices beside every linear layer, A (rank x in) and B (out x rank), in the weights'
# type. The output layer of a language model has none, and a classifier's new one is trained whole.

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
    return dataclasses.replace(shape, tensors=tuple(_adapter_tensors(shape, rank)), lora_rank=rank)


def _adapter_tensors(shape: ModelShape, rank: int) -> Iterator[Tensor]:
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


# What transformers takes where config.json leaves a key out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 512, "type_vocab_size": 2},
    "gpt2": {"n_positions": 1024},
    "gpt_neo": {"max_position_embeddings": 2048},
    "gptj": {"tie_word_embeddings": False},
    "gpt_neox": {"tie_word_embeddings": False},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}
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
_Sizes = Mapping[str, Any]
# Name, shape.
_Named = list[tuple[str, tuple[int, ...]]]


def model_shape(name: str, *, ask_hub: bool = False) -> ModelShape:
    """Of a preset, of a folder or file that holds config.json, of words; of a hub id only where that is allowed."""
    preset = find_preset(name)
    if preset is not None:
        return shape_of_preset(preset)
    if "=" in name:
        return _shape_of_words(name)
    path = folder_named(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _shape_of_document(_read(file), name)
    if ask_hub and name.count("/") == 1:
        from study.workloads.hub import load_from

        return _shape_of_document(load_from(name, _hub_config, "config"), name)
    if path.is_dir():
        raise UserError(f"there is no config.json in {name}", "name the folder that holds the model's")
    if path.is_absolute() or name.startswith("."):
        raise UserError(f"there is no folder {name}", "name one with config.json, or a preset such as gpt2")
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
    hint = "add --hub to ask the hub for it, or " if name.count("/") == 1 else ""
    raise UserError(
        f"unknown model {name!r}",
        (f"did you mean {' or '.join(near)}? " if near else "")
        + f"{hint}give a preset ({', '.join(PRESETS)}), a folder with config.json, or its sizes as"
        " layers=32,hidden=4096,heads=32,vocabulary=32000,inner=11008 (without inner: a GPT-2)",
    )


def sequence_length(shape: ModelShape, asked: int | None, default: int) -> int:
    """Where nobody asks, as many tokens as the model takes, up to the default."""
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
    """From the keys that transformers gives the architecture; UserError names those that are missing."""
    if model_type not in _FAMILIES:
        near = difflib.get_close_matches(model_type, _FAMILIES, n=3, cutoff=0.4)
        said = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"{name}: no arithmetic for model_type {model_type!r}",
            f"{said}known: {', '.join(_FAMILIES)}; or give the sizes of one that is built like it, as"
            " layers=32,hidden=4096,heads=32,vocabulary=32000,inner=11008,key_value_heads=8,head_dim=128",
        )
    get = {**_DEFAULTS.get(model_type, {}), **{key: value for key, value in architecture.items() if value is not None}}
    needed = {field: next((get[key] for key in keys if key in get), None) for field, keys in _KEYS.items()}
    inner_is_free = model_type in ("gpt2", "gptj", "gpt_neo", "mpt")
    inner = (
        get.get("n_inner") or get.get("intermediate_size") or (4 * (needed["hidden"] or 0) if inner_is_free else None)
    )
    missing = [f"{field} ({' or '.join(_KEYS[field])})" for field, value in needed.items() if value is None]
    missing += ["inner (intermediate_size)"] if inner is None else []
    if missing:
        raise UserError(f"{name} does not say its {', '.join(missing)}", "add what is missing")
    sizes = {key: _whole(name, key, value) for key, value in {**needed, "inner": inner}.items()}
    refuse_depth(sizes["layers"], name)
    for key in ("hidden_act", "activation_function", "hidden_activation"):
        if get.get(key, "gelu") not in _ACTIVATIONS:
            raise UserError(f"{name}: {key} is {brief(get[key])}", f"use one of {', '.join(_ACTIVATIONS)}")
    hidden, heads = sizes["hidden"], sizes["heads"]
    key_value_heads = _whole(name, "num_key_value_heads", get.get("num_key_value_heads") or heads)
    if heads % key_value_heads:
        raise UserError(f"{name}: {key_value_heads} key heads do not divide {heads} heads", "use key heads that do")
    head_dim = _whole(name, "head_dim", get.get("head_dim", hidden // heads))
    if hidden % heads and "head_dim" not in get:
        raise UserError(f"{name}: {heads} heads do not divide a width of {hidden}", "use heads that do")
    tied = get.get("tie_word_embeddings", model_type not in ("llama", "mistral", "qwen2", "qwen3"))
    if type(tied) is not bool:
        raise UserError(f"{name}: tie_word_embeddings is {brief(tied)}", "use true or false")
    facts: dict[str, Any] = {**sizes, "query": heads * head_dim, "key_value": key_value_heads * head_dim, "tied": tied}
    facts["head_dim"] = head_dim
    facts |= {"positions": _positions(get), "said": get}
    before, layer, after = _FAMILIES[model_type](facts)
    count = sizes["layers"]
    return ModelShape(
        name=name, model_type=model_type,
        family="sequence-classification" if model_type == "bert" else "causal-lm",
        layers=count, hidden=hidden, inner=sizes["inner"], heads=heads, key_value_heads=key_value_heads,
        head_dim=head_dim, vocabulary=sizes["vocabulary"], gated=model_type in _GATED,
        tied=tied and model_type != "bert",
        tensors=(*_tensors(before, 1, False), *_tensors(layer, count, True), *_tensors(after, 1, False)),
        positions=None if facts["positions"] is None else _whole(name, "max_position_embeddings", facts["positions"]),
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


def _tensors(named: _Named, count: int, in_layer: bool) -> list[Tensor]:
    found = []
    for name, shape in named:
        elements = shape[0] * (shape[1] if len(shape) > 1 else 1)
        found.append(Tensor(name, elements, count, in_layer, rows=shape[0]))
    return found


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> _Named:
    return [(f"{name}.weight", (rows, columns)), *([(f"{name}.bias", (rows,))] if bias else [])]


def _norm(name: str, width: int, bias: bool = True) -> _Named:
    return [(f"{name}.weight", (width,)), *([(f"{name}.bias", (width,))] if bias else [])]


def _bert(sizes: _Sizes) -> tuple[_Named, _Named, _Named]:
    h, inner = sizes["hidden"], sizes["inner"]
    before: _Named = [
        ("word_embeddings.weight", (sizes["vocabulary"], h)), ("position_embeddings.weight", (sizes["positions"], h)),
        ("token_type_embeddings.weight", (sizes["said"]["type_vocab_size"], h)), *_norm("embeddings.LayerNorm", h),
    ]  # fmt: skip
    layer = [
        *_linear("query", h, h), *_linear("key", h, h), *_linear("value", h, h), *_linear("attention.output", h, h),
        *_norm("attention.LayerNorm", h), *_linear("intermediate", inner, h), *_linear("output", h, inner),
        *_norm("output.LayerNorm", h),
    ]  # fmt: skip
    # The head of this study's task has two classes.
    return before, layer, [*_linear("pooler", h, h), *_linear("classifier", 2, h)]


def _gpt2(sizes: _Sizes) -> tuple[_Named, _Named, _Named]:
    h, inner = sizes["hidden"], sizes["inner"]
    before: _Named = [("wte.weight", (sizes["vocabulary"], h)), ("wpe.weight", (sizes["positions"], h))]
    # Conv1D holds its matrix the other way round.
    layer: _Named = [
        *_norm("ln_1", h), ("c_attn.weight", (h, 3 * h)), ("c_attn.bias", (3 * h,)), ("attn.c_proj.weight", (h, h)),
        ("attn.c_proj.bias", (h,)), *_norm("ln_2", h), ("c_fc.weight", (h, inner)), ("c_fc.bias", (inner,)),
        ("mlp.c_proj.weight", (inner, h)), ("mlp.c_proj.bias", (h,)),
    ]  # fmt: skip
    return before, layer, [*_norm("ln_f", h), *_head(sizes)]


def _gpt_neo(sizes: _Sizes) -> tuple[_Named, _Named, _Named]:
    h, inner = sizes["hidden"], sizes["inner"]
    before: _Named = [("wte.weight", (sizes["vocabulary"], h)), ("wpe.weight", (sizes["positions"], h))]
    layer = [
        *_norm("ln_1", h), *_linear("k_proj", h, h, False), *_linear("v_proj", h, h, False),
        *_linear("q_proj", h, h, False), *_linear("out_proj", h, h), *_norm("ln_2", h), *_linear("c_fc", inner, h),
        *_linear("c_proj", h, inner),
    ]  # fmt: skip
    return before, layer, [*_norm("ln_f", h), *_head(sizes)]


def _gptj(sizes: _Sizes) -> tuple[_Named, _Named, _Named]:
    h, inner = sizes["hidden"], sizes["inner"]
    layer = [
        *_norm("ln_1", h), *_linear("k_proj", h, h, False), *_linear("v_proj", h, h, False),
        *_linear("q_proj", h, h, False), *_linear("out_proj", h, h, False), *_linear("fc_in", inner, h),
        *_linear("fc_out", h, inner),
    ]  # fmt: skip
    return [("wte.weight", (sizes["vocabulary"], h))], layer, [*_norm("ln_f", h), *_head(sizes, True)]


def _gpt_neox(sizes: _Sizes) -> tuple[_Named, _Named, _Named]:
    h, inner, bias = sizes["hidden"], sizes["inner"], sizes["said"].get("attention_bias", True)
    layer = [
        *_norm("input_layernorm", h), *_norm("post_attention_layernorm", h),
        *_linear("query_key_value", 3 * h, h, bias), *_linear("attention.dense", h, h, bias),
        *_linear("dense_h_to_4h", inner, h), *_linear("dense_4h_to_h", h, inner),
    ]  # fmt: skip
    before: _Named = [("embed_in.weight", (sizes["vocabulary"], h))]
    return before, layer, [*_norm("final_layer_norm", h), *_head(sizes)]


def _mpt(sizes: _Sizes) -> tuple[_Named, _Named, _Named]:
    """Without a bias anywhere, and with ALiBi for positions."""
    h, inner = sizes["hidden"], sizes["inner"]
    layer = [
        *_norm("norm_1", h, False), *_linear("Wqkv", 3 * h, h, False), *_linear("out_proj", h, h, False),
        *_norm("norm_2", h, False), *_linear("up_proj", inner, h, False), *_linear("down_proj", h, inner, False),
    ]  # fmt: skip
    return [("wte.weight", (sizes["vocabulary"], h))], layer, [*_norm("norm_f", h, False), *_head(sizes)]


def _llama(
    norms: int = 2, query_bias: bool = False, head_norms: bool = False
) -> Callable[[_Sizes], tuple[_Named, _Named, _Named]]:
    def tensors(sizes: _Sizes) -> tuple[_Named, _Named, _Named]:
        h, inner, said = sizes["hidden"], sizes["inner"], sizes["said"]
        bias, mlp_bias = said.get("attention_bias", query_bias), said.get("mlp_bias", False)
        layer = [
            *_linear("q_proj", sizes["query"], h, bias), *_linear("k_proj", sizes["key_value"], h, bias),
            *_linear("v_proj", sizes["key_value"], h, bias),
            *_linear("o_proj", h, sizes["query"], bias and not query_bias),
            *(pair for name in ("q_norm", "k_norm") if head_norms for pair in _norm(name, sizes["head_dim"], False)),
            *_linear("gate_proj", inner, h, mlp_bias), *_linear("up_proj", inner, h, mlp_bias),
            *_linear("down_proj", h, inner, mlp_bias),
            *(pair for number in range(norms) for pair in _norm(f"norm_{number}", h, False)),
        ]  # fmt: skip
        before: _Named = [("embed_tokens.weight", (sizes["vocabulary"], h))]
        return before, layer, [*_norm("norm", h, False), *_head(sizes)]

    return tensors


def _head(sizes: _Sizes, bias: bool = False) -> _Named:
    head = _linear("lm_head", sizes["vocabulary"], sizes["hidden"], bias)
    # A tied one has no matrix of its own.
    return head[1:] if sizes["tied"] else head


_FAMILIES: dict[str, Callable[[_Sizes], tuple[_Named, _Named, _Named]]] = {
    "bert": _bert, "gpt2": _gpt2, "gpt_neo": _gpt_neo, "gptj": _gptj, "gpt_neox": _gpt_neox, "llama": _llama(),
    "mistral": _llama(), "qwen2": _llama(query_bias=True), "qwen3": _llama(head_norms=True), "gemma": _llama(),
    "gemma2": _llama(norms=4), "mpt": _mpt,
}  # fmt: skip
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")


def _whole(name: str, key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
        raise UserError(f"{name}: {key} is {value!r:.40}", f"use a whole number from 1 to {_LARGEST_SIZE:,}")
    return value


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
        raise UserError(f"{name} does not say its model_type", f"add one of {', '.join(_FAMILIES)}")
    if document.get("quantization_config"):
        fix = "take quantization_config out of config.json to have it told in 16 bits"
        raise UserError(f"{name} is quantised, and weights of fewer bits are not predicted", fix)
    return shape_of_architecture(name.rstrip("/").rsplit("/", 1)[-1], document["model_type"], document)


def _shape_of_words(text: str) -> ModelShape:
    """layers=32,hidden=4096,heads=32,vocabulary=32000: a GPT-2, or a Llama where it says what only that has."""
    named = [part.partition("=")[::2] for part in text.split(",")]
    words = dict(named)
    if len(words) < len(named):
        raise UserError(f"{text[:80]} says a size twice", "say each once")
    unknown = [word for word in words if word not in _WORDS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _WORDS, n=1)
        said = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{unknown[0][:40]!r} is no size of a model", f"{said}known: {', '.join(_WORDS)}")
    missing = [word for word in _KEYS if word not in words]
    if missing:
        raise UserError(f"{text[:80]} does not say its {', '.join(missing)}", "add what is missing")
    model_type = words.pop("type", "llama" if {"inner", "key_value_heads", "head_dim"} & words.keys() else "gpt2")
    if "head_dim" in words and model_type not in _GATED:
        raise UserError(f"{text[:80]}: a {model_type[:20]} divides its width among its heads", "leave head_dim out")
    if (tied := words.get("tied", "true")) not in _TIED:
        raise UserError(f"tied={tied[:20]} in the sizes is neither true nor false", "use one of the two")
    numbers: dict[str, Any] = {
        word: int(value) if value.isdecimal() and len(value) < 13 else value for word, value in words.items()
    }
    keys = {word: keys[0] for word, keys in _KEYS.items()}
    keys |= {
        "inner": "intermediate_size", "key_value_heads": "num_key_value_heads", "positions": "n_positions",
        "tied": "tie_word_embeddings", "head_dim": "head_dim",
    }  # fmt: skip
    if "tied" in words:
        numbers["tied"] = _TIED[words["tied"]]
    architecture = {keys[word]: value for word, value in numbers.items()}
    if model_type in ("gpt_neox", *_GATED):
        architecture.setdefault("intermediate_size", 4 * numbers["hidden"] if isinstance(numbers["hidden"], int) else 0)
    return shape_of_architecture(text, model_type, architecture)
