"""A receipt has the cause of bytes without a part, and of a peak that is far above its prediction."""

from __future__ import annotations

from typing import Any

import pytest

from study.config.places import REPOSITORY
from study.predictor.calibration import PredictedRun
from study.receipt.document import ForecastRow, ReceiptDocument, read_receipt
from study.receipt.forecast import make_forecast, measured_run
from study.receipt.page import receipt_lines
from study.receipt.unexplained import explain_attribution

RECEIPTS = REPOSITORY / "tests" / "data" / "receipts"
MIB = 2**20


def read(name: str = "ddp", extra_bytes: int = 0, device: str | None = None, **parts: int) -> ReceiptDocument:
    """Return a stored receipt whose peak has other parts, and more bytes than they have."""
    receipt = read_receipt(str(RECEIPTS / f"{name}.json"))
    assert receipt.memory is not None
    before = sum(receipt.memory.parts.values())
    changed = {**receipt.memory.parts, **parts}
    total = receipt.memory.total_bytes + sum(changed.values()) - before + extra_bytes
    update: dict[str, Any] = {"parts": changed, "total_bytes": total}
    memory = receipt.memory.model_copy(update=update)
    engine = receipt.engine.model_copy(update={"device": device} if device is not None else {})
    return receipt.model_copy(update={"memory": memory, "engine": engine})


def join_screen(receipt: ReceiptDocument) -> str:
    return " ".join(" ".join(receipt_lines(receipt, "receipt.json")).split())


SMALL: dict[str, Any] = {
    "parameters": 80,
    "gradients": 80,
    "optimizer": 168,
    "buckets": 0,
    "activations": 120,
    "other_tensors": 0,
}


@pytest.mark.parametrize(
    ("receipt", "cause"),
    [
        (
            # With the 72,712 bytes that the stored one has without a part: a model of 20 weights.
            read(**SMALL),
            "only 0.6% of the peak is attributed, and usually at least 95%: 71.01 KiB have no part; on a CPU up to"
            " 256.00 KiB of a peak are Python's objects and temporaries",
        ),
        (
            read(extra_bytes=2 * MIB),
            "only 86.9% of the peak is attributed, and usually at least 95%: 2.07 MiB have no part; they are of"
            " kernels, or of libraries other than torch",
        ),
        (
            read(extra_bytes=-MIB),
            "only 92.8% of the peak is attributed, and usually at least 95%: the parts have 952.99 KiB more than are in"
            " use, and are counted too high",
        ),
    ],
)
def test_bytes_without_a_part_have_their_cause_on_the_screen(receipt: ReceiptDocument, cause: str) -> None:
    assert explain_attribution(receipt) == cause
    assert join_screen(receipt).count(cause) == 1


def test_a_peak_with_its_parts_has_no_such_line() -> None:
    assert explain_attribution(read()) is None
    assert "usually at least" not in join_screen(read())
    # On a CPU whose heap is not counted, the peak is the sum of its parts.
    small = read(**SMALL)
    assert small.memory is not None
    memory = small.memory.model_copy(update={"outside_torch_bytes": None})
    assert explain_attribution(small.model_copy(update={"memory": memory})) is None


def peak_row(receipt: ReceiptDocument) -> ForecastRow:
    return next(row for row in make_forecast(receipt).comparisons if row.figure.startswith("peak"))


def test_a_peak_of_more_than_twice_its_prediction_has_the_part_that_exceeds_it() -> None:
    row = peak_row(read(activations=24 * MIB))
    assert row.measured > 2 * row.predicted
    assert row.cause is not None
    assert row.cause.startswith("activations and logits are ")
    row = peak_row(read(extra_bytes=20 * MIB))
    assert row.cause == "bytes without a part are 20.07 MiB above their prediction"
    receipt = read(activations=24 * MIB)
    receipt = receipt.model_copy(update={"forecast": make_forecast(receipt)})
    assert "which states no error here: activations and logits are " in join_screen(receipt)


def predicted_peak(receipt: ReceiptDocument, **config: object) -> float:
    model = receipt.model.model_copy(update={"config": {**(receipt.model.config or {}), **config}})
    return peak_row(receipt.model_copy(update={"model": model})).predicted


def test_dropped_attention_of_a_cpu_without_a_fused_kernel_is_in_the_prediction() -> None:
    receipt = read()
    assert receipt.model.attention == "sdpa"
    plain = predicted_peak(receipt, use_cache=False)
    # Two layers, two samples, four heads, 64 tokens: weights, factors of dropout and their product in fp32, and no
    # logarithms of sums.
    pairs, rows = 2 * 2 * 4 * 64**2, 2 * 2 * 4 * 64
    assert predicted_peak(receipt, use_cache=False, attn_pdrop=0.1) - plain == 12 * pairs - 4 * rows
    # Its kernel on a GPU saves no more than without dropout.
    on_gpu = read("cuda_ddp")
    assert predicted_peak(on_gpu, attn_pdrop=0.1) == predicted_peak(on_gpu)
    # Dropout of a head that GPT-2 does not have.
    assert predicted_peak(receipt, summary_first_dropout=0.0) == predicted_peak(receipt)


def test_keys_and_values_of_a_cache_are_in_the_prediction() -> None:
    receipt = read()
    # Two layers, each with keys and values of 128 tokens of width 128.
    assert predicted_peak(receipt, use_cache=True) - predicted_peak(receipt, use_cache=False) == 2 * 2 * 4 * 128 * 128
    for name in ("ddp", "logits", "cuda_ddp", "cuda_plain", "cuda_zero2", "cuda_zero3", "cuda_checkpointed"):
        row = peak_row(read(name))
        assert row.measured == pytest.approx(row.predicted, rel=0.005), name


def test_answers_that_a_receipt_calibrates_have_the_bytes_of_its_dropout_and_cache() -> None:
    receipt = read("cuda_ddp")
    config = {**(receipt.model.config or {}), "resid_pdrop": 0.1}
    receipt = receipt.model_copy(update={"model": receipt.model.model_copy(update={"config": config})})
    run = PredictedRun.predict(measured_run(receipt, "a"))
    # Twelve layers, each with keys and values in 16 bits, and two masks of a byte: of 4,096 tokens of width 768.
    extra = 12 * (2 * 2 + 2) * 4096 * 768
    row = peak_row(receipt)
    assert run.excess_bytes is not None
    assert run.excess_bytes == pytest.approx(row.measured - row.predicted + extra, rel=1e-6)


def test_a_peak_near_its_prediction_has_no_cause() -> None:
    assert [row.cause for row in make_forecast(read()).comparisons] == [None] * 4
    assert [row.cause for row in make_forecast(read("cuda_ddp")).comparisons] == [None] * 4
