"""Shapes of classes outside the table of families, from transformers' own model, and the answers of live_trace.py.

Does not import torch: study/predictor/live_trace.py does if the user's cache has no answer for this architecture, its
libraries and the code that traces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError, clip, describe_cause, first_line, require_extra
from study.config.printing import progress_line
from study.host.folders import cache_directory
from study.predictor.lora_targets import peft_targets
from study.predictor.shape import (
    BEFORE,
    FUSED_ATTENTIONS,
    Call,
    ModelShape,
    Parameter,
    calls_without_gradient,
    can_adapt,
)
from study.records.directory import write_json
from study.workloads.presets import TEXT_MODEL_SIZES, check_depth

# Keys of a config.json for the layers of a model, and for the text model of one with images or sounds.
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TEXT_PARTS = ("text_config", "llm_config", "thinker_config")
# Pixels a side of the usual images of transformers' convolutional classes.
USUAL_IMAGE = 224


@dataclasses.dataclass(frozen=True)
class LiveShape(ModelShape):
    """The shape of a class outside the table, as transformers builds it."""

    is_traced = True

    # Frozen modules before all trained ones have no backward pass under gradient checkpointing, either.
    stops_at_frozen: bool = False
    # Samples have no images and sounds, so that the towers for them do not run.
    text_only: bool = False
    survey: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False, compare=False)

    @property
    def fused_attentions(self) -> tuple[str, ...]:
        return FUSED_ATTENTIONS if self.survey["sdpa"] else tuple(self.survey["other_attentions"])

    @property
    def flash_kernels(self) -> tuple[str, ...]:
        return tuple(self.survey["flash_kernels"])

    @property
    def has_position_table(self) -> bool:
        return not self.survey["rotary"]

    @property
    def looked_up(self) -> int | None:
        owned: Sequence[int] = self.survey["owners"].get(self.survey["embedding"], ())
        return next((number for number in owned if not self.params[number].trained), None)

    def has_input_gradients(self, recomputes: bool) -> bool:
        has_frozen = bool(self.frozen_modules) and not self.stops_at_frozen
        return recomputes and has_frozen and bool(self.survey["reads_words"])

    def recomputes(self, layer: int) -> bool:
        return layer in self.survey["recomputed"]

    def gathered_once(self, recomputes: bool) -> frozenset[int]:
        if not self.frozen_modules or self.has_input_gradients(recomputes):
            return frozenset()
        return _gathered_once(self)

    @functools.cached_property
    def stack_sizes(self) -> tuple[int, ...]:
        # Layers of a list of modules follow each other.
        lists = itertools.groupby(self.survey["units"], key=lambda unit: unit.rpartition(".")[0])
        return tuple(len(list(units)) for _, units in lists)

    @property
    def has_rms_norms(self) -> bool:
        return bool(self.survey["rms_norms"])

    @property
    def caps_logits(self) -> bool:
        # The trace has the product's saved tensors.
        return False

    def part_of_backward(self, param: Parameter) -> str:
        return param.name

    def part_of_any_layer(self, layer: int, part: str) -> str:
        return part.removeprefix(f"{self.survey['units'][layer]}.")

    def find_layer(self, param: Parameter) -> int:
        # The place of a parameter between two layers is the first of them.
        layer = super().find_layer(param)
        return layer if layer != BEFORE and param.name.startswith(f"{self.survey['units'][layer]}.") else BEFORE

    def module_path(self, param: Parameter) -> str:
        return param.name.rpartition(".")[0]

    @property
    def outside_modules(self) -> tuple[str, ...]:
        matrices = (param for param in self.params if param.elements > param.rows and not can_adapt(self, param))
        return tuple(map(self.module_path, matrices))

    def add_adapters(
        self, rank: int, targets: tuple[str, ...], saved: tuple[str, ...] = (), *, dora: bool = False
    ) -> LiveShape:
        adapted = live_shape(self.name, json.loads(self.document), rank, targets, saved, dora=dora)
        return dataclasses.replace(
            adapted,
            quantized_by=self.quantized_by,
            has_usual_images=self.has_usual_images,
            text_only=self.text_only,
        )

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        yield (
            "this class is outside the table of families: its activations and FLOPs are traced on transformers' code,"
            " and no published measurement validates its peak or its time"
        )
        if self.has_usual_images:
            yield f"images of {USUAL_IMAGE} x {USUAL_IMAGE} pixels; an image_size in config.json changes it"
        if self.text_only:
            idle = "samples are text alone: the towers of images and sounds are in memory, and do not run"
            yield f"{idle}; DDP needs find_unused_parameters if weights of a tower are trained"
        elif has_towers(self):
            side, merged = self.survey.get("image_patches", 0), "whose tokens are among those of the sample"
            size = f" of {side} x {side} patches" if side else " or sound"
            changes = "an image_size in vision_config changes it, and " if side else ""
            yield f"one image{size} a sample, {merged}; {changes}--text_only counts none"
        if self.active_experts:
            reach = f"every token reaches its {self.active_experts} experts, none is dropped or padded"
            yield f"experts are grouped products without capacity: {reach}"

    def module_calls(self) -> tuple[Call, dict[int, Call]]:
        """Return the calls in the order of a trace, or in that of the model's modules without a trace."""
        length = min(64, self.positions or 64)
        has_sdpa = self.survey["sdpa"]
        answer = measure(self, mode="engine", dropout=False, fused=has_sdpa, cuda=True, length=length)
        called: list[Any] = []
        kinds = dict[str, str]()
        if not isinstance(answer, str):
            # The towers of images are called before the model.
            *towers, (_, model_calls, _) = answer["calls"][1]
            called = [*towers, *model_calls]
            kinds = answer["kinds"]
        calls = _TracedCalls(self, kinds)
        root = calls.add(["", called, False])
        untraced = () if self.text_only else calls.untraced()
        return dataclasses.replace(root, inside=(*untraced, *root.inside)), calls.layers


