"""Which line of user code an op came from."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
from types import FrameType

import torch

from .. import compat

# Frames in these places are never the user's own.
_FOREIGN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep,
            os.path.dirname(compat.__file__) + os.sep, contextlib.__file__)
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')
UNKNOWN = "an unknown line"


def is_foreign(path: str) -> bool:
    """Whether a file belongs to torch or to capture itself, or only calls what is decorated."""
    return path.startswith(_FOREIGN) or path.startswith("<") or not path.endswith(".py")


def user_frame() -> str:
    """The innermost frame of user code now running, as a stack trace would show it; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}' if frame else ""


def user_line(stack_trace: str | None) -> str:
    """`file.py:12 the text of that line` for the innermost user frame of a stack trace."""
    frames = [(m["path"], int(m["line"])) for m in _FRAME.finditer(stack_trace or "")]
    own = [f for f in frames if not is_foreign(f[0])]
    if not own:
        return UNKNOWN
    path, line = own[-1]
    return f"{os.path.basename(path)}:{line} {linecache.getline(path, line).strip()}".strip()
