"""The bytes in records, compared with the counters of a loopback interface: tools/count_bytes.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from engines import ROOT


def counted(folder: Path, *arguments: str, timeout: float) -> pd.DataFrame:
    file = folder / "bytes.csv"
    result = subprocess.run(
        [sys.executable, "tools/count_bytes.py", *arguments, "--csv", str(file), "--markdown"], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    rows = pd.read_csv(file)
    assert set(rows["state"]) <= {"ok", "unsupported"}
    assert "Recorded gloo bytes are" in (folder / "summary.md").read_text()
    return rows[rows["state"] == "ok"]


def assert_counted(rows: pd.DataFrame) -> None:
    """Assert agreement within 1 %, without the 52 bytes that TCP and IP add to each packet and acknowledgement.

    A segment that TCP sends again has at most 64 KiB; which of the two runs repeated it is not counted.
    """
    counted = rows["counted_bytes"] - 52 * rows["counted_packets"]
    repeated = rows["repeated_segments"] * 65_536
    within = (rows["gloo_bytes"] >= 0.99 * (counted - repeated)) & (rows["gloo_bytes"] <= 1.01 * (counted + repeated))
    assert within.all(), rows.assign(over=rows["gloo_bytes"] / counted).to_string()


@pytest.mark.alone
def test_gloo_bytes_of_a_record_are_those_of_the_loopback(tmp_path: Path) -> None:
    names = ["ddp", "zero1", "zero3", "fsdp2", "cp"]
    rows = counted(tmp_path, "--strategy", *names, "--ranks", "2", "--accumulation", "1", timeout=300)
    assert list(rows["strategy"]) == names
    assert_counted(rows)
    ring, sent = (rows.set_index("strategy")[key] for key in ("ring_bytes", "gloo_bytes"))
    # With NCCL stage 3 sends as much as DDP, as long as this model stays gathered.
    assert ring["zero3"] == pytest.approx(ring["ddp"], rel=1e-4)
    assert sent["zero3"] == pytest.approx(1.5 * sent["ddp"], rel=1e-4)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_gloo_bytes_of_every_strategy_are_those_of_the_loopback(tmp_path: Path) -> None:
    rows = counted(tmp_path, timeout=7000)
    assert len(rows) >= 2 * (18 + 20)
    assert_counted(rows)
