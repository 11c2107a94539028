"""Locations of the project's files: in the checkout, or in the data of an installed wheel.

setup.py copies the files that the commands read into study/data/ of the wheel, under the paths that they have in the
checkout.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# A folder for sys.path from which `study` can be imported.
IMPORT_ROOT = PACKAGE.parent
IS_CHECKOUT = (IMPORT_ROOT / "accelerate_configs").is_dir()
# Folder with accelerate_configs/, reports/ and notebooks/.
REPOSITORY = IMPORT_ROOT if IS_CHECKOUT else PACKAGE / "data"
# Folder in which runs start, and to which the paths of their flags are relative.
WORKING_FOLDER = REPOSITORY if IS_CHECKOUT else Path()


def install_command(extras: str, options: str = "") -> str:
    """Return the pip command that installs extras of pyproject.toml, separated by commas."""
    project = f"-e '.[{extras}]'" if IS_CHECKOUT else f"'zero-study[{extras}]'"
    return " ".join(filter(None, ["pip install", options, project]))
