"""Facts about a live model, read from its objects: engine, wrapping, precision and adapters."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from study.engine.audit import dtype_name, read_deepspeed
from study.metrics.inventory import dtensor_type, fsdp_groups
from study.metrics.state import base_optimizer, find_quant_states, fsdp1_parameters
from study.receipt.document import Engine, EngineFacts, ModelFacts
from study.receipt.live_adapters import adapter_facts, frozen_modules
from study.receipt.live_fsdp import fsdp1_facts, fsdp1_ignored, fsdp2_facts, is_in_fsdp1_root, is_in_fsdp2_root
from study.workloads.architecture import find_adapters

# Names of the study's strategies by stage and offloads.
_STRATEGIES = {
    (0, None, None): "zero0",
    (1, None, None): "zero1",
    (2, None, None): "zero2",
    (3, None, None): "zero3",
    (2, "cpu", None): "zero2_cpu",
    (3, "cpu", None): "zero3_cpu_optimizer",
    (3, "cpu", "cpu"): "zero3_cpu",
    (3, "nvme", None): "zero3_nvme_optimizer",
    (3, "nvme", "nvme"): "zero3_nvme",
    (3, "cpu", "nvme"): "zero3_cpu_nvme",
}
_OF_OTHER_ENGINES: dict[Engine, str] = {"ddp": "ddp", "fsdp2": "fsdp2", "none": "single"}


def find_engine(model: Any) -> Any:
    """Return the wrapper that trains a model: of DDP, FSDP or DeepSpeed, found among all live objects."""
    wrappers = _wrapper_types()
    if _is_fabric(model):
        model = model._forward_module
    if isinstance(getattr(model, "_orig_mod", model), wrappers) or not wrappers:
        # torch.compile may wrap the wrapper.
        return model
    inner = find_inner(model)
    for candidate in gc.get_objects():
        if issubclass(type(candidate), wrappers) and find_inner(candidate) is inner:
            return candidate
    return model


def _wrapper_types() -> tuple[type, ...]:
    types: list[type] = [nn.parallel.DistributedDataParallel]
    fsdp, deepspeed = (sys.modules.get(name) for name in ("torch.distributed.fsdp", "deepspeed"))
    if fsdp is not None:
        types.append(fsdp.FullyShardedDataParallel)
    if deepspeed is not None:
        types.append(deepspeed.DeepSpeedEngine)
    return tuple(types)


def find_inner(model: Any) -> Any:
    """Return the model inside the wrappers of engines and of torch.compile."""
    while True:
        is_wrapper = isinstance(model, _wrapper_types()) or _is_fabric(model)
        if not is_wrapper and not hasattr(model, "_orig_mod"):
            return model
        model = model.module if is_wrapper else model._orig_mod


def _is_fabric(model: Any) -> bool:
    """Whether it is what Lightning's Fabric.setup returns: the engine's wrapper, in one that casts inputs."""
    return type(model).__name__ == "_FabricModule"


def find_core(inner: nn.Module) -> nn.Module:
    """Return the model of transformers or peft that has all parameters of a program's module; else the module itself.

    A LightningModule, for example, has its model as an attribute.
    """
    module = inner
    while not hasattr(getattr(module, "config", None), "to_dict"):
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own or len(children) != 1:
            return inner
        module = find_inner(children[0])
    return module


def is_lightning(model: Any) -> bool:
    """Whether it is a LightningModule, of which Lightning's Trainer calls `training_step`."""
    return any(kind.__name__ == "LightningModule" for kind in type(model).__mro__)


def find_kind(model: Any) -> Engine:
    if hasattr(model, "zero_optimization_stage"):
        return "deepspeed"
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, nn.parallel.DistributedDataParallel):
        return "ddp"
    if next(fsdp_groups(plain), None) is not None:
        return "fsdp2"
    return "fsdp1" if fsdp1_parameters(plain) else "none"


