"""Write the parts, saved bytes, peak and collectives of rank 0 of two, and the loss, of tensor-parallel models.

A case has `config`, `dtype`, `batch`, `tokens`, `checkpoints`, and `targets`: those of peft's adapters on a model that
transformers divides, or null for a model that torch divides, with norms, residual stream and loss.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from study.metrics.inventory import live_tensors
from study.metrics.traffic import TrafficWatch

RANKS = 2

SETTLED_AFTER_S = 0.005


def divide_by_torch(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Divide a Llama by the plan of torchtitan's parallelize_llama."""
    states: dict[str, Placement] = {"hidden_states": Shard(1)}
    gathered: dict[str, Placement] = {"hidden_states": Replicate()}
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    plan["self_attn"] = PrepareModuleInput(input_kwarg_layouts=states, desired_input_kwarg_layouts=gathered)
    plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, plan)
    ends: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


def build(case: dict[str, Any], mesh: DeviceMesh, folder: Path) -> torch.nn.Module:
    config, dtype = AutoConfig.for_model(**case["config"]), getattr(torch, case["dtype"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    if case["targets"] is None:
        divide_by_torch(model, mesh)
        return model
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    divided = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=RANKS), dtype=dtype, attn_implementation="sdpa"
    )
    settings = peft.LoraConfig(r=case["rank"], target_modules=case["targets"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(divided, settings, autocast_adapter_dtype=False)
    if not case.get("unmended"):
        set_full_widths(adapted)
    return adapted


def set_full_widths(model: torch.nn.Module) -> None:
    """Set the width of each divided matrix A to that of all ranks, which RowwiseParallel of transformers 5.23.0 reads:
    peft 0.21.2 sets that of one rank (_get_in_out_features in its tuners_utils.py), and the product fails."""
    for name, module in model.named_modules():
        if ".lora_A." in name and isinstance(module.weight, DTensor):
            module.in_features = module.weight.shape[1]


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors that operations made within it: `now`, and `peak` between two operations.

    The profiler's memory events do not count what a thread of gloo frees, and a sum of them has it for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.peak = 0

    def __enter__(self) -> LiveBytes:
        gc.collect()
        # Without the tensors before it, which an operation may write into.
        self._before = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in live_tensors()}
        super().__enter__()
        return self

    @property
    def now(self) -> int:
        return sum(size for _, size in list(self._known.values()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not is_traceable_wrapper_subclass(leaf):
                self._see(leaf.untyped_storage())
        if self.now > self.peak:
            # A thread of gloo frees a collective's input some time after the collective.
            time.sleep(SETTLED_AFTER_S)
            self.peak = max(self.peak, self.now)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._before and key not in self._known:
            reference = weakref.ref(storage, lambda _: self._known.pop(key, None))
            self._known[key] = (reference, storage.nbytes())


def changes_of_passes(forward: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Return the bytes that a forward pass leaves, and the peak of both passes."""
    with LiveBytes() as live:
        loss = forward()
        gc.collect()
        time.sleep(SETTLED_AFTER_S)
        saved = live.now
        loss.backward()
    return saved, live.peak


def measure(case: dict[str, Any], mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    model = build(case, mesh, folder)
    model.train()
    model.config.use_cache = False  # type: ignore[union-attr]
    if case["checkpoints"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if case["targets"] is not None:
            model.enable_input_require_grads()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    shape = (case["batch"], case["tokens"])
    ids = torch.randint(0, case["config"]["vocab_size"], shape, generator=generator)
    places = torch.arange(case["tokens"])[None]
    losses = []

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, position_ids=places).loss
        losses.append(loss)
        return loss

    def step() -> None:
        forward().backward()

    with loss_parallel():
        try:
            step()
        except RuntimeError as error:
            return {"error": f"RuntimeError: {error}"}
        model.zero_grad()
        losses.clear()
        with TrafficWatch(1) as watch:
            step()
        model.zero_grad()
        losses.clear()
        saved, peak = changes_of_passes(forward)
    params = [param for _, param in model.named_parameters()]
    local = [param.to_local() if isinstance(param, DTensor) else param for param in params]
    loss = losses[0].full_tensor() if isinstance(losses[0], DTensor) else losses[0]
    return {
        "elements": [part.numel() for part in local],
        "trained": [param.requires_grad for param in params],
        "collectives": watch.report()["collectives"],
        "saved": saved,
        "peak": peak,
        "loss": loss.item(),
    }


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    folder = Path(sys.argv[2])
    cases = enumerate(json.loads(sys.argv[1]))
    output = [measure(case, mesh, folder / f"model_{place}") for place, case in cases]
    if dist.get_rank() == 0:
        (folder / "output.json").write_text(json.dumps(output), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
