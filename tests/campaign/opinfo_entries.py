"""Which of torch's op descriptions (OpInfo) onepass captures: those with a sample that only needs ops of the capture table.

Nothing is listed by name: an op that gets a row in the table, or a decomposition, is included automatically.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import compat
from onepass.capture.lowering.lower import LOWERINGS
from onepass.capture.lowering.schema import op_name

# Ops that are refused although similar ones are computed: every sample must be refused.
REFUSED = frozenset({"index_select", "nn.functional.pad", "norm", "scatter_add", "scatter_reduce", "zero_"})
UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})  # nothing is promised about their elements
TRIED = 3  # samples of an op; one of them must need only ops of the table
TYPES = (torch.float32, torch.int64, torch.bool)  # the first one that an op accepts is tried


def database() -> list[Any]:
    """torch's descriptions of all ops, all variants of each."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        # torch's test helpers import it, and what is used of them does not need it
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
    # The import would freeze torch's global flags, which other tests of this process set.
    with mock.patch.object(torch.backends, "disable_global_flags", lambda: None):
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def title(info: Any) -> str:
    """The name of an op and of its variant."""
    return f"{info.name}.{info.variant_test_name}".rstrip(".")


def entries(table: Mapping[str, Any] = LOWERINGS) -> list[Any]:
    """The descriptions of all ops that are captured with a table, and of those that must be refused."""
    return [info for info in database() if info.name not in UNDEFINED and (info.name in REFUSED or is_captured(info, table))]


def is_captured(info: Any, table: Mapping[str, Any] = LOWERINGS) -> bool:
    """Whether one of an op's first samples needs only ops of the table."""
    dtype = next((d for d in TYPES if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            tried = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), TRIED))
        except Exception:  # torch lacks something it needs to make samples
            return False
        met = [ops_of(info, sample, table) for sample in tried]
        return any(ops is not None and ops <= table.keys() for ops in met)


def ops_of(info: Any, sample: Any, table: Mapping[str, Any]) -> frozenset[str] | None:
    """The ops that a sample runs; None if it raises."""
    try:
        with Watch(table) as watch:
            info.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:  # some samples are expected to fail
        return None
    return frozenset(watch.names)


class Watch(TorchDispatchMode):
    """Records the overloads that calls run. Ops without a row in the table are decomposed, as in a trace."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        super().__init__()
        self.table, self.names = table, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func)
        if name not in self.table:
            parts = _decompositions().get(func, func.decompose)
            with self:
                result = parts(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        packet, _, overload = name.rpartition(".")
        self.names.add(f"{packet.removesuffix('_')}.{overload}")  # an in-place op is traced as its result and a copy
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=1)
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    return compat.decompositions()
