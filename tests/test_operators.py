"""DeepSpeed's operators: nothing that a killed run leaves behind holds up the next one."""

from __future__ import annotations

import subprocess
import sys
import time

from study.operators import _build_folder, _clear_dead_build

LOAD = """
from study.operators import build_operators
from study.preflight import cache_directory
from study.strategies import read_strategy
build_operators(read_strategy("zero0"), cache_directory())
"""


def test_a_lock_that_a_killed_run_left_holds_up_nobody():
    folder = _build_folder("deepspeed_shm_comm")
    (folder / "lock").touch()
    subprocess.run([sys.executable, "-c", LOAD], check=True, timeout=240)
    assert not (folder / "lock").exists()


def test_a_compiler_that_outlived_its_run_is_left_to_finish(tmp_path):
    (tmp_path / "lock").touch()
    compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"], cwd=tmp_path)
    started = time.monotonic()
    _clear_dead_build(tmp_path)
    assert time.monotonic() - started > 0.5
    # It is a zombie until it is waited for, and works nowhere by then.
    assert compiler.wait() == 0
    assert not (tmp_path / "lock").exists()
