"""Accelerate's load_state does not load the optimizer's state under FSDP1 with SHARDED_STATE_DICT, from 1.7.0 on.

load_fsdp_optimizer gives torch.distributed.checkpoint the state of the new optimizer to fill in. That optimizer has not
stepped and has none, so that nothing is read. FSDP2 takes another path.
"""

import os
import sys
import tempfile
import warnings

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

warnings.filterwarnings("ignore")
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29523")
torch.distributed.init_process_group("gloo")
state = PartialState(cpu=True)
# Without a GPU Accelerate makes FSDP of this type only.
state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
state._shared_state["device"] = torch.device("cpu")
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=1, auto_wrap_policy="no_wrap", use_orig_params=True, state_dict_type="SHARDED_STATE_DICT"
)
accelerator = Accelerator(fsdp_plugin=plugin)


def prepare():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


model, optimizer = prepare()
accelerator.backward(model(torch.ones(1, 4)).sum())
optimizer.step()
saved = len(optimizer.state)
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    accelerator.free_memory()
    model, optimizer = prepare()
    accelerator.load_state(folder)
loaded = len(optimizer.state)
torch.distributed.destroy_process_group()
print(f"parameters with a state of AdamW: {saved} saved, {loaded} after load_state")
sys.exit(0 if loaded == saved else 1)
