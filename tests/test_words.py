"""tools/words.py: each scope is searched in its own texts, and a room may not exceed its budget."""

from __future__ import annotations

import runpy
from pathlib import Path

from engines import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "words.py"))
SOURCE = '''"""Blue and red\nis."""

green = f"of red {1}"  # red
# is

KEY = "red"
'''


def test_a_match_is_found_across_lines_and_in_its_own_scope_alone(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    rows = (("docstring", "^Blue"), ("prose", "red is|of red X"), ("name", "^green$"))
    table = "".join(f"{scope}\t{pattern}\ta better word\n" for scope, pattern in rows)
    (tmp_path / "tools" / "words.tsv").write_text("scope\tpattern\tinstead\n" + table)
    for name in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_text("# red\n\nred\nis\n")
    (tmp_path / "study" / "run").mkdir(parents=True)
    (tmp_path / "study" / "run" / "a.py").write_text(SOURCE)
    matches = [(match.room, match.file.name, match.line) for match in TOOL["find_matches"](tmp_path)]
    docs = [("docs", "CONTRIBUTING.md", 3), ("docs", "README.md", 3)]
    assert matches == [*docs, *(("run", "a.py", line) for line in (1, 1, 4, 4, 4))]


def test_a_count_above_its_budget_is_named() -> None:
    compare = TOOL["compare_with_budgets"]
    assert compare({"run": 3, "sweep": 2}, {"run": 3, "sweep": 3}) == []
    (above,) = compare({"run": 4}, {"run": 3})
    assert above.startswith("run: 4 matches of tools/words.tsv, 3 allowed: tools/words.py --list run")
