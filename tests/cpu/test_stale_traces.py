"""`fuse` never uses a stale trace: all state that a function can read besides its arguments is compared, or it is refused."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass import errors
from onepass.capture import capture
from onepass.capture.function import state_walk
from onepass.capture.function.state import exact_key, same_value
from onepass.capture.function.state_walk import state_of

X = torch.full((2, 3), 2.0)
THIS = sys.modules[__name__]
SCALE = 2.0
TABLE: dict[str, Any] = {"s": 2.0, "deep": {"list": [1.0, 2.0]}}
CONTEXT = contextvars.ContextVar("CONTEXT", default=2.0)
COUNTER = itertools.count(1)

Case = tuple[Callable[..., Any], Callable[[], Any]]  # a function, and what changes the state it reads


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the globals of this module."""
    kept, torch_state_guard = dict(vars(THIS)), (F.gelu, torch.Tensor.relu, math.sqrt)
    yield
    for name in set(vars(THIS)) - set(kept):
        delattr(THIS, name)
    vars(THIS).update(kept)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("package_of_a_test", "module_of_a_test")]:
        del sys.modules[name]
    TABLE.update(s=2.0, deep={"list": [1.0, 2.0]})
    Config.scale = 2.0
    F.gelu, torch.Tensor.relu, math.sqrt = torch_state_guard  # type: ignore[method-assign]
    for undo in (
        lambda: torch.set_default_dtype(torch.float32),
        lambda: torch.set_grad_enabled(True),
        lambda: torch.use_deterministic_algorithms(False),
        lambda: torch.set_default_device(None),
    ):
        undo()
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    while HOOKS:
        HOOKS.pop().remove()
    for name in ("of_a_test", "of_a_test.part"):
        sys.modules.pop(name, None)


