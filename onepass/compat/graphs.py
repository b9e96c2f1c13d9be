"""Private torch APIs for tracing functions and for calling kernels from graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from .uninterrupted import Once

# Ops that are decomposed while tracing: norms, softmax, losses, activations and their backward passes. Names that a torch
# release lacks are skipped.
_DECOMPOSED = """
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
_fused_rms_norm_backward native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
_native_batch_norm_legit_functional native_batch_norm_backward
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
gelu gelu_backward silu silu_backward leaky_relu leaky_relu_backward elu elu_backward celu hardtanh hardtanh_backward
hardswish hardswish_backward hardsigmoid hardsigmoid_backward softplus softplus_backward mish mish_backward
log_sigmoid_forward log_sigmoid_backward threshold threshold_backward sigmoid_backward tanh_backward glu glu_backward
_prelu_kernel _prelu_kernel_backward softshrink hardshrink logit logit_backward
mse_loss mse_loss_backward huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
addcdiv lerp nan_to_num norm linalg_vector_norm std_mean dist aminmax xlogy masked_fill tril triu logaddexp logaddexp2
heaviside sinc special_entr special_xlog1py isposinf isneginf eye linspace nansum count_nonzero frac
"""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the composite ops that capture does not lower itself."""
    import torch
    from torch._decomp import get_decompositions

    packets = [getattr(torch.ops.aten, name) for name in _DECOMPOSED.split() if hasattr(torch.ops.aten, name)]
    return dict(get_decompositions(packets))


def pytree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of nested tuples, lists and dicts."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def pytree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The inverse of pytree_flatten. torch's own makes every torch.Size a tuple."""
    import torch
    from torch.utils import _pytree

    if spec.is_leaf():
        return leaves[0]
    rest = iter(leaves)
    specs = spec.children() if hasattr(spec, "children") else spec.children_specs  # by the release of torch
    children = [pytree_unflatten(list(islice(rest, child.num_leaves)), child) for child in specs]
    return (
        torch.Size(children) if spec.type is torch.Size else _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)
    )


def structure_key(spec: Any) -> Any:
    """A hashable key that is equal for equal pytree structures."""
    try:
        hash(spec)
    except TypeError:
        return repr(spec)
    return spec


def tree_builder(spec: Any) -> Callable[[list[Any]], Any]:
    """pytree_unflatten for one structure, with a fast path for a single leaf or a flat tuple or list."""
    marks = [*range(1000, 1000 + spec.num_leaves)]  # no two are one object, and a torch.Size holds ints only
    built = pytree_unflatten(marks, spec)
    if len(marks) == 1 and built is marks[0]:
        return lambda leaves: leaves[0]
    for kind in (tuple, list):
        if type(built) is kind and len(built) == len(marks) and all(a is b for a, b in zip(built, marks, strict=True)):
            return kind
    return lambda leaves: pytree_unflatten(leaves, spec)


def fake_mode() -> Any:
    """A new FakeTensorMode with its own symbols and guards."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_symbol(mode: Any, hint: int) -> Any:
    """A symbolic size (2 or more) whose value while tracing is `hint`."""
    import torch
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context).shape[0]


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is a FakeTensor, which has no data, or wraps one."""
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(tensor)


def is_recorded(args: tuple[Any, ...]) -> bool:
    """Whether torch records the ops of a call: for torch.compile, for torch.jit.trace, or under a mode with fake tensors."""
    import torch

    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    return bool(active_modes()) and any(map(is_fake, args))


def constant_tensor(tensor: Any) -> Any:
    """The tensor behind a constant of a traced graph; None if only its shape is known."""
    return getattr(tensor, "constant", None) if is_fake(tensor) else tensor


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """The exceptions torch raises when tracing needs a tensor's value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


@contextmanager
def intercept_ops(
    watch: Callable[[Any, tuple[Any, ...], dict[str, Any]], str], split: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Call `watch(op, args, kwargs)` before every op. Its return value becomes the stack trace of the nodes made for the op.

    If `split(op, args, kwargs)` returns a list of calls, they run instead of the op, and their results are the op's results.
    """
    from torch.fx import traceback
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            traceback.set_stack_trace([watch(func, args, kwargs or {})])
            calls = split(func, args, kwargs or {})
            if calls is None:
                return func(*args, **(kwargs or {}))
            results = [call() for call in calls]
            return results if func._schema.returns else None

    with Watch():  # type: ignore[no-untyped-call]  # of torch
        yield


