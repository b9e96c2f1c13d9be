"""The engine: what is built once and for which calls; launching into memory of the caller."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from onepass import compat
from onepass.capture.function.trace import capture
from onepass.codegen.source import Param, ParamKind, Source
from onepass.device import device
from onepass.errors import CompilerNotStarted, NoPlan, NotWarmedUp, ProcessExiting
from onepass.integration import build, engine
from onepass.integration.engine import Kernels, counts
from onepass.ir.expr import DTYPES
from onepass.ir.program import Buffer, Program
from onepass.pipeline import optimize
from onepass.plan.variant import specialized
from onepass.runtime import background, cache, executable, module, offline, promise
from onepass.runtime.background import DaemonExecutor
from onepass.runtime.compile_job import job
from onepass.runtime.counters import count_triton_lookup
from onepass.runtime.executable import Executable, aligned_of
from onepass.runtime.interpreter import interpret
from tests.support.function_cases import CASES

CPU, CARD, H200 = torch.device("cpu"), torch.device("cuda", 0), device("h200")
NOTHING: frozenset[str] = frozenset()

pytestmark = pytest.mark.usefixtures("empty_store")


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.softmax(-1), x.sum(0)


def program(rows: int = 12, cols: int = 40) -> Program:
    return optimize(capture(both, (torch.zeros(rows, cols),)).program)


def made_by(action: Any) -> Any:
    before = counts()
    action()
    return counts() - before


# ---- building --------------------------------------------------------------------------------------------------------------


def test_equal_programs_are_planned_once() -> None:
    blocks = [Kernels(program(), f"block {k}") for k in range(32)]
    work = made_by(lambda: [b.executable({"s0": 12}, CPU, NOTHING) for b in blocks])
    assert (work.plans, work.misses) == (1, 1)
    assert len({id(b.executable({"s0": 12}, CPU, NOTHING)) for b in blocks}) == 1


def test_lines_of_user_code_do_not_make_programs_differ() -> None:
    elsewhere = replace(program(), nodes=tuple(replace(n, src="other.py:1 y = x") for n in program().nodes))
    first, second = (Kernels(p, "it").executable({"s0": 12}, CPU, NOTHING) for p in (program(), elsewhere))
    assert first is second
    assert not [line for s in first.artifact.sources for line in s.text.splitlines() if ".py:" in line]


def test_one_set_of_kernels_for_a_class_of_row_counts() -> None:
    kernels = Kernels(program(), "it")
    few = [kernels.executable({"s0": rows}, CPU, NOTHING) for rows in (40, 50, 100)]
    assert len({id(e) for e in few}) == 1 and len(kernels.keys) == 1
    for rows in (500, 5000, 50_000):
        kernels.executable({"s0": rows}, CPU, NOTHING)
    assert len(kernels.keys) == 4


def test_each_fixed_size_has_its_own_kernels() -> None:
    columns = optimize(capture(lambda x: x.softmax(0), (torch.zeros(12, 40),)).program)
    kernels = Kernels(columns, "it")
    assert kernels.executable({"s0": 12}, CPU, NOTHING) is not kernels.executable({"s0": 13}, CPU, NOTHING)
    assert [key.variant.fixed for key in kernels.keys] == [(("s0", 12),), (("s0", 13),)]


def test_large_and_unaligned_tensors_have_their_own_kernels() -> None:
    kernels = Kernels(program(), "it")
    for rows in (100_000_000, 90_000):
        kernels.executable({"s0": rows}, CPU, frozenset({"x"}))
    kernels.executable({"s0": 90_000}, CPU, NOTHING)
    assert [(key.wide, key.variant.aligned) for key in kernels.keys] == [(True, {"x"}), (False, {"x"}), (False, NOTHING)]


def test_unaligned_tensors_are_planned_as_unaligned() -> None:
    key = Kernels(program(), "it")._shared.key({"s0": 12}, CPU, frozenset({"x"}))
    laid_out = specialized(program(), key.variant)
    assert {b.name for b in laid_out.buffers if b.aligned} == {"x"}


def test_concurrent_threads_build_once() -> None:
    found: list[Executable] = []
    start, captured = threading.Barrier(8), program()  # torch traces one function at a time

    def work() -> None:
        kernels = Kernels(captured, "it")
        start.wait()
        found.append(kernels.executable({"s0": 12}, CPU, NOTHING))

    def all_of_them() -> None:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert made_by(all_of_them).plans == 1
    assert len(found) == 8 and len({id(e) for e in found}) == 1


def test_the_most_recent_variants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_KEYS", 2)
    kernels = Kernels(optimize(capture(lambda x: x.softmax(0), (torch.zeros(12, 8),)).program), "it")
    made = [kernels.executable({"s0": rows}, CPU, NOTHING) for rows in (3, 4, 5)]
    assert [key.variant.fixed for key in kernels.keys] == [(("s0", 4),), (("s0", 5),)]
    assert kernels.executable({"s0": 5}, CPU, NOTHING) is made[2]
    assert len(kernels._shared._executables) == 2 and set(kernels._shared._by_call.values()) <= set(made[1:])
    assert kernels.executable({"s0": 3}, CPU, NOTHING) is not made[0]


def test_kernels_are_built_in_the_background() -> None:
    kernels = Kernels(program(), "it")
    future = kernels.prepare({"s0": 12}, CPU, NOTHING)
    assert kernels.prepare({"s0": 13}, CPU, NOTHING) is future
    work = made_by(lambda: kernels.executable({"s0": 12}, CPU, NOTHING))
    assert future.result().sources and work.plans <= 1
    assert made_by(lambda: Kernels(program(), "again").executable({"s0": 14}, CPU, NOTHING)).plans == 0


def test_after_a_failure_the_next_call_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise NoPlan(what="it", device="h200", detail="not today")

    kernels = Kernels(program(), "it")
    with monkeypatch.context() as patch:
        patch.setattr(build, "interpret", failing)
        with pytest.raises(NoPlan):
            kernels.executable({"s0": 12}, CPU, NOTHING)
        with pytest.raises(NoPlan):
            kernels.prepare({"s0": 12}, CPU, NOTHING).result()
    assert kernels.executable({"s0": 12}, CPU, NOTHING).artifact.sources


def test_a_stored_entry_still_writes_its_sources_for_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(2):
        engine.forget()
        monkeypatch.setenv("ONEPASS_KEEP_SOURCES", str(tmp_path / f"kept{turn}"))
        Kernels(program(), "it").executable({"s0": 12}, CPU, NOTHING)
    first, second = (sorted(p.read_text() for p in (tmp_path / f"kept{k}").iterdir()) for k in range(2))
    assert first and first == second


# ---- running ---------------------------------------------------------------------------------------------------------------

NAMES = ("rms_norm-w-backward", "layer_norm-wb", "cross_entropy-mean", "sum-both")


Ran = tuple[Executable, list[torch.Tensor], dict[str, int], dict[str, torch.Tensor]]


def case(name: str, rows: int = 40, cols: int = 70) -> Ran:
    """An executable, its inputs in order, its sizes, and the expected results."""
    inputs = CASES[name].inputs(rows, cols, torch.bfloat16, "cpu")
    captured = capture(CASES[name].function, inputs)
    bindings = dict(captured.bind(inputs) or {})
    runs = Kernels(optimize(captured.program), name).executable(bindings, CPU, NOTHING)
    tensors = captured.tensors(inputs)
    return runs, [tensors[b.name] for b in runs.artifact.inputs], bindings, runs(tensors, bindings)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_written_to_memory_of_the_caller(name: str) -> None:
    runs, inputs, bindings, expected = case(name)
    given = {name: torch.empty_like(t) for name, t in expected.items()}
    runs.run_into(given | {b.name: t for b, t in zip(runs.artifact.inputs, inputs)}, bindings)
    assert all(torch.equal(given[k], expected[k]) for k in expected)
    bound = runs.bound(bindings)
    outputs = [torch.empty_like(t) for t in expected.values()]
    bound(outputs, inputs)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected.values()))
    assert runs.bound(dict(bindings) | {"unused": 3}) is bound


@pytest.mark.parametrize("name", NAMES)
def test_launches_get_the_right_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches as on a card, with launchers that interpret their arguments: addresses, sizes, grids."""
    runs, inputs, bindings, expected = case(name, rows=700)
    streams: list[int] = []

    def launcher(source: Source) -> Any:
        def launch(grid: int, stream: int, *args: int) -> None:
            streams.append(stream)
            assert grid == source.programs(bindings) and len(args) == len(source.params)
            given = {p.name: a for p, a in zip(source.params, args)}
            addresses: Any = {n: SimpleNamespace(data_ptr=lambda a=a: a) for n, a in given.items()}
            sizes = {p.name: a for p, a in zip(source.params, args) if p.kind is ParamKind.SIZE}
            assert all(a == 0 for p, a in zip(source.params, args) if p.kind is ParamKind.ZERO)
            interpret.run(source, addresses, dict(bindings) | sizes)

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(compat, "raw_stream", lambda: lambda index: 77 + index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    allocate = executable.allocate
    monkeypatch.setattr(executable, "allocate", lambda wanted, _: allocate(wanted, CPU).fill_(torch.nan))
    on_card = Executable(runs.artifact, CARD, tuple(launcher(s) for s in runs.artifact.sources))
    outputs = [torch.empty_like(t) for t in expected.values()]
    on_card.bound(bindings)(outputs, inputs)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected.values()))
    assert streams == [77] * len(runs.artifact.sources)


