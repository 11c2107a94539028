"""The meters, compared with figures derived by hand, on real engines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from engines import ROOT
from runs import RunFactory, trained
from study.host.stacks import ENGINES_ONLY_VARIABLE
from study.metrics import Meters, flops
from study.metrics.clock import EnergyMeter, StepClock, step_time_statistics, warmup_steps
from study.metrics.flops import matmul_tflops, measure_matmul_rates
from study.metrics.inventory import ForwardWatch
from study.metrics.memory import MemoryMeter
from study.metrics.traffic import TrafficWatch
from study.predictor.models import model_shape
from study.predictor.recorded_runs import ALL_STATE, SENT, compare_run_figures, request_from_record
from study.predictor.zero3_gathers import simulate_gathers
from study.records.directory import Run
from study.records.frames import read_records

CPU = torch.device("cpu")
MIB = 2**20
FP32 = 4
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run_steps(clock: StepClock, steps: range, seconds: float) -> None:
    for step in steps:
        time.sleep(seconds)
        clock.step_done(step)


@pytest.mark.alone
def test_every_step_has_its_time_and_warm_up_enters_no_statistic() -> None:
    """Neither do pauses nor the watched step."""
    segments: list[tuple[bool, bool]] = []
    clock = StepClock(CPU, warmup_steps=2, on_segment=lambda *segment: segments.append(segment))
    clock.resume()
    run_steps(clock, range(1, 3), 0.03)
    run_steps(clock, range(3, 6), 0.01)
    clock.pause()
    time.sleep(0.2)
    clock.resume()
    run_steps(clock, range(6, 7), 0.01)
    clock.exclude_next_step()
    run_steps(clock, range(7, 8), 0.05)
    run_steps(clock, range(8, 9), 0.01)
    clock.pause()
    times = dict(clock.flush())
    assert list(times) == list(range(1, 9))
    assert [times[step] >= least for step, least in ((1, 0.03), (2, 0.03), (7, 0.05))] == [True] * 3
    assert clock.counted_step_times == [times[step] for step in (3, 4, 5, 6, 8)]
    assert clock.window_steps == 5
    assert clock.window_s == pytest.approx(sum(clock.counted_step_times), abs=0.005)
    assert max(clock.counted_step_times) < 0.1
    assert clock.flush() == []
    # (counted, opened): warm-up, steps, a step after the pause, the watched step, another step.
    kinds = (False, True, True, False, True)
    assert segments == [(kind, opened) for kind in kinds for opened in (True, False)]


def test_the_step_after_an_evaluation_is_not_counted_where_evaluations_are_far_enough_apart() -> None:
    clock = StepClock(CPU, warmup_steps=1)
    clock.resume()
    for steps in (range(1, 7), range(7, 10), range(10, 16), range(16, 17)):
        run_steps(clock, steps, 0)
        clock.pause()
        clock.resume_cold()
    run_steps(clock, range(17, 18), 0)
    clock.pause()
    times = dict(clock.flush())
    # Step 1 warms up; 7 and 16 follow an evaluation, 10 and 17 one that came soon after another.
    assert clock.counted_step_times == [seconds for step, seconds in times.items() if step not in (1, 7, 16)]


def test_statistics_are_percentiles_and_null_without_steps_and_a_fifth_of_a_run_warms_up() -> None:
    """Warm-up has at least 3 steps, which suits probes of a search and virtual ranks, and at most 10."""
    assert [warmup_steps(steps) for steps in (3, 8, 19, 20, 40, 50, 1000)] == [3, 3, 3, 4, 8, 10, 10]
    statistics = step_time_statistics([float(value) for value in range(101)])
    assert statistics == {"step_time_s_p10": 10.0, "step_time_s_median": 50.0, "step_time_s_p90": 90.0}
    assert set(step_time_statistics([]).values()) == {None}


def test_a_host_peak_belongs_to_its_phase_keeps_its_largest_and_is_in_no_step() -> None:
    meter = MemoryMeter(CPU)
    meter.enter_phase("steady")
    meter.step_done()
    for mib in (64, 1):
        with meter.phase("eval"):
            torch.ones(mib * MIB // FP32)
    phases = meter.report()["phases"]
    assert phases["eval"]["host"] > phases["steady"]["host"] + 48 * MIB
    with meter.phase("eval"):
        tensor = torch.ones(64 * MIB // FP32)
    assert meter.report()["phases"]["steady"] == phases["steady"]
    meter.step_done()
    assert tensor.numel()
    assert meter.report()["phases"]["steady"]["host"] > phases["steady"]["host"] + 48 * MIB


def test_the_rate_of_products_is_of_fp32_and_counts_a_product_and_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    # A CPU without bf16 takes seconds for a product of the usual size.
    monkeypatch.setitem(flops._SIZE, "cpu", 64)
    torch.set_float32_matmul_precision("high")
    assert measure_matmul_rates(seconds=0.01)["tflops"]["fp32"] > 0
    assert torch.get_float32_matmul_precision() == "highest", "TF32 was measured"
    half_a_second = SimpleNamespace(blocked_autorange=lambda **_: SimpleNamespace(median=0.5))
    monkeypatch.setattr("torch.utils.benchmark.Timer", lambda *_, **__: half_a_second)
    assert matmul_tflops(CPU, torch.float32, 100) == pytest.approx(2 * 100**3 / 0.5 / 1e12)


@pytest.mark.gpu
@on_gpu
def test_gpu_peaks_belong_to_their_phase() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    meter = MemoryMeter(device)
    meter.enter_phase("steady")
    with meter.phase("eval"):
        torch.ones(256 * MIB // FP32, device=device)
    torch.cuda.empty_cache()
    meter.enter_phase("steady")
    meter.step_done()
    report = meter.report()
    assert report["phases"]["eval"]["allocated"] >= report["phases"]["steady"]["allocated"] + 256 * MIB
    assert report["phases"]["eval"]["reserved"] >= report["phases"]["eval"]["allocated"]
    assert report["phases"]["eval"]["device"] >= report["phases"]["eval"]["reserved"]
    assert report["device_mean_over_steps"] > 0


@pytest.mark.gpu
@on_gpu
def test_gpu_step_times_are_the_devices_own() -> None:
    clock = StepClock(torch.device("cuda", torch.cuda.current_device()), warmup_steps=0)
    clock.resume()
    begun = time.perf_counter()
    for step in range(3):
        torch.cuda._sleep(200_000_000)
        clock.step_done(step)
    assert time.perf_counter() - begun < 0.05, "step_done synchronized with the device"
    clock.pause()
    assert all(0.05 < seconds < 0.5 for _, seconds in clock.flush())


@pytest.mark.gpu
@on_gpu
def test_gpu_energy_grows_over_the_window() -> None:
    meter = EnergyMeter(torch.device("cuda", torch.cuda.current_device()))
    meter.resume()
    time.sleep(1)
    meter.pause()
    assert meter.joules is None or 1 < meter.joules < 2000


@pytest.fixture
def eight_ranks() -> Iterator[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield 8
    dist.destroy_process_group()


def count_traffic(watch: TrafficWatch) -> dict[str, tuple[int, int, float]]:
    return {
        kind: (count["calls"], count["payload_bytes"], count["wire_bytes_per_rank"])
        for kind, count in watch.report()["collectives"].items()
    }


def test_each_collective_counts_its_payload_and_its_bus_factor_and_an_all_to_all_what_it_sends(eight_ranks: int):
    small, large = torch.ones(100), torch.ones(800)
    half = torch.ones(100, dtype=torch.bfloat16)
    with TrafficWatch(7) as watch:
        dist.all_reduce(small)
        dist.all_reduce(half)
        dist.all_gather_into_tensor(large, small)
        dist.all_gather([torch.empty(100) for _ in range(8)], small)
        dist.reduce_scatter_tensor(small, large)
        dist.broadcast(small, src=0)
        dist.reduce(small, dst=0)
        dist.all_to_all_single(torch.empty(800), large)
        dist.barrier()
    assert (watch.report()["step"], watch.report()["world_size"]) == (7, 8)
    assert count_traffic(watch) == {
        "all_reduce": (2, 600, 600 * 2 * 7 / 8),
        "all_gather": (2, 6400, 6400 * 7 / 8),
        "reduce_scatter": (1, 3200, 3200 * 7 / 8),
        "broadcast": (1, 400, 400),
        "reduce": (1, 400, 400),
        "all_to_all": (1, 3200, 3200 * 7 / 8),
        "barrier": (1, 0, 0),
    }
    # A rank sends all but its own split.
    rows, splits, everybody = torch.ones(8, 100), [3, 5, *[0] * 6], dist.distributed_c10d._get_default_group()
    parts = list(rows.split(splits))
    with TrafficWatch(1) as watch:
        dist.all_to_all_single(torch.empty_like(rows), rows, splits, splits)
        functional.all_to_all_single(rows, splits, splits, everybody).sum()
        dist.all_to_all([torch.empty_like(part) for part in parts], parts)
    assert count_traffic(watch) == {"all_to_all": (3, 3 * 3200, pytest.approx(3 * 5 * 400))}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_bytes_across_machines_are_those_of_groups_over_several_machines(eight_ranks: int) -> None:
    within, across = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 4])
    with TrafficWatch(1, ranks_per_machine=4) as watch:
        dist.all_reduce(torch.ones(100), group=within)
        functional.all_gather_tensor(torch.ones(100), 0, within).sum()
        dist.all_reduce(torch.ones(100), group=across)
        functional.all_reduce(torch.ones(100), "sum", across).sum()
        dist.broadcast(torch.ones(100), src=0)
    report = watch.report()
    assert (report["ranks_per_machine"], report["across_machines_bytes_per_rank"]) == (4, 400 + 400 + 400)
    assert "across_machines_bytes_per_rank" not in TrafficWatch(1, ranks_per_machine=8).report()


def test_a_watched_step_that_was_skipped_leaves_the_watch_to_the_next_and_its_new_optimizer_state_is_seen() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meters = Meters(CPU, watched_step=1)
    meters.start(model, optimizer)
    for step in (1, 2, 3):
        with meters.step(step):
            model(torch.ones(1, 64)).sum().backward()
            if step > 1:
                optimizer.step()
    meters.finish()
    assert (meters.traffic or {})["step"] == 2
    state = (meters.state or {})["state_bytes"]
    kinds = ("params", "grads", "optimizer")
    assert {kind: state[kind]["device"] for kind in state} == dict.fromkeys(kinds, 64 * 64 * FP32)


def test_the_memory_of_a_forward_pass_is_that_saved_for_its_backward_pass() -> None:
    # The first layer's output is larger than the 32 MiB from which glibc maps a block separately, and counts it in
    # hblkhd (mallinfo(3)).
    wide, narrow, samples = 4096, 512, 2304
    model = torch.nn.Sequential(torch.nn.Linear(narrow, wide), torch.nn.ReLU(), torch.nn.Linear(wide, narrow))
    inputs = torch.randn(samples, narrow)

    def saved_bytes(forward: Any) -> int | None:
        caller = torch.nn.Module()
        caller.inner, caller.forward = model, forward
        # Memory that libraries allocate at their first use stays allocated.
        caller(inputs).sum().backward()
        with ForwardWatch(caller, CPU) as watch:
            caller(inputs).sum().backward()
        return watch.report["forward_holds_bytes"]

    # The linear layer's output is freed once the ReLU has used it.
    assert saved_bytes(lambda x: model(x)) == pytest.approx((wide + narrow) * samples * FP32, rel=0.02)
    recomputed = saved_bytes(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    assert recomputed == pytest.approx(narrow * samples * FP32, rel=0.1)


def test_a_peak_that_cannot_be_set_back_is_the_process_s_own_in_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a container denies clear_refs (proc(5)), getrusage(2) has the peak of the process's whole life."""

    def fail(*_: object) -> None:
        raise OSError

    lifetime = SimpleNamespace(ru_maxrss=50_000_000)
    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr("study.metrics.memory.resource.getrusage", lambda _: lifetime)
    meter = MemoryMeter(CPU)
    with meter.phase("eval"):
        lifetime.ru_maxrss = 60_000_000
    with meter.phase("save"):
        pass
    peaks = meter.report()["phases"]
    assert peaks["eval"]["host"] == 60_000_000 * 1024
    assert peaks["save"]["host"] < 50_000_000 * 1024


