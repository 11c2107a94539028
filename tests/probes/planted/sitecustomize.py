"""On PYTHONPATH, lets the installed DeepSpeed train wrongly under AdamW, in another way at each stage.

Stage 1 drops the second micro-step of a step, stage 2 skips clipping, stage 3 divides by the accumulation steps twice.
Packages that `study verify` must not import cannot be imported here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != "deepspeed.runtime.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_plant(module: Any) -> None:
            load(module)
            _plant(module.DeepSpeedEngine)

        spec.loader.exec_module = load_and_plant  # type: ignore[method-assign]
        return spec


def _plant(engine_class: Any) -> None:
    right = engine_class.backward

    def backward(self: Any, loss: Any, **options: Any) -> Any:
        stage, micro_steps = self.zero_optimization_stage(), self.gradient_accumulation_steps()
        self.backwards = getattr(self, "backwards", 0) + 1
        if "Muon" in type(self.basic_optimizer).__name__:
            stage = 0
        if stage == 1 and micro_steps > 1 and self.backwards % micro_steps == 2:
            loss = 0 * loss
        elif stage == 2:
            self.optimizer.clip_grad = 0.0
        elif stage == 3:
            loss = loss / micro_steps
        return right(self, loss, **options)

    engine_class.backward = backward


sys.meta_path.insert(0, _AfterImport())
for name in ("datasets", "evaluate", "pandas", "pyarrow", "matplotlib", "scipy", "papermill", "peft", "jupyter"):
    sys.modules[name] = None  # type: ignore[assignment]
