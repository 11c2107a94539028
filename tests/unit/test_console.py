from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from engines import ROOT, run_in_terminal

# Every channel of a library's output: streams, descriptors, warnings, logging, another process, C's buffer.
NOISE = """
import ctypes, logging, os, subprocess, sys, warnings
def noise(when):
    print(f"printed {when}")
    print(f"printed to stderr {when}", file=sys.stderr)
    os.write(1, f"written to 1 {when}\\n".encode())
    os.write(2, f"written to 2 {when}\\n".encode())
    warnings.warn(f"warned {when}")
    logging.getLogger("library").error(f"logged {when}")
    subprocess.run([sys.executable, "-c", f"print('another process {when}')"], check=True)
"""
START = """
from pathlib import Path
from study.run.console import Console
log = Path(sys.argv[1])
console = Console(speaks=True)
"""


def run_python(code: str, log: Path) -> subprocess.CompletedProcess[str]:
    """Run code with buffered streams, as in a shell: their content must not be lost when the log opens."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", NOISE + START + code, str(log)]
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


KINDS = ("printed", "printed to stderr", "written to 1", "written to 2", "warned", "logged", "another process")


def find_kinds(text: str, when: str) -> list[str]:
    return [kind for kind in KINDS if re.search(rf"{kind} {when}\b", text)]


def test_all_noise_goes_to_the_log_and_none_to_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("an earlier attempt\n")
    code = 'noise("early"); console.print_from_main("hello"); console.log_to(log); noise("late"); raise OSError("why")'
    result = run_python(code, log)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "hello\n")
    text = log.read_text()
    assert (text.startswith("an earlier attempt\n"), "OSError: why" in text) == (True, True)
    assert find_kinds(text, "early") == find_kinds(text, "late") == list(KINDS)
    assert text.index("written to 1 early") < text.index("written to 1 late")


def test_the_streams_are_the_users_again_after_restore(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    restored = 'console.restore()\nprint("to stdout"); print("to stderr", file=sys.stderr)'
    result = run_python(f'console.log_to(log); noise("inside"); {restored}', log)
    assert (result.stdout, result.stderr) == ("to stdout\n", "to stderr\n")
    assert find_kinds(log.read_text(), "inside") == list(KINDS)
    # Noise that never got a log leaves no file.
    log.unlink()
    result = run_python('noise("early"); console.print_from_main("error: no"); console.restore()', log)
    assert (result.stdout, result.stderr, list(tmp_path.iterdir())) == ("", "error: no\n", [])


def test_a_silent_rank_prints_nothing_but_logs(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    code = (
        'other = Console(speaks=False); other.print_from_main("hello"); other.log_to(log); noise("there")\n'
        "progress = other.progress(10, 0); progress.show(10, 1.0, 1.0, 1.0); progress.close()"
    )
    result = run_python(code, log)
    assert (result.stdout, result.stderr) == ("", "")
    assert find_kinds(log.read_text(), "there") == list(KINDS)


PROGRESS = """
progress = console.progress(40, 20)
for step in range(21, 41):
    pause()
    progress.show(step, None if step == 30 else 1.5, 1234.5 if step > 25 else None, 0.25)
progress.close()
"""


def test_progress_without_a_terminal_is_a_line_every_tenth(tmp_path: Path) -> None:
    lines = run_python("pause = int" + PROGRESS, tmp_path / "log.txt").stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {step}/40" for step in (21, 24, 28, 32, 36, 40)]
    assert lines[0] == "step 21/40: loss 1.5000, peak 0.25 GiB"
    assert lines[-1] == "step 40/40: loss 1.5000, 1,234 tokens/s, peak 0.25 GiB"


def test_progress_on_a_terminal_is_a_bar_with_step_loss_speed_and_memory(tmp_path: Path) -> None:
    # A bar is drawn at most ten times a second.
    slowly = "import time; pause = lambda: time.sleep(0.02)\n"
    code, log = f'{NOISE}{START}console.log_to(log)\n{slowly}{PROGRESS}noise("there")', tmp_path / "log.txt"
    bar = run_in_terminal([sys.executable, "-c", code, str(log)], COLUMNS="120", PYTHONUNBUFFERED="")
    assert [text for text in ("loss 1.5000", "1,234 tokens/s", "peak 0.25 GiB", "/40") if text not in bar] == []
    assert (find_kinds(bar, "there"), find_kinds(log.read_text(), "there")) == ([], list(KINDS))
