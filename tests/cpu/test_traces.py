"""How traces of a fused function are found, how many are kept, and which thread makes them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch

import onepass
from onepass import compat, errors
from onepass.capture.function.captured import Captured
from onepass.capture.graph import region_program
from onepass.compat import uninterrupted
from onepass.integration import fuse, region_op, traces
from onepass.integration.engine import counts
from onepass.integration.fuse import Fused
from tests.support.processes import ROOT, run_python
from tests.support.region_calls import region


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in threads that start together, and raise what any of them raises."""
    start, raised = threading.Barrier(count), []

    def one(k: int) -> None:
        try:
            start.wait()
            work(k)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=one, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def assert_softmax_right(fused: Fused, *shape: int) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(fused(x), softmax(x))


def test_concurrent_threads_trace_once() -> None:
    fused = onepass.fuse(softmax)
    before = counts()
    in_threads(8, lambda k: assert_softmax_right(fused, 4, 33))
    assert len(fused._traces) == 1 and (counts() - before).plans <= 1
    in_threads(4, lambda k: assert_softmax_right(fused, 4 + k, 33 + k % 2))
    assert len(fused._traces) == 2


def test_a_trace_for_other_rows_is_found_without_checking_each(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, checked = onepass.fuse(softmax), []
    for columns in range(8, 14):
        fused(torch.zeros(4, columns))
    real = Captured.bind_leaves
    monkeypatch.setattr(Captured, "bind_leaves", lambda self, *a: checked.append(self) or real(self, *a))
    assert_softmax_right(fused, 7, 10)
    assert len(checked) == 1
    assert_softmax_right(fused, 7, 10)
    assert len(checked) == 1 and len(fused._traces) == 6


def test_the_most_recent_kinds_of_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_CALL_KINDS", 3)
    fused = onepass.fuse(softmax, dynamic=False)
    for rows in (2, 3, 4):
        assert_softmax_right(fused, rows, 8)
    first, second, third = fused._traces
    assert_softmax_right(fused, 2, 8)  # used again, so the second is now the least recently used
    gone = weakref.ref(second)
    del second
    assert_softmax_right(fused, 5, 8)
    gc.collect()
    assert gone() is None and first in fused._traces and third in fused._traces and len(fused._traces) == 3
    assert_softmax_right(fused, 3, 8)
    assert len(fused._traces) == 3


def test_rows_that_never_repeat_keep_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_CALL_KINDS", 3)
    fused = onepass.fuse(softmax)
    for rows in range(2, 9):
        assert_softmax_right(fused, rows, 8)
    known = fused._known[0].traces
    assert len(fused._traces) == 1 and len(known._calls) == 3


def test_an_evicted_trace_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_CALL_KINDS", 1)
    fused = onepass.fuse(softmax, dynamic=False)
    for columns in (8, 9, 10):
        assert_softmax_right(fused, 2, columns)
    known = fused._known[0].traces
    assert [len(each) for each in (known._calls, known._uses, known._fixed)] == [1, 1, 1]
    assert sum(len(each) for each in known._by_pattern.values()) == 1


def test_the_most_recent_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "MAX_STATES", 2)
    box = [1.0]
    fused, x = onepass.fuse(lambda x: x * box[0]), torch.ones(2, 3)
    for value in (1.0, 2.0, 3.0, 2.0):
        box[0] = value
        assert torch.equal(fused(x), x * value)
    assert len(fused._known) == len(fused._traces) == 2


def test_guards_on_sizes_decide_between_traces_of_one_key() -> None:
    fused = onepass.fuse(lambda x: x * 2 if x.shape[0] > 10 else x + 1, dynamic=True)
    for rows in (12, 4, 20, 5, 12):
        x = torch.zeros(rows, 3)
        assert torch.equal(fused(x), x * 2 if rows > 10 else x + 1)
    assert len(fused._traces) == 2


