"""Reader of a local copy of the data (`--data PATH`), by the `datasets` library without a network.

Files are assigned to splits here. `load_dataset(FOLDER)` reads a file twice if two of its patterns match, may put one
file into two splits, and follows the URLs in a folder's README.
"""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from study.config.errors import UserError, first_line
from study.host.folders import atomic_folder, check_disk_space, content_digest, resolve_path

if TYPE_CHECKING:
    from datasets import Dataset

# File types with the reader of `datasets` for each.
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json"}
TABLES_AND_TEXT = TABLES | {".raw": "text", ".tokens": "text", ".txt": "text"}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test)(?![a-z])")


def read_local_reviews(data: str, cache_dir: Path) -> Dataset:
    """Read labelled reviews: the Stanford archive, or the training split of data files."""
    path = resolve_path(data)
    for folder in (path, path / "aclImdb"):
        if (folder / "train" / "pos").is_dir():
            return _read_acl_imdb(folder)
    return _local_splits(path, TABLES, cache_dir)["train"]


def read_local_rows(data: str, name: str, cache_dir: Path) -> dict[str, Dataset]:
    """Read rows of text by split. A clone of the hub's repository has a folder per configuration, `name`."""
    path = resolve_path(data)
    return _local_splits(path / name if (path / name).is_dir() else path, TABLES_AND_TEXT, cache_dir)


def _local_splits(path: Path, readers: dict[str, str], cache_dir: Path) -> dict[str, Dataset]:
    """Read datasets by split: train, and eval or test if files have these names."""
    if not path.exists():
        raise UserError(f"--data {path}: no such file or folder", "use --data hub, --data builtin or an existing path")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _read_saved_splits(path)
    data_files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.name not in _NOT_DATA)
    data_files = [file for file in data_files if file.suffix in readers and file.is_file()]
    if not data_files:
        raise UserError(
            f"--data {path} has no data that this task can read",
            f"give {', '.join(readers)} files, or use --data builtin",
        )
    kinds = sorted({readers[file.suffix] for file in data_files})
    if len(kinds) > 1:
        raise UserError(f"--data {path} mixes {' and '.join(kinds)} files", "name one file, or a folder of one kind")
    splits: dict[str, list[Path]] = {}
    for file in data_files:
        splits.setdefault("train" if path.is_file() else _split_name(file.relative_to(path)), []).append(file)
    # Files without a split name are training data, unless other files are named train.
    unnamed = splits.pop("", [])
    if not splits.setdefault("train", unnamed):
        raise UserError(f"--data {path} has no training split, only {data_files[0].name}", "add a train* file")
    return {split: read_files(files, kinds[0], cache_dir) for split, files in splits.items()}


def _read_saved_splits(path: Path) -> dict[str, Dataset]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise _unreadable(path, error) from error
    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    splits = {_split_name(Path(str(name))): dataset for name, dataset in loaded.items()}
    if "train" not in splits:
        raise UserError(f"--data {path} has no training split, only {', '.join(map(str, loaded))}", "add one")
    splits.pop("", None)
    return splits


def _split_name(file: Path) -> str:
    """Return train, eval or test by the name of the file or else of its folders; empty without a match."""
    for part in (file.name, *reversed(file.parts[:-1])):
        if match := _SPLIT_IN_NAME.search(part.lower()):
            return match[1] if match[1] in ("train", "test") else "eval"
    return ""


def read_files(files: list[Path], kind: str, cache_dir: Path) -> Dataset:
    """Read all files into one dataset, each converted once under `cache_dir`; UserError names an unreadable file."""
    import datasets

    datasets.disable_progress_bars()
    parts = [_read_file(file, kind, cache_dir / "datasets") for file in files]
    if any(part.features.type != parts[0].features.type for part in parts):
        raise UserError(f"--data: the files in {files[0].parent} differ in their columns", "give files of one schema")
    return datasets.concatenate_datasets(parts)


def _read_file(file: Path, kind: str, cache: Path) -> Dataset:
    import datasets
    from filelock import FileLock

    # Otherwise `datasets` reports each file to a Hugging Face server.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    if not file.stat().st_size:
        raise UserError(f"--data: {file} is empty", "give a file with rows")
    options = {"keep_linebreaks": True} if kind == "text" else {}
    try:
        # By content: a file may be replaced by another one of the same name, size and time.
        folder = cache / f"{kind}-{datasets.__version__}-{content_digest(file)}"
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                # The Arrow files take as much room as the rows.
                check_disk_space(cache, file.stat().st_size, f"--data: converting {file}")
                with atomic_folder(folder) as partial, tempfile.TemporaryDirectory() as place:
                    # Read through a link: `datasets` may treat a user's file name as a pattern or a URL.
                    link = Path(place) / f"rows{file.suffix}"
                    link.symlink_to(file.absolute())
                    rows = datasets.load_dataset(
                        kind, data_files=str(link), split="train", cache_dir=str(partial), **options
                    )
                    if not len(rows):
                        raise UserError(f"--data: {file} has no rows", "give a file with rows")
        return datasets.concatenate_datasets(
            [datasets.Dataset.from_file(str(part)) for part in sorted(folder.rglob("*.arrow"))]
        )
    except UserError:
        raise
    except Exception as error:  # Each reader raises different errors.
        raise _unreadable(file, error) from error


def _read_acl_imdb(folder: Path) -> Dataset:
    """Read the Stanford archive: one file per review, in a folder per label. `unsup` has no labels and is left out."""
    import datasets

    rows = []
    for label, name in enumerate(("neg", "pos")):
        files = sorted(file for file in (folder / "train" / name).glob("*.txt") if file.is_file())
        if not files:
            raise UserError(f"--data: {folder / 'train' / name} has no reviews", "unpack the whole aclImdb archive")
        for file in files:
            try:
                rows.append({"text": file.read_text(encoding="utf-8"), "label": label})
            except (OSError, UnicodeDecodeError) as error:
                raise _unreadable(file, error) from error
    return datasets.Dataset.from_list(rows)


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = error.__cause__ if isinstance(error.__cause__, Exception) else error
    problem = f"--data: cannot read {file} ({type(reason).__name__}: {first_line(reason)})"
    if getattr(reason, "errno", None) in _NO_ROOM:
        return UserError(problem, "free disk space, or set ZERO_STUDY_CACHE to a folder on a larger disk")
    return UserError(problem, "give a complete file of the type in its name")
