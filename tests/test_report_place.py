"""A report is put in place whole, and never over or instead of a file that it did not make."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from report_folders import committed, contents, laptop
from study import cli
from study.errors import UserError
from study.report.records.frames import write_parquet
from study.report.site import place
from study.report.site.build import build
from study.spec.strategies import REPOSITORY


def rendered(folder: Path, *figures: str) -> Path:
    """A new report that waits to be put in place."""
    folder.mkdir()
    (folder / "index.html").write_text("new")
    for figure in figures:
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / figure).write_text("new")
    return folder


def put(tmp_path: Path, output: Path, *figures: str) -> list[str]:
    said: list[str] = []
    place.put_in_place(rendered(tmp_path / "new", *figures), output, said.append)
    return said


@pytest.mark.parametrize("name", ["loss_curves.html", "peak_memory.ipynb", "summary.md", "files.json", "figures"])
def test_what_would_be_overwritten_and_is_not_the_reports_is_refused_before_notebooks_run(name, tmp_path):
    output = committed(tmp_path)
    if name == "figures":
        shutil.move(output / name, tmp_path / "elsewhere")
        (output / name).symlink_to(tmp_path / "elsewhere")
    else:
        (output / name).write_text("my own words")
    before, outside = contents(output), contents(tmp_path)
    with pytest.raises(UserError, match=rf"report holds {name}, which is not as a report wrote it"):
        build(laptop(), "laptop", output, notebooks=tmp_path / "nowhere")
    assert (contents(output), contents(tmp_path)) == (before, outside)


@pytest.mark.parametrize("name", ["mine.png", "loss_1.svg"])
def test_a_figure_of_the_users_is_not_overwritten(name, tmp_path):
    """One that no report made, and one that was changed since."""
    output = committed(tmp_path)
    (output / "figures" / name).write_text("mine")
    before = contents(output)
    with pytest.raises(UserError, match=rf"holds figures/{name}, which is not as a report wrote it"):
        put(tmp_path, output, name)
    assert contents(output) == before


def test_a_wrong_place_ends_the_command_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (committed(tmp_path) / "index.html").write_text("mine")
    shutil.copytree(REPOSITORY / "reports" / "laptop", tmp_path / "reports" / "laptop")
    assert cli.main(["report", "laptop", "--output", "report"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--output report holds index.html, which is not as a report wrote it" in line
    assert "move it elsewhere" in line


def test_a_list_cannot_name_a_file_elsewhere(tmp_path):
    """Neither by its path nor through a link."""
    output = committed(tmp_path)
    shutil.move(output / "figures", tmp_path / "figures")
    (output / "figures").symlink_to(tmp_path / "figures")
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (output / "link.html").symlink_to(victim)
    document = json.loads((output / "files.json").read_text())
    names = ("../victim.txt", str(victim), "link.html", "figures/../../victim.txt")
    digest = place._sha256(victim)
    document["files"] |= dict.fromkeys(names, digest)
    (output / "files.json").write_text(json.dumps(document))
    figures = contents(tmp_path / "figures")
    assert put(tmp_path, output) == []
    assert victim.read_text() == "mine"
    assert contents(tmp_path / "figures") == figures
    assert sorted(file.name for file in output.iterdir()) == ["figures", "files.json", "index.html", "link.html"]


@pytest.mark.parametrize("name", ["laptop", "paper_table1", "virtual_settings"])
def test_the_reports_in_git_have_their_list_and_are_known_without_it(name, tmp_path):
    folder = Path(shutil.copytree(REPOSITORY / "reports" / name, tmp_path / name))
    everything = set(contents(folder))
    listed = json.loads((folder / "files.json").read_text())["files"]
    assert {file: place._sha256(folder / file) for file in everything - {"files.json"}} == listed
    # As earlier versions left them.
    (folder / "files.json").unlink()
    (folder / "figures").mkdir(exist_ok=True)
    for mine in ("notes.html", "notes.ipynb", "figures/mine.png", "figures/mine.svg"):
        (folder / mine).write_text("mine")
    assert place.own_files(folder) == everything - {"files.json"}


def test_tables_that_were_made_again_by_hand_are_replaced(tmp_path):
    output = committed(tmp_path)
    write_parquet(dataclasses.replace(laptop(), refused=("another",)), output)
    assert {"runs.parquet", "steps.parquet"} <= place.own_files(output)
    (output / "runs.parquet").write_text("no table")
    assert "runs.parquet" not in place.own_files(output)


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    output = committed(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(output)
    assert place.place_of(link) == output.resolve()
    assert place.place_of(Path()) == Path.cwd()
    assert place.place_of(output) == output


KILLED = """
import os, signal, sys
from pathlib import Path
from study.report.site import place

renames = 0


def killed_before(event, arguments):
    global renames
    if event == "os.rename":
        renames += 1
        if renames > int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(killed_before)
place.put_in_place(Path(sys.argv[2]), Path(sys.argv[3]), print)
"""


@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_nothing_is_lost_when_it_is_killed_between_two_steps(renames, tmp_path):
    """The old report is whole or the new one is, and the next command brings back what was under way."""
    output = committed(tmp_path)
    (output / "figures" / "mine.png").write_text("mine")
    (output / "notes.txt").write_text("mine")
    before = contents(output)
    arguments = [sys.executable, "-c", KILLED, str(renames), str(rendered(tmp_path / "new", "loss_1.png")), str(output)]
    assert subprocess.run(arguments, check=False, env=os.environ).returncode == -signal.SIGKILL
    said: list[str] = []
    place.finish_earlier(output, said.append)
    after = contents(output)
    if renames < 2:
        assert after == before
    else:
        assert set(after) == {"index.html", "files.json", "figures/loss_1.png", "figures/mine.png", "notes.txt"}
        assert (after["notes.txt"], after["index.html"]) == (b"mine", b"new")
    assert said == []
    assert not list(tmp_path.glob(".report.before-*"))


def test_a_file_that_came_during_the_swap_is_kept_and_named(tmp_path):
    output = rendered(tmp_path / "report")
    place.write_list(output)
    before = tmp_path / ".report.before-x"
    before.mkdir()
    (before / "report").mkdir()
    (before / "report" / "index.html").write_text("mine")
    said: list[str] = []
    place.finish_earlier(output, said.append)
    assert (before / "report" / "index.html").read_text() == "mine"
    assert (output / "index.html").read_text() == "new"
    assert str(before) in said[0]
