"""Write the project's results into a folder and compare two such folders, to check that a refactoring changes nothing.

    python tools/golden.py write DIR [--checkout PATH] [--without-engines]
    python tools/golden.py compare DIR_A DIR_B [--renames FILE]
    python tools/golden.py guard [--without-engines]    write runs/golden/TIME-COMMIT, compare it with the last one

`write` works in copies of a checkout, of this version or another, and uses the command line if it can. It writes the
results of tools/golden_requests.yaml, the claims, every committed report rebuilt from its records (without executing
notebooks; figures as the data that they draw), the generated pages, and two steps of every strategy on real engines.

`compare` prints file, key path, old and new value of each difference; the exit status is 1 if there are any. Numbers
are compared to the last digit. In prose (four words or more) only numbers and names between backticks are compared, in
order. Tables of Markdown are compared cell by cell, and items of a list by their id, name or strategy if it is unique.
An error is compared by its exit status and by the file, line or flag that it names. The renames map names in the first
folder to those in the second.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).resolve().parents[1]
REQUESTS = Path(os.environ.get("GOLDEN_REQUESTS", ROOT / "tools" / "golden_requests.yaml"))
RENAMES = ROOT / "tools" / "golden_renames.yaml"
KEPT = ROOT / "runs" / "golden"
LEFT_OUT = (".git", ".venv", "runs", "__pycache__", ".*_cache", "*.egg-info", "nvme_offload", "wheels")
TINY = (
    "--scale", "laptop", "--task", "gpt-wikitext", "--max_steps", "2", "--seq_length", "32", "--global_batch_size", "8",
    "--train_samples", "64", "--eval_samples", "8", "--logging_steps", "1",
)  # fmt: skip
# Keys of a run's record that differ between any two runs: times, memory of the process, paths.
_VOLATILE = re.compile(r"_s$|_s_|per_s|rss|memory|path|pid|commit|_at$")
_PLACE = re.compile(r"--[a-z][\w-]+|[\w./-]+\.(?:ya?ml|json|jsonl|md|csv)(?::\d+)?")
_GENERATED = re.compile(r"<!-- (\w+)[^>]*-->\n(.*?)\n<!-- end of \1 -->", re.DOTALL)


# Writing: each part runs in a separate process, in a copy of the checkout, with that copy's `study`.


def read_requests(kind: str) -> Iterator[str]:
    """Yield the commands of tools/golden_requests.yaml, with braces and stars expanded like in a shell."""
    for line in read_yaml(REQUESTS)[kind]:
        yield from (" ".join(words) for words in itertools.product(*map(_expanded, shlex.split(line))))


def _expanded(word: str) -> list[str]:
    if braces := re.search(r"\{([^}]*)\}", word):
        return [word.replace(braces[0], option) for option in braces[1].split(",")]
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def call(command: str) -> tuple[object, str, str]:
    """Run a `study` command in this process; return its exit status, standard output and standard error."""
    from study.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status: object = main(shlex.split(command))
        except SystemExit as leaving:
            status = leaving.code
        except Exception as error:  # A crash is a result too.
            status = f"{type(error).__name__}: {error}"
    return status, out.getvalue(), err.getvalue()


def answers(commands: Iterable[str]) -> dict[str, Any]:
    """Return each command's exit status, its output, and its document with --json."""
    results = {}
    for command in commands:
        status, printed, _ = call(command)
        document = call(f"{command} --json")[1]
        results[command] = {"status": status, "json": json.loads(document or "null"), "text": printed.splitlines()}
    return results


def write_requests(output: Path) -> None:
    """Write the results of the requests, a file for each subcommand."""
    for name, commands in itertools.groupby(read_requests("requests"), key=lambda command: command.split()[0]):
        write_json(output / f"{name}.json", answers(commands))


