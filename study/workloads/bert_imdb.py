"""BERT sequence classification on IMDB: a review in, its sentiment out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from study.config.flags import RunConfig
from study.workloads import builtin, sources
from study.workloads.blocks import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# [CLS] before a sample and [SEP] after it.
FRAMED = True


read = sources.load_reviews


def tokenized(
    raw: sources.Raw[sources.Reviews], tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> tuple[Split, Split]:
    def split_of(reviews: sources.Reviews) -> Split:
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

    return split_of(raw.train), split_of(raw.eval)


def floor(evaluation: Split) -> builtin.Floor:
    return builtin.review_floor(evaluation.tensors["input_ids"].numpy(), evaluation.tensors["labels"].numpy())
