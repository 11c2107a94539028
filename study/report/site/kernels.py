"""Kernels of notebooks without import time.

`python study/report/site/kernels.py SOCKET` imports the libraries of notebooks and forks a kernel for each request;
`... kernels.py -f CONNECTION_FILE` is one kernel.
"""

from __future__ import annotations

import gc
import importlib
import sys

_MODULES = (
    "ipykernel.kernelapp",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "study.report.questions",
    # Imported by each kernel when it starts.
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "ipykernel.debugger",
    # Imported by the first table that is read, and by the first PNG that is saved.
    "pyarrow.dataset",
    "pyarrow.pandas_compat",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "PIL.PpmImagePlugin",
)


def preload() -> None:
    """Import the libraries of notebooks; matplotlib reads its fonts, too."""
    for module in _MODULES:
        importlib.import_module(module)
    # A collection of garbage in a kernel would read, and so copy, the objects of the libraries.
    gc.freeze()


def main() -> None:
    """Serve forks, or be a kernel."""
    if len(sys.argv) == 2:
        from study.sweep.fork_server import serve

        serve(sys.argv[1], preload)
        return
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()


if __name__ == "__main__":
    main()
