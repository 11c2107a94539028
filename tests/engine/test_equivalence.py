"""Every strategy trains the same model on the same data, and the record has the engine's real settings.

fp32 with dropout 0: strategies differ only in the order of floating-point sums, so a step's loss agrees to 1e-5.
"""

from __future__ import annotations

import pytest

from runs import BF16_FLAGS, BF16_RELATIVE, FP32_RELATIVE, assert_same_training, by_one_rank, default_ranks, losses
from study.config.strategies import WITH_REPLICAS, read_strategy

TASKS = ("bert-imdb", "gpt-wikitext")
SHARDED = (
    "ddp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2_cpu",
    "zero3_cpu_optimizer",
    "zero3_cpu",
    "zero3_nvme_optimizer",
    "zero3_nvme",
    "zero3_cpu_nvme",
    "fsdp2",
    "hsdp",
    "zero3_hpz",
)
# Micro-batches per step: some engines have lost some of them with offload.
ACCUMULATION = {"bert-imdb": 4, "gpt-wikitext": 1}
# One strategy per kind of engine accumulates in the short tests.
LONG_ACCUMULATION = (
    "zero0",
    "zero1",
    "zero3_cpu",
    "zero3_cpu_optimizer",
    "zero3_nvme",
    "zero3_nvme_optimizer",
    "zero3_cpu_nvme",
    "hsdp",
    "zero3_hpz",
)


@pytest.mark.parametrize(
    ("strategy", "task"),
    [
        pytest.param(strategy, task, marks=[pytest.mark.long] * (task == "bert-imdb" and strategy in LONG_ACCUMULATION))
        for strategy in SHARDED
        for task in TASKS
    ],
)
def test_every_step_has_the_loss_of_the_accumulating_single_run_in_fp32(get_run, strategy, task):
    """Gradient norms are compared too, if the engine reports them."""
    cut = ("--per_device_train_batch_size", "1") if ACCUMULATION[task] == 4 else ()
    single, arm = by_one_rank(get_run, task), get_run(strategy, "--task", task, *cut)
    assert single.engine["gradient_accumulation_steps"] == 2
    expected = 2 * ACCUMULATION[task] // arm.engine["world_size"] if cut else ACCUMULATION[task]
    assert arm.engine["gradient_accumulation_steps"] == expected
    assert_same_training(arm, single)
    assert len({row["samples_hash"] for row in arm.steps}) == 8
    assert max(row["grad_norm"] for row in single.steps) > 0.5, "clipping must bite, or its differences are not seen"


@pytest.mark.parametrize(
    ("strategy", "task"),
    [(strategy, "gpt-wikitext") for strategy in ("zero0", "zero3", "fsdp2")]
    + [pytest.param(name, "gpt-wikitext", marks=pytest.mark.long) for name in ("ddp", "zero1", "zero2", "zero3_cpu")]
    + [pytest.param(strategy, "bert-imdb", marks=pytest.mark.long) for strategy in ("ddp", "zero2", "zero3", "fsdp2")],
)
def test_bf16_like_for_like_differs_by_roundings_only(get_run, strategy, task):
    bf16 = (*BF16_FLAGS, "--precision", "bf16")
    single, arm = by_one_rank(get_run, task, *bf16), get_run(strategy, "--task", task, *bf16)
    assert arm.engine["precision"] == "bf16"
    assert arm.engine["param_dtype"] == "float32"
    values, expected = losses(arm), losses(single)
    # The schedule warms up from 0, so the first two steps have the same weights.
    assert values[:2] == pytest.approx(expected[:2], rel=FP32_RELATIVE)
    assert values == pytest.approx(expected, rel=BF16_RELATIVE)
    fp32 = losses(by_one_rank(get_run, task, *BF16_FLAGS))
    assert expected != pytest.approx(fp32, rel=1e-6), "bf16 must not be fp32 under another name"


@pytest.mark.parametrize("strategy", SHARDED)
def test_the_engine_record_matches_the_strategy_file(get_run, strategy):
    engine, file = get_run(strategy, "--task", "gpt-wikitext").engine, read_strategy(strategy)
    expected = {
        "strategy": strategy,
        "world_size": default_ranks(strategy),
        "zero_stage": file.zero_stage,
        "offload_optimizer": file.offload_device("optimizer"),
        "offload_param": file.offload_device("param"),
        "gradient_clipping": 0.5,
        "precision": "fp32",
        "param_dtype": "float32",
    }
    assert {key: engine[key] for key in expected} == expected
    assert engine.get("copies") == ({"copies": 2, "ranks_of_a_copy": 2} if strategy in WITH_REPLICAS else None)
    assert (engine["nvme_path"] is not None) == file.uses_nvme
    offloads_optimizer = file.offload_device("optimizer") is not None
    assert engine["optimizer_class"].endswith("DeepSpeedCPUAdam" if offloads_optimizer else "AdamW")
    assert any("DeepSpeedCPUAdam" in warning for warning in engine["warnings"]) == offloads_optimizer


def test_parameters_on_nvme_are_files_of_their_own_and_not_rounded(get_run):
    """A checkpoint loaded with zero.Init keeps fp32 on NVMe; the reported bfloat16 rounding occurs without it."""
    arm = get_run("zero3_cpu_nvme", "--task", "gpt-wikitext")
    assert arm.summary["state_bytes_per_rank"]["params"]["nvme"] > 2**20
    assert arm.engine["nvme_param_dtype"] in (None, arm.engine["param_dtype"])


def test_the_second_copy_of_zero3_hpz_is_half_of_what_is_sharded_and_counts_as_parameters(get_run):
    full = get_run("ddp", "--task", "gpt-wikitext").summary["state_bytes_per_rank"]["params"]["device"]
    for rank in get_run("zero3_hpz", "--task", "gpt-wikitext").memory["ranks"]:
        state = rank["state"]
        copy = state["pieces"]["params.device.second_copy"]
        assert copy == pytest.approx((full - state["kept_whole"]["bytes"]) / 2, rel=0.01)
        assert state["pieces"]["params.device.partitions"] == pytest.approx(full / 4, rel=0.01)
        assert state["other_tensor_bytes"] < copy / 100
