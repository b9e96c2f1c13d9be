"""The capture table compared with torch's schemas: exact overloads, and every argument respected, harmless, or refused."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # defines some of the ops
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import onepass
from onepass import compat
from onepass.capture import capture
from onepass.capture.graph import node_kinds, reuse
from onepass.capture.lowering.call import Call, Handler
from onepass.capture.lowering.lower import LOWERINGS, Output, lower
from onepass.capture.lowering.reductions import REDUCTIONS
from onepass.capture.lowering.schema import PLACEMENT, op_name
from onepass.device import device
from onepass.errors import (
    BitReinterpretation,
    IgnoredArgument,
    MetadataMismatch,
    Mutation,
    OnepassError,
    ResultOnOtherDevice,
    UnsupportedOp,
    UnsupportedView,
)
from onepass.integration import region_op  # noqa: F401, defines the op that rewritten graphs call
from onepass.integration.claim import ClaimOptions, claim
from onepass.ir.expr import BY_TORCH
from onepass.ir.oracle import evaluate
from onepass.ir.program import Buffer, Program
from onepass.tools.check import as_tuple

# Overloads that some releases between 2.11 and 2.15 lack.
SOME_LACK = {
    "prims.fma.default",
    "aten.mm.dtype",
    "aten.bmm.dtype",
    "aten.addmm.dtype",
    "aten.baddbmm.dtype",
    "aten._grouped_mm.default",
}
# fmt: off
CLAIMS = {*node_kinds._COPIES, *node_kinds._CASTS, *node_kinds._CONSTANTS, *node_kinds._DECLINED, *node_kinds._INLINED,
          *node_kinds.OTHER_REDUCTIONS, *node_kinds.MATMULS, *reuse._FRESH_RESULTS, *reuse._CASTS}
# fmt: on
OPS = sorted(name for name in LOWERINGS if name.startswith(("aten.", "prims.")))


def overload(name: str) -> Any:
    """The overload of a name; None if this torch lacks it."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def missing(names: set[str]) -> set[str]:
    return {name for name in names - SOME_LACK if not isinstance(overload(name), torch._ops.OpOverload)}


def test_every_row_is_a_pure_overload() -> None:
    assert not missing(set(OPS))
    schemas = {name: overload(name)._schema for name in OPS if overload(name) is not None}
    assert not [name for name, schema in schemas.items() if schema.is_mutable or any(a.is_out for a in schema.arguments)]
    of_sizes = (torch.sym_float, torch._sym_sqrt)  # type: ignore[attr-defined]
    functions = (operator.mul, operator.add, operator.sub, operator.truediv, *of_sizes)
    assert set(LOWERINGS) - set(OPS) == {op_name(f) for f in functions}


def test_claims_name_overloads() -> None:
    assert not missing(CLAIMS)
    assert set(LOWERINGS) >= node_kinds._COPIES | node_kinds._CASTS | node_kinds._CONSTANTS | node_kinds._DECLINED
    assert not node_kinds.OTHER_REDUCTIONS & set(LOWERINGS)


# ---- sample calls -----------------------------------------------------------------------------------------------------------

X = (torch.arange(24, dtype=torch.float64).reshape(4, 6) * 7 % 24) / 4 + 0.25
Y = X.flip(0) / 2 + 0.25
INTS, MORE_INTS = (X * 4).long(), (Y * 4).long()
AT = torch.tensor([[1], [0], [5], [2]])
SHAPE = [4, 6]

