"""`study explain` against real ranks and the engines' own readers of files."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from engines import ROOT, printed_json
from forked import fork_ranks, fork_script
from study.advisor.explain_case import ACCUMULATION, ProgramSettings, resolve
from study.advisor.explain_costs import bucket_bytes
from study.advisor.explain_findings import findings
from study.advisor.explanation_text import LATE_ERRORS
from study.advisor.user_settings import ZERO, read_user_file
from study.config.errors import UserError
from study.config.strategies import read_strategy
from study.predictor.hardware import ANY_DEVICE, box_of_ranks
from study.predictor.live import live_shape
from study.predictor.memory import predict_memory
from study.predictor.models import model_shape
from study.predictor.request import Request
from study.predictor.shape import ModelShape
from study.predictor.state import predict_state, sub_groups
from study.predictor.table_shape import shape_of_architecture
from study.predictor.zero3_gathers import simulate_gathers
from unit.test_explain import make_case, persistent_elements, zero


class FsdpCase(NamedTuple):
    """A case of tests/probes/fsdp_rank.py, whose words these are."""

    version: int
    vocabulary: int
    tokens: int
    checkpoints: bool
    micro_batches: int
    is_bf16: bool
    keeps_gathered: bool
    tied: bool
    is_unwrapped: bool
    syncs: bool = False
    experts: int = 0

    def shape(self) -> ModelShape:
        if not self.experts:
            sizes = {"vocab_size": self.vocabulary, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
            return shape_of_architecture("gpt2", "gpt2", sizes | {"tie_word_embeddings": self.tied})
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 4, "num_local_experts": self.experts, "max_position_embeddings": 128}
        return live_shape("mixtral", sizes | {"model_type": "mixtral", "vocab_size": self.vocabulary})

    def request(self) -> Request:
        return Request(
            self.shape(),
            read_strategy("fsdp2"),
            box_of_ranks("4", ANY_DEVICE, 4),
            self.tokens,
            2,
            self.micro_batches,
            "bf16" if self.is_bf16 else "fp32",
            self.checkpoints,
            "sdpa",
            autocast=False,
            fsdp_version=self.version,
            fsdp_keeps_gathered=self.keeps_gathered,
            fsdp_unwrapped=self.is_unwrapped,
            sync_each_batch=self.syncs,
        )


# By layer. Logits, layers, recomputed layers, and the root decide the peak.
_WRAPPED = [
    (1, 2000, 64, False, 1, False, False, True),
    (1, 200, 64, False, 2, True, False, True),
    (1, 200, 64, True, 1, True, False, True),
    (1, 4000, 4, True, 1, True, False, True),
    (1, 200, 8, True, 2, False, False, True),
    (1, 200, 64, False, 2, True, True, True),
    (2, 2000, 64, False, 1, False, True, False),
    (2, 200, 64, False, 2, True, False, True),
    (2, 4000, 4, True, 1, True, False, False),
    (2, 200, 4, False, 1, False, True, True),
    (2, 200, 8, True, 2, False, True, True),
]
# As Accelerate's default, without a policy for the layers: all weights and gradients are there at the end of the
# backward pass.
_UNWRAPPED = [
    (1, 200, 64, False, 1, False, False, True),
    (1, 200, 4, False, 2, True, False, True),
    (1, 2000, 4, False, 1, True, False, False),
    (1, 200, 64, False, 1, True, False, True),
    (1, 200, 4, True, 2, False, True, True),
    (2, 200, 64, False, 1, False, False, True),
    (2, 200, 4, False, 1, True, False, True),
    (2, 200, 4, False, 2, True, False, False),
    (2, 2000, 4, True, 1, False, False, False),
    (2, 200, 64, False, 1, True, False, True),
    (2, 2000, 64, True, 1, True, False, False),
    (2, 200, 4, False, 2, False, True, False),
    (2, 200, 4, True, 1, False, False, True),
    (2, 200, 4, False, 1, True, False, False),
]
# Gradients are reduced in each micro-batch, and added to the shards of earlier ones.
_SYNCED = [
    (1, 200, 8, False, 2, False, False, True, False),
    (1, 200, 4, False, 2, True, False, True, False),
    (1, 200, 64, False, 2, True, True, True, False),
    (2, 200, 8, False, 2, False, False, True, False),
    (2, 200, 4, False, 2, True, False, False, False),
    (2, 200, 4, False, 3, False, True, True, False),
    (2, 200, 4, False, 2, True, False, True, True),
]
# Two experts on four ranks: every tensor of experts has twice its elements in a gather and in a reduction. The last
# case has as many experts as ranks.
_EXPERTS = [
    (2, 200, 4, False, 1, False, False, False, False, False, 2),
    (2, 200, 4, False, 1, True, False, False, False, False, 2),
    (2, 200, 4, False, 2, False, False, False, False, False, 2),
    (2, 200, 4, False, 1, False, False, False, False, False, 4),
]
FSDP_CASES = [FsdpCase(*case, False) for case in _WRAPPED] + [FsdpCase(*case, True) for case in _UNWRAPPED]
FSDP_CASES += [FsdpCase(*case, syncs=True) for case in _SYNCED] + [FsdpCase(*case) for case in _EXPERTS]


def test_the_bytes_of_fsdp_are_those_of_a_virtual_rank() -> None:
    """Version 1's root keeps the embedding, the last norm and the head gathered, and their gradients until the end; of
    version 2's groups, as Accelerate makes them, an untied head is reduced first."""
    probe = [ROOT / "tests/probes/fsdp_rank.py", json.dumps(FSDP_CASES)]
    done = fork_script(*probe, folder=ROOT, environment=os.environ, read_at_import={})  # type: ignore[arg-type]
    measured = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("SAYS")]
    assert len(measured) == len(FSDP_CASES), done.stderr[-2000:]
    for case, rank in zip(FSDP_CASES, measured, strict=True):
        request = case.request()
        state = predict_state(request, unreduced=False)
        assert (state.params_device, state.optimizer_device) == (rank["params"], rank["optimizer"])
        # The table of families has 4 % more for a recomputed layer. Version 2's rules are up to 21 % off for version 1,
        # 38 % if the head waited for the embedding, and 7 % without the buffers of the forward pass.
        within = 0.05 if case.checkpoints and case.tokens < 65 else 0.015
        assert predict_memory(request).peak_allocated.value == pytest.approx(rank["peak"], rel=within), case