def has_towers(shape: ModelShape) -> bool:
    """Whether a model of text has towers for images or sounds, which samples may lack."""
    return isinstance(shape, LiveShape) and bool(shape.survey["has_towers"])


def without_media(shape: ModelShape) -> LiveShape:
    """Return the shape of samples without images and sounds; UserError if the model reads none besides text."""
    if not isinstance(shape, LiveShape) or not has_towers(shape):
        raise UserError(f"--text_only has no effect: {shape.name} has no tower of images or sounds", "leave it out")
    return dataclasses.replace(shape, text_only=True)


def with_frozen(shape: ModelShape, modules: tuple[str, ...], *, stops: bool = False) -> LiveShape:
    """Return the shape of transformers' class with frozen modules; UserError if a module is not there. `stops`: those
    before all trained ones have no backward pass under gradient checkpointing, either."""
    frozen = live_shape(shape.name, json.loads(shape.document), frozen=modules)
    return dataclasses.replace(
        frozen,
        quantized_by=shape.quantized_by,
        has_usual_images=shape.has_usual_images,
        text_only=isinstance(shape, LiveShape) and shape.text_only,
        stops_at_frozen=stops,
    )


@functools.lru_cache(maxsize=64)
def _gathered_once(shape: LiveShape) -> frozenset[int]:
    """Return the numbers of parameters that FSDP2 gathers for the forward pass alone: their outputs have no gradient.

    It prefetches the group that ran before the one whose backward pass begins, so that the last layer without a
    gradient is gathered in vain (_backward_prefetch in torch's _fsdp_param_group.py).
    """
    calls = shape.module_calls()[0].flat()
    without = calls_without_gradient(calls, shape.looked_up)
    once = {param for call in calls if id(call) in without for param in call.params}
    last = max(map(shape.find_layer, once), default=BEFORE)
    return frozenset(param.index for param in once if shape.find_layer(param) != last)


