"""Runs code of a file that the user named. What it raises gets a code, and its own part of the traceback can be shown."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from ..errors import OnepassError, UsersCodeFailed, printable
from ..integration.failure import describe_error
from ..stages import is_external

# Files whose frames lie between a command and the user's code.
_BETWEEN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__, "<")


@contextlib.contextmanager
def users_code(what: str, only_marked: bool = False) -> Iterator[None]:
    """Give a code to exceptions of the user's code, and to sys.exit. `only_marked`: only to those that stages let pass."""
    try:
        yield
    except OnepassError:
        raise
    except (Exception, SystemExit) as error:
        if only_marked and not is_external(error):
            raise
        raise UsersCodeFailed(what=what, error=_described(error)) from error


def _described(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f'SystemExit({error.code!r}), which ends a process; call sys.exit under `if __name__ == "__main__":` only.'
    return describe_error(error)


def users_traceback(error: BaseException) -> list[str]:
    """An exception's traceback from the user's code on; empty if nothing there raised it, or if it is to end the process."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_BETWEEN):
        trace = trace.tb_next
    if isinstance(error, SystemExit) or trace is None and not isinstance(error, SyntaxError):
        return []
    text = "".join(traceback.format_exception(type(error), error, trace))
    return [printable(line) for line in text.splitlines()]
