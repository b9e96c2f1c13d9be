"""Base class of all errors, and helpers that show errors and warnings safely."""

from __future__ import annotations

import logging
import warnings

_LOG = logging.getLogger(__name__)


class OnepassError(Exception):
    """Base class of all errors. `message` is a template that the keyword arguments fill in."""

    code = "ONEPASS-000"
    message = "{detail}"

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(f"[{self.code}] {self.message.format(**fields)}")


class TooManySteps(OnepassError):
    """A loop reached its step budget. Each stage has its own subclass."""

    message = (
        "{work} stopped after its limit of {most} steps. Fuse a smaller part of the function. Under torch.compile, Inductor "
        "compiles this region instead."
    )


class InternalError(OnepassError):
    """An unexpected exception inside a stage. The original exception is its cause."""

    code = "ONEPASS-900"
    message = (
        "onepass failed while {doing} (at {where}): {error}. This is a bug in onepass; please report it with "
        "`onepass doctor`. Until it is fixed, move this function or region out of onepass."
    )


class OnepassWarning(UserWarning):
    """Something failed and onepass continued without it. The text is that of a coded error."""


def warn(error: OnepassError, stacklevel: int = 1) -> None:
    """Warn about an error that onepass recovered from. This never raises, unless the user turned warnings into errors."""
    try:
        warnings.warn(printable(str(error)), OnepassWarning, stacklevel=stacklevel + 1)
    except OnepassWarning:
        raise
    except Exception:  # the user's warning hook failed, or the output stream cannot be written
        _LOG.debug("a warning could not be shown: %s", error.code, exc_info=True)


def text_of(error: BaseException) -> str:
    """The message of an exception, even if its __str__ raises."""
    try:
        return str(error)
    except Exception:
        return "its message cannot be read"


def printable(text: str) -> str:
    """Text with control characters, surrogates and bidirectional marks escaped, so that it cannot alter a terminal or a page."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
