"""The implementations that a bench run compares: onepass, eager torch, Inductor with several settings, and kernel libraries.

A provider turns a workload and its inputs into a callable. All providers of a workload run interleaved in one process.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import BadSpec
from ..integration.fuse import fuse
from . import peers
from .results import ONEPASS_PROVIDERS, PROVIDERS
from .suites import Job
from .timing import Call

MAX_AUTOTUNE = "inductor-max"  # tunes for a minute or more per workload, so it runs only on request
MAX_AUTOTUNE_SUITES = ("table",)
NON_STRICT_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}


@dataclass(frozen=True)
class Prepared:
    """A provider's implementation of a workload, ready to be called."""

    call: Call
    function: Callable[..., Any] | None = None  # takes other inputs of the same sizes; None if the provider cannot


def default_providers() -> tuple[str, ...]:
    """The installed providers, except those that tune for minutes."""
    return ("onepass", "eager", "inductor", "inductor-nonstrict", *(name for name in peers.PACKAGES if peers.importable(name)))


def parse_providers(text: str | None, suite: str) -> tuple[str, ...]:
    """The names in a text such as `onepass,eager`. Raises BadSpec unless all are known, installed and allowed in the suite."""
    if text is None:
        return default_providers()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown or not names:
        raise BadSpec(what="The list of providers", text=text, detail=f"write a comma-separated list of {', '.join(PROVIDERS)}")
    if MAX_AUTOTUNE in names and suite not in MAX_AUTOTUNE_SUITES:
        raise BadSpec(
            what="The list of providers",
            text=text,
            detail=f"{MAX_AUTOTUNE} tunes for minutes per workload and runs only with the suite {', '.join(MAX_AUTOTUNE_SUITES)}",
        )
    for name in names:
        if name in peers.PACKAGES and not peers.importable(name):
            raise BadSpec(
                what="The list of providers", text=text, detail=f"{name} is not installed (pip install {peers.PACKAGES[name][1]})"
            )
    return names


def supported_providers(providers: Sequence[str], job: Job) -> tuple[str, ...]:
    """The providers that implement a workload, in the given order."""
    return tuple(name for name in providers if name not in peers.PACKAGES or peers.peer(name, job.workload) is not None)


def make_provider(name: str, job: Job, inputs: Sequence[Tensor]) -> Prepared:
    """Prepare a provider for a workload, without calling it. Errors may occur here or in the first call."""
    function = job.subject.function
    if name in peers.PACKAGES:
        made = peers.peer(name, job.workload)
        assert made is not None, "supported_providers excludes workloads that a library does not implement"
        return Prepared(made(*inputs))
    callable_ = _FUNCTIONS[name](function)
    return Prepared(lambda: callable_(*inputs), callable_)


def is_onepass(name: str) -> bool:
    """Whether a provider is onepass, tuned or not."""
    return name in ONEPASS_PROVIDERS


def _inductor(**settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(copy_function(function), dynamic=False, fullgraph=True, **settings)

    return compiled


def copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with its own code object.

    Dynamo caches compilations by code object and stops recompiling one after a few sizes, so each provider at each size gets its
    own.
    """
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace()
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


_FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "onepass": lambda function: fuse(function, tune="off"),
    "onepass-tuned": lambda function: fuse(function, tune="on"),
    "eager": lambda function: function,
    "inductor": _inductor(),
    "inductor-nonstrict": _inductor(options=NON_STRICT_OPTIONS),
    MAX_AUTOTUNE: _inductor(mode="max-autotune-no-cudagraphs"),
}
