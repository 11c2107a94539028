from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from study.claims.published import TABLES, check_table, published_tables, read_table
from study.cli import main
from study.config.places import REPOSITORY


def table(tmp_path: Path, row: str, header: str = "model,gpus,strategy,gb,device") -> Path:
    file = tmp_path / "table.csv"
    file.write_text(f"{header}\n{row}")
    return file


BY_HAND = yaml.safe_load((REPOSITORY / "tests" / "data" / "published_tables.yaml").read_text())


def test_every_stored_table_has_its_source_and_is_judged_as_by_hand() -> None:
    tables = published_tables()
    assert {file.name: [row.plausibility for row in check_table(file)] for file in TABLES.iterdir()} == BY_HAND
    assert len(tables) == len(BY_HAND) == 16
    assert all(re.search(r"<https://\S+>|Document S\d", table.address) and table.note for table in tables)


ROWS = yaml.safe_load((REPOSITORY / "tests" / "data" / "table_rows.yaml").read_text())


@pytest.mark.parametrize("row", ROWS)
def test_a_row_moves_with_its_figures(tmp_path: Path, row: str) -> None:
    header = "model,gpus,strategy,gb,device" + ",trains" * ("adapters" in row)
    (only,) = check_table(table(tmp_path, row, header=header))
    assert only.plausibility == ROWS[row]


def test_strategies_are_found_under_the_names_that_tables_use(tmp_path: Path) -> None:
    strategies = {
        "ZeRO-0 (Baseline DDP)": "zero0",
        "Baseline (No ZeRO)": "ddp",
        "Stage 2": "zero2",
        "zero1": "zero1",
        "ZeRO-3 + CPU Offload": "zero3_cpu",
        "ZeRO-3 + NVMe Offload": "zero3_nvme",
        "fsdp2": "fsdp2",
        "ZeRO-2 with optimizer offload": "zero2_cpu",
        # The paper's is of stage 2.
        "ZeRO-Offload": "zero2_cpu",
        "FSDP (full shard)": "fsdp2",
    }
    rows = read_table(table(tmp_path, "\n".join(f"7B,8,{label},100," for label in strategies)))
    assert [row.strategy for row in rows] == list(strategies.values())


def test_a_preset_has_its_parameters_under_the_name_that_people_write(tmp_path: Path) -> None:
    names = ("llama-2-7b", "Llama-2-7B", "Llama 2 7B", "meta-llama/Llama-2-7b-hf")
    rows = read_table(table(tmp_path, "\n".join(f"{name},4,zero3,27," for name in names)))
    # Not 7 B.
    assert [row.parameters for row in rows] == [6_738_415_616] * len(names)


WRONG_TABLES = yaml.safe_load((REPOSITORY / "tests" / "data" / "wrong_tables.yaml").read_text())


@pytest.mark.parametrize("wrong", WRONG_TABLES)
def test_a_table_that_is_not_understood_is_refused_in_one_line(tmp_path, capsys, wrong):
    file = tmp_path / "table.csv"
    command = ["claims", "check-table", str(file)]
    assert main(command) == 2
    assert f"{file} is not readable" in capsys.readouterr().err
    file.write_text(wrong["table"])
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert wrong["says"] in err
    assert str(file) + (f":{wrong['line']}" if wrong["line"] else "") in err


def test_json_has_every_row_with_its_floors(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(TABLES / "s0_memory.md")
    assert main(["claims", "check-table", file, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["plausibility"] for row in rows] == ["suspicious", "possible", "possible"]
    assert rows[0]["row"]["parameters"] == 9241705984
    assert rows[0]["adam_gb"] == pytest.approx(147.87, abs=0.01)
    assert main(["claims", "check-table", file]) == 0
    assert capsys.readouterr().out.startswith("1 suspicious, 2 possible of 3 rows\nline ")
