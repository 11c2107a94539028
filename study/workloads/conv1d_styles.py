"""Tensor-parallel styles for GPT-2's Conv1D, whose weight is a transposed Linear's; transformers has none.

Importing DTensor takes half a second, so this module is imported only if tensors are sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer


class ColumnsOfConv1D(TensorParallelLayer):
    """Style that shards the last dimension; with `packed` concatenated matrices it shards each of them."""

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
        replicated = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        # Each rank computes the input gradient of its columns; their sum is the gradient.
        return (replicated.to_local(grad_placements=[Partial()]), *args[1:]), kwargs


class RowsOfConv1D(TensorParallelLayer):
    """Style that shards the first dimension; every rank adds the full bias to the sum over ranks."""

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        _divide(module, param, mesh, Replicate() if param == "bias" else Shard(0))

    def install_forward(self, module: Any, mesh: Any) -> Any:
        def forward(local_input: torch.Tensor) -> torch.Tensor:
            partial = DTensor.from_local(local_input @ module.weight.to_local(), mesh, [Partial()], run_check=False)
            output = partial.redistribute(placements=[Replicate()]).to_local()
            return output + module.bias.to_local(grad_placements=[Replicate()])

        module.forward = forward
        return module


class LocalHeads(TensorParallelLayer):
    """Style that sets GPT-2's attention to this rank's number of heads; otherwise it uses the config's."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.split_size //= mesh.size()
        module.num_heads //= mesh.size()
        return module


def _divide(module: Any, param: str, mesh: Any, placement: Any) -> None:
    parameter = module._parameters[param]
    sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    module._parameters[param] = torch.nn.Parameter(sharded, requires_grad=parameter.requires_grad)


for _name, _style in {
    "conv1d_columns": ColumnsOfConv1D(),
    "conv1d_packed_columns": ColumnsOfConv1D(packed=3),
    "conv1d_rows": RowsOfConv1D(),
    "own_heads": LocalHeads(),
}.items():
    ALL_PARALLEL_STYLES.register(_name, _style)
