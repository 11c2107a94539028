"""Faults that DeepSpeed, Accelerate and torch have fixed, put back into the installed releases.

Each is the code before one merged pull request. `Fault.plant` patches the process it is called in; call it in every
rank before the model is built. It raises if the text that it changes is not there, as in another release.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

_ENGINE = "deepspeed.runtime.engine"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_SCHEDULES = "deepspeed.runtime.lr_schedules"
_ZERO = "DeepSpeedZeroOptimizer"
_ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"
_PARALLEL_STYLES = "torch.distributed.tensor.parallel.style"
_DCP = "torch.distributed.checkpoint.state_dict"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fixed fault, and how to put it back."""

    name: str
    package: str  # deepspeed | accelerate | torch
    pull: int  # number of the pull request that fixed it
    fixed_in: str  # first release with the fix; "" if not known
    title: str  # what goes wrong
    features: tuple[str, ...]  # a combination that shows it
    shows: str  # where first: forward | local gradient | gradient | norm | update | weights | resume | crash
    plant: Callable[[], None]
    given: str = ""  # a name in SETTINGS: what the combination needs besides, also without the fault


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a fault needs besides its features, and how to set it."""

    title: str
    plant: Callable[[], None]


class NotThereError(RuntimeError):
    """The installed release does not hold the text to change."""


def replace_source(module: str | ModuleType, qualified_name: str, *changes: str) -> None:
    """Compile a function anew with each odd text of `changes` replaced by the next, wherever its module is known.

    Each replaced text must occur exactly once in the dedented source.
    """
    module = importlib.import_module(module) if isinstance(module, str) else module
    *owners, name = qualified_name.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    mangled = f"_{owners[-1]}{name}" if owners and name.startswith("__") and not name.endswith("__") else name
    original = inspect.getattr_static(owner, mangled)
    source = textwrap.dedent(inspect.getsource(_undecorated(getattr(owner, mangled))))
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        if source.count(old) != 1:
            raise NotThereError(f"{module.__name__}.{qualified_name} holds {source.count(old)} times: {old!r}")
        source = source.replace(old, new)
    scope: dict[str, object] = {}
    if owners:  # within a class, for private names; one more underscore leaves them as they are, and hides no class
        code = f"class _{owners[-1]}:\n{textwrap.indent(source, '    ')}"
        exec(compile(code, f"<replanted {qualified_name}>", "exec"), module.__dict__, scope)
        made = scope[f"_{owners[-1]}"].__dict__[mangled]
        _point_super_at(made, owner)
        setattr(owner, mangled, made)
        return
    exec(compile(source, f"<replanted {qualified_name}>", "exec"), module.__dict__, scope)
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, scope[name])


def _undecorated(function: Callable) -> Callable:
    """Return the function within a decorator that does not say what it wraps."""
    function = inspect.unwrap(function)
    plain = getattr(function, "__func__", function)
    if "func" in plain.__code__.co_freevars:
        return inspect.getclosurevars(plain).nonlocals["func"]
    return function


def _point_super_at(made: Any, owner: Any) -> None:
    """Let `super()` within a function refer to the class that it is put into."""
    function = _undecorated(getattr(made, "__func__", made))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "__class__" in cells:
        cells["__class__"].cell_contents = owner


def _replaced(module: str, qualified_name: str, *changes: str) -> Callable[[], None]:
    return lambda: replace_source(module, qualified_name, *changes)


def _all_of(*plants: Callable[[], None]) -> Callable[[], None]:
    def plant() -> None:
        for each in plants:
            each()

    return plant


def _scale_of_fp16_in_bf16() -> None:
    """Give stage 0's optimizer in bf16 the loss scale that fp16 begins with."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig

    if not {"use_grad_scaling", "cur_scale"} <= set(LossScaleConfig.__annotations__):
        raise NotThereError("LossScaleConfig holds another scale")
    initialize = LossScaleConfig.__init__

    def begin_at_the_scale_of_fp16(self, *arguments, **named) -> None:
        initialize(self, *arguments, **named)
        if not self.use_grad_scaling:
            self.cur_scale = 2.0**16

    LossScaleConfig.__init__ = begin_at_the_scale_of_fp16


