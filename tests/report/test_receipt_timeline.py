"""Memory of a receipt's watched step over time: its moments, the picture, and the trace for Perfetto."""

from __future__ import annotations

import itertools
import json
import re
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest

from engines import ROOT
from study.cli import main
from study.receipt.changes import repeat_prediction
from study.receipt.document import MEMORY_PARTS, MemoryTimeline, Part, ReceiptDocument, read_receipt, write_receipt
from study.receipt.drawing import draw_timeline
from study.receipt.timeline import MAX_MOMENTS, MemoryLog, Parts, SplitMoment, thinned
from study.receipt.trace import trace_document

FILE = "tests/data/receipts/zero3.json"
MIB = 2**20


def read_example() -> tuple[ReceiptDocument, MemoryTimeline]:
    receipt = read_receipt(str(ROOT / FILE))
    assert receipt.timeline is not None
    return receipt, receipt.timeline


def make_parts(**counts: int) -> Parts:
    return dict.fromkeys(MEMORY_PARTS, 0) | counts


def test_between_two_splits_parts_change_evenly_and_activations_are_the_rest() -> None:
    log = MemoryLog()
    log.begin()
    log.add(110, make_parts(parameters=100))
    log.add_peak(200, make_parts(parameters=100, gradients=20, activations=70))
    log.enter_phase("backward")
    log.add(200, make_parts(parameters=100, gradients=20, activations=70))
    time.sleep(0.01)
    log.add(160, None)
    time.sleep(0.01)
    log.add(150, make_parts(parameters=100, gradients=40))
    timeline = log.timeline
    assert timeline is not None
    assert timeline.total_bytes == (110, 200, 200, 160, 150)
    assert timeline.parts["parameters"] == (100,) * 5
    assert timeline.parts["gradients"][3] == pytest.approx(30, abs=3)
    # Ten bytes belong to no part at any time.
    assert timeline.parts["activations"][3] == 160 - 10 - 100 - timeline.parts["gradients"][3]
    assert timeline.at_s[1] == timeline.peak_at_s
    assert [span.phase for span in timeline.phases] == ["between", "backward"]


def test_what_is_freed_between_two_phases_does_not_shrink_before() -> None:
    log = MemoryLog()
    log.begin()
    log.add_peak(200, make_parts(gradients=200))
    log.add(210, None)
    log.enter_phase("optimizer")
    log.add(0, make_parts())
    timeline = log.timeline
    assert timeline is not None
    assert timeline.parts["gradients"] == (200, 200, 0)
    assert timeline.parts["activations"] == (0, 10, 0)


def test_splits_take_at_most_a_tenth_of_the_time_and_small_changes_are_left_out() -> None:
    log = MemoryLog()
    log.begin()
    log.add_peak(1000, make_parts(activations=1000))
    splits = 0

    def split() -> Parts:
        nonlocal splits
        splits += 1
        time.sleep(0.002)
        return make_parts(activations=500)

    began = time.perf_counter()
    for number in range(50):
        time.sleep(0.001)
        log.note(1000 if number % 2 else 500, 1000, split)
        log.note(1001 if number % 2 else 501, 1000, split)
    elapsed = time.perf_counter() - began
    assert 1 <= splits <= 1 + 0.1 * elapsed / 0.002
    assert log.timeline is not None
    assert set(log.timeline.total_bytes) == {1000, 500}


def test_the_clock_is_stopped_while_the_receipt_works() -> None:
    log = MemoryLog()
    log.begin()
    with log:
        time.sleep(0.05)
        log.add_peak(1, make_parts())
    assert log.timeline is not None
    assert log.timeline.at_s[0] < 0.04


def test_a_long_step_keeps_its_peak_its_ends_and_the_extremes_of_each_stretch() -> None:
    rows = [SplitMoment(place / 10, 100 + (place * 7919) % 1000, make_parts()) for place in range(20_000)]
    rows[12_345] = rows[12_345]._replace(total_bytes=5000)
    thin_rows = thinned(rows, MAX_MOMENTS, rows[777].at_s)
    assert len(thin_rows) <= MAX_MOMENTS
    assert [row.at_s for row in thin_rows] == sorted({row.at_s for row in thin_rows})
    times = {row.at_s for row in thin_rows}
    assert {rows[place].at_s for place in (0, 777, 12_345, 19_999)} <= times
    assert min(row.total_bytes for row in thin_rows) == min(row.total_bytes for row in rows)
    assert thinned(rows[:10], MAX_MOMENTS, 0.0) == rows[:10]


def test_the_example_is_that_of_a_real_run_and_the_docs_show_it() -> None:
    receipt, timeline = read_example()
    assert receipt.memory is not None
    peak = timeline.at_s.index(timeline.peak_at_s)
    assert timeline.total_bytes[peak] == receipt.memory.total_bytes
    assert {part: column[peak] for part, column in timeline.parts.items()} == {
        part: count for part, count in receipt.memory.parts.items() if part in timeline.parts
    }
    picture = (ROOT / "docs" / "receipt_memory.svg").read_text(encoding="utf-8")
    assert picture == draw_timeline(receipt, timeline)
    assert "receipt_memory.svg" in (ROOT / "docs" / "receipt.md").read_text(encoding="utf-8")


