"""Tensor-parallel groups of two real ranks against the prediction: a divided residual stream, and peft's adapters."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.metadata import version
from typing import Any

import pytest

from forked import fork_ranks
from study.config.flags import Precision
from study.config.strategies import read_strategy
from study.predictor.activations import Activations
from study.predictor.communication import sent_by_collective
from study.predictor.hardware import CPU_CORE, box_of_ranks
from study.predictor.memory import device_snapshots
from study.predictor.micro_batch import predict_activations
from study.predictor.request import Request, with_tensor_group
from study.predictor.shape import ModelShape, with_adapters
from study.predictor.table_shape import shape_of_architecture
from study.predictor.tensor_group import ADAPTERS_ON_ROWS

RANK = 8
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "use_cache": False,
}
ATTENTION, ALL = ["q_proj", "v_proj"], "all-linear"


def case(model_type: str, dtype: str, checkpoints: bool, targets: object = None, **sizes: int) -> dict[str, Any]:
    config = {"model_type": model_type, **SIZES}
    usual = {"batch": 2, "tokens": 128, "rank": RANK}
    return {"config": config, "dtype": dtype, "checkpoints": checkpoints, "targets": targets, **usual, **sizes}


DIVIDED_STREAM = [
    case("llama", "float32", False),
    case("llama", "float32", True),
    case("llama", "bfloat16", False),
    case("llama", "bfloat16", True),
    case("qwen3", "float32", False),
]
ADAPTERS = [
    case("llama", "float32", False, ATTENTION),
    case("llama", "float32", True, ATTENTION),
    case("llama", "float32", False, ALL),
    case("llama", "float32", True, ALL),
    case("llama", "bfloat16", False, ALL),
    case("llama", "float32", False, ["gate_proj"]),
    case("llama", "float32", False, ["o_proj", "down_proj"]),
]


# As peft makes it.
UNMENDED = case("llama", "float32", False, ["o_proj"], unmended=1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the output of rank 0 for each case."""
    folder = tmp_path_factory.mktemp("plans")
    cases = json.dumps([*DIVIDED_STREAM, *ADAPTERS, UNMENDED])
    done = fork_ranks("ddp", "tests/probes/tensor_plans.py", cases, str(folder))
    assert done.returncode == 0, done.stderr
    output: list[dict[str, Any]] = json.loads((folder / "output.json").read_text(encoding="utf-8"))
    return output


def make_request(case: dict[str, Any], ranks: int = 2) -> Request:
    config, targets = case["config"], case["targets"]
    shape: ModelShape = shape_of_architecture(config["model_type"], config["model_type"], config)
    if targets is not None:
        shape = with_adapters(shape, case["rank"], () if targets == ALL else tuple(targets))
    is_half = case["dtype"] == "bfloat16"
    precision: Precision = "bf16-engine" if is_half else "fp32"
    request = Request(
        shape=shape,
        strategy=read_strategy("tp").with_tensor_parallelism(ranks) if ranks > 1 else read_strategy("single"),
        box=dataclasses.replace(box_of_ranks("processes", CPU_CORE, ranks), gloo_copies_gathers=True),
        sequence_length=case["tokens"],
        micro_batch=case["batch"],
        accumulation=1,
        precision=precision,
        gradient_checkpointing=case["checkpoints"],
        attention="sdpa",
        pure=is_half,
        adapters_in_16_bits=is_half and targets is not None,
    )
    return request if ranks == 1 else with_tensor_group(request, "sequence" if targets is None else "plain")


def make_name(case: dict[str, Any]) -> str:
    checkpoints = "checkpoints" if case["checkpoints"] else "all"
    return f"{case['config']['model_type']}-{case['dtype']}-{checkpoints}-{case['targets']}"


CASES = list(enumerate([*DIVIDED_STREAM, *ADAPTERS]))
by_case = pytest.mark.parametrize(("place", "case"), CASES, ids=[make_name(case) for _, case in CASES])


@by_case
def test_a_rank_has_the_predicted_part_of_each_tensor(
    measured: list[dict[str, Any]], place: int, case: dict[str, Any]
) -> None:
    params, rank = make_request(case).shape.params, measured[place]
    assert sorted(zip(rank["elements"], rank["trained"], strict=True)) == sorted(
        (param.elements, param.trained) for param in params
    )


@by_case
def test_a_step_sends_the_predicted_bytes(measured: list[dict[str, Any]], place: int, case: dict[str, Any]) -> None:
    counted = measured[place]["collectives"]
    sent = {name: counts["wire_bytes_per_rank"] for name, counts in counted.items()}
    assert sent == sent_by_collective(make_request(case))


@by_case
def test_a_rank_saves_and_allocates_the_predicted_bytes(
    measured: list[dict[str, Any]], place: int, case: dict[str, Any]
) -> None:
    # Attention of the first layer has no gradient then, and a prediction has its tensors.
    if case["targets"] == ["gate_proj"]:
        return
    rank, request = measured[place], make_request(case)
    saved: Activations = predict_activations(request)
    points = [point.total - point.parts["allocator"] for point in device_snapshots(request) if not point.step]
    # Rotary positions, samples and masks of a step.
    assert points[0] - saved.logits_forward == pytest.approx(rank["saved"], rel=0.03, abs=52_000)
    assert max(points) == pytest.approx(rank["peak"], rel=0.05)


def test_a_group_computes_the_loss_of_one_rank(measured: list[dict[str, Any]]) -> None:
    """Its values are those of all tokens: of the same weights and samples for each plan and recomputation."""
    losses = {
        make_name(case): measured[place]["loss"] for place, case in CASES if case["config"]["model_type"] == "llama"
    }
    exact = [loss for name, loss in losses.items() if "float32" in name]
    assert max(exact) - min(exact) < 1e-5
    assert max(abs(loss - exact[0]) for loss in losses.values()) < 0.02


def test_adapters_on_matrices_by_rows_end_with_the_error_of_the_installed_releases(
    measured: list[dict[str, Any]],
) -> None:
    assert re.match(r"RuntimeError: shape '\[256, 64\]' is invalid for input of size 32768", measured[-1]["error"])
    assert f"peft {version('peft')} ends with a RuntimeError" in ADAPTERS_ON_ROWS
    assert f"transformers {version('transformers')}" in " ".join(ADAPTERS_ON_ROWS.split())


def test_a_divided_stream_keeps_less_than_the_matrices_alone() -> None:
    undivided, divided = make_request(DIVIDED_STREAM[0], ranks=1), make_request(DIVIDED_STREAM[0])
    assert divided.tensor_group is not None
    plain = dataclasses.replace(divided, tensor_group=dataclasses.replace(divided.tensor_group, divides_stream=False))
    layers = [predict_activations(request).layer for request in (undivided, plain, divided)]
    assert layers[0] > layers[1] > layers[2] > layers[0] / 2
