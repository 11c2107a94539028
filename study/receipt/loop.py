"""A training loop with a receipt: the batches of a loader, and the block of a step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from study.receipt.wrong_uses import UseWatch

T = TypeVar("T")


class Steps(Generic[T]):
    """Batches of a loader, each within a step; each pass over them is a new one over the loader, which they replace."""

    def __init__(self, loader: Iterable[T], enclose: Callable[[Iterator[T]], Iterator[T]]) -> None:
        self._loader, self._enclose = loader, enclose
        self._own_pass: Iterator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        # The loader begins its pass here, as without a receipt: it may draw a random number.
        return self._enclose(iter(self._loader))

    def __next__(self) -> T:
        if self._own_pass is None:
            self._own_pass = iter(self)
        return next(self._own_pass)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # the TypeError of a loader without a length

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as its sampler."""
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class StepBlock(contextlib.ContextDecorator):
    """Block of a step, or of a micro-batch of one: `with receipt.step():`, with and without its parentheses."""

    def __init__(
        self, uses: UseWatch, enter: Callable[[], None], leave: Callable[[BaseException | None], None]
    ) -> None:
        self._uses, self._enter, self._leave = uses, enter, leave

    def __call__(self, *arguments: Any, **unknown: Any) -> Any:
        if len(arguments) == 1 and inspect.isroutine(arguments[0]):
            # A decorator of the function that trains a step.
            self._uses.enter_block()
            return super().__call__(arguments[0])
        self._uses.check_arguments("step", arguments, unknown)
        self._uses.call_block()
        return self

    def __enter__(self) -> None:
        self._uses.enter_block()
        self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)