# Values by argument name: a tensor if the argument takes one, otherwise a number.
TENSORS = {
    "self": X,
    "a": X,
    "condition": X > 2,
    "grad_output": X[:2],
    "b": Y,
    "c": X + Y,
    "other": Y,
    "exponent": Y,
    "tensor1": Y,
    "tensor2": X + Y,
    "src": Y,
    "min": Y,
    "max": Y + 1,
    "index": AT,
    "value": torch.tensor(1.5),
    "tensors": [X, Y],
}
OTHERS = {
    "alpha": 1,
    "value": 1,
    "other": 2,
    "self": 2,
    "exponent": 2,
    "min": 1,
    "max": 3,
    "dim": 1,
    "dim0": 0,
    "dim1": 1,
    "dim2": 1,
    "dims": [1, 0],
    "permutation": [1, 0],
    "size": SHAPE,
    "shape": SHAPE,
    "input_sizes": SHAPE,
    "fill_value": 2,
    "s": 2,
    "end": 6,
    "start": 0,
    "step": 1,
    "index": 1,
    "length": 6,
    "decimals": 0,
    "repeats": [2, 3],
    "pad": [1, 2],
    "split_size": 2,
    "split_sizes": [2, 4],
    "chunks": 3,
    "stride": [6, 1],
    "rounding_mode": None,
    "dimension": 0,
    "offset": 0,
    "broadcast_dimensions": [0, 1],
    "dimensions": [],
    "dtype": torch.float64,
    "device": torch.device("cpu"),
    "requires_grad": False,
}
NUMBERS = [0, 3, 0.5, True]
ALTERNATIVES: dict[str, list[Any]] = {
    "alpha": NUMBERS,
    "value": NUMBERS,
    "exponent": NUMBERS,
    "other": NUMBERS,
    "fill_value": NUMBERS,
    "s": NUMBERS,
    "dim": [0, -1, -2, [0], [1, 0], [-1, 0], [], None],
    "keepdim": [True],
    "unbiased": [False],
    "correction": [0, 1, 2, 0.5, None],
    "dtype": [torch.float32, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8, torch.float64],
    "device": [torch.device("cpu"), "cpu"],
    "layout": [torch.strided, torch.sparse_coo],
    "pin_memory": [False, True],
    "non_blocking": [True],
    "memory_format": [torch.contiguous_format, torch.preserve_format],
    "rounding_mode": ["trunc", "floor"],
    "decimals": [0, 1, -1],
    "sparse_grad": [True],
    "implicit": [True],
    "requires_grad": [True],
    "start": [None, 1, -3, -100, 100],
    "end": [None, 4, -1, 100],
    "step": [2, 3, -1],
    "index": [0, 3, -1],
    "storage_offset": [0, 6, None],
    "stride": [[1, 4], [0, 1], [6, 2]],
    "size": [[6, 4], [24], [2, 12], [4, 1]],
    "shape": [[6, 4], [24], [2, 2, 6], [4, 6]],
    "input_sizes": [[4, 6], [8, 6]],
    "dims": [[0, 1], [-1, 0]],
    "permutation": [[0, 1]],
    "min": [0, 2, None],
    "max": [0, 2, None],
    "dim0": [1, -1],
    "dim1": [0, -1],
    "dim2": [0],
    "repeats": [[1, 1], [2, 1, 3]],
    "pad": [[0, 1, 2, 0], [-1, 0], [0, 0]],
    "split_size": [1, 4, [1, 5]],
    "split_sizes": [[6], [1, 2, 3]],
    "chunks": [1, 4],
    "start_dim": [1, -1],
    "end_dim": [0, 1],
    "dimension": [1],
    "offset": [1],
    "broadcast_dimensions": [[1, 0]],
    "dimensions": [[0], [1]],
    "length": [4],
}

INT = {"self": INTS, "other": MORE_INTS}
CALLS: dict[str, dict[str, Any]] = {
    **{
        f"aten.bitwise_{op}.{kind}": (
            {"self": INTS, "other": 5} if kind == "Scalar" else {"self": 5, "other": MORE_INTS} if kind == "Scalar_Tensor" else INT
        )
        for op in ("and", "or", "xor")
        for kind in ("Tensor", "Scalar", "Scalar_Tensor")
    },
    **{
        f"aten.bitwise_{way}_shift.{kind}": (
            {"self": INTS, "other": 5}
            if kind == "Tensor_Scalar"
            else {"self": 5, "other": MORE_INTS}
            if kind == "Scalar_Tensor"
            else INT
        )
        for way in ("left", "right")
        for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    },
    **{
        f"aten.__{way}shift__.{kind}": {"self": INTS, "other": 5} if kind == "Scalar" else INT
        for way in "lr"
        for kind in ("Tensor", "Scalar")
    },
    "aten.bitwise_not.default": {"self": INTS},
    "aten.unsqueeze.default": {"dim": 1},
    "aten.squeeze.default": {"self": X[:, None]},
    "aten.squeeze.dim": {"self": X[:, None]},
    "aten.squeeze.dims": {"self": X[:, None], "dim": [1]},
    "prims.squeeze.default": {"a": X[:, None], "dimensions": [1]},
    "prims.collapse_view.default": {"start": 0, "end": 1},
    "aten.expand.default": {"self": X[:1]},
    "prims.broadcast_in_dim.default": {"shape": [4, 3, 6], "broadcast_dimensions": [0, 2]},
    **{f"aten.clamp.{kind}": {"min": TENSORS["min"] if kind == "Tensor" else 1} for kind in ("default", "Tensor")},
    **{f"aten.{name}": {"dim": 1} for name in ("split_with_sizes.default", "unsafe_split_with_sizes.default")},
    "aten.split.sizes": {"split_size": [2, 4], "dim": 1},
    "aten.slice_scatter.default": {"src": Y[:, 1:5], "dim": 1, "start": 1, "end": 5},
    "aten.select_scatter.default": {"src": Y[:, 0]},
    "aten.slice_backward.default": {"grad_output": X[:, 1:5], "start": 1, "end": 5},
    "aten.select_backward.default": {"grad_output": X[:, 0]},
    "aten.as_strided.default": {"self": X[1:3], "size": [2, 6], "stride": [6, 1]},
    "aten.unfold.default": {"size": 2, "step": 2},
    "aten.lift_fresh.default": {"self": torch.tensor(2.0)},
    "prims.scalar_tensor.default": {"dtype": torch.float64, "device": torch.device("cpu")},
    "prims.iota.default": {"dtype": torch.int64},
}
REFUSED = {"aten.unfold.default", "aten.diagonal.default"}


