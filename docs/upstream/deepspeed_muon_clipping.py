"""With Muon DeepSpeed clips by the norm of Muon's updates, and reports it as the norm of the gradients.

Stages 1 to 3 replace the gradient of a matrix by its orthogonalized update before they take the norm. An update has a
norm of about the square root of the matrix's rank, whatever the gradient is.
"""

import os
import sys

import deepspeed
import torch
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29533")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16, bias=False)
model.weight.use_muon = True
groups = [{"params": [model.weight], "use_muon": True, "lr": 1e-2, "momentum": 0.95}]
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=MuonWithAuxAdam(groups))
# The gradient of this loss for each weight is 0.001, so that its norm is 0.016 and nothing is to be clipped.
engine.backward(engine(torch.ones(1, 16)).sum() * 1e-3)
engine.step()
norm = float(engine.get_global_grad_norm())
torch.distributed.destroy_process_group()
print(f"reported norm of the gradient {norm:.3f}, right is 0.016")
sys.exit(0 if abs(norm - 0.016) < 1e-4 else 1)