def read_texts(picture: str) -> list[tuple[str, ElementTree.Element]]:
    root = ElementTree.fromstring(picture)
    return [(it.text or "", it) for it in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_has_parts_phases_and_peak_within_its_frame() -> None:
    receipt, timeline = read_example()
    picture = draw_timeline(receipt, timeline)
    texts = read_texts(picture)
    words = [text for text, _ in texts]
    assert {"forward", "backward", "peak 12.49 MiB", "gathered", "3.56 MiB", "other tensors", "MiB"} <= set(words)
    for text, element in texts:
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        width = 7.5 * len(text)
        anchor = element.attrib["class"].rpartition(" ")[2]
        begin = x - {"end": width, "middle": width / 2}.get(anchor, 0)
        assert begin > -12, text
        assert begin + width < 560 + 12, text
        assert 0 < y < float(ElementTree.fromstring(picture).attrib["height"])
    assert "prefers-color-scheme:dark" in picture
    assert len(picture) < 60_000


def test_a_name_of_a_model_is_escaped_in_the_picture() -> None:
    receipt, timeline = read_example()
    model = receipt.model.model_copy(update={"name": '<script>alert("x")</script>&'})
    picture = draw_timeline(receipt.model_copy(update={"model": model}), timeline)
    assert "<script" not in picture
    assert any("<script>" in text for text, _ in read_texts(picture))


@pytest.mark.parametrize("factor", [0, 1, 1000, 10**6])
def test_any_size_of_memory_has_an_axis_of_few_round_numbers(factor: int) -> None:
    receipt, timeline = read_example()
    counts = tuple(count * factor // 100 for count in timeline.total_bytes)
    timeline = timeline.model_copy(update={"total_bytes": counts, "parts": {}})
    labels = [text for text, it in read_texts(draw_timeline(receipt, timeline)) if it.attrib["class"] == "quiet end"]
    numbers = [text for text in labels if re.fullmatch(r"[\d,.]+", text)]
    assert 2 <= len(numbers) <= 6
    assert all(len(number) <= 5 for number in numbers)


class Metadata(Part):
    ph: Literal["M"]
    name: Literal["process_name", "thread_name"]
    pid: int
    tid: int
    ts: float
    args: dict[Literal["name"], str]


class Slice(Part):
    ph: Literal["X"]
    name: Literal["forward", "backward", "optimizer"]
    cat: str
    pid: int
    tid: int
    ts: pydantic.NonNegativeFloat
    dur: pydantic.PositiveFloat


class Counter(Part):
    ph: Literal["C"]
    name: str
    pid: int
    tid: int
    ts: pydantic.NonNegativeFloat
    args: dict[Literal["bytes"], pydantic.NonNegativeInt]


class Instant(Part):
    ph: Literal["i"]
    name: str
    s: Literal["p"]
    pid: int
    tid: int
    ts: pydantic.NonNegativeFloat
    args: dict[str, int]


Event = Annotated[Metadata | Slice | Counter | Instant, pydantic.Field(discriminator="ph")]


class Trace(Part):
    """The Trace Event Format, as Perfetto reads it."""

    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]
    traceEvents: list[Event]


def test_the_trace_has_the_events_that_perfetto_reads() -> None:
    receipt, timeline = read_example()
    trace = Trace.model_validate(json.loads(json.dumps(trace_document(receipt, timeline))))
    counters = defaultdict(list)
    for event in trace.traceEvents:
        if isinstance(event, Counter):
            counters[event.name].append((event.ts, event.args["bytes"]))
    assert set(counters) == {"all tensors", "other tensors", *timeline.parts} - {"other_tensors"}
    assert max(count for _, count in counters["all tensors"]) == max(timeline.total_bytes)
    for rows in counters.values():
        assert [ts for ts, _ in rows] == sorted(ts for ts, _ in rows)
        # Each counter lasts until the end of the step.
        assert rows[-1][0] == pytest.approx(1e6 * timeline.at_s[-1], abs=0.1)
    slices = [event for event in trace.traceEvents if isinstance(event, Slice)]
    assert [event.name for event in slices] == ["forward", "backward", "optimizer"]
    assert all(first.ts + first.dur <= second.ts + 0.2 for first, second in itertools.pairwise(slices))
    assert [event.name for event in trace.traceEvents if isinstance(event, Instant)] == ["peak of memory"]


def test_the_command_writes_both_and_prints_the_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "memory.svg", tmp_path / "memory.json"
    command = ["receipt", str(ROOT / FILE), "--timeline", str(picture), "--trace", str(trace)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("receipt of DeepSpeed stage 3")
    assert f"{picture}: memory of the watched step as a picture" in printed
    assert picture.read_text(encoding="utf-8") == draw_timeline(*read_example())
    assert Trace.model_validate_json(trace.read_text(encoding="utf-8"))
    assert main([*command, "--json"]) == 0
    assert ReceiptDocument.model_validate_json(capsys.readouterr().out) == repeat_prediction(read_example()[0])


def test_a_receipt_from_before_timelines_and_two_receipts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = str(ROOT / "tests/data/receipts/ddp.json")
    picture = str(tmp_path / "memory.svg")
    assert main(["receipt", older, "--timeline", picture]) == 2
    assert "has no memory timeline" in capsys.readouterr().err
    assert main(["receipt", older, str(ROOT / FILE), "--timeline", picture]) == 2
    assert "that of one receipt" in capsys.readouterr().err
    assert main(["receipt", str(ROOT / FILE), "--trace", str(tmp_path / "none" / "trace.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"total_bytes": (1,)}, "total_bytes has 1 values"),
        ({"parts": {"activations": (1, 2)}}, "activations has 2 values"),
        ({"at_s": (), "total_bytes": (), "parts": {}}, "the peak is at none of them"),
        ({"peak_at_s": -1.0}, "the peak is at none of them"),
    ],
)
def test_a_damaged_timeline_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], problem: str
) -> None:
    receipt, timeline = read_example()
    write_receipt(
        tmp_path / "receipt.json", receipt.model_copy(update={"timeline": timeline.model_copy(update=change)})
    )
    assert main(["receipt", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err
