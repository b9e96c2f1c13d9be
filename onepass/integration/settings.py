"""Settings of torch.compile(backend="onepass"), and how their sources combine.

There are three sources, in increasing priority: environment variables (knobs), `with onepass.settings(...)`, and the `options` of
torch.compile. They are combined once, where a graph or a function enters the compiler (`resolved`), and handed on as one value.
What was given for the calls of regions travels with each region (CallSettings), because a process that loads a cached graph does
not compile it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import BadSetting, UnknownSetting
from ..knobs import VERIFY_HELP, knobs, verify_fraction


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
        return verify_fraction(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(VERIFY_HELP)
    return given


def _setting(default: Any, read: Callable[[Any], Any], *, per_call: bool = False) -> Any:
    return field(default=default, metadata={"read": read, "per_call": per_call})


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The settings that were given for calls of a region. None: the environment of the calling process decides."""

    verify: int | str | None = None
    on_error: str | None = None
    tune: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not left to the environment."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings in effect for one graph or one region."""

    disable: bool = _setting(False, _switch)  # compile everything with Inductor
    interpret: bool = _setting(False, _switch)  # also claim regions of CPU tensors, and run them in Triton's interpreter
    skip: tuple[str, ...] = _setting((), _names)  # regions to decline, by id or by source line
    rest: str = _setting("inductor", _choice("inductor", "eager"))  # what runs the rest of the graph
    functional: bool = _setting(False, _switch)  # regions return new tensors instead of filling tensors that Inductor allocates
    in_place: bool = _setting(True, _switch)  # outputs may reuse the memory of dead inputs
    recompute: bool = _setting(True, _switch)  # the backward recomputes saved values where that reads no more memory
    by_cost: bool = _setting(True, _switch)  # False: claim every supported region, even if predicted to be slower
    verify: int | str = _setting(0, _verify, per_call=True)  # how many calls of each region to compare with float64; or 1/1000
    on_error: str = _setting("warn", _choice("warn", "raise"), per_call=True)
    tune: str = _setting("off", _choice("off", "on", "full"), per_call=True)  # whether plans are timed at a region's first call
    for_calls: CallSettings = CallSettings()  # what was given of the last three, without the environment

    @property
    def graph_key(self) -> str:
        """The settings that affect the compiled graph, as text for cache keys."""
        own = [(name, getattr(self, name)) for name, row in _ROWS.items() if not row["per_call"]]
        return repr((own, self.for_calls))

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return {name: now for name in _ROWS if (now := getattr(self, name)) != getattr(_DEFAULTS, name)}


_ROWS: Mapping[str, Mapping[str, Any]] = {f.name: f.metadata for f in fields(Settings) if f.metadata}
_DEFAULTS = Settings()
NAMES = frozenset(_ROWS)
_CONTEXT: ContextVar[Mapping[str, Any]] = ContextVar("onepass settings", default={})  # noqa: B039, never mutated


@contextmanager
def settings(**changes: Any) -> Iterator[None]:
    """Use these settings for everything that the current thread or task compiles inside the context. Contexts nest.

    torch.compile compiles at the first call. A backward graph, which autograd may compile later in another thread, has the settings
    of its forward graph. Like any context variable, settings do not carry over to threads started inside, unless they run
    in `contextvars.copy_context()` or Python's `thread_inherit_context` is on (the default of free-threaded builds).
    """
    token = _CONTEXT.set({**_CONTEXT.get(), **validated(changes)})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def validated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check settings and convert them to their types. Raises on unknown names and invalid values."""
    found = {}
    for name, value in given.items():
        if name not in _ROWS:
            raise UnknownSetting(name=name, known=", ".join(sorted(_ROWS)))
        try:
            found[name] = _ROWS[name]["read"](value)
        except (ValueError, TypeError) as error:
            raise BadSetting(name=name, given=value, detail=error) from None
    return found


def split(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options of torch.compile into settings of onepass, validated, and options for Inductor."""
    options = options or {}
    ours = validated({name: value for name, value in options.items() if name in NAMES})
    return ours, {name: value for name, value in options.items() if name not in NAMES}


def resolved(options: Mapping[str, Any] | None = None) -> Settings:
    """The settings in effect here and now: `options` (validated) over the current contexts over the environment."""
    return resolve({**_CONTEXT.get(), **(options or {})})


def resolve(given: Mapping[str, Any]) -> Settings:
    """Settings given explicitly (validated), on top of the environment."""
    now = knobs()
    calls = CallSettings(**{f.name: given[f.name] for f in fields(CallSettings) if f.name in given})
    environment = {"disable": now.disable, "verify": now.verify, "on_error": now.on_error, "tune": now.tune}
    return Settings(**{**environment, **given}, for_calls=calls)
