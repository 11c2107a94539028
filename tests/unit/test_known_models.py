"""Models by name besides the presets, without torch: their names, and parameters of those in the table of families."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from study.config.errors import UserError
from study.predictor.families import FAMILIES
from study.predictor.models import model_shape
from study.workloads.presets import find_known, find_preset, known_models


def test_a_known_model_of_the_table_of_families_needs_no_torch() -> None:
    listed = [name for name, model in known_models().items() if model.config["model_type"] in FAMILIES]
    code = "import json, sys; sys.modules['torch'] = None; from study.predictor.models import model_shape;"
    code += f" print(json.dumps([model_shape(name).parameters for name in {listed}]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [known_models()[name].parameters for name in listed]
    assert {"pythia-1.4b", "mpt-7b", "codellama-7b", "yi-34b"} <= {*listed}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("codellama/CodeLlama-7b-Instruct-hf", "codellama-7b"),
        ("01-ai/Yi-34B-Chat", "yi-34b"),
        ("mosaicml/mpt-7b-instruct", "mpt-7b"),
        ("somebody/pythia-1.4b", None),
        ("google-t5/t5-3b", "t5-3b"),
        ("roberta-base", "roberta-base"),
        ("facebook/opt-6.7b", "opt-6.7b"),
        ("bigscience/bloomz-7b1", None),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("stabilityai/stablelm-2-1_6b", "stablelm-2-1.6b"),
    ],
)
def test_a_known_model_is_found_by_its_hub_id_and_by_tuned_weights(name: str, expected: str | None) -> None:
    model = find_known(name)
    assert (model and model.name) == expected
    assert find_preset(name) is None


@pytest.mark.parametrize(
    ("name", "nearest"), [("t5-xl", "t5-(small|base|large|3b)"), ("opt-66b", "opt-"), ("bloomz-7b1", "bloom-7b1")]
)
def test_a_family_with_known_models_is_not_called_one_without_presets(name: str, nearest: str) -> None:
    with pytest.raises(UserError, match=rf"unknown model '{name}' -> did you mean {nearest}"):
        model_shape(name)


def test_no_two_known_models_have_one_spelling() -> None:
    ids = [model.hub_id.lower() for model in known_models().values()]
    assert len({*ids}) == len(ids)
    assert all(find_known(model.hub_id) == model == find_known(model.name) for model in known_models().values())
