"""The request of a prediction, the settings derived from it, and the prediction.

Does not import torch, so that advice takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from study.config.errors import UserError
from study.config.flags import Precision, RunConfig
from study.config.precisions import in_autocast, in_engine
from study.config.strategies import DEFAULT_RANKS_PER_NODE, WITH_GROUPS, Strategy, read_strategy
from study.predictor.hardware import Hardware
from study.predictor.losses import DIVIDED_LOSSES, LossKernel
from study.predictor.models import model_shape
from study.predictor.shape import ModelShape, Parameter, in_4_bits, in_8_bits, is_saved_copy, with_adapters
from study.predictor.tensor_group import (
    TensorGroup,
    TensorPlan,
    part_of_model,
    sequence_refusal,
    tensor_group,
    tensor_refusal,
)

Attention = Literal["eager", "sdpa", "sdpa_causal", "flash_attention_2", "flex_attention"]
OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "lion", "adafactor"]
FP32_BYTES = 4
# The part of device memory that another engine in the same process takes.
BESIDE = "vLLM"


# DeepSpeed's settings that affect memory, read from a strategy's JSON with the engine's defaults.


@dataclasses.dataclass(frozen=True)
class Offload:
    """Offload settings of the optimizer or of the parameters."""

    device: str
    pinned: bool
    buffers: int
    # In elements; only for parameters.
    buffer_size: int
    # Fraction of the optimizer on the host.
    ratio: float


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Settings that affect memory and time: those of ZeRO have the names and defaults of DeepSpeed.

    Sizes are in elements.
    """

    stage: int
    overlap_comm: bool
    reduce_bucket_size: int = 500_000_000
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    # Stages 1 and 2 all-reduce a bucket, and each rank keeps its shard.
    use_multi_rank_bucket_allreduce: bool = True
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_model_persistence_threshold: int = sys.maxsize
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    # Replaces the function of linear layers under stage 3.
    memory_efficient_linear: bool = True
    # Rank 0 gathers all weights in host memory when the model is saved.
    stage3_gather_16bit_weights_on_model_save: bool = False
    # Gradients accumulate in fp32 although the weights are 16-bit.
    accumulates_in_fp32: bool = False
    # DeepSpeed's pure bf16: no fp32 masters, and moments in 16 bits.
    bf16_masters: bool = False
    bf16_moments: bool = False
    optimizer: Offload | None = None
    parameters: Offload | None = None
    # Elements of a rank's weights that stay in host memory although offload_param names NVMe.
    max_in_cpu: int = 1_000_000_000

    @property
    def master_bytes(self) -> int:
        """Bytes per element of the master weights."""
        return 2 if self.bf16_masters else FP32_BYTES

    @property
    def gradients_by(self) -> Literal["all_reduce", "reduce", "reduce_scatter"]:
        """The collective that reduces gradients: stages 1 and 2 all-reduce a bucket or reduce each shard to its owner
        (stage_1_and_2.py, average_tensor); only stage 3 reduce-scatters."""
        if not self.reduce_scatter:
            return "all_reduce"
        if self.stage == 3:
            return "reduce_scatter"
        return "all_reduce" if self.use_multi_rank_bucket_allreduce else "reduce"


