"""study/train.py with Muon's iteration in fp32, as DeepSpeed has it where a processor has no fp16.

In 16 bits it makes 1e-3 of an update out of a gradient's last bit, and two equal trainings cannot be told from others.
"""

from __future__ import annotations

import sys

import torch
from deepspeed.runtime.zero.muon import original_muon

from study.run.console import run_for_exit_status
from study.train import main

original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32
sys.exit(run_for_exit_status(main))
