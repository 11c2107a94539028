"""One rank of a combination: the engine as a user would set it up, and its figures, step by step."""

from __future__ import annotations

import abc
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from study.compositions import tiny_model
from study.compositions.experts import plain_expert_name, replace_experts
from study.compositions.features import GROUP_SIZE, Combination
from study.compositions.groups import ATTENTION, ContextRing, UlyssesGroup, divide_layers, make_group
from study.compositions.trace import FigureTrace, LocalGradients, Place, plain_name, watch_modules

if TYPE_CHECKING:
    import torch

# Half a unit in the last place of a type.
HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}
# Elements of a small bucket: fewer than a matrix has.
_SMALL_BUCKET = 700


def run_rank(combination: Combination, rank: int, folder: Path, seed: int = 0) -> FigureTrace:
    """Train the combination as one rank of the process group that the environment describes."""
    return make_loop(combination, rank, folder, seed=seed).train()


def make_loop(
    combination: Combination, rank: int, folder: Path, size: tiny_model.DecoderSize = tiny_model.TINY, seed: int = 0
) -> Loop:
    """Return the combination's training on this rank, not started."""
    import torch

    torch.set_num_threads(1)
    if combination.has("muon", "config_muon"):
        _run_muon_in_fp32()
    return _choose_loop(combination)(combination, rank, folder, size, seed)


def _choose_loop(combination: Combination) -> type[Loop]:
    if combination.has("accelerate"):
        return AccelerateDeepSpeedLoop if combination.uses_deepspeed else AccelerateTorchLoop
    return DeepSpeedLoop if combination.uses_deepspeed else TorchLoop


def _run_muon_in_fp32() -> None:
    """Replace Muon's 16-bit iteration, which makes 1e-3 of an update out of a gradient's last bit."""
    import torch
    from deepspeed.runtime.zero.muon import original_muon

    if hasattr(original_muon, "ns_compute_dtype"):
        original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32


