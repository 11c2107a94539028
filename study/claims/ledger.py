"""The ledger as written: every claim, what would make it true, and its checks. Read strictly."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from study.claims.evidence import Evidence
from study.claims.forms import FORMS, WORDS
from study.claims.verdicts import Answer, Figure, Kind, NoRecords, NotJudged, Region, awaited, number
from study.config.errors import UserError
from study.config.yaml_sections import Section, as_section, read_document

LEDGER = Path(__file__).with_name("ledger.yaml")
_MOST = 20_000
_ID = re.compile(r"[SZ]\d-\d\d")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_CLAIM_KEYS = {"id", "place", "says", "holds_if", "falls_if", "checks", "untestable", "settle", "protocol",
               "alternatives"}  # fmt: skip
_TOP_KEYS = {"documents", "claims", "contradictions"}
_REGION_KEYS = {"at_least", "at_most", "about", "within"}
_CHECK_KEYS = {"form", "shows", "unit", "necessary", "elsewhere", "against", "needs"} | _REGION_KEYS


@dataclasses.dataclass(frozen=True)
class Document:
    code: str
    title: str
    scale: str


@dataclasses.dataclass(frozen=True)
class Settle:
    """The one command that would say more."""

    command: str
    minutes: float
    box: str


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How the document came to its figure, and how this study does."""

    published: str
    here: str


@dataclasses.dataclass(frozen=True)
class Correction:
    """What a verdict or an entry said wrongly, and since when it does not."""

    date: str
    claim: str
    what: str
    why: str


@dataclasses.dataclass(frozen=True)
class ClaimFinding:
    """What one check came to."""

    kind: Kind
    answer: Answer
    sentence: str
    figure: Figure | None = None
    unit: str = ""

    @property
    def reports(self) -> set[str]:
        """Whose records it rests on."""
        records = self.figure.records if self.figure else ()
        return {record.split("/")[0] for record in records if not record.startswith("accelerate_configs/")}


@dataclasses.dataclass(frozen=True)
class ClaimCheck:
    form: str
    # What its figure is of, in a few words.
    shows: str
    numbers: Mapping[str, Any]
    region: Region
    unit: str = ""
    necessary: bool = False
    elsewhere: bool = False
    # The claim that it is held against: where they disagree, either may be wrong.
    against: str = ""
    # What its records are to come from, said as long as there are none.
    needs: str = ""

    @property
    def kind(self) -> Kind:
        return "consistency" if self.against else FORMS[self.form].kind

    @property
    def role(self) -> str:
        """Behind the answer, where it is another one than judging the claim at its own scale."""
        return ", cannot do without it" if self.necessary else ", at another scale" if self.elsewhere else ""

    def find(self, evidence: Evidence) -> ClaimFinding:
        try:
            figure = FORMS[self.form].figure(evidence, **self.numbers)
        except NotJudged as reason:
            is_awaited = self.needs and isinstance(reason, NoRecords)
            why = awaited(self.needs) if is_awaited else str(reason)
            return ClaimFinding(self.kind, "not judged", _capital(f"{self.shows}: {why}"))
        answer = self.region.judge(figure)
        if self.against and answer == "fails":
            answer = "disputed"
        text = number(figure.value, self.unit)
        if figure.low is not None and figure.high is not None:
            text += f"{figure.spread}, n = {figure.n}"
        where = f" ({figure.note})" if figure.note else f" (as {self.against} has it)" if self.against else ""
        sentence = f"{self.shows}: {text}{where}; the claim needs {self.region.words(self.unit)}"
        return ClaimFinding(self.kind, answer, _capital(sentence), figure, self.unit)


@dataclasses.dataclass(frozen=True)
class Claim:
    id: str
    place: str
    says: str
    holds_if: str
    falls_if: str
    checks: tuple[ClaimCheck, ...]
    # Why nothing here can, and what would.
    untestable: str
    settle: Settle | None
    protocol: Protocol | None = None
    # What else could explain a figure that was measured.
    alternatives: tuple[str, ...] = ()

    @property
    def document(self) -> str:
        return self.id.split("-")[0]


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """Sides of claims that cannot both be true; one claim alone contradicts itself."""

    between: tuple[tuple[str, ...], ...]
    why: str

    def others(self, claim: str) -> list[str]:
        return [other for side in self.between if claim not in side for other in side]


