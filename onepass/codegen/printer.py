"""Kernel IR -> text, once, in the dialect of Triton or Gluon."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from ..ir.expr import BOOL, OPS, DType
from . import kernel_ir as ir
from .expr import TRITON, conjunction
from .helpers import FUNCTIONS, definitions, with_callees
from .kernel_ir import Kernel, Language, RightSide, Slot, Statement
from .source import Source

GLUON_MODULE = "triton.experimental.gluon"
# Synchronizes all threads of a CTA. Triton 3.6 has only `thread_barrier`.
CTA_BARRIER = 'cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier'
INDENT = "    "


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel in IR, and its Source but for the text."""

    kernel: Kernel
    blank: Source

    def source(self) -> Source:
        """The kernel with its text."""
        return replace(self.blank, text=print_kernel(self.kernel))


def print_kernel(kernel: Kernel) -> str:
    """The module text of a kernel: imports, helper functions, and the kernel function."""
    helpers = helpers_of(kernel)
    modules = modules_of(kernel, helpers)
    barrier = () if kernel.language is TRITON else (CTA_BARRIER,)
    parts = (
        "\n".join(imports(kernel.language, modules)),
        *barrier,
        *definitions(helpers, kernel.language),
        Printer(kernel.language).function(kernel),
    )
    text = "\n\n\n".join(parts)
    compile(text, "<a kernel>", "exec", dont_inherit=True)  # not ast.parse: it is not thread-safe in Python 3.11
    return text


def imports(language: Language, modules: frozenset[str]) -> tuple[str, ...]:
    """The imports of a kernel's module. `modules` are those that not all kernels use."""
    libdevice = ("from triton.language.extra import libdevice",) if "libdevice" in modules else ()
    if language is TRITON:
        return "import triton", "import triton.language as tl", *libdevice
    tl = ("import triton.language as tl",) if "tl" in modules else ()
    return (
        *tl,
        "from triton.experimental import gluon",
        f"from {GLUON_MODULE} import language as gl",
        f"from {GLUON_MODULE}.language.nvidia.hopper import fence_async_shared, mbarrier, tma",
        *libdevice,
    )


def modules_of(kernel: Kernel, helpers: frozenset[str]) -> frozenset[str]:
    """The modules that a kernel's ops and helpers name."""
    named = [module for name in with_callees(helpers) for module in FUNCTIONS[name].modules]
    forms = {_form(value.op, value.exact) for value in ir.values(kernel.body) if isinstance(value, ir.Apply)}
    return frozenset(named).union(*(_MODULES.findall(form) for form in forms))


_MODULES = re.compile(r"\b(libdevice|tl)\.")  # in rows of the op table


def _form(name: str, exact: bool) -> str:
    """The kernel text of a row of the op table."""
    return OPS[name].exact if exact and OPS[name].exact else OPS[name].text


def helpers_of(kernel: Kernel) -> frozenset[str]:
    """The helper functions that a kernel calls."""
    sent = {"publish" for node in ir.statements(kernel.body) if isinstance(node, ir.Publish)}
    return frozenset(sent.union(*map(_helper, ir.values(kernel.body))))


def _helper(value: RightSide) -> frozenset[str]:
    """The helper functions that a right-hand side calls."""
    match value:
        case ir.Apply():
            return op_helpers(value)
        case ir.Widen():
            return frozenset({"widen"})
        case ir.TileFold() if value.kind != "sum":
            return frozenset({f"fold_{value.kind}"})
        case ir.TwoSums():
            return frozenset({"sum_two"})
        case ir.Received():
            return frozenset({"published"})
        case _:
            return frozenset()


def op_helpers(applied: ir.Apply) -> frozenset[str]:
    """The helper functions that the text of an op calls."""
    if applied.op == "cast" and applied.dtype.name == "f8e5m2":
        return frozenset({"to_e5m2"})
    row = OPS[applied.op]
    return frozenset({row.helper}) if row.helper and not (applied.exact and row.exact) else frozenset()


