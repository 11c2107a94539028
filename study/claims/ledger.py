"""The ledger: every claim, the conditions under which it is true, and its checks. pydantic validates it strictly."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic.dataclasses import dataclass

from study.claims.evidence import Evidence
from study.claims.forms import FORMS, WORDS
from study.claims.verdicts import Answer, Figure, Kind, NoRecords, NotJudged, Region, awaited, number
from study.config.errors import UserError
from study.config.yaml_sections import Section, read_document

LEDGER = Path(__file__).with_name("ledger.yaml")
_REGION_KEYS = {"at_least", "at_most", "about", "within"}
_STRICT = pydantic.ConfigDict(extra="forbid")
Text = Annotated[str, pydantic.Field(pattern=r"\S"), pydantic.AfterValidator(lambda text: " ".join(text.split()))]
Number = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, pydantic.Field(strict=True, ge=0)]
Flag = Annotated[bool, pydantic.Field(strict=True)]
ClaimId = Annotated[str, pydantic.Field(pattern=r"^[SZ]\d-\d\d$")]


@dataclass(frozen=True, config=_STRICT)
class Document:
    """A studied document, with its code and the scale of its experiments."""

    code: Text
    title: Text
    scale: Text


@dataclass(frozen=True, config=_STRICT)
class DecidingExperiment:
    """Experiment that would settle the claim."""

    command: Text
    minutes: Number
    box: Text


@dataclass(frozen=True, config=_STRICT)
class Protocol:
    """Protocols of the published figure and of this study's figure."""

    published: Text
    here: Text


