"""The libraries of a run, imported in one go: most of what a run costs before it starts, paid by every rank."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from study.spec.strategies import Strategy


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Without garbage collection: imports make a million objects that stay, walked again and again for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        # What is there now stays, and no later collection needs to look at it.
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def import_libraries(strategy: Strategy) -> None:
    # transformers and evaluate take parts of scipy along where they find it, for losses and tests nobody here asks for.
    # It is a library of the report's; to a run it is not there. But scikit-learn is built on it, and some versions of
    # transformers import that wherever they find it.
    if importlib.util.find_spec("sklearn") is None:
        sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    with importing():
        for library in ("accelerate", "transformers.modeling_utils", "transformers.generation"):
            importlib.import_module(library)
        if strategy.deepspeed is not None:
            importlib.import_module("deepspeed")