def sample(name: str) -> dict[str, Any]:
    """The fewest arguments that the schema allows for a call."""
    given = {}
    for argument in overload(name)._schema.arguments:
        kind = TENSORS if "Tensor" in str(argument.type) else OTHERS
        if argument.name in CALLS.get(name, {}):
            given[argument.name] = CALLS[name][argument.name]
        elif not argument.has_default_value():
            is_list = str(argument.type) in ("List[int]", "Optional[List[int]]")
            value = kind[argument.name]
            given[argument.name] = [value] if is_list and isinstance(value, int) else value
    return given


def variants(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sample call with one argument changed at a time: tensors to other types and ranks, the rest to all alternatives."""
    base = sample(name)
    for argument in overload(name)._schema.arguments:
        value = base.get(argument.name)
        if isinstance(value, Tensor):
            changed: list[Any] = [value > 1, value.long(), value.float(), *([value[0], value[:1]] if value.dim() else [])]
        else:
            changed = [value[:1]] if value is not None and argument.name == "tensors" else ALTERNATIVES.get(argument.name, [])
            assert changed or argument.name in base, f"{name}: no alternatives for {argument.name}"
        yield from ((argument.name, {**base, argument.name: each}) for each in changed)


def ordered(name: str, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, as torch takes them."""
    schema = overload(name)._schema
    positional, gap = [], False
    by_name = {}
    for argument in schema.arguments:
        gap |= argument.name not in given or argument.kwarg_only
        if argument.name in given and gap:
            by_name[argument.name] = given[argument.name]
        elif argument.name in given:
            positional.append(given[argument.name])
    return tuple(positional), by_name


class OneCall:
    """A graph of one call, as Inductor would see it; creating it fails if torch refuses the call."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        args, kwargs = ordered(name, given)
        self.op, self.graph, self.tensors = overload(name), fx.Graph(), dict[str, Tensor]()
        expected = self.op(*args, **kwargs)
        self.expected = expected if isinstance(expected, (tuple, list)) else (expected,)
        mode = compat.fake_mode()
        placed = pytree.tree_map(lambda leaf: self.place(leaf, mode) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        self.inputs = {node: buffer(node, "input", node.name) for node in self.graph.nodes}
        fakes = fx.node.map_arg(placed, lambda n: n.meta["val"])
        node = self.graph.call_function(self.op, *placed)
        with mode:
            node.meta["val"] = self.op(*fakes[0], **fakes[1])
        outputs = [node] if isinstance(node.meta["val"], Tensor) else [self.item(node, k) for k in range(len(self.expected))]
        self.outputs = tuple(Output(each, buffer(each, "output", f"out{k}")) for k, each in enumerate(outputs))

    def place(self, tensor: Tensor, mode: Any) -> fx.Node:
        node = self.graph.placeholder(f"in{len(self.tensors)}")
        node.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
        self.tensors[node.name] = tensor
        return node

    def item(self, node: fx.Node, k: int) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (node, k))
        item.meta["val"] = node.meta["val"][k]
        return item

    def program(self) -> Program:
        return lower(self.graph, "one", self.inputs, self.outputs, lambda size: int(size))

    def compare(self, values: bool) -> None:
        """Check that the Program matches torch."""
        program = self.program()
        found = evaluate(program, self.tensors, {})
        for k, wanted in enumerate(self.expected):
            actual = found[f"out{k}"]
            assert actual.shape == wanted.shape and program.buffer[f"out{k}"].dtype.torch == wanted.dtype
            eps = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0
            if values:
                torch.testing.assert_close(actual.to(wanted.dtype), wanted, rtol=4 * eps, atol=4 * eps, equal_nan=True)


def buffer(node: fx.Node, role: str, name: str) -> Buffer:
    value = node.meta["val"]
    return Buffer(name, BY_TORCH[value.dtype], role, tuple(value.shape), tuple(value.stride()))


def outcome(name: str, given: dict[str, Any]) -> str:
    """How a call ends: torch refuses it, onepass refuses it, or both agree."""
    try:
        call = OneCall(name, given)
    except Exception:  # torch's own errors have many types
        return "no call"
    try:
        call.compare(values="empty" not in name)
    except OnepassError:
        return "refused"
    return "agrees"


@pytest.mark.parametrize("name", [name for name in OPS if overload(name) is not None])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
def test_every_argument_is_respected_or_refused(name: str) -> None:
    """A call with the schema's defaults is computed; one with a changed argument matches torch or is refused with a code."""
    assert outcome(name, sample(name)) == ("refused" if name in REFUSED else "agrees")
    for argument, given in variants(name):
        try:
            outcome(name, given)
        except Exception as error:
            raise AssertionError(f"{name} with {argument}={given[argument]}") from error


# ---- the mechanism ----------------------------------------------------------------------------------------------------------

# Arguments that no handler reads: a call that passes them is refused.
NOT_FOLLOWED = {("aten.expand.default", "implicit"), ("aten.gather.default", "sparse_grad")}


def test_arguments_that_are_not_read_must_hold_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers read every argument, except those about a result's location and those listed here."""
    calls: list[Call] = []

    def watched(handler: Handler) -> Handler:
        def handle(call: Call) -> Any:
            calls.append(call)
            return handler(call)

        return handle

    for name in [name for name in OPS if overload(name) is not None and name not in REFUSED]:
        monkeypatch.setitem(LOWERINGS, name, watched(LOWERINGS[name]))  # type: ignore[arg-type]
        OneCall(name, sample(name)).program()
    unread = {(call.name, name) for call in calls for name in {*call.args.values} - call.args.read - {*PLACEMENT}}
    assert unread == NOT_FOLLOWED
    for call in calls:
        others = replace(call.args, values={name: object() for name in call.args.values})
        assert {*others.ignored()} == {*call.args.values} - call.args.read - {"device", "non_blocking", "memory_format"}


def test_an_argument_that_a_handler_ignores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LOWERINGS["aten.amax.default"]
    monkeypatch.setitem(LOWERINGS, "aten.amax.default", lambda call: (right(call), call.args.read.discard("keepdim"))[0])  # type: ignore
    OneCall("aten.amax.default", {"self": X, "dim": [1], "keepdim": False}).program()
    with pytest.raises(IgnoredArgument, match=r"ONEPASS-111.*keepdim=True"):
        OneCall("aten.amax.default", {"self": X, "dim": [1], "keepdim": True}).program()


@pytest.mark.parametrize("name", ["aten.isnan.default", "aten.t.default", "aten.squeeze.default"])
def test_a_result_that_differs_in_form_from_torchs_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unchanged(call: Call) -> Any:
        return next(iter(call.args))

    monkeypatch.setitem(LOWERINGS, name, unchanged)  # type: ignore[arg-type]
    with pytest.raises(MetadataMismatch, match="ONEPASS-113"):
        OneCall(name, sample(name)).program()


def add() -> None:
    """A function with the name of an op."""


@pytest.mark.parametrize(
    "target", [torch.ops.aten.add, torch.add, add, torch.ops.aten.add.out, torch.ops.aten.add_.Tensor], ids=op_name
)
def test_a_target_without_an_overload_has_no_row(target: Any) -> None:
    assert op_name(target) not in LOWERINGS


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in REDUCTIONS
        if overload(name) is not None and any("List[int]" in str(a.type) for a in overload(name)._schema.arguments)
    ],
)
@pytest.mark.parametrize("x", [X, X[:1, :1], X[:, :1], X[0, 0]], ids=["4x6", "1x1", "4x1", "0-dim"])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
def test_an_empty_list_of_dims_means_all_or_none_as_in_torch(name: str, x: Tensor) -> None:
    outcomes = [
        outcome(name, {"self": x, "dim": dim, "keepdim": keepdim}) for dim in (list[int](), None) for keepdim in (False, True)
    ]
    assert "refused" not in outcomes and "agrees" in outcomes


