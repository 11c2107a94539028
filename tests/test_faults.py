"""tools/faults.yaml: the place and the tests of each fault are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engines import ROOT

FAULTS = yaml.safe_load((ROOT / "tools" / "faults.yaml").read_text(encoding="utf-8"))
SOURCES = [file.read_text(encoding="utf-8") for file in (ROOT / "study").rglob("*") if file.suffix in (".py", ".yaml")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_is_found_once_and_its_tests_exist(fault: dict[str, Any]) -> None:
    assert sum(text.count(fault["old"]) for text in SOURCES) == 1
    for test in fault["tests"]:
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}" in Path(ROOT, file).read_text(encoding="utf-8")
