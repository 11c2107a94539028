"""The model that a user names: a preset, a folder with config.json, a list of sizes, or a hub id."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.config.errors import UserError, clip, did_you_mean, first_line, require_extra
from study.host.folders import resolve_path
from study.predictor.families import FAMILIES, OTHER_FAMILIES
from study.predictor.live import live_shape
from study.predictor.shape import ModelShape
from study.predictor.table_shape import SIZE_KEYS, shape_of_architecture
from study.workloads.presets import PRESETS, find_base, find_preset, load_from

# A config.json is a few levels deep.
_MAX_NESTING = 50
# Quantizations of published weights: transformers makes the first two 16-bit for training (dequantize=True), and 4-bit
# ones of bitsandbytes stay as the frozen base of adapters.
_TRAINED_FROM = ("mxfp4", "fp8", "4bit")
# Sizes on a command line, and their keys.
_WORDS = {word: keys[0] for word, keys in SIZE_KEYS.items()} | {
    "inner": "intermediate_size",
    "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "positions": "n_positions",
    "tied": "tie_word_embeddings",
    "type": "model_type",
}


_SYNONYMS = {"vocab": "vocabulary", "intermediate": "inner", "kv_heads": "key_value_heads"}
_SYNONYMS |= {key: word for word, keys in SIZE_KEYS.items() for key in keys}
_SYNONYMS |= {key: word for word, key in _WORDS.items() if word not in SIZE_KEYS}


def model_shape(name: str, *, ask_hub: bool = False) -> ModelShape:
    """Return the shape of a preset, a folder or file with config.json, a list of sizes, or with `ask_hub` a hub id."""
    if not name.strip():
        # Usually an unset variable of a shell; as a path it would be the working directory.
        raise UserError("the model's name is empty", "name one, such as llama-3.1-8b")
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
    start = re.sub("[^a-z0-9]", "", name.lower())
    longer = [preset for preset in PRESETS if start and re.sub("[^a-z0-9]", "", preset).startswith(start)]
    suggestion = did_you_mean(name, PRESETS, cutoff=0.85) or did_you_mean(name.lower(), longer, cutoff=0.1)
    raise UserError(
        f"unknown model {clip(name)}",
        f"{suggestion}{hint}give a preset (`study predict --help` lists them), a folder with config.json, or sizes:"
        " layers=32,hidden=4096,heads=32,key_value_heads=8,vocabulary=128256,inner=14336 (without inner: a GPT-2)",
    )


def _nesting(text: str) -> int:
    """Return how deep a JSON text is nested. In a browser a parser that recurses ends Python before its own limit."""
    brackets = re.sub(r'"(?:[^"\\]|\\.)*"|[^][{}"]+', "", text)
    return max(itertools.accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


def _read(file: Path) -> dict[str, Any]:
    """Read a config.json; UserError if it is not a JSON object."""
    try:
        text = file.read_text(encoding="utf-8")
        if _nesting(text) > _MAX_NESTING:
            raise UserError(f"{file} is nested more than {_MAX_NESTING} levels deep", "give a config.json")
        document = json.loads(text)
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
    if missing := [word for word in SIZE_KEYS if word not in words]:
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
