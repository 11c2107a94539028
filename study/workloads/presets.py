"""The models of this study by architecture, so that random weights need no network.

Free of torch and transformers: what a preset is can be asked before either is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError

# The words and special tokens of the corpora in study/workloads/builtin.py, which the tiny models read.
BUILTIN_VOCABULARY_SIZE = 256

# DeepSpeed swaps nothing under 1 MiB to NVMe. This makes the position table of a tiny model large enough, on up to four
# ranks, at no cost in arithmetic.
TINY_POSITIONS = 4096

Family = Literal["sequence-classification", "causal-lm"]

FAMILY_OF_TASK: dict[str, Family] = {"bert-imdb": "sequence-classification", "gpt-wikitext": "causal-lm"}

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

# DeepNet has the most that anybody has published, 1000 (https://arxiv.org/abs/2203.00555), and such a model is made
# without its tensors in four seconds here. One of ten million would be silence for hours.
LARGEST_LAYERS = 1000

# Where an architecture keeps its number of layers.
_LAYERS_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclasses.dataclass(frozen=True)
class Preset:
    """One architecture. `hub_id` publishes its tokenizer, and its weights unless the depth was changed."""

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
        return "sequence-classification" if self.model_type == "bert" else "causal-lm"

    @property
    def layers(self) -> int:
        return int(self.architecture[self._layers_field])

    @property
    def has_published_weights(self) -> bool:
        return self.hub_id is not None and self.name == self.base

    def with_layers(self, layers: int) -> Preset:
        """The same architecture at another depth; no weights are published for it."""
        assert layers > 0
        refuse_depth(layers, self.base)
        changed: dict[str, Any] = {self._layers_field: layers}
        if self.model_type == "gpt_neo":
            changed["attention_types"] = _alternating_attention(layers)
        name, architecture = f"{self.base}-{layers}layers", self.architecture | changed
        return dataclasses.replace(self, name=name, architecture=architecture)

    @property
    def _layers_field(self) -> str:
        return next(field for field in _LAYERS_FIELDS if field in self.architecture)


def refuse_depth(layers: int, model: str) -> None:
    if not 0 < layers <= LARGEST_LAYERS:
        raise UserError(f"{layers} layers of {model} are out of range", f"use 1 to {LARGEST_LAYERS}")


def _alternating_attention(layers: int) -> list[list[Any]]:
    pairs = [[["global", "local"], layers // 2]] if layers > 1 else []
    return [*pairs, [["global"], 1]] if layers % 2 else pairs


_BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 0,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
# GPT-2's architecture with the vocabulary and the context that Megatron pads it to; nobody publishes weights.
_MEGATRON = _GPT2 | {"vocab_size": 51200, "n_positions": 2048, "bos_token_id": None, "eos_token_id": None}
_LLAMA_3 = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip

_ALL = (
    Preset(
        "bert-large-uncased", "bert",
        _BERT | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        "google-bert/bert-large-uncased", "6da4b6a26a1877e173fca3225479512db81a5e5b",
    ),
    Preset(
        "bert-base-uncased", "bert", _BERT,
        "google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594",
    ),
    Preset(
        "bert-tiny", "bert",
        _BERT | {"vocab_size": BUILTIN_VOCABULARY_SIZE, "hidden_size": 256, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "intermediate_size": 1024, "max_position_embeddings": TINY_POSITIONS},
    ),
    Preset("gpt2", "gpt2", _GPT2, "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    Preset(
        "gpt2-medium", "gpt2", _GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16},
        "openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da",
    ),
    Preset(
        "gpt2-large", "gpt2", _GPT2 | {"n_embd": 1280, "n_layer": 36, "n_head": 20},
        "openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519",
    ),
    Preset(
        "gpt2-xl", "gpt2", _GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25},
        "openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2",
    ),
    Preset(
        "gpt-tiny", "gpt2",
        _GPT2 | {"vocab_size": BUILTIN_VOCABULARY_SIZE, "n_embd": 256, "n_layer": 2, "n_head": 4,
                 "n_positions": TINY_POSITIONS, "bos_token_id": None, "eos_token_id": None},
    ),
    Preset(
        "llama-tiny", "llama",
        {"vocab_size": BUILTIN_VOCABULARY_SIZE, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TINY_POSITIONS,
         "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None},
    ),
    # The sizes in the ZeRO papers, with their width and depth where these give the size that is named. (The 13 B of
    # the paper's figures has 62 layers, which makes 12.7 B.)
    Preset("gpt-7.5b", "gpt2", _MEGATRON | {"n_embd": 4096, "n_layer": 36, "n_head": 32}),  # 7.47 B parameters
    Preset("gpt-13b", "gpt2", _MEGATRON | {"n_embd": 4096, "n_layer": 63, "n_head": 32}),  # 12.90 B
    Preset("gpt-20b", "gpt2", _MEGATRON | {"n_embd": 4096, "n_layer": 98, "n_head": 32}),  # 19.95 B
    Preset("gpt-128b", "gpt2", _MEGATRON | {"n_embd": 8192, "n_layer": 158, "n_head": 64}),  # 127.7 B
    Preset("gpt-175b", "gpt2", _MEGATRON | {"n_embd": 12288, "n_layer": 96, "n_head": 96}),  # 174.6 B, as GPT-3
    # 1008 B, as in ZeRO-Infinity.
    Preset("gpt-1t", "gpt2", _MEGATRON | {"n_embd": 25600, "n_layer": 128, "n_head": 160}),
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
    # What is fine-tuned most.
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
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-5,
            "sliding_window": None, "attention_dropout": 0.0,
        },
        "mistralai/Mistral-7B-v0.3", "caa1feb0e54d415e2df31207e5f4e273e33509b1",
    ),
    Preset(
        "qwen2.5-7b", "qwen2",
        {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
            "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        },
        "Qwen/Qwen2.5-7B", "d149729398750b98c0af14eb82c78cfe92750796",
    ),
    Preset(
        "qwen3-8b", "qwen3",
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
            "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        },
        "Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218",
    ),
)  # fmt: skip
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def find_preset(name: str) -> Preset | None:
    """By name, by the hub id it stands for, or `NAME-Nlayers` for NAME at another depth."""
    for preset in _ALL:
        if name in (preset.name, preset.hub_id):
            return preset
    other_depth = re.fullmatch(r"(.+)-([1-9]\d{0,99})layers", name)
    if other_depth and other_depth[1] in PRESETS:
        return PRESETS[other_depth[1]].with_layers(int(other_depth[2]))
    return None


def preset_layers(name: str) -> int | None:
    """How many a preset has as it is published, whatever depth is asked for."""
    preset = find_preset(name)
    return PRESETS[preset.base].layers if preset else None


def find_model(name: str) -> Preset | Path | str:
    """A preset, a folder or a hub id, in this order."""
    preset = find_preset(name)
    if preset is not None:
        return preset
    # A name that is longer than any path, or begins with ~ and no user's name, is no folder.
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
    # The hub's old names without an owner are refused: a misspelt preset looks like one.
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return name
    guess = "".join(f"did you mean {near}? " for near in difflib.get_close_matches(name, PRESETS, n=1))
    raise UserError(
        f"unknown model {name!r}",
        f"{guess}presets: {', '.join(PRESETS)}; or give a hub id as owner/name, or a folder that holds config.json"
        " and safetensors",
    )
