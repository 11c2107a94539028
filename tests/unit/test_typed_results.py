"""A command has one typed result: --json prints its document, and its page is made of it without another prediction."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from collections.abc import Iterable

import pytest

from commands import parse
from engines import ROOT
from study.advisor import advice_text, advise_command, explain, explanation_text, predict_command, prediction_text
from study.advisor.explanation import ConfigExplanation, Remedy
from study.config.printing import TextTable, print_page
from study.host.memory import GIB
from study.predictor.request import Estimate
from study.releases.verdict import ROUNDING, Verdict
from study.releases.verification import Verification, VerifyAnswer, VerifyRow

_PREDICTIONS = (
    "accumulated_bytes",
    "advise_without_losers",
    "predict_activations",
    "predict_memory",
    "predict_payload",
    "predict_state",
    "predict_time",
    "sent_bytes",
    "simulate_gathers",
)


def printed(page: Iterable[str | TextTable]) -> str:
    out = io.StringIO()
    print_page(page, out)
    return out.getvalue()


def forbid_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every function that predicts fail, wherever it is imported."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a page predicts something that its result does not have")

    for name, module in list(sys.modules.items()):
        if name.startswith("study."):
            for function in _PREDICTIONS:
                if hasattr(module, function):
                    monkeypatch.setattr(module, function, fail)


@pytest.mark.parametrize(
    "line",
    [
        "llama-3.1-8b --strategy zero3 --hardware 2x8xH100 --train_tokens 15B",
        # Hints of checkpointing, of loading, and of a host with too little memory.
        "llama-3.1-8b --strategy zero2 --hardware 8xA100-40 --micro_batch 4",
        "llama-3.1-70b --strategy fsdp2 --hardware 8xA100-40 --peft lora --quantization 4bit",
        "llama-3.1-70b --strategy zero3_cpu --hardware 8xA100 --host_memory 64",
        "llama-3.1-8b --strategy zero3 --hardware 8xH100 --sp 4 --seq_length 32768",
        "gpt2-large --strategy zero3 --hardware 4xA100 --measured step_ms=400,peak_gib=14,micro_batch=2",
    ],
)
def test_a_page_of_a_prediction_predicts_nothing(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = predict_command.predict(parse(predict_command, line.split()), None)
    forbid_predictions(monkeypatch)
    for details in (False, True):
        text = printed(prediction_text.page(prediction, details))
        assert prediction.request.shape.name in text
        assert ("figures with their interval" in text) == details


def test_document_and_page_of_a_prediction_have_its_fields() -> None:
    line = "llama-3.1-8b --strategy zero3 --hardware 2x8xH100"
    prediction = predict_command.predict(parse(predict_command, line.split()), None)
    reserved = 1000 * GIB
    memory = dataclasses.replace(prediction.memory, peak_reserved=Estimate(reserved), notes=("a note",))
    changed = dataclasses.replace(prediction, memory=memory, step=None, traffic=None, findings=[], notes=["another"])
    document, text = changed.document, printed(prediction_text.page(changed, details=True))
    assert document["device_bytes"] == reserved + memory.device_parts["context"]
    assert (document["fits"], document["time"], document["payload_bytes"]) == (False, None, None)
    assert text.startswith("Does not fit: ")
    assert "communication of one rank per step  not predicted\n" in text
    assert "time of one step" not in text
    assert text.endswith("\n\nanother\na note\n")


FILES = ROOT / "accelerate_configs"


def explained(line: str) -> ConfigExplanation:
    return ConfigExplanation.explain(explain.read_case(parse(explain, line.split())))


@pytest.mark.parametrize(
    "words",
    [
        "zero3_cpu.yaml llama-3.1-8b --hardware 2x8xH100 --precision bf16",
        # In 16 bits it fits; with other changes; on any device; while the weights are loaded it does not.
        "zero2.yaml gpt2-xl --hardware 4xL4",
        "zero3.yaml llama-3.1-8b --hardware 8xA100-40 --precision bf16 --micro_batch 8",
        "fsdp2.yaml gpt2-xl --world_size 8",
        "fsdp2.yaml llama-3.1-70b --hardware 8xA100-40 --peft lora --quantization 4bit --precision bf16",
    ],
)
def test_a_page_of_a_config_predicts_nothing(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = explained(f"{FILES}/{words}")
    forbid_predictions(monkeypatch)
    for details in (False, True):
        text = printed(explanation_text.page(explanation, details))
        assert all(answer.question in text for answer in explanation.answers)
        assert all(f"- {line}" in text for answer in explanation.answers for line in answer.because) == details


def test_document_and_page_of_a_config_have_its_fields() -> None:
    explanation = explained(f"{FILES}/zero2.yaml gpt2-xl --hardware 4xL4")
    assert explanation.fits is False
    in_half = explanation.in_half
    assert in_half is not None
    assert re.match(r"Does not fit in fp32: .*; in bf16 it fits: ", explanation_text.first_line(explanation))
    assert explanation.remedies == []
    # Without an answer for 16 bits other changes are named.
    remedy = Remedy("a smaller model", in_half.memory)
    changed = dataclasses.replace(explanation, in_half=None, remedies=[remedy], costs=[], answers=[], step=None)
    document, text = changed.document, printed(explanation_text.page(changed, details=False))
    assert (document["settings"], document["answers"], document["step_s"]) == ([], [], None)
    assert "; it fits with a smaller model (" in text.splitlines()[0]
    assert "memory of a rank by setting" not in text


@pytest.mark.parametrize(
    "line",
    [
        "gpt2-xl --hardware A100 --train_tokens 1B --price_per_gpu_hour 2",
        # FSDP reduces in each micro-batch; a sample fills the memory; nothing fits.
        "llama-3.1-8b --hardware 8xA100-40",
        "llama-3.1-8b --hardware 4xL4 --seq_length 131072",
        "gpt-175b --hardware A100-40",
    ],
)
def test_a_page_of_advice_predicts_nothing(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = advise_command.make_answer(parse(advise_command, line.split()))
    forbid_predictions(monkeypatch)
    for details in (False, True):
        text = printed(advice_text.page(answer, details))
        assert all(line in text for line in (*answer.safer, *answer.what_ifs))
        assert (answer.recommendation is None) == text.startswith("Nothing fits")


def test_document_and_page_of_advice_have_its_fields() -> None:
    answer = advise_command.make_answer(parse(advise_command, ["gpt2-xl", "--hardware", "A100"]))
    assert answer.recommendation is not None
    best = answer.recommendation.best
    lean = dataclasses.replace(answer.recommendation, riskier=best, roomier=None, plain=None, slowdown="", findings=[])
    changed = dataclasses.replace(
        answer, recommendation=lean, how_sure="a reason", what_ifs=["a change"], nearest=["a run"], measured=[]
    )
    document, text = changed.document, printed(advice_text.page(changed, details=True))
    assert document["recommended"] == best.name
    assert (document["how_sure"], document["nearest"]) == ("a reason", ["a run"])
    assert document["faster_if_it_fits"]["tokens_per_s"] == best.tokens_per_s
    assert document["plain_in_16_bits"] is None
    assert document["changes"][-1] == "a change"
    assert f"why {best.name}: a reason\n" in text
    assert "\na change\na run\n" in text
    assert "bf16 weights" not in text


def test_document_and_page_of_a_verification_have_the_verdict_of_each_cell() -> None:
    wrong = Verdict("different", what="gradient", first_step=1, size=0.5)
    rows = [VerifyRow("ddp", "fp32", 1, Verdict("equal")), VerifyRow("zero2", "bf16", 4, wrong)]
    answer = VerifyAnswer(
        stack={"deepspeed": "0.19.8", "torch": None},
        on_gpu=False,
        verification=Verification(("ddp", "zero2"), 2, rows),
        tolerances={("fp32", ""): ROUNDING["fp32"], ("fp32", "muon"): ROUNDING["fp32"]},
        not_tested=["not tested: fp16"],
        seconds=75.0,
    )
    document, text = answer.document, printed(answer.page())
    assert list(document["tolerances"]) == ["fp32", "fp32 muon"]
    assert [(row["strategy"], row["kind"], row["first_step"]) for row in document["rows"]] == [
        ("ddp", "equal", None),
        ("zero2", "different", 1),
    ]
    lines = text.splitlines()
    assert lines[0].startswith(f"{document['answer']} (")
    assert lines[1:3] == ["tested: deepspeed 0.19.8, torch not installed", "not tested: fp16"]
    cells = [line.split() for line in lines[-2:]]
    assert cells == [["ddp", "equal", "-"], ["zero2", "-", "different"]]