@pytest.mark.parametrize(
    "name",
    [
        "aten.isfinite.default",
        "prims.isfinite.default",
        "aten.isinf.default",
        "aten.isnan.default",
        "aten.sign.default",
        "aten.sgn.default",
        "aten.relu.default",
    ],
)
def test_predicates_of_nan_and_infinities(name: str) -> None:
    special = torch.tensor([[1.5, -2.0, 0.0], [float("nan"), float("inf"), -float("inf")]], dtype=torch.float64)
    (argument,) = (k for k, value in sample(name).items() if isinstance(value, Tensor))
    assert outcome(name, {**sample(name), argument: special}) == "agrees"


# ---- functions, fused -------------------------------------------------------------------------------------------------------


def check(function: Callable[..., Any], *args: Tensor) -> None:
    """Check that a fused function matches eager: types, shapes, strides and bits."""
    for expected, actual in zip(as_tuple(function(*args)), as_tuple(onepass.fuse(function)(*args)), strict=True):
        assert expected.dtype == actual.dtype and expected.shape == actual.shape and expected.stride() == actual.stride()
        assert torch.equal(expected.contiguous().view(torch.uint8), actual.contiguous().view(torch.uint8))


def test_results_may_be_views_as_another_type_of_the_same_width() -> None:
    x = torch.arange(24.0).reshape(4, 6) - 7
    check(lambda x: ((x + 1).view(torch.int32), x.view(torch.int32), x.t().view(torch.int32)[1:]), x)
    check(lambda x: ((x + 1).view(torch.int32)[1:3, 1:].t(), (x * 2).view(torch.int32).view(torch.float32)), x)
    check(lambda x: (x.to(torch.float8_e4m3fn).view(torch.uint8), x.bool().view(torch.int8), x.bfloat16().view(torch.int16)), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(torch.int32) & 0x7FFFFFFF,
        lambda x: (x + 1).view(torch.int32).amax(-1),
        lambda x: (x + 1).view(torch.int16),
        lambda x: x.to(torch.float8_e4m3fn).view(torch.uint8).sum(0),
        lambda x: x.bool().view(torch.uint8) + 1,
        lambda x: ((x + 1).view(torch.float64), x + 1),
    ],
    ids=["masked", "reduced", "narrower", "fp8", "bool", "wider"],
)
def test_computing_with_reinterpreted_bits_is_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(BitReinterpretation, match="ONEPASS-110"):
        onepass.fuse(function)(X.float())


