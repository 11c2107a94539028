"""`study autopsy run` and `study autopsy report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from study.autopsy.design import SCALES, plan
from study.autopsy.run import check_box, open_folder, run_sessions
from study.config.errors import extra
from study.host.folders import folder_argument

REPORT = Path("reports") / "autopsy"
RUNS = Path("runs") / "autopsy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|report")
    run_parser = actions.add_parser("run", help="run what has no record yet; stop it at any time", allow_abbrev=False)
    boxes = "; ".join(f"{scale.name}: {scale.box}, {scale.minutes:g} min" for scale in SCALES.values())
    run_parser.add_argument("--scale", choices=SCALES, default="laptop", help=boxes)
    run_parser.add_argument("--retry", action="store_true", help="also what has failed")
    report_parser = actions.add_parser("report", help="make the page and its figures", allow_abbrev=False)
    for each in (run_parser, report_parser):
        each.add_argument("--runs", type=folder_argument, metavar="DIR", help=f"sessions; {RUNS} by default")
    report_parser.add_argument(
        "--output", type=folder_argument, default=REPORT, metavar="DIR", help=f"{REPORT} by default"
    )


def run(options: argparse.Namespace) -> int:
    if options.action == "run":
        scale = SCALES[options.scale]
        check_box(scale)
        folder = options.runs or (RUNS if scale.name == "laptop" else RUNS.with_name(f"autopsy-{scale.name}"))
        with open_folder(folder, scale) as lock:
            failed = run_sessions(folder, lock, scale, plan(scale), lambda line: print(line, flush=True), options.retry)
        print(f"to see it: study autopsy report{'' if folder == RUNS else f' --runs {folder}'}")
        return 1 if failed else 0
    with extra("report"):
        from study.autopsy.page import build
    print(build(options.runs or RUNS, options.output, runs_named=options.runs is not None))
    return 0
