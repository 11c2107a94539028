"""The README's first figure: the predicted memory of one GPU by part and strategy."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from typing import Any

import matplotlib
import pandas as pd

from study.advisor import predict_command
from study.config.text import rounded
from study.host.memory import GIB
from study.predictor.hardware import to_box
from study.predictor.time import usable_bytes
from study.report.canvas import (
    GUIDE,
    OTHER,
    SETTINGS,
    STATE,
    Drawing,
    Fill,
    as_svg,
    bars,
    finish,
    legend_of_fills,
    sheet_of_rows,
)

MEMORY_FIGURE = "docs/memory.svg"
MODEL, HARDWARE = "llama-3.1-8b", "4xA100"
STRATEGIES = (
    "ddp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "fsdp2",
    "zero2_cpu",
    "zero3_cpu_optimizer",
    "zero3_cpu",
)
# Parts of a prediction in the order of the bar.
_PARTS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "buffers": ("buffers",),
    "activations": ("activations", "logits", "attention"),
    "outside": ("context", "allocator", "fragmentation"),
}
_FILLS: dict[str, Fill] = {
    "parameters": STATE["params"],
    "gradients": STATE["grads"],
    "optimizer": STATE["optimizer"],
    "buffers": STATE["gathered"],
    "activations": OTHER,
    "outside": STATE["outside"],
}
_WORDS = {
    "buffers": "buffers, gathered weights",
    "activations": "activations and logits",
    "outside": "CUDA, NCCL, allocator",
}


def command(strategy: str) -> str:
    """Return the command whose answer is the bar of a strategy."""
    return f"study predict {MODEL} --strategy {strategy} --fitted --hardware {HARDWARE} --accumulation 16"


def predicted(strategy: str) -> dict[str, Any]:
    """Return the document that the command prints with --json."""
    parser, out = argparse.ArgumentParser(), io.StringIO()
    predict_command.add_arguments(parser)
    # The program and the command have no flags here.
    arguments = command(strategy).split()[2:]
    with contextlib.redirect_stdout(out):
        predict_command.run(parser.parse_args([*arguments, "--json"]))
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def combine_parts(document: dict[str, Any]) -> dict[str, float]:
    """Return the GiB of each part of a bar."""
    parts = document["memory"]["device_parts"]
    return {name: sum(parts[part] for part in names) / GIB for name, names in _PARTS.items()}


@matplotlib.rc_context(SETTINGS)
def memory_figure() -> Drawing:
    """Draw one bar per strategy, and the memory that a program can use of the card."""
    documents = {strategy: predicted(strategy) for strategy in STRATEGIES}
    parts = pd.DataFrame({strategy: combine_parts(document) for strategy, document in documents.items()}).T
    peaks = {strategy: rounded(document["device_bytes"] / GIB) for strategy, document in documents.items()}
    usable = usable_bytes(to_box(HARDWARE)) / GIB
    figure, (axes,) = sheet_of_rows(len(STRATEGIES))
    bars(axes, parts, _FILLS, peaks.values(), "GiB of one GPU at its peak, predicted", {})
    axes.axvline(usable, **GUIDE)
    axes.annotate(
        f"an A100 has {rounded(usable)}",
        (usable, len(STRATEGIES) - 1),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        size=9,
    )
    return finish(
        figure,
        "Memory of one GPU by strategy",
        "Llama 3.1 8B on 4 A100s of 80 GB, bf16, AdamW",
        "Micro-batch 1 of 2,048 tokens, accumulation 16, no checkpointing.",
        ", ".join(f"{name} {peak} GiB" for name, peak in peaks.items()),
        legend=legend_of_fills(_FILLS, _WORDS),
        legend_columns=2,
    )


def memory_svg() -> str:
    """Return the figure as it is committed."""
    return as_svg(memory_figure().figure)
