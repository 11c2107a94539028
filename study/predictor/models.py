"""The model that a user names: a preset, a folder with config.json, a list of sizes, or a hub id."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study.config.errors import UserError, clip, did_you_mean, first_line, require_extra, similar_words
from study.config.other_names import find_family
from study.host.folders import resolve_path
from study.predictor.families import FAMILIES, OTHER_FAMILIES
from study.predictor.live import live_shape, trained_part
from study.predictor.shape import ModelShape
from study.predictor.table_shape import SIZE_KEYS, shape_of_architecture, with_named_class
from study.workloads.presets import (
    NO_NETWORK,
    PRESETS,
    SIZE,
    find_base,
    find_known,
    find_preset,
    hub_id,
    known_models,
    load_from,
    name_words,
    split_4_bits,
    without_tuning,
)

# Of a size as a word of a name.
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
# Presets that only this study has; no published model is meant by their names.
_MADE_UP = re.compile(r"-(tiny|4k)$")
# Words of names: images, and weights in 4 bits, which a preset of text in 16 bits lacks.
_OF_IMAGES = {"vl", "vision", "omni", "audio", "multimodal"}
_OF_4_BITS = {"bnb", "bit", "awq", "gptq", "gguf", "nf", "int", "qlora"}
# Keys of DeepSpeed files that no config.json has.
_OF_AN_ENGINE = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
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


# Raises UserError by the name and the model_type of a model that would be traced.
CheckTraced = Callable[[str, str], None]

# Sizes that name a model, as an example.
SIZES_EXAMPLE = (
    "sizes: layers=32,hidden=4096,heads=32,key_value_heads=8,vocabulary=128256,inner=14336 (without inner: a GPT-2)"
)


class UnknownModel(UserError):
    """A name without a preset, sizes or a config.json, with a fix for where neither files nor the hub are read."""

    def __init__(self, problem: str, fix: str, page_fix: str):
        self.page_fix = page_fix
        super().__init__(problem, fix)


@functools.cache
def _shape_of_preset(name: str) -> ModelShape:
    """Return the shape of a preset, cached: records and published rows are of a few models."""
    preset = find_preset(name)
    assert preset is not None
    return shape_of_architecture(preset.name, preset.model_type, preset.architecture)


def model_shape(name: str, *, ask_hub: bool = False, check_traced: CheckTraced | None = None) -> ModelShape:
    """Return the shape of a preset, a folder or file with config.json, a list of sizes, or with `ask_hub` a hub id.

    `check_traced` raises UserError for a class that would be traced in vain.
    """
    if not name.strip():
        # Usually an unset variable of a shell; as a path it would be the working directory.
        raise UserError("the model's name is empty", "name one, such as llama-3.1-8b")
    if not resolve_path(name).exists():
        name = hub_id(name)
    # A tuned model has its base's shape; the trainer would load other weights. A folder of that name comes first.
    is_folder = resolve_path(name).exists()
    if (listed := _listed_shape(name, is_folder, check_traced)) is not None:
        return listed
    if "=" in name:
        return _shape_of_words(name)
    path = resolve_path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return shape_of_document(_read(file), name, check_traced)
    if ask_hub and name.count("/") == 1:
        with require_extra("train"):
            from huggingface_hub import hf_hub_download

        def download(repo_id: str, *, trust_remote_code: bool, **options: Any) -> dict[str, Any]:
            return _read(Path(hf_hub_download(repo_id, "config.json", **options)))

        try:
            document = load_from(name, download, "config")
        except UserError as refusal:
            # A prediction loads no weights.
            fix = "give a folder with its config.json, or its sizes" if refusal.fix == NO_NETWORK else refusal.fix
            raise UserError(refusal.problem, f"{_suggest(name)}{fix}") from None
        return shape_of_document(document, name, check_traced)
    raise _no_model(name, path)


def _listed_shape(name: str, is_folder: bool, check_traced: CheckTraced | None) -> ModelShape | None:
    """Return the shape of a preset or a known model, also of its weights in 4 bits; None for another name, and for a
    folder of such a name."""
    if (preset := find_preset(name) or (None if is_folder else find_base(name))) is not None:
        return _shape_of_preset(preset.name)
    if is_folder:
        return None
    if (known_model := find_known(name)) is not None:
        return shape_of_document(known_model.config, known_model.name, check_traced)
    base, kind = split_4_bits(name)
    shape = _listed_shape(base, False, check_traced) if kind and not split_4_bits(base)[1] else None
    return None if shape is None else dataclasses.replace(shape, quantized_by=kind)


def _no_model(name: str, path: Path) -> UserError:
    """Return the refusal of a name without a preset, sizes or a config.json, with the likely presets."""
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            return _refuse_adapter(_read(path / "adapter_config.json"), name)
        return UserError(f"there is no config.json in {name}", "name the folder with the model's config.json")
    on_page = f"choose a preset, paste the model's config.json, or give {SIZES_EXAMPLE}"
    if path.is_absolute() or name.startswith("."):
        return UnknownModel(
            f"there is no folder {name}", "name one with config.json, or a preset such as gpt2", on_page
        )
    plain, is_id = name.rpartition("/")[2].lower(), name.count("/") == 1
    suggestion = _suggest(name)
    if not suggestion and _has_no_preset(plain):
        fix = f"give the folder of its config.json, or {'add --hub' if is_id else 'OWNER/NAME with --hub'}"
        return UnknownModel(f"{name!r} is of a family without presets", fix, "paste its config.json")
    hint = "add --hub to ask the hub for it, or " if is_id else "OWNER/NAME with --hub asks the hub; or "
    ways = f"give a preset (`study predict --help` lists them), a folder with config.json, or {SIZES_EXAMPLE}"
    return UnknownModel(f"unknown model {clip(name)}", f"{suggestion}{hint}{ways}", f"{suggestion}{on_page}")


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _parse_size(word: str) -> float:
    return float(word[:-1]) * _UNITS[word[-1]]


def _has_no_preset(plain: str) -> bool:
    """Whether a name is of an architecture without presets, or of a mixture of experts (8x7b, 30b-a3b)."""
    has_experts = re.search(r"moe|\d+x\d+b|-a\d+(\.\d+)?b", plain)
    return bool(has_experts) or _letters(plain).startswith(OTHER_FAMILIES)


def _suggest(name: str) -> str:
    """Return the presets that a name may mean, to put before the other ways to name a model; empty without any."""
    plain = name.rpartition("/")[2].lower()
    similar = did_you_mean(without_tuning(plain), known_models(), cutoff=0.85)
    # bert-large is not a misspelt bart-large.
    if similar and (longer := [preset for preset in PRESETS if preset.startswith(f"{plain}-")]):
        return _alternatives(longer)
    # qwen3-30b without its -a3b.
    if longer := [model for model in known_models() if model.startswith(f"{without_tuning(plain)}-")]:
        return _alternatives(longer)
    return similar or _suggest_base(plain) or (_suggest_known if _has_no_preset(plain) else _suggest_preset)(plain)


def _suggest_known(name: str) -> str:
    """Return the known models of a family without presets, the most similar first; empty if it has none."""
    family = next((family for family in OTHER_FAMILIES if _letters(name).startswith(family)), None)
    siblings = [model for model in known_models() if family is not None and _letters(model).startswith(family)]
    return did_you_mean(without_tuning(name), siblings, cutoff=0.0) if siblings else ""


def _suggest_base(name: str) -> str:
    """Return the preset whose sizes a model of a tuned family has, to put before a fix; empty for another family."""
    tuned, family = find_family(name)
    size = next((word for word in name_words(name.removeprefix(tuned)) if re.fullmatch(SIZE, word)), "")
    base = find_base(f"{family}-{size}") if tuned and size else None
    return "" if base is None else f"the nearest preset is {base.name}, of the family that {tuned} is tuned from; "


def _suggest_preset(name: str) -> str:
    """Return the presets that a name may mean, to put before the other ways to name a model; empty without any.

    In this order: of another spelling; with more words than a preset; of another size; without a size; of
    a size alone; with a preset's words after its own; misspelt; of another version.
    """
    presets = {preset: name_words(preset) for preset in PRESETS if not _MADE_UP.search(preset)}
    untuned = without_tuning(name)
    words = name_words(untuned)
    # A spelling of a preset: llama3-8b.
    if same := [preset for preset in presets if _letters(preset) == _letters(untuned)]:
        return _alternatives(same)
    sizes = [word for word in words if re.fullmatch(SIZE, word)]
    # The number after the first word is a family's: llama-3.1-7b is not a llama-7b.
    start = words[: 2 if re.fullmatch("[0-9.]+", "".join(words[1:2])) else 1]
    inside = [
        preset
        for preset, preset_words in presets.items()
        if preset_words[: len(start)] == start and not Counter(preset_words) - Counter(words)
    ]
    if inside:
        nearest = max(inside, key=lambda preset: len(presets[preset]))
        extra = [part for part in untuned.split("-") if part not in nearest.split("-")]
        return _nearest_text(nearest, extra) if extra else _alternatives([nearest])
    family = [word for word in words if word not in sizes]
    siblings = [
        preset for preset in presets if [word for word in presets[preset] if not re.fullmatch(SIZE, word)] == family
    ]
    if sizes and family and siblings:

        def distance(preset: str) -> float:
            preset_sizes = [word for word in presets[preset] if re.fullmatch(SIZE, word)]
            if not preset_sizes:
                return math.inf
            return abs(math.log(_parse_size(preset_sizes[0]) / _parse_size(sizes[0])))

        return _alternatives(sorted(siblings, key=distance))
    if not sizes and (started := [preset for preset in presets if presets[preset][: len(words)] == words]):
        return _alternatives(started)
    if sizes == words and (equal := [preset for preset in presets if sizes[0] in presets[preset]]):
        return _alternatives(equal)
    after = [preset for preset, preset_words in presets.items() if len(preset_words) > 1 and _ends(words, preset_words)]
    if after:
        nearest = max(after, key=lambda preset: len(presets[preset]))
        return _nearest_text(nearest, [untuned.rpartition(presets[nearest][0])[0].strip("-_")])
    likely = similar_words(untuned, PRESETS, cutoff=0.85)
    if likely and all(_numbers(preset) != _numbers(untuned) for preset in likely):
        return f"the nearest preset is {likely[0]}, another version: its sizes and vocabulary may differ; "
    return did_you_mean(untuned, PRESETS, cutoff=0.85)


def _ends(words: Sequence[str], preset_words: Sequence[str]) -> bool:
    """Whether a name has the words of a preset after others."""
    return [*words[-len(preset_words) :]] == [*preset_words]


def _numbers(name: str) -> list[str]:
    return re.findall(r"[0-9]+", name)


def _alternatives(presets: Sequence[str]) -> str:
    return f"did you mean {' or '.join(presets[:3])}? "


def _nearest_text(preset: str, extra: Sequence[str]) -> str:
    """Return the preset whose words are in a name, and the words of the name that it lacks."""
    words = {word for part in extra for word in re.findall("[a-z]+|[0-9]+", part)}
    lacks = f"without {clip('-'.join(extra))}"
    if _OF_IMAGES & words:
        lacks = "a text model, without the images"
    elif _OF_4_BITS & words and "8" not in words:
        lacks = "in 16 bits; for weights in 4 bits add --peft lora --quantization 4bit"
    return f"the nearest preset is {preset}, {lacks}; "


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


def shape_of_document(document: Mapping[str, Any], name: str, check_traced: CheckTraced | None = None) -> ModelShape:
    """Return the shape of a parsed config.json; UserError if its family or quantization is not supported."""
    if not isinstance(document.get("model_type"), str):
        if "peft_type" in document:
            raise _refuse_adapter(document, name)
        if _OF_AN_ENGINE & document.keys():
            fix = f"explain it: {shlex.join(['study', 'explain', name, 'llama-3.1-8b'])}"
            raise UserError(f"{name} is a file of DeepSpeed, not of a model", fix)
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
        if check_traced is not None:
            check_traced(name, trained_part(document)["model_type"])
        return dataclasses.replace(live_shape(name, document), quantized_by=method)
    shape = with_named_class(shape_of_architecture(name, document["model_type"], document), document)
    return dataclasses.replace(shape, quantized_by=method)


def _refuse_adapter(document: Mapping[str, Any], name: str) -> UserError:
    """Return the refusal of an adapter_config.json, which has no sizes."""
    base = document.get("base_model_name_or_path")
    model = f"its base model, {clip(base)}," if isinstance(base, str) else "its base model"
    return UserError(f"{name} has adapters, and not the sizes of a model", f"name {model} and add --peft lora")


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
