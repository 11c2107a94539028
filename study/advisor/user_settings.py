"""Read a user's DeepSpeed JSON or Accelerate YAML as the two libraries do, and reject the settings that they reject."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError, clip, did_you_mean, first_line
from study.config.yaml_sections import Section, load_package_yaml, read_document
from study.host.folders import resolve_path

MAX_FILE_BYTES = 1_000_000
_EITHER = "give a DeepSpeed JSON or an Accelerate YAML"
ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")
_SECTIONS = (ZERO, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param")
# Accelerate's types: plain data parallelism on any device, DeepSpeed and FSDP; and two that are not modelled.
_DISTRIBUTED = (
    "NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
    "MULTI_NEURON", "DEEPSPEED", "FSDP",
)  # fmt: skip
_NOT_PREDICTED = ("XLA", "MEGATRON_LM")
NOT_MODELLED = "not modelled: the figures are without it"
# Accelerate ends with an error if these are set in addition to a deepspeed_config_file.
SAID_TWICE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
    "mixed_precision",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Finding:
    """A setting whose effect differs from its value in the file."""

    kind: Literal["refused", "conflict", "ignored", "ineffective", "filled", "missing", "noted"]
    key: str
    says: str


@dataclasses.dataclass
class UserFile:
    """A config file as the launcher or the engine reads it."""

    name: str
    launcher: Literal["accelerate", "deepspeed"]
    distributed_type: str
    # Settings as the engine gets them, except that "auto" is not resolved; None without DeepSpeed.
    deepspeed: dict[str, Any] | None
    # Dotted names of the settings in the file.
    explicit_keys: tuple[str, ...]
    mixed_precision: str | None = None
    fsdp: Mapping[str, Any] | None = None
    num_processes: int | None = None
    # FSDP's number of replicas, and of ranks per replica.
    mesh: tuple[int, int] | None = None
    findings: list[Finding] = dataclasses.field(default_factory=list)


@functools.cache
def known_settings() -> dict[str, Any]:
    """Return the content of known_settings.yaml."""
    text = Path(__file__).with_name("known_settings.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = load_package_yaml(text)
    return document


def read_user_file(name: str) -> UserFile:
    """Read a DeepSpeed JSON or an Accelerate YAML; raise UserError if it is neither or a key is wrong."""
    document, findings = _read(name)
    if "distributed_type" in document or "compute_environment" in document:
        return _accelerate(name, document)
    if "version" in document and "services" in document:
        raise UserError(f"{name} has no settings of an engine", _EITHER)
    file = UserFile(name, "deepspeed", "DEEPSPEED", document, _dotted(document), findings=findings)
    check_deepspeed(file)
    return file


def _read(name: str) -> tuple[dict[str, Any], list[Finding]]:
    """Read a JSON or YAML mapping; raise UserError if it is unreadable or has a duplicate key."""
    path, findings = resolve_path(name), list[Finding]()
    try:
        if path.is_dir():
            raise UserError(f"{name} is a folder", "name the file in it")
        if not path.exists():
            files = path.parent.iterdir() if path.parent.is_dir() else ()
            names = [candidate.name for candidate in files if candidate.suffix in (".json", ".yaml", ".yml")]
            raise UserError(f"there is no file {name}", did_you_mean(path.name, names) or _EITHER)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{name} is larger than 1 MB", _EITHER)
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{name} is not readable ({first_line(error)})", "name a text file") from None
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        document, findings = _read_json(name, text)
    else:
        document = read_document(path, Section)
    if not isinstance(document, dict):
        raise UserError(f"{name} is not a mapping of settings", _EITHER)
    return document, findings


def _read_json(name: str, text: str) -> tuple[Any, list[Finding]]:
    """Read a JSON, or a Hjson, which may have comments and which only DeepSpeed reads by itself."""
    hook = functools.partial(_without_duplicates, name)
    try:
        return json.loads(text, object_pairs_hook=hook), []
    except ValueError as error:
        problem = f"{name} is not readable as JSON ({' '.join(str(error).split())[:120]})"
    fix = "make it JSON at that place"
    with contextlib.suppress(ValueError):
        try:
            import hjson

            message = "is Hjson and not JSON: DeepSpeed reads it, Accelerate and the Trainer end with an error"
            return hjson.loads(text, object_pairs_hook=hook), [Finding("conflict", name, message)]
        except ModuleNotFoundError:
            fix += "; or run: pip install hjson, with which DeepSpeed reads comments"
    raise UserError(problem, fix)


def _without_duplicates(name: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise UserError(f"{name} sets {key} twice", "keep one of the two: DeepSpeed refuses such a file")
        mapping[key] = value
    return mapping


def _dotted(document: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    names = []
    for key, value in document.items():
        names.append(prefix + key)
        if isinstance(value, dict) and prefix + key in _SECTIONS:
            names += _dotted(value, f"{prefix}{key}.")
    return tuple(names)


def _accelerate(name: str, document: dict[str, Any]) -> UserFile:
    _check_unknown_keys(name, "", document, known_settings()["accelerate"], "Accelerate")
    kind = document.get("distributed_type")
    if not isinstance(kind, str) or kind not in _DISTRIBUTED:
        problem = f"has distributed_type: {clip(kind)}" if kind is not None else "has no distributed_type"
        if kind in _NOT_PREDICTED:
            raise UserError(f"{name} {problem}, which is not modelled", f"modelled are {', '.join(_DISTRIBUTED)}")
        guess = did_you_mean(str(kind).upper(), _DISTRIBUTED)
        raise UserError(f"{name} {problem}", f"{guess}supported are {', '.join(_DISTRIBUTED)}")
    processes, precision = document.get("num_processes"), document.get("mixed_precision")
    if processes is not None and (type(processes) is not int or processes < 1):
        raise UserError(f"{name} sets num_processes: {clip(processes)}", "set a whole number of ranks")
    if precision is not None and precision not in ("no", "fp16", "bf16", "fp8", False):
        raise UserError(f"{name} sets mixed_precision: {clip(precision)}", "set no, bf16 or fp16")
    # YAML 1.1 reads a bare `no` as false, and Accelerate does so too.
    precision = "no" if precision is False else precision
    findings = [Finding("noted", key, NOT_MODELLED) for key in ("megatron_lm_config",) if document.get(key)]
    mesh = None
    if document.get("parallelism_config"):
        mesh = _mesh(name, _section(name, document, "parallelism_config"), kind, findings)
    if kind == "DEEPSPEED":
        file = _accelerate_deepspeed(name, document, precision, processes)
        file.findings += findings
        return file
    section = _section(name, document, "fsdp_config") if kind == "FSDP" else None
    return UserFile(name, "accelerate", kind, None, (), precision, section, processes, mesh, findings)


def _mesh(name: str, section: Mapping[str, Any], kind: str, findings: list[Finding]) -> tuple[int, int] | None:
    sizes = {key.removeprefix("parallelism_config_"): value for key, value in section.items()}
    for key, size in sizes.items():
        if key.endswith("_size") and (type(size) is not int or size < 1):
            raise UserError(f"{name} sets parallelism_config.{key}: {clip(size)}", "set a whole number from 1 up")
    replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    groups = [key for key, size in sizes.items() if key in ("tp_size", "cp_size", "sp_size") and size > 1]
    findings += [Finding("noted", f"parallelism_config.{key}", NOT_MODELLED) for key in groups]
    if replicas == 1 or kind != "FSDP" or groups:
        return None
    if shards == 1:
        message = "Accelerate refuses replicas that are not sharded: without it the run is plain data parallelism"
        findings.append(Finding("refused", "parallelism_config.dp_shard_size", message))
        return None
    return replicas, shards


def _section(name: str, document: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = document.get(key)
    if not isinstance(section, dict) or not all(isinstance(setting, str) for setting in section):
        problem = f"has no {key}" if section is None else f"sets {key}: {clip(section)}, which is not a mapping"
        raise UserError(f"{name} {problem}", f"write its settings under {key}:")
    return section


def _accelerate_deepspeed(name: str, document: dict[str, Any], precision: Any, processes: int | None) -> UserFile:
    plugin, reference = _section(name, document, "deepspeed_config"), known_settings()
    mapped, findings = reference["accelerate_deepspeed"], []
    for key in plugin:
        if key not in mapped:
            message = f"Accelerate drops it silently; {did_you_mean(key, mapped, cutoff=0.75)}".rstrip("; ")
            if key in reference[ZERO] or key in reference["top"]:
                message = "an Accelerate file cannot set it, Accelerate drops it silently; a DeepSpeed JSON can"
            findings.append(Finding("ignored", key, message))
    inner = plugin.get("deepspeed_config_file")
    has_json = inner not in (None, "none")
    if has_json:
        if not isinstance(inner, str) or not resolve_path(inner).exists():
            fix = "name a file that exists"
            if isinstance(inner, str) and not Path(inner).is_absolute():
                fix = "run this in the folder at which that path starts: for this study, the root of the repository"
            raise UserError(f"{name} sets deepspeed_config_file: {clip(inner)}, and there is no file of that name", fix)
        settings, only_deepspeeds = _read(inner)
        findings += [dataclasses.replace(finding, kind="refused") for finding in only_deepspeeds]
        for key in sorted((SAID_TWICE & plugin.keys()) | ({"mixed_precision"} if precision is not None else set())):
            message = f"Accelerate ends with an error if {inner} is given, too: set it there"
            findings.append(Finding("refused", key, message))
        explicit_keys = _dotted(settings)
    else:
        # Settings that Accelerate creates if the file names no JSON.
        offloads = {what: {"device": str(plugin.get(f"{what}_device") or "none").lower()} for what in OFFLOADS}
        saves = bool(plugin.get("zero3_save_16bit_model", False))
        settings = {
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", "auto"),
            "gradient_clipping": plugin.get("gradient_clipping", "auto"),
            ZERO: {"stage": plugin.get("zero_stage", 2), **offloads,
                   "stage3_gather_16bit_weights_on_model_save": saves},
        }  # fmt: skip
        explicit_keys = tuple(mapped[key] for key in plugin if mapped.get(key))
    if "zero3_init_flag" in plugin:
        zero = settings.get(ZERO, {})
        is_on, is_stage3 = plugin["zero3_init_flag"], isinstance(zero, dict) and zero.get("stage") == 3
        if is_on and not is_stage3:
            findings.append(Finding("ineffective", "zero3_init_flag", "is for stage 3"))
        elif is_stage3 and not is_on:
            message = "false has no effect: transformers shards each parameter of a stage-3 model as it is created"
            findings.append(Finding("ineffective", "zero3_init_flag", message))
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if not has_json and plugin.get(key) not in (None, "none"):
            message = "the launcher does not pass it to ranks: set nvme_path in a DeepSpeed JSON"
            findings.append(Finding("ignored", key, message))
    file = UserFile(
        name, "accelerate", "DEEPSPEED", settings, explicit_keys, precision, None, processes, None, findings
    )
    check_deepspeed(file)
    return file


def _check_unknown_keys(name: str, place: str, section: Iterable[str], supported: Iterable[str], owner: str) -> None:
    supported = list(supported)
    for key in section:
        if key not in supported:
            fix = did_you_mean(key, supported) or "take it out"
            raise UserError(f"{name}: {place}{key} is not a setting that {owner} supports", fix)


def check_deepspeed(file: UserFile) -> None:
    """Add the findings of a file's DeepSpeed settings; raise UserError if a key or value is wrong."""
    settings, reference = file.deepspeed, known_settings()
    assert settings is not None
    for key in settings:
        # DeepSpeed drops comments, too, as their authors expect.
        if key in reference["top"] or key in reference["others"] or key.lstrip("_") in ("comment", "comments"):
            continue
        if guess := did_you_mean(key, [*reference["top"], *reference["others"]], cutoff=0.75):
            problem = f"{file.name}: {key} is not a setting of DeepSpeed, which drops it silently"
            raise UserError(problem, guess)
        place = next((section for section in _SECTIONS if key in reference[section]), None)
        hint = f"; it belongs in {place}" if place else ""
        file.findings.append(Finding("ignored", key, f"DeepSpeed does not support it, and drops it silently{hint}"))
    zero = settings.get(ZERO, {})
    if not isinstance(zero, dict):
        fix = 'write it as {"zero_optimization": {"stage": 2}}'
        raise UserError(f"{file.name}: {ZERO} is {clip(zero)}, not a mapping", fix)
    if ZERO not in settings:
        message = "without it ZeRO is off" + ", and Accelerate ends with an error" * (file.launcher == "accelerate")
        file.findings.append(Finding("missing", ZERO, message))
    _check_section(file.name, ZERO, zero)
    if type(zero.get("stage", 0)) is not int or zero.get("stage", 0) not in range(4):
        raise UserError(f"{file.name}: {ZERO}.stage is {clip(zero['stage'])}", "set 0, 1, 2 or 3")
    for what in OFFLOADS:
        section = zero.get(what)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise UserError(f"{file.name}: {ZERO}.{what} is {clip(section)}", 'write it as {"device": "cpu"}')
        _check_section(file.name, f"{ZERO}.{what}", section)
        if section.get("device", "none") not in ("none", "cpu", "nvme", "auto"):
            raise UserError(f"{file.name}: {ZERO}.{what}.device is {clip(section['device'])}", "set none, cpu or nvme")
    for key in ("bf16", "bfloat16", "fp16", "torch_autocast", "data_types", "optimizer", "scheduler", "aio"):
        if key in settings and not isinstance(settings[key], dict):
            raise UserError(f"{file.name}: {key} is {clip(settings[key])}, not a mapping", f'write "{key}": {{...}}')
    file.findings += _not_modelled("top", settings, zero)
    file.findings += _not_modelled(ZERO, zero, zero)
    for what in OFFLOADS:
        file.findings += _not_modelled(f"{ZERO}.{what}", zero.get(what) or {}, zero)


