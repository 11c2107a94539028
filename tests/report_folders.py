"""Records and folders for tests that build reports."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import nbformat
import pandas as pd

from study.config.places import REPOSITORY
from study.records.frames import Records, read_parquet, write_parquet
from study.report.canvas import Drawing

if TYPE_CHECKING:
    from playwright.sync_api import Page


@functools.cache
def read_committed(folder: Path) -> Records:
    """Return the records of a committed report, which no caller changes."""
    return read_parquet(folder)


def laptop() -> Records:
    """Return the committed records of the laptop suite."""
    return read_committed(REPOSITORY / "reports" / "laptop")


@functools.cache
def few() -> Records:
    """Return laptop records of four strategies, with a baseline and an offload: enough for any report."""
    records = laptop()
    is_included = records.runs["strategy"].isin(["single", "ddp", "zero2", "zero2_cpu"])
    runs = records.runs[is_included & (records.runs["model_name_or_path"] == "gpt-tiny")]
    return dataclasses.replace(records, runs=runs, steps=records.steps[records.steps["run"].isin(runs["run"])])


def committed(folder: Path) -> Path:
    """Copy what git keeps of the laptop report into a folder."""
    pages = shutil.ignore_patterns("*.html", "*.ipynb", "images", "pages.json")
    return Path(shutil.copytree(REPOSITORY / "reports" / "laptop", folder / "report", ignore=pages))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def row(table: pd.DataFrame, strategy: str) -> pd.Series:
    """Return the only row of a strategy."""
    (match,) = [line for _, line in table.iterrows() if line["Strategy"] == strategy]
    return match


def links_with_targets(page: Page, file: Path) -> list[str]:
    """Return the links of the open file; each has a target on this machine."""
    links: list[str] = page.eval_on_selector_all("a[href]", "all => all.map(one => one.getAttribute('href'))")
    for link in dict.fromkeys(links):
        parts = urlsplit(link)
        assert not parts.scheme
        target = file.parent / unquote(parts.path) if parts.path else file
        assert target.exists(), link
        assert not parts.fragment or f'id="{unquote(parts.fragment)}"' in target.read_text(encoding="utf-8"), link
    return links


def drawn(notebook: str, records: Records, written: Path | None = None, **parameters: Any) -> list[Drawing]:
    """Run the cells of a notebook on these records in this process, and return the figures that they display.

    `written` is a folder that has the records already.
    """
    shown: list[Any] = []
    names: dict[str, Any] = {"display": shown.append}
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(written or temporary)
        if written is None:
            write_parquet(records, Path(folder))
        for cell in nbformat.read(REPOSITORY / "notebooks" / f"{notebook}.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                exec(cell.source, names)
            if cell.id == "parameters":
                names |= {**parameters, "records_dir": folder}
    return [one for one in shown if isinstance(one, Drawing)]


def figures(notebook: str, records: Records, **parameters: Any) -> dict[str, Drawing]:
    """Return the figures of records with one workload by their names."""
    drawings = drawn(notebook, records, **parameters)
    by_name = {drawing.name: drawing for drawing in drawings}
    assert len(by_name) == len(drawings)
    return by_name
