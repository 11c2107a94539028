"""study/train.py with plain SGD, which takes gradients as large as they are: Adam does not see a factor in them."""

from __future__ import annotations

import os
from typing import Any

import torch

from study.run.console import run_for_exit_status
from study.train import main


class AdamW(torch.optim.Optimizer):
    """Under the name, and with the settings, that a run asks for."""

    def __init__(self, parameters: Any, lr: float, **settings: Any) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


torch.optim.AdamW = AdamW  # type: ignore[assignment,misc]
os._exit(run_for_exit_status(main))