def write_refusals(output: Path) -> None:
    """Write the exit status of each wrong request, and the file, line or flag that its error names."""
    results: dict[str, Any] = {}
    status: object
    for command in read_requests("refusals"):
        if command.startswith("train "):
            words = [sys.executable, "study/train.py", *command.split()[1:]]
            ended = subprocess.run(words, capture_output=True, text=True, check=False)
            status, stderr = ended.returncode, ended.stderr
        else:
            status, _, stderr = call(command)
        problem = next((line for line in stderr.splitlines() if "error: " in line), "").partition(". To fix it: ")[0]
        place = _PLACE.search(problem.partition("error: ")[2])
        results[command] = {"status": status, "place": place and place[0]}
    write_json(output / "refusals.json", results)


def write_reports(output: Path) -> None:
    """Write each report with runs.parquet: its first page by `study report`, and all its tables and figures."""
    from matplotlib.figure import Figure
    from PIL import Image

    from study.records.frames import read_parquet
    from study.report import questions
    from study.report.site import build

    # Images and notebooks take most of the time, and neither is compared.
    blank = {"png": io.BytesIO(), "svg": io.BytesIO(b"<svg/>")}
    Image.new("RGB", (1, 1)).save(blank["png"], "png")
    cast(Any, Figure).savefig = lambda _, file, *, format="png", **_options: file.write(blank[format].getvalue())
    cast(Any, build).execute = lambda notebook, executed, *_: shutil.copy(notebook, executed)
    for folder in sorted(file.parent for file in Path("reports").glob("*/runs.parquet")):
        status, _, stderr = call(f"report {folder.name} --output made/{folder.name}")
        if status != 0:
            raise SystemExit(f"study report {folder.name} ended with {status}: {stderr}")
        shutil.copy(f"made/{folder.name}/summary.md", output / f"report_{folder.name}.md")
        records, results = read_parquet(folder), {}
        for question, answer in questions.answers(records).items():
            results[question.name] = {
                "headlines": [[headline.value, headline.words] for headline in answer.headlines],
                "table": table_rows(answer.table),
                "notes": list(answer.notes),
                "tables": {name: table_rows(make(records)) for name, make in question.tables.items()},
            }
        notebooks = {question.notebook for question in questions.answers(records) if question.notebook}
        results["figures"] = {name: drawn_by(Path("notebooks") / f"{name}.ipynb", folder) for name in sorted(notebooks)}
        write_json(output / f"report_{folder.name}.json", results)


