"""One rank of N without the others: memory and communication of a real rank, and no losses."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT, launch
from runs import FLAGS, RunFactory, trained
from study.config.strategies import WITH_GROUPS
from study.host.memory import HOST_MEMORY_VARIABLE
from study.predictor.memory import predict_memory
from study.predictor.recorded_runs import SENT, compare_run_figures, request_from_record
from study.records.directory import Run, read_run, read_status
from study.records.frames import read_records
from study.records.virtual_summary import summarize_record
from study.report.questions.virtual import settings_table
from study.virtual.extrapolation import extrapolate
from study.virtual.summaries import summaries
from sweeps import wait_until

GPT, LORA = ("--task", "gpt-wikitext"), ("--peft", "lora")
# Rank 0 with each kind of engine; the first and last rank with every strategy are among the long tests.
QUICK = (("zero2", 2), ("zero3_cpu", 2), ("fsdp2", 2), ("hsdp", 4), ("zero3_hpz", 4), ("zero2_tp", 2))
ALL = (
    "ddp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2_cpu",
    "zero3_cpu_optimizer",
    "zero3_cpu",
    "zero3_nvme_optimizer",
    "zero3_nvme",
    "zero3_cpu_nvme",
    "fsdp2",
    *(name for name in WITH_GROUPS if "zero" in name),
)


def virtual(strategy: str, output_dir: Path, *flags: str, ranks: int = 2, rank: int = 0) -> Run:
    """Run a virtual rank with FLAGS, but without evaluations, which virtual runs do not have."""
    job = ("--virtual_world_size", str(ranks), "--virtual_rank", str(rank), "--eval_steps", "0")
    return trained(strategy, output_dir, *GPT, *job, *flags, ranks=1)


def study(runs_dir: Path, request: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "study.cli", "virtual", "--runs_dir", str(runs_dir), *request.split()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def assert_same_rank(imagined: Run, real_run: Run, rank: int) -> None:
    (rank_memory,), expected = imagined.memory["ranks"], real_run.memory["ranks"][rank]
    assert rank_memory["rank"] == expected["rank"] == rank
    assert rank_memory["state"]["state_bytes"] == expected["state"]["state_bytes"]
    assert rank_memory["state"]["buffer_bytes"] == expected["state"]["buffer_bytes"]
    if rank == 0:
        # The record has the traffic of rank 0.
        assert imagined.traffic == real_run.traffic | {"collectives": without_gloo(real_run)}


def without_gloo(run: Run) -> dict[str, dict[str, Any]]:
    """Return the counts of each collective without what gloo sends: it does not connect virtual ranks."""
    return {
        kind: {key: count[key] for key in count if key != "gloo_bytes_per_rank"}
        for kind, count in run.traffic["collectives"].items()
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("strategy", "ranks", "chosen", "flags"),
    [
        *((strategy, ranks, [0], ()) for strategy, ranks in QUICK),
        ("zero2", 2, [0], LORA),
        ("zero3", 2, [0], LORA),
        *(
            pytest.param(strategy, ranks, [0, ranks - 1], (), marks=pytest.mark.long)
            for ranks in (2, 4)
            for strategy in ALL
        ),
        *(
            pytest.param(strategy, 2, [0], LORA, marks=pytest.mark.long)
            for strategy in ("ddp", "fsdp2", "zero1", "zero3_cpu", "zero2_cpu")
        ),
    ],
)
def test_state_and_communication_of_a_virtual_rank_are_a_real_one_s_to_the_byte(
    get_run: RunFactory, strategy: str, ranks: int, chosen: list[int], flags: tuple[str, ...], tmp_path: Path
) -> None:
    real_run = get_run(strategy, *GPT, *flags, ranks=ranks)
    for rank in chosen:
        assert_same_rank(virtual(strategy, tmp_path / str(rank), *flags, ranks=ranks, rank=rank), real_run, rank)


def exact_peaks(strategy: str, output_dir: Path, *flags: str, ranks: int) -> Run:
    """Run the probe on a model large enough that gloo's threads and buffers, some MiB, are below a percent."""
    result = launch(
        strategy,
        "tests/probes/exact_peaks.py",
        *FLAGS,
        *GPT,
        "--model_name_or_path",
        "gpt2-2layers",
        "--seq_length",
        "16",
        "--max_steps",
        "3",
        "--eval_steps",
        "0",
        *flags,
        "--output_dir",
        str(output_dir),
        ranks=ranks,
        timeout=800,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return read_run(output_dir)


def predicted_gib(record: Any) -> float:
    memory = predict_memory(request_from_record(record))
    return float(memory.peak_allocated.value + memory.host_parts["rank"]) / 2**30


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the probe sets glibc to keep no freed memory")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero0", "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu", "fsdp2"])
def test_the_peak_of_a_virtual_rank_is_that_of_a_real_one_within_2_percent(strategy, ranks, tmp_path):
    """Only during the steps: before them a virtual rank draws weights that a real one reads from a file."""
    kinds = {"real": (ranks, ()), "virtual": (1, ("--virtual_world_size", str(ranks)))}
    peaks = {}
    for kind, (processes, job) in kinds.items():
        run = exact_peaks(strategy, tmp_path / kind, "--global_batch_size", "4", *job, ranks=processes)
        phases = run.memory["ranks"][0]["phases"]
        peaks[kind] = {phase: phases[phase]["host"] for phase in ("first_step", "steady")}
    assert peaks["virtual"] == pytest.approx(peaks["real"], rel=0.02)
    record = next(run for run in read_records(tmp_path).runs.itertuples() if not run.virtual)
    assert predicted_gib(record) == pytest.approx(peaks["real"]["steady"], rel=0.05)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the probe sets glibc to keep no freed memory")
