"""`study advise`: fitting strategies, the recommendation, its words and its files."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engines import ROOT
from study.advisor import advise as rules
from study.advisor.advice_text import _left_out_lines, file_lines
from study.advisor.advise import (
    SPEED_TOLERANCE,
    Advice,
    AdviceRequest,
    Option,
    advise,
    candidates,
    explain_best,
    needs_large_host,
    offload_line,
    reason_against,
    speed_gap,
    unchecked_needs,
    wrong_releases,
)
from study.advisor.advise_command import AdviseFlags, add_arguments, build_advice_request
from study.advisor.advised_files import SAVES_SHARDS, SUMS_WITHIN_GROUPS, write_files
from study.advisor.calculator import Calculator
from study.advisor.fitted import RankKey, find_best, precision_under
from study.advisor.request_text import workload_text
from study.cli import main
from study.compositions.answers import read_known_findings
from study.config.errors import UserError
from study.config.flags import parse_command_line, resolve_config
from study.config.strategies import WITH_REPLICAS, read_strategy, read_yaml
from study.config.text import rounded, rounded_seconds
from study.host.memory import GIB
from study.predictor import intervals
from study.predictor import time as timing
from study.predictor.communication import predict_payload
from study.predictor.hardware import CPU_CORE, to_box
from study.predictor.intervals import NOT_KNOWN
from study.predictor.memory import least_device_bytes, predict_memory
from study.predictor.models import model_shape
from study.predictor.request import Estimate, Request, TrainerSettings, request_for
from study.predictor.shape import with_adapters
from study.predictor.time import (
    device_bytes,
    fits,
    max_offload_slowdown,
    offload_range,
    predict_time,
    usable_bytes,
)

LLAMA_8B = "layers=32,hidden=4096,heads=32,vocabulary=128256,inner=14336,key_value_heads=8"
SIZES = "layers=12,hidden=768,heads=12,vocabulary=50257"
# 3.6 B: on a GPU of 80 GB it trains without recomputing in 16 bits, and not in fp32.
MIDDLE = "layers=30,hidden=3072,heads=24,vocabulary=32000,inner=8192,key_value_heads=24"
TINY = AdviceRequest(model_shape("gpt-tiny"), to_box("2xL4"), 32, "bf16", gradient_checkpointing=False, global_batch=4)


@functools.cache
def run_command(command: str, model: str, hardware: str, *flags: str) -> tuple[int, str]:
    """Return exit status and output of one command, which takes seconds of CPU and runs once."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main([command, "--model_name_or_path", model, "--hardware", hardware, *flags])
    return status, out.getvalue()


def print_page(model: str, hardware: str, *flags: str, status: int = 0) -> str:
    ended, page = run_command("advise", model, hardware, *flags)
    assert ended == status
    return page


def read_json(command: str, model: str, hardware: str, *flags: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run_command(command, model, hardware, *flags, "--json")[1])
    return document


