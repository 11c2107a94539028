"""Wrong uses of a receipt. Each ends in one line that names its cause, and training goes on."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from study.config.errors import did_you_mean, first_line, replace_unprintable
from study.metrics.state import base_optimizer
from study.receipt.document import Engine
from study.receipt.failures import WRONG_USE, Failures, WrongUse, print_notice
from study.receipt.live_engine import find_engine, find_inner, find_kind

# Models with a receipt that is not closed.
_measured: weakref.WeakSet[nn.Module] = weakref.WeakSet()

NESTED = "step() is inside of steps() or of another step(): the inner one counts; remove the other"
TWICE = "another receipt measures this model, and has its figures: close() it before you make a second one"
WITHOUT_WITH = "step() stands without with: write `with receipt.step():` around each step"
WITHOUT_END = "begin_step() comes without end_step(): call end_step() after the optimizer's step"
WITHOUT_BEGIN = "end_step() comes without begin_step(): call begin_step() before the forward pass of each step"
AFTER_CLOSE = "close() has ended this receipt, and these steps are not measured: call it after the last step"
NEVER_USED = (
    "the receipt was made, and no step has begun: write `for batch in receipt.steps(loader):`,"
    " or `with receipt.step():` around each step"
)

OPTIONS = ("path", "after", "steps", "quiet", "log")
# A trainer gives these to its callback.
_OF_THE_TRAINER = ("model", "optimizer")


def check_options(wrong: Sequence[str]) -> None:
    """Raise WrongUse if a receipt has got options that it does not have."""
    if wrong:
        guess = did_you_mean(wrong[0], OPTIONS)
        raise WrongUse(f"a receipt has no option {wrong[0][:60]}: {guess}its options are {', '.join(OPTIONS)}")


def is_path(path: object) -> bool:
    return isinstance(path, (str, os.PathLike)) and bool(str(path))


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


class UseWatch:
    """Order of the calls of one receipt; a wrong one gets one line, and training goes on."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        # In a program whose receipt measures nothing.
        self.is_off = False
        # A wrong order of calls, which is why no step ends.
        self._is_wrong_order = False
        # step() without its block, and begin_step() without its end_step().
        self._is_called = self._is_open = False
        # Steps and micro-batches.
        self.begun = 0

    def note(self, cause: str) -> None:
        """Name a wrong use once."""
        if not self.is_off and self._failures.note("using the receipt", WrongUse(cause)):
            print_notice(f"{self._failures.texts[-1]}; training goes on")

    def check_arguments(self, method: str, arguments: Sequence[object], unknown: Mapping[str, object]) -> None:
        """Name arguments that a method does not have: a TypeError of Python would end the program."""
        for argument in (*map(repr, arguments), *unknown):
            self.note(f"{method}() has no argument {argument[:60]}: leave it out")

    def _note_order(self, cause: str) -> None:
        self._is_wrong_order = True
        self.note(cause)

    def call_block(self) -> None:
        if self._is_called:
            self._note_order(WITHOUT_WITH)
        self._is_called = True

    def enter_block(self) -> None:
        self._is_called = False

    def begin(self, has_stepped: bool) -> None:
        """Note a begin_step(); `has_stepped`: the optimizer has, since the last step that has ended."""
        if self._is_open and has_stepped:
            self._note_order(WITHOUT_END)
        self._is_open = True

    def end(self, is_inside: bool) -> bool:
        """Note an end_step(), and return whether a step can end; `is_inside`: of steps() or step()."""
        if not (self._is_open or is_inside):
            self._note_order(WITHOUT_BEGIN)
            return False
        self._is_open = False
        return True

    def check_at_end(self, optimizer: Any) -> None:
        """Name the cause of a run in which no step has ended, unless a wrong use is named already."""
        if self._is_wrong_order:
            return
        cause = NEVER_USED
        if self._is_called:
            cause = WITHOUT_WITH
        elif self._is_open:
            cause = WITHOUT_END
        elif self.begun:
            kind = type(base_optimizer(optimizer)).__name__ if optimizer is not None else "the engine"
            count = f"{self.begun} micro-batch{'es' if self.begun > 1 else ''}"
            cause = f"{kind} has not stepped in {count}: give Receipt the optimizer whose step() the loop calls"
        self.note(cause)


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


def is_ending_by_error() -> bool:
    """Whether an error or an interrupt ends the program, or is being handled."""
    return sys.exc_info()[1] is not None or error_of_the_program() is not None


def error_of_the_program() -> BaseException | None:
    """Return the error that ends the program, which the interpreter has printed; None without one."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