class _TracedCalls:
    """Calls of modules from a trace, which has one layer of each kind.

    An entry of the trace is a module's name, the entries inside it, and whether it was called as a whole.
    """

    def __init__(self, shape: LiveShape, kinds: Mapping[str, str]) -> None:
        self.shape = shape
        # By layer, the one that was traced in its place.
        self.kinds = kinds
        # Parameters of each module, by their numbers.
        self.owners: Mapping[str, Sequence[int]] = shape.survey["owners"]
        self.units = {unit: place for place, unit in enumerate(shape.survey["units"])}
        self.layers = dict[int, Call]()
        self.used = set[int]()

    def add(self, entry: Any, source: str = "", target: str = "", unit: int | None = None) -> Call:
        """Return the call of an entry; that of layer `source` stands for layer `target`."""
        name, children, is_whole = entry
        name = target + name[len(source) :]
        unit = self.units.get(name, unit)
        params = self._take_params(name, is_whole)
        inside = list[Call]()
        listed = set[str]()
        for child in children:
            parent = child[0].rpartition(".")[0]
            if source or child[0] not in self.units:
                inside.append(self.add(child, source, target, unit))
            elif parent not in listed:
                listed.add(parent)
                inside += self._add_layers(parent, children)
        call = Call(self._find_place(params, unit), params, tuple(inside))
        if unit is not None:
            self.layers[unit] = call
        return call

    def _add_layers(self, parent: str, traced: Iterable[Any]) -> list[Call]:
        """Return the layers of a list, which follow each other, each as the traced one of its kind."""
        entries = {entry[0]: entry for entry in traced}
        return [
            self.add(entries[kind], kind, layer)
            for layer, kind in self.kinds.items()
            if layer.rpartition(".")[0] == parent and kind in entries
        ]

    def _take_params(self, name: str, is_whole: bool) -> tuple[Parameter, ...]:
        """Return the parameters of a module; of all modules inside it if it was called as a whole."""
        numbers = dict.fromkeys(self.owners.get(name, ()))
        if is_whole:
            for owner, owned in self.owners.items():
                if f"{owner}.".startswith(f"{name}."):
                    numbers |= dict.fromkeys(owned)
        self.used.update(numbers)
        return tuple(self.shape.params[number] for number in numbers)

    def _find_place(self, params: Sequence[Parameter], unit: int | None) -> int:
        if unit is not None:
            return unit
        # Modules called after all layers use their parameters there, even those of a tied embedding.
        are_done = len(self.layers) == self.shape.layers
        return self.shape.layers if not params or are_done else params[0].place

    def untraced(self) -> list[Call]:
        """Return the calls of modules that no entry has: a tower that cannot be traced, in the order of its modules."""
        calls = list[Call]()
        for numbers in self.owners.values():
            params = tuple(self.shape.params[number] for number in numbers if number not in self.used)
            if params:
                calls.append(Call(params[0].place, params))
        return calls


def live_shape(
    name: str,
    document: Mapping[str, Any],
    rank: int | None = None,
    targets: tuple[str, ...] = (),
    saved: tuple[str, ...] = (),
    *,
    dora: bool = False,
    frozen: tuple[str, ...] = (),
) -> LiveShape:
    """Return the shape of the model that a config.json describes; UserError if transformers does not build it."""
    document = trained_part(document)
    # Names and places of files change nothing.
    architecture = {key: document[key] for key in document if key not in ("_name_or_path", "transformers_version")}
    if takes_images_of_any_size(architecture):
        architecture["image_size"] = USUAL_IMAGE
    text = json.dumps(architecture, sort_keys=True)
    for part in (architecture, *(value for value in architecture.values() if isinstance(value, dict))):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth"):
            if isinstance(part.get(key), int):
                check_depth(part[key], name)
    survey = answer("survey", text, rank, _with_modules({}, targets, saved, dora, frozen))
    return LiveShape(
        name=name,
        model_type=str(document["model_type"]),
        params=tuple(Parameter(*row) for row in survey["params"]),
        gated=survey["gated"],
        lora_rank=rank,
        lora_targets=targets,
        lora_saved=saved,
        lora_dora=dora,
        frozen_modules=frozen,
        document=text,
        built_class=survey["class"],
        is_stand_in=survey["is_stand_in"],
        active_experts=survey["active"] or 0,
        has_usual_images=takes_images_of_any_size(document),
        survey=survey,
        **survey["shape"],
    )


