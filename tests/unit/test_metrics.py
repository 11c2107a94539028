from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from study.config.places import REPOSITORY
from study.metrics.inventory import Inventory
from study.metrics.state import _reduce_buckets
from study.workloads.metrics import summarize_evaluation


@pytest.mark.parametrize(
    ("task", "labels", "scores"),
    [
        ("gpt-wikitext", (None, None), {"perplexity": math.exp(5.5 / 3)}),
        ("bert-imdb", (torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])), {"accuracy": 2 / 3}),
    ],
)
def test_scores_are_means_over_samples(task: str, labels: tuple[Any, Any], scores: dict[str, float]) -> None:
    losses = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    assert summarize_evaluation(task, losses, *labels) == pytest.approx({"eval_loss": 5.5 / 3, **scores})


def test_the_metrics_need_no_network_and_write_nothing_even_into_the_hugging_face_cache(tmp_path: Path) -> None:
    script = (
        "import torch; from study.workloads.metrics import summarize_evaluation as s;"
        "print([s('bert-imdb', torch.ones(2), torch.tensor([1, 0]), torch.tensor([1, 1])),"
        "s('gpt-wikitext', torch.zeros(2), None, None)])"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_", "XDG_"))}
    folders = {"HF_HOME": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=clean | offline | folders, cwd=tmp_path, capture_output=True, text=True
    )
    expected = [{"eval_loss": 1.0, "accuracy": 0.5}, {"eval_loss": 0.0, "perplexity": 1.0}]
    assert ast.literal_eval(result.stdout.strip().splitlines()[-1]) == expected
    assert list(tmp_path.iterdir()) == []


class DeepSpeedZeroOptimizer_Stage3:  # the name of DeepSpeed's class is part of the attribute's
    """Stage 3 of DeepSpeed 0.14.5, as far as its bucket goes."""

    def __init__(self, bucket: torch.Tensor) -> None:
        self.__ipg_bucket_flat_buffer = bucket


def test_buckets_are_found_under_the_names_of_older_and_newer_releases() -> None:
    bucket = torch.zeros(3)
    newer = SimpleNamespace(ipg_buckets={torch.float32: SimpleNamespace(buffer=[bucket])})
    # Stages 1 and 2 of 0.14.5; after a step they have released it.
    older, released = SimpleNamespace(ipg_buffer=[bucket, bucket]), SimpleNamespace(ipg_buffer=None)
    for optimizer in (newer, older, DeepSpeedZeroOptimizer_Stage3(bucket)):
        inventory = Inventory(torch.device("cpu"))
        inventory.claim("buffers", "reduce_bucket", _reduce_buckets(optimizer))
        assert inventory.claims == {("buffers", "device", "reduce_bucket"): 12}
    assert _reduce_buckets(released) == [None, None]
