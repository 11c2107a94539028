"""The page of the autopsy, from its records only; notebooks/autopsy.ipynb draws its figures."""

from __future__ import annotations

import collections
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from study.config.errors import UserError
from study.config.text import percent
from study.experiments.autopsy.contrasts import FILE, Autopsy, Effect, read_arms, read_sessions, share_text
from study.experiments.autopsy.design import AA, CORRECTED, GATES, LETTERS, PRINTED, PUBLISHED, SCALES, SWITCHES, Kind
from study.experiments.autopsy.run import MARK
from study.records.statistics import NOT_SIGNIFICANT, equivalence_test
from study.report.document import PageSection, change_text, format_or_dash, page_html, page_markdown, paragraphs
from study.report.site.build import NOTEBOOKS, TIME_LIMIT_S, run_notebooks, take_figures, write_figures
from study.report.site.publishing import FIGURES, new_report

TITLE = "Why does S2's listing of one epoch show a lower loss in its ZeRO row?"
_FIGURES = "What each switch changes"
_PROTOCOLS: dict[str, tuple[Kind, str]] = {
    "as printed": ("factorial", PRINTED),
    "third run of the listing": ("listing", PRINTED),
    "corrected": ("corrected", CORRECTED),
    "corrected, clipping not asked for": ("unclipped", CORRECTED),
    "two equal arms": ("aa", AA),
}
# Smaller steps from the printed to the corrected protocol are not in the sentence.
_NOTABLE = 0.01
_MARKS = {"as expected": " ✓", "not as expected": " ✗"}


def build(runs: Path, output: Path, *, runs_named: bool) -> Path:
    """Build the page from the sessions in `runs`, or from the table of an earlier report, and return its path."""
    study = Autopsy(read_sessions(runs) if (runs / MARK).is_file() or runs_named else read_arms(output))
    if study.models["eval_loss"].terms.empty:
        raise UserError("no seed has all its 16 cells yet", "run: study autopsy run")
    with new_report(output, ()) as folder:
        study.arms.to_parquet(folder / FILE, index=False, compression="zstd", write_statistics=False)
        for name, why in run_notebooks(["autopsy"], NOTEBOOKS, folder, TIME_LIMIT_S, lambda _line: None).items():
            raise UserError(f"notebooks/{name}.ipynb failed in {why}", "fix that cell")
        # The first of each kind is about the loss, as the sentence is.
        by_panel = itertools.zip_longest(*take_figures(folder / "autopsy.ipynb").values())
        pictures = [picture for panel in by_panel for picture in panel if picture]
        write_figures(pictures, folder, {picture.name for picture in pictures})
        first, *remaining = sections(study)
        sessions = study.arms.drop_duplicates("session")
        facts, made_by = paragraphs(
            "autopsy_facts.j2",
            states=list(sessions["state"]),
            seeds=len(study.models["eval_loss"].terms),
            environments=[json.loads(text) for text in study.arms["environment"].unique() if text != "null"],
            started=sessions["started_at"].min(),
            minutes=sessions["session_s"].sum() / 60 / sessions["lanes"].max(),
        )
        html = page_html(
            "autopsy.html.j2",
            TITLE,
            {"index": TITLE},
            "index",
            lead="",
            facts=facts,
            failure="",
            numbers=_numbers(study),
            sections=[
                PageSection(sentence=first.sentence, drawings=pictures[:3]),
                PageSection(notes=first.notes),
                PageSection(_FIGURES, drawings=pictures[3:]),
                *remaining,
            ],
        )
        text = "\n\n".join(f"![{picture.alt}]({FIGURES}/{picture.name}.svg)" for picture in pictures)
        page = [PageSection(text=facts), first, PageSection(_FIGURES, text=text), *remaining, PageSection(text=made_by)]
        (folder / "index.html").write_text(html, encoding="utf-8")
        (folder / "summary.md").write_text(page_markdown(TITLE, page, _numbers(study)), encoding="utf-8")
    return output / "index.html"


