"""The receipt of a loop under real engines: it changes nothing, it attributes memory, and it never ends a run."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.utils._python_dispatch
from torch.utils.data.dataloader import _BaseDataLoaderIter
from transformers import LlamaConfig, LlamaForCausalLM

from engines import ONE_THREAD, ROOT, printed_json
from forked import fork_ranks, fork_script
from study.metrics.inventory import bytes_in_use
from study.receipt.document import MEMORY_PARTS, TIME_PARTS, ReceiptDocument, read_receipt
from study.receipt.failures import Failures
from study.receipt.figures import list_figures
from study.receipt.page import HEIGHT, WIDTH, receipt_lines
from study.receipt.peak import PeakWatch, find_vocabulary
from study.receipt.timing import PartTimer
from study.receipt.unexplained import explain_attribution

CPU = torch.device("cpu")

LOOP = "tests/probes/receipt_loop.py"
# Dropout shows whether the receipt draws random numbers.
ARGUMENTS = {
    "ddp": ("--twice", "--dropout", "0.1", "--accumulation", "2"),
    "fsdp2": ("--twice", "--dropout", "0.1"),
    "zero2": ("--twice", "--dropout", "0.1", "--accumulation", "2"),
    "zero3": ("--twice", "--dropout", "0.1"),
}
STRATEGIES = list(ARGUMENTS)


class Measured(NamedTuple):
    """Losses of each rank as hexadecimal numbers, with and without the receipt, and the output of rank 0."""

    losses: list[list[str]]
    losses_without: list[list[str]]
    receipt: ReceiptDocument
    printed: str


@functools.cache
def run_loop(strategy: str, *arguments: str) -> Measured:
    """Return the outcome of the loop, which trains twice in one process with --twice."""
    folder = Path(tempfile.mkdtemp())
    ranks = 1 if strategy == "single" else 2
    result = fork_ranks(strategy, LOOP, "--receipt", str(folder / "receipt.json"), *arguments, ranks=ranks)
    documents = printed_json(result)
    losses = [document["losses"] for document in documents]
    return Measured(
        losses, [document.get("losses_without") for document in documents], read_receipt(str(folder)), result.stdout
    )


def measure(strategy: str, *arguments: str) -> ReceiptDocument:
    return run_loop(strategy, *(arguments or ARGUMENTS[strategy])).receipt


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_has_the_same_losses_to_the_last_bit_with_and_without_a_receipt(strategy: str) -> None:
    run = run_loop(strategy, *ARGUMENTS[strategy])
    assert run.losses == run.losses_without
    assert len({loss for rank in run.losses for loss in rank}) == len(run.losses) * len(run.losses[0])
    assert run.receipt.failures == ()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_parts_explain_at_least_95_percent_of_the_bytes_at_the_peak(strategy: str) -> None:
    memory = measure(strategy).memory
    assert memory is not None
    assert 0.95 <= memory.attributed <= 1
    assert memory.moment in ("in the forward pass", "in the backward pass", "in the optimizer step")
    # AdamW has two moments in fp32, and a stage of ZeRO also masters.
    factor = 3 if strategy in ("zero2", "zero3") else 2
    weights = 4 * measure(strategy).model.parameters
    shards = 1 if strategy == "ddp" else 2
    assert memory.parts["optimizer"] == pytest.approx(factor * weights / shards, rel=0.01)
    assert memory.parts["parameters"] == pytest.approx(
        weights if strategy in ("ddp", "zero2") else weights / 2, rel=0.05
    )
    assert memory.parts["activations"] > 2**20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_over_the_watched_step_has_its_peak_its_parts_and_its_phases(strategy: str) -> None:
    receipt = measure(strategy)
    memory, timeline = receipt.memory, receipt.timeline
    assert memory is not None
    assert timeline is not None
    peak = timeline.at_s.index(timeline.peak_at_s)
    assert timeline.total_bytes[peak] == memory.total_bytes
    assert max(timeline.total_bytes) <= 1.01 * memory.total_bytes
    assert all(column[peak] == memory.parts[part] for part, column in timeline.parts.items())
    assert 20 < len(timeline.at_s) <= 400
    phases = [span.phase for span in timeline.phases if span.phase != "between"]
    micro_batches = receipt.work.micro_batches or 0
    assert phases[: 2 * micro_batches] == ["forward", "backward"] * micro_batches
    assert set(phases[2 * micro_batches :]) == {"optimizer"}
    backward = next(span for span in timeline.phases if span.phase == "backward")
    in_backward = [
        count
        for at_s, count in zip(timeline.at_s, timeline.parts["activations"], strict=True)
        if backward.begin_s <= at_s <= backward.end_s
    ]
    # The backward pass frees the activations of the forward pass.
    assert in_backward[-1] < 0.5 * max(in_backward)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_finds_engine_batch_and_accumulation_by_itself(strategy: str) -> None:
    receipt = measure(strategy)
    engine = {"ddp": "ddp", "fsdp2": "fsdp2"}.get(strategy, "deepspeed")
    assert (receipt.engine.engine, receipt.engine.strategy, receipt.engine.ranks) == (engine, strategy, 2)
    assert receipt.engine.zero_stage == {"zero2": 2, "zero3": 3}.get(strategy)
    assert (receipt.engine.compute_dtype, receipt.engine.param_dtype) == ("float32", "float32")
    accumulation = 2 if "--accumulation" in ARGUMENTS[strategy] else 1
    work = receipt.work
    assert (work.micro_batches, work.samples, work.sequence_length, work.steps) == (accumulation, 2, 64, 12)
    assert work.measured_steps == (6, 7, 8, 9, 10)
    assert receipt.model.name == "GPT2LMHeadModel"
    assert [row.rank for row in receipt.ranks] == [0, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_prediction_agrees_in_state_and_traffic_with_what_was_measured(strategy: str) -> None:
    receipt = measure(strategy)
    assert receipt.forecast.missing is None
    exact = {row.figure: row for row in receipt.forecast.comparisons if row.low is not None}
    assert set(exact) == {"parameters", "optimizer state", "ring bytes of a step"}
    assert not [row for row in exact.values() if row.is_outside]
    assert receipt.traffic is not None
    sent = sum(row.ring_bytes for row in receipt.traffic.values())
    # With two ranks a ring all-reduce sends the gradients once, and each gather or scatter half of the weights.
    weights = 4 * receipt.model.parameters
    times = {"ddp": 1, "fsdp2": 1.5, "zero2": 2.5, "zero3": 1}[strategy]
    assert sent == pytest.approx(times * weights, rel=0.1)


def test_the_peak_of_a_model_with_dropout_is_that_of_the_prediction() -> None:
    receipt = measure("ddp")
    assert (receipt.model.config or {})["attn_pdrop"] == 0.1
    (row,) = (row for row in receipt.forecast.comparisons if row.figure.startswith("peak"))
    assert row.predicted == pytest.approx(row.measured, rel=0.05)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_parts_of_a_step_add_up_to_it(strategy: str) -> None:
    times = measure(strategy).time
    assert set(times.parts) == set(TIME_PARTS)
    # Nothing is offloaded.
    assert (times.parts["offload"], times.offload) == (0, {})
    assert all(times.parts[part] > 0 for part in ("forward", "backward", "communication", "optimizer"))
    assert times.step_s is not None
    # The median of all steps, and one of them.
    assert 0.2 < sum(times.parts.values()) / times.step_s < 5
    assert sum(row.exposed_s for row in times.collectives.values()) == pytest.approx(times.parts["communication"])
    assert all(0 <= row.exposed_s <= row.in_flight_s * 1.001 for row in times.collectives.values())


def test_rank_0_prints_one_screen() -> None:
    run = run_loop("zero3", *ARGUMENTS["zero3"])
    lines = receipt_lines(run.receipt, "receipt.json")
    assert len(lines) <= HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert run.printed.count("receipt of DeepSpeed stage 3, 2 ranks on CPU, float32: GPT2LMHeadModel") == 1
    assert "attributed" in run.printed


def test_adapters_and_gradient_checkpointing_are_measured() -> None:
    receipt = measure("ddp", "--lora", "--checkpoints")
    assert (receipt.model.lora_rank, receipt.engine.gradient_checkpointing) == (4, True)
    assert receipt.model.trained_parameters < receipt.model.parameters / 10
    assert receipt.memory is not None
    assert receipt.memory.attributed >= 0.95
    assert receipt.failures == ()


def test_a_compiled_model_is_measured(tmp_path: Path) -> None:
    from study import Receipt

    layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    # The default backend needs a compiler of C++.
    model: Any = torch.compile(layers, backend="eager")
    optimizer = torch.optim.AdamW(layers.parameters())
    receipt = Receipt(model, optimizer, path=tmp_path / "receipt.json", after=2, steps=3, quiet=True)
    for rows in receipt.steps(torch.ones(8, 16, 64)):
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    receipt.close()
    document = read_receipt(str(tmp_path))
    assert document.failures == ()
    assert (document.engine.compiled, document.model.name) == (True, "Sequential")
    assert document.work.samples == 16
    assert document.time.parts["backward"] > 0
    assert document.memory is not None
    assert document.memory.parts["optimizer"] > 2 * 4 * document.model.parameters


VOCABULARY, SAMPLES, TOKENS = 8192, 4, 64


def measure_loop(path: Path, keeps: bool) -> ReceiptDocument:
    """Return the receipt of a loop that keeps the model's output, or takes its loss alone."""
    from study import Receipt

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    receipt = Receipt(model, optimizer, path=path, after=2, steps=3, quiet=True)
    ids = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS)
    for _ in receipt.steps(range(8)):
        if keeps:
            output = model(input_ids=ids, labels=ids)
            output.loss.backward()
        else:
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    receipt.close()
    return read_receipt(str(path))


