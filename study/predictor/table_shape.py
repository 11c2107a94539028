"""Shapes of the table of families, from the sizes of a transformers configuration."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from study.config.errors import UserError, clip
from study.predictor.families import FAMILIES, READS_INPUT, ModelFamily, Tree
from study.predictor.lora_targets import is_target, module_name, module_path, outside_modules
from study.predictor.shape import (
    BEFORE,
    FUSED_ATTENTIONS,
    INFIX,
    MAGNITUDE,
    OUTPUT_LAYER,
    SAVED,
    Call,
    ModelShape,
    Parameter,
    can_adapt,
)
from study.workloads.presets import check_depth

# Keys of transformers for each size, the most common one first.
SIZE_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size",),
}
_MAX_SIZE = 2**31 - 1
# Ends of names of a decoder's classes with labels in place of words (modeling_layers.py of transformers), the first of
# those whose output layer has a bias. A class without an output layer is named as Qwen3Model.
_WITH_BIAS = ("ForTokenClassification", "ForQuestionAnswering")
_WITH_LABELS = ("ForSequenceClassification", *_WITH_BIAS)
_LABEL_SCORES, _USUAL_LABELS = "score", 2
# Output layers that no pretrained model has: peft trains them in full.
_NEW_LAYERS = ("classifier", _LABEL_SCORES)


def find_family(shape: ModelShape) -> ModelFamily:
    """Return the family's row of the table."""
    return FAMILIES[shape.model_type]


