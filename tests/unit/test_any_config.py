"""Classes outside the table of families: any config.json, by transformers' own model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from engines import ROOT
from study.advisor.advised_files import _study_command
from study.advisor.predict_command import check_attention
from study.advisor.request_notes import request_findings
from study.cli import main
from study.config import printing
from study.config.errors import UserError
from study.config.flags import Precision, RunConfig
from study.config.strategies import read_strategy
from study.config.text import rounded
from study.host.memory import GIB
from study.predictor.buckets import gradient_snapshots
from study.predictor.communication import (
    collective_s,
    communication_time,
    padding_notes,
    predict_payload,
    sent_bytes,
)
from study.predictor.constants import FITTED
from study.predictor.families import FAMILIES as TABLE
from study.predictor.hardware import to_box
from study.predictor.live import LiveShape, live_shape
from study.predictor.live_trace import quiet
from study.predictor.memory import _DeviceStep, predict_memory
from study.predictor.micro_batch import predict_activations
from study.predictor.models import model_shape, shape_of_document
from study.predictor.passes import _device_rates, _elementwise_s, passes_s
from study.predictor.request import Attention, Request
from study.predictor.shape import FUSED_ATTENTIONS, ModelShape, in_4_bits, is_packed, resolve_length, with_adapters
from study.predictor.state import predict_state
from study.predictor.table_shape import shape_of_architecture
from study.predictor.time import predict_time
from study.predictor.traced_activations import trace
from study.predictor.traced_request import trace_activations
from study.predictor.zero3_gathers import module_call_order, simulate_gathers
from study.workloads.presets import find_known, find_preset, known_models
from tools.architectures import CLASSIFIERS, CONFIGS, OUTPUT, TEXT, WITHOUT_FSDP, compare, page
from unit.test_predict_memory import FAMILIES, assert_recomputed_as_traced


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(tmp_path_factory.getbasetemp() / "live_cache"))


def read_shape(model_type: str, **changed: object) -> LiveShape:
    return live_shape(model_type, {**CONFIGS[model_type], "model_type": model_type, **changed})


def make_request(shape: ModelShape, strategy: str, *, ranks: int = 4, checkpointing: bool = False) -> Request:
    precision: Precision = "bf16-engine" if strategy.startswith("zero") else "bf16"
    length = min(64, shape.positions or 64)
    return Request(
        shape, read_strategy(strategy), to_box(f"{ranks}xH100"), length, 4, 1, precision, checkpointing, "sdpa"
    )


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [("deepseek_v3", "num_hidden_layers"), ("modernbert", "num_hidden_layers"), ("t5", "num_layers")],
)
def test_moments_of_layers_that_are_left_out_are_never_the_peak(model_type: str, layers: str) -> None:
    shape = read_shape(model_type, **{layers: 9})
    for name, recomputed, batch in itertools.product(("zero2", "zero3", "fsdp2"), (False, True), (1, 7)):
        request = dataclasses.replace(make_request(shape, name, checkpointing=recomputed), micro_batch=batch)
        step, whole_step = _DeviceStep(request), _DeviceStep(request)
        # No two layers are of one kind, so that none is left out.
        whole_step.saved = dataclasses.replace(whole_step.saved, layer_kinds=tuple(map(str, range(shape.layers))))
        points, all_points = (list(it.from_the_first_gradient_on()) for it in (step, whole_step))
        assert len(points) < len(all_points)
        assert max(point.total for point in points) == max(point.total for point in all_points)


def build_without_data(model_type: str) -> torch.nn.Module:
    """Return transformers' own model, with tensors that have sizes alone."""
    config = transformers.CONFIG_MAPPING[model_type].from_dict(CONFIGS[model_type])
    with torch.device("meta"):
        if model_type in CLASSIFIERS:
            return transformers.AutoModelForSequenceClassification.from_config(config)
        if names := CONFIGS[model_type].get("architectures"):
            return getattr(transformers, names[0])(config)
        return transformers.AutoModelForCausalLM.from_config(config)


def assert_every_parameter_is_gathered(shape: LiveShape, padded: int) -> None:
    """Each is gathered for the forward pass, and at most once for each call and direction, if all are sharded."""
    sharded = RunConfig(engine_override=("zero_optimization.stage3_param_persistence_threshold=0",))
    request = make_request(shape, "zero3", checkpointing=True)
    request = dataclasses.replace(request, strategy=request.strategy.with_overrides(sharded))
    assert 0.9 * padded < simulate_gathers(request).elements <= 4 * padded