def _not_modelled(place: str, section: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each setting that changes the memory of a rank, but is not part of the prediction."""
    reference = known_settings()[place]
    for key, value in section.items():
        entry = reference.get(key) or reference.get(f"stage3_{key}") or {}
        if "switch" in entry:
            value = isinstance(value, Mapping) and value.get(entry["switch"])
        is_off = value in (None, False, "auto", {}, entry.get("default"))
        if "not_modelled" in entry and not is_off and zero.get("stage", 0) in entry.get("stages", range(4)):
            name = key if place == "top" else f"{place}.{key}"
            yield Finding("noted", name, f"{entry['not_modelled']}; {NOT_MODELLED}")


def _check_section(name: str, place: str, section: dict[str, Any]) -> None:
    reference = known_settings()[place]
    # DeepSpeed also accepts stage 3's settings without the prefix.
    short = {key.removeprefix("stage3_") for key in reference if key.startswith("stage3_")}
    _check_unknown_keys(name, f"{place}.", section, [*reference, *short], "DeepSpeed")
    for key, value in section.items():
        default = reference.get(key, reference.get(f"stage3_{key}", {})).get("default")
        if value == "auto" or default is None:
            continue
        # The engine converts strings, too.
        if isinstance(value, str) and not isinstance(default, str):
            spelled = {"true": True, "false": False}
            value = section[key] = spelled.get(value.lower(), int(value) if value.isdecimal() else value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(default, bool):
            expected, is_valid = "true or false", isinstance(value, bool)
        elif isinstance(default, int):
            least = int(key == "reduce_bucket_size")
            expected = f"a whole number, {least} or more"
            is_valid = is_number and least <= value < 2**63 and float(value).is_integer()
        elif isinstance(default, float):
            expected, is_valid = "a number from 0 to 1", isinstance(value, int | float) and 0 <= value <= 1
        else:
            expected, is_valid = "a string", isinstance(value, str)
        if not is_valid:
            raise UserError(f"{name}: {place}.{key} is {clip(value)}", f"set {expected}")
