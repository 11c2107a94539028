"""What a command needs of its own process before it does anything: three streams, and a folder to stand in."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from study.errors import UserError


def check_process() -> None:
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # Closed, as by `>&-`. The next file to be opened would get its number, and what is printed.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
        # What a terminal of a narrow encoding cannot print is written as its number.
        stream = getattr(sys, name)
        if descriptor and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        Path.cwd()
    except OSError as error:
        # Left to itself the arithmetic library of torch ends the process, and says that it is not there.
        raise UserError(
            f"the folder in which this was started is not there ({error.strerror})", "change to one that is"
        ) from None
