"""Raw text by `--data`: from the hub at a pinned revision, from a local copy, or built in. Never one for another."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import UserError
from study.models.hub import PROBE_TIMEOUT_S, first_line
from study.spec.config import RunConfig
from study.tasks import builtin

if TYPE_CHECKING:
    from datasets import Dataset

# The commits that the published parquet files of both datasets have stood at since 2024; a newer one is a new study.
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

READERS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json"}
TEXT_READERS = {".raw": "text", ".tokens": "text", ".txt": "text"}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test)(?![a-z])")
# run_clm's default where the data brings no validation split: its first 5%.
HELD_OUT_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Reviews:
    texts: list[str]
    labels: list[int]


@dataclasses.dataclass(frozen=True)
class RawReviews:
    train: Reviews
    eval: Reviews
    provenance: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RawRows:
    """Rows of running text, to be read once and only as far as needed."""

    train: Iterable[str]
    eval: Iterable[str]
    provenance: dict[str, Any]


def load_reviews(config: RunConfig, cache_dir: Path) -> RawReviews:
    """Labelled reviews, selected as the studied documents did; test splits are left alone, as they did."""
    assert config.data is not None
    assert config.train_samples is not None
    assert config.eval_samples is not None
    if config.data == "builtin":
        wanted = {"train": config.train_samples, "eval": config.eval_samples}
        train, evaluation = (
            Reviews(*builtin.reviews(split, _count(wanted[split], builtin.REVIEWS[split], f"--{split}_samples")))
            for split in ("train", "eval")
        )
        return RawReviews(train, evaluation, {"data": "builtin", "corpus": "reviews", "seed": builtin.CORPUS_SEED})
    if config.data == "hub":
        files = [_hub_file(IMDB, IMDB_REVISION, file) for file in IMDB_FILES["train"]]
        dataset = _read(files, "parquet", cache_dir)
        provenance = {"data": "hub", "dataset": IMDB, "revision": IMDB_REVISION}
    else:
        path = _existing(config.data)
        acl_imdb = next((folder for folder in (path, path / "aclImdb") if (folder / "train" / "pos").is_dir()), None)
        dataset = _read_acl_imdb(acl_imdb) if acl_imdb else _local_splits(path, READERS, cache_dir)["train"]
        provenance = {"data": "local", "path": config.data}
    _check_columns(dataset, ("text", "label"), config.data, IMDB)
    if len(dataset) < 5:
        raise UserError(f"{config.data} holds {len(dataset)} reviews, too few to split 80/20", "use more data")
    parts = _split_rows(len(dataset))
    train = _select(dataset, parts["train"], config.train_samples, "--train_samples")
    evaluation = _select(dataset, parts["test"], config.eval_samples, "--eval_samples")
    return RawReviews(train, evaluation, provenance | {"rows": len(dataset)})


def load_rows(config: RunConfig, cache_dir: Path) -> RawRows:
    """Wikitext's rows, training and validation split."""
    assert config.data is not None
    assert config.dataset_config_name is not None
    if config.data == "builtin":
        provenance = {"data": "builtin", "corpus": "language", "seed": builtin.CORPUS_SEED}
        return RawRows(builtin.language_rows("train"), builtin.language_rows("eval"), provenance)
    name = config.dataset_config_name
    if config.data == "hub":
        files = {
            split: [_hub_file(WIKITEXT, WIKITEXT_REVISION, f"{name}/{file}") for file in files]
            for split, files in WIKITEXT_FILES[name].items()
        }
        splits = {split: _read(paths, "parquet", cache_dir) for split, paths in files.items()}
        provenance = {"data": "hub", "dataset": WIKITEXT, "name": name, "revision": WIKITEXT_REVISION}
    else:
        path = _existing(config.data)
        # A clone of the hub's repository has a folder for each of its configurations.
        folder = path / name if (path / name).is_dir() else path
        splits = _local_splits(folder, READERS | TEXT_READERS, cache_dir)
        provenance = {"data": "local", "path": config.data}
    for dataset in splits.values():
        _check_columns(dataset, ("text",), config.data, WIKITEXT)
    train, evaluation = splits["train"], splits.get("eval", splits.get("test"))
    if evaluation is None:
        held_out = max(1, int(HELD_OUT_SHARE * len(train)))
        evaluation, train = train.select(range(held_out)), train.select(range(held_out, len(train)))
        provenance["held_out_rows"] = held_out
    provenance["rows"] = {"train": len(train), "eval": len(evaluation)}
    return RawRows(_rows(train), _rows(evaluation), provenance)