@pytest.mark.parametrize(
    "other",
    [lambda x: x.double(), lambda x: x.to(torch.bfloat16), lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(8, 8)],
    ids=["twice as wide", "half as wide", "transposed", "expanded"],
)
def test_similar_calls_are_distinguished(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    fused, x = onepass.fuse(softmax, dynamic=False), torch.randn(8, 8)
    for given in (x, other(x), x, other(x)):
        result = fused(given)
        torch.testing.assert_close(result, softmax(given))
        assert result.dtype == given.dtype
    assert len(fused._traces) == 2


def test_a_lazily_negated_tensor_is_not_taken_for_a_plain_one() -> None:
    fused, x = onepass.fuse(softmax), torch.randn(8, 8)
    assert_softmax_right(fused, 8, 8)
    try:
        result = fused(torch._neg_view(x))
    except errors.OnepassError:
        return
    torch.testing.assert_close(result, softmax(-x))


@pytest.mark.parametrize(("elements", "fine"), [(0, True), (1, False), (2, False), (4, True)])
def test_kernels_are_told_which_tensors_start_on_16_bytes(elements: int, fine: bool) -> None:
    """A card reads aligned tensors by 16 bytes, so an 8-byte offset is not enough."""
    fused, cols = onepass.fuse(softmax), 8 * (elements + 1)  # equal Programs would share kernels
    fused(torch.zeros(8 * cols + elements)[elements:].view(8, cols))
    (key,) = fused._traces[0].kernels.keys
    assert ("x" in key.variant.aligned) is fine


def test_nested_arguments() -> None:
    fused, x = onepass.fuse(lambda d, xs: d["a"] * xs[0] * d["s"]), torch.ones(2, 3)
    assert torch.equal(fused({"a": x, "s": 2.0}, [x]), x * 2) and torch.equal(fused({"a": x, "s": 3.0}, [x]), x * 3)
    assert torch.equal(fused({"s": 2.0, "a": x}, (x,)), x * 2) and torch.equal(fused({"a": x, "s": 2}, [x]), x * 2)
    assert torch.equal(fused({"a": x, "s": 2.0}, [torch.full((2, 3), 2.0)]), x * 4)
    assert len(fused._traces) in (3, 4)  # the order of keys may or may not matter


def test_arguments_with_equal_leaves_may_differ() -> None:
    fused = onepass.fuse(lambda a, b: a[0] - a[1] * b if isinstance(a, tuple) else a + b[0] / b[1])
    x, y, z = (torch.full((2, 3), n) for n in (7.0, 4.0, 2.0))
    for _ in range(2):
        assert torch.equal(fused((x, y), z), x - y * z) and torch.equal(fused(x, (y, z)), x + y / z)


def test_fused_functions_inside_fused_functions() -> None:
    scale = 2.0
    inner = onepass.fuse(lambda x: x * scale)
    outer, x = onepass.fuse(lambda x: inner(x) + inner(x=x)), torch.ones(2, 3)
    assert torch.equal(outer(x), x * 4)
    scale = 3.0
    assert torch.equal(outer(x), x * 6)


def test_a_fused_function_that_calls_itself_terminates() -> None:
    def loops(x: torch.Tensor) -> Any:
        return fused(x)

    fused = onepass.fuse(loops)
    with pytest.raises((RecursionError, errors.OnepassError)):
        fused(torch.ones(2, 3))
    assert_softmax_right(onepass.fuse(softmax), 2, 3)


def test_the_most_recently_called_regions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "program p\n  axis n = 4\n  input in0: f32 [4] strides [1]\n  output out0: f32 [4] strides [1]\n"
        "  %0 = load in0 [n:1]\n  %1 = mul %0 %0\n  store out0 [n:1] = %1\n"
    )
    monkeypatch.setattr(region_op, "MAX_REGIONS", 3)
    region_op.forget()

    def call(name: str) -> None:
        out, x = torch.empty(4), torch.randn(4)
        region_op.run([out], [x], [], region(name, text))
        torch.testing.assert_close(out, x * x)

    for name in ("a", "b", "c", "d"):
        call(name)
    assert [known.id for known in region_op._REGIONS.values()] == ["b", "c", "d"]  # all had been called, and the oldest was evicted
    call("b")
    call("e")
    assert {known.id for known in region_op._REGIONS.values()} == {"b", "d", "e"}
    call("a")
    region_op.forget()


