"""The shape of a model: every parameter by name, in the engines' order.

A shape is of a family of the table (table_shape.py) or traced (live.py); models.py finds the one that a name means.
Does not import torch or transformers; tests compare every family with the model that transformers creates.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from study.config.errors import UserError, clip, did_you_mean
from study.predictor.families import READS_INPUT
from study.predictor.lora_targets import ALL_LINEAR, check_pattern, is_target
from study.workloads.presets import Family

# Place of parameters before the layers.
BEFORE = -1
# Names of attentions without scores in memory; transformers' classes have all, none or some.
FUSED_ATTENTIONS = ("sdpa", "sdpa_causal", "flash_attention_2", "flex_attention")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model, in the engines' order."""

    index: int
    name: str = dataclasses.field(hash=False)
    elements: int = dataclasses.field(hash=False)
    # Size of the first dimension, which FSDP2 shards.
    rows: int = dataclasses.field(hash=False)
    # Its layer; BEFORE if it precedes the layers, and the number of layers if it follows them.
    place: int = dataclasses.field(hash=False)
    # False: frozen, as all parameters of a LoRA model other than the adapters.
    trained: bool = dataclasses.field(default=True, hash=False)
    # FSDP2 gathers it again for the backward pass: layers, and an untied embedding as its group.
    regathered: bool = dataclasses.field(default=False, hash=False)
    # Of a traced model: whether transformers replaces its module by one of bitsandbytes. None: if it is a matrix of a
    # layer.
    is_linear: bool | None = dataclasses.field(default=None, hash=False)

    def shard_by_rows(self, ranks: int) -> int:
        """Return the elements of one rank's shard in FSDP2, with padding."""
        return math.ceil(self.rows / ranks) * (self.elements // self.rows)

    def gathered_by_rows(self, ranks: int) -> int:
        """Return the elements of a tensor that FSDP2 gathers, or reduces, with the padding of each rank's shard."""
        return self.shard_by_rows(ranks) * ranks


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module, with the parameters that it owns."""

    place: int
    params: tuple[Parameter, ...] = ()
    # Calls of the modules that it contains.
    inside: tuple[Call, ...] = ()
    # Released after the call, regardless of the next use.
    releases: tuple[Parameter, ...] = ()

    def flat(self, backward: bool = False) -> list[Call]:
        """Return all calls in order; a module precedes the modules that it contains in both directions."""
        inside = self.inside[::-1] if backward else self.inside
        return [self, *(step for call in inside for step in call.flat(backward))]


def calls_without_gradient(forward: Sequence[Call], looked_up: int | None) -> set[int]:
    """Return ids of the calls without a backward pass, whose output has no gradient: no parameter before them is
    trained, or they look words up in the parameter `looked_up`."""
    call_ids: set[int] = set()
    is_trained = False
    for call in forward:
        is_trained = is_trained or any(param.trained for param in call.params)
        if call.params and not call.params[0].trained:
            module = call.params[0].name.rpartition(".")[0]
            reads_words = call.params[0].index == looked_up
            # The second call of a tied embedding is the output layer.
            looked_up = None if reads_words else looked_up
            if not is_trained or reads_words or (call.place == 0 and module in READS_INPUT):
                call_ids.add(id(call))
    return call_ids


@dataclasses.dataclass(frozen=True)
class ModelShape(abc.ABC):
    """Sizes and parameters of a transformer, on which memory, traffic and time depend."""

    # Activations and FLOPs are traced on transformers' code, not counted by the table of families.
    is_traced: ClassVar[bool]

    name: str
    model_type: str
    family: Family
    layers: int
    hidden: int
    # Width of the feed-forward block.
    inner: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    # The feed-forward block has two input matrices, as SwiGLU.
    gated: bool
    # The output layer shares the embedding's weight.
    tied: bool
    params: tuple[Parameter, ...] = dataclasses.field(hash=False)
    # The longest sequence that it was made for; None: the configuration does not have it.
    positions: int | None = None
    # Rank of the LoRA adapters, which are among the tensors; None: full training.
    lora_rank: int | None = None
    # Names of the modules with adapters, as peft's target_modules; none: all linear layers.
    lora_targets: tuple[str, ...] = ()
    # Names of the modules that are trained in full next to the adapters, as peft's modules_to_save.
    lora_saved: tuple[str, ...] = ()
    # The adapters are DoRA's, each with a trained magnitude of every output.
    lora_dora: bool = False
    # Names of modules whose weights are frozen in a training without adapters.
    frozen_modules: tuple[str, ...] = ()
    # Content of config.json, as JSON.
    document: str = ""
    # Integer buffers, which DDP broadcasts: BERT's positions and types.
    buffer_bytes: int = 0
    # Index of the embedding, whose weight a tied output layer shares.
    embedding_index: int = 0
    # Reason that FSDP2 does not train it, and FSDP1.
    fsdp_refusal: str | None = None
    fsdp1_refusal: str | None = None
    # Method of config.json's quantization_config; figures are those of the weights that it stands for.
    quantized_by: str = ""
    # Class of transformers that was traced, and whether another class of its family stands for it.
    built_class: str = "none"
    is_stand_in: bool = False
    # Experts that every token reaches; 0 without experts.
    active_experts: int = 0
    # Parts into which a tensor-parallel group divides the output layer, whose logits it gathers.
    head_parts: int = 1
    # Labels are the tokens of a decoder, whose encoder reads tokens, too, or sounds and images of a fixed size.
    has_decoder: bool = False
    encoder_reads_tokens: bool = True
    # config.json sets no size of images, so they have the usual one.
    has_usual_images: bool = False
    # Class of a decoder that config.json names, if it has no output layer over the vocabulary: one for labels, whose
    # number `vocabulary` is, or none.
    headless_class: str = ""

    def why_no_fsdp(self, version: int) -> str | None:
        """Return the reason why a version of FSDP cannot train it; None if it can."""
        return self.fsdp1_refusal if version == 1 else self.fsdp_refusal

    @property
    @abc.abstractmethod
    def fused_attentions(self) -> tuple[str, ...]:
        """Names of the attentions that are counted as fused, as --attn_implementation has them."""

    @property
    def has_dropout(self) -> bool:
        """Whether its family has dropout unless config.json sets it to 0."""
        return False

    @property
    def flash_kernels(self) -> tuple[str, ...]:
        """The kernels of flash attention that compute its sinks; none: it has no sinks, and any kernel does."""
        return ()

    @property
    @abc.abstractmethod
    def has_position_table(self) -> bool:
        """Whether positions are rows of a table, so that a longer sequence ends with an error; RoPE computes any."""

    @property
    def has_rms_norms(self) -> bool:
        """Whether its norms are Llama's, which compute in fp32: of the table, those of families with a gate."""
        return self.gated

    @property
    @abc.abstractmethod
    def caps_logits(self) -> bool:
        """Whether a tanh caps the logits, whose bytes a count adds and a trace includes."""

    @property
    def has_word_logits(self) -> bool:
        """Whether it is a decoder whose output layer scores the words of its vocabulary."""
        return self.family == "causal-lm" and not self.headless_class

    @property
    def looked_up(self) -> int | None:
        """Index of a frozen embedding, whose words no gradient reaches; None without one."""
        return None

    def has_input_gradients(self, recomputes: bool) -> bool:
        """Whether frozen modules before all trained ones have a backward pass: gradient checkpointing of transformers
        makes the outputs of all input embeddings require gradients (enable_input_require_grads)."""
        return False

    def recomputes(self, layer: int) -> bool:
        """Whether gradient checkpointing recomputes a layer."""
        return True

    def gathered_once(self, recomputes: bool) -> frozenset[int]:
        """Return the numbers of parameters that FSDP2 gathers for the forward pass alone."""
        return frozenset()

    @property
    def stack_sizes(self) -> tuple[int, ...]:
        """Numbers of similar layers that follow each other: one of all layers, or those of an encoder and a decoder."""
        return (self.layers,)

    @functools.cached_property
    def stack_numbers(self) -> tuple[int, ...]:
        """The stack of each layer, by its number."""
        return tuple(number for number, size in enumerate(self.stack_sizes) for _ in range(size))

    @abc.abstractmethod
    def part_of_backward(self, param: Parameter) -> str:
        """Return the part of its layer's backward pass that begins when a parameter's gradient has arrived."""

    def part_of_any_layer(self, layer: int, part: str) -> str:
        """Return the name that a part of a layer's backward pass has in each layer."""
        return part

    @abc.abstractmethod
    def module_path(self, param: Parameter) -> str:
        """Return the full name of a parameter's module in transformers' model."""

    @property
    @abc.abstractmethod
    def outside_modules(self) -> tuple[str, ...]:
        """Full names of modules with a matrix that are outside the layers."""

    @abc.abstractmethod
    def module_calls(self) -> tuple[Call, dict[int, Call]]:
        """Return the module calls of a forward pass, and the layers among them."""

    @abc.abstractmethod
    def add_adapters(
        self, rank: int, targets: tuple[str, ...], saved: tuple[str, ...] = (), *, dora: bool = False
    ) -> ModelShape:
        """Return the shape with frozen base weights and adapters, without targets on all linear layers; `saved`: names
        of modules with a trained copy; `dora`: the adapters are DoRA's."""

    def notes(self) -> Iterator[str]:
        """Yield the assumptions of this kind of shape."""
        if self.quantized_by == "dynamic-4bit":
            yield (
                "quantization: Unsloth's dynamic 4-bit weights have some matrices in 16 bits (llm_int8_skip_modules of"
                " their config.json), and these figures have all linear layers in 4 bits: they take more memory"
            )

    @property
    def embedding(self) -> Parameter:
        return self.params[self.embedding_index]

    @functools.cached_property
    def layer_elements(self) -> int:
        """Elements of the largest layer."""
        sizes = collections.Counter[int]()
        for param in self.params:
            sizes[param.place] += param.elements
        return max(sizes[layer] for layer in range(self.layers))

    def find_layer(self, param: Parameter) -> int:
        """The layer that contains a parameter; BEFORE if none does."""
        return param.place if 0 <= param.place < self.layers else BEFORE

    @functools.cached_property
    def trained_params(self) -> tuple[Parameter, ...]:
        """Trainable parameters in the engines' order; frozen ones are not in the optimizer's groups."""
        return tuple(param for param in self.params if param.trained)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(param.elements for param in self.params)

    @functools.cached_property
    def trained_parameters(self) -> int:
        return sum(param.elements for param in self.trained_params)

    @functools.cached_property
    def frozen_in_layers(self) -> int:
        """Frozen elements of all layers."""
        return sum(param.elements for param in self.params if self.find_layer(param) >= 0 and not param.trained)

    @functools.cached_property
    def layer_matrices(self) -> tuple[Parameter, ...]:
        """The matrices of the first layer, adapters included."""
        return tuple(param for param in self.params if param.place == 0 and param.elements > param.rows)

    @property
    def frozen_parameters(self) -> int:
        return self.parameters - self.trained_parameters

    @functools.cached_property
    def largest(self) -> int:
        return max(param.elements for param in self.params)

    @functools.cached_property
    def largest_trained(self) -> int:
        return max(param.elements for param in self.trained_params)


# LoRA: adapters are additional parameters of a shape, and all others are frozen, as in study/workloads/architecture.py.
# peft's "all-linear" adds two matrices to every linear layer, A (rank x in) and B (out x rank), in the weights' type.
# The output layer of a language model has none, and a classifier's new output layer is trained in full.
# modules_to_save trains a copy of a module, and the frozen original stays (ModulesToSaveWrapper in peft's other.py).
# DoRA trains a magnitude of each output, too (DoraLinearLayer in peft's dora.py).
INFIX = ".lora_"
MAGNITUDE = f"{INFIX}magnitude_vector"
SAVED = ".modules_to_save"
OUTPUT_LAYER = "lm_head"


@functools.lru_cache(maxsize=64)
def trained_text(shape: ModelShape) -> str:
    """Format LoRA's rank, or the frozen modules, and trainable parameters, with a leading comma; empty if all weights
    are trained."""
    if shape.frozen_modules:
        return f", {' and '.join(shape.frozen_modules)} frozen: {_millions_text(shape)}"
    if shape.lora_rank is None:
        return ""
    where = ", ".join(shape.lora_targets) or "all linear layers"
    saved = f" and copies of {', '.join(shape.lora_saved)}" if shape.lora_saved else ""
    kind = "DoRA" if shape.lora_dora else "LoRA"
    return f", {kind} of rank {shape.lora_rank} on {where}{saved}: {_millions_text(shape)}"


def _millions_text(shape: ModelShape) -> str:
    """Format the trainable parameters."""
    millions = shape.trained_parameters / 1e6
    return f"{millions / 1e3:.2f} B trained" if millions >= 1000 else f"{millions:,.3g} M trained"


@functools.lru_cache(maxsize=64)
def with_adapters(
    shape: ModelShape, rank: int, targets: tuple[str, ...] = (), saved: tuple[str, ...] = (), *, dora: bool = False
) -> ModelShape:
    """Return the shape with frozen base weights and LoRA adapters of a rank, by default on all linear layers, and with
    trained copies of the modules `saved`; UserError if the rank is below 1, or if the model has no module of a name.
    `dora`: the adapters are DoRA's."""
    if rank < 1:
        raise UserError(f"--lora_rank {rank} is out of range", "use 1 or more")
    paths = dict.fromkeys(shape.module_path(param) for param in shape.params if can_adapt(shape, param))
    for target in targets:
        check_pattern(target, [*paths], shape.outside_modules)
        if not any(is_target(path, [target]) for path in paths):
            names = dict.fromkeys(path.removesuffix(".dense").rpartition(".")[2] for path in paths)
            fix = f"{did_you_mean(target, names)}its linear layers are {', '.join(names)}; or {ALL_LINEAR}"
            raise UserError(f"{shape.name[:80]} has no layer {clip(target)} for --lora_targets", fix)
    _check_saved(shape, saved)
    return shape.add_adapters(rank, targets, saved, dora=dora)


def _check_saved(shape: ModelShape, saved: tuple[str, ...]) -> None:
    """Raise UserError for a name of `saved` that is neither the embedding nor the output layer."""
    modules = [param.name.rpartition(".")[0].rpartition(".")[2] for param in shape.params]
    names = [_embedding_module(shape).rpartition(".")[2]]
    names += [OUTPUT_LAYER] if OUTPUT_LAYER in modules or shape.tied else []
    for name in saved:
        if name in names:
            continue
        if any(module.endswith(name) for module in modules):
            problem = f"a trained copy of {clip(name)} is not predicted"
        else:
            problem = f"{shape.name[:80]} has no module {clip(name)} for --lora_modules_to_save"
        raise UserError(problem, f"{did_you_mean(name, names)}copies of {' and '.join(names)} are")


def can_adapt(shape: ModelShape, param: Parameter) -> bool:
    """Whether it is the matrix of a linear layer with adapters: outside the layers only BERT's pooler is one."""
    return param.elements > param.rows and (0 <= param.place < shape.layers or param.name.startswith("pooler."))


def is_saved_copy(param: Parameter) -> bool:
    """Whether it is of a module that is trained in full next to adapters."""
    return param.trained and SAVED in param.name


def trains_embedding(shape: ModelShape) -> bool:
    """Whether the embedding of a model with adapters is trained."""
    return _embedding_module(shape).rpartition(".")[2] in shape.lora_saved


def trains_head(shape: ModelShape) -> bool:
    """Whether the output layer of a model with adapters is trained."""
    return OUTPUT_LAYER in shape.lora_saved


def _embedding_module(shape: ModelShape) -> str:
    """Return the name of the embedding, as it is without a trained copy."""
    name = shape.embedding.name.partition(SAVED)[0]
    return name.removesuffix(".weight").removesuffix(".original_module")


@functools.lru_cache(maxsize=64)
def in_4_bits(shape: ModelShape, width: int) -> ModelShape:
    """Return the shape with the layers' frozen matrices as bitsandbytes stores them: two weights to a byte, in elements
    of the other weights' width (bnb_4bit_quant_storage). Experts in one tensor are no Linear, and are not packed."""

    return _packed(shape, 2 * width)


@functools.lru_cache(maxsize=64)
def in_8_bits(shape: ModelShape, width: int) -> ModelShape:
    """Return the shape with the layers' frozen matrices in a byte a weight, in elements of the other weights' width."""
    return _packed(shape, width)


def _packed(shape: ModelShape, per_element: int) -> ModelShape:
    """Return the shape with as many weights of the layers' frozen matrices in one element."""

    def pack(param: Parameter) -> Parameter:
        size = math.ceil(param.elements / per_element)
        return dataclasses.replace(param, elements=size, rows=size) if is_packed(shape, param) else param

    return dataclasses.replace(shape, params=tuple(map(pack, shape.params)))


def in_tensor_parts(shape: ModelShape, ranks: int, *, only_layers: bool) -> ModelShape:
    """Return the shape with the part of each tensor that one of several ranks has; `only_layers`: each of them has all
    of the embeddings and of the output layer, as DeepSpeed's AutoTP leaves them."""

    def divide(param: Parameter) -> Parameter:
        if only_layers and not 0 <= param.place < shape.layers:
            return param
        return dataclasses.replace(
            param, elements=math.ceil(param.elements / ranks), rows=math.ceil(param.rows / ranks)
        )

    return dataclasses.replace(shape, params=tuple(map(divide, shape.params)))


def is_packed(shape: ModelShape, param: Parameter) -> bool:
    """Whether bitsandbytes quantizes a parameter: the frozen matrix of a linear layer, other than the output layer's.
    A model of several has embeddings between the layers, too."""
    if param.is_linear is not None:
        return param.is_linear and not param.trained
    is_matrix = 0 <= param.place < shape.layers and param.name.endswith(".weight") and param.rows < param.elements
    return is_matrix and not param.trained


# Default sequence length in tokens.
USUAL_LENGTH = 2048


def resolve_length(shape: ModelShape, requested: int | None, default: int = USUAL_LENGTH) -> int:
    """Return the sequence length: by default the model's maximum, up to `default`; UserError if it is longer than its
    table of positions."""
    if shape.positions is None:
        return requested or default
    if requested is not None and requested > shape.positions and shape.has_position_table:
        raise UserError(
            f"{shape.name[:80]} has {shape.positions} positions, too few for sequences of {requested} tokens",
            f"use {shape.positions} or less",
        )
    return requested or min(default, shape.positions)


def resolve_lengths(shape: ModelShape, requested: int | None, target: int | None) -> tuple[int, int | None]:
    """Return the sequence length, and that of a decoder if it has another one; UserError if a model has no decoder, or
    if a length is too long."""
    if target is None:
        return resolve_length(shape, requested), None
    if not shape.has_decoder:
        problem = f"{shape.name[:80]} has no encoder next to a decoder, whose tokens --target_length sets"
        raise UserError(problem, "leave it out")
    if shape.encoder_reads_tokens:
        length, decoder_length = resolve_length(shape, requested), resolve_length(shape, target)
        return length, None if decoder_length == length else decoder_length
    if requested is not None and requested != target:
        problem = (
            f"the encoder of {shape.name[:80]} reads no tokens: --seq_length and --target_length set the decoder's"
        )
        raise UserError(problem, "leave one of them out")
    return resolve_length(shape, target), None
