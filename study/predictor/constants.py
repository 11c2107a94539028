"""Constants of step times without a published source, fitted to published rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from study.config.yaml_sections import load_package_yaml


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants without a published source, fitted to the rows of validation/published.yaml with `use: fit`."""

    # Sustained fraction of the best measured matrix product, in a long run with many shapes.
    sustained: float
    # Memory traffic of all other operations over the count below: as transformers' modules run them one by one, and
    # compiled.
    eager_traffic: float
    compiled_traffic: float
    # Slowdown of compute by overlapped communication, as a fraction of the overlapped time.
    hidden_share: float
    # CPU time per layer and pass to launch kernels, a lower bound of the passes. DeepSpeed's stage 3 adds the hooks
    # that gather and release, per parameter and pass.
    launch_s: float
    gather_hook_s: float
    # Memory bandwidth of DeepSpeed's CPU Adam in GB/s, for all ranks of a node that share its cores, including clipping
    # and copies. CPU Adam alone was measured at 109 to 127 (table 4 of https://arxiv.org/abs/2101.06840).
    host_gb_per_s: float


# Written by `python -m study.report.pages.prediction fit`.
FITTED_FILE = Path(__file__).with_name("fitted.yaml")
FITTED = Constants(**load_package_yaml(FITTED_FILE.read_text(encoding="utf-8"))["constants"])
