"""Speed of the study's loop compared with transformers' Trainer and a bare PyTorch loop, and start-up of commands.

    python tools/bench.py [--repeats 5] [--case NAME] [--clock cpu] [--json]

A repeat starts the three in fresh processes on one core. They train in turns: a loop pauses whenever it prints its
progress, until its next turn. Turns last seconds, so other load on the machine slows all three equally. The placement
of memory makes processes differ by several percent, so each repeat starts new ones, in another order.
The case `start-up` is the CPU time of commands that need no torch, each in a new process.
Exit status: 0 no target missed, 1 a target missed or a run failed, 2 the request itself is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from study.config.errors import RunFailed
from study.config.places import IMPORT_ROOT
from study.config.printing import TextTable, print_page
from study.records.directory import Run, read_run
from study.run.console import StepProgress, run_for_exit_status

SCRIPTS = {
    "study": "study.train",
    "hf_trainer": "study.experiments.baselines.hf_trainer",
    "bare_loop": "study.experiments.baselines.bare_loop",
}
STEPS_PER_TURN = 5
# More than the study's timing window excludes: at most ten steps of warm-up, and the instrumented step.
WARMUP_TURNS = 3
WINDOW = (
    f"one turn is {STEPS_PER_TURN} optimizer steps and the writing of their rows, device synchronized at both ends; "
    f"start-up, the first {WARMUP_TURNS} turns (warm-up) and evaluation are excluded"
)
# CPU time of one thread on one core equals the wall time of an idle machine; other processes do not affect it.
CLOCKS = {"wall": "by the wall clock", "cpu": "of CPU time of the run's process"}
MIN_RATIO = {"hf_trainer": 1.00, "bare_loop": 0.98}
MAX_OVERHEAD_FRACTION = 0.01
# Without large pages the placement of small ones makes processes differ by several percent; no effect outside glibc.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Largest relative difference between the final losses of loops that do the same arithmetic.
LOSS_TOLERANCE = 1e-5


class BenchCase(NamedTuple):
    """A workload and the number of timed turns per repeat."""

    name: str
    arguments: tuple[str, ...]
    turns: int


CASES = (
    BenchCase("bert-imdb", ("--task", "bert-imdb"), turns=8),
    BenchCase("gpt-wikitext", ("--task", "gpt-wikitext"), turns=8),
    # Four times the layers: the overhead of a loop grows with the number of parameter tensors.
    BenchCase("gpt-8layers", ("--task", "gpt-wikitext", "--model_name_or_path", "gpt-tiny-8layers"), turns=3),
)
START_UP = "start-up"
# A class outside the table of families: the process that is not timed traces it, and those that are find the trace.
TRACED = "CONFIG_TRACED_BEFORE"
TRACED_CONFIG = {
    "model_type": "olmo2",
    "architectures": ["Olmo2ForCausalLM"],
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
# Most CPU seconds of each command on an idle core: advice for a preset on any hardware, and for a class traced before.
_PRESET_S, _TRACED_S = 1.0, 2.0
COMMANDS = {
    ("--help",): _PRESET_S,
    ("advise", "--help"): _PRESET_S,
    ("advise", "llama-3.1-8b", "--hardware", "4xA100"): _PRESET_S,
    ("advise", "llama-3.1-8b", "--hardware", "8xH100"): _PRESET_S,
    ("advise", "llama-3.1-8b", "--hardware", "4090"): _PRESET_S,
    ("advise", "llama-3.1-70b", "--hardware", "8x8xH100"): _PRESET_S,
    ("advise", "llama-3.1-405b", "--hardware", "16x8xH200"): _PRESET_S,
    ("advise", "mixtral-8x7b", "--hardware", "8xH100"): _TRACED_S,
    ("advise", "gpt-1t", "--hardware", "64x8xH100"): _PRESET_S,
    ("advise", TRACED, "--hardware", "8xH100"): _TRACED_S,
}
LIMITS = {" ".join(("study", *command)): limit for command, limit in COMMANDS.items()}
_SHARED = (
    "--scale", "laptop", "--weights", "random", "--data", "builtin", "--precision", "fp32", "--dropout", "0",
    "--eval_steps", "0", "--eval_samples", "16", "--logging_steps", str(STEPS_PER_TURN),
)  # fmt: skip


class TrainerProcess:
    """A run of one trainer in a separate process, which pauses whenever its loop prints its progress."""

    def __init__(self, trainer: str, case: BenchCase, folder: Path):
        self.trainer, self.output_dir = trainer, folder / trainer
        steps = STEPS_PER_TURN * (WARMUP_TURNS + case.turns)
        arguments = [*case.arguments, *_SHARED, "--max_steps", str(steps), "--output_dir", str(self.output_dir)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--runner", trainer, *arguments],
            cwd=IMPORT_ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **LARGE_PAGES},
        )
        self._cpu_s = self._wait_for_pause()
        for _ in range(WARMUP_TURNS - 1):
            self.turn()

    def turn(self) -> dict[str, float]:
        """Run one turn; return its wall and CPU seconds."""
        started, before = time.perf_counter(), self._cpu_s
        print("go", file=self._process.stdin, flush=True)
        self._cpu_s = self._wait_for_pause()
        return {"wall": time.perf_counter() - started, "cpu": self._cpu_s - before}

    def finish(self) -> None:
        """Let the run end; raise RunFailed if its exit status is not 0."""
        _, printed = self._process.communicate("go\n")
        if self._process.returncode:
            raise RunFailed(
                f"{self.trainer} failed with exit status {self._process.returncode}: {printed.strip()[-500:]}"
            )

    def kill(self) -> None:
        """Kill the process and collect its output."""
        self._process.kill()
        self._process.communicate()

    def _wait_for_pause(self) -> float:
        """Wait for the next pause; return the CPU seconds of the process so far."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RunFailed(f"{self.trainer} ended early: {self._process.communicate()[1].strip()[-500:]}")
        return float(line)


