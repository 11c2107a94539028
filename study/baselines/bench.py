"""The study's loop against transformers' Trainer and a bare PyTorch loop: the same work, in turns, pair by pair.

    python -m study.baselines.bench [--repeats 5] [--case NAME] [--json]

Exit status: 0 every target met, 1 a target missed or a run failed, 2 the request itself is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.errors import RunFailed
from study.records import read_run
from study.strategies import REPOSITORY

SCRIPTS = {
    "study": "study/train.py",
    "hf_trainer": "study/baselines/hf_trainer.py",
    "bare_loop": "study/baselines/bare_loop.py",
}
WINDOW = (
    "tokens of all steps but the first four (three warm up, the study watches one) over the wall time of those steps, "
    "the device synchronized at both ends; start-up, evaluation and the writing of records lie outside"
)
LEAST_RATIO = {"hf_trainer": 1.00, "bare_loop": 0.98}
LARGEST_MEASUREMENT_SHARE = 0.01
# Two loops that do the same arithmetic agree this well; a faster one that does not has done other work.
SAME_LOSS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of work, sized so that its timed window is seconds long on one core."""

    name: str
    arguments: tuple[str, ...]


CASES = (
    Case("bert-imdb", ("--task", "bert-imdb", "--max_steps", "44")),
    Case("gpt-wikitext", ("--task", "gpt-wikitext", "--max_steps", "44")),
    # Four times the layers: a loop's own overhead grows with the number of parameters it has to walk.
    Case(
        "gpt-8layers",
        ("--task", "gpt-wikitext", "--model_name_or_path", "gpt-tiny-8layers", "--max_steps", "24"),
    ),
)
_SHARED = (
    "--scale", "laptop", "--weights", "random", "--data", "builtin", "--precision", "fp32", "--dropout", "0",
    "--eval_steps", "0", "--eval_samples", "16", "--logging_steps", "20",
)  # fmt: skip


def measure(case: Case, trainer: str, folder: Path) -> dict[str, float]:
    """One run in a process of its own, as one rank."""
    output_dir = folder / f"{case.name}-{trainer}"
    arguments = [*case.arguments, *_SHARED, "--output_dir", str(output_dir), "--overwrite_output_dir"]
    command = [sys.executable, str(REPOSITORY / SCRIPTS[trainer]), *arguments]
    process = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunFailed(f"{trainer} on {case.name} ended with exit status {process.returncode}: {last}")
    run = read_run(output_dir)
    time = run.memory["ranks"][0]["time"]
    return {
        "tokens_per_s": run.summary["tokens_per_s"],
        "timed_steps": time["window_steps"],
        "train_loss_final": run.summary["train_loss_final"],
        "measurement_share": None if time["self_cost_s"] is None else time["self_cost_s"] / time["window_s"],
    }


def compare(case: Case, rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """What the rounds of one case say; a round is one run of every trainer, one right after the other."""
    for results in rounds:
        study = results["study"]
        for trainer, result in results.items():
            gap = abs(result["train_loss_final"] - study["train_loss_final"]) / abs(study["train_loss_final"])
            if result["timed_steps"] != study["timed_steps"] or gap > SAME_LOSS:
                raise RunFailed(f"{trainer} on {case.name} did other work than the study", "compare their steps.jsonl")
    speeds = {trainer: [results[trainer]["tokens_per_s"] for results in rounds] for trainer in SCRIPTS}
    ratios = {
        trainer: _spread([study / other for study, other in zip(speeds["study"], speeds[trainer], strict=True)])
        for trainer in LEAST_RATIO
    }
    share = statistics.median(results["study"]["measurement_share"] for results in rounds)
    missed = [
        f"{case.name}: study/{trainer} is {ratios[trainer]['median']:.3f}, wanted at least {least:.2f}"
        for trainer, least in LEAST_RATIO.items()
        if ratios[trainer]["median"] < least
    ]
    if share > LARGEST_MEASUREMENT_SHARE:
        missed.append(f"{case.name}: measuring takes {share:.2%} of a step, wanted at most 1%")
    return {
        "case": case.name,
        "arguments": list(case.arguments),
        "timed_steps": rounds[0]["study"]["timed_steps"],
        "tokens_per_s": speeds,
        "tokens_per_s_median": {trainer: statistics.median(values) for trainer, values in speeds.items()},
        "ratio": ratios,
        "measurement_share": share,
        "missed": missed,
    }


def _spread(pairs: list[float]) -> dict[str, Any]:
    return {"pairs": pairs, "min": min(pairs), "median": statistics.median(pairs), "max": max(pairs)}


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'median tokens/s':<14}{'study':>9}{'hf_trainer':>12}{'bare_loop':>11}"
        f"{'study/hf_trainer':>24}{'study/bare_loop':>24}{'measuring':>11}"
    ]
    for result in results:
        speeds = result["tokens_per_s_median"]
        spreads = [
            f"{ratio['min']:.3f}  {ratio['median']:.3f}  {ratio['max']:.3f}"
            for ratio in (result["ratio"]["hf_trainer"], result["ratio"]["bare_loop"])
        ]
        lines.append(
            f"{result['case']:<14}{speeds['study']:>10,.0f}{speeds['hf_trainer']:>12,.0f}{speeds['bare_loop']:>11,.0f}"
            f"{spreads[0]:>24}{spreads[1]:>24}{result['measurement_share']:>11.2%}"
        )
    wanted = [f"at least {LEAST_RATIO[name]:.2f}" for name in ("hf_trainer", "bare_loop")]
    lines.append(f"{'wanted':<47}{wanted[0]:>24}{wanted[1]:>24}{f'at most {LARGEST_MEASUREMENT_SHARE:.0%}':>11}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.baselines.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds per case; a round runs every trainer once")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    asked = parser.parse_args(arguments)
    if asked.repeats < 1:
        parser.error(f"--repeats {asked.repeats} is out of range; use 1 or more")
    _share_one_core()
    results = []
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for case in CASES:
                if asked.case and case.name not in asked.case:
                    continue
                rounds = []
                for number in range(1, asked.repeats + 1):
                    rounds.append({trainer: measure(case, trainer, Path(folder)) for trainer in SCRIPTS})
                    speeds = ", ".join(f"{name} {run['tokens_per_s']:,.0f}" for name, run in rounds[-1].items())
                    print(f"{case.name}, round {number} of {asked.repeats}: {speeds} tokens/s", file=sys.stderr)
                results.append(compare(case, rounds))
    except RunFailed as failure:
        print(f"error: {failure.reason}", file=sys.stderr)
        return 1
    missed = [line for result in results for line in result["missed"]]
    if asked.json:
        print(json.dumps({"window": WINDOW, "repeats": asked.repeats, "cases": results, "missed": missed}, indent=2))
    else:
        print(f"{table(results)}\n\nratios: min, median and max over {asked.repeats} pairs. tokens/s: {WINDOW}.")
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


def _share_one_core() -> None:
    """Without a GPU a rank is one core: every run gets the same one, and none wanders between caches."""
    import torch

    if not torch.cuda.is_available() and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


if __name__ == "__main__":
    sys.exit(main())
