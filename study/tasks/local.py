"""`--data PATH`: a local copy of the data, read by the `datasets` library. Nothing is fetched, nothing is guessed.

Which file is which split is decided here. `load_dataset(FOLDER)` takes a file twice that two of its patterns match, may
put one file into two splits, and follows the addresses in a folder's README.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import UserError, first_line
from study.host.folders import folder_named

if TYPE_CHECKING:
    from datasets import Dataset

# The file types a task reads, each with the reader of `datasets` for it.
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json"}
TABLES_AND_TEXT = TABLES | {".raw": "text", ".tokens": "text", ".txt": "text"}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test)(?![a-z])")


def local_reviews(data: str, cache_dir: Path) -> Dataset:
    path = _existing(data)
    for folder in (path, path / "aclImdb"):
        if (folder / "train" / "pos").is_dir():
            return _read_acl_imdb(folder)
    return _local_splits(path, TABLES, cache_dir)["train"]


def local_rows(data: str, name: str, cache_dir: Path) -> dict[str, Dataset]:
    """Running text by split. A clone of the hub's repository has a folder for each of its configurations: `name`."""
    path = _existing(data)
    return _local_splits(path / name if (path / name).is_dir() else path, TABLES_AND_TEXT, cache_dir)


def _existing(data: str) -> Path:
    path = folder_named(data)
    if not path.exists():
        raise UserError(f"--data {data}: no such file or folder", "use --data hub, --data builtin or an existing path")
    return path


def _local_splits(path: Path, readers: dict[str, str], cache_dir: Path) -> dict[str, Dataset]:
    """Datasets by split: train, and eval or test where they are named."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_splits(path)
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
    if not splits.setdefault("train", unnamed):
        raise UserError(f"--data {path} holds no training split, only {found[0].name}", "add a train* file")
    return {split: read_files(files, kinds[0], cache_dir) for split, files in splits.items()}


def _saved_splits(path: Path) -> dict[str, Dataset]:
    """What save_to_disk wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise _unreadable(path, error) from error
    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    splits = {_split_of(Path(str(name))): dataset for name, dataset in loaded.items()}
    if "train" not in splits:
        raise UserError(f"--data {path} holds no training split, only {', '.join(map(str, loaded))}", "add one")
    splits.pop("", None)
    return splits


def _split_of(file: Path) -> str:
    """train, eval or test, by the name of the file or else of its folders; empty where none of them says."""
    for part in (file.name, *reversed(file.parts[:-1])):
        if match := _SPLIT_IN_NAME.search(part.lower()):
            return match[1] if match[1] in ("train", "test") else "eval"
    return ""


def read_files(files: list[Path], kind: str, cache_dir: Path) -> Dataset:
    """One dataset of all files. Each is converted once, under `cache_dir`; one that cannot be read is named."""
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
        except Exception as error:  # each reader has its own errors
            raise _unreadable(file, error) from error
        if not len(part):
            raise UserError(f"--data: {file} holds no rows", "give a file with rows in it")
        parts.append(part)
    if any(part.features.type != parts[0].features.type for part in parts):
        raise UserError(f"--data: the files beside {files[0]} differ in their columns", "give files of one schema")
    return datasets.concatenate_datasets(parts)


def _read_acl_imdb(folder: Path) -> Dataset:
    """The Stanford archive: one file per review, in a folder per label. `unsup` has no labels and is left out."""
    import datasets

    rows = []
    for label, name in enumerate(("neg", "pos")):
        files = sorted((folder / "train" / name).glob("*.txt"))
        if not files:
            raise UserError(f"--data: {folder / 'train' / name} holds no reviews", "unpack the whole aclImdb archive")
        for file in files:
            try:
                rows.append({"text": file.read_text(encoding="utf-8"), "label": label})
            except (OSError, UnicodeDecodeError) as error:
                raise _unreadable(file, error) from error
    return datasets.Dataset.from_list(rows)


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = error.__cause__ if isinstance(error.__cause__, Exception) else error
    problem = f"--data: cannot read {file} ({type(reason).__name__}: {first_line(reason)})"
    return UserError(problem, "give a complete file of the kind it claims")
