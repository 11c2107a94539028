from __future__ import annotations

from runs import run_of

__all__ = ["run_of"]
