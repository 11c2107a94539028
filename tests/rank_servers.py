"""One server of forks for several tests: the imports of its engines are most of the time of a short session.

Its forks keep no state from one request to the next (study/compositions/forks.py).
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from types import TracebackType

import pytest

from study.compositions.session import RankServer

_start, _end = RankServer.__enter__, RankServer.__exit__
# By the module of the server.
_running: dict[str, RankServer] = {}


def _enter(server: RankServer) -> RankServer:
    """Give a session the process of an earlier one, if there is one."""
    if server._environment is not None:
        return _start(server)
    running = _running.get(server._module)
    if running is None or running._process.poll() is not None:
        running = _running[server._module] = _start(RankServer(server._module))
    server._folder, server._log, server._process = running._folder, running._log, running._process
    return server


def _exit(
    server: RankServer, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    if server._environment is not None:
        _end(server, kind, error, trace)
    elif error is not None and not isinstance(error, Exception):
        # Ctrl-C or a time limit came in the middle of a request.
        _end(_running.pop(server._module), kind, error, trace)


@atexit.register
def _end_all() -> None:
    while _running:
        _end(_running.popitem()[1], None, None, None)


@pytest.fixture(scope="module")
def one_server() -> Iterator[None]:
    """Start one process for all sessions of this module and of those before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankServer, "__enter__", _enter)
        patch.setattr(RankServer, "__exit__", _exit)
        yield