@dataclasses.dataclass(frozen=True)
class TableShape(ModelShape):
    """The shape of a family of the table, which counts its activations and FLOPs."""

    is_traced = False

    @property
    def fused_attentions(self) -> tuple[str, ...]:
        return FUSED_ATTENTIONS if find_family(self).fused is not None else ()

    @property
    def has_dropout(self) -> bool:
        return find_family(self).has_dropout

    @property
    def has_position_table(self) -> bool:
        family = find_family(self)
        return family.has_sine_table or " positions " in f" {family.parameters[0]} "

    @property
    def caps_logits(self) -> bool:
        return find_family(self).caps_logits

    def part_of_backward(self, param: Parameter) -> str:
        module = param.name.partition(INFIX)[0].removesuffix(".weight").removesuffix(".bias")
        if module in find_family(self).block:
            return module
        return "reads" if module in READS_INPUT else ""

    def module_path(self, param: Parameter) -> str:
        is_inside = 0 <= param.place < self.layers
        return module_path(self.model_type, param.place if is_inside else None, param.name.rpartition(".")[0])

    @property
    def outside_modules(self) -> tuple[str, ...]:
        return outside_modules(self.model_type)

    def add_adapters(
        self, rank: int, targets: tuple[str, ...], saved: tuple[str, ...] = (), *, dora: bool = False
    ) -> TableShape:
        self._check_every_layer(targets)
        params = list[Parameter]()
        # Each module's adapters follow its parameters.
        for (place, module), group in itertools.groupby(
            self.params, key=lambda param: (param.place, param.name.rpartition(".")[0])
        ):
            matrix, *biases = (
                dataclasses.replace(param, index=len(params) + number, trained=module in _NEW_LAYERS)
                for number, param in enumerate(group)
            )
            params += [matrix, *biases]
            if self.find_layer(matrix) == BEFORE and module in saved:
                for param in (matrix, *biases):
                    params.append(self._trained_copy(param, len(params)))
                continue
            if not can_adapt(self, matrix) or (targets and not is_target(self.module_path(matrix), targets)):
                continue
            out, columns_in = matrix.rows, matrix.elements // matrix.rows
            if find_family(self).transposed:
                out, columns_in = columns_in, out
            for letter, rows, columns in (("A", rank, columns_in), ("B", out, rank)):
                name = f"{module}{INFIX}{letter}.weight"
                params.append(Parameter(len(params), name, rows * columns, rows, place, regathered=matrix.regathered))
            if dora:
                name = f"{module}{MAGNITUDE}.weight"
                params.append(Parameter(len(params), name, out, out, place, regathered=matrix.regathered))
        if self.tied and OUTPUT_LAYER in saved:
            # The copy of a tied output layer is a separate parameter, whose original is the embedding.
            head = dataclasses.replace(
                self.embedding, name=f"{OUTPUT_LAYER}.weight", place=self.layers, regathered=False
            )
            params.append(self._trained_copy(head, len(params)))
        return dataclasses.replace(
            self,
            params=tuple(params),
            lora_rank=rank,
            lora_targets=targets,
            lora_saved=saved,
            lora_dora=dora,
            # A copy of either is not tied to the other.
            tied=self.tied and not saved,
        )

    @staticmethod
    def _trained_copy(param: Parameter, index: int) -> Parameter:
        module, _, kind = param.name.rpartition(".")
        return dataclasses.replace(param, index=index, name=f"{module}{SAVED}.{kind}", trained=True)

    def _check_every_layer(self, targets: tuple[str, ...]) -> None:
        """Raise UserError for adapters on a module of some of the layers: the table counts one layer for all."""
        adapted = Counter(
            param.name.rpartition(".")[0]
            for param in self.params
            if 0 <= param.place < self.layers and can_adapt(self, param) and is_target(self.module_path(param), targets)
        )
        for module, count in adapted.items():
            if count != self.layers:
                last = module_name(module).removesuffix(".dense").rpartition(".")[2]
                problem = f"--lora_targets has {last} of {count} of {self.layers} layers, which is not predicted"
                raise UserError(problem, f"name it for all of them: {last}")

    def module_calls(self) -> tuple[Call, dict[int, Call]]:
        owned: dict[tuple[int, str], list[Parameter]] = {}
        for param in self.params:
            owned.setdefault((param.place, param.name.rpartition(".")[0]), []).append(param)

        def to_call(tree: str | Tree, place: int) -> Call:
            if not isinstance(tree, str):
                return Call(place, inside=tuple(to_call(child, place) for child in tree))
            if copy := owned.get((place, f"{tree}{SAVED}")):
                return Call(place, inside=(Call(place, tuple(copy)),))
            leaf = Call(place, tuple(owned.get((place, tree), ())))
            adapters = [owned.get((place, f"{tree}{INFIX}{letter}"), ()) for letter in "AB"]
            if not all(adapters):
                return leaf
            products = tuple(Call(place, tuple(params)) for params in adapters)
            if magnitude := owned.get((place, f"{tree}{MAGNITUDE}")):
                # It reads the weight of the model's layer, and calls both adapters on an identity matrix first.
                weight = leaf.params[:1]
                return Call(place, inside=(leaf, Call(place, (*magnitude, *weight), inside=(*products, *products))))
            # peft wraps the model's layer; its dropout is a module, too.
            return Call(place, inside=(leaf, Call(place), *products))

        (before, layer, after), end = find_family(self).calls, self.layers
        layers = {number: to_call(layer, number) for number in range(self.layers)}
        inside = (
            *(to_call(tree, BEFORE) for tree in before),
            *layers.values(),
            *(to_call(tree, end) for tree in after),
        )
        if self.family == "sequence-classification":
            heads = [Call(end), to_call("classifier", end)]
        elif self.headless_class:
            heads = [to_call(_LABEL_SCORES, end)] * has_head(self)
        else:
            # A tied head uses the embedding's parameter: the frozen one if the embedding has a trained copy.
            head = to_call("lm_head", end)
            has_weight = any(param.name.endswith(".weight") for param in head.params)
            shared = () if head.inside or has_weight else tuple(owned.get((BEFORE, str(before[0])), ()))
            heads = [dataclasses.replace(head, params=(*shared, *head.params))]
        return Call(end, inside=(Call(end, inside=inside), *heads)), layers


