from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Annotation, Text

from report_folders import drawn, figures, laptop
from study.config.places import REPOSITORY
from study.config.strategies import STRATEGY_NAMES, WITH_GROUPS
from study.records.frames import Records, read_parquet
from study.report import canvas
from study.report.canvas import STRATEGIES, Drawing, as_svg
from study.report.questions import QUESTIONS, TABLES
from study.report.questions.memory import NEIGHBOURS
from synthetic_records import answered

# The notebooks that the laptop's records have data for.
OF_THE_LAPTOP = ["loss_curves", "offload", "peak_memory", "runtime", "single_vs_multi"]
NOTEBOOKS = sorted({question.notebook for question in QUESTIONS if question.figures if question.notebook})
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
_TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_TO_OKLAB = (
    (0.2104542553, 0.793617785, -0.0040720468),
    (1.9779984951, -2.428592205, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.808675766),
)


def changed(**columns: object) -> Records:
    """Return the laptop's GPT records with these values in the columns of the zero3 run."""
    records = laptop()
    runs = records.runs[records.runs["model_name_or_path"] == "gpt-tiny"].copy()
    for column, value in columns.items():
        runs.loc[runs["strategy"] == "zero3", column] = value
    return dataclasses.replace(records, runs=runs)


def texts(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)).split())


@functools.cache
def laptops(notebook: str, *change: tuple[str, object]) -> dict[str, Drawing]:
    """Return a notebook's figures of the laptop's GPT records with these values for zero3."""
    return figures(notebook, changed(**dict(change)))


def is_cut_off(figure: Figure) -> bool:
    """Whether anything drawn is beyond an edge of the figure."""
    figure.draw_without_rendering()
    drawn_in, size_in = figure.get_tightbbox().extents, figure.get_size_inches()
    rights = [drawn_in[2], *(legend.get_window_extent().x1 / figure.dpi for legend in figure.legends)]
    return bool(min(drawn_in) < -0.01 or max(rights) > size_in[0] + 0.01 or drawn_in[3] > size_in[1] + 0.01)


def words(drawing: Drawing) -> set[str]:
    return set(f"{texts(drawing.figure)} {drawing.alt}".replace(",", " ").split())


def linear(colour: str) -> npt.NDArray[np.float64]:
    values = np.array(to_rgb(colour))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def to_oklab(colour: str, sight: str) -> npt.NDArray[np.float64]:
    light = np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1)
    return np.array(_TO_OKLAB) @ np.cbrt(np.array(_TO_CONES) @ light)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("styles", ["STRATEGIES", "RELEASES", "STATE", "TRAFFIC", "PROFILE"])
def test_no_two_styles_look_alike(sight, styles):
    for (first_name, first), (second_name, second) in itertools.combinations(getattr(canvas, styles).items(), 2):
        distance = np.linalg.norm(to_oklab(first.colour, sight) - to_oklab(second.colour, sight))
        # A strategy with groups has the color of the one without them.
        has_groups = {first_name, second_name} & set(WITH_GROUPS)
        is_other = has_groups and first.dash != second.dash if styles == "STRATEGIES" else first.hatch != second.hatch
        assert is_other or distance > 0.08, f"{first_name} and {second_name}: {distance:.3f}"


@pytest.mark.parametrize(("report", "labels"), [("laptop", 13), ("neighbours", 4)])
def test_labels_of_points_do_not_overlap_and_of_many_points_only_the_best_have_one(report, labels):
    folder = REPOSITORY / "reports" / report
    drawings = drawn("runtime", read_parquet(folder), folder)
    counts = []
    for figure in (drawing.figure for drawing in drawings if drawing.name == "frontier"):
        figure.draw_without_rendering()
        texts = [text for text in figure.axes[0].texts if text.get_text()]
        boxes = [Text.get_window_extent(text) for text in texts]  # without the line to its point
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].shrunk(0.9, 0.8).overlaps(pair[1])]
        counts.append(len(texts))
    assert counts[0] == labels


