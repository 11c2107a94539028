"""Build step of the wheel: adds the files of the checkout that the commands read, as study/data/ (config/places.py)."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = (
    "accelerate_configs/*.*", "accelerate_configs/deepspeed/*.json", "constraints.txt", "notebooks/*.ipynb",
    "reports/*/*.parquet", "reports/checkpoints/memory.json", "reports/engine_keys/keys.json",
)  # fmt: skip


class BuildWithData(build_py):
    """Treats DATA as data of the package, so that both the wheel and the source distribution contain it."""

    def _get_data_files(self):
        files = [file for pattern in DATA for file in sorted(Path().glob(pattern))]
        folders = dict.fromkeys(file.parent for file in files)
        target = Path(self.build_lib) / "study" / "data"
        return [
            *super()._get_data_files(),
            *(("study", str(folder), str(target / folder), [file.name for file in files if file.parent == folder])
              for folder in folders),
        ]  # fmt: skip


setup(cmdclass={"build_py": BuildWithData})
