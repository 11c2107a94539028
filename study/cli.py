"""The `study` command; its exit status is 0 (done), 1 (some run failed) or 2 (the request is wrong).

Five commands have a third answer, 3: `releases` (not tested), `explain --strict` (warnings), `receipt --strict` (two
receipts that are not comparable), `verify --mine` (a program that is not comparable) and `why` (no known message).
"""

from __future__ import annotations

import argparse
import errno
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from study import __version__
from study.config.errors import UserError, clip, first_line
from study.config.flags import Parser
from study.config.other_names import find_flag


class Command(NamedTuple):
    """A subcommand: its help text, and the module and names of its functions, which only that subcommand imports."""

    help: str
    module: str
    add: str = "add_arguments"
    # It returns the exit status.
    function: str = "run"
    # Keywords of the function and the places of their values, in packages above the module.
    extras: tuple[tuple[str, str], ...] = ()
    epilog: str = "EPILOG"

    def find(self, name: str) -> Any:
        """Return the object of this name in the module, or in the module before a colon; None if it has none."""
        module, _, name = name.rpartition(":")
        return getattr(importlib.import_module(f"study.{module or self.module}"), name, None)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments and the epilog of this subcommand."""
        self.find(self.add)(parser)
        parser.epilog = self.find(self.epilog)

    def run(self, options: argparse.Namespace) -> int:
        """Run the subcommand; return the exit status."""
        keywords = {keyword: self._imported_when_called(place) for keyword, place in self.extras}
        status: int = self.find(self.function)(options, **keywords)
        return status

    def _imported_when_called(self, place: str) -> Callable[..., Any]:
        """Return a function that imports the one of this place: most requests of a command call none of its extras."""
        return lambda *values, **keywords: self.find(place)(*values, **keywords)


def add_shell(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that completes")


def print_completion(options: argparse.Namespace) -> int:
    """Print a script with which a shell completes commands, flags and names; it starts no Python."""
    import shtab

    from study.config.strategies import STRATEGY_NAMES
    from study.sweep.suite_file import SUITE_DIRECTORY
    from study.workloads.presets import PRESETS, known_models

    models = (*PRESETS, *known_models())

    parser, subparsers = build_parser(COMMANDS)
    names = {
        "suite": sorted(file.stem for file in SUITE_DIRECTORY.glob("*.yaml")),
        "strategy": STRATEGY_NAMES,
        "names": STRATEGY_NAMES,
        "model_name_or_path": models,
        "named_model": models,
    }
    for command_parser in subparsers.choices.values():
        for action in command_parser._actions:
            action.choices = action.choices or names.get(action.dest)
            if action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE
    print(shtab.complete(parser, options.shell))
    return 0


SHELL_EPILOG = (
    "bash: study completion bash > ~/.local/share/bash-completion/completions/study; zsh: > _study in a folder of"
    " $fpath; fish: > ~/.config/fish/completions/study.fish"
)
_READ_RUN = ("read_run", "receipt.forecast:read_run")
COMMANDS = {
    "advise": Command(
        "recommend a strategy and its settings for a model on given hardware",
        "advisor.advise_command",
        extras=(("nearest", "predictor.nearest:describe_nearest"), _READ_RUN),
    ),
    "predict": Command(
        "predict memory, communication and step time of a strategy", "advisor.predict_command", extras=(_READ_RUN,)
    ),
    "explain": Command(
        "explain a DeepSpeed or Accelerate config: the cost of each setting, conflicts, and settings without effect",
        "advisor.explain",
    ),
    "serve": Command("answer advise, explain and releases on a page in the browser", "advisor.serve"),
    "configs": Command(
        "write strategies' Accelerate files for any script",
        "advisor.advised_files",
        "add_configs_arguments",
        "write_configs",
        epilog="CONFIGS_EPILOG",
    ),
    "verify": Command(
        "test which strategies compute the gradients of DDP on this stack, or whether your own program does",
        "releases.verify",
        extras=(("run_mine", "receipt.mine_command:run"),),
    ),
    "benchmark": Command(
        "score predictors of memory and step time on published runs, also your own", "benchmark.command"
    ),
    "claims": Command("judge published claims about ZeRO by arithmetic and the committed records", "claims.command"),
    "doctor": Command("check the requirements of this machine and print fixes", "advisor.doctor"),
    "why": Command("name the cause and the remedy of an error message, or of those in a log", "advisor.why_command"),
    "run": Command(
        "run every cell of a suite that is not done yet", "sweep.command", "add_run_arguments", epilog="RESUME"
    ),
    "status": Command(
        "count the cells of a suite that are done, and print why others are not",
        "sweep.command",
        "add_status_arguments",
        "status",
    ),
    "report": Command(
        "build the report of a suite from its records",
        "report.site.command",
        extras=(("claims", "claims.command:dependent_claims"),),
    ),
    "virtual": Command("measure memory and communication of one rank of N, without N GPUs", "virtual.command"),
    "prepare": Command(
        "prepare a suite: install other DeepSpeed releases, build operators, create initial weights",
        "sweep.command",
        "add_timed_arguments",
        "releases.prepare:prepare",
    ),
    "weights": Command(
        "create the initial weights of a suite's remaining cells, so that no run's time includes it",
        "sweep.command",
        "add_timed_arguments",
        "weights",
    ),
    "autopsy": Command("measure the effect of each flaw in a published listing", "experiments.autopsy.run"),
    "releases": Command("judge a DeepSpeed release, and print the grid of tested ones", "releases.command"),
    "receipt": Command("print where memory and time of a training script went, or compare two", "receipt.command"),
    "completion": Command(
        "print a script for completion in bash, zsh or fish",
        "cli",
        "add_shell",
        "print_completion",
        epilog="SHELL_EPILOG",
    ),
}
# A complete command, for a request that lacks arguments; advise and predict have their own.
_EXAMPLES = {
    "explain": "study explain ds.json llama-3.1-8b --hardware 8xH100",
    "configs": "study configs mine zero3",
    "why": "study why train.log",
    "run": "study run laptop",
    "status": "study status laptop",
    "report": "study report laptop",
    "virtual": "study virtual --strategy zero3 --world_size 64",
    "prepare": "study prepare releases",
    "weights": "study weights laptop",
    "receipt": "study receipt receipt.json",
    "completion": "study completion bash",
}


# Commands about the same request, each of which has flags that others lack.
PREDICTING = ("advise", "predict", "explain")


def build_parser(names: Iterable[str]) -> tuple[Parser, argparse._SubParsersAction[Any]]:
    """Return the parser of the command line, and its subparsers; those that are not named have no arguments."""
    parser = Parser(
        prog="study",
        description="DeepSpeed ZeRO on Accelerate: advice, predictions, studies, verdicts on published claims.",
        allow_abbrev=False,
    )
    parser.example = "study advise llama-3.1-8b --hardware 8xH100"
    parser.add_argument("--version", action="version", version=f"zero-study {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command_parser = subparsers.add_parser(name, help=command.help, allow_abbrev=False)
        command_parser.example = _EXAMPLES.get(name, "")
        if name in PREDICTING:
            command_parser.find_elsewhere = functools.partial(_commands_with, without=name)
        if name in names:
            command.add_arguments(command_parser)
    return parser, subparsers


def _commands_with(flag: str, without: str) -> str:
    """Return which of the commands that predict has a flag or one of its meaning, to put before a fix."""
    parsers = {name: build_parser([name])[1].choices[name] for name in PREDICTING}
    for name, parser in parsers.items():
        flags = parser._option_string_actions
        has = flag if flag in flags else find_flag(flag, flags)
        if name != without and has:
            return f"study {name} has {has}; "
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line's subcommand; return the exit status."""
    from study.host.folders import check_process
    from study.records.outcome import Terminated

    words = sys.argv[1:] if arguments is None else arguments
    try:
        # Within it, since the import of a command takes most of the time in which Ctrl-C may come.
        parser, subparsers = build_parser([*words[:1]])
        check_process()
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            # The subcommand's parser prints the command that lists its flags.
            command_parser = subparsers.choices[options.command]
            assert isinstance(command_parser, Parser)
            command_parser.raise_unknown(unknown)
        status = COMMANDS[options.command].run(options)
        # Detects a closed pipe here instead of at interpreter exit.
        sys.stdout.flush()
        return status
    except UserError as refusal:
        end = "" if refusal.fix.endswith("?") else "."
        print(f"error: {refusal.problem}. To fix it: {refusal.fix}{end}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1
    except Terminated:
        return 128 + signal.SIGTERM
    except BrokenPipeError:
        # `study status X | head`: the reader has closed the pipe, and the interpreter would flush it again at exit. A
        # command that runs cells has no known result.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        runs_something = options.command in ("run", "prepare", "weights", "virtual")
        return int(runs_something and not getattr(options, "dry_run", False))
    except OSError as error:
        # Errors that no command handles, such as a full disk, are one line as well.
        fixes = {errno.ENOSPC: "make room there", errno.ENOENT: "name one that exists"}
        fix = fixes.get(error.errno or 0, "check that it can be read and written")
        where = clip(os.fsdecode(error.filename)) if error.filename else "a file"
        print(f"error: {where}: {error.strerror or first_line(error)}. To fix it: {fix}.", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
