"""Causal language modelling on Wikitext: text tokenized, joined into one stream, cut into blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.workloads import builtin, sources
from study.workloads.blocks import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# [CLS] and [SEP] are BERT's.
FRAMED = False
ROWS_PER_CHUNK = 256


read = sources.load_rows


def tokenized(
    raw: sources.Raw[Iterable[str]], tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> tuple[Split, Split]:
    train = pack(tokenizer, raw.train, config.seq_length, config.train_samples, "--train_samples")
    return train, pack(tokenizer, raw.eval, config.seq_length, config.eval_samples, "--eval_samples")


def floor(evaluation: Split) -> builtin.Floor:
    return builtin.language_floor(evaluation.tensors["input_ids"].numpy())


def pack(tokenizer: PreTrainedTokenizerBase, rows: Iterable[str], length: int, samples: int, flag: str) -> Split:
    """The first `samples` blocks of `length` tokens (0: all), reading no more rows than they take.

    As transformers' run_clm groups texts, but what does not fill a block is dropped once, at the end of the data.
    The labels are the inputs: a causal model shifts them itself.
    """
    remaining, chunks, tokens = iter(rows), [np.empty(0, np.int64)], 0
    while not samples or tokens < samples * length:
        texts = list(itertools.islice(remaining, ROWS_PER_CHUNK))
        if not texts:
            break
        # verbose would warn of rows longer than the model takes; here they are cut into blocks.
        encoded = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        chunks.append(np.fromiter(itertools.chain.from_iterable(encoded), np.int64))
        tokens += len(chunks[-1])
    blocks = tokens // length
    if blocks < max(samples, 1):
        raise UserError(
            f"{flag} {samples}: the data has {blocks} blocks of --seq_length {length} ({tokens} tokens)",
            f"use {flag} {blocks} or less, or 0 for all" if blocks else "use a smaller --seq_length or more data",
        )
    input_ids = torch.from_numpy(np.concatenate(chunks)[: (samples or blocks) * length].reshape(-1, length).copy())
    return Split({"input_ids": input_ids, "labels": input_ids})
