"""tools/golden.py, the guard of refactorings: it finds every difference, and none between equal versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import ROOT

PAGE = "| Strategy | peak |\n| --- | --- |\n| zero2 | 1.25 |\n\nThe lowest peak is 1.25 GiB.\n"
OLD = {"arms": [{"name": "ddp", "held": 0.1 + 0.2, "kind": "nothing"}, {"name": "zero2", "held": 2}]}
DDP, ZERO2 = {"held": 0.1 + 0.2, "name": "ddp", "kind": "ineffective"}, {"name": "zero2", "held": 2.0}


def golden(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/golden.py", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("rows", "page", "says"),
    [
        # Other names in the table of renames, and other words.
        ([DDP, ZERO2], PAGE.replace("The lowest peak is", "Lowest of all peaks:"), ""),
        ([DDP | {"held": 0.3}, ZERO2], PAGE, "a.json: strategies.ddp.held: 0.30000000000000004 -> 0.3 (rounding)"),
        ([DDP | {"held": 0.31}, ZERO2], PAGE, "a.json: strategies.ddp.held: 0.30000000000000004 -> 0.31"),
        ([DDP, {"name": "zero2"}], PAGE, 'a.json: strategies.zero2.held: 2 -> "(absent)"'),
        ([DDP, ZERO2 | {"more": None}], PAGE, 'a.json: strategies.zero2.more: "(absent)" -> null'),
        ([ZERO2, DDP], PAGE, 'a.json: strategies (order): ["ddp", "zero2"] -> ["zero2", "ddp"]'),
        ([DDP, ZERO2], PAGE.replace("| 1.25", "| 1"), 'b.md: tables[Strategy, peak (1)].zero2.peak: "1.25" -> "1"'),
        ([DDP, ZERO2], PAGE.replace("1.25 G", "1.26 G"), 'b.md: prose: "1.25 (The lowest peak is 1.25 GiB.)" -> "1.26 '
         '(The lowest peak is 1.26 GiB.)"'),
        ([DDP, ZERO2], None, "b.md: : "),
    ],
)  # fmt: skip
def test_each_difference_is_found_and_a_new_name_is_none(rows: object, page: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "renames.yaml").write_text("arms: strategies\nnothing: ineffective\n")
    for name, document, text in (("old", OLD, PAGE), ("new", {"strategies": rows}, page)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text(json.dumps(document))
        if text:
            (tmp_path / name / "b.md").write_text(text)
    done = golden("compare", f"{tmp_path}/old", f"{tmp_path}/new", "--renames", f"{tmp_path}/renames.yaml")
    *differences, summary = done.stdout.splitlines()
    assert (len(differences), done.returncode) == ((1, 1) if says else (0, 0)), done
    assert all(line.startswith(says) for line in differences), differences
    assert summary.startswith(
        f"{len(differences)} differences, {done.stdout.count('(rounding)')} of them rounding, in 2 files"
    )