# Real engines: records of runs that other tests read as well.

GPT = ("--task", "gpt-wikitext")


def parameter_bytes(run: Run) -> int:
    return FP32 * int(run.engine["model_parameters"])


def states(run: Run) -> list[dict[str, Any]]:
    """Return the state of each rank."""
    return [rank["state"] for rank in run.memory["ranks"]]


CASES = [
    ("ddp", 2),
    ("zero0", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("fsdp2", 2),
    ("hsdp", 4),
    ("zero3_hpz", 4),
    ("zero2_cpu", 2),
    ("zero3_cpu", 2),
    ("zero3_nvme_optimizer", 2),
]


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulation"),
    [
        *((*case, 1) for case in CASES),
        *((strategy, 2, 4) for strategy in ("fsdp2", "ddp", "zero1", "zero2", "zero3")),
        *(pytest.param("zero3", ranks, 1, marks=pytest.mark.long) for ranks in (1, 4)),
    ],
)
def test_state_and_traffic_are_those_that_the_source_says_and_a_scan_finds_no_more(
    get_run, strategy, ranks, accumulation
):
    """The prediction follows the source, and has those of all committed records: test_predict_memory.py.

    Gradients of a step with accumulation are the most after any micro-batch: FSDP2 has unpartitioned ones until the
    last of four, and only its shards before the step.
    """
    flags = GPT if accumulation == 1 else ("--task", "bert-imdb", "--per_device_train_batch_size", "1")
    run = get_run(strategy, *flags, ranks=ranks)
    (record,) = read_records(run.path).runs.assign(suite="").itertuples()
    assert record.gradient_accumulation_steps == accumulation
    for figure in compare_run_figures(record):
        assert figure.measured == pytest.approx(figure.predicted, rel=1e-3 if figure.figure == SENT else 1e-6), figure
    assert run.summary["state_bytes_per_rank"] == states(run)[0]["state_bytes"]
    # The boundary of two partitions is within a matrix. Stages 1 and 2 also keep each rank's part of its gradient.
    divided = 256 * 256 * FP32 if strategy in ("zero1", "zero2") else 0
    scanned = sum(state["other_tensor_bytes"] for state in states(run))
    assert accumulation > 1 or 0 < scanned - divided < 0.01 * parameter_bytes(run) * ranks


