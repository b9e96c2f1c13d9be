"""Finds everything a function can read besides its arguments, without running it.

The walk follows globals, closures, defaults and the code of every function that could be called, and of every object the
attributes that any of that code names. The result does not depend on which branches a trace takes. Each place where a value was
found becomes a Read. A function that could read state that Python cannot see is refused.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
from collections import deque, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch

from ...errors import UnguardedState
from . import known_functions
from .bytecode import Chain, mentions
from .state import ABSENT, Read, State, TransparentWrapper, cell_content, make_read

MAX_READS = 20_000  # most Reads, and most objects; checking more on each call would cost more than fusion saves
_SEQUENCES = (list, tuple, deque, set, frozenset)
_FIELD: type = type(vars(namedtuple("_Named", "field"))["field"])
# Wrapper objects and the attributes that lead to what they wrap.
_WRAPPERS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    MethodType: ("__func__", "__self__"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    type(functools.lru_cache(len)): ("__wrapped__",),
    slice: ("start", "stop", "step"),
    _FIELD: (),
}
# Methods of user subclasses that torch calls from C.
_CALLED_IN_C = frozenset({"forward", "backward", "setup_context", "jvp", "vjp", "vmap"})
_MAKE_TEXT, _AS_TEXT = ("str", "repr", "format", "print"), ("__repr__", "__str__", "__format__")
_CONSTRUCT = ("__init__", "__new__", "__post_init__")
# Special names of a class that no bytecode instruction looks up.
# fmt: off
_PASSIVE = frozenset({"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__firstlineno__", "__slots__",
                      "__static_attributes__", "__abstractmethods__", "__parameters__", "__orig_bases__", "__annotate__",
                      "__annotate_func__", "__annotations_cache__", "__classdictcell__", "__subclasshook__", "__del__",
                      "__init_subclass__", "__set_name__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
                      "__copy__", "__deepcopy__", "__dir__", "__sizeof__", "__dataclass_fields__", *_AS_TEXT, *_CONSTRUCT})
# fmt: on
_BY_NAME = frozenset({"__dict__", "__getattribute__", "__getattr__", "__setattr__"})
# fmt: off
_UNTRACKABLE = frozenset({"__globals__", "__subclasses__", "__builtins__", "f_globals", "f_locals", "f_back", "gi_frame",
                          "tb_frame", "__loader__", "__spec__", "_version"})
# fmt: on
# These read a tensor's memory without dispatching an op.
_READ_MEMORY = frozenset({"tolist", "numpy", "data_ptr", "storage", "untyped_storage", "__array__", "__dlpack__", "grad"})
_NOT_FOLLOWED = object()


def state_of(roots: Sequence[Any]) -> State:
    """The State that the roots (functions and other objects) can read now."""
    walk = _Walk()
    walk.namespaces.append(_Namespace("torch.Tensor", vars(torch.Tensor), "tensor"))
    try:
        for root in roots:
            walk.visit(root, getattr(root, "__name__", type(root).__name__))
        walk.finish()
    except RecursionError:
        raise UnguardedState(what="state nested deeper than Python's recursion limit", where=f"from {roots[0]}") from None
    return State(walk.reads, walk.sets_data or bool(walk.looks_up_by_name))


@dataclass(eq=False)
class _Namespace:
    """A namespace (of a module, class or object) of which only the names that code mentions are read."""

    where: str
    names: Mapping[str, Any]
    of: str  # "object" | "class" | "module" | "tensor": torch.Tensor itself; only mentioned names are compared
    done: int = 0  # number of mentioned names already read; -1 once all names of the namespace were


@dataclass
class _Walk:
    reads: list[Read] = field(default_factory=list)
    recorded: set[tuple[int, str]] = field(default_factory=set)
    seen: dict[int, Any] = field(default_factory=dict)  # by id; kept alive so that no other object can get the id
    types: dict[int, type] = field(default_factory=dict)
    mentioned: dict[str, None] = field(default_factory=dict)
    namespaces: list[_Namespace] = field(default_factory=list)
    looks_up_by_name: str = ""  # where attributes are looked up by a computed name, if anywhere
    tensor_location: str = ""  # where a tensor was found, if anywhere
    sets_data: bool = False

    def read(self, where: str, owner: Any, expression: str, kind: str = "one") -> Any:
        """Evaluate an expression and record it as a Read."""
        read, value = make_read(where, owner, expression, kind)
        if (id(owner), expression) not in self.recorded:
            self.recorded.add((id(owner), expression))
            self.reads.append(read)
        if len(self.reads) > MAX_READS or len(self.seen) > MAX_READS:
            raise UnguardedState(what=f"more than {MAX_READS} objects", where=where)
        return value

    def read_item(self, where: str, namespace: Mapping[str, Any], name: str) -> Any:
        """Read a name of a namespace; ABSENT if it is not defined."""
        return self.read(where, namespace, f"{{o}}.get({name!r}, ABSENT)")

    def visit_elements(self, where: str, container: Any, values: str = "{o}") -> None:
        for k, value in enumerate(self.read(where, container, values, "each")):
            self.visit(value, f"{where}[{k}]")

    def visit_mapping(self, where: str, owner: Any, of: str = "{o}.") -> None:
        """Read a dict: its keys in order, and its values."""
        given = "" if of == "{o}." else "{o}"
        self.visit_elements(f"the keys of {where}", owner, f"{of}keys({given})")
        self.visit_elements(where, owner, f"{of}values({given})")

    def mention(self, *names: str) -> None:
        self.mentioned.update(dict.fromkeys(names))

    def finish(self) -> None:
        """Read every mentioned name of every namespace, until no new names or namespaces appear."""
        met = -1
        while met != (met := len(self.mentioned) + len(self.namespaces) + bool(self.looks_up_by_name)):
            for namespace in tuple(self.namespaces):
                self.read_mentioned(namespace)
        reading = sorted(_READ_MEMORY.intersection(self.mentioned)) or [self.looks_up_by_name]
        if self.tensor_location and reading[0]:
            raise UnguardedState(what=f"the values of a tensor through {reading[0]}", where=self.tensor_location)

    def read_mentioned(self, namespace: _Namespace) -> None:
        if self.looks_up_by_name and namespace.done >= 0 and namespace.of != "tensor":
            if namespace.of == "module":
                raise UnguardedState(what=f"any name of module {namespace.where}", where=self.looks_up_by_name)
            namespace.done = -1
            self.visit_mapping(namespace.where, namespace.names)
        if namespace.done < 0:
            return
        names = tuple(self.mentioned)[namespace.done :]
        namespace.done = len(self.mentioned)
        for name in names:
            if namespace.of != "class" or name in namespace.names:  # visit_user_class guards a class's names
                where = f"{namespace.where}.{name}"
                value = self.read_item(where, namespace.names, name)
                if value is ABSENT and namespace.of == "module":
                    value = self.module_getattr(sys.modules.get(namespace.names["__name__"]), name, where)
                self.visit(value, where)

    def module_getattr(self, module: Any, name: str, where: str) -> Any:
        """The value that a module's `__getattr__` returns for a name it does not define."""
        function = vars(module).get("__getattr__") if isinstance(module, ModuleType) else None
        if function is None:
            return ABSENT
        self.visit(function, f"{module.__name__}.__getattr__")
        return self.read(where, module, f"getattr({{o}}, {name!r}, ABSENT)", "fresh")

    # ---- objects -------------------------------------------------------------------------------------------------------------

    def visit(self, value: Any, where: str) -> None:
        """Follow a value that code may use in any way."""
        if value is ABSENT or known_functions.is_immutable(value) or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.visit_tensor(value, where)
        elif isinstance(value, type):
            if not known_functions.is_in_c(value):  # float(x) makes no object of a class that code cannot reach otherwise
                self.mention(*_CONSTRUCT)
            self.visit_class(value, where)
        elif kind is FunctionType:
            self.visit_function(value, where)
        elif isinstance(value, ModuleType):
            self.visit_module(value, where)
        elif known_functions.is_in_c_function(value):
            self.visit_c_function(value, where)
        elif kind in _WRAPPERS:
            for name in _WRAPPERS[kind]:
                self.visit(self.read(where, value, f"{{o}}.{name}"), where)
        elif kind in _SEQUENCES:
            self.visit_elements(where, value)
        elif kind in (dict, MappingProxyType):
            self.visit_mapping(where, value)
        elif isinstance(value, TransparentWrapper):
            self.visit(self.read(f"{where}.fn", value, "{o}.fn"), f"{where}.fn")
        elif kind is not CodeType and not known_functions.is_logger(value):
            self.visit_instance(value, where)

    def visit_tensor(self, tensor: torch.Tensor, where: str) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnguardedState(what=f"a {type(tensor).__name__}", where=where)
        self.tensor_location = self.tensor_location or where
        self.visit_mapping(f"vars({where})", vars(tensor))

    def visit_function(self, function: FunctionType, where: str) -> None:
        """Visit a function's code, defaults and closure. Of a helper, only the closure."""
        code, module = function.__code__, function.__globals__.get("__name__")
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if not known_functions.is_helper(module):
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                self.visit(self.read(f"{where}.{name}", function, f"{{o}}.{name}"), f"defaults of {where}")
            if vars(function):
                self.visit_mapping(f"vars({where})", vars(function))
            self.visit_code(code, cells, function.__globals__, where)
            return
        if known_functions.is_torch(module):
            self.torch_function(function, where)
        for name, cell in cells.items():
            self.visit(self.read_cell(cell, f"{name} in {where}"), f"{name} in {where}")

    def read_cell(self, cell: CellType, where: str) -> Any:
        return self.read(where, cell, "cell_content({o})" if cell_content(cell) is ABSENT else "{o}.cell_contents")

    def torch_function(self, function: Any, where: str) -> None:
        treatment = known_functions.torch_function(function)
        if treatment == "readable":
            self.read(f"{where}()", function, "call_or_error_type({o})", "fresh")
        elif treatment == "stateful":
            raise UnguardedState(what=f"torch state through {function.__name__}", where=where)

    def visit_c_function(self, function: Any, where: str) -> None:
        """Visit a C function or descriptor. It must be known; the object it is bound to is followed."""
        bound_to = getattr(function, "__self__", None)
        is_function = isinstance(function, BuiltinFunctionType)
        if is_function and known_functions.is_torch(function.__module__):
            self.torch_function(function, where)
        elif known_functions.looks_up_by_name(function):
            self.looks_up_by_name = self.looks_up_by_name or where
        elif bound_to is not None and not isinstance(bound_to, ModuleType):
            self.visit(bound_to, where)
        elif not known_functions.is_pure_in_c(function):
            module = getattr(function, "__module__", None)
            raise UnguardedState(what=f"hidden state through {module}.{function.__name__}", where=where)

    def visit_module(self, module: ModuleType, where: str) -> None:
        if not known_functions.is_torch(module.__name__):
            self.namespaces.append(_Namespace(where, vars(module), "module"))
        elif known_functions.is_stateful(module.__name__):
            raise UnguardedState(what=f"torch state in {module.__name__}", where=where)

    def visit_class(self, kind: type, where: str) -> None:
        """Visit a class: names of it and its bases that code mentions, and special methods that instructions look up."""
        self.read(where, kind, "{o}.__mro__")
        if kind is type:
            self.mention(*_CONSTRUCT)
        for base in kind.__mro__:
            if id(base) in self.types:
                continue
            self.types[id(base)] = base
            if known_functions.is_torch(base.__module__):
                self.visit_torch_class(base, where)
            elif known_functions.is_in_c(base):
                if not known_functions.is_known_in_c(base):
                    raise UnguardedState(what=f"a {base.__module__}.{base.__name__}", where=where)
            elif not known_functions.is_helper_type(base):
                self.visit_user_class(base, base.__qualname__)
        if type(kind) is not type:
            self.visit_class(type(kind), where)

    def visit_user_class(self, kind: type, where: str) -> None:
        names = vars(kind)
        self.read(f"the names of {where}", names, "{o}.keys()", "each")
        self.namespaces.append(_Namespace(where, names, "class"))
        called = frozenset().union(*(methods_called_by(base) for base in kind.__mro__ if known_functions.is_torch(base.__module__)))
        for name in tuple(names):
            special = name.startswith("__") and name.endswith("__") and name not in _PASSIVE
            if special or name in called:
                self.visit(self.read_item(f"{where}.{name}", names, name), f"{where}.{name}")

    def visit_torch_class(self, kind: type, where: str) -> None:
        """Visit a class of torch. It needs no inspection, except for the state it reads elsewhere."""
        if known_functions.is_stateful(kind.__module__) or known_functions.is_in_c(kind) and kind.__name__ == "Generator":
            raise UnguardedState(what=f"a {kind.__module__}.{kind.__name__}", where=where)
        if kind is torch.autocast:
            for device in ("cuda", "cpu"):
                self.read("torch.get_autocast_dtype()", device, "autocast_dtype({o})")
        if kind is torch.nn.Module:
            hooks = vars(sys.modules[kind.__module__])
            for name in [n for n, v in hooks.items() if n.startswith("_global_") and isinstance(v, dict)]:
                self.visit(self.read_item(name, hooks, name), name)

    def visit_instance(self, value: Any, where: str) -> None:
        """Visit an object: its class, its attributes and its elements."""
        kind = type(value)
        unknown = next((c for c in kind.__mro__ if known_functions.is_in_c(c) and c not in known_functions.VALUE_BASES), None)
        if unknown is not None:
            raise UnguardedState(what=f"a {kind.__module__}.{kind.__qualname__}", where=where)
        self.read(f"type({where})", value, "type({o})")
        self.visit_class(kind, where)
        if kind.__module__ in ("torch._ops", "torch._library.custom_ops"):
            return
        base = next((c for c in (*_SEQUENCES, dict) if isinstance(value, c)), None)
        if base is dict:
            self.visit_mapping(where, value, "dict.")
        elif base is not None:
            self.visit_elements(where, value, f"tuple({base.__name__}.__iter__({{o}}))")
        self.visit(getattr(value, "default_factory", None), where)
        self.visit_attributes(value, where)

    def visit_attributes(self, value: Any, where: str) -> None:
        """Read an object's attributes: those that code mentions, or all of them if code that the walk skips may read them."""
        names = own_names(value)
        for base in type(value).__mro__:
            if not known_functions.is_in_c(base):
                for name in [n for n, v in vars(base).items() if isinstance(v, MemberDescriptorType)]:
                    self.visit(self.read(f"{where}.{name}", value, f"getattr({{o}}, {name!r}, ABSENT)"), f"{where}.{name}")
        if names is None:
            return
        if any(known_functions.is_helper_type(base) for base in type(value).__mro__) or type(value) is SimpleNamespace:
            self.visit_mapping(f"vars({where})", names)
        else:
            self.namespaces.append(_Namespace(where, names, "object"))

    # ---- code ----------------------------------------------------------------------------------------------------------------

    def visit_code(self, code: CodeType, cells: Mapping[str, CellType], outer: dict[str, Any], where: str) -> None:
        """Visit the names that a function's instructions use, including those of its inner functions."""
        named = mentions(code)
        if hidden := _UNTRACKABLE.intersection(named.attributes):
            raise UnguardedState(what=f"arbitrary state through {min(hidden)}", where=where)
        self.mention(*named.attributes)
        self.sets_data |= "data" in named.stored
        if named.has_class_patterns or not _BY_NAME.isdisjoint(named.attributes):
            self.looks_up_by_name = self.looks_up_by_name or where
        if "__class__" in named.attributes:
            self.mention(*_CONSTRUCT)
        if named.makes_text or any(not c.in_cell and c.root in _MAKE_TEXT for c in named.chains):
            self.mention(*_AS_TEXT)
        for chain in named.chains:
            self.visit_chain(chain, cells, outer)
        for name, level in named.imports:
            self.visit_import(name, level, outer)
        for inner in named.inner:
            seen = {n: cells[n] for n in inner.co_freevars if n in cells and n not in code.co_cellvars}
            self.visit_code(inner, seen, outer, where)

    def visit_import(self, name: str, level: int, outer: dict[str, Any]) -> None:
        if level:
            name = importlib.util.resolve_name("." * level + name, outer.get("__package__") or "")
        for module in dict.fromkeys((name, name.partition(".")[0])):
            self.visit(self.read_item(module, sys.modules, module), module)

    def visit_chain(self, chain: Chain, cells: Mapping[str, CellType], outer: dict[str, Any]) -> None:
        """Follow a variable and the attributes read from it. For modules and plain objects only these attributes are read."""
        if chain.in_cell and chain.root not in cells:
            return  # a local variable
        where = chain.root
        value = self.read_cell(cells[where], where) if chain.in_cell else self.read_item(where, outer, where)
        if value is ABSENT and not chain.in_cell:
            value = self.read_item(where, vars(builtins), where)
        if where == "__class__" and chain.in_cell:  # super()
            self.visit_class(value, where)
            return
        for name in chain.steps:
            found = self.follow_attribute(value, name, f"{where}.{name}")
            if found is _NOT_FOLLOWED:
                break
            value, where = found, f"{where}.{name}"
        self.visit(value, where)

    def follow_attribute(self, value: Any, name: str, where: str) -> Any:
        """Read one attribute, if a plain lookup decides its value; else _NOT_FOLLOWED."""
        if isinstance(value, ModuleType) and name in vars(value):
            return self.read_item(where, vars(value), name)
        if is_torch_part(value):
            return self.read(where, value, f"getattr({{o}}, {name!r}, ABSENT)", "fresh")
        if isinstance(value, ModuleType):
            self.read_item(where, vars(value), name)
            return self.module_getattr(value, name, where)
        is_class = isinstance(value, type)
        kind = value if is_class else type(value)
        names = own_names(value)
        if not is_plain(kind):
            return _NOT_FOLLOWED
        if is_class:
            return self.follow_class_attribute(kind, name, where) if type(kind) is type else _NOT_FOLLOWED
        return self.follow_object_attribute(value, names, name, where) if names is not None and name in names else _NOT_FOLLOWED

    def follow_class_attribute(self, kind: type, name: str, where: str) -> Any:
        holder = next((c for c in kind.__mro__ if name in vars(c)), None)
        if holder is None or hasattr(vars(holder)[name], "__get__"):
            return _NOT_FOLLOWED
        self.read(where, kind, "{o}.__mro__")
        return [self.read_item(where, vars(c), name) for c in kind.__mro__[: kind.__mro__.index(holder) + 1]][-1]

    def follow_object_attribute(self, value: Any, names: Mapping[str, Any], name: str, where: str) -> Any:
        kind = type(value)
        if any(name in vars(c) for c in kind.__mro__):
            return _NOT_FOLLOWED
        self.read(f"type of {where}", value, "type({o})")
        self.read(where, kind, "{o}.__mro__")
        for base in kind.__mro__[:-1]:
            self.read_item(where, vars(base), name)
        return self.read_item(where, names, name)


