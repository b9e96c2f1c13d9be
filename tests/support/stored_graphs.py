"""Graphs as the graph pass sees them, written to JSON and read back on a machine without the card they came from.

A graph is a dict: where it is from, hints for its symbolic sizes, and its nodes. A node has its op, name and target, its arguments
with references to other nodes, the form of its value and the user's line. Reading needs none of the operators to run: values become
fake tensors on the device they had, and unknown operators become functions that only have a name.
"""

from __future__ import annotations

import ast
import functools
import gzip
import importlib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

FOLDER = Path(__file__).parents[1] / "fixtures" / "graphs"
FORM = 1  # increased when older files can no longer be read
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')
# Values without a JSON type, by their type: written as their name without "torch.".
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PowByNatural": operator.pow,
    "IntTrueDiv": operator.truediv,
}


# ---- writing ---------------------------------------------------------------------------------------------------------------


def dump(graph: fx.Graph, **about: Any) -> dict[str, Any]:
    """A graph as a JSON value; `about` is stored with it."""
    symbols: dict[str, int | None] = {}
    nodes = [_node(node, symbols) for node in graph.nodes]
    return {"form": FORM, "torch": torch.__version__, **about, "symbols": symbols, "nodes": nodes}


def _node(node: fx.Node, symbols: dict[str, int | None]) -> dict[str, Any]:
    written: dict[str, Any] = {"op": node.op, "name": node.name}
    if node.op != "output":
        written["target"] = target_name(node.target)
    if node.args:
        written["args"] = [_argument(a, symbols) for a in node.args]
    if node.kwargs:
        written["kwargs"] = {name: _argument(a, symbols) for name, a in node.kwargs.items()}
    if "val" in node.meta:
        written["val"] = _value(node.meta["val"], symbols)
    if line := user_line(node.stack_trace):
        written["line"] = line
    if "user_visible_output_idxs" in node.meta:
        written["visible"] = list(node.meta["user_visible_output_idxs"])
    return written


def target_name(target: Any) -> str:
    """The name by which a target can be found again: `aten.add.Tensor`, `higher_order.cond`, `operator.getitem`."""
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)
    return f"{module}.{getattr(target, '__qualname__', target.__name__)}"


def user_line(stack_trace: str | None) -> str | None:
    """`file.py:12` for the innermost frame outside torch."""
    frames = [(m["path"], m["line"]) for m in _FRAME.finditer(stack_trace or "") if not m["path"].startswith((_TORCH, "<"))]
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else None


def _argument(value: Any, symbols: dict[str, int | None]) -> Any:
    match value:
        case fx.Node():
            return {"node": value.name}
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return {"symbolic": _symbolic(value, symbols)}
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_argument(v, symbols) for v in value]
        case tuple():
            return {"tuple": [_argument(v, symbols) for v in value]}
        case dict():
            return {"dict": [[_argument(k, symbols), _argument(v, symbols)] for k, v in value.items()]}
        case slice():
            return {"slice": [_argument(v, symbols) for v in (value.start, value.stop, value.step)]}
        case complex():
            return {"complex": [value.real, value.imag]}
        case torch.device():
            return {"device": str(value)}
    for kind, of in _NAMED.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    return {"opaque": target_name(value) if callable(value) else type(value).__name__}


def _value(value: Any, symbols: dict[str, int | None]) -> Any:
    """The form of a node's value, never its data."""
    if isinstance(value, torch.Tensor):
        written = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [_size(s, symbols) for s in value.shape],
            "stride": [_size(s, symbols) for s in value.stride()],
            "device": str(value.device),
        }
        offset = _size(value.storage_offset(), symbols)
        return {**written, "offset": offset} if offset else written
    if isinstance(value, list | tuple):
        return [_value(v, symbols) for v in value]
    return _argument(value, symbols)


def _size(size: Any, symbols: dict[str, int | None]) -> int | str:
    return _symbolic(size, symbols) if isinstance(size, torch.SymInt) else int(size)


def _symbolic(value: Any, symbols: dict[str, int | None]) -> str:
    """An expression in symbols, whose hints are recorded."""
    node = value.node
    for symbol in sorted(node.expr.free_symbols, key=str):
        if str(symbol) not in symbols:
            symbols[str(symbol)] = _hint(node, symbol)
    return str(node.expr)


def _hint(node: Any, symbol: Any) -> int | None:
    if node.expr == symbol and node.has_hint():
        return int(node.hint)
    for held in ("var_to_val", "backed_var_to_val"):  # the name differs between releases
        hints = getattr(node.shape_env, held, None) or {}
        if symbol in hints:
            return int(hints[symbol])
    return None


def packed(graph: dict[str, Any]) -> bytes:
    """A dumped graph as a file holds it; the same graph gives the same bytes."""
    return gzip.compress(json.dumps(graph, separators=(",", ":"), allow_nan=False).encode(), 9, mtime=0)