class Printer:
    """Prints the statements of one kernel."""

    def __init__(self, language: Language) -> None:
        self.language, self.lines = language, list[str]()
        self._noted = set[str]()  # lines of user code

    def function(self, kernel: Kernel) -> str:
        """The kernel function."""
        self._line(f'@{self.language.jit}(do_not_specialize=["zero"])', 0)
        self._line(f"def {kernel.name}({', '.join(kernel.params)}):", 0)
        end = "\n" if "\n" in kernel.doc else ""
        for line in f'"""{kernel.doc}{end}"""'.split("\n"):
            self._line(line, 1 if line else 0)
        if kernel.legend:
            self._line(f"# {kernel.legend}", 1)
        for each in kernel.body:
            self.statement(each, 1)
        return "\n".join(self.lines) + "\n"

    def block(self, header: str, body: Sequence[Statement], depth: int) -> None:
        """An indented block under `header:`."""
        self._line(f"{header}:", depth)
        for each in body:
            self.statement(each, depth + 1)
        if not body:
            self._line("pass", depth + 1)

    def statement(self, node: Statement, depth: int) -> None:
        """One statement, with those inside it."""
        match node:
            case ir.For():
                self.block(f"for {node.index} in {self._range(node)}", node.body, depth)
            case ir.If():
                self.block(f"if {node.condition}", node.body, depth)
            case ir.Poll():
                again = [ir.Assign((name,), load) for name, load in zip(node.words, node.loads)]
                self.block("while " + " | ".join(f"({name} == 0)" for name in node.words), again, depth)
            case ir.Assign():
                self._line(self._assigned(node), depth, *node.notes)
            case ir.Store():
                self._line(self._stored(node), depth, node.src)
            case ir.Release():
                self.statement(ir.Fence(), depth)
                self.statement(ir.CtaBarrier(), depth)
            case _:
                self._line(self._simple(node), depth)

    def _line(self, text: str, depth: int, *notes: str) -> None:
        """Write one line, with those notes that no line had before, such as the line of user code it is the first from."""
        fresh = [note for note in notes if note and note not in self._noted]
        self._noted.update(fresh)
        self.lines.append(f"{INDENT * depth}{text}{'  # ' if fresh else ''}{'; '.join(fresh)}")

    def _range(self, node: ir.For) -> str:
        bounds = ", ".join(str(x) for x in (node.start, node.stop, node.step) if x not in ("", None))
        match node.kind:
            case ir.Loop.RANGE:
                return f"range({bounds})"
            case ir.Loop.UNROLLED:
                return f"{self.language.prefix}.static_range({bounds})"
            case ir.Loop.PIPELINED:
                return f"tl.range({bounds}{f', num_stages={node.stages}' if node.stages > 1 else ''})"

    def _assigned(self, node: ir.Assign) -> str:
        return f"{', '.join(node.targets)} = {self.value(node.value)}"

    def _stored(self, node: ir.Store) -> str:
        options = _mask(node.masks) + _eviction(node.evict_last)
        return f"{self.language.prefix}.store({_address(node)}, {node.value}{options})"

    def _simple(self, node: Statement) -> str:
        """A statement of one line that is no assignment of a value."""
        match node:
            case ir.Advance():
                return f"{node.counter} += {node.by}"
            case ir.Layout():
                shape = ", ".join(str([*sizes]) for sizes in (node.per_thread, node.threads, node.warps, (1, 0)))
                return f"{node.name}: gl.constexpr = gl.BlockedLayout({shape})"
            case ir.SharedStore():
                return f"{_viewed(node.slot, node.shape)}.store({self.value(node.value)})"
            case ir.Alloc():
                return f"{node.name} = gl.allocate_shared_memory(gl.{node.dtype}, {[*node.shape]}, {node.layout})"
            case ir.View():
                return f"{node.name} = {node.of}._reinterpret(gl.{node.dtype}, {[*node.shape]}, {node.layout})"
            case ir.Publish():
                return f"publish({node.mailboxes}, {node.word}, {node.value})"
            case _:
                return _synchronization(node)

    def value(self, value: RightSide) -> str:
        """A right-hand side."""
        match value:
            case str():
                return value
            case ir.Apply():
                return op_text(value.op, value.args, value.dtype, value.exact, self.language)
            case ir.Widen():
                return f"widen({value.value}{f', {value.zero}' if value.zero else ''})"
            case ir.Load():
                mask = f"{_mask(value.masks)}, other={value.other}" if value.masks else ""
                volatile = ", volatile=True" if value.volatile else ""
                return f"{self.language.prefix}.load({_address(value)}{mask}{_eviction(value.evict_last)}{volatile})"
            case ir.SharedLoad():
                return f"{_viewed(value.slot, value.shape)}.load(TILE)"
            case ir.TileFold():
                return self._fold(value)
            case ir.TwoSums():
                return f"sum_two({', '.join(value.values)}, {value.axis})"
            case ir.Received():
                return f"published({value.word}, gl.{value.dtype.kernel})"

    def _fold(self, fold: ir.TileFold) -> str:
        def along(text: str, axis: int) -> str:
            if fold.kind == "sum":
                return f"{self.language.prefix}.sum({text}, axis={axis}, keep_dims=True)"
            return f"fold_{fold.kind}({text}, {axis})"

        text = f"tl.reshape({fold.value}, {[*fold.cube]})" if fold.cube else fold.value
        text = reduce(along, fold.axes, text)
        return f"tl.reshape({text}, {[*fold.gives]})" if fold.gives else text


