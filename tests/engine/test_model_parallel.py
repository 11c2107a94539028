"""Model-parallel groups compute the same gradients as one rank, and impossible divisions are rejected by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import DiffLlamaConfig, FalconConfig, MistralConfig

from engine.test_virtual import assert_same_rank, virtual
from runs import BF16_FLAGS, RunFactory, assert_same_training, by_one_rank, losses, trained
from study.config.errors import UserError
from study.config.flags import RunConfig, resolve_config
from study.config.launch_context import Launch
from study.config.strategies import WITH_GROUPS, read_strategy
from study.engine.model_parallel import check_group
from study.records.directory import Run
from study.workloads.architecture import model_config
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


def make_config(**flags: Any) -> RunConfig:
    values = {"task": "gpt-wikitext", "scale": "laptop", "seq_length": 32, **flags}
    return resolve_config(RunConfig.from_dict(values, "the test"), accelerator_visible=False)


LLAMA_TINY = {"model_name_or_path": "llama-tiny"}


@pytest.mark.parametrize(
    ("strategy", "ranks", "case", "words"),
    [
        ("tp", 4, {}, "all 4 must be in it"),
        ("tp", 2, {"peft": "lora"}, "--peft lora: tp divides tensors"),
        ("ulysses_zero3", 2, {"optimizer": "muon", "max_grad_norm": 0.0}, "--optimizer muon: ulysses_zero3"),
        ("tp", 2, {"checkpointing_steps": 2}, "--checkpointing_steps: tp"),
        ("tp", 2, {"precision": "fp16"}, "--precision fp16: tp"),
        ("tp", 3, {"group_size": 3}, "4 heads do not divide over 3 ranks"),
        ("zero3_tp", 8, {"group_size": 4, **LLAMA_TINY}, "2 heads of keys and values do not divide over 4 ranks"),
        ("zero3_tp", 2, {"model_name_or_path": "gpt-neo-2.7b"}, "gpt_neo has no tensor-parallel plan"),
        ("ulysses_zero1", 6, {"task": "bert-imdb"}, "--task bert-imdb has none"),
        ("ulysses_zero1", 6, {"seq_length": 31}, "--seq_length 31 does not divide into 2 equal parts"),
        ("ulysses_zero1", 6, {"attn_implementation": "eager"}, "its attention is eager"),
        (
            "ulysses_zero1",
            6,
            {"seq_length": 48, "group_size": 3, **LLAMA_TINY},
            "4 heads over 2 of keys and values do not divide over 3 ranks",
        ),
        ("cp", 2, {"attn_implementation": "eager"}, "its attention is eager"),
        ("cp", 2, {"task": "bert-imdb"}, "divides the tokens of causal models"),
        ("cp", 2, {"seq_length": 30}, "--seq_length 30 does not divide"),
        # transformers has a plan for its head alone.
        ("zero1_tp", 2, DiffLlamaConfig(hidden_size=64, num_attention_heads=4), "diffllama has no tensor-parallel"),
        ("cp", 2, FalconConfig(hidden_size=64), "its attention is custom, and would cover"),
        ("ulysses_zero1", 2, MistralConfig(sliding_window=17), "window of 17 tokens.*use --seq_length 16 or less"),
        ("ulysses_zero1", 2, MistralConfig(sliding_window=32), None),
    ],
)
def test_training_that_a_group_does_not_support_is_refused(strategy, ranks, case, words):
    """Flags and architectures that would compute wrong gradients."""
    config = make_config(**case if isinstance(case, dict) else {})
    launch = Launch(read_strategy(strategy).with_group_size(config.group_size), ranks, 0, 0, ranks)
    architecture = model_config(config) if isinstance(case, dict) else case
    if words is None:
        check_group(config, launch, architecture)
        return
    with pytest.raises(UserError) as refusal:
        check_group(config, launch, architecture)
    assert re.search(words, f"{refusal.value.problem}. {refusal.value.fix}")


def test_only_ulysses_at_stage_3_resumes_with_another_world_size() -> None:
    """test_resume.py resumes it."""
    config = make_config(**LLAMA_TINY)
    for strategy in {*WITH_GROUPS} - {"ulysses_zero3"}:
        with pytest.raises(UserError, match="the world size that saved it, 2"):
            check_group(config, Launch(read_strategy(strategy), 4, 0, 0, 4), model_config(config), 2)