@pytest.mark.parametrize(
    ("strategy", "ranks", "settings"),
    [
        ("zero3", 2, {}),
        ("zero3_hpz", 4, {}),
        ("fsdp2", 2, {}),
        pytest.param("zero3", 1, {}, marks=pytest.mark.long),
        ("zero3", 2, {"max_live_parameters": 2 * 10**6, "max_reuse_distance": 0, "prefetch_bucket_size": 6 * 10**5}),
    ],
)
def test_a_forward_pass_allocates_the_same_however_the_weights_are_sharded(get_run, strategy, ranks, settings):
    """It allocates activations for the backward pass, and no weights: neither those that FSDP gathers before any hook
    of the model, nor those that a single rank uses in place, nor the buffer of a prefetch, nor hpZ's secondary
    partition, which is state.
    """
    flags = [f"--engine_override=zero_optimization.stage3_{key}={value}" for key, value in settings.items()]
    plain = max(state["forward_holds_bytes"] for state in states(get_run("ddp", *GPT)))
    # One rank runs the samples of two.
    run = get_run(strategy, *GPT, *flags, ranks=ranks)
    for state in states(run):
        # A sharding engine allocates about 0.1 MiB on any number of ranks.
        assert state["forward_holds_bytes"] == pytest.approx(plain * 2 / ranks, abs=0.03 * plain)
        assert (state["forward_gathers_bytes"] > 0) == (ranks > 1)
        if strategy == "zero3" and ranks > 1:
            (record,) = read_records(run.path).runs.itertuples()
            gathered = simulate_gathers(request_from_record(record)).live_at_end
            assert state["forward_gathers_bytes"] == gathered * FP32