def shape_of_architecture(name: str, model_type: str, architecture: Mapping[str, Any]) -> TableShape:
    """Return the shape of a transformers config; UserError names missing or invalid keys."""
    if (family := FAMILIES.get(model_type)) is None:
        raise UserError(
            f"{name}: the family {model_type!r} is not modelled",
            f"use one of {', '.join(FAMILIES)}; or give the sizes of a dense model of such a family, as"
            " layers=32,hidden=4096,heads=32,key_value_heads=8,vocabulary=128256,inner=14336,head_dim=128",
        )
    get = {**dict(family.defaults), **{key: value for key, value in architecture.items() if value is not None}}
    needed = {field: next((get[key] for key in keys if key in get), None) for field, keys in SIZE_KEYS.items()}
    inner = get.get("n_inner") or get.get("intermediate_size")
    if not inner and family.inner_is_free:
        inner = 4 * (needed["hidden"] or 0)
    missing = [f"{field} ({' or '.join(SIZE_KEYS[field])})" for field, value in needed.items() if value is None]
    missing += ["inner (intermediate_size)"] if inner is None else []
    if missing:
        raise UserError(f"{name} does not set its {', '.join(missing)}", "add the missing keys")

    def check_size(key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise UserError(f"{name}: {key} is {value!r:.40}", f"use a whole number from 1 to {_MAX_SIZE:,}")
        return value

    layers, hidden, heads, vocabulary = (check_size(key, needed[key]) for key in SIZE_KEYS)
    inner = check_size("inner", inner)
    check_depth(layers, name)
    key_value_heads = check_size("num_key_value_heads", get.get("num_key_value_heads") or heads)
    if heads % key_value_heads:
        raise UserError(f"{name}: {key_value_heads} key heads do not divide {heads} heads", "use key heads that do")
    head_dim = check_size("head_dim", get.get("head_dim", hidden // heads))
    if hidden % heads and "head_dim" not in get:
        raise UserError(f"{name}: {heads} heads do not divide a width of {hidden}", "use heads that do")
    tied = get.get("tie_word_embeddings", family.tied)
    if tied not in (True, False):
        raise UserError(f"{name}: tie_word_embeddings is {clip(tied)}", "use true or false")
    if (positions := _positions(get)) is not None:
        check_size("max_position_embeddings", positions)
    is_classifier = model_type == "bert"
    sizes = {
        "h": hidden,
        "3h": 3 * hidden,
        "inner": inner,
        "vocabulary": vocabulary,
        "query": heads * head_dim,
        "key_value": key_value_heads * head_dim,
        "head_dim": head_dim,
        "positions": positions or 0,
        "two": 2,
        "types": get.get("type_vocab_size", 0),
        # Whether there are biases.
        "+": True,
        "+attention": bool(get.get("attention_bias", family.attention_bias)),
        "+mlp": bool(get.get("mlp_bias", False)),
    }
    is_tied = bool(tied) and not is_classifier
    return TableShape(
        name=name,
        model_type=model_type,
        family="sequence-classification" if is_classifier else "causal-lm",
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        gated=family.gated,
        tied=is_tied,
        positions=positions,
        params=_parameters(model_type, layers, bool(tied), tuple(sizes.items())),
        document=json.dumps({**architecture, "model_type": model_type, "n_inner": inner}),
        # Positions and types, of 8 bytes each.
        buffer_bytes=2 * 8 * (positions or 0) if is_classifier else 0,
    )


def named_class(document: Mapping[str, Any]) -> str:
    """Return the class that a config.json names; empty without one."""
    classes = document.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def has_head(shape: ModelShape) -> bool:
    """Whether a model has an output layer, of words or of labels."""
    return not shape.headless_class or shape.headless_class.endswith(_WITH_LABELS)


def with_named_class(shape: TableShape, document: Mapping[str, Any]) -> TableShape:
    """Return a decoder with the output layer of the class that its config.json names: of labels in place of words, or
    none. UserError if the number of labels is none."""
    name = named_class(document)
    is_base = name.lower() == f"{shape.model_type.replace('_', '')}model"
    if shape.family != "causal-lm" or not (is_base or name.endswith(_WITH_LABELS)):
        return shape
    embedding, *remaining = (param for param in shape.params if not param.name.startswith(f"{OUTPUT_LAYER}."))
    labels = 1 if is_base else _count_labels(document, shape.name)
    scores = list[Parameter]()
    if not is_base:
        index, has_bias = 1 + len(remaining), name.endswith(_WITH_BIAS)
        scores.append(Parameter(index, f"{_LABEL_SCORES}.weight", labels * shape.hidden, labels, shape.layers))
        scores += [Parameter(index + 1, f"{_LABEL_SCORES}.bias", labels, labels, shape.layers)] * has_bias
    # An embedding that no output layer shares is a group of FSDP2.
    params = (dataclasses.replace(embedding, regathered=True), *remaining, *scores)
    return dataclasses.replace(shape, params=params, vocabulary=labels, tied=False, headless_class=name)


def _count_labels(document: Mapping[str, Any], name: str) -> int:
    """Return the number of labels as transformers reads it."""
    names = document.get("id2label")
    labels = len(names) if isinstance(names, Mapping) and names else document.get("num_labels", _USUAL_LABELS)
    if type(labels) is not int or not 1 <= labels <= _MAX_SIZE:
        raise UserError(f"{name}: num_labels is {clip(labels)}", f"use a whole number from 1 to {_MAX_SIZE:,}")
    return labels


@functools.lru_cache(maxsize=256)
def _parameters(
    model_type: str, layers: int, tied: bool, sizes_by_name: tuple[tuple[str, int], ...]
) -> tuple[Parameter, ...]:
    """Return the parameters by the family's table; cached, since many records are of one model."""
    family, sizes = FAMILIES[model_type], dict(sizes_by_name)

    def tensors(text: str) -> Iterator[tuple[str, int, int]]:
        """Yield name, elements and rows of the parameters in a text of the table."""
        for row in text.split(", "):
            module, *words = row.split()
            has_bias = words[-1].startswith("+") and sizes[words.pop()]
            dimensions = [sizes[word] for word in words]
            if not (tied and module == "lm_head"):
                yield f"{module}.weight", math.prod(dimensions), dimensions[0]
            if has_bias:
                out = dimensions[-1 if family.transposed else 0]
                yield f"{module}.bias", out, out

    before, inside, after = (list(tensors(text)) for text in family.parameters)
    placed = [(BEFORE, before), *((layer, inside) for layer in range(layers)), (layers, after)]
    entries = ((place, *tensor) for place, placed_tensors in placed for tensor in placed_tensors)
    # A tied embedding is in FSDP2's root, which stays gathered; BERT has no head to be tied.
    is_group = not tied or model_type == "bert"
    return tuple(
        Parameter(index, name, elements, rows, place, regathered=0 <= place < layers or (index == 0 and is_group))
        for index, (place, name, elements, rows) in enumerate(entries)
    )


def _positions(get: Mapping[str, Any]) -> Any:
    """Return the maximum positions, including the scaling of rotary embeddings (linear, dynamic, YaRN)."""
    positions = get.get("n_positions") or get.get("max_position_embeddings")
    stretched = get.get("rope_parameters") or get.get("rope_scaling") or {}
    if not isinstance(stretched, Mapping) or type(positions) is not int:
        return positions
    factor, kind = stretched.get("factor"), stretched.get("rope_type") or stretched.get("type")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float) or not 1 <= factor <= 1e4:
        return positions
    first = stretched.get("original_max_position_embeddings")
    return max(positions, int((first if type(first) is int else positions) * factor))
