"""The autopsy of the published listing: its cells, its requests, and how it rates records."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import typing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from study.claims import forms
from study.claims.evidence import Evidence
from study.cli import main
from study.config.errors import UserError
from study.config.places import REPOSITORY
from study.experiments.autopsy.contrasts import FILE, Autopsy, read_arms
from study.experiments.autopsy.design import AA, CORRECTED, FACTORIAL, LETTERS, PRINTED, RESPONSES, SCALES, SEEDS, plan
from study.experiments.autopsy.page import build
from study.experiments.autopsy.run import MARK, SESSIONS, missing, open_folder

COMMITTED = REPOSITORY / "reports" / "autopsy"
TINY = dataclasses.replace(
    SCALES["laptop"], train_samples=96, eval_samples=8, wide_samples=16, eval_steps=3, logging_steps=3, limit_s=120
)


def test_no_switch_and_no_pair_is_confounded_with_another_one() -> None:
    assert len(FACTORIAL) == 16
    assert {PRINTED, AA} <= set(FACTORIAL)
    assert CORRECTED not in FACTORIAL
    signs = {letter: np.array([1 if letter in cell else -1 for cell in FACTORIAL]) for letter in LETTERS}
    assert set(np.prod(list(signs.values()), axis=0)) == {-1}
    pairs = [(first, second) for first in LETTERS for second in LETTERS if first < second]
    columns = np.array([*signs.values(), *(signs[first] * signs[second] for first, second in pairs)])
    assert (columns @ columns.T == 16 * np.eye(len(columns))).all()


def test_each_response_has_the_expected_sign_of_each_switch_as_registered() -> None:
    assert all(set(response.expected) == set(LETTERS) for response in RESPONSES)
    # As committed before the first session, in the order of the responses.
    registered = {
        "E": "000++++++?-++",
        "W": "+??0000000000",
        "P": "000+++0+0----",
        "O": "+??+++0+0-?-?",
        "B": "---++++++----",
    }
    expected = {letter: "".join(response.expected[letter] for response in RESPONSES) for letter in LETTERS}
    assert expected == registered


def test_every_seed_has_every_cell_once_and_in_a_different_order() -> None:
    sessions = plan(SCALES["laptop"])
    assert len({session.id for session in sessions}) == len(sessions)
    blocks = [[session.id.partition("-")[2] for session in sessions if session.seed == seed] for seed in SEEDS]
    assert {tuple(sorted(block)) for block in blocks} == {tuple(sorted(blocks[0]))}
    assert len({tuple(block) for block in blocks}) == len(SEEDS)
    kinds = [session.kind for session in sessions if session.seed == SEEDS[0]]
    assert [kinds.count(kind) for kind in ("factorial", "corrected", "aa")] == [16, 1, 1]


def synthetic(gap: Callable[[str, int], float]) -> Autopsy:
    """Return rows of sessions whose ZeRO arm has exp(gap) times the standard arm's figure in every response."""
    cells = [*(("factorial", cell) for cell in FACTORIAL), ("corrected", CORRECTED), ("aa", AA)]
    rows = [
        {
            "session": f"{seed}-{kind}-{cell}",
            "kind": kind,
            "cell": cell,
            "seed": seed,
            "state": "ok",
            "arm": arm,
            "deepspeed_enabled": arm == "zero" and "E" in cell,
        }
        | {response.name: ratio * (1 + seed / 10) for response in RESPONSES}
        for (kind, cell), seed in itertools.product(cells, SEEDS)
        for arm, ratio in (("standard", 1.0), ("zero", math.exp(gap(cell, seed))))
    ]
    return Autopsy(pd.DataFrame(rows))


def planted(cell: str, seed: int) -> float:
    """Return a gap without an engine effect, 0.1 less for a smaller batch; carried weights favour the second arm."""
    carried = 0.0 if "W" in cell else (-0.3 if "o" in cell else 0.3)
    return carried - (0.1 if "B" in cell else 0.0) + 0.001 * math.sin(37 * seed + len(cell) * ord(cell[0]))


def test_planted_effects_are_found_and_separate_from_the_order() -> None:
    by_letter = {effect.letter: effect for effect in synthetic(planted).effects["eval_loss"]}
    assert math.log(by_letter["W"].ratio.center) == pytest.approx(0.3, abs=0.002)
    assert math.log(by_letter["B"].ratio.center) == pytest.approx(-0.1, abs=0.002)
    assert (by_letter["E"].outcome, by_letter["W"].outcome, by_letter["B"].outcome) == ("0", "+", "-")
    # Two of 256 signs, by Holm for five switches.
    assert by_letter["W"].p == pytest.approx(5 * 2 / 2**8)
    # Averaging over both orders cancels the effect of carried weights.
    assert math.log(by_letter["W"].average.center) == pytest.approx(0, abs=0.002)
    fit = synthetic(planted).models["eval_loss"]
    shares = {letter: float(part.mean()) for letter, part in fit.shares().items()}
    assert (shares["W"], shares["O"]) == (pytest.approx(0.15, abs=0.002), pytest.approx(0.15, abs=0.002))
    # The shares lead from the listing to the corrected protocol in both orders.
    assert fit.printed().mean() + sum(shares.values()) == pytest.approx(fit.corrected().mean())
    assert fit.printed() == pytest.approx(synthetic(planted).cell_gaps("eval_loss", "factorial", PRINTED))