def assert_activations_are_the_traced_ones(shape: LiveShape) -> None:
    """The layers that were traced, multiplied, are those of the traced model."""
    request = make_request(shape, "zero2")
    saved = predict_activations(request)
    layers = shape.layers * (saved.layer + saved.cast_layer)
    traced_bytes = trace_activations(request).saved_bytes
    assert layers + saved.cast_head + saved.outside + saved.logits == pytest.approx(traced_bytes, rel=0.03)
    traced = trace(request)
    assert traced.backward >= 1.5 * traced.forward - traced.attention > 0


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_class_has_the_parameters_of_the_model_and_a_prediction(model_type: str, tmp_path: Path) -> None:
    shape = read_shape(model_type)
    parameters = build_without_data(model_type).parameters()
    expected = [(tensor.numel(), tensor.shape[0] if tensor.dim() else 1) for tensor in parameters]
    assert [(param.elements, param.rows) for param in shape.params] == expected
    assert bool(shape.fsdp_refusal) == (model_type in WITHOUT_FSDP)
    padded = sum(-(-param.elements // 4) * 4 for param in shape.trained_params)
    stage3 = predict_state(make_request(shape, "zero3"))
    assert stage3.optimizer_device == pytest.approx(padded / 4 * 12, abs=64)
    full = sum(elements for elements, _ in expected)
    assert predict_state(make_request(shape, "ddp")).params_device == 4 * full
    assert_every_parameter_is_gathered(shape, padded)
    memory = predict_memory(make_request(shape, "zero2"))
    assert memory.missing is None
    assert memory.device_parts["activations"] + memory.device_parts["logits"] > 0
    assert_activations_are_the_traced_ones(shape)
    # A recomputed layer frees its activations as its gradients arrive.
    if model_type in ("mixtral", "deepseek_v3", "gpt_oss", "bart", "vit", "gemma3_text", "mamba2"):
        for precision in ("fp32", "bf16-engine", "bf16"):
            request = make_request(shape, "single", checkpointing=True)
            # The whole BART's trace makes masks for its decoder, which a GPU does not: in 16 bits, from one of bytes.
            masks = (2 + 1) * request.micro_batch * request.sequence_length**2 if model_type == "bart" else 0
            assert_recomputed_as_traced(dataclasses.replace(request, precision=precision), without=masks)


# peft refuses adapters of a Mamba.
@pytest.mark.parametrize("model_type", [model_type for model_type in CONFIGS if model_type != "mamba2"])
def test_bitsandbytes_has_the_weights_that_transformers_replaces(model_type: str) -> None:
    model = build_without_data(model_type)
    excluded = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    # replace_with_bnb_linear in transformers' integrations/bitsandbytes.py.
    replaced = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if should_convert_module(name, excluded) and (isinstance(module, Conv1D) or type(module) is torch.nn.Linear)
    }
    shape = with_adapters(read_shape(model_type), 4)
    plain_names = {param.name.replace(".base_layer", ""): param for param in shape.params}
    packed = {name for name, param in plain_names.items() if is_packed(shape, param)}
    # The head of a classifier is new, and trained.
    frozen = {name for name, param in plain_names.items() if not param.trained}
    assert packed == replaced & frozen
    assert len(replaced - frozen) <= 2 * (shape.family == "sequence-classification")


def test_an_embedding_between_the_layers_of_two_models_is_not_in_4_bits() -> None:
    shape = with_adapters(read_shape("gemma3"), 4)
    embedding = shape.embedding
    assert 0 < embedding.place < shape.layers
    assert in_4_bits(shape, 2).embedding == embedding


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3"])
def test_a_find_family_the_table_is_equal_to_its_trace(model_type: str) -> None:
    sizes = FAMILIES[model_type]
    names = ("vocab_size", "n_embd", "n_head", "n_layer") if model_type == "gpt2" else sizes
    document = {name: sizes[name] for name in names}
    table = shape_of_architecture(model_type, model_type, document)
    live = live_shape("", {**document, "model_type": model_type})
    for strategy in ("zero2", "zero3", "ddp", "fsdp2"):
        for checkpointing in (False, True):
            a, b = (make_request(shape, strategy, checkpointing=checkpointing) for shape in (table, live))
            assert predict_state(a) == predict_state(b)
            # DDP broadcasts the rotary frequencies, which the table leaves out.
            assert sent_bytes(b) - sent_bytes(a) in ((0.0, live.buffer_bytes * 1.0) if strategy == "ddp" else (0.0,))
            if strategy == "zero3":
                assert dataclasses.asdict(simulate_gathers(a)) == dataclasses.asdict(simulate_gathers(b))
            peaks = [predict_memory(request).peak_allocated.value for request in (a, b)]
            # The table's own peaks are 0.95 to 1.2 times the traced ones (tests/unit/test_predict_memory.py).
            # In its trace GPT-2's backward pass of a layer, the peak of FSDP2 and recomputation, is up to 7.1 % larger.
            in_backward = model_type == "gpt2" and (checkpointing or strategy == "fsdp2")
            assert peaks[1] == pytest.approx(peaks[0], rel=0.075 if in_backward else 0.05), (strategy, checkpointing)


def assert_as_predicted(rows: pd.DataFrame) -> None:
    print(rows.to_string())
    # DDP refuses parameters without a gradient, which no prediction reports.
    unused = rows["kind"].eq("llava") & rows["strategy"].eq("ddp")
    refused = rows["refused"].notna() & ~unused
    assert refused.equals(rows["predicted refusal"].notna() & ~unused)
    ran = rows[rows["refused"].isna()]
    # Parameters without a gradient (a norm of LLaVA's tower), and gradients that arrive in another order.
    assert set(ran.loc[ran["state"] > 0, "kind"]) <= {"llava", "siglip", "qwen2_5_vl"}
    assert (ran["sent"].abs() < 0.01).all()
    peaks = ran["peak"].astype(float).dropna().abs()
    # A trace adds the features of images to the loss, and a model copies them into its input: much of a tiny peak.
    with_grid = ran["kind"].eq("qwen2_5_vl")
    assert peaks[~with_grid].max() < 0.10
    assert peaks[with_grid].max() < 0.15 or not with_grid.any()
    # Three models have no median worth its name.
    assert len(ran) < 9 or peaks.median() < 0.03


@pytest.mark.long
def test_the_page_of_architectures_has_today_s_predictions() -> None:
    rows = compare(json.loads((OUTPUT / "measured.json").read_text()))
    assert_as_predicted(rows)
    assert rows["kind"].nunique() >= 20
    assert (OUTPUT / "summary.md").read_text() == page(rows)


def write_config(folder: Path, model_type: str) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIGS[model_type], "model_type": model_type}))
    return str(folder)


