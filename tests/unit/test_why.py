"""`study why`: each message is one of the installed code, and is found in a log as it is printed."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from study.advisor.why_command import find_messages, read_messages, read_text
from study.cli import COMMANDS, main
from study.config.errors import UserError

MESSAGES = read_messages()


def site_packages() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


@pytest.mark.parametrize("message", MESSAGES, ids=lambda it: it.id)
def test_a_message_is_one_of_the_installed_code(message) -> None:
    assert bool(message.file) != bool(message.place)
    assert message.says
    assert message.fix
    if message.file:
        source = (site_packages() / message.file).read_text(encoding="utf-8")
        # Python joins adjacent texts.
        joined = "".join(source.split()).replace('""', "")
        assert all("".join(text.split()) in joined for text in message.text), message.text
    if message.see:
        assert shlex.split(message.see)[:2] == ["study", message.see.split()[1]]
        assert message.see.split()[1] in COMMANDS


def test_ids_are_unique_and_no_message_finds_another() -> None:
    assert len({message.id for message in MESSAGES}) == len(MESSAGES)
    for message in MESSAGES:
        for text in message.text:
            assert [item.message.id for item in find_messages(text)] == [message.id]


def test_a_log_has_its_messages_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "step 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "[rank0]: Watchdog caught collective operation timeout\n"
        "[rank0]: Watchdog caught collective\n  operation timeout"
    )
    assert main(["why", str(log)]) == 0
    page = capsys.readouterr().out
    assert page.index("line 2, 2 times: [rank1]") < page.index("line 3, 2 times: [rank0]")
    assert "see: study predict MODEL" in page
    assert main(["why", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(item["id"], item["line"]) for item in document["messages"]] == [("out-of-memory", 2), ("watchdog", 3)]


def test_an_unknown_message_ends_with_3_and_a_missing_log_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "nothing", "of", "this", "kind"]) == 3
    assert "no message of this text is known" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"there is no file train\.log"):
        read_text(["train.log"])
    assert main(["why", "Attempting", "to", "unscale", "FP16", "gradients."]) == 0
    assert "do:  load the model in fp32" in " ".join(capsys.readouterr().out.split("\n"))


def test_what_a_log_has_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "\x1b[31mCUDA out of memory\x07"]) == 0
    assert "\x1b" not in capsys.readouterr().out
