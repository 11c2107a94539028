"""Models by name: presets with their architecture, so that random weights need no network; folders; and hub ids.

Does not import torch or transformers, so that a preset can be looked up before either is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from study.config.errors import UserError, clip, did_you_mean, first_line
from study.config.text import full_model
from study.config.yaml_sections import load_package_yaml

Family = Literal["sequence-classification", "causal-lm"]

FAMILY_OF_TASK: dict[str, Family] = {"bert-imdb": "sequence-classification", "gpt-wikitext": "causal-lm"}

Loaded = TypeVar("Loaded")

# The libraries retry an unreachable hub for at least 15 s per file; one request decides for all files.
PROBE_TIMEOUT_S = 5.0

OTHER_MODEL = "give another --model_name_or_path, or a local folder with the model"
NO_NETWORK = "give --model_name_or_path a local folder, or for a run a preset and --weights random"
TEXT_MODEL_SIZES = "to have a verdict, give the sizes of its text model, as layers=32,hidden=4096,.."
OTHER_TOKENIZER = "give --tokenizer_name a hub id or local folder that has one, or use --data builtin"

# Every dropout probability of an architecture. One that is missing here would stay on under --dropout 0.
DROPOUT_FIELDS: dict[str, tuple[str, ...]] = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    "distilbert": ("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"),
    "gpt_neo": ("resid_dropout", "embed_dropout", "attention_dropout", "classifier_dropout"),
    "gptj": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neox": ("attention_dropout", "hidden_dropout", "classifier_dropout"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), ("attention_dropout",)),
}

# The largest published depth is 1000, of DeepNet (https://arxiv.org/abs/2203.00555). A typo of ten million layers would
# build for hours without a message.
MAX_LAYERS = 1000

# Config keys for the number of layers.
_LAYERS_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclasses.dataclass(frozen=True)
class Preset:
    """One architecture. `hub_id` has its tokenizer, and its weights unless the depth was changed."""

    name: str
    model_type: str
    architecture: dict[str, Any]
    hub_id: str | None = None
    revision: str | None = None

    @property
    def base(self) -> str:
        return full_model(self.name)

    @property
    def family(self) -> Family:
        """Kind of model: a classifier (BERT) or a causal language model."""
        return "sequence-classification" if self.model_type == "bert" else "causal-lm"

    @property
    def layers(self) -> int:
        return int(self.architecture[self._layers_field])

    @property
    def has_published_weights(self) -> bool:
        return self.hub_id is not None and self.name == self.base

    def with_layers(self, layers: int) -> Preset:
        """Return the architecture with another depth, without published weights."""
        assert layers > 0
        check_depth(layers, self.base)
        changed: dict[str, Any] = {self._layers_field: layers}
        if self.model_type == "gpt_neo":
            pairs = [[["global", "local"], layers // 2]] if layers > 1 else []
            changed["attention_types"] = [*pairs, [["global"], 1]] if layers % 2 else pairs
        name, architecture = f"{self.base}-{layers}layers", self.architecture | changed
        return dataclasses.replace(self, name=name, architecture=architecture)

    @property
    def _layers_field(self) -> str:
        return next(field for field in _LAYERS_FIELDS if field in self.architecture)


def check_depth(layers: int, model: str) -> None:
    """Raise UserError if a number of layers is out of range."""
    if not 0 < layers <= MAX_LAYERS:
        raise UserError(f"{layers} layers of {model} are out of range", f"use 1 to {MAX_LAYERS}")


_FILE = load_package_yaml(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
PRESETS: dict[str, Preset] = {entry["name"]: Preset(**entry) for entry in _FILE["presets"]}
# Words and special tokens of the corpora in study/workloads/builtin.py.
BUILTIN_VOCABULARY_SIZE: int = PRESETS["gpt-tiny"].architecture["vocab_size"]


def find_preset(name: str) -> Preset | None:
    """Return a preset by name, hub id, or `NAME-Nlayers` for another depth; None if there is none."""
    for preset in PRESETS.values():
        if name in (preset.name, preset.hub_id):
            return preset
    other_depth = re.fullmatch(r"(.+)-([1-9]\d{0,99})layers", name)
    if other_depth and other_depth[1] in PRESETS:
        return PRESETS[other_depth[1]].with_layers(int(other_depth[2]))
    return None


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A published model that `study run` does not train by this name; outside the table of families it is traced on
    transformers' code."""

    name: str
    hub_id: str
    # As its page states them.
    parameters: int
    config: dict[str, Any]


@functools.cache
def known_models() -> dict[str, KnownModel]:
    """Return the models of known_models.yaml by name."""
    text = Path(__file__).with_name("known_models.yaml").read_text(encoding="utf-8")
    models = [KnownModel(**entry) for entry in load_package_yaml(text)["models"]]
    return {model.name: model for model in models}


