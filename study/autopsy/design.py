"""The experiment as data: switches, cells, scales, expected signs and null margins. Without torch.

All of this was committed before the first session ran. A cell is named by one letter per switch: small where the
listing's way is kept (`ewpob` is the listing), large where it is corrected.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Kind = Literal["factorial", "corrected", "aa", "unclipped", "listing", "printed rate", "gate"]


@dataclasses.dataclass(frozen=True)
class Switch:
    letter: str
    name: str
    printed: str
    corrected: str
    line: str
    claims: tuple[str, ...]


SWITCHES = (
    Switch(
        "E", "engine", "set on arguments that are made already: off", "given to the arguments: on",
        "training_args.deepspeed = ...", ("S2-01", "S2-03", "S2-08"),
    ),
    Switch(
        "W", "weights", "one model for all arms: the later arm goes on", "each arm from the same initial weights",
        "model = ... at the top, model=model in train_model", ("S2-01", "S2-08"),
    ),
    Switch(
        "P", "process", "one process: the first arm warms it up", "a process for each arm",
        "train_model(...) three times", ("S2-03", "S2-04"),
    ),
    Switch(
        "O", "order", "standard always first", "ZeRO first; a corrected protocol has both orders",
        "std_... = train_model(with_zero=False), then the others", ("S2-01", "S2-03"),
    ),
    Switch(
        "B", "batch", "the row printed for ZeRO has batch 16", "8 in both arms",
        "zero_large_... = train_model(with_zero=True, batch_size=16)", ("S2-01", "S2-03", "S2-05"),
    ),
)  # fmt: skip
LETTERS = "".join(switch.letter for switch in SWITCHES)
PRINTED, CORRECTED = LETTERS.lower(), LETTERS
# Engine as printed and nothing else wrong: both arms are the same training.
AA = "eWPOB"
# The half of the 32 cells in which an odd number of switches is as printed: I = EWPOB, resolution V. No switch and no
# pair of switches is mixed up with another one; pairs are, with triples.
FACTORIAL = tuple(
    cell
    for cell in ("".join(each) for each in itertools.product(*zip(PRINTED, CORRECTED, strict=True)))
    if sum(map(str.islower, cell)) % 2
)
SEEDS = tuple(range(1, 9))

# The line of a lane that can run sessions, and the file in which a process leaves its result.
READY, RESULT = "ready", "result.json"
PRINTED_RATE = 5e-5
_AT_PRINTED_RATE = {"learning_rate": PRINTED_RATE}

# -1.22 % validation loss and -1.18 % training loss at the end of S2's training.
PUBLISHED = {"eval_loss": -0.0122, "train_loss": -0.0118}
# The null margin: 10 % of the published effect, or twice the SD of two equal arms where that is more.
LOSS_MARGIN, AA_DEVIATIONS = 0.0012, 2.0
# Below this a time or a memory is called unchanged.
TIME_MARGIN, MEMORY_MARGIN = 0.03, 0.01


@dataclasses.dataclass(frozen=True)
class Response:
    """The log of the ZeRO arm's figure over the standard arm's."""

    name: str
    words: str
    margin: float


RESPONSES = (
    Response("train_loss", "training loss, as logged last", LOSS_MARGIN),
    Response("eval_loss_200", "evaluation loss on the listing's 200 samples", LOSS_MARGIN),
    Response("eval_loss", "evaluation loss on all samples", LOSS_MARGIN),
    Response("whole_s", "the listing's clock", TIME_MARGIN),
    Response("less_eval_s", "without evaluations", TIME_MARGIN),
    Response("less_eval_and_save_s", "without evaluations and checkpoint", TIME_MARGIN),
    Response("warm_s_per_sample", "a sample in warm steps", TIME_MARGIN),
    # Independent of other work on the same cores. A GPU's work is in neither.
    Response("whole_cpu_s", "the listing's clock, in CPU time", TIME_MARGIN),
    Response("warm_cpu_s_per_sample", "a sample in warm steps, in CPU time", TIME_MARGIN),
    Response("device_peak_never_reset", "device, never reset", MEMORY_MARGIN),
    Response("device_peak_reset", "device, reset for each arm", MEMORY_MARGIN),
    Response("host_peak_never_reset", "host, never reset", MEMORY_MARGIN),
    Response("host_peak_reset", "host, reset for each arm", MEMORY_MARGIN),
)

# What correcting a switch does to the responses, in their order: three losses, six times, four memories. `?` where
# either sign was thought possible. For E, W, P and B: where the standard arm comes first, as printed.
_EXPECTED = {
    "E": "000 ++++++ ?-++",
    "W": "+?? 000000 0000",
    "P": "000 +++0+0 ----",
    "O": "+?? +++0+0 -?-?",
    "B": "--- ++++++ ----",
}
EXPECTED: Mapping[str, Mapping[str, str]] = {
    letter: dict(zip((response.name for response in RESPONSES), signs.replace(" ", ""), strict=True))
    for letter, signs in _EXPECTED.items()
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """Where and how large; `options` are flags of study/train.py. What the listing prints and is the same everywhere
    stands here as defaults."""

    name: str
    box: str
    options: Mapping[str, Any]
    minutes: float
    wide_samples: int
    on_gpu: bool
    # Sessions side by side, each with this many threads; 0 leaves threads as they are.
    lanes: int
    threads: int
    limit_s: float
    train_samples: int = 800
    eval_samples: int = 200
    batch: int = 8
    printed_zero_batch: int = 16
    eval_steps: int = 50
    logging_steps: int = 10


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "laptop", "two cores, no GPU",
            # At the listing's 5e-5 a tiny model that starts from nothing is still at chance after 100 steps.
            {"scale": "laptop", "model_name_or_path": "bert-tiny-1layers", "learning_rate": 1e-3, "dropout": -1.0,
             "warmup_ratio": 0.0},
            minutes=35, wide_samples=1000, on_gpu=False, lanes=2, threads=1, limit_s=300,
        ),
        Scale(
            "a100", "one GPU of 16 GB or more, and the network for BERT-large and IMDB",
            {"scale": "paper"},
            minutes=480, wide_samples=4000, on_gpu=True, lanes=1, threads=0, limit_s=1800,
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AutopsyArm:
    """One training of a session. `engine`: none, late (on arguments that exist already) or given (to them)."""

    name: str
    batch: int
    engine: Literal["none", "late", "given"] = "none"
    # Of the DeepSpeed dictionary: what the listing prints, that with a batch size, or that with clipping as well.
    keys: Literal["printed", "batch", "batch and clipping"] = "printed"
    launcher: bool = False
    start: Literal["initial", "same model", "file"] = "initial"
    leaves_file: bool = False


@dataclasses.dataclass(frozen=True)
class Session:
    """Both arms once, from the initial weights of one seed. `arms` lists them by process."""

    kind: Kind
    cell: str
    seed: int
    processes: tuple[tuple[AutopsyArm, ...], ...]
    # Beside those of the scale.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.seed}-{self.kind}-{self.cell}".replace(" ", "-").replace(",", "").replace("'", "")


def plan(scale: Scale, seeds: tuple[int, ...] = SEEDS) -> list[Session]:
    """Gates first; then seeds as blocks, each with its cells in an order of its own."""
    return [*_gates(), *itertools.chain.from_iterable(_block(scale, seed) for seed in seeds)]


def _block(scale: Scale, seed: int) -> Iterator[Session]:
    sessions = [_factorial("factorial", cell, seed, scale) for cell in FACTORIAL]
    sessions += [_factorial("corrected", CORRECTED, seed, scale), _factorial("aa", AA, seed, scale)]
    sessions += [_factorial("unclipped", CORRECTED, seed, scale), _listing(scale, seed)]
    if scale.options.get("learning_rate", PRINTED_RATE) != PRINTED_RATE:
        sessions.append(dataclasses.replace(_listing(scale, seed), kind="printed rate", options=_AT_PRINTED_RATE))
    random.Random(f"autopsy {seed}").shuffle(sessions)
    return iter(sessions)


def _factorial(kind: Kind, cell: str, seed: int, scale: Scale) -> Session:
    on, fresh, own, zero_first, equal = (letter in cell for letter in LETTERS)
    keys: Literal["batch", "batch and clipping"] = "batch" if kind == "unclipped" else "batch and clipping"
    batch = scale.batch if equal else scale.printed_zero_batch
    zero = AutopsyArm("zero", batch, "given", keys, True) if on else AutopsyArm("zero", batch, "late")
    arms = [AutopsyArm("standard", scale.batch), zero]
    first, second = reversed(arms) if zero_first else arms
    if not fresh:
        # One object only where the listing has it: no engine keeps its weights, and the process is the same.
        through_file = on or own
        first = dataclasses.replace(first, leaves_file=through_file)
        second = dataclasses.replace(second, start="file" if through_file else "same model")
    return Session(kind, cell, seed, ((first,), (second,)) if own else ((first, second),))


def _listing(scale: Scale, seed: int) -> Session:
    """All three of its runs, where the factorial has the two that its table prints."""
    small = AutopsyArm("zero8", scale.batch, "late", start="same model")
    large = AutopsyArm("zero", scale.printed_zero_batch, "late", start="same model")
    return Session("listing", PRINTED, seed, ((AutopsyArm("standard", scale.batch), small, large),))


# What stands between the listing's dictionary and an engine that runs.
GATES: Mapping[str, AutopsyArm] = {
    "as printed": AutopsyArm("zero", 8, "late"),
    "given": AutopsyArm("zero", 8, "given", "printed", False),
    "given, with a launcher's environment": AutopsyArm("zero", 8, "given", "printed", True),
    "given, with a batch size": AutopsyArm("zero", 8, "given", "batch", False),
    "given, with both": AutopsyArm("zero", 8, "given", "batch", True),
}


def _gates() -> list[Session]:
    return [Session("gate", name, 0, ((arm,),)) for name, arm in GATES.items()]