def test_outputs_that_the_loop_keeps_are_a_fault_of_their_predicted_size(tmp_path: Path) -> None:
    logits = 4 * SAMPLES * TOKENS * VOCABULARY
    keeping, taking = (measure_loop(tmp_path / f"{keeps}.json", keeps) for keeps in (True, False))
    assert keeping.failures == taking.failures == ()
    assert keeping.memory is not None
    assert taking.memory is not None
    assert (keeping.memory.kept_output_bytes, taking.memory.kept_output_bytes) == (logits, 0)
    assert keeping.memory.total_bytes - taking.memory.total_bytes == pytest.approx(logits, rel=0.01)
    assert "keeps the model's outputs" in next(fault.says for fault in keeping.faults if fault.id == "kept-outputs")
    assert "kept-outputs" not in {fault.id for fault in taking.faults}
    # The logarithms of the loss's probabilities, their gradient, and that of the logits.
    assert (keeping.memory.parts["logits"], taking.memory.parts["logits"]) == (4 * logits, 3 * logits)
    for receipt in (keeping, taking):
        parts = {row.figure: row for row in receipt.forecast.parts}
        assert parts["memory: logits"].predicted == pytest.approx(parts["memory: logits"].measured, rel=0.05)
        (row,) = (row for row in receipt.forecast.comparisons if row.figure.startswith("peak"))
        assert row.predicted == pytest.approx(row.measured, rel=0.05)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_logits_and_their_gradient_are_a_part_of_the_peak(strategy: str) -> None:
    receipt = measure(strategy, "--steps", "11", "--vocabulary", str(VOCABULARY))
    memory, timeline, work = receipt.memory, receipt.timeline, receipt.work
    assert receipt.failures == ()
    assert memory is not None
    assert timeline is not None
    assert 0.95 <= memory.attributed <= 1
    logits = 4 * (work.samples or 0) * (work.sequence_length or 0) * VOCABULARY
    assert logits == 4 * 2 * 64 * VOCABULARY
    # The logarithms of the loss's probabilities, their gradient, and that of the logits.
    assert memory.moment == "in the backward pass"
    assert memory.parts["logits"] == 3 * logits
    assert {0, 3 * logits} <= set(timeline.parts["logits"])
    predicted = {row.figure: row.predicted for row in receipt.forecast.parts}
    if strategy != "zero3":
        # On a CPU most of DeepSpeed's bucket is untouched memory, which no prediction counts.
        buffers = "gathered" if strategy == "fsdp2" else "buckets"
        assert predicted[f"memory: {buffers}"] == memory.parts[buffers]
        assert predicted["memory: logits"] == memory.parts["logits"]
        assert predicted["memory: activations"] == pytest.approx(memory.parts["activations"], rel=0.1)
    assert receipt.traffic is not None
    for kind, row in receipt.traffic.items():
        if row.ring_bytes > 1000:
            assert predicted[f"ring bytes: {kind}"] == pytest.approx(row.ring_bytes, rel=0.01), kind


