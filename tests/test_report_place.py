"""A report replaces the old one completely, and never overwrites or removes a file that no report made."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from report_folders import committed, contents, laptop
from study import cli
from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.records.frames import read_parquet, write_parquet
from study.report.site import publishing
from synthetic_records import write_run


def rendered(folder: Path, *figures: str) -> Path:
    """Write a new report that is not in its place yet."""
    folder.mkdir(parents=True)
    (folder / "index.html").write_text("new")
    for figure in figures:
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / figure).write_text("new")
    return folder


def publish(tmp_path: Path, output: Path, *figures: str) -> None:
    publishing.publish_report(rendered(tmp_path / "new", *figures), output)


NO_LIST = r"report has \S+, and no files\.json of a report"


@pytest.mark.parametrize("name", ["peak_memory.ipynb", "summary.md", "files.json", "figures"])
def test_a_file_of_the_users_is_not_overwritten(name, tmp_path):
    output = committed(tmp_path)
    names = {file.name for file in output.iterdir()}
    if name == "figures":
        shutil.move(output / name, tmp_path / "elsewhere")
        (output / name).symlink_to(tmp_path / "elsewhere")
    else:
        (output / name).write_text("my own words")
    words = NO_LIST if name == "files.json" else f"report has {name}, which is not as a report wrote it"
    with pytest.raises(UserError, match=words):
        publishing.check_place(output, names)


@pytest.mark.parametrize("name", ["mine.png", "loss_1.svg"])
def test_a_figure_of_the_users_is_not_overwritten(name, tmp_path):
    """One figure is the user's, and one was changed since the report."""
    output = committed(tmp_path)
    (output / "figures" / name).write_text("mine")
    before = contents(output)
    with pytest.raises(UserError, match=rf"has figures/{name}, which is not as a report wrote it"):
        publish(tmp_path, output, name)
    assert contents(output) == before


