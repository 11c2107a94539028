"""The ledger: every claim, the conditions under which it is true, and its checks. pydantic validates it strictly."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import pydantic
from pydantic.dataclasses import dataclass

from study.claims.evidence import Evidence
from study.claims.forms import FORMS
from study.claims.verdicts import PROXY, Basis, CheckResult, Figure, Kind, NoRecords, NotJudged, Region, awaited, number
from study.config.errors import UserError
from study.config.yaml_sections import Section, read_document
from study.records.statistics import mean_p

LEDGER = Path(__file__).with_name("ledger.yaml")
_STRICT = pydantic.ConfigDict(extra="forbid")
Text = Annotated[str, pydantic.Field(pattern=r"\S"), pydantic.AfterValidator(lambda text: " ".join(text.split()))]
Number = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, pydantic.Field(strict=True, ge=0)]
Flag = Annotated[bool, pydantic.Field(strict=True)]
CLAIM_ID = r"^[SZ]\d-\d\d$"
ClaimId = Annotated[str, pydantic.Field(pattern=CLAIM_ID)]


def _claim_of_ledger(claim: str, info: pydantic.ValidationInfo) -> str:
    if claim and info.context and claim not in (entry.get("id") for entry in info.context["claims"]):
        raise ValueError("name a claim of this ledger")
    return claim


def _unique_id(claim: str, info: pydantic.ValidationInfo) -> str:
    if info.context and claim.split("-")[0] not in (entry.get("code") for entry in info.context["documents"]):
        raise ValueError("no document has that code")
    if info.context and [entry.get("id") for entry in info.context["claims"]].count(claim) > 1:
        raise ValueError("it appears twice")
    return claim


Named = Annotated[str, pydantic.AfterValidator(_claim_of_ledger)]


@dataclass(frozen=True, config=_STRICT)
class Document:
    """A studied document, with its code and the scale of its experiments."""

    code: Text
    title: Text
    scale: Text
    # Title, publisher and address, in Markdown.
    source: str = ""


@dataclass(frozen=True, config=_STRICT)
class DecidingExperiment:
    """Experiment that would settle the claim."""

    command: Text
    minutes: Number
    box: Text


@dataclass(frozen=True, config=_STRICT)
class Correction:
    """An error in a verdict or an entry, with the date of its correction."""

    date: Annotated[str, pydantic.Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    claim: Named
    what: Text
    why: Text


@dataclass(frozen=True, config=_STRICT)
class ClaimCheck:
    """One check of a claim: a form with its arguments, and the region that the claim allows."""

    form: str
    # The figure in a few words.
    shows: Text
    # The arguments of the form.
    numbers: Mapping[str, Any]
    # The region that the claim allows: one bound or both, or a fraction around a figure.
    at_least: Number | None = None
    at_most: Number | None = None
    about: Number | None = None
    within: Annotated[Number, pydantic.Field(ge=0)] | None = None
    unit: str = ""
    # The words of the claim that it tests, and the reading of them; empty: the whole claim, every reading.
    tests: str = ""
    reading: str = ""
    # The claim is false or undecided if this part is.
    decides: Flag = False
    necessary: Flag = False
    # Made with a tiny model or on fewer ranks than the claim's.
    proxy: Flag = False
    # It compares figures of the claim with each other.
    internal: Flag = False
    # Address of the publication that has the numbers.
    source: str = ""
    # The claim that it is compared with: if they disagree, either may be wrong.
    against: Named = ""
    # The runs that would make its records, if there are none yet.
    needs: str = ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _split(cls, written: Any) -> Any:
        if not isinstance(written, Section):
            return written
        form = written.get("form")
        if form not in FORMS:
            raise written.refusal("form", f"is {form!r}", f"use one of {', '.join(FORMS)}")
        model = _arguments(form)
        arguments = {key: value for key, value in written.items() if key in model.model_fields}
        try:
            stated = model.model_validate(arguments)
        except pydantic.ValidationError as error:
            raise _refusal(written, written.place, error.errors()[0]) from None
        rest = {key: value for key, value in written.items() if key not in arguments}
        return {**rest, "numbers": stated.model_dump(exclude_unset=True)}

    @pydantic.model_validator(mode="after")
    def _has_region(self) -> ClaimCheck:
        keys = {key for key in ("at_least", "at_most", "about", "within") if getattr(self, key) is not None}
        complete = [{"at_least"}, {"at_most"}, {"at_least", "at_most"}, {"about", "within"}]
        if keys not in ([set()] if self.form == "missing" else complete):
            raise ValueError("the region is at_least, at_most or both, or about with within, a fraction")
        if self.region.low > self.region.high:
            raise ValueError("the lower limit is above the upper limit")
        return self

    @property
    def region(self) -> Region:
        """The figures that the claim allows."""
        if self.about is not None and self.within is not None:
            reach = abs(self.about) * self.within
            return Region(self.about - reach, self.about + reach)
        low, high = (-math.inf if self.at_least is None else self.at_least), self.at_most
        return Region(low, math.inf if high is None else high)

    @property
    def kind(self) -> Kind:
        """Kind of evidence: consistency for a comparison with another claim, else that of the form."""
        return "consistency" if self.against else FORMS[self.form].kind

    @property
    def basis(self) -> Basis:
        """Kind of evidence that its figure is."""
        if self.proxy:
            return PROXY
        if self.source:
            return "published"
        return "derived" if self.kind in ("arithmetic", "consistency") else "at scale"

    def find(self, evidence: Evidence) -> CheckResult:
        """Compute the figure and compare it with the region; the sentence begins with it, or with why it is missing."""
        try:
            figure = FORMS[self.form].figure(evidence, **self.numbers)
        except NotJudged as reason:
            if self.needs and isinstance(reason, NoRecords):
                reason = NotJudged(awaited(self.needs))
            return CheckResult(self, "not judged", f"{reason.sentence}: {self.shows}")
        return self.judge(figure)

    def judge(self, figure: Figure) -> CheckResult:
        """Compare a figure with the region."""
        answer = self.region.judge(figure)
        if self.against and answer == "fails":
            answer = "disputed"
        text = number(figure.value, self.unit)
        if figure.low is not None and figure.high is not None:
            text += f"{figure.spread}, n = {figure.n}"
        where = f" ({figure.note})" if figure.note else f" (as {self.against} has it)" if self.against else ""
        text += f"; the claim needs {self.region.words(self.unit)}{' in one reading' * bool(self.reading)}"
        return CheckResult(self, answer, f"{text}: {self.shows}{where}", figure, _p_value(figure, self.region))


# Which readings count: the keys of `readings` in the legend.
ReadingRule = Literal["words", "sentences", "defaults", "natural"]


@dataclass(frozen=True, config=_STRICT)
class RejectedReading:
    """A reading of a claim that was tried and does not count, with the rule that it breaks."""

    reading: Text
    rule: ReadingRule
    why: Text


@dataclass(frozen=True, config=_STRICT)
class Claim:
    """One claim of a document, with its checks."""

    id: Annotated[ClaimId, pydantic.AfterValidator(_unique_id)]
    place: Text
    says: Text
    holds_if: Text
    falls_if: Text
    # Word for word from the document.
    quote: str = ""
    # The ways to read its words, if there are several.
    readings: tuple[Text, ...] = ()
    rejected: tuple[RejectedReading, ...] = ()
    # Words of the quote that are not judged here: other claims judge them, or nothing rests on them.
    not_judged: tuple[Text, ...] = ()
    checks: tuple[ClaimCheck, ...] = ()
    # Why no record of this study can judge it, and which record would.
    untestable: str = ""
    # None if no experiment can decide between its readings.
    settle: DecidingExperiment | None = None
    # Of the published figure and of this study's figure.
    protocol: Annotated[Mapping[Literal["published", "here"], Text], pydantic.Field(min_length=2)] | None = None
    # Other explanations of a measured figure.
    alternatives: tuple[Text, ...] = ()
    # Why its parts, limits or readings are these, if a reader would have others.
    reasons: tuple[Text, ...] = ()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_complete(cls, written: Any) -> Any:
        if isinstance(written, Section) and "untestable" not in written:
            written.require_keys("settle")
            if not written.get("checks"):
                fix = "add one (form: missing names the records that it needs), or untestable: why"
                raise written.refusal("checks", "are missing", fix)
        return written

    @pydantic.model_validator(mode="after")
    def _quotes_what_it_leaves_out(self) -> Claim:
        if strange := [words for words in self.not_judged if words not in self.quote]:
            raise ValueError(f"not_judged {strange[0]!r} is not in the quote")
        return self

    @property
    def document(self) -> str:
        """Code of the claim's document."""
        return self.id.split("-")[0]