def test_temporaries_share_one_aligned_block() -> None:
    made = next(m for m in (case(n, rows=3000, cols=8)[0].artifact for n in ("sum-both", "rms_norm-w-backward")) if m.temporaries)
    doubled = (*made.temporaries, *made.temporaries)
    words, offsets = executable.pack_temporaries(doubled, {"s0": 3000})
    assert offsets[0] == 0 and all(o % 256 == 0 for o in offsets) and list(offsets) == sorted(set(offsets))
    sizes = [t.untyped_storage().nbytes() for b in doubled for t in [executable.allocate(executable.layout(b, {"s0": 3000}), CPU)]]
    ends = [o + n for o, n in zip(offsets, sizes)]
    assert all(end <= start for end, start in zip(ends, (*offsets[1:], 4 * words)))
    odd = Buffer("odd", DTYPES["f32"], "temp", (65,), (1,))  # only its last element crosses a boundary
    assert executable.pack_temporaries((odd, odd), {}) == (256, (0, 512))


def test_launches_of_the_most_recent_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executable, "MAX_BOUND_SIZES", 2)
    runs = case("layer_norm-wb")[0]
    for rows in range(2, 9):
        assert runs.bound({"s0": rows}) is runs.bound({"s0": rows})
        assert len(runs._bound) <= 2


