"""The edge of a stage: an exception that nobody foresaw leaves it as one coded error, so that it can be told, reported and counted.

What comes from outside of onepass passes as it is: a lack of memory, a broken card, a full disk, a warning that is to raise, and
whatever the function raises that a user hands in.
"""

from __future__ import annotations

import re
from contextlib import ContextDecorator, suppress
from types import TracebackType
from typing import TypeVar

import torch

from .errors import InternalError, OnepassError, text_of

_BROKEN_CARD = re.compile(r"CUDA error|Triton Error \[CUDA\]|CUDA driver error")
_FROM_OUTSIDE = (OnepassError, MemoryError, OSError, ImportError, Warning, torch.OutOfMemoryError)
_FOREIGN = "_onepass_foreign"  # an attribute of exceptions that code of others raised

Raised = TypeVar("Raised", bound=BaseException)


class stage(ContextDecorator):
    """Around what onepass does by itself: `with stage("planning"):` or `@stage("planning")`.

    `passing` are exceptions by which the code inside tells something to the code around it.
    """

    def __init__(self, doing: str, *passing: type[Exception]) -> None:
        self.doing, self.passing = doing, passing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, self.passing):
            coded = as_coded(error, self.doing)
            if coded is not error:
                raise coded


class foreign:
    """Around code of others that a stage calls: what that raises is its own."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            with suppress(AttributeError):
                setattr(error, _FOREIGN, True)


def as_coded(error: Raised, doing: str) -> Raised | InternalError:
    """An exception that onepass did not mean to raise, as the error that says so; any other as it is."""
    if not isinstance(error, Exception) or isinstance(error, _FROM_OUTSIDE) or is_of_card(error) or hasattr(error, _FOREIGN):
        return error
    first = (text_of(error).strip().splitlines() or [""])[0]
    coded = InternalError(doing=doing, error=f"{type(error).__name__}: {first}", where=_where(error))
    coded.__cause__ = error
    return coded


def is_of_card(error: BaseException) -> bool:
    """Whether an error says that the card failed, which any later call may be told."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    return isinstance(error, RuntimeError) and _BROKEN_CARD.search(text_of(error)) is not None


def _where(error: Exception) -> str:
    """The innermost line of onepass that an exception came through."""
    found, trace = "an unknown line", error.__traceback__
    while trace is not None:
        _, package, path = trace.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/onepass/")
        if package:
            found = f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