def run_in_turns(trainer: str, arguments: list[str]) -> int:
    """Run a trainer in this process, with a pause at every progress line; return its exit status."""
    # A copy of stdout, because the run redirects its own to its log.
    pauses = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)

    def pause(*_: Any) -> None:
        print(time.process_time(), file=pauses)
        sys.stdin.readline()

    StepProgress.show = pause  # type: ignore[assignment,method-assign]
    return run_for_exit_status(functools.partial(importlib.import_module(SCRIPTS[trainer]).main, arguments))


def measure(case: BenchCase, repeats: int, clock: str) -> dict[str, Any]:
    """Time turns of every trainer in fresh processes, `repeats` times; return the comparison."""
    turns: list[list[dict[str, float]]] = []
    fractions = []
    for repeat in range(repeats):
        first = repeat % len(SCRIPTS)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
            runs = {}
            for trainer in [*list(SCRIPTS)[first:], *list(SCRIPTS)[:first]]:
                runs[trainer] = TrainerProcess(trainer, case, Path(folder))
                stack.callback(runs[trainer].kill)
            turns.append([{name: run.turn()[clock] for name, run in runs.items()} for _ in range(case.turns)])
            for run in runs.values():
                run.finish()
            records = {trainer: read_run(run.output_dir) for trainer, run in runs.items()}
        check_same_losses(case, records)
        clock_figures = records["study"].memory["ranks"][0]["time"]
        fractions.append(clock_figures["self_cost_s"] / clock_figures["window_s"])
    config = records["study"].config
    tokens = STEPS_PER_TURN * config["global_batch_size"] * config["seq_length"]
    return compare(case.name, tokens, turns, statistics.median(fractions))