def auto_bucket_sizes(hidden: int) -> dict[str, int]:
    """Return Accelerate's values for three sizes set to `auto`, from the hidden size."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


@functools.lru_cache(maxsize=256)
def _engine_settings(strategy: Strategy, hidden: int) -> EngineSettings:
    """Return the settings of a strategy's DeepSpeed JSON, for a model of a hidden size."""
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    auto, values = auto_bucket_sizes(hidden), dict[str, Any](overlap_comm=int(zero["stage"]) == 3)
    for field in dataclasses.fields(EngineSettings):
        value = zero.get(field.name)
        if (value := auto.get(field.name) if value == "auto" else value) is not None:
            values[field.name] = bool(value) if field.type == "bool" else int(value)
    if isinstance(zero.get("offload_param"), Mapping):
        values["max_in_cpu"] = int(zero["offload_param"].get("max_in_cpu", 1e9))
    bf16, types = (strategy.deepspeed.get(key) for key in ("bf16", "data_types"))
    if isinstance(bf16, Mapping):
        values["bf16_masters"] = bool(bf16.get("bf16_master_weights_and_grads"))
        values["bf16_moments"] = bool(bf16.get("bf16_optimizer_states"))
    if isinstance(types, Mapping):
        values["accumulates_in_fp32"] = types.get("grad_accum_dtype") == "fp32"
    for name, what, buffers in (("optimizer", "optimizer", 4), ("parameters", "param", 5)):
        if (device := strategy.offload_device(what)) is not None:
            section = zero[f"offload_{what}"]
            # deepspeed pins by default since 0.19.5.
            values[name] = Offload(
                device=device,
                pinned=bool(section.get("pin_memory", True)),
                buffers=int(section.get("buffer_count", buffers)),
                buffer_size=int(section.get("buffer_size", 1e8)),
                ratio=float(section.get("ratio", 1.0)),
            )
    return EngineSettings(**values)


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """Settings of the user's trainer, as the fields of Request of the same names."""

    reentrant_units: bool = False
    fsdp_mixed_units: bool = False
    adapters_in_16_bits: bool = False
    lora_dropout: float = 0.0
    double_quantized: bool = False
    quantized_on_host: bool = False
    loss_kernel: LossKernel = "transformers"
    keeps_outputs: bool = False
    compiled: bool = False
    sync_each_batch: bool = False
    in_8_bits: bool = False


DEFAULT_TRAINER = TrainerSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Settings of the user's program that no strategy changes, as the fields of Request of the same names."""

    # Tokens of an encoder-decoder model's decoder; None: as many as the sequence length.
    target_length: int | None = None
    attention: Attention = "sdpa"
    optimizer: OptimizerName = "adamw"
    reference_model: bool = False
    quantized: bool = False
    trainer: TrainerSettings = DEFAULT_TRAINER

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of Request that these settings set."""
        names = [field.name for field in dataclasses.fields(Program) if field.name != "trainer"]
        return {name: getattr(self, name) for name in names} | vars(self.trainer)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One of several configurations of the same model, hardware and program."""

    strategy: str
    micro_batch: int
    accumulation: int
    sequence_length: int
    gradient_checkpointing: bool


@dataclasses.dataclass(frozen=True)
class SetupCorrection:
    """Differences between measured runs of a setup and their predictions (calibration.py)."""

    # Factors of the step time of other configurations, by measured runs without offload, by those with it, and by those
    # that wait for the CPU to launch kernels; None without one.
    step_factor: float | None = None
    offload_step_factor: float | None = None
    launch_factor: float | None = None
    # Of each measured peak: its bytes above the predicted peak, and the predicted bytes above weights and optimizer.
    excesses: tuple[tuple[float, float], ...] = ()
    # The same of the measured configurations themselves.
    measured_step_factors: tuple[tuple[Configuration, float], ...] = ()
    measured_excesses: tuple[tuple[Configuration, float], ...] = ()

    def find_measured_factor(self, request: Request) -> float | None:
        """Return the factor of a request that was measured itself."""
        return dict(self.measured_step_factors).get(request.configuration)

    def find_step_factor(self, request: Request) -> float:
        """Return the factor of a request's work on the GPU and the host; 1 without a run of its kind."""
        if request.offloads and self.offload_step_factor is not None:
            return self.offload_step_factor
        return self.step_factor or 1.0

    def corrects_step(self, request: Request) -> bool:
        """Whether a step of the request's setup was measured, of which with offload another one with it counts too."""
        has_offload = request.offloads and self.offload_step_factor is not None
        return has_offload or self.step_factor is not None or self.launch_factor is not None

    def has_measured_peak(self, request: Request) -> bool:
        """Whether the peak of a request was measured."""
        return request.configuration in dict(self.measured_excesses)

    def find_excess(self, request: Request, above_state: float) -> float:
        """Return the bytes by which a request's peak is larger than predicted, of bytes above weights and optimizer.

        A peak that is too low by bytes that every configuration has needs those; one that is too low by a factor needs
        that factor. The smaller of the two is taken.
        """
        if self.has_measured_peak(request):
            return dict(self.measured_excesses)[request.configuration]
        if not self.excesses:
            return 0.0
        smaller = [min(excess, above_state * excess / above, key=abs) for excess, above in self.excesses]
        return sum(smaller) / len(smaller)


