"""The server of tests/forked.py: `python tests/probe_server.py SOCKET`.

It has the imports of a run of the study, and those of a user's program, such as a probe: each rank repeats these.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys

from study.host.stacks import without_gc
from study.sweep import fork_server

_IMPORTED = (
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "study.host.environment",
    "study.metrics.flops",
    "study.receipt.session",
    "study.records.models",
    "study.run.resume",
    "torch.profiler._cupti_monitor",
)


def preload() -> None:
    """Import the libraries of runs and receipts, and read the CPU's description."""
    fork_server.preload()
    import cpuinfo

    # Once instead of in each rank that uses one of DeepSpeed's operators: it is a second of CPU time.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    # ZeRO imports Muon, which is compiled at import unless this is set: that imports torch's compiler, four seconds in
    # each rank. A run of the study sets it, too.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with without_gc():
        for name in _IMPORTED:
            # Older releases of DeepSpeed lack some.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    del os.environ["TORCHDYNAMO_DISABLE"]


if __name__ == "__main__":
    fork_server.serve(sys.argv[1], preload)