def test_views_of_other_types_and_signs() -> None:
    check(lambda x: x.view(torch.float32) + 1, X.float())
    with pytest.raises(Mutation):
        capture(lambda x: x.view(torch.int32).add_(1), (X.float(),))
    for function in (torch._neg_view, lambda x: torch._neg_view(x + 1)):
        with pytest.raises(UnsupportedOp, match="_neg_view"):
            capture(function, (X,))


def test_as_strided_outside_of_its_argument_is_refused() -> None:
    check(lambda x: x[1:3].as_strided((6, 2), (2, 1)) + 1, X.float())
    with pytest.raises(UnsupportedView):
        capture(lambda x: x[1:3].as_strided((6, 2), (2, 1), 0) + 1, (X,))


def test_results_on_another_device_are_refused() -> None:
    with pytest.raises(ResultOnOtherDevice, match="ONEPASS-112"):
        capture(lambda x: (x.sum(), torch.zeros(3, device="cpu")), (X.to("meta"),))
    with pytest.raises(ResultOnOtherDevice, match="ONEPASS-112"):
        capture(lambda x: (x + 1).to("meta"), (X,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.scatter(1, i, 5.0, reduce="add"),
        lambda x, i: x.scatter(1, i, x, reduce="multiply"),
        lambda x, i: x.scatter_add(1, i, x),
        lambda x, i: x.scatter_reduce(1, i, x, "sum"),
        lambda x, i: x.scatter_reduce(1, i, x, "amax", include_self=False),
        lambda x, i: x.clone().scatter_(1, i, 5.0, reduce="add"),
    ],
    ids=["value_reduce", "reduce", "add", "sum", "amax", "in_place"],
)
def test_scatters_that_reduce_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedOp, match=r"ONEPASS-101.*aten\.scatter"):
        capture(function, (X, AT))


