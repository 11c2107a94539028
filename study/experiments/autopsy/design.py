"""The experiment as data: switches, cells, scales, expected signs and null margins. Without torch.

All of this was committed before the first session ran. A cell's name has one letter per switch: lower case as printed
(`ewpob` is the listing), upper case if the switch is corrected.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["factorial", "corrected", "aa", "unclipped", "listing", "printed rate", "gate"]


@dataclasses.dataclass(frozen=True)
class Switch:
    """A protocol error of the listing that the experiment turns on and off."""

    letter: str
    name: str
    printed: str
    corrected: str
    line: str
    claims: tuple[str, ...]


SWITCHES = (
    Switch(
        "E",
        "engine",
        "set on arguments that are made already: off",
        "given to the arguments: on",
        "training_args.deepspeed = ...",
        ("S2-01", "S2-03", "S2-08"),
    ),
    Switch(
        "W",
        "weights",
        "one model for all arms: a later one starts with trained weights",
        "each arm from the same initial weights",
        "model = ... at the top, model=model in train_model",
        ("S2-01", "S2-08"),
    ),
    Switch(
        "P",
        "process",
        "one process: the first arm warms it up",
        "a process for each arm",
        "train_model(...) three times",
        ("S2-03", "S2-04"),
    ),
    Switch(
        "O",
        "order",
        "standard always first",
        "ZeRO first; a corrected protocol has both orders",
        "std_... = train_model(with_zero=False), then the others",
        ("S2-01", "S2-03"),
    ),
    Switch(
        "B",
        "batch",
        "the row printed for ZeRO has batch 16",
        "8 in both arms",
        "zero_large_... = train_model(with_zero=True, batch_size=16)",
        ("S2-01", "S2-03", "S2-05"),
    ),
)
LETTERS = "".join(switch.letter for switch in SWITCHES)
PRINTED, CORRECTED = LETTERS.lower(), LETTERS
# A/A sessions: the engine as printed (off) and all else corrected, so both arms are the same training.
AA = "eWPOB"
# Half fraction of the 32 cells, with an odd number of switches as printed: I = EWPOB, resolution V. Switches and pairs
# are not confounded with each other; a pair is confounded with a triple.
FACTORIAL = tuple(
    cell
    for cell in ("".join(letters) for letters in itertools.product(*zip(PRINTED, CORRECTED, strict=True)))
    if sum(map(str.islower, cell)) % 2
)
SEEDS = tuple(range(1, 9))

# The file to which a process writes its result, and the strategy whose operators its engine needs.
RESULT, OPERATORS_OF = "result.json", "zero3_cpu_optimizer"
PRINTED_RATE = 5e-5
_AT_PRINTED_RATE = {"learning_rate": PRINTED_RATE}

# -1.22 % validation loss and -1.18 % training loss at the end of S2's training.
PUBLISHED = {"eval_loss": -0.0122, "train_loss": -0.0118}
# The null margin: the larger of 10 % of the published effect and twice the SD of the A/A sessions.
LOSS_MARGIN, AA_DEVIATIONS = 0.0012, 2.0
# Null margins of times and memories.
TIME_MARGIN, MEMORY_MARGIN = 0.03, 0.01


Sign = Literal["+", "-", "0", "?"]


@dataclasses.dataclass(frozen=True)
class Response:
    """A response of the experiment: log(ZeRO arm / standard arm) of one figure."""

    name: str
    words: str
    margin: float
    # Sign of correcting each switch, by its letter; `?` if either sign seemed possible. For E, W, P and B with the
    # standard arm first, as printed.
    expected: Mapping[str, Sign]


def _signs(**by_letter: Sign) -> Mapping[str, Sign]:
    return by_letter


RESPONSES = (
    Response("train_loss", "training loss, as logged last", LOSS_MARGIN, _signs(E="0", W="+", P="0", O="+", B="-")),
    Response(
        "eval_loss_200",
        "evaluation loss on the listing's 200 samples",
        LOSS_MARGIN,
        _signs(E="0", W="?", P="0", O="?", B="-"),
    ),
    Response("eval_loss", "evaluation loss on all samples", LOSS_MARGIN, _signs(E="0", W="?", P="0", O="?", B="-")),
    Response("whole_s", "the listing's clock", TIME_MARGIN, _signs(E="+", W="0", P="+", O="+", B="+")),
    Response("less_eval_s", "without evaluations", TIME_MARGIN, _signs(E="+", W="0", P="+", O="+", B="+")),
    Response(
        "less_eval_and_save_s",
        "without evaluations and checkpoint",
        TIME_MARGIN,
        _signs(E="+", W="0", P="+", O="+", B="+"),
    ),
    Response("warm_s_per_sample", "a sample in warm steps", TIME_MARGIN, _signs(E="+", W="0", P="0", O="0", B="+")),
    # CPU time is independent of other load on the cores. It does not include GPU time.
    Response("whole_cpu_s", "the listing's clock, in CPU time", TIME_MARGIN, _signs(E="+", W="0", P="+", O="+", B="+")),
    Response(
        "warm_cpu_s_per_sample",
        "a sample in warm steps, in CPU time",
        TIME_MARGIN,
        _signs(E="+", W="0", P="0", O="0", B="+"),
    ),
    Response(
        "device_peak_never_reset", "device, never reset", MEMORY_MARGIN, _signs(E="?", W="0", P="-", O="-", B="-")
    ),
    Response(
        "device_peak_reset", "device, reset for each arm", MEMORY_MARGIN, _signs(E="-", W="0", P="-", O="?", B="-")
    ),
    Response("host_peak_never_reset", "host, never reset", MEMORY_MARGIN, _signs(E="+", W="0", P="-", O="-", B="-")),
    Response("host_peak_reset", "host, reset for each arm", MEMORY_MARGIN, _signs(E="+", W="0", P="-", O="?", B="-")),
)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size and hardware of the experiment; `options` are flags of study/train.py. Defaults are from the listing."""

    name: str
    box: str
    options: Mapping[str, Any]
    minutes: float
    wide_samples: int
    on_gpu: bool
    # Concurrent sessions, and threads of each; 0: torch's default.
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
            "laptop",
            "two cores, no GPU",
            # At the listing's 5e-5 a tiny model with random weights is still at chance after 100 steps.
            {
                "scale": "laptop",
                "model_name_or_path": "bert-tiny-1layers",
                "learning_rate": 1e-3,
                "dropout": -1.0,
                "warmup_ratio": 0.0,
            },
            minutes=35,
            wide_samples=1000,
            on_gpu=False,
            lanes=2,
            threads=1,
            limit_s=300,
        ),
        Scale(
            "a100",
            "one GPU of 16 GB or more, and the network for BERT-large and IMDB",
            {"scale": "paper"},
            minutes=480,
            wide_samples=4000,
            on_gpu=True,
            lanes=1,
            threads=0,
            limit_s=1800,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class AutopsyArm:
    """One training of a session. `engine`: none, late (set on existing arguments) or given (passed to them)."""

    name: str
    batch: int
    engine: Literal["none", "late", "given"] = "none"
    # Keys of the DeepSpeed dictionary: those printed, also the batch size, or also clipping.
    keys: Literal["printed", "batch", "batch and clipping"] = "printed"
    launcher: bool = False
    start: Literal["initial", "same model", "file"] = "initial"
    leaves_file: bool = False


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of both arms from the initial weights of one seed, grouped by process."""

    kind: Kind
    cell: str
    seed: int
    processes: tuple[tuple[AutopsyArm, ...], ...]
    # In addition to those of the scale.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.seed}-{self.kind}-{self.cell}".replace(" ", "-").replace(",", "").replace("'", "")


def plan(scale: Scale, seeds: tuple[int, ...] = SEEDS) -> list[Session]:
    """Return the gate sessions, then those of each seed as a block, with its cells in random order."""
    planned = [Session("gate", name, 0, ((arm,),)) for name, arm in GATES.items()]
    for seed in seeds:
        block = [_factorial("factorial", cell, seed, scale) for cell in FACTORIAL]
        block += [_factorial("corrected", CORRECTED, seed, scale), _factorial("aa", AA, seed, scale)]
        block += [_factorial("unclipped", CORRECTED, seed, scale), _listing(scale, seed)]
        if scale.options.get("learning_rate", PRINTED_RATE) != PRINTED_RATE:
            block.append(dataclasses.replace(_listing(scale, seed), kind="printed rate", options=_AT_PRINTED_RATE))
        random.Random(f"autopsy {seed}").shuffle(block)
        planned += block
    return planned


def _factorial(kind: Kind, cell: str, seed: int, scale: Scale) -> Session:
    on, fresh, separate, zero_first, equal = (letter in cell for letter in LETTERS)
    keys: Literal["batch", "batch and clipping"] = "batch" if kind == "unclipped" else "batch and clipping"
    batch = scale.batch if equal else scale.printed_zero_batch
    zero = AutopsyArm("zero", batch, "given", keys, True) if on else AutopsyArm("zero", batch, "late")
    arms = [AutopsyArm("standard", scale.batch), zero]
    first, second = reversed(arms) if zero_first else arms
    if not fresh:
        # Both arms share one model object, as in the listing, only without an engine and in one process.
        through_file = on or separate
        first = dataclasses.replace(first, leaves_file=through_file)
        second = dataclasses.replace(second, start="file" if through_file else "same model")
    return Session(kind, cell, seed, ((first,), (second,)) if separate else ((first, second),))


def _listing(scale: Scale, seed: int) -> Session:
    """Return a session of all three runs of the listing; the factorial has the two of its table."""
    small = AutopsyArm("zero8", scale.batch, "late", start="same model")
    large = AutopsyArm("zero", scale.printed_zero_batch, "late", start="same model")
    return Session("listing", PRINTED, seed, ((AutopsyArm("standard", scale.batch), small, large),))


# Configurations between the listing's dictionary and a working engine.
GATES: Mapping[str, AutopsyArm] = {
    "as printed": AutopsyArm("zero", 8, "late"),
    "given": AutopsyArm("zero", 8, "given", "printed", False),
    "given, with a launcher's environment": AutopsyArm("zero", 8, "given", "printed", True),
    "given, with a batch size": AutopsyArm("zero", 8, "given", "batch", False),
    "given, with both": AutopsyArm("zero", 8, "given", "batch", True),
}
