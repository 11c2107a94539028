"""Shapes of classes outside the table of families, from transformers' own model, and their traced figures.

Does not import torch: study/predictor/live_trace.py does if the user's cache has no answer for this architecture, its
libraries and the code that traces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError, first_line, require_extra
from study.host.folders import cache_directory
from study.predictor.request import Request
from study.predictor.shape import ModelShape, Parameter
from study.records.directory import write_json
from study.workloads.presets import check_depth

LIVE_NOTE = (
    "this class is outside the table of families: its activations and FLOPs are traced on transformers' code, and no"
    " published measurement validates its peak or its time"
)
EXPERTS_NOTE = (
    "experts are grouped products without capacity: every token reaches its {} experts, none is dropped or padded"
)


@dataclasses.dataclass(frozen=True)
class LiveShape(ModelShape):
    """Shape of a live model."""

    survey: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False, compare=False)


def live_notes(shape: ModelShape) -> Iterator[str]:
    """Yield the assumptions of a class outside the table; none for the families of the table."""
    if isinstance(shape, LiveShape):
        yield LIVE_NOTE
        if shape.survey["active"]:
            yield EXPERTS_NOTE.format(shape.survey["active"])


def live_shape(name: str, document: Mapping[str, Any], rank: int | None = None) -> LiveShape:
    """Return the shape of the model that a config.json describes; UserError if transformers does not build it."""
    # Names and places of files do not change the architecture.
    architecture = {
        key: value for key, value in document.items() if key not in ("_name_or_path", "transformers_version")
    }
    text = json.dumps(architecture, sort_keys=True)
    for part in (architecture, *(value for value in architecture.values() if isinstance(value, dict))):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth"):
            if isinstance(part.get(key), int):
                check_depth(part[key], name)
    answer = _answer("survey", text, rank)
    regathered, shares = set(answer["regathered"]), answer["fsdp_shares"]
    rows = zip(answer["parameters"], answer["places"], strict=True)
    return LiveShape(
        name=name, model_type=str(document["model_type"]), layers=len(answer["units"]),
        family="causal-lm" if answer["is_language_model"] else "sequence-classification",
        inner=answer["inner"] * (answer["active"] or 1), gated=True, tied=answer["tied"] is not None,
        params=tuple(Parameter(index, name, elements, first, place, trained, index in regathered)
                     for index, ((name, elements, first, trained), place) in enumerate(rows)),
        lora_rank=rank, document=text, survey=answer, buffer_bytes=answer["buffer_bytes"],
        embedding_index=answer["tied"] or 0,
        fsdp_refusal=f"torch refuses {shares[0]}, which modules of two FSDP2 groups share" if shares else None,
        **{key: answer[key] for key in ("hidden", "heads", "key_value_heads", "head_dim", "vocabulary", "positions")},
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _answer(kind: Literal["survey", "measure"], document: str, rank: int | None, options: str = "{}") -> dict[str, Any]:
    """Return an answer of live_trace.py, from the user's cache if it has one."""
    key = hashlib.sha256(json.dumps([kind, document, rank, options, _libraries()]).encode()).hexdigest()
    file = cache_directory() / "traces" / f"{key}.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        pass
    with require_extra("train"):
        from study.predictor import live_trace

        run = live_trace.survey if kind == "survey" else live_trace.measure
        answer = run(json.loads(document), rank, **json.loads(options))
    # A cache that cannot be written costs only time.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, answer)
    return answer


@functools.cache
def _libraries() -> str:
    """Return the versions and code on which an answer depends."""
    versions = []
    for package in ("torch", "transformers", "peft"):
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.append("")
    code = Path(__file__).with_name("live_trace.py").read_bytes()
    return " ".join([*versions, hashlib.sha256(code).hexdigest()])


@dataclasses.dataclass(frozen=True)
class Trace:
    """Figures of a micro-batch in bytes and FLOPs; `missing` names what could not be traced."""

    # Sums over all layers, and the largest of one layer.
    saved: float = 0.0
    constant: float = 0.0
    largest: float = 0.0
    checkpoint: float = 0.0
    working: float = 0.0
    # Outside the layers; the loss and the output layer.
    outside: float = 0.0
    tail: float = 0.0
    tail_constant: float = 0.0
    tail_forward: float = 0.0
    tail_backward: float = 0.0
    # FLOPs: forward, of fused attention, of the layers forward, and backward.
    forward: float = 0.0
    attention: float = 0.0
    layers_forward: float = 0.0
    backward: float = 0.0
    calls: tuple[Any, ...] | None = None
    missing: str | None = None