@contextmanager
def forbid_data_assignment(refuse: Callable[[], None]) -> Iterator[None]:
    """Call `refuse()` when a tensor's `data` is assigned, which no traced op shows."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Refuse(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                refuse()
            return func(*args, **(kwargs or {}))

    with Refuse():
        yield


def storage_key(tensor: Any) -> int:
    """A number that is equal for tensors that share storage, fake tensors included."""
    return int(tensor.untyped_storage()._cdata)


def trace_graph(fn: Callable[..., Any], fakes: list[Any], mode: Any) -> Any:
    """The decomposed graph of the ops that `fn(*fakes)` runs. Nodes keep the stack traces that were set when they were made."""
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, traceback.preserve_node_meta():
        return make_fx(fn, decomposition_table=decompositions())(*fakes)


def _trace_example() -> None:
    import torch

    mode = fake_mode()
    with mode:
        fake = torch.empty(fake_symbol(mode, 8), 4)
    functionalized(trace_graph(lambda x: [x.softmax(-1)], [fake], mode), [fake], mode)
    size_factors(fake.shape[0])
    shape_guards(mode, {size_expression(fake.shape[0]): "s0"})


warm_up_tracing = Once(_trace_example)  # the first trace makes torch import hundreds of modules, dynamo and sympy included


def functionalized(graph_module: Any, fakes: list[Any], mode: Any) -> Any:
    """The graph with in-place ops on its own intermediates replaced by functional ops."""
    import torch

    return trace_graph(torch.func.functionalize(torch.fx.Interpreter(graph_module).run, remove="mutations"), fakes, mode)


def torch_state_guard() -> Callable[[], bool]:
    """A function that checks whether torch's global state (grad mode, autocast, default dtype, modes) is still the same as now."""
    import torch

    guard, inference, modes = torch._C._dynamo.guards.GlobalStateGuard(), torch.is_inference_mode_enabled(), active_modes()
    check, is_inference = guard.check, torch.is_inference_mode_enabled

    def unchanged() -> bool:
        return bool(check()) and is_inference() is inference and active_modes() == modes

    return unchanged


def active_modes() -> tuple[Any, ...]:
    """The torch function and dispatch modes active in this thread, and the names of torch.func's transforms.

    A DeviceContext is represented by its device.
    """
    import torch

    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    transforms = torch._C._functorch.get_interpreter_stack()
    if not functions and not dispatches and not transforms:
        return ()
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    found = [torch._C._get_function_stack_at(k) for k in range(functions)]
    names = [f"torch.func.{transform.key().name.lower()}" for transform in transforms or ()]
    return (*(m.device if isinstance(m, DeviceContext) else m for m in found), *_get_current_dispatch_mode_stack(), *names)


def has_tangent(values: Sequence[Any]) -> bool:
    """Whether a tensor among these carries a tangent of forward-mode differentiation."""
    import torch
    from torch.autograd import forward_ad

    if forward_ad._current_level < 0:
        return False
    return any(isinstance(v, torch.Tensor) and forward_ad.unpack_dual(v).tangent is not None for v in values)


def size_factors(size: Any) -> tuple[int, tuple[str, ...]] | None:
    """A (symbolic) size as a coefficient times symbols, by torch's names; None if it is not such a product."""
    import sympy

    if isinstance(size, int):
        return size, ()
    coefficient, symbols = sympy.sympify(size.node.expr).as_coeff_Mul()
    names: list[str] = []
    for base, exponent in symbols.as_powers_dict().items():
        if base == 1:
            continue
        if not (base.is_Symbol and exponent.is_Integer and exponent > 0 and coefficient.is_Integer):
            return None
        names += [str(base)] * int(exponent)
    return int(coefficient), tuple(names)


def shape_guards(mode: Any, names: dict[str, str]) -> tuple[str, ...]:
    """The guards that tracing added on symbols, as Python expressions. `names` maps torch's symbol names to ours."""
    import sympy
    from torch.utils._sympy.printers import PythonPrinter

    texts = []
    for guard in mode.shape_env.guards:
        renamed = {s: sympy.Symbol(names[str(s)], integer=True, positive=True) for s in guard.expr.free_symbols}
        texts.append(PythonPrinter().doprint(guard.expr.xreplace(renamed)))
    return tuple(dict.fromkeys(texts))


def size_hint(size: Any) -> int | None:
    """The value of a (symbolic) size when the graph was traced; None if it depends on data."""
    import torch

    if isinstance(size, int):
        return size
    if not isinstance(size, torch.SymInt):
        return None
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else None