@dataclasses.dataclass(frozen=True)
class Ledger:
    documents: tuple[Document, ...]
    claims: tuple[Claim, ...]
    contradictions: tuple[Contradiction, ...]
    # The claims that the README tells.
    front_page: tuple[str, ...] = ()
    corrections: tuple[Correction, ...] = ()


def read_ledger(file: Path = LEDGER) -> Ledger:
    top = as_section(read_document(file, Section, _MOST), str(file), _TOP_KEYS | {"front_page", "corrections"}, Section)
    top.need(*sorted(_TOP_KEYS - top.keys()))
    documents = tuple(
        Document(_text(each, "code"), _text(each, "title"), _text(each, "scale"))
        for each in _list(top, "documents", {"code", "title", "scale"})
    )
    codes = {document.code for document in documents}
    claims: dict[str, Claim] = {}
    sections = _list(top, "claims", _CLAIM_KEYS)
    known = {str(each.get("id")) for each in sections}
    for each in sections:
        claim = _claim(each, known)
        if claim.document not in codes:
            raise each.refusal("id", f"is {claim.id}, of no document above", "add the document, or fix it")
        if claim.id in claims:
            raise each.refusal("id", f"{claim.id} is there twice", "number it anew")
        claims[claim.id] = claim
    contradictions = []
    for each in _list(top, "contradictions", {"between", "why"}):
        sides = each.get("between")
        if not isinstance(sides, list) or not all(isinstance(side, list) and side for side in sides):
            raise each.refusal("between", f"is {sides!r}", "list the sides, each a list of ids")
        if not sides or not {claim for side in sides for claim in side} <= claims.keys():
            raise each.refusal("between", f"is {sides!r}", "list ids of claims that are here")
        contradictions.append(Contradiction(tuple(map(tuple, sides)), _text(each, "why")))
    front_page = _texts(top, "front_page")
    if unknown := [name for name in front_page if name not in claims]:
        raise top.refusal("front_page", f"names {unknown[0]!r}", "list ids of claims that are here")
    corrections = [
        Correction(*(_text(each, key) for key in ("date", "claim", "what", "why")))
        for each in _list(top, "corrections", {"date", "claim", "what", "why"})
    ]
    if wrong := [each for each in corrections if each.claim not in claims or not _DAY.fullmatch(each.date)]:
        raise top.refusal(
            "corrections", f"holds {wrong[0].date} of {wrong[0].claim}", 'write date: "2026-11-21", and a claim of here'
        )
    return Ledger(documents, tuple(claims.values()), tuple(contradictions), front_page, tuple(corrections))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _claim(section: Section, known: set[str]) -> Claim:
    checks = tuple(_check(each, known) for each in _list(section, "checks", None))
    untestable = _text(section, "untestable") if "untestable" in section else ""
    if not checks and not untestable:
        raise section.refusal("checks", "are none", "add one (form: missing says what it needs), or untestable: why")
    settle = None
    if "settle" in section or not untestable:
        section.need("settle")
        said = _fields(section["settle"], section.place_of("settle"), {"command", "minutes", "box"})
        settle = Settle(_text(said, "command"), _number(said, "minutes"), _text(said, "box"))
    protocol = None
    if "protocol" in section:
        said = _fields(section["protocol"], section.place_of("protocol"), {"published", "here"})
        protocol = Protocol(_text(said, "published"), _text(said, "here"))
    name = _text(section, "id")
    if not _ID.fullmatch(name):
        raise section.refusal("id", f"is {name!r}", "write it as S0-01")
    return Claim(
        id=name, place=_text(section, "place"), says=_text(section, "says"), holds_if=_text(section, "holds_if"),
        falls_if=_text(section, "falls_if"), checks=checks, untestable=untestable,
        settle=settle, protocol=protocol, alternatives=_texts(section, "alternatives"),
    )  # fmt: skip


