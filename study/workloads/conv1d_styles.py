"""Tensor-parallel styles for GPT-2's Conv1D, whose weight is a transposed Linear's; transformers has none.

Importing DTensor takes half a second, so this module is imported only where tensors are sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer


class ColumnsOfConv1D(TensorParallelLayer):
    """Shards the last dimension; with `packed` matrices side by side, each of them."""

    def __init__(self, packed: int = 1):
        self.packed = packed

    def should_use_local_tensors(self, module: Any) -> bool:
        return True

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        last = module._parameters[param].ndim - 1
        _divide(module, param, mesh, Shard(last) if self.packed == 1 else _StridedShard(last, split_factor=self.packed))

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.nf //= mesh.size()
        return super().install_forward(module, mesh)

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        # Each rank has the input gradient of its own columns; their sum is the gradient.
        return (whole.to_local(grad_placements=[Partial()]), *args[1:]), kwargs


class RowsOfConv1D(TensorParallelLayer):
    """Shards the first dimension. Every rank adds the whole bias to the sum over ranks."""

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        _divide(module, param, mesh, Replicate() if param == "bias" else Shard(0))

    def install_forward(self, module: Any, mesh: Any) -> Any:
        def forward(own: torch.Tensor) -> torch.Tensor:
            part = DTensor.from_local(own @ module.weight.to_local(), mesh, [Partial()], run_check=False)
            whole = part.redistribute(placements=[Replicate()]).to_local()
            return whole + module.bias.to_local(grad_placements=[Replicate()])

        module.forward = forward
        return module


class OwnHeads(TensorParallelLayer):
    """Sets GPT-2's attention to this rank's share of the heads, which it takes from the config."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.split_size //= mesh.size()
        module.num_heads //= mesh.size()
        return module


def _divide(module: Any, param: str, mesh: Any, placement: Any) -> None:
    whole = module._parameters[param]
    divided = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module._parameters[param] = torch.nn.Parameter(divided, requires_grad=whole.requires_grad)


for _name, _style in {
    "conv1d_columns": ColumnsOfConv1D(), "conv1d_packed_columns": ColumnsOfConv1D(packed=3),
    "conv1d_rows": RowsOfConv1D(), "own_heads": OwnHeads(),
}.items():  # fmt: skip
    ALL_PARALLEL_STYLES.register(_name, _style)