def measure_start_up(repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds, user and system, of each command in `repeats` processes, after one that is not timed."""
    timed: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TRACED_CONFIG), encoding="utf-8")
        for command in COMMANDS:
            name = " ".join(("study", *command))
            words = [folder if word == TRACED else word for word in command]
            for repeat in range(repeats + 1):
                seconds = _cpu_seconds(name, words)
                if repeat:
                    timed.setdefault(name, []).append(seconds)
    return timed


def _cpu_seconds(name: str, words: Sequence[str]) -> float:
    """Return the CPU seconds of a command in a new process; raise RunFailed if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, "-m", "study.cli", *words], cwd=IMPORT_ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RunFailed(f"{name} failed with exit status {process.returncode}: {process.stderr.strip()[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def check_same_losses(case: BenchCase, records: dict[str, Run]) -> None:
    """Raise RunFailed if a trainer's final loss differs from the study's, so that their work is not the same."""
    expected = records["study"].summary["train_loss_final"]
    for trainer, run in records.items():
        final = run.summary["train_loss_final"]
        if abs(final - expected) > LOSS_TOLERANCE * abs(expected):
            raise RunFailed(f"{trainer} on {case.name} diverges from the study: its loss is {final}, not {expected}")


def compare(
    name: str, tokens_per_turn: int, repeats: Sequence[Sequence[dict[str, float]]], overhead: float
) -> dict[str, Any]:
    """Return speeds, ratios and missed targets from the seconds of each turn.

    Consecutive turns are compared, and the median of a repeat is one sample. Only repeats are independent: all turns of
    a process share its placement of memory.
    """
    speeds = {
        trainer: [statistics.median(tokens_per_turn / turn[trainer] for turn in turns) for turns in repeats]
        for trainer in SCRIPTS
    }
    ratios: dict[str, dict[str, Any]] = {}
    missed, undecided = [], []
    for trainer, least in MIN_RATIO.items():
        pairs = [statistics.median(turn[trainer] / turn["study"] for turn in turns) for turns in repeats]
        median, (low, high) = statistics.median(pairs), median_interval(pairs)
        ratios[trainer] = {
            "pairs": pairs,
            "min": min(pairs),
            "median": median,
            "max": max(pairs),
            "interval": (low, high),
        }
        line = f"{name}: study/{trainer} is {median:.3f} ({low:.3f} to {high:.3f}), target at least {least:.2f}"
        if high < least:
            missed.append(line)
        elif median < least:
            undecided.append(line)
    if overhead > MAX_OVERHEAD_FRACTION:
        missed.append(f"{name}: measurement takes {overhead:.2%} of a step, target at most {MAX_OVERHEAD_FRACTION:.0%}")
    return {
        "case": name,
        "tokens_per_s": speeds,
        "tokens_per_s_median": {trainer: statistics.median(values) for trainer, values in speeds.items()},
        "ratio": ratios,
        "measurement_share": overhead,
        "missed": missed,
        "undecided": undecided,
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median: the sign test's order statistics, for any distribution."""
    ordered, cut = sorted(values), 0
    outside = 2 / 2 ** len(ordered)
    while outside + 2 * math.comb(len(ordered), cut + 1) / 2 ** len(ordered) <= 0.05:
        cut += 1
        outside += 2 * math.comb(len(ordered), cut) / 2 ** len(ordered)
    return ordered[cut], ordered[-1 - cut]


def table(results: Sequence[dict[str, Any]]) -> TextTable:
    """Table of speeds and median ratios, with the smallest and the largest ratio in parentheses."""
    rows = [
        [
            result["case"],
            *(f"{result['tokens_per_s_median'][trainer]:,.0f}" for trainer in SCRIPTS),
            *("{median:.3f} ({min:.3f} to {max:.3f})".format_map(result["ratio"][trainer]) for trainer in MIN_RATIO),
            f"{result['measurement_share']:.2%}",
        ]
        for result in results
    ]
    targets = [f"at least {least:.2f}" for least in MIN_RATIO.values()]
    rows.append(["target", *["-"] * len(SCRIPTS), *targets, f"at most {MAX_OVERHEAD_FRACTION:.0%}"])
    speeds, ratios = [f"{name}, tokens/s" for name in SCRIPTS], [f"study/{name}" for name in MIN_RATIO]
    return TextTable(["case", *speeds, *ratios, "measurement"], rows)


def judge_start_up(timed: Mapping[str, Sequence[float]], limits: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the commands that take longer than their limit, and those whose repeats do not decide it."""
    judged: dict[str, list[str]] = {"missed": [], "undecided": []}
    for name, times in timed.items():
        median, (low, high) = statistics.median(times), median_interval(times)
        if median > limits[name]:
            line = f"{name}: {median:.2f} s of CPU ({low:.2f} to {high:.2f}), target at most {limits[name]:g}"
            judged["missed" if low > limits[name] else "undecided"].append(line)
    return judged


def start_up_table(timed: dict[str, list[float]]) -> TextTable:
    """Table of the median CPU seconds of each command, with the least and the most in parentheses."""
    rows = [
        [name, f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})", f"{LIMITS[name]:g}"]
        for name, times in timed.items()
    ]
    return TextTable([START_UP, "CPU, s", "at most"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases and print their comparison; return exit status 1 if a target is missed or a run fails."""
    parser = argparse.ArgumentParser(prog="python tools/bench.py", description=(__doc__ or "").split("\n")[0])
    names = [*(case.name for case in CASES), START_UP]
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats; default: 5")
    parser.add_argument("--case", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--clock", choices=list(CLOCKS), help="default: wall with a GPU, else cpu")
    parser.add_argument("--json", action="store_true", help="print only one JSON document on stdout")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} is out of range; use 1 or more")
    selected = options.case or names
    import torch

    if not torch.cuda.is_available() and hasattr(os, "sched_setaffinity"):
        # Without a GPU a rank uses one core: all runs share it, and none migrates between caches.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    clock = options.clock or ("wall" if torch.cuda.is_available() else "cpu")
    results = []
    try:
        for case in CASES:
            if case.name in selected:
                print(f"{case.name}: {options.repeats} x {case.turns} turns of {', '.join(SCRIPTS)}", file=sys.stderr)
                results.append(measure(case, options.repeats, clock))
        timed = measure_start_up(options.repeats) if START_UP in selected else {}
    except RunFailed as failure:
        print(f"error: {failure.reason}", file=sys.stderr)
        return 1
    start_up = judge_start_up(timed, LIMITS)
    if options.json:
        document = {"window": WINDOW, "clock": clock, "repeats": options.repeats, "cases": results}
        print(json.dumps({**document, "start_up": timed, "start_up_targets": start_up}, indent=2))
    else:
        if results:
            print_page([table(results), "", f"Seconds {CLOCKS[clock]}; {WINDOW}.", *[""] * bool(timed)])
        if timed:
            print_page([start_up_table(timed)])
    _print_targets([*results, start_up])
    return 1 if any(result["missed"] for result in [*results, start_up]) else 0


def _print_targets(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the targets that the cases missed, or did not decide."""
    for result in results:
        for word in ("missed", "undecided"):
            for line in result[word]:
                print(f"{word}: {line}", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--runner"]:
        # As in the scripts: native threads must not abort a run that has finished.
        os._exit(run_in_turns(sys.argv[2], sys.argv[3:]))
    sys.exit(main())
