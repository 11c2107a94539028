"""The tokenizer of a run: the model's own, or the one that --tokenizer_name says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from study.errors import UserError
from study.models.architecture import model_config
from study.models.hub import OTHER_TOKENIZER, load_from
from study.models.presets import Preset, find_model
from study.spec.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, or `--tokenizer_name`; it always has a pad token."""
    from transformers import AutoTokenizer

    source = find_model(config.tokenizer_name or config.model_name_or_path)
    if isinstance(source, Preset) and source.hub_id is None:
        raise UserError(f"{source.name} is a model for the built-in corpora and has no tokenizer", OTHER_TOKENIZER)
    tokenizer = load_from(source, AutoTokenizer.from_pretrained, "tokenizer")
    where = config.tokenizer_name or config.model_name_or_path
    # Without a vocabulary file, transformers makes a tokenizer of special tokens alone and does not warn.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"there is no tokenizer vocabulary in {where}", OTHER_TOKENIZER)
    entries = model_config(config).vocab_size
    if len(tokenizer) > entries:
        raise UserError(
            f"the tokenizer of {where} has {len(tokenizer)} entries and {config.model_name_or_path} takes {entries}",
            "use the model's own tokenizer, or a model with a larger vocabulary",
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {where} has neither a pad token nor an end token", OTHER_TOKENIZER)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
