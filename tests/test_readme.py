"""The README says what the committed records say."""

from __future__ import annotations

import subprocess
import sys

from study.report.site.readme import rewritten
from study.spec.strategies import REPOSITORY, STRATEGY_NAMES


def test_the_table_in_the_readme_is_the_one_the_records_give():
    text = (REPOSITORY / "README.md").read_text()
    assert rewritten(text, REPOSITORY) == text
    assert all(f"| `{strategy}` | " in text for strategy in STRATEGY_NAMES)


def test_records_are_read_without_torch():
    code = "import sys, study.report.site.readme; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
