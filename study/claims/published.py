"""Check of published tables of models, GPUs, strategies and gigabytes against the memory that each row needs."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from study.claims.forms import GB, parameter_bytes
from study.claims.verdicts import number
from study.config.errors import UserError
from study.config.strategies import STRATEGY_NAMES
from study.host.memory import GIB
from study.predictor.hardware import known_devices
from study.predictor.models import model_shape
from study.workloads.presets import find_base, find_preset

Plausibility = Literal["impossible", "suspicious", "possible"]
# Names of columns in published tables, lower case and letters only.
_COLUMNS = {
    "model": {"model", "modelsize", "parameters", "params", "size"},
    "gpus": {"gpus", "gpucount", "numberofgpus", "ranks", "worldsize", "n"},
    "strategy": {"strategy", "stage", "zerostage", "approach", "configuration", "method"},
    "gb": {"gb", "memory", "memorygb", "gbpergpu", "memorypergpu", "pergpumemory", "peak", "peakgb", "peakgpumemory"},
    "device": {"device", "gpu", "gpumemory", "devicegb"},
    "trains": {"trains", "tuning", "finetuning"},
}
# Bits per frozen weight if only adapters are trained.
_FROZEN_BITS = {"all": None, "adapters": 16, "adapters, 8-bit": 8, "adapters, 4-bit": 4}
TABLES = Path(__file__).with_name("tables")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One row of a published table, parsed."""

    line: int
    model: str
    parameters: float
    gpus: int
    strategy: str
    gb: float
    # Half a unit of the last digit.
    rounding_gb: float
    # Text of the cell.
    stated_gb: str
    is_out_of_memory: bool
    device_gb: float | None
    trains: str = "all"


@dataclasses.dataclass(frozen=True)
class CheckedRow:
    """A row with its verdict, and the memory that it needs."""

    row: PublishedRow
    plausibility: Plausibility
    # The minimum, and the memory of mixed-precision Adam; equal if only adapters are trained.
    least_gb: float
    adam_gb: float
    why: str


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    """One of `tables/`: its title, its address, a note on how it is read, and its checked rows."""

    title: str
    # In markdown.
    address: str
    note: str
    rows: tuple[CheckedRow, ...]


def published_tables(folder: Path = TABLES) -> list[PublishedTable]:
    """Read and check the tables of a folder."""
    tables = []
    for file in sorted(folder.glob("*.md")):
        title, address, *note = file.read_text(encoding="utf-8").partition("\n|")[0].split("\n\n")
        note_text = " ".join(" ".join(note).split())
        tables.append(PublishedTable(title.removeprefix("# "), address, note_text, tuple(check_table(file))))
    return tables


def check_table(file: Path) -> list[CheckedRow]:
    """Read and check one table."""
    return [check(row) for row in read_table(file)]


def check(row: PublishedRow) -> CheckedRow:
    """Compare the memory that a row states with the memory that it needs."""
    # Training without ZeRO may be pure 16-bit, like stage 0 here, and FSDP shards the same state as stage 3.
    stand_in = {"single": "zero0", "ddp": "zero0", "fsdp2": "zero3", "hsdp": "zero3"}.get(row.strategy, row.strategy)
    per_parameter = parameter_bytes(stand_in, row.gpus)
    least = row.parameters * (per_parameter.params_device + per_parameter.grads_device) / GB
    adam = row.parameters * per_parameter.device / GB
    needs, bits = "16-bit weights and gradients alone", _FROZEN_BITS[row.trains]
    if bits is not None:
        least = adam = row.parameters * per_parameter.params_device * bits / 16 / GB
        needs = f"frozen {bits}-bit weights alone"
    # The source may have written GiB as GB, so the figure counts as GiB.
    most = (row.gb + row.rounding_gb) * GIB / GB
    stated = f"{number(row.gb)} GB"
    verdict: Plausibility = "possible"
    if most < least:
        verdict, why = "impossible", f"{needs} are {number(least)} GB, and the row states {stated}"
    elif row.device_gb is not None and not row.is_out_of_memory and row.gb - row.rounding_gb > row.device_gb:
        verdict, why = "impossible", f"the device has {number(row.device_gb)} GB, and the row states {stated}"
    elif most < adam:
        verdict = "suspicious"
        why = f"mixed-precision Adam needs {number(adam)} GB, the row states {stated}: another optimizer or precision"
    elif bits is not None:
        why = f"{needs} are {number(least)} GB of {stated}"
    else:
        unit = ", read as GiB" if adam > row.gb + row.rounding_gb else ""
        why = f"mixed-precision Adam needs {number(adam)} GB of {stated}{unit}"
    return CheckedRow(row, verdict, least, adam, why)


