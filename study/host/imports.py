"""The libraries of a run, imported at once: most of a run's start-up time, on every rank."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from study.config.errors import UserError
from study.config.strategies import Strategy


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Without garbage collection, which would walk the million objects that imports make, and free none of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        # What is there now stays: no later collection looks at it.
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def import_libraries(strategy: Strategy) -> None:
    if sys.flags.optimize > 1:
        raise UserError(
            "Python leaves docstrings out here, and transformers reads them where it is imported",
            "unset PYTHONOPTIMIZE, and leave out -OO",
        )
    # transformers and evaluate import parts of scipy where they find it, for what no run here uses. So it is hidden
    # from them, unless scikit-learn is installed: that needs scipy, and some versions of transformers import it.
    if importlib.util.find_spec("sklearn") is None:
        sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    # transformers imports it wherever it is, and it fails beside another torch than its own: a notebook's stays behind
    # when torch is replaced. No model of text uses it.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    with importing():
        for library in ("accelerate", "transformers.modeling_utils", "transformers.generation"):
            importlib.import_module(library)
        if strategy.deepspeed is not None:
            importlib.import_module("deepspeed")
