"""False alarms of `study verify --features`: stored equal combinations with other initial weights and samples.

    python tools/clean_runs.py [--runs 200] [--seed 1] [--only FEATURES...]

Each run has another seed than the stored runs. It writes reports/compositions/clean.json after each run. A file of an
earlier call with the same seed on the same stack is continued: its runs stay, whatever the matrix has become since.
--only repeats combinations of that file and replaces their rows. The exit status is 1 if a run is not equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study.compositions.answers import read_matrices
from study.compositions.command import installed_stack
from study.compositions.features import Combination, make_combination
from study.compositions.matrix import Matrix
from study.compositions.session import CombinationOutcome, CombinationSession
from study.records.directory import json_by_row

RESULT = Path(__file__).resolve().parents[1] / "reports" / "compositions" / "clean.json"


def draw_equal_runs(matrix: Matrix, seed: int) -> Iterator[Combination]:
    """Yield the equal runs of a matrix in a random order, one of each engine in turn as long as it has some."""
    drawing = random.Random(seed)
    by_engine: dict[str, list[Combination]] = {}
    for combination, outcome in sorted(matrix.outcomes.items(), key=lambda item: item[0].name):
        if outcome.is_equal:
            by_engine.setdefault(combination.level("engine"), []).append(combination)
    for combinations in by_engine.values():
        drawing.shuffle(combinations)
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*by_engine.values()))
    return filter(None, rounds)


def plan_runs(matrix: Matrix, count: int, seed: int, rows: Mapping[str, Mapping[str, Any]]) -> dict[Combination, int]:
    """Return the combinations to run, each with the seed of its run: a number from 1 to the count that no row has.

    Rows of an earlier call stay, also those that the matrix of today would not draw.
    """
    # The stored runs have seed 0.
    free = sorted(set(range(1, count + 1)) - {row["seed"] for row in rows.values()})
    drawn = (combination for combination in draw_equal_runs(matrix, seed) if combination.name not in rows)
    return dict(zip(drawn, free, strict=False))


def make_row(outcome: CombinationOutcome, seed: int) -> dict[str, Any]:
    """Return the row of a run: how near it came to an alarm, or its first difference or error."""
    row: dict[str, Any] = {"features": outcome.combination.name, "seed": seed, "kind": outcome.kind}
    # Earlier rows precede this comparison.
    row["local_gradients"] = True
    if outcome.share_of_limit is not None:
        return row | {"share_of_limit": float(f"{outcome.share_of_limit:.2g}")}
    return row | {"says": outcome.says, "line": outcome.line}


def _earlier_rows(stack: dict[str, str | None], seed: int) -> list[dict[str, Any]]:
    """Return the rows of an earlier call with the same seed on the same stack."""
    if not RESULT.exists():
        return []
    earlier = json.loads(RESULT.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = earlier["runs"] if (earlier["stack"], earlier["seed"]) == (stack, seed) else []
    return rows


def _run_planned(
    planned: Mapping[Combination, int],
    rows: dict[str, dict[str, Any]],
    stack: dict[str, str | None],
    options: argparse.Namespace,
) -> None:
    """Run combinations with their seeds, and write all rows after each run."""
    with CombinationSession() as session:
        for combination, seed in planned.items():
            row = make_row(session.run_with_seed(combination, seed), seed)
            rows[combination.name] = row
            print(f"[{seed}/{options.runs}] {json.dumps(row)}", flush=True)
            ordered = sorted(rows.values(), key=lambda row: row["seed"])
            RESULT.write_text(json_by_row({"stack": stack, "seed": options.seed, "runs": ordered}), encoding="utf-8")


def main() -> int:
    """Run the drawn combinations, write their rows, and print the number of false alarms."""
    parser = argparse.ArgumentParser(description="Measure false alarms of study verify --features.")
    parser.add_argument("--runs", type=int, default=200, help="number of combinations")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--only", nargs="+", metavar="FEATURES", help="combinations of the file to repeat")
    options = parser.parse_args()
    stack = installed_stack()
    rows = {row["features"]: row for row in _earlier_rows(stack, options.seed)}
    planned = plan_runs(next(read_matrices()), options.runs, options.seed, rows)
    if options.only:
        planned = {make_combination(name.split(",")): rows[name]["seed"] for name in options.only}
    if planned:
        _run_planned(planned, rows, stack, options)
    alarms = [row for row in rows.values() if row["kind"] != "equal"]
    print(f"seed {options.seed}: {len(alarms)} of {len(rows)} clean runs are not equal")
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
