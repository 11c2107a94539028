"""Structure and traced figures of any class of transformers, from its config.json, on fake tensors without data.

The only module of predictions that imports torch, imported on request. The structure is that of the live model: tied
weights, shared modules and buffers included. A trace runs one layer of each distinct kind, and study/predictor/live.py
multiplies its figures by the number of such layers. It counts every storage that the dispatcher allocates, from its
creation to its release, without the weights. Fused attention is torch's without a mask, as on a GPU. For hardware with
GPUs the operations that CUDA's autocast computes in fp32 are in fp32.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import itertools
import logging
import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from study.config.errors import UserError, describe_cause, did_you_mean, first_line
from study.config.flags import RunConfig
from study.workloads.architecture import add_adapters
from study.workloads.presets import TEXT_MODEL_SIZES

# A forward pass with more has a loop over its tokens, and a trace takes minutes: Mamba and RWKV without their kernels.
MAX_OPERATIONS = 10_000
# Per token such a loop has the same bytes at any length; kernels of mamba-ssm save fewer.
SHORTER_SAMPLES = (
    "--seq_length 128 with as many tokens in a larger --micro_batch has the same bytes, an upper bound of those with"
    " kernels (mamba-ssm)"
)
# Of the towers of images: attention within windows is an operation for each.
MAX_TOWER_OPERATIONS = 100_000
# Of 14 or 16 pixels each, on a side of an image for a tower that takes images of any size.
USUAL_PATCHES = 32
# Samples of the first pass: enough that activations exceed the gradient of a weight in most layers.
SAMPLES = 4
_FUSED = "traced_without_mask"
# peft's names of the module under an adapter, of adapters and of copies.
_BASE, _ADDED = ".base_layer", (".lora_", ".modules_to_save")
# deepspeed/runtime/zero/leaf_module_config.py: modules whose parameters stage 3 gathers together, inner ones included.
_LEAVES = {"MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"}
_HEADS = ("MULTIMODAL_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION")
# Inputs of a model of text that a tower reads, with the method that calls it.
_TOWERS = {"pixel_values": ("get_image_features", "images"), "input_features": ("get_audio_features", "sounds")}
# Names of transformers for a size, the most common one first.
_SIZES = {
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "heads": ("num_attention_heads", "num_heads", "n_head"),
    "inner": ("moe_intermediate_size", "intermediate_size", "ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"),
}


def survey(
    document: Mapping[str, Any],
    rank: int | None,
    targets: Sequence[str] = (),
    saved: Sequence[str] = (),
    dora: bool = False,
    frozen: Sequence[str] = (),
) -> dict[str, Any]:
    """Return layers, owners, parameters and shape of the model that a config.json describes, with LoRA of a rank or
    with frozen modules."""
    # Where from_pretrained creates a model: on fake tensors it takes twice as long.
    with torch.device("meta"):
        model = build_model(document, rank, "eager", dropout=True, targets=targets, saved=saved, dora=dora)
        freeze(model, frozen)
    structure = _Structure(model)
    text = model.config.get_text_config()
    sizes = _read_sizes(text)
    active = _read_largest(text, "num_experts_per_tok")
    fsdp2_groups, fsdp1_groups = structure.fsdp2_groups(), structure.fsdp1_groups()
    return {
        "units": structure.units,
        "recomputed": structure.recomputed,
        "owners": structure.owners,
        "reads_words": model.main_input_name == "input_ids",
        "embedding": next((name for name, module in model.named_modules() if module is structure.embedding), ""),
        "active": active,
        "image_patches": _assumed_patches(model),
        "has_towers": _has_towers(model),
        "class": type(model).__name__,
        "is_stand_in": document["model_type"] not in transformers.CONFIG_MAPPING,
        "sdpa": bool(type(model)._supports_sdpa) and getattr(text, "attn_logit_softcapping", None) is None,
        "other_attentions": _other_attentions(type(model)),
        "flash_kernels": type(model)._compatible_flash_implementations or [],
        "rotary": _computes_positions(model),
        "gated": structure.is_gated(sizes["hidden"], sizes["inner"]),
        "rms_norms": structure.has_rms_norms,
        "params": structure.rows(fsdp2_groups),
        "shape": {
            "family": "causal-lm" if _head(document)[1] else "sequence-classification",
            "layers": len(structure.units),
            **sizes,
            "inner": sizes["inner"] * (active or 1),
            "tied": structure.is_tied,
            "embedding_index": structure.embedding_index,
            "key_value_heads": _read_largest(text, "num_key_value_heads") or sizes["heads"],
            "head_dim": _read_largest(text, "head_dim") or sizes["hidden"] // sizes["heads"],
            "vocabulary": getattr(text, "vocab_size", None) or model.config.num_labels,
            "positions": _positions(model, text),
            "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
            "fsdp_refusal": structure.refusal(fsdp2_groups, version=2),
            "fsdp1_refusal": structure.refusal(fsdp1_groups, version=1),
            "has_decoder": _has_decoder(model),
            "encoder_reads_tokens": "input_ids" in inspect.signature(model.forward).parameters,
        },
    }


def _other_attentions(model_class: Any) -> list[str]:
    """Return the names of the fused attentions that a class has whatever its sdpa; none if no attention can be
    registered, as the trace does."""
    if not model_class._supports_attention_backend:
        return []
    supported = {
        "flash_attention_2": model_class._supports_flash_attn,
        "flex_attention": model_class._supports_flex_attn,
    }
    return [name for name, is_supported in supported.items() if is_supported]


class _Structure:
    """Layers, modules and parameters of a model, which are numbered in the model's order."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.units = _units(model)
        self.parameters = list(model.named_parameters())
        self.index = {id(parameter): number for number, (_, parameter) in enumerate(self.parameters)}
        # Parameters of each module itself.
        self.owners = {
            name: [self.index[id(parameter)] for parameter in module._parameters.values() if parameter is not None]
            for name, module in model.named_modules(remove_duplicate=False)
        }
        self.embedding = _call(model.get_input_embeddings)
        self.head = _call(model.get_output_embeddings)

    @property
    def recomputed(self) -> list[int]:
        """Numbers of the layers that gradient checkpointing recomputes."""
        layers = map(self.model.get_submodule, self.units)
        return [number for number, layer in enumerate(layers) if isinstance(layer, GradientCheckpointingLayer)]

    @property
    def _embedding_weight(self) -> Any:
        return getattr(self.embedding, "weight", None)

    @property
    def is_tied(self) -> bool:
        """Whether the head has the embedding's weight."""
        weight = self._embedding_weight
        return weight is not None and weight is getattr(self.head, "weight", None)

    @property
    def embedding_index(self) -> int:
        """Number of a tied embedding."""
        return self.index[id(self._embedding_weight)] if self.is_tied else 0

    def find_unit(self, name: str) -> str:
        """Return the layer that contains a module or parameter; empty if none does."""
        return next((unit for unit in self.units if f"{name}.".startswith(f"{unit}.")), "")

    def places(self) -> list[int]:
        """Return the layer of each parameter; outside the layers that before it, and at the end their number."""
        places, earlier = list[int](), set[str]()
        for name, _ in self.parameters:
            unit = self.find_unit(name)
            if unit:
                earlier.add(unit)
            places.append(self.units.index(unit) if unit else len(earlier) - 1)
        in_layers = (number for name, numbers in self.owners.items() if self.find_unit(name) for number in numbers)
        last = max(in_layers, default=0)
        return [len(self.units) if number > last else place for number, place in enumerate(places)]

    def is_gated(self, hidden: int, inner: int) -> bool:
        """Whether a feed-forward block has a gate: three matrices of hidden x inner width, or one of twice that."""
        matrices = collections.Counter[str]()
        for name, parameter in self.parameters:
            if parameter.dim() < 2 or not self.find_unit(name):
                continue
            sizes = sorted(parameter.shape[-2:])
            if sizes == sorted((hidden, 2 * inner)):
                return True
            if sizes == sorted((hidden, inner)):
                module = name.removesuffix(".weight").removesuffix(_BASE)
                matrices[module.rpartition(".")[0]] += 1
        return 3 in matrices.values()

    @property
    def has_rms_norms(self) -> bool:
        """Whether layers have norms of transformers' own code with only a scale, as Llama's: they compute in fp32."""
        modules = (module for name, module in self.model.named_modules() if self.find_unit(name))
        return any(_is_rms_norm(module) for module in modules)

    def fsdp2_groups(self) -> Mapping[int, set[str]]:
        """Return the groups of FSDP2 with each parameter."""
        groups = _fsdp_groups(self.model, self.embedding, self.head, self.is_tied)
        return self._by_parameter(groups.__getitem__)

    def fsdp1_groups(self) -> Mapping[int, set[str]]:
        """Return the groups of FSDP1 with each parameter: one for each layer, and one for the rest."""
        return self._by_parameter(self.find_unit)

    def _by_parameter(self, find_group: Callable[[str], str]) -> Mapping[int, set[str]]:
        groups = defaultdict[int, set[str]](set)
        for name, numbers in self.owners.items():
            for number in numbers:
                groups[number].add(find_group(name))
        return groups

    def refusal(self, groups: Mapping[int, set[str]], version: int) -> str | None:
        """Return why torch refuses a parameter that is in two groups; None if there is none."""
        for number, (name, _) in enumerate(self.parameters):
            if len(groups[number]) > 1:
                return f"torch refuses {name}, which modules of two FSDP{version} groups share"
        return None

    def quantizable(self) -> set[int]:
        """Return the numbers of the weights that transformers replaces by those of bitsandbytes: of linear layers
        (replace_with_bnb_linear), without the output layer, tied weights, the last module (get_keys_to_not_convert in
        quantizers/base.py) and those that stay in fp32, whatever adapters are added later."""
        names = [name for name, _ in self.parameters if not any(part in name for part in _ADDED)]
        last = names[-1].replace(_BASE, "").removesuffix(".weight")
        excluded = (last, *(getattr(self.model, "_keep_in_fp32_modules", None) or ()))
        owners = collections.Counter(number for numbers in self.owners.values() for number in numbers)
        numbers = set[int]()
        for name, module in self.model.named_modules():
            if type(module) is not torch.nn.Linear and not isinstance(module, Conv1D):
                continue
            plain, number = name.replace(_BASE, ""), self.index[id(module.weight)]
            is_excluded = any(plain.endswith(key) or f"{plain}.".startswith(f"{key}.") for key in excluded)
            if not is_excluded and owners[number] == 1 and module is not self.head:
                numbers.add(number)
        return numbers

    def rows(self, groups: Mapping[int, set[str]]) -> list[tuple[Any, ...]]:
        """Return the fields of study/predictor/shape.py's Parameter for each one."""
        linear = self.quantizable()
        return [
            (
                number,
                name,
                parameter.numel(),
                parameter.shape[0] if parameter.dim() else 1,
                place,
                parameter.requires_grad,
                not groups[number] & {"", "tail"},
                number in linear,
            )
            for number, ((name, parameter), place) in enumerate(zip(self.parameters, self.places(), strict=True))
        ]


