"""Tensors, or tokens, divided over the ranks of a team: the same training, what a rank holds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_virtual import assert_same_rank, virtual

from runs import RunFactory, assert_same_training, by_one_rank
from study.config.errors import UserError
from study.config.flags import RunConfig, resolved
from study.config.launched import Launch
from study.config.strategies import read_strategy
from study.engine.groups import check_team
from study.workloads.architecture import model_config
from study.workloads.presets import TINY_POSITIONS

GPT = ("--task", "gpt-wikitext")
LLAMA = (*GPT, "--model_name_or_path", "llama-tiny")
long = pytest.mark.long
CASES = [
    ("tp", 2, GPT), ("tp", 2, ("--task", "bert-imdb")), ("cp", 2, GPT),
    pytest.param("tp", 2, LLAMA, marks=long), pytest.param("cp", 2, LLAMA, marks=long),
    pytest.param("tp", 4, (*GPT, "--team_size", "4"), marks=long), pytest.param("cp", 4, GPT, marks=long),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "ranks", "flags"), CASES)
def test_every_step_has_the_loss_and_the_norm_of_one_process(
    run_of: RunFactory, strategy: str, ranks: int, flags: tuple[str, ...]
) -> None:
    alone = tuple(flag for flag in flags[1:] if flag not in ("--team_size", "4"))
    single, arm = by_one_rank(run_of, *alone), run_of(strategy, *flags, ranks=ranks)
    assert_same_training(arm, single)
    team = 2 if strategy == "cp" else ranks
    assert arm.engine["team"] == {
        "divides": "context" if strategy == "cp" else "tensors", "ranks": team,
        "state_over": ranks if strategy == "cp" else 1,
    }  # fmt: skip
    assert arm.engine["model_parameters"] == single.engine["model_parameters"]


@pytest.mark.parametrize("strategy", ["tp", "cp"])
def test_a_rank_holds_its_parts_and_a_virtual_one_the_same(run_of: RunFactory, strategy: str, tmp_path: Path) -> None:
    single, arm = by_one_rank(run_of, "gpt-wikitext"), run_of(strategy, *GPT)
    whole, held = (run.summary["state_bytes_per_rank"] for run in (single, arm))
    # The table of positions is on all ranks of a team that divides tensors, beside norms and some biases.
    on_all = 4 * TINY_POSITIONS * 256 if strategy == "tp" else 0
    for kind, copies in (("params", 1), ("grads", 1), ("optimizer", 2)):
        expected = (whole[kind]["device"] + copies * on_all) / 2
        assert held[kind]["device"] == pytest.approx(expected, rel=2e-3)
    assert_same_rank(virtual(strategy, tmp_path / "run"), arm, rank=0)


def test_attention_that_would_not_hear_of_the_other_ranks_is_refused() -> None:
    from transformers import FalconConfig

    config = resolved(RunConfig(task="gpt-wikitext", scale="laptop", seq_length=32), accelerator_visible=False)
    with pytest.raises(UserError, match="its attention is its own, which would see"):
        check_team(config, Launch(read_strategy("cp"), 2, 0, 0, 2), FalconConfig(hidden_size=64), None)


def test_what_a_team_sends_is_seen(run_of: RunFactory) -> None:
    tensors, context = (run_of(strategy, *GPT).traffic["collectives"] for strategy in ("tp", "cp"))
    # Of both layers, forward and backward, after attention and after the feed-forward block; and of both ends.
    assert tensors["all_reduce"]["calls"] >= 8
    assert "all_gather" in context
    fully_sharded = run_of("fsdp2", *GPT).traffic["collectives"]
    assert context["all_gather"]["calls"] > fully_sharded["all_gather"]["calls"]


@pytest.mark.parametrize(
    ("strategy", "ranks", "asked", "says"),
    [
        ("tp", 4, {}, "all 4 must be in it"),
        ("tp", 2, {"peft": "lora"}, "--peft lora: tp divides tensors"),
        ("zero1_tp", 2, {"peft": "lora"}, "--peft lora: zero1_tp"),
        ("ulysses_zero3", 2, {"optimizer": "muon", "max_grad_norm": 0.0}, "--optimizer muon: ulysses_zero3"),
        ("tp", 2, {"checkpointing_steps": 2}, "--checkpointing_steps: tp"),
        ("tp", 2, {"precision": "fp16"}, "--precision fp16: tp"),
        ("tp", 3, {"team_size": 3}, "4 heads do not divide over 3 ranks"),
        ("cp", 2, {"attn_implementation": "eager"}, "its attention is eager"),
        ("cp", 2, {"task": "bert-imdb"}, "divides the tokens of causal models"),
        ("cp", 2, {"seq_length": 30}, "--seq_length 30 does not divide"),
    ],
)
def test_what_cannot_be_divided_is_refused(strategy: str, ranks: int, asked: dict[str, object], says: str) -> None:
    given = {"task": "gpt-wikitext", "scale": "laptop", "seq_length": 32, **asked}
    config = resolved(RunConfig.from_dict(given, "the test"), accelerator_visible=False)
    launch = Launch(read_strategy(strategy).with_team(config.team_size), ranks, 0, 0, ranks)
    with pytest.raises(UserError, match=says):
        check_team(config, launch, model_config(config))
