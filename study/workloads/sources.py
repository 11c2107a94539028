"""Raw text for `--data`: the hub at a pinned revision, a local copy, or a built-in corpus, without any fallback."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from study.config.errors import UserError, first_line
from study.config.flags import RunConfig
from study.workloads import builtin
from study.workloads.film_reviews import PROVENANCE, frequent_words, read_film_reviews
from study.workloads.local import read_files, read_local_reviews, read_local_rows
from study.workloads.presets import PROBE_TIMEOUT_S

if TYPE_CHECKING:
    from datasets import Dataset

# Commits of the parquet files published since 2024, pinned so that results stay comparable.
IMDB, IMDB_REVISION = "stanfordnlp/imdb", "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"
WIKITEXT, WIKITEXT_REVISION = "Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3"
IMDB_FILES = {"train": ["plain_text/train-00000-of-00001.parquet"]}
WIKITEXT_FILES = {
    "wikitext-2-raw-v1": {"train": ["train-00000-of-00001.parquet"], "eval": ["validation-00000-of-00001.parquet"]},
    "wikitext-103-raw-v1": {
        "train": ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        "eval": ["validation-00000-of-00001.parquet"],
    },
}
# Without a validation split the first 5% are held out, as in transformers' run_clm.
HELD_OUT_SHARE = 0.05

Texts = TypeVar("Texts")


@dataclasses.dataclass(frozen=True)
class Raw(Generic[Texts]):
    """Raw texts of both splits, their provenance for the record, and words to build a tokenizer of, if it needs one."""

    train: Texts
    eval: Texts
    provenance: dict[str, Any]
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reviews:
    """Reviews with labels 0 (negative) and 1 (positive)."""

    texts: list[str]
    labels: list[int]


def load_reviews(config: RunConfig, cache_dir: Path) -> Raw[Reviews]:
    """Load labelled reviews, both splits from the training split, as in the studied documents."""
    sample_counts = {"train": config.train_samples, "eval": config.eval_samples}
    if config.data == "builtin":
        train, evaluation = (
            Reviews(*builtin.reviews(split, _count(sample_counts[split], builtin.REVIEWS[split], f"--{split}_samples")))
            for split in ("train", "eval")
        )
        return Raw(train, evaluation, {"data": "builtin", "corpus": "reviews", "seed": builtin.CORPUS_SEED})
    import datasets  # 83 MiB of a rank, which the built-in reviews do not need.

    if config.data == "hub":
        dataset = _hub_dataset(IMDB, IMDB_REVISION, IMDB_FILES["train"], cache_dir)
        provenance = {"data": "hub", "dataset": IMDB, "revision": IMDB_REVISION}
    elif config.data == "reviews":
        dataset = datasets.Dataset.from_dict(read_film_reviews(cache_dir))
        provenance = PROVENANCE
    else:
        dataset = read_local_reviews(config.data, cache_dir)
        provenance = {"data": "local", "path": config.data}
    _check_columns(dataset, ("text", "label"), config.data, IMDB)
    if len(dataset) < 5:
        raise UserError(f"{config.data} has {len(dataset)} reviews, too few to split 80/20", "use more data")
    # The documents' 80/20 split, applied to row numbers: applied to the data, `datasets` would write files next to it.
    parts = datasets.Dataset.from_dict({"row": range(len(dataset))}).train_test_split(test_size=0.2, seed=42)
    train = _select(dataset, parts["train"], config.train_samples, "--train_samples")
    evaluation = _select(dataset, parts["test"], config.eval_samples, "--eval_samples")
    words = frequent_words(dataset.select(parts["train"]["row"])["text"]) if config.data == "reviews" else ()
    return Raw(train, evaluation, provenance | {"rows": len(dataset)}, words)


def load_rows(config: RunConfig, cache_dir: Path) -> Raw[Iterable[str]]:
    """Load the rows of Wikitext's training and validation splits, as lazy iterators."""
    if config.data == "builtin":
        provenance = {"data": "builtin", "corpus": "language", "seed": builtin.CORPUS_SEED}
        return Raw(builtin.language_rows("train"), builtin.language_rows("eval"), provenance)
    if config.data == "reviews":
        # The same sentences train and evaluate both tasks.
        raw = load_reviews(dataclasses.replace(config, train_samples=0, eval_samples=0), cache_dir)
        return Raw(raw.train.texts, raw.eval.texts, raw.provenance, raw.words)
    name = config.dataset_config_name
    if config.data == "hub":
        splits = {
            split: _hub_dataset(WIKITEXT, WIKITEXT_REVISION, [f"{name}/{file}" for file in files], cache_dir)
            for split, files in WIKITEXT_FILES[name].items()
        }
        provenance = {"data": "hub", "dataset": WIKITEXT, "name": name, "revision": WIKITEXT_REVISION}
    else:
        splits = read_local_rows(config.data, name, cache_dir)
        provenance = {"data": "local", "path": config.data}
    for dataset in splits.values():
        _check_columns(dataset, ("text",), config.data, WIKITEXT)
    train, evaluation = splits["train"], splits.get("eval", splits.get("test"))
    if evaluation is None:
        held_out = max(1, int(HELD_OUT_SHARE * len(train)))
        evaluation, train = train.select(range(held_out)), train.select(range(held_out, len(train)))
        provenance["held_out_rows"] = held_out
    provenance["rows"] = {"train": len(train), "eval": len(evaluation)}
    return Raw(_rows(train), _rows(evaluation), provenance)