class Loop(abc.ABC):
    """A training of a few steps that notes the figures of the reference."""

    model: torch.nn.Module

    def __init__(self, combination: Combination, rank: int, folder: Path, size: tiny_model.DecoderSize, seed: int):
        self.combination, self.rank, self.folder, self.size = combination, rank, folder, size
        # Of the initial weights and the samples.
        self.seed = seed
        self.group = make_group(combination, rank)
        self.trace = FigureTrace()
        # Off where only the cost of a step counts: reading a figure may gather it.
        self.notes_figures = True
        self._noting: int | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._local_gradients: LocalGradients | None = None

    def train(self) -> FigureTrace:
        self.start(self.seed)
        for step in range(1, tiny_model.STEPS + 1):
            self._before = self.read("master")
            self.train_step(step)
            if self.combination.has("evaluation"):
                self._evaluate(step)
            if self.combination.has("resume") and step == tiny_model.RESUMED_AFTER:
                self._resume(step)
        return self.trace

    def _resume(self, step: int) -> None:
        self._note_all(step, "saved master", self.read("master"))
        self.save()
        # Other weights, which the checkpoint replaces.
        self.start(self.seed + 1)
        self.load()
        self._note_all(step, "resumed", self.read("weight"))
        self._note_all(step, "resumed master", self.read("master"))

    def _note_all(self, step: int, stage: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.trace.note(Place(step, stage, name), tensor)

    def start(self, seed: int) -> None:
        """Make new objects; the seed is that of the initial weights."""
        self.discard()
        plain = self.make_model(seed)
        self._enable_checkpointing(plain)
        if self.combination.has("ep"):
            replace_experts(plain, self.rank)
        # On the plain modules, which every wrapper calls.
        watch_modules(plain, self.trace, self._forward_place, self.group.full_output)
        if self.notes_figures and self.combination.has_local_gradients:
            is_fsdp = self.combination.has("fsdp1", "fsdp2", "hsdp")
            self._local_gradients = LocalGradients(plain, replaces_weights=is_fsdp)
        self.group.prepare(plain)
        self.set_up(plain)

    def make_model(self, seed: int) -> torch.nn.Module:
        """Return the model that the engine gets, with the first weights of the seed."""
        return tiny_model.make_model(self.combination, seed, self.size)

    def _enable_checkpointing(self, model: Any) -> None:
        if self.combination.has("checkpointing", "reentrant"):
            reentrant = self.combination.has("reentrant")
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant and self.combination.has("frozen", "lora"):
                # Reentrant checkpointing needs an input with a gradient.
                model.enable_input_require_grads()

    def _forward_place(self, module: str) -> Place | None:
        return None if self._noting is None else Place(self._noting, "forward", module)

    def batch(self, step: int, micro_step: int) -> dict[str, torch.Tensor]:
        combination = self.combination
        data_rank = combination.data_rank(self.rank)
        return tiny_model.make_batch(
            combination, step, micro_step, data_rank, combination.data_ranks, self.size, self.seed
        )

    @contextlib.contextmanager
    def loss(self, step: int, micro_step: int) -> Iterator[torch.Tensor]:
        """Yield the loss of a micro-batch, with its figures noted, for the backward pass within the block."""
        with self.group.divided(self.batch(step, micro_step)) as inputs:
            self._noting = step if self.notes_figures and micro_step == 0 else None
            loss = self.forward(inputs)
            self._noting = None
            if self.notes_figures:
                self.trace.note(Place(step, "loss", f"micro-batch {micro_step + 1}"), self.group.full_loss(loss))
            yield loss

    def note_gradients(self, step: int) -> None:
        if not self.notes_figures:
            return
        if self._local_gradients is not None:
            sums = self._local_gradients.take()
            self._note_all(step, "local gradient", {name: total / self.loss_scale for name, total in sums.items()})
        self._note_all(step, "gradient", self.read("gradient"))
        self.trace.note(Place(step, "reduction rounding"), HALF_ULP[self.reduction_type])

    @property
    def loss_scale(self) -> float:
        """The factor by which gradients are too large up to the engine's step."""
        return tiny_model.LOSS_SCALE if self.combination.has("fp16") else 1.0

    def note_update(self, step: int, norm: torch.Tensor | float | None) -> None:
        if not self.notes_figures:
            return
        # At DeepSpeed's stages this norm is that of Muon's updates, and clipping judges by it.
        if not (self.combination.has("muon", "config_muon") and self.combination.stage):
            self.trace.note(Place(step, "norm"), norm)
        for name, master in self.read("master").items():
            self.trace.note(Place(step, "update", name), master - self._before[name])
        self._note_all(step, "weight", self.read("weight"))

    def _evaluate(self, step: int) -> None:
        import torch

        self.model.eval()
        with torch.no_grad(), self.group.divided(self.batch(0, step)) as inputs:
            self.trace.note(Place(step, "evaluation"), self.group.full_loss(self.forward(inputs)))
        self.model.train()

    def discard(self) -> None:  # noqa: B027
        """Forget the objects of before, if there are any."""

    @abc.abstractmethod
    def set_up(self, plain: torch.nn.Module) -> None:
        """Make the engine around a plain model."""

    @abc.abstractmethod
    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""

    @abc.abstractmethod
    def train_step(self, step: int) -> None:
        """Train one optimizer step; call note_gradients before the update and note_update after it."""

    @abc.abstractmethod
    def read(self, kind: str) -> dict[str, torch.Tensor]:
        """Return whole tensors by plain name: of kind gradient, master (trained weights in fp32) or weight."""

    @property
    @abc.abstractmethod
    def reduction_type(self) -> str:
        """The coarsest type in which ranks add gradients."""

    @abc.abstractmethod
    def save(self) -> None: ...

    @abc.abstractmethod
    def load(self) -> None: ...


class DeepSpeedLoop(Loop):
    """The loop of DeepSpeed's own guide: initialize, forward, backward, step."""

    engine: Any

    def discard(self) -> None:
        if hasattr(self, "engine"):
            self.engine.destroy()

    def make_model(self, seed: int) -> torch.nn.Module:
        if not self.combination.has("zero_init"):
            return super().make_model(seed)
        from transformers.integrations import HfDeepSpeedConfig

        # transformers opens zero.Init with these settings as long as this object exists.
        self._config_of_transformers = HfDeepSpeedConfig(deepspeed_settings(self.combination, self.folder, self.size))
        return tiny_model.make_model(self.combination, seed, self.size, build_under_zero_init)

    def set_up(self, plain: torch.nn.Module) -> None:
        import deepspeed

        # ZenFlow takes no optimizer of the user's.
        names_optimizer = self.combination.has("zenflow", "config_muon")
        optimizer = None if names_optimizer else make_optimizer(self.combination, plain)
        schedule = tiny_model.make_schedule if self.combination.has("schedule") else None
        self.engine, *_ = deepspeed.initialize(
            model=plain,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=deepspeed_settings(self.combination, self.folder, self.size),
            mpu=self.group.mpu if isinstance(self.group, UlyssesGroup) else None,
        )
        if self.combination.has("deepcompile"):
            # Without this call the setting has no effect.
            self.engine.compile()
        self.model = self.engine

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**batch).loss
        return loss

    def train_step(self, step: int) -> None:
        if self.combination.has("no_sync"):
            self._train_without_sync(step)
            return
        last = self.combination.micro_steps - 1
        for micro_step in range(last + 1):
            with self.loss(step, micro_step) as loss:
                self.engine.backward(loss)
            if micro_step == last:
                self.note_gradients(step)
            self.engine.step()
        self.note_update(step, self.engine.get_global_grad_norm())

    def _train_without_sync(self, step: int) -> None:
        """DeepSpeed divides nothing inside no_sync, so the loop divides."""
        last = self.combination.micro_steps - 1
        for micro_step in range(last + 1):
            with (
                self.engine.no_sync() if micro_step < last else contextlib.nullcontext(),
                self.loss(step, micro_step) as loss,
            ):
                self.engine.backward(loss / (last + 1))
        self.note_gradients(step)
        self.engine.step()
        self.note_update(step, self.engine.get_global_grad_norm())

    def read(self, kind: str) -> dict[str, torch.Tensor]:
        names = {
            plain_expert_name(plain_name(name), self.rank): weight
            for name, weight in self.engine.module.named_parameters()
        }
        if kind == "weight":
            return {name: self.group.full_weight(name, self._undivided(weight)) for name, weight in names.items()}
        trained = {name: weight for name, weight in names.items() if weight.requires_grad}
        read = self._gradient if kind == "gradient" else self._master
        tensors = {name: read(weight) for name, weight in trained.items()}
        return {name: self.group.full_weight(name, tensor) for name, tensor in tensors.items() if tensor is not None}

    @property
    def reduction_type(self) -> str:
        if self.combination.has("autocast", "autocast_modules"):
            return "bfloat16"
        return str(self.engine.communication_data_type).removeprefix("torch.")

    def _undivided(self, weight: torch.nn.Parameter) -> torch.Tensor:
        import deepspeed

        if not hasattr(weight, "ds_id"):
            return weight.detach().clone()
        with deepspeed.zero.GatheredParameters([weight]):
            full = weight.detach().clone()
        # ZenFlow keeps transposed matrices at stage 3, and turns them before a layer computes.
        return full.t() if self.combination.has("zenflow") and full.dim() == 2 else full

    def _gradient(self, weight: torch.nn.Parameter) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        if getattr(weight, "use_muon", False) and not self._has_gradients_of_muon:
            # DeepSpeed has replaced it by Muon's update.
            return None
        if self.combination.has("zenflow"):
            # DeepSpeed's function reads a buffer that ZenFlow does not fill.
            return None
        if self.combination.has("round_robin"):
            # DeepSpeed's function returns the gradient of another weight (deepspeed/utils/tensor_fragment.py:119).
            return None
        gradient = safe_get_full_grad(weight)
        if gradient is None:
            return None
        return gradient.detach().float() / self.loss_scale

    @property
    def _has_gradients_of_muon(self) -> bool:
        """Whether Muon takes gradients in the engine's step: without ZeRO, and at stage 3 since 0.19.8."""
        return not self.combination.stage or hasattr(self.engine.optimizer, "_apply_muon_to_accumulated_grads")

    def _master(self, weight: torch.nn.Parameter) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_full_fp32_param

        if self.combination.has("round_robin", "zenflow"):
            # This function, too, returns another weight; of ZenFlow it cuts a matrix from a buffer of transposed ones.
            return self._undivided(weight) if self.combination.has("fp32", "autocast", "autocast_modules") else None
        master: torch.Tensor | None = safe_get_full_fp32_param(weight)
        if master is None:
            master = self._master_of_stage_0(weight)
        return None if master is None else master.detach().float().clone()

    def _master_of_stage_0(self, weight: torch.nn.Parameter) -> torch.Tensor | None:
        optimizer = self.engine.optimizer
        masters, weights = getattr(optimizer, "fp32_groups", None), getattr(optimizer, "fp16_groups", None)
        if masters is None or weights is None:
            return weight
        pairs = zip((w for group in weights for w in group), (m for group in masters for m in group), strict=True)
        return next((master for candidate, master in pairs if candidate is weight), None)

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.folder / "checkpoint"))

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.folder / "checkpoint"))


