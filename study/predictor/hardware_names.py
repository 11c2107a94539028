"""Parts of a name of hardware as people write it: counts, nodes, and the words of the device."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

_NODES = r"(?:nodes?|machines?|servers?|hosts?)"
_NUMBER = r"([0-9]{1,99})"


@dataclasses.dataclass(frozen=True)
class HardwareName:
    """A name of hardware, taken apart."""

    device: str
    # Counts before the device and after it, in their order.
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    # Number of nodes if a word for them follows it.
    nodes: int | None = None
    # Whether the count of GPUs with those nodes may be that of all nodes: "8xH100 on 4 nodes"; None: only a large one.
    is_of_all: bool | None = False

    @property
    def prefix(self) -> str:
        """The counts, as they stand before a device."""
        nodes = () if self.nodes is None else (self.nodes,)
        return "".join(f"{count}x" for count in (*nodes, *self.before, *self.after))


def split_name(name: str, is_device: Callable[[str], bool]) -> HardwareName:
    """Return the parts of a name such as `8xH100`, `4 nodes x 8 H100`, `H100 80GB x8`, `8xH100 (4 nodes)`."""
    text = " ".join(re.sub(r"[\N{MULTIPLICATION SIGN}*:]", "x", name).split())
    # A group in parentheses is that of one node.
    text = re.sub(rf"^\(([^()]+)\) ?x ?{_NUMBER}$", r"\2x\1", text, flags=re.IGNORECASE)
    text = " ".join(re.sub(r"[()]", " ", text).split())
    nodes: int | None = None
    is_of_all: bool | None = False
    named_first = re.fullmatch(rf"{_NUMBER} ?{_NODES}\b ?,? ?(?:x|of|with|each with)? ?(.*)", text, re.IGNORECASE)
    named_last = re.fullmatch(
        rf"(.*?\S)(?: ?(?P<times>x) ?| ?, ?| (?P<spread>on|over|across|in) | )(?P<nodes>[0-9]{{1,99}}) ?{_NODES}",
        text,
        re.IGNORECASE,
    )
    if named_first is not None:
        nodes, text = int(named_first[1]), named_first[2]
    elif named_last is not None:
        nodes, text = int(named_last["nodes"]), named_last[1]
        if not named_last["times"]:
            is_of_all = True if named_last["spread"] else None
    if nodes is not None:
        alone = re.sub(rf"(?: ?(?:per|/|a) ?{_NODES}| each)$", "", text, flags=re.IGNORECASE)
        text, is_of_all = alone, is_of_all if alone == text else False
    # The x of RTX 3090 is part of its name.
    after: tuple[int, ...] = ()
    while (factor := re.fullmatch(rf"(.*[^\s])( ?)x ?{_NUMBER}", text, re.IGNORECASE)) is not None:
        has_count = re.match("[0-9]+ ?x", text, re.IGNORECASE)
        looks_like_device = not has_count and (factor[2] or re.search(r"[0-9](GI?B?)?$", factor[1], re.IGNORECASE))
        if not (looks_like_device or "=" in factor[1] or is_device(_split_counts(factor[1], is_device)[1])):
            break
        after, text = (int(factor[3]), *after), factor[1]
    before, text = _split_counts(text, is_device)
    return HardwareName(text, before, after, nodes, is_of_all)


def _split_counts(text: str, is_device: Callable[[str], bool]) -> tuple[tuple[int, ...], str]:
    """Return the counts at the beginning of a text, and its rest: `8x`, `8 ` before a letter, and `8H100`."""
    counts: tuple[int, ...] = ()
    while (factor := re.match(rf"{_NUMBER} ?x ?", text, re.IGNORECASE)) is not None:
        counts, text = (*counts, int(factor[1])), text[factor.end() :]
    if is_device(text):
        return counts, text
    # "8 3090" stays unknown, and the number before Ti and Super is a card's.
    spaced = re.fullmatch(rf"{_NUMBER} (?!x|(?:ti|super|nvlink|pcie)\b)([a-z].*)", text, re.IGNORECASE)
    joined = re.fullmatch(r"([0-9]{1,3})([a-z].*)", text, re.IGNORECASE)
    if spaced is None and joined is not None:
        spaced = joined if re.match("[abhlv][0-9]", joined[2], re.IGNORECASE) or is_device(joined[2]) else None
    return (counts, text) if spaced is None else ((*counts, int(spaced[1])), spaced[2])


# Words of a device's name besides its model; a memory is its number.
_FORMS = ("NVLINK", "NVL", "PCIE", "SXM", "OAM")
_MEMORY = "[1-9][0-9]{1,2}"


def device_words(text: str, models: Sequence[str]) -> frozenset[str]:
    """Return the words of a device's name in any order, also of words that are joined: H100NVL, A100PCIE, A10080GB."""
    spelled = re.sub(r"PCI-?E", "PCIE", text.upper().replace("_", "-"))
    spelled = re.sub(rf"\b({_MEMORY}) ?G(I?B)?(?![A-Z0-9])", r"\1", spelled)
    chunks = filter(None, re.split(r"[\s,/-]+", spelled))
    return frozenset(word for chunk in chunks for word in _split_words(chunk, tuple(models)) or (chunk,))


@functools.lru_cache(maxsize=4096)
def _split_words(chunk: str, models: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the words of a chunk of letters and digits; None if it is not made of known ones."""
    memory = rf"(?P<memory>{_MEMORY})(?:G(?:I?B)?|(?![0-9]))"
    # The longest first: A100 before A10. SXM5 is SXM.
    for word in (*sorted((*models, *_FORMS), key=len, reverse=True), None):
        pattern = memory if word is None else f"{word}[2-9]?" if word == "SXM" else word
        if (start := re.match(pattern, chunk)) is None:
            continue
        rest = chunk[start.end() :]
        words = _split_words(rest, models) if rest else ()
        if words is not None:
            return (word or start["memory"], *words)
    return None