def drawn_by(notebook: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the figures that a notebook's cells display with these records."""
    displayed: list[Any] = []
    names: dict[str, Any] = {"display": displayed.append}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names["records_dir"] = str(folder)
    drawings = [drawing for drawing in displayed if hasattr(drawing, "alt")]
    return [{"name": drawing.name, "alt": drawing.alt, "axes": drawn_data(drawing.figure)} for drawing in drawings]


def table_rows(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a frame by column name."""
    names = [": ".join(filter(None, name)) if isinstance(name, tuple) else str(name) for name in frame.columns]
    return [dict(zip(names, row, strict=True)) for row in frame.itertuples(index=False, name=None)]


def drawn_data(figure: Any) -> list[dict[str, Any]]:
    """Return the data and texts of a figure, in the units of its axes, without its layout."""
    return [
        {
            "title": axes.get_title() or axes.get_title("left"),
            "x": axes.get_xlabel(),
            "y": axes.get_ylabel(),
            "texts": [text.get_text() for text in axes.texts],
            "lines": [[line.get_label(), *map(list, line.get_data(orig=True))] for line in axes.lines],
            "bars": [patch.get_bbox().bounds for patch in axes.patches if hasattr(patch, "get_bbox")],
            "points": [collection.get_offsets().tolist() for collection in axes.collections],
            # Intervals are lines and bands are areas; markers (PathCollection) are points.
            "areas": [
                [path.vertices.tolist() for path in collection.get_paths()]
                for collection in axes.collections
                if not type(collection).__name__.startswith("PathCollection")
            ],
        }
        for axes in figure.axes
    ]


def write_pages(output: Path) -> None:
    """Write the claims, and each generated page by the command that makes it."""
    import pandas as pd

    write_json(output / "claims.json", json.loads(call("claims --json")[1]))
    for command in (
        "report.pages.prediction report",
        "report.pages.releases",
        "claims.page",
        "report.pages.readme",
        "cli autopsy report",
    ):
        subprocess.run([sys.executable, "-m", *f"study.{command}".split()], check=True, stdout=subprocess.DEVNULL)
    for page in (Path("README.md"), Path("reports/releases/causes.md"), *sorted(Path("docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        parts = [text] if "<!-- Made by" in text else [match[2] for match in _GENERATED.finditer(text)]
        (output / f"page_{page.name}").write_text("\n\n".join(parts), encoding="utf-8")
    for name in ("prediction", "autopsy"):
        shutil.copy(f"reports/{name}/summary.md", output / f"report_{name}.md")
    for name in ("scores", "league"):
        write_json(
            output / f"prediction_{name}.json", table_rows(pd.read_parquet(f"reports/prediction/{name}.parquet"))
        )
    write_json(output / "prediction_intervals.json", read_yaml(Path("study/predictor/intervals.yaml")))


def write_engines(output: Path) -> None:
    """Write the records of two steps of every strategy on two and on four ranks, in the forks that the tests use."""
    sys.path.insert(0, "tests")
    from forked import fork_ranks

    names = sorted(file.stem for file in Path("accelerate_configs").glob("*.yaml"))
    pairs = [f"{name} {ranks}" for name in names for ranks in ((1,) if name == "single" else (2, 4))]
    results: dict[str, Any] = {}
    for run in (*pairs, *read_requests("engines")):
        (strategy, ranks, *flags), folder = run.split(), Path.cwd() / "made" / run.replace(" ", "_")
        flags_of_folders = ["--output_dir", str(folder), "--nvme_path", str(folder.with_name("nvme"))]
        ended = fork_ranks(strategy, "study/train.py", *TINY, *flags, *flags_of_folders, ranks=int(ranks), timeout=600)
        results[run] = {"status": ended.returncode}
        for file in sorted(folder.glob("*.json*")) if ended.returncode == 0 else ():
            if file.stem in ("engine", "traffic", "summary", "steps", "evals"):
                results[run][file.stem] = [lasting(json.loads(line)) for line in _documents(file)]
    write_json(output / "engines.json", results)


def _documents(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    return text.splitlines() if file.suffix == ".jsonl" else [text]


def lasting(value: Any) -> Any:
    """Return the value without keys that differ between any two runs."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if not _VOLATILE.search(key)}
    return [lasting(item) for item in value] if isinstance(value, list) else value


# Engines are last, because they need all cores.
PARTS = {
    "reports": write_reports,
    "requests": write_requests,
    "pages": write_pages,
    "refusals": write_refusals,
    "engines": write_engines,
}


def write_json(file: Path, document: Any) -> None:
    """Write the document without the path of the copy."""
    text = json.dumps(
        document, indent=1, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value)
    )
    file.write_text(text.replace(f"{Path.cwd()}/", "").replace(str(Path.cwd()), ".") + "\n", encoding="utf-8")


def read_yaml(file: Path) -> Any:
    """Return the document of a YAML file."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def write_part(name: str, checkout: Path, output: Path) -> None:
    """Write one part from a temporary copy of the checkout."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        copy = Path(folder).resolve() / "checkout"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        (copy / "golden_files").mkdir()
        for file, text in read_yaml(REQUESTS)["files"].items():
            (copy / "golden_files" / file).write_text(text, encoding="utf-8")
        environment = os.environ | {
            "PYTHONPATH": str(copy),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
        }
        started = time.monotonic()
        subprocess.run([sys.executable, __file__, "part", name, str(output)], cwd=copy, env=environment, check=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def write(output: Path, checkout: Path, parts: Iterable[str]) -> None:
    """Write the parts of a checkout into a new folder."""
    output.mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: write_part(name, checkout, output), [name for name in parts if name != "engines"]))
    if "engines" in parts:
        write_part("engines", checkout, output)


