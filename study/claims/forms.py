"""Every form of check, and what the words of a check may be."""

from __future__ import annotations

from typing import get_args

from study.autopsy.design import RESPONSES
from study.claims import arithmetic, measured  # noqa: F401 - their forms are known by name from then on
from study.claims.evidence import SETTINGS
from study.claims.form import FORMS
from study.spec.config import Precision
from study.spec.strategies import STRATEGY_NAMES

__all__ = ["FORMS", "WORDS"]

_STRATEGIES = "|".join(STRATEGY_NAMES)
_PRECISIONS = "|".join(get_args(Precision))
_STATE = r"(state|params|grads|optimizer)(_(device|host|nvme))?"
_VIRTUAL = rf"{_STATE}|sent|calls|host_peak|device_peak|collective\.\w+"
_SIZE = rf"({_STATE}|sent|gathered|calls|forward)"
# Of a table: ranks, and what is printed for stages 1, 2 and 3.
_CELLS = r"\d+: [\d.]+ [\d.]+ [\d.]+"
_COUNTED = rf"{_SIZE}(/(tokens|parameters))?|parameters|tokens"
_MEASURED = "|".join(
    ("step_time_s_median", "tokens_per_s", "train_loss_final", "eval_loss_final", "host_peak_rss_gib",
     "memory_steady_host_gib", "avg_memory_gib_device", "energy_j")
)  # fmt: skip
_WHERE = rf"(?:{'|'.join(SETTINGS)})=\S+"
_ALONG = "model_parameters|seq_length|global_batch_size|micro_batch_size"
# What a word of a check must be, by its key or by its form and key; other words are free.
WORDS = {
    "strategy": _STRATEGIES, "over": f"{_STRATEGIES}|paper", "precision": _PRECISIONS, "over_precision": _PRECISIONS,
    "what": "weights|sharded|rest", "virtual.figure": _VIRTUAL, "virtual.over_figure": _VIRTUAL,
    "counted.figure": _COUNTED, "counted.over_figure": _COUNTED, "virtual_furthest.printed": rf"{_CELLS}(; {_CELLS})*",
    "paired.figure": _MEASURED, "ratio_slope.figure": _MEASURED, "growth.figure": _MEASURED, "along": _ALONG,
    "where": f"{_WHERE}( {_WHERE})*", "over_where": f"{_WHERE}( {_WHERE})*", "probed.over": ".+",
    "corrected.figure": "|".join(each.name for each in RESPONSES),
}  # fmt: skip