def _fsdp_reduction_type(combination: Combination) -> str:
    """Return the coarser of the types in which FSDP adds micro-batches and reduces.

    It reduces in the type of the weights that compute, unless reduce_dtype is set; Accelerate's mixed precision is a
    policy of FSDP with 16-bit weights. FSDP1 adds the micro-batches in the type of these weights, whatever reduce_dtype
    is (_post_backward_hook in torch's _runtime_utils.py).
    """
    adds_in_16_bits = combination.has("fsdp1") and combination.has("fp32_accumulation") and combination.micro_steps > 1
    return "bfloat16" if combination.has("bf16", "autocast") or adds_in_16_bits else "float32"


class TorchLoop(Loop):
    """torch's own DDP, FSDP1, FSDP2 or a mesh of it."""

    def set_up(self, plain: torch.nn.Module) -> None:
        import torch

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        self.model = self._wrapped(plain)
        self.optimizer = make_optimizer(self.combination, self.model)
        self.schedule = tiny_model.make_schedule(self.optimizer) if self.combination.has("schedule") else None

    def _wrapped(self, plain: Any) -> Any:
        import torch

        if self.combination.has("ddp"):
            return torch.nn.parallel.DistributedDataParallel(plain)
        blocks = list_blocks(plain)
        if self.combination.has("fsdp1"):
            from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
            from torch.distributed.fsdp.wrap import ModuleWrapPolicy

            return FullyShardedDataParallel(
                plain,
                use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({type(blocks[0])}),
                mixed_precision=fsdp1_precision(self.combination),
                device_id=torch.device("cpu"),
                cpu_offload=CPUOffload(self.combination.has("all_cpu")),
            )
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        mesh = self._mesh
        if self.combination.has("tp"):
            divide_layers(blocks, mesh["tp"])
            mesh = mesh["shard"]
        if isinstance(self.group, ContextRing):
            self.group.mesh = mesh
            mesh = mesh["shard", "cp"]._flatten("shard_cp")
        offload = CPUOffloadPolicy(pin_memory=False) if self.combination.has("all_cpu") else OffloadPolicy()
        shard = functools.partial(
            fully_shard,
            mesh=mesh,
            offload_policy=offload,
            mp_policy=fsdp2_precision(self.combination),
        )
        for block in blocks:
            shard(block)
        return shard(plain)

    @functools.cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        level = self.combination.level("parallelism")
        if self.combination.has("hsdp"):
            return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if self.combination.shares_samples:
            return init_device_mesh("cpu", (self.combination.data_ranks, GROUP_SIZE), mesh_dim_names=("shard", level))
        return init_device_mesh("cpu", (self.combination.ranks,), mesh_dim_names=("shard",))

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        with torch.autocast("cpu", torch.bfloat16, enabled=self.combination.has("autocast")):
            loss: torch.Tensor = self.model(**batch).loss
        return loss

    def train_step(self, step: int) -> None:
        import torch

        micro_steps = self.combination.micro_steps
        for micro_step in range(micro_steps):
            is_synchronized = micro_step == micro_steps - 1 or not self.combination.has("no_sync")
            with self._synchronized(is_synchronized), self.loss(step, micro_step) as loss:
                (loss / micro_steps).backward()
        self.note_gradients(step)
        norm = None
        if self.combination.has("clipping"):
            if self.combination.has("fsdp1"):
                norm = cast(Any, self.model).clip_grad_norm_(tiny_model.MAX_NORM)
            else:
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), tiny_model.MAX_NORM)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        self.note_update(step, gather_tensor(norm) if norm is not None else None)

    @contextlib.contextmanager
    def _synchronized(self, is_synchronized: bool) -> Iterator[None]:
        model: Any = self.model
        if self.combination.has("fsdp2", "hsdp"):
            model.set_requires_gradient_sync(is_synchronized)
            yield
        else:
            with contextlib.nullcontext() if is_synchronized else model.no_sync():
                yield

    def read(self, kind: str) -> dict[str, torch.Tensor]:
        return read_torch(self.model, kind, self.combination)

    @property
    def reduction_type(self) -> str:
        return _fsdp_reduction_type(self.combination)

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        weights, states = get_state_dict(self.model, self.optimizer)
        save({"weights": weights, "states": states}, checkpoint_id=self.folder / "checkpoint")
        self._saved_schedule = self.schedule.state_dict() if self.schedule is not None else None

    def load(self) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        weights, states = get_state_dict(self.model, self.optimizer)
        load({"weights": weights, "states": states}, checkpoint_id=self.folder / "checkpoint")
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=states)
        if self.schedule is not None:
            self.schedule.load_state_dict(self._saved_schedule)


