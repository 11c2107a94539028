"""Shapes of classes outside the table of families, from transformers' own model, and the answers of live_trace.py.

Does not import torch: study/predictor/live_trace.py does if the user's cache has no answer for this architecture, its
libraries and the code that traces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError, first_line, require_extra
from study.host.folders import cache_directory
from study.predictor.shape import BEFORE, ModelShape, Parameter
from study.records.directory import write_json
from study.workloads.presets import check_depth


@dataclasses.dataclass(frozen=True)
class LiveShape(ModelShape):
    survey: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False, compare=False)

    def find_layer(self, param: Parameter) -> int:
        # The place of a parameter between two layers is the first of them.
        layer = super().find_layer(param)
        return layer if layer != BEFORE and param.name.startswith(f"{self.survey['units'][layer]}.") else BEFORE


def live_notes(shape: ModelShape) -> Iterator[str]:
    """Yield the assumptions of a class outside the table; none for the families of the table."""
    if isinstance(shape, LiveShape):
        yield (
            "this class is outside the table of families: its activations and FLOPs are traced on transformers' code,"
            " and no published measurement validates its peak or its time"
        )
        if active := shape.survey["active"]:
            reach = f"every token reaches its {active} experts, none is dropped or padded"
            yield f"experts are grouped products without capacity: {reach}"


def live_shape(
    name: str, document: Mapping[str, Any], rank: int | None = None, targets: tuple[str, ...] = ()
) -> LiveShape:
    """Return the shape of the model that a config.json describes; UserError if transformers does not build it."""
    # Of Qwen's Omni models the thinker is trained, not what speaks. Names and places of files change nothing.
    document = document.get("thinker_config", document)
    architecture = {key: document[key] for key in document if key not in ("_name_or_path", "transformers_version")}
    text = json.dumps(architecture, sort_keys=True)
    for part in (architecture, *(value for value in architecture.values() if isinstance(value, dict))):
        for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth"):
            if isinstance(part.get(key), int):
                check_depth(part[key], name)
    survey = answer("survey", text, rank, _with_targets({}, targets))
    return LiveShape(
        name=name,
        model_type=str(document["model_type"]),
        params=tuple(Parameter(*row) for row in survey["params"]),
        gated=True,
        lora_rank=rank,
        lora_targets=targets,
        document=text,
        survey=survey,
        **survey["shape"],
    )


def _with_targets(options: Mapping[str, Any], targets: tuple[str, ...]) -> str:
    """Return the options of an answer as JSON, with the modules that have adapters unless all linear layers have."""
    return json.dumps({**options, "targets": targets} if targets else options, sort_keys=True)


@functools.lru_cache(maxsize=64)
def measure(shape: LiveShape, **options: bool | int | str) -> dict[str, Any] | str:
    """Return the answer of a trace, or why there is none."""
    # A loop over the tokens is one in every precision.
    work = shape.document, options["length"]
    if work in _loops:
        return _loops[work]
    try:
        return answer("measure", shape.document, shape.lora_rank, _with_targets(options, shape.lora_targets))
    except UserError:
        raise
    except Exception as error:  # Any class of transformers, on tensors without data.
        if type(error).__name__ == "TokenLoop":
            _loops[work] = first_line(error)
            return _loops[work]
        why = f"{type(error).__name__}, {first_line(error)}"
        return f"transformers' {shape.survey['class']} does not run here on tokens without data: {why}"


_loops: dict[tuple[str, bool | int | str], str] = {}


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
    with require_extra("train"):
        from study.predictor import live_trace

        run = live_trace.survey if kind == "survey" else live_trace.measure
        with live_trace.quiet():
            return dict(run(json.loads(document), rank, **json.loads(options)))


# What answers if the cache does not; `study serve` asks another process.
TRACER = ContextVar[Callable[[str, str, "int | None", str], "dict[str, Any]"]]("TRACER", default=_trace)


@functools.cache
def _libraries() -> str:
    """Return the versions and code on which an answer depends."""
    from study.host.stacks import package_version

    versions = [package_version(package) or "" for package in ("torch", "transformers", "peft")]
    code = Path(__file__).with_name("live_trace.py").read_bytes()
    return " ".join([*versions, hashlib.sha256(code).hexdigest()])
