"""`study advise`: what fits, what it recommends, and files that the real launcher takes as they are."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines import ROOT
from study.advisor.advise import (
    AS_FAST,
    SIMPLEST_FIRST,
    Advice,
    AdviceRequest,
    Option,
    advise,
    candidates,
    precision_under,
    ranked,
)
from study.advisor.advise_command import add_arguments, question_of
from study.advisor.advise_files import write_files
from study.advisor.advise_words import because, changes, how_sure, unchecked, worth_trying
from study.cli import main
from study.config.errors import UserError
from study.config.flags import parse_command_line, resolved
from study.config.strategies import WITH_COPIES, read_strategy
from study.predictor import time as intervals
from study.predictor.boxes import box_of
from study.predictor.floor import least_device_bytes, state_bytes
from study.predictor.memory import predict_memory
from study.predictor.request import Estimate
from study.predictor.shape import model_shape, with_adapters
from study.predictor.state import state_of
from study.predictor.time import device_bytes, fits, predict_time, slowest_offload, usable_bytes
from study.records.directory import read_run

LLAMA_8B = "layers=32,hidden=4096,heads=32,vocabulary=128256,inner=14336,key_value_heads=8"
# What a run on this box's cores is asked for.
SIZES = "layers=12,hidden=768,heads=12,vocabulary=50257"
FLASH = ["--attn_implementation", "flash_attention_2"]
TINY = AdviceRequest(model_shape("gpt-tiny"), box_of("2xL4"), 32, "bf16", gradient_checkpointing=False, global_batch=4)


@pytest.fixture(scope="module")
def eight_b() -> Advice:
    return advise(AdviceRequest(model_shape(LLAMA_8B), box_of("8xH100"), 2048, "bf16", price_per_gpu_hour=2.0))


@pytest.mark.alone
def test_eight_b_over_every_strategy_takes_less_than_ten_seconds_of_processor() -> None:
    before = time.process_time()
    arguments = ["advise", "--model_name_or_path", LLAMA_8B, "--hardware", "8xH100"]
    assert main(arguments) == 0
    assert time.process_time() - before < 10


def test_every_strategy_is_there_with_the_largest_micro_batch_that_fits(eight_b: Advice) -> None:
    question = eight_b.question
    assert {option.name for option in eight_b.options} == set(candidates(question))
    assert {option.name for option in eight_b.options if not option.fits} == {"ddp", "zero0"}
    for option in eight_b.fitting:
        one_more = dataclasses.replace(option.request, micro_batch=option.request.micro_batch + 1)
        assert fits(option.memory, question.box, at_upper_end=option.is_sure)
        assert not fits(predict_memory(one_more), question.box, at_upper_end=option.is_sure), option.name
        assert option.cost_per_million_tokens == pytest.approx(8 * 2.0 / 3600 / option.tokens_per_s * 1e6)


def test_nothing_fits_below_what_a_rank_must_hold(eight_b: Advice) -> None:
    for option in eight_b.fitting:
        least = least_device_bytes(
            state_bytes(option.request.strategy, option.request.precision, 8), option.request.shape.parameters, 0
        )
        assert least <= option.memory.peak_allocated.value, option.name


def test_the_recommended_is_the_fastest_and_says_how_sure_it_is(eight_b: Advice) -> None:
    best, other = eight_b.best, eight_b.runner_up
    assert best is not None
    assert other is not None
    sure = [option for option in eight_b.options if option.is_sure]
    equal = [option for option in sure if option.tokens_per_s >= (1 - AS_FAST) * max(map(_speed, sure))]
    assert [option.name for option in eight_b.options[: len(equal)]] == [
        name for name in SIMPLEST_FIRST if name in {option.name for option in equal}
    ]
    assert "it fits at the upper end of its peak's interval too" in how_sure(eight_b)


def test_nothing_is_surely_faster_than_what_nobody_validated(eight_b: Advice) -> None:
    names = ["zero3", "zero3_cpu"]
    both = [option for name in names if (option := eight_b.option(name)) is not None and option.fits]
    assert [option.name for option in both] == names
    advice = dataclasses.replace(eight_b, options=tuple(both))
    assert "nobody has validated times here" in how_sure(advice)


def test_advice_to_offload_says_what_its_time_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model_name_or_path", "gpt2-xl", "--hardware", "T4"]) == 0
    assert capsys.readouterr().out.count("set OMP_NUM_THREADS") == 1


def test_advice_for_lora_compares_it_with_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["advise", "--model_name_or_path", LLAMA_8B, "--hardware", "2x4090", "--json"]
    said = {}
    for peft in ("none", "lora"):
        main([*asked, "--peft", peft])
        said[peft] = json.loads(capsys.readouterr().out)
    lora = said["lora"]
    assert lora["trained_parameters"] < lora["parameters"] / 100
    assert {row["strategy"] for row in lora["strategies"]} == {row["strategy"] for row in said["none"]["strategies"]}
    assert sum(row["fits"] for row in lora["strategies"]) > sum(row["fits"] for row in said["none"]["strategies"])
    assert all("LoRA" in line for line in lora["nearest"])
    assert not any("LoRA" in line for line in said["none"]["nearest"])
    best = next(row for row in lora["strategies"] if row["strategy"] == lora["recommended"])
    assert best["step_s"]["low"] is None
    assert best["fits"]


def test_lora_on_one_gpu_is_advised_with_frozen_weights_in_16_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model_name_or_path", "gpt2-xl", "--hardware", "RTX4090", "--peft", "lora", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recommended"] == "zero1"
    rows = {row["strategy"]: row for row in said["strategies"]}
    assert rows["zero1"]["peak_reserved"]["value"] < rows["single"]["peak_reserved"]["value"]
    assert rows["zero1"]["deepspeed"]["zero_optimization"]["reduce_bucket_size"] == said["trained_parameters"]


def test_on_one_gpu_an_engine_is_advised_for_its_16_bit_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """`single` autocasts fp32 weights, and was all that offloads were compared with."""
    asked = ["--model_name_or_path", "gpt2-xl", "--hardware", "A100-40"]
    assert main(["advise", *asked]) == 0
    page = capsys.readouterr().out
    assert "take zero1 (2 x 32 a rank, without checkpointing): 60% ahead of the next" in page
    assert page.count("an engine for one GPU: nothing is sharded, but its weights are 16 bits") == 1
    assert main(["advise", *asked, "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert (rows["zero1"]["tokens_per_s"], rows["single"]["tokens_per_s"]) == pytest.approx((14222, 7462), rel=1e-3)
    assert "no offload: one is" not in page


@pytest.mark.parametrize(("model", "hardware"), [("gpt2-xl", "A100-40"), ("gpt2", "L4"), ("bert-large-uncased", "T4")])
def test_no_offload_is_ahead_on_one_gpu_where_the_same_fits_without_it(model: str, hardware: str) -> None:
    shape, box = model_shape(model), box_of(hardware)
    precision = "fp16" if hardware == "T4" else "bf16"
    advice = advise(AdviceRequest(shape, box, min(shape.positions or 512, 1024), precision, global_batch=64))
    best = advice.best
    assert best is not None
    assert best.name == "zero1"
    offloads = [option for option in advice.fitting if option.request.strategy.offloads]
    assert len(offloads) == 6
    for option in offloads:
        assert option.tokens_per_s < best.tokens_per_s, option.name
        without = option.name.partition("_")[0]
        asked = dataclasses.replace(option.request, strategy=read_strategy(without))
        assert option.time is not None
        assert predict_time(asked).step_s.value < option.time.step_s.value, option.name


def test_one_gpu_is_advised_what_trains_there() -> None:
    for precision, names in (("bf16", {"single", "zero1"}), ("fp16", {"single", "zero1"}), ("fp32", {"single"})):
        found = candidates(AdviceRequest(model_shape("gpt2"), box_of("L4"), 128, precision))
        assert {name for name in found if not read_strategy(name).offloads} == names


def test_a_drive_that_nothing_would_be_swapped_to_is_not_advised() -> None:
    """A run would load the model and then fail: DeepSpeed swaps no part below a mebibyte."""
    shape = with_adapters(model_shape("gpt2-xl"), 8)
    drives = ("zero3_nvme", "zero3_nvme_optimizer")
    for box, fit in (("A100", [True, True]), ("64x8xA100", [False, False])):
        asked = AdviceRequest(shape=shape, box=box_of(box), sequence_length=1024, precision="bf16")
        found = {option.name: option for option in advise(asked, drives).options}
        assert [found[name].fits for name in drives] == fit, box
        assert all(("is swapped" in found[name].why) != fits for name, fits in zip(drives, fit, strict=True))


def test_what_is_written_for_lora_trains_adapters(tmp_path: Path) -> None:
    shape = with_adapters(model_shape("gpt2-xl"), 16)
    asked = AdviceRequest(shape=shape, box=box_of("2xA100"), sequence_length=1024, precision="bf16")
    best = advise(asked, ["zero2"]).best
    assert best is not None
    of_study = write_files(best, tmp_path, "drive", "gpt2-xl").of_study
    assert of_study is not None
    assert of_study.endswith("--peft lora --lora_rank 16")
    config = resolved(parse_command_line(of_study.partition("study/train.py ")[2].split()), accelerator_visible=True)
    assert (config.task, config.model_name_or_path) == ("gpt-wikitext", "gpt2-xl")
    assert config.batch_plan(2).per_device_train_batch_size == best.request.micro_batch
    # A folder is said whole, and of sizes there is nothing to load.
    folder = write_files(best, tmp_path, "drive", "some/gpt2").of_study
    assert folder is not None
    assert "--model_name_or_path some/gpt2 " in folder
    assert write_files(best, tmp_path, "drive", SIZES).of_study is None


def _speed(option: Option) -> float:
    return option.tokens_per_s


def _as_fast_as(option: Option, tokens_per_s: float, error: float | None) -> Option:
    """The same option, as if its time were another."""
    assert option.time is not None
    seconds = 1 / tokens_per_s
    ends = (None, None) if error is None else ((1 - error) * seconds, (1 + error) * seconds)
    each = Estimate(tokens_per_s / option.request.box.ranks)
    time = dataclasses.replace(option.time, step_s=Estimate(seconds, *ends), tokens_per_s_per_gpu=each)
    return dataclasses.replace(option, time=time)


@pytest.mark.parametrize(("times", "first"), [(0.9, "zero2_cpu"), (1.1, "zero2")])
def test_an_offload_is_taken_where_it_is_ahead_by_more_than_such_steps_were_off(times: float, first: str) -> None:
    advice = advise(TINY, ["zero1", "zero2", "zero2_cpu"])
    one, two, offload = (advice.option(name) for name in ("zero1", "zero2", "zero2_cpu"))
    assert one is not None
    assert two is not None
    assert offload is not None
    # The simplest is slower than its like by more than the two may differ.
    plain = times * 100 / slowest_offload()
    options = [_as_fast_as(offload, 100, None), _as_fast_as(two, plain, 0.15), _as_fast_as(one, 0.9 * plain, 0.15)]
    order = ranked(options)
    assert order[0].name == first
    # The offload comes next where it is the fastest of the rest.
    said = how_sure(Advice(TINY, order))
    assert ("no offload: one is" in said) is (first == "zero2")


def test_what_an_offload_needs_is_said_where_nobody_said_what_there_is() -> None:
    box = dataclasses.replace(box_of("T4"), nvme_read_gb_per_s=3.5)
    advice = advise(AdviceRequest(model_shape("gpt2"), box, 128, "fp16"), ["single", "zero2_cpu", "zero3_nvme"])
    said = {option.name: list(unchecked(option)) for option in advice.options}
    offload = advice.option("zero2_cpu")
    assert offload is not None
    host = "not checked: it needs {:.0f} GiB of host memory; --host-memory says what there is"
    assert said["single"] == []
    assert said["zero2_cpu"] == [host.format(offload.memory.host_peak.value / 2**30)]
    assert said["zero3_nvme"][1:] == ["its drives are taken to read 3.5 and write 5 GB/s (--nvme_gb_per_s)"]
    assert said["zero2_cpu"][0] in how_sure(Advice(advice.question, (offload,)))
    known = dataclasses.replace(box, host_gib_per_node=64.0)
    for option in advise(dataclasses.replace(advice.question, box=known), ["zero2_cpu", "zero3_nvme"]).options:
        assert not any("--host-memory" in line for line in unchecked(option))


def test_a_slower_drive_is_a_slower_step(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {}
    for drive in ("10,5", "1,0.5"):
        asked = ["--model_name_or_path", "gpt2", "--hardware", "T4", "--strategy", "zero3_nvme", "--json"]
        assert main(["predict", *asked, "--nvme_gb_per_s", drive]) == 0
        steps[drive] = json.loads(capsys.readouterr().out)["time"]["parts"]["nvme"]
    assert steps["1,0.5"] == pytest.approx(10 * steps["10,5"])


def test_a_faster_one_that_only_its_figure_lets_in_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_table", lambda: {"above_state": {"low": 0.9, "high": 2.0}})
    advice = advise(AdviceRequest(model_shape(LLAMA_8B), box_of("8xH100"), 2048, "bf16"), ["fsdp2", "zero3_cpu"])
    best, tried = advice.best, worth_trying(advice)
    assert best is not None
    assert tried is not None
    assert (best.is_sure, tried.is_sure, tried.fits) == (True, False, True)
    assert tried.tokens_per_s > (1 + AS_FAST) * best.tokens_per_s
    assert device_bytes(best.memory, at_upper_end=True) <= usable_bytes(best.request.box)
    # Weights and the optimizer are as certain as arithmetic.
    state = best.memory.device_parts["parameters"] + best.memory.device_parts["optimizer"]
    peak = best.memory.peak_reserved
    assert peak.high == pytest.approx(state + 2 * (peak.value - state))


def test_copies_within_a_machine_are_advised_where_there_are_several_machines() -> None:
    def asked(hardware: str) -> AdviceRequest:
        return AdviceRequest(model_shape("gpt2-xl"), box_of(hardware), 1024, "bf16", gradient_checkpointing=False)

    assert not set(WITH_COPIES) & set(candidates(asked("8xA100-40")))
    assert not set(WITH_COPIES) & set(candidates(asked("8x1xA100-40")))
    assert set(WITH_COPIES) < set(candidates(asked("4x4xA100-40")))
    # Over a slow network it pays to send little between machines.
    slow = dataclasses.replace(asked("4x4xA100-40"), box=dataclasses.replace(box_of("4x4xA100-40"), network_gb_per_s=1))
    told = advise(slow, ["fsdp2", "hsdp", "zero3", "zero3_hpz"])
    speeds = {option.name: option.tokens_per_s for option in told.options}
    assert speeds["hsdp"] > speeds["fsdp2"]
    assert speeds["zero3_hpz"] > speeds["zero3"]
    state = {option.name: state_of(option.request).params_device for option in told.options}
    assert state["hsdp"] == pytest.approx(4 * state["fsdp2"], rel=0.01)


def test_where_nothing_fits_it_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model_name_or_path", "gpt-1t", "--hardware", "T4", "--host-memory", "16", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["recommended"] is None
    assert not any(row["fits"] for row in said["strategies"])
    assert all("GiB" in row["why"] for row in said["strategies"])


def test_where_a_sample_alone_is_too_large_no_number_of_gpus_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["advise", "--model_name_or_path", LLAMA_8B, "--hardware", "8xH100", "--seq_length", "65536"]
    assert main(asked) == 1
    page = capsys.readouterr().out
    assert "more GPUs" not in page
    assert (
        "nothing fits, and no number of GPUs helps: one sample makes 113.3 GiB on its rank (logits 93.9, activations"
        " 18.0, context 1.4) of 78.8; what helps: fewer tokens a sample, a loss in chunks (--chunked_loss)" in page
    )
    # What it names does help.
    said = advise(AdviceRequest(model_shape(LLAMA_8B), box_of("8xH100"), 65536, "bf16", chunked_loss=True), ["zero3"])
    assert said.best is not None
    assert said.best.is_sure
    assert said.best.tokens_per_s == pytest.approx(22424, rel=1e-3)
    # A model is divided over them.
    assert main(["advise", "--model_name_or_path", "gpt-13b", "--hardware", "2xT4", "--host-memory", "16"]) == 1
    page = capsys.readouterr().out
    short = re.search(r"nothing fits this host: (\w+) needs (\d+) GiB,", page)
    assert short is not None
    more = str(int(short[2]) + 8)
    assert main(["advise", "--model_name_or_path", "gpt-13b", "--hardware", "2xT4", "--host-memory", more]) == 0
    assert f"take {short[1]} " in capsys.readouterr().out
    box = box_of("2xT4")
    small = dataclasses.replace(box, device=dataclasses.replace(box.device, memory_gib=3.0))
    nothing = advise(AdviceRequest(model_shape("gpt2-xl"), small, 1024, "fp16"), ["zero2", "zero3"])
    assert how_sure(nothing) == "nothing fits: more GPUs, fewer tokens a sample, or a smaller model"


def test_one_machine_is_named_where_the_network_makes_two_slower(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["advise", "--model_name_or_path", "llama-3.1-8b", "--hardware", "2x8xH100"]
    assert main([*asked, "--network_gb_per_s", "0.156"]) == 0
    said = re.search(r"one of these machines alone is ([\d.]+) x as fast, under (\w+)", capsys.readouterr().out)
    assert said is not None
    assert float(said[1]) > 5
    assert main(asked) == 0
    assert "one of these machines" not in capsys.readouterr().out


def test_the_default_batch_has_parts_that_a_rank_can_take() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def speed(box: str) -> float:
        options = parser.parse_args(["--model_name_or_path", "llama-3.1-8b", "--hardware", box])
        best = advise(question_of(options)).best
        assert best is not None
        return best.tokens_per_s

    # 64 samples rounded up to the ranks made shares of 13 and 11, of which only one sample fits.
    assert speed("4xRTX4090") < speed("5xRTX4090") < speed("6xRTX4090")


def test_of_two_as_fast_the_one_that_a_usual_host_can_load_is_taken() -> None:
    question = AdviceRequest(with_adapters(model_shape("llama-3.1-70b"), 16), box_of("8xA100-80"), 2048, "bf16")
    found = advise(question, ["fsdp2", "zero3"])
    assert found.best is not None
    assert found.best.name == "zero3"
    assert "GiB of host memory" in how_sure(found)
    roomy = dataclasses.replace(question, box=dataclasses.replace(question.box, host_gib_per_node=4096.0))
    (best, other) = advise(roomy, ["fsdp2", "zero3"]).fitting
    assert (best.name, other.name) == ("fsdp2", "zero3")


def test_a_loss_in_chunks_is_asked_for_by_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model_name_or_path", LLAMA_8B, "--hardware", "8xH100", "--chunked_loss"]
    assert main(["predict", *model, "--strategy", "zero3", "--seq_length", "8192", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["chunked_loss"] is True
    assert main(["predict", *model, "--strategy", "zero3", "--seq_length", "8192", "--peft", "lora", "--json"]) == 0
    frozen = json.loads(capsys.readouterr().out)["memory"]["device_parts"]["logits"]
    # A frozen matrix has no gradient, of all tokens or of a part; what remains is three times as wide as the stream.
    assert said["memory"]["device_parts"]["logits"] - frozen == 2 * 2 * 128256 * 4096
    assert frozen == 3 * 2 * 8192 * 4096
    option = advise(dataclasses.replace(TINY, chunked_loss=True), ["zero2"]).best
    assert option is not None
    assert write_files(option, tmp_path, "drive", "gpt2-xl").of_study is None


def test_host_memory_is_checked_where_it_is_said() -> None:
    question = AdviceRequest(model_shape("gpt-7.5b"), box_of("L4"), 512, "bf16", gradient_checkpointing=True)
    without = {option.name for option in advise(question).fitting}
    small = dataclasses.replace(question, box=dataclasses.replace(question.box, host_gib_per_node=32.0))
    assert without
    assert not [option for option in advise(small).fitting if option.memory.host_peak.value > 32 * 2**30]
    assert len(advise(small).fitting) < len(without)


def test_another_question_is_told_where_the_answer_changes() -> None:
    question = AdviceRequest(model_shape("gpt2"), box_of("2xL4"), 512, "fp32", gradient_checkpointing=False)
    assert "with half the GPUs it would be single" in list(changes(advise(question)))
    # A sequence that the model has no positions for is no question.
    short = AdviceRequest(model_shape("gpt2-xl"), box_of("8xA100-40"), 1024, "bf16", gradient_checkpointing=False)
    assert not [line for line in changes(advise(short)) if "tokens a sample" in line]


def test_a_device_without_bf16_trains_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model_name_or_path", "gpt2", "--hardware", "V100-16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["precision"] == "fp16"
    assert {row["precision"] for row in said["strategies"]} == {"fp16", "fp16-engine"}
    assert precision_under(read_strategy("fsdp2"), "fp16") == "fp16"
    # Nor is it asked to do what a run on it would be refused.
    for command in (["advise"], ["predict", "--strategy", "zero2"], ["predict", "--strategy", "ddp", "--pure_bf16"]):
        asked = ["--model_name_or_path", "gpt2", "--hardware", "V100-16"]
        assert main([*command, *asked, *([] if "--pure_bf16" in command else ["--precision", "bf16"])]) == 2
        assert "has no bf16. To fix it: use --precision fp16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hardware", "strategy", "precision"),
    [("2xT4", "zero2", "fp16-engine"), ("2xT4", "zero0", "fp16"), ("2xT4", "ddp", "fp16"),
     ("2xL4", "zero0", "bf16-engine"), ("2xL4", "zero1", "bf16-engine"), ("2xL4", "fsdp2", "bf16")],
)  # fmt: skip
def test_predict_asks_for_the_precision_that_advice_picks(
    hardware: str, strategy: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["predict", "--model_name_or_path", "gpt2", "--strategy", strategy, "--hardware", hardware, "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == precision


def test_a_choice_is_slower_by_what_it_does_with_the_same_micro_batch() -> None:
    # Over a slow network stage 2 reduces in every micro-batch; on one device an offload has nobody to wait for.
    slow = dataclasses.replace(box_of("2x8xA100"), network_gb_per_s=2.0)
    shared = advise(AdviceRequest(model_shape("gpt2-xl"), slow, 1024, "bf16", global_batch=4096), ["zero1", "zero2"])
    zero1, zero2 = shared.options
    assert "trained as zero1 is, waiting for communication takes" in because(zero2, zero1)
    wide = dataclasses.replace(zero1, request=dataclasses.replace(zero1.request, micro_batch=512))
    assert "512 a rank without checkpointing, as zero1 trains, does not fit" in because(zero2, wide)
    large = AdviceRequest(model_shape("gpt-13b"), box_of("8xH100"), 2048, "bf16", global_batch=8)
    zero3, offloaded = advise(large, ["zero3", "zero3_cpu"]).options
    assert "trained as zero3 is, the optimizer on the host takes" in because(offloaded, zero3)


def test_what_keeps_the_next_one_behind_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight passes a step, in each of which stage 2 reduces, and stage 1 in the last alone."""
    assert main(["advise", "--model_name_or_path", "llama-3.1-8b", "--hardware", "8xH100"]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next best zero2")]
    words = r"trained as zero1 is, waiting for communication takes (\d+)% of its step, and (\d+)% of zero1's"
    found = re.search(words, said)
    assert found is not None
    # Exposed or not, its reductions are eight times as many.
    assert int(found[1]) > 3 * int(found[2])
    assert main(["advise", "--model_name_or_path", "llama-3.1-8b", "--hardware", "4xA100"]) == 0
    assert "trained as" not in capsys.readouterr().out.split("next best")[1].splitlines()[0]


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        "zero3",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("ddp", "fsdp2", "hsdp", "zero2", "zero2_cpu", "zero3_hpz")
        ),
    ],
)
def test_its_files_are_launched_as_they_are_and_train_with_the_fitted_settings(name: str, tmp_path: Path) -> None:
    has_copies = name in WITH_COPIES
    question = dataclasses.replace(TINY, box=box_of("2x2xL4"), global_batch=8) if has_copies else TINY
    option = advise(question, [name]).option(name)
    assert option is not None
    assert option.request.micro_batch == 2
    files = write_files(option, tmp_path / "files", "nvme_offload", "gpt-tiny")
    assert files.of_study is not None
    words = files.of_study.split()
    assert words[:2] == ["accelerate", "launch"]
    own = ["--task", "gpt-wikitext", "--scale", "laptop", "--model_name_or_path", "gpt-tiny", "--max_steps", "2",
           "--train_samples", "16", "--eval_samples", "4", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    # Both machines are this one.
    here = ["--num_machines", "1", "--main_process_port", "0"] if has_copies else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *here, *words[2:], *own]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    run = read_run(tmp_path / "run")
    assert run.status["state"] == "ok"
    assert run.config["per_device_train_batch_size"] == 2
    if option.request.strategy.deepspeed is not None:
        asked = option.request.strategy.deepspeed["zero_optimization"]
        assert run.engine["strategy"].startswith(f"{name}-fitted-")
        assert run.engine["buckets"]["reduce_bucket_size"] == asked["reduce_bucket_size"] < 5e8
        assert run.engine["precision"] == "bf16-engine"
    if has_copies:
        assert run.engine["copies"] == {"copies": 2, "ranks_of_a_copy": 2}