def test_a_wrong_place_ends_the_command_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (committed(tmp_path) / "index.html").write_text("mine")
    shutil.copytree(REPOSITORY / "reports" / "laptop", tmp_path / "reports" / "laptop")
    before = contents(tmp_path)
    assert cli.main(["report", "laptop", "--output", "report"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--output report has index.html, which is not as a report wrote it" in line
    assert "move it elsewhere" in line
    assert contents(tmp_path) == before


def test_records_are_read_only_from_the_given_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "reports" / "laptop", tmp_path / "reports" / "laptop")
    before = contents(tmp_path)
    assert cli.main(["report", "laptop", "--runs_dir", "typo"]) == 2
    assert "--runs_dir typo has no records of laptop" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_report_with_the_only_records_of_runs_is_replaced_only_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # This test does not draw figures.
    monkeypatch.setattr("study.report.site.build.run_notebooks", lambda *_: {})
    monkeypatch.setattr("study.report.site.build._write_pages", lambda *_: None)
    first, second = (write_run(tmp_path / "runs" / "mine", "ddp", seed=seed) for seed in (1, 2))
    assert cli.main(["report", "mine"]) == 0
    shutil.rmtree(first)
    before = contents(tmp_path / "reports" / "mine")
    assert cli.main(["report", "mine"]) == 2
    assert "1 runs of the report in reports/mine are not below runs" in capsys.readouterr().err
    assert contents(tmp_path / "reports" / "mine") == before
    third = write_run(tmp_path / "runs" / "mine", "ddp", seed=3)
    assert cli.main(["report", "mine", "--keep_missing"]) == 0
    merged = read_parquet(tmp_path / "reports" / "mine")
    assert list(merged.runs["run"]) == [first.name, second.name, third.name]
    assert set(merged.steps["run"]) == set(merged.runs["run"])
    shutil.rmtree(third)
    assert cli.main(["report", "mine", "--drop_missing"]) == 0
    assert list(read_parquet(tmp_path / "reports" / "mine").runs["run"]) == [second.name]


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
    digest = hashlib.sha256(b"mine").hexdigest()
    document["files"] |= dict.fromkeys(names, digest)
    (output / "files.json").write_text(json.dumps(document))
    figures = contents(tmp_path / "figures")
    publish(tmp_path, output)
    assert victim.read_text() == "mine"
    assert contents(tmp_path / "figures") == figures
    assert sorted(file.name for file in output.iterdir()) == ["figures", "files.json", "index.html", "link.html"]


@pytest.mark.parametrize("how", ["none", "another's", "a link", "damaged"])
def test_a_folder_without_a_list_of_ours_is_refused(how, tmp_path):
    """Reports of earlier versions, too: their files cannot be distinguished from others."""
    output = committed(tmp_path)
    list_ = output / "files.json"
    if how == "a link":
        list_.rename(tmp_path / "files.json")
        list_.symlink_to(tmp_path / "files.json")
    else:
        list_.unlink()
    if how == "another's":
        list_.write_text('{"files": {"index.html": "0"}}')
    if how == "damaged":
        list_.write_text('{"made_by": "study report", "files": ["index.html"]}')
    before = contents(tmp_path)
    with pytest.raises(UserError, match=NO_LIST):
        publishing.check_place(output, ["index.html", "files.json"])
    assert contents(tmp_path) == before


def test_tables_without_a_list_are_replaced(tmp_path):
    """They are in a report, or in a folder without other files."""
    output = committed(tmp_path)
    write_parquet(dataclasses.replace(laptop(), refused=("another",)), output)
    publishing.check_place(output, ["runs.parquet", "steps.parquet"])
    (output / "runs.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"has runs\.parquet, which is not as a report wrote it"):
        publishing.check_place(output, ["runs.parquet", "steps.parquet"])
    write_parquet(laptop(), tmp_path / "tables")
    publish(tmp_path, tmp_path / "tables")
    assert set(contents(tmp_path / "tables")) == {"index.html", "files.json"}


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    output = committed(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(output)
    publish(tmp_path, link)
    assert link.is_symlink()
    assert set(contents(output)) == {"index.html", "files.json"}


def killed_before_change(number: int, new: Path, output: Path) -> bool:
    """Put a report in place in a process that is killed before its (n + 1)th change of a file."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    changes = 0

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        if event in ("os.rename", "os.remove", "os.mkdir") or (event == "open" and arguments[1] == "w"):
            changes += 1
            if changes > number:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(kill)
        publishing.publish_report(new, output)
        os._exit(0)
    finally:
        os._exit(1)


def old_report(output: Path) -> Path:
    """Write a report with files that the next one replaces, removes or does not touch."""
    new = rendered(output.with_name("old"), "loss_1.png", "gone.png")
    (new / "index.html").write_text("old")
    publishing.publish_report(new, output)
    for name in ("notes.txt", "figures/mine.png"):
        (output / name).write_text("mine")
    return output


@pytest.mark.parametrize("earlier", [False, True])
def test_a_report_that_is_killed_anywhere_is_complete_after_the_next_one(earlier, tmp_path):
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        output = old_report(folder / "report") if earlier else folder / "report"
        killed = killed_before_change(number, rendered(folder / "new", "loss_1.png", "loss_2.png"), output)
        # The next report has other figures than the killed one.
        publish(folder / "next", output, "loss_1.png", "loss_3.png")
        after = contents(output)
        user_files = {name: after.pop(name) for name in ("notes.txt", "figures/mine.png") if earlier}
        assert set(user_files.values()) <= {b"mine"}
        assert set(after) == {"index.html", "files.json", "figures/loss_1.png", "figures/loss_3.png"}
        assert set(listed(output)) == set(after) - {"files.json"}
        if not killed:
            break
    # Two lists, two folders, three files, and the removed one.
    assert number >= 7


def test_the_first_page_is_the_last_file_to_change(tmp_path):
    output = old_report(tmp_path / "report")
    for number in itertools.count():
        assert killed_before_change(number, rendered(tmp_path / f"new-{number}", "loss_1.png", "loss_2.png"), output)
        if (output / "figures" / "loss_2.png").exists():
            break
    assert (output / "index.html").read_text() == "old"


def listed(folder: Path) -> dict[str, str]:
    document = json.loads((folder / "files.json").read_text())
    assert document["made_by"] == "study report"
    return dict(document["files"])
