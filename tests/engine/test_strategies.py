"""Strategies as launched processes see them, and their settings in records of real runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engines import ROOT, launch, printed_json
from forked import fork_ranks
from runs import train, trained, write_strategy
from study.config.strategies import read_strategy
from study.records.directory import read_run
from unit.test_strategies import write_variant

DIRECTORY = ROOT / "accelerate_configs"


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 2),
        ("zero3_nvme", 1),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("single", 1), ("ddp", 1), ("fsdp2", 2), ("hsdp", 4), ("zero0", 2))
        ),
    ],
)
def test_a_launched_process_knows_its_strategy_and_its_place_and_a_forked_one_of_the_tests_does_too(strategy, ranks):
    documents = printed_json(launch(strategy, "tests/probes/this_launch.py", ranks=ranks))
    forked = printed_json(fork_ranks(strategy, "tests/probes/this_launch.py", ranks=ranks))
    shipped = read_strategy(strategy)
    for rank, (document, fork) in enumerate(zip(documents, forked, strict=True)):
        launched, environment = document.pop("environment"), fork["environment"]
        assert document == {
            "strategy": {
                "name": strategy,
                "distributed_type": shipped.distributed_type,
                "deepspeed": shipped.deepspeed,
                "custom_settings": None,
                "mesh": [2, 2] if strategy == "hsdp" else None,
                "group": None,
            },
            "world_size": ranks,
            "rank": rank,
            "local_rank": rank,
            "local_world_size": ranks,
            "virtual": False,
        }
        # DeepSpeed sets the last one at its import: always in the fork server, and with some files in a launcher.
        assert {name for name in {*launched, *environment} if launched.get(name) != environment.get(name)} <= {
            "MASTER_PORT",
            "TORCHELASTIC_ERROR_FILE",
            "PYTEST_CURRENT_TEST",
            "PYTORCH_NVML_BASED_CUDA_CHECK",
        }
    assert len(documents) == ranks


def test_nvme_buffers_grow_to_hold_the_largest_parameter_and_the_record_has_the_file_s_settings(tmp_path: Path) -> None:
    """DeepSpeed asserts it, and the shipped 1e8 elements are fewer than those of GPT-J's embedding."""
    shipped = read_strategy("zero3_nvme")
    assert shipped.with_swap_buffers(100_000_000) == shipped
    grown = shipped.with_swap_buffers(206_438_400).deepspeed
    assert grown is not None
    assert grown["zero_optimization"]["offload_param"]["buffer_size"] == 206_438_400
    small = json.loads((DIRECTORY / "deepspeed" / "zero3_nvme.json").read_text())["zero_optimization"]["offload_param"]
    file = write_variant(tmp_path, "mine", "zero3_nvme", offload_param=small | {"buffer_size": 100_000})
    strategy = write_strategy(tmp_path, "mine", "zero3_nvme", "deepspeed_config", deepspeed_config_file=str(file))
    engine = trained(strategy, tmp_path / "run", ranks=1).engine
    # The position embedding of bert-tiny.
    assert engine["buckets"]["offload_param.buffer_size"] == 4096 * 256
    assert re.fullmatch(r"mine-[0-9a-f]{8}", engine["strategy"])
    assert engine["zero_stage"] == 3
    assert engine["own_settings"]["zero_optimization"]["offload_param"]["buffer_size"] == 100_000


def test_classes_to_wrap_that_the_model_does_not_have_end_the_run(tmp_path: Path) -> None:
    strategy = write_strategy(tmp_path, "mine", "fsdp2", "fsdp_config", fsdp_transformer_layer_cls_to_wrap="GPT2MPL")
    result = train(strategy, tmp_path / "run", "--task", "gpt-wikitext", ranks=1)
    status = read_run(tmp_path / "run").status
    assert (result.returncode, status["state"]) == (1, "failed")
    assert "GPT2LMHeadModel has no module GPT2MPL" in status["reason"]
    assert status["hint"] == "use GPT2Block, or leave it out"
