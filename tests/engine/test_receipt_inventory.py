"""The receipt and the record of one run: study/train.py with the two lines, under every strategy of the study."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import trained
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.receipt.document import read_receipt

# Those that run in each build: state in three places, and groups of ranks whose gloo copies tensors.
IN_EACH_BUILD = ("zero3_cpu_nvme", "hsdp")
# A group's strategies take a causal model of transformers.
FLAGS = ("--task", "gpt-wikitext", "--eval_steps", "0", "--eval_samples", "8")


@pytest.mark.parametrize(
    "strategy",
    [name if name in IN_EACH_BUILD else pytest.param(name, marks=pytest.mark.long) for name in STRATEGY_NAMES],
)
def test_the_state_of_a_receipt_is_that_of_the_record_to_the_byte(strategy: str, tmp_path: Path) -> None:
    run = trained(strategy, tmp_path / "run", *FLAGS, script="tests/probes/receipt_of_train.py")
    receipt = read_receipt(str(tmp_path / "receipt.json"))
    assert receipt.failures == ()
    assert receipt.model_state is not None
    recorded = run.memory["ranks"][0]["state"]
    assert receipt.model_state.model_dump() == recorded["state_bytes"]
    total = {kind: sum(places.values()) for kind, places in recorded["state_bytes"].items()}
    assert all(total.values())
    # A row of the table in docs/receipt.md.
    print(f"| `{strategy}` |", *(f"{total[kind]:,} |" for kind in ("params", "grads", "optimizer")))
    # Parameters that are swapped wait in the passes, the optimizer's state in its step.
    assert (receipt.time.parts["offload"] > 0) == read_strategy(strategy).uses_nvme
    assert receipt.memory is not None
    assert 0.95 <= receipt.memory.attributed <= 1
    parts = receipt.memory.parts
    # At the peak, whose gradients and gathered parameters are those of its moment.
    if not any(places["nvme"] for places in recorded["state_bytes"].values()):
        buffers = recorded["buffer_bytes"].get("model_buffers.device", 0)
        # hpZ's secondary partition, which the optimizer's step deletes.
        second_copy = recorded["pieces"].get("params.device.second_copy", 0)
        expected = total["params"] + buffers - second_copy, total["optimizer"]
        assert (parts["parameters"], parts["optimizer"]) == expected
    assert parts["buckets"] == sum(
        count
        for name, count in recorded["buffer_bytes"].items()
        if name.partition(".")[0] not in ("gathered_parameters", "model_buffers")
    )
    stage, is_fsdp = receipt.engine.zero_stage, receipt.engine.engine == "fsdp2"
    in_memory = sum(count for place, count in recorded["state_bytes"]["grads"].items() if place != "nvme")
    if stage == 3:
        # They have their memory from the first step on.
        assert parts["gradients"] == in_memory
    else:
        # Those of the layers so far; a stage may have one that it has not reduced yet.
        assert 0 < parts["gradients"] <= 1.01 * in_memory
    weights = 4 * receipt.model.parameters
    if stage == 3 and parts["gathered"]:
        # At the end of the forward pass: all parameters but those that are never freed, and the buffers of gathers.
        assert parts["gathered"] == 2 * (weights - recorded["kept_whole"]["bytes"])
    elif is_fsdp:
        assert 0 < parts["gathered"] <= weights
    else:
        assert parts["gathered"] == 0
    # Stage 3 has nothing to gather on one rank of data, and between the passes.
    is_passing = receipt.memory.moment != "between the passes"
    assert bool(parts["gathered"]) == (is_passing and (stage == 3 or is_fsdp))
