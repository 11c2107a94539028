"""The private names of DeepSpeed that meters and receipts read are in the installed release, or known to be older."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from study.engine.audit import read_deepspeed
from study.engine.model_parallel import read_hpz_replicas
from study.metrics import inventory, state
from study.receipt import host_traffic, live_engine, obstacles, plain_optimizer, update_hooks, whole_tensors, wrong_uses

# Objects of DeepSpeed, by the variables that have them.
OBJECTS = {"engine", "zero", "wrapper", "swapper", "p", "parameter", "info", "section", "model", "registry", "handle"}
READERS: tuple[Any, ...] = (
    inventory,
    state,
    host_traffic,
    obstacles,
    plain_optimizer,
    update_hooks,
    whole_tensors.DeepSpeedTensors,
    live_engine.find_groups,
    live_engine.find_device,
    live_engine.read_facts,
    wrong_uses.check_optimizer,
    read_deepspeed,
    read_hpz_replicas,
)
# Names of the buckets before 0.17.2: one of stages 1 and 2, and one of stage 3.
OLDER = {"ipg_buffer", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"}
# Of objects that are not DeepSpeed's: torch's, with FSDP's, and those of bitsandbytes.
OTHERS = (torch.Tensor, torch.nn.Module, torch.nn.parallel.DistributedDataParallel, dict, list)
NOT_DEEPSPEEDS = re.compile(
    r"_?fsdp|_orig_mod|quant_state|_sharded|_unsharded|_local_|_handle|_full_p|_mp_shard|_saved|_use_orig_params"
    r"|flat_param|gradient_as_bucket_view|clip_grad_norm_"
)


def list_names(reader: Callable[..., object]) -> Iterator[str]:
    """Yield the attributes that a function or module reads of DeepSpeed's objects, also by getattr and hasattr."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(reader)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OBJECTS:
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            target, name = node.args[:2]
            if isinstance(target, ast.Name) and target.id in OBJECTS and isinstance(name, ast.Constant):
                yield str(name.value)
        # Names that a loop passes to getattr.
        if isinstance(node, ast.Tuple) and len(node.elts) > 1:
            values = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            yield from (value for value in values if isinstance(value, str) and "_" in value)


def private_names() -> set[str]:
    names = {name for reader in READERS for name in list_names(reader)}
    # Of claims.
    names -= {state.GATHERED, state.MODEL_BUFFERS, state.REDUCER_BUCKETS}
    return {
        name for name in names if not any(hasattr(kind, name) for kind in OTHERS) and not NOT_DEEPSPEEDS.match(name)
    }


_USES = (re.compile(r"\.(\w+)"), re.compile(r"def (\w+)"), re.compile(r"['\"](\w+)"), re.compile(r"\n    (\w+)"))


def read_source(package: Path) -> set[str]:
    """Return the attributes, methods, fields and quoted words in the source of the engine."""
    files = [*(package / "runtime").rglob("*.py"), *(package / "utils").glob("*.py")]
    # Methods of the handles of asynchronous I/O.
    files += (package / "ops" / "csrc" / "aio" / "py_lib").glob("py_ds_aio.cpp")
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return {word for text in texts for pattern in _USES for word in pattern.findall(text)}


def test_each_private_name_is_in_the_installed_release() -> None:
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    names = private_names()
    assert {"bit16_groups_flat", "ds_tensor", "get_swap_paths", "ipg_buckets", "sync_pread"} <= names
    assert names - read_source(Path(spec.origin).parent) == OLDER


def test_files_of_a_swapped_optimizer_are_found_under_both_names() -> None:
    swap_info = pytest.importorskip("deepspeed.runtime.swap_tensor.optimizer_utils").OptimizerStateSwapInfo
    assert hasattr(swap_info, "get_swap_paths")
    # As in the source of 0.14.5 and 0.15.4.
    assert state._swap_paths(SimpleNamespace(swap_paths=["a.tensor.swp"])) == ["a.tensor.swp"]
