"""Tasks: a run's data as tokenized samples in memory, and the samples of each optimizer step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from study.config.errors import UserError
from study.config.flags import RunConfig
from study.workloads.architecture import load_tokenizer, model_config
from study.workloads.builtin import SPECIAL_TOKENS, LossFloor, builtin_tokenizer, language_floor, review_floor
from study.workloads.sources import Raw, Reviews, load_reviews, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_CHUNK = 256


class Split(Dataset[dict[str, Tensor]]):
    """Samples of equal length as tensors by name. With equal lengths the mean of micro-batch means is the mean.

    Use it in a DataLoader with a batch_sampler and `collate_fn=lambda batch: batch`: `__getitems__` returns batches.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        counts = {len(tensor) for tensor in tensors.values()}
        assert len(counts) == 1, f"tensors of one split differ in samples: {counts}"
        self.tensors = dict(sorted(tensors.items()))
        self._samples = counts.pop()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices)
        return {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}

    def sha256(self) -> str:
        """Return a hash of the name, type, shape and content of every tensor."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class TaskData:
    """Training and evaluation samples of a run; `source` is their provenance, for the record."""

    train: Split
    eval: Split
    floor: LossFloor | None
    source: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TaskSteps:
    """Functions that turn a task's raw text into samples."""

    read: Callable[[RunConfig, Path], Raw[Any]]
    # Whether [CLS] and [SEP] frame a sample, as BERT's tokenizer does.
    is_framed: bool
    # (texts of a split, tokenizer, config, "train" or "eval") -> samples
    tokenize: Callable[[Any, PreTrainedTokenizerBase, RunConfig, str], Split]
    # The best possible scores on the built-in corpus.
    floor: Callable[[Split], LossFloor]


def tokenize_reviews(reviews: Reviews, tokenizer: PreTrainedTokenizerBase, config: RunConfig, _split: str) -> Split:
    """Tokenize reviews to samples of --seq_length, padded or truncated."""
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


def pack_rows(rows: Iterable[str], tokenizer: PreTrainedTokenizerBase, config: RunConfig, split: str) -> Split:
    """Pack the token stream into blocks of --seq_length, and read only the rows that the samples need (0: all).

    This groups texts like transformers' run_clm, but drops the incomplete block only once, at the end of the data.
    The labels are the inputs: a causal model shifts them itself.
    """
    length = config.seq_length
    samples = config.train_samples if split == "train" else config.eval_samples
    remaining, chunks, tokens = iter(rows), [np.empty(0, np.int64)], 0
    while not samples or tokens < samples * length:
        texts = list(itertools.islice(remaining, ROWS_PER_CHUNK))
        if not texts:
            break
        # verbose would warn of rows longer than the model's context, which are cut into blocks here.
        encoded = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        chunks.append(np.fromiter(itertools.chain.from_iterable(encoded), np.int64))
        tokens += len(chunks[-1])
    blocks, flag = tokens // length, f"--{split}_samples"
    if blocks < max(samples, 1):
        raise UserError(
            f"{flag} {samples}: the data has {blocks} blocks of --seq_length {length} ({tokens} tokens)",
            f"use {flag} {blocks} or less, or 0 for all" if blocks else "use a smaller --seq_length or more data",
        )
    input_ids = torch.from_numpy(np.concatenate(chunks)[: (samples or blocks) * length].reshape(-1, length).copy())
    return Split({"input_ids": input_ids, "labels": input_ids})


TASKS = {
    "bert-imdb": TaskSteps(
        load_reviews,
        True,
        tokenize_reviews,
        lambda samples: review_floor(samples.tensors["input_ids"].numpy(), samples.tensors["labels"].numpy()),
    ),
    "gpt-wikitext": TaskSteps(
        load_rows, False, pack_rows, lambda samples: language_floor(samples.tensors["input_ids"].numpy())
    ),
}


def load_data(config: RunConfig, cache_dir: Path, own_samples: int | None = None) -> TaskData:
    """Load the run's training and evaluation samples. Converted files are cached under `cache_dir`.

    `own_samples` is the number of samples per step of a virtual rank. Only those are loaded, and repeated for the other
    ranks, which do not read them.
    """
    if own_samples is not None:
        data = load_data(dataclasses.replace(config, train_samples=own_samples), cache_dir)
        rows = torch.arange(config.train_samples or config.global_batch_size) % len(data.train)
        # No floor: a virtual run has no loss to compare with it.
        return dataclasses.replace(data, train=Split(data.train.__getitems__(rows.tolist())), floor=None)
    task = TASKS[config.task]
    # Only with random weights: published weights require their vocabulary.
    is_free = config.weights == "random" and config.tokenizer_name is None
    has_builtin_words = is_free and config.data == "builtin"
    # Read first: an error about missing data comes before one about the tokenizer.
    raw = task.read(config, cache_dir)
    vocabulary = model_config(config).vocab_size
    if has_builtin_words:
        tokenizer: PreTrainedTokenizerBase = builtin_tokenizer(task.is_framed)
    elif is_free and raw.words:
        tokenizer = builtin_tokenizer(task.is_framed, raw.words[: vocabulary - len(SPECIAL_TOKENS)])
    else:
        tokenizer = load_tokenizer(config)
    train = task.tokenize(raw.train, tokenizer, config, "train")
    evaluation = task.tokenize(raw.eval, tokenizer, config, "eval")
    largest = max(int(split.tensors["input_ids"].max()) for split in (train, evaluation))
    if largest >= vocabulary:
        problem = (
            f"the data has tokens up to {largest}, but {config.model_name_or_path} has a vocabulary of {vocabulary}"
        )
        raise UserError(problem, "use the model's own --tokenizer_name, or a model with a larger vocabulary")
    # Two runs with equal values trained on the same tokens.
    source = {
        **raw.provenance,
        "samples": {"train": len(train), "eval": len(evaluation)},
        "tokens_sha256": {"train": train.sha256(), "eval": evaluation.sha256()},
        "tokenizer": {
            "name": tokenizer.name_or_path or "builtin",
            "class": type(tokenizer).__name__,
            "entries": len(tokenizer),
        },
    }
    return TaskData(train, evaluation, task.floor(evaluation) if has_builtin_words else None, source)


def pin_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch in pinned memory for asynchronous copies; unchanged without a GPU."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if torch.cuda.is_available() else batch


def sample_hashes(batch: dict[str, Tensor]) -> list[int]:
    """Return a 64-bit hash of each sample. Call it before the batch is moved: a copy from the device would block."""
    columns = [batch[name].contiguous().numpy() for name in sorted(batch)]
    # All columns concatenated, so that one call hashes a sample.
    rows = np.concatenate([column.reshape(len(column), -1).view(np.uint8) for column in columns], axis=1)
    return [int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little") for row in rows]


@functools.lru_cache(maxsize=2)
def epoch_order(n_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of samples in an epoch."""
    order = np.random.default_rng([seed, epoch]).permutation(n_samples)
    order.setflags(write=False)
    return order


def step_samples(config: RunConfig, n_samples: int, step: int) -> list[int]:
    """Return the samples of optimizer step `step`, counted from 0 over all epochs; independent of the number of ranks.

    An epoch's incomplete last batch is dropped. Epochs repeat as often as needed.
    """
    batch = config.global_batch_size
    assert n_samples >= batch, "RunConfig.total_steps refuses this first"
    epoch, position = divmod(step, n_samples // batch)
    order = epoch_order(n_samples, config.seed, epoch)
    return order[position * batch : (position + 1) * batch].tolist()
