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

from study.errors import UserError

# The words and special tokens of the corpora in study/tasks/builtin.py, which the tiny models read.
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
    "llama": ("attention_dropout",),
    "mistral": ("attention_dropout",),
    "qwen2": ("attention_dropout",),
    "gemma": ("attention_dropout",),
    "gemma2": ("attention_dropout",),
}

_LAYERS_FIELD = {
    "bert": "num_hidden_layers",
    "gpt2": "n_layer",
    "gpt_neo": "num_layers",
    "gptj": "n_layer",
    "gemma2": "num_hidden_layers",
}


@dataclasses.dataclass(frozen=True)
class Preset:
    """One architecture. `hub_id` publishes its tokenizer, and its weights unless the depth was changed."""

    name: str
    family: Family
    model_type: str
    architecture: dict[str, Any]
    hub_id: str | None = None
    revision: str | None = None
    depth_changed: bool = False

    @property
    def layers(self) -> int:
        layers: int = self.architecture[_LAYERS_FIELD[self.model_type]]
        return layers

    @property
    def has_published_weights(self) -> bool:
        return self.hub_id is not None and not self.depth_changed

    def with_layers(self, layers: int) -> Preset:
        """The same architecture at another depth; no weights are published for it."""
        assert layers > 0
        changed: dict[str, Any] = {_LAYERS_FIELD[self.model_type]: layers}
        if self.model_type == "gpt_neo":
            changed["attention_types"] = _alternating_attention(layers)
        return dataclasses.replace(
            self,
            name=f"{self.name}-{layers}layers",
            architecture=self.architecture | changed,
            depth_changed=True,
        )


def _alternating_attention(layers: int) -> list[list[Any]]:
    pairs = [[["global", "local"], layers // 2]] if layers > 1 else []
    return [*pairs, [["global"], 1]] if layers % 2 else pairs


def _bert(name: str, hub_id: str | None, revision: str | None, **changed: Any) -> Preset:
    base = {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 0,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    }  # fmt: skip
    return Preset(name, "sequence-classification", "bert", base | changed, hub_id, revision)


def _gpt2(name: str, hub_id: str | None, revision: str | None, **changed: Any) -> Preset:
    base = {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "bos_token_id": 50256, "eos_token_id": 50256,
    }  # fmt: skip
    return Preset(name, "causal-lm", "gpt2", base | changed, hub_id, revision)


def _megatron(name: str, **shape: int) -> Preset:
    """GPT-2's architecture with the vocabulary and the context that Megatron pads it to; nobody publishes weights."""
    return _gpt2(name, None, None, vocab_size=51200, n_positions=2048, bos_token_id=None, eos_token_id=None, **shape)


_ALL = (
    _bert(
        "bert-large-uncased", "google-bert/bert-large-uncased", "6da4b6a26a1877e173fca3225479512db81a5e5b",
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    ),
    _bert("bert-base-uncased", "google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594"),
    _bert(
        "bert-tiny", None, None,
        vocab_size=BUILTIN_VOCABULARY_SIZE, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=TINY_POSITIONS,
    ),
    _gpt2("gpt2", "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    _gpt2(
        "gpt2-medium", "openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da",
        n_embd=1024, n_layer=24, n_head=16,
    ),
    _gpt2(
        "gpt2-large", "openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519",
        n_embd=1280, n_layer=36, n_head=20,
    ),
    _gpt2(
        "gpt2-xl", "openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2",
        n_embd=1600, n_layer=48, n_head=25,
    ),
    _gpt2(
        "gpt-tiny", None, None,
        vocab_size=BUILTIN_VOCABULARY_SIZE, n_embd=256, n_layer=2, n_head=4, n_positions=TINY_POSITIONS,
        bos_token_id=None, eos_token_id=None,
    ),
    # The sizes in the ZeRO papers, with their width and depth where these give the size that is named. (The 13 B of
    # the paper's figures has 62 layers, which makes 12.7 B.)
    _megatron("gpt-7.5b", n_embd=4096, n_layer=36, n_head=32),  # 7.47 B parameters
    _megatron("gpt-13b", n_embd=4096, n_layer=63, n_head=32),  # 12.90 B
    _megatron("gpt-20b", n_embd=4096, n_layer=98, n_head=32),  # 19.95 B
    _megatron("gpt-128b", n_embd=8192, n_layer=158, n_head=64),  # 127.7 B
    _megatron("gpt-175b", n_embd=12288, n_layer=96, n_head=96),  # 174.6 B, as GPT-3
    _megatron("gpt-1t", n_embd=25600, n_layer=128, n_head=160),  # 1008 B, as in ZeRO-Infinity
    Preset(
        "gpt-neo-2.7b", "causal-lm", "gpt_neo",
        {
            "vocab_size": 50257, "max_position_embeddings": 2048, "hidden_size": 2560, "num_layers": 32,
            "num_heads": 20, "attention_types": _alternating_attention(32), "window_size": 256,
            "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
        },
        "EleutherAI/gpt-neo-2.7B", "e24fa291132763e59f4a5422741b424fb5d59056",
    ),
    Preset(
        "gpt-j-6b", "causal-lm", "gptj",
        {
            "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        },
        "EleutherAI/gpt-j-6b", "47e169305d2e8376be1d31e765533382721b2cc1",
    ),
    Preset(
        "gemma-2-9b", "causal-lm", "gemma2",
        {
            "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "attention_dropout": 0.0,
        },
        "google/gemma-2-9b", "33c193028431c2fde6c6e51f29e6f17b60cbfac6",
    ),
)  # fmt: skip
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def _find_preset(name: str) -> Preset | None:
    """By name, by the hub id it stands for, or `NAME-Nlayers` for NAME at another depth."""
    for preset in _ALL:
        if name in (preset.name, preset.hub_id):
            return preset
    other_depth = re.fullmatch(r"(.+)-([1-9]\d*)layers", name)
    if other_depth and other_depth[1] in PRESETS:
        return PRESETS[other_depth[1]].with_layers(int(other_depth[2]))
    return None


def without_depth(name: str) -> str | None:
    """The name of the preset without a depth; None if it is no preset."""
    preset = _find_preset(name)
    return re.sub(r"-\d+layers$", "", preset.name) if preset else None


def preset_family(name: str) -> Family | None:
    preset = _find_preset(name)
    return preset.family if preset else None


def preset_layers(name: str) -> int | None:
    base = without_depth(name)
    return PRESETS[base].layers if base else None


def find_model(name: str) -> Preset | Path | str:
    """A preset, a folder or a hub id, in this order."""
    preset = _find_preset(name)
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
    raise UserError(f"unknown model {name!r}", _how_to_name_a_model(name))


def _how_to_name_a_model(name: str) -> str:
    near = difflib.get_close_matches(name, PRESETS, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return (
        f"{guess}presets: {', '.join(PRESETS)}; or give a hub id as owner/name, "
        "or a folder that holds config.json and safetensors"
    )
