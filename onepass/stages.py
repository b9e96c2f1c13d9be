"""Stage boundaries: turn an unexpected exception inside a stage into one coded error that can be shown, reported and counted.

Exceptions from outside onepass pass unchanged: out of memory, a GPU failure, a full disk, a warning turned into an error, and
whatever the user's function raises.
"""

from __future__ import annotations

import re
from contextlib import ContextDecorator, suppress
from types import TracebackType
from typing import TypeVar

import torch

from .errors import InternalError, OnepassError, text_of

_DEVICE_FAILURE = re.compile(r"CUDA error|Triton Error \[CUDA\]|CUDA driver error")
_NOT_OURS = (OnepassError, MemoryError, OSError, ImportError, Warning, torch.OutOfMemoryError)
_EXTERNAL = "_onepass_external"  # attribute that marks exceptions raised by code outside onepass

Raised = TypeVar("Raised", bound=BaseException)


class stage(ContextDecorator):
    """Marks code of onepass: `with stage("planning"):` or `@stage("planning")`. Unexpected exceptions leave it as InternalError.

    Exceptions of the types in `expected` pass unchanged: the surrounding code handles them.
    """

    def __init__(self, doing: str, *expected: type[Exception]) -> None:
        self.doing, self.expected = doing, expected

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, self.expected):
            coded = to_coded_error(error, self.doing)
            if coded is not error:
                raise coded


class external_code:
    """Marks code outside onepass that a stage calls. Exceptions it raises pass through the stage unchanged."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            with suppress(AttributeError):
                setattr(error, _EXTERNAL, True)


def is_external(error: BaseException) -> bool:
    """Whether code outside onepass raised an exception that passed through a stage."""
    return hasattr(error, _EXTERNAL)


def to_coded_error(error: Raised, doing: str) -> Raised | InternalError:
    """Wrap an unexpected exception of onepass in InternalError; return any other exception unchanged."""
    if not isinstance(error, Exception) or isinstance(error, _NOT_OURS) or is_device_error(error) or is_external(error):
        return error
    first = (text_of(error).strip().splitlines() or [""])[0]
    coded = InternalError(doing=doing, error=f"{type(error).__name__}: {first}", where=_where(error))
    coded.__cause__ = error
    return coded


def is_device_error(error: BaseException) -> bool:
    """Whether an error reports a GPU failure. CUDA reports such failures asynchronously, at any later call."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    return isinstance(error, RuntimeError) and _DEVICE_FAILURE.search(text_of(error)) is not None


def _where(error: Exception) -> str:
    """The innermost line of onepass in an exception's traceback."""
    found, trace = "an unknown line", error.__traceback__
    while trace is not None:
        _, package, path = trace.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/onepass/")
        if package:
            found = f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