class _AccelerateLoop(Loop):
    """The loop of Accelerate's guide, over whichever engine its settings name."""

    accelerator: Any

    def set_up(self, plain: torch.nn.Module) -> None:
        if not hasattr(self, "accelerator"):
            self.accelerator = self.make_accelerator()
        optimizer = make_optimizer(self.combination, plain)
        parts = [plain, optimizer]
        if self.combination.has("schedule"):
            parts.append(tiny_model.make_schedule(optimizer))
        self.model, self.optimizer, *rest = self.accelerator.prepare(*parts)
        self.schedule = rest[0] if rest else None

    def discard(self) -> None:
        if hasattr(self, "accelerator"):
            # Otherwise the next checkpoint would be loaded into the old model, too.
            self.accelerator.free_memory()

    @abc.abstractmethod
    def make_accelerator(self) -> Any: ...

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def save(self) -> None:
        self.accelerator.save_state(str(self.folder / "checkpoint"))

    def load(self) -> None:
        self.accelerator.load_state(str(self.folder / "checkpoint"))


class AccelerateTorchLoop(_AccelerateLoop):
    """DDP or FSDP under Accelerate."""

    def make_accelerator(self) -> Any:
        import torch
        from accelerate import Accelerator, DistributedType, PartialState

        arguments: dict[str, Any] = {}
        state = PartialState(cpu=True)
        if not self.combination.has("ddp"):
            # Without a GPU Accelerate turns only this type into FSDP.
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            arguments["fsdp_plugin"] = self._fsdp_plugin()
        if self.combination.has("hsdp"):
            from accelerate import ParallelismConfig

            arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        if self.combination.has("cp"):
            from accelerate import ParallelismConfig

            arguments["parallelism_config"] = ParallelismConfig(
                dp_shard_size=self.combination.data_ranks, cp_size=GROUP_SIZE
            )
        mixed = "bf16" if self.combination.has("autocast", "bf16", "fp32_accumulation") else "no"
        # Its index would not be that of FSDP1.
        state._shared_state["device"] = torch.device("cpu")
        accelerator = Accelerator(
            mixed_precision=mixed,
            gradient_accumulation_steps=self.combination.micro_steps,
            **arguments,
        )
        torch.set_num_threads(1)
        if isinstance(self.group, ContextRing):
            self.group.accelerator = accelerator
        return accelerator

    def _fsdp_plugin(self) -> Any:
        from accelerate import FullyShardedDataParallelPlugin

        arguments: dict[str, Any] = {}
        fsdp1 = self.combination.has("fsdp1")
        if fsdp1:
            # Otherwise FSDP1 shows no gradient of a parameter.
            arguments["use_orig_params"] = True
        if self.combination.has("fp32_accumulation"):
            policy = fsdp1_precision(self.combination) if fsdp1 else fsdp2_precision(self.combination)
            arguments["mixed_precision_policy"] = policy
        return FullyShardedDataParallelPlugin(
            fsdp_version=1 if fsdp1 else 2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["OPTDecoderLayer"],
            cpu_offload=self.combination.has("all_cpu"),
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=self.combination.has("ram_efficient"),
            **arguments,
        )

    def train_step(self, step: int) -> None:
        for micro_step in range(self.combination.micro_steps):
            with self.accelerator.accumulate(self.model):
                with self.loss(step, micro_step) as loss:
                    self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients:
                    self.note_gradients(step)
                    if self.combination.has("clipping"):
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), tiny_model.MAX_NORM)
                self.optimizer.step()
                if self.schedule is not None:
                    self.schedule.step()
                self.optimizer.zero_grad()
        self.note_update(step, gather_tensor(norm) if norm is not None else None)

    def read(self, kind: str) -> dict[str, torch.Tensor]:
        return read_torch(self.model, kind, self.combination)

    @property
    def reduction_type(self) -> str:
        return _fsdp_reduction_type(self.combination)


