"""Finds the line of user code an op came from."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
from types import FrameType

import torch

from ... import compat

# Code in these places is never user code.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(compat.__file__)))
_NOT_USER_CODE = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(_PACKAGE, part) + os.sep for part in ("capture", "compat", "integration")),
    contextlib.__file__,
)
# Names of code that is in no file: `python -c`, a pipe, interactive input. Other names in brackets are generated code.
_TYPED = re.compile(r"<(string|stdin|console|(ipython|python)-input.*|doctest .*)>")
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)(, in (?P<function>\w+))?')
UNKNOWN = "an unknown line"


def is_not_user_code(path: str) -> bool:
    """Whether a file belongs to torch, to onepass, or to a standard wrapper such as contextlib."""
    return not _TYPED.fullmatch(path) and (path.startswith(_NOT_USER_CODE) or path.startswith("<") or not path.endswith(".py"))


def user_frame() -> str:
    """The innermost frame of user code, formatted as in a stack trace; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    # Some frames without __name__ are torch's.
    while frame is not None and (is_not_user_code(frame.f_code.co_filename) or "__name__" not in frame.f_globals):
        frame = frame.f_back
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}' if frame else ""


def user_line(stack_trace: str | None) -> str:
    """`file.py:12 text of that line` for the innermost user frame of a stack trace. Without a file, the function's name."""
    frames = [(m["path"], int(m["line"]), m["function"]) for m in _FRAME.finditer(stack_trace or "")]
    own = [f for f in frames if not is_not_user_code(f[0])]
    if not own:
        return UNKNOWN
    path, line, function = own[-1]
    text = linecache.getline(path, line).strip() or (f"in {function}" if function and path.startswith("<") else "")
    return f"{os.path.basename(path)}:{line} {text}".strip()
