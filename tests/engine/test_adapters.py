"""Adapters under FSDP1 on real ranks: what its units keep for the backward pass."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from forked import fork_script
from study.config.places import REPOSITORY
from study.predictor.memory import predict_memory
from unit.test_adapters import fsdp1


def measured_by(probe: str, cases: list[Any]) -> list[int]:
    script = REPOSITORY / "tests/probes" / probe
    done = fork_script(script, json.dumps(cases), folder=REPOSITORY, environment=os.environ, read_at_import={})
    figures = [int(line[4:]) for line in done.stdout.splitlines() if line.startswith("SAYS")]
    assert len(figures) == len(cases), done.stderr[-2000:]
    return figures


def rotary_bytes(tokens: int) -> int:
    """Sines and cosines of the positions of a head of 32, in fp32, which a prediction leaves out: here as many bytes as
    a tensor of the hidden width, and in Llama 3.1 8B a sixteenth of it."""
    return 2 * tokens * 32 * 4


def test_fsdp1_keeps_each_input_and_its_gradient_where_reentrant_checkpoints_enclose_its_units() -> None:
    """A virtual rank has them to the byte: an input and a gradient of all layers but two more than it otherwise has."""
    sizes = ((4, 128), (6, 64))
    cases = [[*size, place, "units"] for size in sizes for place in ("around", "inside")]
    peaks = iter(measured_by("fsdp1_adapters.py", cases))
    for layers, tokens in sizes:
        around, inside = next(peaks), next(peaks)
        predicted = [predict_memory(fsdp1(layers, tokens, reentrant_units=is_so)) for is_so in (True, False)]
        more = predicted[0].peak_allocated.value - predicted[1].peak_allocated.value
        assert around - inside == more
        # At the first layer the shards of all adapters' gradients are there, too, and at the last those of one matrix.
        gradients = [memory.device_parts["gradients"] for memory in predicted]
        assert more - (gradients[0] - gradients[1]) == (layers - 2) * tokens * 64 * 4
        # The table of families has 4 to 6 % less of these layers, whose feed-forward block is narrow.
        constant = sum(predicted[0].device_parts[part] for part in ("parameters", "optimizer"))
        changing = predicted[0].peak_allocated.value - constant + rotary_bytes(tokens)
        assert changing == pytest.approx(around, rel=0.07)


def test_fsdp1_has_gradients_of_frozen_weights_in_a_flat_parameter_with_adapters() -> None:
    """All weights of a layer that a policy wraps with its adapters get them."""
    sizes = ((4, 128), (6, 64))
    peaks = measured_by("fsdp1_adapters.py", [[*size, "inside", "layers"] for size in sizes])
    for (layers, tokens), peak in zip(sizes, peaks, strict=True):
        for is_mixed, low, high in ((True, 0.91, 1.0), (False, 0.5, 0.7)):
            predicted = predict_memory(fsdp1(layers, tokens, fsdp_mixed_units=is_mixed))
            constant = sum(predicted.device_parts[part] for part in ("parameters", "optimizer"))
            assert low < (predicted.peak_allocated.value - constant + rotary_bytes(tokens)) / peak < high