class AccelerateDeepSpeedLoop(_AccelerateLoop):
    """DeepSpeed under Accelerate, whose backward steps the engine."""

    def make_model(self, seed: int) -> torch.nn.Module:
        if not self.combination.has("zero_init"):
            return super().make_model(seed)
        if not hasattr(self, "accelerator"):
            # Its plugin gives transformers the settings of zero.Init.
            self.accelerator = self.make_accelerator()
        return tiny_model.make_model(self.combination, seed, self.size, build_under_zero_init)

    def make_accelerator(self) -> Any:
        import deepspeed
        from accelerate import Accelerator, DeepSpeedPlugin, PartialState

        PartialState(cpu=True)
        # On a GPU Accelerate does this.
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        settings = deepspeed_settings(self.combination, self.folder, self.size)
        accumulation: dict[str, Any] = {"gradient_accumulation_steps": self.combination.micro_steps}
        if self.combination.has("config_accumulation"):
            accumulation = {}
        arguments: dict[str, Any] = {}
        if self.combination.has("ulysses"):
            from accelerate import ParallelismConfig
            from accelerate.utils import DeepSpeedSequenceParallelConfig

            arguments["parallelism_config"] = ParallelismConfig(
                dp_shard_size=self.combination.data_ranks,
                sp_size=GROUP_SIZE,
                sp_backend="deepspeed",
                sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation=ATTENTION),
            )
        if self.combination.has("deepcompile"):
            # Accelerate compiles the engine for a backend, and DeepSpeed's setting makes DeepCompile of it.
            arguments["dynamo_backend"] = "inductor"
        return Accelerator(
            mixed_precision={"bf16": "bf16", "fp32_accumulation": "bf16", "fp16": "fp16"}.get(
                self.combination.level("precision"), "no"
            ),
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
            **accumulation,
            **arguments,
        )

    def train_step(self, step: int) -> None:
        # Accelerate's backward takes the engine's step: the gradients are read in between.
        engine: Any = self.model
        engine_step: Callable[..., Any] = type(engine).step.__get__(engine)

        def step_after_noting(*arguments: Any, **keywords: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self.note_gradients(step)
            return engine_step(*arguments, **keywords)

        if self.notes_figures:
            engine.step = step_after_noting
        for micro_step in range(self.combination.micro_steps):
            with self.accelerator.accumulate(self.model):
                with self.loss(step, micro_step) as loss:
                    self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.combination.has("clipping"):
                    self.accelerator.clip_grad_norm_(self.model.parameters(), tiny_model.MAX_NORM)
                self.optimizer.step()
                if self.schedule is not None:
                    self.schedule.step()
                self.optimizer.zero_grad()
        self.note_update(step, engine.get_global_grad_norm())

    @property
    def engine(self) -> Any:
        return self.model

    read = DeepSpeedLoop.read
    reduction_type = DeepSpeedLoop.reduction_type
    _has_gradients_of_muon = DeepSpeedLoop._has_gradients_of_muon
    _undivided = DeepSpeedLoop._undivided
    _gradient = DeepSpeedLoop._gradient
    _master = DeepSpeedLoop._master
    _master_of_stage_0 = DeepSpeedLoop._master_of_stage_0


def build_under_zero_init(plain: Any) -> torch.nn.Module:
    """Return the model as transformers builds it for stage 3, with the weights of a plain one in the ranks' partitions.

    Adapters, which PEFT adds later, are whole up to deepspeed.initialize.
    """
    # A plain dictionary: transformers sets the attribute _metadata of torch's on one, which takes no attributes.
    weights = dict(plain.state_dict())
    model: torch.nn.Module = type(plain).from_pretrained(None, config=plain.config, state_dict=weights)
    check_partitions(model)
    return model


def check_partitions(model: torch.nn.Module) -> None:
    """Raise RuntimeError if a weight is not a partition of zero.Init."""
    undivided = [name for name, weight in model.named_parameters() if not hasattr(weight, "ds_id") or weight.numel()]
    if undivided:
        raise RuntimeError(f"zero.Init left {len(undivided)} weights whole, such as {undivided[0]}")


def deepspeed_settings(
    combination: Combination, folder: Path, size: tiny_model.DecoderSize = tiny_model.TINY
) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a combination, as its file has it."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1 if combination.has("no_sync") else combination.micro_steps,
        "zero_optimization": _zero_settings(combination, folder, size),
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if not combination.has("clipping_unset"):
        settings["gradient_clipping"] = tiny_model.MAX_NORM if combination.has("clipping") else 0.0
    settings |= json.loads(json.dumps(_PRECISIONS.get(combination.level("precision"), {})))
    if (optimizer := _named_optimizer(combination)) is not None:
        settings["optimizer"] = optimizer
    settings |= tiny_model.schedule_settings(combination)
    if combination.has("autotp"):
        settings["tensor_parallel"] = {"autotp_size": GROUP_SIZE}
    if combination.has("ulysses") and not combination.has("accelerate"):
        settings["sequence_parallel_size"] = GROUP_SIZE
    if combination.has("deepcompile"):
        settings["compile"] = {"deepcompile": True}
    return settings


def _zero_settings(combination: Combination, folder: Path, size: tiny_model.DecoderSize) -> dict[str, Any]:
    bucket = _SMALL_BUCKET if combination.has("small_buckets") else size.bucket
    zero: dict[str, Any] = {
        "stage": combination.stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if combination.has("zero3"):
        zero["stage3_prefetch_bucket_size"] = bucket
        zero["stage3_param_persistence_threshold"] = 100 if combination.has("persistent") else 0
        if size.live is not None:
            zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = size.live
    nvme = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    if combination.has("optimizer_cpu", "all_cpu"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if combination.has("optimizer_nvme", "all_nvme"):
        zero["offload_optimizer"] = dict(nvme)
    if combination.has("all_cpu"):
        zero["offload_param"] = {"device": "cpu"}
    if combination.has("all_nvme"):
        zero["offload_param"] = {**nvme, "buffer_size": size.bucket}
    zero |= _ZERO_OPTIONS.get(combination.level("zero"), {})
    if combination.has("super_offload"):
        zero["offload_optimizer"] |= {"super_offload": True}
    return zero


def _named_optimizer(combination: Combination) -> dict[str, Any] | None:
    """Return the optimizer section of a configuration that names one."""
    params: dict[str, Any] = {
        "lr": tiny_model.LEARNING_RATE,
        "eps": tiny_model.EPSILON,
        "weight_decay": tiny_model.WEIGHT_DECAY,
    }
    if combination.has("zenflow"):
        return {"type": "AdamW", "params": params}
    if combination.has("config_muon"):
        params["muon_lr"] = tiny_model.MUON_RATE_FACTOR * tiny_model.LEARNING_RATE
        params["momentum"] = tiny_model.MUON_MOMENTUM
        params["betas"] = [0.9, 0.999]
        # DeepSpeed's own operator takes a minute to compile.
        params["torch_adam"] = True
        return {"type": "Muon", "params": params}
    return None


_ZERO_OPTIONS: dict[str, dict[str, Any]] = {
    "hpz": {"zero_hpz_partition_size": 2},
    "quantized_weights": {"zero_quantized_weights": True},
    "quantized_gradients": {"zero_quantized_gradients": True},
    "overlap": {"overlap_comm": True},
    "no_reduce_scatter": {"reduce_scatter": False},
    "no_contiguous": {"contiguous_gradients": False},
    "round_robin": {"round_robin_gradients": True},
    # While it warms up ZenFlow updates everything, as plain training does.
    "zenflow": {
        "zenflow": {
            "topk_ratio": 0.5,
            "select_strategy": "step",
            "select_interval": 1,
            "update_interval": 1,
            "full_warm_up_rounds": tiny_model.STEPS + 1,
            "overlap_step": False,
        }
    },
}
_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp32_accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": tiny_model.LOSS_SCALE}},
    "autocast": {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    },
    "autocast_modules": {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    },
}


def make_optimizer(combination: Combination, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the combination names, over the trained weights."""
    import torch

    trained: Any = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    rate, decay, epsilon = tiny_model.LEARNING_RATE, tiny_model.WEIGHT_DECAY, tiny_model.EPSILON
    if combination.has("muon"):
        return _make_muon(trained, rate, decay)
    weights: Any = list(trained.values())
    if combination.has("ep"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        weights = split_params_into_different_moe_groups_for_optimizer({"params": weights, "name": "all"})
    if combination.has("sgd"):
        return torch.optim.SGD(weights, rate, momentum=tiny_model.MOMENTUM, weight_decay=decay)
    if combination.has("cpu_adam"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(weights, lr=rate, eps=epsilon, weight_decay=decay)
    fused = True if combination.has("fused_adamw") else None
    return torch.optim.AdamW(weights, rate, eps=epsilon, weight_decay=decay, fused=fused)


def _make_muon(trained: Mapping[str, torch.nn.Parameter], rate: float, decay: float) -> torch.optim.Optimizer:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    groups = []
    for use_muon in (True, False):
        weights = [weight for name, weight in trained.items() if tiny_model.is_hidden_matrix(name) == use_muon]
        for weight in weights:
            weight.use_muon = use_muon  # type: ignore[attr-defined]
        settings: dict[str, Any] = {"momentum": tiny_model.MUON_MOMENTUM}
        if not use_muon:
            settings = {"betas": (0.9, 0.999), "eps": tiny_model.EPSILON}
        if weights:
            groups.append({"params": weights, "use_muon": use_muon, "lr": rate, "weight_decay": decay, **settings})
    optimizer: torch.optim.Optimizer = MuonWithAuxAdam(groups)
    return optimizer


def list_blocks(model: Any) -> list[torch.nn.Module]:
    """Return the decoder's layers."""
    return [module for module in model.modules() if type(module).__name__ == "OPTDecoderLayer"]


def fsdp1_precision(combination: Combination) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecision

    if combination.has("fp32_accumulation"):
        return MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecision(param_dtype=torch.bfloat16) if combination.has("bf16") else None


def fsdp2_precision(combination: Combination) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if combination.has("fp32_accumulation"):
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16) if combination.has("bf16") else MixedPrecisionPolicy()


def gather_tensor(tensor: Any) -> torch.Tensor:
    """Return the whole tensor of a DTensor, or the tensor itself."""
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def read_torch(model: torch.nn.Module, kind: str, combination: Combination) -> dict[str, torch.Tensor]:
    """Return whole tensors by plain name of a model under DDP or FSDP."""
    import torch

    if combination.has("fsdp2", "hsdp"):
        from torch.distributed.fsdp import FSDPModule

        # After an evaluation the outermost group still has the weights that compute, in their type.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    summoned: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if combination.has("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        summoned = FullyShardedDataParallel.summon_full_params(model, with_grads=kind == "gradient", writeback=False)
    tensors: dict[str, torch.Tensor] = {}
    with summoned:
        for name, weight in model.named_parameters():
            tensor: Any = weight.grad if kind == "gradient" else weight
            if tensor is None or (kind != "weight" and not weight.requires_grad):
                continue
            tensor = gather_tensor(tensor).detach().clone()
            if kind == "weight" and combination.has("bf16", "fp32_accumulation"):
                # The engine casts its fp32 weights in each forward pass.
                tensor = tensor.to(torch.bfloat16)
            tensors[plain_name(name)] = tensor
    return tensors