@functools.cache
def ask(model: str, hardware: str, *flags: str) -> Advice:
    """Return the advice that the command prints, without its other output."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--model_name_or_path", model, "--hardware", hardware, *flags]
    return advise(build_advice_request(AdviseFlags.from_options(parser.parse_args(words))))


def recommend(request: AdviceRequest, *names: str) -> Option:
    best = advise(request, names or None).best
    assert best is not None
    return best


@pytest.fixture(scope="module")
def eight_b() -> Advice:
    return advise(AdviceRequest(model_shape(LLAMA_8B), to_box("8xH100"), 2048, "bf16", price_per_gpu_hour=2.0))


def test_advice_imports_no_module_that_it_does_not_use() -> None:
    code = "import sys; from study.cli import main; main(['advise', 'gpt2', '--hardware', '8xH100'])"
    unused = {"importlib.metadata", "pydantic", "study.receipt.document", "study.compositions", "pandas", "torch"}
    code += f"; print(sorted({unused} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_advice_leaves_the_collection_of_garbage_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    during = list[bool]()

    def no_lines(advice: Advice) -> list[str]:
        during.append(gc.isenabled())
        return []

    # Adapters are compared when the page is printed.
    for name in ("sensitivity_lines", "adapters_lines"):
        monkeypatch.setattr(rules, name, no_lines)
    assert main(["advise", "gpt2", "--hardware", "8xH100"]) == 0
    assert (during, gc.isenabled()) == ([False, False], True)


def test_eight_b_over_every_strategy_takes_less_than_ten_seconds_of_cpu() -> None:
    before = time.process_time()
    print_page(LLAMA_8B, "8xH100")
    assert time.process_time() - before < 10


# Predictions of memory take most of the time; without bounds on the speed there were 177 and 233 of them.
@pytest.mark.parametrize(
    ("model", "hardware", "most"), [("llama-3.1-8b", "8xH100", 45), ("llama-3.1-70b", "8x8xH100", 65)]
)
def test_a_page_of_advice_predicts_the_memory_of_few_requests(
    model: str, hardware: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    predict_memory.cache_clear()
    assert main(["advise", model, "--hardware", hardware]) == 0
    assert capsys.readouterr().out.startswith("Use ")
    assert predict_memory.cache_info().misses < most


@pytest.mark.parametrize("at_upper_bound", [True, False])
@pytest.mark.parametrize(
    ("model", "hardware"),
    [
        ("llama-3.1-8b", "4xA100"),
        ("llama-3.1-8b", "2x4090"),
        ("gpt2", "L4"),
        ("qwen2.5-14b", "2x8xL4"),
        ("gpt-1t", "8xH100"),
    ],
)
def test_a_what_if_question_leaves_out_only_what_cannot_win(model: str, hardware: str, at_upper_bound: bool) -> None:
    shape, box = model_shape(model), to_box(hardware)
    question = AdviceRequest(shape, box, 1024, "bf16", global_batch=8 * box.ranks)
    complete = advise(question, at_upper_bound=at_upper_bound)
    for baseline in (None, "zero3", "zero3_cpu"):
        brief = rules.advise_without_losers(question, candidates(question), baseline, at_upper_bound=at_upper_bound)
        assert brief is not None
        assert brief.best == complete.best
        assert len(brief.options) <= len(complete.options)
        options = {option.name: option for option in complete.options}
        assert all(option == options[option.name] for option in brief.options)
        assert (
            baseline not in options
            or not options[baseline].fits
            or baseline in {option.name for option in brief.options}
        )
    if complete.best is not None:
        faster_than_all = 1.01 * max(option.tokens_per_s for option in complete.options)
        assert rules.advise_without_losers(question, ["ddp"], worth=100 * faster_than_all) is None


def test_the_best_settings_are_those_of_all_although_most_are_not_evaluated() -> None:
    # By name: whether it may not fit, the speed, a bound on the speed, and the peak.
    rows = {
        "a": (True, 9.0, 9.0, 1.0),
        "b": (False, 3.0, 8.0, 5.0),
        "c": (False, 5.0, 5.0, 4.0),
        "d": (False, 5.0, 5.0, 3.0),
        "e": (False, 4.0, 4.0, 1.0),
    }
    evaluated = list[str]()

    def evaluate(name: str) -> tuple[RankKey, str]:
        evaluated.append(name)
        is_uncertain, speed, _, peak = rows[name]
        return (is_uncertain, not speed, -speed, peak), name

    assert find_best(list(rows), lambda name: rows[name][2], evaluate) == "d"
    assert evaluated == ["a", "b", "c", "d"]
    # Of equal ones the first, as min() does.
    assert find_best(["c", "c2"], lambda _: math.inf, lambda name: ((False, False, -5.0, 4.0), name)) == "c"


def test_the_least_memory_of_a_request_is_less_than_the_prediction_and_its_bound() -> None:
    shape = model_shape("llama-3.2-1b")
    for name in rules.SIMPLEST_FIRST:
        box = to_box("A100" if name == "single" else "2x8xA100")
        for accumulation, checkpointing in ((1, False), (4, True)):
            precision = precision_under(read_strategy(name), "bf16")
            request = Request(shape, read_strategy(name), box, 512, 2, accumulation, precision, checkpointing, "sdpa")
            memory = predict_memory(request)
            for at_upper in (False, True):
                least = least_device_bytes(request, at_upper)
                assert 0.5 * device_bytes(memory, at_upper) < least <= device_bytes(memory, at_upper) * (1 + 1e-12), (
                    name
                )


@pytest.mark.parametrize("hardware", ["8xA100", "4090", "V100-16"])
def test_the_least_memory_never_falls_with_the_micro_batch_but_at_the_one_without_accumulation(hardware: str) -> None:
    box = to_box(hardware)
    for shape in (model_shape("gpt2-xl"), with_adapters(model_shape("llama-3.2-1b"), 8)):
        question = AdviceRequest(shape, box, 1024, "fp16", global_batch=64 * box.ranks)
        for name, at_upper in itertools.product(candidates(question), (False, True)):
            for checkpointing in (False, True):
                requests = [
                    question.configuration(read_strategy(name), size, 64 // size, checkpointing)
                    for size in (1, 2, 4, 8, 16, 32)
                ]
                least = [least_device_bytes(request, at_upper) for request in requests]
                assert least == sorted(least), name


def test_few_micro_batches_are_asked_for_their_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list[Request]()

    def counted(request: Request, at_upper: bool = False) -> float:
        requests.append(request)
        return least_device_bytes(request, at_upper)

    monkeypatch.setattr(rules, "least_device_bytes", counted)
    assert main(["advise", "llama-3.1-8b", "--hardware", "4090"]) == 0
    # Of each size it would be 1,284.
    assert 0 < len(requests) < 900


def test_every_strategy_is_there_with_the_largest_micro_batch_that_fits(eight_b: Advice) -> None:
    question = eight_b.question
    assert {option.name for option in eight_b.options} == set(candidates(question))
    assert {option.name for option in eight_b.options if not option.fits} == {"ddp"}
    for option in eight_b.fitting:
        request = option.request
        one_more = dataclasses.replace(request, micro_batch=request.micro_batch + 1)
        assert fits(option.memory, question.box, at_upper=option.is_safe)
        assert not fits(predict_memory(one_more), question.box, at_upper=option.is_safe), option.name
        assert option.cost_per_million_tokens == pytest.approx(8 * 2.0 / 3600 / option.tokens_per_s * 1e6)


def test_the_recommended_is_the_fastest_and_states_its_confidence(eight_b: Advice) -> None:
    sure = [option for option in eight_b.options if option.is_safe]
    fastest = max(option.tokens_per_s for option in sure)
    equal = {option.name for option in sure if option.tokens_per_s >= (1 - SPEED_TOLERANCE) * fastest}
    first = [option.name for option in eight_b.options[: len(equal)]]
    assert first == [name for name in rules.SIMPLEST_FIRST if name in equal]
    assert "its 90 % bound leaves " in explain_best(eight_b)
    both = tuple(option for option in eight_b.options if option.name in ("zero3", "zero3_cpu") and option.fits)
    assert len(both) == 2
    # The step time of an offload is not validated, so no option is certainly faster.
    assert "step times are not validated here" in explain_best(dataclasses.replace(eight_b, options=both))


def test_an_offload_has_the_range_of_its_host_in_advice_and_in_prediction() -> None:
    best = ask("qwen2.5-7b", "2xA100-40").best
    assert best is not None
    assert best.time is not None
    request, step_s = best.request, best.time.step_s.value
    span = offload_range(request, step_s)
    assert span is not None
    assert span[1] > 2 * step_s
    speed = f"about {rounded(best.tokens_per_s)} tokens/s ({NOT_KNOWN}), predicted"
    assert speed in print_page("qwen2.5-7b", "2xA100-40")
    settings = ("--micro_batch", f"{request.micro_batch}", "--accumulation", f"{request.accumulation}")
    words = (*settings, *("--gradient_checkpointing",) * request.gradient_checkpointing)
    command = ("predict", "qwen2.5-7b", "2xA100-40", "--strategy", best.name, "--fitted", *words)
    _, predicted = run_command(*command)
    assert f"about {rounded_seconds(step_s)} a step ({NOT_KNOWN}), " in predicted.splitlines()[0]
    step = read_json(*command)["time"]["step_s"]
    assert (step["low"], step["high"]) == pytest.approx(span)
    assert not step["within_factor_2"]
    # At a rate that was measured the ends are those of other steps.
    with_rate = read_json(*command, "--host_gb_per_s", "40")["time"]["step_s"]
    assert with_rate["within_factor_2"]
    low, high = (rounded_seconds(with_rate[end]) for end in ("low", "high"))
    _, predicted = run_command(*command, "--host_gb_per_s", "40")
    assert f"about {rounded_seconds(with_rate['value'])} a step ({low} to {high}), " in predicted.splitlines()[0]


NVME = ("mistral-7b", "A100-40", "--host_memory", "83")


def with_slow_disk(request: Request) -> Request:
    slow_box = dataclasses.replace(request.box, nvme_read_gb_per_s=0.76, nvme_write_gb_per_s=0.26)
    return dataclasses.replace(request, box=slow_box)


def test_the_range_of_a_step_with_assumed_nvme_has_a_slow_disk() -> None:
    best = ask(*NVME).best
    assert best is not None
    assert best.time is not None
    request, step_s = best.request, best.time.step_s.value
    assert request.strategy.uses_nvme
    slow_s = predict_time(with_slow_disk(request)).step_s.value
    # Most of the step is NVMe's.
    assert slow_s > 5 * step_s
    box_with_rates = dataclasses.replace(request.box, is_nvme_given=True)
    span = offload_range(request, step_s)
    narrower_span = offload_range(dataclasses.replace(request, box=box_with_rates), step_s)
    assert span is not None
    assert narrower_span is not None
    assert span == pytest.approx((narrower_span[0], narrower_span[1] + slow_s - step_s))
    settings = ("--micro_batch", f"{request.micro_batch}", "--accumulation", f"{request.accumulation}")
    words = (*settings, *("--gradient_checkpointing",) * request.gradient_checkpointing, *NVME[2:])
    _, predicted = run_command("predict", *NVME[:2], "--strategy", best.name, "--fitted", *words)
    assert f" a step ({NOT_KNOWN}), " in predicted.splitlines()[0]
    assert f" to {rounded_seconds(span[1])} a step: " in predicted


def test_advice_that_rests_on_assumed_nvme_says_so_in_its_first_lines() -> None:
    best = ask(*NVME).best
    assert best is not None
    assert best.time is not None
    slow = best.tokens_per_s * best.time.step_s.value / predict_time(with_slow_disk(best.request)).step_s.value
    lines = print_page(*NVME).splitlines()
    assert f" ({NOT_KNOWN}), predicted" in "".join(lines[:2])
    (why,) = [line for line in lines[:3] if line.startswith("why ")]
    says = f"and a disk with 0.76 and 0.26 makes it {rounded(slow)} tokens/s: study doctor --nvme_path DIR"
    assert f"assumed to read 10 and write 5 GB/s (--nvme_gb_per_s), {says}" in why
    page_with_rates = "".join(print_page(*NVME, "--nvme_gb_per_s", "10,5").splitlines()[:3])
    assert f" ({NOT_KNOWN}), predicted" in page_with_rates
    assert "assumed" not in page_with_rates


def test_an_option_names_the_release_that_its_accumulation_needs() -> None:
    document, page = read_json("advise", LLAMA_8B, "8xH100"), print_page(LLAMA_8B, "8xH100")
    best = document["strategies"][0]
    assert (best["strategy"], best["accumulation"] > 1) == ("zero1", True)
    # causes.yaml: the gradient is divided twice up to 0.19.5, and micro-batches are dropped up to 0.18.9.
    releases = {row["strategy"]: row["least_deepspeed_release"] for row in document["strategies"]}
    assert (releases["zero2_cpu"], releases["zero3_cpu"]) == ("0.19.6", None)
    assert "needs DeepSpeed 0.19.6 or later" in page


def test_advice_for_lora_loads_frozen_weights_in_16_bits_and_is_compared_with_lora_alone() -> None:
    advice = ask("Qwen/Qwen2.5-7B-Instruct", "4090", "--peft", "lora")
    shape, best = advice.question.shape, advice.best
    assert best is not None
    assert (best.name, best.request.pure, best.request.precision) == ("single", True, "bf16-engine")
    # Frozen weights of 2 bytes; adapters, their gradients and moments of 4, 4 and 8.
    weights = 2 * (shape.parameters - shape.trained_parameters) + 4 * shape.trained_parameters
    assert best.memory.device_parts["parameters"] == pytest.approx(weights, rel=1e-6)
    full, lora = (read_json("advise", LLAMA_8B, "2x4090", "--peft", peft) for peft in ("none", "lora"))
    assert sum(row["fits"] for row in lora["strategies"]) > sum(row["fits"] for row in full["strategies"])
    assert [all("LoRA" in line for line in document["nearest"]) for document in (full, lora)] == [False, True]


def test_adapters_of_a_quantized_model_are_not_said_to_be_fp32_in_trl() -> None:
    lora = ("--peft", "lora", "--seq_length", "512")
    page = print_page("qwen2.5-7b", "T4", *lora, "--quantization", "4bit")
    assert "TRL since 0.26.0 casts them to bf16, which fp16's loss scaler refuses: before train()" in page
    page = print_page("qwen2.5-7b", "L4", *lora, "--quantization", "4bit")
    assert "TRL since 0.26.0 casts them to bf16" in page
    assert "loss scaler" not in page
    assert "TRL" not in print_page("qwen2.5-0.5b", "T4", *lora)


def test_another_optimizer_is_compared_without_the_optimizer_on_the_host(tmp_path: Path) -> None:
    usual, smaller = ask(LLAMA_8B, "8xH100"), ask(LLAMA_8B, "8xH100", "--optimizer", "adamw_8bit")
    names = {option.name for option in usual.options if not option.request.strategy.offloads}
    # bitsandbytes' optimizers crash on FSDP2's tensors.
    assert {option.name for option in smaller.options} == names - {"fsdp2"}
    assert {option.request.optimizer for option in smaller.options} == {"adamw_8bit"}
    for advice, moments in ((usual, 8), (smaller, 2 * (1 + 4 / 256))):
        (option,) = [option for option in advice.options if option.name == "zero3"]
        # fp32 masters and two moments, over eight ranks.
        expected = advice.question.shape.parameters * (4 + moments) / 8
        assert option.memory.device_parts["optimizer"] == pytest.approx(expected, rel=1e-4)
    page = print_page(LLAMA_8B, "8xH100", "--optimizer", "adamw_8bit")
    assert ", bf16, optimizer: adamw_8bit\n" in page
    assert "no optimizer on the host is compared: DeepSpeed refuses adamw_8bit there" in page
    assert " --optimizer adamw_8bit" in page.splitlines()[-1]
    written = print_page(LLAMA_8B, "8xH100", "--optimizer", "lion", "--output", str(tmp_path))
    assert "bf16=True, optim='lion_32bit')" in written
    # It has no such optimizer.
    assert "study/train.py" not in written


@pytest.mark.parametrize(
    ("flags", "batch", "work"),
    [
        (["--micro_batch", "2"], 64, (2, 4)),
        (["--micro_batch", "3"], 72, (3, 3)),
        (["--accumulation", "4"], 64, (2, 4)),
        (["--micro_batch", "1", "--accumulation", "2"], 16, (1, 2)),
        (["--micro_batch", "4", "--global_batch_size", "128"], 128, (4, 4)),
    ],
)
def test_a_micro_batch_or_an_accumulation_is_not_searched_for(
    flags: list[str], batch: int, work: tuple[int, int]
) -> None:
    advice = ask("gpt2-xl", "8xA100-40", *flags)
    assert advice.question.global_batch == batch
    assert {(option.request.micro_batch, option.request.accumulation) for option in advice.options} == {work}
    # On more machines a rank has fewer samples, and perhaps no micro-batch of that size.
    more = dataclasses.replace(advice.question, box=to_box("4x8xA100-40"))
    samples = max(1, round(batch / 32))
    largest = max(size for size in range(1, work[0] + 1) if samples % size == 0)
    assert recommend(more, "zero2").request.micro_batch == largest


def test_candidates_are_the_strategies_that_train_on_the_hardware() -> None:
    for precision, names in (("bf16", {"single", "zero1"}), ("fp16", {"single", "zero1"}), ("fp32", {"single"})):
        names_found = candidates(AdviceRequest(model_shape("gpt2"), to_box("L4"), 128, precision))
        assert {name for name in names_found if not read_strategy(name).offloads} == names
    for box, replicas in (("8xL4", set()), ("8x1xL4", set()), ("4x4xL4", set(WITH_REPLICAS))):
        names_found = candidates(AdviceRequest(model_shape("gpt2-xl"), to_box(box), 1024, "bf16"))
        assert set(WITH_REPLICAS) & set(names_found) == replicas
    # To NVMe DeepSpeed swaps no tensor below 1 MiB: a run would load the model and then fail.
    shape = with_adapters(model_shape("gpt2-xl"), 8)
    on_drive = ("zero3_nvme", "zero3_nvme_optimizer")
    for box, fit in (("A100", True), ("64x8xA100", False)):
        for option in advise(AdviceRequest(shape, to_box(box), 1024, "bf16"), on_drive).options:
            assert (option.fits, "is swapped" in option.why) == (fit, not fit), (box, option.name)


def test_the_command_for_this_study_trains_the_advised_option(tmp_path: Path) -> None:
    best = recommend(AdviceRequest(with_adapters(model_shape("gpt2-xl"), 16), to_box("2xA100"), 1024, "bf16"), "zero2")
    command = write_files(best, tmp_path, "drive", "gpt2-xl").of_study or ""
    assert command.endswith("--peft lora --lora_rank 16")
    config = resolve_config(parse_command_line(command.partition("study/train.py ")[2].split()), True)
    assert (config.task, config.model_name_or_path) == ("gpt-wikitext", "gpt2-xl")
    assert config.batch_plan(2).per_device_train_batch_size == best.request.micro_batch
    nodes = recommend(dataclasses.replace(TINY, box=to_box("2x2xL4"), global_batch=8), "zero2")
    document = read_yaml(write_files(nodes, tmp_path / "nodes", "drive", "gpt-tiny").accelerate)
    assert (document["num_machines"], document["num_processes"]) == (2, 4)
    # A folder's path is printed in full, and a model given by sizes has nothing to load.
    assert "--model_name_or_path some/gpt2 " in (write_files(best, tmp_path, "drive", "some/gpt2").of_study or "")
    assert write_files(best, tmp_path, "drive", SIZES).of_study is None
    chunked = recommend(dataclasses.replace(TINY, trainer=TrainerSettings(loss_kernel="liger")), "zero2")
    assert write_files(chunked, tmp_path / "chunked", "drive", "gpt2-xl").of_study is None


@pytest.mark.parametrize(
    ("model", "box", "precision", "rank"),
    [
        ("gpt2", "4xA100", "bf16", None),
        ("gpt2-xl", "2xL4", "fp32", None),
        ("gpt2-large", "RTX4090", "bf16", None),
        ("bert-large-uncased", "4xV100", "fp16", None),
        ("gpt2-xl", "2x8xA100-40", "bf16", 16),
    ],
)
def test_a_printed_command_needs_the_memory_that_was_advised(model, box, precision, rank, tmp_path):
    shape = model_shape(model) if rank is None else with_adapters(model_shape(model), rank)
    question = AdviceRequest(shape, to_box(box), 512, precision, attention="eager", global_batch=64)
    advised = [option for option in advise(question).options if option.fits]
    commands = {option.name: write_files(option, tmp_path, "drive", model) for option in advised}
    # With FSDP this study gathers fp32, and Accelerate gathers 16 bits for a user's program.
    without = {name for name, files in commands.items() if files.of_study is None}
    # Without DeepSpeed it keeps frozen weights in fp32.
    other_programs = {"fsdp2", "hsdp", *["ddp"] * (rank is not None)} if precision != "fp32" else set()
    # Its loop reduces once.
    other_programs |= {option.name for option in advised if option.request.sync_each_batch}
    assert without == other_programs & commands.keys()
    for option in advised:
        advised_request, files = option.request, commands[option.name]
        if files.of_study is None:
            continue
        config = resolve_config(parse_command_line(files.of_study.partition("study/train.py ")[2].split()), True)
        plan = config.batch_plan(advised_request.box.ranks)
        sizes = plan.per_device_train_batch_size, plan.gradient_accumulation_steps
        request = request_for(option.name, config, advised_request.box, *sizes)
        if files.deepspeed is not None:
            strategy = dataclasses.replace(request.strategy, deepspeed=json.loads(files.deepspeed.read_text()))
            request = dataclasses.replace(request, strategy=strategy)
        assert predict_memory(request).peak_reserved == option.memory.peak_reserved, option.name


def _at_speed(option: Option, tokens_per_s: float, error: float | None) -> Option:
    """Return the same option with another step time."""
    assert option.time is not None
    seconds = 1 / tokens_per_s
    ends = (None, None) if error is None else ((1 - error) * seconds, (1 + error) * seconds)
    per_gpu = Estimate(tokens_per_s / option.request.box.ranks)
    time = dataclasses.replace(option.time, step_s=Estimate(seconds, *ends), tokens_per_s_per_gpu=per_gpu)
    return dataclasses.replace(option, time=time)


@pytest.mark.parametrize(("times", "first"), [(0.9, "zero2_cpu"), (1.1, "zero2")])
def test_an_offload_is_advised_if_it_is_ahead_by_more_than_the_error_of_such_predictions(times, first):
    options = {option.name: option for option in advise(TINY, ["zero1", "zero2", "zero2_cpu"]).options}
    # Slower than its like by more than the two predictions may differ.
    plain = times * 100 / max_offload_slowdown()
    speeds = {"zero2_cpu": (100.0, None), "zero2": (plain, 0.15), "zero1": (0.9 * plain, 0.15)}
    order = rules.rank_options([_at_speed(options[name], *speed) for name, speed in speeds.items()])
    assert order[0].name == first
    # The offload is next if it is the fastest of the rest.
    assert ("no offload: zero2_cpu is" in explain_best(Advice(TINY, order))) is (first == "zero2")


def test_an_offload_names_its_needs_if_the_hardware_does_not_state_them() -> None:
    box = dataclasses.replace(to_box("T4"), nvme_read_gb_per_s=3.5)
    advice = advise(AdviceRequest(model_shape("gpt2"), box, 128, "fp16"), ["single", "zero2_cpu", "zero3_nvme"])
    lines = {option.name: " ".join(rules.unchecked_needs(option)) for option in advice.options}
    (host,) = (option.memory.host_peak for option in advice.options if option.name == "zero2_cpu")
    assert lines["single"] == ""
    assert f"{rounded(host.value / 2**30)} GiB of host memory are not checked (--host_memory GIB)" in lines["zero2_cpu"]
    assert "read 3.5 and write 5 GB/s (--nvme_gb_per_s)" in lines["zero3_nvme"]
    # The fastest option that needs less host memory.
    lighter = "with less host memory: zero3_nvme_optimizer (micro-batch 2 x accumulation 8, gradient checkpointing)"
    assert lighter in print_page("qwen2.5-7b", "4x4090")
    assert "with less host memory" not in print_page("qwen2.5-7b", "4x4090", "--host_memory", "512")


def test_the_optimizer_on_the_host_is_compared_at_the_recommended_micro_batch() -> None:
    advice = ask("llama-3.1-8b", "8xH100")
    best = advice.best
    assert best is not None
    line = offload_line(advice)
    assert line is not None
    settings = ("--micro_batch", f"{best.request.micro_batch}", "--accumulation", f"{best.request.accumulation}")
    predicted = read_json("predict", "llama-3.1-8b", "8xH100", "--strategy", "zero2_cpu", "--fitted", *settings)
    peaks = [rounded(size / 2**30) for size in (predicted["device_bytes"], device_bytes(best.memory))]
    memory = predicted["memory"]
    ends = memory["peak_reserved"]["high"] + memory["device_parts"]["context"], device_bytes(best.memory, at_upper=True)
    bounds = [rounded(size / 2**30) for size in ends]
    takes = f"{peaks[0]} GiB of a GPU (90 % bound {bounds[0]}) instead of {peaks[1]} ({bounds[1]})"
    assert f"(zero2_cpu) the same micro-batch takes {takes}, and " in line
    offload = next(option for option in advice.options if option.name == "zero2_cpu")
    assert offload.speed_ends is not None
    assert offload.speed_ends[0] < offload.tokens_per_s / 2
    assert line.endswith(f" it has {offload.tokens_per_s / best.tokens_per_s:.0%} of the speed ({NOT_KNOWN})")
    assert line in print_page("llama-3.1-8b", "8xH100", "--details")
    assert line == read_json("advise", "llama-3.1-8b", "8xH100")["optimizer_on_host"]
    # An offload that is recommended has nothing to compare with, and one whose host is too small does not fit.
    alone = ask("llama-3.1-8b", "1x4090")
    assert alone.best is not None
    assert alone.best.request.strategy.offloads
    assert offload_line(alone) is None
    assert "it would not fit: " in (offload_line(ask("llama-3.1-8b", "8xH100", "--host_memory", "100")) or "")


def test_an_option_that_fits_only_by_its_predicted_peak_is_named_separately(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Predictions with other intervals are neither taken from the cache nor left in it.
    predict_memory.cache_clear()
    request.addfinalizer(predict_memory.cache_clear)
    wide = {"low": 0.9, "high": 2.0}
    monkeypatch.setattr(intervals, "_INTERVALS", {"above_state": wide, "offload_above_state": wide})
    advice = advise(AdviceRequest(model_shape(LLAMA_8B), to_box("8xH100"), 2048, "bf16"), ["fsdp2", "zero3_cpu"])
    best, riskier = advice.best, rules.faster_riskier_option(advice)
    assert best is not None
    assert riskier is not None
    assert (best.is_safe, riskier.is_safe, riskier.fits) == (True, False, True)
    assert riskier.tokens_per_s > (1 + SPEED_TOLERANCE) * best.tokens_per_s
    assert device_bytes(best.memory, at_upper=True) <= usable_bytes(best.request.box)
    # Weights and optimizer state are exact.
    state = best.memory.device_parts["parameters"] + best.memory.device_parts["optimizer"]
    peak = best.memory.peak_reserved
    assert peak.high == pytest.approx(state + 2 * (peak.value - state))


@pytest.mark.parametrize(
    ("model", "hardware", "flags", "changes"),
    [
        ("gpt-13b", "2xT4", ("--host_memory", "16"), ["LoRA", "QLoRA (4-bit weights)", "8 such machines"]),
        (LLAMA_8B, "1x4090", ("--seq_length", "32768", "--peft", "lora"), ["--chunked_loss", "8192 tokens per sample"]),
    ],
)
def test_if_nothing_fits_the_changes_that_make_something_fit_are_printed(
    model: str, hardware: str, flags: tuple[str, ...], changes: list[str]
) -> None:
    lines = re.findall(r"^with (.*) it would be (\w+)", print_page(model, hardware, *flags, status=1), re.MULTILINE)
    assert [label for label, _ in lines] == changes
    # With the last change the command recommends the named strategy; with less of it nothing fits.
    words = {
        "8 such machines": ("8x2xT4", *flags),
        "8192 tokens per sample": (hardware, "--seq_length", "8192", *flags[2:]),
    }
    less = {
        "8 such machines": ("4x2xT4", *flags),
        "8192 tokens per sample": (hardware, "--seq_length", "16384", *flags[2:]),
    }
    assert print_page(model, *words[changes[-1]]).startswith(f"Use {lines[-1][1]},")
    print_page(model, *less[changes[-1]], status=1)


def test_twice_the_machines_are_named_once() -> None:
    page = print_page("llama-3.1-70b", "8xH100", "--host_memory", "64", status=1)
    lines = [line for line in page.splitlines() if re.match("with .*machine", line)]
    assert len(lines) == 1
    assert lines[0].startswith("with a second such machine it would be zero3, which may not fit (90 % bound ")


def test_plain_training_of_bf16_weights_is_a_row_of_its_own_where_it_is_faster() -> None:
    words = (MIDDLE, "8xA100-80", "--seq_length", "1024")
    page, document = print_page(*words), read_json("advise", *words)
    plain = document["plain_in_16_bits"]
    assert (plain["strategy"], plain["sure_to_fit"], plain["loads_in_16_bits"]) == ("ddp", True, True)
    # Plain training of fp32 weights recomputes.
    (fp32,) = [row for row in document["strategies"] if row["strategy"] == "ddp"]
    assert (fp32["gradient_checkpointing"], plain["gradient_checkpointing"]) == (True, False)
    assert fp32["tokens_per_s"] < 0.6 * plain["tokens_per_s"]
    # Weights and two moments of 2 bytes.
    assert plain["device_parts"]["parameters"] == 2 * document["parameters"]
    assert plain["device_parts"]["optimizer"] == pytest.approx(4 * document["parameters"], rel=1e-4)
    # It has a row below the recommendation, which keeps fp32 masters.
    lines = page.splitlines()
    recommended = next(place for place, line in enumerate(lines) if line.endswith(" recommended"))
    assert re.match(r"ddp, bf16 weights .*, without fp32 masters$", lines[recommended + 1])
    assert "ddp, bf16 weights: " in page
    assert "small updates are lost" in page
    # Another command has the same figures.
    (command,) = [line for line in lines if "--pure_bf16" in line]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([*shlex.split(command)[1:], "--json"])
    predicted = json.loads(out.getvalue())
    assert predicted["device_bytes"] == plain["device_bytes"]
    assert 8 * predicted["time"]["tokens_per_s_per_gpu"]["value"] == pytest.approx(plain["tokens_per_s"])


@pytest.mark.parametrize(
    ("hardware", "flags"),
    [
        # With adapters plain training has 16-bit weights anyway; fp16 needs fp32 weights; 40 GB are too few for both.
        ("8xA100-80", ("--peft", "lora")),
        ("8xV100-32", ()),
        ("8xA100-80", ("--precision", "fp32")),
        ("8xA100-40", ()),
    ],
)
def test_plain_training_of_bf16_weights_is_not_named_where_it_changes_nothing(hardware: str, flags: Any) -> None:
    words = (MIDDLE, hardware, "--seq_length", "1024", *flags)
    assert read_json("advise", *words)["plain_in_16_bits"] is None
    assert "bf16 weights" not in print_page(*words)


def test_if_nothing_else_fits_bf16_weights_without_masters_are_a_change_that_helps() -> None:
    # DeepSpeed refuses this optimizer on the host.
    words = ("llama-3.1-8b", "H100", "--optimizer", "lion")
    page = print_page(*words, status=1)
    assert f"with {rules.IN_16_BITS} it would be single" in page.splitlines()
    flags = ("--strategy", "single", "--pure_bf16", "--gradient_checkpointing")
    assert read_json("predict", *words, *flags)["fits"] is True


def test_a_model_that_no_number_of_machines_fits_is_asked_with_the_most_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    question = AdviceRequest(model_shape("gpt-1t"), to_box("2xRTX3090"), 2048, "bf16", global_batch=64)
    advice = advise(question)
    assert advice.best is None
    labels = []
    ask = rules._fitting_line

    def record(label: str, scenario: AdviceRequest) -> Any:
        labels.append(label)
        return ask(label, scenario)

    monkeypatch.setattr(rules, "_fitting_line", record)
    lines = list(rules.sensitivity_lines(advice))
    assert [label for label in labels if "machines" in label] == ["64 such machines"]
    # None of the fewer ones is enough either.
    for times in rules._MACHINES:
        assert list(ask(f"{times} such machines", rules._resized(question, nodes=times))) == []
    (line,) = lines
    assert line.startswith("with 1024 tokens per sample it would be zero3_cpu")


ADAPTERS = (("--peft", "lora"), ("--peft", "lora", "--quantization", "4bit"))


@pytest.mark.parametrize(
    ("model", "box", "fitting"),
    [("llama-3.1-8b", "4090", (0, 1)), ("qwen2.5-7b", "RTX3090", (0, 1)), ("qwen2.5-14b", "4090", (1,))],
)
def test_where_full_training_needs_an_offload_the_page_has_the_figures_of_adapters(model, box, fitting) -> None:
    """They are those of the advice with these flags, which holds every limit."""
    host = ("--host_memory", "128")
    page = print_page(model, box, *host)
    (line,) = [line for line in page.splitlines() if line.startswith("adapters need no offload: ")]
    parts = dict(part.split(" under ") for part in line.partition(": ")[2].split("; "))
    assert list(parts) == [" ".join(ADAPTERS[place]) for place in fitting]
    for flags, says in parts.items():
        best = ask(model, box, *flags.split(), *host).best
        assert best is not None
        assert best.is_safe
        assert not best.request.strategy.offloads
        sizes = (device_bytes(best.memory, at_upper=upper) / GIB for upper in (False, True))
        peak, bound = map(rounded, sizes)
        figures = f"{best.name}: {peak} GiB, 90 % bound {bound}, {rounded(best.tokens_per_s)} tokens/s"
        assert says == f"{figures} with {workload_text(best.request)}"
    assert read_json("advise", model, box, *host)["changes"][0] == line


@pytest.mark.parametrize(("box", "flags"), [("8xH100", ()), ("4090", ADAPTERS[0])])
def test_adapters_are_not_named_where_full_training_fits_or_they_are_asked_for(box, flags) -> None:
    assert "adapters need no offload" not in print_page("llama-3.1-8b", box, *flags)


def test_a_strategy_whose_gpus_cannot_load_the_weights_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 3 shards 4-bit weights after each GPU has all of them; FSDP also shards them from host memory."""
    model, box = "llama-3-70b", "4x3090"
    advice = ask(model, box, *ADAPTERS[1])
    assert advice.best is not None
    assert advice.best.name == "fsdp2"
    assert advice.best.request.loads_on_host
    reasons = {option.why for option in advice.options if option.request.strategy.zero_stage == 3}
    (needed,) = re.findall("'loading needs (.*) of 23.6 GiB on each GPU'", str(reasons))
    page = print_page(model, box, *ADAPTERS[1])
    assert f"do not fit 23.6 GiB a rank while weights are loaded: zero3_cpu ({needed}), " in page
    types = 'bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16'
    config = f"BitsAndBytesConfig(load_in_4bit=True, {types})"
    assert f"load the model with {config} and device_map={{'': 'cpu'}}" in page
    # The command below the page has the recommended figures.
    predicted = shlex.split(page.splitlines()[-1])
    assert main([*predicted[1:], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["fits"], document["device_bytes"]) == (True, device_bytes(advice.best.memory))
    for strategy, remedy in (("zero3_cpu", ""), ("fsdp2", " (with --quantized_on_host in host memory)")):
        words = ("predict", model, box, "--strategy", strategy, "--gradient_checkpointing", *ADAPTERS[1])
        assert read_json(*words)["fits"] is False
        first = run_command(*words)[1].splitlines()[0]
        assert first == f"Does not fit: loading needs {needed} of 23.6 GiB on each GPU{remedy}; predicted"
        file = str(ROOT / f"accelerate_configs/{strategy}.yaml")
        explained = [
            "explain",
            file,
            model,
            "--hardware",
            box,
            "--world_size",
            "4",
            "--precision",
            "bf16",
            *ADAPTERS[1],
        ]
        main([*explained, "--gradient_checkpointing"])
        text = f"Does not fit while quantized weights are loaded: {needed} of 23.6 GiB{remedy}. After that: "
        assert capsys.readouterr().out.startswith(text)
        main([*explained, "--gradient_checkpointing", "--json"])
        assert json.loads(capsys.readouterr().out)["fits"] is False


def test_the_calculator_says_why_stage_3_cannot_load_the_weights() -> None:
    calculator = Calculator()
    calculator.ask(json.dumps(["llama-3-70b", "--hardware", "4x3090", *ADAPTERS[1]]))
    fitting = [json.loads(calculator.best(name))["fits"] for name in ("fsdp2", "zero3_cpu")]
    assert fitting == [True, False]
    ranked = json.loads(calculator.rank())
    assert ranked["recommended"] == "fsdp2"
    assert re.fullmatch("loading needs .* of 23.6 GiB on each GPU", ranked["remarks"]["zero3_cpu"])


def test_what_adapters_need_names_the_flag_without_which_no_gpu_loads_them() -> None:
    page = print_page("qwen2.5-32b", "4xT4", "--host_memory", "500", "--seq_length", "1024")
    (line,) = [line for line in page.splitlines() if line.startswith("adapters need no offload: ")]
    flags, _, says = line.partition(": ")[2].partition(" under ")
    assert flags.split() == [*ADAPTERS[1], "--quantized_on_host"]
    best = ask("qwen2.5-32b", "4xT4", *flags.split(), "--host_memory", "500", "--seq_length", "1024").best
    assert best is not None
    assert says.startswith(f"{best.name}: {rounded(device_bytes(best.memory) / GIB)} GiB, ")


def test_if_no_gpu_loads_the_weights_that_is_why_nothing_fits() -> None:
    page = print_page("llama-3-70b", "4090", *ADAPTERS[1], status=1)
    says = "Nothing fits: under zero3_cpu, which needs least, loading needs .* of 23.6 GiB on each GPU\n"
    assert re.match(says, page)


def test_if_nothing_fits_it_prints_what_would_help() -> None:
    page = print_page(LLAMA_8B, "8xH100", "--seq_length", "65536", status=1)
    # The sample's own figures: logits 93.9, activations 18.0, context 1.4.
    assert "no number of GPUs helps: one sample needs 113 GiB" in page
    assert "a chunked loss (--chunked_loss)" in page
    # The suggested change helps.
    chunked = AdviceRequest(
        model_shape(LLAMA_8B), to_box("8xH100"), 65536, "bf16", trainer=TrainerSettings(loss_kernel="liger")
    )
    assert recommend(chunked, "zero3").is_safe
    page = print_page("gpt-13b", "2xT4", "--host_memory", "16", status=1)
    ((name, needed_gib),) = re.findall(r"Nothing fits this host: (\w+) needs ([\d.]+) GiB,", page)
    enough = dataclasses.replace(to_box("2xT4"), host_gib_per_node=float(needed_gib) + 8.0)
    assert recommend(AdviceRequest(model_shape("gpt-13b"), enough, 2048, "fp16"), name).fits


def test_one_machine_is_named_if_the_network_makes_two_slower() -> None:
    page = print_page("llama-3.1-8b", "2x8xH100", "--network_gb_per_s", "0.156")
    (times,) = re.findall(r"one of these machines alone is ([\d.]+) x as fast, under \w+", page)
    assert float(times) > 5
    assert "one of these machines" not in print_page("llama-3.1-8b", "2x8xH100")


def test_the_default_global_batch_divides_into_micro_batches() -> None:
    """64 samples rounded up to the ranks gave 13 and 11 samples per rank, and only one at a time fits."""
    options = [ask("llama-3.1-8b", f"{count}xRTX4090").best for count in (4, 5, 6)]
    first, second, third = (option.tokens_per_s for option in options if option is not None)
    assert first < second < third


def test_a_chunked_loss_is_asked_for_by_a_flag() -> None:
    flags = ("--chunked_loss", "--strategy", "zero3", "--seq_length", "8192")
    full = read_json("predict", LLAMA_8B, "8xH100", *flags)
    assert full["chunked_loss"] is True
    # A frozen matrix has no gradient; the remaining tensors are three times as wide as the hidden states.
    frozen = 3 * 2 * 8192 * 4096
    assert full["memory"]["device_parts"]["logits"] - frozen == 2 * 2 * 128256 * 4096
    lora = ask(LLAMA_8B, "8xH100", "--chunked_loss", "--seq_length", "8192", "--peft", "lora").best
    assert lora is not None
    # Adapters have their peak in the backward pass, when the loss is past.
    assert lora.memory.most_parts["logits"] == frozen * lora.request.micro_batch


@pytest.mark.parametrize(
    ("hardware", "strategy", "precision"),
    # A T4 has no bf16.
    [
        ("2xT4", "zero2", "fp16-engine"),
        ("2xT4", "zero0", "fp16"),
        ("2xT4", "ddp", "fp16"),
        ("2xT4", "fsdp2", "fp16"),
        ("2xL4", "zero0", "bf16-engine"),
        ("2xL4", "zero1", "bf16-engine"),
        ("2xL4", "fsdp2", "bf16"),
    ],
)
def test_predict_asks_for_the_precision_that_advice_picks(hardware: str, strategy: str, precision: str) -> None:
    assert read_json("predict", "gpt2", hardware, "--strategy", strategy)["precision"] == precision
    # Advice does not try every strategy.
    options = ask("gpt2", hardware).options
    assert {option.request.precision for option in options if option.name == strategy} <= {precision}


@pytest.mark.parametrize(("model", "hardware"), [("llama-3.1-8b", "4xA100"), ("gpt2-xl", "RTX4090")])
def test_the_first_line_is_the_answer(model: str, hardware: str) -> None:
    page, document = print_page(model, hardware), read_json("advise", model, hardware)
    assert page.startswith(f"Use {document['recommended']}, ")
    best = document["strategies"][0]["strategy"]
    assert next(line for line in page.splitlines() if line.startswith(f"{best} ")).endswith("recommended")
    assert ("reports/" in page, "reports/" in print_page(model, hardware, "--details")) == (False, True)


@pytest.mark.parametrize(
    ("strategy", "hardware", "precision"),
    [
        ("zero3", "8xH100", "bf16-engine (weights and gradients bf16)"),
        ("fsdp2", "8xH100", "bf16 (weights fp32)"),
        ("ddp", "T4", "fp16 (weights and gradients fp32)"),
    ],
)
def test_predict_begins_with_the_fit_and_the_step_time(strategy: str, hardware: str, precision: str) -> None:
    words = ("predict", "llama-3.1-8b", hardware, "--strategy", strategy)
    page, document = run_command(*words)[1], read_json(*words)
    verdict = page.splitlines()[0]
    assert verdict.startswith("Does not fit: " if not document["fits"] else ("Fits: ", "May not fit: "))
    assert f" {rounded(document['device_bytes'] / 2**30)} of " in verdict
    step = f"; about {rounded_seconds(document['time']['step_s']['value'])} a step"
    # A step that does not fit has no time.
    assert (step in verdict) == document["fits"]
    # The longest bar belongs to the largest part.
    bars = {line.split()[0]: line.count("█") for line in page.splitlines() if "█" in line}
    parts = document["memory"]["device_parts"]
    inside = sum(size for name, size in parts.items() if name not in ("context", "fragmentation"))
    assert inside == pytest.approx(document["memory"]["peak_allocated"]["value"])
    assert max(bars, key=bars.__getitem__) == max(parts, key=parts.__getitem__)
    assert f"), {precision},\n" in page
    assert ["peak reserved" in text for text in (page, run_command(*words, "--details")[1])] == [False, True]


def test_a_strategy_that_fits_with_checkpointing_alone_says_so() -> None:
    words = (
        "predict",
        "llama-3.1-8b",
        "4090",
        "--strategy",
        "single",
        "--peft",
        "lora",
        "--quantization",
        "4bit",
        "--lora_targets",
        "all-linear",
    )
    recomputed = rounded(read_json(*words, "--gradient_checkpointing")["device_bytes"] / 2**30)
    says = f"May not fit: .*; with --gradient_checkpointing {recomputed} GiB; predicted"
    assert re.match(says, run_command(*words)[1])


def test_a_micro_batch_of_dpo_is_given_in_pairs_below_the_first_line() -> None:
    """A sequence is a sample of the model: two of them have twice the activations."""
    words, activations = ("predict", "llama-3.1-8b", "8xH100", "--strategy", "fsdp2"), []
    for size, text in (("1", "half a pair"), ("2", "1 pair"), ("3", "1.5 pairs")):
        flags = ("--with_reference", "--micro_batch", size)
        assert f"DPO: micro-batch {size} is {text}: " in run_command(*words, *flags)[1].splitlines()[1]
        activations.append(read_json(*words, *flags)["memory"]["device_parts"]["activations"])
    assert activations[1] == pytest.approx(2 * activations[0], rel=0.01)
    assert "DPO" not in run_command(*words)[1]
    advised = print_page("llama-3.1-8b", "8xH100", "--with_reference").splitlines()
    # Below the verdict, which has one line or two.
    micro_batch = re.findall(r"micro-batch ([0-9]+),", advised[0])[0]
    assert any(line.startswith(f"DPO: micro-batch {micro_batch} is ") for line in advised[1:3])


def test_files_with_other_contents_are_not_replaced(tmp_path: Path) -> None:
    best = recommend(TINY)
    first = write_files(best, tmp_path, "nvme_offload", "gpt2")
    assert write_files(best, tmp_path, "nvme_offload", "gpt2") == first
    first.accelerate.write_text("mine: 1\n")
    for folder, says in ((tmp_path, "other contents"), (first.accelerate, "cannot be written")):
        with pytest.raises(UserError, match=says):
            write_files(best, folder, "nvme_offload", "gpt2")


def test_zero0_is_tried_in_fp32_alone_and_ddp_is_not_passed_over_for_a_little_memory() -> None:
    # In 16 bits stage 0 trains something else (docs/compositions.md).
    tried = {
        precision: "zero0" in candidates(dataclasses.replace(TINY, precision=precision))
        for precision in ("fp32", "bf16", "fp16")
    }
    assert tried == {"fp32": True, "bf16": False, "fp16": False}
    best = ask("llama-3.1-8b", "2xA100-40", "--peft", "lora", "--lora_rank", "16").best
    assert best is not None
    assert best.name == "ddp"


def test_speeds_have_one_base_and_a_slow_plain_training_has_its_reason() -> None:
    page = print_page("gpt2-xl", "4xA100")
    assert page.startswith("Use zero1, ")
    assert re.search("^ddp .* fp32 weights under autocast, not 16-bit ones", page, re.MULTILINE)
    # A simpler option that is slower is recommended elsewhere: the table and the reason state one figure.
    for model, hardware in (("llama-3.1-8b", "8xH200"), ("gpt2-xl", "8xH100"), ("qwen3-8b", "8xH200")):
        page = print_page(model, hardware)
        for name, figure in re.findall(r"(\w+),? is ([\d.]+% (?:faster|slower))", page):
            rows = [line for line in page.splitlines() if line.startswith(f"{name} ")]
            assert figure in rows[0] or "slower" in figure
            best = ask(model, hardware).best
            rival = next(option for option in ask(model, hardware).options if option.name == name)
            assert best is not None
            assert figure == rules.speed_text(rival, best)


def test_a_limit_is_printed_as_it_was_given() -> None:
    page = print_page("qwen2.5-7b", "4x4090", "--host_memory", "128")
    assert "do not fit 128 GiB of host memory a node: " in page
    # By the option's memory, not by its reason.
    advice = ask("qwen2.5-7b", "4x4090", "--host_memory", "128")
    left_out = [dataclasses.replace(option, why="") for option in advice.options if not option.fits]
    lines = list(_left_out_lines(left_out, left_out[0].request.box))
    assert any(line.startswith("do not fit 128 GiB of host memory a node: ") for line in lines)


LLAMA_405B = ("llama-3.1-405b", "16x8xH200")


def test_a_strategy_that_its_host_memory_leaves_out_is_named_with_the_flag_that_brings_it_back() -> None:
    """FSDP2 of Llama 3.1 405B needs 12 TB of host memory a node, and no line showed why zero3 is advised."""
    best, (host_line,) = (
        ask(*LLAMA_405B).best,
        re.findall(r"^with (.*) it would be fsdp2, (.*)$", print_page(*LLAMA_405B), re.M),
    )
    assert best is not None
    assert best.name == "zero3"
    (fsdp2,) = (option for option in ask(*LLAMA_405B).options if option.name == "fsdp2")
    needed = rounded(fsdp2.memory.host_peak.value / GIB)
    assert f"it needs {needed} GiB of a node's host memory while the model is loaded" in host_line[1]
    assert host_line[1].endswith("if each process loads the full model in fp32; a usual host has 1,024")
    assert any(
        line.startswith(f"with {host_line[0]} it would be fsdp2")
        for line in read_json("advise", *LLAMA_405B)["changes"]
    )
    # With the named flag it is the answer, and with less it is left out with the same flag.
    flag, size = host_line[0].split()
    assert print_page(*LLAMA_405B, flag, size).startswith("Use fsdp2, ")
    assert f"fsdp2 ({needed}, {flag} {size})" in print_page(*LLAMA_405B, flag, "2TB")
    left_out = {option.name: option.why for option in ask(*LLAMA_405B, flag, "2TB").options}
    assert left_out["fsdp2"].endswith(f"while the model is loaded ({flag} {size})")
    # A strategy that no GPU of these fits is left out for that.
    assert flag not in left_out["zero1"]
    assert "with --host_memory" not in print_page("llama-3.1-8b", "8xH100")


def test_a_measured_host_has_no_more_digits_than_it_means() -> None:
    """23.5402 GiB."""
    box = dataclasses.replace(TINY.box, device=CPU_CORE, host_gib_per_node=23.54023)
    request = dataclasses.replace(TINY, shape=model_shape(LLAMA_8B), box=box, precision="fp32")
    reasons = {option.why for option in advise(request).options}
    assert any(why.endswith("GiB of host memory for all ranks, of 23.5") for why in reasons), reasons


def test_ddp_that_may_not_fit_says_that_its_weights_are_wider() -> None:
    rows = print_page("gpt2-xl", "4xA100-40GB").splitlines()
    (ddp,) = [row for row in rows if row.startswith("ddp ")]
    assert ddp.endswith("may not fit; fp32 weights under autocast, not 16-bit ones with fp32 masters")


def test_asking_the_hub_without_its_library_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["advise", "someone/some-model", "--hardware", "4xA100-40GB", "--hub"]) == 2
    printed = capsys.readouterr().err
    assert re.fullmatch(
        r"error: huggingface_hub is not installed here. To fix it: run: pip install .*\[train\].*\n", printed
    )


