"""Rebuild the reports in git from their records: `make reports`.

Pages, notebooks and images are files that git ignores; a summary and its figures are in git, and `git status` shows
what changed there. A second call rebuilds only the reports whose inputs changed: their records, the code, or a file
that the report wrote.

python tools/reports.py [NAME ...]      all of them by default
python tools/reports.py --all           also those that are up to date
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from study.claims.command import dependent_claims
from study.claims.ledger import committed_ledger
from study.config.places import REPOSITORY
from study.experiments.autopsy import page as autopsy
from study.experiments.autopsy.contrasts import FILE as ARMS_FILE
from study.predictor import recorded_runs
from study.records.frames import RUNS_FILE, read_parquet
from study.report.site import build, command
from study.report.site.publishing import LIST, PAGES_LIST, READING

REPORTS = REPOSITORY / "reports"
# Digests of the inputs and of the files of each report.
STAMPS = REPOSITORY / "runs" / "reports.json"
# Reports are built in two processes, each with one kernel at a time.
_PROCESSES = 2
_SOURCES = (
    "study/**/*.py",
    "study/**/*.yaml",
    "study/**/*.json",
    "study/report/site/templates/*",
    "notebooks/*.ipynb",
    "tools/reports.py",
    "constraints.txt",
)
_RECORDS = ("*.parquet", "*.json", "*.csv", READING)


def names() -> list[str]:
    """Return the reports that are built from tables of runs or of the autopsy, the largest first."""
    # A build that was killed leaves a hidden folder.
    tables = [file for kind in (RUNS_FILE, ARMS_FILE) for file in REPORTS.glob(f"[!.]*/{kind}")]
    return [file.parent.name for file in sorted(tables, key=lambda file: -file.stat().st_size)]


def rebuild(name: str) -> str:
    """Build one report in its folder and return the notebooks that failed, with the reasons."""
    output = REPORTS / name
    if (output / ARMS_FILE).is_file():
        autopsy.build(REPOSITORY / "runs" / "none", output, runs_named=False)
        return ""
    records = read_parquet(output)
    failures = build.build(
        records, name, output, claims=dependent_claims(records, name, output), title=command.title_of(name), kernels=1
    )
    return "; ".join(f"{notebook}: {why}" for notebook, why in failures.items())


def stamp(name: str, sources: str) -> dict[str, str]:
    """Return digests of the inputs and of the files of a report."""
    folder = REPORTS / name
    records = [file for pattern in _RECORDS for file in folder.glob(pattern) if file.name not in (LIST, PAGES_LIST)]
    if name == recorded_runs.GPU:
        # Its virtual ranks are compared with those on CPUs.
        records += [REPORTS / suite / RUNS_FILE for suite in recorded_runs.SUITES]
    return {"sources": sources, "records": digest(records), "files": digest(_listed_files(folder))}


def _listed_files(folder: Path) -> Iterator[Path]:
    """Yield the files that the lists of a report name."""
    for name in (LIST, PAGES_LIST):
        if (folder / name).is_file():
            yield from (folder / file for file in json.loads((folder / name).read_text(encoding="utf-8"))["files"])


def digest(files: Iterable[Path]) -> str:
    """Return one digest of the names and contents of files; a missing file has a special digest."""
    parts = hashlib.sha256()
    for file in sorted(set(files)):
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"
        parts.update(f"{file.relative_to(REPOSITORY)} {content}\n".encode())
    return parts.hexdigest()


def main() -> int:
    """Rebuild the reports that are out of date; return 1 if a notebook failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="reports to build; all of them by default")
    parser.add_argument("--all", action="store_true", help="also reports that are up to date")
    options = parser.parse_args()
    unknown = sorted({*options.names} - {*names()})
    if unknown:
        parser.error(f"no report {unknown[0]} with records in reports/; there are {', '.join(sorted(names()))}")
    sources = digest(file for pattern in _SOURCES for file in REPOSITORY.glob(pattern))
    stamps = json.loads(STAMPS.read_text(encoding="utf-8")) if STAMPS.is_file() else {}
    chosen = [name for name in names() if not options.names or name in options.names]
    stale = [name for name in chosen if options.all or stamps.get(name) != stamp(name, sources)]
    start, failed = time.monotonic(), False
    # The ledger is read before the fork, so both processes have it.
    committed_ledger()
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(_PROCESSES, mp_context=fork) as pool:
        for name, failure in zip(stale, pool.map(rebuild, stale), strict=True):
            print(f"{name}: {failure or 'rebuilt'}", flush=True)
            failed = failed or bool(failure)
            if not failure:
                stamps[name] = stamp(name, sources)
    STAMPS.parent.mkdir(exist_ok=True)
    STAMPS.write_text(json.dumps(stamps, indent=1) + "\n", encoding="utf-8")
    print(f"{len(stale)} of {len(chosen)} reports rebuilt in {time.monotonic() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
