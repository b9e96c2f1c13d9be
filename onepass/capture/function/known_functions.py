"""Functions, modules and classes that the state walk can skip: they keep no state, or it is guarded elsewhere."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Generic

import torch

from .state import IMMUTABLE_TYPES, is_numpy

# C functions of these modules are pure, except for those in _IMPURE.
# fmt: off
_PURE = frozenset({"builtins", "math", "cmath", "operator", "_operator", "itertools", "_functools", "functools", "collections",
                   "_collections", "_abc", "_warnings", "_typing", "types"})
# fmt: on
_IMPURE = frozenset({"eval", "exec", "compile", "open", "input", "globals", "__import__", "breakpoint", "id"})
_IMPURE_NUMPY = frozenset({"empty", "empty_like", "loadtxt", "genfromtxt"})  # numpy functions
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "vars", "dir"})
# Python code of these modules only calls its arguments.
# fmt: off
_HELPERS = frozenset({"functools", "contextlib", "dataclasses", "enum", "typing", "abc", "_py_abc", "_collections_abc",
                      "collections", "collections.abc", "types", "warnings", "reprlib", "copyreg", "numbers", "operator",
                      "_pytest.assertion.rewrite"})  # rewrites assertions under pytest
# fmt: on
_CONTAINERS = (list, tuple, set, frozenset, dict, deque, OrderedDict, defaultdict)
_DESCRIPTORS = (MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType)
_FUNCTIONS = (*_DESCRIPTORS, BuiltinFunctionType, MethodWrapperType, ClassMethodDescriptorType, MemberDescriptorType)
VALUE_BASES = (object, *_CONTAINERS, int, float, complex, str, bytes, BaseException, type, Generic, SimpleNamespace)

# Parts of torch with state that no guard covers.
# fmt: off
_STATEFUL = ("torch.cuda", "torch.random", "torch.distributed", "torch.backends", "torch.accelerator", "torch.mps", "torch.xpu",
             "torch.mtia", "torch.cpu", "torch.hub", "torch.serialization", "torch.utils.data", "torch.multiprocessing",
             "torch._dynamo", "torch._inductor", "torch.package", "torch.storage")
# fmt: on
_STATELESS = ("torch.cuda.amp", "torch.cpu.amp", "torch.cuda.nvtx", "torch._dynamo.decorators")
# torch functions that read guarded state: in compat's guard on torch's modes, or by calling them again.
# fmt: off
_COMPARED_MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_num_threads",
                             "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled",
                             "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled",
                             "get_deterministic_debug_mode"})
# fmt: on
_READABLE = frozenset(
    {
        "get_default_device",
        "get_float32_matmul_precision",
        "get_num_interop_threads",
        "is_available",
        "device_count",
        "current_device",
        "is_initialized",
    }
)
_STATEFUL_PREFIXES = ("set_", "use_", "get_", "compile", "manual_seed", "seed", "initial_seed", "load", "save")


def is_immutable(value: Any) -> bool:
    """Whether a value is immutable and refers to no other object."""
    return type(value) in IMMUTABLE_TYPES or type(value) is torch.Size or is_numpy(value, "generic")


def is_torch(module: str | None) -> bool:
    """Whether a module is part of torch."""
    return module is not None and (module == "torch" or module.startswith("torch."))


def is_torch_in_c(function: Any) -> bool:
    """Whether a function is one of torch's own, written in C: `torch.softmax`, `F.gelu`."""
    owner = getattr(function, "__self__", None)
    return isinstance(function, BuiltinFunctionType) and (
        is_torch(function.__module__) or isinstance(owner, type) and is_torch(owner.__module__)
    )


def is_helper(module: str | None) -> bool:
    """Whether the walk can skip the Python code of a module."""
    return module in _HELPERS or is_torch(module)


def is_helper_type(kind: type) -> bool:
    """Whether the walk can skip a class. Classes made at run time may name such a module falsely, so the module is checked."""
    module = kind.__module__
    return is_torch(module) or module in _HELPERS and getattr(sys.modules.get(module), kind.__qualname__, None) is kind


def is_stateful(module: str) -> bool:
    """Whether a part of torch keeps state that no guard covers."""
    return _within(module, _STATEFUL) and not _within(module, _STATELESS)


def _within(module: str, parents: tuple[str, ...]) -> bool:
    return module in parents or module.startswith(tuple(f"{p}." for p in parents))


def torch_function(function: Any) -> str:
    """How to treat a function of torch: "pure", "readable" (reads state; call it without arguments to compare) or "stateful"."""
    name = function.__name__
    if isinstance(function, FunctionType):
        module = str(function.__globals__.get("__name__"))
        module_object = sys.modules.get(module)
        if name in _READABLE and getattr(module_object, name, None) is function:
            return "readable"
        sets = is_stateful(module) or module == "torch" and name.startswith(_STATEFUL_PREFIXES)
        return "stateful" if sets and name not in _COMPARED_MODES else "pure"
    sets_modes = function.__self__ is torch._C  # ops belong to other C modules, or to none
    if sets_modes and name in _READABLE:
        return "readable"
    return "stateful" if sets_modes and name not in _COMPARED_MODES else "pure"


def looks_up_by_name(function: Any) -> bool:
    """Whether a function looks up attributes by a name that may be computed at run time."""
    return isinstance(function, BuiltinFunctionType) and function.__module__ == "builtins" and function.__name__ in _BY_NAME


def is_pure_in_c(function: Any) -> bool:
    """Whether a C function or descriptor computes from its arguments alone."""
    if is_numpy(function, "ufunc") or type(function).__name__ == "_ArrayFunctionDispatcher":
        return function.__name__ not in _IMPURE_NUMPY
    kind = getattr(function, "__objclass__", None)
    if kind is not None:
        return is_known_in_c(kind) or is_torch(kind.__module__) or not is_in_c(kind)
    return getattr(function, "__module__", None) in _PURE and function.__name__ not in _IMPURE


def is_in_c(kind: type) -> bool:
    """Whether a class is written in C. Its objects may have state that Python cannot see."""
    if not kind.__flags__ & 1 << 9:  # a static type, not made by a class statement
        return True
    return any(
        isinstance(v, _DESCRIPTORS) and v.__objclass__ is kind and name not in ("__dict__", "__weakref__")
        for name, v in vars(kind).items()
    )


def is_known_in_c(kind: type) -> bool:
    """Whether a C class only makes values, or containers and iterators of its arguments."""
    numpy = sys.modules.get("numpy")
    return (
        kind.__module__ in _PURE
        and kind.__name__ not in ("attrgetter", "methodcaller")
        or kind in VALUE_BASES
        or numpy is not None
        and issubclass(kind, numpy.generic)
    )


def is_in_c_function(value: Any) -> bool:
    """Whether a value is a function or descriptor written in C."""
    return isinstance(value, _FUNCTIONS) or type(value).__name__ == "_ArrayFunctionDispatcher" or is_numpy(value, "ufunc")


def is_logger(value: Any) -> bool:
    """Whether an object is a logger, which does not affect results."""
    logging = sys.modules.get("logging")
    return logging is not None and isinstance(value, logging.Logger)
