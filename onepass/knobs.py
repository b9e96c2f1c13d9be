"""Settings from environment variables: typed, described in one sentence each, and read only here.

Settings that change what is computed or generated are arguments of `fuse` and `explain`, not variables. The settings here change
where and how fast work is done, so none of them is part of a cache key; one that is must set `in_cache_key`.
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

VERIFY_HELP = "give a whole number of calls, 0 for none, or a fraction of all calls such as 1/1000"


def _workers(text: str) -> int:
    if not re.fullmatch("[0-9]{1,3}", text) or not 1 <= int(text) <= 256:
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
    except OSError:  # the path cannot be read; the code that uses the folder reports that
        is_file = False
    if is_file:
        raise ValueError("it is a file; give a folder, which is created if needed")
    return folder


def _expanded(text: str) -> Path:
    """A path with `~` expanded."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("there is no such home directory") from None


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("give 0 or 1")
    return text == "1"


def verify_fraction(text: str) -> str:
    """Check the form of a fraction such as `1/1000`: one call in 1000."""
    if not re.fullmatch("1/[1-9][0-9]{0,17}", text):
        raise ValueError(VERIFY_HELP)
    return text


def _verify(text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else verify_fraction(text)


def _on_error(text: str) -> str:
    if text not in ("warn", "raise"):
        raise ValueError("give warn or raise")
    return text


def _tune(text: str) -> str:
    if text not in ("off", "on", "full"):
        raise ValueError("give off, on or full")
    return text


def default_cache_folder(environ: Mapping[str, str]) -> Path:
    """The default cache folder, by the XDG rules; a folder in the temporary directory for a user without a home."""
    xdg = Path(environ.get("XDG_CACHE_HOME", "").strip())
    if xdg.is_absolute():  # XDG says to ignore relative paths: they would depend on the working directory
        return xdg / "onepass"
    home = Path(os.path.expanduser("~"))
    return home / ".cache" / "onepass" if home.is_absolute() else Path(tempfile.gettempdir()) / f"onepass-{os.getuid()}"


def _knob(variable: str, default: Any, read: Callable[[str], Any], description: str, in_cache_key: bool = False) -> Any:
    about = {"variable": variable, "read": read, "description": description, "in_cache_key": in_cache_key}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Knobs:
    """All settings. `knobs()` reads them from the environment; tests construct their own."""

    compile_workers: int = _knob(
        "ONEPASS_COMPILE_WORKERS",
        min(4, os.cpu_count() or 1),
        _workers,
        "Number of processes that compile kernels for a named GPU in parallel.",
    )
    compile_timeout: float = _knob(
        "ONEPASS_COMPILE_TIMEOUT",
        300.0,
        _seconds,
        "Seconds a compiler process may take for one kernel before it is killed and a new process retries.",
    )
    keep_sources: Path | None = _knob(
        "ONEPASS_KEEP_SOURCES", None, _folder, "A folder that receives the source of every generated kernel."
    )
    cache: bool = _knob("ONEPASS_CACHE", True, _switch, "0 turns the disk cache off: each process plans and compiles again.")
    cache_dir: Path = _knob(
        "ONEPASS_CACHE_DIR",
        default_cache_folder(os.environ),
        _expanded,  # the store checks it and reports problems
        "The cache folder for plans and compiled kernels. Other users must not be able to write to it or to any folder above it.",
    )
    disable: bool = _knob("ONEPASS_DISABLE", False, _switch, '1 makes torch.compile(backend="onepass") plain Inductor.')
    on_error: str = _knob(
        "ONEPASS_ON_ERROR",
        "warn",
        _on_error,
        "What to do when a region cannot be claimed, planned or compiled: warn (and let Inductor compile it) or raise.",
    )
    verify: int | str = _knob(
        "ONEPASS_VERIFY",
        0,
        _verify,
        "Number of calls of each region to check against float64, or a fraction of them (1/1000). A wrong result raises.",
    )
    repro_dir: Path | None = _knob(
        "ONEPASS_REPRO_DIR",
        None,
        _folder,
        "The folder for reproducers of failures. Default: onepass_repros in the working directory, or a temporary folder.",
    )
    tune: str = _knob(
        "ONEPASS_TUNE",
        "off",
        _tune,
        "Whether plans are timed on the GPU at first use: off, on (the few best plans) or full (many plans).",
    )


def knobs(environ: Mapping[str, str] = os.environ) -> Knobs:
    """The current settings from the environment. An empty variable counts as unset."""
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
    """One setting with its current value and description."""

    variable: str
    now: str
    default: str
    description: str
    in_cache_key: bool


def describe(environ: Mapping[str, str] = os.environ) -> tuple[Setting, ...]:
    """All settings with their current values."""
    now = knobs(environ)
    return tuple(
        Setting(
            k.metadata["variable"], str(getattr(now, k.name)), str(k.default), k.metadata["description"], k.metadata["in_cache_key"]
        )
        for k in fields(Knobs)
    )