def test_a_layout_clips_no_arrow_and_leaves_each_with_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_arrow(_arrow: FancyArrowPatch, *_: object) -> None:
        raise AssertionError("an arrow needs no space in a layout")

    figure, (axes,) = canvas.sheet(3)
    axes.plot([0, 1], [0, 1])
    canvas.label_ends(axes, [canvas.EndLabel(1, 1, "one", "#000000"), canvas.EndLabel(1, 0.99, "two", "#000000")])
    notes = [text for text in axes.texts if isinstance(text, Annotation)]
    arrows = [(note.arrowprops, note.arrow_patch) for note in notes]
    monkeypatch.setattr(FancyArrowPatch, "get_window_extent", fail_at_arrow)
    canvas.finish(figure, "A title", "a subject", "", "words")
    canvas.as_png(figure)
    assert [(note.arrowprops, note.arrow_patch) for note in notes] == arrows
    # Both labels were moved from their points.
    assert [isinstance(arrow, FancyArrowPatch) and arrow.get_visible() for _, arrow in arrows] == [True, True]


def test_a_strategy_with_groups_has_their_ranks_in_the_figure_and_in_the_table():
    folder = REPOSITORY / "reports" / "neighbours"
    records = read_parquet(folder)
    drawing = next(drawing for drawing in drawn("neighbours", records, folder) if ", gpt-tiny, " in drawing.alt)
    rows = {row.get_text() for axes in drawing.figure.axes for row in axes.get_yticklabels()}
    assert rows >= {"zero3", "hsdp (2)", "zero3_hpz (2)", "tp (4)", "cp (2)", "zero3_tp (2)"}
    # State and the weights that are still gathered at the end of the forward pass.
    assert "zero2 20.6 MiB, sends 23.1, zero3 13.6 + 9.50 MiB, sends 15.4, " in drawing.alt
    table = TABLES["neighbours"](records).groupby("Strategy")["Ranks per group"].max()
    assert table[["zero3_hpz", "tp x4", "zero3_tp x4"]].tolist() == [2, 4, 2]
    assert table[["single", "zero3 x4", "fsdp2 x4"]].isna().all()
    # 11.27 MiB at 64 tokens, 23.27 at 256: at 130 the 15.42 of zero3. Eight rings of 117.7 MiB leave a machine.
    turn, memory = answered(NEIGHBOURS.answer(records)).headlines
    assert (turn.value, turn.strategy, turn.scope[:17]) == ("~130 tokens", "zero3_tp", "one of 4 ranks of")
    assert (memory.value, memory.strategy) == ("10.3 + 4.25 MiB", "fsdp2")
    nodes = TABLES["nodes"](read_parquet(REPOSITORY / "reports" / "virtual_scaling"))
    on_most = nodes[nodes["Machines"] == 128].set_index("Strategy")
    assert on_most.loc[["ddp", "hsdp"], "State per rank, MiB"].round().tolist() == [1899, 237]
    assert on_most.loc[["ddp", "hsdp"], "Out of a machine, MiB"].round().tolist() == [948, 942]
    assert round(on_most.loc["hsdp", "Gathered per rank, MiB"]) == 150
    # With all 36 layers: 5,633 MiB and 15.75 for each token, as the 41,036 of zero3 at 2,248. Of zero3_tp not linear.
    folder = REPOSITORY / "reports" / "virtual_neighbours"
    records = read_parquet(folder)
    answer = answered(NEIGHBOURS.answer(records))
    assert answer.headlines[0].value == "~2,250 tokens"
    (drawing,) = (drawing for drawing in drawn("neighbours", records, folder) if f", {answer.subject}: " in drawing.alt)
    assert "zero3 1,784 + 1,936 MiB, sends 41,036, " in drawing.alt
    assert "zero1_tp (8) 5,901 MiB, sends 6,641, zero3_tp (8) 2,148 + ? MiB, sends ?" in drawing.alt


def test_every_strategy_has_a_colour_that_shows_on_white_and_a_marker_of_its_own():
    assert set(STRATEGIES) == set(STRATEGY_NAMES)
    assert len({style.marker for style in STRATEGIES.values()}) == len(STRATEGIES)
    for name, style in STRATEGIES.items():
        contrast = 1.05 / (linear(style.colour) @ np.array([0.2126, 0.7152, 0.0722]) + 0.05)
        assert contrast >= 2.9, f"{name}: {contrast:.2f}"