@dataclass(frozen=True, config=_STRICT)
class Correction:
    """An error in a verdict or an entry, with the date of its correction."""

    date: Annotated[str, pydantic.Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    claim: ClaimId
    what: Text
    why: Text


@dataclasses.dataclass(frozen=True)
class ClaimFinding:
    """The result of one check."""

    kind: Kind
    answer: Answer
    sentence: str
    figure: Figure | None = None
    unit: str = ""

    @property
    def reports(self) -> set[str]:
        """Reports whose records its figure uses."""
        records = self.figure.records if self.figure else ()
        return {record.split("/")[0] for record in records if not record.startswith("accelerate_configs/")}


@dataclass(frozen=True, config=_STRICT)
class ClaimCheck:
    """One check of a claim: a form with its arguments, and the region that the claim allows."""

    form: str
    # The figure in a few words.
    shows: Text
    # The arguments of the form.
    numbers: Mapping[str, Any]
    region: Region
    unit: str = ""
    necessary: Flag = False
    elsewhere: Flag = False
    # The claim that it is compared with: if they disagree, either may be wrong.
    against: str = ""
    # The runs that would make its records, if there are none yet.
    needs: str = ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _split(cls, written: Any) -> Any:
        """Separate the arguments of the form and the allowed region from the other keys of the entry."""
        if not isinstance(written, Section):
            return written
        form = written.get("form")
        if form not in FORMS:
            raise written.refusal("form", f"is {form!r}", f"use one of {', '.join(FORMS)}")
        model = _arguments(form)
        arguments = {key: value for key, value in written.items() if key in model.model_fields}
        try:
            numbers = model.model_validate(arguments).model_dump(exclude_unset=True)
        except pydantic.ValidationError as error:
            raise _refusal(written, written.place, error.errors()[0]) from None
        if FORMS[form].kind == "arithmetic":
            try:
                FORMS[form].figure(Evidence(LEDGER.parent), **numbers)
            except ZeroDivisionError:
                raise UserError(f"{written.place}: its numbers divide by zero", "fix them") from None
        rest = {key: value for key, value in written.items() if key not in arguments and key not in _REGION_KEYS}
        return {**rest, "numbers": numbers, "region": _region(written, form)}

    @property
    def kind(self) -> Kind:
        """Kind of evidence: consistency for a comparison with another claim, else that of the form."""
        return "consistency" if self.against else FORMS[self.form].kind

    @property
    def role(self) -> str:
        """Suffix of the answer: whether the check is only a necessary condition, or made at another scale."""
        return ", necessary" if self.necessary else ", at another scale" if self.elsewhere else ""

    def find(self, evidence: Evidence) -> ClaimFinding:
        """Compute the figure and compare it with the region."""
        try:
            figure = FORMS[self.form].figure(evidence, **self.numbers)
        except NotJudged as reason:
            is_awaited = self.needs and isinstance(reason, NoRecords)
            why = awaited(self.needs) if is_awaited else str(reason)
            return ClaimFinding(self.kind, "not judged", _capitalized(f"{self.shows}: {why}"))
        answer = self.region.judge(figure)
        if self.against and answer == "fails":
            answer = "disputed"
        text = number(figure.value, self.unit)
        if figure.low is not None and figure.high is not None:
            text += f"{figure.spread}, n = {figure.n}"
        where = f" ({figure.note})" if figure.note else f" (as {self.against} has it)" if self.against else ""
        sentence = f"{self.shows}: {text}{where}; the claim needs {self.region.words(self.unit)}"
        return ClaimFinding(self.kind, answer, _capitalized(sentence), figure, self.unit)


@dataclass(frozen=True, config=_STRICT)
class Claim:
    """One claim of a document, with its checks."""

    id: ClaimId
    place: Text
    says: Text
    holds_if: Text
    falls_if: Text
    checks: tuple[ClaimCheck, ...] = ()
    # Why no record of this study can judge it, and which record would.
    untestable: str = ""
    settle: DecidingExperiment | None = None
    protocol: Protocol | None = None
    # Other explanations of a measured figure.
    alternatives: tuple[Text, ...] = ()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_complete(cls, written: Any) -> Any:
        if isinstance(written, Section) and "untestable" not in written:
            written.require_keys("settle")
            if not written.get("checks"):
                fix = "add one (form: missing names the records that it needs), or untestable: why"
                raise written.refusal("checks", "are missing", fix)
        return written

    @property
    def document(self) -> str:
        """Code of the claim's document."""
        return self.id.split("-")[0]


@dataclass(frozen=True, config=_STRICT)
class Contradiction:
    """Sides of claims that cannot both be true; one claim alone contradicts itself."""

    between: Annotated[tuple[tuple[ClaimId, ...], ...], pydantic.Field(min_length=1)]
    why: Text

    def other_claims(self, claim: str) -> list[str]:
        """Return the claims on the sides that do not include this one."""
        return [name for side in self.between if claim not in side for name in side]


@dataclass(frozen=True, config=_STRICT)
class Ledger:
    """All documents, claims, contradictions and corrections."""

    documents: tuple[Document, ...]
    claims: tuple[Claim, ...]
    contradictions: tuple[Contradiction, ...]
    corrections: tuple[Correction, ...] = ()


def read_ledger(file: Path = LEDGER) -> Ledger:
    """Read and validate the ledger; raise UserError with file and line of the first error."""
    top = read_document(file, Section)
    try:
        ledger = pydantic.TypeAdapter(Ledger).validate_python(top)
    except pydantic.ValidationError as error:
        # Report a misspelled key rather than the missing one that it causes.
        first = min(error.errors(), key=lambda item: item["type"] != "unexpected_keyword_argument")
        raise _refusal(top, str(file), first) from None
    claim_ids: set[str] = set()
    for section, claim in zip(top["claims"], ledger.claims, strict=True):
        if claim.document not in {document.code for document in ledger.documents}:
            raise section.refusal("id", f"is {claim.id}, but no document has that code", "add the document, or fix it")
        if claim.id in claim_ids:
            raise section.refusal("id", f"{claim.id} appears twice", "use another number")
        claim_ids.add(claim.id)
    references = [(section, "against", [check.against] if check.against else [])
                  for part, claim in zip(top["claims"], ledger.claims, strict=True)
                  for section, check in zip(part.get("checks", []), claim.checks, strict=True)]  # fmt: skip
    references += [(section, "between", [name for side in item.between for name in side])
                   for section, item in zip(top["contradictions"], ledger.contradictions, strict=True)]  # fmt: skip
    references += [(section, "claim", [item.claim])
                   for section, item in zip(top.get("corrections", []), ledger.corrections, strict=True)]  # fmt: skip
    for section, key, ids in references:
        if unknown := [name for name in ids if name not in claim_ids]:
            raise section.refusal(key, f"names {unknown[0]!r}", "name a claim of this ledger")
    return ledger


def _refusal(top: Any, file: str, problem: Any) -> UserError:
    """Return pydantic's first error as a UserError with FILE:LINE of the key."""
    node, place, key = top, getattr(top, "place", file), ""
    for key in problem["loc"]:
        if isinstance(node, Section) and key in node:
            place, node = node.key_place(key), node[key]
        elif isinstance(node, list) and isinstance(key, int):
            node = node[key]
            place = getattr(node, "place", place)
    if problem["type"] == "missing":
        return UserError(f"{place}: {key} is missing", f"add {key}: to it")
    if problem["type"] == "unexpected_keyword_argument":
        return UserError(f"{place}: unknown key {key!r}", "fix its name, or remove it")
    name = next((part for part in reversed(problem["loc"]) if isinstance(part, str)), "the file")
    return UserError(f"{place}: {name} is {repr(problem['input'])[:80]}", problem["msg"])


@functools.cache
def _arguments(form: str) -> type[pydantic.BaseModel]:
    """Return a pydantic model of a form's arguments, from its signature and the patterns of its strings."""
    kinds: dict[str, Any] = {"float": Number, "int": Whole, "str": Text}
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(FORMS[form].figure).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            words = WORDS.get(f"{form}.{key}") or WORDS.get(key)
            pattern = pydantic.Field(pattern=f"^(?:{words})$") if words else pydantic.Field()
            fields[key] = (
                Annotated[kinds[parameter.annotation], pattern],
                ... if parameter.default is parameter.empty else parameter.default,
            )
    return pydantic.create_model(form, **fields)


def _region(section: Section, form: str) -> Region:
    keys = section.keys() & _REGION_KEYS
    if form == "missing":
        if keys:
            raise section.refusal(min(keys), "does not apply to form: missing", "remove it")
        return Region()
    for key in keys:
        if type(section[key]) not in (int, float) or section[key] != section[key]:
            raise section.refusal(key, f"is {section[key]!r}", "write a number")
    if keys and keys <= {"at_least", "at_most"}:
        region = Region(*(float(section.get(key, end)) for key, end in (("at_least", "-inf"), ("at_most", "inf"))))
    elif keys == {"about", "within"}:
        if section["within"] < 0:
            raise section.refusal("within", f"is {section['within']!r}", "write a fraction of about, 0 or more")
        about, reach = section["about"], abs(section["about"]) * section["within"]
        region = Region(about - reach, about + reach)
    else:
        raise UserError(f"{section.place}: the region of the figure is incomplete",
                        "write at_least, at_most or both, or about with within, a fraction")  # fmt: skip
    if region.low > region.high:
        raise UserError(f"{section.place}: the lower limit is above the upper limit", "swap the two")
    return region


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
