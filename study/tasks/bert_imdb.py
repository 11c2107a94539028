"""BERT sequence classification on IMDB: a review in, its sentiment out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from study.spec.config import RunConfig
from study.tasks import builtin, sources
from study.tasks.blocks import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# [CLS] before a sample and [SEP] after it.
FRAMED = True


def load_splits(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, cache_dir: Path
) -> tuple[Split, Split, dict[str, Any]]:
    def tokenized(reviews: sources.Reviews) -> Split:
        encoded = tokenizer(
            reviews.texts,
            padding="max_length",
            truncation=True,
            max_length=config.seq_length,
            return_token_type_ids=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return Split({**encoded, "labels": torch.tensor(reviews.labels)})

    raw = sources.load_reviews(config, cache_dir)
    return tokenized(raw.train), tokenized(raw.eval), raw.provenance


def floor(evaluation: Split) -> builtin.Floor:
    return builtin.review_floor(evaluation.tensors["input_ids"].numpy(), evaluation.tensors["labels"].numpy())