def _has_decoder(model: Any) -> bool:
    """Whether labels are the tokens of a decoder besides an encoder."""
    return bool(model.config.is_encoder_decoder) and "labels" in inspect.signature(model.forward).parameters


def _is_rms_norm(module: Any) -> bool:
    """Whether a module has one vector, a scale, and no code of torch."""
    vectors = dict(module.named_parameters(recurse=False))
    is_scale = [*vectors] == ["weight"] and vectors["weight"].dim() == 1
    return is_scale and not type(module).__module__.startswith("torch.")


def _read_sizes(text: Any) -> dict[str, int]:
    """Return the sizes of a config by their names in _SIZES; 1 for one that it does not have."""
    sizes = dict[str, int]()
    for what, names in _SIZES.items():
        values = (_read_largest(text, name) for name in names)
        sizes[what] = next((value for value in values if isinstance(value, int) and value), 1)
    return sizes


def _computes_positions(model: Any) -> bool:
    """Whether a model of text computes the angle of any position from the frequencies of RoPE."""
    if model.main_input_name == "pixel_values":
        return False
    frequencies = [name for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]
    return any("vision" not in name and "visual" not in name for name in frequencies)


def _positions(model: Any, text: Any) -> Any:
    """Return the maximum sequence length of a model; None if its config does not limit it."""
    if model.main_input_name == "pixel_values":
        image, patch = getattr(text, "image_size", None), getattr(text, "patch_size", None)
        return (_pair(image)[0] // _pair(patch)[0]) ** 2 + 1 if image and patch else None
    positions = getattr(text, "max_target_positions", getattr(text, "max_position_embeddings", None))
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        # RoBERTa's positions begin after the index of its padding.
        positions -= text.pad_token_id + 1
    return positions


def measure(
    document: Mapping[str, Any],
    rank: int | None,
    mode: str,
    fused: bool,
    cuda: bool,
    dropout: bool,
    length: int,
    targets: Sequence[str] = (),
    saved: Sequence[str] = (),
    lora_dropout: float = 0.0,
    target: int | None = None,
    dora: bool = False,
    frozen: Sequence[str] = (),
    input_gradients: bool = False,
    text_only: bool = False,
) -> dict[str, Any]:
    """Return bytes and FLOPs of a forward and backward pass of few and of twice as many samples, by kind of layer, and
    the module calls; raise the class's own error if it cannot be traced. `target`: the length of a decoder.
    `input_gradients`: the outputs of input embeddings require gradients. `text_only`: towers do not run."""
    with fake_tensors(torch.bfloat16 if mode == "engine" else torch.float32):
        attention = register_fused() if fused else "eager"
        model = build_model(
            document,
            rank,
            attention,
            dropout=dropout,
            targets=targets,
            saved=saved,
            lora_dropout=lora_dropout,
            dora=dora,
        )
        freeze(model, frozen)
        if input_gradients:
            model.enable_input_require_grads()
        names = {module: name for name, module in model.named_modules()}
        units = _units(model)
        # With adapters all layers have the same.
        kinds, counts = _prune(model, units, _gradient_marks(model, units, input_gradients) if frozen else {})
        passes = [
            _Pass(model, names, counts, mode, cuda, make_inputs(model, batch, length, target, text_only=text_only))
            for batch in (SAMPLES, 2 * SAMPLES)
        ]
    return {
        "passes": [item.figures for item in passes],
        "calls": passes[0].calls,
        "counts": counts,
        "kinds": kinds,
        "missing": passes[0].missing or None,
        "samples": SAMPLES,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print no warnings of transformers and torch about kernels and settings of a model that does not run."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def fake_tensors(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors without data, of this type by default."""
    usual, can_group = torch.get_default_dtype(), moe._can_use_grouped_mm
    torch.set_default_dtype(dtype)
    # The grouped product of torch has no fake kernel for fp32; the fallback of transformers saves the same tensors.
    moe._can_use_grouped_mm = lambda *_: False
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        moe._can_use_grouped_mm = can_group
        torch.set_default_dtype(usual)


def _head(document: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the class of the model, and whether it is a causal language model. An encoder is a classifier, as in this
    study's task; other models are what config.json names."""
    kind, classes = document["model_type"], document.get("architectures") or [None]
    config, table = _config_class(document), modeling_auto
    is_encoder = kind in table.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not document.get("is_encoder_decoder", False)
    if is_encoder and kind in table.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and not config().is_encoder_decoder:
        return transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[config], False
    if (model_class := getattr(transformers, str(classes[0]), None)) is not None:
        return model_class, str(classes[0]).endswith("ForCausalLM")
    for head in _HEADS:
        if config in (mapping := getattr(transformers, f"MODEL_FOR_{head}_MAPPING")):
            return mapping[config], head == "CAUSAL_LM"
    return transformers.MODEL_MAPPING[config], False


def _config_class(document: Mapping[str, Any]) -> Any:
    """Return the class of a config, by its model_type or, if transformers does not have that, by its architecture:
    Kimi K2 is a DeepseekV3ForCausalLM. UserError if transformers has neither."""
    kind, classes = document["model_type"], document.get("architectures") or [None]
    if kind in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[kind]
    model_class = getattr(transformers, str(classes[0]), None)
    if (config := getattr(model_class, "config_class", None)) is not None:
        return config
    fix = "give the config.json of a class that transformers has, or the sizes of a Llama: layers=..,hidden=..,.."
    code = ", and the code of a repository is never run" if document.get("auto_map") else ""
    raise UserError(f"transformers {transformers.__version__} has no model_type {kind!s:.40}{code}", fix)


def build_model(
    document: Mapping[str, Any],
    rank: int | None,
    attention: str,
    *,
    dropout: bool,
    targets: Sequence[str] = (),
    saved: Sequence[str] = (),
    lora_dropout: float = 0.0,
    dora: bool = False,
) -> Any:
    """Create the model; UserError if transformers does not support the config. No code of the model runs."""
    try:
        model_class, _ = _head(document)
        config = _config(document, model_class, attention, dropout)
        # Weights without data cannot be drawn.
        with no_init_weights(), _without_stage3():
            model = _create(model_class, config).train()
        model.tie_weights()
        head, text = _call(model.get_output_embeddings), config.get_text_config()
        is_tied = document.get("tie_word_embeddings", text is config or getattr(text, "tie_word_embeddings", True))
        if is_tied is False and head is not None and head.weight is model.get_input_embeddings().weight:
            # Later T5s, Mistral 3, InternVL: from_pretrained does not tie a head whose weight the checkpoint has.
            head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    except UserError:
        raise
    except ImportError as error:
        library = re.search(r"pip install ([\w-]+)", str(error))
        fix = f"pip install {library[1]}" if library else "install it"
        raise UserError(f"this {document['model_type']!s:.40} needs a library: {first_line(error)}", fix) from error
    except Exception as error:
        problem = f"transformers {transformers.__version__} does not build this {document['model_type']!s:.40}"
        raise UserError(f"{problem} ({describe_cause(error)})", "correct config.json") from error
    if rank is not None:
        # The head of a classifier is new, and that of any other model is frozen, as peft leaves it.
        has_new_head = model_class.__name__.endswith("Classification")
        add_fake_adapters(model, rank, has_new_head, targets, saved, lora_dropout, dora=dora)
    return model


def freeze(model: Any, names: Sequence[str]) -> None:
    """Freeze the parameters inside modules of these names; UserError if a name has none, or if all are frozen."""
    for name in names:
        inside = [weight for path, weight in model.named_parameters() if f".{name}." in f".{path}."]
        if not inside:
            modules = dict.fromkeys(part for path, _ in model.named_parameters() for part in path.split(".")[:-1])
            parts = [part for part in modules if not part.isdecimal()]
            fix = f"{did_you_mean(name, parts)}its modules are {', '.join(parts)}"
            raise UserError(f"{type(model).__name__} has no weights in a module {name!s:.40}", fix)
        for weight in inside:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError("all weights are frozen", "leave a module out")


def _config(document: Mapping[str, Any], model_class: Any, attention: str, dropout: bool) -> Any:
    """Return the config of transformers for a training step."""
    config = _config_class(document).from_dict(dict(document))
    if model_class in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.values():
        config.num_labels = 2
        # DeBERTa's class reads the kind of its loss from the values of labels unless it is set.
        config.problem_type = "single_label_classification"
    if attention == _FUSED and not model_class._supports_attention_backend:
        attention = "sdpa"
    config._attn_implementation = attention
    for part in filter(None, [config, *(getattr(config, name, None) for name in config.sub_configs)]):
        part.use_cache = False
        for name, value in vars(part).items() if not dropout else ():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    for name in ("pad_token_id", "decoder_start_token_id") if config.is_encoder_decoder else ():
        setattr(config, name, getattr(config, name, None) or 0)
    return config


@contextlib.contextmanager
def _without_stage3() -> Iterator[None]:
    """Create models inside a class as in a program without DeepSpeed: where stage 3 is on, transformers divides their
    weights over the ranks, and waits for all of these."""
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = reference


def _create(model_class: Any, config: Any) -> Any:
    """Create the model on fake tensors, or on the meta device, as from_pretrained does, if it reads values of tensors
    while it is created (schedules of dropped paths)."""
    try:
        return model_class(config)
    except DataDependentOutputException:
        with unset_fake_temporarily(), torch.device("meta"):
            model = model_class(config)
        return model.to_empty(device="cpu")


def add_fake_adapters(
    model: Any,
    rank: int,
    has_new_head: bool,
    targets: Sequence[str] = (),
    saved: Sequence[str] = (),
    dropout: float = 0.0,
    *,
    dora: bool = False,
) -> None:
    """Add LoRA's adapters. peft moves them to the device of the model and copies the saved modules, but fake tensors
    can neither move nor be copied."""
    task = "bert-imdb" if has_new_head else "gpt-wikitext"
    config = RunConfig(task=task, peft="lora", lora_rank=rank)  # type: ignore[arg-type]
    with (
        _replaced(torch.nn.Module, "to", lambda module, *_, **__: module),
        _replaced(copy, "deepcopy", _copy_with_new_tensors),
    ):
        add_adapters(model, config, targets, saved, dropout, dora=dora)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_deepcopy = copy.deepcopy


def _copy_with_new_tensors(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a deep copy, of a module with new tensors in the place of copies."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.nn.Module):
        for weight in value.parameters():
            memo[id(weight)] = torch.nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
        memo |= {id(buffer): torch.empty_like(buffer) for buffer in value.buffers()}
    return _deepcopy(value, memo)


def register_fused() -> str:
    """Return the name of the fused attention without a mask, as on a GPU, registered with transformers."""

    def fused(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        # The fused kernel of a CPU needs values as wide as the keys, that of a GPU does not (MLA).
        width = Meter.value_widths[query.shape[-1]] = value.shape[-1]
        value = functional.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
        output, weights = sdpa_attention_forward(module, query, key, value, None, **options)
        return output[..., :width], weights

    transformers.AttentionInterface.register(_FUSED, fused)
    AttentionMaskInterface.register(_FUSED, lambda *_, **__: None)
    return _FUSED


def _units(model: Any) -> list[str]:
    """Return the names of the layers: outermost modules that transformers recomputes, or does not split."""
    names, undivided = list[str](), _undivided(model)
    for name, module in model.named_modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in undivided
        if is_layer and name and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    names = [name for name in names if any(True for _ in model.get_submodule(name).parameters())]
    return names or [model.base_model_prefix]


def _undivided(model: Any) -> set[str]:
    """Return the classes of FSDP2's groups. A class around the embedding has none (study/engine/setup.py)."""
    embedding = _call(model.get_input_embeddings)
    around = {
        type(module).__name__ for module in model.modules() if any(embedding is part for part in module.modules())
    }
    return set(model._no_split_modules or ()) - around


def _fsdp_groups(model: Any, embedding: Any, head: Any, is_tied: bool) -> dict[str, str]:
    """Return FSDP2's group of each module, by Accelerate's rules (fsdp2_prepare_model): "" is the root."""
    undivided, groups = _undivided(model), dict[str, str]()
    base = getattr(model, model.base_model_prefix or " ", model)
    norms = [child for child in base.children() if "Norm" in type(child).__name__]
    tail = [module for module in (*norms[-1:], head, embedding if is_tied else None) if module is not None]
    for name, module in model.named_modules(remove_duplicate=False):
        parent = groups.get(name.rpartition(".")[0], "")
        group = name if name and (type(module).__name__ in undivided or (module is embedding and not is_tied)) else ""
        groups[name] = group or parent or ("tail" if any(module is part for part in tail) else "")
    return groups


def _call(function: Callable[[], Any]) -> Any:
    with contextlib.suppress(NotImplementedError, AttributeError):
        return function()
    return None


def _read_largest(config: Any, name: str) -> Any:
    """Return a size; of those that a config lists by layer, the largest."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError of heterogeneous configs.
        value = [getattr(layer, name) for layer in config.per_layer_config]
    return max(value) if isinstance(value, list) and value else value


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _gradient_marks(model: Any, units: list[str], input_gradients: bool) -> dict[str, tuple[bool, ...]]:
    """Return for each layer whether its input has a gradient, and which of its weights are trained."""
    marks, has_gradient = dict[str, tuple[bool, ...]](), input_gradients
    in_layers = itertools.groupby(
        model.named_parameters(), key=lambda item: next((unit for unit in units if item[0].startswith(f"{unit}.")), "")
    )
    for unit, parameters in in_layers:
        trained = [parameter.requires_grad for _, parameter in parameters]
        marks[unit] = (has_gradient, *trained)
        has_gradient = has_gradient or any(trained)
    return marks


def _prune(
    model: Any, units: list[str], marks: Mapping[str, tuple[bool, ...]]
) -> tuple[dict[str, str], dict[str, int]]:
    """Remove layers that are equal to an earlier one of their list, with the same classes, shapes and plain attributes
    of their modules and the same marks. Return the remaining layer of each layer's kind, and the number of layers of
    each."""
    lists = {
        name: children
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and set(children := [f"{name}.{number}" for number in range(len(module))]) <= set(units)
        and children
    }
    first: dict[Any, str] = {}
    kinds = dict[str, str]()
    for unit in units:
        if unit.rpartition(".")[0] not in lists:
            kinds[unit] = first[unit] = unit
            continue
        parts = model.get_submodule(unit).named_modules()
        signature = (
            unit.rpartition(".")[0],
            marks.get(unit),
            *(
                (
                    name,
                    type(part),
                    *((key, tuple(value.shape)) for key, value in part.named_parameters(recurse=False)),
                    *(
                        (key, value)
                        for key, value in vars(part).items()
                        if isinstance(value, (bool, int, float, str)) and not key.endswith(("layer_idx", "layer_id"))
                    ),
                )
                for name, part in parts
            ),
        )
        kinds[unit] = first.setdefault(signature, unit)
    counts = {layer: sum(kind == layer for kind in kinds.values()) for layer in first.values()}
    for name, listed in lists.items():
        module = model.get_submodule(name)
        remaining = [number for number, unit in enumerate(listed) if unit in counts]
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, torch.nn.ModuleList(module[number] for number in remaining))
        while not hasattr(model.get_submodule(parent), "config"):
            parent = parent.rpartition(".")[0]
        config = vars(model.get_submodule(parent).config)
        for key, value in config.items():
            if isinstance(value, list) and len(value) == len(listed) and key.endswith("types"):
                config[key] = [value[number] for number in remaining]
        # Gemma 3n and 4 have inputs of all layers in one tensor.
        if config.get("num_hidden_layers") == len(listed) and not config.get("hidden_size_per_layer_input"):
            config["num_hidden_layers"] = len(remaining)
    return kinds, counts


# Operations of AT_FORALL_FP32 in aten/src/ATen/autocast_mode.h that these models call.
_IN_FP32 = {
    functional.layer_norm,
    functional.softmax,
    functional.log_softmax,
    functional.cross_entropy,
    torch.softmax,
    torch.pow,
    torch.rsqrt,
    torch.sum,
    torch.Tensor.softmax,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    torch.Tensor.rsqrt,
    torch.Tensor.sum,
}


class AsCuda(TorchFunctionMode):
    """Runs the operations that CUDA's autocast computes in fp32 in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

        kwargs = kwargs or {}
        if func in _IN_FP32:
            args, kwargs = tuple(map(widened, args)), {name: widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class Meter(TorchDispatchMode):
    """Counts the bytes of all live storages except those of `outside`, and the FLOPs of matrix products, those of fused
    attention also separately."""

    flops = attention = operations = 0
    # Width of the values before they were padded, by width of the queries.
    value_widths: ClassVar[dict[int, int]] = {}

    def __init__(self, outside: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}
        for value in outside:
            self.see(value)
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for leaf in tree_leaves(result):
            self.see(leaf)
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            query, key = args[1:3] if "backward" in name else args[:2]
            batch, heads, rows, width = query.shape
            flops = 2 * batch * heads * rows * key.shape[2] * (width + self.value_widths.get(width, width))
            flops *= 1 + ("backward" in name)
            self.attention += flops
            self.flops += flops
        elif name.startswith("grouped_mm_fallback"):
            rows, inner = args[0].shape
            self.flops += 2 * rows * inner * args[1].shape[2] * (1 + ("backward" in name))
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def see(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or id(storage := value.untyped_storage()) in self.known:
            return
        key, size = id(storage), storage.nbytes()

        def release(_: Any) -> None:
            self.now -= size
            self.known.pop(key, None)

        self.known[key] = weakref.ref(storage, release)
        self.now += size
        self.peak = max(self.peak, self.now)


class TokenLoop(RuntimeError):
    """A forward pass with more operations than any without a loop over its tokens."""


class OperationLimit(TorchFunctionMode):
    """Ends a forward pass of too many operations, where an exception of Python can pass: a Meter's would end the
    process."""

    def __init__(self, meter: Meter, most: int = MAX_OPERATIONS) -> None:
        super().__init__()
        self.meter, self.most, self.last = meter, most, meter.operations + most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.meter.operations > self.last:
            loop = f"more than {self.most:,} operations, a loop over the tokens"
            raise TokenLoop(f"{loop}: {SHORTER_SAMPLES}")
        return func(*args, **(kwargs or {}))


class _Pass:
    """One forward and backward pass: figures in bytes and FLOPs, by remaining layer, and outside the layers."""

    def __init__(
        self,
        model: Any,
        names: dict[Any, str],
        counts: dict[str, int],
        mode: str,
        cuda: bool,
        samples: tuple[dict[str, Any], dict[str, torch.Tensor]],
    ) -> None:
        self.names = names
        self.missing = ""
        self.layers: dict[str, dict[str, Any]] = {name: {} for name in counts}
        # The module calls as nested lists: a module's name, the modules that it calls, and whether stage 3 gathers all
        # of its parameters at once.
        self.calls: list[Any] = ["", [], False]
        self.stack = [self.calls]
        inputs, media = samples
        self.meter = meter = Meter([*model.parameters(), *model.buffers(), *inputs.values(), *media.values()])
        # By their names in the whole model: the remaining layers have other numbers.
        parameters = {
            parameter: f"{names[module]}.{key}".lstrip(".")
            for module in model.modules()
            for key, parameter in module.named_parameters(recurse=False)
        }
        handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self.arrive, name))
            for parameter, name in parameters.items()
            if parameter.requires_grad
        ]
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self.leave, with_kwargs=True))
        as_cuda = AsCuda() if mode == "autocast" and cuda else contextlib.nullcontext()
        self.masks = defaultdict[str, set[int]](set)
        self.now: str | None = None
        self.arrived = ""
        self.exit = self.began = 0
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
        with meter, autocast, as_cuda:
            try:
                with OperationLimit(meter, MAX_TOWER_OPERATIONS):
                    features = compute_features(model, media)
            except Exception as error:  # Any class of transformers, on tensors without data.
                features, self.layers = [], {name: {} for name in counts}
                kinds = " and ".join(_TOWERS[name][1] for name in media)
                self.missing = (
                    f"activations of its {kinds}, whose tower does not run on tensors without data"
                    f" ({describe_cause(error)}); {TEXT_MODEL_SIZES}"
                )
            if any(feature.requires_grad for feature in features):
                # Features of images and sounds are among the embedded tokens.
                embedding = model.get_input_embeddings()
                handles.append(embedding.register_forward_hook(lambda *call: call[-1].requires_grad_()))
            with OperationLimit(meter):
                loss = compute_loss(model, inputs, features)
            del features
        saved, forward_peak, forward = meter.now, meter.peak, meter.flops
        forward_attention, meter.peak, self.last = meter.attention, meter.now, 0.0
        with meter:
            loss.backward()
        self.boundary(None)
        for handle in handles:
            handle.remove()
        inside = [layer for layer in self.layers.values() if layer]
        self.figures = {
            "layers": self.layers,
            "tail": saved - self.exit,
            "tail_forward": forward_peak - saved,
            "tail_backward": self.last - saved,
            "forward": forward,
            "attention": forward_attention,
            "backward": meter.flops - forward,
            "gradient": _largest(
                (name, parameter)
                for parameter, name in parameters.items()
                if not any(name.startswith(f"{unit}.") for unit in self.layers)
            ),
            "outside": self.exit - sum(layer["saved"] for layer in inside),
        }

    def enter(self, module: Any, args: Any, kwargs: Any) -> None:
        name, meter = self.names[module], self.meter
        self.stack[-1][1].append([name, [], type(module).__name__ in _LEAVES])
        self.stack.append(self.stack[-1][1][-1])
        if name in self.layers:
            stream, *other_inputs = _floats((*args, *kwargs.values()))
            meter.peak = meter.now
            self.layers[name] = {
                "saved": -meter.now,
                "forward": -meter.flops,
                "attention": -meter.attention,
                "checkpoint": stream.nbytes,
                "stream": stream.numel(),
                "masks": self.add_masks(name, other_inputs),
                "working": {},
                "backward": 0.0,
                "recomputed": isinstance(module, GradientCheckpointingLayer),
                "gradient": _largest(module.named_parameters()),
            }
            if stream.requires_grad:
                stream.register_hook(lambda _: self.boundary(None, ends=name))

    def add_masks(self, name: str, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of masks and position biases that no earlier layer of the list reads: recomputed layers
        save them as inputs, and others need not."""
        known_masks = self.masks[name.rpartition(".")[0]]
        masks = {id(mask.untyped_storage()): mask.nbytes for mask in tensors if mask.dim() == 4}
        added = {key: size for key, size in masks.items() if key not in known_masks}
        known_masks.update(added)
        return sum(added.values())

    def leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        name, meter = self.names[module], self.meter
        _, children, is_leaf = self.stack.pop()
        if is_leaf:
            children.clear()
        if name in self.layers:
            layer = self.layers[name]
            stream, *states = _floats(tree_leaves(output))
            # Temporaries of the recomputation, and tensors besides the stream for later layers (T5's position biases).
            layer["recomputing"] = meter.peak - meter.now
            storages = {id(tensor.untyped_storage()) for tensor in (*_floats(tree_leaves((args, kwargs))), stream)}
            states = [state for state in states if id(state.untyped_storage()) not in storages]
            layer["checkpoint"] += sum(state.nbytes for state in states)
            layer["carried"] = sum(state.nbytes for state in states if state.requires_grad)
            self.exit = meter.peak = meter.now
            layer["saved"] += meter.now
            layer["forward"] += meter.flops
            layer["attention"] += meter.attention
            layer["exit"] = meter.now
            if not stream.requires_grad:
                # A frozen layer before all trained ones saves nothing, and is not recomputed.
                layer["checkpoint"], layer["recomputed"] = 0, False
            if stream.requires_grad:
                stream.register_hook(lambda _: self.boundary(name))

    def boundary(self, begins: str | None, ends: str | None = None) -> None:
        """End a layer's part of the backward pass, and begin another one's. Before the first one it is the head's."""
        meter = self.meter
        if ends is not None and ends != self.now:
            return
        if self.now is not None:
            self.arrive("")
            self.layers[self.now]["backward"] += meter.flops - self.began
        elif not self.last:
            self.last = meter.peak
        self.now, self.began, meter.peak = begins, meter.flops, meter.now

    def arrive(self, name: str, parameter: Any = None) -> None:
        """Drop a gradient, and record the temporaries since the gradient before it."""
        if parameter is not None:
            parameter.grad = None
        if self.now is not None:
            layer, meter = self.layers[self.now], self.meter
            above = meter.peak - layer["exit"]
            layer["working"][self.arrived] = max(above, layer["working"].get(self.arrived, above))
            self.arrived, meter.peak = name, meter.now


def _floats(values: Any) -> list[torch.Tensor]:
    floats = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return floats or [torch.empty(0)]


def _largest(parameters: Any) -> int:
    return max((parameter.nbytes for _, parameter in parameters if parameter.requires_grad), default=0)


def compute_features(model: Any, media: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return the features of the images and sounds that are inputs of a model of text."""
    leaves = list[Any]()
    for name, value in media.items():
        grid_tower = find_grid_tower(model) if name == "pixel_values" else None
        if grid_tower is None:
            leaves += tree_leaves(getattr(model, _TOWERS[name][0])(**{name: value}))
        else:
            leaves += tree_leaves(_run_grid_tower(grid_tower, value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def find_grid_tower(model: Any) -> Any:
    """Return the module that takes patches of images of any size, and their grid; None without one."""
    towers = (module for module in model.modules() if "grid_thw" in inspect.signature(module.forward).parameters)
    return next((tower for tower in towers if hasattr(tower.config, "spatial_merge_size")), None)


def patches_of_a_side(tower: Any) -> int:
    """Return the patches on a side of an image: of an image_size in config.json, or of the usual size."""
    size, merge = getattr(tower.config, "image_size", None), tower.config.spatial_merge_size
    side = int(size) // int(tower.config.patch_size) if isinstance(size, int) else USUAL_PATCHES
    return int(max(merge, side // merge * merge))


def _assumed_patches(model: Any) -> int:
    """Return the patches on a side of an image whose size config.json does not have; 0 if it has one."""
    tower = find_grid_tower(model)
    is_open = tower is not None and not isinstance(getattr(tower.config, "image_size", None), int)
    return patches_of_a_side(tower) if is_open else 0


def _has_towers(model: Any) -> bool:
    """Whether a model of text reads images or sounds, too, which samples may lack."""
    inputs = inspect.signature(model.forward).parameters.keys() & _TOWERS.keys()
    is_of_pairs = "return_loss" in inspect.signature(model.forward).parameters
    return bool(inputs) and model.main_input_name == "input_ids" and not is_of_pairs


def _run_grid_tower(tower: Any, pixels: torch.Tensor) -> Any:
    """Run a tower over patches. What its forward pass reads from the numbers of the grid is computed here with data,
    by transformers' own functions, as it allows (vision_utils.py)."""
    # Older releases do not have it, and their towers have no verdict.
    from transformers import vision_utils

    side, merge = patches_of_a_side(tower), tower.config.spatial_merge_size
    images = pixels.shape[0] // side**2
    with unset_fake_temporarily():
        grid = torch.tensor([[1, side, side]] * images)
        # Lengths of attention are read as Python numbers, which an array of numpy has.
        computed: dict[str, Any] = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid).numpy(),
        }
        if hasattr(tower, "window_size"):
            index, lengths = vision_utils.get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
            computed |= {"window_index": index, "cu_window_seqlens": lengths.numpy()}
        if hasattr(tower, "interpolation_mode"):
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            computed |= {"interp_indices": indices, "interp_weights": weights}
    return tower(pixels, grid_thw=grid, **computed)


def compute_loss(model: Any, inputs: Mapping[str, Any], features: list[Any]) -> Any:
    """Return the loss of a forward pass, which depends on the features too."""
    output = model(**inputs)
    loss = output.loss if getattr(output, "loss", None) is not None else next(iter(output.values())).sum()
    return sum((feature.sum() for feature in features), loss)


def make_inputs(
    model: Any, batch: int, length: int, target: int | None = None, *, text_only: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the tensors of samples for the model's forward pass, and an image and a sound of each for its towers;
    without these if samples are `text_only`. `target`: tokens of a decoder, which without it has as many as its
    encoder."""
    config, accepted = model.config, inspect.signature(model.forward).parameters
    vision, audio = (getattr(config, f"{kind}_config", config) for kind in ("vision", "audio"))
    inputs, media = dict[str, Any](), dict[str, torch.Tensor]()
    if "input_features" in accepted and audio is not None:
        size = getattr(audio, "num_mel_bins", 1), 2 * getattr(audio, "max_source_positions", 1)
        (inputs if hasattr(config, "num_mel_bins") else media)["input_features"] = torch.zeros(batch, *size)
    if "pixel_values" in accepted and (tower := find_grid_tower(model)) is not None:
        patch = next(parameter for name, parameter in tower.named_parameters() if "patch_embed" in name)
        pixels = patch.numel() // patch.shape[0]
        media["pixel_values"] = torch.zeros(batch * patches_of_a_side(tower) ** 2, pixels)
    elif "pixel_values" in accepted:
        size = _pair(getattr(vision, "image_size", 1))
        channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
        is_main = model.main_input_name == "pixel_values" or "return_loss" in accepted
        (inputs if is_main else media)["pixel_values"] = torch.zeros(batch, channels, *size)
        if hasattr(config, "vision_feature_layer"):
            config.vision_feature_layer = -1
    if "input_ids" in accepted:
        inputs["input_ids"] = torch.zeros(batch, length, dtype=torch.long)
    if "return_loss" in accepted:
        inputs["return_loss"] = True
    if "labels" in accepted:
        name = type(model).__name__
        is_classifier = "Classification" in name and "TokenClassification" not in name
        tokens = target if target is not None and _has_decoder(model) else length
        inputs["labels"] = torch.zeros(*((batch,) if is_classifier else (batch, tokens)), dtype=torch.long)
    return inputs, {} if text_only else media
