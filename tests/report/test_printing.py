"""The one printer of the commands: a row is a line in a file, wrapped at its last column on a terminal."""

from __future__ import annotations

import io
import sys
import time

import pytest

from engines import Terminal, print_screen
from study.advisor import advise_command, doctor, explain, predict_command
from study.cli import main
from study.config import printing
from study.config.errors import UserError
from study.config.printing import TextTable, print_page, print_result

PAGE: list[str | TextTable] = [
    "note " * 30,
    TextTable(("name", "count", "reason"), [("a\x1b[31m", "12.5", "word " * 30), ("bb", "-", "")]),
]


def printed(out: io.StringIO) -> list[str]:
    print_page(PAGE, out)
    return out.getvalue().splitlines()


def test_in_a_file_a_note_and_a_row_are_one_line_and_figures_are_aligned_to_the_right(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    note, header, first, second = printed(io.StringIO())
    assert note == PAGE[0]
    assert first.startswith("a\N{REPLACEMENT CHARACTER}[31m")
    assert first.endswith("word word")
    assert header.index("count") + 5 == first.index("12.5") + 4 == second.index("-") + 1


def test_a_page_without_details_ends_at_line_25_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for details, last in ((False, "and 6 more lines; --details prints all"), (True, "line 29")):
        monkeypatch.setattr(sys, "stdout", out := Terminal())
        print_result(False, dict, [f"line {number}" for number in range(30)], details)
        lines = out.getvalue().splitlines()
        assert (len(lines), lines[-1]) == (30 if details else 25, last)


@pytest.mark.parametrize(
    "command",
    [
        "advise gpt2 --hardware 8xH100",
        "predict gpt2 --strategy zero3 --hardware 8xH100",
        "explain accelerate_configs/zero3.yaml gpt2 --hardware 8xH100",
    ],
)
def test_a_command_shows_that_it_works_after_a_second_and_only_on_a_terminal(command, monkeypatch, capsys):
    def stand_for_long_work(*_, **__):
        time.sleep(0.3)
        raise UserError("the work took longer", "nothing")

    for module in (advise_command, predict_command, explain):
        monkeypatch.setattr(module, "model_shape", stand_for_long_work)
    starts = []
    for silent_s, out in ((0.1, Terminal()), (1.0, Terminal()), (0.1, io.StringIO())):
        monkeypatch.setattr(printing, "_SILENT_S", silent_s)
        monkeypatch.setattr(sys, "stderr", out)
        assert main(command.split()) == 2
        starts.append(out.getvalue().partition("error: ")[0])
    line, *silent = starts
    message = line.partition("\r")[0]
    assert message.endswith(" ...")
    # The line is erased before the answer.
    assert line == f"{message}\r{' ' * len(message)}\r"
    assert silent == ["", ""]


def test_a_line_within_another_one_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    monkeypatch.setattr(printing, "_SILENT_S", 0.02)
    with printing.progress_line("comparing"):
        time.sleep(0.2)
        with printing.progress_line("tracing", in_logs=True):
            time.sleep(0.2)
    blank = {text: f"\r{' ' * len(text)}\r" for text in ("comparing", "tracing")}
    assert err.getvalue() == f"comparing{blank['comparing']}tracing{blank['tracing']}"


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("200", 120)])
def test_on_a_terminal_only_words_wrap(columns: str, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": columns, "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    lines = printed(Terminal())
    assert widest - 10 < max(map(len, lines)) <= widest
    assert [line.split()[:2] for line in lines if "12.5" in line] == [["a\N{REPLACEMENT CHARACTER}[31m", "12.5"]]


@pytest.mark.parametrize(
    "command",
    [
        "advise llama-3.1-8b --hardware 8xH100 --peft lora",
        "predict gemma-2-9b --strategy zero3_nvme --hardware 4090",
        "explain accelerate_configs/zero3.yaml llama-3.1-8b --hardware 8xH100",
        "doctor",
        "releases",
    ],
)
def test_an_answer_fits_a_screen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A probe imports the engines; test_doctor.py has real ones.
    facts = [doctor.Check(name, "ok", "fact " * 50) for name in doctor._PROBED]
    monkeypatch.setattr(doctor, "_probe", lambda *_: facts)
    screen = print_screen(command, monkeypatch)
    assert 5 < len(screen) <= 25
    assert max(map(len, screen)) <= 120