_MUON_PER_MICRO_STEP = """
    if self.use_muon and not self.offload_optimizer:
        groups = {}
        start = 0
        for param in params_in_bucket:
            index, offset, _ = self.grad_position[self.get_param_id(param)]
            full = buffer_to_reduce[start:start + param.grad.numel()].view(param.grad.shape)
            start += param.grad.numel()
            if self.sub_groups_using_muon[index]:
                groups.setdefault(index, []).append((param, offset, full))
        for index, items in groups.items():
            self._muon_update_sub_group(index, items, self.communication_data_type)

    grad_partitions = []
    grad_offset_in_buffer = 0
"""

_EXPERTS_BY_THEIR_OWN_GROUP = """if bucket.has_moe_params:
                process_group = self.expert_dp_process_group[param.group_name] if is_moe_param(
                    param) else self.dp_process_group
                self.get_gradient_for_reduction(param).data.div_(dist.get_world_size(group=process_group))
"""


def _communicate_in_fp32() -> None:
    """Set communication_data_type, which fp32 gradients leave at the type of the weights, to fp32."""
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

    initialize = DeepSpeedConfig._initialize_params

    def initialize_with_fp32(self, *arguments) -> None:
        initialize(self, *arguments)
        self.communication_data_type = torch.float32

    DeepSpeedConfig._initialize_params = initialize_with_fp32


def _optimize_all_weights() -> None:
    """Give the optimizer frozen weights, too, as `model.parameters()` does."""
    from study.compositions import engines

    make_optimizer = engines.make_optimizer

    def make_with_frozen_weights(combination, model):
        optimizer = make_optimizer(combination, model)
        optimizer.param_groups[0]["params"] += [weight for weight in model.parameters() if not weight.requires_grad]
        return optimizer

    engines.make_optimizer = make_with_frozen_weights


SETTINGS: dict[str, Setting] = {
    "fp32_communication": Setting("communication_data_type is fp32", _communicate_in_fp32),
    "all_weights_in_the_optimizer": Setting("the optimizer has frozen weights, too", _optimize_all_weights),
}

