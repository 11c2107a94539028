"""Model-parallel groups compute the same gradients as one rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.test_virtual import assert_same_rank, virtual
from engines import ROOT
from forked import fork_script
from runs import BF16_FLAGS, RunFactory, assert_same_training, by_one_rank, losses, trained
from study.config.strategies import WITH_GROUPS, read_strategy
from study.predictor.models import model_shape
from study.predictor.tensor_group import part_of_model, tensor_group
from study.records.directory import Run
from study.workloads.presets import PRESETS

GPT = ("--task", "gpt-wikitext")
LLAMA = (*GPT, "--model_name_or_path", "llama-tiny")
PARTITIONED = "activation_checkpointing.partition_activations=true"
ZERO_WITH_GROUPS = [name for name in WITH_GROUPS if read_strategy(name).zero_stage]
long, slow = [pytest.mark.long], [pytest.mark.long, pytest.mark.timeout(900)]
# Outside the long tests: Llama at stages 1 and 3, since stage 2 is between them; tp with both tasks.
CASES = [
    *(
        pytest.param(
            name,
            ranks,
            (*model, "--per_device_train_batch_size", str(8 // ranks)),
            marks=slow if ranks == 4 else long if "2" in name or model == GPT else [],
        )
        for name in ZERO_WITH_GROUPS
        for ranks in (2, 4)
        for model in (GPT, LLAMA)
    ),
    pytest.param("ulysses_zero1", 4, (*LLAMA, "--group_size", "4"), marks=slow),
    ("tp", 2, GPT),
    ("tp", 2, ("--task", "bert-imdb")),
    ("cp", 2, GPT),
    pytest.param("tp", 2, LLAMA, marks=long),
    pytest.param("cp", 2, LLAMA, marks=long),
    pytest.param("tp", 4, (*GPT, "--group_size", "4"), marks=long),
    pytest.param("cp", 4, GPT, marks=long),
]


@pytest.mark.parametrize(("strategy", "ranks", "flags"), CASES)
def test_a_group_trains_as_one_rank_does(get_run, strategy, ranks, flags):
    """ZeRO runs two micro-batches per group; four ranks exceed Llama's key-value heads."""
    model = flags[1 : 4 if "--model_name_or_path" in flags else 2]
    single, grouped = by_one_rank(get_run, *model), get_run(strategy, *flags, ranks=ranks)
    assert_same_training(grouped, single)
    group = read_strategy(strategy).group
    assert group is not None
    size = 4 if "--group_size" in flags else 2
    over = 1 if strategy == "tp" else ranks // size if group.divides == "tensors" else ranks
    assert grouped.engine["model_parallel_group"] == {"divides": group.divides, "ranks": size, "state_over": over}
    assert grouped.engine["model_parameters"] == single.engine["model_parameters"]
    if "--per_device_train_batch_size" in flags:
        assert grouped.engine["gradient_accumulation_steps"] == 2


def by_sgd(strategy: str, output_dir: Path) -> Run:
    """Train without clipping, and with an optimizer that applies a gradient as it is."""
    flags = (*LLAMA, "--max_grad_norm", "0", "--weight_decay", "0", "--learning_rate", "0.3")
    return trained(strategy, output_dir, *flags, script="tests/probes/plain_sgd.py")


@pytest.fixture(scope="module")
def single_by_sgd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return by_sgd("single", tmp_path_factory.mktemp("sgd") / "single")


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=long if "3" not in name else []) for name in ZERO_WITH_GROUPS]
)
def test_a_gradient_is_as_large_as_that_of_one_rank(strategy: str, single_by_sgd: Run, tmp_path: Path) -> None:
    first, *_, last = losses(single_by_sgd)
    assert first - last > 0.04, "steps must move the weights, or any gradient would do"
    assert_same_training(by_sgd(strategy, tmp_path / strategy), single_by_sgd)


def test_the_communication_of_groups_is_counted(get_run: RunFactory) -> None:
    ulysses = get_run("ulysses_zero1", *LLAMA, "--per_device_train_batch_size", "4")
    # Queries, keys, values and output of each layer, and their gradients, in two micro-batches on two ranks.
    counted = ulysses.traffic["collectives"]["all_to_all"]
    assert counted["calls"] == 8 * ulysses.engine["model_layers"] * 2
    assert counted["wire_bytes_per_rank"] == pytest.approx(counted["payload_bytes"] / 2)
    tensors, context, sharded = (get_run(name, *GPT).traffic["collectives"] for name in ("tp", "cp", "fsdp2"))
    # Both layers, forward and backward, after attention and after the MLP.
    assert tensors["all_reduce"]["calls"] >= 8
    assert context["all_gather"]["calls"] > sharded["all_gather"]["calls"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_partitioned_activations_are_gathered_once_for_each_layer(get_run: RunFactory, precision: str) -> None:
    more = () if precision == "fp32" else (*BF16_FLAGS, "--precision", precision)
    flags = (*LLAMA, "--gradient_checkpointing", *more)
    full, parts = (get_run("zero1_tp", *flags, *setting) for setting in ((), ("--engine_override", PARTITIONED)))
    assert [run.engine["partitioned_activations"] for run in (full, parts)] == [False, True]
    if precision == "bf16":
        # Recomputation runs in 16 bits.
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in parts.steps] == [row[key] for row in full.steps], key
        return
    assert_same_training(parts, by_one_rank(get_run, *LLAMA[1:]))
    once, partitioned = (run.traffic["collectives"]["all_gather"] for run in (full, parts))
    layers, hidden_bytes = 2, 8 * 32 * 256 * 4
    assert partitioned["calls"] - once["calls"] == layers
    assert partitioned["payload_bytes"] - once["payload_bytes"] == layers * hidden_bytes


@pytest.mark.parametrize("strategy", ["tp", "cp"])
def test_a_rank_has_its_share_of_the_state_and_a_virtual_one_the_same(get_run, strategy, tmp_path):
    single, grouped = by_one_rank(get_run, "gpt-wikitext"), get_run(strategy, *GPT)
    full_state, rank_state = (run.summary["state_bytes_per_rank"] for run in (single, grouped))
    # Tensor parallelism leaves the position embedding, the norms and some biases undivided.
    on_all = 4 * PRESETS["gpt-tiny"].architecture["n_positions"] * 256 if strategy == "tp" else 0
    for kind, copies in (("params", 1), ("grads", 1), ("optimizer", 2)):
        expected = (full_state[kind]["device"] + copies * on_all) / 2
        assert rank_state[kind]["device"] == pytest.approx(expected, rel=2e-3)
    assert_same_rank(virtual(strategy, tmp_path / "run"), grouped, rank=0)


def test_the_parts_under_fsdp2_are_those_of_torch() -> None:
    """No strategy of accelerate_configs/ has both, so torch's own calls shard the model."""
    probe = ROOT / "tests/probes/mesh_parts.py"
    done = fork_script(probe, folder=ROOT, environment=os.environ, read_at_import={})
    (measured,) = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("SAYS")]
    part = part_of_model(tensor_group(model_shape("llama-tiny"), 2, is_deepspeed=False))
    assert measured == [param.shard_by_rows(2) for param in part.params]
