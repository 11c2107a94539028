"""Training with frozen modules: the figures of --freeze, and transformers' own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from study.cli import main
from study.predictor.live import live_shape, measure, with_frozen, without_media
from study.predictor.models import model_shape
from study.receipt.live_adapters import frozen_modules
from unit.test_advise import read_json

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE, PATCHES = 1, 16


def make_config() -> LlavaConfig:
    vision = CLIPVisionConfig(**SIZES, image_size=28, patch_size=7)
    text = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=256)
    return LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)


def write_llava(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(make_config().to_dict()))
    return str(folder)


ON_GPUS = ("--strategy", "zero2", "--hardware", "8xA100")


def predict(model: str, *flags: str) -> dict[str, float]:
    document = read_json("predict", model, "8xA100", "--strategy", "zero2", *flags)
    parts: dict[str, float] = document["memory"]["device_parts"]
    return parts


@pytest.mark.parametrize(
    ("frozen", "recomputes", "has_gradient"),
    [
        (("vision_tower",), False, False),
        (("vision_tower",), True, True),
        (("vision_tower", "multi_modal_projector", "language_model"), False, False),
    ],
)
def test_a_frozen_tower_has_a_backward_pass_where_transformers_recomputes(
    frozen: tuple[str, ...], recomputes: bool, has_gradient: bool
) -> None:
    model = LlavaForConditionalGeneration(make_config()).train()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(f".{part}." in f".{name}" for part in frozen))
    if recomputes:
        model.activation_checkpointing_enable()
    outputs = list[torch.Tensor]()
    tower = model.model.vision_tower
    tower.encoder.layers[-1].register_forward_hook(lambda *call: outputs.append(call[-1]))
    tokens = torch.full((1, PATCHES + 4), IMAGE + 1)
    tokens[0, :PATCHES] = IMAGE
    model(input_ids=tokens, pixel_values=torch.zeros(1, 3, 28, 28))
    assert outputs[0].requires_grad == has_gradient
    shape = with_frozen(live_shape("llava", model.config.to_dict()), frozen)
    assert shape.has_input_gradients(recomputes) == has_gradient
    if recomputes:
        model.disable_input_require_grads()
        model(input_ids=tokens, pixel_values=torch.zeros(1, 3, 28, 28))
        assert not outputs[-1].requires_grad
        assert not with_frozen(live_shape("llava", model.config.to_dict()), frozen, stops=True).has_input_gradients(
            True
        )


def test_frozen_weights_have_no_gradients_no_optimizer_and_no_activations(tmp_path: Path) -> None:
    folder = write_llava(tmp_path)
    trained_parts, frozen = predict(folder), predict(folder, "--freeze", "vision_tower")
    shape = model_shape(folder)
    tower = sum(param.elements for param in shape.params if ".vision_tower." in param.name)
    trained = with_frozen(shape, ("vision_tower",)).trained_parameters
    assert trained == shape.parameters - tower
    assert frozen["optimizer"] == pytest.approx(trained_parts["optimizer"] * trained / shape.parameters, rel=1e-3)
    assert frozen["parameters"] == pytest.approx(trained_parts["parameters"], rel=1e-3)
    assert frozen["activations"] < trained_parts["activations"]
    # With transformers' gradient checkpointing the tower keeps the inputs of its layers.
    recomputed, stopped = (
        predict(folder, "--freeze", "vision_tower", "--gradient_checkpointing", "--micro_batch", "64", *flags)
        for flags in ([], ["--frozen_without_backward"])
    )
    assert stopped["activations"] < recomputed["activations"]


def test_the_backward_pass_of_a_frozen_tower_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "predict",
        write_llava(tmp_path),
        "--strategy",
        "zero2",
        "--hardware",
        "8xA100",
        "--freeze",
        "vision_tower",
    ]
    for flags, is_said in (
        ([], False),
        (["--gradient_checkpointing"], True),
        (["--gradient_checkpointing", "--frozen_without_backward"], False),
    ):
        assert main([*words, *flags]) == 0
        assert ("disable_input_require_grads" in capsys.readouterr().out) == is_said


def test_a_model_of_the_table_is_traced_with_frozen_layers() -> None:
    modules = ("embed_tokens", "model.layers.0", "model.layers.1")
    words = ["smollm2-135m", "--micro_batch", "8"]
    parts = [predict(*words, "--freeze", ",".join(modules[:count])) for count in (1, 2, 3)]
    shape = model_shape("smollm2-135m")
    trained = [with_frozen(shape, modules[:count]).trained_parameters for count in (1, 3)]
    # A frozen layer saves nothing: one of 30, and then two.
    activations = [part["activations"] for part in parts]
    saved = [activations[0] - size for size in activations[1:]]
    assert saved[1] == pytest.approx(2 * saved[0], rel=0.1)
    assert saved[0] == pytest.approx(activations[0] / 30, rel=0.1)
    assert parts[2]["optimizer"] / parts[0]["optimizer"] == pytest.approx(trained[1] / trained[0], rel=0.001)


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (("model.vision_tower",), ("model.vision_tower",)),
        (("model.language_model.layers.0", "model.language_model.embed_tokens"), None),
        (("model.multi_modal_projector.linear_1",), None),
        ((), ()),
    ],
)
def test_a_receipt_names_the_outermost_frozen_modules(modules: tuple[str, ...], names: tuple[str, ...] | None) -> None:
    model = LlavaForConditionalGeneration(make_config())
    for name in modules:
        model.get_submodule(name).requires_grad_(False)
    assert set(frozen_modules(model)) == set(modules if names is None else names)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--freeze nothing", "has no weights in a module nothing"),
        ("--freeze visin_tower", "did you mean vision_tower"),
        ("--freeze model,lm_head", "all weights are frozen"),
        ("--freeze vision_tower --peft lora", "--freeze is for training without adapters"),
        ("--frozen_without_backward", "--frozen_without_backward has no effect without frozen modules"),
    ],
)
def test_modules_that_cannot_be_frozen_are_refused(
    flags: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", write_llava(tmp_path), *ON_GPUS, *flags.split()]
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_samples_of_text_alone_have_the_activations_of_the_model_of_text(tmp_path: Path) -> None:
    model, text = write_llava(tmp_path), make_config().text_config.to_dict()
    with_image, text_only = predict(model), predict(model, "--text_only")
    assert text_only["activations"] < with_image["activations"]
    # The tower is in memory all the same.
    assert text_only["parameters"] == with_image["parameters"]
    shape = live_shape("text", {**text, "architectures": ["LlamaForCausalLM"]})
    options = {"mode": "engine", "dropout": False, "fused": True, "cuda": True, "length": 64}
    alone, with_tower = (measure(it, **options) for it in (shape, without_media(model_shape(model))))
    assert isinstance(alone, dict)
    assert isinstance(with_tower, dict)
    traced = {
        name.removeprefix("model.language_model."): layer
        for name, layer in with_tower["passes"][0]["layers"].items()
        if layer
    }
    expected = {name.removeprefix("model."): layer for name, layer in alone["passes"][0]["layers"].items()}
    figures = ("saved", "forward", "backward", "checkpoint")
    assert traced.keys() == expected.keys()
    for name, layer in traced.items():
        assert {figure: layer[figure] for figure in figures} == {figure: expected[name][figure] for figure in figures}


def test_a_note_has_the_flag_for_text_alone(tmp_path: Path) -> None:
    shape = model_shape(write_llava(tmp_path))
    assert any("one image or sound a sample" in note and "--text_only counts none" in note for note in shape.notes())
    assert not any("--text_only" in note for note in without_media(shape).notes())


def test_adapters_and_frozen_modules_keep_samples_of_text_alone(tmp_path: Path) -> None:
    shape = without_media(model_shape(write_llava(tmp_path)))
    assert with_frozen(shape, ("vision_tower",)).text_only
    assert shape.add_adapters(8, ()).text_only


def test_a_model_without_towers_refuses_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "gpt2", "--text_only", *ON_GPUS]) == 2
    assert "--text_only has no effect: gpt2 has no tower of images or sounds" in capsys.readouterr().err
