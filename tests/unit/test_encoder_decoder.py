"""Encoder-decoder models, whose decoder has another length than their encoder."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engines import ROOT
from study.cli import main
from study.config.errors import UserError
from study.config.strategies import read_strategy
from study.predictor.constants import FITTED
from study.predictor.hardware import to_box
from study.predictor.live import live_shape
from study.predictor.live_trace import make_inputs
from study.predictor.memory import device_snapshots, kept_output_bytes, predict_memory
from study.predictor.micro_batch import model_flops, predict_activations
from study.predictor.passes import passes_s
from study.predictor.request import Request
from study.predictor.shape import resolve_lengths
from study.predictor.traced_request import trace_activations
from tools.architectures import CONFIGS, measure_peak
from unit.test_any_config import temporary_cache as temporary_cache
from unit.test_trainer_files import ARGUMENTS

ZERO2 = str(ROOT / "accelerate_configs" / "zero2.yaml")
# Layers of the encoder and of the decoder.
LAYERS = {"t5": ("num_layers", "num_decoder_layers")}
USUAL_LAYERS = ("encoder_layers", "decoder_layers")
# Tokens of encoder and decoder: of Whisper the first is not those of a sample, and its encoder has 50 positions.
LENGTHS: dict[str, list[tuple[int, int | None]]] = {
    "t5": [(96, 24), (24, 96)],
    "bart": [(96, 24), (24, 96)],
    "whisper": [(64, None), (8, None)],
}
CASES = [(kind, *lengths) for kind, pairs in LENGTHS.items() for lengths in pairs]


def read_document(kind: str, layers: tuple[int, int] = (4, 3)) -> dict[str, Any]:
    sizes = dict(zip(LAYERS.get(kind, USUAL_LAYERS), layers, strict=True))
    without_dropout = {"dropout_rate": 0.0} if kind == "t5" else {"dropout": 0.0}
    return CONFIGS[kind] | {"model_type": kind} | sizes | without_dropout


def make_request(kind: str, length: int, target: int | None, *, checkpointing: bool = False) -> Request:
    shape = live_shape(kind, read_document(kind))
    strategy, box = read_strategy("single"), to_box("1xH100")
    return Request(shape, strategy, box, length, 4, 1, "fp32", checkpointing, "eager", target_length=target)


def predicted_peak(request: Request) -> float:
    """Return the peak in the passes, without weights and optimizer, and without an allocator's blocks."""
    return max(point.total - point.parts["allocator"] for point in device_snapshots(request) if not point.step)


def live_model(kind: str) -> Any:
    document = read_document(kind)
    config = transformers.CONFIG_MAPPING[kind].from_dict(dict(document), attn_implementation="eager")
    config.use_cache = False
    return getattr(transformers, document["architectures"][0])(config).train()