@pytest.mark.parametrize("host", [[], ["--host_memory", "128"], ["--host_memory", "512"]])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "llama-3.1-8b"])
def test_a_hint_holds_every_limit(model: str, host: list[str]) -> None:
    """Gradient checkpointing let the GPUs fit, and the host did not."""
    flags = ("--strategy", "zero3_cpu", "--seq_length", "4096", *host)
    words = ("predict", model, "2xRTX4090")
    verdict = run_command(*words, *flags)[1].splitlines()[0]
    assert not verdict.startswith("Fits: ")
    hinted = (*words, *flags, "--gradient_checkpointing")
    assert ("with --gradient_checkpointing" in verdict) == run_command(*hinted)[1].startswith("Fits: ")
    assert ("with --gradient_checkpointing" in verdict) == (host != ["--host_memory", "128"])
    if not host:
        needed = read_json(*hinted)["memory"]["host_peak"]["value"] / 2**30
        assert f"{rounded(needed)} GiB of host memory a node, unchecked" in verdict


def test_configs_prints_paths_alone_and_says_how_to_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", str(tmp_path), "zero3", "ddp"]) == 0
    printed = capsys.readouterr()
    assert [Path(line).name for line in printed.out.splitlines()] == ["zero3.json", "zero3.yaml", "ddp.yaml"]
    launch = printed.err.splitlines()[0].removeprefix("launch: ")
    assert launch == f"accelerate launch --config_file {tmp_path / 'zero3.yaml'} --num_processes GPUS YOUR_PROGRAM.py"
    assert printed.err.splitlines()[-1] == SAVES_SHARDS
    assert main(["configs", str(tmp_path), "zero2", "fsdp2"]) == 0
    assert SAVES_SHARDS not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [("zero3_hpz", "zero_hpz_partition_size"), ("hsdp", "parallelism_config_dp_shard_size"), ("zero3", "")],
)
def test_configs_names_the_settings_that_depend_on_the_machines(
    strategy: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["configs", str(tmp_path), strategy]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{strategy}: set ")]
    assert len(lines) == bool(setting)
    assert all(setting in line for line in lines)
    assert setting in "".join(file.read_text() for file in tmp_path.iterdir())


def test_configs_warns_of_ulysses_below_stage_3_as_the_known_faults_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title = "gradients are too large by the number of ranks that share a sequence"
    (fault,) = [entry for entry in read_known_findings() if entry.title == title]
    wrong = [f"ulysses_zero{stage}" for stage in (1, 2, 3) if fault.arises_with({"ulysses", f"zero{stage}"})]
    assert main(["configs", str(tmp_path / "ulysses"), "ulysses_zero1", "ulysses_zero2", "ulysses_zero3"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"{', '.join(wrong)}: {SUMS_WITHIN_GROUPS}"
    assert main(["configs", str(tmp_path / "others"), "ulysses_zero3", "zero2_tp", "cp", "zero1"]) == 0
    assert SUMS_WITHIN_GROUPS not in capsys.readouterr().err


def test_an_advice_whose_bound_leaves_no_room_names_one_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    question = AdviceRequest(model_shape("llama-3.1-8b"), to_box("4xA100"), 2048, "bf16", global_batch=64)
    advice = advise(question)
    roomier = rules.roomier_option(advice)
    assert advice.best is not None
    assert roomier is not None
    assert rules._room(advice.best) < rules._ROOM <= rules._room(roomier)
    assert all(
        option.tokens_per_s <= roomier.tokens_per_s
        for option in advice.fitting
        if rules._room(option) >= rules._ROOM and not option.request.strategy.offloads
    )
    main(["advise", "llama-3.1-8b", "--hardware", "4xA100"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("more room: ")]
    assert line.startswith(f"more room: {roomier.name} (micro-batch {roomier.request.micro_batch} x")
    assert "its 90 % bound leaves 6% of the memory; 10% slower, within the error of a step time" in line
    main(["advise", "llama-3.1-8b", "--hardware", "8xH100"])
    assert "more room" not in capsys.readouterr().out


def test_half_the_micro_batch_is_an_option_with_more_room() -> None:
    question = AdviceRequest(model_shape("llama-3.1-8b"), to_box("4xH100"), 2048, "bf16", global_batch=64)
    advice = advise(question, ["zero1"])
    best, roomier = advice.best, rules.roomier_option(advice)
    assert best is not None
    assert rules._room(best) < rules._ROOM
    assert roomier is not None
    assert 2 * roomier.request.micro_batch == best.request.micro_batch
    assert roomier.request.accumulation == 2 * best.request.accumulation
    assert rules._room(roomier) >= rules._ROOM


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_files_of_stage_3_say_what_saving_the_model_needs(name: str, tmp_path: Path) -> None:
    best = recommend(AdviceRequest(model_shape(LLAMA_8B), to_box("8xH100"), 2048, "bf16"), name)
    files = write_files(best, tmp_path, "/nvme", "llama-3.1-8b")
    lines = "\n".join(file_lines(files, best.request, "/nvme"))
    assert (SAVES_SHARDS in lines) == (name == "zero3")


def test_if_no_bound_fits_the_least_one_is_recommended() -> None:
    advice = ask("llama-3.1-8b", "4x3090", *ADAPTERS[1], "--lora_targets", "all-linear", "--seq_length", "8192")
    best = advice.best
    assert best is not None
    assert not any(option.is_safe for option in advice.fitting)
    bounds = {option.name: device_bytes(option.memory, at_upper=True) for option in advice.fitting}
    usable = usable_bytes(best.request.box)
    assert bounds[best.name] <= min(bounds.values()) + 0.02 * usable < bounds["ddp"]
    assert "no 90 % bound fits, and its is the least" in explain_best(advice)


def test_a_chunked_loss_is_named_where_the_logits_cost_speed() -> None:
    words = ("--seq_length", "16384", "--global_batch_size", "32")
    page = print_page("qwen2.5-14b", "4xH100", *words)
    ((name, faster),) = re.findall(r"with --chunked_loss (\w+) .* (\d+)% faster\n", page)
    without, chunked = (ask("qwen2.5-14b", "4xH100", *words, *loss).best for loss in ((), ("--chunked_loss",)))
    assert without is not None
    assert chunked is not None
    assert (chunked.name, without.request.strategy.offloads) == (name, True)
    assert f"{chunked.tokens_per_s / without.tokens_per_s - 1:.0%}" == f"{faster}%"


def test_a_longer_sample_fits_with_a_chunked_loss_as_stated() -> None:
    def best(*flags: str) -> Option | None:
        return ask("llama-3.1-8b", "8xH100", "--global_batch_size", "32", *flags).best

    page = print_page("llama-3.1-8b", "8xH100", "--global_batch_size", "32", "--seq_length", "32768")
    longer = r"with 65536 tokens per sample nothing would fit without --chunked_loss, and (\w+) with it"
    (strategy,) = re.findall(longer, page)
    assert best("--seq_length", "65536") is None
    at_length = best("--seq_length", "65536", "--chunked_loss")
    assert at_length is not None
    assert at_length.name == strategy


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ((), ("--chunked_loss",)),
        (("--chunked_loss", "--seq_length", "6144"), ("--seq_length", "3072")),
    ],
)
def test_a_change_whose_bound_fits_is_printed_before_a_recommendation_that_may_not_fit(
    flags: tuple[str, ...], change: tuple[str, ...]
) -> None:
    model, qlora = "gemma-2-9b-it", ("--precision", "fp16", "--peft", "lora", "--quantization", "4bit")
    box = ("T4", "--host_memory", "12", *qlora)
    page = print_page(model, *box, *flags)
    first, use = page.splitlines()[:2]
    assert use.startswith("Use ")
    assert "may not fit" in page.partition("why")[0]
    # A request with the change recommends the strategy of the line, and its bound fits.
    best, usual = ask(model, *box, *flags, *change).best, ask(model, *box, *flags).best
    assert best is not None
    assert usual is not None
    assert (best.is_safe, usual.is_safe) == (True, False)
    label = change[0] if len(change) == 1 else f"{change[1]} tokens per sample"
    assert first.startswith(f"With {label} a 90 % bound fits: {best.name} (micro-batch {best.request.micro_batch} x ")
    assert first not in page.splitlines()[2:]
    # The text is the same in the document.
    assert first in read_json("advise", model, *box, *flags)["changes"]


def test_a_change_with_which_something_may_not_fit_says_so() -> None:
    page = print_page("gemma-2-9b-it", "T4", "--host_memory", "12", "--precision", "fp16", status=1)
    (bound,) = re.findall(r"^with QLoRA .* zero3_cpu, which may not fit \(90 % bound (.*) GiB\)$", page, re.MULTILINE)
    assert float(bound) > 14.6


def test_a_strategy_without_wrong_releases_is_recommended_if_it_is_hardly_slower() -> None:
    """DeepSpeed 0.15.2 to 0.19.5 compute wrong gradients with zero2_cpu and accumulation, which was recommended."""
    advice = ask("llama-3.1-8b", "4xA100-40", "--seq_length", "8192", "--host_memory", "512GB")
    best = advice.best
    assert best is not None
    assert best.name == "zero3_cpu_optimizer"
    (rival,) = [option for option in advice.fitting if option.name == "zero2_cpu"]
    assert wrong_releases(rival)
    assert not wrong_releases(best)
    assert 0 < speed_gap(rival, best) < 0.02
    assert "no release of DeepSpeed that computes wrong gradients" in reason_against(rival, best)
    # At a larger gap the fault is named, and the faster one stays.
    faster = ask("llama-3.1-8b", "8xH100").best
    assert faster is not None
    assert faster.name == "zero1"
    assert wrong_releases(faster)


def test_a_host_that_is_nearly_filled_gives_way_to_a_strategy_with_room() -> None:
    """Loading 32 B weights for four ranks of FSDP takes 492 GiB, of a host that has 500."""
    words = ("qwen2.5-32b", "16x4xA100-40", "--seq_length", "4096", "--network_gb_per_s", "6.25")
    by_name = {option.name: option for option in ask(*words, "--host_memory", "500").options}
    fsdp, sharded = by_name["fsdp2"], by_name["zero3"]
    assert fsdp.fits
    assert needs_large_host(fsdp)
    assert not needs_large_host(sharded)
    assert "leave little of the 500 that are given" in " ".join(unchecked_needs(fsdp))
    assert ask(*words, "--host_memory", "500").best == sharded
    # 500 GB are 466 GiB.
    assert [option.fits for option in ask(*words, "--host_memory", "500GB").options if option.name == "fsdp2"] == [
        False
    ]


def test_a_measured_run_fits() -> None:
    run = ("--seq_length", "4096", "--measured", "strategy=zero1,micro_batch=1,accumulation=8,tokens_per_s=9000")
    page = print_page("llama-3.1-8b", "8xH100", *run)
    assert page.startswith("Use zero1, micro-batch 1, accumulation 8")
    assert "may not fit" not in page.partition("why")[0]
    assert "(x 7.76): check its unit" in page


def test_the_bus_of_cards_without_nvlink_is_an_assumption_that_is_named() -> None:
    assert "ranks are assumed to communicate at 19.8 GB/s over PCIe (--bus_gb_per_s)" in print_page(
        "llama-3.1-8b", "4x3090"
    )
    assert "(--bus_gb_per_s)" not in print_page("llama-3.1-8b", "8xH100")
    # Of several machines it is still that of one, and the network is named next to it.
    page = print_page("llama-3.1-8b", "2x4x3090", "--network_gb_per_s", "2")
    assert "2 GB/s of network bandwidth per GPU, 8 per node (--network_gb_per_s), of which 60% is assumed" in page
    assert "ranks are assumed to communicate at 19.8 GB/s over PCIe (--bus_gb_per_s)" in page


def test_replicas_that_add_up_gradients_once_a_step_are_compared_on_a_slow_network() -> None:
    """Gradients that are whole between micro-batches do not fit here, and replicas that add them up in each micro-batch
    send them 32 times over the network."""
    words = ("qwen2.5-14b", "2x8xA100", "--network_gb_per_s", "100Gb/s/node", "--gradient_checkpointing", "off")
    advice = ask(*words, "--global_batch_size", "512")
    late, best = rules.option_of_late_replicas(advice), advice.best
    assert late is not None
    assert best is not None
    assert (best.name, late.name, late.request.accumulation) == ("zero3_hpz", "hsdp", 32)
    assert late.tokens_per_s > 3 * best.tokens_per_s
    in_each = dataclasses.replace(late.request, replicas_sync_last=False)
    at_the_end = dataclasses.replace(in_each, sync_each_batch=False)
    sent, once, unsharded = (predict_payload(request) for request in (in_each, late.request, at_the_end))
    assert sent["all_reduce"] == 32 * once["all_reduce"] == 32 * unsharded["all_reduce"]
    assert once["reduce_scatter"] == sent["reduce_scatter"] == 32 * unsharded["reduce_scatter"]
    # A rank has its part of a replica's gradients.
    assert late.is_safe
    assert late.memory.peak_allocated == predict_memory(in_each).peak_allocated
    assert not timing.fits(predict_memory(at_the_end), late.request.box, at_upper=True)
    page = print_page(*words, "--global_batch_size", "512")
    assert "faster in a custom loop: hsdp (micro-batch 1 x accumulation 32" in page
    # If unsharded gradients fit, they are as fast.
    assert rules.option_of_late_replicas(ask("llama-3.1-8b", *words[1:4], "--global_batch_size", "512")) is None


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero2_cpu"])
def test_adapters_load_their_weights_in_16_bits_with_and_without_deepspeed(strategy: str) -> None:
    advice = ask("llama-3.1-8b", "8xH100", "--peft", "lora")
    (option,) = [option for option in advice.options if option.name == strategy]
    predicted = read_json("predict", "llama-3.1-8b", "8xH100", "--strategy", strategy, "--peft", "lora")
    loaded = predicted["memory"]["host_parts"]["load"]
    # In fp32 each of eight processes would have 32 GB.
    assert 2 * 8.03e9 < loaded < 8 * 8.03e9
    assert option.memory.host_parts["load"] == loaded


def test_fsdp_reduces_in_each_micro_batch_where_whole_gradients_do_not_fit(tmp_path: Path) -> None:
    """A 70B model's gradients are 131 GiB in 16 bits, and Accelerate keeps them whole between micro-batches."""
    flags = ("--global_batch_size", "1024", "--seq_length", "4096")
    advice = ask("llama-3.1-70b", "8x8xH100", *flags)
    (fsdp,) = [option for option in advice.options if option.name == "fsdp2"]
    assert fsdp.is_safe
    assert fsdp.request.sync_each_batch
    unsharded = dataclasses.replace(fsdp.request, sync_each_batch=False)
    gradients = [predict_memory(request).device_parts["gradients"] for request in (fsdp.request, unsharded)]
    elements = fsdp.request.shape.trained_parameters
    assert gradients == pytest.approx([4 * elements / 64, 2 * elements], rel=0.01)
    # Reduced in each of them, which costs time.
    count = fsdp.request.accumulation
    sent = [predict_payload(request)["reduce_scatter"] for request in (fsdp.request, unsharded)]
    assert sent == [count * sent[1], sent[1]]
    assert predict_time(fsdp.request).step_s.value > predict_time(unsharded).step_s.value
    page = print_page("llama-3.1-70b", "8x8xH100", *flags)
    assert re.search(r"\nfsdp2 .* sync_each_batch\n", page)
    # The lines on the file have the setting.
    files = write_files(fsdp, tmp_path, "nvme", "llama-3.1-70b")
    lines = list(file_lines(files, fsdp.request, "nvme"))
    assert any("'sync_each_batch': True" in line for line in lines)
    small = ask("gpt2", "8xH100").options
    assert not any(option.request.sync_each_batch for option in small)


def test_a_larger_batch_is_named_where_the_default_gives_each_rank_few_samples() -> None:
    page = print_page("llama-3.1-70b", "8x8xH100")
    ((batch, name, faster),) = re.findall(
        r"with (\d+) samples per step \(--global_batch_size\) (\w+) .* (\d+)% faster", page
    )
    usual = ask("llama-3.1-70b", "8x8xH100")
    larger = ask("llama-3.1-70b", "8x8xH100", "--global_batch_size", batch)
    assert usual.best is not None
    assert larger.best is not None
    assert int(batch) == 8 * (usual.question.global_batch or 0)
    assert larger.best.name == name
    assert f"{larger.best.tokens_per_s / usual.best.tokens_per_s - 1:.0%}" == f"{faster}%"
    # Not if the user has set it, nor if each rank has several samples.
    assert "samples per step (--" not in print_page("llama-3.1-70b", "8x8xH100", "--global_batch_size", "64")
    assert "samples per step (--" not in print_page("llama-3.1-8b", "8xH100")


def test_an_override_that_is_not_modelled_is_to_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--strategy", "zero3", "--engine_override", "zero_optimization.zero_quantized_weights=true"]
    assert main(["predict", "gpt2", "--hardware", "8xH100", *words]) == 2
    assert capsys.readouterr().err.endswith("To fix it: leave it out.\n")


def test_8_bit_weights_are_advised_without_sharding() -> None:
    flags = ("--peft", "lora", "--quantization", "8bit")
    advice = ask("llama-2-7b", "2x3090", *flags)
    assert {option.name for option in advice.options} == {"ddp", "zero1", "zero2", "zero2_cpu"}
    assert "BitsAndBytesConfig(load_in_8bit=True)" in print_page("llama-2-7b", "2x3090", *flags)
    # LLaMA-Factory's table of hardware has 10 GB for 7 B with it.
    predicted = read_json("predict", "llama-2-7b", "3090", "--strategy", "single", *flags, "--gradient_checkpointing")
    assert 7 < predicted["memory"]["peak_reserved"]["value"] / 1e9 < 10


def test_a_reference_model_is_advised_in_pairs_and_the_trainer_s_batch_counts_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TrainingArguments had the sequences, twice the batch, and half a pair was recommended."""
    request = ["advise", "qwen3-8b", "--hardware", "8xH100", "--seq_length", "8192", "--with_reference"]
    assert main([*request, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Use zero3, micro-batch 2,")
    assert "DPOConfig(per_device_train_batch_size=1," in printed
    assert "study/train.py" not in printed
    adapted = ["advise", "llama-3.3-70b", *request[2:], "--peft", "lora", "--quantization", "4bit", "--json"]
    assert main(adapted) == 0
    options = json.loads(capsys.readouterr().out)["strategies"]
    assert options
    assert all(option["micro_batch"] % 2 == 0 for option in options)


def test_8_bit_adamw_is_not_advised_under_fsdp_2(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["qwen3-32b", "--hardware", "8xH100", "--seq_length", "8192", "--loss_kernel", "liger"]
    assert main(["advise", *request, "--optimizer", "adamw_8bit"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Use zero3,")
    assert "no FSDP is compared: bitsandbytes' optimizers end with an illegal memory access" in printed
    assert main(["predict", *request, "--optimizer", "adamw_8bit", "--strategy", "fsdp2"]) in (0, 1)
    assert "bitsandbytes issue 1633" in capsys.readouterr().out


def test_an_offload_that_is_as_fast_is_not_said_to_keep_state_in_faster_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapters = ["--peft", "lora", "--lora_rank", "64", "--lora_targets", "all-linear"]
    request = ["llama-3.3-70b", "--hardware", "2x8xH100", "--seq_length", "32768", "--loss_kernel", "liger", *adapters]
    assert main(["advise", *request]) == 0
    printed = capsys.readouterr().out
    assert "Use zero3_cpu," in printed
    assert "but zero3_cpu has a smaller 90 % bound (" in printed


@pytest.mark.parametrize(
    ("box", "flag", "arguments"),
    [
        ("4090", "", 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)'),
        ("T4", "--double_quant", "bnb_4bit_compute_dtype=torch.float16, bnb_4bit_use_double_quant=True)"),
    ],
)
def test_the_config_of_bitsandbytes_is_that_of_qlora_and_not_its_defaults(box: str, flag: str, arguments: str) -> None:
    flags = ("--peft", "lora", "--quantization", "4bit", *flag.split())
    assert arguments in " ".join(print_page("qwen2.5-3b", box, *flags).split())