def test_symbols_of_different_sizes_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_program, "MIN_DIGITS", 1)
    sizes = region_program._Sizes()
    factors = [compat.SizeFactor(sympy.Symbol("s0", integer=True) + k, 8) for k in range(1, 41)]
    names = [sizes._name(factor) for factor in factors]
    assert len(set(names)) == 40 and [sizes._name(factor) for factor in factors] == names


INTERRUPTED = """
import os, signal, sys
from onepass.capture.function.trace import capture
import torch

class Interrupting:
    '''Ctrl-C in the middle of the import of a package.'''
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

assert sys.argv[1] not in sys.modules
sys.meta_path.insert(0, Interrupting())
x = torch.empty(64, 256, device="meta")
def symbols():
    return capture(lambda x: (x * x).sum(0), (x,)).bind((x,))
try:
    symbols()
except KeyboardInterrupt:
    print("interrupted")
print(*symbols())
"""


@pytest.mark.parametrize("module", ["sympy.interactive", "torch._dynamo.trace_rules"])
def test_ctrl_c_at_a_first_trace_leaves_nothing_half_imported(module: str) -> None:
    """Otherwise sizes would be fixed, because tracing with symbols fails, or nothing could be traced any more."""
    done = run_python(INTERRUPTED, module)
    assert done.stdout.split() == ["interrupted", "s0"], done.stderr


def test_one_time_work_goes_on_if_waiting_for_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    main, waiting, go, began, ended = threading.main_thread(), threading.Event(), threading.Event(), [], []

    def sleep(seconds: float) -> None:
        waiting.set()
        time.sleep(seconds)

    def work() -> None:
        began.append(threading.current_thread())
        waiting.wait()
        signal.pthread_kill(main.ident or 0, signal.SIGINT)
        go.wait()
        ended.append(1)

    monkeypatch.setattr(uninterrupted, "time", SimpleNamespace(sleep=sleep))
    once = uninterrupted.Once(work)
    with pytest.raises(KeyboardInterrupt):
        once()
    assert main not in began and not ended
    go.set()
    once()
    once()
    assert ended and len(began) == 1


def test_one_time_work_is_done_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    refused = lambda *_: (_ for _ in ()).throw(RuntimeError("can't start new thread"))  # noqa: E731
    monkeypatch.setattr(uninterrupted, "_thread", SimpleNamespace(start_new_thread=refused))
    once = uninterrupted.Once(lambda: done.append(1) or 1 / 0)
    once()
    once()
    assert done == [1]


def test_one_time_work_may_need_itself() -> None:
    done: list[int] = []
    once = uninterrupted.Once(lambda: (once(), done.append(1)))
    once()
    assert done == [1]


SHADOWS_A_LIBRARY = """
import faulthandler
faulthandler.dump_traceback_later(300, exit=True)  # should it hang
import torch
import onepass
x = torch.randn(4, 64)
assert torch.allclose(onepass.fuse(lambda x: x.sum(-1) * 2)(x), x.sum(-1) * 2, atol=1e-4)
faulthandler.cancel_dump_traceback_later()
"""


def test_a_script_with_the_name_of_a_library_that_torch_imports_does_not_hang(tmp_path: Path) -> None:
    """torch imports z3 if it can, so it runs the script again, on the thread that prepares tracing."""
    script = tmp_path / "z3.py"
    script.write_text(SHADOWS_A_LIBRARY)
    done = run_python(script, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


IMPORTING = """
import importlib.abc, sys, threading
import torch
from onepass import compat

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch._inductor.lowering":
            print(threading.current_thread() is threading.main_thread())

sys.meta_path.insert(0, Watch())
assert compat.inductor_incompatibility() is None
"""


def test_ctrl_c_does_not_leave_inductor_half_imported() -> None:
    """A second import would fail, because it registers templates by name. Only the main thread receives Ctrl-C."""
    done = run_python(IMPORTING)
    assert done.stdout == "False\n", done.stdout + done.stderr[-2000:]
