"""A user's DeepSpeed JSON or Accelerate file, read as the two libraries read it. What they refuse is refused here."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from study.config.errors import UserError, brief, first_line
from study.config.yaml_sections import read_own, written_out
from study.host.folders import folder_named

# A user's file as text: a JSON or YAML mapping that says nothing twice, or one clear line of what is wrong with it.

_LARGEST_FILE_BYTES = 1_000_000
_MOST_VALUES = 10_000


def read_document(name: str) -> dict[str, Any]:
    path = folder_named(name)
    try:
        if path.is_dir():
            raise UserError(f"{name} is a folder", "name the file in it")
        if not path.exists():
            raise UserError(f"there is no file {name}", _near_file(path))
        if not path.is_file():
            raise UserError(f"{name} is no plain file", "save what it says in a file, and name that")
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise UserError(f"{name} is larger than 1 MB", "give a DeepSpeed JSON or an Accelerate YAML")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{name} is not readable ({first_line(error)})", "name a text file") from None
    try:
        is_json = path.suffix == ".json" or text.lstrip().startswith("{")
        document = json.loads(text, object_pairs_hook=_once) if is_json else yaml.load(text, _SettingsLoader)
    except _Twice as twice:
        raise UserError(f"{name} says {twice} twice", "keep one of the two: DeepSpeed refuses such a file") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if is_json else "YAML"
        raise UserError(
            f"{name} is not readable as {kind} ({' '.join(str(error).split())[:120]})", f"make it {kind} at that place"
        ) from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UserError(f"{name} is not a mapping of settings", "give a DeepSpeed JSON or an Accelerate YAML")
    return document


def _near_file(path: Path) -> str:
    try:
        there = [each.name for each in path.parent.iterdir() if each.suffix in (".json", ".yaml", ".yml")]
    except OSError:
        there = []
    near = difflib.get_close_matches(path.name, there, n=2)
    return f"beside it there is {', '.join(near)}" if near else "name a DeepSpeed JSON or an Accelerate YAML"


class _Twice(Exception):
    """A key is there twice; both parsers would keep the last without a word."""


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


class _SettingsLoader(yaml.SafeLoader):
    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and written_out(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its aliases make more than {_MOST_VALUES} values of it")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [getattr(key, "value", None) for key, _ in node.value]
        for name in names:
            if isinstance(name, str) and name != "<<" and names.count(name) > 1:
                raise _Twice(name)
        return super().construct_mapping(node, deep)


Kind = Literal["refused", "conflict", "ignored", "nothing", "filled", "missing", "noted"]
ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")
_SECTIONS = (ZERO, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param")
_SPELT: dict[str, Any] = {"true": True, "false": False}
# Those of Accelerate's that train on GPUs, or on processors, with plain torch, DeepSpeed or FSDP.
_DISTRIBUTED = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
_UNREAD = "is not read here: what is told is of one group over all ranks"
# Said beside a deepspeed_config_file, Accelerate ends with an error.
_SAID_TWICE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
    "mixed_precision",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Finding:
    """What becomes of one setting, where that is not what it says."""

    kind: Kind
    key: str
    says: str


@dataclasses.dataclass
class UserFile:
    name: str
    launcher: Literal["accelerate", "deepspeed"]
    distributed_type: str
    # As the engine gets it, but for what is "auto"; None where DeepSpeed does not run.
    deepspeed: dict[str, Any] | None
    # Dotted names of what the user wrote.
    given: tuple[str, ...]
    mixed_precision: str | None = None
    fsdp: Mapping[str, Any] | None = None
    num_processes: int | None = None
    # Of FSDP: how many copies, and over how many ranks each is sharded.
    mesh: tuple[int, int] | None = None
    findings: list[Finding] = dataclasses.field(default_factory=list)


@functools.cache
def known_settings() -> dict[str, Any]:
    text = Path(__file__).with_name("known_settings.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = read_own(text)
    return document


def read_user_file(name: str) -> UserFile:
    document = read_document(name)
    if "distributed_type" in document or "compute_environment" in document:
        return _accelerate(name, document)
    if "version" in document and "services" in document:
        raise UserError(f"{name} is no settings of an engine", "give a DeepSpeed JSON or an Accelerate YAML")
    file = UserFile(name, "deepspeed", "DEEPSPEED", document, _dotted(document))
    check_deepspeed(file)
    return file


def _dotted(document: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    found = []
    for key, value in document.items():
        found.append(prefix + key)
        if isinstance(value, dict) and prefix + key in _SECTIONS:
            found += _dotted(value, f"{prefix}{key}.")
    return tuple(found)


def _accelerate(name: str, document: dict[str, Any]) -> UserFile:
    _refuse_unknown(name, "", document, known_settings()["accelerate"], "Accelerate")
    kind = document.get("distributed_type")
    if not isinstance(kind, str) or kind not in _DISTRIBUTED:
        said = f"says distributed_type: {brief(kind)}" if kind is not None else "has no distributed_type"
        near = difflib.get_close_matches(str(kind).upper(), _DISTRIBUTED, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{name} {said}", f"{guess}read here are {', '.join(_DISTRIBUTED)}")
    processes, precision = document.get("num_processes"), document.get("mixed_precision")
    if processes is not None and (type(processes) is not int or processes < 1):
        raise UserError(f"{name} says num_processes: {brief(processes)}", "set a whole number of ranks")
    if precision is not None and precision not in ("no", "fp16", "bf16", "fp8", False):
        raise UserError(f"{name} says mixed_precision: {brief(precision)}", "set no, bf16 or fp16")
    # YAML 1.1 takes a bare `no` for false, and Accelerate does so too.
    precision = "no" if precision is False else precision
    findings = [Finding("noted", key, _UNREAD) for key in ("megatron_lm_config",) if document.get(key)]
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
            raise UserError(f"{name} says parallelism_config.{key}: {brief(size)}", "set a whole number from 1 up")
    copies, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    wide = [key for key, size in sizes.items() if key in ("tp_size", "cp_size", "sp_size") and size > 1]
    findings += [Finding("noted", f"parallelism_config.{key}", _UNREAD) for key in wide]
    if copies == 1 or kind != "FSDP" or wide:
        return None
    if shards == 1:
        says = "Accelerate refuses copies that nothing shards: take it out, which is plain data parallelism"
        findings.append(Finding("refused", "parallelism_config.dp_shard_size", says))
        return None
    return copies, shards


def _section(name: str, document: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = document.get(key)
    if not isinstance(section, dict) or not all(isinstance(each, str) for each in section):
        said = f"has no {key}" if section is None else f"says {key}: {brief(section)}, which is no mapping"
        raise UserError(f"{name} {said}", f"write its settings under {key}:")
    return section


def _accelerate_deepspeed(name: str, document: dict[str, Any], precision: Any, processes: int | None) -> UserFile:
    plugin, known = _section(name, document, "deepspeed_config"), known_settings()["accelerate_deepspeed"]
    findings = [Finding("ignored", key, _why_unheard(key)) for key in plugin if key not in known]
    inner = plugin.get("deepspeed_config_file")
    if inner not in (None, "none"):
        if not isinstance(inner, str):
            raise UserError(f"{name} says deepspeed_config_file: {brief(inner)}", "name a file")
        if not folder_named(inner).exists():
            begins = "run this in the folder where that path begins: of this study's files, the root of the repository"
            raise UserError(
                f"{name} says deepspeed_config_file: {brief(inner)}, and there is no file of that name",
                "name one that is there" if Path(inner).is_absolute() else begins,
            )
        settings = read_document(inner)
        twice = sorted((_SAID_TWICE & plugin.keys()) | ({"mixed_precision"} if precision is not None else set()))
        for key in twice:
            says = f"Accelerate ends with an error where {inner} is given too: say it there alone"
            findings.append(Finding("refused", key, says))
    else:
        settings = _as_the_plugin(plugin)
    stage = settings.get(ZERO, {}).get("stage") if isinstance(settings.get(ZERO), dict) else None
    if "zero3_init_flag" in plugin:
        findings += _init_flag(plugin["zero3_init_flag"], stage)
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if inner in (None, "none") and plugin.get(key) not in (None, "none"):
            says = "the launcher hands it to no rank: say nvme_path in a DeepSpeed JSON"
            findings.append(Finding("ignored", key, says))
    given = _dotted(settings) if inner not in (None, "none") else tuple(known[key] for key in plugin if known.get(key))
    file = UserFile(name, "accelerate", "DEEPSPEED", settings, given, precision, None, processes, None, findings)
    check_deepspeed(file)
    return file


def _why_unheard(key: str) -> str:
    names = known_settings()
    if key in names[ZERO] or key in names["top"]:
        return "an Accelerate file cannot say it: Accelerate drops it without a word; a DeepSpeed JSON can"
    return f"Accelerate drops it without a word{_guess(key, names['accelerate_deepspeed'])}"


def _init_flag(value: Any, stage: Any) -> list[Finding]:
    if stage != 3:
        return [Finding("nothing", "zero3_init_flag", "is for stage 3")] if value else []
    says = "is not heard: transformers splits each parameter of a stage-3 model as it is made, whatever it says"
    return [] if value else [Finding("nothing", "zero3_init_flag", f"false {says}")]


def _as_the_plugin(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that Accelerate makes where no JSON is named."""
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for what in OFFLOADS:
        zero[what] = {"device": str(plugin.get(f"{what}_device") or "none").lower()}
    zero["stage3_gather_16bit_weights_on_model_save"] = bool(plugin.get("zero3_save_16bit_model", False))
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": plugin.get("gradient_clipping", "auto"), ZERO: zero,
    }  # fmt: skip


