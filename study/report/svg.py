"""SVG images with text as text, small enough to commit: a viewer can select, search and scale them."""

from __future__ import annotations

import collections
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# Verdana has the widths of DejaVu Sans, and is where DejaVu Sans is not.
_FONTS = "DejaVu Sans,Verdana,sans-serif"
# Marks the group of a text with a halo, which matplotlib would draw as outlines of letters.
_HALO = "halo"
_HALO_STYLE = "paint-order:stroke;stroke:#fff;stroke-width:2;stroke-linejoin:round"
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
# Attributes with coordinates, and their digits after the point; a matrix needs more of them.
_COORDINATES = ("d", "x", "y", "width", "height", "transform", "viewBox")
_DIGITS = 2
# A hatch of dots is thousands of curves: each dot becomes a line of length 0 with round ends.
_DOT = re.compile(r"M(\S+) (\S+)((?:C[^CMz]+){8})z")
_MIN_DOTS = 50
# A closed rectangle: along x, then along y, then back.
_BOX = re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4z")
_SIDES = re.compile(r"M\S+ \S+H[^MHVz]+V[^MHVz]+H[^MHVz]+z")
# Fewer points are single elements.
_MIN_POINTS = 20
# A style of fewer elements is written in each of them.
_MIN_OF_STYLE = 3


def draw_svg(figure: Figure, settings: Any) -> str:
    """Return the figure as SVG with text as text and without a date, so that equal figures are equal files."""
    drawn = io.BytesIO()
    with matplotlib.rc_context({**settings, "svg.fonttype": "none"}), _marked_halos(figure):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return compact(drawn.getvalue().decode())


@contextmanager
def _marked_halos(figure: Figure) -> Iterator[None]:
    """Replace the halos of texts by the mark of their group while the figure is saved."""
    effects = {text: text.get_path_effects() for text in figure.findobj(Text) if text.get_path_effects()}
    for text in effects:
        text.set_path_effects([])
        text.set_gid(_HALO)
    try:
        yield
    finally:
        for text, effect in effects.items():
            text.set_path_effects(effect)
            text.set_gid(None)


def compact(svg: str) -> str:
    """Return matplotlib's SVG without metadata, empty groups, repeated styles and needless digits."""
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", svg))
    metadata = root.find(f"{{{_SVG}}}metadata")
    if metadata is not None:
        root.remove(metadata)
    _unwrap(root)
    for element in root.iter():
        element.text = (element.text or "").strip() if element.tag != f"{{{_SVG}}}text" else element.text
        element.tail = None
        _shorten(element)
    _merge_boxes(root)
    _join_points(root)
    _share_styles(root)
    _name_styles(root)
    _number_ids(root)
    root.set("font-family", _FONTS)
    ElementTree.register_namespace("", _SVG)
    # One element a line: a change of a figure is a readable difference.
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>").replace("><", ">\n<") + "\n"


def _unwrap(parent: Element) -> None:
    """Replace each group that only has a name by its content, and remove groups without content."""
    children: list[Element] = []
    for child in list(parent):
        _unwrap(child)
        if child.tag != f"{{{_SVG}}}g":
            children.append(child)
            continue
        if child.get("id") == _HALO:
            for text in child:
                text.set("style", f"{text.get('style', '')};{_HALO_STYLE}")
        child.attrib.pop("id", None)
        if not child.attrib:
            children.extend(child)
        elif len(child):
            children.append(child)
    parent[:] = children


def _shorten(element: Element) -> None:
    """Round the coordinates of an element and remove what its style repeats."""
    for name in _COORDINATES:
        if name in element.attrib:
            element.set(name, _rounded(element.attrib[name]))
    if "d" in element.attrib:
        _shorten_path(element)
    if (element.get("transform") or "").startswith("rotate(0 "):
        del element.attrib["transform"]
    if "style" in element.attrib:
        parts = [part.strip() for part in element.attrib["style"].split(";")]
        rules = [re.sub(r":\s+", ":", part) for part in parts if part and not part.startswith("font-family")]
        element.set("style", ";".join(rules))
    # Only the ids of clips, markers and hatches have references.
    if element.get("id", "").startswith(("figure_", "axes_", "patch_", "text_", "line2d_", "legend_")):
        del element.attrib["id"]


def _rounded(text: str) -> str:
    """Return a text whose numbers have two digits after the point, without zeros at the end."""

    def shorten(match: re.Match[str]) -> str:
        short = f"{float(match[0]):.{_DIGITS}f}".rstrip("0").rstrip(".")
        return "0" if short == "-0" else short

    return re.sub(r"(?<![\w.])-0(?![\d.])", "0", _NUMBER.sub(shorten, text))


