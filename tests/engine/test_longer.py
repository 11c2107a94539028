"""Features for longer samples on two real ranks against the prediction: DeepSpeed's Ulysses and TiledMLP."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

import pytest

from forked import fork_ranks
from study.advisor import long_features
from study.config.flags import Precision
from study.config.strategies import read_strategy
from study.predictor.hardware import CPU_CORE, box_of_ranks
from study.predictor.memory import CHECKPOINTS_ON_DEVICE, device_snapshots
from study.predictor.micro_batch import predict_activations
from study.predictor.request import Request
from study.predictor.table_shape import shape_of_architecture

RANKS = 2
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def case(dtype: str, checkpoints: bool, model_type: str = "llama", keys: int = 4, **features: bool) -> dict[str, Any]:
    config = {"model_type": model_type, **SIZES, "num_key_value_heads": keys}
    features = {"ulysses": False, "tiled": False} | features
    return {"config": config, "dtype": dtype, "checkpoints": checkpoints, "batch": 1, "tokens": 1024, **features}


CASES = [
    case("float32", False, ulysses=True),
    case("float32", True, ulysses=True),
    case("bfloat16", True, ulysses=True),
    # Fewer key heads than ranks.
    case("float32", False, keys=1, ulysses=True),
    case("float32", False, "qwen3", ulysses=True),
    case("float32", False, tiled=True),
    case("bfloat16", True, tiled=True),
    case("bfloat16", True, ulysses=True, tiled=True),
    case("float32", False),
]
NAMES = [
    "-".join(
        [it["config"]["model_type"], it["dtype"], f"{it['config']['num_key_value_heads']}keys"]
        + [name for name in ("checkpoints", "ulysses", "tiled") if it[name]]
    )
    for it in CASES
]
by_case = pytest.mark.parametrize("place", range(len(CASES)), ids=NAMES)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the output of rank 0 for each case."""
    folder = tmp_path_factory.mktemp("longer")
    done = fork_ranks("ddp", "tests/probes/long_samples.py", json.dumps(CASES), str(folder))
    assert done.returncode == 0, done.stderr
    output: list[dict[str, Any]] = json.loads((folder / "output.json").read_text(encoding="utf-8"))
    return output


def make_request(case: dict[str, Any]) -> Request:
    config, ranks = case["config"], RANKS if case["ulysses"] else 1
    is_half = case["dtype"] == "bfloat16"
    precision: Precision = "bf16-engine" if is_half else "fp32"
    return Request(
        shape=shape_of_architecture(config["model_type"], config["model_type"], config),
        strategy=read_strategy("single"),
        box=dataclasses.replace(box_of_ranks("processes", CPU_CORE, 1), gloo_copies_gathers=True),
        sequence_length=case["tokens"] // ranks,
        micro_batch=case["batch"],
        accumulation=1,
        precision=precision,
        gradient_checkpointing=case["checkpoints"],
        attention="sdpa",
        pure=is_half,
        sequence_ranks=ranks,
        tiled_mlp=case["tiled"],
    )


def test_the_named_settings_and_counts_are_those_of_the_installed_libraries() -> None:
    from accelerate import ParallelismConfig
    from deepspeed.runtime import constants
    from deepspeed.runtime.activation_checkpointing import offload_activations
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    fields = {field.name for field in dataclasses.fields(ParallelismConfig)}
    assert {"sp_size", "sp_backend", "cp_size"} <= fields
    assert re.findall(r"(?<=ParallelismConfig\()\w+", long_features.SETTINGS[long_features.RANKS]) == [
        "sp_size",
        "cp_size",
    ]
    assert constants.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE in long_features.SETTINGS[long_features.RANKS]
    assert constants.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT == "fp32"
    manager = offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager
    assert f"{manager.__name__} (DeepSpeed)" in long_features.SETTINGS[long_features.HOST]
    defaults = inspect.signature(manager).parameters
    on_device = sum(defaults[name].default for name in ("max_fwd_stash_count", "keep_last_count"))
    assert on_device == CHECKPOINTS_ON_DEVICE
    assert f"{ulysses_sp.TiledMLP.__name__} of {ulysses_sp.__name__}" in long_features.SETTINGS[long_features.TILES]


@by_case
def test_a_rank_saves_and_allocates_the_predicted_bytes(measured: list[dict[str, Any]], place: int) -> None:
    case, rank = CASES[place], measured[place]
    request = make_request(case)
    points = [point.total - point.parts["allocator"] for point in device_snapshots(request) if not point.step]
    saved = points[0] - predict_activations(request).logits_forward
    # Rotary positions and samples of a step.
    assert saved == pytest.approx(rank["saved"], rel=0.03, abs=52_000)
    assert max(points) == pytest.approx(rank["peak"], rel=0.05)


def test_each_feature_computes_the_loss_of_one_rank(measured: list[dict[str, Any]]) -> None:
    places = [place for place, name in enumerate(NAMES) if name.startswith("llama") and "4keys" in name]
    losses = {NAMES[place]: measured[place]["loss"] for place in places}
    exact = [loss for name, loss in losses.items() if "float32" in name]
    assert max(exact) - min(exact) < 1e-5
    assert max(abs(loss - exact[0]) for loss in losses.values()) < 0.02
