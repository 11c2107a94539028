"""Firefox, headless, by Marionette: its protocol for tests, JSON over TCP. Playwright starts only a patched one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Any free port, which Firefox writes to its profile; and no request of Firefox itself.
PREFERENCES = {
    "marionette.port": 0,
    "app.normandy.enabled": False,
    "app.update.disabledForTesting": True,
    "browser.safebrowsing.update.enabled": False,
    "datareporting.healthreport.uploadEnabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",
    "toolkit.telemetry.server": "data:,",
}
_START_S = 120


class Firefox:
    """One window."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")
        self._last = 0
        self._read()
        self._send("WebDriver:NewSession", {})

    def _read(self) -> Any:
        length = b""
        while (byte := self._file.read(1)) != b":":
            assert byte, "Firefox has ended"
            length += byte
        return json.loads(self._file.read(int(length)))

    def _send(self, command: str, arguments: dict[str, Any]) -> Any:
        self._last += 1
        text = json.dumps([0, self._last, command, arguments]).encode()
        self._file.write(b"%d:%s" % (len(text), text))
        self._file.flush()
        _, number, error, result = self._read()
        assert (number, error) == (self._last, None), error
        return result

    def open(self, url: str) -> None:
        self._send("WebDriver:Navigate", {"url": url})

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        return self._send("WebDriver:ExecuteScript", {"script": f"return {expression}", "args": []})["value"]

    def resize(self, width: int, height: int) -> None:
        self._send("WebDriver:SetWindowRect", {"width": width, "height": height})

    def wait(self, condition: str, seconds: float) -> None:
        """Wait until an expression on the page is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} is not true after {seconds} s"
            time.sleep(0.1)


def find_firefox() -> str | None:
    return shutil.which("firefox-esr") or shutil.which("firefox")


@contextlib.contextmanager
def firefox(executable: str, folder: Path) -> Iterator[Firefox]:
    """Start Firefox with a new profile in the folder; end it afterwards."""
    lines = [f'user_pref("{name}", {json.dumps(value)});\n' for name, value in PREFERENCES.items()]
    (folder / "user.js").write_text("".join(lines))
    command = [executable, "--headless", "--marionette", "--no-remote", "--profile", str(folder)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield Firefox(_connect(process, folder / "MarionetteActivePort"))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def _connect(process: subprocess.Popen[bytes], file: Path) -> socket.socket:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        assert process.poll() is None, "Firefox has ended"
        with contextlib.suppress(OSError, ValueError):
            return socket.create_connection(("127.0.0.1", int(file.read_text())), timeout=_START_S)
        time.sleep(0.1)
    raise AssertionError(f"Firefox does not listen after {_START_S} s")
