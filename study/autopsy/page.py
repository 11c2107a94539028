"""The page of the autopsy and its figures, from its records alone."""

from __future__ import annotations

import base64
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from study.autopsy.contrasts import (
    FILE,
    Effect,
    corrected_ratio,
    detectable,
    effects,
    engine_equivalence,
    engine_was_on,
    gaps,
    is_as_printed,
    measured_responses,
    model,
    of_cell,
    printed_ratio,
    ratio,
    read_arms,
    read_sessions,
)
from study.autopsy.design import AA, CORRECTED, GATES, PRINTED, PUBLISHED, SCALES, SWITCHES
from study.autopsy.figures import drawings, headline
from study.autopsy.run import MARK
from study.config.errors import UserError
from study.records.statistics import Interval, percent
from study.report.site.page import page_html, table_markdown
from study.report.site.place import FIGURES, put_in_place
from study.report.site.show import as_png

TITLE = "The published listing, taken apart"


def build(runs: Path, output: Path, *, runs_named: bool) -> Path:
    """From the sessions in `runs`, or from what an earlier report kept; nothing but records goes in."""
    arms = read_sessions(runs) if (runs / MARK).is_file() or runs_named else read_arms(output)
    if model(gaps(arms, "eval_loss")).terms.empty:
        raise UserError("no seed has all its 16 cells yet", "run: study autopsy run")
    output.resolve().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.building-", dir=output.resolve().parent))
    try:
        arms.to_parquet(folder / FILE, index=False, compression="zstd")
        pictures = {drawing.name: drawing for drawing in drawings(arms)}
        (folder / FIGURES).mkdir()
        pngs = {name: as_png(drawing.figure) for name, drawing in pictures.items()}
        for name, png in pngs.items():
            (folder / FIGURES / f"{name}.png").write_bytes(png)
        shown = {name: {"png": base64.b64encode(png).decode(), "alt": pictures[name].alt} for name, png in pngs.items()}
        content = _content(arms)
        html = page_html("autopsy.html.j2", TITLE, {"index": TITLE}, "index", pictures=shown, **content)
        (folder / "index.html").write_text(html, encoding="utf-8")
        (folder / "summary.md").write_text(_markdown(content, pictures["screen"].alt), encoding="utf-8")
        put_in_place(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return output / "index.html"


def _content(arms: pd.DataFrame) -> dict[str, Any]:
    found = {response.name: effects(arms, response) for response in measured_responses(arms)}
    scale = SCALES[str(arms["scale"].iloc[0])]
    tables = {
        "As printed and corrected": _protocols(arms),
        "The switches": _switches(arms, found),
        "Expected, and found": _predictions(found),
        "What stands between the listing's dictionary and an engine that runs": _gates(arms),
        "Every effect": _every_effect(found),
    }
    return {
        "sentence": f"{headline(arms)}.", "facts": _facts(arms), "findings": _findings(arms, found), "tables": tables,
        "limits": _limits(scale.on_gpu, int(arms["lanes"].max())), "failures": _failures(arms),
    }  # fmt: skip


def _facts(arms: pd.DataFrame) -> list[str]:
    environments = [json.loads(text) for text in arms["environment"].unique() if text != "null"]
    sessions = arms.drop_duplicates("session")
    last = environments[-1]
    packages = last["packages"]
    device = ", ".join(each["name"] for each in last["devices"]) or "no accelerator"
    commits = sorted({str(each["git_commit"])[:12] for each in environments})
    minutes = sessions["session_s"].sum() / 60 / sessions["lanes"].max()
    return [
        f"{len(sessions)} sessions, {int((sessions['state'] == 'ok').sum())} ok",
        f"{len(model(gaps(arms, 'eval_loss')).terms)} seeds with all their cells",
        f"{last['cpu']}, {device}",
        *(f"{name} {packages[name]}" for name in ("torch", "transformers", "accelerate", "deepspeed")),
        f"commit {', '.join(commits)}",
        f"{sessions['started_at'].min()[:10]}, {minutes:.0f} minutes",
    ]


def _share(found: Interval) -> str:
    return found.brief(lambda value: percent(value - 1, signed=True)) if found.n else "-"


def _findings(arms: pd.DataFrame, found: dict[str, list[Effect]]) -> list[str]:
    """What the records say, in sentences that change with them."""
    evaluation = next(each for each in measured_responses(arms) if each.name == "eval_loss")
    told = {name: {each.letter: each for each in made} for name, made in found.items()}
    equal = engine_equivalence(arms, evaluation)
    clock = next(each for each in measured_responses(arms) if each.name == "whole_s")
    at_rate, train_at_rate = (
        ratio(of_cell(arms, loss, "printed rate", PRINTED)) for loss in ("eval_loss", "train_loss")
    )
    memory = next(name for name in ("device_peak_never_reset", "host_peak_never_reset") if name in found)
    engine = "" if engine_was_on(arms, is_as_printed)[0] else ", without DeepSpeed"
    lines = [
        f"As printed, the ZeRO row's evaluation loss is {_share(printed_ratio(arms, 'eval_loss'))} beside the standard"
        f" row's and its training loss {_share(printed_ratio(arms, 'train_loss'))}{engine}. Published are"
        f" {percent(PUBLISHED['eval_loss'], signed=True)} and {percent(PUBLISHED['train_loss'], signed=True)}:"
        f" {_where(arms, 'eval_loss')} the first interval and {_where(arms, 'train_loss')} the second.",
        f"Fresh weights change the evaluation loss by {_share(told['eval_loss']['W'].ratio)}, the engine by"
        f" {_share(told['eval_loss']['E'].ratio)}: {equal.text()}.",
        f"On the listing's clock the ZeRO row is {_share(printed_ratio(arms, 'whole_s'))} beside the standard"
        f" row{engine}; one batch size for both changes that by {_share(told['whole_s']['B'].ratio)}.",
        "Corrected, ZeRO-3 with its optimizer on the host is beside the standard arm"
        f" {_share(corrected_ratio(arms, 'eval_loss'))} in evaluation loss, {_share(corrected_ratio(arms, 'whole_s'))}"
        f" on the clock and {_share(corrected_ratio(arms, memory))} in the {memory.partition('_')[0]}'s peak memory.",
        f"Two equal arms differ by {_share(ratio(of_cell(arms, 'eval_loss', 'aa', AA)))} in evaluation loss and by"
        f" {_share(ratio(of_cell(arms, 'whole_s', 'aa', AA)))} on the clock: an effect of"
        f" {percent(detectable(arms, clock))} on it would be seen four times in five.",
        _came_out(found),
    ]
    if at_rate.n:
        lines.append(
            "At the listing's own learning rate of 5e-5 this model, which starts from nothing, ends its first arm with"
            f" {_level(arms, 'standard')} (chance is {math.log(2):.3f}). The third run is {_share(at_rate)} beside it"
            f" in evaluation loss and {_share(train_at_rate)} in training loss."
        )
    return lines


def _where(arms: pd.DataFrame, loss: str) -> str:
    found = printed_ratio(arms, loss)
    if found.low is None or found.high is None:
        return "beside"
    return "inside" if found.low <= 1 + PUBLISHED[loss] <= found.high else "outside"


def _came_out(found: dict[str, list[Effect]]) -> str:
    verdicts = [effect.verdict for made in found.values() for effect in made]
    right, wrong, undecided, left_open = (
        verdicts.count(each) for each in ("as expected", "not as expected", "not decided", "open")
    )
    return (
        f"Of {len(verdicts) - left_open} signs expected before the first session {right} came out, {wrong} did not, and"
        f" {undecided} are not decided."
    )


def _level(arms: pd.DataFrame, arm: str) -> str:
    mine = arms[(arms["kind"] == "printed rate") & (arms["arm"] == arm)]
    return f"{mine['eval_loss'].mean():.3f} nats, accuracy {mine['eval_accuracy'].mean():.2f}"


def _protocols(arms: pd.DataFrame) -> pd.DataFrame:
    """ZeRO beside standard under three protocols, and two equal arms."""
    rows = []
    for each in measured_responses(arms):
        rows.append({
            "ZeRO over standard": each.words,
            "as printed": _share(printed_ratio(arms, each.name)),
            "third run of the listing": _share(ratio(of_cell(arms, each.name, "listing", PRINTED))),
            "corrected": _share(corrected_ratio(arms, each.name)),
            "corrected, clipping not asked for": _share(ratio(of_cell(arms, each.name, "unclipped", CORRECTED))),
            "two equal arms": _share(ratio(of_cell(arms, each.name, "aa", AA))),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _switches(arms: pd.DataFrame, found: dict[str, list[Effect]]) -> pd.DataFrame:
    rows = []
    mine = arms[(arms["kind"] == "factorial") & (arms["state"] == "ok")].drop_duplicates("session")
    named: list[str] = [
        name for name in ("eval_loss", "train_loss", "whole_s", "warm_cpu_s_per_sample") if name in found
    ]
    named += [name for name in ("device_peak_never_reset", "host_peak_never_reset") if name in found][:1]
    for place, switch in enumerate(SWITCHES):
        printed = int(mine["cell"].str.contains(switch.letter.lower()).sum())
        rows.append({
            "switch": f"{switch.letter} {switch.name}", "as printed": switch.printed, "corrected": switch.corrected,
            "in the listing": switch.line, "claims": ", ".join(switch.claims),
            "sessions": f"{printed} and {len(mine) - printed}",
            **{found[name][place].response.words: _told(found[name][place]) for name in named},
        })  # fmt: skip
    return pd.DataFrame(rows)


def _told(effect: Effect) -> str:
    return f"{_share(effect.ratio)}, p {effect.p:.2g}"


def _predictions(found: dict[str, list[Effect]]) -> pd.DataFrame:
    """Committed before the first session, beside what came out."""
    rows = []
    for made in found.values():
        row = {"expected → found, for": made[0].response.words}
        row |= {effect.letter: f"{effect.expected} → {effect.outcome}{_MARKS[effect.verdict]}" for effect in made}
        rows.append(row | {"nothing is below": percent(made[0].margin)})
    return pd.DataFrame(rows)


_MARKS = {"as expected": " ✓", "not as expected": " ✗", "not decided": "", "open": ""}


def _every_effect(found: dict[str, list[Effect]]) -> pd.DataFrame:
    rows = [
        {"switch": effect.letter, "figure": effect.response.words, "effect": _told(effect),
         "over both orders": _share(effect.average), "expected": effect.expected, "found": effect.outcome}
        for made in found.values() for effect in made
    ]  # fmt: skip
    return pd.DataFrame(rows).sort_values("switch", key=lambda names: names.map(CORRECTED.index), kind="stable")


def _gates(arms: pd.DataFrame) -> pd.DataFrame:
    gates = arms[arms["kind"] == "gate"].drop_duplicates("cell").set_index("cell")
    rows = []
    for name in GATES:
        if name in gates.index:
            one = gates.loc[name]
            on = "the engine is on" if one.get("deepspeed_enabled") is True else "no engine, and no word of it"
            clip = f"; clips at {one['clips_at']:g}" if one["state"] == "ok" else ""
            rows.append(
                {"the dictionary": name, "what happens": f"{on}{clip}" if one["state"] == "ok" else one["reason"]}
            )
    return pd.DataFrame(rows)


def _failures(arms: pd.DataFrame) -> list[str]:
    bad = arms[(arms["state"] != "ok") & (arms["kind"] != "gate")].drop_duplicates("session")
    return [f"{one.session}: {one.state}, {one.reason}" for one in bad.itertuples()]


def _limits(on_gpu: bool, at_once: int) -> list[str]:
    lines = [
        "The middle run of the listing, ZeRO at batch 8, is left out of the factorial, as its table leaves it out; the"
        " third run of the listing has it.",
        "A pair of switches is mixed up with a triple of the others; a switch, with the other four. Where triples act,"
        " the waterfall ends elsewhere than where the corrected cell is measured.",
        "Rows for ZeRO are labelled stage 2 and ask for stage 3, MB are MiB, one epoch is printed where five are"
        " claimed, and there is no standard run at batch 16: read from the text, not measured.",
        "A found 0 is an interval inside what counts as nothing, a sign one that excludes zero, and ? neither.",
        "All arms see the samples in one order and draw dropout from one seed, 42, as the listing's do; seeds here draw"
        " the initial weights.",
        f"Sessions ran {at_once} at a time. Their order is drawn by lot: what else the box does is noise and no bias.",
    ]
    return lines if on_gpu else [*lines, *_LAPTOP]


_ELSEWHERE = SCALES["a100"]
_LAPTOP = (
    "A laptop has no device memory, no PCIe and no kernels that differ from run to run. What ZeRO saves on a GPU, what"
    " its offload costs there, and how far two equal arms drift apart, only a GPU says: `study autopsy run --scale"
    f" {_ELSEWHERE.name}`, on {_ELSEWHERE.box}, about {_ELSEWHERE.minutes / 60:.0f} hours (an estimate), in parts if"
    " wanted.",
    "The model is one layer that starts from nothing, at 1e-3, where BERT-large starts from published weights at 5e-5:"
    " signs carry over, figures do not.",
)


def _markdown(content: dict[str, Any], alt: str) -> str:
    parts = [
        f"# {TITLE}", f"**{content['sentence']}**", " · ".join(content["facts"]),
        f"![{alt}]({FIGURES}/screen.png)", _list(content["findings"]),
    ]  # fmt: skip
    for name, table in content["tables"].items():
        parts += [f"## {name}", table_markdown(table).rstrip("\n")]
    parts += ["## What this cannot say", _list(content["limits"])]
    if content["failures"]:
        parts += ["## Sessions that did not end", _list(content["failures"])]
    parts.append(
        "Made by `study autopsy report` from `arms.parquet`; `study autopsy run` makes the sessions anew. Design,"
        " expected signs and margins were committed before the first of them."
    )
    return "\n\n".join(parts) + "\n"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