@pytest.mark.parametrize("figure", typing.get_args(forms.SessionFigure))
def test_claims_compute_the_same_from_the_table(figure: str) -> None:
    """Claims import nothing of experiments."""
    study, evidence = Autopsy(read_arms(COMMITTED)), Evidence(COMMITTED.parent)
    ours = study.ratio(figure, "corrected", CORRECTED)
    theirs = forms.corrected(evidence, figure=figure, least_sessions=8)
    assert theirs.n == ours.n == len(SEEDS)
    assert (theirs.value, theirs.low, theirs.high) == pytest.approx((ours.center, ours.low, ours.high), rel=1e-12)
    on, sessions = study.engine_was_on(all_as_printed=True)
    as_printed = forms.engine_as_printed(evidence, least_sessions=16)
    assert (as_printed.value, as_printed.n) == (on / sessions, sessions)


def test_an_effect_whose_corrected_p_is_not_significant_has_no_sign() -> None:
    effect = synthetic(planted).effects["eval_loss"][LETTERS.index("W")]
    assert (effect.is_significant, effect.outcome) == (True, "+")
    assert effect.ratio.low is not None
    assert effect.ratio.low > 1
    unsure = dataclasses.replace(effect, p=0.0625)
    assert (unsure.is_significant, unsure.outcome) == (False, "?")
    order = {item.letter: item for item in Autopsy(read_arms(COMMITTED)).effects["eval_loss"]}["O"]
    assert (order.p, order.outcome) == (pytest.approx(0.0625), "?")


def test_the_minimum_detectable_effect_is_found_in_four_of_five_studies() -> None:
    noise = dict(zip(SEEDS, stats.norm.ppf((np.arange(len(SEEDS)) + 0.5) / len(SEEDS)) * 0.02, strict=True))
    detectable = synthetic(lambda _, seed: noise[seed]).minimum_detectable_effect("eval_loss")
    n = len(SEEDS)
    # A difference of two means of four cells, in each seed.
    error = np.std(list(noise.values()), ddof=1) * math.sqrt(2 / 4) / math.sqrt(n)
    power = 1 - stats.nct.cdf(stats.t.ppf(0.975, n - 1), n - 1, detectable / error)
    assert power == pytest.approx(0.8, abs=0.03)


def test_a_seed_that_lacks_a_cell_is_in_no_effect() -> None:
    arms = synthetic(planted).arms
    arms.loc[(arms["seed"] == 3) & (arms["cell"] == PRINTED), "state"] = "failed"
    assert list(Autopsy(arms).models["eval_loss"].terms.index) == [seed for seed in SEEDS if seed != 3]


def test_finished_sessions_are_kept_and_cut_off_ones_are_not(tmp_path: Path) -> None:
    sessions = plan(TINY, (1,))
    (tmp_path / SESSIONS).mkdir()
    for session, text in zip(sessions, ('{"state": "ok"}', '{"state": "failed"}', '{"state": "o'), strict=False):
        (tmp_path / SESSIONS / f"{session.id}.json").write_text(text)
    assert missing(tmp_path, sessions) == sessions[2:]
    assert missing(tmp_path, sessions, retry=True) == sessions[1:]


def test_sessions_of_another_scale_are_not_mixed_in(tmp_path: Path) -> None:
    open_folder(tmp_path, SCALES["a100"]).release()
    with pytest.raises(UserError, match="another scale"):
        open_folder(tmp_path, SCALES["laptop"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_a100_scale_is_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autopsy", "run", "--scale", "a100"]) == 2
    assert "this machine has no GPU" in capsys.readouterr().err


def test_the_page_is_made_again_from_the_committed_records_alone(tmp_path: Path) -> None:
    shutil.copy(COMMITTED / FILE, tmp_path / FILE)
    (tmp_path / "files.json").write_text((COMMITTED / "files.json").read_text())
    build(tmp_path / "none", tmp_path, runs_named=False)
    assert (tmp_path / "summary.md").read_text() == (COMMITTED / "summary.md").read_text()
    page = (tmp_path / "index.html").read_text()
    assert page.index('class="answer"') < page.index("<img") < page.index('class="notes"'), "the answer comes first"
    assert not (tmp_path / MARK).exists()