def find_known(name: str) -> KnownModel | None:
    """Return a known model by its name or hub id, also that of tuned weights; None if there is none."""
    owner, _, plain = name.strip().rpartition("/")
    spelled = re.sub("[ _]+", "-", plain)
    # "base" is a size of some models.
    names, untuned = _known_by_spelling(), without_tuning(spelled)
    model = names.get(spelled.lower()) or names.get(untuned) or names.get(_VERSION.sub("", untuned))
    return model if model is not None and owner in ("", model.hub_id.partition("/")[0], *_COPIES) else None


@functools.cache
def _known_by_spelling() -> dict[str, KnownModel]:
    """Return the known models by name, and by the name of their hub id with and without the words of tuned weights."""
    names, unversioned = dict[str, KnownModel](), dict[str, list[KnownModel]]()
    for model in known_models().values():
        spelled = model.hub_id.rpartition("/")[2].replace("_", "-").lower()
        names[spelled] = model
        unversioned.setdefault(_VERSION.sub("", without_tuning(spelled)), []).append(model)
    # Two versions of one name are two models, also if a preset is the other one.
    alone = {name: models[0] for name, models in unversioned.items() if len(models) == 1 and name not in PRESETS}
    return alone | names | known_models()


# Owners of copies of published weights, under the names of these.
_COPIES = {"unsloth", "NousResearch"}
# Words of tuned and converted weights, whose shape is that of the base model.
_TUNED = re.compile(r"-(instruct|chat|it|pt|hf|base|thinking)(?=-|$)")
# The version of weights at the end of a name: Mixtral-8x7B-v0.1, OLMoE-1B-7B-0924, pythia-1.4b-deduped.
_VERSION = re.compile(r"(-v\d+\.\d+|-\d{4}|-deduped)$")


# The end of a name of weights that bitsandbytes made: gemma-2-9b-bnb-4bit, Qwen2.5-7B-Instruct-unsloth-bnb-4bit.
_IN_4_BITS = re.compile(r"(-unsloth)?(-bnb)?[-_]4bit$", re.IGNORECASE)


def split_4_bits(name: str) -> tuple[str, str]:
    """Return a name without its ending for weights in 4 bits, and the kind of those weights: 4bit, dynamic-4bit of
    Unsloth, which has some matrices in 16 bits, or empty without such an ending."""
    ending = _IN_4_BITS.search(name)
    if ending is None:
        return name, ""
    return name[: ending.start()], "dynamic-4bit" if ending[1] else "4bit"


# Addresses of a model on the hub: in a browser, for fsspec, and as a folder of its cache.
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|hf:)/+([\w.-]+/[\w.-]+)(?:/.*|\?.*)?|models--([\w.]+(?:-[\w.]+)*)--([\w.-]+)"
)


def hub_id(name: str) -> str:
    """Return OWNER/NAME of an address on the hub or a folder of its cache, and any other name as it is."""
    if (address := _HUB_ADDRESS.fullmatch(name)) is None:
        return name
    return address[1] or f"{address[2]}/{address[3]}"


def without_tuning(name: str) -> str:
    """Return a model's name in lower case without the words of tuned weights."""
    return _TUNED.sub("", name.lower()).removeprefix("meta-")


# Types of published weights, by the beginnings of names of presets and of known models. Without those whose versions
# differ (Gemma 2 and TinyLlama, whose tuned weights are in another type) or whose weights are in fewer bits (gpt-oss,
# DeepSeek-V3).
_WEIGHT_TYPES: dict[Literal["bf16", "fp16", "fp32"], tuple[str, ...]] = {
    "fp32": (
        *("bert-", "gpt2", "distilbert-", "distilgpt2", "distilroberta-", "gpt-neo-", "gpt-j-"),
        *("roberta-", "xlm-roberta-", "t5-", "bart-", "vit-"),
    ),
    "fp16": ("llama-2-", "llama-7b", "llama-13b", "llama-65b", "pythia-", "opt-", "phi-1", "phi-2"),
    "bf16": (
        *("llama-3", "mistral-", "mixtral-", "qwen", "smollm2-", "gemma-3-", "codellama-", "yi-"),
        *("phi-3", "phi-4", "olmoe-", "falcon-", "mpt-"),
    ),
}


def published_type(name: str) -> Literal["bf16", "fp16", "fp32"] | None:
    """Return the type of the published weights of a preset or a known model; None if it is not listed."""
    types = (kind for kind, names in _WEIGHT_TYPES.items() if name.startswith(names))
    return next(types, None)


# A size as a word of a name, such as 8b, 0.5b and 135m.
SIZE = r"[0-9]+(?:\.[0-9]+)?[mbt](?![a-z])"


def name_words(name: str) -> list[str]:
    """Return the words and numbers of a model's name, a size as one word: llama2-7b is llama, 2, 7b."""
    return re.findall(rf"{SIZE}|[0-9]+(?:\.[0-9]+)*|[a-z]+", name.lower())