_FILLED_BY_THE_ENGINE = """
import json, sys, torch, transformers
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
PartialState(cpu=True)
import deepspeed
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=json.load(open(sys.argv[1]))))
config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=48, vocab_size=64, n_positions=32)
model = transformers.GPT2LMHeadModel(config)
loader = torch.utils.data.DataLoader(torch.zeros(4, 2), batch_size=2)
engine, *_ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
zero = engine._config.zero_config
names = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "overlap_comm",
         "gather_16bit_weights_on_model_save", "max_reuse_distance")
print("SAYS", json.dumps({name: getattr(zero, name) for name in names}
                         | {"persistent": sum(each.ds_numel for each in engine.optimizer.persistent_parameters),
                            "sub_groups": len(engine.optimizer.fp16_groups),
                            "bucket": sum(each.buffer.numel() for each in engine.optimizer.ipg_buckets.values())}))
"""


def test_auto_is_filled_in_as_by_accelerate_and_the_engine_agrees_with_explain(tmp_path: Path) -> None:
    settings = zero(
        3,
        reduce_bucket_size="auto",
        stage3_prefetch_bucket_size="auto",
        stage3_param_persistence_threshold="auto",
        stage3_gather_16bit_weights_on_model_save="auto",
        sub_group_size=9_000,
    )
    settings |= {"bf16": {"enabled": "auto"}, "train_batch_size": "auto", ACCUMULATION: "auto"}
    case = make_case(tmp_path, settings, "layers=1,hidden=48,heads=2,vocabulary=64,positions=32", ranks=1)
    (tmp_path / "engine.json").write_text(json.dumps(settings))
    (tmp_path / "engine.py").write_text(_FILLED_BY_THE_ENGINE)
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_DEEPSPEED": "true"}
    files = [str(tmp_path / name) for name in ("engine.py", "engine.json", "store")]
    done = fork_script(*files, folder=ROOT, environment=environment, read_at_import={})
    (engine,) = (json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("SAYS"))
    names = {
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "gather_16bit_weights_on_model_save",
        "max_reuse_distance",
    }
    assert engine == {
        **{name: case.zero[f"stage3_{name}"] for name in names},
        "reduce_bucket_size": case.zero["reduce_bucket_size"],
        "overlap_comm": case.zero["overlap_comm"],
        "persistent": persistent_elements(case),
        "sub_groups": len(sub_groups(case.request)),
        "bucket": bucket_bytes(case) / case.weight,
    }
    assert engine["reduce_bucket_size"] == 48 * 48
    assert engine["sub_groups"] > 2


