"""Wrong uses of a receipt. Each ends in one line that names its cause, and training goes on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from study.config.errors import did_you_mean, first_line, replace_unprintable
from study.metrics.state import base_optimizer
from study.receipt.document import Engine
from study.receipt.failures import WRONG_USE, WrongUse, print_notice
from study.receipt.live_engine import find_engine, find_inner, find_kind

# Models with a receipt that is not closed.
_measured: weakref.WeakSet[nn.Module] = weakref.WeakSet()

NESTED = "step() is inside of steps() or of another step(): the inner one counts; remove the other"
TWICE = "another receipt measures this model, and has its figures: close() it before you make a second one"


OPTIONS = ("path", "after", "steps", "quiet", "log")
# A trainer gives these to its callback.
_OF_THE_TRAINER = ("model", "optimizer")


def check_options(wrong: Sequence[str]) -> None:
    """Raise WrongUse if a receipt has got options that it does not have."""
    if wrong:
        guess = did_you_mean(wrong[0], OPTIONS)
        raise WrongUse(f"a receipt has no option {wrong[0][:60]}: {guess}its options are {', '.join(OPTIONS)}")


def options_of_callback(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a callback without model and optimizer, which have no effect; a notice names them."""
    for name in _OF_THE_TRAINER:
        if name in options:
            cause = f"the callback takes the {name} of its trainer: leave {name} out"
            print_notice(f"{WRONG_USE}: {cause}; training goes on")
    return {name: value for name, value in options.items() if name not in _OF_THE_TRAINER}


def has_receipt(model: Any) -> bool:
    return isinstance(model, nn.Module) and find_inner(model) in _measured


def register_receipt(model: nn.Module) -> None:
    _measured.add(find_inner(model))


def unregister_receipt(model: nn.Module) -> None:
    _measured.discard(find_inner(model))


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Raise WrongUse if an optimizer trains no parameter of the model."""
    base = base_optimizer(optimizer)
    if hasattr(model, "zero_optimization_stage"):
        # DeepSpeed's has parts of the parameters.
        is_own = base is base_optimizer(model.optimizer) or base is getattr(model, "basic_optimizer", base)
    else:
        parameters = {id(parameter) for parameter in model.parameters()}
        groups = getattr(base, "param_groups", None) or []
        is_own = not groups or any(id(it) in parameters for group in groups for it in group["params"])
    if not is_own:
        raise WrongUse(
            f"the optimizer ({type(base).__name__}) has no parameter of this model:"
            " give Receipt the one that trains it, made after fully_shard"
        )


def check_engine(model: nn.Module, first: Engine) -> None:
    """Raise WrongUse if a model that was in no engine when its receipt was made is in one now."""
    if first == "none" and find_kind(find_engine(model)) != "none":
        raise WrongUse(
            "the receipt was made before accelerator.prepare, deepspeed.initialize or fully_shard: make it after"
        )


class ModuleWatch:
    """Modules of a model by name, to see whether another one has taken the place of one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules = {name: weakref.ref(module) for name, module in model.named_modules()}

    def check(self) -> None:
        """Raise WrongUse if the model has other modules than at first."""
        model = self._model()
        now = {} if model is None else dict(model.named_modules())
        for name in (*self._modules, *now):
            reference = self._modules.get(name)
            if reference is None or now.get(name) is not reference():
                raise WrongUse(
                    f"the model changes while it is measured, at {name or 'its top'}: make the receipt after the change"
                )


def describe_error(error: BaseException) -> str:
    return replace_unprintable(f"{type(error).__name__}: {first_line(error)}"[:200])


def error_of_the_program() -> BaseException | None:
    """Return the error that ends the program, which the interpreter has printed; None without one."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
