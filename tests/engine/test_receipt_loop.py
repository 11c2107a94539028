"""The batches of a receipt are those of the loader, in each pass and under each wrapper; a step encloses its block."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from engines import ROOT
from study import Receipt
from study.receipt.document import read_receipt

EPOCHS, BATCHES, ROWS, WIDTH = 4, 4, 2, 8


class Program:
    """A training of a few epochs, with dropout and a shuffled loader, whose receipt is at `path`; None without one."""

    def __init__(self, path: Path | None) -> None:
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-2)
        rows: Any = torch.randn(BATCHES * ROWS, WIDTH)
        self.loader: Any = DataLoader(rows, batch_size=ROWS, shuffle=True)
        self.losses: list[str] = []
        self.receipt: Receipt | None = None
        if path is not None:
            self.receipt = Receipt(self.layers, self.optimizer, path=path, quiet=True, after=2)
            self.loader = self.receipt.steps(self.loader)

    def train_step(self, row: torch.Tensor) -> None:
        loss = self.layers(row).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())


def whole_epochs(program: Program) -> None:
    for _ in range(EPOCHS):
        for row in program.loader:
            program.train_step(row)


def with_enumerate(program: Program) -> None:
    for epoch in range(EPOCHS):
        for number, row in enumerate(program.loader, start=epoch * len(program.loader)):
            assert number == len(program.losses)
            program.train_step(row)


def with_tqdm(program: Program) -> None:
    from tqdm import tqdm

    for _ in range(EPOCHS):
        progress = tqdm(program.loader, disable=True)
        assert len(progress) == BATCHES
        for row in progress:
            program.train_step(row)


def with_zip(program: Program) -> None:
    for _ in range(EPOCHS):
        for _, row in zip(range(len(program.loader)), program.loader, strict=True):
            program.train_step(row)


def with_a_break(program: Program) -> None:
    """The first two epochs end after two batches, the second of them within the measured steps."""
    for epoch in range(EPOCHS + 1):
        for number, row in enumerate(program.loader):
            program.train_step(row)
            if epoch < 2 and number == 1:
                break


def with_numbers_between(program: Program) -> None:
    """A loader draws its seed when the pass begins, not with the first batch."""
    for _ in range(EPOCHS):
        batches = iter(program.loader)
        torch.rand(3)
        for row in batches:
            program.train_step(row)


def endlessly(program: Program) -> None:
    """Programs that count steps begin a new pass at the end of the last one."""
    batches = iter(program.loader)
    while len(program.losses) < EPOCHS * BATCHES:
        try:
            row = next(batches)
        except StopIteration:
            batches = iter(program.loader)
            row = next(batches)
        program.train_step(row)


@pytest.mark.parametrize(
    "train",
    [whole_epochs, with_enumerate, with_tqdm, with_zip, with_a_break, with_numbers_between, endlessly],
)
def test_each_epoch_trains_as_that_of_the_loader(
    train: Callable[[Program], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, ours = Program(None), Program(tmp_path / "receipt.json")
    for program in (plain, ours):
        torch.manual_seed(6)
        train(program)
    assert ours.losses == plain.losses
    assert len(set(ours.losses)) == len(ours.losses) >= EPOCHS * BATCHES
    assert ours.receipt is not None
    ours.receipt.close()
    receipt = read_receipt(str(tmp_path))
    assert (receipt.state, receipt.failures) == ("complete", ())
    assert receipt.work.steps == len(ours.losses)
    assert "receipt: " not in capsys.readouterr().err


def make_receipt(**options: Any) -> tuple[Receipt, nn.Linear, torch.optim.Optimizer]:
    layer = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    return Receipt(layer, optimizer, quiet=True, **options), layer, optimizer


def test_batches_have_the_length_and_the_attributes_of_their_loader(tmp_path: Path) -> None:
    receipt, _, _ = make_receipt(path=tmp_path / "receipt.json")
    rows: Any = torch.randn(BATCHES * ROWS, WIDTH)
    loader: Any = DataLoader(rows, batch_size=ROWS, shuffle=True)
    steps: Any = receipt.steps(loader)
    assert (len(steps), steps.batch_size, steps.sampler is loader.sampler) == (BATCHES, ROWS, True)
    assert not receipt.steps([])
    with pytest.raises(AttributeError, match="no_attribute"):
        _ = steps.no_attribute
    without_length: Any = receipt.steps(row for row in rows)
    with pytest.raises(TypeError, match="generator"):
        len(without_length)
    assert without_length
    # A pass by next() alone, as over a generator.
    assert torch.equal(next(without_length), rows[0])
    assert len(list(without_length)) == len(rows) - 1
    receipt.close()


def with_parentheses(receipt: Receipt, train: Callable[[], None]) -> None:
    with receipt.step():
        train()


def without_parentheses(receipt: Receipt, train: Callable[[], None]) -> None:
    with receipt.step:
        train()


def decorated(receipt: Receipt, train: Callable[[], None]) -> None:
    receipt.step()(train)()


def decorated_without_parentheses(receipt: Receipt, train: Callable[[], None]) -> None:
    receipt.step(train)()


@pytest.mark.parametrize("enclose", [with_parentheses, without_parentheses, decorated, decorated_without_parentheses])
def test_a_step_encloses_its_block_in_each_way_that_python_has(
    enclose: Callable[[Receipt, Callable[[], None]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt, layer, optimizer = make_receipt(path=tmp_path / "receipt.json", after=1, steps=3)

    def train() -> None:
        layer(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()

    for _ in range(6):
        enclose(receipt, train)
    receipt.close()
    document = read_receipt(str(tmp_path))
    assert (document.state, document.work.steps, document.failures) == ("complete", 6, ())
    assert "receipt: " not in capsys.readouterr().err


def lines_at_exit(script: str, folder: Path) -> Iterable[str]:
    """Return a receipt's lines on standard error of a program that makes one and ends."""
    start = "import torch, study\nlayer = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(layer.parameters())\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{start}receipt = study.Receipt(layer, optimizer, quiet=True)\n{script}"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return _receipt_lines(done.stderr)


def _receipt_lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith("receipt: "))


def test_a_receipt_that_is_never_used_says_so_when_the_program_ends(tmp_path: Path) -> None:
    assert list(lines_at_exit("", tmp_path)) == [
        "receipt: wrong use: the receipt was made, and no step has begun: write `for batch in receipt.steps(loader):`,"
        " or `with receipt.step():` around each step; training goes on"
    ]
    # An error of the program is its own cause.
    assert list(lines_at_exit("raise ValueError('no data')", tmp_path)) == []