def test_the_elements_that_are_gathered_at_once_are_the_engines(tmp_path: Path) -> None:
    settings = {"max_live_parameters": 400_000, "max_reuse_distance": 0, "prefetch_bucket_size": 100_000}
    shipped = json.loads((ROOT / "accelerate_configs/deepspeed/zero3.json").read_text())[ZERO]
    changed = {f"stage3_{name}": value for name, value in settings.items()}
    case = make_case(tmp_path, {"train_micro_batch_size_per_gpu": 8, ZERO: shipped | changed}, "gpt-tiny", 2)
    flags = ["--task", "gpt-wikitext", "--max_steps", "3", "--eval_samples", "8", "--output_dir", str(tmp_path / "run")]
    overrides = [f"--engine_override={ZERO}.{key}={value}" for key, value in changed.items()]
    ended = fork_ranks("zero3", "tests/probes/gathered_at_once.py", *flags, *overrides)
    gathered = simulate_gathers(case.request).gathered_at_once + persistent_elements(case)
    assert all(rank["most"] == gathered < case.shape.parameters for rank in printed_json(ended))


def test_files_like_those_of_public_repositories_are_refused_as_by_the_engines_own_readers(tmp_path, monkeypatch):
    sample = yaml.safe_load((ROOT / "tests/data/config_files.yaml").read_text())
    for document in sample:
        (tmp_path / document["name"]).write_text(document["text"])
    names = json.dumps([document["name"] for document in sample])
    command = [ROOT / "tests/probes/config_readers.py", str(tmp_path / "store"), str(tmp_path), names]
    done = fork_script(*command, folder=ROOT, environment=os.environ, read_at_import={})  # type: ignore[arg-type]
    says = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("SAYS")]
    assert len(says) == len(sample) >= 60, done.stderr[-2000:]
    monkeypatch.chdir(tmp_path)
    for (document, errors), ranks in itertools.product(zip(sample, says, strict=True), (1, 8)):
        error = errors[ranks == 8]
        try:
            file = read_user_file(document["name"])
            case = resolve(file, model_shape("gpt2"), 1 if file.distributed_type == "NO" else ranks, ProgramSettings())
            # The readers accept what ends a run later.
            refusals = [item for item in findings(case) if item.kind == "refused" and item.rule not in LATE_ERRORS]
            keys = [finding.key for finding in refusals]
        except UserError:
            keys = [""]
        assert bool(keys) == bool(error), (document, ranks, keys, error)
        # Its arithmetic of a batch names any of the sizes; errors of Python, of a ratio and of a file name no setting.
        words = (
            "batch",
            "steps",
            "KeyError",
            "truth value",
            "Partial offloading",
            "has no attribute",
            "DecodeError",
            "OverflowError",
            "invalid literal",
            "could not convert",
            "not supported between",
        )
        plain = re.sub("[ _]", "", error.lower())
        parts = [re.sub("_", "", key.rpartition(".")[2].removeprefix("fsdp_")) for key in keys]
        assert not error or any(part in plain for part in parts) or any(word in error for word in words), (keys, error)
