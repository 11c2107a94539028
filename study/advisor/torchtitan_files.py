"""The flags of `study predict` that a torchtitan TOML amounts to.

Keys are those of torchtitan/config/job_config.py and, of 2024, torchtitan/config_manager.py, which had the degrees of
parallelism in [training] and [experimental].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study.config.errors import WrongFile

try:
    import tomllib
except ModuleNotFoundError:
    # Python 3.10.
    tomllib = None  # type: ignore[assignment]

_GENERAL = "study predict MODEL --strategy fsdp2 --precision bf16 --hardware BOX, with its batch and degrees as flags"
# Its flavors, by model.
_MODELS = {
    "llama3": {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"},
    "qwen3": {
        **{size: f"qwen3-{size.lower()}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
        "30B-A3B": "qwen3-30b-a3b",
        "235B-A22B": "qwen3-235b-a22b",
    },
    "deepseek_v3": {"671B": "deepseek-v3"},
}
# Whole numbers, by flag, in the order of its names from new to old.
_COUNTS = {
    "seq_length": ("seq_len",),
    "micro_batch": ("local_batch_size", "batch_size"),
}
_NOT_PREDICTED = {
    "pipeline_parallel_degree": "pipelines",
    "context_parallel_degree": "tokens over ranks",
    "expert_parallel_degree": "experts over ranks",
}


def unread_file(name: str, path: Path) -> WrongFile:
    """Return the refusal of a TOML, with the command that asks its question."""
    return WrongFile(name, "is TOML, as torchtitan's files are, which are not read", _question(path))


def _question(path: Path) -> str:
    if tomllib is None:
        return _GENERAL
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _GENERAL
    if not isinstance(document.get("training"), Mapping):
        return _GENERAL
    reasons = [what for key, what in _NOT_PREDICTED.items() if _count(document, key) > 1]
    reasons += ["products in 8 bits"] if _trains_in_8_bits(document) else []
    lacks = f"; not predicted: {', '.join(reasons)}" if reasons else ""
    return f"study predict {_model(document)} {' '.join(_flags(document))} --hardware BOX{_selective(document)}{lacks}"


def _find(document: Mapping[str, Any], key: str) -> Any:
    """Return a key of any section; None without it."""
    sections = (section for section in document.values() if isinstance(section, Mapping))
    return next((section[key] for section in sections if key in section), None)


def _count(document: Mapping[str, Any], key: str, default: int = 1) -> int:
    value = _find(document, key)
    return value if type(value) is int else default


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, Mapping) else {}


def _model(document: Mapping[str, Any]) -> str:
    model = _section(document, "model")
    return _MODELS.get(str(model.get("name")), {}).get(str(model.get("flavor")), "MODEL")


def _trains_in_8_bits(document: Mapping[str, Any]) -> bool:
    converters = _section(document, "model").get("converters") or []
    return any("float8" in str(name) or "mx" in str(name) for name in converters)


def _flags(document: Mapping[str, Any]) -> Iterator[str]:
    training = _section(document, "training")
    replicas = _count(document, "data_parallel_replicate_degree")
    shards = _count(document, "data_parallel_shard_degree", default=-1)
    if replicas == 1:
        yield "--strategy fsdp2"
    else:
        yield "--strategy ddp" if shards == 1 else "--strategy hsdp"
    for flag, names in _COUNTS.items():
        value = next((training[name] for name in names if type(training.get(name)) is int), None)
        if value:
            yield f"--{flag} {value}"
    tensors = _count(document, "tensor_parallel_degree")
    if tensors > 1:
        yield f"--tensor_parallel {tensors} --tensor_plan sequence"
    yield "--precision bf16"
    compiled = _section(document, "compile").get("enable", training.get("compile"))
    if compiled is True and "model" in _section(document, "compile").get("components", ["model"]):
        yield "--compile"
    if _section(document, "activation_checkpoint").get("mode") == "full":
        yield "--gradient_checkpointing"


def _selective(document: Mapping[str, Any]) -> str:
    # Its default.
    if _section(document, "activation_checkpoint").get("mode", "selective") != "selective":
        return ""
    return "; selective checkpointing is between the figures with and without --gradient_checkpointing"
