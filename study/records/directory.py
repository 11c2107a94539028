"""The run directory: written by training, read by all other code.

Every document is written completely or not at all. study/records/models.py defines which values are valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from study.records.outcome import Outcome, outcome_from_status
from study.records.schema import SEAL, RecordError, State, validate, with_new_names

ROW_FILES = ("steps.jsonl", "evals.jsonl")
_DOCUMENTS = ("config", "environment", "engine", "summary", "memory", "traffic", "profile")
_SEALED_FILES = (*(f"{name}.json" for name in _DOCUMENTS), *ROW_FILES)
# Freed before the final status is written, so that a full disk can still record the outcome.
_ROOM, _ROOM_BYTES = ".status.json.room", 16384


def utc_now() -> str:
    """Return the time in UTC as ISO 8601, in seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document atomically: readers see the old or the new one, also after a power failure."""
    _replace(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def json_by_row(document: Mapping[str, Any]) -> str:
    """Return a document as JSON with a line for each entry of a list: a change of one is a change of one line."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            entries = ",\n".join(compact_json(entry) for entry in value)
            lines.append(f'"{key}":[\n{entries}\n]')
        else:
            lines.append(f'"{key}":{compact_json(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compact_json(value: object) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), 0o644)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_partial_write(name: str, document: str) -> bool:
    """Whether a file is left over from an interrupted write of this document, or reserves disk space for it."""
    return re.fullmatch(rf"\.{re.escape(document)}\.([a-z0-9_]{{8}}|ending|room)", name) is not None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, with old keys renamed; raises RecordError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(path, "is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(path, f"is not readable as JSON ({error})") from None
    if not isinstance(document, dict):
        raise RecordError(path, f"contains a {type(document).__name__} instead of an object")
    return with_new_names(document)


def finite_or_none(value: float | None) -> float | None:
    """Return a finite float, else None: JSON has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


class RunWriter:
    """Writer of a run directory, on the main process: documents, rows, and the final status.

    It writes through a descriptor of the directory. If the folder is moved, the run completes its record there, and not
    in a new folder of the same name.
    """

    def __init__(self, path: Path, *, rows_from: Path | None = None):
        """Start an attempt, with no rows or with those of the checkpoint folder that it resumes from."""
        self._streams: dict[str, IO[str]] = {}
        path.mkdir(parents=True, exist_ok=True)
        self._asked, self._descriptor = path, os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        # Also the record's folder after a move.
        path = self.folder = Path(f"/proc/self/fd/{self._descriptor}")
        # Written first, because a killed process cannot write it later. `close` replaces it.
        self.status = {
            "state": "interrupted",
            "reason": "the run has not ended, or was killed",
            "hint": "run it again",
            "attempt": read_attempt(path) + 1,
            "started_at": utc_now(),
            "ended_at": None,
            "cause": None,
            "not_finite_step": None,
        }
        self.write("status.json", self.status)
        for name in ("engine.json", "memory.json", "traffic.json", "profile.json", "summary.json"):
            (path / name).unlink(missing_ok=True)
        # Only files of a record are deleted; all others belong to the user.
        for leftover in path.iterdir():
            if any(is_partial_write(leftover.name, name) for name in ("status.json", *_SEALED_FILES)):
                leftover.unlink(missing_ok=True)
        (path / _ROOM).write_bytes(_ROOM_BYTES * b"\n")
        rows = read_rows(rows_from, complete=True) if rows_from else ([], [])
        for name, file_rows in zip(ROW_FILES, rows, strict=True):
            _replace(path / name, "".join(json.dumps(row) + "\n" for row in file_rows))

    def is_in_place(self) -> bool:
        """Whether the directory is still at its original path."""
        with contextlib.suppress(OSError):
            return self._asked.samefile(self.folder)
        return False

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        write_json(self.folder / name, document)

    def set_crash_hint(self, hint: str) -> None:
        """Set the hint for the case that the run is killed, unless another rank has already recorded an outcome."""
        self.status["hint"] = hint
        # Not checked, since the models of records would add 8 MiB to the memory of the run.
        if read_json(self.folder / "status.json")["ended_at"] is None:
            self.write("status.json", self.status)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._streams:
            self._streams[name] = (self.folder / name).open("a", encoding="utf-8")
        self._streams[name].write(json.dumps(row, allow_nan=False) + "\n")

    def flush(self) -> None:
        for stream in self._streams.values():
            stream.flush()

    def close(self, ending: Outcome) -> None:
        """Write the final status with the seal, and close all files."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        self._streams.clear()
        (self.folder / _ROOM).unlink(missing_ok=True)
        self.write("status.json", seal(self.folder, _ended(self.status, ending)))
        os.close(self._descriptor)


def _ended(status: Mapping[str, Any], ending: Outcome) -> dict[str, Any]:
    return {**status, **dataclasses.asdict(ending), "ended_at": utc_now()}


def seal(path: Path, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a closed record, with the digests of its files and of itself."""
    sealed = {**status, "files_sha256": digests(path)}
    content = json.dumps(sealed, sort_keys=True).encode()
    return sealed | {"status_sha256": hashlib.sha256(content).hexdigest()}


def is_sealed(status: Mapping[str, Any]) -> bool:
    """Whether a run closed its record; False if it was killed."""
    return status.keys() >= SEAL


def digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a record, except status.json, which contains them."""
    files = (path / name for name in _SEALED_FILES)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def end_interrupted_run(path: Path, ending: Outcome) -> None:
    """Record the outcome of an unfinished run, from any rank; only the first rank's reason is kept."""
    if not (path / "status.json").exists():
        return  # the main process has not opened the record yet
    (path / _ROOM).unlink(missing_ok=True)
    first_rank = path / ".status.json.ending"
    try:
        # Ranks fail together. The rank that creates this file records its reason.
        first_rank.touch(exist_ok=False)
    except FileExistsError:
        return
    try:
        if read_status(path)["ended_at"] is None:
            rewrite_outcome(path, ending)
    finally:
        first_rank.unlink()


def rewrite_outcome(path: Path, ending: Outcome) -> None:
    """Rewrite status.json with another outcome."""
    write_json(path / "status.json", _ended(read_status(path), ending))


@dataclasses.dataclass(frozen=True)
class Run:
    """Content of a run directory; documents that a failed run did not write are empty."""

    path: Path
    status: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    engine: dict[str, Any]
    summary: dict[str, Any]
    memory: dict[str, Any]
    traffic: dict[str, Any]
    # Empty if no step was profiled.
    profile: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]

    @property
    def state(self) -> State:
        state: State = self.status["state"]
        return state

    @property
    def ending(self) -> Outcome:
        return outcome_from_status(self.status)


def read_status(path: Path) -> dict[str, Any]:
    """Read and check status.json of a run directory; raises RecordError."""
    status = read_json(path / "status.json")
    validate(path / "status.json", status)
    return status


def read_attempt(path: Path) -> int:
    """Return the number of the last attempt; 0 without a readable record."""
    try:
        return int(read_status(path)["attempt"])
    except RecordError:
        return 0


def is_finished(path: Path) -> bool:
    """Whether the run directory has a successful run."""
    return (path / "status.json").exists() and read_status(path)["state"] == "ok"


def read_run(path: Path) -> Run:
    """Read and check a run directory; raises RecordError with the file and the reason."""
    status = read_status(path)
    complete = status["state"] == "ok"
    documents: dict[str, dict[str, Any]] = {}
    for name in _DOCUMENTS:
        file = path / f"{name}.json"
        # The profile is optional.
        required = complete and name != "profile"
        documents[name] = read_json(file) if required or file.exists() else {}
        if required or documents[name]:
            validate(file, documents[name])
    steps, evals = read_rows(path, complete)
    # The seal is checked last, because an invalid value is a better reason than a changed file.
    if complete and not is_sealed(status):
        raise RecordError(path / "status.json", "its seal is missing")
    if is_sealed(status):
        now = seal(path, {key: value for key, value in status.items() if key not in SEAL})
        if now != status:
            digests_now, sealed = now["files_sha256"], status["files_sha256"]
            changed = [name for name in sorted({*digests_now, *sealed}) if digests_now.get(name) != sealed.get(name)]
            raise RecordError(path / [*changed, "status.json"][0], "was changed after the run had closed its record")
    return Run(path=path, status=status, steps=steps, evals=evals, **documents)


def read_rows(path: Path, complete: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read steps.jsonl and evals.jsonl, without an incomplete last row of a killed run."""
    steps: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    for rows, file in zip((steps, evals), map(path.joinpath, ROW_FILES), strict=True):
        if not complete and not file.exists():
            continue
        try:
            *lines, torn = file.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            raise RecordError(file, "is missing") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(file, f"is not readable ({error})") from None
        if torn and complete:
            raise RecordError(file, "its last line is cut off")
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecordError(file, f"row {number} is not JSON ({error})") from None
            validate(file, row, number)
            rows.append(row)
    return steps, evals


def find_runs(root: Path) -> Iterator[Path]:
    """Yield every run directory below `root`, in the order of their names."""
    yield from sorted(file.parent for file in root.glob("**/status.json"))
