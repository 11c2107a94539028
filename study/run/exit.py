"""How a launched script ends where no record tells of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


def exit_status_of(main: Callable[[], int]) -> int:
    """For `os._exit`: what is printed is flushed, and a refused request is a status like any other."""
    interruptions = []

    def interrupt(number: int, frame: object) -> None:
        interruptions.append(number)
        raise KeyboardInterrupt

    # Where a shell has it ignored it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        # Before there is a record. An import that was interrupted may end in any error.
        if not interruptions:
            raise
        print("interrupted: stopped from the keyboard. To go on: run it again.", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