@pytest.mark.long
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2", 8), ("hsdp", 4)])
def test_accumulating_fsdp_has_unpartitioned_gradients_and_reduces_once_a_step(strategy, ranks, tmp_path):
    peaks = []
    for accumulation in (1, 4):
        output_dir = tmp_path / str(accumulation)
        batch = ("--per_device_train_batch_size", "1", "--global_batch_size", str(ranks * accumulation))
        run = exact_peaks(strategy, output_dir, *batch, "--virtual_world_size", str(ranks), ranks=1)
        record = next(read_records(output_dir).runs.assign(suite="").itertuples())
        (sent,) = (single for single in compare_run_figures(record) if single.figure == SENT)
        assert sent.predicted == pytest.approx(sent.measured, rel=1e-4)
        peaks.append((run.memory["ranks"][0]["phases"]["steady"]["host"], predicted_gib(record)))
    (single, single_predicted), (several, several_predicted) = peaks
    assert several > 1.1 * single
    assert (single_predicted, several_predicted) == pytest.approx((single, several), rel=0.05)


def test_the_last_of_a_thousand_ranks_has_the_padding_and_no_loss_is_kept(tmp_path: Path) -> None:
    flags = ("--global_batch_size", "1024", "--train_samples", "1024", "--max_steps", "3")
    run = virtual("zero3", tmp_path / "run", *flags, ranks=1024, rank=1023)
    assert run.engine["virtual"] is True
    assert (run.engine["world_size"], run.engine["virtual_rank"]) == (1024, 1023)
    assert run.engine["initial_weights_sha256"] is None
    assert run.engine["floor"] is None
    assert run.evals == []
    assert {(row["loss"], row["grad_norm"], row["step_time_s"]) for row in run.steps} == {(None, None, None)}
    figures = {key for key, value in run.summary.items() if value is not None}
    assert not {key for key in figures if "loss" in key or "accuracy" in key or "perplexity" in key}
    assert not figures & {"tokens_per_s", "samples_per_s", "tokens_per_s_per_device", "mfu", "energy_j"}
    assert any(warning.startswith("virtual: rank 1023 of 1024") for warning in run.engine["warnings"])


