"""The words of a precision's name, each once."""

from __future__ import annotations

from typing import get_args

import pytest

from study.config.flags import Precision
from study.config.precisions import computes_in_bf16, computes_in_fp16, computing_type, in_autocast, in_engine

_EXPECTED = {
    "fp32": ("fp32", False, False),
    "bf16": ("bf16", True, False),
    "bf16-engine": ("bf16", False, True),
    "fp16": ("fp16", True, False),
    "fp16-engine": ("fp16", False, True),
}


@pytest.mark.parametrize("precision", get_args(Precision))
def test_a_precision_says_its_type_and_who_casts_to_it(precision: Precision) -> None:
    assert (computing_type(precision), in_autocast(precision), in_engine(precision)) == _EXPECTED[precision]
    assert computes_in_bf16(precision) is precision.startswith("bf16")
    assert computes_in_fp16(precision) is precision.startswith("fp16")