def test_zero3_names_its_persistent_parameters(get_run: RunFactory) -> None:
    run, sizes = get_run("zero3", *GPT), [param.elements for param in model_shape("gpt-tiny").params]
    assert parameter_bytes(run) == FP32 * sum(sizes)
    small = [size for size in sizes if size < 100_000]
    for state in states(run):
        assert state["kept_whole"] == {
            "parameters": len(small),
            "elements": sum(small),
            "bytes": sum(small) * FP32,
            "threshold_elements": 100_000,
        }


def test_zero1_has_whole_gradients_until_backward_ends_and_zero2_and_ddp_in_their_buckets(get_run: RunFactory) -> None:
    runs = [get_run(strategy, *GPT) for strategy in ("zero1", "zero2")]
    full, (zero1, zero2) = parameter_bytes(runs[0]), (states(run)[0] for run in runs)
    assert zero1["grads_after_backward"]["device"] == full
    assert zero1["grads_before_step"]["device"] == full / 2
    assert zero2["grads_after_backward"]["device"] == 0
    # A bucket of 5e8 elements contains every gradient of a small model before the first reduction.
    assert zero2["grads_in_bucket_bytes"] == full
    assert zero2["buffer_bytes"]["reduce_bucket.device"] == 500_000_000 * FP32
    # DDP copies all gradients into its buckets.
    assert states(get_run("ddp", *GPT))[0]["buffer_bytes"] == {"ddp_reducer_buckets.device": full}