def _rows(dataset: Dataset) -> Iterator[str]:
    for batch in dataset.iter(batch_size=1000):
        # The published files hold blank lines as "", Wikitext's raw files as " \n"; a model should see one of them.
        yield from (text if text.strip() else "" for text in batch["text"])


def _split_rows(count: int) -> dict[str, Dataset]:
    """The documents' own split, of row numbers: splitting the data, `datasets` would write index files beside them."""
    import datasets

    return datasets.Dataset.from_dict({"row": range(count)}).train_test_split(test_size=0.2, seed=42)


def _select(dataset: Dataset, rows: Dataset, samples: int, flag: str) -> Reviews:
    count = _count(samples, len(rows), flag)
    chosen = dataset.select(rows.shuffle(seed=42)["row"][:count], keep_in_memory=True)
    return Reviews(list(chosen["text"]), [int(label) for label in chosen["label"]])


def _count(samples: int, available: int, flag: str) -> int:
    if samples > available:
        raise UserError(f"{flag} {samples}: the data has {available} reviews", f"use {available} or less, or 0 for all")
    return samples or available


# The hub


def _hub_file(repository: str, revision: str, file: str) -> Path:
    """One file of the pinned commit, from the cache where it is there.

    Not load_dataset(repository, revision=...): without a network it takes whatever revision it has cached.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    where: dict[str, Any] = {"repo_id": repository, "filename": file, "repo_type": "dataset", "revision": revision}
    try:
        return Path(hf_hub_download(**where, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().dataset_info(repository, revision=revision, timeout=PROBE_TIMEOUT_S)
        return Path(hf_hub_download(**where))
    except Exception as error:  # offline mode, name resolution, proxy, HTTP: all mean that the hub does not serve it
        raise UserError(
            f"--data hub: {repository} at {revision[:12]} is not in the local cache and the hub does not serve it "
            f"({type(error).__name__}: {first_line(error)})",
            "use --data builtin, which needs no network, or --data PATH with a local copy",
        ) from error


# Local copies


def _existing(data: str) -> Path:
    path = Path(data).expanduser()
    if not path.exists():
        raise UserError(f"--data {data}: no such file or folder", "use --data hub, --data builtin or an existing path")
    return path


def _local_splits(path: Path, readers: dict[str, str], cache_dir: Path) -> dict[str, Dataset]:
    """Datasets by split (train, and eval or test where they are named) from a file, a folder or a save_to_disk."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _from_disk(path)
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.name not in _NOT_DATA)
    found = [file for file in found if file.suffix in readers and file.is_file()]
    if not found:
        raise UserError(
            f"--data {path} holds no data this task can read", f"give {', '.join(readers)} files, or use --data builtin"
        )
    kinds = sorted({readers[file.suffix] for file in found})
    if len(kinds) > 1:
        raise UserError(f"--data {path} mixes {' and '.join(kinds)} files", "name one file, or a folder of one kind")
    splits: dict[str, list[Path]] = {}
    for file in found:
        splits.setdefault("train" if path.is_file() else _split_of(file.relative_to(path)), []).append(file)
    # Files that name no split are training data, unless others say that they are.
    unnamed = splits.pop("", [])
    splits.setdefault("train", unnamed)
    if not splits["train"]:
        raise UserError(f"--data {path} holds no training split, only {found[0].name}", "add a train* file")
    return {split: _read(files, kinds[0], cache_dir) for split, files in splits.items()}