def test_a_trace_says_so_on_stderr_after_a_second_and_once_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sizes that no other test has: nothing is in the cache.
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["bart"], "vocab_size": 271, "model_type": "bart"}))
    monkeypatch.setattr(printing, "_SILENT_S", 0.01)
    monkeypatch.setattr(printing, "_logged", set())
    command = ["predict", str(tmp_path), "--strategy", "zero2", "--hardware", "2xA100", "--seq_length", "32", "--json"]
    for precision, lines in (
        ("bf16", ["tracing transformers' code of 'bart' on tensors without data ..."]),
        ("fp32", []),
    ):
        assert main([*command, "--precision", precision]) == 0
        output = capsys.readouterr()
        assert json.loads(output.out)["fits"] is True
        assert output.err.splitlines() == lines


def test_what_cannot_be_traced_gets_no_verdict_and_is_named(capsys, tmp_path) -> None:
    with quiet():
        document = transformers.CONFIG_MAPPING["mistral3"]().to_dict()
    # Each layer takes time: the tower fails at its first operation on the sizes of an image.
    for part in ("text_config", "vision_config"):
        document[part] |= {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(document, default=str))
    model = ["--model_name_or_path", str(tmp_path), "--hardware", "8xH100"]
    assert main(["predict", *model, "--strategy", "zero3"]) == 0
    page = capsys.readouterr().out
    assert re.match("No verdict: .*without activations of its images, whose tower does not run on tensors", page)
    assert "give the sizes of its text model" in page.splitlines()[0]
    # The error of Python is for a report of a fault: it stands after the reason, and names no folder of this machine.
    assert re.search(r"on tensors without data \(\w+Error: .{3,160}?\); to have a verdict", page.splitlines()[0])
    assert str(Path.home()) not in page
    assert main(["predict", *model, "--strategy", "zero3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None
    assert main(["advise", *model]) == 1
    assert "no verdict: " in capsys.readouterr().out.partition("\n")[0]
    file = str(ROOT / "accelerate_configs/zero2.yaml")
    assert main(["explain", file, model[1], "--hardware", "8xH100", "--precision", "bf16"]) == 0
    assert capsys.readouterr().out.startswith("No verdict: ")


def test_sizes_with_a_tied_output_layer_are_traced(capsys: pytest.CaptureFixture[str]) -> None:
    """transformers 5.23 rejects `tie_word_embeddings: 1`."""
    sizes = "layers=2,hidden=64,heads=4,vocabulary=100,inner=128,key_value_heads=4,tied=1"
    words = ["--strategy", "ddp", "--hardware", "2xH100", "--seq_length", "32", "--traced", "--json"]
    assert main(["predict", sizes, *words]) == 0
    assert json.loads(capsys.readouterr().out)["traced_activation_bytes"] > 0


def test_an_expert_s_gather_and_an_fsdp2_refusal_are_named(capsys, tmp_path) -> None:
    model = write_config(tmp_path, "t5")
    assert main(["predict", model, "--hardware", "8xH100", "--strategy", "fsdp2"]) == 2
    refusal = "torch refuses shared.weight, which modules of two FSDP2 groups share"
    assert refusal in capsys.readouterr().err
    # Version 1 has one group of all that is outside the layers.
    for version, status in ((1, 0), (2, 1)):
        file = tmp_path / f"fsdp{version}.yaml"
        file.write_text(f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {{fsdp_version: {version}}}\n")
        assert main(["explain", str(file), model]) == status
        assert (refusal in capsys.readouterr().out) == (version == 2)
    assert main(["advise", write_config(tmp_path, "mixtral"), "--hardware", "8xH100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"]
    forward, _ = module_call_order(read_shape("mixtral"), False)
    # DeepSpeed's leaf: the router and all experts of a layer at once.
    experts = 4 * (2 * 128 * 64 + 64 * 128) + 4 * 64
    assert max(sum(param.elements for param in call.params) for call in forward) == experts


@pytest.mark.parametrize("ranks", [4, 64])
def test_experts_that_are_fewer_than_ranks_are_padded_in_every_part_of_an_fsdp2_step(ranks: int) -> None:
    """Four experts are four rows. tests/engine/test_explain.py has the bytes of a rank."""
    shape = read_shape("mixtral", hidden_size=2048, intermediate_size=4096)
    request = dataclasses.replace(make_request(shape, "fsdp2"), box=to_box(f"{ranks // 4}x4xH100"))
    width, times = request.gathered_bytes, ranks // 4
    experts = sum(param.elements for param in shape.params if ".experts." in param.name)
    padded = shape.parameters + (times - 1) * experts
    # A layer's gathered buffer and the weights that are copied out of it.
    assert predict_memory(request).device_parts["buffers"] >= 2 * width * times * experts / shape.layers
    assert sum(snapshot.grads for snapshot in gradient_snapshots(request)[-1:]) >= 4 * experts / 4
    payload = predict_payload(request)
    assert payload["reduce_scatter"] == pytest.approx(width * padded, rel=0.01)
    least_s = sum(collective_s(request.box, name, payload[name]) for name in ("all_gather", "reduce_scatter"))
    assert communication_time(request, 0.0, 0.0).exposed >= 0.95 * least_s
    notes = [note for note in predict_time(request).notes if note.startswith("FSDP2 pads")]
    assert bool(notes) == (ranks > 4)
    # A group of four ranks in a node pads none.
    assert not list(padding_notes(dataclasses.replace(request, strategy=read_strategy("hsdp"))))


def test_files_are_read_as_they_are_published(tmp_path: Path) -> None:
    """The head of later T5s stays untied in from_pretrained; Kimi K2 names DeepSeek's class; sizes listed by layer."""
    tied, untied = read_shape("t5"), read_shape("t5", tie_word_embeddings=False)
    assert [param.name for param in untied.params] == [*(param.name for param in tied.params), "lm_head.weight"]
    document = {**CONFIGS["llava"], "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    document["text_config"] = TEXT | {"model_type": "mistral"}
    assert live_shape("", document).params[-1].elements == 256 * 64
    architectures = ["DeepseekV3ForCausalLM"]
    kimi = live_shape("kimi", {**CONFIGS["deepseek_v3"], "model_type": "kimi_k2", "architectures": architectures})
    assert kimi.params == read_shape("deepseek_v3").params
    experts = {"num_experts": 4, "moe_topk": [2] * 3, "moe_intermediate_size": [32] * 3, "num_shared_expert": [1] * 3}
    hunyuan = live_shape("hunyuan", {**TEXT, **experts, "head_dim": 16, "model_type": "hunyuan_v1_moe"})
    assert predict_memory(make_request(hunyuan, "zero3")).missing is None
    # The first reads values of a tensor while it is created; the second has no size of an image.
    for kind, name in (("convnext", "ConvNextForImageClassification"), ("resnet", "ResNetForImageClassification")):
        sizes = {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 16, 16, 32]}
        document = {"model_type": kind, "architectures": [name], **sizes}
        shape, config = live_shape(kind, document), transformers.CONFIG_MAPPING[kind].from_dict(dict(document))
        assert shape.parameters == sum(param.numel() for param in getattr(transformers, name)(config).parameters())
        assert predict_memory(make_request(shape, "zero2")).missing is None


def test_a_loop_over_the_tokens_ends_its_trace_within_seconds() -> None:
    shape = live_shape("mamba", {"model_type": "mamba", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2})
    short, long = (dataclasses.replace(make_request(shape, "zero3"), sequence_length=tokens) for tokens in (64, 4096))
    assert predict_memory(short).missing is None
    assert "a loop over the tokens: --seq_length 128 with as many" in str(predict_memory(long).missing)
    # The remedy has the bytes of as many tokens in longer samples.
    wider = dataclasses.replace(short, sequence_length=32, micro_batch=2 * short.micro_batch)
    layers = [predict_activations(request).layer for request in (short, wider)]
    assert layers[0] == pytest.approx(layers[1], rel=0.02)
    assert "Error" not in str(predict_memory(long).missing)
    # Another precision has the same loop, and is not traced again.
    started = time.monotonic()
    assert predict_memory(dataclasses.replace(long, precision="fp32")).missing == predict_memory(long).missing
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("document", "sizes"),
    [
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "num_conv_pos_embedding_groups": 4}, True),
        # The kind of DeBERTa's loss is set, which it would read from labels.
        ({"model_type": "deberta-v2", "architectures": ["DebertaV2ForMaskedLM"]}, False),
    ],
)
def test_the_remedy_of_a_class_that_does_not_run_has_a_verdict(document: dict[str, object], sizes: bool) -> None:
    text = {key: value for key, value in TEXT.items() if not key.startswith("num_key_value")}
    shape = live_shape("model", {**text, **document, "pos_att_type": "p2c|c2p", "relative_attention": True})
    missing = predict_memory(make_request(shape, "zero2")).missing
    assert (missing is not None) == sizes
    if missing is None:
        return
    remedy = missing.rpartition("of its layers alone: ")[2].rstrip(")")
    assert remedy == "layers=3,hidden=64,heads=4,vocabulary=256"
    replaced = dataclasses.replace(make_request(shape, "zero2"), shape=model_shape(remedy))
    assert predict_memory(replaced).missing is None


def test_a_model_without_a_verdict_has_no_step(capsys, tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", **sizes}))
    options = [str(tmp_path), "--hardware", "8xH100", "--seq_length", "4096"]
    assert main(["predict", *options, "--strategy", "zero2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [document["fits"], document["time"]] == [None, None]
    assert main(["predict", *options, "--strategy", "zero2"]) == 0
    page = capsys.readouterr().out
    assert "no step time" in page
    assert not any(words in page for words in ("time of one step", "MFU", "\n\n\n"))


def test_a_class_that_stands_for_another_and_an_encoder_that_is_a_classifier_are_named(tmp_path: Path) -> None:
    kimi = {**CONFIGS["deepseek_v3"], "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    roberta = {**sizes, "intermediate_size": 128, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}
    bert = {**sizes, "intermediate_size": 128, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    classifier = {**roberta, "architectures": ["RobertaForSequenceClassification"]}
    deepseek = {**kimi, "model_type": "deepseek_v3"}
    for document, says in (
        (kimi, "stand-in no model_type kimi_k2: the figures are those of DeepseekV3ForCausalLM"),
        (roberta, "classifier names RobertaForMaskedLM, and the figures are those of a classifier of two classes"),
        (bert, "classifier names BertForMaskedLM, and"),
        (classifier, ""),
        (deepseek, ""),
    ):
        (tmp_path / "config.json").write_text(json.dumps(document))
        request = make_request(model_shape(str(tmp_path)), "zero2")
        notes = {item.rule: item.says for item in request_findings(request) if item.rule in ("stand-in", "classifier")}
        rule, _, words = says.partition(" ")
        assert list(notes) == [rule] * bool(says)
        assert words in notes.get(rule, "")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaForSequenceClassification"),
        ("llama", "LlamaForTokenClassification"),
        ("qwen2", "Qwen2ForSequenceClassification"),
        ("qwen3", "Qwen3Model"),
        ("mistral", "MistralModel"),
        ("gpt2", "GPT2ForSequenceClassification"),
    ],
)
def test_a_decoder_without_an_output_layer_of_words_is_that_of_transformers(kind: str, name: str) -> None:
    document = {**TEXT, "head_dim": 16, "vocab_size": 8192, "model_type": kind, "architectures": [name]}
    if kind == "gpt2":
        document = {key: value for key, value in document.items() if key not in ("intermediate_size", "head_dim")}
        document["n_positions"] = 128
    counted, traced = shape_of_document(document, kind), live_shape(kind, document)
    language = shape_of_document({key: value for key, value in document.items() if key != "architectures"}, kind)
    assert (counted.is_traced, traced.is_traced) == (False, True)
    for rank in (None, 4):
        shapes = [shape if rank is None else with_adapters(shape, rank) for shape in (counted, traced)]
        listed = [sorted((param.elements, param.rows, param.trained) for param in shape.params) for shape in shapes]
        assert listed[0] == listed[1]
        # The logits of a language model and their gradient are 29 MB.
        peaks = [predict_memory(make_request(shape, "fsdp2")).peak_allocated.value for shape in shapes]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.006)
        sent = [sent_bytes(make_request(shape, "zero3")) for shape in shapes]
        assert sent[0] == pytest.approx(sent[1], rel=1e-3)
    words = {item.key for item in request_findings(make_request(counted, "zero2")) if item.rule == "headless"}
    assert words == {"model"}
    counted_peak, language_peak = (
        predict_memory(make_request(shape, "fsdp2")).peak_allocated.value for shape in (counted, language)
    )
    assert language_peak - counted_peak > 20e6
    # study/train.py would train the language model.
    commands = [_study_command(make_request(shape, "zero2"), "folder", ["run"]) for shape in (language, counted)]
    assert [command is None for command in commands] == [False, True]
    assert not [item for item in request_findings(make_request(language, "zero2")) if item.rule == "headless"]


def test_what_a_named_class_or_a_contrastive_loss_changes_is_noted() -> None:
    bert = {**TEXT, "vocab_size": 30522, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    # Log-probabilities of 4 samples of 64 tokens, their gradient and that of the logits, of 2 bytes each.
    masked = 4 * 64 * 30522 * 3 * 2
    odd = {**TEXT, "model_type": "llama", "architectures": ["LlamaForNumbers"]}
    embedding = {**TEXT, "model_type": "qwen3", "architectures": ["Qwen3Model"]}
    sentences = {**bert, "architectures": ["BertModel"]}
    notes = {}
    for name, document in (("bert", bert), ("odd", odd), ("embedding", embedding), ("sentences", sentences)):
        request = dataclasses.replace(make_request(shape_of_document(document, name), "zero2"), accumulation=8)
        notes[name] = {item.rule: item.says for item in request_findings(request)}
        alone = [item.rule for item in request_findings(dataclasses.replace(request, accumulation=1))]
        assert "contrastive" not in alone
    assert f"30,522 values for each token, {rounded(masked / GIB)} GiB a rank" in notes["bert"]["classifier"]
    assert "LlamaForNumbers, and the figures are those of a causal language model" in notes["odd"]["other-class"]
    assert {name for name, rules in notes.items() if "contrastive" in rules} == {"embedding", "sentences"}
    assert "accumulation of 8 is not the loss" in notes["embedding"]["contrastive"]
    pairs = dataclasses.replace(read_shape("vit"), model_type="siglip")
    request = dataclasses.replace(make_request(pairs, "zero2"), accumulation=8)
    assert "contrastive" in {item.rule for item in request_findings(request)}


def test_traced_layers_have_the_traffic_of_their_own_norms_and_feed_forward_blocks(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = {**sizes, "intermediate_size": 128, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    counted = dataclasses.replace(make_request(read_shape("opt"), "ddp"), shape=model_shape(str(tmp_path)))
    twin = make_request(read_shape("roberta", **sizes, intermediate_size=128), "ddp")
    assert not counted.shape.is_traced
    assert twin.shape.is_traced
    rates = _device_rates(counted, FITTED)
    assert _elementwise_s(twin, FITTED, rates) == _elementwise_s(counted, FITTED, rates)
    kinds = {name: (read_shape(name).gated, read_shape(name).has_rms_norms) for name in ("opt", "vit", "mixtral")}
    assert kinds == {"opt": (False, False), "vit": (False, False), "mixtral": (True, True)}
    # A gate in one matrix with the other half, and torch's norms.
    modern = read_shape("modernbert")
    assert (modern.gated, modern.has_rms_norms) == (True, False)


def test_a_length_in_tokens_does_not_change_the_step_of_a_model_of_images() -> None:
    request = make_request(read_shape("vit"), "ddp")
    shorter = dataclasses.replace(request, sequence_length=1)
    assert passes_s(shorter, FITTED) == passes_s(request, FITTED)


def test_a_class_that_cannot_be_created_is_named_with_what_is_missing(capsys, tmp_path) -> None:
    command = ["predict", "--model_name_or_path", str(tmp_path), "--hardware", "8xH100", "--strategy", "zero3"]
    for document, says in (
        ({"model_type": "chatglm", "auto_map": {"AutoModel": "m.C"}}, "has no model_type chatglm, and the code"),
        ({"model_type": "detr", "backbone": "resnet50", "use_timm_backbone": True}, "pip install timm"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert main(command) == 2
        assert re.fullmatch(f".*{says}.*\n", capsys.readouterr().err)


def test_adapters_are_those_of_peft_on_the_live_model() -> None:
    shape = with_adapters(read_shape("olmo2"), 4)
    layer = 4 * (64 * 4 + 32 * 2 + 64 * 2 + 128 * 0) + 4 * (3 * (64 + 128))
    assert shape.trained_parameters == 3 * layer
    assert predict_memory(make_request(shape, "zero2")).missing is None


def test_of_composite_configs_the_part_that_is_trained_is_counted(tmp_path, capsys):
    """Qwen's Omni models nest the thinker, Voxtral sets no tie_word_embeddings, and Gemma 4 lists sizes by
    layer and has the inputs of all layers in one tensor."""
    omni = {
        "model_type": "qwen2_5_omni",
        "architectures": ["Qwen2_5OmniModel"],
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "vision_config": {"depth": 1},
            "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        },
    }
    shape = live_shape("omni", omni)
    config = transformers.CONFIG_MAPPING["qwen2_5_omni_thinker"].from_dict(omni["thinker_config"])
    with torch.device("meta"):
        model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)
    assert shape.parameters == sum(param.numel() for param in model.parameters())
    (tmp_path / "config.json").write_text(json.dumps(omni))
    assert main(["predict", str(tmp_path), "--hardware", "8xH100", "--strategy", "zero3"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "without activations of its sounds and images" in page
    assert "the thinker alone is counted" in page
    for kind in ("voxtral", "gemma4_text", "qwen3_5_text"):
        with quiet():
            document = transformers.CONFIG_MAPPING[kind]().to_dict()
        request = make_request(live_shape(kind, json.loads(json.dumps(document, default=str))), "zero3")
        assert trace(request).missing is None


def test_a_model_of_qwen_s_vision_has_a_verdict_with_its_images(tmp_path, capsys) -> None:
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    text = {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
    }
    document = {"model_type": "qwen2_5_vl", "text_config": text, "tie_word_embeddings": False}
    document["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]

    # As the hub has it.
    assert live_shape("vl", document | {"vision_config": vision}).parameters == 8_292_166_656
    layers = 2
    # A trace takes time for each layer, and those of the text have the same activations whatever the image.
    vision["depth"] = text["num_hidden_layers"] = layers
    # It also takes time for each window of attention. Here one is as wide as a usual image, and at last as on the hub.
    wide_windows = {"window_size": 32 * 14}

    def activations(**changes: int) -> float:
        shape = live_shape("vl", document | {"vision_config": vision | wide_windows | changes})
        memory = predict_memory(dataclasses.replace(make_request(shape, "zero3"), micro_batch=1))
        assert memory.missing is None
        return memory.most_parts["activations"]

    usual = activations()
    assert activations(image_size=32 * 14) == usual
    # A patch keeps more than 20 tensors of the tower's width in each of its layers.
    assert activations(image_size=64 * 14) - usual > 3 * 32**2 * 20 * layers * 1280 * 2
    (tmp_path / "config.json").write_text(json.dumps(document | {"vision_config": vision}))
    assert main(["predict", str(tmp_path), "--hardware", "8xA100", "--strategy", "zero3"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert page.startswith("Fits: ")
    assert "one image of 32 x 32 patches a sample" in page


def test_a_class_for_images_of_any_size_is_traced_with_usual_ones_and_says_so() -> None:
    sizes = {"num_channels": 3, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    document = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], **sizes}
    unset, written = live_shape("resnet", document), live_shape("resnet", document | {"image_size": 224})
    assert unset.document == written.document
    assert any("224 x 224" in note for note in unset.notes())
    assert not any("224 x 224" in note for note in written.notes())


def test_known_models_have_the_parameters_of_their_pages() -> None:
    for model in known_models().values():
        shape = model_shape(model.name)
        assert (shape.name, shape.parameters) == (model.name, model.parameters)
        assert shape.is_traced == (model.config["model_type"] not in TABLE)
        experts = model.config.get("num_experts_per_tok", 0)
        assert shape.active_experts == experts, model.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("OLMoE-1B-7B-0924", "olmoe-1b-7b"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3.5-mini"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("somebody/Mixtral-8x7B-v0.1", None),
        ("mixtral-8x7b-dpo", None),
        ("qwen3-30b", None),
        ("google/vit-base-patch16-224", "vit-base-patch16-224"),
        ("unsloth/gemma-3-1b-it", "gemma-3-1b"),
        ("openai/whisper-large-v3", "whisper-large-v3"),
    ],
)
def test_a_known_model_is_found_by_the_names_of_its_tuned_weights(name: str, expected: str | None) -> None:
    model = find_known(name)
    assert (model and model.name) == expected
    # A preset goes first.
    assert model is None or find_preset(name) is None


def test_a_misspelt_known_model_is_suggested_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "mixtral-8x9b", "--strategy", "zero3", "--hardware", "8xH100"]) == 2
    assert "did you mean mixtral-8x7b or mixtral-8x22b?" in capsys.readouterr().err


def test_a_class_with_sinks_has_the_fused_attentions_of_transformers() -> None:
    shape, model_class = read_shape("gpt_oss"), transformers.GptOssForCausalLM
    assert (model_class._supports_sdpa, model_class._supports_flash_attn, model_class._supports_flex_attn) == (0, 1, 1)
    assert shape.fused_attentions == ("flash_attention_2", "flex_attention")
    assert set(shape.flash_kernels) == set(model_class._compatible_flash_implementations or ())
    assert read_shape("mixtral").fused_attentions == FUSED_ATTENTIONS
    assert set(FUSED_ATTENTIONS) == set(get_args(Attention)) - {"eager"}


def test_a_fused_attention_of_a_class_without_sdpa_saves_no_scores() -> None:
    shape = read_shape("gpt_oss", max_position_embeddings=512)
    by_name = {name: _at_512(shape, name) for name in ("eager", "sdpa", "flash_attention_2", "flex_attention")}
    assert by_name["sdpa"] == by_name["eager"]
    assert by_name["flex_attention"] == by_name["flash_attention_2"]
    eager, fused = by_name["eager"], by_name["flash_attention_2"]
    # At least the probabilities, in 16 bits.
    assert eager[0] - fused[0] > 2 * 4 * shape.heads * 512**2
    # Its products have the rate of a fused attention, which computes no masked pairs.
    assert eager[1] == 0 < fused[1]


def _at_512(shape: LiveShape, attention: Attention) -> tuple[float, float]:
    """Return the bytes that a layer saves of 4 sequences of 512 tokens, and the FLOPs of a fused attention."""
    request = dataclasses.replace(make_request(shape, "zero2"), sequence_length=512, attention=attention)
    return predict_activations(request).layer, trace(request).attention


def test_eager_attention_that_was_not_asked_for_is_named() -> None:
    request = dataclasses.replace(make_request(read_shape("gpt_oss"), "zero2"), box=to_box("8xH100"))
    (note,) = (item.says for item in request_findings(request) if item.rule == "eager")
    assert "counted with eager attention" in note
    assert "vllm-flash-attn3 (Hopper)" in note
    on_ampere = dataclasses.replace(request, box=to_box("8xA100-80"))
    (note,) = (item.says for item in request_findings(on_ampere) if item.rule == "eager")
    assert "set flex_attention" in note
    for name in ("eager", "flash_attention_2", "flex_attention"):
        requested = dataclasses.replace(request, attention=name)
        assert not [item for item in request_findings(requested) if item.rule == "eager"]


def test_flash_attention_with_sinks_needs_hopper() -> None:
    request = dataclasses.replace(make_request(read_shape("gpt_oss"), "zero2"), attention="flash_attention_2")
    check_attention(dataclasses.replace(request, box=to_box("8xH100")))
    check_attention(dataclasses.replace(request, box=to_box("8xB200")))
    ampere = dataclasses.replace(request, box=to_box("8xA100-80"))
    with pytest.raises(UserError, match="no flash attention for gpt_oss: its sinks need") as error:
        check_attention(ampere)
    assert "flex_attention" in error.value.fix
    assert [item.kind for item in request_findings(ampere) if item.key == "attn_implementation"] == ["refused"]
    check_attention(dataclasses.replace(ampere, attention="flex_attention"))


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "opt", "roberta", "vit", "bart"])
def test_a_traced_class_has_a_table_of_positions_unless_it_has_the_frequencies_of_rope(model_type: str) -> None:
    shape = read_shape(model_type)
    assert shape.has_position_table == (model_type not in ("gpt_oss", "mixtral"))
    assert shape.positions is not None
    if shape.has_position_table:
        with pytest.raises(UserError, match="positions, too few"):
            resolve_length(shape, shape.positions + 1)
    else:
        assert resolve_length(shape, shape.positions + 1) == shape.positions + 1