ODD = "_$x^{\\frac$ <script>alert(1)</script>\n| & \u0000"


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_axis_has_its_unit_and_every_figure_its_words(notebook):
    """Any text in a record is drawn; no records give no drawing."""
    empty = dataclasses.replace(laptop(), runs=laptop().runs.iloc[:0], steps=laptop().steps.iloc[:0])
    assert drawn(notebook, empty) == []
    drawings = laptops(notebook)
    workload = json.dumps(json.loads(laptop().runs["workload_key"].iloc[-1]) | {"tokenizer_name": f"${ODD}"})
    odd = drawn(notebook, changed(arm=ODD, workload_key=workload, confounded=ODD, confounded_loss=ODD))
    assert bool(odd) == bool(drawings) == (notebook in OF_THE_LAPTOP)
    for drawing in drawings.values():
        finding = drawing.alt.partition(". ")[2]
        assert len(finding) > 20
        assert finding in texts(drawing.figure), "the alt text ends with the finding"
        assert not is_cut_off(drawing.figure), drawing.name
        for axes in drawing.figure.axes:
            rows = (row for side in axes.get_shared_y_axes().get_siblings(axes) for row in side.get_yticklabels())
            assert any(panel.get_xlabel() for panel in axes.get_shared_x_axes().get_siblings(axes))
            assert axes.get_ylabel() or any(row.get_text() in STRATEGIES for row in rows)
    assert not any("<script>" in as_svg(drawing.figure) for drawing in odd)


@pytest.mark.parametrize("notebook", OF_THE_LAPTOP)
def test_an_svg_has_the_words_of_its_figure_as_text(notebook: str) -> None:
    for drawing in laptops(notebook).values():
        image = ElementTree.fromstring(as_svg(drawing.figure))
        written = " ".join(element.text or "" for element in image.iter() if element.tag.endswith("}text"))
        # Without the labels of ticks, some of which are beyond the ends of their axis.
        texts = [*drawing.figure.texts, *(text for axes in drawing.figure.axes for text in axes.texts)]
        assert texts
        assert {word for text in texts for word in text.get_text().split()} <= {*written.split()}, drawing.name
        ids = [element.get("id") for element in image.iter() if element.get("id")]
        assert len(ids) == len(set(ids))
        used = re.findall(r"url\(#(\w+)\)|href=\"#(\w+)\"", ElementTree.tostring(image, encoding="unicode"))
        assert {in_url or in_link for in_url, in_link in used} <= {*ids}


def test_numbers_at_the_ends_of_bars_are_the_lengths_of_the_bars():
    """Those of model state are the whole state, and those of sent bytes are next to their own bars."""
    folder = REPOSITORY / "reports" / "neighbours"
    drawings = {"neighbours": drawn("neighbours", read_parquet(folder), folder)[0]}
    drawings |= {"model_state": laptops("peak_memory")["model_state"], "traffic": laptops("runtime")["traffic"]}
    for name, drawing in drawings.items():
        for axes in drawing.figure.axes:
            ends = np.zeros(len(axes.texts))
            for bar in (bar for bars in axes.containers for bar in bars):
                row = round(bar.get_y() + bar.get_height() / 2)
                ends[row] = max(ends[row], bar.get_x() + bar.get_width())
            # Gathered weights are added to the state; in brackets is a part of the state.
            words = [text.get_text().replace(",", "").partition(" (")[0].split(" + ") for text in axes.texts]
            numbers = [sum(float(word.split()[0]) for word in parts) for parts in words]
            assert numbers == pytest.approx(ends.tolist(), rel=0.01), name


@pytest.mark.parametrize("notebook", OF_THE_LAPTOP)
def test_a_virtual_or_unfinished_run_is_in_no_figure_of_loss_or_time(notebook):
    records = changed(virtual=True)
    records.runs.loc[records.runs["strategy"] == "zero1", "status_state"] = "oom"
    before, after = laptops(notebook), figures(notebook, records)
    for name in before:
        # Memory and communication of a virtual rank are real.
        drawn = {"zero3"} if name in ("model_state", "traffic") else set()
        assert words(after[name]) & {"zero1", "zero3"} == drawn, name
        assert "zero3" in words(before[name])


@pytest.mark.parametrize("notebook", OF_THE_LAPTOP)
def test_a_confounded_strategy_is_marked_and_its_reason_is_in_the_figure(notebook):
    reason = "clipping: 0.5, baseline 1"
    for name, drawing in laptops(notebook, ("confounded", reason), ("confounded_loss", reason)).items():
        assert "†" in texts(drawing.figure), name
        assert reason in texts(drawing.figure), name