def sections(study: Autopsy) -> list[PageSection]:
    """Return the sections of the page."""
    arms = study.arms
    bad = arms[(arms["state"] != "ok") & (arms["kind"] != "gate")].drop_duplicates("session")
    failures = [f"{row.session}: {row.state}, {row.reason}" for row in bad.itertuples()]
    limits = paragraphs(
        "autopsy_limits.j2",
        lanes=int(arms["lanes"].max()),
        gpu=SCALES["a100"],
        on_gpu=SCALES[str(arms["scale"].iloc[0])].on_gpu,
    )
    every_effect = pd.DataFrame(
        {
            "switch": effect.letter,
            "figure": effect.response.words,
            "effect": _effect_text(effect),
            "over both orders": share_text(effect.average),
            "expected": effect.expected,
            "found": effect.outcome,
        }
        for of_switch in zip(*study.effects.values(), strict=True)
        for effect in of_switch
    )
    # The signs that were committed before the first session, and those found.
    predictions = pd.DataFrame(
        {
            "expected → found, for": response.words,
            **{
                effect.letter: f"{effect.expected} → {effect.outcome}{_MARKS.get(effect.verdict, '')}"
                for effect in study.effects[name]
            },
            "null margin": percent(study.null_margin(name)),
        }
        for name, response in study.responses.items()
    )
    sentence, *findings = _findings(study)
    return [
        PageSection(sentence=sentence, notes=findings),
        PageSection("As printed and corrected", table=_protocols(study)),
        PageSection("The switches", table=_switches(study)),
        PageSection("Expected, and found", table=predictions),
        PageSection("From the listing's dictionary to an engine that runs", table=_gates(arms)),
        PageSection("Every effect", tables={"Each switch on each figure": every_effect}),
        PageSection("Limits", notes=limits),
        *([PageSection("Failed sessions", notes=failures)] if failures else []),
    ]


def _numbers(study: Autopsy) -> list[tuple[str, str]]:
    """Return the numbers at the head of the page, with their words."""
    was_on, asked = study.engine_was_on()
    gaps = {what: study.ratio("eval_loss", *at).center - 1 for what, at in _PROTOCOLS.items()}
    row = "evaluation loss of the ZeRO row against the standard row"
    published = f"published with BERT-large after five epochs: {change_text(PUBLISHED['eval_loss'])}"
    figures = {
        f"{row} when the listing, of one epoch, runs here; {published}": format_or_dash(
            gaps["as printed"], change_text
        ),
        "the same with every switch corrected": format_or_dash(gaps["corrected"], change_text),
        "sessions in which DeepSpeed ran, of those that set it as the listing does": f"{was_on} of {asked}",
    }
    return [(figure, words) for words, figure in figures.items()]


def _memory(study: Autopsy) -> str:
    return next(name for name in ("device_peak_never_reset", "host_peak_never_reset") if name in study.responses)


