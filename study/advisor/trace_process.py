"""Traces of models for `study serve` in one separate process: the server answers meanwhile, and imports no torch.

Its requests and answers are lines of JSON on its stdin and stdout. It ends with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from study.config.errors import UserError, first_line, refusal_from_json
from study.config.places import IMPORT_ROOT
from study.predictor import live

# A newer process replaces one that has more, whose memory its allocator keeps.
MAX_TRACES = 200


class TraceProcess:
    """The process, which starts with the first trace. It runs one at a time; callers wait for their turn."""

    def __init__(self) -> None:
        # A list of one page for each trace that is asked for; the first one runs.
        self._turns: list[list[str]] = []
        self._moved = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._traces = 0
        self._is_closed = False

    def trace(self, request: tuple[Any, ...], page: str) -> dict[str, Any]:
        """Return what find_trace reads: the result of `live.answer` to these arguments, or its error."""
        try:
            with self._turn(page):
                return dict(json.loads(self._ask(json.dumps(request))))
        except UserError as refusal:
            return {"refusal": refusal.to_json()}

    def ahead(self, page: str) -> int:
        """Return the number of traces before that of a page; 0 while its own runs, or without one."""
        with self._moved:
            return next((place for place, turn in enumerate(self._turns) if page in turn), 0)

    @contextlib.contextmanager
    def _turn(self, page: str) -> Iterator[None]:
        turn = [page]
        with self._moved:
            self._turns.append(turn)
            self._moved.wait_for(lambda: self._turns[0] is turn)
        try:
            yield
        finally:
            with self._moved:
                del self._turns[0]
                self._moved.notify_all()

    def _ask(self, request: str) -> str:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{request}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._end()
            raise UserError("the process that traces models has ended", "ask again, with more memory free")
        self._traces += 1
        if self._traces >= MAX_TRACES:
            self._end()
        return line

    def _running(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise UserError("study serve has ended", "start it again")
        if self._process is None:
            # Ctrl-C ends the server, which ends this process. The working folder may have a user's files.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "study.advisor.trace_process"],
                cwd=IMPORT_ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._traces = 0
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                # A request that it did not read is not flushed.
                with contextlib.suppress(OSError):
                    stream.close()

    def close(self) -> None:
        """End the process, also during a trace."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._turn(""):
            self._end()


# It passes every `except Exception` of an answer.
class MissingTrace(BaseException):
    """The end of an answer that needs a trace: the arguments of `live.answer`."""

    def __init__(self, request: tuple[Any, ...]) -> None:
        super().__init__()
        self.request = request


def find_trace(traces: Mapping[tuple[Any, ...], dict[str, Any]], *request: Any) -> dict[str, Any]:
    """Return a trace; raise its UserError, any other error as one of the same name, and MissingTrace without it."""
    if request not in traces:
        raise MissingTrace(request)
    trace = traces[request]
    if "refusal" in trace:
        raise refusal_from_json(trace["refusal"])
    if "error" in trace:
        raise type(trace["error"], (Exception,), {})(trace["text"])
    return dict(trace["result"])


def main() -> None:
    """Answer the requests on stdin until it ends."""
    # Libraries print to stderr instead.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for request in sys.stdin:
            print(json.dumps(_answer(*json.loads(request))), file=answers, flush=True)


def _answer(kind: Any, document: str, rank: int | None, options: str) -> dict[str, Any]:
    try:
        return {"result": live.answer(kind, document, rank, options)}
    except UserError as refusal:
        return {"refusal": refusal.to_json()}
    except Exception as error:  # Any class of transformers, on tensors without data.
        return {"error": type(error).__name__, "text": first_line(error)}


if __name__ == "__main__":
    main()
