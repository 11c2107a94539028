"""Build the folder of the calculator, three commands of `study` in a browser, for any web server.

    python tools/calculator/build.py FOLDER

Its files are static: the page, Pyodide (CPython compiled to WebAssembly), the project's modules, the wheels that
`study explain` needs, and answers that are shown while Python loads. Pyodide comes from npm's registry and the wheels
from Python's, once, and their digests are checked. Without a network PYODIDE names the archive of that release, and
WHEELS a folder with the wheels of wheels.txt.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from study.advisor.calculator import Calculator, page_files
from study.config.errors import UserError
from study.host.folders import cache_directory

ROOT = Path(__file__).resolve().parents[2]


class Package(NamedTuple):
    """An archive of npm's registry; its digest is that of `npm view NAME@RELEASE dist.integrity`."""

    name: str
    release: str
    sha512: str

    @property
    def variable(self) -> str:
        """Return the environment variable that names the archive where there is no network."""
        return self.name.upper().replace("-", "_")


PYODIDE = Package(
    "pyodide", "314.0.7", "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
)
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
# What `study advise` reads.
MODULES = (
    "study/__init__.py",
    *(
        f"study/{room}/"
        for room in ("config", "host", "records", "workloads", "predictor", "advisor", "releases", "compositions")
    ),
    "accelerate_configs/",
)
# What `study explain` reads settings with: pydantic's core is compiled for Pyodide, the others are pure Python. The
# versions are those of constraints.txt, which decide the words of findings.
WHEELS = Path(__file__).resolve().parent / "wheels.txt"
# Modules of pydantic for programs of its first version, and for mypy.
_UNUSED = ("pydantic/v1/", "pydantic/mypy.py")
# What a release of Pyodide accepts, its Python first.
_TARGET = (
    "--python-version=3.14",
    "--abi=cp314",
    "--implementation=cp",
    "--platform=pyemscripten_2026_0_wasm32",
)
# Large files that only other commands read.
_LEFT_OUT = ("published.yaml", "stacks.lock.json")
# Pure Python, so that nothing is compiled for WebAssembly.
LIBRARIES = ("yaml", "packaging")
# Questions whose answers are shown at once: model, GPUs, and flags in the order of the page's. People ask most about 7
# to 9 B on one node, in full and with LoRA, and on cards of 24 GB, one with QLoRA or two; then about 32 and 70 B (11 of
# the threads in tests/threads.yaml). GPT-2 XL and BERT-large are models of this study.
STORED = (
    ("llama-3.1-8b", "8xH100"),
    ("llama-3.1-8b", "4xA100"),
    ("llama-3.1-8b", "1xH100", "--peft", "lora"),
    ("llama-3.1-8b", "1x4090", "--peft", "lora", "--quantization", "4bit"),
    ("qwen3-8b", "8xH100"),
    ("qwen3-8b", "2x4090"),
    ("qwen3-32b", "8xH100"),
    ("mistral-7b-v0.3", "4xA100-40"),
    ("llama-3.1-70b", "8xA100"),
    ("llama-3.1-70b", "4x8xH100"),
    ("gpt2-xl", "1x4090"),
    ("bert-large-uncased", "1xT4"),
)


def main() -> int:
    """Build the folder; return 2 if Pyodide cannot be had."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    try:
        build(options.folder)
    except UserError as refusal:
        print(f"error: {refusal.problem}. To fix it: {refusal.fix}.", file=sys.stderr)
        return 2
    return 0


def build(folder: Path) -> None:
    """Write all files of the calculator."""
    runtime = folder / "pyodide"
    runtime.mkdir(parents=True, exist_ok=True)
    archive = fetch(PYODIDE)
    for name in RUNTIME:
        (runtime / name).write_bytes(read_member(archive, name))
    # What loadPyodide() compares with its own, instead of the list of all packages.
    info = json.loads(read_member(archive, "pyodide-lock.json"))["info"]
    (runtime / "info.json").write_text(json.dumps(info | {"version": PYODIDE.release}), encoding="utf-8")
    for file in page_files("static"):
        shutil.copyfile(file, folder / file.name)
    write_modules(folder / "study.zip")
    write_wheels(folder / "wheels.zip")
    (folder / "stored.json").write_text(json.dumps(stored_answers()), encoding="utf-8")


def read_member(archive: Path, name: str) -> bytes:
    """Return a file of an archive of npm's registry."""
    with tarfile.open(archive) as opened:
        member = opened.extractfile(f"package/{name}")
        assert member is not None, f"{archive} has no {name}"
        return member.read()


