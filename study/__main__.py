"""The `study` command, also as `python -m study`. Ctrl-C ends it without a traceback from its first import on."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; return its exit status."""
    try:
        from study.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 1


if __name__ == "__main__":
    sys.exit(main())