def size_expression(size: Any) -> str:
    """torch's text for a (symbolic) size. Equal texts are equal sizes."""
    return str(size) if isinstance(size, int) else str(size.node.expr)


@dataclass(frozen=True)
class SizeFactor:
    """An irreducible factor of a size: a symbol, or an expression such as `s0 - 1`."""

    expression: Any  # a sympy expression over torch's symbols
    hint: int  # its value when the graph was traced

    def __str__(self) -> str:
        return str(self.expression)

    @property
    def is_symbol(self) -> bool:
        return bool(self.expression.is_Symbol)


def factored_size(size: Any, nonempty: bool = False) -> tuple[int, tuple[SizeFactor, ...]] | None:
    """A (symbolic) size as a coefficient and factors; None if it depends on data.

    Equal polynomials have equal factors: `32*s0 - 32` is 32 and `s0 - 1`. With `nonempty`, the size is a stride, and `Max(1, s)`
    in it counts as `s`: they differ only for tensors without elements.
    """
    if isinstance(size, int):
        return size, ()
    environment = size.node.shape_env
    known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    expression = _without_least_one(size.node.expr) if nonempty else size.node.expr
    if any(symbol not in known for symbol in expression.free_symbols):
        return None
    coefficient, bases = _factors(expression)
    hints = [int(base.xreplace(known)) for base in bases]
    if any(hint <= 0 for hint in hints):  # single factors may be negative although the size is not
        return 1, (SizeFactor(expression, int(expression.xreplace(known))),)
    return coefficient, tuple(map(SizeFactor, bases, hints))


def _without_least_one(expression: Any) -> Any:
    from torch.utils._sympy.functions import Max

    return expression.replace(lambda e: isinstance(e, Max) and 1 in e.args, lambda e: Max(*(a for a in e.args if a != 1)))


MAX_FACTORED_OPS = 64  # longer expressions are not factored


@lru_cache(maxsize=4096)
def _factors(expression: Any) -> tuple[int, tuple[Any, ...]]:
    """A positive coefficient and the factors of an expression; the expression alone if it cannot be factored."""
    import sympy

    whole = expression
    if expression.is_Integer:
        return int(expression), ()
    if expression.is_Add and expression.count_ops() <= MAX_FACTORED_OPS:
        with suppress(sympy.PolynomialError):
            expression = sympy.factor(expression)
    coefficient, rest = expression.as_coeff_Mul()
    powers = rest.as_powers_dict().items()
    if not (coefficient.is_Integer and coefficient > 0 and all(power.is_Integer and power > 0 for _, power in powers)):
        return 1, (whole,)
    return int(coefficient), tuple(base for base, power in powers for _ in range(int(power)) if base != 1)


def emit_size(graph: Any, expression: Any, known: Callable[[str], Any]) -> Any:
    """Insert nodes that compute a symbolic size, at the graph's insertion point, and return the last one.

    `known` gives the node of a symbol. NotImplementedError if torch cannot express a function as nodes.
    """
    from torch import fx
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Tracer(fx.proxy.GraphAppendingTracer):
        def create_node(self, *args: Any, **kwargs: Any) -> Any:
            node: Any = super().create_node(*args, **kwargs)
            given = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*given[0], **given[1])
            return node

    tracer = Tracer(graph)
    symbols = {symbol: fx.Proxy(known(str(symbol)), tracer) for symbol in sorted(expression.free_symbols, key=str)}
    try:
        return sympy_interp(PythonReferenceAnalysis, symbols, expression).node
    except (AttributeError, KeyError, TypeError, AssertionError) as error:
        raise NotImplementedError(f"{expression}: {type(error).__name__}: {error}") from error


def raw_stream() -> Callable[[int], int]:
    """A function from a CUDA device's index to the address of its current stream."""
    import torch

    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # creates no Stream object
    return fast if fast is not None else lambda index: torch.cuda.current_stream(index).cuda_stream


def auto_functionalized_call(argument: str, bases: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Target and keyword arguments for calling an op that fills `bases` (its list `argument`) in a functional graph.

    The call returns the op's own result and then one tensor per base. ImportError if torch lacks auto_functionalized_v2.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

    places = {f"_{argument}_{k}_base_index": k for k in range(len(bases))}
    return auto_functionalized_v2, {f"_{argument}_length": len(bases), **places, "_all_bases": bases}
