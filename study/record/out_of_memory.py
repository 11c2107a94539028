"""The words in which libraries say that memory ran out: for an exception in a run, and for what a dead one printed."""

from __future__ import annotations

import re

# As torch, the CUDA libraries and NCCL say it; NCCL speaks of an unhandled error first, and of memory in its last line.
OF_THE_GPU = re.compile(
    r"CUDA out of memory|CUDA (driver )?error: out of memory|torch\.(cuda\.)?OutOfMemoryError|"
    r"CU(BLAS|DNN)_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|Cuda failure (\d+ )?'out of memory'"
)
OF_THE_HOST = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|std::bad_alloc|Cannot allocate memory|\bMemoryError\b|"
    r"can't start new thread|pthread_create failed|failed to map segment from shared object|unable to mmap"
)


def line_of(text: str, found: re.Match[str]) -> str:
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else None].strip()[:500]