# Comparison.

_ABSENT = "(absent)"
# Keys that identify an item of a list if their values are unique.
_IDENTITIES = ("id", "name", "key", "strategy", "Strategy", "Claim", "session")
_COUNTED = re.compile(r"`[^`]+`|(?<![\w.])[-+\u2212]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_PROSE_WORDS = 4


def renamed(value: Any, renames: Mapping[str, str]) -> Any:
    """Return the value with new names for its keys, its whole strings, and names between backticks."""
    if isinstance(value, dict):
        return {renames.get(key, key): renamed(item, renames) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, renames) for item in value]
    if isinstance(value, str) and value not in renames:
        return re.sub("`([^`]+)`", lambda match: f"`{renames.get(match[1], match[1])}`", value)
    return renames[value] if isinstance(value, str) else value


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield path, old and new value of each difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            place = f"{path}[{key}]" if re.search(r"\W", key) else f"{path}.{key}"
            yield from differences(old.get(key, _ABSENT), new.get(key, _ABSENT), place)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _differences_of_lists(old, new, path)
    elif isinstance(old, str) and isinstance(new, str):
        is_prose = _is_prose(old) or _is_prose(new)
        if old != new and counted(old, is_prose) != counted(new, is_prose):
            yield path, old, new
    # 1 and True are different values, 1 and 1.0 the same; NaN is equal to itself.
    elif isinstance(old, bool) != isinstance(new, bool) or (old != new and (old == old or new == new)):
        yield path, old, new


def _differences_of_lists(old: list[Any], new: list[Any], path: str) -> Iterator[tuple[str, object, object]]:
    if identity := next((name for name in _IDENTITIES if _names_each(name, old) and _names_each(name, new)), None):
        was, now = ({item[identity]: item for item in items} for items in (old, new))
        yield from differences(was, now, path)
        order, order_now = [name for name in was if name in now], [name for name in now if name in was]
        if order != order_now:
            yield f"{path} (order)", order, order_now
    elif old and new and all(isinstance(entry, str) for entry in (*old, *new)):
        # An added, removed or rewrapped line must not shift all others.
        is_prose = any(map(_is_prose, (*old, *new)))
        marks, marks_now = (
            [(mark, line) for line in lines for mark in counted(line, is_prose)] for lines in (old, new)
        )
        names, names_now = [mark for mark, _ in marks], [mark for mark, _ in marks_now]
        for kind, a, b, c, d in difflib.SequenceMatcher(None, names, names_now, autojunk=False).get_opcodes():
            if kind != "equal":
                yield path, _shown(marks[a:b]), _shown(marks_now[c:d])
    else:
        for place, pair in enumerate(itertools.zip_longest(old, new, fillvalue=_ABSENT)):
            yield from differences(pair[0], pair[1], f"{path}[{place}]")


def _shown(marks: Sequence[tuple[str, str]]) -> str:
    return f"{' '.join(mark for mark, _ in marks)} ({marks[0][1].strip()})" if marks else _ABSENT


def _names_each(name: str, items: list[Any]) -> bool:
    names = [item.get(name) for item in items if isinstance(item, dict)]
    return 0 < len(items) == len(set(map(str, names))) and all(isinstance(name_of_item, str) for name_of_item in names)


def _is_prose(text: str) -> bool:
    return len(text.split()) >= _PROSE_WORDS


def counted(text: str, is_prose: bool) -> list[str]:
    """Return the compared parts of a text: numbers and names between backticks of prose, else the whole text."""
    return [word.strip("`").rstrip(",") for word in _COUNTED.findall(text)] if is_prose else [text]


