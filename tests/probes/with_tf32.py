"""A trainer in a process where TF32 is on, as NVIDIA's containers have it: with_tf32.py TRAINER FLAG..."""

from __future__ import annotations

import runpy
import sys

import torch

torch.backends.cuda.matmul.allow_tf32 = True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
