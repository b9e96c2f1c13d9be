"""Parses command-line arguments into functions, models and tensors: `8192x8192`, `f32[8192,1]`, `file.py:function`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import BadArgument, BadSpec, printable
from ..ir.expr import DTYPES
from .users_code import users_code
from .workloads import workload

_TENSOR = re.compile(r"\s*(\w+)\s*\[([0-9,\s]*)\]\s*(?:,|$)")
MAX_DIGITS = 18
MAX_ELEMENTS = 1 << 59  # torch counts the bytes of a tensor in a signed 64-bit number
_OTHER_NAMES = {d.torch_name: d for d in DTYPES.values()} | {f"fp{n}": DTYPES[f"f{n}"] for n in (16, 32, 64)}


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse a shape: `8192x8192` -> (8192, 8192)."""
    sizes = text.lower().split("x")
    if not all(re.fullmatch("[0-9]+", size) for size in sizes):
        raise BadSpec(what="The shape", text=text, detail="write integers separated by x, such as 8192x8192")
    return _checked("The shape", text, sizes)


def _checked(what: str, text: str, sizes: Sequence[str]) -> tuple[int, ...]:
    """The sizes of a tensor, if it is one that torch can describe."""
    found = tuple(int(size) if len(size) <= MAX_DIGITS else MAX_ELEMENTS + 1 for size in sizes)
    if math.prod(n or 1 for n in found) > MAX_ELEMENTS:
        raise BadSpec(what=what, text=printable(text[:200]), detail="a tensor of these sizes has more than 2^59 elements")
    return found


def parse_dtype(text: str) -> torch.dtype:
    """Parse a dtype: `bf16` or `bfloat16` -> torch.bfloat16."""
    found = DTYPES.get(text) or _OTHER_NAMES.get(text)
    if found is None:
        raise BadSpec(what="The dtype", text=text, detail=f"known are {', '.join(DTYPES)}")
    return found.torch


