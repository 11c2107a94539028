"""study/train.py, which prints the most elements of parameters that stage 3 has gathered at once in training."""

from __future__ import annotations

import json
import os
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from study import train
from study.run.console import run_for_exit_status

fetch = PartitionedParameterCoordinator._fetch_sub_module_impl
modules: list[Any] = []
most = 0


def fetch_and_count(self: PartitionedParameterCoordinator, module: Any, *given: Any) -> None:
    global most
    fetch(self, module, *given)
    # The first module that is called is the whole model.
    if not modules:
        modules.append(module)
    if self.is_complete_trace() and module.training:
        gathered = [p.ds_numel for p in modules[0].parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
        most = max(most, sum(gathered))


PartitionedParameterCoordinator._fetch_sub_module_impl = fetch_and_count
if __name__ == "__main__":
    status = run_for_exit_status(train.main)
    print("PROBE " + json.dumps({"rank": int(os.environ["RANK"]), "most": most}), flush=True)
    os._exit(status)
