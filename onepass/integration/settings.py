"""Settings of torch.compile(backend="onepass"), and where they come from.

Three sources, the later the stronger: environment variables (knobs), `with onepass.settings(...)`, and the `options` of
torch.compile. What is given in the last two is in force while a graph is compiled; of it, what concerns calls of a region
travels in the region's key, because a process that starts from a cached graph claims nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import BadSetting, UnknownSetting
from ..knobs import VERIFIED, knobs, share


def _switch(given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError("give True or False")
    return given


def _choice(*names: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        if given not in names:
            raise ValueError(f"give one of {', '.join(names)}")
        return str(given)

    return read


def _names(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise ValueError("give a list of region ids or of lines such as model.py:12")
    return tuple(given)


def _verify(given: Any) -> int | str:
    if isinstance(given, str):
        return share(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(VERIFIED)
    return given


def _setting(default: Any, read: Callable[[Any], Any], *, per_call: bool = False) -> Any:
    return field(default=default, metadata={"read": read, "per_call": per_call})


@dataclass(frozen=True, slots=True)
class Settings:
    """All of them, as they hold for one graph or one region."""

    disable: bool = _setting(False, _switch)  # everything to Inductor
    interpret: bool = _setting(False, _switch)  # claim regions of CPU tensors too, and run them under Triton's interpreter
    skip: tuple[str, ...] = _setting((), _names)  # regions to leave out, by id or by a line they came from
    rest: str = _setting("inductor", _choice("inductor", "eager"))  # who runs what is not claimed
    functional: bool = _setting(False, _switch)  # regions return fresh tensors instead of filling those Inductor allocates
    in_place: bool = _setting(True, _switch)  # an output may take the memory of an input that nobody reads again
    recompute: bool = _setting(True, _switch)  # the backward computes again what it can have without reading more
    by_cost: bool = _setting(True, _switch)  # False: claim whatever can be computed, however small
    verify: int | str = _setting(0, _verify, per_call=True)  # how many calls of each region are compared with float64, or 1/1000
    on_error: str = _setting("warn", _choice("warn", "raise"), per_call=True)
    tune: str = _setting("off", _choice("off", "on", "full"), per_call=True)  # whether plans are timed at a region's first call

    @property
    def graph_key(self) -> str:
        """What changes the graph that is compiled, as text for cache keys."""
        return repr([(f.name, getattr(self, f.name)) for f in fields(self) if not f.metadata["per_call"]])


MAX_LINES = 3  # of user code that a region's key names
ID_DIGITS = 10
NAMES = frozenset(f.name for f in fields(Settings))
_CONTEXT: ContextVar[Mapping[str, Any]] = ContextVar("onepass settings", default={})  # noqa: B039, never changed in place


@contextmanager
def settings(**changes: Any) -> Iterator[None]:
    """Settings for all that this thread or task compiles while the context lasts; contexts nest.

    torch.compile compiles at the first call. A backward graph, which autograd may compile in another thread and later, has the
    settings of its forward graph. Threads started inside do not take settings over, as with every context variable, unless they
    run in `contextvars.copy_context()`, or Python is told to (`thread_inherit_context`, the default of free-threaded builds).
    """
    token = _CONTEXT.set({**_CONTEXT.get(), **validated(changes)})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def validated(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings in their own types; a name or value that means nothing is an error."""
    rows = {f.name: f for f in fields(Settings)}
    found = {}
    for name, value in given.items():
        if name not in rows:
            raise UnknownSetting(name=name, known=", ".join(sorted(rows)))
        try:
            found[name] = rows[name].metadata["read"](value)
        except (ValueError, TypeError) as error:
            raise BadSetting(name=name, given=value, detail=error) from None
    return found


def split(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """torch.compile's options: ours, checked, and those meant for Inductor, which knows its own names."""
    options = options or {}
    ours = validated({name: value for name, value in options.items() if name in NAMES})
    return ours, {name: value for name, value in options.items() if name not in NAMES}


def current_overrides(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the contexts and `options` (ours, checked) say, the environment left out."""
    return {**_CONTEXT.get(), **(options or {})}


def resolve(overrides: Mapping[str, Any]) -> Settings:
    """The settings in force, given what was said beyond the environment."""
    now = knobs()
    return Settings(**{"disable": now.disable, "verify": now.verify, "on_error": now.on_error, "tune": now.tune, **overrides})


# ---- what travels with a region ----------------------------------------------------------------------------------------------


def encode_key(overrides: Mapping[str, Any], lines: Sequence[str] = ()) -> str:
    """The suffix of a region's key: where it came from, and what was said about its calls where the environment is not to
    decide."""
    per_call = sorted(f.name for f in fields(Settings) if f.metadata["per_call"] and f.name in overrides)
    places = [re.sub("[@?]", "_", line.split(" ")[0]) for line in lines[:MAX_LINES]]
    return "".join(f"@{place}" for place in places) + "".join(f"?{name}={overrides[name]}" for name in per_call)


@dataclass(frozen=True)
class RegionKey:
    """A region's key, read."""

    region: str  # its id
    lines: tuple[str, ...]
    settings: Settings


def decode_key(key: str) -> RegionKey:
    """What a key says; the environment decides the rest."""
    named, *pairs = key.split("?")
    region, *lines = named.split("@")
    overrides: dict[str, Any] = {}
    for name, _, text in (pair.partition("=") for pair in pairs):
        overrides[name] = int(text) if text.isdigit() else text
    return RegionKey(region[:ID_DIGITS], tuple(lines), resolve(validated(overrides)))
