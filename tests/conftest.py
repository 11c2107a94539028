from __future__ import annotations

import os

import torch

from runs import run_of
from study.host.folders import cache_directory
from study.host.operators import use_own_build

__all__ = ["run_of"]

# What the tests launch finds the operators that the installation built, whatever cache a test gives it.
use_own_build(cache_directory())

if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside other tests two threads wait for each other's core, and a test that trains in this process takes minutes.
    torch.set_num_threads(1)
