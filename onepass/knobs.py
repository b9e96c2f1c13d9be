"""Every setting that comes from the environment: typed, one sentence each, read here and nowhere else.

Settings that change what is computed or generated are arguments of `fuse` and `explain`, not variables. The ones here change
where and how fast the work is done, so none of them enters a cache key; one that did would say so in its field.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import BadSpec

VERIFIED = "give a whole number of calls, 0 for none, or a share of all calls such as 1/1000"


def _workers(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 256:
        raise ValueError("give a whole number from 1 to 256")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise ValueError("give a number of seconds above 0, at most 86400")
    return seconds


def _folder(text: str) -> Path:
    folder = _expanded(text)
    try:
        is_file = folder.exists() and not folder.is_dir()
    except OSError:  # it cannot be looked at; whoever uses it will find out, and say so
        is_file = False
    if is_file:
        raise ValueError("it names a file; give a folder, which is created if need be")
    return folder


def _expanded(text: str) -> Path:
    """A path with `~` for a home."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("nobody here has that home") from None


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("give 0 or 1")
    return text == "1"


def share(text: str) -> str:
    """`1/1000`, checked: one of so many."""
    if not re.fullmatch("1/[1-9][0-9]*", text):
        raise ValueError(VERIFIED)
    return text


def _verify(text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]+", text) else share(text)


def _on_error(text: str) -> str:
    if text not in ("warn", "raise"):
        raise ValueError("give warn or raise")
    return text


def _tune(text: str) -> str:
    if text not in ("off", "on", "full"):
        raise ValueError("give off, on or full")
    return text


def _user_cache(environ: Mapping[str, str]) -> Path:
    """The folder for what can be made again, by the XDG rules; one in the temporary folder for a user without a home."""
    named = Path(environ.get("XDG_CACHE_HOME", "").strip())
    if named.is_absolute():  # the rules have a relative one ignored: where it led would depend on where a process runs
        return named / "onepass"
    home = Path(os.path.expanduser("~"))
    return home / ".cache" / "onepass" if home.is_absolute() else Path(tempfile.gettempdir()) / f"onepass-{os.getuid()}"


def _knob(variable: str, default: Any, read: Callable[[str], Any], sentence: str, in_cache_key: bool = False) -> Any:
    about = {"variable": variable, "read": read, "sentence": sentence, "in_cache_key": in_cache_key}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Knobs:
    """All settings. `knobs()` reads them; tests make their own."""

    compile_workers: int = _knob(
        "ONEPASS_COMPILE_WORKERS", min(4, os.cpu_count() or 1), _workers,
        "How many processes compile kernels for a named GPU at the same time.")
    compile_timeout: float = _knob(
        "ONEPASS_COMPILE_TIMEOUT", 300.0, _seconds,
        "How many seconds a compiler process may take for one kernel before it is ended, and a fresh one tried.")
    keep_sources: Path | None = _knob(
        "ONEPASS_KEEP_SOURCES", None, _folder,
        "A folder to which the source of every generated kernel is written.")
    cache: bool = _knob(
        "ONEPASS_CACHE", True, _switch,
        "With 0, nothing is kept on disk: each process plans and compiles anew.")
    cache_dir: Path = _knob(
        "ONEPASS_CACHE_DIR", _user_cache(os.environ), _expanded,  # the store says what is the matter with it
        "The folder plans and compiled kernels are kept in; nobody else may be able to write to it or above it.")
    disable: bool = _knob(
        "ONEPASS_DISABLE", False, _switch,
        "With 1, torch.compile(backend=\"onepass\") is plain Inductor.")
    on_error: str = _knob(
        "ONEPASS_ON_ERROR", "warn", _on_error,
        "What follows an error in claiming, planning or compiling a region: warn and leave it to Inductor, or raise.")
    verify: int | str = _knob(
        "ONEPASS_VERIFY", 0, _verify,
        "How many calls of each region are compared with float64, or which share of them (1/1000), and raise if they are wrong.")
    repro_dir: Path | None = _knob(
        "ONEPASS_REPRO_DIR", None, _folder,
        "The folder reproducers of failures are written to; unset, onepass_repros where the process runs, or a temporary one.")
    tune: str = _knob(
        "ONEPASS_TUNE", "off", _tune,
        "Whether plans are timed on the card at first use: off, on for the few best, full for many.")


def knobs(environ: Mapping[str, str] = os.environ) -> Knobs:
    """The settings as the environment has them now; an empty variable counts as unset."""
    given = {}
    for knob in fields(Knobs):
        variable, read = knob.metadata["variable"], knob.metadata["read"]
        if text := environ.get(variable, "").strip():
            try:
                given[knob.name] = read(text)
            except ValueError as error:
                raise BadSpec(what=f"The environment variable {variable}", text=text, detail=str(error)) from None
    return Knobs(**given)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, described."""

    variable: str
    now: str
    default: str
    sentence: str
    in_cache_key: bool


def describe(environ: Mapping[str, str] = os.environ) -> tuple[Setting, ...]:
    """Every setting with its present value."""
    now = knobs(environ)
    return tuple(Setting(k.metadata["variable"], str(getattr(now, k.name)), str(k.default), k.metadata["sentence"],
                         k.metadata["in_cache_key"]) for k in fields(Knobs))
