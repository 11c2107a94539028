"""Threads on GitHub about ZeRO's memory, speed and refusals: a command answers each as its resolution does."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines import ROOT
from study.cli import main

THREADS = yaml.safe_load((ROOT / "tests" / "threads.yaml").read_text(encoding="utf-8"))


def read_part(part: Any, key: str) -> Any:
    """Return the entry of a mapping, or of a list the one whose question or key begins so."""
    if isinstance(part, list):
        return next(item for item in part if item.get("question", item.get("key")).startswith(key))
    return part[key]


@pytest.mark.parametrize("thread", THREADS, ids=[thread["thread"] for thread in THREADS])
def test_a_command_answers_a_thread(thread, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, document in thread.get("files", {}).items():
        Path(name).parent.mkdir(exist_ok=True)
        # JSON is YAML.
        Path(name).write_text(json.dumps(document))
    command = shlex.split(thread["command"])
    assert main(command) == thread.get("status", 0)
    answer = " ".join(capsys.readouterr().out.split())
    assert [phrase for phrase in thread["says"] if not re.search(phrase, answer)] == [], answer
    if "figures" in thread:
        main([*command, "--json"])
        document = json.loads(capsys.readouterr().out)
        figures = {place: functools.reduce(read_part, place.split("/"), document) for place in thread["figures"]}
        assert figures == {key: pytest.approx(value, rel=most) for key, (value, most) in thread["figures"].items()}


def test_the_page_of_threads_has_each_with_its_command() -> None:
    page = (ROOT / "docs" / "threads.md").read_text(encoding="utf-8")
    rows = {line.split("](")[0].lstrip("| ["): line for line in page.splitlines() if line.startswith("| [")}
    assert list(rows) == [thread["thread"] for thread in THREADS]
    for thread in THREADS:
        name, options = re.findall(r"`study (\w+)([^`]*)`", rows[thread["thread"]])[0]
        assert thread["command"].startswith(name)
        assert set(re.findall(r"--\w+", options)) <= set(re.findall(r"--\w+", thread["command"]))