_FAULTS = (
    Fault(
        "divided_twice",
        "deepspeed",
        8245,
        "0.19.6",
        "a gradient that comes through two outputs of the model is divided by the accumulation steps twice",
        ("zero1", "accumulation"),
        "local gradient",
        _all_of(
            _replaced(
                _ENGINE,
                "DeepSpeedEngine._backward_prologue_per_tensor",
                "    if graph_loss_scaled:\n        return grad\n",
                "",
            ),
            _replaced(
                _ENGINE,
                "DeepSpeedEngine.backward",
                "loss = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss\n",
                "loss = loss * 1\n",
            ),
        ),
    ),
    Fault(
        "last_micro_step_only",
        "deepspeed",
        7665,
        "0.18.3",
        "stage 2 keeps the gradient of the last micro-batch alone",
        ("zero2", "accumulation"),
        "gradient",
        _replaced(
            _STAGE_1_2,
            f"{_ZERO}.independent_gradient_partition_epilogue",
            "if i not in self.all_grad_tensors or self.all_grad_tensors[i] is None:",
            "if i not in self.averaged_gradients or self.averaged_gradients[i] is None:",
        ),
    ),
    Fault(
        "offload_drops_micro_steps",
        "deepspeed",
        7967,
        "0.19.0",
        "with the optimizer on the host the micro-batches between the first and the last are lost",
        ("zero2", "cpu_adam", "optimizer_cpu", "accumulation"),
        "gradient",
        _replaced(
            _STAGE_1_2,
            f"{_ZERO}.async_accumulate_grad_in_cpu_via_gpu",
            "        accumulate_gradients()\n    copy_gradients_to_cpu()\n",
            "        accumulate_gradients()\n    else:\n        copy_gradients_to_cpu()\n",
        ),
    ),
    Fault(
        "bf16_optimizer_leaks_last_micro_step",
        "deepspeed",
        7985,
        "0.19.0",
        "stage 1 in bf16 with fp32 accumulation reduces before it adds the last micro-batch",
        ("zero1", "fp32_accumulation"),
        "gradient",
        _replaced(
            _ENGINE,
            "DeepSpeedEngine._backward_epilogue",
            "    if bf16_optimizer:\n        self.optimizer.backward_epilogue()\n",
            "",
            "        if not bf16_optimizer:\n            self.optimizer.backward_epilogue()\n",
            "        self.optimizer.backward_epilogue()\n",
        ),
    ),
    Fault(
        "stage0_bf16_has_a_loss_scale",
        "deepspeed",
        7839,
        "0.18.6",
        "stage 0 in bf16 divides gradients by a loss scale that nothing was multiplied with",
        ("zero0", "bf16"),
        "update",
        _scale_of_fp16_in_bf16,
    ),
    Fault(
        "flat_buffer_keeps_its_graph",
        "deepspeed",
        7948,
        "0.19.0",
        "the flat buffer of weights belongs to autograd, which refuses to gather into it",
        ("zero2",),
        "crash",
        _replaced(
            _STAGE_1_2, f"{_ZERO}.__init__", "param_padding=param_padding).detach()", "param_padding=param_padding)"
        ),
    ),
    Fault(
        "cosine_warms_up_one_group",
        "deepspeed",
        7969,
        "0.19.0",
        "WarmupCosineLR begins one group at zero, and the others at their full learning rate",
        ("zero2", "muon", "warmup_cosine_lr"),
        "update",
        _replaced(_SCHEDULES, "WarmupCosineLR.get_lr", "return [0.0 for _ in self.org_lrs]", "return [0.0]"),
    ),
    Fault(
        "warmup_takes_the_first_group",
        "deepspeed",
        8171,
        "0.19.4",
        "WarmupLR without a maximum warms every group (muon_lr, adam_lr) up to the learning rate of the first",
        ("zero2", "config_muon", "warmup_lr"),
        "update",
        _replaced(
            _SCHEDULES,
            "WarmupLR.__init__",
            "[group['lr'] for group in self.optimizer.param_groups]",
            "[group['lr'] for group in self.optimizer.param_groups][0]",
        ),
    ),
    Fault(
        "warmup_ignores_the_optimizer",
        "deepspeed",
        7360,
        "0.17.2",
        "WarmupLR without a maximum warms up to 0.001, whatever the optimizer's learning rate",
        ("zero2", "warmup_lr"),
        "update",
        _replaced(
            _SCHEDULES,
            "WarmupLR.__init__",
            "[group['lr'] for group in self.optimizer.param_groups]",
            "0.001",
        ),
    ),
    Fault(
        "hpz_keeps_the_old_shard",
        "deepspeed",
        7707,
        "0.18.3",
        "after a checkpoint is loaded the secondary shards hold the weights from before",
        ("zero3", "hpz", "resume"),
        "resume",
        _all_of(
            _replaced(
                _PARTITION,
                "Init._partition",
                "(param, has_been_updated=has_been_updated)\n        self._par",
                "(param)\n        self._par",
            ),
            _replaced(_STAGE_3, f"{_ZERO_3}.checkpoint_event_epilogue", "    self.invalidate_secondary_tensor()\n", ""),
        ),
    ),
    Fault(
        "autocast_gathers_all_in_one_dtype",
        "deepspeed",
        7462,
        "0.17.5",
        "stage 3 under autocast gathers every weight once per dtype, all in the last weight's dtype",
        ("zero3", "autocast_modules"),
        "crash",
        _replaced(  # the assertion that refuses it came with a later change
            _PARTITION,
            "Init._convert_to_deepspeed_param",
            "_all_gather_dtype(dtype_params[dtype], world_size, rank_in_group, ds_process_group, dtype))",
            "_all_gather_dtype(params, world_size, rank_in_group, ds_process_group, allgather_dtype))",
            "assert all(\n            dtype == allgather_dtype",
            "assert all(\n            True",
        ),
    ),
    Fault(
        "large_gradient_under_another_dtype",
        "deepspeed",
        7660,
        "0.18.2",
        "a gradient larger than the bucket is noted under its weight's dtype, and sought under that of communication",
        ("zero2", "autocast_modules", "small_buckets"),
        "crash",
        _replaced(
            _STAGE_1_2,
            f"{_ZERO}.reduce_independent_p_g_buckets_and_remove_grads",
            "self.extra_large_param_to_reduce[comm_dtype] = param",
            "self.extra_large_param_to_reduce[param.dtype] = param",
        ),
    ),
    Fault(
        "large_gradient_of_no_bucket",
        "deepspeed",
        7376,
        "0.17.2",
        "a gradient larger than the bucket is sought in a list of the optimizer's that is not there",
        ("zero2", "small_buckets"),
        "crash",
        _replaced(
            _STAGE_1_2,
            f"{_ZERO}.reduce_ipg_grads",
            "_, _, param_id = bucket.params[0]",
            "_, _, param_id = self.params[0]",
        ),
    ),
    Fault(
        "stage0_bf16_saves_as_zero",
        "deepspeed",
        7786,
        "0.18.5",
        "a checkpoint of stage 0 in bf16 is written as one of ZeRO",
        ("zero0", "bf16", "resume"),
        "resume",
        _all_of(
            _replaced(
                _ENGINE,
                "DeepSpeedEngine._save_checkpoint",
                "zero_optimizer_state = self.zero_optimization()",
                "zero_optimizer_state = self.zero_optimization() or self.bfloat16_enabled()",
            ),
            _replaced(
                _ENGINE,
                "DeepSpeedEngine._load_checkpoint",
                "has_zero_optimizer_state = self.zero_optimization()",
                "has_zero_optimizer_state = self.zero_optimization() or self.bfloat16_enabled()",
            ),
        ),
    ),
    Fault(
        "frozen_weights_have_masters",
        "deepspeed",
        8029,
        "0.19.2",
        "stage 0 in 16 bits gives frozen weights of the optimizer's groups masters, which weight decay moves",
        ("zero0", "bf16", "frozen"),
        "weights",
        _all_of(
            *(
                _replaced(
                    f"deepspeed.runtime.fp16.{module}",
                    f"{owner}.__init__",
                    "trainable = [p for p in param_group['params'] if is_optimized_parameter(p)]",
                    "trainable = list(param_group['params'])",
                )
                for module, owner in (
                    ("fused_optimizer", "FP16_Optimizer"),
                    ("unfused_optimizer", "FP16_UnfusedOptimizer"),
                )
            )
        ),
        "all_weights_in_the_optimizer",
    ),
    Fault(
        "bf16_optimizer_has_no_loss_scaler",
        "deepspeed",
        7788,
        "0.18.5",
        "the loss is given to a loss scaler that the optimizer of bf16 does not have",
        ("zero1", "fp32_accumulation"),
        "crash",
        _replaced(
            "deepspeed.runtime.base_optimizer",
            "ZeROOptimizer.scale_if_loss",
            "        if hasattr(self, 'loss_scaler') and self.loss_scaler is not None:\n"
            "            return self.loss_scaler.scale_loss(value)\n",
            "        return self.loss_scaler.scale_loss(value)\n",
        ),
    ),
    Fault(
        "experts_divided_by_their_group",
        "deepspeed",
        6546,
        "0.15.4",
        "the gradients of experts are divided by the size of the expert group, and are too large by that of the others",
        ("zero2", "ep"),
        "gradient",
        _replaced(
            _STAGE_1_2,
            f"{_ZERO}.average_tensor",
            "if bucket.has_moe_params:\n"
            "                process_group = self.expert_dp_process_group[param.group_name] if is_moe_param(\n"
            "                    param) else self.dp_process_group\n",
            _EXPERTS_BY_THEIR_OWN_GROUP,
            "if self.gradient_average:",
            "if self.gradient_average and not self.ipg_buckets[communication_data_type].has_moe_params:",
        ),
    ),
    Fault(
        "muon_is_sgd",
        "deepspeed",
        8442,
        "0.19.7",
        "without ZeRO Muon steps along the plain gradient",
        ("zero0", "muon"),
        "update",
        _replaced("deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam.step", "if p.dim() < 2:", "if True:"),
    ),
    Fault(
        "muon_gathers_unlike_shapes",
        "deepspeed",
        8628,
        "0.19.8",
        "stage 3 gathers matrices as if of one shape, also where those of two ranks differ (three layers)",
        ("zero3", "muon", "no_reduce_scatter"),
        "crash",
        _replaced(
            _STAGE_3,
            f"{_ZERO_3}._muon_update_sub_group",
            "round_count == world_sz and all(g.shape == round_grads[0].shape for g in round_grads)",
            "round_count == world_sz",
        ),
    ),
    Fault(
        "muon_in_each_micro_step",
        "deepspeed",
        8600,
        "0.19.8",
        "stage 3 orthogonalizes the gradient of each micro-batch, and its momentum advances as often",
        ("zero3", "muon", "accumulation", "no_reduce_scatter"),
        "gradient",
        _all_of(
            _replaced(
                _STAGE_3,
                f"{_ZERO_3}.__avg_scatter_contiguous_grads",
                "\n    grad_partitions = []\n    grad_offset_in_buffer = 0\n",
                _MUON_PER_MICRO_STEP,
            ),
            _replaced(
                _STAGE_3, f"{_ZERO_3}._apply_muon_to_accumulated_grads", "if not self.use_muon:", "if self.use_muon:"
            ),
        ),
    ),
    Fault(
        "muon_misses_partitioned_matrices",
        "deepspeed",
        8438,
        "",
        "a model built within zero.Init shows Muon no matrix, and is trained by Adam alone",
        ("zero3", "muon"),
        "norm",
        _replaced(
            "deepspeed",
            "set_optimizer_flags",
            "if len(_layer_shape(p)) >= 2 and not any",
            "if p.ndim >= 2 and not any",
        ),
    ),
    Fault(
        "muon_takes_frozen_weights",
        "deepspeed",
        7869,
        "0.18.7",
        "Muon's groups hold frozen weights, which weight decay moves",
        ("zero0", "config_muon", "frozen"),
        "weights",
        _replaced(
            _ENGINE,
            "DeepSpeedEngine._muon_param_groups",
            'trainable = [p for p in group["params"] if p.requires_grad]',
            'trainable = list(group["params"])',
        ),
    ),
    Fault(
        "muon_orthogonalizes_half_reduced",
        "deepspeed",
        8141,
        "0.19.3",
        "Muon orthogonalizes a matrix that two partitions share (three layers), and a rank has reduced its own part",
        ("zero2", "muon"),
        "update",
        _replaced(
            _STAGE_1_2,
            f"{_ZERO}.average_tensor",
            'and getattr(param, "use_muon", False) and len(partition_ids) > 1 else None)',
            "and False else None)",
        ),
    ),
    Fault(
        "steps_in_every_micro_step",
        "accelerate",
        3630,
        "1.8.0",
        "Accelerate steps the engine within no_sync, which DeepSpeed refuses",
        ("zero1", "accelerate", "accumulation"),
        "crash",
        _replaced(
            "accelerate.utils.deepspeed",
            "DeepSpeedEngineWrapper.backward",
            "    self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)\n",
            "",
            "    if sync_gradients:\n",
            "    if True:\n",
        ),
    ),
    Fault(
        "no_sync_in_every_stage",
        "accelerate",
        3656,
        "1.9.0",
        "Accelerate enters DeepSpeed's no_sync, which stages 2 and 3 refuse",
        ("zero2", "accelerate", "accumulation"),
        "crash",
        _replaced(
            "accelerate.accelerator",
            "Accelerator.no_sync",
            "if self.distributed_type != DistributedType.DEEPSPEED or self.state.deepspeed_plugin.zero_stage < 2:",
            "if True:",
        ),
    ),
    Fault(
        "optimizer_loaded_by_position",
        "accelerate",
        3904,
        "1.13.0",
        "the sharded optimizer's state is saved under names and sought under numbers, so that it is not loaded",
        ("fsdp2", "accelerate", "resume"),
        "resume",
        _replaced(
            "accelerate.utils.fsdp_utils",
            "load_fsdp_optimizer",
            "optim_state = get_optimizer_state_dict(model, optimizer, options=sd_options)",
            "optim_state = optimizer.state_dict()",
        ),
    ),
    Fault(
        "names_are_dropped",
        "accelerate",
        3564,
        "1.7.0",
        "every parameter is dropped whose name has no prefix of torch.compile",
        ("fsdp2", "accelerate"),
        "crash",
        _replaced(
            "accelerate.utils.fsdp_utils",
            "fsdp2_canonicalize_names",
            'k.replace("_orig_mod.", "") if k.startswith("_orig_mod.") else k: v for k, v in named_params.items()',
            'k.replace("_orig_mod.", ""): v for k, v in named_params.items() if k.startswith("_orig_mod")',
        ),
    ),
    Fault(
        "stage0_bf16_loads_as_zero",
        "deepspeed",
        7586,
        "0.18.0",
        "a checkpoint of stage 0 in bf16 is loaded as one of ZeRO",
        ("zero0", "bf16", "resume"),
        "crash",
        _replaced(
            _ENGINE,
            "DeepSpeedEngine.load_checkpoint",
            "load_zero_checkpoint = load_path is not None and self.zero_optimization()",
            "load_zero_checkpoint = load_path is not None and (self.zero_optimization() or self.bfloat16_enabled())",
        ),
    ),
    Fault(
        "reduced_in_the_weights_dtype",
        "deepspeed",
        8056,
        "0.19.2",
        "stage 3 reduces in fp32 (communication_data_type), and rounds to bf16 before it accumulates in fp32",
        ("zero3", "fp32_accumulation"),
        "gradient",
        _replaced(
            _STAGE_3,
            f"{_ZERO_3}.__avg_scatter_grads",
            "    if communication_data_type != self.gradient_accumulation_dtype:\n",
            "    if communication_data_type != self.dtype:\n",
            "g.to(self.gradient_accumulation_dtype)",
            "g.to(self.dtype)",
        ),
        "fp32_communication",
    ),
    Fault(
        "accumulation_of_the_configuration",
        "accelerate",
        3632,
        "1.8.0",
        "Accelerate, without accumulation steps of its argument, ignores those of DeepSpeed's configuration",
        ("zero2", "accelerate", "config_accumulation"),
        "forward",
        _replaced(
            "accelerate.accelerator",
            "Accelerator._prepare_deepspeed",
            "self.gradient_accumulation_steps = deepspeed_gradient_accumulation_steps",
            "pass",
        ),
    ),
    Fault(
        "one_mesh_dimension_is_loaded",
        "accelerate",
        3740,
        "1.11.0",
        "weights that one rank has loaded (cpu_ram_efficient_loading) are sent along a mesh of two dimensions",
        ("hsdp", "accelerate", "ram_efficient"),
        "crash",
        _replaced(
            "accelerate.utils.fsdp_utils",
            "fsdp2_load_full_state_dict",
            "dist.broadcast(full_param, src=0, group=dist.group.WORLD)",
            "dist.broadcast(full_param, src=0, group=device_mesh.get_group())",
            "dist.broadcast(full_tensor, src=0, group=dist.group.WORLD)",
            "dist.broadcast(full_tensor, src=0, group=device_mesh.get_group())",
        ),
    ),
    Fault(
        "loading_decays_the_weights",
        "torch",
        125708,
        "",
        "loading the optimizer's state steps it once, which decays the loaded weights",
        ("fsdp2", "accelerate", "resume"),
        "resume",
        _replaced(
            _DCP,
            "_init_optim_state",
            "torch.tensor(0.0)\n"
            '                if isinstance(param_group["lr"], torch.Tensor)\n'
            "                else 0.0\n",
            'param_group["lr"]\n',
        ),
    ),
    Fault(
        "tied_weights_have_two_states",
        "torch",
        128685,
        "",
        "the optimizer's state of a tied weight is sought under both of its names",
        ("fsdp2", "tied", "resume"),
        "crash",
        _replaced(_DCP, "_split_optim_state_dict", "if fqn in info.shared_params_mapping:", "if False:"),
    ),
    Fault(
        "parallel_layers_are_never_frozen",
        "torch",
        171709,
        "2.11.0",
        "frozen layers that tensor parallelism divides have gradients, and are trained",
        ("fsdp2", "tp", "frozen"),
        "weights",
        _all_of(
            _replaced(
                _PARALLEL_STYLES,
                "ColwiseParallel._partition_linear_fn",
                "            requires_grad=param.requires_grad,\n",
                "",
            ),
            _replaced(
                _PARALLEL_STYLES,
                "RowwiseParallel._partition_linear_fn",
                "            requires_grad=module.weight.requires_grad,\n",
                "",
                "                requires_grad=module.bias.requires_grad,\n",
                "",
            ),
        ),
    ),
    Fault(
        "checkpoints_by_sequence_rank",
        "deepspeed",
        8226,
        "0.19.5",
        "ranks that share a sequence seek a checkpoint's weights under their own number, which no file has",
        ("zero3", "ulysses", "resume"),
        "crash",
        _replaced(
            _ENGINE,
            "DeepSpeedEngine._configure_distributed_model",
            "    if self.mp_world_size > 1:\n        self.checkpoint_mp_rank",
            "    if self.mpu is not None:\n        self.checkpoint_mp_rank",
        ),
    ),
    Fault(
        "ulysses_takes_adapters_for_a_path",
        "deepspeed",
        7737,
        "0.18.4",
        "Ulysses takes a model with adapters for the path of a model",
        ("zero3", "ulysses", "lora"),
        "crash",
        _replaced(
            "deepspeed.runtime.sequence_parallel.ulysses_sp",
            "UlyssesSPAttentionHF.register_with_transformers",
            'hasattr(model_name_or_path, "config") or isinstance(model_name_or_path, PreTrainedModel)',
            "isinstance(model_name_or_path, PreTrainedModel)",
        ),
    ),
    Fault(
        "context_parallelism_is_not_prepared",
        "accelerate",
        3858,
        "1.13.0",
        "Accelerate leaves context parallelism to DeepSpeed, which sp_backend names by default",
        ("fsdp2", "accelerate", "cp"),
        "crash",
        _replaced(
            "accelerate.accelerator",
            "Accelerator._prepare_cp",
            "    from torch.distributed.tensor.experimental import context_parallel\n",
            '    if self.parallelism_config.sp_backend == "deepspeed":\n'
            "        return args\n"
            "    from torch.distributed.tensor.experimental import context_parallel\n",
        ),
    ),
)


FAULTS: dict[str, Fault] = {fault.name: fault for fault in _FAULTS}
