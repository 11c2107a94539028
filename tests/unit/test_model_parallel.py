"""Rejected requests for model-parallel training, and checkpoints for another number of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import DiffLlamaConfig, FalconConfig, MistralConfig

from study.config.errors import UserError
from study.config.flags import RunConfig, resolve_config
from study.config.launch_context import Launch
from study.config.strategies import WITH_GROUPS, read_strategy
from study.engine.model_parallel import check_group
from study.workloads.architecture import model_config


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
