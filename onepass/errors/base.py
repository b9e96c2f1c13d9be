"""What all errors have in common, and how they are told."""

from __future__ import annotations

import logging
import warnings

_LOG = logging.getLogger(__name__)


class OnepassError(Exception):
    """Base of all. `message` is a template over the keyword arguments."""

    code = "ONEPASS-000"
    message = "{detail}"

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(f"[{self.code}] {self.message.format(**fields)}")


class OnepassWarning(UserWarning):
    """Something went wrong and was worked around; its text is that of a coded error."""


def warn(happened: OnepassError, stacklevel: int = 1) -> None:
    """Tell of an error that was worked around. Unless the user has warnings raised, telling never fails what goes on."""
    try:
        warnings.warn(printable(str(happened)), OnepassWarning, stacklevel=stacklevel + 1)
    except OnepassWarning:
        raise
    except Exception:  # a hook of the user's, or a stream that cannot be written
        _LOG.debug("a warning could not be shown: %s", happened.code, exc_info=True)


def text_of(error: BaseException) -> str:
    """What an error says, whatever its __str__ does."""
    try:
        return str(error)
    except Exception:
        return "it cannot say why"


def printable(text: str) -> str:
    """Text that does to a terminal, a file or a page what it looks like: control characters, surrogates, and marks that turn the
    direction of writing are escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
