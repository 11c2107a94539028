"""Answers of the calculator, a page that asks three commands of `study` in a browser (tools/calculator).

Every method takes texts and returns JSON: no object of Python is left in JavaScript.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study.advisor import advise, advise_command, explain
from study.config.errors import NotInstalled, UserError
from study.config.flags import Parser
from study.config.strategies import STRATEGY_NAMES, read_strategy
from study.predictor.communication import sent_bytes
from study.predictor.hardware import known_devices
from study.predictor.time import device_bytes, usable_bytes
from study.releases.causes import GRID
from study.releases.judge import add_stack_arguments, cause_line, judge_request
from study.workloads.presets import PRESETS

# Folders of the browser's file system, which is in memory.
_MODELS, _FILES, _GIVEN = Path("/tmp/models"), Path("/tmp/files"), Path("/tmp/given")


def _as_json(method: Callable[..., dict[str, Any]]) -> Callable[..., str]:
    """Make a method return JSON; a refusal is {"refused": problem, "fix": what to do}."""

    @functools.wraps(method)
    def answer(*arguments: str) -> str:
        try:
            return json.dumps(method(*arguments))
        except NotInstalled:
            # Of models that no table here describes.
            problem = "this kind of model is traced with transformers' own code, which a browser does not have"
            return json.dumps({"refused": problem, "fix": "run the command below on a machine, after `make install`"})
        except UserError as refusal:
            return json.dumps({"refused": refusal.problem, "fix": refusal.fix})

    return answer


class Calculator:
    """One page: the question that it asks, and the options found so far."""

    def __init__(self) -> None:
        self.options = argparse.Namespace()
        self.question: advise.AdviceRequest | None = None
        self.advice: advise.Advice | None = None
        self.found: dict[str, advise.Option] = {}

    @_as_json
    def choices(self) -> dict[str, Any]:
        """Return the models, the GPUs that have a name, the tested releases, and the strategies of DeepSpeed."""
        document = json.loads(GRID.read_text(encoding="utf-8"))
        return {
            "models": list(PRESETS),
            "devices": [device.names[0] for device in known_devices() if device.names],
            "releases": [row["DeepSpeed"] for row in document["releases"]],
            "versions": document["versions"],
            "strategies": [name for name in STRATEGY_NAMES if read_strategy(name).deepspeed is not None],
        }

    @_as_json
    def keep_config(self, name: str, text: str) -> dict[str, Any]:
        """Store a config.json, and return the folder that MODEL names."""
        folder = _MODELS / (Path(name).name or "pasted")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(text, encoding="utf-8")
        return {"folder": str(folder)}

    @_as_json
    def ask(self, words: str) -> dict[str, Any]:
        """Read the words of `study advise`, as JSON; return the request, and the strategies to compare."""
        parser = Parser(prog="study advise")
        advise_command.add_arguments(parser)
        self.options = parser.parse_args(json.loads(words))
        question = advise_command.build_advice_request(self.options)
        self.question, self.advice, self.found = question, None, {}
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
        }

    @_as_json
    def one_sample(self, name: str) -> dict[str, Any]:
        """Return a strategy at micro-batch 1 without accumulation, which takes a fraction of the time of `best`."""
        question = self._asked()
        single = dataclasses.replace(question, global_batch=question.box.ranks)
        return _row(advise.advise(single, [name]).options[0])

    @_as_json
    def best(self, name: str) -> dict[str, Any]:
        """Return a strategy with its best settings, as in the document of `study advise --json`."""
        (option,) = advise.advise(self._asked(), [name]).options
        self.found[name] = option
        return _row(option)

    @_as_json
    def rank(self) -> dict[str, Any]:
        """Order the strategies found, with the recommendation and the remark of each."""
        order = functools.partial(advise.order_key, at_upper_bound=True)
        advice = advise.Advice(self._asked(), advise.rank_options(sorted(self.found.values(), key=order)))
        self.advice, best = advice, advice.best
        return {
            "order": [option.name for option in advice.options],
            "recommended": best and best.name,
            "how_sure": advise.explain_best(advice),
            "remarks": {option.name: advise_command.remark(option, best) for option in advice.options},
        }

    @_as_json
    def changes(self) -> dict[str, Any]:
        """Return the changes of hardware or length that would change the recommendation: less work than a table."""
        assert self.advice is not None, "rank() comes first"
        return {"changes": list(advise.sensitivity_lines(self.advice))}

    @_as_json
    def files(self, name: str) -> dict[str, Any]:
        """Return the files of a strategy with the settings found, and the commands that launch and predict it."""
        shutil.rmtree(_FILES, ignore_errors=True)
        option = self.found[name]
        written = advise_command.write_files(option, _FILES, self.options.nvme_path, self.options.model_name_or_path)
        # On the user's machine they are in a folder of any name.
        texts = {
            file.name: file.read_text(encoding="utf-8").replace(f"{_FILES}/", "") for file in sorted(_FILES.iterdir())
        }
        return {
            "texts": texts,
            "launch": written.command.replace(f"{_FILES}/", ""),
            "predict": advise_command.predict_words(option.request, self.options),
        }

    @_as_json
    def explain(self, words: str, files: str) -> dict[str, Any]:
        """Return the findings of `study explain` about the first of some files.

        The words are those of the command, as JSON; the files have their contents in base64. An Accelerate file finds
        the JSON that it names if that is among them.
        """
        _keep_files({Path(name).name: base64.b64decode(text) for name, text in json.loads(files).items()})
        parser = Parser(prog="study explain", allow_abbrev=False)
        explain.add_arguments(parser)
        before = Path.cwd()
        os.chdir(_GIVEN)
        try:
            case = explain.read_case(parser.parse_args(json.loads(words)))
        except UserError as refusal:
            is_alone = "deepspeed_config_file" in refusal.problem
            raise UserError(refusal.problem, "choose that file, too" if is_alone else refusal.fix) from None
        finally:
            os.chdir(before)
        return {"first_line": explain.first_line(case), "findings": [finding.document for finding in case.findings]}

    @_as_json
    def releases(self, words: str) -> dict[str, Any]:
        """Return the first line of `study releases`, its exit status, and the faults; the words are JSON."""
        parser = Parser(prog="study releases", allow_abbrev=False)
        add_stack_arguments(parser)
        _, _, verdict = judge_request(parser.parse_args(json.loads(words)))
        faults = [cause_line(letter, cause) for letter, cause in sorted(verdict.faults.items())]
        return {"first_line": verdict.text, "status": verdict.status, "faults": faults}

    def _asked(self) -> advise.AdviceRequest:
        assert self.question is not None, "ask() comes first"
        return self.question


def _keep_files(contents: dict[str, bytes]) -> None:
    """Store files in a separate folder, and a JSON also at the relative path by which the first file names it."""
    shutil.rmtree(_GIVEN, ignore_errors=True)
    _GIVEN.mkdir(parents=True)
    first = next(iter(contents.values())).decode("utf-8", "replace")
    inner = re.findall(r"^\s*deepspeed_config_file\s*:\s*[\"']?([^\"'#\s]+)", first, re.MULTILINE)
    inner_paths = [path for path in map(Path, inner) if not path.is_absolute() and ".." not in path.parts]
    for name, content in contents.items():
        for place in [Path(name), *(path for path in inner_paths if path.name == name)]:
            (_GIVEN / place).parent.mkdir(parents=True, exist_ok=True)
            (_GIVEN / place).write_bytes(content)


def _row(option: advise.Option) -> dict[str, Any]:
    """Return an option as `study advise --json` does, with its 90 % bound and the bytes that one rank sends."""
    return {
        **advise_command.entry(option),
        "bound_bytes": device_bytes(option.memory, at_upper=True),
        "sent_bytes": sent_bytes(option.request),
        "offloads": option.request.strategy.offloads,
    }
