"""Damage to files, and limits on their size, for several tests."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

SNIPPETS = (
    b'"', b",", b"{", b"}", b"[", b"]", b":", b"-", b"NaN", b"1e999", b"true", b"null", b"\n", b"\xff", b"0", b".",
)  # fmt: skip


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one random fault of a crash, a bad disk or an editor."""
    if not content:
        return b"{}"
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice((1, 1, 2, 8, 60)))
    kind = rng.randrange(6)
    if kind == 0:
        return content[:start]
    if kind == 1:
        return content[:start] + content[end:]
    if kind == 2:
        return content[:end] + content[start:]
    if kind == 3:
        return content[:start] + rng.choice(SNIPPETS) + content[start:]
    if kind == 4:
        return content[:start] + rng.choice(SNIPPETS) + content[start + 1 :]
    return content[:start] + bytes([content[start] ^ 1 << rng.randrange(8)]) + content[start + 1 :]


class Trap:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@contextlib.contextmanager
def no_file_larger_than(count: int) -> Iterator[None]:
    """Limit the size of files that this process writes, as a full disk does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, limit[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