def test_no_step_of_four_ranks_is_skipped_for_the_content_of_an_unwritten_file(tmp_path: Path) -> None:
    """One parameter's shard is on NVMe there. A skipped first step would leave Adam without its two moments."""
    run = virtual("zero3_nvme", tmp_path / "run", ranks=4)
    state = run.memory["ranks"][0]["state"]
    assert state["pieces"]["params.nvme.swap_files"] == 4 * (4096 // 4) * 256
    assert state["state_bytes"]["optimizer"]["nvme"] == 3 * state["state_bytes"]["grads"]["host"]
    assert "OVERFLOW" not in (run.path / "log.txt").read_text()


@pytest.mark.long
def test_parameters_on_nvme_release_their_buffers_before_these_run_out(tmp_path: Path) -> None:
    """Ten parameters share five buffers, so none may keep its buffer for the next use."""
    flags = ("--model_name_or_path", "gpt2-2layers", "--max_steps", "3", "--global_batch_size", "2")
    run = virtual("zero3_nvme", tmp_path / "run", *flags)
    assert run.state == "ok"
    assert run.engine["buckets"]["max_reuse_distance"] == 0


def test_the_third_step_communicates_as_a_later_one_of_a_real_rank(get_run: RunFactory, tmp_path: Path) -> None:
    third, real_run = virtual("zero3", tmp_path / "third", "--max_steps", "3"), get_run("zero3", *GPT)
    assert (third.traffic["step"], real_run.traffic["step"]) == (3, 4)
    assert third.traffic["collectives"] == without_gloo(real_run)


@pytest.mark.long
def test_three_depths_are_extrapolated_and_the_json_is_one_document_with_the_fit(tmp_path: Path) -> None:
    flags = "--strategy zero2 --world_size 8 --layers_fit 3,4,6 --precision bf16 --seq_length 16 --json"
    result = study(tmp_path, f"--model_name_or_path gpt-tiny-12layers {flags}")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["precision"] == "bf16-engine"
    assert summary["extrapolated"]["layers"] == 12
    assert (summary["extrapolated"]["depths"], summary["extrapolated"]["checked_at_depth"]) == ([3, 4], 6)
    assert summary["extrapolated"]["largest_residual_of_state"] < 1e-4
    runs = [read_run(Path(path)) for path in summary["extrapolated"]["run_dirs"]]
    assert [run.engine["model_layers"] for run in runs] == [3, 4, 6]
    assert {run.config["seq_length"] for run in runs} == {16}
    # The extrapolation also matches the third depth, which was measured.
    depths = [summarize_record(run) for run in runs]
    line = extrapolate(depths, "gpt-tiny-6layers", 6)
    assert line["model_parameters"] == depths[2]["model_parameters"]
    assert line["state_bytes_total"] == pytest.approx(depths[2]["state_bytes_total"], rel=1e-4)
    # The report finds the three depths itself, and extrapolates to the preset's two layers.
    records = read_records(tmp_path)
    (row,) = summaries(records)
    assert (row["model"], row["setting"], row["extrapolated"]["layers"]) == ("gpt-tiny", "as shipped", 2)
    assert settings_table(records)["Made by"].tolist() == ["layers 3, 4 of 2"]


@pytest.mark.long
def test_a_refusal_halfway_keeps_the_measured_depths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = f"--strategy ddp,zero3_nvme --world_size 2 --nvme_path {tmp_path}/file/nvme --json"
    result = study(tmp_path / "runs", flags)
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert [run["strategy"] for run in document["runs"]] == ["ddp"]
    (failed,) = document["failed"]
    assert (failed["strategy"], failed["state"]) == ("zero3_nvme", "refused")
    assert "cannot be a folder" in failed["reason"]


@pytest.mark.long
def test_ctrl_c_is_one_line_and_ends_the_rank(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "study.cli",
        "virtual",
        "--strategy",
        "zero0",
        "--world_size",
        "2",
        "--max_steps",
        "100000",
        "--runs_dir",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: any(file.stat().st_size for file in tmp_path.glob("*/steps.jsonl")))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.splitlines() == ["zero0: stopped from the keyboard; all of its processes have ended"]
    (record,) = (file.parent for file in tmp_path.glob("*/status.json"))
    status = read_status(record)
    assert (status["state"], "another rank" in status["reason"]) == ("interrupted", False)


def test_a_model_that_does_not_fit_is_one_line_that_names_the_extrapolation(tmp_path: Path) -> None:
    result = study(tmp_path, "--strategy ddp --world_size 2 --model_name_or_path gpt-1t")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "one rank of ddp on 2 needs about" in line
    assert "--layers_fit" in line


@pytest.mark.long
@pytest.mark.timeout(900)
def test_depths_beyond_a_threshold_are_used_if_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About 14 of 36 layers fit, and from the sixth on stage 3 gathers twice."""
    monkeypatch.setenv(HOST_MEMORY_VARIABLE, "1.52")
    names = ("live_parameters", "reuse_distance")
    flags = (
        "--model_name_or_path",
        "gpt-tiny-36layers",
        *(f"--engine_override=zero_optimization.stage3_max_{name}=4170000" for name in names),
    )
    request = ("--strategy zero3 --world_size 16 --precision bf16 --json", *flags)
    result = study(tmp_path, " ".join(request), timeout=800)
    assert result.returncode == 0, result.stderr
    assert "extrapolating from 6 to 8 layers" in result.stderr
    summary = json.loads(result.stdout)
    fit = summary["extrapolated"]
    assert (fit["depths"], fit["checked_at_depth"], fit["crossed"]) == ([6, 7], 8, [])
    assert fit["whole_model"]["state"] == "unsupported"
    # The full model, which gathers released parameters a second time.
    monkeypatch.delenv(HOST_MEMORY_VARIABLE)
    steps = ("--precision", "bf16-engine", "--global_batch_size", "16", "--max_steps", "3")
    full = virtual("zero3", tmp_path / "whole", *flags, *steps, ranks=16)
    assert summary["collectives"] == full.traffic["collectives"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_papers_7_5_b_on_64_ranks_has_the_papers_state(tmp_path: Path) -> None:
    """Stages 1 and 2, which are extrapolated, are in the records of the suite paper_table1."""
    flags = "--strategy zero3 --world_size 64 --model_name_or_path gpt-7.5b --precision bf16 --seq_length 16 --json"
    result = study(tmp_path, flags, timeout=1700)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["state_bytes_total"] == pytest.approx(1.88e9, rel=0.01)
    assert summary["extrapolated"] is None
    assert summary["host_peak_rss_gib"] < 12