@pytest.mark.parametrize("names", [("x", "y"), ("y", "x")])
def test_size_arguments_are_passed_by_name(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is passed at the position of its name among a kernel's arguments."""
    params = tuple(Param(n, ParamKind.SIZE, n) for n in names)
    source = replace(case("layer_norm-wb")[0].artifact.sources[0], params=params, cleared=(), grid=())
    made = replace(case("layer_norm-wb")[0].artifact, buffers=(), sources=(source,))
    given: list[Any] = []
    launcher: Any = SimpleNamespace(launch=lambda grid, stream, *args: given.append(args))
    monkeypatch.setattr(compat, "raw_stream", lambda: lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sizes = {"x": 3, "y": 5}
    Executable(made, CARD, (launcher,)).bound(sizes)((), ())
    assert given == [tuple(sizes[n] for n in names)]


def test_only_buffers_that_must_start_at_zero_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, where such memory comes first in the allocation of a call."""
    runs, _, bindings, _ = case("layer_norm-wb")
    source = runs.artifact.sources[0]
    signals, partial = (Buffer(n, DTYPES["i32"], "temp", (100,), (1,)) for n in ("signals", "partial"))
    params = tuple(Param(n, ParamKind.POINTER, n, DTYPES["i32"]) for n in ("signals", "partial"))
    made = replace(runs.artifact, buffers=(partial,), sources=(replace(source, params=params, cleared=(signals,)),))
    held: list[torch.Tensor] = []
    found: list[bool] = []

    def allocated(wanted: Any, _: Any) -> torch.Tensor:
        held.append(torch.full(wanted.shape, 7.0))
        return held[-1]

    def launch(grid: int, stream: int, cleared: int, other: int) -> None:
        at = (cleared - held[0].data_ptr()) // 4, (other - held[0].data_ptr()) // 4
        found.extend(bool((held[0][k : k + 100] == 0).all()) for k in at)

    launcher: Any = SimpleNamespace(launch=launch)
    monkeypatch.setattr(compat, "raw_stream", lambda: lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(executable, "allocate", allocated)
    Executable(made, CARD, (launcher,)).bound(bindings)((), ())
    assert found == [True, False]


def test_outputs_of_a_caller_may_be_misaligned() -> None:
    source = case("layer_norm-wb")[0].artifact.sources[0]
    outputs = frozenset(n for n in source.fresh if n.startswith("out"))
    assert outputs and outputs <= aligned_of(source, NOTHING)
    assert not outputs & aligned_of(source, NOTHING, caller_allocated=outputs)
    assert outputs <= aligned_of(source, outputs, caller_allocated=outputs)


def test_calls_do_not_wait_for_background_work_that_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no threads left, or the process is about to end. The next caller tries again."""
    kernels, go, threads = Kernels(program(cols=52), "it"), threading.Event(), DaemonExecutor(1, "it")
    threads.submit(go.wait)
    monkeypatch.setattr(engine, "_background", lambda process_id: threads)
    future = kernels.prepare({"s0": 12}, CPU, NOTHING)
    threads.close()
    go.set()
    assert isinstance(future.exception(), ProcessExiting)
    assert isinstance(kernels.prepare({"s0": 12}, CPU, NOTHING).exception(), CompilerNotStarted)
    assert kernels.executable({"s0": 12}, CPU, NOTHING).artifact.sources


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------------

INTERRUPTED = {Path(str(module.__file__)).name for module in (engine, promise, background)}  # the lines at which Ctrl-C arrives


def interrupted_at(line: int, action: Any) -> bool:
    """Run an action with Ctrl-C at its `line`-th line; returns whether it has that many. No signal arrives at a `with`."""
    seen = [0]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if Path(name).name not in INTERRUPTED:
            return None
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            seen[0] += 1
            if seen[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("way", ["executable", "prepare"])
def test_after_ctrl_c_at_any_line_no_thread_waits_forever(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, threads = program(), DaemonExecutor(1, "it")
    made = Kernels(captured, "it").executable({"s0": 12}, CPU, NOTHING).artifact
    monkeypatch.setattr(build, "load_or_compile", lambda *_: made)
    monkeypatch.setattr(engine, "_background", lambda process_id: threads)
    line, goes_on = 1, True
    while goes_on:
        engine.forget()
        kernels = Kernels(captured, "it")
        goes_on = interrupted_at(line, lambda kernels=kernels: getattr(kernels, way)({"s0": 12}, CPU, NOTHING))
        threads.submit(print).result()  # everything that was started has ended
        assert all(promised.done for promised in kernels._shared._promises.values()), line
        assert kernels.prepare({"s0": 12}, CPU, NOTHING).result() is made, line
        assert kernels.executable({"s0": 12}, CPU, NOTHING).artifact is made, line
        line += 1
    assert line > 30
    threads.close()


def test_a_waiting_thread_takes_over_from_an_interrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, began, go = program(), threading.Event(), threading.Event()
    made, calls, found = Kernels(captured, "it").executable({"s0": 12}, CPU, NOTHING).artifact, [], []

    def making(*_: Any) -> Any:
        calls.append(threading.current_thread())
        if len(calls) == 1:
            began.set()
            go.wait()
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(build, "load_or_compile", making)
    engine.forget()
    kernels = Kernels(captured, "it")
    claimed = kernels._shared._claim_promise

    def claiming(variant: Any, own: Any) -> Any:
        try:
            return claimed(variant, own)
        finally:
            if calls:
                go.set()  # from now on the other thread waits

    monkeypatch.setattr(kernels._shared, "_claim_promise", claiming)

    def interrupted() -> None:
        with suppress(KeyboardInterrupt):
            kernels.executable({"s0": 12}, CPU, NOTHING)

    first = threading.Thread(target=interrupted)
    first.start()
    began.wait()
    found.append(kernels.executable({"s0": 12}, CPU, NOTHING))
    first.join()
    assert found[0].artifact is made and calls == [first, threading.current_thread()]


def test_a_promise_may_be_fulfilled_twice_and_its_gate_may_stay_locked() -> None:
    promised: promise.Promise[int] = promise.Promise()
    promised.fulfill(1)
    promised.fail(ValueError())
    promised.abandon(ValueError())
    assert promised.result() == 1 and promised.exception() is None and not promised.failed and not promised.abandoned
    promised._gate.acquire()  # held by a thread that Ctrl-C interrupted there
    assert promised.result() == 1
    late: promise.Promise[int] = promise.Promise()
    late._open = lambda: None  # type: ignore[method-assign]  # as if Ctrl-C came before it
    waiting = threading.Thread(target=late.exception)
    waiting.start()
    late.abandon(KeyError())
    waiting.join()
    assert isinstance(late.exception(), KeyError) and late.abandoned


# ---- as on a card, without one ---------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An H200 whose kernels are compiled in this process and never run. Yields whether the stream is being captured."""
    capturing = [False]

    def prepare(source: Source, index: int, aligned: frozenset[str]) -> Any:
        store = cache.store()
        with compat.triton_cache_folder(str(store.kernels) if store else None, count_triton_lookup):
            module.build(job(source, 90, aligned))
        return SimpleNamespace(binary=offline.compile(source, H200, aligned), launch=None)

    monkeypatch.setattr(engine, "local_device", lambda index: H200)
    monkeypatch.setattr(build, "prepare", prepare)
    monkeypatch.setattr(executable, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    offline._measured.cache_clear()
    return capturing


def test_binaries_compiled_in_the_background_are_found_when_loading(card: list[bool]) -> None:
    kernels = Kernels(program(cols=56), "it")
    made = kernels.prepare({"s0": 12}, CARD, frozenset({"x", "out0"})).result()
    work = made_by(lambda: kernels.executable({"s0": 12}, CARD, frozenset({"x", "out0"})))
    assert (work.plans, work.compilations, work.found) == (0, 0, len(made.sources))
    assert all(b.registers for b in made.binaries)


def assembler_in(folder: Path) -> Path:
    """Triton's assembler, reporting another version."""
    folder.mkdir(parents=True)
    other = folder / "ptxas"
    own = compat.triton_toolchain(90)["assembler"]
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 12.7, another" || exec {own} "$@"\n')
    other.chmod(0o755)
    return other


def test_workers_use_the_assembler_set_by_the_user(card: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is set late: Triton reads the version once, and kernels must not be stored under that of another one."""
    before, toolchain = compat.triton_toolchain(90), compat.triton_toolchain_key(90)
    named = assembler_in(tmp_path / "mine")
    offline._pool(os.getpid()).close()  # workers start again, and inherit
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(named))
    assert compat.triton_toolchain(90) == before | {"assembler": str(named), "version": "release 12.7, another\n"}
    assert compat.triton_toolchain_key(90) != toolchain
    kernels = Kernels(program(cols=40), "it")
    made = kernels.prepare({"s0": 12}, CARD, frozenset({"x", "out0"})).result()
    work = made_by(lambda: kernels.executable({"s0": 12}, CARD, frozenset({"x", "out0"})))
    assert (work.compilations, work.found) == (0, len(made.sources))


def test_plans_of_instrumented_kernels_have_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need other numbers of registers, and spill."""
    toolchain = compat.triton_toolchain_key(90)
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "consan")
    assert compat.triton_toolchain_key(90) != toolchain


def test_the_assembler_set_by_inductor_is_ignored(card: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor points Triton to the one in torch's wheel once it compiles. Kernels built before and after must be the same."""
    before, toolchain = compat.triton_toolchain(90), compat.triton_toolchain_key(90)
    monkeypatch.setattr(compat.kernels, "_torch_folder", lambda: tmp_path / "torch")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler_in(tmp_path / "torch" / "bin")))
    assert (compat.triton_toolchain(90), compat.triton_toolchain_key(90)) == (before, toolchain)
    kernels = Kernels(program(cols=44), "it")
    made = kernels.prepare({"s0": 12}, CARD, frozenset({"x", "out0"})).result()
    work = made_by(lambda: kernels.executable({"s0": 12}, CARD, frozenset({"x", "out0"})))
    assert (work.compilations, work.found) == (0, len(made.sources))
    nvidia = importlib.import_module("triton.backends.nvidia.compiler")
    assert nvidia.get_ptxas(90).path == str(tmp_path / "torch" / "bin" / "ptxas")  # as Inductor left it


def test_a_second_process_neither_plans_nor_compiles(card: list[bool]) -> None:
    cold = made_by(lambda: Kernels(program(cols=48), "it").executable({"s0": 12}, CARD, NOTHING))
    engine.forget()
    offline._measured.cache_clear()
    warm = made_by(lambda: Kernels(program(cols=48), "it").executable({"s0": 12}, CARD, NOTHING))
    assert cold.plans == 1 and cold.compilations > 0
    assert (warm.plans, warm.compilations, warm.hits) == (0, 0, 1)


def test_kernels_depend_on_alignment_on_a_card(card: list[bool]) -> None:
    kernels = Kernels(program(), "it")
    for aligned in (frozenset({"x", "out0", "out1"}), frozenset({"x"}), frozenset({"x", "not a buffer"})):
        kernels.executable({"s0": 12}, CARD, aligned)
    assert len(kernels.keys) == 2


def test_nothing_is_built_during_graph_capture(card: list[bool]) -> None:
    kernels = Kernels(program(), "both")
    card[0] = True
    with pytest.raises(NotWarmedUp, match="both"):
        kernels.executable({"s0": 12}, CARD, NOTHING)
    card[0] = False
    made = kernels.executable({"s0": 12}, CARD, NOTHING)
    card[0] = True
    assert kernels.executable({"s0": 12}, CARD, NOTHING) is made
    assert kernels.executable({"s0": 13}, CARD, NOTHING) is made  # of the same class of row counts


def test_triton_is_not_modified() -> None:
    knobs = compat.triton("test").knobs
    heard_of: list[Any] = []
    before = dict(vars(knobs.cache)), dict(vars(knobs.compilation))
    knobs.compilation.listener = lambda **event: heard_of.append(event["cache_hit"])
    try:
        source = case("softmax-last")[0].artifact.sources[0]
        store = cache.store()
        assert store is not None
        with compat.triton_cache_folder(str(store.kernels), count_triton_lookup):
            assert knobs.cache.dir == str(store.kernels)
            module.build(job(source, 90))
        assert len(heard_of) == 1 and knobs.cache.dir != str(store.kernels)
    finally:
        knobs.compilation.listener = None
    assert vars(knobs.cache) == before[0] and vars(knobs.compilation).get("listener") == before[1].get("listener")
