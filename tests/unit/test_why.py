"""`study why`: each message is one of the installed code, and is found in a log as it is printed."""

from __future__ import annotations

import json
import shlex
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from study.advisor.full_gpu import read_full_gpu
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


REPORTED = yaml.safe_load((Path(__file__).parents[1] / "data" / "reported_messages.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("report", REPORTED, ids=lambda it: it["finds"][0])
def test_a_line_that_people_report_is_known(report) -> None:
    assert [item.message.id for item in find_messages(report["line"])] == report["finds"]


def test_a_log_has_its_messages_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "step 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "[rank0]: Watchdog caught collective operation timeout\n"
        "[rank0]: Watchdog caught collective\n  operation timeout"
    )
    assert main(["why", str(log)]) == 0
    page = capsys.readouterr().out
    assert page.index("line 2: [rank1]") < page.index("line 3, 2 times: [rank0]")
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


def test_a_message_that_no_file_name_can_have_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    # 255 bytes are the most, and these are 300 letters of three.
    assert main(["why", "内" * 300 + " CUDA out of memory"]) == 0
    assert "why: the peak of a rank exceeds the GPU" in capsys.readouterr().out


def test_a_log_with_a_message_in_each_of_many_lines_is_read_in_seconds() -> None:
    text = "".join(f"step {step} {'.' * 60}\nOVERFLOW! Rank 0 Skipping step.\n" for step in range(100_000))
    began = time.process_time()
    (message,) = find_messages(text)
    assert (message.line, message.count) == (2, 100_000)
    # Minutes, if each line were counted from the beginning.
    assert time.process_time() - began < 5


def test_what_a_log_has_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "\x1b[31mCUDA out of memory\x07"]) == 0
    assert "\x1b" not in capsys.readouterr().out


# torch's texts, by release.
FULL_GPU_FORMS = {
    "new": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {0}. GPU 0 has a total capacity of {1} of which "
        "{2} is free. {processes} Of the allocated memory {3} is allocated by PyTorch, {private}and {4} is reserved by "
        "PyTorch but unallocated."
    ),
    "old": (
        "RuntimeError: CUDA out of memory. Tried to allocate {0} (GPU 0; {1} total capacity; {3} already allocated; "
        "{2} free; {4} reserved in total by PyTorch)"
    ),
    "oldest": (
        "RuntimeError: CUDA out of memory. Tried to allocate {0} (GPU 0; {1} total capacity; {3} already allocated; "
        "{2} free; {4} cached)"
    ),
}
FULL_GPU_FORMS["typo"] = FULL_GPU_FORMS["new"].replace("capacity", "capacty")
FULL_GPUS = yaml.safe_load((Path(__file__).parents[1] / "data" / "full_gpus.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("report", FULL_GPUS, ids=lambda it: "-".join(it["source"].split("/")[-3::2]))
def test_the_figures_of_a_full_gpu_say_what_to_do(report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools = report.get("private", "0 bytes")
    private = f"with {pools} allocated in private pools (e.g., CUDA Graphs), "
    form = FULL_GPU_FORMS[report["form"]]
    text = form.format(*report["sizes"], processes=report.get("processes", ""), private=private)
    log = tmp_path / "train.log"
    # The next rank's figures are not of this message.
    another = FULL_GPU_FORMS["old"].format("1 GiB", "2 GiB", "9 GiB", "3 GiB", "4 GiB")
    log.write_text(f"[rank3]: {text}\n[rank0]: {another}")
    # A message in quotes is longer than a file's name may be.
    assert main(["why", text]) == 0
    assert "why: the peak of a rank exceeds the GPU" in capsys.readouterr().out
    assert main(["why", str(log), "--json"]) == 0
    (message,) = json.loads(capsys.readouterr().out)["messages"]
    assert len(message["do"]) == len(report["says"])
    for remedy, words in zip(message["do"], report["says"], strict=True):
        assert remedy.startswith(words)
    gpu = message["full_gpu"]
    assert gpu["capacity"] >= gpu["free"] + gpu["allocated"] + gpu["unused"]
    assert main(["why", str(log)]) == 0
    assert " in torch's pool without a tensor" in " ".join(capsys.readouterr().out.split())


def test_a_message_without_its_figures_has_no_parts() -> None:
    assert read_full_gpu("torch.OutOfMemoryError: CUDA out of memory.") is None
    assert read_full_gpu("Tried to allocate 2.00 GiB") is None
    (message,) = find_messages("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert message.memory is None
    assert message.remedies == [message.message.fix]
