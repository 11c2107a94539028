"""`study explain --strict`: check a repository's config files, and print the lines of settings without their effect."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study.advisor import user_settings
from study.advisor.explain_case import ACCUMULATION, MICRO_BATCH, ProgramSettings, resolve
from study.advisor.explain_combinations import WRONG_TRAINING
from study.advisor.explain_findings import WRONG_BLOCK, findings
from study.advisor.explain_releases import with_releases
from study.advisor.user_settings import Finding
from study.config.errors import UserError, WrongFile
from study.config.yaml_sections import Section, read_document
from study.host.folders import home_folder, resolve_path
from study.predictor.hardware import MAX_JOB_GPUS
from study.predictor.models import model_shape
from study.predictor.shape import ModelShape

# A finding that holds for both models and for all numbers of ranks does not depend on them.
_MODELS, _RANKS = ("gpt-tiny", "gpt-1t"), (1, 8)
# Keys that other files do not have.
_DEEPSPEED_KEYS = (user_settings.ZERO, MICRO_BATCH, "zero_allow_untested_optimizer")
_ACCELERATE_KEYS = ("compute_environment", "distributed_type")
# In a file with one of them any distributed_type is Accelerate's, even if it is misspelt.
_BESIDE_TYPE = {"deepspeed_config", "fsdp_config", "machine_rank", "main_training_function", "num_machines"}
_ACCELERATE = re.compile(r"^(compute_environment\s*:|distributed_type\s*:\s*[\"']?[A-Z])", re.MULTILINE)
# Their settings are not modelled.
_OTHER_LAUNCHERS = {"AMAZON_SAGEMAKER", "XLA", "TPU", "MEGATRON_LM"}
_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")
_NUMBER = re.compile(r"\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*")


@dataclass(frozen=True)
class CheckedFiles:
    """The answer of `study explain --strict`."""

    names: Sequence[str]
    # Number of files that are none of DeepSpeed or Accelerate.
    skipped: int
    # By file, then by line.
    findings: Sequence[Finding]

    @property
    def levels(self) -> Counter[str]:
        return Counter[str](finding.severity for finding in self.findings)

    @property
    def status(self) -> int:
        """Exit status: 1 with an error, 3 with warnings alone."""
        if self.levels["error"]:
            return 1
        return 3 if self.levels["warning"] else 0

    @property
    def document(self) -> dict[str, Any]:
        """The answer as --json prints it."""
        return {"checked": self.names, "findings": [finding.document for finding in self.findings]}

    def page(self) -> list[str]:
        """Return a line per finding, and their number."""
        lines = [f"{item.file}:{item.line}: {item.severity}: {item.kind}: {item.text}" for item in self.findings]
        return [*lines, self._total()]

    def annotations(self) -> list[str]:
        """Return the same as annotations of GitHub Actions."""
        return [*(finding.annotation for finding in self.findings), self._total()]

    def _total(self) -> str:
        levels = self.levels
        notes = f", notes: {levels['note']}" * bool(levels["note"])
        files = f"{len(self.names)} configuration files checked, {self.skipped} other files skipped"
        return f"errors: {levels['error']}, warnings: {levels['warning']}{notes}; {files}"


def checked_tree(name: str) -> Path:
    """Return the folder that limits the files a check reads: the file's repository; without one the working directory,
    or the file's own folder if that is elsewhere or the working directory has the user's home in it."""
    # Links are not followed: one that leads out of a repository belongs to it.
    folder = resolve_path(name).absolute().parent
    repository = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)
    if repository is not None:
        return repository
    working, home = Path.cwd(), home_folder()
    has_home = home is not None and home.is_relative_to(working)
    return working if folder.is_relative_to(working) and not has_home else folder


def is_config(name: str) -> bool:
    """Whether a file is, by its content, a DeepSpeed JSON or an Accelerate YAML that `study explain` supports."""
    path = resolve_path(name)
    try:
        if path.stat().st_size > user_settings.MAX_FILE_BYTES:
            return False
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return _is_deepspeed(text) if user_settings.is_json(path, text) else _is_accelerate(path, text)


class _Repeating(Section):
    def may_repeat(self, key: str) -> bool:
        return True


def _is_accelerate(path: Path, text: str) -> bool:
    """Whether a YAML has keys of Accelerate at its top level, also such as an alias merges into it."""
    if not any(key in text for key in _ACCELERATE_KEYS):
        return False
    try:
        document = read_document(path, _Repeating)
    except UserError:
        return _ACCELERATE.search(text) is not None
    if not isinstance(document, dict):
        return False
    if not _OTHER_LAUNCHERS.isdisjoint(str(document.get(key)) for key in _ACCELERATE_KEYS):
        return False
    if "compute_environment" in document or "distributed_type" not in document:
        return "compute_environment" in document
    kind = str(document["distributed_type"])
    types = user_settings.section_entries("accelerate")["distributed_type"]["type"].rstrip("?").split("|")
    return kind.isupper() or kind.upper() in types or not _BESIDE_TYPE.isdisjoint(document)


def _is_deepspeed(text: str) -> bool:
    """Whether a JSON, which may have a mistake, has the keys of DeepSpeed."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        # Hjson, or JSON with a mistake.
        return any(re.search(rf'(^|[{{,])\s*["\']?{key}["\']?\s*:', text, re.MULTILINE) for key in _DEEPSPEED_KEYS)
    if not isinstance(document, dict):
        return False
    reference = user_settings.known_settings()
    is_deepspeed = "train_batch_size" in document and document.keys() <= {*reference["top"], *reference["others"]}
    keys = (*_DEEPSPEED_KEYS, "compute_environment")
    return is_deepspeed or any(difflib.get_close_matches(key, document, cutoff=0.85) for key in keys)


