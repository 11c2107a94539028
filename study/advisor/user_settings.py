"""Read a user's DeepSpeed JSON or Accelerate YAML as the two libraries do, and reject the settings that they reject."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from study.config.errors import UserError, clip, did_you_mean, first_line, replace_unprintable
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
    # Of a check of several files; the line from 1.
    file: str = ""
    line: int = 0

    @property
    def document(self) -> dict[str, str]:
        """Kind, key and text, for a document of one file."""
        return {"kind": self.kind, "key": self.key, "says": self.says}

    @property
    def level(self) -> Literal["error", "warning"]:
        """Whether the setting ends the run or is dropped silently, which is an error."""
        return "error" if self.kind in ("refused", "missing", "ignored") else "warning"

    @property
    def text(self) -> str:
        """Key and message, without control characters."""
        return replace_unprintable(f"{self.key}: {self.says}" if self.key else self.says)

    @property
    def line_text(self) -> str:
        """One line with the place, for a terminal."""
        return f"{self.file}:{self.line}: {self.level}: {self.kind}: {self.text}"

    @property
    def annotation(self) -> str:
        """Workflow command of GitHub Actions that annotates the line; it escapes as actions/toolkit does."""
        file = _escape(self.file).replace(":", "%3A").replace(",", "%2C")
        return f"::{self.level} file={file},line={self.line},title={self.kind}::{_escape(self.text)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


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


def read_user_file(name: str, findings: list[Finding] | None = None) -> UserFile:
    """Read a DeepSpeed JSON or an Accelerate YAML, without the keys and values that the engine refuses.

    These are findings, which are added to a given list. Raise UserError if the file has no settings that can be read.
    """
    findings = [] if findings is None else findings
    document = _read(name, findings)
    if "distributed_type" in document or "compute_environment" in document:
        return _accelerate(name, document, findings)
    if "version" in document and "services" in document:
        raise UserError(f"{name} has no settings of an engine", _EITHER)
    file = UserFile(name, "deepspeed", "DEEPSPEED", document, _dotted(document), findings=findings)
    check_deepspeed(file)
    return file


def _refused(key: str, problem: str, fix: str) -> Finding:
    return Finding("refused", key, f"{problem}; {fix}".rstrip())


def _read(name: str, findings: list[Finding]) -> dict[str, Any]:
    """Read a JSON or YAML mapping; raise UserError if it is unreadable."""
    path = resolve_path(name)
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
        document = _read_json(name, text, findings)
    else:
        document = read_document(path, Section)
    if not isinstance(document, dict):
        raise UserError(f"{name} is not a mapping of settings", _EITHER)
    return document


def _read_json(name: str, text: str, findings: list[Finding]) -> Any:
    """Read a JSON, or a Hjson, which may have comments and which only DeepSpeed reads by itself."""
    twice = set[str]()

    def to_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        twice.update(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    fix = "make it JSON at that place"
    try:
        document = json.loads(text, object_pairs_hook=to_mapping)
    except ValueError as error:
        problem = f"{name} is not readable as JSON ({' '.join(str(error).split())[:120]})"
        try:
            import hjson

            document = hjson.loads(text, object_pairs_hook=to_mapping)
            message = "is Hjson and not JSON: DeepSpeed reads it, Accelerate and the Trainer end with an error"
            findings.append(Finding("conflict", name, message))
        except ModuleNotFoundError:
            raise UserError(problem, f"{fix}; or run: pip install hjson, with which DeepSpeed reads comments") from None
        except ValueError:
            raise UserError(problem, fix) from None
    findings += [_refused(key, "is set twice", "keep one, DeepSpeed refuses such a file") for key in sorted(twice)]
    return document


def _dotted(document: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    names = []
    for key, value in document.items():
        names.append(prefix + key)
        if isinstance(value, dict) and prefix + key in _SECTIONS:
            names += _dotted(value, f"{prefix}{key}.")
    return tuple(names)


def _accelerate(name: str, document: dict[str, Any], findings: list[Finding]) -> UserFile:
    findings += _unknown_keys("", document, known_settings()["accelerate"], "Accelerate")
    # YAML 1.1 reads a bare `no` as false, and Accelerate does so too.
    kind, precision = document.get("distributed_type"), document.get("mixed_precision")
    kind, precision = "NO" if kind is False else kind, "no" if precision is False else precision
    if kind in _NOT_PREDICTED:
        problem = f"{name} has distributed_type: {kind}, which is not modelled"
        raise UserError(problem, f"modelled are {', '.join(_DISTRIBUTED)}")
    if not isinstance(kind, str) or kind not in _DISTRIBUTED:
        guess = did_you_mean(str(kind).upper(), _DISTRIBUTED) or f"supported are {', '.join(_DISTRIBUTED)}"
        findings.append(_refused("distributed_type", "is missing" if kind is None else f"is {clip(kind)}", guess))
        kind = "DEEPSPEED" if "deepspeed_config" in document else "FSDP" if "fsdp_config" in document else "MULTI_GPU"
    processes = document.get("num_processes")
    if processes is not None and (type(processes) is not int or processes < 1):
        findings.append(_refused("num_processes", f"is {clip(processes)}", "set a whole number of ranks"))
        processes = None
    if precision not in (None, "no", "fp16", "bf16", "fp8"):
        guess = did_you_mean(str(precision), ("bf16", "fp16", "fp8"), cutoff=0.5) or "set no, bf16 or fp16"
        findings.append(_refused("mixed_precision", f"is {clip(precision)}", guess))
        precision = None
    findings += [Finding("noted", key, NOT_MODELLED) for key in ("megatron_lm_config",) if document.get(key)]
    mesh = None
    if document.get("parallelism_config"):
        mesh = _mesh(_section(document, "parallelism_config", findings), kind, findings)
    if kind == "DEEPSPEED":
        return _accelerate_deepspeed(name, document, precision, processes, findings)
    section = _section(document, "fsdp_config", findings) if kind == "FSDP" else None
    return UserFile(name, "accelerate", kind, None, (), precision, section, processes, mesh, findings)


def _mesh(section: Mapping[str, Any], kind: str, findings: list[Finding]) -> tuple[int, int] | None:
    sizes = {key.removeprefix("parallelism_config_"): value for key, value in section.items()}
    wrong = [key for key, size in sizes.items() if key.endswith("_size") and (type(size) is not int or size < 1)]
    for key in wrong:
        problem = f"is {clip(sizes[key])}"
        findings.append(_refused(f"parallelism_config.{key}", problem, "set a whole number from 1 up"))
    if wrong:
        return None
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


def _section(document: Mapping[str, Any], key: str, findings: list[Finding]) -> dict[str, Any]:
    section = document.get(key)
    if isinstance(section, dict) and all(isinstance(setting, str) for setting in section):
        return section
    problem = "is missing" if section is None else f"is {clip(section)}, which is not a mapping"
    findings.append(_refused(key, problem, f"write its settings under {key}"))
    return {}


def _accelerate_deepspeed(
    name: str, document: dict[str, Any], precision: Any, processes: int | None, findings: list[Finding]
) -> UserFile:
    plugin, reference = _section(document, "deepspeed_config", findings), known_settings()
    mapped = reference["accelerate_deepspeed"]
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
        only_deepspeeds = list[Finding]()
        settings = _read(inner, only_deepspeeds)
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


def _unknown_keys(place: str, section: dict[str, Any], supported: Iterable[str], owner: str) -> list[Finding]:
    """Take the keys that the owner of a section does not support out of it, and return a finding for each."""
    supported = list(supported)
    unknown = [key for key in section if key not in supported]
    for key in unknown:
        del section[key]
    problem = f"is not a setting that {owner} supports, which ends with an error"
    return [_refused(f"{place}{key}", problem, did_you_mean(str(key), supported) or "take it out") for key in unknown]


def check_deepspeed(file: UserFile) -> None:
    """Add the findings of a file's DeepSpeed settings, and take out those with a wrong key or value."""
    settings, reference, findings = file.deepspeed, known_settings(), file.findings
    assert settings is not None
    for key in settings:
        # DeepSpeed drops comments, too, as their authors expect.
        if key in reference["top"] or key in reference["others"] or key.lstrip("_") in ("comment", "comments"):
            continue
        place = next((section for section in _SECTIONS if key in reference[section]), None)
        hint = did_you_mean(key, [*reference["top"], *reference["others"]], cutoff=0.75).strip()
        hint = hint or (f"it belongs in {place}" if place else "")
        message = "DeepSpeed does not support it, and drops it silently"
        findings.append(Finding("ignored", key, f"{message}; {hint}".removesuffix("; ")))
    if isinstance(settings.get(ZERO), bool) and file.launcher == "deepspeed":
        settings[ZERO] = {"stage": int(settings[ZERO])}
        findings.append(Finding("noted", ZERO, f"a deprecated form, read as stage {settings[ZERO]['stage']}"))
    for key in (ZERO, "bf16", "bfloat16", "fp16", "torch_autocast", "data_types", "optimizer", "scheduler", "aio"):
        if key in settings and not isinstance(settings[key], dict):
            problem = f"is {clip(settings.pop(key))}, not a mapping"
            findings.append(_refused(key, problem, f'write "{key}": {{...}}'))
    if ZERO not in settings:
        if file.launcher == "accelerate":
            findings.append(Finding("refused", ZERO, "Accelerate ends with an error without it"))
        else:
            findings.append(Finding("noted", ZERO, "is not set: ZeRO is off"))
    zero = settings.get(ZERO, {})
    if zero.get("stage") == "auto":
        # DeepSpeedPlugin fills it from ACCELERATE_DEEPSPEED_ZERO_STAGE, 2 by default.
        zero["stage"] = 2 if file.launcher == "accelerate" else 0
        by = "Accelerate makes it" if file.launcher == "accelerate" else "DeepSpeed drops it and uses its default,"
        findings.append(Finding("filled", f"{ZERO}.stage", f"auto: {by} {zero['stage']}"))
    findings += _wrong_settings(ZERO, zero)
    if (stage := zero.get("stage", 0)) not in range(4):
        zero["stage"] = 3 if type(stage) is int and stage > 3 else 2
        fix = f"set 0, 1, 2 or 3 (figures here are those of stage {zero['stage']})"
        findings.append(_refused(f"{ZERO}.stage", f"is {clip(stage)}", fix))
    for what in OFFLOADS:
        section = zero.get(what)
        if section is not None and not isinstance(section, dict):
            problem = f"is {clip(zero.pop(what))}"
            findings.append(_refused(f"{ZERO}.{what}", problem, 'write it as {"device": "cpu"}'))
        elif section is not None:
            findings += _wrong_settings(f"{ZERO}.{what}", section)
            if section.get("device", "none") not in ("none", "cpu", "nvme", "auto"):
                problem = f"is {clip(section.pop('device'))}"
                findings.append(_refused(f"{ZERO}.{what}.device", problem, "set none, cpu or nvme"))
    for place, keys in reference["strict_sections"].items():
        section = (settings if place in settings else zero).get(place.removeprefix(f"{ZERO}."))
        # DeepSpeed reads bfloat16 only if there is no bf16.
        if isinstance(section, dict) and not (place == "bfloat16" and settings.get("bf16") is not None):
            findings += _unknown_keys(f"{place}.", section, keys, "DeepSpeed")
    findings += _not_modelled("top", settings, zero)
    findings += _not_modelled(ZERO, zero, zero)
    for what in OFFLOADS:
        findings += _not_modelled(f"{ZERO}.{what}", zero.get(what) or {}, zero)


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


def _wrong_settings(place: str, section: dict[str, Any]) -> Iterator[Finding]:
    """Take the settings with a wrong key or value out of a section, and yield a finding for each."""
    reference = known_settings()[place]
    # DeepSpeed also accepts stage 3's settings without the prefix.
    short = {key.removeprefix("stage3_") for key in reference if key.startswith("stage3_")}
    yield from _unknown_keys(f"{place}.", section, [*reference, *short], "DeepSpeed")
    for key, value in list(section.items()):
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
        if not is_valid and key != "stage":
            del section[key]
            yield _refused(f"{place}.{key}", f"is {clip(value)}", f"set {expected}")
