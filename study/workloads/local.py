"""`--data PATH`: a local copy of the data, read by the `datasets` library. Nothing is fetched, nothing is guessed.

Which file is which split is decided here. `load_dataset(FOLDER)` takes a file twice that two of its patterns match, may
put one file into two splits, and follows the addresses in a folder's README.
"""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from study.config.errors import UserError, first_line
from study.host.folders import content_digest, folder_named, refuse_full_disk, whole_or_nothing

if TYPE_CHECKING:
    from datasets import Dataset

# The file types a task reads, each with the reader of `datasets` for it.
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json"}
TABLES_AND_TEXT = TABLES | {".raw": "text", ".tokens": "text", ".txt": "text"}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
# As deep as Arrow nests. The parser of `datasets` ends the process with a segmentation fault at some larger depth.
_DEEPEST = 64
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NOT_BRACKETS = bytes({*range(256)} - {*b"[]{}"})
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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
    why = "no such file or folder"
    try:
        path = folder_named(data)
        if path.exists():
            return path
    except OSError as error:  # a name that is too long, a folder that is closed
        why = error.strerror or first_line(error)
    raise UserError(f"--data {data}: {why}", "use --data hub, --data builtin or an existing path")


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
    parts = [_read_file(file, kind, cache_dir / "datasets") for file in files]
    if any(part.features.type != parts[0].features.type for part in parts):
        raise UserError(f"--data: the files beside {files[0]} differ in their columns", "give files of one schema")
    return datasets.concatenate_datasets(parts)


def _read_file(file: Path, kind: str, cache: Path) -> Dataset:
    import datasets
    from filelock import FileLock

    if not file.stat().st_size:
        raise UserError(f"--data: {file} is empty", "give a file with rows in it")
    try:
        # By what it holds: a file may be replaced by another one of its name, size and time.
        folder = cache / f"{kind}-{datasets.__version__}-{content_digest(file)}"
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _convert(file, kind, folder)
        return datasets.concatenate_datasets(
            [datasets.Dataset.from_file(str(part)) for part in sorted(folder.rglob("*.arrow"))]
        )
    except UserError:
        raise
    except Exception as error:  # each reader has its own errors
        raise _unreadable(file, error) from error


def _convert(file: Path, kind: str, folder: Path) -> None:
    """Into Arrow files, which take as much room as the rows, unpacked."""
    import datasets
    from datasets.utils.extract import Extractor

    # It tells its makers' server of each file otherwise.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False

    if packed := Extractor.infer_extractor_format(str(file)):
        # `datasets` would unpack it, to any size.
        raise UserError(f"--data: {file} is packed ({packed})", "unpack it")
    refuse_full_disk(folder.parent, file.stat().st_size, f"--data: what {file} is converted into")
    if kind == "json":
        _refuse_deep_nesting(file)
    options = {"keep_linebreaks": True} if kind == "text" else {}
    with whole_or_nothing(folder) as partial, tempfile.TemporaryDirectory() as place:
        # Read through a link: in a user's file name `datasets` may see a pattern, or an address.
        link = Path(place) / f"rows{file.suffix}"
        link.symlink_to(file.absolute())
        rows = datasets.load_dataset(kind, data_files=str(link), split="train", cache_dir=str(partial), **options)
        if not len(rows):
            raise UserError(f"--data: {file} holds no rows", "give a file with rows in it")


def _refuse_deep_nesting(file: Path) -> None:
    steps = np.zeros(256, np.int64)
    steps[[*b"[{"]], steps[[*b"]}"]] = 1, -1
    depth = np.int64(0)
    with file.open("rb") as stream:
        # Whole lines, since no string of JSON goes over more than one.
        while lines := stream.readlines(1 << 24):
            brackets = _JSON_STRING.sub(b"", b"".join(lines)).translate(None, _NOT_BRACKETS)
            depths = depth + np.cumsum(steps[np.frombuffer(brackets, np.uint8)])
            if depths.max(initial=0) > _DEEPEST:
                raise UserError(
                    f"--data: {file} nests deeper than {_DEEPEST} levels", "give rows that hold text and numbers"
                )
            depth = depths[-1] if depths.size else depth


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
                if not file.is_file():
                    raise OSError("it is not a file")
                rows.append({"text": file.read_text(encoding="utf-8"), "label": label})
            except (OSError, UnicodeDecodeError) as error:
                raise _unreadable(file, error) from error
    return datasets.Dataset.from_list(rows)


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = error.__cause__ if isinstance(error.__cause__, Exception) else error
    problem = f"--data: cannot read {file} ({type(reason).__name__}: {first_line(reason)})"
    if getattr(reason, "errno", None) in _NO_ROOM:
        return UserError(problem, "make room, or let ZERO_STUDY_CACHE name a folder on a larger drive")
    return UserError(problem, "give a complete file of the kind it claims")