def parse_tensors(text: str) -> tuple[torch.Tensor, ...]:
    """Parse tensors: `bf16[8192,8192],f32[8192,1]` -> meta tensors."""
    made, at = [], 0
    while at < len(text):
        found = _TENSOR.match(text, at)
        if found is None:
            raise BadSpec(what="The list of inputs", text=text, detail="write each as dtype[sizes], such as bf16[8192,8192]")
        sizes = _checked("The list of inputs", text, [s.strip() for s in found[2].split(",") if s.strip()])
        made.append(torch.empty(sizes, dtype=parse_dtype(found[1]), device="meta"))
        at = found.end()
    return tuple(made)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse settings: `["by_cost=False", "rest=eager"]` -> a dict. A value that is not a Python literal stays a string."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise BadSpec(what="The option", text=text, detail="write name=value, such as by_cost=False")
        try:
            found[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            found[name.strip()] = value.strip()
    return found


def is_file_spec(text: str) -> bool:
    """Whether a text has the form `file.py:name`."""
    return ".py:" in text


def load(text: str) -> Callable[..., Any]:
    """Import the callable that `file.py:name` names."""
    if not is_file_spec(text):
        raise BadSpec(what="The function", text=text, detail="write file.py:name")
    path, _, name = text.rpartition(":")
    found: Callable[..., Any] | None = getattr(_module(Path(path), text), name, None)
    if not callable(found):
        raise BadSpec(what="The function", text=text, detail=f"{path} defines no function {name}")
    return found


def _module(path: Path, text: str) -> ModuleType:
    if not path.is_file():
        raise BadSpec(what="The function", text=text, detail=f"there is no file {path}")
    # Dynamo imports the modules of the functions it traces by name, so the file needs a module name that is not taken.
    name = path.stem if path.stem not in sys.modules else f"onepass_subject_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as with `python file.py`, it may import modules from its folder
    try:
        with users_code(f"Importing {path}"):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@dataclass(frozen=True)
class Subject:
    """The function or model that a command works on, and its arguments."""

    call: Callable[..., Any]  # a module, or a function to fuse
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def example_inputs(function_text: str, inputs_text: str | None) -> tuple[torch.Tensor, ...]:
    """The input tensors for `file.py:function`: from a list, a named function, or `inputs` in the same file."""
    args, kwargs = _load_inputs(function_text, inputs_text)
    if kwargs or not all(isinstance(t, torch.Tensor) for t in args):
        named = inputs_text or _default_inputs(function_text)
        raise BadSpec(what="The result of", text=named, detail="it must return tensors (meta tensors are enough)")
    return args


def _load_inputs(text: str, inputs_text: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs_text is not None and not is_file_spec(inputs_text):
        return parse_tensors(inputs_text), {}
    return _arguments(_made(inputs_text or _default_inputs(text)))


def _made(text: str, found: Callable[..., Any] | None = None) -> Any:
    """What the function that a text names returns."""
    found = load(text) if found is None else found
    with users_code(text):
        return found()


def _default_inputs(text: str) -> str:
    return f"{text.rpartition(':')[0]}:inputs"


def _arguments(made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a returned value to arguments: a tuple or list, a dict of keyword arguments, or a single value."""
    if isinstance(made, dict):
        return (), made
    return (tuple(made) if isinstance(made, tuple | list) else (made,)), {}


def _resolve_file(text: str, inputs_text: str | None) -> Subject:
    """Resolve `file.py:name`: a module, a callable without parameters that returns one, or a function of tensors."""
    found = load(text)
    if not isinstance(found, nn.Module) and _needs_arguments(found):
        return Subject(found, example_inputs(text, inputs_text))
    model, *given = _parts(found if isinstance(found, nn.Module) else _made(text, found))
    if not isinstance(model, nn.Module):
        raise BadSpec(
            what="The function",
            text=text,
            detail="a function without parameters must return a module, (module, inputs) "
            "or (module, args, kwargs); any other must take tensors",
        )
    if inputs_text is None and given:
        return _with_arguments(text, model, given)
    return Subject(model, *_load_inputs(text, inputs_text))


def resolve_step(text: str, found: Callable[..., Any], inputs_text: str | None = None) -> Subject | None:
    """The step that `found` is or returns, with its inputs; None if calling `found` already ran the step."""
    if isinstance(found, nn.Module) or _needs_arguments(found):
        return Subject(found, *_load_inputs(text, inputs_text))
    step, *given = _parts(_made(text, found))
    if not callable(step) or isinstance(step, torch.Tensor):
        return None
    if inputs_text is not None or not given and (isinstance(step, nn.Module) or _needs_arguments(step)):
        return Subject(step, *_load_inputs(text, inputs_text))
    return _with_arguments(text, step, given)


def _with_arguments(text: str, call: Callable[..., Any], given: Sequence[Any]) -> Subject:
    """A callable with the arguments that a function returned with it: (args, kwargs), either of which may be missing."""
    args, kwargs = _arguments(given[0]) if given else ((), {})
    more = given[1] if len(given) > 1 else {}
    if not isinstance(more, dict):
        raise BadSpec(what="The result of", text=text, detail="the third value it returns must be a dict of keyword arguments")
    return Subject(call, args, {**kwargs, **more})


def _parts(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) and 0 < len(made) <= 3 else (made,)


def _needs_arguments(found: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # some classes and functions written in C
        raise BadArgument(detail=f"{found!r} has no signature. Wrap it in a function that has one.") from None
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def resolve(what: str, shape: str | None, dtype: str, inputs: str | None) -> Subject:
    """Resolve a command's target: a named workload at a size, or a user's function or model."""
    if is_file_spec(what):
        if shape is not None:
            raise BadArgument(detail="--shape works only with a named workload. Use --inputs for a function in a file.")
        return _resolve_file(what, inputs)
    if inputs is not None:
        raise BadArgument(detail="--inputs works only with file.py:function. Use --shape for a named workload.")
    chosen = workload(what)
    return Subject(chosen.function, chosen.inputs(None if shape is None else parse_shape(shape), parse_dtype(dtype)))
