"""Models by name: presets with their architecture, so that random weights need no network; folders; and hub ids.

Does not import torch or transformers, so that a preset can be looked up before either is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from study.config.errors import UserError, clip, did_you_mean, first_line

# Words and special tokens of the corpora in study/workloads/builtin.py, the vocabulary of the tiny models.
BUILTIN_VOCABULARY_SIZE = 256

# DeepSpeed swaps no tensor under 1 MiB to NVMe. This size makes the position table of a tiny model large enough on up
# to four ranks, without extra FLOPs.
TINY_POSITIONS = 4096

Family = Literal["sequence-classification", "causal-lm"]

FAMILY_OF_TASK: dict[str, Family] = {"bert-imdb": "sequence-classification", "gpt-wikitext": "causal-lm"}

Loaded = TypeVar("Loaded")

# The libraries retry an unreachable hub for at least 15 s per file; one request decides for all files.
PROBE_TIMEOUT_S = 5.0

OTHER_MODEL = "give another --model_name_or_path, or a local folder with the model"
NO_NETWORK = "give --model_name_or_path a local folder, or for a run a preset and --weights random"
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
        """The name without a depth."""
        return re.sub(r"-\d+layers$", "", self.name)

    @property
    def family(self) -> Family:
        """Kind of model: a classifier (BERT) or a causal language model."""
        return "sequence-classification" if self.model_type == "bert" else "causal-lm"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.architecture[self._layers_field])

    @property
    def has_published_weights(self) -> bool:
        """Whether the hub has weights for this depth."""
        return self.hub_id is not None and self.name == self.base

    def with_layers(self, layers: int) -> Preset:
        """Return the architecture with another depth, without published weights."""
        assert layers > 0
        check_depth(layers, self.base)
        changed: dict[str, Any] = {self._layers_field: layers}
        if self.model_type == "gpt_neo":
            changed["attention_types"] = _alternating_attention(layers)
        name, architecture = f"{self.base}-{layers}layers", self.architecture | changed
        return dataclasses.replace(self, name=name, architecture=architecture)

    @property
    def _layers_field(self) -> str:
        return next(field for field in _LAYERS_FIELDS if field in self.architecture)


def check_depth(layers: int, model: str) -> None:
    """Raise UserError if a number of layers is out of range."""
    if not 0 < layers <= MAX_LAYERS:
        raise UserError(f"{layers} layers of {model} are out of range", f"use 1 to {MAX_LAYERS}")


def _alternating_attention(layers: int) -> list[list[Any]]:
    pairs = [[["global", "local"], layers // 2]] if layers > 1 else []
    return [*pairs, [["global"], 1]] if layers % 2 else pairs


_BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 0,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
_TINY = {"vocab_size": BUILTIN_VOCABULARY_SIZE, "bos_token_id": None, "eos_token_id": None}
# Megatron's padded vocabulary and context of GPT-2; no weights are published.
_MEGATRON = {"vocab_size": 51200, "n_positions": 2048, "bos_token_id": None, "eos_token_id": None}
_LLAMA_3 = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e6}


def _bert(name: str, width: int, layers: int, heads: int, revision: str | None = None, **changes: int) -> Preset:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    architecture = _BERT | sizes | {"intermediate_size": 4 * width} | changes
    return Preset(name, "bert", architecture, f"google-bert/{name}" if revision else None, revision)


def _gpt2(
    name: str, width: int, layers: int, heads: int, changes: Mapping[str, Any] = MappingProxyType({}),
    revision: str | None = None,
) -> Preset:  # fmt: skip
    architecture = {**_GPT2, "n_embd": width, "n_layer": layers, "n_head": heads, **changes}
    return Preset(name, "gpt2", architecture, f"openai-community/{name}" if revision else None, revision)


_ALL = (
    _bert("bert-large-uncased", 1024, 24, 16, "6da4b6a26a1877e173fca3225479512db81a5e5b"),
    _bert("bert-base-uncased", 768, 12, 12, "86b5e0934494bd15c9632b12f734a8a67f723594"),
    _bert("bert-tiny", 256, 2, 4, vocab_size=BUILTIN_VOCABULARY_SIZE, max_position_embeddings=TINY_POSITIONS),
    # For the words of `--data reviews`.
    _bert("bert-4k", 64, 2, 4, vocab_size=4096),
    _gpt2("gpt2", 768, 12, 12, revision="607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    _gpt2("gpt2-medium", 1024, 24, 16, revision="6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
    _gpt2("gpt2-large", 1280, 36, 20, revision="32b71b12589c2f8d625668d2335a01cac3249519"),
    _gpt2("gpt2-xl", 1600, 48, 25, revision="15ea56dee5df4983c59b2538573817e1667135e2"),
    _gpt2("gpt-tiny", 256, 2, 4, _TINY | {"n_positions": TINY_POSITIONS}),
    _gpt2("gpt-4k", 64, 2, 4, _TINY | {"vocab_size": 4096}),
    Preset(
        "llama-tiny", "llama",
        _TINY | {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "max_position_embeddings": TINY_POSITIONS, "attention_dropout": 0.0},
    ),
    # Sizes in the ZeRO papers, with their width and depth if these result in the named size. (The 13 B model of the
    # paper's figures has 62 layers and therefore 12.7 B parameters.)
    _gpt2("gpt-7.5b", 4096, 36, 32, _MEGATRON),  # 7.47 B parameters
    _gpt2("gpt-13b", 4096, 63, 32, _MEGATRON),  # 12.90 B
    _gpt2("gpt-20b", 4096, 98, 32, _MEGATRON),  # 19.95 B
    _gpt2("gpt-128b", 8192, 158, 64, _MEGATRON),  # 127.7 B
    _gpt2("gpt-175b", 12288, 96, 96, _MEGATRON),  # 174.6 B, as GPT-3
    _gpt2("gpt-1t", 25600, 128, 160, _MEGATRON),  # 1008 B, as in ZeRO-Infinity
    Preset(
        "gpt-neo-2.7b", "gpt_neo",
        {
            "vocab_size": 50257, "max_position_embeddings": 2048, "hidden_size": 2560, "num_layers": 32,
            "num_heads": 20, "attention_types": _alternating_attention(32), "window_size": 256,
            "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
        },
        "EleutherAI/gpt-neo-2.7B", "e24fa291132763e59f4a5422741b424fb5d59056",
    ),
    Preset(
        "gpt-j-6b", "gptj",
        {
            "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        },
        "EleutherAI/gpt-j-6b", "47e169305d2e8376be1d31e765533382721b2cc1",
    ),
    Preset(
        "gemma-2-9b", "gemma2",
        {
            "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "attention_dropout": 0.0,
        },
        "google/gemma-2-9b", "33c193028431c2fde6c6e51f29e6f17b60cbfac6",
    ),
    # Models that are often fine-tuned.
    Preset("llama-3.1-8b", "llama", _LLAMA_3, "meta-llama/Llama-3.1-8B", "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b"),
    Preset(
        "llama-3.1-70b", "llama",
        _LLAMA_3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                    "num_attention_heads": 64},
        "meta-llama/Llama-3.1-70B", "349b2ddb53ce8f2849a6c168a81980ab25258dac",
    ),
    Preset(
        "mistral-7b-v0.3", "mistral",
        {
            "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
            "rope_parameters": _ROPE, "rms_norm_eps": 1e-5, "sliding_window": None, "attention_dropout": 0.0,
        },
        "mistralai/Mistral-7B-v0.3", "caa1feb0e54d415e2df31207e5f4e273e33509b1",
    ),
    Preset(
        "qwen2.5-7b", "qwen2",
        {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
            "rope_parameters": _ROPE, "tie_word_embeddings": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151643,
        },
        "Qwen/Qwen2.5-7B", "d149729398750b98c0af14eb82c78cfe92750796",
    ),
    Preset(
        "qwen3-8b", "qwen3",
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "rope_parameters": _ROPE, "tie_word_embeddings": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645,
        },
        "Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218",
    ),
)  # fmt: skip
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def find_preset(name: str) -> Preset | None:
    """Return a preset by name, hub id, or `NAME-Nlayers` for another depth; None if there is none."""
    for preset in _ALL:
        if name in (preset.name, preset.hub_id):
            return preset
    other_depth = re.fullmatch(r"(.+)-([1-9]\d{0,99})layers", name)
    if other_depth and other_depth[1] in PRESETS:
        return PRESETS[other_depth[1]].with_layers(int(other_depth[2]))
    return None


def preset_layers(name: str) -> int | None:
    """Return the published number of layers of a preset at any depth; None if it is not a preset."""
    preset = find_preset(name)
    return PRESETS[preset.base].layers if preset else None


def find_model(name: str) -> Preset | Path | str:
    """Resolve a name as a preset, a folder or a hub id, in this order; UserError if it is none."""
    preset = find_preset(name)
    if preset is not None:
        return preset
    # A name that is too long for a path, or begins with ~ and an unknown user, is not a folder.
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path(name).expanduser()
        if folder.is_dir():
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
    from huggingface_hub import HfApi

    # HTTPError is that of the HTTP library of this huggingface_hub.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(repo_id, revision=revision, timeout=PROBE_TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(*_gated(repo_id)) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise UserError(
            f"the hub has no model {repo_id} at revision {revision or 'main'} that this login may read",
            "check owner/name, log in with `hf auth login`, or give a preset or a local folder",
        ) from error
    except (OfflineModeIsEnabled, HTTPError, OSError):
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
    """Return problem and fix of a gated repository."""
    return (
        f"{repo_id} on the hub is gated and this login may not read it",
        "accept its licence on its hub page, then run `hf auth login` or set HF_TOKEN; or give a local folder",
    )