def read_table(file: Path) -> list[PublishedRow]:
    """Read a CSV or markdown table; raise UserError with file and line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not readable ({error})", "name a CSV file or a markdown table") from None
    lines = [(place, line.strip()) for place, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("|")]
    # The row of dashes below the header has no cells.
    cells = [
        (place, [cell.strip() for cell in line.strip("|").split("|")])
        for place, line in lines
        if re.search(r"[^\s|:-]", line)
    ]
    if not lines:
        reader = csv.reader(text.splitlines())
        try:
            cells = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
        except csv.Error as error:
            raise UserError(f"{file}:{reader.line_num}: not CSV ({error})", "fix the row") from None
    if len(cells) < 2:
        raise UserError(f"{file} has no table", "write a line of column names, and one row per configuration")
    (place, header), *rows = cells
    names = [re.sub(r"[^a-z]", "", name.lower()) for name in header]
    columns = {key: names.index(name) for key, aliases in _COLUMNS.items() for name in names if name in aliases}
    for key in ("model", "gpus", "strategy", "gb"):
        if key not in columns:
            fix = "name the columns model, gpus, strategy, gb, device"
            raise UserError(f"{file}:{place}: no column has the {key}", fix)
    return [_row(row, columns, place, f"{file}:{place}") for place, row in rows]


def _row(cells: Sequence[str], columns: dict[str, int], line: int, place: str) -> PublishedRow:
    if len(cells) <= max(columns.values()):
        raise UserError(f"{place}: {len(cells)} cells, fewer than the columns", "fill the row")
    texts = {key: cells[column].strip() for key, column in columns.items()}
    ranks = re.match(r"(\d{1,3}(?:,\d{3})+|\d{1,9})(?![\d,.-])", texts["gpus"])
    gpus = int(ranks[1].replace(",", "")) if ranks else 0
    numbers = re.findall(r"\d[\d,.]*", texts["gb"])
    gb = re.fullmatch(r"(\d[\d,]{0,15})(?:\.(\d{1,9}))?", numbers[0]) if len(numbers) == 1 else None
    if gpus < 1:
        raise UserError(f"{place}: {texts['gpus']!r} is not a valid GPU count", "write an integer of at least 1")
    if gb is None:
        raise UserError(f"{place}: {texts['gb']!r} is not one size of memory", "write GB, such as 45 or 12.5")
    trains = texts.get("trains") or "all"
    if trains not in _FROZEN_BITS:
        raise UserError(f"{place}: {trains!r} is not a kind of training", f"write one of {'; '.join(_FROZEN_BITS)}")
    return PublishedRow(
        line,
        texts["model"],
        _parameters(texts["model"], place),
        gpus,
        _strategy(texts["strategy"], place),
        float(gb[0].replace(",", "")),
        0.5 * 10 ** -len(gb[2] or ""),
        texts["gb"],
        "oom" in texts["gb"].lower(),
        _device_gb(texts["device"], place) if texts.get("device") else None,
        trains,
    )


def _parameters(text: str, place: str) -> float:
    # Also by the name that people write: Llama-2-7B, Llama 2 7B.
    if (preset := find_preset(text) or find_base(text)) is not None:
        return float(model_shape(preset.name).parameters)
    size = re.search(r"(?<![\w.])(\d{1,15}(?:\.\d+)?)\s*([MBT])(?![a-z])", text, re.IGNORECASE)
    if size is None or not float(size[1]):
        fix = "write a preset of this study, or parameters such as 13B"
        raise UserError(f"{place}: {text!r} contains no model size", fix)
    return float(size[1]) * _UNITS[size[2].lower()]


def _strategy(text: str, place: str) -> str:
    if text in STRATEGY_NAMES:
        return text
    plain = text.lower()
    stage = re.search(r"(?:zero|stage)[ _-]*([0-3])(?!\d)", plain)
    if stage is None and re.search(r"\bddp\b|baseline|no zero|data.parallel", plain):
        return "ddp"
    if stage is None and re.search(r"\bfsdp", plain):
        return "fsdp2"
    name = f"zero{stage[1]}" if stage else ""
    if not name and re.search(r"zero[ _-]*offload", plain):
        # The paper's is of stage 2.
        name = "zero2"
    if "nvme" in plain:
        name += "_nvme"
    elif "cpu" in plain or "offload" in plain:
        # Of the two CPU offloads of stage 3, the one that uses less device memory.
        name += "_cpu"
    if name not in STRATEGY_NAMES:
        raise UserError(f"{place}: {text!r} is not a strategy of this study", f"use one of {', '.join(STRATEGY_NAMES)}")
    return name


def _device_gb(text: str, place: str) -> float:
    size = re.search(r"(\d+(?:\.\d+)?)\s*(?:GB|GiB)\b", text, re.IGNORECASE) or re.fullmatch(r"(\d+(?:\.\d+)?)", text)
    if size:
        return float(size[1])
    # Compare whole words: an A100 is not an A10, nor is a GH200 an H200.
    words = set(text.lower().split())
    devices = [(set(device.name.lower().split()), device.memory_gib) for device in known_devices()]
    sizes = {gib for name, gib in devices if words == name} or {gib for name, gib in devices if words <= name}
    if len(sizes) != 1:
        raise UserError(f"{place}: {text!r} is not a device of one size", "write its memory, such as 80 GB")
    return sizes.pop()