def test_zero2_reduces_to_the_owner_once_multi_rank_buckets_are_off(get_run: RunFactory) -> None:
    run = get_run("zero2", *GPT, "--engine_override=zero_optimization.use_multi_rank_bucket_allreduce=false")
    full, collectives = parameter_bytes(run), run.traffic["collectives"]
    assert collectives["reduce"]["payload_bytes"] == full
    # gloo/reduce.cc divides each half into six segments of up to 1 MiB. A rank passes on all but the last two of its
    # three segments; then its three go to the root, unless it is the root.
    passed_on = (full / 2 - (full / 2 - 2 * MIB) / 2) * 2
    assert 5 * MIB < full / 2 < 6 * MIB
    assert collectives["reduce"]["gloo_bytes_per_rank"] == pytest.approx(passed_on + full / 4, rel=1e-3)
    # The norm of the gradients.
    assert collectives["all_reduce"]["payload_bytes"] <= 64


@pytest.mark.alone
def test_measuring_costs_at_most_one_percent_of_a_step(get_run: RunFactory) -> None:
    run = get_run("ddp", *GPT)
    for rank in run.memory["ranks"]:
        assert 0 < rank["time"]["self_cost_s"] < 0.01 * sum(row["step_time_s"] for row in run.steps)


def test_an_engine_run_has_all_phases_and_a_time_for_every_step_and_null_for_what_a_cpu_lacks(get_run) -> None:
    run = get_run("zero3", *GPT)
    assert [row["step"] for row in run.steps if row["step_time_s"] > 0] == list(range(1, 9))
    assert run.summary["energy_j"] is None
    for rank in run.memory["ranks"]:
        assert set(rank["phases"]) == {"init", "first_step", "steady", "eval"}
        phase = rank["phases"]["init"]
        assert [phase["host"] > 0, *(phase[key] for key in ("allocated", "reserved", "device"))] == [True, *[None] * 3]
        assert rank["device_mean_over_steps"] is None
        # Eight steps without three of warm-up and the watched step.
        assert rank["time"]["window_steps"] == 4


