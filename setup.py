"""Build steps: a wheel has the files of the checkout that commands read as study/data/ (config/places.py)."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

DATA = (
    "accelerate_configs/*.*",
    "accelerate_configs/deepspeed/*.json",
    "constraints.txt",
    "notebooks/*.ipynb",
    "reports/*/*.parquet",
    "reports/checkpoints/memory.json",
    "reports/engine_keys/keys.json",
)


def find_data():
    """Return the files of DATA."""
    return [file for pattern in DATA for file in sorted(Path().glob(pattern))]


class BuildWithData(build_py):
    """Treats DATA as data of the package."""

    def _get_data_files(self):
        files = find_data()
        folders = dict.fromkeys(file.parent for file in files)
        target = Path(self.build_lib) / "study" / "data"
        return [
            *super()._get_data_files(),
            *(
                ("study", str(folder), str(target / folder), [file.name for file in files if file.parent == folder])
                for folder in folders
            ),
        ]


class SourceWithData(sdist):
    """Adds DATA: pip and `python -m build` make the wheel from the source distribution."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, [*files, *map(str, find_data())])


setup(cmdclass={"build_py": BuildWithData, "sdist": SourceWithData})