def markdown(text: str, renames: Mapping[str, str]) -> dict[str, Any]:
    """Return tables by their columns, with rows as cells by column, and the lines of prose in order."""
    tables: dict[str, list[dict[str, str]]] = {}
    prose: list[str] = []
    rows: list[dict[str, str]] | None = None
    head: list[str] = []
    for line in text.splitlines():
        cells = [renames.get(cell.strip(), cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            rows = None
            prose += [line] if line.strip() else []
        elif rows is None:
            head = [
                f"{name} {cells[:place].count(name) + 1}" if name in cells[:place] else name
                for place, name in enumerate(cells)
            ]
            title = ", ".join(head)
            rows = tables[f"{title} ({sum(table.startswith(title) for table in tables) + 1})"] = []
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            rows.append(dict(zip(head, cells, strict=True)))
    return {"tables": tables, "prose": prose}


def read(file: Path, renames: Mapping[str, str]) -> Any:
    """Return the renamed content of a JSON or Markdown file; `(absent)` if there is no such file."""
    if not file.is_file():
        return _ABSENT
    text = file.read_text(encoding="utf-8")
    return renamed(json.loads(text) if file.suffix == ".json" else markdown(text, renames), renames)


def compare(old: Path, new: Path, renames: Mapping[str, str]) -> int:
    """Print the differences and return their number."""
    files = sorted({file.relative_to(folder) for folder in (old, new) for file in folder.rglob("*") if file.is_file()})
    counts: dict[str, int] = {}
    rounded = 0
    for file in files:
        for path, was, now in differences(read(old / file, renames), read(new / file, {})):
            is_rounding = isinstance(was, float) and isinstance(now, float) and math.isclose(was, now, rel_tol=1e-12)
            print(f"{file}: {path.lstrip('.')}: {_brief(was)} -> {_brief(now)}{' (rounding)' * is_rounding}")
            rounded += is_rounding
            counts[str(file)] = counts.get(str(file), 0) + 1
    counts_by_file = "".join(f"; {count} in {file}" for file, count in counts.items())
    print(f"{sum(counts.values())} differences, {rounded} of them rounding, in {len(files)} files{counts_by_file}")
    return sum(counts.values())


def _brief(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}..."


def guard(parts: Iterable[str]) -> int:
    """Write the results of this checkout; return the number of differences from the latest earlier ones."""
    earlier = sorted(folder for folder in KEPT.glob("*") if folder.is_dir())
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    output = KEPT / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{commit}"
    write(output, ROOT, parts)
    print(f"written: {output}; {f'compared with {earlier[-1].name}' if earlier else 'there is no earlier one'}")
    return compare(earlier[-1], output, read_yaml(RENAMES)) if earlier else 0


def main() -> int:
    """Run the requested action; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="write|compare|guard")
    writing, comparing, guarding, part = (actions.add_parser(name) for name in ("write", "compare", "guard", "part"))
    part.add_argument("name", choices=PARTS)
    comparing.add_argument("folders", type=Path, nargs=2, metavar="DIR")
    comparing.add_argument("--renames", type=Path, default=RENAMES, metavar="FILE", help="old name: new name")
    for action in (writing, part):
        action.add_argument("output", type=Path, metavar="DIR")
    writing.add_argument("--checkout", type=Path, default=ROOT, metavar="PATH", help="by default this one")
    for action in (writing, guarding):
        action.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="by default all parts")
        action.add_argument("--without-engines", action="store_true", help="all but the runs of real engines")
    options = parser.parse_args()
    if options.action == "part":
        PARTS[options.name](options.output)
        return 0
    if options.action == "compare":
        return int(compare(options.folders[0], options.folders[1], read_yaml(options.renames)) > 0)
    parts = [name for name in options.only if name != "engines" or not options.without_engines]
    if options.action == "guard":
        return int(guard(parts) > 0)
    if options.output.exists():
        parser.error(f"{options.output} is there already: name a new folder")
    write(options.output.absolute(), options.checkout.resolve(), parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