def test_the_second_optimizer_of_a_gpu_counts_as_optimizer_state(tmp_path: Path) -> None:
    settings = ("offload_optimizer.ratio=0.5", "sub_group_size=100000")
    half = [f"--engine_override=zero_optimization.{setting}" for setting in settings]
    trained("zero3_cpu_optimizer", tmp_path / "run", *GPT, *half, script="tests/probes/named_device.py")
    (record,) = read_records(tmp_path).runs.assign(suite="").itertuples()
    (state,) = (figure for figure in compare_run_figures(record) if figure.figure == ALL_STATE)
    # Plus a step count per group, which predictions for a CPU do not have.
    assert state.measured == pytest.approx(state.predicted, abs=64)


# The bytes in records, compared with the counters of a loopback interface by tools/count_bytes.py. Its runs use that of
# all tests only if they get no network namespace.
UNSHARE = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "true"]
HAS_NAMESPACES = shutil.which("unshare") and subprocess.run(UNSHARE, stderr=subprocess.DEVNULL).returncode == 0


def count_bytes(folder: Path, *arguments: str, timeout: float) -> pd.DataFrame:
    file = folder / "bytes.csv"
    result = subprocess.run(
        [sys.executable, "tools/count_bytes.py", *arguments, "--csv", str(file), "--markdown"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), ENGINES_ONLY_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = pd.read_csv(file)
    assert set(rows["state"]) <= {"ok", "unsupported"}
    assert "recorded gloo bytes are" in (folder / "summary.md").read_text()
    return rows[rows["state"] == "ok"]


def assert_counted(rows: pd.DataFrame) -> None:
    """Assert agreement within 1 %, without the 52 bytes that TCP and IP add to each packet and acknowledgement.

    A segment that TCP sends again has at most 64 KiB; which of the two runs repeated it is not counted.
    """
    counted = rows["counted_bytes"] - 52 * rows["counted_packets"]
    repeated = rows["repeated_segments"] * 65_536
    within = (rows["gloo_bytes"] >= 0.99 * (counted - repeated)) & (rows["gloo_bytes"] <= 1.01 * (counted + repeated))
    assert within.all(), rows.assign(over=rows["gloo_bytes"] / counted).to_string()


@(pytest.mark.engine if HAS_NAMESPACES else pytest.mark.alone)
def test_gloo_bytes_of_a_record_are_those_of_the_loopback(tmp_path: Path) -> None:
    # Each kind of collective at least once; every strategy, with samples as on the page, is among the long tests.
    names, short = ["ddp", "zero3", "cp"], ("--ranks", "2", "--accumulation", "1", "--seq_length", "32")
    rows = count_bytes(tmp_path, "--strategy", *names, *short, timeout=300)
    assert list(rows["strategy"]) == names
    assert_counted(rows)
    ring, sent = (rows.set_index("strategy")[key] for key in ("ring_bytes", "gloo_bytes"))
    # With NCCL stage 3 sends as much as DDP, as long as this model stays gathered.
    assert ring["zero3"] == pytest.approx(ring["ddp"], rel=1e-4)
    assert sent["zero3"] == pytest.approx(1.5 * sent["ddp"], rel=1e-4)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_gloo_bytes_of_every_strategy_are_those_of_the_loopback(tmp_path: Path) -> None:
    rows = count_bytes(tmp_path, timeout=7000)
    assert len(rows) >= 2 * (18 + 20)
    assert_counted(rows)