def trained_part(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that is trained: of Qwen's Omni models the thinker, not what speaks."""
    part = document.get("thinker_config")
    return part if isinstance(part, Mapping) and "model_type" in part else document


def takes_images_of_any_size(document: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a class for images of any size, as ResNet's."""
    return "num_channels" in document and "image_size" not in document


def _with_modules(
    options: Mapping[str, Any],
    targets: tuple[str, ...],
    saved: tuple[str, ...],
    dora: bool,
    frozen: tuple[str, ...] = (),
) -> str:
    """Return the options of an answer as JSON, with the modules that have adapters unless all linear layers have,
    those with a trained copy, whether the adapters are DoRA's, and the frozen modules."""
    adapters = {"targets": peft_targets(targets), "saved": saved, "dora": dora, "frozen": frozen}
    modules = {name: value for name, value in adapters.items() if value}
    return json.dumps({**options, **modules}, sort_keys=True)


@functools.lru_cache(maxsize=64)
def measure(shape: LiveShape, **options: bool | int | str) -> dict[str, Any] | str:
    """Return the answer of a trace, or why there is none."""
    # A loop over the tokens is one in every precision.
    work = shape.document, options["length"], options.get("target")
    if work in _loops:
        return _loops[work]
    if shape.text_only:
        options["text_only"] = True
    try:
        text = _with_modules(options, shape.lora_targets, shape.lora_saved, shape.lora_dora, shape.frozen_modules)
        return answer("measure", shape.document, shape.lora_rank, text)
    except UserError:
        raise
    except Exception as error:  # Any class of transformers, on tensors without data.
        if type(error).__name__ == "TokenLoop":
            _loops[work] = first_line(error)
            return _loops[work]
        cause = describe_cause(error)
        return f"transformers' {shape.built_class} does not run on tokens without data ({cause}); {_sizes(shape)}"


def _sizes(shape: LiveShape) -> str:
    """Return the sizes that have a verdict in place of a class without one: those of its text model or, without any, of
    its layers."""
    document = json.loads(shape.document)
    layers = next((document[key] for key in _LAYER_KEYS if key in document), None)
    if layers is None or any(isinstance(document.get(part), dict) for part in _TEXT_PARTS):
        return TEXT_MODEL_SIZES
    sizes = f"layers={layers},hidden={shape.hidden},heads={shape.heads},vocabulary={shape.vocabulary}"
    return f"these sizes have a verdict, of its layers alone: {sizes}"


_loops: dict[tuple[str, bool | int | str, bool | int | str | None], str] = {}


@functools.lru_cache(maxsize=64)
def answer(kind: Literal["survey", "measure"], document: str, rank: int | None, options: str = "{}") -> dict[str, Any]:
    """Return an answer of live_trace.py, from the user's cache if it has one."""
    key = hashlib.sha256(json.dumps([kind, document, rank, options, _libraries()]).encode()).hexdigest()
    file = cache_directory() / "traces" / f"{key}.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        pass
    result = TRACER.get()(kind, document, rank, options)
    # A cache that cannot be written costs only time.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
    return result


def _trace(kind: str, document: str, rank: int | None, options: str) -> dict[str, Any]:
    """Trace a model in this process."""
    config = json.loads(document)
    reason = f"{config.get('model_type')} is not in the table of families, so transformers' code is traced: "
    # Of a first trace torch and transformers are imported, too.
    doing = f"tracing transformers' code of {clip(config.get('model_type'))} on tensors without data ..."
    with require_extra("train", reason), progress_line(doing, in_logs=True):
        from study.predictor import live_trace

        run = live_trace.survey if kind == "survey" else live_trace.measure
        with live_trace.quiet():
            return dict(run(config, rank, **json.loads(options)))


# What answers if the cache does not; `study serve` asks another process.
TRACER = ContextVar[Callable[[str, str, "int | None", str], "dict[str, Any]"]]("TRACER", default=_trace)


@functools.cache
def _libraries() -> str:
    """Return the versions and code on which an answer depends."""
    from study.host.stacks import package_version

    versions = [package_version(package) or "" for package in ("torch", "transformers", "peft")]
    code = Path(__file__).with_name("live_trace.py").read_bytes()
    return " ".join([*versions, hashlib.sha256(code).hexdigest()])