@dataclasses.dataclass(frozen=True)
class Request:
    """A configuration whose memory, communication and time are predicted."""

    shape: ModelShape
    strategy: Strategy
    box: Hardware
    sequence_length: int
    micro_batch: int
    accumulation: int
    precision: Precision
    gradient_checkpointing: bool
    attention: Attention
    optimizer: OptimizerName = "adamw"
    # With checkpointing every n-th layer is recomputed, and the others save their activations.
    checkpoint_every: int = 1
    # A recomputed layer saves its attention output and every second product: torchtitan's selective option.
    saves_matmul_outputs: bool = False
    # The model's dropout is on: masks are saved.
    dropout: bool = False
    # The dropout of attention is on: eager attention saves its scores twice. None: as the other dropout of the family.
    attention_dropout: bool | None = None
    # For bf16 and fp16. False: FSDP alone casts to 16 bits, Accelerate's default; then norms, the residual stream and
    # the gathered parameters are 16-bit, too. This study's runs use autocast.
    autocast: bool = True
    # torch.compile or fused kernels: operations other than matrix products have less memory traffic.
    compiled: bool = False
    # The fused kernels are those of norms, rotary positions and loss only: the gate's product is torch's.
    torch_gate: bool = False
    # The loss, by a name of study/predictor/losses.py.
    loss_kernel: LossKernel = "transformers"
    # The loop has a name for the model's output (`output = model(...)`), so its logits live until the next one exists.
    # torchtitan and torchtune delete them before the backward pass, and transformers' Trainer returns the loss alone.
    keeps_outputs: bool = False
    # transformers caches keys and values in the forward pass (use_cache), which its Trainer switches off.
    uses_cache: bool = False
    # The kept output has the keys and values of all layers: torch's checkpoint wrapper leaves use_cache on, which
    # transformers' own checkpointing switches off.
    keeps_cache: bool = False
    # Temporary copies that torch's AdamW makes: 0 if fused, as in this study; 1 for the root if foreach
    # (torch/optim/adamw.py, _multi_tensor_adamw), and 2 before torch 2.1, which adds eps out of place.
    step_copies: int = 0
    # Without an engine: the model was loaded in 16 bits, so gradients and moments are 16-bit, without masters.
    pure: bool = False
    # The program loads 16-bit weights, which DeepSpeed takes as they are, and not fp32 ones.
    loads_16_bits: bool = False
    # Version of FSDP: 1 has a flat parameter per layer, and one of all other parameters, which stays gathered.
    fsdp_version: int = 2
    # With FSDP1 and adapters: checkpoints are reentrant and enclose the units of FSDP, as in transformers before 4.52.
    # The hook of a frozen unit then keeps its layer's input and the gradient of that, until the pass has ended.
    reentrant_units: bool = False
    # With FSDP1 and adapters: no policy separates these from the frozen weights of their layer, as peft's does. A flat
    # parameter with a trained tensor requires a gradient, and its views of frozen weights do, too
    # (_validate_tensors_to_flatten and _use_unsharded_views in torch's _flat_param.py).
    fsdp_mixed_units: bool = False
    # Adapters have the type of the weights: those of torchtune, LitGPT and NeMo, and peft's with
    # autocast_adapter_dtype=False.
    adapters_in_16_bits: bool = False
    # LoRA's dropout: an adapter saves its own input after dropout, and a mask.
    lora_dropout: float = 0.0
    # FSDP2's embedding and head are one group, as if the program shards its layers and the model alone.
    fsdp_whole_root: bool = False
    # FSDP frees gathered weights only after the backward pass (fsdp_reshard_after_forward: false, SHARD_GRAD_OP).
    fsdp_keeps_gathered: bool = False
    # No policy wraps layers (fsdp_auto_wrap_policy: NO_WRAP, Accelerate's default): the model is one unit of FSDP.
    fsdp_unwrapped: bool = False
    # FSDP reduces gradients in each micro-batch, and not in a step's last one alone (sync_each_batch of Accelerate's
    # GradientAccumulationPlugin; a loop without no_sync or set_requires_gradient_sync).
    sync_each_batch: bool = False
    # With it, replica groups add up these gradients in a step's last micro-batch alone (set_requires_all_reduce).
    replicas_sync_last: bool = False
    # FSDP2's MixedPrecisionPolicy reduces in fp32, as torchtitan's does; Accelerate's reduces in the computing type
    # (set_mixed_precision of FullyShardedDataParallelPlugin).
    fsdp_reduces_fp32: bool = False
    # FSDP keeps weights, gradients and optimizer in host memory (fsdp_offload_params).
    fsdp_offloads: bool = False
    # A frozen copy of the model in addition to it (DPO, GRPO); 4-bit frozen matrices in the layers (QLoRA).
    reference_model: bool = False
    quantized: bool = False
    # The scales of 4-bit weights are quantized, too (bnb_4bit_use_double_quant).
    double_quantized: bool = False
    # The frozen matrices in the layers have 8 bits (LLM.int8 of bitsandbytes).
    in_8_bits: bool = False
    # FSDP shards 4-bit weights from the host memory of each process: from_pretrained has device_map={"": "cpu"}.
    quantized_on_host: bool = False
    # PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True.
    expandable_segments: bool = False
    # Bytes of each GPU that another engine takes in the same process: vLLM next to the training of GRPO.
    vllm_bytes: float = 0.0
    # The ranks that divide the tensors of each layer: the shape is then the part of one of them. None without division.
    tensor_group: TensorGroup | None = None
    # Ranks that divide a sample by tokens (DeepSpeed's Ulysses). `sequence_length` is then the part of one of them, and
    # the state is sharded over all ranks; speeds and sent bytes are not predicted.
    sequence_ranks: int = 1
    # Inputs of recomputed layers are in host memory until the backward pass.
    checkpoints_on_host: bool = False
    # The feed-forward block has the tokens of one tile at a time, and runs a second time in the backward pass.
    tiled_mlp: bool = False
    # Tokens of an encoder-decoder model's decoder; None: as many as `sequence_length`.
    target_length: int | None = None
    # By measured runs of the same model, hardware and program; None without one.
    correction: SetupCorrection | None = None

    def __post_init__(self) -> None:
        """Load 4-bit weights in 16 bits under FSDP, where Accelerate casts none of them."""
        if self.quantized and self.strategy.is_fsdp and in_autocast(self.precision):
            object.__setattr__(self, "precision", f"{self.precision}-engine")
            object.__setattr__(self, "pure", True)

    @property
    def configuration(self) -> Configuration:
        return Configuration(
            self.strategy.name,
            self.micro_batch,
            self.accumulation,
            self.sequence_length,
            self.gradient_checkpointing,
        )

    @property
    def sample_tokens(self) -> int:
        """Tokens of a whole sample."""
        return self.sequence_length * self.sequence_ranks

    @property
    def output_tokens(self) -> int:
        """Tokens of a micro-batch that have logits: a decoder's, or all."""
        return self.micro_batch * (self.target_length or self.sequence_length)

    @property
    def tensor_ranks(self) -> int:
        """Ranks that divide the tensors of each layer, and process the same samples."""
        return 1 if self.tensor_group is None else self.tensor_group.ranks

    @property
    def stream_ranks(self) -> int:
        """Ranks that divide the residual stream, and the norms with it, by tokens."""
        return self.tensor_ranks if self.tensor_group is not None and self.tensor_group.divides_stream else 1

    @property
    def data_ranks(self) -> int:
        """Ranks with different samples, over which ZeRO and FSDP shard."""
        return self.box.ranks // self.tensor_ranks

    @property
    def full_shape(self) -> ModelShape:
        """The shape of the model, also if a rank has a part of each layer."""
        return self.shape if self.tensor_group is None else self.tensor_group.model

    @functools.cached_property
    def settings(self) -> EngineSettings:
        """DeepSpeed's settings, only for strategies that use DeepSpeed; any other `auto` is the engine's default."""
        return _engine_settings(self.strategy, self.shape.hidden)

    @functools.cached_property
    def stored(self) -> ModelShape:
        """The shape whose parameters are those that are stored, sharded and gathered."""
        if self.quantized:
            return in_4_bits(self.shape, self.weight_bytes)
        return in_8_bits(self.shape, self.weight_bytes) if self.in_8_bits else self.shape

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes per weight: autocast keeps fp32 weights, DeepSpeed's bf16 and fp16 do not."""
        return 2 if in_engine(self.precision) else FP32_BYTES

    @property
    def drops_attention(self) -> bool:
        """Whether the weights of attention have dropout."""
        if self.attention_dropout is None:
            return self.dropout and self.shape.has_dropout
        return self.attention_dropout

    @property
    def offloads(self) -> bool:
        """Whether state is in host memory or on NVMe, by DeepSpeed or by FSDP."""
        return self.strategy.offloads or self.fsdp_offloads

    @property
    def has_reference_copy(self) -> bool:
        """Whether the reference is a second model: with adapters it is the model without them."""
        return self.reference_model and self.shape.lora_rank is None

    @property
    def has_mixed_units(self) -> bool:
        """Whether flat parameters of FSDP1 may have both trained and frozen weights."""
        is_first = self.strategy.is_fsdp and self.fsdp_version == 1
        with_adapters = self.fsdp_mixed_units and self.shape.lora_rank is not None
        return is_first and (with_adapters or bool(self.shape.frozen_modules))

    @property
    def has_fp32_adapters(self) -> bool:
        """Whether adapters are in fp32 next to 16-bit weights: peft casts them (autocast_adapter_dtype). In a flat
        parameter all tensors have one type."""
        has_adapters = self.shape.lora_rank is not None
        return has_adapters and self.pure and not self.has_mixed_units and not self.adapters_in_16_bits

    def bytes_per_weight(self, param: Parameter) -> int:
        """Bytes per weight of a parameter: peft casts adapters to fp32, but no copy of a whole module."""
        is_adapter = param.trained and not is_saved_copy(param)
        return FP32_BYTES if self.has_fp32_adapters and is_adapter else self.weight_bytes

    @functools.cached_property
    def adapter_bytes(self) -> float:
        """Bytes per trained weight, the mean if adapters are in fp32 and copies of modules in 16 bits."""
        if not self.has_fp32_adapters or not self.shape.lora_saved:
            return FP32_BYTES if self.has_fp32_adapters else self.weight_bytes
        sizes = (param.elements * self.bytes_per_weight(param) for param in self.shape.trained_params)
        return sum(sizes) / self.shape.trained_parameters

    @property
    def computing_bytes(self) -> int:
        """Bytes per element of the matrix products."""
        return FP32_BYTES if self.precision == "fp32" else 2

    @property
    def loose_bytes(self) -> int:
        """Bytes per element of a layer's operations other than products and attention: autocast runs norms and softmax
        in fp32."""
        is_autocast = in_autocast(self.precision) and self.autocast
        return FP32_BYTES if is_autocast else self.computing_bytes

    @property
    def moments_bytes(self) -> float:
        """Bytes per parameter of the optimizer's moments: two of AdamW, one of Lion. 8-bit moments add 4 bytes per 256
        elements (bitsandbytes). Adafactor has a sum per row and column, and of DeepSpeed's flat shards a whole moment.
        """
        if self.pure:
            width = float(self.adapter_bytes)
        else:
            width = 2.0 if self.strategy.zero_stage and self.settings.bf16_moments else 4.0
        if self.optimizer.endswith("8bit"):
            return 2 * (1 + 4 / 256)
        if self.optimizer == "adafactor" and not self.strategy.zero_stage:
            sums = (min(item.rows + item.elements // item.rows, item.elements) for item in self.shape.trained_params)
            return width * sum(sums) / self.shape.trained_parameters
        return width * (2 if self.optimizer == "adamw" else 1)

    @functools.cached_property
    def without_batch(self) -> Request:
        """This request with one token, accumulation at most 2, no checkpointing, and one network: of the same state."""
        return dataclasses.replace(
            self,
            micro_batch=1,
            sequence_length=1,
            target_length=None,
            accumulation=min(2, self.accumulation),
            gradient_checkpointing=False,
            sequence_ranks=1,
            checkpoints_on_host=False,
            tiled_mlp=False,
            box=self.box.with_any_network,
            correction=None,
        )

    @property
    def fsdp_gathers_16_bits(self) -> bool:
        """Whether FSDP casts parameters to 16 bits before it gathers them."""
        return self.strategy.is_fsdp and self.precision != "fp32" and not self.autocast

    @property
    def gathered_bytes(self) -> int:
        """Bytes per element that FSDP or stage 3 gathers."""
        return 2 if self.fsdp_gathers_16_bits else self.weight_bytes

    @property
    def swapped(self) -> list[str]:
        """State that DeepSpeed swaps to NVMe: only stage 3 does, other stages keep it in host memory (engine.py,
        zero_use_cpu_optimizer)."""
        strategy = self.strategy
        return [
            what
            for what in ("optimizer", "param")
            if strategy.zero_stage == 3 and strategy.offload_device(what) == "nvme"
        ]

    @property
    def keeps_inputs(self) -> bool:
        """Whether hooks of FSDP1's frozen units keep the inputs of recomputed layers, and their gradients."""
        has_frozen_units = self.strategy.is_fsdp and self.fsdp_version == 1 and self.shape.lora_rank is not None
        has_frozen_units = has_frozen_units and not self.has_mixed_units
        return has_frozen_units and self.gradient_checkpointing and self.reentrant_units

    @property
    def reduced_bytes_per_element(self) -> int:
        """Bytes of an element in which FSDP reduces gradients."""
        return FP32_BYTES if self.fsdp_reduces_fp32 else self.gathered_bytes

    @property
    def reductions(self) -> int:
        """Number of reductions of FSDP's gradients in a step."""
        return self.accumulation if self.sync_each_batch else 1

    @property
    def replica_reductions(self) -> int:
        """Number of reductions of FSDP's gradients over replica groups in a step."""
        return 1 if self.replicas_sync_last else self.reductions

    @property
    def loads_on_host(self) -> bool:
        """Whether 4-bit weights are in host memory until FSDP shards them; transformers refuses a device_map under
        stage 3 (check_and_set_device_map)."""
        return self.quantized and self.quantized_on_host and self.strategy.is_fsdp

    @property
    def regathered_frozen_elements(self) -> float:
        """Elements that stage 3 gathers a third time in a micro-batch: the frozen parameters of recomputed layers
        (_recomputing_frozen in zero3_gathers.py)."""
        if self.strategy.zero_stage != 3 or not self.gradient_checkpointing:
            return 0.0
        return self.stored.frozen_in_layers / self.checkpoint_every

    @property
    def ranks_per_replica(self) -> int | None:
        """Ranks of a replica group. A virtual rank runs alone, as a rank of machines with eight."""
        per_machine = self.box.gpus_per_node if self.box.gpus_per_node > 1 else DEFAULT_RANKS_PER_NODE
        return self.strategy.ranks_per_replica(self.data_ranks, per_machine)

    @property
    def fsdp_ranks(self) -> int:
        """Ranks over which FSDP shards: those of one of several replica groups, or all."""
        return self.ranks_per_replica or self.data_ranks


_R = TypeVar("_R")


def cache_by_request(func: Callable[..., _R]) -> Callable[..., _R]:
    """Cache a function across requests with the same `without_batch`."""
    cached = functools.lru_cache(maxsize=256)(func)
    return functools.wraps(func)(lambda request, **options: cached(request.without_batch, **options))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A predicted figure and its interval from the validation; None if it was not validated."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes of one GPU, of one node's host memory, and of NVMe."""

    # parameters, gradients, optimizer, buffers, activations, logits, attention, allocator, context, fragmentation.
    device_parts: Mapping[str, float]
    steady_allocated: Estimate
    peak_allocated: Estimate
    # Reserved memory of the caching allocator, at least.
    peak_reserved: Estimate
    # Reserved memory if the device has free memory.
    pool_with_room: float
    # state, pinned, load, save.
    host_parts: Mapping[str, float]
    host_peak: Estimate
    nvme: float
    # Without a GPU: a rank's process, including libraries and freed blocks that malloc retains.
    process_peak: Estimate | None = None
    # Explanations for the user: "gradients of the embedding exceed the bucket".
    notes: tuple[str, ...] = ()
    # Parts that could not be traced, by name: with any of them there is no verdict.
    missing: str | None = None
    # Of one GPU, with its context, while it loads unsharded weights that an engine shards later; 0 without.
    loading: float = 0.0
    # Moment of a step at which the device memory peaks, and the largest size of each part at any moment.
    moment: str = ""
    most_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, and the speed, MFU and HFU that follow."""

    # compute, communication_exposed, communication_overlapped, offload, cpu_adam, nvme.
    parts: Mapping[str, float]
    # forward, backward and optimizer of compute; if the passes wait for the CPU to launch kernels, passes instead of
    # the first two: their ratio is not measured then.
    compute_parts: Mapping[str, float]
    step_s: Estimate
    tokens_per_s_per_gpu: Estimate
    mfu: float | None
    hfu: float | None
    notes: tuple[str, ...] = ()
    # The passes wait for the CPU to launch kernels.
    is_launch_bound: bool = False


def unsupported_reason(strategy: str, config: RunConfig) -> str | None:
    """Return the unsupported part of a run, as text for a message; None if the run can be predicted."""
    if strategy in WITH_GROUPS:
        return f"{strategy}, whose ranks share their samples"
    if config.optimizer != "adamw":
        return config.optimizer
    try:
        return "quantized weights" if model_shape(config.model_name_or_path).quantized_by else None
    except UserError:
        return f"{config.model_name_or_path}, since its architecture is not known"


def request_for(strategy: str, config: RunConfig, box: Hardware, micro_batch: int, accumulation: int) -> Request:
    """Return a run's request; UserError if `unsupported_reason` returns one."""
    if reason := unsupported_reason(strategy, config):
        raise UserError(f"there is no prediction for {reason}", "leave it out")
    shape = model_shape(config.model_name_or_path)
    buffered = read_strategy(strategy).with_swap_buffers(-(-shape.largest // box.ranks))
    trained = shape if config.peft == "none" else with_adapters(shape, config.lora_rank)
    return request_of_flags(config, trained, buffered.with_overrides(config), box, micro_batch, accumulation)


def tensor_request_for(strategy: str, config: RunConfig, box: Hardware, micro_batch: int, accumulation: int) -> Request:
    """Return the request of a run whose ranks divide the tensors of each layer; UserError if they cannot."""
    shape, launched = model_shape(config.model_name_or_path), read_strategy(strategy).with_overrides(config)
    return with_tensor_group(request_of_flags(config, shape, launched, box, micro_batch, accumulation))


def with_tensor_group(request: Request, plan: TensorPlan = "plain") -> Request:
    """Return the request of a rank with its part of each layer, or the same request if the strategy's ranks do not
    divide tensors; UserError if they cannot divide this model, or do not make whole groups."""
    strategy, box = request.strategy, request.box
    if strategy.group is None or strategy.group.divides != "tensors":
        return request
    ranks, per_node, fix = strategy.group.ranks, box.gpus_per_node, "use another number of ranks in a group"
    if box.ranks % ranks or (per_node % ranks and ranks % per_node):
        where = f"{box.ranks} ranks, {per_node} of a machine," if box.nodes > 1 else f"{box.ranks} ranks"
        raise UserError(f"{where} do not make groups of {ranks}", fix)
    is_deepspeed = strategy.deepspeed is not None
    refusal = tensor_refusal(request.shape, ranks, is_deepspeed=is_deepspeed)
    if refusal is None and (request.quantized or request.in_8_bits):
        refusal = "quantized weights are not predicted with it"
    if refusal is not None:
        raise UserError(f"tensor parallelism over {ranks} ranks: {refusal}", f"{fix}, or none")
    divides_stream = plan == "sequence"
    if divides_stream:
        _check_sequence_plan(request, ranks)
    section = (strategy.deepspeed or {}).get("tensor_parallel") or {}
    group = tensor_group(
        request.shape,
        ranks,
        is_deepspeed=is_deepspeed,
        vocab_parallel=section.get("vocab_parallel_lm_head"),
        divides_stream=divides_stream,
    )
    return dataclasses.replace(request, shape=part_of_model(group), tensor_group=group)


def _check_sequence_plan(request: Request, ranks: int) -> None:
    """Raise UserError if a group cannot divide the residual stream and the loss of a request."""
    is_deepspeed = request.strategy.deepspeed is not None
    refusal = sequence_refusal(request.shape, ranks, request.sequence_length, is_deepspeed=is_deepspeed)
    if refusal is None and request.loss_kernel not in DIVIDED_LOSSES:
        refusal = f"torch's loss_parallel divides cross_entropy, not the loss {request.loss_kernel}"
    if refusal is None and request.keeps_outputs:
        refusal = "kept outputs are not predicted with it"
    if refusal is not None:
        raise UserError(f"--tensor_plan sequence over {ranks} ranks: {refusal}", "use --tensor_plan plain")


def request_of_flags(
    config: RunConfig, shape: ModelShape, strategy: Strategy, box: Hardware, micro_batch: int, accumulation: int
) -> Request:
    """Return the request of a run's flags, of a shape with its adapters and a strategy with its overrides."""
    return Request(
        shape=shape,
        strategy=strategy,
        box=box,
        sequence_length=config.seq_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing,
        attention=config.attn_implementation,
        dropout=config.dropout != 0,
        compiled=config.torch_compile,
    )
