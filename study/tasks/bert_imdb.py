"""BERT sequence classification on IMDB: a review in, its sentiment out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from study.spec.config import RunConfig
from study.tasks import builtin, describe, load_task_tokenizer, sources, uses_builtin_tokenizer
from study.tasks.blocks import Split, TaskData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_data(config: RunConfig, cache_dir: Path) -> TaskData:
    raw = sources.load_reviews(config, cache_dir)
    tokenizer = load_task_tokenizer(config, frame=True)
    train, evaluation = (tokenize(tokenizer, reviews, config.seq_length) for reviews in (raw.train, raw.eval))
    floor = None
    if uses_builtin_tokenizer(config):
        floor = builtin.review_floor(evaluation.tensors["input_ids"].numpy(), evaluation.tensors["labels"].numpy())
    return TaskData(train, evaluation, floor, raw.provenance | describe(train, evaluation, tokenizer))


def tokenize(tokenizer: PreTrainedTokenizerBase, reviews: sources.Reviews, seq_length: int | None) -> Split:
    encoded = tokenizer(
        reviews.texts,
        padding="max_length",
        truncation=True,
        max_length=seq_length,
        return_token_type_ids=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return Split(
        {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "labels": torch.tensor(reviews.labels),
        }
    )
