"""Kernels of notebooks without import time.

`python study/report/site/kernels.py SOCKET` imports what notebooks import and forks a kernel for each request;
`... kernels.py -f CONNECTION_FILE` is one kernel.
"""

from __future__ import annotations

import sys


def preload() -> None:
    """Import what a notebook imports; matplotlib reads its fonts, too."""
    import ipykernel.kernelapp
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg

    import study.report.questions  # noqa: F401


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