def own_names(value: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, None if it has none."""
    try:
        names: dict[str, Any] = object.__getattribute__(value, "__dict__")
        return names
    except AttributeError:
        return None


def is_torch_part(value: Any) -> bool:
    """Whether a value belongs to torch: a module, a class, or an object other than a tensor or an nn.Module."""
    if isinstance(value, ModuleType):
        return known_functions.is_torch(value.__name__)
    if isinstance(value, type):
        return known_functions.is_torch(value.__module__)
    return known_functions.is_torch(type(value).__module__) and not isinstance(value, torch.nn.Module | torch.Tensor)


def is_plain(kind: type) -> bool:
    """Whether attributes of a class's objects are looked up by Python's default rules, and all its bases are user classes."""
    by_itself = getattr(kind, "__getattribute__") is object.__getattribute__  # noqa: B009, mypy takes the attribute for a method
    return by_itself and all(
        c is object or not known_functions.is_in_c(c) and not known_functions.is_helper_type(c) for c in kind.__mro__
    )


@functools.lru_cache(maxsize=256)
def methods_called_by(kind: type) -> frozenset[str]:
    """The names that methods of a torch class use; a subclass may override them."""
    methods = ("__call__", "_wrapped_call_impl", "_call_impl") if kind is torch.nn.Module else tuple(vars(kind))
    code = [vars(kind)[m].__code__ for m in methods if isinstance(vars(kind).get(m), FunctionType)]
    return frozenset(name for each in code for name in each.co_names) | _CALLED_IN_C
