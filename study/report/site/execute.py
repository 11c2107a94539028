"""One notebook through papermill: in this interpreter, within its time, with parameters that it knows."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from study.errors import UserError

START_LIMIT_S = 120
_ERROR_TAG = "papermill-error-cell-tag"


class NotebookFailed(Exception):
    """A cell raised, ran out of time or lost its kernel; what ran before it is in the written notebook."""


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the running Python, whatever the `python3` is that Jupyter knows on this machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
                   "--HistoryManager.enabled=False", "--log-level=CRITICAL"]  # fmt: skip
        environment = {"PYTHONHASHSEED": "0", "IPYTHONDIR": _no_profile().name}
        return KernelSpec(argv=command, language="python", display_name="Python 3", env=environment)


@functools.cache
def _no_profile() -> tempfile.TemporaryDirectory[str]:
    """A user's own would run its start-up files in every notebook, and may be where nothing can be written."""
    return tempfile.TemporaryDirectory(prefix="zero-study-ipython-")


def execute(notebook: Path, output: Path, parameters: Mapping[str, Any], folder: Path, time_limit_s: float) -> None:
    """Runs `notebook` with `folder` as its working directory and writes it, with its outputs, to `output`."""
    known = papermill.inspect_notebook(str(notebook))
    if unknown := sorted(set(parameters) - set(known)):
        raise UserError(
            f"{notebook.name} has no parameter {', '.join(unknown)}", f"it knows {', '.join(sorted(known)) or 'none'}"
        )
    deadline = time.monotonic() + time_limit_s
    try:
        papermill.execute_notebook(
            str(notebook), str(output), parameters=dict(parameters), progress_bar=False,
            # Not `cwd`: that moves this whole process, and notebooks run side by side.
            resources={"metadata": {"path": str(folder)}},
            start_timeout=START_LIMIT_S, kernel_manager_class=ThisInterpreter,
            timeout_func=lambda _cell: max(1, int(deadline - time.monotonic())),
        )  # fmt: skip
    except PapermillExecutionError as error:
        raise NotebookFailed(f"{_place(output, error.cell_index)}: {error.ename}: {error.evalue}") from None
    except CellTimeoutError:
        raise NotebookFailed(f"{_place(output)}: the notebook has had its {time_limit_s:.0f} s") from None
    except DeadKernelError:
        raise NotebookFailed(f"{_place(output)}: the kernel died") from None
    finally:
        if output.exists():
            _settle(output)


def _place(output: Path, index: int | None = None) -> str:
    """The cell that failed by number, name and first line: by papermill's index, else the last one it started."""
    cells = _own_cells(nbformat.read(output, as_version=4))
    if index is None:
        started = [place for place, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("start_time")]
        index = started[-1] if started else 0
    cell = cells[index]
    first_line = next(iter(cell.source.splitlines()), "")
    return f"cell {index + 1} ({cell.id}, `{first_line[:80]}`)"


def _own_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Without the two that papermill puts before one that failed."""
    return [cell for cell in notebook.cells if _ERROR_TAG not in cell.metadata.get("tags", [])]


def _settle(output: Path) -> None:
    """Leaves out clocks, paths and random names: the same records give the same notebook."""
    notebook = nbformat.read(output, as_version=4)
    notebook.metadata.pop("papermill", None)
    notebook.cells = _own_cells(notebook)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = "injected-parameters"
    nbformat.write(notebook, output)
