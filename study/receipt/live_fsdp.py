"""Facts about a live model of FSDP, read from its private states: groups, precision, offload, replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from study.engine.audit import dtype_name, read_fsdp
from study.metrics.inventory import dtensor_type, fsdp_groups, fsdp_state_groups
from study.metrics.state import fsdp1_parameters


def fsdp2_facts(model: nn.Module) -> dict[str, Any]:
    live = read_fsdp(model)
    groups = list(dict.fromkeys(fsdp_groups(model)))
    sizes = [param._orig_size.numel() for group in _outermost(model) for param in group.fsdp_params]
    gathered = {id(getattr(param, "_unsharded_param", None)) for group in groups for param in group.fsdp_params}
    # Parameters that no call of fully_shard has reached are plain tensors, equal on all ranks at first.
    plain = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, dtensor_type()) and id(parameter) not in gathered
    }
    largest = max(groups, key=lambda group: sum(param._orig_size.numel() for param in group.fsdp_params))
    replicas = int(getattr(largest.mesh_info, "replicate_mesh_size", 1))
    weights = largest.fsdp_params[0].sharded_param.dtype
    casts = largest.mp_policy.param_dtype or weights
    return {
        "strategy": "hsdp" if replicas > 1 else "fsdp2",
        "replicas": replicas,
        "wrapped_groups": live.get("fsdp_groups"),
        "root_elements": sum(sizes) if len(groups) > 1 else None,
        "reshard_after_forward": live.get("fsdp_reshard_after_forward"),
        **_unsharded(plain),
        **_offloads(bool(live.get("fsdp_offload_params"))),
        **_types(weights, casts, largest.mp_policy.reduce_dtype or casts),
    }


def fsdp1_facts(model: Any) -> dict[str, Any]:
    flats, handle = fsdp1_parameters(model), _fsdp1_handle(model)
    sharding = model.sharding_strategy.name
    replicas = model._inter_node_pg.size() if "HYBRID" in sharding else 1
    ignored = fsdp1_ignored(model).items()
    plain = {name: parameter.numel() for name, parameter in ignored if parameter.requires_grad}
    return {
        "sharding": sharding,
        "replicas": replicas,
        "wrapped_groups": len(flats),
        "root_elements": handle.flat_param._unpadded_unsharded_size.numel() if _has_root(model) else None,
        **_unsharded(plain),
        **_offloads(handle._offload_params),
        **_types(handle._orig_param_dtype, handle._fwd_bwd_param_dtype, handle._reduce_dtype),
    }


def fsdp1_ignored(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that are in no flat one: of `ignored_modules`. With use_orig_params a flat parameter is in
    no list of a module's, and has the program's."""
    flats = fsdp1_parameters(model)
    inside = [inner for flat in flats for inner in (*(flat._params or ()), *(flat._shared_params or ()))]
    sharded = {id(parameter) for parameter in (*flats, *inside)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in sharded}


def _unsharded(plain: dict[str, int]) -> dict[str, Any]:
    """Return the number of trained elements that no group shards, and the largest such parameter."""
    largest = max(plain, key=plain.__getitem__).replace("_fsdp_wrapped_module.", "") if plain else None
    return {"unsharded_elements": sum(plain.values()), "largest_unsharded": largest}


def _offloads(is_offloading: bool) -> dict[str, Any]:
    """Return where weights and optimizer are: FSDP offloads both or none."""
    return dict.fromkeys(("offload_optimizer", "offload_param"), "cpu" if is_offloading else None)


def _types(weights: torch.dtype, casts: torch.dtype, reduces: torch.dtype) -> dict[str, Any]:
    """Return the types of gathered parameters and of reduced gradients; None: there is no cast."""
    return {
        "cast_dtype": dtype_name(casts) if casts != weights else None,
        "reduce_dtype": dtype_name(reduces) if reduces != casts else None,
    }


def _fsdp1_handle(model: Any) -> Any:
    """Return the handle of the outermost flat parameter."""
    fsdp_modules = type(model).fsdp_modules(model)
    return next(module._handle for module in fsdp_modules if module._handle is not None)


def _has_root(model: Any) -> bool:
    """Whether FSDP1 has a flat parameter of the model itself next to others."""
    return model._handle is not None and len(fsdp1_parameters(model)) > 1


def is_in_fsdp1_root(model: Any, module: nn.Module) -> bool:
    """Whether a module is in the outermost flat parameter, and could be in another: tied weights have to share one."""
    if not _has_root(model):
        return False
    flat = model._handle.flat_param
    is_tied = any(module in (info.module, info.prim_module) for info in flat._shared_param_infos)
    return not is_tied and any(info.module is module for info in flat._param_infos)


def is_in_fsdp2_root(model: nn.Module, module: nn.Module) -> bool:
    infos = [param._module_info for group in _outermost(model) for param in group.fsdp_params]
    return len(set(fsdp_groups(model))) > 1 and any(info.module is module for info in infos)


def _outermost(model: nn.Module) -> list[Any]:
    """Return FSDP2's groups of the model itself, for parameters that no inner group wraps."""
    find_state = getattr(model, "_get_fsdp_state", None)
    return [] if find_state is None else fsdp_state_groups(find_state())
