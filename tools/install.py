"""`pip install` through uv, which takes a fifth of the time, with pip's settings; through pip if uv fails.

python tools/install.py [ARGUMENTS OF pip install ...]
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

# uv reads none of pip's settings. With several indexes pip takes a package from any of them, and uv only with the index
# strategy below.
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
}
PIP = [sys.executable, "-m", "pip"]
# Packages of isolated builds are pinned, too.
os.environ |= {"UV_BUILD_CONSTRAINT": "constraints.txt", "PIP_BUILD_CONSTRAINT": "constraints.txt"}


def settings_for_uv(listed: str) -> dict[str, str]:
    """Return uv's variables for the lines of `pip config list`; a later line overrides earlier ones, as in pip."""
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        if variable := SETTINGS.get(name.rpartition(".")[2]):
            words = ast.literal_eval(value).split()
            variables[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(words)
    return variables


def main(arguments: list[str]) -> int:
    """Install with uv, else with pip; return the exit status."""
    if subprocess.run([*PIP, "install", "--quiet", "-c", "constraints.txt", "uv"]).returncode == 0:
        listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *arguments]
        if subprocess.run(command, env=settings_for_uv(listed) | os.environ).returncode == 0:
            return 0
        print("uv failed: installing with pip", file=sys.stderr)
    return subprocess.run([*PIP, "install", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