def test_a_vocabulary_that_is_not_the_largest_width_has_no_logits() -> None:
    """The probe's default is as wide as the model's perceptrons."""
    memory = measure("ddp").memory
    assert memory is not None
    assert set(memory.parts) == set(MEMORY_PARTS) - {"logits"}


class NamelessHead(torch.nn.Module):
    """A language model without functions of transformers."""

    def __init__(self, vocabulary: int, perceptron: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.wte = torch.nn.Embedding(vocabulary, 32)
        self.perceptron = torch.nn.Linear(32, perceptron)
        self.lm_head = torch.nn.Linear(32, vocabulary)


@pytest.mark.parametrize(
    ("model", "vocabulary"),
    [
        (NamelessHead(512, 128), 512),
        (NamelessHead(512, 512), None),
        (NamelessHead(128, 512), None),
        (torch.nn.Linear(4, 512), None),
        (LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=1, hidden_size=32, intermediate_size=64)), 512),
        (LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, hidden_size=32, intermediate_size=64)), None),
    ],
)
def test_the_width_of_logits_is_that_of_no_other_layer(model: torch.nn.Module, vocabulary: int | None) -> None:
    assert find_vocabulary(model) == vocabulary


@pytest.mark.long
def test_state_on_the_host_is_told_from_that_on_the_device() -> None:
    receipt = measure("zero3_cpu", "--steps", "11")
    assert (receipt.engine.offload_optimizer, receipt.engine.offload_param) == ("cpu", "cpu")
    assert receipt.memory is not None
    assert receipt.memory.host_parts["optimizer"] == receipt.memory.parts["optimizer"] > 0
    assert receipt.memory.attributed >= 0.95


