"""Answers of the calculator, a page that asks three commands of `study`; its files are in page/.

Python runs in the browser (tools/calculator), or on the user's machine (serve.py). Every method takes texts and returns
JSON: no object of Python is left in JavaScript.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from study.advisor import advice_text, advise, advise_command, explain, explanation_text
from study.advisor.advice_answer import Recommendation, option_document
from study.advisor.advised_files import write_files
from study.advisor.explanation import ConfigExplanation
from study.compositions.command import parse_features
from study.compositions.features import read_rows
from study.config.errors import MissingFile, NotInstalled, UserError
from study.config.flags import Parser
from study.config.places import PACKAGE
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.predictor.communication import sent_bytes
from study.predictor.hardware import box_notices, known_devices
from study.predictor.intervals import NOT_KNOWN, describe_error, is_known
from study.predictor.models import UnknownModel
from study.predictor.time import device_bytes, usable_bytes
from study.releases.causes import GRID, Cause
from study.releases.combinations import answer_features
from study.releases.judge import (
    CPU_FAULTS,
    TESTED_WITH,
    add_stack_arguments,
    cause_line,
    faults_in_bf16,
    faults_of_other_pairs,
    judge_request,
    judge_rows,
    nearest_rows,
    other_pair_lines,
)
from study.releases.races import gpu_races
from study.workloads.presets import PRESETS

_PAGE = Path(__file__).parent / "page"


def page_files(transport: Literal["static", "served"]) -> list[Path]:
    """Return the files of the page, with those that reach Python in the browser or on the machine that serves it."""
    return [file for folder in (_PAGE, _PAGE / transport) for file in sorted(folder.iterdir()) if file.is_file()]


def _as_json(method: Callable[..., dict[str, Any]]) -> Callable[..., str]:
    """Make a method return JSON; a refusal is {"refused": problem, "fix": what to do}."""

    @functools.wraps(method)
    def answer(session: Calculator, *arguments: str) -> str:
        try:
            return json.dumps(method(session, *arguments))
        except UserError as refusal:
            problem, fix = refusal.problem, refusal.fix
            if isinstance(refusal, NotInstalled) and sys.platform == "emscripten":
                # Of models that no table here describes.
                problem = "this kind of model is traced with transformers' own code, which a browser does not have"
                fix = "run `study serve`, or the command below, on a machine, after `make install` in a clone"
            if isinstance(refusal, UnknownModel):
                fix = refusal.page_fix
            return json.dumps({"refused": session.without_folders(problem), "fix": fix})

    return answer


class Calculator:
    """One page: the question that it asks, and the options found so far."""

    def __init__(self) -> None:
        # Its name is random and other users cannot read it; it is removed with this object.
        folder = Path(tempfile.mkdtemp(prefix="study-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._models = folder / "models"
        self._files = folder / "files"
        self._given = folder / "given"
        self._folder = folder
        self.flags: advise_command.AdviseFlags | None = None
        self.question: advise.AdviceRequest | None = None
        self.advice: advise.Advice | None = None
        self.found: dict[str, advise.Option] = {}

    @_as_json
    def choices(self) -> dict[str, Any]:
        """Return the lists of the forms: models, GPUs, releases, strategies, features; and the version of the code."""
        document = json.loads(GRID.read_text(encoding="utf-8"))
        return {
            "models": list(PRESETS),
            "devices": [device.names[0] for device in known_devices() if device.names],
            "releases": [row["DeepSpeed"] for row in document["releases"]],
            "versions": document["versions"],
            "strategies": [name for name in STRATEGY_NAMES if read_strategy(name).deepspeed is not None],
            "version": _version(),
            "features": {name: dict(row.levels) for name, row in read_rows().items()},
        }

    @_as_json
    def keep_config(self, name: str, text: str) -> dict[str, Any]:
        """Store a config.json, and return the folder that MODEL names."""
        folder = self._models / (Path(name).name or "pasted")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(text, encoding="utf-8")
        return {"folder": str(folder)}

    @_as_json
    def ask(self, words: str) -> dict[str, Any]:
        """Read the words of `study advise`, as JSON; return the request, and the strategies to compare."""
        parser = Parser(prog="study advise")
        advise_command.add_arguments(parser)
        flags = advise_command.AdviseFlags.from_options(parser.parse_args(json.loads(words)))
        question = advise_command.build_advice_request(flags)
        self.flags, self.question, self.advice, self.found = flags, question, None, {}
        box = question.box
        return {
            "names": advise.candidates(question),
            "model": question.shape.name,
            "parameters": question.shape.parameters,
            "trained_parameters": question.shape.trained_parameters,
            "hardware": box.name,
            "ranks": box.ranks,
            "usable_bytes": usable_bytes(box),
            "sequence_length": question.sequence_length,
            "precision": question.precision,
            "global_batch": question.global_batch,
            "optimizer": question.optimizer,
            "notes": [*question.shape.notes(), *box_notices(box)],
            "errors": {figure: describe_error(figure) for figure in ("sent", "host", "nvme")},
        }

    @_as_json
    def best(self, name: str) -> dict[str, Any]:
        """Return a strategy with its best settings, as in the document of `study advise --json`."""
        # A newer question has its own.
        results = self.found
        (option,) = advise.advise(self._asked(), [name]).options
        results[name] = option
        return _row(option)

    @_as_json
    def rank(self) -> dict[str, Any]:
        """Order the strategies found, with the recommendation, its notes, and the remark of each."""
        order = functools.partial(advise.order_key, at_upper_bound=True)
        advice = advise.Advice(self._asked(), advise.rank_options(sorted(self.found.values(), key=order)))
        self.advice, best = advice, advice.best
        notes = list[str]()
        if self.flags is not None and (total := advise_command.whole_training(self.flags, best)) is not None:
            notes.append(total.line)
        if best is not None:
            notes += advice_text.release_lines(best)
        if (recommendation := Recommendation.find(advice)) is not None:
            notes += advice_text.recommendation_notes(recommendation)
            if recommendation.plain is not None:
                notes.append(advice_text.plain_note(recommendation.plain, recommendation.best))
        return {
            "order": [option.name for option in advice.options],
            "recommended": best and best.name,
            "how_sure": advise.explain_best(advice),
            "notes": notes,
            "remarks": {option.name: advice_text.remark(option, best) for option in advice.options},
        }

    @_as_json
    def changes(self) -> dict[str, Any]:
        """Return the changes that would change the recommendation, and the effect of an offload: no whole table."""
        if self.advice is None:
            raise self._missing_question()
        return {
            "changes": [
                *advise.adapters_lines(self.advice),
                *advise.safer_lines(self.advice),
                *advise.sensitivity_lines(self.advice),
            ],
            "optimizer_on_host": advise.offload_line(self.advice),
        }

    @_as_json
    def what_ifs(self) -> dict[str, Any]:
        """Return the recommendations with one more GPU and with half the tokens."""
        return {"lines": list(advise.what_if_lines(self._asked()))}

    @_as_json
    def files(self, name: str) -> dict[str, Any]:
        """Return the files of a strategy with the settings found, and the commands that launch and predict it."""
        if self.flags is None or name not in self.found:
            raise self._missing_question()
        shutil.rmtree(self._files, ignore_errors=True)
        option, flags, model = self.found[name], self.flags, self.flags.workload.model_name_or_path
        if Path(model).parent == self._models:
            # As in the command that the page shows.
            model = "config.json"
            workload = dataclasses.replace(flags.workload, model_name_or_path=model)
            flags = dataclasses.replace(flags, workload=workload)
        written = write_files(option, self._files, flags.nvme_path, model)
        files = sorted(self._files.iterdir())
        return {
            "texts": {file.name: self.without_folders(file.read_text(encoding="utf-8")) for file in files},
            "launch": self.without_folders(written.command),
            "predict": advise_command.predict_words(option.request, flags),
        }

    @_as_json
    def explain(self, words: str, files: str) -> dict[str, Any]:
        """Return the findings of `study explain` about the first of some files, its memory by setting and the answers.

        The words are those of the command, as JSON; the files have their contents in base64. An Accelerate file or a
        trainer's finds the JSON that it names if that is among them.
        """
        self._keep_files({Path(name).name: base64.b64decode(text) for name, text in json.loads(files).items()})
        parser = Parser(prog="study explain", allow_abbrev=False)
        explain.add_arguments(parser)
        before = Path.cwd()
        os.chdir(self._given)
        try:
            case = explain.read_case(parser.parse_args(json.loads(words)))
        except MissingFile as refusal:
            raise UserError(refusal.problem, "choose that file, too") from None
        finally:
            os.chdir(before)
        explanation = ConfigExplanation.explain(case)
        return {
            "first_line": explanation_text.first_line(explanation),
            "subject": [self.without_folders(line) for line in explanation_text.subject_lines(explanation)],
            "findings": [finding.document for finding in case.findings],
            "peak": explanation_text.peak_line(explanation),
            "costs": explanation_text.cost_rows(explanation, details=False),
            "costs_error": explanation_text.costs_error(explanation),
            "answers": [dataclasses.asdict(answer) for answer in explanation.answers],
        }

    @_as_json
    def releases(self, words: str) -> dict[str, Any]:
        """Return the first line of `study releases`, its exit status and the faults, with the grid around the release
        and the faults of its other rows; the words are JSON.

        With --features the other lines are in place of the faults, and there is no grid.
        """
        parser = Parser(prog="study releases", allow_abbrev=False)
        add_stack_arguments(parser)
        parser.add_argument("--features", type=parse_features, default=None)
        options = parser.parse_args(json.loads(words))
        if options.features is not None:
            answer = answer_features(options)
            return {"first_line": answer.lines[0], "status": answer.status, "faults": answer.lines[1:]}
        document, stack, verdict = judge_request(options)
        rows = nearest_rows(document["releases" if stack.precision == "fp32" else "bf16"], stack.deepspeed)
        elsewhere = faults_of_other_pairs(stack) if options.release else []
        cells, by_letter = judge_rows(document, stack, rows)
        by_letter |= {document["letters"][cause.id]: cause for cause in (*elsewhere, *faults_in_bf16(stack))}
        other_causes = {letter: cause for letter, cause in by_letter.items() if letter not in verdict.faults}
        return {
            "first_line": verdict.text,
            "status": verdict.status,
            "faults": _cause_lines(verdict.faults),
            "columns": list(rows[0]),
            "rows": cells,
            "other_faults": _cause_lines(other_causes),
            "notes": [
                *(race.line for race in gpu_races(stack.versions, stack.strategy)),
                *other_pair_lines(document, stack, elsewhere),
                TESTED_WITH,
                CPU_FAULTS,
            ],
        }

    def without_folders(self, text: str) -> str:
        """Return a text without the folders of this object: the user has the files in a folder of any name."""
        for folder in (self._models, self._files, self._given):
            text = text.replace(f"{folder}/", "")
        return text

    def _asked(self) -> advise.AdviceRequest:
        if self.question is None:
            raise self._missing_question()
        return self.question

    def _missing_question(self) -> UserError:
        return UserError("this page's question is not stored in Python", "ask it again")

    def _keep_files(self, contents: dict[str, bytes]) -> None:
        """Store files in a separate folder, and a JSON also at the relative path by which the first file names it."""
        shutil.rmtree(self._given, ignore_errors=True)
        # Of a new name, since the browser's file system does not remove a file that is called __proto__.
        self._given = Path(tempfile.mkdtemp(prefix="given-", dir=self._folder))
        first = next(iter(contents.values())).decode("utf-8", "replace")
        inner = re.findall(r"^\s*(?:deepspeed|deepspeed_config_file)\s*:\s*[\"']?([^\"'#\s]+)", first, re.MULTILINE)
        inner_paths = [path for path in map(Path, inner) if not path.is_absolute() and ".." not in path.parts]
        for name, content in contents.items():
            for place in [Path(name), *(path for path in inner_paths if path.name == name)]:
                (self._given / place).parent.mkdir(parents=True, exist_ok=True)
                (self._given / place).write_bytes(content)


def _cause_lines(causes: Mapping[str, Cause]) -> list[str]:
    return [cause_line(letter, cause) for letter, cause in sorted(causes.items())]


def _version() -> str:
    """Return eight digits of the digest of the modules and tables that the answers are computed from."""
    digest = hashlib.sha256()
    for room in ("config", "workloads", "predictor", "advisor", "releases", "compositions"):
        files = (PACKAGE / room).rglob("*.*")
        for file in sorted(file for file in files if file.suffix in (".py", ".yaml", ".json")):
            digest.update(file.relative_to(PACKAGE).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _row(option: advise.Option) -> dict[str, Any]:
    """Return an option as `study advise --json` does, with its 90 % bound, the bytes that one rank sends, and the ends
    of its speed and cost or that these are not known well enough."""
    return {
        **option_document(option),
        "bound_bytes": device_bytes(option.memory, at_upper=True),
        "sent_bytes": sent_bytes(option.request),
        "offloads": option.request.strategy.offloads,
        # Of an offload those of the slowest and the fastest host that published pages have.
        "speed_ends": option.speed_ends,
        "cost_ends": option.cost_ends,
        "not_known": NOT_KNOWN if option.fits and not is_known(option.tokens_per_s, option.speed_ends) else None,
    }
