"""Locations of the project's files: in the checkout, or in the data of an installed wheel.

setup.py copies the files that the commands read into study/data/ of the wheel, under the paths that they have in the
checkout.
"""

from __future__ import annotations

import json
import shlex
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
# A folder for sys.path from which `study` can be imported.
IMPORT_ROOT = PACKAGE.parent
IS_CHECKOUT = (IMPORT_ROOT / "accelerate_configs").is_dir()
# Folder with accelerate_configs/, reports/ and notebooks/.
REPOSITORY = IMPORT_ROOT if IS_CHECKOUT else PACKAGE / "data"
# Folder in which runs start, and to which the paths of their flags are relative.
WORKING_FOLDER = REPOSITORY if IS_CHECKOUT else Path()
DISTRIBUTION = "zero-study"


def install_command(extras: str, options: str = "", missing: Iterable[str] = ()) -> str:
    """Return the pip command that installs extras of pyproject.toml, separated by commas.

    Missing packages are installed in their versions of constraints.txt.
    """
    return " ".join(filter(None, ["pip install", options, _project(extras), *tested_versions(missing)]))


def _project(extras: str) -> str:
    """Return this project with extras as pip's argument: the checkout, or that from which it was installed."""
    if IS_CHECKOUT:
        folder = "." if Path.cwd() == REPOSITORY else str(REPOSITORY)
        return f"-e {shlex.quote(f'{folder}[{extras}]')}"
    return shlex.quote(project_with_extras(_read_origin(), extras))


def project_with_extras(origin: dict[str, Any] | None, extras: str) -> str:
    """Return a requirement of the project with extras, from the document of PEP 610 that pip wrote of its origin.

    Without one a registry has the project. A file or folder that is gone was of a clone, which has the same files.
    """
    if origin is None:
        return f"{DISTRIBUTION}[{extras}]"
    address = urllib.parse.urlsplit(origin["url"])
    if address.scheme == "file":
        path = Path(urllib.parse.unquote(address.path))
        return f"{path if path.exists() else '.'}[{extras}]"
    kind = f"{vcs['vcs']}+" if (vcs := origin.get("vcs_info")) else ""
    revision = f"@{vcs['commit_id']}" if vcs else ""
    return f"{DISTRIBUTION}[{extras}] @ {kind}{origin['url']}{revision}"


def _read_origin() -> dict[str, Any] | None:
    """Return the document of PEP 610 of the installed project; None if it has none, as in a browser."""
    # Imported here: it imports email and zipfile, and every command imports this module.
    import importlib.metadata

    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        return None if text is None else dict(json.loads(text))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def tested_versions(names: Iterable[str]) -> list[str]:
    """Return NAME==VERSION of each package that constraints.txt has for this Python."""
    from packaging.requirements import Requirement

    # The calculator's page has no such file.
    file, pins = REPOSITORY / "constraints.txt", dict[str, str]()
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for requirement in (Requirement(line) for line in lines if line and not line.startswith("#")):
        if requirement.marker is None or requirement.marker.evaluate():
            pins[requirement.name] = f"{requirement.name}{requirement.specifier}"
    return [pins[name] for name in (name.replace("_", "-") for name in names) if name in pins]
