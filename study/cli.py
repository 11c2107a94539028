"""The `study` command; its exit status is 0 (done), 1 (some run failed) or 2 (the request is wrong)."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from study import __version__
from study.advisor import advise_command as advise
from study.advisor import configs_command as configs
from study.advisor import doctor, explain
from study.advisor import predict_command as predict
from study.autopsy import run as autopsy
from study.claims import command as claims
from study.config.errors import UserError, clip, first_line
from study.config.flags import Parser
from study.config.strategies import STRATEGY_NAMES
from study.host.folders import check_process
from study.predictor import validation
from study.records.outcome import Terminated
from study.releases import command as releases
from study.releases import verify
from study.releases.prepare import prepare
from study.report.site import command as report
from study.sweep import command as sweep
from study.sweep.suite_file import SUITE_DIRECTORY
from study.virtual import command as virtual
from study.workloads.presets import PRESETS

_FIXES = {errno.ENAMETOOLONG: "use a shorter name", errno.ENOSPC: "make room there"}


class Command(NamedTuple):
    """A subcommand: its help text, its arguments and its function, which returns the exit status."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


def add_shell(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `study completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that completes")


def print_completion(options: argparse.Namespace) -> int:
    """Print a script with which a shell completes commands, flags and names; it starts no Python."""
    import shtab

    parser, subparsers = build_parser()
    names = {
        "suite": sorted(file.stem for file in SUITE_DIRECTORY.glob("*.yaml")), "strategy": STRATEGY_NAMES,
        "names": STRATEGY_NAMES, "model_name_or_path": tuple(PRESETS),
    }  # fmt: skip
    for command_parser in subparsers.choices.values():
        for action in command_parser._actions:
            action.choices = action.choices or names.get(action.dest)
            if action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE
    print(shtab.complete(parser, options.shell))
    return 0


COMMANDS = {
    "advise": Command(
        "recommend a strategy and its settings for a model on given hardware",
        advise.add_arguments,
        partial(advise.run, nearest=validation.describe_nearest),
        advise.EPILOG,
    ),
    "predict": Command(
        "predict memory, communication and step time of a strategy",
        predict.add_arguments,
        predict.run,
        predict.EPILOG,
    ),
    "explain": Command(
        "explain a DeepSpeed or Accelerate config: the cost of each setting, conflicts, and settings without effect",
        explain.add_arguments,
        explain.run,
        explain.EPILOG,
    ),
    "configs": Command(
        "write strategies' Accelerate files for any script", configs.add_arguments, configs.run, configs.EPILOG
    ),
    "verify": Command(
        "test which strategies compute the gradients of DDP on this stack",
        verify.add_arguments,
        verify.run,
        verify.EPILOG,
    ),
    "claims": Command(
        "judge published claims about ZeRO by arithmetic and the committed records", claims.add_arguments, claims.run
    ),
    "doctor": Command("check the requirements of this machine and print fixes", doctor.add_arguments, doctor.run),
    "run": Command("run every cell of a suite that is not done yet", sweep.add_run_arguments, sweep.run, sweep.RESUME),
    "status": Command(
        "count the cells of a suite that are done, and print why others are not",
        sweep.add_status_arguments,
        sweep.status,
    ),
    "report": Command(
        "build the report of a suite from its records",
        report.add_arguments,
        partial(report.run, claims=claims.dependent_claims),
    ),
    "virtual": Command(
        "measure memory and communication of one rank of N, without N GPUs",
        virtual.add_arguments,
        virtual.run,
        virtual.EPILOG,
    ),
    "prepare": Command(
        "prepare a suite: install other DeepSpeed releases, build operators, create initial weights",
        sweep.add_timed_arguments,
        prepare,
    ),
    "weights": Command(
        "create the initial weights of a suite's remaining cells, so that no run's time includes it",
        sweep.add_timed_arguments,
        sweep.weights,
    ),
    "autopsy": Command("measure the effect of each flaw in a published listing", autopsy.add_arguments, autopsy.run),
    "releases": Command(
        "judge a DeepSpeed release, and print the grid of tested ones",
        releases.add_arguments,
        releases.run,
        releases.EPILOG,
    ),
    "completion": Command(
        "print a script for completion in bash, zsh or fish",
        add_shell,
        print_completion,
        "bash: study completion bash > ~/.local/share/bash-completion/completions/study; zsh: > _study in a folder of"
        " $fpath; fish: > ~/.config/fish/completions/study.fish",
    ),
}


def build_parser() -> tuple[Parser, argparse._SubParsersAction[Any]]:
    """Return the parser of the command line, and its subparsers."""
    parser = Parser(
        prog="study",
        description="DeepSpeed ZeRO on Accelerate: advice, predictions, studies, verdicts on published claims.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zero-study {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(subparsers.add_parser(name, help=command.help, epilog=command.epilog, allow_abbrev=False))
    return parser, subparsers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line's subcommand; return the exit status."""
    parser, subparsers = build_parser()
    try:
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
        # `study status X | head`: the reader has closed the pipe. A command that runs cells has no known result.
        _drop_output()
        runs_something = options.command in ("run", "prepare", "weights", "virtual")
        return int(runs_something and not getattr(options, "dry_run", False))
    except OSError as error:
        # Errors that no command handles, such as a name that is too long or a full disk, are one line as well.
        if error.filename is None:
            _drop_output()
        subject = "the output cannot be written" if error.filename is None else clip(os.fsdecode(error.filename))
        fix = _FIXES.get(error.errno or 0, "check that it can be read and written")
        print(f"error: {subject}: {error.strerror or first_line(error)}. To fix it: {fix}.", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Redirect stdout to the null device: its reader is gone, and the interpreter would flush it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