def _findings(study: Autopsy) -> list[str]:
    engine = 1 + 2 * study.models["eval_loss"].terms["E"]
    equivalence = equivalence_test(list(engine), [1.0] * len(engine), study.null_margin("eval_loss"))
    standard = study.arms[(study.arms["kind"] == "printed rate") & (study.arms["arm"] == "standard")]

    def share(kind: Kind, cell: str) -> Callable[[str], str]:
        return lambda response: share_text(study.ratio(response, kind, cell))

    largest = max(study.effects["eval_loss"], key=lambda effect: abs(math.log(effect.ratio.center)))
    means = {letter: part.mean() for letter, part in study.models["eval_loss"].shares().items()}
    steps = sorted(
        ((SWITCHES[LETTERS.index(letter)], mean) for letter, mean in means.items()), key=lambda x: -abs(x[1])
    )
    return paragraphs(
        "autopsy_findings.j2",
        largest=SWITCHES[LETTERS.index(largest.letter)],
        printed=share("factorial", PRINTED),
        corrected=share("corrected", CORRECTED),
        equal=share("aa", AA),
        third=share("printed rate", PRINTED),
        in_both_orders=share_text(largest.average),
        steps={switch: _step_text(study, switch.letter, step) for switch, step in steps if abs(step) > _NOTABLE},
        on=[*study.engine_was_on(), *study.engine_was_on(all_as_printed=True)],
        model="BERT-large" if (on_gpu := SCALES[str(study.arms["scale"].iloc[0])].on_gpu) else "a one-layer model",
        on_gpu=on_gpu,
        published={loss: percent(change, signed=True) for loss, change in PUBLISHED.items()},
        effect=lambda letter, name: _effect_text(study.effects[name][LETTERS.index(letter)]),
        equivalence=equivalence.text(),
        memory=_memory(study),
        detectable=percent(study.minimum_detectable_effect("whole_s")),
        verdicts=collections.Counter(effect.verdict for effects in study.effects.values() for effect in effects),
        at_rate={
            "loss": f"{standard['eval_loss'].mean():.3f}",
            "accuracy": f"{standard['eval_accuracy'].mean():.2f}",
            "chance": f"{math.log(2):.3f}",
        }
        if study.ratio("eval_loss", "printed rate", PRINTED).n
        else {},
    )


def _protocols(study: Autopsy) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "ZeRO over standard": response.words,
            **{what: share_text(study.ratio(name, *at)) for what, at in _PROTOCOLS.items()},
        }
        for name, response in study.responses.items()
    )


def _switches(study: Autopsy) -> pd.DataFrame:
    arms = study.arms
    sessions = arms[(arms["kind"] == "factorial") & (arms["state"] == "ok")].drop_duplicates("session")["cell"]
    printed = {switch.letter: int(sessions.str.contains(switch.letter.lower()).sum()) for switch in SWITCHES}
    shown = ("eval_loss", "train_loss", "whole_s", "warm_cpu_s_per_sample", _memory(study))
    return pd.DataFrame(
        {
            "switch": [f"{switch.letter} {switch.name}" for switch in SWITCHES],
            "as printed": [switch.printed for switch in SWITCHES],
            "corrected": [switch.corrected for switch in SWITCHES],
            "in the listing": [switch.line for switch in SWITCHES],
            "claims": [", ".join(switch.claims) for switch in SWITCHES],
            "sessions": [f"{count} and {len(sessions) - count}" for count in printed.values()],
            **{
                study.responses[name].words: map(_effect_text, study.effects[name])
                for name in shown
                if name in study.responses
            },
        }
    )


def _effect_text(effect: Effect) -> str:
    unsure = "" if effect.is_significant or effect.outcome == "0" else f", {NOT_SIGNIFICANT}"
    return f"{share_text(effect.ratio)}, p {effect.p:.2g}{unsure}"


def _step_text(study: Autopsy, letter: str, step: float) -> str:
    """Return a step of the waterfall; a switch whose effect is not significant has its p beside it."""
    effect = study.effects["eval_loss"][LETTERS.index(letter)]
    unsure = "" if effect.is_significant else f", p {effect.p:.2g}: {NOT_SIGNIFICANT}"
    return f"{change_text(math.expm1(step))}{unsure}"


def _gates(arms: pd.DataFrame) -> pd.DataFrame:
    gates = arms[arms["kind"] == "gate"].drop_duplicates("cell").set_index("cell")
    rows = []
    for name in (name for name in GATES if name in gates.index):
        gate = gates.loc[name]
        on = "the engine is on" if gate.get("deepspeed_enabled") is True else "no engine, and no message"
        what = f"{on}; clips at {gate['clips_at']:g}" if gate["state"] == "ok" else gate["reason"]
        rows.append({"the dictionary": name, "what happens": what})
    return pd.DataFrame(rows)