@pytest.mark.parametrize(("kind", "length", "target"), CASES)
def test_the_peak_of_an_encoder_and_a_decoder_is_that_of_torch(kind: str, length: int, target: int | None) -> None:
    model = live_model(kind)
    for checkpointing in (False, True):
        request = make_request(kind, length, target, checkpointing=checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        inputs, _ = make_inputs(model, request.micro_batch, length, target)

        def step(inputs: Any = inputs) -> None:
            model.zero_grad()
            model(**inputs).loss.backward()

        step()
        model.zero_grad()
        # Of a recomputed T5 by 4 %: in its trace no position bias is passed on to a recomputation.
        assert predicted_peak(request) == pytest.approx(measure_peak(step), rel=0.045 if checkpointing else 0.01)


@pytest.mark.parametrize(("kind", "length", "target"), CASES)
def test_a_recomputed_encoder_and_decoder_save_what_the_traced_code_saves(
    kind: str, length: int, target: int | None
) -> None:
    """Masks and position biases are inputs of recomputed layers, and the peak is in the stack with the longer input."""
    for attention in ("eager", "sdpa"):
        request = make_request(kind, length, target, checkpointing=True)
        request = dataclasses.replace(request, precision="bf16-engine", attention=attention)
        trace, first = trace_activations(request), device_snapshots(request)[0]
        stored = first.total - first.parts["allocator"] - predict_activations(request).logits_forward
        # Fused attention saves a mask that the trace has not.
        assert stored == pytest.approx(trace.saved_bytes, rel=0.002 if attention == "eager" else 0.07)
        assert predicted_peak(request) == pytest.approx(trace.backward_peak, rel=0.075)


def test_a_decoder_s_length_changes_its_logits_products_and_memory() -> None:
    same, shorter = make_request("t5", 96, None), make_request("t5", 96, 24)
    assert shorter.output_tokens * 4 == same.output_tokens
    assert 0 < predict_activations(shorter).logits < predict_activations(same).logits / 2
    output_bytes = [kept_output_bytes(dataclasses.replace(request, keeps_outputs=True)) for request in (shorter, same)]
    assert 4 * output_bytes[0] == output_bytes[1] == 4 * 96 * 256 * 4
    assert predict_memory(shorter).peak_allocated.value < predict_memory(same).peak_allocated.value
    assert model_flops(shorter) < model_flops(same)
    assert sum(passes_s(shorter, FITTED)) < sum(passes_s(same, FITTED))
    # An encoder of 4 layers and a decoder of 3.
    stream = predict_activations(shorter).stacks
    assert [stack.layers for stack in stream] == [4, 3]
    assert stream[0].checkpoint > 3 * stream[1].checkpoint


def test_a_layer_of_an_encoder_has_the_time_of_its_own_positions() -> None:
    """Whisper's encoder has 50 positions, whatever the tokens of its decoder."""
    seconds = [sum(passes_s(make_request("whisper", length, None), FITTED)) for length in (4, 8, 16)]
    grown = [after - before for before, after in itertools.pairwise(seconds)]
    assert seconds[0] > 2 * grown[0]


def write_model(folder: Path, kind: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(read_document(kind)))
    return str(folder)


def test_predict_advise_and_explain_take_the_decoder_s_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "t5", "t5")

    def ask(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    lengths = ["--seq_length", "96", "--target_length", "24"]
    predicted = ask("predict", model, "--strategy", "zero2", "--hardware", "2xA100", *lengths)
    explained = ask("explain", ZERO2, model, "--hardware", "2xA100", "--precision", "bf16", *lengths)
    assert predicted["target_length"] == explained["target_length"] == 24
    assert predicted["memory"]["peak_allocated"] == explained["memory"]["peak_allocated"]
    equal = ask("predict", model, "--strategy", "zero2", "--hardware", "2xA100", "--seq_length", "96")
    assert equal["target_length"] is None
    assert predicted["memory"]["peak_allocated"]["value"] < equal["memory"]["peak_allocated"]["value"]
    assert main(["advise", model, "--hardware", "2xA100", *lengths]) == 0
    page = capsys.readouterr().out
    assert "96 tokens per sample and 24 in the decoder" in page
    assert "--target_length 24" in page
    # Its data of run_translation.py, whose decoder has 128 tokens unless the file sets them.
    file = tmp_path / "arguments.json"
    for keys, length in (({}, 128), ({"max_target_length": 24}, 24)):
        file.write_text(json.dumps({**ARGUMENTS, "max_source_length": 96, **keys}))
        assert ask("explain", str(file), model, "--hardware", "2xA100")["target_length"] == length
        assert ask("explain", str(file), "gpt2", "--hardware", "2xA100")["target_length"] is None


def test_a_decoder_s_length_is_refused_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "gpt2", "--strategy", "zero2", "--hardware", "2xA100", "--target_length", "24"]
    assert main(command) == 2
    assert "gpt2 has no encoder next to a decoder" in capsys.readouterr().err
    whisper, bart = (live_shape(kind, read_document(kind)) for kind in ("whisper", "bart"))
    assert resolve_lengths(whisper, None, 48) == resolve_lengths(whisper, 48, None) == (48, None)
    with pytest.raises(UserError, match="the encoder of whisper reads no tokens"):
        resolve_lengths(whisper, 24, 48)
    for shape, most in ((whisper, 64), (bart, 128)):
        with pytest.raises(UserError, match=f"{most} positions, too few for sequences of {most + 1} tokens"):
            resolve_lengths(shape, None, most + 1)
    assert resolve_lengths(bart, 64, 64) == (64, None)
