"""What was found by trying: each of these was a traceback, minutes of silence, or a run of something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_records import write_run
from test_refusals import assert_is_one_line, assert_refused

from engines import ROOT
from study.cli import main
from study.config.errors import Unsupported, UserError
from study.config.flags import RunConfig
from study.config.strategies import read_strategy
from study.engine.setup import check_engine_settings
from study.records.directory import read_run
from study.records.schema import RecordError

NOBODY = "~nobody-of-this-name/x"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["run", "x" * 300], "no suite is called"),
        (["status", "x" * 300], "no suite is called"),
        (["run", "laptop", "--runs-dir", ""], "--runs-dir: is empty"),
        (["status", "laptop", "--runs-dir", "/dev/null"], "--runs-dir: /dev/null is no folder"),
        (["report", "laptop", "--output", ""], "--output: is empty"),
        (["report", "laptop", "--runs-dir", NOBODY], "nobody's home"),
        (["report", "laptop", "--output", "x\udcff"], "holds what cannot be printed"),
        (["report", ".."], "no suite is called"),
        (["virtual", "--strategy", "zero3", "--world-size", "4", "--data", NOBODY], "nobody's home"),
        (["virtual", "--strategy", "zero3", "--world-size", "9" * 5000], "--world-size"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_command_that_cannot_be_served_ends_in_one_line(
    command: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert_is_one_line(printed.err, (says,), "")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_suite_is_told_what_a_suite_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert main(["status", str(tmp_path / "empty.yaml")]) == 2
    assert_is_one_line(capsys.readouterr().err, ("empty.yaml: nothing stands where a mapping belongs",), "grids, name")


def test_a_time_budget_has_no_upper_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "laptop", "--dry-run", "--time-budget", "9" * 400 + "m"]) == 0


GPT = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 64}


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ({"n_layer": 0}, "0 layers of"),
        ({"n_layer": 10**9}, "1000000000 layers of"),
        ({"n_head": 3}, "divisible"),
        ({"n_head": 0}, "cannot be built"),
        ({"n_embd": 10**12}, "cannot be built"),
        ({"vocab_size": 10}, "knows 10"),
    ],
    ids=str,
)
def test_a_config_that_describes_no_model_is_refused(architecture: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT | architecture))
    flags = ("--scale", "laptop", "--task", "gpt-wikitext", "--seq_length", "32", "--model_name_or_path", str(folder))
    assert_refused(tmp_path, *flags, says=(str(folder), says), fix="")


def test_a_home_folder_of_nobody_is_refused_wherever_a_path_is_given(tmp_path: Path) -> None:
    for flag in ("--data", "--output_dir"):
        assert_refused(tmp_path, "--scale", "laptop", flag, NOBODY, says=(NOBODY, "nobody's home"), fix="whole path")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("zero_optimization.nonsense=1", "zero_optimization.nonsense: Extra inputs"),
        ('zero_optimization.reduce_bucket_size="x"', "zero_optimization.reduce_bucket_size: Input should be a valid"),
        ("zero_optimization.reduce_bucket_size=-5", "greater than 0"),
        ("zero_optimization.stage=9", "zero_optimization.stage"),
        ("zero_optimization=[1]", "refuses zero_optimization"),
        ('zero_optimization.offload_optimizer="cpu"', "zero_optimization.offload_optimizer"),
        # DeepSpeed leaves these out in silence, and the record would say that they were set.
        ("zero_optimisation.reduce_bucket_size=5e6", "no setting zero_optimisation"),
        ("nonsense=1", "no setting nonsense"),
        ("train_batch_size=7", "the batch of the run decides it"),
        ("gradient_accumulation_steps=2", "the batch of the run decides it"),
    ],
)
def test_an_engine_setting_that_deepspeed_does_not_know_is_refused(setting: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_engine_settings(RunConfig(engine_override=(setting,)), read_strategy("zero2"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a box without a GPU is told")
@pytest.mark.parametrize(
    "key",
    [
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.offload_optimizer.super_offload",
        "compile.deepcompile",
    ],
)
def test_a_setting_for_gpus_alone_is_unsupported_without_one(key: str) -> None:
    on, off = (RunConfig(engine_override=(f"{key}={value}",), torch_compile=True) for value in ("true", "false"))
    with pytest.raises(Unsupported, match=f"{key} runs on GPUs alone"):
        check_engine_settings(on, read_strategy("zero3_cpu"))
    check_engine_settings(off, read_strategy("zero3_cpu"))


def test_deepcompile_without_compiling_is_refused() -> None:
    with pytest.raises(UserError, match="does nothing in a model that is not compiled"):
        check_engine_settings(RunConfig(engine_override=("compile.deepcompile=true",)), read_strategy("zero3"))


def test_the_engine_settings_of_the_suites_are_taken() -> None:
    for setting in (
        "zero_optimization.use_multi_rank_bucket_allreduce=false", "zero_optimization.overlap_comm=true",
        'zero_optimization.reduce_bucket_size="auto"', "aio.block_size=16777216", "communication_data_type=\"fp32\"",
        "gradient_clipping=0.25", "zero_optimization.stage3_param_persistence_threshold=0",
    ):  # fmt: skip
        check_engine_settings(RunConfig(engine_override=(setting,)), read_strategy("zero3"))


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    for command in (str(ROOT / "study/train.py"), "-m study.cli status laptop"):
        result = subprocess.run(
            ["bash", "-c", f"mkdir -p {gone} && cd {gone} && rmdir {gone} && {sys.executable} {command}"],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 2
        assert_is_one_line(result.stderr, ("folder in which this was started",), "change to one")


def test_threads_that_are_no_number_are_refused_before_accelerate_reads_them() -> None:
    for words in (["-m", "study.cli", "status", "laptop"], ["study/train.py", "--help"]):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "abc"}
        result = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert result.returncode == 2
        assert_is_one_line(result.stderr, ("OMP_NUM_THREADS is 'abc', which is no number",), "unset it, or set it to")


CONSOLE = """
import os, pathlib, sys
from study.host.folders import check_process
from study.run.console import Console
check_process()
kept = open(sys.argv[1], "w")
console = Console(speaks=True)
console.say("once")
console.say("twice")
console.log_to(pathlib.Path(sys.argv[2]))
print("noise")
os.write(2, b"noise")
progress = console.progress(10, 0)
progress.show(10, 1.0, 2.0, 3.0)
progress.close()
console.restore()
print("after")
print("after", file=sys.stderr)
os.system("echo of a child")
kept.write("mine")
"""


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>&-", ">&-", "2>&1 | true", "2>/dev/full >/dev/full"])
def test_a_run_goes_on_where_nobody_reads_what_it_says(streams: str, tmp_path: Path) -> None:
    kept, log, code = tmp_path / "kept", tmp_path / "log.txt", tmp_path / "code.py"
    code.write_text(CONSOLE if "full" not in streams and "true" not in streams else CONSOLE.split("console.restore")[0])
    # The pipe has lost its reader before the first word.
    wait = "sleep 0.2; " if "true" in streams else ""
    subprocess.run(
        ["bash", "-c", f"({wait}{sys.executable} {code} {kept} {log}; echo $? > {tmp_path}/status) {streams}"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert (tmp_path / "status").read_text() == "0\n"
    assert log.read_text().count("noise") == 2
    if "kept.write" in code.read_text():
        # Nothing that was printed went into a file that had been opened with the number of a closed stream.
        assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "status"), [("status laptop", 0), ("run laptop --dry-run", 0), ("weights paper_table1", 1)]
)
def test_a_reader_that_has_read_enough_is_no_error_of_what_only_shows(command: str, status: int) -> None:
    """What starts runs has not told how they ended."""
    script = f"(sleep 0.2; {sys.executable} -m study.cli {command}) | true; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (status, "")


def test_a_cache_that_cannot_be_is_what_the_doctor_names_and_not_the_installation() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ZERO_STUDY_CACHE": "/proc/x"}
    command = [sys.executable, "-m", "study.advisor.doctor_probe"]
    probed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(probed) > 5
    for line in probed:
        check = json.loads(line)
        assert (check["state"], "/proc/x" in check["found"]) == ("missing", True)
        assert "ZERO_STUDY_CACHE" in check["fix"]


def test_operators_that_have_no_place_are_refused_in_one_line() -> None:
    """`make install` ends with it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ZERO_STUDY_CACHE": "/proc/x"}
    command = [sys.executable, "-m", "study.host.operators"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the cache /proc/x is not writable")
    assert "ZERO_STUDY_CACHE" in line


def test_a_record_whose_file_is_a_pipe_or_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("steps.jsonl", "status.json", "config.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(RecordError, match="not a regular file"):
            read_run(run)
    for make, problem in ((Path.mkdir, "none is a run's"), (os.mkfifo, "neither a file nor a folder")):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / "status.json")
        flags = ("--overwrite_output_dir", "--output_dir", str(folder))
        assert_refused(tmp_path, *flags, says=(problem,), fix="new folder")
