"""LoRA, Muon and bf16 states with each strategy: equal losses, the expected bytes, and rejected combinations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.test_virtual import assert_same_rank, virtual
from runs import FP32_RELATIVE, RunFactory, losses, trained
from study.config.flags import RunConfig
from study.config.strategies import read_strategy
from study.config.strategy_names import apply_overrides
from study.engine.setup import check_engine_settings
from study.records.directory import Run

GPT = ("--task", "gpt-wikitext")
LORA = ("--peft", "lora")
MUON = ("--optimizer", "muon", "--max_grad_norm", "0")
STATES = ("--precision", "bf16-engine", "--bf16_states")
# One per kind of engine; the others are among the long tests.
QUICK = ("ddp", "zero2", "zero3", "fsdp2")
REST = ("zero0", "zero1", "zero2_cpu", "zero3_cpu_optimizer", "zero3_cpu", "zero3_cpu_nvme", "hsdp", "zero3_hpz")
# Their adapters must be larger, or DeepSpeed swaps none of their states.
ON_DRIVE = ("zero3_nvme_optimizer", "zero3_nvme")
long = pytest.mark.long


def count_state_bytes(run: Run) -> dict[str, float]:
    return {kind: sum(places.values()) for kind, places in run.memory["ranks"][0]["state"]["state_bytes"].items()}


@pytest.mark.parametrize("task", ["gpt-wikitext", pytest.param("bert-imdb", marks=long)])
@pytest.mark.parametrize("strategy", [*QUICK, *(pytest.param(name, marks=long) for name in REST)])
def test_adapters_alone_are_trained_with_the_losses_of_one_process(get_run, strategy, task):
    flags = ("--task", task, *LORA)
    single, arm = get_run("single", *flags, "--per_device_train_batch_size", "4"), get_run(strategy, *flags)
    assert losses(arm) == pytest.approx(losses(single), rel=FP32_RELATIVE)
    assert len(set(losses(arm))) == 8
    evaluated = [[row["eval_loss"] for row in run.evals] for run in (arm, single)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=FP32_RELATIVE)
    assert arm.engine["adapters"] == {"kind": "lora", "rank": 8, "alpha": 16}
    assert arm.engine["trainable_parameters"] == single.engine["trainable_parameters"]
    assert 0 < arm.engine["trainable_parameters"] < arm.engine["model_parameters"] / 10
    full = get_run("single", "--task", task, "--per_device_train_batch_size", "4")
    assert full.engine["trainable_parameters"] == full.engine["model_parameters"]
    assert losses(full)[0] == pytest.approx(losses(single)[0], rel=FP32_RELATIVE), "B begins at zero"
    assert arm.summary["model_flops_per_step"] < 0.75 * full.summary["model_flops_per_step"]


@long
@pytest.mark.parametrize("strategy", ["cp", "ulysses_zero2", "ulysses_zero3", *ON_DRIVE])
def test_adapters_are_trained_with_divided_tokens_and_swapped_if_large_enough(get_run: RunFactory, strategy: str):
    flags = (*GPT, *LORA, *(("--lora_rank", "256") if strategy in ON_DRIVE else ()))
    single, arm = get_run("single", *flags), get_run(strategy, *flags)
    assert losses(arm) == pytest.approx(losses(single), rel=FP32_RELATIVE)
    assert (arm.summary["state_bytes_per_rank"]["optimizer"].get("nvme", 0) > 0) == (strategy in ON_DRIVE)


@pytest.mark.parametrize(
    ("strategy", "gradients", "states"),
    # In fp32: Adam's two moments, plus DeepSpeed's copy of the weights and step counts.
    [("ddp", 4, 8), pytest.param("zero1", 4, 6, marks=long), ("zero2", 2, 6), ("zero3", 2, 6), ("fsdp2", 2, 4)],
)
def test_frozen_weights_have_no_gradients_and_no_states(get_run, strategy, gradients, states):
    run = get_run(strategy, *GPT, *LORA)
    trainable = run.engine["trainable_parameters"]
    assert count_state_bytes(run)["grads"] == gradients * trainable
    assert count_state_bytes(run)["optimizer"] == pytest.approx(states * trainable, rel=1e-3)
    assert count_state_bytes(run)["params"] >= 4 * run.engine["model_parameters"] / 2


def by_muon_in_fp32(strategy: str, output_dir: Path) -> Run:
    """Train with Muon in fp32: a 16-bit iteration amplifies the last bit of a gradient to 1e-3 of an update."""
    return trained(strategy, output_dir, *GPT, *MUON, script="tests/probes/muon_in_fp32.py")


@pytest.fixture(scope="module")
def single_by_muon(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return by_muon_in_fp32("single", tmp_path_factory.mktemp("muon") / "single")


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=long) for name in ("zero3", "ddp", "zero1", "zero2")])
def test_muon_computes_the_same_with_and_without_sharding(strategy: str, single_by_muon: Run, tmp_path: Path) -> None:
    single, arm = single_by_muon, by_muon_in_fp32(strategy, tmp_path / strategy)
    assert losses(arm) == pytest.approx(losses(single), rel=FP32_RELATIVE)
    assert arm.engine["optimizer_class"] == "deepspeed.MuonWithAuxAdam"
    assert arm.engine["optimizer_settings"]["momentum"] == 0.95
    norms, updates = ([row["grad_norm"] for row in run.steps] for run in (single, arm))
    if strategy != "ddp":
        assert min(updates) > 5 * max(norms), "DeepSpeed takes the norm of gradients again"
        assert any("after Muon has orthogonalized" in warning for warning in arm.engine["warnings"])


@long
def test_stage_0_in_half_precision_begins_with_muon_as_it_does_with_adamw(get_run: RunFactory) -> None:
    """DeepSpeed takes an extra step before the first."""
    flags = ("--precision", "bf16-engine", "--learning_rate", "1e-30")
    muon, adamw = get_run("zero0", *GPT, *MUON, *flags), get_run("zero0", *GPT, "--max_grad_norm", "0", *flags)
    assert losses(muon) == losses(adamw)


@long
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_muon_keeps_one_momentum_for_each_hidden_matrix(get_run: RunFactory, strategy: str, tmp_path: Path) -> None:
    adamw, muon = get_run("single", *GPT), get_run("single", *GPT, *MUON)
    # GPT-2's four matrices per layer have twelve times its width squared.
    matrices = 2 * 12 * 256**2
    saved = count_state_bytes(adamw)["optimizer"] - count_state_bytes(muon)["optimizer"]
    assert saved == pytest.approx(4 * matrices, rel=1e-3)
    arm = get_run(strategy, *GPT, *MUON)
    assert_same_rank(virtual(strategy, tmp_path / "run", *MUON), arm, rank=0)
    assert count_state_bytes(arm)["optimizer"] < 0.9 * count_state_bytes(get_run(strategy, *GPT))["optimizer"]


def test_torchs_muon_is_the_same_mathematics_rounded_to_bf16() -> None:
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    torch.manual_seed(0)
    for shape in ((96, 32), (32, 96), (48, 48)):
        weight, momentum = torch.nn.Parameter(torch.zeros(shape)), torch.zeros(shape)
        theirs = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.95)
        for _ in range(3):
            before, weight.grad = weight.detach().clone(), torch.randn(shape)
            # The stance of every run without compilation.
            with torch.compiler.set_stance("force_eager"):
                ours = muon_update(weight.grad.clone(), momentum, beta=0.95)
            theirs.step()
            update = before - weight.detach()
            assert torch.equal(momentum, theirs.state[weight]["momentum_buffer"])
            assert 1e-4 < (ours - update).norm() / update.norm() < 0.03


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=long) for name in ("zero3", "zero1")])
def test_states_in_bf16_train_alike_with_half_the_bytes(get_run: RunFactory, strategy: str, tmp_path: Path) -> None:
    stage2, arm = get_run("zero2", *GPT, *STATES), get_run(strategy, *GPT, *STATES)
    assert losses(arm) == pytest.approx(losses(stage2), rel=2**-9)
    assert arm.engine["bf16_states"]
    engine = get_run(strategy, *GPT, "--precision", "bf16-engine")
    assert not engine.engine["bf16_states"]
    assert losses(arm) != losses(engine)
    assert count_state_bytes(arm)["optimizer"] == pytest.approx(count_state_bytes(engine)["optimizer"] / 2, rel=1e-4)
    assert count_state_bytes(arm)["params"] == count_state_bytes(engine)["params"]
    assert_same_rank(virtual(strategy, tmp_path / "run", *STATES), arm, rank=0)


def test_deepspeed_s_own_clock_waits_for_the_gpu_and_can_be_switched_off() -> None:
    """It stays on as shipped: docs/traps.md describes how its cost is measured."""
    from deepspeed.utils.config import get_timers_config

    zero2 = read_strategy("zero2").deepspeed
    off = "timers.throughput.enabled=false"
    assert zero2 is not None
    check_engine_settings(RunConfig(engine_override=(off,)), zero2, apply_overrides(zero2, (off,)))
    shipped, changed = (get_timers_config(apply_overrides(zero2, settings)) for settings in ((), (off,)))
    assert (shipped.enabled, shipped.synchronized, changed.enabled) == (True, True, False)