def test_scatter_uses_the_leading_part_of_its_source() -> None:
    check(lambda x, i, y: (x.scatter(1, i, y), x.scatter(-1, i, y[:, 2:]), x.scatter(1, i, 2)), X.float(), AT, Y.float())


@pytest.mark.parametrize("several", [2, 6])
def test_scatters_to_several_positions_per_row_are_refused(several: int) -> None:
    with pytest.raises(UnsupportedOp, match="only one index per row"):
        capture(lambda x, i: x.scatter(1, i, 5.0), (X, torch.arange(several).expand(4, several).flip(1)))


@pytest.mark.parametrize("end", [5, 100])
def test_a_slice_gradient_of_another_shape_is_refused(end: int) -> None:
    """torch would repeat one column for a slice of several."""
    given = {**sample("aten.slice_backward.default"), "dim": 1, "grad_output": X[:, :1]}
    assert outcome("aten.slice_backward.default", {**given, "end": 2}) == "agrees"
    with pytest.raises(UnsupportedOp, match="do not have the shape"):
        OneCall("aten.slice_backward.default", {**given, "end": end}).program()


@pytest.mark.parametrize("x", [X[0], X[0, :1], X[0, 0]], ids=["6", "1", "0-dim"])
@pytest.mark.parametrize("at", [torch.tensor(0), torch.tensor([0])], ids=["at 0-dim", "at 1"])
def test_a_zero_dim_tensor_is_indexed_as_one_element(x: Tensor, at: Tensor) -> None:
    """If a dim is indexed, or one element of it is overwritten."""
    check(lambda x, at: (x.gather(0, at).reshape(-1), x.scatter(0, at, 9.0).reshape(-1)), x, at)
    for new in (X[1, 1], X[1, :1]):
        check(lambda x, at, new: x.scatter(-1, at, new).reshape(-1), x, at, new)
    for function in (lambda x, at: x.gather(0, at), lambda x, at: x.scatter(0, at, 9.0)):
        assert onepass.fuse(function)(x, at).shape == function(x, at).shape


def test_an_index_without_elements_may_have_any_rank() -> None:
    """Nothing is read, and nothing overwritten."""
    for at in (torch.empty(0, dtype=torch.int64), torch.empty(0, 3, 2, dtype=torch.int64)):
        check(lambda x, at: (x.gather(1, at), x.scatter(1, at, 2.0)), X, at)


def test_transposing_a_dim_with_itself() -> None:
    check(lambda x: (x.transpose(0, -1) + 1, x.sum().transpose(0, -1) + x, x.t() + 1), X[0])


def test_alpha_of_bools() -> None:
    for alpha in (0, 1, 2, True, False):
        check(lambda a, b, alpha=alpha: (torch.add(a, b, alpha=alpha), torch.add(a, True, alpha=alpha)), X > 2, Y > 1)


def test_a_sum_in_another_type_converts_its_elements_first() -> None:
    check(lambda x: x.sum(1, dtype=torch.int64), torch.tensor([[0.75, 0.75, -0.75, 9.5]]))


# ---- claims -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function,left",
    [
        (lambda x: ((x.view(torch.int32) & 0x7FFFFFFF).amax(-1), (x + 1).sum(0)), torch.ops.aten.view.dtype),
        (
            lambda x: (x.scatter(1, torch.zeros(64, 1, dtype=torch.int64), 5.0, reduce="add").amax(-1), x.sum(0)),
            torch.ops.aten.scatter.value_reduce,
        ),
        (
            lambda x: (torch.gather(x, 1, torch.zeros(64, 32, dtype=torch.int64), sparse_grad=True).sum(0), x.sum(1)),
            torch.ops.aten.gather.default,
        ),
    ],
    ids=["bits", "scatter", "argument"],
)
def test_ops_without_a_row_stay_in_the_graph(function: Callable[[Tensor], Any], left: Any) -> None:
    mode = compat.fake_mode()
    with mode:
        x = torch.empty(64, 32)
    graph = compat.trace_graph(function, [x], mode).graph
    outcome = claim(graph, ClaimOptions(device("h200"), interpret=True, by_cost=False))
    assert outcome.regions and all(each.error is None for each in outcome.declined)
    assert [node.target for node in graph.nodes].count(left) == 1
