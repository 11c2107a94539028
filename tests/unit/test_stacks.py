"""Stacks: other releases in separate folders, made once from pinned archives, and refused if missing."""

from __future__ import annotations

import itertools
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from study import cli
from study.config.errors import UserError
from study.host.folders import cache_directory
from study.host.machine import Machine
from study.host.stacks import VERIFIED, is_of_today, layer_folder, layer_state, stacks
from study.records.directory import read_json
from study.releases import prepare
from study.sweep.cell import Cell
from study.sweep.execute import run_cells
from study.sweep.plan import plan_cells
from study.sweep.suite_file import read_suite
from sweeps import TINY, write_suite

NO_GPU = Machine((), 16.0)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(tmp_path / "cache"))
    return cache_directory()


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Make pip's only index: a folder with one release, which has a single file."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_release(folder, "0.17.6")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(prepare, "LOCK_FILE", tmp_path / "lock.json")
    return folder


def write_release(folder: Path, version: str, content: str = "") -> None:
    metadata = f"deepspeed-{version}.dist-info"
    with zipfile.ZipFile(folder / f"deepspeed-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("deepspeed/__init__.py", f"__version__ = {version!r}\n{content}")
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")


def planned(tmp_path: Path, axes: Mapping[str, Any], fixed: Mapping[str, Any] = TINY) -> list[Cell]:
    cells = plan_cells(read_suite(write_suite(tmp_path, axes, fixed)), NO_GPU)
    return [cell for cell in cells if isinstance(cell, Cell)]


def test_the_stacks_have_every_minor_since_0_14_and_each_archive_is_pinned():
    releases = [stack.releases["deepspeed"] for stack in stacks().values() if is_of_today(stack.name)]
    assert len(releases) >= 10
    assert {release.rsplit(".", 1)[0] for release in releases} == {f"0.{minor}" for minor in range(14, 20)}
    assert VERIFIED[-1][1] in releases
    pins = prepare.read_pins()
    for stack in stacks().values():
        for package, version in stack.releases.items():
            assert re.fullmatch("[0-9a-f]{64}", pins[f"{package}-{version}"][f"{package}=={version}"])


def test_a_stack_is_an_axis_of_a_suite_and_part_of_a_cell_s_name(tmp_path):
    cells = planned(tmp_path, {"strategy": ["single", "zero1"], "stack": "today"})
    today = [name for name in stacks() if is_of_today(name)]
    assert {(cell.strategy, cell.stack) for cell in cells} == set(itertools.product(("single", "zero1"), today))
    assert len({cell.id for cell in cells}) == len(cells) == 2 * len(today)
    assert all(f"-{cell.strategy}-ds{cell.stack}-" in cell.id for cell in cells)
    # The cells of a stack are consecutive, so a process with its libraries serves all of them.
    assert len(list(itertools.groupby(cells, lambda cell: cell.stack))) == len(today)
    with pytest.raises(UserError, match=r"tiny\.yaml:\d+: stack is '0\.1\.0'"):
        read_suite(write_suite(tmp_path, {"strategy": "zero1", "stack": "0.1.0"}))


def test_a_layer_is_made_once_and_from_then_on_from_the_pinned_archive_alone(index, cache, capsys):
    name = "deepspeed-0.17.6"
    folder = layer_folder(cache, name)
    assert prepare.install([name]) == set()
    first = layer_state(cache, name)["sha256"]
    assert prepare.read_pins() == {name: {"deepspeed==0.17.6": first}}
    (folder / "marked").touch()
    prepare.install([name])
    assert (folder / "marked").exists(), "an existing layer is not changed"
    shutil.rmtree(folder)
    assert (prepare.install([name]), layer_state(cache, name)["sha256"]) == (set(), first)
    shutil.rmtree(folder)
    write_release(index, "0.17.6", "# Another archive under the same name.\n")
    assert prepare.install([name]) == {name}
    assert "HASHES" in capsys.readouterr().out
    assert "HASHES" in str(layer_state(cache, name)["problem"])


def test_without_a_network_prepare_ends_in_one_line(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "LOCK_FILE", tmp_path / "lock.json")
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert cli.main(["prepare", str(write_suite(tmp_path, {"strategy": "single", "stack": "0.17.6"}))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: deepspeed-0.17.6 cannot be installed: pip does not reach its index. To fix it: ")
    assert "problem" not in layer_state(cache, "deepspeed-0.17.6")


def test_a_release_that_pip_cannot_install_is_an_unsupported_cell_with_the_reason(tmp_path, index, cache):
    assert prepare.install(["deepspeed-0.18.0"]) == {"deepspeed-0.18.0"}
    (cell,) = planned(tmp_path, {"strategy": "zero1", "stack": "0.18.0"})
    run_cells([cell], tmp_path / "runs", NO_GPU)
    status = read_json(tmp_path / "runs" / cell.id / "status.json")
    assert status["state"] == "unsupported"
    assert status["reason"].startswith("deepspeed-0.18.0 is not installable: No matching distribution")


def test_a_missing_stack_is_refused_with_the_command_that_makes_it(tmp_path, cache):
    cells = planned(tmp_path, {"strategy": "zero1", "stack": "0.18.0"})
    sweep = run_cells(cells, tmp_path / "runs", NO_GPU)
    assert sweep.refused == 1
    assert not (tmp_path / "runs" / cells[0].id / "status.json").exists()
    with pytest.raises(UserError, match=r"lacks deepspeed-0\.18\.0 -> run: study prepare releases"):
        stacks()["0.18.0"].install_error()
