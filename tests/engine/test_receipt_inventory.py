"""The receipt and the record of one run: study/train.py with the two lines, under every strategy of the study."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import trained
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.receipt.document import read_receipt

# The one that runs in each build: its state is in three places.
IN_EACH_BUILD = "zero3_cpu_nvme"
# A group's strategies take a causal model of transformers.
FLAGS = ("--task", "gpt-wikitext", "--eval_steps", "0", "--eval_samples", "8")


@pytest.mark.parametrize(
    "strategy",
    [name if name == IN_EACH_BUILD else pytest.param(name, marks=pytest.mark.long) for name in STRATEGY_NAMES],
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
    # At the peak, whose gradients are those of its moment.
    if not any(places["nvme"] for places in recorded["state_bytes"].values()):
        buffers = recorded["buffer_bytes"].get("model_buffers.device", 0)
        # hpZ's second copy, which the optimizer's step deletes.
        second_copy = recorded["pieces"].get("params.device.second_copy", 0)
        parts = receipt.memory.parts
        expected = total["params"] + buffers - second_copy, total["optimizer"]
        assert (parts["parameters"], parts["optimizer"]) == expected