@dataclass(frozen=True, config=_STRICT)
class Contradiction:
    """Sides of claims that cannot both be true; one claim alone contradicts itself."""

    between: Annotated[tuple[tuple[Named, ...], ...], pydantic.Field(min_length=1)]
    why: Text


@dataclass(frozen=True, config=_STRICT)
class Ledger:
    """All documents, claims, contradictions and corrections, and the meaning of each finding and kind of evidence."""

    documents: tuple[Document, ...]
    claims: tuple[Claim, ...]
    contradictions: tuple[Contradiction, ...]
    corrections: tuple[Correction, ...] = ()
    legend: Mapping[str, Mapping[str, Text]] = dataclasses.field(default_factory=dict)


def read_ledger(file: Path = LEDGER) -> Ledger:
    """Read and validate the ledger; raise UserError with file and line of the first error."""
    top = read_document(file, Section)
    try:
        return pydantic.TypeAdapter(Ledger).validate_python(top, context=top)
    except pydantic.ValidationError as error:
        # Report a misspelled key rather than the missing one that it causes.
        first = min(error.errors(), key=lambda item: item["type"] != "unexpected_keyword_argument")
        raise _refusal(top, str(file), first) from None


@functools.cache
def committed_ledger() -> Ledger:
    """Return the ledger in git, read once: reading it takes a second, and each report of a build needs it."""
    return read_ledger()


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
    name = next((part for part in reversed(problem["loc"]) if isinstance(part, str)), "the entry")
    return UserError(f"{place}: {name} is {repr(problem['input'])[:80]}", problem["msg"])


@functools.cache
def _arguments(form: str) -> type[pydantic.BaseModel]:
    """Return a model of a form's arguments, from its signature."""
    hints, checked = get_type_hints(FORMS[form].figure, include_extras=True), {float: Number, int: Whole, str: Text}
    fields: dict[str, Any] = {
        key: (checked.get(hints[key], hints[key]), ... if parameter.default is parameter.empty else parameter.default)
        for key, parameter in inspect.signature(FORMS[form].figure).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return pydantic.create_model(form, **fields)


def _p_value(figure: Figure, region: Region) -> float | None:
    """Return the two-sided p of a t test at the nearest bound; None if the figure has no t interval."""
    if figure.standard_error is None or figure.df is None:
        return None
    value, *bounds = (
        end if figure.is_slope else math.log(end)
        for end in (figure.value, region.low, region.high)
        if math.isfinite(end)
    )
    distance = min(abs(value - bound) for bound in bounds)
    return mean_p(distance, max(figure.standard_error, 1e-12), figure.df)
