"""Read a user's DeepSpeed JSON or Accelerate YAML as the two libraries do, and reject the settings that they reject."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from study.advisor import torchtitan_files
from study.advisor.other_programs import check_program, script_strategy
from study.config.errors import MissingFile, UserError, WrongFile, clip, did_you_mean, first_line, replace_unprintable
from study.config.registry import REGISTRY
from study.config.strategies import STRATEGY_DIRECTORY
from study.config.yaml_sections import Section, load_package_yaml, read_document
from study.host.folders import resolve_path

MAX_FILE_BYTES = 1_000_000
# Settings are four levels deep.
_MAX_NESTING = 50
# The libraries support 300. For each other key the similar names are computed.
_MAX_KEYS = 2_000
_EITHER = "give a DeepSpeed JSON or an Accelerate YAML"
_MAX_PROGRAM_LETTERS = 1_000_000
_PROGRAMS = (".py", ".ipynb", ".sh", ".bash", ".sbatch", ".slurm")
ZERO = "zero_optimization"
# Keys of the files of TrainingArguments, TRL, LlamaFactory and axolotl; and of a DeepSpeed file.
_OF_A_TRAINER = {
    *("per_device_train_batch_size", "model_name_or_path", "base_model", "output_dir", "dataset_name", "dataset"),
    *("datasets", "learning_rate", "num_train_epochs", "num_epochs", "bf16", "fsdp", "fsdp_config", "use_peft"),
}
_OF_DEEPSPEED = {ZERO, "train_batch_size", "train_micro_batch_size_per_gpu"}
OFFLOADS = ("offload_optimizer", "offload_param")
SECTIONS = (ZERO, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param")
MESH_PREFIX = "parallelism_config_"
# In the order of torch's ShardingStrategy, from 1.
_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_JSON_SUFFIXES = (".json", ".jsonc", ".json5", ".hjson")
_SPACE_OR_COMMENT = re.compile(r"\s+|(?:#|//)[^\n]*|/\*[\s\S]*?\*/")
# A value without quotes that begins as a name does, up to the end of its line.
_UNQUOTED = re.compile(r":[ \t]*([A-Za-z_][^\n]*)")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_IS_OUTSIDE = "is outside of the checked repository or folder, where --strict reads nothing"
_INSIDE = "give a copy of that file inside"
NOT_MODELLED = "not modelled: the figures are without it"
# Rule of the values "auto" that the Trainer fills in.
AUTO_VALUE = "auto-value"
# Rule of Accelerate's demand for stand-ins of an optimizer and a scheduler, which the Trainer meets.
DUMMY = "dummy"
# Both are of settings that end a run without the Trainer.
FILLED_BY_TRAINER = (AUTO_VALUE, DUMMY)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A setting whose effect differs from its value in the file."""

    kind: Literal["refused", "conflict", "ignored", "ineffective", "filled", "noted"]
    key: str
    message: str
    fix: str = ""
    # Name of the rule in the id, if that is not the key.
    rule: str = ""
    file: str = ""
    # From 1.
    line: int = 0
    # The cause of `study releases` that it is, by its id.
    cause: str = ""

    @property
    def says(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message

    @property
    def id(self) -> str:
        """Stable name, such as refused/unknown-key."""
        return f"{self.kind}/{self.rule or self.key.rpartition('.')[2] or 'file'}"

    @property
    def severity(self) -> Literal["error", "warning", "note"]:
        """Whether the engine ends with an error, or a setting has another effect."""
        return "error" if self.kind == "refused" else "note" if self.kind in ("noted", "filled") else "warning"

    @property
    def document(self) -> dict[str, str | int]:
        return {name: getattr(self, name) for name in ("id", "severity", "file", "line", "key", "message", "fix")}

    @property
    def text(self) -> str:
        """Key and message, without control characters."""
        return replace_unprintable(f"{self.key}: {self.says}" if self.key else self.says)

    @property
    def annotation(self) -> str:
        """Workflow command of GitHub Actions that annotates the line; it escapes as actions/toolkit does."""
        parts = (self.file, self.text)
        file, text = (part.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A") for part in parts)
        file = file.replace(":", "%3A").replace(",", "%2C")
        command = "notice" if self.severity == "note" else self.severity
        return f"::{command} file={file},line={self.line},title={self.kind}::{text}"


@dataclasses.dataclass
class UserFile:
    """A config file as the launcher or the engine reads it."""

    name: str
    # "trainer": the Trainer of transformers, which a trainer's file sets up, with a DeepSpeed JSON.
    launcher: Literal["accelerate", "deepspeed", "trainer"]
    distributed_type: str
    # Settings as the engine gets them, except that "auto" is not resolved; None without DeepSpeed.
    deepspeed: dict[str, Any] | None
    # Dotted names of the settings in the file.
    explicit_keys: tuple[str, ...]
    mixed_precision: str | None = None
    # Under their full names: Accelerate accepts FSDP's settings without the prefix, too. None without FSDP.
    fsdp: Mapping[str, Any] | None = None
    num_processes: int | None = None
    # Machines that these are spread over; None: the file does not set it.
    num_machines: int | None = None
    # FSDP's number of replicas, and of ranks per replica.
    mesh: tuple[int, int] | None = None
    findings: list[Finding] = dataclasses.field(default_factory=list)
    # Ranks of Accelerate's parallelism_config; 1 if it sets none, or leaves them to DeepSpeed.
    mesh_ranks: int = 1
    # Sizes above 1 in Accelerate's parallelism_config of groups that share samples.
    group_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # The deepspeed_config of an Accelerate file.
    plugin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Accelerate compiles the model with inductor.
    compiled: bool = False

    def is_on(self, name: str) -> bool:
        """Whether a key of FSDP is true, as Accelerate reads the variables that its launcher sets."""
        return str((self.fsdp or {}).get(name, False)).lower() in ("true", "1", "yes", "y", "on", "t")

    @property
    def sharding(self) -> str | None:
        """The sharding strategy of FSDP version 1, whose numbers are those of torch; None for version 2."""
        if self.fsdp is None or str(self.fsdp.get("fsdp_version", 1)) != "1":
            return None
        # By default the launcher sets FULL_SHARD, so fsdp_reshard_after_forward has no effect.
        name = str(self.fsdp.get("fsdp_sharding_strategy", _SHARDINGS[0])).upper()
        return _SHARDINGS[int(name) - 1] if name in ("1", "2", "3", "4", "5") else name


@functools.cache
def known_settings() -> dict[str, Any]:
    """Return the content of known_settings.yaml."""
    text = Path(__file__).with_name("known_settings.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = load_package_yaml(text)
    return document


@functools.cache
def known_words() -> frozenset[str]:
    """Return the words of known_settings.yaml in lower case: names, values and descriptions of settings."""
    return frozenset(re.findall(r"\w+", json.dumps(known_settings()).lower()))


def has_no_setting(file: UserFile) -> bool:
    """Whether a mapping has no key of DeepSpeed, so that it is another program's file."""
    reference = known_settings()
    names = {*reference["top"], *reference["others"], *reference["removed"], *reference["accelerate_deepspeed"]}
    similar = any(did_you_mean(key, names, cutoff=0.85) for key in file.explicit_keys if "." not in key)
    return file.launcher == "deepspeed" and not similar


@functools.cache
def section_entries(place: str) -> dict[str, dict[str, Any]]:
    """Return the settings of a section with their types; DeepSpeed accepts those of stage 3 without prefix, too."""
    reference = known_settings()
    entries = reference["strict_sections"].get(place) or reference["sections"].get(place) or reference[place]
    full = {key: {"type": item} if isinstance(item, str) else {"type": "any", **item} for key, item in entries.items()}
    return {key.removeprefix("stage3_"): entry for key, entry in full.items()} | full


def read_user_file(name: str, findings: list[Finding] | None = None, tree: Path | None = None) -> UserFile:
    """Read a DeepSpeed JSON or an Accelerate YAML, without the keys and values that the engine refuses.

    These are findings, which are added to a given list. Raise UserError if the file has no settings that can be read,
    or if it or one that it names is outside of a given tree.
    """
    findings = [] if findings is None else findings
    document = read_mapping(name, findings, tree)
    section = document.get("deepspeed_config")
    if _is_of_accelerate(document):
        return _accelerate(name, document, findings, tree)
    if is_of_a_trainer(document):
        raise WrongFile(name, "is the file of a trainer, not of an engine", _engine_of_a_trainer(document))
    if isinstance(section, dict) and not section_entries("top").keys().isdisjoint(section):
        problem = "has its settings under deepspeed_config, where DeepSpeed reads none"
        raise WrongFile(name, problem, "write them at the top level of the file", key="deepspeed_config")
    if "peft_type" in document or "model_type" in document:
        kind = "adapters" if "peft_type" in document else "a model"
        raise WrongFile(name, f"is the config of {kind}, not of an engine", f"{_EITHER}, and then the model")
    check_program(name, document)
    if "version" in document and "services" in document:
        raise WrongFile(name, "has no settings of an engine", _EITHER)
    if document and all(f"fsdp_{key}" in section_entries("fsdp") or "xla" in key for key in document):
        fix = "write an Accelerate YAML with distributed_type: FSDP, and these settings under its fsdp_config"
        raise WrongFile(name, "is an fsdp_config of TrainingArguments, whose other half is --fsdp", fix)
    file = deepspeed_file(name, document, findings)
    if document and tree is None and has_no_setting(file):
        raise WrongFile(name, "has no setting of DeepSpeed or Accelerate", _EITHER)
    return file


def deepspeed_file(name: str, settings: dict[str, Any], findings: list[Finding]) -> UserFile:
    """Return DeepSpeed's settings as a file of this name, without wrong keys and values, which are findings."""
    file = UserFile(name, "deepspeed", "DEEPSPEED", settings, _explicit_keys(settings), findings=findings)
    check_deepspeed(file)
    return file


def _is_of_accelerate(document: Mapping[str, Any]) -> bool:
    section, names = document.get("deepspeed_config"), known_settings()["accelerate_deepspeed"]
    has_plugin = isinstance(section, dict) and not names.keys().isdisjoint(section)
    return has_plugin or "distributed_type" in document or "compute_environment" in document


def is_of_a_trainer(document: Mapping[str, Any]) -> bool:
    """Whether a mapping has keys of TrainingArguments, LlamaFactory or axolotl, and no batch or stage of DeepSpeed."""
    if _is_of_accelerate(document):
        return False
    has_keys = len(_OF_A_TRAINER & document.keys()) > 1 and _OF_DEEPSPEED.isdisjoint(document)
    return isinstance(document.get("deepspeed"), str) or has_keys


def _engine_of_a_trainer(document: Mapping[str, Any]) -> str:
    """Return the place of the engine's settings in a trainer's file, as a fix."""
    if isinstance(path := document.get("deepspeed"), str):
        return f"explain the file that it names: {path}"
    if isinstance(document.get("deepspeed"), dict):
        return "explain a file with its section deepspeed alone"
    if document.get("fsdp") or document.get("fsdp_config"):
        return "explain an Accelerate YAML with distributed_type: FSDP, and its settings of FSDP under fsdp_config"
    return "it names no engine, so explain the file of accelerate launch, or: study predict MODEL --strategy ddp"


def _refused(key: str, problem: str, fix: str, rule: str = "wrong-value") -> Finding:
    return Finding("refused", key, problem, fix.rstrip(), rule)


def is_inside(name: str, tree: Path) -> bool:
    """Whether a file is one of a tree, with links followed, and not one of git's own."""
    path, root = resolve_path(name).resolve(), tree.resolve()
    return path.is_relative_to(root) and ".git" not in path.relative_to(root).parts


def is_json(path: Path, text: str) -> bool:
    """Whether a file is read as JSON or Hjson: by its name, or by its beginning, as JSON may have any name."""
    if path.suffix in _JSON_SUFFIXES:
        return True
    # In a YAML, # begins a comment, too.
    if path.suffix in (".yaml", ".yml"):
        return text.lstrip().startswith("{")
    place = 0
    while match := _SPACE_OR_COMMENT.match(text, place):
        place = match.end()
    return text.startswith("{", place)


def read_mapping(name: str, findings: list[Finding], tree: Path | None) -> dict[str, Any]:
    """Read a JSON or YAML mapping; raise UserError if it is unreadable, or outside of the tree."""
    if tree is not None and not is_inside(name, tree):
        raise WrongFile(name, _IS_OUTSIDE, _INSIDE)
    path = resolve_path(name)
    if path.suffix in _PROGRAMS and path.is_file():
        raise _is_a_program(name, _read_beginning(path))
    if path.suffix == ".toml" and path.is_file():
        raise torchtitan_files.unread_file(name, path)
    text = _read_text(name, path)
    if text.startswith("#!"):
        raise _is_a_program(name, text)
    if is_json(path, text):
        # The reader of a Python in a browser does not come back from deep nesting.
        if _json_depth(text) > _MAX_NESTING:
            raise _too_deep(name)
        document = _read_json(name, text, findings)
    else:
        document = _read_yaml(path, findings)
    if not isinstance(document, dict):
        raise WrongFile(name, "is not a mapping of settings", _EITHER)
    _check_size(name, document)
    return document


def _read_beginning(path: Path) -> str:
    """Return the first letters of a program; none if it is not readable."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_PROGRAM_LETTERS)
    except OSError:
        return ""


def _is_a_program(name: str, text: str) -> WrongFile:
    strategy = script_strategy(text) or "single"
    fix = (
        "give the file that it launches with (--config_file, --deepspeed), the YAML or JSON of its TrainingArguments"
        f" (TRL, axolotl, LlamaFactory), or its settings as flags: study predict MODEL --strategy {strategy}"
        " --hardware BOX; two lines in it measure its run (docs/receipt.md)"
    )
    return WrongFile(name, "is a program, and its settings are not read", fix)


def _read_text(name: str, path: Path) -> str:
    """Return the text of a file; raise UserError if there is no such file, or if it is too large or empty."""
    try:
        if path.is_dir():
            raise WrongFile(name, "is a folder", "name the file in it")
        if not path.exists():
            missing = [place for place in (path, *path.parents) if not place.exists()][-1]
            what = f"file {name}" if missing == path else f"folder {missing}"
            siblings = sorted(entry.name for entry in missing.parent.iterdir())
            if missing == path and (strategy := path.name.partition(".")[0]) in REGISTRY:
                shipped = os.path.relpath(STRATEGY_DIRECTORY / f"{strategy}.yaml")
                same = [entry for entry in siblings if entry.partition(".")[0] == strategy]
                fix = f"did you mean {' or '.join(same)}?" if same else f"this study's {strategy} is in {shipped}"
                raise UserError(f"there is no {what}", fix)
            raise UserError(f"there is no {what}", did_you_mean(missing.name, siblings) or _EITHER)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WrongFile(name, "is larger than 1 MB", _EITHER)
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise WrongFile(name, f"is not readable ({first_line(error)})", "name a text file") from None
    if not text.strip():
        raise WrongFile(name, "is empty", _EITHER)
    return text


def _read_yaml(path: Path, findings: list[Finding]) -> Any:
    """Return the document of a YAML file, and add a finding for each key that is set twice."""

    class Repeating(Section):
        def may_repeat(self, key: str) -> bool:
            findings.append(_set_twice(key))
            return True

    try:
        return read_document(path, Repeating)
    except WrongFile as error:
        if path.suffix in ("", ".yaml", ".yml"):
            raise
        fix = f"{_EITHER}, or fix the file"
        raise WrongFile(error.file, error.what, fix, line=error.line, place=error.place) from None


def _check_size(name: str, document: dict[str, Any]) -> None:
    """Raise UserError if a document has too many keys, or too many levels."""
    level: list[Any] = [document]
    keys = 0
    for _ in range(_MAX_NESTING):
        keys += sum(len(item) for item in level if isinstance(item, Mapping))
        if keys > _MAX_KEYS:
            raise WrongFile(name, f"has more than {_MAX_KEYS:,} keys", _EITHER)
        values = [item.values() if isinstance(item, Mapping) else item for item in level]
        below = (value for row in values for value in row if isinstance(value, Mapping | list))
        # With aliases one list may be in many places.
        level = list({id(value): value for value in below}.values())
    if level:
        raise _too_deep(name)


def _json_depth(text: str) -> int:
    """Return the levels of brackets outside of strings, in one pass, whether or not the text is JSON."""
    depth = deepest = 0
    for token in re.finditer(r'"(?:[^"\\]+|\\.)*"?|[][{}]', text, re.DOTALL):
        depth += (token[0] in "[{") - (token[0] in "]}")
        deepest = max(deepest, depth)
    return deepest


def _too_deep(name: str) -> WrongFile:
    return WrongFile(name, f"is nested more than {_MAX_NESTING} levels deep", _EITHER)


_UNCLOSED = "the end of the file before its last bracket is closed"


def _json_mistake(text: str, error: json.JSONDecodeError) -> tuple[str, str, bool]:
    """Return the mistake at the place of an error, its fix, and whether Hjson permits it."""
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    # Python 3.13 names the place of the comma, releases before it that of the bracket.
    has_comma = before.endswith(",") or rest.startswith(",")
    rest = rest.removeprefix(",").lstrip()
    if not rest and before:
        return _UNCLOSED, "close it", False
    if rest.startswith(("#", "//", "/*")):
        return "a comment", "take it out", True
    if has_comma and rest.startswith(("}", "]")):
        return "a comma before a closing bracket", "take it out", True
    if word := re.match(r"(True|False|None)\b", rest):
        fix = f"write {json.dumps({'True': True, 'False': False}.get(word[0]))}"
        return f"{word[0]}, as Python writes it", fix, False
    if rest.startswith("'"):
        return "single quotes", "write double ones", True
    if re.match(r"[A-Za-z_]", rest) and error.msg.startswith("Expecting property name"):
        return "a name without quotes", "put it in double quotes", True
    if error.msg.startswith("Expecting ',' delimiter"):
        return "no comma after the value before it", "add one", False
    return " ".join(error.msg.split())[:120], "make it JSON at that place", False


def _hjson_mistake(text: str, error: Any) -> tuple[int, str, str]:
    """Return the line of a mistake in Hjson, the mistake, and its fix."""
    for number, line in enumerate(text.splitlines(), 1):
        value = match[1] if (match := _UNQUOTED.search(line)) else ""
        is_word = re.match(r"(true|false|null)\s*([]},#/]|$)", value)
        if not is_word and any(value.count(end) > value.count(start) for start, end in ("[]", "{}")):
            # Without the text itself, since --strict also reads the files of strangers.
            mistake = "a text without quotes, which ends with its line and so includes the bracket"
            return number, mistake, "put the text in quotes"
    # An infinite number has no place.
    place = getattr(error, "lineno", None) or 1
    message = str(getattr(error, "msg", error))
    if "eof" in message:
        return place, _UNCLOSED, "close it"
    return place, " ".join(message.split())[:120], "correct it there"


def _read_json(name: str, text: str, findings: list[Finding]) -> Any:
    """Read a JSON, or a Hjson, which may have comments and names without quotes, and which only DeepSpeed reads."""
    twice, not_finite = set[str](), list[str]()

    def to_float(number: str) -> float:
        if not math.isfinite(value := float(number)):
            not_finite.append(number)
        return value

    def to_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.update(Counter(key for key, _ in pairs) - Counter({key for key, _ in pairs}))
        return dict(pairs)

    try:
        document = json.loads(text, object_pairs_hook=to_mapping, parse_constant=to_float, parse_float=to_float)
    except RecursionError:
        raise _too_deep(name) from None
    except json.JSONDecodeError as error:
        mistake, fix, is_hjson = _json_mistake(text, error)
        problem = f"is not readable as JSON: line {error.lineno} has {mistake}"
        not_json = None if is_hjson else WrongFile(name, problem, fix, line=error.lineno)
        document = _read_hjson(name, text, to_mapping, not_json)
        findings += _accelerate_reads_no_hjson(name, document, error.lineno, mistake, fix)
    # A file with "auto" is one of the Trainer's or Accelerate's, whose reader is Python's.
    by_python = '"auto"' in text
    if not_finite and not by_python:
        problem = f"has {not_finite[0]}, which DeepSpeed's reader (Hjson) does not accept"
        findings.append(_refused(name, problem, "write it in digits", "not-finite"))
    fix = "keep one, DeepSpeed refuses such a file"
    for key in sorted(twice):
        findings.append(_set_twice(key) if by_python else _refused(key, "is set twice", fix, "set-twice"))
    return document


def _read_hjson(name: str, text: str, to_mapping: Callable[..., dict[str, Any]], not_json: WrongFile | None) -> Any:
    """Return the document of a text that is not JSON, by DeepSpeed's reader, or raise UserError.

    A given error names the mistake.
    """
    # Imported here, since few files are Hjson.
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=to_mapping)
    # An OverflowError is that of an infinite number.
    except (ValueError, OverflowError) as error:
        line, mistake, fix = _hjson_mistake(text, error)
        refusal = not_json or WrongFile(name, f"is not readable as Hjson: line {line} has {mistake}", fix, line=line)
        problem = f"{refusal.what}; DeepSpeed ends with an error, too"
        raise WrongFile(name, problem, refusal.fix, line=refusal.line) from None
    except RecursionError:
        raise _too_deep(name) from None


def _accelerate_reads_no_hjson(name: str, document: Any, line: int, mistake: str, fix: str) -> Iterator[Finding]:
    """Yield a finding for a Hjson, and one for each setting that only a reader of JSON would fill in."""
    message = f"is Hjson and not JSON, with {mistake} in line {line}: DeepSpeed reads it, Accelerate and"
    message += " the Trainer end with an error"
    yield Finding("conflict", name, message, fix, line=line)
    for key in _BATCH:
        if isinstance(document, dict) and document.get(key) == "auto":
            message = "only Accelerate and the Trainer fill in auto, and they do not read Hjson"
            yield _refused(key, message, "make the file JSON, or set a number")


def _set_twice(key: str) -> Finding:
    return Finding("ignored", key, "is set twice: Accelerate uses the last one", "keep one", "set-twice")


def flatten(section: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return settings and those of their sections by dotted name."""
    values = dict[str, Any]()
    for key, value in section.items():
        values[f"{place}{key}"] = value
        values |= flatten(value, f"{place}{key}.") if isinstance(value, Mapping) else {}
    return values


def _explicit_keys(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dotted names of the settings at the top level and in the sections of ZeRO."""
    return tuple(key for key in flatten(settings) if key.rpartition(".")[0] in ("", *SECTIONS))


def _accelerate(name: str, document: dict[str, Any], findings: list[Finding], tree: Path | None) -> UserFile:
    if document.get("compute_environment") == "AMAZON_SAGEMAKER":
        fix = "give the DeepSpeed JSON of its program"
        raise WrongFile(name, "is for SageMaker, which is not modelled", fix, key="compute_environment")
    findings += _unknown_keys("", document, known_settings()["accelerate"], "Accelerate")
    # YAML 1.1 reads a bare `no` as false, which Accelerate takes for one process, but for no precision.
    document |= {"distributed_type": "NO"} if document.get("distributed_type") is False else {}
    _check_distributed_type(name, document, findings)
    _read_processes(document, findings)
    findings += _wrong_values("", document, section_entries("accelerate"))
    findings += _wrong_launch(document)
    backend = _dynamo_backend(document, findings)
    if document.get("megatron_lm_config"):
        findings.append(Finding("noted", "megatron_lm_config", NOT_MODELLED))
    kind = document.get("distributed_type") or _type_by_sections(document)
    sizes = read_mesh_sizes(document, findings)
    mesh, mesh_ranks = read_mesh(sizes, kind, findings)
    # Files of 2021 have this key, which Accelerate drops next to the newer one.
    old_precision = "fp16" if document.get("fp16") else None
    precision, processes = document.get("mixed_precision", old_precision), document.get("num_processes")
    if kind == "DEEPSPEED":
        file = _accelerate_deepspeed(name, document, precision, processes, findings, tree)
    else:
        fsdp = read_fsdp(document, findings) if kind == "FSDP" else None
        file = UserFile(
            name, "accelerate", kind, None, (), precision, fsdp, num_processes=processes, mesh=mesh, findings=findings
        )
    file.mesh_ranks, file.group_sizes = mesh_ranks, sample_groups(sizes)
    machines = document.get("num_machines")
    file.num_machines = machines if type(machines) is int and machines > 0 else None
    file.compiled = backend == "inductor"
    return file


def _dynamo_backend(document: Mapping[str, Any], findings: list[Finding]) -> str:
    """Return the backend with which Accelerate compiles the model, "no" without one.

    Its launcher passes none to DeepSpeed's processes (prepare_deepspeed_cmd_env in utils/launch.py).
    """
    old_form = {key: value for key, value in document.items() if key == "dynamo_backend"}
    dynamo = {**_section(document, "dynamo_config", findings), **old_form}
    # The launcher takes its names without the prefix, too.
    value = dynamo.get("dynamo_backend", dynamo.get("backend"))
    backend = str(value).lower() if value else "no"
    if document.get("distributed_type") != "DEEPSPEED":
        findings += _wrong_values("", dynamo, section_entries("dynamo"))
        return backend
    if backend != "no":
        key = "dynamo_backend" if old_form else "dynamo_config"
        text = "accelerate launch does not pass it to DeepSpeed's processes, so that the model is not compiled"
        fix = "compile it in the program: torch.compile, or torch_compile of the TrainingArguments"
        findings.append(Finding("ineffective", key, text, fix))
    return "no"


def _check_distributed_type(name: str, document: Mapping[str, Any], findings: list[Finding]) -> None:
    """Raise UserError if the type is not modelled, and add a finding if there is none."""
    types = section_entries("accelerate")["distributed_type"]["type"].rstrip("?").split("|")
    kind = document.get("distributed_type")
    if kind in ("XLA", "MEGATRON_LM"):
        problem = f"has distributed_type: {kind}, which is not modelled"
        raise WrongFile(name, problem, f"modelled are {', '.join(types)}", key="distributed_type")
    if kind is None:
        findings.append(_refused("distributed_type", "is missing", f"supported are {', '.join(types)}"))


def _wrong_launch(document: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding for GPUs that are too few for the distributed type, and for a port that is not one."""
    kind, gpus, machines = (document.get(key) for key in ("distributed_type", "gpu_ids", "num_machines"))
    is_one = gpus not in (None, "all") and "," not in gpus and machines in (None, 1)
    if is_one and str(kind).startswith("MULTI_") and kind != "MULTI_CPU":
        yield _refused("gpu_ids", f"names one GPU, and {kind} needs more", "name them, or set all")
    gpu_count, processes = str(gpus).count(",") + 1, document.get("num_processes")
    is_listed = gpus not in (None, "all") and not is_one and machines in (None, 1)
    if is_listed and kind not in ("NO", "MULTI_CPU") and type(processes) is int and processes > gpu_count:
        message = f"names {gpu_count} GPUs, and num_processes is {processes}: rank {gpu_count} has no device"
        yield _refused("gpu_ids", message, f"name {processes}, or set num_processes: {gpu_count}")
    if kind not in ("NO", "MULTI_CPU"):
        yield from _wrong_values("", document, {"main_process_port": {"type": "int!#?"}})


def _type_by_sections(document: Mapping[str, Any]) -> str:
    """Return the distributed type for which a file without a type has settings."""
    if "deepspeed_config" in document:
        return "DEEPSPEED"
    return "FSDP" if "fsdp_config" in document else "MULTI_GPU"


def _read_processes(document: dict[str, Any], findings: list[Finding]) -> None:
    """Replace a text of num_processes by torchrun's number for it, or leave that to the machine
    (determine_local_world_size of torch). If the launcher itself compares or divides the text, it stays as it is."""
    text, kind = document.get("num_processes"), document.get("distributed_type")
    if not isinstance(text, str) or kind in ("NO", "MULTI_CPU"):
        return
    if document.get("use_cpu") or document.get("num_machines") not in (None, 1):
        return
    if text in ("auto", "cpu", "gpu", "xpu"):
        del document["num_processes"]
        what = "CPU core" if text == "cpu" else "GPU"
        findings.append(
            Finding("noted", "num_processes", f"{text}: torchrun starts a process for each {what} it finds")
        )
        return
    with contextlib.suppress(ValueError):
        document["num_processes"] = int(text)


def read_mesh_sizes(document: Mapping[str, Any], findings: list[Finding]) -> dict[str, int]:
    """Return the sizes of Accelerate's parallelism_config; none if one of them is not a size."""
    if not document.get("parallelism_config"):
        return {}
    section = _section(document, "parallelism_config", findings)
    names = {f"{MESH_PREFIX}{name}": name for name in known_settings()["parallelism_config"]}
    # Accelerate takes them as flags of its launcher, and has none of another name.
    for key in [key for key in section if key not in names]:
        guess = f"did you mean {MESH_PREFIX}{key}?" if f"{MESH_PREFIX}{key}" in names else did_you_mean(key, names)
        findings.append(Finding("ignored", key, f"Accelerate drops it silently; {guess}".rstrip("; ")))
    sizes = {names[key]: value for key, value in section.items() if key in names and key.endswith("_size")}
    wrong = list(_wrong_values("parallelism_config.", sizes, {key: {"type": "int!# >=1"} for key in sizes}))
    findings += wrong
    return {} if wrong else sizes


def run_by_trainer(file: UserFile) -> UserFile:
    """Return an engine's file as transformers' Trainer reads it."""
    return dataclasses.replace(file, launcher="trainer" if file.launcher == "deepspeed" else file.launcher)


def sample_groups(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes above 1 of groups that share samples."""
    return {key: size for key, size in sizes.items() if key in ("tp_size", "cp_size", "sp_size") and size > 1}


def read_mesh(sizes: Mapping[str, int], kind: str, findings: list[Finding]) -> tuple[tuple[int, int] | None, int]:
    """Return FSDP's replicas and ranks of each, and the number of ranks that Accelerate requires; 1 without one
    (ParallelismConfig._validate_accelerator)."""
    replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    groups = list(sample_groups(sizes))
    # Under DeepSpeed Accelerate divides no layer by tp_size. explain_case.py divides other layers, and its samples.
    modelled = {"tp_size", "sp_size"} if kind == "DEEPSPEED" else {"tp_size"}
    unmodelled = [key for key in groups if key not in modelled]
    for key in unmodelled:
        what = "compute the same samples" if key == "tp_size" else "divide the tokens of each sample"
        message = f"{sizes[key]} ranks {what}; {NOT_MODELLED}"
        findings.append(Finding("noted", f"parallelism_config.{key}", message))
    # Sequence parallelism is DeepSpeed's, which makes its own groups.
    ranks = 1 if "sp_size" in groups else math.prod(sizes.values())
    if kind == "FSDP" and ranks > 1 and shards == 1 and "cp_size" not in groups:
        message = "Accelerate ends with an error: FSDP has no ranks to shard over"
        findings.append(Finding("refused", "parallelism_config.dp_shard_size", message))
        return None, ranks if groups else 1
    # ParallelismConfig.__post_init__, whatever the engine.
    if {"tp_size", "cp_size"}.intersection(groups) and replicas > 1 and shards == 1:
        message = "Accelerate ends with an error: with tp_size or cp_size it has no ranks that only replicate"
        fix = f"set dp_shard_size: {replicas} in its place"
        if kind == "DEEPSPEED":
            fix = f"leave it and {' and '.join(groups)} out"
        findings.append(Finding("refused", "parallelism_config.dp_replicate_size", message, fix))
    has_mesh = replicas > 1 and kind == "FSDP" and groups in ([], ["tp_size"])
    return (replicas, shards) if has_mesh else None, ranks


def _section(document: Mapping[str, Any], key: str, findings: list[Finding]) -> dict[str, Any]:
    section = {} if document.get(key) is None else document[key]
    if isinstance(section, dict) and all(isinstance(setting, str) for setting in section):
        return section
    findings.append(_refused(key, f"is {clip(section)}, which is not a mapping", f"write its settings under {key}"))
    return {}


def read_fsdp(document: Mapping[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """Return FSDP's settings without those that Accelerate refuses (FullyShardedDataParallelPlugin)."""
    section = _section(document, "fsdp_config", findings).items()
    settings = {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in section}
    typed_entries, version = section_entries("fsdp"), str(settings.get("fsdp_version", 1))
    for name in [name for name in settings if name not in typed_entries]:
        guess = did_you_mean(name, typed_entries, cutoff=0.75)
        findings.append(Finding("ignored", name, f"Accelerate drops it silently; {guess}".rstrip("; ")))
    # The launcher's own default of both is true; to it, "false" in quotes is true.
    if settings.get("fsdp_cpu_ram_efficient_loading", True) and not settings.get("fsdp_sync_module_states", True):
        message = "Accelerate ends with an error if it is false and fsdp_cpu_ram_efficient_loading is not"
        findings.append(Finding("refused", "fsdp_sync_module_states", message))
    entries = {name: entry for name, entry in typed_entries.items() if entry.get("version", version) == version}
    # The plugin reads it from a variable, with int().
    least, policy = settings.get("fsdp_min_num_params", 0), str(settings.get("fsdp_auto_wrap_policy")).upper()
    if policy == "SIZE_BASED_WRAP" and not str(least).isdecimal():
        findings.append(_refused("fsdp_min_num_params", f"is {clip(least)}", "write a whole number in digits"))
    findings += _wrong_values("", settings, entries)
    return settings


def _accelerate_deepspeed(
    name: str,
    document: dict[str, Any],
    precision: Any,
    processes: int | None,
    findings: list[Finding],
    tree: Path | None,
) -> UserFile:
    plugin = _section(document, "deepspeed_config", findings)
    mapped = known_settings()["accelerate_deepspeed"]
    findings += _wrong_values("", plugin, {"gradient_clipping": {"type": "float/auto?"}})
    plugin_values = {key: value for key, value in plugin.items() if value is not None}
    # The plugin reads it from a variable, with int().
    if not str(plugin_values.get("zero_stage", 2)).isdecimal():
        stage = clip(plugin_values.pop("zero_stage"))
        findings.append(_refused("zero_stage", f"is {stage}", "write a whole number in digits"))
    findings += _dropped_by_accelerate(plugin)
    inner = plugin.get("deepspeed_config_file")
    if inner in (None, "none"):
        settings = _settings_of_plugin(plugin_values)
        explicit_keys = tuple(mapped[key] for key in plugin if mapped.get(key))
    else:
        inner_name = _inner_name(name, inner, tree)
        settings = _read_inner(inner_name, findings, tree)
        message = f"Accelerate ends with an error if {inner_name} is given, too: set it there"
        outer_keys = {*plugin, "mixed_precision"} if precision else set(plugin)
        set_in_both = [key for key in known_settings()["set_in_json"] if key in outer_keys]
        findings += [Finding("refused", key, message) for key in set_in_both]
        findings += _unfilled(settings)
        explicit_keys = _explicit_keys(settings)
    file = UserFile(
        name,
        "accelerate",
        "DEEPSPEED",
        settings,
        explicit_keys,
        precision,
        num_processes=processes,
        findings=findings,
        plugin=plugin,
    )
    check_deepspeed(file)
    return file


def _dropped_by_accelerate(plugin: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each key of deepspeed_config that Accelerate does not support."""
    reference = known_settings()
    mapped = reference["accelerate_deepspeed"]
    for key in plugin:
        if key not in mapped:
            message = f"Accelerate drops it silently; {did_you_mean(key, mapped, cutoff=0.75)}".rstrip("; ")
            if key in reference[ZERO] or key in reference["top"]:
                message = "an Accelerate file cannot set it, Accelerate drops it silently; a DeepSpeed JSON can"
            yield Finding("ignored", key, message)


def _settings_of_plugin(plugin_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that Accelerate creates if the file names no JSON."""
    offloads = {what: {"device": str(plugin_values.get(f"{what}_device") or "none").lower()} for what in OFFLOADS}
    for section in offloads.values():
        if section["device"] == "nvme":
            # The launcher passes no path, and the plugin sets this one (DeepSpeedPlugin.__post_init__).
            section["nvme_path"] = "none"
    saves = bool(plugin_values.get("zero3_save_16bit_model", False))
    steps = str(plugin_values.get("gradient_accumulation_steps", "auto"))
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        # Read from the text of a variable.
        "gradient_accumulation_steps": int(steps) if steps.isdecimal() else steps,
        "gradient_clipping": plugin_values.get("gradient_clipping", "auto"),
        ZERO: {
            "stage": plugin_values.get("zero_stage", 2),
            **offloads,
            "stage3_gather_16bit_weights_on_model_save": saves,
        },
    }


def _inner_name(name: str, inner: Any, tree: Path | None) -> str:
    """Return the value of deepspeed_config_file; raise UserError if it names no file, or one outside of the tree."""
    if isinstance(inner, str) and tree is not None and not is_inside(inner, tree):
        problem = f"sets deepspeed_config_file: {clip(inner)}, which {_IS_OUTSIDE}"
        raise WrongFile(name, problem, _INSIDE, key="deepspeed_config_file")
    if isinstance(inner, str) and resolve_path(inner).exists():
        return inner
    fix = "name a file that exists"
    if isinstance(inner, str) and not Path(inner).is_absolute():
        folders = resolve_path(name).resolve().parents
        searched = (folder for folder in folders if tree is None or is_inside(str(folder / inner), tree))
        start = next((f": {folder}" for folder in searched if (folder / inner).is_file()), "")
        fix = f"run this in the folder at which that path starts{start}"
    problem = f"sets deepspeed_config_file: {clip(inner)}, and there is no file of that name"
    raise MissingFile(name, problem, fix, key="deepspeed_config_file")


def _read_inner(name: str, findings: list[Finding], tree: Path | None) -> dict[str, Any]:
    """Read the JSON that an Accelerate file names: Accelerate's reader takes no comments, and any number."""
    only_deepspeeds = list[Finding]()
    settings = read_mapping(name, only_deepspeeds, tree)
    for finding in only_deepspeeds:
        # Accelerate passes DeepSpeed a mapping.
        if finding.rule == "set-twice":
            findings.append(_set_twice(finding.key))
        elif finding.rule != "not-finite":
            findings.append(dataclasses.replace(finding, kind="refused"))
    return settings


def _unfilled(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each auto of a JSON that Accelerate does not fill in."""
    # explain_case._auto does this for ZeRO's settings.
    filled = {f"{place}.{key}" for place in SECTIONS for key in section_entries(place)}
    filled.update(known_settings()["filled_by_accelerate"])
    by_trainer = known_settings()["filled_by_trainer"]
    for key, value in flatten(settings).items():
        if value == "auto" and key not in filled:
            message = "auto: Accelerate does not fill it in, and ends with an error"
            if key in by_trainer:
                message += ", unless the program is transformers' Trainer"
                yield _refused(key, message, "add --trainer if it is", AUTO_VALUE)
            else:
                yield _refused(key, message, "", rule="")


def _unknown_keys(place: str, section: dict[str, Any], supported: Iterable[str], owner: str) -> Iterator[Finding]:
    """Take the keys that the owner of a section does not support out of it, and yield a finding for each."""
    gone, supported = known_settings()["removed"], list(supported)
    for key in [key for key in section if key not in supported]:
        value = section.pop(key)
        if value == "auto" and owner == "DeepSpeed":
            message = "DeepSpeed does not support it, and drops it silently since it is auto"
            yield Finding("ignored", f"{place}{key}", message, did_you_mean(str(key), supported).strip(), "unknown-key")
        elif owner == "Accelerate" and key in known_settings()["instead"]:
            problem = "is not a setting that Accelerate supports, which ends with an error"
            yield _refused(key, problem, known_settings()["instead"][key], "unknown-key")
        elif message := gone.get(f"{place}{key}"):
            yield removed(f"{place}{key}", message)
        else:
            problem = f"is not a setting that {owner} supports, which ends with an error"
            fix = did_you_mean(str(key), supported) or "take it out"
            if owner == "DeepSpeed" and key in _top_keys():
                problem = "is not a setting of this section, which ends with an error"
                fix = "it belongs to the top level of the file"
            yield _refused(f"{place}{key}", problem, fix, "unknown-key")


@functools.cache
def _top_keys() -> frozenset[str]:
    """Return DeepSpeed's keys of the top level, its sections included."""
    reference = known_settings()
    sections = (*SECTIONS, *reference["sections"], *reference["strict_sections"])
    return frozenset((*reference["top"], *reference["others"], *sections))


def removed(key: str, message: str) -> Finding:
    """Return the finding of a setting that a release removed, from its text in known_settings.yaml."""
    release, _, fix = message.partition("; ")
    return _refused(key, f"DeepSpeed {release} removed it, and ends with an error", fix, "removed")


@functools.cache
def _reader(kind: str) -> Any:
    """Return pydantic's reader of a type of known_settings.yaml: DeepSpeed's settings are pydantic models, too."""
    import pydantic

    return pydantic.TypeAdapter(_hint(kind))


def _hint(kind: str) -> Any:
    # Imported here, since `study` imports this module for every command.
    import pydantic

    types: dict[str, Any] = {
        "any": Any,
        "bool": bool,
        "int": int,
        "float": float,
        "str": str,
        "list": list,
        "dict": dict,
        "whole": pydantic.InstanceOf[int],
        "number": pydantic.InstanceOf[int] | pydantic.InstanceOf[float],
        "none": Literal["left out"],
    }
    if "/" in kind:
        return Union[tuple(map(_hint, kind.split("/")))]  # noqa: UP007 - known at run time alone
    marked, *bounds = kind.lstrip("~").split()
    name, lacks = marked.rstrip("?!#"), [bool] * ("!" in marked) + [str] * ("#" in marked)
    if name.startswith("list["):
        hint: Any = list[_hint(name[5:-1])]  # type: ignore[misc]  # a type that is known at run time alone
    elif name in types:
        hint = types[name]
    else:
        hint = Literal[tuple(int(word) if word.isdecimal() else word for word in name.split("|"))]

    def before(value: Any) -> Any:
        if isinstance(value, tuple(lacks)):
            what = "text" if isinstance(value, str) else "true or false"
            raise ValueError(f"Input should be no {what}")
        if marked.startswith("int!") and isinstance(value, str):
            return int(value)
        if name[0].isdecimal():
            with contextlib.suppress(ValueError):
                return _reader("int").validate_python(value)
        return value.lower() if kind.startswith("~") and isinstance(value, str) else value

    names = {">": "gt", "<": "lt", ">=": "ge", "<=": "le"}
    limits: dict[str, Any] = {names[bound.rstrip("01")]: int(bound.lstrip("<>=")) for bound in bounds}
    limits |= {"allow_inf_nan": False} if marked.startswith("float!") else {}
    hint = Annotated[hint, pydantic.Field(**limits), pydantic.BeforeValidator(before)]
    if marked.endswith("??"):
        return Annotated[hint, pydantic.WrapValidator(lambda value, read: read(value) if value else value)]
    return hint | None if marked.endswith("?") else hint


def check_deepspeed(file: UserFile) -> None:
    """Add the findings of a file's DeepSpeed settings, and take out those with a wrong key or value."""
    settings, findings = file.deepspeed, file.findings
    assert settings is not None
    findings += _dropped_by_deepspeed(settings)
    if isinstance(settings.get(ZERO), bool) and file.launcher == "deepspeed":
        settings[ZERO] = {"stage": int(settings[ZERO])}
        findings.append(Finding("noted", ZERO, f"a deprecated form, read as stage {settings[ZERO]['stage']}"))
    findings += _wrong_values("", settings, section_entries("top"))
    if isinstance(settings.get(ZERO), bool):
        findings.append(_refused(ZERO, f"is {clip(settings.pop(ZERO))}", "set a section"))
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
    stage = zero.get("stage", 0)
    findings += _wrong_sections(settings, zero)
    if "stage" not in zero and stage != 0:
        zero["stage"] = 3 if type(stage) is int and stage > 3 else 2
        _add_assumed_stage(zero["stage"], findings)
    findings += _not_modelled("top", settings, zero)


def _dropped_by_deepspeed(settings: dict[str, Any]) -> Iterator[Finding]:
    """Take the removed keys out of the top level; yield a finding for these, and for keys that were never supported."""
    reference = known_settings()
    names = [*reference["top"], *reference["others"]]
    for key in list(settings):
        if message := reference["removed"].get(key):
            del settings[key]
            yield removed(key, message)
        # DeepSpeed drops comments, too, as their authors expect.
        elif key not in (*names, "comment", "comments") and not key.startswith("_"):
            place = next((section for section in SECTIONS if key in reference[section]), None)
            hint = did_you_mean(key, names, cutoff=0.75).strip() or (f"it belongs in {place}" if place else "")
            if name := reference["accelerate_deepspeed"].get(key):
                hint = f"it is an Accelerate file's name of {name}"
            message = "DeepSpeed does not support it, and drops it silently"
            yield Finding("ignored", key, message, hint, "unknown-key")


def _wrong_sections(settings: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[Finding]:
    """Take wrong keys and values out of the sections, and yield the findings of each section."""
    reference = known_settings()
    for place in (*SECTIONS, *reference["strict_sections"], *reference["sections"]):
        # DeepSpeed reads bfloat16 only if there is no bf16.
        section = None if place == "bfloat16" and settings.get("bf16") is not None else flatten(settings).get(place)
        if isinstance(section, dict):
            if place not in reference["sections"]:
                yield from _unknown_keys(f"{place}.", section, section_entries(place), "DeepSpeed")
            yield from _wrong_values(f"{place}.", section, section_entries(place))
            yield from _not_modelled(place, section, zero)


def _add_assumed_stage(stage: int, findings: list[Finding]) -> None:
    """Add the stage of the prediction to the finding of a wrong stage."""
    assumed = f"; the figures are those of stage {stage}"
    for index, finding in enumerate(findings):
        if finding.kind == "refused" and finding.key in ("zero_stage", f"{ZERO}.stage"):
            findings[index] = dataclasses.replace(finding, fix=finding.fix + assumed)


def _not_modelled(place: str, section: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each setting that changes the memory of a rank, but is not part of the prediction."""
    for key, value in section.items():
        entry = section_entries(place).get(key, {})
        if "switch" in entry:
            value = isinstance(value, Mapping) and value.get(entry["switch"])
        is_off = value in (None, "auto", {}, entry.get("default", False))
        if "not_modelled" in entry and not is_off and zero.get("stage", 0) in entry.get("stages", range(4)):
            name = key if place == "top" else f"{place}.{key}"
            yield Finding("noted", name, f"{entry['not_modelled']}; {NOT_MODELLED}", rule="not-modelled")


def _wrong_values(place: str, section: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[Finding]:
    """Take the settings with a wrong value out of a section, convert the others, and yield a finding for each."""
    from pydantic import ValidationError

    sections = (*known_settings()["sections"], "parallelism_config")
    is_model = place and place.removesuffix(".") not in sections
    for key, value in list(section.items()):
        # The engine's models drop "auto".
        if key not in entries or (value == "auto" and is_model):
            continue
        try:
            section[key] = _reader(entries[key]["type"]).validate_python(value)
        except ValidationError as error:
            del section[key]
            allowed = [item["msg"].partition("Input should be ")[2].partition(", unable")[0] for item in error.errors()]
            fix = f"it should be {' or '.join(filter(None, allowed)) or 'a number'}"
            guess = did_you_mean(str(value), re.findall(r"'([^']+)'", fix))
            yield _refused(f"{place}{key}", f"is {clip(value)}", guess + fix)