def fetch(package: Package) -> Path:
    """Return an archive from the cache, or fetch it; raise UserError without it or with another digest."""
    name, release = package.name, package.release
    fix = f"name the archive of npm's package {name}@{release}: {package.variable}=FILE"
    if file := os.environ.get(package.variable):
        return _checked(package, Path(file), fix)
    kept = cache_directory() / f"{name}-{release}.tgz"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                result = subprocess.run(
                    ["npm", "pack", "--silent", f"{name}@{release}"], cwd=scratch, capture_output=True, text=True
                )
            except OSError as error:
                raise UserError(f"{name} cannot be fetched: npm does not start ({error.strerror})", fix) from None
            if result.returncode:
                reason = (result.stderr.strip() or "npm pack failed").splitlines()[-1]
                raise UserError(f"{name} cannot be fetched: {reason}", fix)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(_checked(package, Path(scratch) / f"{name}-{release}.tgz", fix), kept)
    return _checked(package, kept, f"remove {kept}")


def _checked(package: Package, archive: Path, fix: str) -> Path:
    try:
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    except OSError as error:
        raise UserError(f"{archive} cannot be read ({error.strerror})", fix) from None
    if digest != package.sha512:
        raise UserError(f"{archive} is not {package.name} {package.release}: its digest is another one", fix)
    return archive


def wheels() -> list[Path]:
    """Return the wheels of wheels.txt from the cache, or fetch them; raise UserError without one."""
    digest = hashlib.sha256(WHEELS.read_bytes()).hexdigest()[:12]
    kept = cache_directory() / f"wheels-{digest}"
    if not kept.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            fetched = Path(scratch) / "wheels"
            source = ["--no-index", "--find-links", os.environ["WHEELS"]] if "WHEELS" in os.environ else []
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--require-hashes",
                "--no-deps",
                *_TARGET,
                "--only-binary",
                ":all:",
                "--dest",
                str(fetched),
                "--requirement",
                str(WHEELS),
                *source,
            ]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                reason = next((line for line in result.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
                fix = f"name a folder with the wheels of {WHEELS.relative_to(ROOT)}: WHEELS=FOLDER"
                raise UserError(f"the wheels of `study explain` cannot be fetched: {reason}", fix)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fetched, kept)
    return sorted(kept.glob("*.whl"))


def write_wheels(file: Path) -> None:
    """Write the modules and licences of all wheels as one archive, the same bytes each time."""
    with zipfile.ZipFile(file, "w", compresslevel=9) as archive:
        for wheel in wheels():
            with zipfile.ZipFile(wheel) as source:
                for name in sorted(source.namelist()):
                    is_module = name.endswith((".py", ".so")) and not name.startswith(_UNUSED)
                    if is_module or "/licenses/" in name:
                        archive.writestr(zipfile.ZipInfo(name), source.read(name), zipfile.ZIP_DEFLATED)


def write_modules(file: Path) -> None:
    """Write the project's modules and the libraries that they import as one archive, the same bytes each time."""
    with zipfile.ZipFile(file, "w", compresslevel=9) as archive:
        for name, path in sorted([*_project_files(), *_library_files()]):
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)


def _project_files() -> Iterator[tuple[str, Path]]:
    for part in MODULES:
        place = ROOT / part
        for path in [place] if place.is_file() else place.rglob("*"):
            if path.suffix in (".py", ".yaml", ".json") and path.name not in _LEFT_OUT:
                yield path.relative_to(ROOT).as_posix(), path


def _library_files() -> Iterator[tuple[str, Path]]:
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in folder.rglob("*.py"):
            yield f"{library}/{path.relative_to(folder).as_posix()}", path


def stored_answers() -> dict[str, object]:
    """Return the choices of the form, and the whole answers to the stored questions."""
    session = Calculator()
    answers = []
    for model, hardware, *flags in STORED:
        words = [model, "--hardware", hardware, *flags]
        about = json.loads(session.ask(json.dumps(words)))
        rows = {name: json.loads(session.best(name)) for name in about["names"]}
        answers.append({"words": words, "about": about, "rows": rows, "rank": json.loads(session.rank())})
    return {**json.loads(session.choices()), "answers": answers}


if __name__ == "__main__":
    sys.exit(main())