def check_file(
    name: str,
    model: ModelShape | None,
    ranks: int | None,
    work: ProgramSettings,
    releases: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """Yield the problems of a file; without a model or a number of ranks, those that it has with any.

    The file may be a stranger's, who sees the findings: no file outside of its tree is read, and its values are
    repeated only if they are numbers or words of a setting.
    """
    early, text, tree = list[Finding](), "", checked_tree(name)
    if user_settings.is_inside(name, tree):
        # The reader names the problem of a file that is not readable.
        with contextlib.suppress(OSError, ValueError):
            text = resolve_path(name).read_text(encoding="utf-8")
    try:
        file = user_settings.read_user_file(name, early, tree)
        if user_settings.has_no_setting(file):
            early.clear()
            problem = "has no setting of DeepSpeed or Accelerate"
            raise WrongFile(name, problem, "name their configuration files alone, or add --skip_others")
        shapes = [model] if model else [model_shape(preset) for preset in _MODELS]
        is_one_process = file.distributed_type == "NO"
        counts = [None] if is_one_process else [ranks] if ranks else _fitting_ranks(file)
        cases = [
            with_releases(resolve(file, shape, count, work), releases)
            for shape, count in itertools.product(shapes, counts)
        ]
    except UserError as refusal:
        for item in (item for item in early if item.severity != "note"):
            yield replace(_without_texts(item), file=name, line=item.line or find_line(text, item.key) or 1)
        yield _unreadable(refusal, name, text)
        return
    by_case = [_by_place(findings(case)) for case in cases]
    for place, finding in by_case[0].items():
        is_shown = finding.severity != "note" or finding.rule == WRONG_TRAINING
        # The models that stand for any are of one type.
        is_shown = is_shown and (model is not None or finding.rule != WRONG_BLOCK)
        if is_shown and all(place in case for case in by_case):
            if finding.key == "train_batch_size" and len(counts) > 1:
                finding = _for_any_ranks(finding, file.deepspeed or {})
            yield in_file(_without_texts(finding), file, text)


def _unreadable(refusal: UserError, name: str, text: str) -> Finding:
    """Return the finding of a file that cannot be read, at the line or the key that the refusal has."""
    what, line = refusal.problem, None
    if isinstance(refusal, WrongFile) and resolve_path(refusal.file) == resolve_path(name):
        what = refusal.what
        line = find_line(text, refusal.key) if refusal.key else refusal.line
    elif isinstance(refusal, WrongFile):
        # The mistake is in the JSON that the file names.
        line = find_line(text, "deepspeed_config_file")
    return Finding("refused", "", what, refusal.fix, "unreadable", name, line or 1)


def _by_place(listed: Iterable[Finding]) -> dict[tuple[str, str, str, int], Finding]:
    """Return findings by kind, key, rule and their number among those with all three equal: messages depend on the
    model and on the ranks."""
    places, counts = dict[tuple[str, str, str, int], Finding](), Counter[tuple[str, str, str]]()
    for finding in dict.fromkeys(listed):
        kind, key, rule = place = (finding.kind, finding.key, finding.rule)
        places[kind, key, rule, counts[place]] = finding
        counts[place] += 1
    return places


def _without_texts(finding: Finding) -> Finding:
    """Return a finding whose message repeats no text of a file but numbers and words of a setting."""

    def hide_text(quoted: re.Match[str]) -> str:
        text = str(quoted[1] or quoted[2] or "")
        is_word = set(re.findall(r"\w+", text.lower())) <= user_settings.known_words()
        return quoted[0] if is_word or _NUMBER.fullmatch(text) else "a text"

    return replace(finding, message=_QUOTED.sub(hide_text, finding.message))


def in_file(finding: Finding, file: user_settings.UserFile, text: str) -> Finding:
    """Return a finding with the file's own name of its key, and its line."""
    names = {key: name for name, key in user_settings.known_settings()["accelerate_deepspeed"].items() if key}
    inner = find_line(text, "deepspeed_config_file") if file.launcher == "accelerate" else None
    key = names.get(finding.key, finding.key) if file.launcher == "accelerate" and inner is None else finding.key
    # The top level may have the same key, which Accelerate does not support there.
    place = f"deepspeed_config.{key}" if key in file.plugin and finding.rule != "unknown-key" else key
    line = finding.line or find_line(text, place) or inner or 1
    return replace(finding, key=key, file=file.name, line=line)


def _for_any_ranks(finding: Finding, top: Mapping[str, Any]) -> Finding:
    """Return the finding of a batch, with why the engine rejects it on any number of ranks if it does so."""
    batch, sizes = top["train_batch_size"], [top.get(key) for key in (MICRO_BATCH, ACCUMULATION)]
    sizes_set = [size for size in sizes if type(size) is int and size > 0]
    if type(batch) is not int or batch < 1 or batch % math.prod(sizes_set) == 0:
        return finding
    product = " x ".join(map(str, sizes_set))
    message = f"the engine ends with an error on any number of ranks: {batch} is not a multiple of {product}"
    return replace(finding, message=message, fix=f"set a multiple of {math.prod(sizes_set)}, or leave it out")


def _fitting_ranks(file: user_settings.UserFile) -> list[int]:
    """Return numbers of ranks; if any number fits the batch and the groups of the file, one of these does."""
    if file.num_processes:
        return [file.num_processes]
    top, counts = file.deepspeed or {}, [*_RANKS]
    batch, *parts = (top.get(key, 1) for key in ("train_batch_size", MICRO_BATCH, ACCUMULATION))
    groups = [top.get(f"{what}_parallel_size", 1) for what in ("data", "sequence")]
    if all(type(size) is int and size > 0 for size in (batch, *parts, *groups)):
        counts += [batch // (parts[0] * parts[1]) * groups[1], groups[0] * groups[1]]
    return [count for count in dict.fromkeys([*counts, file.mesh_ranks]) if 0 < count <= MAX_JOB_GPUS]


def find_line(text: str, key: str) -> int | None:
    """Return the line of a dotted key, or of the innermost of its sections that the text has."""
    place, line = 0, None
    for part in key.split("."):
        match = re.compile(rf"^[^#\n]*?(?<![\w.-])[\"']?{re.escape(part)}[\"']?\s*:", re.MULTILINE).search(text, place)
        if match:
            place, line = match.end(), text.count("\n", 0, match.end()) + 1
    return line
