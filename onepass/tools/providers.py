"""Who computes a workload in a bench run: onepass, eager torch, Inductor under several settings, and kernel libraries.

Each provider makes a call from a workload and its inputs. All of one workload run in one process and are measured in turn.
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

MAX_AUTOTUNE = "inductor-max"  # tunes for a minute or more a workload, so it runs where it is asked for
MAX_AUTOTUNE_SUITES = ("table",)
NON_STRICT_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}


@dataclass(frozen=True)
class Prepared:
    """A provider ready to be called."""

    call: Call
    function: Callable[..., Any] | None = None  # the same for other inputs of the same sizes, where it can be had


def default_providers() -> tuple[str, ...]:
    """Those that are here and take no minutes to compile."""
    return ("onepass", "eager", "inductor", "inductor-nonstrict", *(name for name in peers.PACKAGES if peers.importable(name)))


def parse_providers(text: str | None, suite: str) -> tuple[str, ...]:
    """`onepass,eager` -> names, each known, here and fit for the suite."""
    if text is None:
        return default_providers()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown or not names:
        raise BadSpec(what="The list of providers", text=text, detail=f"write some of {', '.join(PROVIDERS)}, with commas between")
    if MAX_AUTOTUNE in names and suite not in MAX_AUTOTUNE_SUITES:
        raise BadSpec(what="The list of providers", text=text,
                      detail=f"{MAX_AUTOTUNE} takes minutes of tuning a workload and runs only with the suite {', '.join(MAX_AUTOTUNE_SUITES)}")
    for name in names:
        if name in peers.PACKAGES and not peers.importable(name):
            raise BadSpec(what="The list of providers", text=text,
                          detail=f"{name} is not installed (pip install {peers.PACKAGES[name][1]})")
    return names


def supported_providers(providers: Sequence[str], job: Job) -> tuple[str, ...]:
    """The providers that have something for a workload, in order."""
    return tuple(name for name in providers if name not in peers.PACKAGES or peers.peer(name, job.workload) is not None)


def make_provider(name: str, job: Job, inputs: Sequence[Tensor]) -> Prepared:
    """A provider's call for a workload. It is not called yet; what fails, fails here or there."""
    function = job.subject.function
    if name in peers.PACKAGES:
        made = peers.peer(name, job.workload)
        assert made is not None, "only what a library has is asked of it"
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
    """A copy of a function that torch.compile does not take for the original.

    Dynamo remembers what it compiled by code object and gives up on one after a few sizes; here each provider at each size has
    its own.
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
