"""Files that are known by what they hold, and folders that are made whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def content_digest(file: Path) -> str:
    """For what a disk, a copy or a hand may have changed. Against whoever wants to deceive it is none.

    Five times as fast as SHA-256 on a processor with instructions for that, and faster than any drive.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        block = memoryview(bytearray(1 << 20))
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """With a digest of what it says, instead of one that it has. It is as it was when that changes nothing."""
    plain = json.loads(json.dumps({key: value for key, value in document.items() if key != "own_sha256"}))
    return plain | {"own_sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """An empty folder beside it, which takes its name, and its place, when the block ends well.

    One process at a time. What a killed one left is deleted: half of a large model would fill the disk.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