@functools.lru_cache(maxsize=512)
def trace(request: Request) -> Trace:
    """Return the traced figures of a request's micro-batch."""
    shape = request.shape
    assert isinstance(shape, LiveShape)
    mode = "engine" if request.precision.endswith("-engine") or not request.autocast else "autocast"
    options = {
        "mode": "fp32" if request.precision == "fp32" else mode, "dropout": request.dropout,
        "fused": request.attention != "eager" and shape.survey["fused"], "cuda": not request.box.is_cpu_only,
        "length": request.sequence_length,
    }  # fmt: skip
    try:
        answer = _answer("measure", shape.document, shape.lora_rank, json.dumps(options, sort_keys=True))
    except UserError:
        raise
    except Exception as error:  # Any class of transformers, on tensors without data.
        return Trace(missing=f"activations and FLOPs ({type(error).__name__}: {first_line(error)})")
    first_pass, second_pass = answer["passes"]
    # Micro-batches, in units of the first pass, whose samples the second one has twice.
    counts, batch = answer["counts"], request.micro_batch / answer["samples"]

    def total(figure: str, at: Mapping[str, Any], recomputed: bool = True) -> float:
        layers = ((counts[name], layer) for name, layer in at["layers"].items() if layer)
        return float(sum(count * layer[figure] for count, layer in layers if layer["recomputed"] or not recomputed))

    def growth(first: float, second: float) -> float:
        """Return a figure's part that grows with the micro-batch; gradients and copies of weights are constant."""
        return (second - first) * batch

    def working(first: Mapping[str, Any], second: Mapping[str, Any], figure: str) -> float:
        """Return temporaries without the gradient of a weight, which is constant and counted elsewhere."""
        grown = growth(first[figure], second[figure])
        return max(0.0, grown, 2 * first[figure] - second[figure] + grown - first["gradient"])

    layers = [(layer, second_pass["layers"][name]) for name, layer in first_pass["layers"].items() if layer]
    saved = growth(total("saved", first_pass), total("saved", second_pass))
    # Bytes saved outside the layers, and by layers that are never recomputed.
    first, second = (at["outside"] + total("saved", at, False) - total("saved", at) for at in (first_pass, second_pass))
    outside = first + (second - first) * (batch - 1)
    traced = {figure: sum(layer[figure] for layer, _ in layers) for figure in ("forward", "attention", "backward")}
    flops = {name: batch * (first_pass[name] - traced[name] + total(name, first_pass, False)) for name in traced}
    tail = growth(first_pass["tail"], second_pass["tail"])
    return Trace(
        saved=saved, constant=2 * total("saved", first_pass) - total("saved", second_pass),
        largest=max(growth(a["saved"], b["saved"]) * a["recomputed"] for a, b in layers),
        checkpoint=growth(total("checkpoint", first_pass), total("checkpoint", second_pass)),
        working=max(working(a, b, "working") for a, b in layers),
        outside=outside + min(0.0, tail), tail=max(0.0, tail),
        tail_constant=2 * first_pass["tail"] - second_pass["tail"],
        tail_forward=max(0.0, growth(first_pass["tail_forward"], second_pass["tail_forward"])),
        tail_backward=working(first_pass, second_pass, "tail_backward"),
        layers_forward=batch * total("forward", first_pass), calls=(answer["calls"], answer["kinds"]),
        missing=answer["missing"], **flops,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Module:
    """A called module, and those that it calls."""

    # None: outside the layers.
    unit: int | None
    params: tuple[Parameter, ...]
    children: tuple[Module, ...]


@functools.lru_cache(maxsize=16)
def call_tree(shape: LiveShape) -> Module:
    """Return the module calls of a forward pass over all layers; in the model's order if it cannot be traced."""
    owners, units = shape.survey["owners"], {unit: place for place, unit in enumerate(shape.survey["units"])}
    options = {"mode": "engine", "dropout": False, "fused": shape.survey["fused"], "cuda": True,
               "length": min(64, shape.positions or 64)}  # fmt: skip
    try:
        answer = _answer("measure", shape.document, shape.lora_rank, json.dumps(options, sort_keys=True))
        # The towers of images are called before the model.
        *towers, (_, called, _) = answer["calls"][1]
        root, kinds = ["", [*towers, *called], False], answer["kinds"]
    except UserError:
        raise
    except Exception:  # As in `trace`.
        root, kinds = ["", [], False], {}

    def module(entry: Any, source: str = "", target: str = "", unit: int | None = None) -> Module:
        name, children, is_leaf = entry
        name = target + name[len(source) :]
        unit = units.get(name, unit)
        inside = [numbers for owner, numbers in owners.items() if f"{owner}.".startswith(f"{name}.")] if is_leaf else []
        indexes = dict.fromkeys(index for numbers in (owners.get(name, ()), *inside) for index in numbers)
        inner, done = list[Module](), set[str]()
        for child in children:
            listed = child[0].rpartition(".")[0]
            if source or child[0] not in units:
                inner.append(module(child, source, target, unit))
            elif listed not in done:
                # The layers of a list follow each other, each as the remaining one of its kind.
                done.add(listed)
                entries = {entry[0]: entry for entry in children}
                inner += [module(entries[kind], kind, layer) for layer, kind in kinds.items()
                          if layer.rpartition(".")[0] == listed and kind in entries]  # fmt: skip
        return Module(unit, tuple(shape.params[index] for index in indexes), tuple(inner))

    tree = module(root)
    called = set(_parameters(tree))
    # A tower that cannot be traced is called in the order of its modules.
    missing = [
        Module(None, params, ())
        for numbers in owners.values()
        if (params := tuple(shape.params[index] for index in numbers if shape.params[index] not in called))
    ]
    return dataclasses.replace(tree, children=(*missing, *tree.children))


def _parameters(module: Module) -> Iterator[Parameter]:
    yield from module.params
    for child in module.children:
        yield from _parameters(child)
