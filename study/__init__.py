"""A study of DeepSpeed ZeRO on Accelerate: one trainer, many strategies, evidence for every claim."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LightningReceiptCallback", "Receipt", "ReceiptCallback"]
# They import torch, which the commands do without: found at their first use.
_MODULES = {
    "LightningReceiptCallback": "study.receipt.lightning_callback",
    "Receipt": "study.receipt.session",
    "ReceiptCallback": "study.receipt.callback",
}

if TYPE_CHECKING:
    LightningReceiptCallback: Any
    Receipt: Any
    ReceiptCallback: Any


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
