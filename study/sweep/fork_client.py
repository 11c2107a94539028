"""Stands in for a launcher: asks a fork server for a run, and ends as the run does.

    python -ES study/sweep/fork_client.py SOCKET REQUEST

It needs nothing but the standard library. Whoever ends it ends the run: the server sees it hang up.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path


def main(address: str, file: str) -> int:
    request = json.loads(Path(file).read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        request["port"] = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        status = json.loads(connection.recv(64) or b"1")
    if status < 0:
        # As torch's launcher says it, which is where the sweep looks for it.
        print(f"  exitcode  : {status}", flush=True)
    return status if status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
