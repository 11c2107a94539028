"""torch's ring attention on CPUs."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def register_cpu_ring() -> None:
    """Register torch's ring attention for the CPU kernel; torch registers it only for GPU kernels."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tokens = 2

    def as_dtensors(parts: Any, mesh: Any) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(part, mesh, [Shard(tokens)], run_check=False) for part in parts)

    def forward(_operator: Any, args: Any, options: dict[str, Any]) -> Any:
        query, key, value, dropout, is_causal = (*args, 0.0, False)[:5] if len(args) < 5 else args[:5]
        mesh = query.device_mesh
        output = ring._templated_ring_attention(
            mesh.get_group(),
            tokens,
            kernel,
            query.to_local(),
            key.to_local(),
            value.to_local(),
            is_causal=options.get("is_causal", is_causal),
            dropout_p=options.get("dropout_p", dropout),
            scale=options.get("scale"),
        )
        return as_dtensors(output, mesh)

    def backward(_operator: Any, args: Any, options: dict[str, Any]) -> Any:
        *divided_args, dropout, is_causal = args
        gradient, query, key, value, output, logsumexp = (tensor.to_local() for tensor in divided_args)
        mesh = args[1].device_mesh
        gradients = ring._templated_ring_attention_backward(
            mesh.get_group(),
            tokens,
            kernel_backward.default,
            grad_out=gradient,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=output,
            logsumexp=logsumexp,
            is_causal=is_causal,
            dropout_p=dropout,
            scale=options.get("scale"),
        )
        return as_dtensors(gradients, mesh)

    operators: dict[Any, Any] = {kernel.default: forward, kernel_backward.default: backward}
    ring.custom_ops.update(operators)
