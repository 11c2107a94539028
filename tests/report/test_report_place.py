from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from report_folders import committed, contents
from study import cli
from study.config.errors import UserError
from study.records.frames import read_parquet
from study.report.site import publishing
from synthetic_records import write_run


def rendered(folder: Path, *names: str, text: str = "new") -> Path:
    """Write a new report that is not in its place yet, with a first page and these files."""
    for name in ("index.html", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def publish(tmp_path: Path, output: Path, *names: str) -> None:
    publishing.publish_report(rendered(tmp_path / "new", *names), output)


def test_a_file_that_no_report_made_or_that_was_changed_since_is_not_overwritten(tmp_path):
    names = ("peak_memory.ipynb", "figures/mine.png", "figures/loss_1.svg")
    for place, name in enumerate((*names, "index.html", "figures")):
        output = committed(tmp_path / str(place))
        if name == "figures":
            shutil.move(output / name, output.parent / "elsewhere")
            (output / name).symlink_to(output.parent / "elsewhere")
        else:
            (output / name).write_text("mine")
        before = contents(output)
        with pytest.raises(UserError, match=f"report has {name}, which is not as a report wrote it"):
            publish(output.parent, output, *names)
        assert contents(output) == before


def test_a_folder_without_a_list_of_ours_is_refused(tmp_path):
    """Reports of earlier versions, too: their files cannot be distinguished from others."""
    output = committed(tmp_path)
    for text in ("mine", '{"made_by": "study report", "files": ["index.html"]}', None):
        (output / "files.json").unlink() if text is None else (output / "files.json").write_text(text)
        before = contents(output)
        with pytest.raises(UserError, match=r"report has \S+, and no files\.json of a report"):
            publish(tmp_path, output)
        assert contents(output) == before


def test_a_report_with_the_only_records_of_runs_is_replaced_only_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # This test does not draw figures.
    monkeypatch.setattr("study.report.site.build.run_notebooks", lambda *_: {})
    monkeypatch.setattr("study.report.site.build._write_pages", lambda *_: None)
    folder = tmp_path / "reports" / "mine"
    first, second = (write_run(tmp_path / "runs" / "mine", "ddp", seed=seed) for seed in (1, 2))
    assert cli.main(["report", "mine"]) == 0
    shutil.rmtree(first)
    before = contents(folder)
    assert cli.main(["report", "mine"]) == 2
    assert "1 runs of the report in reports/mine are not below runs" in capsys.readouterr().err
    assert contents(folder) == before
    third = write_run(tmp_path / "runs" / "mine", "ddp", seed=3)
    assert cli.main(["report", "mine", "--keep_missing"]) == 0
    merged = read_parquet(folder)
    assert list(merged.runs["run"]) == [first.name, second.name, third.name]
    assert set(merged.steps["run"]) == set(merged.runs["run"])
    shutil.rmtree(third)
    assert cli.main(["report", "mine", "--drop_missing"]) == 0
    assert list(read_parquet(folder).runs["run"]) == [second.name]


def test_a_list_cannot_name_a_file_elsewhere(tmp_path):
    """Neither by its path nor through a link."""
    output, victim = committed(tmp_path), tmp_path / "victim.txt"
    shutil.move(output / "figures", tmp_path / "figures")
    (output / "figures").symlink_to(tmp_path / "figures")
    victim.write_text("mine")
    (output / "link.html").symlink_to(victim)
    document = json.loads((output / "files.json").read_text())
    names = ("../victim.txt", str(victim), "link.html", "figures/../../victim.txt")
    document["files"] |= dict.fromkeys(names, hashlib.sha256(b"mine").hexdigest())
    (output / "files.json").write_text(json.dumps(document))
    figures = contents(tmp_path / "figures")
    publish(tmp_path, output)
    assert (victim.read_text(), contents(tmp_path / "figures")) == ("mine", figures)
    assert sorted(file.name for file in output.iterdir()) == [
        "figures",
        "files.json",
        "index.html",
        "link.html",
        "pages.json",
    ]


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


@pytest.mark.parametrize("earlier", [False, True])
def test_a_report_that_is_killed_anywhere_is_complete_after_the_next_one(earlier, tmp_path):
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        output, users = folder / "report", ("notes.txt", "figures/mine.svg") if earlier else ()
        if earlier:
            names = ("figures/loss_1.svg", "figures/gone.svg", "images/gone.png")
            publishing.publish_report(rendered(folder / "old", *names, text="old"), output)
        for name in users:
            (output / name).write_text("mine")
        new = rendered(folder / "new", "figures/loss_1.svg", "images/loss_2.png")
        killed = killed_before_change(number, new, output)
        before = contents(output) if output.exists() else {}
        assert before.get("index.html") != b"new" or "images/loss_2.png" in before, "the first page changes last"
        # The next report has other figures than the killed one.
        publish(folder / "next", output, "figures/loss_1.svg", "images/loss_3.png")
        after = contents(output)
        assert [after.pop(name) for name in users] == [b"mine"] * len(users)
        assert set(after) == {"index.html", "files.json", "pages.json", "figures/loss_1.svg", "images/loss_3.png"}
        committed_files, pages = (set(json.loads(after[name])["files"]) for name in ("files.json", "pages.json"))
        assert (committed_files, pages) == ({"figures/loss_1.svg"}, {"index.html", "images/loss_3.png"})
        if not killed:
            break
    # Two lists twice, the folders, three files, and the removed ones.
    assert number >= 9