class Thing:
    """Something to put attributes on."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def set_global(value: Any, name: str = "SCALE") -> Callable[[], None]:
    return lambda: setattr(THIS, name, value)


def helper(x: Any) -> Any:
    return x * SCALE


def caller(x: Any) -> Any:
    return helper(x)


# ---- functions -------------------------------------------------------------------------------------------------------------------


def a_global() -> Case:
    return lambda x: x * SCALE, set_global(3.0)


def a_global_of_a_called_function() -> Case:
    return lambda x: caller(x), set_global(3.0)


def a_replaced_helper() -> Case:
    return caller, set_global(lambda x: x * 7, "helper")


def code_of_a_helper() -> Case:
    def mine(x: Any) -> Any:
        return x * 2

    return lambda x: mine(x), lambda: setattr(mine, "__code__", (lambda x: x * 3).__code__)


def own_code() -> Case:
    def mine(x: Any) -> Any:
        return x * 2

    return mine, lambda: setattr(mine, "__code__", (lambda x: x * 3).__code__)


def a_default() -> Case:
    def mine(x: Any, s: float = 2.0) -> Any:
        return x * s

    return lambda x: mine(x), lambda: setattr(mine, "__defaults__", (3.0,))


def own_keyword_default() -> Case:
    def mine(x: Any, *, s: float = 2.0) -> Any:
        return x * s

    return mine, lambda: setattr(mine, "__kwdefaults__", {"s": 3.0})


def what_a_default_holds() -> Case:
    box = [2.0]

    def mine(x: Any, box: list[float] = box) -> Any:
        return x * box[0]

    return lambda x: mine(x), lambda: box.__setitem__(0, 3.0)


def a_cell_of_a_called_function() -> Case:
    value = 2.0

    def mine(x: Any) -> Any:
        return x * value

    def change() -> None:
        nonlocal value
        value = 3.0

    return lambda x: mine(x), change


def an_inner_function() -> Case:
    box = [1.0]
    return lambda x: x * sum(k * SCALE for k in box), set_global(3.0)


def a_decorator() -> Case:
    def doubled(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def mine(*args: Any) -> Any:
            return fn(*args) * TABLE["s"]

        return mine

    return doubled(lambda x: x), lambda: TABLE.update(s=3.0)


def a_decorator_of_torch() -> Case:
    return torch.no_grad()(lambda x: x * SCALE), set_global(3.0)


def a_transform_of_torch() -> Case:
    return lambda x: torch.func.vjp(helper, x)[0], set_global(3.0)


def a_cached_function() -> Case:
    return functools.lru_cache(lambda x: x * SCALE), set_global(3.0)


def a_partial() -> Case:
    return functools.partial(lambda d, x: x * d["s"], TABLE), lambda: TABLE.update(s=3.0)


def a_partial_inside() -> Case:
    box = [2.0]
    mine = functools.partial(lambda x, b: x * b[0], b=box)
    return lambda x: mine(x), lambda: box.__setitem__(0, 3.0)


def an_import() -> Case:
    def mine(x: Any) -> Any:
        from os import path

        return x * path.added_by_a_test  # type: ignore[attr-defined]

    os.path.added_by_a_test = 2.0  # type: ignore[attr-defined]
    return mine, lambda: setattr(os.path, "added_by_a_test", 3.0)


def an_attribute_of_a_function() -> Case:
    def mine(x: Any) -> Any:
        return x * mine.s  # type: ignore[attr-defined]

    mine.s = 2.0  # type: ignore[attr-defined]
    return lambda x: mine(x), lambda: setattr(mine, "s", 3.0)


def a_relative_import() -> Case:
    package, inside = types.ModuleType("package_of_a_test"), types.ModuleType("package_of_a_test.inside")
    package.inside, package.__path__, inside.s = inside, [], 2.0  # type: ignore[attr-defined]
    sys.modules |= {m.__name__: m for m in (package, inside)}
    names: dict[str, Any] = {"__name__": "package_of_a_test.here", "__package__": "package_of_a_test"}
    exec("def mine(x):\n    from .inside import s\n    return x * s\n", names)
    return names["mine"], lambda: setattr(inside, "s", 3.0)


def a_name_that_a_module_makes_up() -> Case:
    module = types.ModuleType("module_of_a_test")
    module.__getattr__ = lambda name: TABLE["s"]  # type: ignore[method-assign]
    sys.modules[module.__name__] = module
    modules = [module]
    return lambda x: x * sum(m.made_up_by_it for m in modules), lambda: TABLE.update(s=3.0)


def in_a_package(code: str) -> Case:
    """A function of a package, and a change of the package."""
    package, part = types.ModuleType("of_a_test"), types.ModuleType("of_a_test.part")
    package.own, package.part = 2.0, part  # type: ignore[attr-defined]
    sys.modules.update({"of_a_test": package, "of_a_test.part": part})
    namespace: dict[str, Any] = {"__name__": "of_a_test.mine", "__package__": "of_a_test"}
    exec(code, namespace)
    return namespace["mine"], lambda: setattr(package, "own", 3.0)


def a_relative_import_of_a_name() -> Case:
    return in_a_package("def mine(x):\n    from . import own\n    return x * own\n")


def an_import_of_a_part() -> Case:
    return in_a_package("def mine(x):\n    import of_a_test.part\n    return x * of_a_test.own\n")


def a_patched_function_of_torch() -> Case:
    return lambda x: F.gelu(x), lambda: setattr(F, "gelu", lambda x: x * 9)


def a_patched_method_of_tensors() -> Case:
    return lambda x: x.relu(), lambda: setattr(torch.Tensor, "relu", lambda x: x * 9)


def a_patched_builtin() -> Case:
    return lambda x: x * math.sqrt(len(x.shape)), set_global(lambda x: 9, "len")


# ---- objects ---------------------------------------------------------------------------------------------------------------------


class Config:
    scale = 2.0

    def __init__(self) -> None:
        self.own = 2.0

    @property
    def as_property(self) -> float:
        return self.own

    @staticmethod
    def static(x: Any) -> Any:
        return x * SCALE

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x * cls.scale

    def method(self, x: Any) -> Any:
        return x * self.own

    def __getattr__(self, name: str) -> Any:
        if name == "made_up":
            return TABLE["s"]
        raise AttributeError(name)


class Slots:
    __slots__ = ("own",)


def an_attribute() -> Case:
    thing = Thing(s=2.0)
    return lambda x: x * thing.s, lambda: setattr(thing, "s", 3.0)


def an_attribute_of_an_attribute() -> Case:
    thing = Thing(a=Thing(b=[2.0]))
    return lambda x: x * thing.a.b[0], lambda: setattr(thing.a, "b", [3.0])


def negative_zero() -> Case:
    thing = Thing(s=0.0)
    return lambda x: x / thing.s, lambda: setattr(thing, "s", -0.0)


def a_bool_for_an_int() -> Case:
    thing = Thing(s=1)
    return lambda x: x if thing.s is True else x * 3, lambda: setattr(thing, "s", True)


def an_int_of_more_than_64_bits() -> Case:
    thing = Thing(s=2**70)
    return lambda x: x * float(thing.s), lambda: setattr(thing, "s", 2**70 + 2**40)


def an_attribute_that_was_absent() -> Case:
    thing = Thing()

    def mine(x: Any) -> Any:
        try:
            return x * thing.s
        except AttributeError:
            return x

    return mine, lambda: setattr(thing, "s", 3.0)


def an_attribute_asked_for_by_name() -> Case:
    thing, name = Thing(ab=2.0), "b"
    return lambda x: x * getattr(thing, "a" + name), lambda: setattr(thing, "ab", 3.0)


def all_attributes() -> Case:
    thing = Thing(a=2.0)
    return lambda x: x * sum(vars(thing).values()), lambda: setattr(thing, "b", 3.0)


def a_method() -> Case:
    config = Config()
    return config.method, lambda: setattr(config, "own", 3.0)


def a_property() -> Case:
    config = Config()
    return lambda x: x * config.as_property, lambda: setattr(config, "own", 3.0)


def an_attribute_made_up() -> Case:
    config = Config()
    return lambda x: x * config.made_up, lambda: TABLE.update(s=3.0)


def a_static_method() -> Case:
    return lambda x: Config.static(x), set_global(3.0)


def a_slot() -> Case:
    thing = Slots()
    thing.own = 2.0
    return lambda x: x * thing.own, lambda: setattr(thing, "own", 3.0)


def a_callable_object() -> Case:
    class Mine:
        own = 2.0

        def __call__(self, x: Any) -> Any:
            return x * self.own

    mine = Mine()
    return mine, lambda: setattr(mine, "own", 3.0)


def another_class() -> Case:
    first, second = (type("Mine", (), {"k": k}) for k in (2.0, 3.0))
    mine = first()
    return lambda x: x * mine.k, lambda: setattr(mine, "__class__", second)


def other_bases() -> Case:
    first, second = (type("Base", (), {"k": k}) for k in (2.0, 3.0))
    mine = type("Mine", (first,), {})()
    return lambda x: x * mine.k, lambda: setattr(type(mine), "__bases__", (second,))


def a_dataclass() -> Case:
    @dataclasses.dataclass
    class Mine:
        own: float = 2.0

    mine = Mine()
    return lambda x: x * mine.own if mine else f"{mine}", lambda: setattr(mine, "own", 3.0)


def a_class_pattern() -> Case:
    kind = type("Mine", (), {"__match_args__": ("a" + "_field",)})
    mine = kind()
    mine.a_field = 2.0

    def function(x: Any) -> Any:
        match mine:
            case kind(value):  # type: ignore[misc]
                return x * value  # type: ignore[unreachable]

    return function, lambda: setattr(mine, "a_field", 3.0)


def text_of_an_object() -> Case:
    class Mine:
        shown = 2.0

        def __str__(self) -> str:
            return str(self.shown)

    mine = Mine()
    return lambda x: x * float(f"{mine}"), lambda: setattr(mine, "shown", 3.0)


def a_named_tuple() -> Case:
    kind = collections.namedtuple("kind", "a b")
    thing = Thing(t=kind(2.0, 1.0))
    return lambda x: x * thing.t.a, lambda: setattr(thing, "t", kind(3.0, 1.0))


def a_member_of_an_enumeration() -> Case:
    class Mine(enum.Enum):
        A = 2.0
        B = 3.0

    thing = Thing(e=Mine.A)
    return lambda x: x * thing.e.value, lambda: setattr(thing, "e", Mine.B)


def on_class(name: str, value: Any, read: Callable[[Any], Callable[..., Any]]) -> Callable[[], Case]:
    """A change of a class, seen by a function that `read` makes for one of its objects."""

    def made() -> Case:
        mine = types.new_class("Mine", (Config,))
        return read(mine()), lambda: setattr(mine, name, value)

    return made


def an_attribute_that_a_property_hides() -> Case:
    mine = types.new_class("Mine", (Config,))
    config = mine()
    return lambda x: x * config.own, lambda: setattr(mine, "own", property(lambda self: 3.0))


def an_attribute_of_a_base_that_is_hidden() -> Case:
    mine = types.new_class("Mine", (Config,))
    return lambda x: x * mine.scale, lambda: setattr(mine, "scale", 3.0)


def an_item_in_an_attribute_of_a_function() -> Case:
    def mine(x: Any) -> Any:
        return x * mine.own[0]  # type: ignore[attr-defined]

    mine.own = [2.0]  # type: ignore[attr-defined]
    return mine, lambda: setattr(mine, "own", [3.0])


def what_an_object_says_of_itself() -> Case:
    class Mine:
        def __str__(self) -> str:
            return str(SCALE)

    mine = Mine()
    return lambda x: x * float(f"{mine}"), set_global(3.0)


def what_a_pattern_reads() -> Case:
    thing = Pair()
    setattr(thing, "hid" + "den", 2.0)

    def mine(x: Any) -> Any:
        match thing:
            case Pair(first):  # type: ignore[misc]
                return x * first

    return mine, lambda: setattr(thing, "hidden", 3.0)


class Pair:
    """A class pattern names its attribute only in __match_args__."""

    __match_args__ = ("hidden",)


CLASSES: dict[str, Callable[[], Case]] = {
    "class attribute": on_class("scale", 3.0, lambda o: lambda x: x * o.scale),
    "replaced method": on_class("method", lambda self, x: x * 9, lambda o: lambda x: o.method(x)),
    "replaced property": on_class("as_property", 9.0, lambda o: lambda x: x * o.as_property),
    "class method": on_class("scale", 3.0, lambda o: lambda x: o.of_class(x)),
    "added operator": on_class("__float__", lambda self: 3.0, lambda o: lambda x: x * float(o) if hasattr(o, "__float__") else x),
}


def a_method_of_a_base() -> Case:
    base = types.new_class("Base", (Config,))

    class Mine(base):  # type: ignore[valid-type, misc]
        def method(self, x: Any) -> Any:
            return super().method(x)

    mine = Mine()
    return lambda x: mine.method(x), lambda: setattr(base, "method", lambda self, x: x * 9)


def a_metaclass() -> Case:
    meta = type("Meta", (type,), {"k": 2.0})
    mine = meta("Mine", (), {})
    return lambda x: x * mine.k, lambda: setattr(meta, "k", 3.0)


# ---- containers ------------------------------------------------------------------------------------------------------------------


def in_container(container: Any, read: Callable[[Any, Any], Any], change: Callable[[Any], Any]) -> Callable[[], Case]:
    def made() -> Case:
        mine = container()
        return (lambda x: read(x, mine)), lambda: change(mine)

    return made


CONTAINERS: dict[str, Callable[[], Case]] = {
    "item of a list": in_container(lambda: [2.0], lambda x, c: x * c[0], lambda c: c.__setitem__(0, 3.0)),
    "length of a list": in_container(lambda: [2.0], lambda x, c: x * len(c), lambda c: c.append(0.0)),
    "object in a list": in_container(lambda: [Thing(s=2.0)], lambda x, c: x * c[0].s, lambda c: setattr(c[0], "s", 3.0)),
    "item of a dict": in_container(lambda: {"s": 2.0}, lambda x, c: x * c["s"], lambda c: c.update(s=3.0)),
    "dict in a dict": in_container(
        lambda: {"d": {"s": [2.0]}}, lambda x, c: x * c["d"]["s"][0], lambda c: c["d"]["s"].__setitem__(0, 3.0)
    ),
    "absent key": in_container(dict, lambda x, c: x * c.get("s", 2.0), lambda c: c.update(s=3.0)),
    "order of keys": in_container(
        lambda: {"a": 1.0, "b": 2.0}, lambda x, c: x * next(iter(c.values())), lambda c: c.update(a=c.pop("a"))
    ),
    "element of a set": in_container(set, lambda x, c: x * 3 if "s" in c else x, lambda c: c.add("s")),
    "deque": in_container(lambda: collections.deque([2.0]), lambda x, c: x * c[0], lambda c: c.__setitem__(0, 3.0)),
    "default dict": in_container(
        lambda: collections.defaultdict(lambda: SCALE), lambda x, c: x * c.default_factory(), lambda c: set_global(3.0)()
    ),
    "user list": in_container(lambda: collections.UserList([2.0]), lambda x, c: x * c[0], lambda c: c.__setitem__(0, 3.0)),
    "subclass of list": in_container(
        lambda: type("Mine", (list,), {})([2.0]), lambda x, c: x * c[0], lambda c: c.__setitem__(0, 3.0)
    ),
    "proxy": in_container(lambda: types.MappingProxyType(TABLE), lambda x, c: x * c["s"], lambda c: TABLE.update(s=3.0)),
    "namespace": in_container(lambda: types.SimpleNamespace(s=2.0), lambda x, c: x * c.s, lambda c: setattr(c, "s", 3.0)),
    "tensor's shape": in_container(lambda: torch.ones(2), lambda x, c: x * c.shape[0], lambda c: c.resize_(5)),
    "tensor's gradient": in_container(
        lambda: torch.ones(2), lambda x, c: x if c.requires_grad else -x, lambda c: c.requires_grad_()
    ),
    "tensor's start": in_container(
        lambda: Thing(w=torch.ones(4)[:2]), lambda x, c: x * c.w.storage_offset(), lambda c: setattr(c, "w", torch.ones(4)[2:])
    ),
    "tensor's strides": in_container(
        lambda: Thing(w=torch.ones(3, 3)), lambda x, c: x * c.w.stride(0), lambda c: setattr(c, "w", torch.ones(3, 3).t())
    ),
    "other tensor": in_container(
        lambda: Thing(w=torch.ones(2)), lambda x, c: x.to(c.w.dtype), lambda c: setattr(c, "w", torch.ones(2, dtype=torch.float64))
    ),
}


# ---- modules ---------------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: Any) -> Any:
        return x * self.scale * self.table.shape[0] if self.training else x * 3  # type: ignore[index]


HOOKS: list[Any] = []  # of all modules, to be removed


def on_module(change: Callable[[Any], Any], make: Callable[[], nn.Module] = Layer) -> Callable[[], Case]:
    def made() -> Case:
        layer = make()
        return layer, lambda: change(layer)

    return made


def sequence() -> nn.Module:
    return nn.Sequential(Layer(), nn.GELU())


MODULES: dict[str, Callable[[], Case]] = {
    "attribute": on_module(lambda m: setattr(m, "scale", 3.0)),
    "training": on_module(lambda m: m.eval()),
    "buffer": on_module(lambda m: setattr(m, "table", torch.ones(5))),
    "hook": on_module(lambda m: m.register_forward_hook(lambda m, a, o: o * 5)),
    "forward of the object": on_module(lambda m: setattr(m, "forward", lambda x: x * 9)),
    "hook of all modules": on_module(lambda m: HOOKS.append(nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 5))),
    "inner attribute": on_module(lambda m: setattr(m[0], "scale", 3.0), sequence),
    "inner hook": on_module(lambda m: m[0].register_forward_pre_hook(lambda m, a: (a[0] * 5,)), sequence),
    "inner module": on_module(lambda m: m.__setitem__(1, nn.Tanh()), sequence),
    "option of a module of torch": on_module(lambda m: setattr(m[1], "approximate", "tanh"), sequence),
}


def a_class_of_modules() -> Case:
    mine = types.new_class("Mine", (Layer,))
    return mine(), lambda: setattr(mine, "forward", lambda self, x: x * 9)


def an_autograd_function() -> Case:
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * SCALE

    return lambda x: Mine.apply(x), set_global(3.0)


def a_class_method_looked_up_at_each_call() -> Case:
    return lambda x: Config.of_class(x), lambda: setattr(Config, "scale", 3.0)


def a_bound_method_of_a_module() -> Case:
    layer = Layer()
    return layer.forward, lambda: setattr(layer, "scale", 3.0)


# ---- torch -----------------------------------------------------------------------------------------------------------------------


def under_autocast(x: Any) -> Any:
    with torch.autocast("cpu"):
        return x.T @ x


OF_TORCH: dict[str, Callable[[], Case]] = {
    "default dtype": lambda: (lambda x: x + torch.ones(3), lambda: torch.set_default_dtype(torch.float64)),
    "grad mode": lambda: (lambda x: x * 3 if torch.is_grad_enabled() else x, lambda: torch.set_grad_enabled(False)),
    "determinism": lambda: (lambda x: x, lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
    "default device": lambda: (lambda x: x.to(torch.get_default_device()), lambda: torch.set_default_device("meta")),
    "cudnn": lambda: (
        lambda x: x if torch.backends.cudnn.benchmark else -x,
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "tf32": lambda: (
        lambda x: x if torch.backends.cuda.matmul.allow_tf32 else -x,
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
    "precision": lambda: (
        lambda x: x if torch.get_float32_matmul_precision() == "medium" else -x,
        lambda: torch.set_float32_matmul_precision("medium"),
    ),
    "autocast": lambda: (under_autocast, lambda: torch.set_autocast_dtype("cpu", torch.float16)),
    "threads": lambda: (lambda x: x * torch.get_num_threads(), lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
}

# fmt: off
FUNCTIONS = [a_global, a_global_of_a_called_function, a_replaced_helper, code_of_a_helper, own_code, a_default, own_keyword_default,
             what_a_default_holds, a_cell_of_a_called_function, an_inner_function, a_decorator, a_decorator_of_torch,
             a_transform_of_torch, a_cached_function, a_partial, a_partial_inside, an_import, an_attribute_of_a_function,
             a_relative_import, a_name_that_a_module_makes_up, a_class_pattern, text_of_an_object, a_patched_function_of_torch,
             a_patched_method_of_tensors, a_patched_builtin, an_attribute, an_attribute_of_an_attribute, negative_zero,
             a_bool_for_an_int, an_int_of_more_than_64_bits, an_attribute_that_was_absent, an_attribute_asked_for_by_name,
             all_attributes, a_method, a_property, an_attribute_made_up, a_static_method, a_slot, a_callable_object, another_class,
             other_bases, a_dataclass, a_named_tuple, a_member_of_an_enumeration, a_method_of_a_base, a_metaclass,
             an_attribute_that_a_property_hides, an_attribute_of_a_base_that_is_hidden, an_item_in_an_attribute_of_a_function,
             what_an_object_says_of_itself, what_a_pattern_reads, a_relative_import_of_a_name, an_import_of_a_part,
             a_class_of_modules, an_autograd_function, a_class_method_looked_up_at_each_call, a_bound_method_of_a_module]
# fmt: on
ALL = {f.__name__: f for f in FUNCTIONS} | CLASSES | CONTAINERS | MODULES | OF_TORCH


@pytest.mark.parametrize("name", ALL)
def test_a_change_of_state_that_a_function_reads_is_detected(name: str) -> None:
    threads = torch.get_num_threads()
    function, change = ALL[name]()
    state = state_of((function,))
    assert state.unchanged() and state.first_change() is None
    assert state._test(), "the fast comparison does for a function nothing happened to"
    function(X)
    assert state.unchanged(), "running the function changes nothing"
    change()
    seen = not state.unchanged()
    torch.set_num_threads(threads)
    assert seen


@pytest.mark.parametrize(
    "name",
    [
        "a_global_of_a_called_function",
        "an_attribute",
        "negative_zero",
        "item of a list",
        "a_partial",
        "attribute",
        "a_bound_method_of_a_module",
        "replaced method",
    ],
)
def test_results_follow_the_present_state(name: str) -> None:
    function, change = ALL[name]()
    fused = onepass.fuse(function)
    first = fused(X)
    assert torch.equal(first, function(X))
    change()
    then = fused(X)
    if name != "negative_zero":  # the value of the literal in the kernel is not tested here
        assert torch.equal(then, function(X)) and not torch.equal(first, then)
    assert len(fused._traces) == 2


def test_changed_defaults_of_the_fused_function_take_effect() -> None:
    def mine(x: Any, s: float = 2.0) -> Any:
        return x * s

    fused = onepass.fuse(mine)
    assert torch.equal(fused(X), X * 2)
    mine.__defaults__ = (3.0,)
    assert torch.equal(fused(X), X * 3)


def test_equal_values_stored_again_change_nothing() -> None:
    thing = Thing(s=float("2.5"), n=float("nan"), t=(1, "a"))
    fused = onepass.fuse(lambda x: x * thing.s + (thing.n if thing.t[0] == 2 else 0.0))
    fused(X)
    thing.s, thing.n, thing.t = float("2.5"), float("nan"), (1, "".join(["a"]))
    thing.other = 3
    fused(X)
    assert len(fused._traces) == 1


def test_going_back_and_forth_traces_twice() -> None:
    layer = Layer()
    fused = onepass.fuse(layer)
    for _ in range(3):
        assert torch.equal(fused(X), X * 4)
        layer.eval()
        assert torch.equal(fused(X), X * 3)
        layer.train()
    assert len(fused._traces) == 2


def test_functions_among_the_arguments() -> None:
    thing = Thing(s=2.0)
    fused, mine = onepass.fuse(lambda x, f: f(x)), lambda x: x * thing.s
    assert torch.equal(fused(X, mine), X * 2)
    thing.s = 3.0
    assert torch.equal(fused(X, mine), X * 3)
    assert torch.equal(fused(X, lambda x: x * 4), X * 4)


def test_a_value_cached_at_the_first_run_is_no_change() -> None:
    class Mine:
        @functools.cached_property
        def scale(self) -> float:
            return 2.0

    mine = Mine()
    fused = onepass.fuse(lambda x: x * mine.scale)
    assert torch.equal(fused(X), X * 2) and torch.equal(fused(X), X * 2)
    assert len(fused._traces) == 1


# ---- refusals --------------------------------------------------------------------------------------------------------------------


def hidden() -> dict[str, Callable[..., Any]]:
    thing, array, raw, tensor = Thing(s=2.0), numpy.array([2.0]), bytearray([2]), torch.ones(2)
    reference, local, getter = weakref.ref(thing), threading.local(), operator.attrgetter("s")
    return {
        "array": lambda x: x * float(array[0]),
        "bytes that change": lambda x: x * raw[0],
        "context": lambda x: x * CONTEXT.get(),
        "iterator": lambda x: x * next(COUNTER),
        "random": lambda x: x * random.random(),
        "clock": lambda x: x * time.time(),
        "own generator": lambda x: x * random.Random(1).random(),
        "globals": lambda x: x * globals()["SCALE"],
        "eval": lambda x: x * eval("SCALE"),
        "environment": lambda x: x * len(os.environ),
        "identity": lambda x: x * id(x),
        "modules": lambda x: x * sys.modules[__name__].SCALE,
        "weak reference": lambda x: x * reference().s,  # type: ignore[union-attr]
        "thread": lambda x: x * local.s,
        "getter": lambda x: x * getter(thing),
        "its globals": lambda x: x * helper.__globals__["SCALE"],
        "frame": lambda x: x * sys._getframe().f_globals["SCALE"],
        "memory of a tensor": lambda x: x * tensor.tolist()[0],
        "version of a tensor": lambda x: x * tensor._version,
        "attribute by name": lambda x: x * getattr(tensor, "a" + "b"),
        "file": lambda x: x * len(open(__file__).read()),
        "seed": lambda x: x * torch.initial_seed(),
        "state of torch": lambda x: x * torch.cuda.memory_allocated(),
        "array of a tensor": lambda x: x * float(tensor.numpy()[0]),
        "address of a tensor": lambda x: x * tensor.data_ptr(),
        "gradient of a tensor": lambda x: x if tensor.grad is None else -x,
        "memory behind a tensor": lambda x: x * tensor.untyped_storage().nbytes(),
        "getter made inside": lambda x: x * operator.attrgetter("s")(thing),
        "caller made inside": lambda x: x * operator.methodcaller("get", "s")(TABLE),
        "any name of a module": lambda x: getattr(operator, "m" + "ul")(x, 2),
    }


@pytest.mark.parametrize("name", hidden())
def test_state_that_cannot_be_inspected_is_refused(name: str) -> None:
    with pytest.raises(errors.UnguardedState, match="ONEPASS-120") as caught:
        capture(hidden()[name], (X,))
    assert type(caught.value) is errors.UnguardedState


def test_functions_that_change_the_state_they_read_are_refused() -> None:
    box, thing = [0], Thing(n=0)

    def counts(x: Any) -> Any:
        box[0] += 1
        return x * 2

    def numbers(x: Any) -> Any:
        thing.n += 1
        return x + thing.n

    for function, where in ((counts, "box"), (numbers, "thing.n")):
        with pytest.raises(errors.ChangesState, match="ONEPASS-121") as caught:
            capture(function, (X,))
        assert where in str(caught.value)


def test_mutable_results_are_copied_or_refused() -> None:
    with pytest.raises(errors.UnsupportedReturn, match="a set"):
        capture(lambda x: (x * 2, {1}), (X,))
    assert onepass.fuse(lambda x: (x * 2, [1, None, "a"], torch.float32))(X)[1:] == ([1, None, "a"], torch.float32)


class Times5(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * 5


def test_torch_function_modes_are_refused() -> None:
    fused = onepass.fuse(lambda x: x.exp())
    fused(X)
    with Times5(), pytest.raises(errors.UnsupportedTorchMode, match="Times5"):
        fused(X)
    with torch.device("cpu"):  # sets the device of new tensors, which is compared
        assert torch.equal(fused(X), fused(X))
    assert len(fused._traces) == 2


# ---- plain arguments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (2**64, 2**64 + 1),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (slice(0, 1), slice(False, 1)),
        (float("nan"), 0.0),
    ],
    ids=repr,
)
def test_plain_values_that_differ(first: Any, then: Any) -> None:
    captured = capture(lambda x, option: x * 2, (X, first))
    assert captured.bind((X, first)) is not None and captured.bind((X, then)) is None
    assert not same_value(first, then) and exact_key(first) != exact_key(then)


def test_plain_values_that_do_not_differ() -> None:
    fused = onepass.fuse(lambda x, option: x * 2)
    for values in ((float("nan"), math.nan), (2**100, int("1" + "0" * 100, 2)), ("ab", "".join("ab")), (slice(0, 1), slice(0, 1))):
        before = len(fused._traces)
        for value in values:
            fused(X, value)
        assert len(fused._traces) == before + 1


def test_functions_that_compute_from_their_arguments_alone() -> None:
    def mine(x: Any) -> Any:
        count = functools.reduce(operator.mul, x.shape, 1) + sum(sorted(len(s) for s in ("a", "bc")))
        return x * count * math.prod(x.shape) * float(numpy.prod(x.shape)) * numpy.pi * isinstance(x, torch.Tensor)

    assert torch.allclose(onepass.fuse(mine)(X), mine(X))


def test_too_much_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [[k] for k in range(50)]
    capture(lambda x: x * len(many), (X,))
    monkeypatch.setattr(state_walk, "MAX_READS", 49)
    with pytest.raises(errors.UnguardedState, match="more than 49 objects"):
        capture(lambda x: x * len(many), (X,))


def test_inference_mode_is_more_than_no_gradients() -> None:
    with torch.no_grad():
        state = state_of((helper,))
        assert state.unchanged()
    with torch.inference_mode():
        assert not state.unchanged()


def test_objects_nested_too_deeply() -> None:
    chain: list[Any] = []
    for _ in range(5000):
        chain = [chain]
    with pytest.raises(errors.UnguardedState, match="recursion"):
        capture(lambda x: x * len(chain), (X,))