def test_losses_are_equal_and_waiting_for_nvme_is_a_part_of_the_time(tmp_path: Path) -> None:
    arguments = ("--twice", "--steps", "11", "--width", "512", "--swap_folder", str(tmp_path))
    run = run_loop("zero3_nvme_optimizer", *arguments)
    receipt = run.receipt
    assert receipt.failures == ()
    assert run.losses == run.losses_without
    assert len({loss for rank in run.losses for loss in rank}) == 2 * 11
    assert (receipt.engine.offload_optimizer, receipt.engine.offload_param) == ("nvme", None)
    times = receipt.time
    assert set(times.offload) == {"nvme"}
    nvme = times.offload["nvme"]
    # Each step reads and writes the optimizer's state of this rank.
    assert nvme.exposed_s == pytest.approx(times.parts["offload"])
    assert nvme.exposed_s > 1e-4
    assert times.parts["offload"] <= nvme.in_flight_s * 1.001
    assert all(times.parts[part] > 0 for part in ("forward", "backward", "optimizer"))
    assert times.step_s is not None
    assert "host and NVMe" in "\n".join(receipt_lines(receipt, "receipt.json"))


def test_failures_on_one_rank_are_listed_and_no_rank_waits_for_another() -> None:
    targets = "peak.claim_model_state", "peak.TrafficWatch._count", "live_engine.read_facts"
    run = run_loop("ddp", "--steps", "11", "--twice", "--breaks", ",".join(targets))
    assert run.losses == run.losses_without
    for doing in ("watching memory", "counting collectives", "reading the engine"):
        assert f"{doing}: ZeroDivisionError: planted" in run.receipt.failures
    # The other rank has measured, and rank 0 has received it.
    assert run.receipt.ranks[1].peak_bytes is not None
    assert run.receipt.time.parts["backward"] > 0


