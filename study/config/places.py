"""Locations of the project's files: in the checkout, or in the data of an installed wheel.

setup.py copies the files that the commands read into study/data/ of the wheel, under the paths that they have in the
checkout.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# A folder for sys.path from which `study` can be imported.
IMPORT_ROOT = PACKAGE.parent
IS_CHECKOUT = (IMPORT_ROOT / "accelerate_configs").is_dir()
# Folder with accelerate_configs/, reports/ and notebooks/.
REPOSITORY = IMPORT_ROOT if IS_CHECKOUT else PACKAGE / "data"
# Folder in which runs start, and to which the paths of their flags are relative.
WORKING_FOLDER = REPOSITORY if IS_CHECKOUT else Path()


def install_command(extras: str, options: str = "", missing: Iterable[str] = ()) -> str:
    """Return the pip command that installs extras of pyproject.toml, separated by commas.

    Missing packages are installed in their versions of constraints.txt.
    """
    project = f"-e '.[{extras}]'" if IS_CHECKOUT else f"'zero-study[{extras}]'"
    return " ".join(filter(None, ["pip install", options, project, *tested_versions(missing)]))


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