def _rows(dataset: Dataset) -> Iterator[str]:
    """Yield the rows of a dataset, with blank lines as empty text."""
    for batch in dataset.iter(batch_size=1000):
        # Blank lines are "" in the published files and " \n" in Wikitext's raw files; a model should see only one form.
        yield from (text if text.strip() else "" for text in batch["text"])


def _select(dataset: Dataset, rows: Dataset, samples: int, flag: str) -> Reviews:
    count = _count(samples, len(rows), flag)
    chosen = dataset.select(rows.shuffle(seed=42)["row"][:count], keep_in_memory=True)
    return Reviews(list(chosen["text"]), [int(label) for label in chosen["label"]])


def _count(samples: int, available: int, flag: str) -> int:
    if samples > available:
        raise UserError(f"{flag} {samples}: the data has {available} reviews", f"use {available} or less, or 0 for all")
    return samples or available


def _hub_dataset(repository: str, revision: str, files: list[str], cache_dir: Path) -> Dataset:
    """Read files of the pinned commit, from the cache if present.

    Without a network load_dataset(repository, revision=...) would read any cached revision.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    location: dict[str, Any] = {"repo_id": repository, "repo_type": "dataset", "revision": revision}
    paths = []
    for file in files:
        with contextlib.suppress(LocalEntryNotFoundError):
            paths.append(hf_hub_download(filename=file, local_files_only=True, **location))
            continue
        try:
            HfApi().dataset_info(repository, revision=revision, timeout=PROBE_TIMEOUT_S)
            paths.append(hf_hub_download(filename=file, **location))
        except Exception as error:  # Offline mode, name resolution, proxy, HTTP.
            raise UserError(
                f"--data hub: {repository} at {revision[:12]} is not in the local cache and the hub does not serve it "
                f"({type(error).__name__}: {first_line(error)})",
                "use --data builtin, which needs no network, or --data PATH with a local copy",
            ) from error
    return read_files([Path(path) for path in paths], "parquet", cache_dir)


def _check_columns(dataset: Dataset, needed: tuple[str, ...], data: str, schema: str) -> None:
    """Raise UserError unless the dataset has the columns, with complete UTF-8 text and labels 0 or 1."""
    fix = f"rename its columns, or give the data in the schema of {schema} on the hub"
    columns = dataset.column_names
    if not set(needed) <= set(columns):
        raise UserError(f"--data {data} has the columns {', '.join(columns)}; needed: {', '.join(needed)}", fix)
    kinds = {name: str(getattr(feature, "dtype", feature)) for name, feature in dataset.features.items()}
    texts = dataset.data.column("text")
    if kinds["text"] not in ("string", "large_string") or texts.null_count:
        problem = f"--data {data} has a `text` column of {kinds['text']} that is not text or has missing values"
        raise UserError(problem, fix)
    try:
        texts.validate(full=True)
    except ValueError as error:
        raise UserError(
            f"--data {data} has text that is not UTF-8 ({first_line(error)})", "save it as UTF-8"
        ) from error
    if "label" in needed:
        labels = dataset.unique("label") if kinds["label"].startswith(("int", "uint")) else [kinds["label"]]
        if not set(labels) <= {0, 1}:
            examples = ", ".join(map(repr, sorted(labels, key=repr)[:5]))
            raise UserError(f"--data {data} has a `label` column of {examples}", "label reviews 0 (bad) or 1 (good)")
