"""Touch host memory once, several processes at a time: a virtual machine may get its memory only then, and slowly.

    python tools/quarter/touch_memory.py GIB

The memory is free again afterwards. If there is less, the kernel ends these processes before any other.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

PROCESSES = 8
GIB = 2**30


def touch(gib: int) -> None:
    """Touch pages of memory, one GiB after another."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    blocks = [mmap.mmap(-1, GIB, flags) for _ in range(gib)]
    for block in blocks:
        block.close()


def main(gib: int) -> None:
    """Touch that much memory and print how long it took."""
    started = time.monotonic()
    for process in range(PROCESSES):
        share = gib // PROCESSES + (process < gib % PROCESSES)
        if os.fork() == 0:
            touch(share)
            os._exit(0)
    failed = 0
    for _ in range(PROCESSES):
        _, status = os.wait()
        failed += status != 0
    print(f"{gib} GiB in {time.monotonic() - started:.1f} s; processes that failed: {failed} of {PROCESSES}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