def op_text(name: str, args: tuple[str, ...], gives: DType, exact: bool, language: Language) -> str:
    """One op of the op table applied to expressions."""
    if name == "cast" and gives is BOOL:
        return f"{args[0]} != 0"
    if name == "cast" and gives.name == "f8e5m2":
        return f"to_e5m2({args[0]})"
    if name == "neg" and gives.is_float:
        return f"{args[0]} * -1.0"  # Triton computes -x as 0 - x, which turns 0.0 into 0.0
    return _form(name, exact).format(*args, L=language.prefix, T=f"{language.prefix}.{gives.kernel}")


def _synchronization(node: Statement) -> str:
    match node:
        case ir.InitBarrier():
            return f"mbarrier.init({_place(node.barrier)}, count=1)"
        case ir.Invalidate():
            return f"mbarrier.invalidate({_place(node.barrier)})"
        case ir.Expect():
            return f"mbarrier.expect({_place(node.barrier)}, {node.bytes}, pred={node.pred})"
        case ir.Wait():
            return f"mbarrier.wait({_place(node.barrier)}, {node.phase})"
        case ir.CopyAsync():
            to = f"[{', '.join(node.coordinates)}], {_place(node.barrier)}, {_place(node.into)}"
            return f"tma.async_copy_global_to_shared({node.map}, {to}{f', pred={node.pred}' if node.pred else ''})"
        case ir.Fence():
            return "fence_async_shared()"
        case ir.CtaBarrier():
            return "cta_barrier()"
        case _:
            raise AssertionError(f"a statement of more than one line: {node}")


def _place(slot: Slot) -> str:
    return f"{slot.memory}.index({slot.index})"


def _viewed(slot: Slot, shape: tuple[int, ...]) -> str:
    return _place(slot) + (f".reshape({[*shape]})" if shape else "")


def _address(access: ir.Load | ir.Store) -> str:
    """The pointers of a load or store: its offset is added up first, and then to the pointer."""
    offset = " + ".join(access.offset)
    return " + ".join(filter(None, (access.pointer, f"({offset})" if len(access.offset) > 1 else offset)))


def _mask(masks: tuple[str, ...]) -> str:
    return f", mask={conjunction(masks)}" if masks else ""


def _eviction(evict_last: bool) -> str:
    return ', eviction_policy="evict_last"' if evict_last else ""
