"""What happens to an error: raised, or worked around with one warning, a reproducer and a line in the journal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from ..errors import NoReproducer, NotWarmedUp, OnepassError, RegionFallback, WrongAnswer, printable, text_of, warn
from ..stages import is_device_error
from . import journal

_LOG = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


def is_fatal(error: BaseException) -> bool:
    """Whether an error must reach the user whatever the settings: working around it would hide a wrong answer or a broken card."""
    if isinstance(error, (WrongAnswer, NotWarmedUp, torch.OutOfMemoryError)) or not isinstance(error, Exception):
        return True
    return is_device_error(error)


def describe_error(error: BaseException) -> str:
    """An error as part of a message: its code or type, and its first line."""
    text = printable((text_of(error).strip().splitlines() or [""])[0])
    text = text if isinstance(error, OnepassError) else f"{type(error).__name__}: {text}"
    return text if text.endswith((".", "!", "?")) else text + "."


def format_lines(lines: Sequence[str]) -> str:
    """Lines of user code as part of a message."""
    named = [line.split(" ")[0] for line in lines]
    if not named:
        return "lines unknown"
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more lines" if len(named) > 3 else "")


def report_fallback(region: str, lines: Sequence[str], stage: str, error: BaseException, repro: Callable[[], str],
                runs_as: str = "inductor") -> None:
    """Note that a region is computed without onepass; says so once for each region and stage.

    `stage` completes "could not be ...": claimed, planned, planned and compiled, launched.
    """
    where = reproducer(repro)
    happened = RegionFallback(region=region, lines=format_lines(lines), stage=stage, error=describe_error(error), repro=where)
    code = error.code if isinstance(error, OnepassError) else RegionFallback.code
    journal.fallback(journal.Fallback(region, code, stage, describe_error(error), where, runs_as))
    warn_once((region, stage), happened)
    _LOG.debug("region %s was left", region, exc_info=error)


def reproducer(write: Callable[[], str]) -> str:
    """Where a reproducer was written to, or why it could not be: a failure of reporting must not become one of its own."""
    try:
        return write()
    except Exception as error:
        _LOG.debug("no reproducer was written", exc_info=True)
        return str(NoReproducer(folder="any folder", detail=describe_error(error).rstrip(".")))


def warn_once(about: tuple[str, str], happened: OnepassError) -> None:
    """Warn, unless the same was said before."""
    with _lock:
        fresh = about not in _warned
        _warned.add(about)
    if fresh:
        warn(happened, stacklevel=3)


def reset_warnings() -> None:
    """Say everything again when it happens again."""
    with _lock:
        _warned.clear()