# ---- reading ---------------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """A dumped graph from its file."""
    graph: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    assert graph["form"] == FORM, f"{path.name} has form {graph['form']}, and this reads {FORM}: capture it again"
    return graph


def stored() -> Iterator[tuple[str, Path]]:
    """Name and path of every graph kept with the tests, as in `llama_backward`."""
    for path in sorted(FOLDER.glob("*.json.gz")):
        yield path.name.removesuffix(".json.gz"), path


def load(graph: dict[str, Any]) -> fx.Graph:
    """The graph of a dump. Values are fake tensors of one mode, which `mode_of` returns."""
    reader = _Reader(graph["symbols"])
    made = fx.Graph()
    for written in graph["nodes"]:
        reader.node(made, written)
    made.lint()
    return made


def mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode a loaded graph's values belong to; None if it has no tensors."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


class _Reader:
    """Nodes, sizes and values of one graph."""

    def __init__(self, symbols: dict[str, int | None]) -> None:
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        self.symbols = {name: self._symbol(name, hint) for name, hint in symbols.items()}
        self.nodes: dict[str, fx.Node] = {}

    def _symbol(self, name: str, hint: int | None) -> Any:
        if hint is None:
            return self.shapes.create_unbacked_symint()
        source = ConstantSource(name)
        symbol = self.shapes.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return self.shapes.create_symintnode(symbol, hint=hint, source=source)

    def node(self, graph: fx.Graph, written: dict[str, Any]) -> None:
        """Append one node."""
        args = tuple(self.argument(a) for a in written.get("args", ()))
        kwargs = {name: self.argument(a) for name, a in written.get("kwargs", {}).items()}
        op, name = written["op"], written["name"]
        target: Any = op if op == "output" else written["target"]
        node = graph.create_node(op, target_of(target) if op == "call_function" else target, args, kwargs, name=name)
        if "val" in written:
            node.meta["val"] = self.value(written["val"])
        if "line" in written:
            path, line = written["line"].rsplit(":", 1)
            node.meta["stack_trace"] = f'  File "{path}", line {line}, in captured\n'
        if "visible" in written:
            node.meta["user_visible_output_idxs"] = written["visible"]
        self.nodes[name] = node

    def argument(self, written: Any) -> Any:
        """The original value of an argument."""
        if isinstance(written, list):
            return [self.argument(v) for v in written]
        if not isinstance(written, dict):
            return written
        ((kind, value),) = written.items()
        match kind:
            case "node":
                return self.nodes[value]
            case "symbolic":
                return self.size(value)
            case "float":
                return float(value)
            case "tuple":
                return tuple(self.argument(v) for v in value)
            case "dict":
                return {self.argument(k): self.argument(v) for k, v in value}
            case "slice":
                return slice(*(self.argument(v) for v in value))
            case "complex":
                return complex(*value)
            case "device":
                return torch.device(value)
            case "opaque":
                return f"<{value}>"
        return getattr(torch, value)

    def size(self, written: int | str) -> Any:
        """A size: a number, or an expression in the graph's symbols."""
        return written if isinstance(written, int) else self._evaluated(ast.parse(written, mode="eval").body)

    def _evaluated(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.symbols[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATIONS[type(op)](self._evaluated(left), self._evaluated(right))
            case ast.UnaryOp(op=op, operand=operand):
                return _OPERATIONS[type(op)](self._evaluated(operand))
            case ast.Call(func=ast.Name(id=name), args=args):
                return functools.reduce(_FUNCTIONS[name], map(self._evaluated, args))
        raise ValueError(f"a size that cannot be read: {ast.unparse(tree)}")

    def value(self, written: Any) -> Any:
        """The fake value of a node."""
        if isinstance(written, list):
            return tuple(self.value(v) for v in written)
        if not (isinstance(written, dict) and "stride" in written):
            return self.argument(written)
        shape, stride = ([self.size(s) for s in written[key]] for key in ("shape", "stride"))
        with self.mode:
            made = torch.empty_strided(shape, stride, dtype=getattr(torch, written["dtype"]), device=written["device"])
            offset = self.size(written.get("offset", 0))
            return made.as_strided(shape, stride, offset) if "offset" in written else made


@functools.cache
def target_of(name: str) -> Callable[..., Any]:
    """The function of a name; if there is none, one that only has this name."""
    first, *rest = name.split(".")
    found: Any = None
    try:
        if first in ("operator", "math", "torch", "builtins", "_operator"):
            found = importlib.import_module(first)
        else:
            importlib.import_module("torch._inductor.inductor_prims")  # registers ops that only Inductor's passes use
            found = getattr(torch.ops, first)
        for part in rest:
            found = getattr(found, part)
    except (AttributeError, ImportError):
        return _unknown(name)
    return found if callable(found) else _unknown(name)


def _unknown(name: str) -> Callable[..., Any]:
    """Stands for an operator this torch does not have."""

    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not known to torch {torch.__version__}: this graph can be read, not run")

    unknown.__name__ = unknown.__qualname__ = re.sub(r"\W", "_", name)
    return unknown
