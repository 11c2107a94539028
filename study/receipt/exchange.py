"""Figures of all ranks for rank 0, through the store of the process group: no rank ever waits for another one."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Receipts of one process, in an order that is the same on all ranks.
_numbers = itertools.count()
_PAUSE_S = 0.02


class Exchange:
    """Small documents of the ranks, by rank."""

    def __init__(self) -> None:
        self._prefix = f"zero-study/receipt/{next(_numbers)}"
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._store = distributed_c10d._get_default_store() if self.ranks > 1 else None
        self.received: dict[int, dict[str, Any]] = {}

    def publish(self, document: dict[str, Any]) -> None:
        self.received[self.rank] = document
        if self._store is not None:
            self._store.set(self._key(self.rank), json.dumps(document))

    def collect(self, wait_s: float = 0.0) -> None:
        """Receive what other ranks have published; wait at most this long for the others."""
        deadline = time.monotonic() + wait_s
        while self._store is not None and len(self.received) < self.ranks:
            for rank in range(self.ranks):
                if rank not in self.received and self._store.check([self._key(rank)]):
                    self.received[rank] = json.loads(self._store.get(self._key(rank)))
            if time.monotonic() >= deadline:
                return
            time.sleep(_PAUSE_S)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"
