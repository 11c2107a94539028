"""Exit status of the scripts in docs/upstream with the installed releases."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from forked import fork_script
from study.config.places import REPOSITORY
from study.host.folders import cache_directory
from study.host.machine import operator_build_folder

UPSTREAM = REPOSITORY / "docs" / "upstream"
# Script and exit status of each row.
ROWS = re.findall(
    r"^\| \[(\w+\.py)\].*\| ([01]) \| [^|]+\|$", (UPSTREAM / "README.md").read_text(encoding="utf-8"), re.MULTILINE
)


def test_the_table_has_every_script() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(file.name for file in UPSTREAM.glob("*.py"))


@pytest.mark.parametrize(("name", "status"), ROWS)
def test_a_fault_of_another_library_is_there_or_not_as_the_table_says(name: str, status: str) -> None:
    has_fp16 = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if name == "deepspeed_stage0_fp16.py" and not has_fp16:
        pytest.skip("this CPU has no fp16")
    if name == "deepspeed_init_dtype.py" and has_fp16:
        status = "0"
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(operator_build_folder(cache_directory())),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = fork_script(UPSTREAM / name, folder=REPOSITORY, environment=environment, read_at_import={}, timeout=500)
    # A script that cannot run ends in a traceback, with exit status 1 too.
    assert (str(done.returncode), "Traceback" in done.stderr) == (status, False), done.stdout + done.stderr
