"""How a strategy looks, the same in every figure, table and page.

No two colours come close to each other for a reader with protanopia, deuteranopia or tritanopia, and each strategy has
a marker of its own, so that a figure reads in black and white as well. A strategy with teams has the colour of the one
under it, and another line. A test measures all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# A dash pattern as matplotlib takes it: the offset, then lengths of ink and gap.
Dash = tuple[int, tuple[float, ...]]
SOLID: Dash = (0, ())
_LINES_ALONE = "1234+x_|"


class Style(NamedTuple):
    colour: str
    marker: str
    dash: Dash

    @property
    def points(self) -> dict[str, Any]:
        """As matplotlib takes it. A marker of lines alone is all edge."""
        edge = {"markeredgecolor": self.colour} if self.marker in _LINES_ALONE else {}
        return {"color": self.colour, "marker": self.marker, "linestyle": "", **edge}

    @property
    def line(self) -> dict[str, Any]:
        return self.points | {"linestyle": self.dash}


STRATEGIES: Mapping[str, Style] = {
    "single": Style("#000000", "o", SOLID),
    "ddp": Style("#767676", "s", SOLID),
    "zero0": Style("#2b98ff", "^", SOLID),
    "zero1": Style("#0a35b3", "v", (0, (6, 1.5))),
    "zero2": Style("#018228", "D", SOLID),
    "zero3": Style("#db3502", "P", SOLID),
    "zero2_cpu": Style("#6e9a78", "d", (0, (3, 1.5))),
    "zero3_cpu_optimizer": Style("#c58b1a", "<", (0, (3, 1.5))),
    "zero3_cpu": Style("#704731", ">", (0, (4, 1.5, 1, 1.5))),
    "zero3_nvme_optimizer": Style("#e557bb", "p", (0, (1, 1.2))),
    "zero3_nvme": Style("#9c1179", "h", (0, (5, 1.5, 1, 1.5, 1, 1.5))),
    "zero3_cpu_nvme": Style("#b328da", "*", (0, (2, 2))),
    "fsdp2": Style("#3e1665", "X", (0, (8, 2))),
    "hsdp": Style("#183c3c", "H", (0, (8, 2, 1, 2))),
    "zero3_hpz": Style("#6d1404", "8", (0, (5, 1))),
    # With teams: the colour of what a strategy is without them.
    "tp": Style("#767676", "4", (0, (2, 1, 6, 1))),
    "cp": Style("#3e1665", "+", (0, (4, 1, 2, 1))),
    "ulysses_zero1": Style("#0a35b3", "1", (0, (2, 1, 6, 1))),
    "ulysses_zero2": Style("#018228", "2", (0, (2, 1, 6, 1))),
    "ulysses_zero3": Style("#db3502", "3", (0, (2, 1, 6, 1))),
    "zero1_tp": Style("#0a35b3", "_", (0, (1, 1, 3, 1))),
    "zero2_tp": Style("#018228", "x", (0, (1, 1, 3, 1))),
    "zero3_tp": Style("#db3502", "|", (0, (1, 1, 3, 1))),
}
UNKNOWN = Style("#767676", "o", (0, (1, 2)))


class Fill(NamedTuple):
    colour: str
    hatch: str


# Colours tell what the bytes are, hatches tell where they are.
STATE: Mapping[str, Fill] = {
    "params": Fill("#31688e", ""), "grads": Fill("#e8a33d", ""), "optimizer": Fill("#7a5195", ""),
    "rest": Fill("#b9c0c8", ""), "reserved": Fill("#dbe0e5", ""), "outside": Fill("#eff1f3", ""),
}  # fmt: skip
PLACES: Mapping[str, str] = {"device": "", "host": "////", "nvme": "xxxx"}
TRAFFIC: Mapping[str, Fill] = {
    "all_reduce": Fill("#0a35b3", ""),
    "reduce_scatter": Fill("#2b98ff", "////"),
    "reduce": Fill("#7fb2e5", "\\\\\\\\"),
    "all_gather": Fill("#db3502", "\\\\\\\\"),
    "broadcast": Fill("#e0a98f", "xxxx"),
    "all_to_all": Fill("#7a5195", "...."),
}
# Where the time of a step goes, in the order in which it is stacked; what is idle comes last.
PROFILE: Mapping[str, Fill] = {
    "matmul": Fill("#0a35b3", ""),
    "attention": Fill("#2b98ff", "////"),
    "elementwise": Fill("#e8a33d", ""),
    "optimizer": Fill("#7a5195", "\\\\"),
    "copies": Fill("#018228", "xxxx"),
    "collectives": Fill("#db3502", "////"),
    "other": Fill("#767676", ""),
    "idle": Fill("#e3e7eb", ""),
}
OTHER = Fill("#b0b6bd", "")
# What came of a release: right, wrong, wrong together with another release, or nothing to compare.
RELEASES: Mapping[str, Fill] = {
    "equal": Fill("#74b06f", ""), "lucky": Fill("#c3dec0", ""), "different": Fill("#b3240f", ""),
    "cpu": Fill("#d98a7e", ""), "mismatch": Fill("#d2691e", "////"),
    "refuses": Fill("#c9ced4", ""), "crashes": Fill("#767c85", ""), "not installable": Fill("#e8ebee", ""),
    "not judged": Fill("#e8ebee", "xxxx"),
}  # fmt: skip

INK, QUIET, FAINT, ACCENT = "#1f2328", "#5b636e", "#dfe3e8", "#a0410d"

# A line to read others against.
GUIDE: Any = {"color": QUIET, "linestyle": (0, (4, 3)), "linewidth": 1.1}

# One column of a page, and a whole telephone: type is large against the figure, because a phone halves it.
WIDTH_IN = 4.8
SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": "#aeb5bd",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": "#aeb5bd",
    "ytick.color": "#aeb5bd",
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "text.color": INK,
    "lines.markeredgecolor": "white",
    # A name from a record may hold a dollar sign.
    "text.parse_math": False,
    "hatch.linewidth": 0.7,
    "hatch.color": "#ffffffb0",
    "figure.facecolor": "#ffffff",
    "savefig.facecolor": "#ffffff",
    "legend.frameon": False,
    # The same figure gives the same file.
    "svg.hashsalt": "zero-study",
    "svg.fonttype": "path",
}


def style_of(strategy: object) -> Style:
    return STRATEGIES.get(str(strategy), UNKNOWN)