def test_how_many_batches_make_a_step_is_said_wherever_the_batch_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who gives a loader batches of 1 and nothing else steps after each, at a sixteenth of the batch that was timed."""
    asked = ["advise", "--model_name_or_path", "gemma-2-9b", "--hardware", "4xRTX4090", "--output", str(tmp_path)]
    assert main(asked) == 0
    page = capsys.readouterr().out
    assert "YOUR_PROGRAM.py    (batches of 1, 16 of them before each step, gradient checkpointing on)" in page
    assert "take zero3_cpu_optimizer (1 x 16 a rank, with checkpointing)" in page
    row = next(line for line in page.splitlines() if line.startswith("zero3_cpu "))
    assert row.split()[1:5] == ["1", "x", "16", "yes"]
    settings = json.loads((tmp_path / "zero3_cpu_optimizer-fitted.json").read_text())
    assert settings["gradient_accumulation_steps"] == "auto"
    assert main([*asked[:5], "--global_batch_size", "4", "--output", str(tmp_path)]) == 0
    assert "YOUR_PROGRAM.py    (batches of 1, gradient checkpointing on)" in capsys.readouterr().out


def test_files_that_say_something_else_are_not_replaced(tmp_path: Path) -> None:
    best = advise(TINY).best
    assert best is not None
    first = write_files(best, tmp_path, "nvme_offload", "gpt2")
    assert write_files(best, tmp_path, "nvme_offload", "gpt2") == first
    first.accelerate.write_text("mine: 1\n")
    with pytest.raises(UserError, match="something else"):
        write_files(best, tmp_path, "nvme_offload", "gpt2")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_files(best, tmp_path / "file", "nvme_offload", "gpt2")


def test_sizes_say_whether_the_output_layer_is_the_embedding() -> None:
    tied, apart = (model_shape(f"{SIZES},tied={said}").parameters for said in ("true", "false"))
    assert apart - tied == 768 * 50257
    assert model_shape(SIZES).parameters == tied


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model_name_or_path", "gtp2", "--hardware", "H100"], "did you mean gpt2"),
        (["--model_name_or_path", "gpt2", "--hardware", "8xH10O"], "did you mean H100"),
        (["--model_name_or_path", "layers=2,hidden=64", "--hardware", "H100"], "does not say its heads, vocabulary"),
        (["--model_name_or_path", f"{SIZES},tied=no", "--hardware", "H100"], "neither true nor false"),
        (["--model_name_or_path", LLAMA_8B[:-1] + "5", "--hardware", "H100"], "5 key heads do not divide 32 heads"),
        (["--model_name_or_path", "gpt2", "--hardware", "H100", "--seq_length", "0"], "no whole number"),
        (["--model_name_or_path", "gpt2", "--hardware", "H100", "--seq_length", "1025"], "gpt2 has 1024 positions"),
        (["--model_name_or_path", "gemma-2-9b", "--hardware", "H100", "--seq_length", "8193"], "has 8192 positions"),
        (["--model_name_or_path", "gpt2", "--hardware", "8xH100", "--global_batch_size", "12"], "use 16"),
        (["--model_name_or_path", "gpt2", "--hardware", "H100", "--price-per-gpu-hour", "free"], "no number above 0"),
        (["--model_name_or_path", "gpt2"], "--hardware"),
        (["--model_name_or_path", "gpt2", "--hardware", "H100", "--lora_rank", "8"], "add --peft lora"),
        (
            ["--model_name_or_path", "gpt2", "--hardware", "H100", "--optimizer", "muon"],
            "`study virtual --optimizer muon",
        ),
        (["--model_name_or_path", "gpt2", "--hardware", "H100", "--nvme_gb_per_s", "3"], "no two numbers above 0"),
        (["--model_name_or_path", "gpt2", "--hardware", "V100", *FLASH], "has no flash_attention_2"),
        (["--model_name_or_path", "gpt2", "--hardware", "H100", "--precision", "fp32", *FLASH], "compute in fp32"),
        (["--model_name_or_path", "gpt-j-6b", "--hardware", "H100", *FLASH], "no arithmetic for flash_attention_2"),
        (["--model_name_or_path", "gpt2", "--hardware", "H100", "--nvme_gb_per_s", "3,nan"], "no two numbers above 0"),
    ],
)
def test_a_wrong_question_ends_in_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *arguments]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert not said.out
