from __future__ import annotations

from runs import run_of
from study.host.folders import cache_directory
from study.host.operators import use_own_build

__all__ = ["run_of"]

# What the tests launch finds the operators that the installation built, whatever cache a test gives it.
use_own_build(cache_directory())