def _guess(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def _refuse_unknown(name: str, place: str, section: Iterable[str], known: Iterable[str], whose: str) -> None:
    known = list(known)
    for key in section:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            fix = f"did you mean {' or '.join(near)}?" if near else "take it out"
            raise UserError(f"{name}: {place}{key} is no setting that {whose} knows", fix)


def check_deepspeed(file: UserFile) -> None:
    settings, known = file.deepspeed, known_settings()
    assert settings is not None
    for key in settings:
        if key in known["top"] or key in known["others"]:
            continue
        near = difflib.get_close_matches(key, [*known["top"], *known["others"]], n=1, cutoff=0.75)
        if near:
            problem = f"{file.name}: {key} is no setting that DeepSpeed knows, and it drops it without a word"
            raise UserError(problem, f"did you mean {near[0]}?")
        where = next((section for section in _SECTIONS if key in known[section]), None)
        hint = f"; it belongs into {where}" if where else ""
        file.findings.append(Finding("ignored", key, f"DeepSpeed does not know it, and drops it without a word{hint}"))
    if settings.get("tensor_parallel"):
        file.findings.append(Finding("noted", "tensor_parallel", _UNREAD))
    zero = settings.get(ZERO, {})
    if isinstance(zero, bool) or not isinstance(zero, dict):
        fix = 'write it as {"zero_optimization": {"stage": 2}}'
        raise UserError(f"{file.name}: zero_optimization is {brief(zero)}, and no mapping", fix)
    if ZERO not in settings:
        says = "without it there is no ZeRO, and Accelerate ends with an error"
        file.findings.append(Finding("missing", ZERO, says if file.launcher == "accelerate" else says.split(",")[0]))
    _check_section(file.name, ZERO, zero)
    if type(zero.get("stage", 0)) is not int or zero.get("stage", 0) not in range(4):
        raise UserError(f"{file.name}: zero_optimization.stage is {brief(zero['stage'])}", "set 0, 1, 2 or 3")
    for what in OFFLOADS:
        section = zero.get(what)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise UserError(f"{file.name}: {ZERO}.{what} is {brief(section)}", 'write it as {"device": "cpu"}')
        _check_section(file.name, f"{ZERO}.{what}", section)
        if section.get("device", "none") not in ("none", "cpu", "nvme", "auto"):
            raise UserError(f"{file.name}: {ZERO}.{what}.device is {brief(section['device'])}", "set none, cpu or nvme")
    for key in ("bf16", "bfloat16", "fp16", "torch_autocast", "data_types", "optimizer", "scheduler", "aio"):
        if key in settings and not isinstance(settings[key], dict):
            raise UserError(f"{file.name}: {key} is {brief(settings[key])}, and no mapping", f'write "{key}": {{...}}')


def _check_section(name: str, place: str, section: dict[str, Any]) -> None:
    known = known_settings()[place]
    # Its own names of stage 3's settings, without the prefix.
    short = {key.removeprefix("stage3_") for key in known if key.startswith("stage3_")}
    _refuse_unknown(name, f"{place}.", section, [*known, *short], "DeepSpeed")
    for key, value in section.items():
        default = known.get(key, known.get(f"stage3_{key}", {})).get("default")
        if value == "auto" or default is None:
            continue
        # As the engine does.
        if isinstance(value, str) and not isinstance(default, str):
            value = section[key] = _SPELT.get(value.lower(), int(value) if value.isdecimal() else value)
        wants, is_it = _type_of(default, value)
        if key == "reduce_bucket_size" and value == 0:
            wants, is_it = "a whole number above 0", False
        if not is_it:
            raise UserError(f"{name}: {place}.{key} is {brief(value)}", f"set {wants}")


def _type_of(default: Any, value: Any) -> tuple[str, bool]:
    if isinstance(default, bool):
        return "true or false", isinstance(value, bool)
    if isinstance(default, int):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63
        return "a whole number that is not negative", fits and float(value).is_integer()
    if isinstance(default, float):
        return "a number from 0 to 1", isinstance(value, int | float) and 0 <= value <= 1
    return "a word", isinstance(value, str)