def _shorten_path(path: Element) -> None:
    """Join the commands of a path, write rectangles by their sides, and draw the dots of a hatch as points."""
    commands = re.sub(r"\s*([MLCQz])\s*", r"\1", path.attrib["d"].strip())
    box = _BOX.fullmatch(commands)
    if box:
        commands = f"M{box[1]} {box[2]}H{box[3]}V{box[4]}H{box[1]}z"
    if len(_DOT.findall(commands)) >= _MIN_DOTS:
        diameters = []

        def as_point(match: re.Match[str]) -> str:
            # The circle begins at its lowest point and passes its rightmost one after two of eight curves.
            bottom, right = (float(match[1]), float(match[2])), [float(word) for word in match[3].split("C")[2].split()]
            diameters.append(2 * (right[-2] - bottom[0]))
            return f"M{match[1]} {_rounded(f'{right[-1]:.3f}')}h0"

        commands = _DOT.sub(as_point, commands)
        look = dict(part.strip().split(":") for part in path.attrib["style"].split(";") if part.strip())
        diameter = max(diameters) + float(look["stroke-width"])
        path.set("style", f"stroke:{look['stroke'].strip()};stroke-linecap:round;stroke-width:{diameter:.2f}")
    path.set("d", commands)


def _merge_boxes(parent: Element) -> None:
    """Write neighboring rectangles of one opaque style as one path: a grid has hundreds of them."""
    merged: list[Element] = []
    for child in list(parent):
        _merge_boxes(child)
        before = merged[-1] if merged else None
        if before is not None and _are_one_path(before, child):
            before.set("d", before.attrib["d"] + child.attrib["d"])
        else:
            merged.append(child)
    parent[:] = merged


def _are_one_path(before: Element, after: Element) -> bool:
    return _is_opaque_box(before) and _is_opaque_box(after) and _look(before, "d") == _look(after, "d")


def _is_opaque_box(element: Element) -> bool:
    sides = element.get("d", "")
    return bool(_SIDES.match(sides)) and "opacity" not in element.get("style", "") and "id" not in element.attrib


def _look(element: Element, *places: str) -> dict[str, str]:
    """Return the attributes of an element without its coordinates."""
    return {name: value for name, value in element.attrib.items() if name not in places}


def _join_points(root: Element) -> None:
    """Write many equal points as the markers of one path."""
    for group in list(root.iter(f"{{{_SVG}}}g")):
        looks = {tuple(sorted(_look(child, "x", "y").items())) for child in group}
        if len(group) < _MIN_POINTS or len(looks) != 1 or any(child.tag != f"{{{_SVG}}}use" for child in group):
            continue
        name = f"points{len(root)}"
        marker = Element(f"{{{_SVG}}}marker", id=name, overflow="visible", markerUnits="userSpaceOnUse")
        marker.append(Element(group[0].tag, _look(group[0], "x", "y")))
        definition = Element(f"{{{_SVG}}}defs")
        definition.append(marker)
        places = "L".join(f"{child.attrib['x']} {child.attrib['y']}" for child in group)
        path = Element(f"{{{_SVG}}}path", d=f"M{places}", style=f"fill:none;stroke:none;marker:url(#{name})")
        group[:] = [path]
        root.append(definition)


def _share_styles(root: Element) -> None:
    """Give a group the style that all its markers have."""
    for group in root.iter(f"{{{_SVG}}}g"):
        styles = {child.get("style") for child in group}
        if len(group) > 1 and len(styles) == 1 and "style" not in group.attrib and {*styles} != {None}:
            group.set("style", str(styles.pop()))
            for child in group:
                del child.attrib["style"]


def _number_ids(root: Element) -> None:
    """Replace the long ids of markers, clips and hatches by short ones."""
    ids = {element.attrib["id"]: f"i{place}" for place, element in enumerate(root.iter()) if "id" in element.attrib}
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", ids[element.attrib["id"]])
        target = element.attrib.pop(f"{{{_XLINK}}}href", None)
        if target is not None:
            element.set("href", f"#{ids[target.removeprefix('#')]}")
        if "style" in element.attrib:
            element.set("style", _with_ids(element.attrib["style"], ids))
    for sheet in root.iter(f"{{{_SVG}}}style"):
        sheet.text = _with_ids(sheet.text or "", ids)


def _with_ids(style: str, ids: dict[str, str]) -> str:
    return re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{ids[match[1]]})", style)


def _name_styles(root: Element) -> None:
    """Write each style of several elements once, as a class; clips are part of it."""
    for element in root.iter():
        clip = element.attrib.pop("clip-path", None)
        if clip:
            element.set("style", ";".join(filter(None, (element.get("style"), f"clip-path:{clip}"))))
    counts = collections.Counter(element.attrib["style"] for element in root.iter() if "style" in element.attrib)
    shared = [style for style, count in counts.items() if count >= _MIN_OF_STYLE]
    names = {style: f"s{place}" for place, style in enumerate(shared)}
    for element in root.iter():
        if element.get("style") in names:
            element.set("class", names[element.attrib.pop("style")])
    sheet = root.find(f".//{{{_SVG}}}style")
    assert sheet is not None
    rules = [f".{name}{{{style}}}" for style, name in names.items()]
    sheet.text = "\n".join([sheet.text or "", *rules])
