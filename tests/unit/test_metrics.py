from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from study.config.places import REPOSITORY
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
