"""Run a kernel on CPU tensors with Triton's interpreter, without side effects on other users of Triton in the process.

TRITON_INTERPRET=1 must be set before triton is first imported, and then applies to the whole process. Here the kernel's Python
function is rebuilt in its own namespace, where `tl` is bound to the interpreter. Only the operators of `tl.tensor` are replaced in
place, and they are restored when the kernel ends. Meanwhile other threads can still compile, because a compiler always passes its
semantics to an operator.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ... import compat
from ...codegen.source import Param, ParamKind, Source
from ...ir.expr import OPS
from ...stages import stage
from ..module import load
from . import ptx
from .builder import make_builder

_LOG = logging.getLogger("onepass.interpret")
_ONE_AT_A_TIME = threading.Lock()


def program_order(programs: int) -> Iterable[int]:
    """The order in which CTAs run. A GPU guarantees none, so results must not depend on it."""
    return range(programs)


@stage("running a kernel under Triton's interpreter")
def run(source: Source, buffers: Mapping[str, torch.Tensor], bindings: Mapping[str, int]) -> None:
    """Execute a kernel over its whole grid. `buffers` are CPU tensors, written in place; `bindings` are the sizes."""
    _warn_once()
    engine = _engine()
    kernel = engine.interpreted(load(source).fn)
    args = [engine.argument(p, buffers, bindings, source.wide_index) for p in source.params]
    programs = source.programs(bindings)
    with _ONE_AT_A_TIME, engine.operators(), np.errstate(all="ignore"):
        engine.builder.set_grid_dim(programs, 1, 1)
        for program in program_order(programs):
            engine.builder.set_grid_idx(program, 0, 0)
            kernel(*args)


@cache
def _warn_once() -> None:
    _LOG.warning("kernels on CPU tensors run under Triton's interpreter: correct, but slow")


@cache
def _engine() -> _Engine:
    return _Engine(compat.triton_interpreter())


class _Engine:
    """Triton's interpreter as onepass uses it: a numpy builder, and kernels bound to it."""

    def __init__(self, parts: compat.InterpreterParts) -> None:
        self.parts = parts
        self.language = parts.language
        self.builder = make_builder(parts)
        self.semantic = parts.semantic(self.builder)
        self._functions: dict[Callable[..., Any], _Interpreted] = {}
        self._namespaces: dict[str, SimpleNamespace] = {}

    def interpreted(self, fn: Callable[..., Any]) -> _Interpreted:
        """The interpreted form of a kernel's or helper's Python function."""
        return self._functions.setdefault(fn, _Interpreted(fn, self))

    def tensor(self, data: np.ndarray, dtype: Any) -> Any:
        """A numpy array as a Triton value; one with no axes is a scalar."""
        tl, handle = self.language, self.parts.runtime.TensorHandle
        if data.ndim == 0:
            return tl.tensor(handle(data.reshape(1), dtype), dtype)
        return tl.tensor(handle(data, dtype), tl.block_type(dtype, list(data.shape)))

    def argument(self, param: Param, buffers: Mapping[str, torch.Tensor], bindings: Mapping[str, int], wide: bool) -> Any:
        """What a kernel parameter is bound to."""
        tl = self.language
        match param.kind:
            case ParamKind.POINTER:
                assert param.dtype is not None
                address = np.array(buffers[param.name].data_ptr(), dtype=np.uint64)
                return self.tensor(address, tl.pointer_type(getattr(tl, param.dtype.kernel)))
            case ParamKind.SIZE if wide:
                return self.tensor(np.array(bindings[param.name], dtype=np.int64), tl.int64)
            case ParamKind.SIZE:
                return self.tensor(np.array(bindings[param.name], dtype=np.int32), tl.int32)
            case ParamKind.ZERO:
                return self.tensor(np.array(0, dtype=np.int32), tl.int32)

    def bound(self, value: Any) -> Any:
        """A name of the language, as an interpreted function sees it."""
        if isinstance(value, self.parts.jit_types):
            return self.interpreted(value.fn)
        if isinstance(value, ModuleType) and value.__name__.startswith("triton.language"):
            return self.namespace(value)
        if self.language.core.is_builtin(value):
            return partial(value, _semantic=self.semantic)
        return value

    def namespace(self, module: ModuleType) -> SimpleNamespace:
        """A module of the language, bound to the interpreter."""
        name = module.__name__
        if name not in self._namespaces:
            self._namespaces[name] = namespace = SimpleNamespace()
            if name.endswith("libdevice"):
                vars(namespace).update({fn: partial(self.elementwise, ufunc) for fn, ufunc in _LIBDEVICE.items()})
            else:
                vars(namespace).update({k: self.bound(v) for k, v in vars(module).items() if not k.startswith("__")})
                vars(namespace).update({k: v for k, v in self._overrides().items() if hasattr(namespace, k)})
        return self._namespaces[name]

    def _overrides(self) -> dict[str, Callable[..., Any]]:
        """Functions of the language that need another implementation in an interpreter."""
        return {
            "range": self.dynamic_range,
            "static_range": range,
            "reduce": self.reduce,
            "static_assert": _static_assert,
            "inline_asm_elementwise": self.assembly,
            **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy", "assume"), _passed_through),
        }

    def elementwise(self, ufunc: Callable[..., Any], *args: Any) -> Any:
        """A libdevice function, computed by numpy."""
        tensors = [self.semantic.to_tensor(a) for a in args]
        like = next((t for t in tensors if t.type.is_block()), tensors[0])
        out = ufunc(*(t.handle.data for t in tensors)).astype(like.handle.data.dtype)
        return self.tensor(out if like.type.is_block() else out.reshape(()), like.dtype)

    def assembly(self, text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        """Inline assembly, element by element."""
        found = ptx.elementwise(text, [self.semantic.to_tensor(a).handle.data for a in args], pack)
        return self.tensor(found, dtype)

    def dynamic_range(self, *bounds: Any, **_: Any) -> Iterator[Any]:
        """A loop whose index is a kernel scalar, as in a compiled kernel. Options such as `num_stages` are ignored."""
        wide = any(isinstance(b, self.language.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
        numpy_type, dtype = (np.int64, self.language.int64) if wide else (np.int32, self.language.int32)
        for i in range(*map(_integer, bounds)):
            yield self.tensor(np.array(i, dtype=numpy_type), dtype)

    def reduce(self, values: Any, axis: int | None, combine: Callable[..., Any], keep_dims: bool = False) -> Any:
        """tl.reduce by halving: neighboring elements are combined until one is left."""
        if not isinstance(values, tuple):
            return self.reduce((values,), axis, combine, keep_dims)[0]
        dtypes = [v.dtype for v in values]
        arrays = [v.handle.data if axis is not None else v.handle.data.reshape(-1) for v in values]
        rank, along = values[0].handle.data.ndim, 0 if axis is None else axis % values[0].handle.data.ndim
        while arrays[0].shape[along] > 1:
            typed = list(zip(arrays, dtypes, strict=True))
            merged = combine(*(self.tensor(_every_other(a, along, first), t) for first in (0, 1) for a, t in typed))
            arrays = [m.handle.data for m in (merged if isinstance(merged, tuple) else (merged,))]
        if keep_dims:
            arrays = arrays if axis is not None else [a.reshape((1,) * rank) for a in arrays]
        else:
            arrays = [a.squeeze(along) for a in arrays]
        return tuple(self.tensor(a, t) for a, t in zip(arrays, dtypes, strict=True))

    @contextmanager
    def operators(self) -> Iterator[None]:
        """Install the interpreted operators on Triton's values, and restore the original ones at the end."""
        tensor, dtype = self.language.tensor, self.language.dtype
        changes = [
            (tensor, name, _with_default_semantic(member, self.semantic))
            for name, member in vars(tensor).items()
            if self.language.core.is_builtin(member)
        ]
        changes += [
            (tensor, "__index__", _integer),
            (tensor, "__bool__", lambda self: bool(self.handle.data.all())),
            (dtype, "to_ir", _identity_types(dtype.to_ir, type(self.builder))),
        ]
        before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
        try:
            for owner, name, member in changes:
                setattr(owner, name, member)
            yield
        finally:
            for owner, name, member in before:
                delattr(owner, name) if member is _ABSENT else setattr(owner, name, member)


_ABSENT = object()
_LIBDEVICE: dict[str, Callable[..., Any]] = {"fast_dividef": np.divide}  # called by helpers only
for _row in OPS.values():
    _LIBDEVICE.update(_row.libdevice)


class _Interpreted:
    """A function of a kernel module, rebuilt on its first call with interpreted names."""

    def __init__(self, fn: Callable[..., Any], engine: _Engine) -> None:
        self._original, self._engine = fn, engine
        self._rebuilt: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._rebuilt = self._rebuilt or self._rebuild()
        return self._rebuilt(*args, **kwargs)

    def _rebuild(self) -> Callable[..., Any]:
        fn, engine = self._original, self._engine
        text = textwrap.dedent(inspect.getsource(fn))
        tree = compat.retry_parse(lambda: ast.parse(text))
        definition = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
        definition.decorator_list = []
        tree = ast.fix_missing_locations(_Assignments().visit(ast.Module([definition], [])))
        ast.increment_lineno(tree, fn.__code__.co_firstlineno - 1)
        names = {name: engine.bound(value) for name, value in fn.__globals__.items()}
        names |= {"range": engine.dynamic_range, _AS_TENSOR: partial(engine.semantic.to_tensor, check_type=False)}
        exec(compile(tree, fn.__code__.co_filename, "exec", dont_inherit=True), names)
        rebuilt: Callable[..., Any] = names[fn.__name__]
        return rebuilt


_AS_TENSOR = "__as_tensor"


class _Assignments(ast.NodeTransformer):
    """x = value -> x = __as_tensor(value): a plain number becomes a kernel scalar, as in a compiled kernel."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = ast.Call(ast.Name(_AS_TENSOR, ast.Load()), [node.value], [])
        return node


def _with_default_semantic(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """A tensor's operator with the semantics a compiler passes, else with the interpreter's."""

    def operator(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return member(*args, _semantic=_semantic or semantic, **kwargs)

    return operator


def _identity_types(original: Callable[..., Any], builder_type: type) -> Callable[..., Any]:
    """dtype.to_ir that returns the type itself for the interpreter's builder (a compiler's types lose the sign of integers)."""
    return lambda self, builder: self if isinstance(builder, builder_type) else original(self, builder)


def _every_other(array: np.ndarray, axis: int, first: int) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(first, None, 2),)]


def _integer(value: Any) -> int:
    return value.handle.data.item() if hasattr(value, "handle") else int(value)


def _passed_through(value: Any, *_: Any) -> Any:
    return value


def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message
