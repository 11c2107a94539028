"""Ranks that share their samples train what one rank would, and what cannot be divided is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runs import RunFactory, assert_same_training, losses, trained
from study.config.errors import UserError
from study.config.flags import RunConfig, resolved
from study.config.launched import Launch
from study.config.strategies import WITH_TEAMS, read_strategy
from study.engine.groups import check_team
from study.records.directory import Run

GPT = ("--task", "gpt-wikitext")
LLAMA = (*GPT, "--model_name_or_path", "llama-tiny")
IN_PARTS = "activation_checkpointing.partition_activations=true"
ZERO_WITH_TEAMS = [name for name in WITH_TEAMS if read_strategy(name).zero_stage]
# Stage 2 is between the others.
FIRST_AND_LAST = [pytest.param(name, marks=[pytest.mark.long] * ("2" in name)) for name in ZERO_WITH_TEAMS]
FOUR_RANKS = (pytest.mark.long, pytest.mark.timeout(900))


@pytest.mark.parametrize("flags", [pytest.param(GPT, marks=pytest.mark.long), LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=FOUR_RANKS)])
@pytest.mark.parametrize("strategy", FIRST_AND_LAST)
def test_a_team_trains_what_one_rank_does(run_of: RunFactory, strategy: str, ranks: int, flags: tuple[str]) -> None:
    """Two micro-batches for each team."""
    cut = ("--per_device_train_batch_size", str(8 // ranks))
    arm = run_of(strategy, *flags, *cut, ranks=ranks)
    assert_same_training(arm, run_of("single", *flags))
    asked = read_strategy(strategy).team
    assert asked is not None
    team = {"divides": asked.divides, "ranks": 2, "state_over": ranks // (2 if asked.divides == "tensors" else 1)}
    assert arm.engine["team"] == team
    assert arm.engine["gradient_accumulation_steps"] == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_team_may_have_more_ranks_than_there_are_heads_of_keys(run_of: RunFactory) -> None:
    arm = run_of("ulysses_zero1", *LLAMA, "--team_size", "4", ranks=4)
    assert_same_training(arm, run_of("single", *LLAMA))
    assert arm.engine["team"] == {"divides": "sequence", "ranks": 4, "state_over": 4}


def by_sgd(strategy: str, output_dir: Path) -> Run:
    """Without clipping, and with an optimizer that takes a gradient as it is."""
    flags = (*LLAMA, "--max_grad_norm", "0", "--weight_decay", "0", "--learning_rate", "0.3")
    return trained(strategy, output_dir, *flags, script="tests/probes/plain_sgd.py")


@pytest.fixture(scope="module")
def single_by_sgd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return by_sgd("single", tmp_path_factory.mktemp("sgd") / "single")


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.long] * ("3" not in name)) for name in ZERO_WITH_TEAMS]
)
def test_a_gradient_is_as_large_as_that_of_one_rank(strategy: str, single_by_sgd: Run, tmp_path: Path) -> None:
    first, *_, last = losses(single_by_sgd)
    assert first - last > 0.04, "steps must move the weights, or any gradient would do"
    assert_same_training(by_sgd(strategy, tmp_path / strategy), single_by_sgd)


def test_all_to_alls_of_attention_are_counted(run_of: RunFactory) -> None:
    """Queries, keys, values and the answer of each layer, and the gradients of these."""
    run = run_of("ulysses_zero1", *LLAMA, "--per_device_train_batch_size", "4")
    counted, layers, micro_batches, ranks = run.traffic["collectives"]["all_to_all"], run.engine["model_layers"], 2, 2
    assert counted["calls"] == 8 * layers * micro_batches
    assert counted["wire_bytes_per_rank"] == pytest.approx(counted["payload_bytes"] * (ranks - 1) / ranks)


def test_checkpoints_are_kept_in_parts_and_gathered_once_for_each_layer(run_of: RunFactory) -> None:
    whole, parts = (
        run_of("zero1_tp", *LLAMA, "--gradient_checkpointing", *flags)
        for flags in ((), ("--engine_override", IN_PARTS))
    )
    assert_same_training(parts, run_of("single", *LLAMA))
    assert [run.engine["partitioned_activations"] for run in (whole, parts)] == [False, True]
    once, again = (run.traffic["collectives"]["all_gather"] for run in (whole, parts))
    layers, hidden_bytes = 2, 8 * 32 * 256 * 4
    assert again["calls"] - once["calls"] == layers
    assert again["payload_bytes"] - once["payload_bytes"] == layers * hidden_bytes


def test_what_was_kept_in_parts_is_computed_again_in_16_bits(run_of: RunFactory) -> None:
    flags = (*LLAMA, "--gradient_checkpointing", "--precision", "bf16")
    whole, parts = (run_of("zero1_tp", *flags, *more) for more in ((), ("--engine_override", IN_PARTS)))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in parts.steps] == [row[key] for row in whole.steps], key


@pytest.mark.parametrize(
    ("strategy", "flags", "named"),
    [
        ("zero1", {"gradient_checkpointing": True}, "under zero1 no ranks share a layer's activations"),
        ("ulysses_zero1", {"gradient_checkpointing": True}, "under ulysses_zero1 no ranks share"),
        ("zero1_tp", {}, "without checkpoints there is nothing to keep in parts"),
        ("zero1_tp", {"more": ("activation_checkpointing.cpu_checkpointing=true",)}, "partition_activations alone"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(strategy: str, flags: dict[str, Any], named: str) -> None:
    more = flags.pop("more", ())
    config = config_of(engine_override=(IN_PARTS, *more), **flags)
    with pytest.raises(UserError, match=named):
        read_strategy(strategy).check_engine_flags(config)


def config_of(**flags: object) -> RunConfig:
    asked = {"task": "gpt-wikitext", "model_name_or_path": "llama-tiny", "seq_length": 32, **flags}
    return resolved(RunConfig(**asked), accelerator_visible=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "team_size", "named"),
    [
        ({"task": "bert-imdb", "model_name_or_path": "bert-tiny"}, None, "--task bert-imdb has none"),
        ({"seq_length": 31}, None, "--seq_length 31 does not divide over the 2 ranks"),
        ({"attn_implementation": "eager"}, None, "its attention is eager"),
        ({"model_name_or_path": "gpt-neo-2.7b"}, None, "its attention is eager"),
        ({"seq_length": 48}, 3, "4 heads over 2 of keys and values do not divide over 3 ranks"),
    ],
)
def test_what_no_sequence_team_can_train_is_refused(
    flags: dict[str, object], team_size: int | None, named: str
) -> None:
    from study.workloads.architecture import model_config

    config = config_of(**flags)
    launch = Launch(read_strategy("ulysses_zero1").with_team(team_size), 6, 0, 0, 6)
    with pytest.raises(UserError, match=named):
        check_team(config, launch, model_config(config), None)


@pytest.mark.parametrize(
    ("model", "ranks", "named"),
    [
        ("gpt-neo-2.7b", 2, "nobody has said how the layers of gpt_neo are divided"),
        ("llama-tiny", 4, "2 heads of keys and values do not divide over 4 ranks"),
        ("gpt-tiny", 8, "4 heads do not divide over 8 ranks"),
    ],
)
def test_layers_that_do_not_divide_are_refused(model: str, ranks: int, named: str) -> None:
    from study.workloads.architecture import model_config

    config = config_of(model_name_or_path=model)
    launch = Launch(read_strategy("zero3_tp").with_team(ranks), 8, 0, 0, 8)
    with pytest.raises(UserError, match=named):
        check_team(config, launch, model_config(config), None)


def test_a_plan_for_the_head_alone_is_none() -> None:
    from transformers import DiffLlamaConfig

    launch = Launch(read_strategy("zero1_tp"), 2, 0, 0, 2)
    with pytest.raises(UserError, match="nobody has said how the layers of diffllama are divided"):
        check_team(config_of(), launch, DiffLlamaConfig(hidden_size=64, num_attention_heads=4), None)


def test_a_window_shorter_than_the_sequence_is_refused() -> None:
    from transformers import MistralConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    launch = Launch(read_strategy("ulysses_zero1"), 2, 0, 0, 2)
    check_team(config_of(), launch, MistralConfig(**sizes, sliding_window=32), None)
    with pytest.raises(UserError, match="it looks back 17 tokens at most") as refusal:
        check_team(config_of(), launch, MistralConfig(**sizes, sliding_window=17), None)
    assert refusal.value.fix == "use --seq_length 16 or less"


def test_a_checkpoint_goes_on_with_other_ranks_where_the_engine_can() -> None:
    from study.workloads.architecture import model_config

    config = config_of()
    for strategy in WITH_TEAMS:
        launch = Launch(read_strategy(strategy), 4, 0, 0, 4)
        if strategy == "ulysses_zero3":
            check_team(config, launch, model_config(config), 2)
            continue
        with pytest.raises(UserError, match="as many ranks as saved it, which were 2"):
            check_team(config, launch, model_config(config), 2)