def train_in_process(path: Path | None, steps: int = 12) -> list[float]:
    """Return the losses of some steps in this process, with a receipt at a path or without one."""
    from study import Receipt

    torch.manual_seed(4)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(layers.parameters())
    receipt = Receipt(layers, optimizer, path=path, quiet=True) if path is not None else None
    rows = torch.utils.data.DataLoader(torch.randn(4 * steps, 16), batch_size=4)  # type: ignore[arg-type,var-annotated]
    losses = []
    for row in rows if receipt is None else receipt.steps(rows):
        loss = layers(row).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if receipt is not None:
        receipt.close()
    return losses


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("timing.PartTimer.open", "ending a step"),
        ("timing.wait_for", "ending a step"),
        ("timing.time_mark", "timing the forward part"),
        ("timing.PartTimer._read_inputs", "timing the forward pass"),
        ("exposure.read_exposure", "reading torch's profiler"),
        ("peak.PeakWatch.__enter__", "watching a step"),
        ("peak.PeakWatch._follow", "watching memory"),
        ("live_engine.read_model", "reading the engine"),
        ("session.make_forecast", "asking the predictor"),
        ("session.find_faults", "looking for faults"),
        ("session.Exchange.publish", "publishing to rank 0"),
        ("session.Receipt._prepare", "setting up"),
        ("session.Receipt._end_step", "ending a step"),
    ],
)
def test_a_failure_inside_is_listed_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    expected = train_in_process(None)
    monkeypatch.setattr(f"study.receipt.{target}", fail)
    backward, load = torch.autograd.backward, _BaseDataLoaderIter.__next__
    assert train_in_process(tmp_path / "receipt.json") == expected
    failures = read_receipt(str(tmp_path)).failures
    assert f"{message}: ZeroDivisionError: planted" in failures
    # Nothing stays patched.
    assert (torch.autograd.backward, _BaseDataLoaderIter.__next__) == (backward, load)


