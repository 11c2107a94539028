"""Classes outside the table of families on real ranks: predicted state, traffic and peaks."""

from __future__ import annotations

import json

import pytest

from forked import fork_ranks
from runs import trained
from study.config.flags import RunConfig
from study.predictor.communication import sent_bytes
from study.predictor.hardware import CPU_CORE, box_of_ranks
from study.predictor.request import request_for
from study.predictor.state import predict_state
from tools.architectures import CONFIGS, STRATEGIES, compare
from unit.test_any_config import assert_as_predicted, write_config


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_STUDY_CACHE", str(tmp_path_factory.getbasetemp() / "live_cache"))


@pytest.mark.parametrize(
    ("model_type", "strategy", "flags"),
    [
        ("olmo2", "zero2", ()),
        ("smollm3", "zero3", ("--gradient_checkpointing",)),
        ("falcon", "ddp", ()),
        ("gemma3_text", "fsdp2", ()),
        ("roberta", "fsdp2", ("--task", "bert-imdb")),
    ],
)
def test_real_ranks_have_the_predicted_state_and_send_the_predicted_bytes(model_type, strategy, flags, tmp_path):
    task = () if "--task" in flags else ("--task", "gpt-wikitext")
    model = ("--model_name_or_path", write_config(tmp_path, model_type), "--weights", "random", "--dropout", "-1")
    run = trained(strategy, tmp_path / "run", *model, *task, *flags, "--per_device_train_batch_size", "2")
    names = ("model_name_or_path", "seq_length", "precision", "gradient_checkpointing", "attn_implementation", "task")
    config = RunConfig(**{name: run.config[name] for name in names})
    request = request_for(strategy, config, box_of_ranks("processes", CPU_CORE, 2), 2, 2)
    state, measured = predict_state(request), run.summary["state_bytes_per_rank"]
    assert {kind: place["device"] for kind, place in measured.items()} == {
        "params": state.params_device,
        "grads": state.grads_device,
        "optimizer": state.optimizer_device,
    }
    assert run.summary["sent_bytes_per_step"] == pytest.approx(sent_bytes(request), rel=0.006)


MEASURED = [
    *(
        pytest.param(strategy, sort, tuple(CONFIGS), marks=pytest.mark.long)
        for strategy in STRATEGIES
        for sort in ("real", "virtual")
    ),
    ("zero3", "real", ("mixtral", "whisper", "vit")),
    ("fsdp2", "real", ("t5", "olmo2", "gemma3")),
    ("zero2", "virtual", ("modernbert", "mamba2", "qwen2_5_vl")),
]


@pytest.mark.parametrize(("strategy", "sort", "kinds"), MEASURED)
def test_two_ranks_have_the_predicted_state_traffic_and_peak(strategy, sort, kinds, tmp_path) -> None:
    is_virtual, file = sort == "virtual", tmp_path / "measured.json"
    arguments = ["ranks", *kinds, "--file", str(file), *(["--virtual"] if is_virtual else [])]
    ranks, limit_s = 1 if is_virtual else 2, 180 if len(kinds) < 9 else 590
    result = fork_ranks(strategy, "tools/architectures.py", *arguments, ranks=ranks, timeout=limit_s)
    assert result.returncode == 0, result.stderr[-2000:]
    name = f"{strategy}, virtual" if is_virtual else strategy
    assert_as_predicted(compare({name: json.loads(file.read_text())}))
