"""The page of the autopsy and its figures, from its records only."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from pathlib import Path

import pandas as pd

from study.autopsy.contrasts import (
    FILE,
    Effect,
    cell_gaps,
    corrected_ratio,
    effects,
    engine_equivalence,
    engine_was_on,
    fit_linear_model,
    gaps,
    is_as_printed,
    mean_ratio,
    measured_responses,
    minimum_detectable_effect,
    printed_ratio,
    read_arms,
    read_sessions,
)
from study.autopsy.design import AA, CORRECTED, GATES, PRINTED, PUBLISHED, SCALES, SWITCHES
from study.autopsy.figures import drawings, headline
from study.autopsy.run import MARK
from study.config.errors import UserError
from study.config.text import percent
from study.records.statistics import Interval
from study.report.document import PageSection, page_html, page_markdown
from study.report.site.publishing import FIGURES, publish_report

TITLE = "The published listing, taken apart"
_MADE_BY = (
    "Made by `study autopsy report` from `arms.parquet`; `study autopsy run` makes the sessions anew. Design, expected"
    " signs and margins were committed before the first of them."
)


def build(runs: Path, output: Path, *, runs_named: bool) -> Path:
    """Build the page from the sessions in `runs`, or from the table of an earlier report, and return its path."""
    arms = read_sessions(runs) if (runs / MARK).is_file() or runs_named else read_arms(output)
    if fit_linear_model(gaps(arms, "eval_loss")).terms.empty:
        raise UserError("no seed has all its 16 cells yet", "run: study autopsy run")
    output.resolve().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.building-", dir=output.resolve().parent))
    try:
        arms.to_parquet(folder / FILE, index=False, compression="zstd")
        *panels, screen = drawings(arms)
        (folder / FIGURES).mkdir()
        for drawing in (*panels, screen):
            (folder / FIGURES / f"{drawing.name}.png").write_bytes(drawing.png)
        first, *remaining = sections(arms)
        facts = _facts(arms)
        html = page_html(
            "autopsy.html.j2", TITLE, {"index": TITLE}, "index", lead=facts, failure="",
            sections=[dataclasses.replace(first, drawings=panels), *remaining],
        )  # fmt: skip
        (folder / "index.html").write_text(html, encoding="utf-8")
        first = dataclasses.replace(first, text=f"{facts}\n\n![{screen.alt}]({FIGURES}/screen.png)")
        markdown = page_markdown(TITLE, [first, *remaining, PageSection(text=_MADE_BY)])
        (folder / "summary.md").write_text(markdown, encoding="utf-8")
        publish_report(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return output / "index.html"


def sections(arms: pd.DataFrame) -> list[PageSection]:
    """Return the sections of the page."""
    by_response = {response.name: effects(arms, response) for response in measured_responses(arms)}
    tables = {
        "As printed and corrected": _protocols(arms),
        "The switches": _switches(arms, by_response),
        "Expected, and found": _predictions(by_response),
        "From the listing's dictionary to an engine that runs": _gates(arms),
    }
    bad = arms[(arms["state"] != "ok") & (arms["kind"] != "gate")].drop_duplicates("session")
    failures = [f"{row.session}: {row.state}, {row.reason}" for row in bad.itertuples()]
    limits = _limits(SCALES[str(arms["scale"].iloc[0])].on_gpu, int(arms["lanes"].max()))
    return [
        PageSection(sentence=f"{headline(arms)}.", notes=_findings(arms, by_response)),
        *(PageSection(title, table=table) for title, table in tables.items()),
        PageSection("Every effect", tables={"Each switch on each figure": _every_effect(by_response)}),
        PageSection("Limits", notes=limits),
        *([PageSection("Failed sessions", notes=failures)] if failures else []),
    ]


def _facts(arms: pd.DataFrame) -> str:
    environments = [json.loads(text) for text in arms["environment"].unique() if text != "null"]
    sessions = arms.drop_duplicates("session")
    last = environments[-1]
    device = ", ".join(entry["name"] for entry in last["devices"]) or "no accelerator"
    commits = sorted({str(entry["git_commit"])[:12] for entry in environments})
    minutes = sessions["session_s"].sum() / 60 / sessions["lanes"].max()
    return " · ".join([
        f"{len(sessions)} sessions, {int((sessions['state'] == 'ok').sum())} ok",
        f"{len(fit_linear_model(gaps(arms, 'eval_loss')).terms)} seeds with all their cells",
        f"{last['cpu']}, {device}",
        *(f"{name} {last['packages'][name]}" for name in ("torch", "transformers", "accelerate", "deepspeed")),
        f"commit {', '.join(commits)}",
        f"{sessions['started_at'].min()[:10]}, {minutes:.0f} minutes",
    ])  # fmt: skip


def _share(estimate: Interval) -> str:
    return estimate.brief(lambda value: percent(value - 1, signed=True)) if estimate.n else "-"


def _findings(arms: pd.DataFrame, by_response: dict[str, list[Effect]]) -> list[str]:
    """Return the findings as sentences, computed from the records."""
    responses = {response.name: response for response in measured_responses(arms)}
    effect = {(name, item.letter): _share(item.ratio) for name, group in by_response.items() for item in group}
    printed = {name: printed_ratio(arms, name) for name in ("eval_loss", "train_loss", "whole_s")}
    memory = next(name for name in ("device_peak_never_reset", "host_peak_never_reset") if name in by_response)
    corrected = {name: _share(corrected_ratio(arms, name)) for name in ("eval_loss", "whole_s", memory)}
    equal = {name: _share(mean_ratio(cell_gaps(arms, name, "aa", AA))) for name in ("eval_loss", "whole_s")}
    engine = "" if engine_was_on(arms, is_as_printed)[0] else ", without DeepSpeed"
    verdicts = [item.verdict for group in by_response.values() for item in group]
    right, wrong, undecided, left_open = (
        verdicts.count(verdict) for verdict in ("as expected", "not as expected", "not decided", "open")
    )
    lines = [
        f"As printed, the ZeRO row's evaluation loss is {_share(printed['eval_loss'])} against the standard row's and"
        f" its training loss {_share(printed['train_loss'])}{engine}. The size does not carry over to"
        f" BERT-large, for which {percent(PUBLISHED['eval_loss'], signed=True)} and"
        f" {percent(PUBLISHED['train_loss'], signed=True)} are published after five epochs.",
        f"Fresh weights change the evaluation loss by {effect['eval_loss', 'W']}, the engine by"
        f" {effect['eval_loss', 'E']}: {engine_equivalence(arms, responses['eval_loss']).text()}.",
        f"On the listing's clock the ZeRO row is {_share(printed['whole_s'])} against the standard row{engine}; one"
        f" batch size for both changes that by {effect['whole_s', 'B']}.",
        f"Corrected, ZeRO-3 with its optimizer on the host is {corrected['eval_loss']} against the standard arm in"
        f" evaluation loss, {corrected['whole_s']} on the clock and {corrected[memory]} in the"
        f" {memory.partition('_')[0]}'s peak memory.",
        f"Two equal arms differ by {equal['eval_loss']} in evaluation loss and by {equal['whole_s']} on the clock: the"
        f" minimum detectable effect on it, found in four of five studies, is"
        f" {percent(minimum_detectable_effect(arms, responses['whole_s']))}.",
        f"{right} of {len(verdicts) - left_open} signs expected before the first session came out, {wrong} did not, and"
        f" {undecided} are not decided.",
    ]
    at_rate = {loss: mean_ratio(cell_gaps(arms, loss, "printed rate", PRINTED)) for loss in ("eval_loss", "train_loss")}
    if at_rate["eval_loss"].n:
        standard = arms[(arms["kind"] == "printed rate") & (arms["arm"] == "standard")]
        lines.append(
            "At the listing's own learning rate of 5e-5 this model, which starts from random weights, ends its first"
            f" arm with {standard['eval_loss'].mean():.3f} nats, accuracy {standard['eval_accuracy'].mean():.2f}"
            f" (chance is {math.log(2):.3f}). Against it, the third run is {_share(at_rate['eval_loss'])} in evaluation"
            f" loss and {_share(at_rate['train_loss'])} in training loss."
        )
    return lines


def _protocols(arms: pd.DataFrame) -> pd.DataFrame:
    """Compare ZeRO with standard under three protocols, and two equal arms."""
    rows = []
    for response in measured_responses(arms):
        rows.append({
            "ZeRO over standard": response.words,
            "as printed": _share(printed_ratio(arms, response.name)),
            "third run of the listing": _share(mean_ratio(cell_gaps(arms, response.name, "listing", PRINTED))),
            "corrected": _share(corrected_ratio(arms, response.name)),
            "corrected, clipping not asked for": _share(
                mean_ratio(cell_gaps(arms, response.name, "unclipped", CORRECTED))
            ),
            "two equal arms": _share(mean_ratio(cell_gaps(arms, response.name, "aa", AA))),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _switches(arms: pd.DataFrame, by_response: dict[str, list[Effect]]) -> pd.DataFrame:
    rows = []
    sessions = arms[(arms["kind"] == "factorial") & (arms["state"] == "ok")].drop_duplicates("session")
    names: list[str] = [
        name for name in ("eval_loss", "train_loss", "whole_s", "warm_cpu_s_per_sample") if name in by_response
    ]
    names += [name for name in ("device_peak_never_reset", "host_peak_never_reset") if name in by_response][:1]
    for place, switch in enumerate(SWITCHES):
        printed = int(sessions["cell"].str.contains(switch.letter.lower()).sum())
        rows.append({
            "switch": f"{switch.letter} {switch.name}", "as printed": switch.printed, "corrected": switch.corrected,
            "in the listing": switch.line, "claims": ", ".join(switch.claims),
            "sessions": f"{printed} and {len(sessions) - printed}",
            **{by_response[name][place].response.words: _effect_text(by_response[name][place]) for name in names},
        })  # fmt: skip
    return pd.DataFrame(rows)


def _effect_text(effect: Effect) -> str:
    return f"{_share(effect.ratio)}, p {effect.p:.2g}"


def _predictions(by_response: dict[str, list[Effect]]) -> pd.DataFrame:
    """Compare the signs that were committed before the first session with those found."""
    rows = []
    for group in by_response.values():
        row = {"expected → found, for": group[0].response.words}
        row |= {effect.letter: f"{effect.expected} → {effect.outcome}{_MARKS[effect.verdict]}" for effect in group}
        rows.append(row | {"null margin": percent(group[0].margin)})
    return pd.DataFrame(rows)


_MARKS = {"as expected": " ✓", "not as expected": " ✗", "not decided": "", "open": ""}


def _every_effect(by_response: dict[str, list[Effect]]) -> pd.DataFrame:
    rows = [
        {"switch": effect.letter, "figure": effect.response.words, "effect": _effect_text(effect),
         "over both orders": _share(effect.average), "expected": effect.expected, "found": effect.outcome}
        for group in by_response.values() for effect in group
    ]  # fmt: skip
    return pd.DataFrame(rows).sort_values("switch", key=lambda names: names.map(CORRECTED.index), kind="stable")


def _gates(arms: pd.DataFrame) -> pd.DataFrame:
    gates = arms[arms["kind"] == "gate"].drop_duplicates("cell").set_index("cell")
    rows = []
    for name in GATES:
        if name in gates.index:
            gate = gates.loc[name]
            on = "the engine is on" if gate.get("deepspeed_enabled") is True else "no engine, and no message"
            clip = f"; clips at {gate['clips_at']:g}" if gate["state"] == "ok" else ""
            rows.append(
                {"the dictionary": name, "what happens": f"{on}{clip}" if gate["state"] == "ok" else gate["reason"]}
            )
    return pd.DataFrame(rows)


def _limits(on_gpu: bool, at_once: int) -> list[str]:
    lines = [
        "The middle run of the listing, ZeRO at batch 8, is left out of the factorial, as in its table; the third run"
        " of the listing has it.",
        "A pair of switches is confounded with a triple of the others; a switch, with the other four. Where triples"
        " act, the waterfall does not end at the measured corrected cell.",
        "Rows for ZeRO are labelled stage 2 and ask for stage 3, MB are MiB, one epoch is printed where five are"
        " claimed, and there is no standard run at batch 16: read from the text, not measured.",
        "A found 0 is an interval inside the null margin, a sign one that excludes zero, and ? neither.",
        "All arms see the samples in one order and draw dropout from one seed, 42, as the listing's do; seeds here draw"
        " the initial weights.",
        f"Sessions ran {at_once} at a time. Their order is random: other work on the machine is noise and not a bias.",
    ]
    return lines if on_gpu else [*lines, *_LAPTOP]


_ELSEWHERE = SCALES["a100"]
_LAPTOP = (
    "A laptop has no device memory, no PCIe and no kernels that differ from run to run. What ZeRO saves on a GPU, what"
    " its offload costs there, and how far two equal arms drift apart, needs a GPU: `study autopsy run --scale"
    f" {_ELSEWHERE.name}`, on {_ELSEWHERE.box}, about {_ELSEWHERE.minutes / 60:.0f} hours (an estimate), in parts if"
    " wanted.",
    "The model is one layer with random weights, at 1e-3, where BERT-large starts from published weights at 5e-5:"
    " signs carry over, figures do not.",
)