def test_a_peak_that_is_the_sum_of_its_parts_is_not_called_attributed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = "bytes that no part has: psutil before 7.2"
    if bytes_in_use(CPU) is not None:
        train_in_process(tmp_path / "counted.json")
        counted = read_receipt(str(tmp_path / "counted.json"))
        assert "% attributed" in "\n".join(receipt_lines(counted, "r"))
        # 577 weights: Python's objects have more bytes.
        assert counted.memory is not None
        assert counted.memory.attributed < 0.95
        assert counted.memory.low_attribution == explain_attribution(counted) is not None
        assert "and usually at least 95%" in "\n".join(receipt_lines(counted, "r"))
        assert not any(line.startswith(cause) for line in counted.unavailable)
    monkeypatch.delattr(psutil, "heap_info", raising=False)
    train_in_process(tmp_path / "summed.json")
    summed = read_receipt(str(tmp_path / "summed.json"))
    assert summed.memory is not None
    assert summed.memory.total_bytes == sum(summed.memory.parts.values())
    assert any(line.startswith(cause) for line in summed.unavailable)
    assert "% attributed" not in "\n".join(receipt_lines(summed, "r"))
    assert summed.memory.low_attribution is None
    assert "memory/attributed(%)" not in list_figures(summed)


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    """Make this process the only rank of a group over gloo."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("operations_before", [0, 3])
def test_a_copy_that_gloo_frees_late_is_not_part_of_a_peak(operations_before: int) -> None:
    """Its threads may get no core for some time after a collective has ended."""
    if bytes_in_use(CPU) is None:
        pytest.skip("the heap is not measured before psutil 7.2")
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    model, size = torch.nn.Linear(4, 4), 16 * 2**20
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures = Failures()
    watch = PeakWatch(model, optimizer, PartTimer(model, optimizer, CPU, failures), CPU, failures)
    with watch:
        for _ in range(operations_before):
            torch.ones(1)
        copy = libc.malloc(size)
        ctypes.memset(copy, 1, size)
        freeing = threading.Timer(0.2, libc.free, (copy,))
        freeing.start()
        ones = torch.ones(size // 4)
        freeing.join()
        del ones
    assert failures.texts == []
    assert size <= watch.peak_bytes < 1.2 * size
    assert sum(watch.parts.values()) >= 0.95 * watch.peak_bytes


def test_a_loop_that_is_left_early_leaves_nothing_behind(tmp_path: Path) -> None:
    from study import Receipt

    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for last in (2, 3, 5, 6):
        # Within a timed, the profiled and the watched step.
        backward = torch.autograd.backward
        receipt = Receipt(layer, optimizer, path=tmp_path / "receipt.json", after=2, steps=4, quiet=True)
        for number, row in enumerate(receipt.steps(torch.ones(20, 2, 4))):
            if number == last:
                break
            layer(row).sum().backward()
            optimizer.step()
        receipt.close()
        assert torch.autograd.backward is backward
        assert not layer._forward_hooks
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        assert read_receipt(str(tmp_path)).failures == ()


@pytest.mark.alone
def test_after_the_measured_steps_it_costs_at_most_one_percent() -> None:
    cost = measure("ddp", "--steps", "40").cost
    assert cost.later_fraction is not None
    assert 0 < cost.later_fraction <= 0.01
    assert cost.measured_s > 0
    assert cost.added_s is not None
    assert cost.added_s > 0


def test_a_run_that_is_interrupted_prints_its_receipt_too(tmp_path: Path) -> None:
    script = (
        "import signal, torch, study\n"
        # A background job of a shell inherits that SIGINT is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "layer = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)\n"
        "receipt = study.Receipt(layer, optimizer)\n"
        "def rows():\n"
        "    while True: yield torch.ones(8, 64)\n"
        "for number, row in enumerate(receipt.steps(rows())):\n"
        "    layer(row).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    if number == 20: print('trains', flush=True)\n"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        process.send_signal(signal.SIGINT)
        try:
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert printed.count("receipt of no engine, 1 rank on CPU, float32: Linear") == 1
    receipt = read_receipt(str(tmp_path))
    assert receipt.state == "complete"
    assert receipt.work.steps >= 20
    assert (receipt.failures, receipt.memory is None) == ((), False)


def test_two_ranks_of_torchrun_that_are_interrupted_print_one_receipt(tmp_path: Path) -> None:
    script = (
        "import signal, torch, study\n"
        # A background job of a shell inherits that SIGINT is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "torch.distributed.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "receipt = study.Receipt(model, optimizer)\n"
        "def rows():\n"
        "    while True: yield torch.ones(8, 64)\n"
        "for number, row in enumerate(receipt.steps(rows())):\n"
        "    model(row).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    if number == 20 and torch.distributed.get_rank() == 0: print('trains', flush=True)\n"
    )
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        # As a terminal does: to the launcher's group.
        os.killpg(process.pid, signal.SIGINT)
        try:
            printed, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    # Python ends by the signal after an uncaught KeyboardInterrupt, and torchrun names it.
    assert "[rank0]: KeyboardInterrupt" in errors
    assert errors.rstrip().endswith(f"Process {process.pid} got signal: {signal.SIGINT.value}")
    assert printed.count("receipt of ") == printed.count("receipt of DDP, 2 ranks on CPU, float32: Linear") == 1
    assert [path.name for path in tmp_path.glob("*.json")] == ["receipt.json"]
    receipt = read_receipt(str(tmp_path))
    assert (receipt.state, receipt.failures, receipt.memory is None) == ("complete", (), False)
    assert [row.rank for row in receipt.ranks] == [0, 1]


def test_a_run_of_few_steps_says_that_nothing_was_measured(tmp_path: Path) -> None:
    train_in_process(tmp_path / "receipt.json", steps=4)
    receipt = read_receipt(str(tmp_path))
    assert (receipt.state, receipt.memory, receipt.work.steps) == ("too_short", None, 4)
    assert receipt.unavailable[0].startswith(
        "memory, communication and parts of time: the run ended after 4 steps, and"
    )


@functools.cache
def wrapped(*ways: str) -> dict[str, ReceiptDocument]:
    first = printed_json(fork_ranks("ddp", "tests/probes/receipt_wrapping.py", *ways))[0]
    return {way: ReceiptDocument.model_validate(document) for way, document in first["receipts"].items()}


WAYS = ("whole", "root", "outside", "fsdp1")
WAYS_OF_FSDP1 = ("fsdp1", "fsdp1_whole", "fsdp1_tied", "fsdp1_outside")


def test_a_loop_without_accelerate_is_measured_under_both_versions_of_fsdp() -> None:
    receipts = wrapped(*WAYS)
    for way in WAYS:
        receipt = receipts[way]
        assert receipt.failures == ()
        assert receipt.memory is not None
        assert receipt.memory.attributed >= 0.95, (way, receipt.memory)
        assert (receipt.work.samples, receipt.work.sequence_length) == (4, 32)
        assert receipt.model.name == "NanoGpt"
        assert receipt.model.parameters == 2 * 1000 * 64 + 3 * (2 * 64 + 2 * 4 * 64 * 64 + 5 * 64)
    assert receipts["fsdp1"].engine.engine == "fsdp1"
    assert receipts["fsdp1"].engine.wrapped_groups == 4


def test_an_embedding_outside_of_wrapping_is_named() -> None:
    receipts = wrapped(*WAYS)
    faults = {way: {fault.id: fault.says for fault in receipts[way].faults} for way in WAYS}
    assert "wte has 28% of the parameters" in faults["root"]["embedding-outside-wrapping"]
    assert "128,000 trained parameters are outside of fully_shard" in faults["outside"]["outside-wrapping"]
    assert {"embedding-outside-wrapping", "outside-wrapping"}.isdisjoint(faults["whole"])


def test_an_embedding_that_fsdp1_could_wrap_apart_is_named() -> None:
    receipts = wrapped(*WAYS_OF_FSDP1)
    faults = {way: {fault.id: fault for fault in receipts[way].faults} for way in WAYS_OF_FSDP1}
    fault = faults["fsdp1"]["embedding-outside-wrapping"]
    assert fault.says.startswith("wte has 28% of the parameters and has no separate group")
    assert "auto_wrap_policy" in fault.fix
    # The head, and on FSDP1 the embedding with it.
    assert receipts["fsdp1"].engine.root_elements == 2 * 1000 * 64
    assert receipts["fsdp1_whole"].engine.root_elements == 1000 * 64
    # A flat parameter has all layers that share a weight.
    for way in ("fsdp1_whole", "fsdp1_tied"):
        assert "embedding-outside-wrapping" not in faults[way]
        assert receipts[way].failures == ()


def test_an_embedding_that_fsdp1_ignores_is_named() -> None:
    receipts = wrapped(*WAYS_OF_FSDP1)
    receipt = receipts["fsdp1_outside"]
    fault = next(fault for fault in receipt.faults if fault.id == "outside-wrapping")
    assert fault.says == (
        "64,000 trained parameters are outside of FSDP, such as wte.weight: no rank shards them, and nothing reduces"
        " their gradients"
    )
    assert receipt.failures == ()
    # Its elements are of the model.
    assert receipt.model.parameters == receipts["fsdp1"].model.parameters
    assert [way for way in WAYS_OF_FSDP1 if receipts[way].engine.unsharded_elements] == ["fsdp1_outside"]


ACCUMULATING = ("whole_forgets", "whole_waits", "fsdp1_forgets", "fsdp1_waits")


@pytest.mark.parametrize(
    ("version", "fix"), [("whole", "model.set_requires_gradient_sync(False)"), ("fsdp1", "model.no_sync()")]
)
def test_a_forgotten_no_sync_is_named_under_both_versions_of_fsdp(version: str, fix: str) -> None:
    receipts = wrapped(*ACCUMULATING)
    forgetting, waiting = receipts[f"{version}_forgets"], receipts[f"{version}_waits"]
    fault = next(fault for fault in forgetting.faults if fault.id == "forgotten-no-sync")
    assert "gradients are reduced in each of 2 micro-batches" in fault.says
    assert fault.fix.startswith(fix)
    assert forgetting.reduced_bytes[0] == forgetting.reduced_bytes[1] > 0
    assert "forgotten-no-sync" not in {fault.id for fault in waiting.faults}
    assert waiting.reduced_bytes == (0, forgetting.reduced_bytes[1])


def test_gradients_reduced_in_every_micro_batch_and_a_slow_loader_are_named() -> None:
    receipt = measure("ddp", "--steps", "11", "--accumulation", "3", "--forgets_no_sync", "--sleep_s", "0.05")
    faults = {fault.id: fault.says for fault in receipt.faults}
    assert "gradients are reduced in each of 3 micro-batches" in faults["forgotten-no-sync"]
    assert "of its time for the data loader" in faults["data-loader-waits"]
    gradients = 4 * receipt.model.parameters
    assert receipt.reduced_bytes == (gradients,) * 3
    # Three batches of two samples.
    assert receipt.time.parts["data"] >= 0.9 * 3 * 2 * 0.05
    sound = measure("ddp")
    assert sound.reduced_bytes == (0, gradients)
    assert "forgotten-no-sync" not in {fault.id for fault in sound.faults}


def test_accumulation_on_a_release_with_wrong_gradients_is_named_by_the_live_loop() -> None:
    arguments = ("--steps", "11", "--accumulation", "2")
    run = run_loop("zero1", *arguments, "--deepspeed_release", "0.19.5")
    assert run.receipt.packages["deepspeed"] == "0.19.5"
    assert (run.receipt.engine.strategy, run.receipt.work.micro_batches) == ("zero1", 2)
    warning = (
        "FAULT deepspeed 0.19.5 computes other gradients than DDP here: the gradient is divided by the accumulation"
        " steps twice. To fix it: Use DeepSpeed 0.19.6 or later, or let the model return the loss alone."
    )
    assert warning in " ".join(run.printed.split())
    # The release that is installed is sound.
    assert "wrong-gradients" not in {fault.id for fault in measure("zero1", *arguments).faults}


@pytest.mark.long
def test_an_offload_that_the_live_engine_ignores_is_named() -> None:
    receipt = measure("zero2", "--steps", "11", "--offloads_parameters")
    assert (receipt.engine.zero_stage, receipt.engine.offload_param) == (2, "cpu")
    fault = next(fault for fault in receipt.faults if fault.id == "offload-without-effect")
    assert "zero_optimization.offload_param: stage 2 does not use it" in fault.says


def test_a_wrong_use_ends_in_one_line_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from study import Receipt

    monkeypatch.chdir(tmp_path)
    model: Any = "gpt2"
    receipt = Receipt(model, None)
    assert list(receipt.steps([1, 2, 3])) == [1, 2, 3]
    receipt.close()
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "the model is a str; give Receipt the model that is trained" in printed.err
    assert read_receipt("receipt.json").failures == (
        "wrong use: the model is a str; give Receipt the model that is trained",
    )
    layer = torch.nn.Linear(2, 2)
    for wrong in ({"after": "five"}, {"log": 5}, {"path": tmp_path / "receipt.json" / "inside_a_file"}):
        options: Any = wrong
        receipt = Receipt(layer, torch.optim.SGD(layer.parameters()), **options)
        assert list(receipt.steps([1])) == [1]
        receipt.close()
    printed = capsys.readouterr()
    assert "receipt: wrong use: log is 5; give it a function" in printed.err


def test_the_package_is_imported_without_torch_and_names_what_it_has() -> None:
    script = (
        "import sys, study; assert 'torch' not in sys.modules\n"
        "from study.receipt import command; assert 'torch' not in sys.modules\n"
        "try: study.Reciept\nexcept AttributeError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "module 'study' has no attribute 'Reciept'\n"


def test_the_program_for_a_gpu_compares_with_a_control(tmp_path: Path) -> None:
    probe = ROOT / "tests" / "probes" / "receipt_gpu.py"
    environment = {**os.environ, **ONE_THREAD}
    result = fork_script(
        probe, str(tmp_path), "plain", "zero2", folder=ROOT, environment=environment, read_at_import={}, timeout=180
    )
    rows = printed_json(result)
    assert [row["loop"] for row in rows] == ["plain", "zero2"]
    for row in rows:
        assert (row["equal_control"], row["equal_with_receipt"]) == (True, True), row["loop"]
        assert (row["state"], row["failures"], row["outside"]) == ("complete", [], [])
        assert 0.95 <= row["attributed"] <= 1
        # The last loss is that of trained weights.
        assert row["losses"][0] != row["losses"][1]
        # Most of it is in the watched step, the tenth.
        watched_ms = row["step_ms_with"][9] - row["median_ms_with"]
        assert 0.5 * watched_ms < 1000 * row["added_s"] < sum(row["step_ms_with"])
    assert rows == [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    engines = [read_receipt(str(tmp_path / f"{name}.json")).engine for name in ("plain", "zero2")]
    assert [(engine.engine, engine.zero_stage, engine.ranks) for engine in engines] == [
        ("none", None, 1),
        ("deepspeed", 2, 1),
    ]


def test_the_schema_of_a_receipt_is_stable() -> None:
    receipt = measure("ddp")
    document = json.loads(json.dumps(receipt.model_dump(mode="json")))
    assert ReceiptDocument.model_validate(document) == receipt
    assert document["version"] == 1


def test_a_closed_receipt_keeps_neither_the_model_nor_a_hook(tmp_path: Path) -> None:
    from study import Receipt

    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    receipt = Receipt(layer, optimizer, path=tmp_path / "receipt.json", after=1, steps=3, quiet=True)
    for row in receipt.steps(torch.ones(6, 2, 4)):
        layer(row).sum().backward()
        optimizer.step()
    receipt.close()
    assert not optimizer._optimizer_step_post_hooks
    reference = weakref.ref(layer)
    del layer, optimizer
    gc.collect()
    assert reference() is None