class ParallelGroups(NamedTuple):
    """Ranks of the groups that divide a layer (tensor), and of those that divide a sequence or context (sequence)."""

    tensor: int = 1
    sequence: int = 1

    @property
    def ranks_of_a_sample(self) -> int:
        return self.tensor * self.sequence


def find_groups(model: Any) -> ParallelGroups:
    """Return the sizes of a model's model-parallel groups."""
    if not dist.is_initialized():
        return ParallelGroups()
    if find_kind(model) == "deepspeed":
        sequence_group = getattr(model, "seq_parallel_group", None)
        sequence_ranks = 1 if sequence_group is None else dist.get_world_size(sequence_group)
        return ParallelGroups(getattr(model, "mp_world_size", None) or 1, sequence_ranks)
    meshes = {it.device_mesh for it in find_inner(model).parameters() if isinstance(it, dtensor_type())}
    is_sharded = find_kind(model) in ("fsdp1", "fsdp2")
    tensor_ranks = max((_tensor_ranks(mesh, is_sharded=is_sharded) for mesh in meshes), default=1)
    return ParallelGroups(tensor_ranks, _accelerate_sequence_ranks())


def _tensor_ranks(mesh: Any, *, is_sharded: bool) -> int:
    names = mesh.mesh_dim_names
    if names is None:
        # Without FSDP only tensor parallelism makes DTensors of parameters.
        return 1 if is_sharded else int(mesh.size())
    return int(mesh.size(names.index("tp"))) if "tp" in names else 1


def _accelerate_sequence_ranks() -> int:
    """Return the ranks that share a sequence by Accelerate's record: no parameter's mesh has such a dimension."""
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.AcceleratorState._shared_state
    config = shared.get("parallelism_config")
    return int(getattr(config, "cp_size", 1)) * int(getattr(config, "sp_size", 1))


def find_device(model: Any) -> torch.device:
    """Return the device on which a model computes."""
    if hasattr(model, "zero_optimization_stage"):
        return torch.device(model.device)
    for parameter in model.parameters():
        if parameter.device.type == "cuda":
            return torch.device(parameter.device)
    # FSDP's offload keeps the parameters on the host.
    is_offloading = (
        torch.cuda.is_available() and find_kind(model) in ("fsdp1", "fsdp2") and dist.get_backend() != "gloo"
    )
    return torch.device("cuda", torch.cuda.current_device()) if is_offloading else torch.device("cpu")


def read_model(model: Any) -> ModelFacts:
    core = find_core(find_inner(model))
    config: Any = getattr(core, "config", None)
    adapters, states = find_adapters(core), find_quant_states(core)
    return ModelFacts(
        name=_class_name(core),
        parameters=sum(_elements(parameter) for _, parameter in _whole_parameters(model)),
        trained_parameters=sum(_elements(it) for _, it in _whole_parameters(model) if it.requires_grad),
        config=_plain(config.to_dict()) if hasattr(config, "to_dict") else None,
        **(adapter_facts(core, adapters["rank"]) if isinstance(adapters, dict) else {}),
        frozen_modules=() if adapters else frozen_modules(core),
        attention=getattr(config, "_attn_implementation", None),
        quantized=bool(states),
        double_quantized=any(getattr(state, "nested", False) for state in states),
    )


