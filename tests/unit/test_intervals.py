"""A figure has the interval of its kind of training, and every command the same words for one that is not known."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from study.advisor import advise_command
from study.advisor.advise import Option, advise
from study.advisor.advise_command import AdviseFlags
from study.advisor.calculator import _row
from study.advisor.training import Amount, WholeTraining
from study.cli import main
from study.config.strategies import read_strategy
from study.config.text import rounded_seconds
from study.predictor.hardware import to_box
from study.predictor.intervals import (
    NOT_KNOWN,
    Ends,
    Kind,
    ends_text,
    ends_words,
    estimate,
    figure_document,
    is_known,
    kind_of_training,
)
from study.predictor.memory import predict_memory
from study.predictor.models import model_shape
from study.predictor.request import Estimate, Request
from study.predictor.shape import with_adapters
from study.predictor.time import predict_time, step_ends


def make_request(strategy: str, hardware: str, lora_rank: int | None = None) -> Request:
    shape = model_shape("llama-3.1-8b")
    shape = shape if lora_rank is None else with_adapters(shape, lora_rank)
    return Request(shape, read_strategy(strategy), to_box(hardware), 2048, 1, 2, "bf16-engine", True, "sdpa")


KINDS: tuple[tuple[Request, Kind], ...] = (
    (make_request("zero2", "8xH100"), "full"),
    (make_request("zero2", "8xH100", 8), "adapters"),
    (make_request("zero2_cpu", "8xH100"), "offload"),
    (make_request("zero2_cpu", "8xH100", 8), "adapters"),
    (make_request("zero2", "2x8xH100"), "scale"),
    (make_request("zero2", "72xH100"), "scale"),
    (make_request("zero3_cpu", "2x8xH100"), "offload"),
)


@pytest.mark.parametrize(("request_", "kind"), KINDS)
def test_a_request_has_the_intervals_of_its_kind(request_: Request, kind: Kind) -> None:
    assert kind_of_training(request_) == kind
    prefix = "" if kind == "full" else f"{kind}_"
    time, peak = predict_time(request_), predict_memory(request_).peak_reserved
    assert time.step_s == (
        Estimate(time.step_s.value) if request_.offloads else estimate(f"{prefix}step_s", time.step_s.value)
    )
    assert peak.low is not None
    assert peak.high is not None
    unit = estimate(f"{prefix}above_state", 1.0)
    # Both ends are those of the part above weights and optimizer.
    assert unit.low is not None
    assert unit.high is not None
    below, above = peak.value - peak.low, peak.high - peak.value
    # An interval contains its figure: the ends of adapters do, too.
    assert below * (unit.high - 1) == pytest.approx(above * (1 - unit.low))


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((1.0, 4.0), "1.00 s to 4.00 s by its host"),
        ((1.5, 4.01), NOT_KNOWN),
        ((0.99, 2.5), NOT_KNOWN),
        (None, NOT_KNOWN),
    ],
)
def test_ends_further_than_a_factor_of_two_are_words(ends: Ends | None, words: str) -> None:
    assert ends_words(2.0, ends, rounded_seconds, " by its host") == words
    assert ends_text(2.0, ends, rounded_seconds, " by its host") == f" ({words})"
    assert is_known(2.0, ends) == (words != NOT_KNOWN)
    document = figure_document(Estimate(2.0), ends)
    assert document["within_factor_2"] == (words != NOT_KNOWN)
    assert (document["low"], document["high"]) == (ends or (None, None))


def advised(words: tuple[str, ...]) -> Option | None:
    parser = argparse.ArgumentParser()
    advise_command.add_arguments(parser)
    flags = AdviseFlags.from_options(parser.parse_args([*words]))
    return advise(advise_command.build_advice_request(flags)).best


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "hardware", "flags", "is_known_"),
    [
        ("llama-3.1-8b", "8xH100", (), True),
        ("llama-3.1-8b", "8xH100", ("--peft", "lora"), False),
        ("qwen2.5-7b", "2xA100-40", (), False),
        ("llama-3.1-8b", "2x8xH100", (), True),
    ],
)
def test_every_command_says_alike_whether_a_step_is_known(
    model: str,
    hardware: str,
    flags: tuple[str, ...],
    is_known_: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requested = (model, "--hardware", hardware, *flags)
    page = run(capsys, "advise", *requested)
    command = next(line for line in page.splitlines() if line.startswith("  study predict "))
    words = shlex.split(command)[1:]
    predicted = run(capsys, *words)
    files = run(capsys, "advise", *requested, "--output", str(tmp_path))
    config = next(line for line in files.splitlines() if line.startswith("written: ")).split()[1]
    work = [word for word in words[words.index("--micro_batch") :] if word not in ("--hub", "--pure_bf16")]
    explain = ("explain", config, model, "--hardware", hardware, *work)
    explained = run(capsys, *explain)
    step = next(line for line in explained.splitlines() if line.startswith("What takes the time of a step?"))
    for text in ("\n".join(page.splitlines()[:2]), predicted.splitlines()[0], step):
        assert (f"({NOT_KNOWN})" in text) == (not is_known_), text
    documents = [json.loads(run(capsys, *line, "--json")) for line in (words, explain, ("advise", *requested))]
    steps = [documents[0]["time"]["step_s"], documents[1]["step_s"], documents[2]["strategies"][0]["step_s"]]
    assert steps[0] == steps[1] == steps[2]
    assert steps[0]["within_factor_2"] == is_known_
    best = advised(requested)
    assert best is not None
    assert _row(best)["not_known"] == (None if is_known_ else NOT_KNOWN)


def test_a_training_of_unknown_steps_has_no_range() -> None:
    request = make_request("zero2", "8xH100", 8)
    time = predict_time(request)
    total = WholeTraining.predict(Amount(1e9, "tokens"), request, time, 2.0)
    assert step_ends(request, time) is None
    assert total.line.count(f"({NOT_KNOWN})") == 2
    assert total.document["within_factor_2"] is False
