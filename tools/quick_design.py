"""Time the quick design: `study verify --pairs 10` without earlier runs, into reports/compositions/quick.json.

python tools/quick_design.py [--minutes 10]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from study.compositions.answers import match_known_finding
from study.compositions.command import PAIRS_FILE
from study.compositions.matrix import Matrix
from study.config.places import REPOSITORY
from study.records.directory import write_json

RESULT = REPOSITORY / "reports" / "compositions" / "quick.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the design in a new process, as a user does, and write its counts and its wall time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--pairs", format(options.minutes, "g"), "--runs_dir", folder]
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "study", "verify", *flags], cwd=REPOSITORY, check=False)
        minutes = (time.monotonic() - began) / 60
        matrix = Matrix.read(Path(folder) / PAIRS_FILE)
    # Of five minutes: above the two ranks of a run other processes had the cores, too.
    load = round(os.getloadavg()[1], 1)
    write_json(RESULT, summarize(matrix) | {"minutes": round(minutes, 1), "cores": os.cpu_count(), "load": load})
    return 0


def summarize(matrix: Matrix) -> dict[str, Any]:
    """Return what a design has found and covered."""
    entries = {match_known_finding(finding, matrix.stack) for finding in matrix.findings.values()}
    return {
        "stack": matrix.stack,
        "runs": len(matrix.outcomes),
        "equal": sum(outcome.is_equal for outcome in matrix.outcomes.values()),
        "pairs": matrix.pairs,
        "equal_pairs": matrix.pairs - len(matrix.open_pairs),
        "unknown": sum(entry is None for entry in entries),
        "wrong": sorted(entry.title for entry in entries if entry is not None and entry.verdict == "wrong"),
    }


if __name__ == "__main__":
    sys.exit(main())
