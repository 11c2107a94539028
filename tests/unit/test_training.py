"""The time, the GPU hours and the price of a whole training."""

from __future__ import annotations

import argparse
import json

import pytest

from study.advisor.training import Amount, WholeTraining, parse_count
from study.cli import main
from study.config.strategies import read_strategy
from study.predictor.hardware import to_box
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.time import predict_time, speed_ends

BOX = "8xH100"


@pytest.mark.parametrize(
    ("text", "count"),
    [("15B", 15e9), ("1.5t", 1.5e12), ("300M", 3e8), ("50k", 5e4), ("50000", 5e4), ("50,000", 5e4), ("2e9", 2e9)],
)
def test_a_count_is_read_as_people_write_it(text: str, count: float) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "15G", "nan", "1e99", "k"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_count(text)


@pytest.mark.parametrize("strategy", ["zero3", "zero3_cpu_optimizer"])
def test_a_training_takes_its_tokens_at_the_speed_of_a_step(strategy: str) -> None:
    request = Request(
        model_shape("llama-3.1-8b"), read_strategy(strategy), to_box(BOX), 2048, 2, 4, "bf16-engine", True, "sdpa"
    )
    time = predict_time(request)
    tokens_of_a_step = 8 * 2 * 4 * 2048
    total = WholeTraining.predict(Amount(1000 * tokens_of_a_step, "tokens"), request, time, 2.0)
    assert total.steps == 1000
    assert total.seconds == pytest.approx(1000 * time.step_s.value)
    assert total.gpu_hours == pytest.approx(8 * total.seconds / 3600)
    assert total.price == pytest.approx(2 * total.gpu_hours)
    ends = speed_ends(request, time)
    assert ends is not None
    assert total.ends == pytest.approx((1000 * tokens_of_a_step / ends[1], 1000 * tokens_of_a_step / ends[0]))
    samples = WholeTraining.predict(Amount(1000 * 8 * 2 * 4, "samples"), request, time)
    assert (samples.steps, samples.seconds) == (total.steps, pytest.approx(total.seconds))
    assert samples.price is None


def test_advise_and_predict_say_the_same_hours(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3.1-8b", "--hardware", BOX, "--train_tokens", "15B"]
    assert main(["advise", *words, "--price_per_gpu_hour", "2.5", "--json"]) == 0
    advised = json.loads(capsys.readouterr().out)
    assert advised["training"]["price"] == pytest.approx(2.5 * advised["training"]["gpu_hours"])
    assert main(["advise", *words]) == 0
    printed = capsys.readouterr().out
    line = next(line.strip() for line in printed.splitlines() if "of steps alone" in line)
    command = next(line.split()[2:] for line in printed.splitlines() if line.strip().startswith("study predict"))
    assert main(["predict", *command, "--train_tokens", "15B"]) == 0
    assert line in capsys.readouterr().out.splitlines()
    assert main(["predict", *command, "--train_tokens", "15B", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["training"]["seconds"] == advised["training"]["seconds"]


def test_what_does_not_fit_takes_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3.1-70b", "--hardware", "4090", "--host_memory", "64GB", "--train_tokens", "1B"]
    main(["predict", *words, "--strategy", "single"])
    main(["advise", *words])
    assert "of steps alone" not in capsys.readouterr().out


def test_two_amounts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt2", "--hardware", "4090", "--train_tokens", "1B", "--train_samples", "50k"]
    assert main(["advise", *words]) == 2
    assert "--train_tokens and --train_samples are both given" in capsys.readouterr().err


def test_a_training_without_a_step_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3.1-8b", "--strategy", "zero3", "--hardware", "8xH100", "--seq_length", "64k", "--sp", "8"]
    assert main(["predict", *words, "--gradient_checkpointing", "--train_tokens", "1B"]) == 2
    assert "leave out --train_tokens" in capsys.readouterr().err
