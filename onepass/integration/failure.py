"""Error handling: raise, or fall back with one warning, a reproducer and a journal entry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from ..errors import NoReproducer, NotWarmedUp, OnepassError, RaisedFailure, RegionFallback, WrongAnswer, printable, text_of, warn
from ..stages import is_device_error
from . import journal

_LOG = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


def is_fatal(error: BaseException) -> bool:
    """Whether an error must be raised regardless of settings, because a fallback would hide a wrong answer or a broken GPU."""
    if isinstance(error, (WrongAnswer, NotWarmedUp, torch.OutOfMemoryError)) or not isinstance(error, Exception):
        return True
    return is_device_error(error)


def raise_coded(error: Exception, what: str, lines: Sequence[str], stage: str) -> NoReturn:
    """Raise an error with a code, whose cause is the error. Errors that have a code, and fatal ones, are raised as they are.

    `what` and `stage` complete the sentence "... could not be ...".
    """
    if isinstance(error, OnepassError) or is_fatal(error):
        raise error
    raise RaisedFailure(what=what, lines=format_lines(lines), stage=stage, error=describe_error(error)) from error


def describe_error(error: BaseException) -> str:
    """One line for messages: the error's code or type, and the first line of its text."""
    text = printable((text_of(error).strip().splitlines() or [""])[0])
    text = text if isinstance(error, OnepassError) else f"{type(error).__name__}: {text}"
    return text if text.endswith((".", "!", "?")) else text + "."


def format_lines(lines: Sequence[str]) -> str:
    """Lines of user code for messages: at most three, then a count."""
    named = [line.split(" ")[0] for line in lines]
    if not named:
        return "lines unknown"
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more lines" if len(named) > 3 else "")


def report_fallback(
    region: str, lines: Sequence[str], stage: str, error: BaseException, repro: Callable[[], str], runs_as: str = "inductor"
) -> None:
    """Record that a region runs without onepass kernels, and warn once per region and stage.

    `stage` completes the phrase "could not be ...": claimed, planned, planned and compiled, launched.
    """
    where = reproducer(repro)
    happened = RegionFallback(region=region, lines=format_lines(lines), stage=stage, error=describe_error(error), repro=where)
    code = error.code if isinstance(error, OnepassError) else RegionFallback.code
    journal.fallback(journal.Fallback(region, code, stage, describe_error(error), where, runs_as))
    warn_once((region, stage), happened)
    _LOG.debug("region %s uses a fallback", region, exc_info=error)


def reproducer(write: Callable[[], str]) -> str:
    """Write a reproducer; returns its path, or why it could not be written. Never raises, so that reporting cannot fail."""
    try:
        return write()
    except Exception as error:
        _LOG.debug("no reproducer was written", exc_info=True)
        return str(NoReproducer(folder="any folder", detail=describe_error(error).rstrip(".")))


def warn_once(about: tuple[str, str], happened: OnepassError) -> None:
    """Warn, unless this process already warned about the same."""
    with _lock:
        fresh = about not in _warned
        _warned.add(about)
    if fresh:
        warn(happened, stacklevel=3)


def reset_warnings() -> None:
    """Forget which warnings were given, so that they can appear again."""
    with _lock:
        _warned.clear()