def _check(section: Section, known: set[str]) -> ClaimCheck:
    name = _text(section, "form")
    if name not in FORMS:
        raise section.refusal("form", f"is {name!r}", f"use one of {', '.join(FORMS)}")
    parameters = {key: each for key, each in inspect.signature(FORMS[name].figure).parameters.items()
                  if each.kind is each.KEYWORD_ONLY}  # fmt: skip
    as_section(section, section.place, _CHECK_KEYS | parameters.keys(), Section)
    section.need(*(key for key, each in parameters.items() if each.default is each.empty))
    readers: dict[str, Callable[[Section, str], Any]] = {"float": _number, "int": _whole, "str": _text}
    numbers = {key: readers[parameters[key].annotation](section, key) for key in section if key in parameters}
    for key, value in numbers.items():
        words = WORDS.get(f"{name}.{key}") or WORDS.get(key)
        if words and not re.fullmatch(words, str(value)):
            raise section.refusal(key, f"is {value!r}", f"it must match {words}")
    if FORMS[name].kind == "arithmetic":
        try:
            FORMS[name].figure(Evidence(LEDGER.parent), **numbers)
        except ZeroDivisionError:
            raise UserError(f"{section.place}: its numbers divide by zero", "fix them") from None
    against = _text(section, "against") if "against" in section else ""
    if against and against not in known:
        raise section.refusal("against", f"is {against!r}", "name a claim of this ledger")
    return ClaimCheck(
        name, _text(section, "shows"), numbers, _region(section, name), _text(section, "unit", ""),
        _flag(section, "necessary"), _flag(section, "elsewhere"), against,
        "" if "needs" in parameters else _text(section, "needs", ""),
    )  # fmt: skip


def _region(section: Section, form: str) -> Region:
    given = section.keys() & _REGION_KEYS
    if form == "missing":
        if given:
            raise section.refusal(min(given), "judges no figure", "take it out")
        return Region()
    if given in ({"at_least"}, {"at_most"}, {"at_least", "at_most"}):
        region = Region(*(_number(section, key) if key in section else default
                          for key, default in (("at_least", -float("inf")), ("at_most", float("inf")))))  # fmt: skip
    elif given == {"about", "within"}:
        about, reach = _number(section, "about"), _number(section, "within")
        region = Region(about - abs(about) * reach, about + abs(about) * reach)
    else:
        raise UserError(f"{section.place}: what the figure must be is unclear",
                        "write at_least, at_most or both, or about with within, a share")  # fmt: skip
    if region.low > region.high:
        raise UserError(f"{section.place}: no figure is both at least and at most that", "swap the two")
    return region


def _fields(value: Any, place: str, keys: set[str]) -> Section:
    section = as_section(value, place, keys, Section)
    section.need(*sorted(keys - section.keys()))
    return section


def _list(section: Section, key: str, keys: set[str] | None) -> list[Section]:
    values = section.get(key, [])
    if not isinstance(values, list):
        raise section.refusal(key, f"is a {type(values).__name__}", "write a list")
    return [as_section(each, section.place_of(key), keys if keys is not None else each, Section) for each in values]


def _texts(section: Section, key: str) -> tuple[str, ...]:
    values = section.get(key, [])
    if not isinstance(values, list) or not all(isinstance(each, str) and each.strip() for each in values):
        raise section.refusal(key, f"is {values!r}", "list texts; quote what looks like a number")
    return tuple(" ".join(each.split()) for each in values)


def _text(section: Section, key: str, default: str | None = None) -> str:
    if key not in section and default is not None:
        return default
    section.need(key)
    value = section[key]
    if not isinstance(value, str) or not value.strip():
        raise section.refusal(key, f"is {value!r}", "write text; quote it if it looks like a number")
    return " ".join(value.split())


def _number(section: Section, key: str) -> float:
    section.need(key)
    if type(section[key]) not in (int, float) or section[key] != section[key]:
        raise section.refusal(key, f"is {section[key]!r}", "write a number")
    return float(section[key])


def _whole(section: Section, key: str) -> int:
    section.need(key)
    if type(section[key]) is not int or section[key] < 0:
        raise section.refusal(key, f"is {section[key]!r}", "write a whole number")
    return int(section[key])


def _flag(section: Section, key: str) -> bool:
    if type(section.get(key, False)) is not bool:
        raise section.refusal(key, f"is {section[key]!r}", "write true or false")
    return bool(section.get(key, False))