def find_base(name: str) -> Preset | None:
    """Return the preset of a model's shape by the name that people write, with or without its owner; None if there is
    none: `Meta-Llama-3-8B-Instruct` and `Llama 3 8B` are llama-3-8b, and `mistral-7b` the newest version of it.
    """
    owner, _, model = name.rpartition("/")
    owners = {(preset.hub_id or "").partition("/")[0] for preset in PRESETS.values()}
    if owner and owner not in owners | _COPIES:
        return None
    plain = without_tuning(re.sub("[ _]+", "-", model.strip()))
    # Mistral-Nemo-Instruct-2407 has the sizes of Mistral-Nemo-Base-2407.
    by_plain = {without_tuning((preset.hub_id or "").rpartition("/")[2]): preset for preset in PRESETS.values()}
    by_plain |= {_TUNED.sub("", preset.name.lower()): preset for preset in PRESETS.values()}
    if plain in by_plain:
        return by_plain[plain]
    spelled = [base for base in by_plain if name_words(base) == name_words(plain)]
    if len(spelled) == 1:
        return by_plain[spelled[0]]
    versions = [base for base in by_plain if re.fullmatch(rf"{re.escape(plain)}-v\d+(\.\d+)*", base)]
    return by_plain[max(versions)] if versions else None


def preset_layers(name: str) -> int | None:
    """Return the published number of layers of a preset at any depth; None if it is not a preset."""
    preset = find_preset(name)
    return PRESETS[preset.base].layers if preset else None


def find_model(name: str) -> Preset | Path | str:
    """Resolve a name as a preset, a folder or a hub id, in this order; UserError if it is none."""
    if (preset := find_preset(name)) is not None:
        return preset
    # A name that begins with ~ and an unknown user is not a folder.
    with contextlib.suppress(RuntimeError):
        if (folder := Path(name).expanduser()).is_dir():
            return folder
    # The hub's legacy names without an owner are rejected: a misspelt preset looks like one.
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return name
    raise UserError(
        f"unknown model {clip(name)}",
        f"{did_you_mean(name, PRESETS)}`study predict --help` lists the presets; or give a hub id as owner/name, or a"
        " folder with config.json and safetensors",
    )


@functools.cache
def hub_files(repo_id: str, revision: str | None) -> tuple[str, ...] | None:
    """Return the repository's file names; None if the hub cannot be reached or HF_HUB_OFFLINE is set."""
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().model_info(repo_id, revision=revision, timeout=PROBE_TIMEOUT_S)
    except errors.GatedRepoError as error:
        raise UserError(*_gated(repo_id)) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UserError(
            f"the hub has no model {repo_id} at revision {revision or 'main'} that this login may read",
            "check owner/name, log in with `hf auth login`, or give a preset or a local folder",
        ) from error
    except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError):  # type: ignore[attr-defined]
        return None
    return tuple(sibling.rfilename for sibling in info.siblings or ())


def load_from(source: Preset | Path | str, load: Callable[..., Loaded], what: str, **options: Any) -> Loaded:
    """Call `load(...)` on a local folder, or on the hub or, if it cannot be reached, on its cache."""
    fix, no_network = (OTHER_TOKENIZER, OTHER_TOKENIZER) if what == "tokenizer" else (OTHER_MODEL, NO_NETWORK)
    if isinstance(source, Path):
        if what == "config" and not (source / "config.json").is_file():
            raise UserError(f"there is no config.json in {source}", fix)
        try:
            return load(str(source), local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # Each format raises different errors.
            raise UserError(f"cannot load the {what} in {source}: {first_line(error)}", fix) from error
    from huggingface_hub.errors import GatedRepoError

    repo_id, revision = hub_place(source)
    reachable = hub_files(repo_id, revision) is not None
    try:
        return load(
            repo_id, revision=revision or "main", local_files_only=not reachable, trust_remote_code=False, **options
        )
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error.__cause__, GatedRepoError):
            raise UserError(*_gated(repo_id)) from error
        if reachable:
            raise UserError(f"cannot load the {what} of {repo_id}: {first_line(error)}", no_network) from error
        raise UserError(
            f"the hub cannot be reached (or HF_HUB_OFFLINE is set) and the local cache has no {what} of {repo_id}",
            no_network,
        ) from error


def hub_place(source: Preset | str) -> tuple[str, str | None]:
    """Return repository and revision; None for the newest revision."""
    if isinstance(source, str):
        return source, None
    assert source.hub_id is not None
    return source.hub_id, source.revision


def _gated(repo_id: str) -> tuple[str, str]:
    return (
        f"{repo_id} on the hub is gated and this login may not read it",
        "accept its licence on its hub page, then run `hf auth login` or set HF_TOKEN; or give a local folder",
    )