def _from_disk(path: Path) -> dict[str, Dataset]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(*_unreadable(path, error)) from error
    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    splits = {_split_of(Path(str(name))): dataset for name, dataset in loaded.items()}
    if "train" not in splits:
        raise UserError(f"--data {path} holds no training split, only {', '.join(map(str, loaded))}", "add one")
    splits.pop("", None)
    return splits


def _split_of(file: Path) -> str:
    """train, eval or test by the file's name, else by its folders'; empty where none says."""
    for part in (file.name, *reversed(file.parts[:-1])):
        if match := _SPLIT_IN_NAME.search(part.lower()):
            return match[1] if match[1] in ("train", "test") else "eval"
    return ""


def _read(files: list[Path], kind: str, cache_dir: Path) -> Dataset:
    """One dataset of all files; converted once, under `cache_dir`."""
    import datasets

    datasets.disable_progress_bars()
    options: dict[str, Any] = {"keep_linebreaks": True} if kind == "text" else {}
    parts = []
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"--data: {file} is empty", "give a file with rows in it")
        try:
            part = datasets.load_dataset(
                kind, data_files=str(file), split="train", cache_dir=str(cache_dir / "datasets"), **options
            )
        except Exception as error:  # each reader has its own errors, all meaning that this file is not what it claims
            raise UserError(*_unreadable(file, error)) from error
        if not len(part):
            raise UserError(f"--data: {file} holds no rows", "give a file with rows in it")
        parts.append(part)
    if any(part.features.type != parts[0].features.type for part in parts):
        raise UserError(f"--data: the files beside {files[0]} differ in their columns", "give files of one schema")
    return datasets.concatenate_datasets(parts)


def _unreadable(file: Path, error: Exception) -> tuple[str, str]:
    reason = error.__cause__ if isinstance(error.__cause__, Exception) else error
    problem = f"--data: cannot read {file} ({type(reason).__name__}: {first_line(reason)})"
    return problem, "give a complete file of the kind it claims"


def _read_acl_imdb(folder: Path) -> Dataset:
    """The Stanford archive: one file per review, in a folder per label. `unsup` has no labels and is left out."""
    import datasets

    texts, labels = [], []
    for label, name in enumerate(("neg", "pos")):
        files = sorted((folder / "train" / name).glob("*.txt"))
        if not files:
            raise UserError(f"--data: {folder / 'train' / name} holds no reviews", "unpack the whole aclImdb archive")
        for file in files:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(*_unreadable(file, error)) from error
            labels.append(label)
    return datasets.Dataset.from_dict({"text": texts, "label": labels})


def _check_columns(dataset: Dataset, needed: tuple[str, ...], where: str, schema: str) -> None:
    missing = [name for name in needed if name not in dataset.column_names]
    fix = f"rename its columns, or give the data in the schema of {schema} on the hub"
    if missing:
        raise UserError(
            f"--data {where} has the columns {', '.join(dataset.column_names)}; needed: {', '.join(needed)}", fix
        )
    kind = str(getattr(dataset.features["text"], "dtype", dataset.features["text"]))
    if kind not in ("string", "large_string") or dataset.data.column("text").null_count:
        raise UserError(f"--data {where} has a `text` column of {kind} with gaps or of another type", fix)
    if "label" in needed:
        kind = str(getattr(dataset.features["label"], "dtype", dataset.features["label"]))
        values = dataset.unique("label") if "int" in kind else [kind]
        if not set(values) <= {0, 1}:
            shown = ", ".join(map(repr, sorted(values, key=repr)[:5]))
            raise UserError(f"--data {where} has a `label` column of {shown}", "label reviews 0 (bad) or 1 (good)")
