"""Records and folders for tests that build reports."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path

from study.config.places import REPOSITORY
from study.records.frames import Records, read_parquet


@functools.cache
def laptop() -> Records:
    """Return the committed records of the laptop suite."""
    return read_parquet(REPOSITORY / "reports" / "laptop")


@functools.cache
def few() -> Records:
    """Return laptop records of four strategies, with a baseline and an offload: enough for any report."""
    records = laptop()
    is_included = records.runs["strategy"].isin(["single", "ddp", "zero2", "zero2_cpu"])
    runs = records.runs[is_included & (records.runs["task"] == "gpt-wikitext")]
    return dataclasses.replace(records, runs=runs, steps=records.steps[records.steps["run"].isin(runs["run"])])


def committed(folder: Path) -> Path:
    """Copy the committed laptop report into a folder."""
    return Path(shutil.copytree(REPOSITORY / "reports" / "laptop", folder / "report"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
