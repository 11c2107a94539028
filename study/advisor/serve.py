"""`study serve`: the page of the calculator, which asks the Python of this machine instead of the browser's.

Other machines do not reach it, since it listens on the loopback address alone. Other users and other pages in the
browser do not either: each request must have the token of the printed address.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import hmac
import html
import http.server
import json
import re
import secrets
import signal
import sys
import tempfile
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from study.advisor.calculator import Calculator, page_files
from study.advisor.trace_process import MissingTrace, TraceProcess, find_trace
from study.config.errors import UserError, first_line
from study.predictor.hardware import parse_int
from study.predictor.live import TRACER
from study.records.outcome import Terminated, raise_on_signals

EPILOG = """\
The page is docs/advice.md's calculator. Models of any class of transformers are predicted where torch is installed. To
reach it on another machine: ssh -L 8000:127.0.0.1:PORT MACHINE, and the printed address with port 8000.
"""
ADDRESS = "127.0.0.1"
# Names under which a browser reaches this machine, also through an ssh tunnel. Another one is an attack by DNS.
_HOSTS = {"127.0.0.1", "localhost", "::1"}
# Files of 1 MB are the largest that `study explain` reads; in base64 a third is added.
MAX_BODY_BYTES = 8_000_000
# A page that is not among the newest asks its question again.
MAX_SESSIONS = 64
_TIMEOUT_S = 30
_CALLS = (
    "keep_config",
    "ask",
    "best",
    "rank",
    "changes",
    "what_ifs",
    "files",
    "explain",
    "releases",
    "traces_ahead",
)
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
# As in the page, without the WebAssembly that only the browser's Python needs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # The address has the token.
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_parse_port, default=0, metavar="P", help="by default a free one")
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")


def _parse_port(text: str) -> int:
    return parse_int(text, 65535, "port")


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; return 0."""
    # A folder of the process is removed on SIGTERM, too.
    with (
        make_server(options.port) as server,
        contextlib.suppress(KeyboardInterrupt),
        raise_on_signals(Terminated(), signal.SIGTERM),
    ):
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        with _opened(server.url) if options.open else contextlib.nullcontext():
            server.serve_forever()
    return 0


@contextlib.contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open an address in the browser by a private file: the arguments of its process are not secret."""
    with tempfile.TemporaryDirectory(prefix="study-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "calculator.html"
        file.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">', encoding="utf-8")
        if not webbrowser.open(file.as_uri()):
            print("no browser was found: open the address in one", file=sys.stderr)
        yield


def make_server(port: int = 0) -> Server:
    """Return a server that listens; raise UserError if the port is not available."""
    try:
        return Server(port)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise UserError(f"port {port} {reason}", "name another --port, or none for a free one") from None


class Server(http.server.ThreadingHTTPServer):
    """The page, its token, and one Calculator for each open page."""

    daemon_threads = True
    # Else two servers of Python 3.14 would share a port.
    allow_reuse_port = False

    def __init__(self, port: int) -> None:
        self._traces = TraceProcess()
        super().__init__((ADDRESS, port), _Handler)
        self.token = secrets.token_urlsafe()
        self._files = {file.name: file.read_bytes() for file in page_files("served")}
        choices = json.loads(Calculator().choices())
        # The answers that the static page has while its Python loads.
        self._files["stored.json"] = json.dumps({**choices, "answers": []}).encode()
        # By the random name of a page, the newest last.
        self._sessions = OrderedDict[str, Calculator]()
        # The process has one working folder.
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def find_file(self, name: str) -> tuple[bytes, str] | None:
        """Return a file of the page, and its type; None for any other name."""
        content = self._files.get(name)
        return None if content is None else (content, _TYPES[Path(name).suffix])

    def answer(self, session: str, call: str, words: list[str]) -> str:
        """Return the JSON of a call. Calls take turns, except for the question how many traces are before one's own.

        One that needs a trace ends there, and is repeated with it: the trace takes seconds, and others have their turn.
        """
        if call == "traces_ahead":
            return json.dumps({"ahead": self._traces.ahead(session)})
        traces = dict[tuple[Any, ...], dict[str, Any]]()
        TRACER.set(functools.partial(find_trace, traces))
        while True:
            try:
                return self._answer(session, call, words)
            except MissingTrace as missing:
                traces[missing.request] = self._traces.trace(missing.request, session)

    def _answer(self, session: str, call: str, words: list[str]) -> str:
        with self._lock:
            calculator = self._sessions.pop(session, None) or Calculator()
            self._sessions[session] = calculator
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
            result: str = getattr(calculator, call)(*words)
            return result

    def server_close(self) -> None:
        """Close the port, and end the process of traces."""
        super().server_close()
        self._traces.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a page that was closed before its answer."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a browser."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "study", ""
    timeout = _TIMEOUT_S
    # Else each answer waits 40 ms for the acknowledgement of its headers.
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def parse_request(self) -> bool:
        """Whether a request is to be answered; one without the token, or from another place, gets status 403."""
        if not super().parse_request():
            return False
        if self._is_allowed():
            return True
        self._reject(HTTPStatus.FORBIDDEN, "open the address that study serve has printed")
        return False

    def _is_allowed(self) -> bool:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        try:
            name = urlsplit(f"//{host}").hostname
            self._path = urlsplit(self.path).path
        except ValueError:
            return False
        if name not in _HOSTS or origin not in (None, f"http://{host}"):
            return False
        token, _, self._name = self._path.removeprefix("/").partition("/")
        return hmac.compare_digest(token.encode(), self.server.token.encode())

    def do_GET(self) -> None:
        """Send a file of the page."""
        if self._path == f"/{self.server.token}":
            # The page's files are relative to its folder.
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", f"/{self.server.token}/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        file = self.server.find_file(self._name or "index.html")
        if file is None:
            self._reject(HTTPStatus.NOT_FOUND, "the page has no such file")
        else:
            self._send(HTTPStatus.OK, *file)

    def do_POST(self) -> None:
        """Answer a call of the page."""
        length = self.headers.get("Content-Length", "")
        if self._name != "ask":
            self._reject(HTTPStatus.NOT_FOUND, "calls go to ask")
        elif self.headers.get_content_type() != "application/json":
            self._reject(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a call is JSON")
        elif not re.fullmatch("[0-9]{1,15}", length):
            self._reject(HTTPStatus.LENGTH_REQUIRED, "a call has a Content-Length")
        elif int(length) > MAX_BODY_BYTES:
            self._reject(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a call has at most {MAX_BODY_BYTES} bytes")
        else:
            self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        call = _read_call(body)
        if call is None:
            self._reject(HTTPStatus.BAD_REQUEST, "this is not a call of the page")
            return
        try:
            text = self.server.answer(*call)
        except (Exception, SystemExit) as error:  # Also transformers' own, for a config.json that it cannot build.
            self._reject(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {first_line(error)}")
        else:
            self._send(HTTPStatus.OK, text.encode(), "application/json")

    def _reject(self, status: HTTPStatus, text: str) -> None:
        """Send a text, and close the connection, since the rest of the request was perhaps not read."""
        self.close_connection = True
        self._send(status, text.encode(), "text/plain")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _read_call(body: bytes) -> tuple[str, str, list[str]] | None:
    """Return the page, the method and its words; None if the body is something else."""
    try:
        document = json.loads(body)
        session, method, words = document["session"], document["method"], document["words"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_session = isinstance(session, str) and re.fullmatch(r"[\w-]{1,64}", session)
    has_texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return (session, method, words) if is_session and has_texts and method in _CALLS else None