def read_facts(model: Any, optimizer: Any) -> EngineFacts:
    """Return the facts of an engine after its first steps; None for a setting that it does not have."""
    kind, inner = find_kind(model), find_inner(model)
    device, is_distributed = find_device(model), dist.is_initialized()
    base = base_optimizer(optimizer) if optimizer is not None else None
    groups = find_groups(model)
    facts: dict[str, Any] = {
        "engine": kind,
        "ranks": dist.get_world_size() if is_distributed else 1,
        "tensor_parallel": groups.tensor,
        "sequence_parallel": groups.sequence,
        "backend": str(dist.get_backend()) if is_distributed else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "param_dtype": dtype_name(next(inner.parameters()).dtype),
        "optimizer": type(base).__name__ if base is not None else None,
        "gradient_checkpointing": _is_checkpointing(inner),
        "compiled": any(hasattr(module, "_orig_mod") for module in (model, *model.modules())),
        "strategy": _OF_OTHER_ENGINES.get(kind),
    }
    if kind == "deepspeed":
        live = read_deepspeed(model)
        offloads = live["offload_optimizer"], live["offload_param"]
        facts |= {
            "zero_stage": live["zero_stage"],
            "offload_optimizer": offloads[0],
            "offload_param": offloads[1],
            "settings": _plain(model._config._param_dict),
            "strategy": _STRATEGIES.get((live["zero_stage"], *offloads)),
        }
    elif kind == "fsdp2":
        facts |= fsdp2_facts(getattr(model, "_orig_mod", model))
    elif kind == "fsdp1":
        facts |= fsdp1_facts(getattr(model, "_orig_mod", model))
    facts |= _embedding_facts(model, inner, kind) | _types_of_gradients(inner)
    return EngineFacts(**facts)


def _embedding_facts(model: Any, inner: nn.Module, kind: Engine) -> dict[str, Any]:
    """Return the largest embedding, and whether it is in FSDP's outermost group with others wrapped apart."""
    embeddings = [(name, module) for name, module in inner.named_modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        return {}
    name, module = max(embeddings, key=lambda row: row[1].num_embeddings * row[1].embedding_dim)
    is_in_root = {"fsdp1": is_in_fsdp1_root, "fsdp2": is_in_fsdp2_root}.get(kind)
    return {
        "embedding": name.replace("_fsdp_wrapped_module.", ""),
        "embedding_elements": module.num_embeddings * module.embedding_dim,
        "embedding_in_root": is_in_root is not None and is_in_root(getattr(model, "_orig_mod", model), module),
    }


def _types_of_gradients(inner: nn.Module) -> dict[str, Any]:
    """Return the trained elements by type, and the largest such parameter in fp32."""
    trained = [(name, parameter) for name, parameter in inner.named_parameters() if parameter.requires_grad]
    elements = Counter[str]()
    for _, parameter in trained:
        elements[dtype_name(parameter.dtype)] += _elements(parameter)
    in_fp32 = [(_elements(parameter), name) for name, parameter in trained if parameter.dtype == torch.float32]
    return {"trained_elements": dict(elements), "largest_fp32": max(in_fp32)[1] if in_fp32 else None}


def _whole_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters, or FSDP1's flat ones, whose sizes are those of all ranks."""
    plain = getattr(model, "_orig_mod", model)
    flats = fsdp1_parameters(plain)
    if flats:
        yield from ((f"flat {number}", flat) for number, flat in enumerate(flats))
        yield from fsdp1_ignored(plain).items()
    else:
        yield from find_inner(model).named_parameters()


def _elements(parameter: Any) -> int:
    """Return the elements of a whole parameter, whichever part this rank has."""
    if hasattr(parameter, "_unpadded_unsharded_size"):
        return int(parameter._unpadded_unsharded_size.numel())
    if (state := getattr(parameter, "quant_state", None)) is not None:
        # Two of its elements are in one byte.
        return math.prod(state.shape)
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _is_checkpointing(model: nn.Module) -> bool:
    """Whether a layer recomputes its activations, by transformers' flag or by torch's wrapper; transformers' own
    property warns that it is renamed."""
    return any(getattr(module, "gradient_checkpointing", False) or _is_wrapper(module) for module in model.modules())


def _is_wrapper(module: nn.Module) -> bool:
    return any(kind.__name__ == "ActivationWrapper" for kind in type(module).__mro__)


def _class_name(model: nn.Module) -> str:
    """Return the name of a class; FSDP2 creates a class with a prefix."""
    names = [kind.__name__ for kind in type(model).__mro__ if kind.__name__ != "FSDPModule"]
    return names[1] if names[0] == f"FSDP{names[1]}" else names[0]


def _plain(value: Any) -> Any:
    """Return a document of plain JSON values; others become their text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
