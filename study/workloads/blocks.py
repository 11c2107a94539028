"""Tokenized samples in memory: which of them each optimizer step takes, and a hash that proves it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from study.config.flags import RunConfig
from study.workloads.builtin import Floor


class Split(Dataset[dict[str, Tensor]]):
    """Samples of one length, as tensors by name; one length, so a mean of micro-batch means is the mean.

    Give a DataLoader a batch_sampler and `collate_fn=lambda batch: batch`: `__getitems__` returns whole batches.
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
        """Of every tensor's name, type, shape and content."""
        digest = hashlib.sha256()
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class TaskData:
    """What a run trains on and is evaluated on; `source` says where it came from, for the record."""

    train: Split
    eval: Split
    floor: Floor | None
    source: dict[str, Any]


def pinned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where a GPU fetches it from by itself, while the host goes on; without a GPU as it was."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if torch.cuda.is_available() else batch


def sample_hashes(batch: dict[str, Tensor]) -> list[int]:
    """64 bits per sample over all it holds. Call it before the batch leaves the host: a device copy would stall."""
    columns = [batch[name].contiguous().numpy() for name in sorted(batch)]
    # All columns side by side: then one call hashes a sample.
    rows = np.concatenate([column.reshape(len(column), -1).view(np.uint8) for column in columns], axis=1)
    return [int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little") for row in rows]


@functools.lru_cache(maxsize=2)
def epoch_order(n_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order in which one pass takes the samples."""
    order = np.random.default_rng([seed, epoch]).permutation(n_samples)
    order.setflags(write=False)
    return order


def step_samples(config: RunConfig, n_samples: int, step: int) -> list[int]:
    """The samples of optimizer step `step`, counted from 0 over all epochs, however many ranks share them.

    An epoch's incomplete last batch is dropped. Epochs repeat as often as needed.
    """
    batch = config.global_batch_size
    assert n_samples >= batch, "RunConfig.total_steps refuses this first"
    epoch, position = divmod(step, n_samples // batch)
    order = epoch_order(n_samples, config.seed, epoch)
    return order[position * batch : (position + 1) * batch].tolist()
