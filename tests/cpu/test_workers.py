"""Whatever happens to compile workers, each reply matches its request, nothing waits forever, and no failure is cached."""

from __future__ import annotations

import _thread
import errno
import itertools
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onepass import compat
from onepass.errors import (
    CompileFailed,
    CompilerExited,
    CompilerNotStarted,
    CompilerProtocolError,
    CompilerTimedOut,
    CompilerUnavailable,
    ProcessExiting,
)
from onepass.runtime import frames, offline, offline_worker, workers
from onepass.runtime.background import DaemonExecutor
from onepass.runtime.module import Job
from onepass.runtime.workers import Pool, WorkerFailure
from tests.support.fake_worker import COMMAND, request, text
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
AGES = 600.0  # seconds: a deadline that these tests never approach
numbers = itertools.count(1000)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(1, COMMAND)
    yield made
    made.end()


def value(pool: Pool, *do: Any, once: Path | None = None, seconds: float = AGES) -> int:
    """Request a unique number, which must come back; returns the process id of the worker."""
    actual = next(numbers)
    answer = pool.ask(request(actual, *do, once=once), seconds)["binary"]
    assert answer["registers"] == actual
    return answer["smem_bytes"]


def is_there(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


FAULTS = {
    "killed": ("signal", signal.SIGKILL),
    "crashed": ("signal", signal.SIGSEGV),
    "ended": ("exit", 3),
    "half an answer": ("write", frames.pack({"id": 1})[:-2].hex()),
    "garbage": ("write", b"Warning: something\n".hex()),
    "no length": ("write", struct.pack("!4sI", b"1pas", 0xFFFFFFFF).hex()),
    "not JSON": ("write", struct.pack("!4sI4s", b"1pas", 4, b'{"a"').hex()),
    "not an object": ("write", struct.pack("!4sI2s", b"1pas", 2, b"[]").hex()),
    "two answers": ("write", (frames.pack({"id": 1}) * 2).hex()),
    "another answer": ("number", 1),
    "an earlier answer": ("number", -1),
}


def ending(fault: str) -> list[tuple[str, int]]:
    """Further orders: after half a reply a worker must exit, or the pool would wait for the other half."""
    return [("exit", 0)] * (fault == "half an answer")


@pytest.mark.parametrize("fault", FAULTS)
def test_after_any_fault_a_fresh_worker_replies(pool: Pool, tmp_path: Path, fault: str) -> None:
    first = value(pool)
    second = value(pool, FAULTS[fault], *ending(fault), once=tmp_path / "done")
    assert second != first and not is_there(first)
    assert value(pool) == second, "the fresh one stays"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_that_fails_twice_is_reported(pool: Pool, fault: str) -> None:
    before = handles()
    with pytest.raises(WorkerFailure) as raised:
        value(pool, FAULTS[fault], *ending(fault))
    expected = CompilerExited if fault in ("killed", "crashed", "ended", "half an answer") else CompilerProtocolError
    assert raised.value.failure is expected
    assert handles() == before, "nothing of a worker is kept"
    value(pool)


@pytest.mark.parametrize("fault", ["killed", "ended", "another answer", "none"])
def test_temporary_files_of_a_compiler_are_removed_with_it(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = Pool(1, COMMAND)
    if fault == "none":
        value(pool, ("litter", "tmp.ptx"))
        assert [file.name for file in tmp_path.glob("*/*")] == ["tmp.ptx"], "in a folder of the process's own"
        pool.end()
    else:
        with pytest.raises(WorkerFailure):
            value(pool, ("litter", "tmp.ptx"), FAULTS[fault])
    assert not list(tmp_path.iterdir())


def test_the_last_output_of_a_worker_is_reported(pool: Pool) -> None:
    with pytest.raises(WorkerFailure) as raised:
        value(pool, ("print", "hello\nerror: no room\nbye\n"), ("exit", 3))
    assert raised.value.fields == {"how": "ended with status 3 after printing 'error: no room'"}
    with pytest.raises(WorkerFailure) as raised:
        value(pool, ("signal", signal.SIGKILL))
    assert raised.value.fields == {"how": "was killed by SIGKILL"}


def test_workers_compile_even_if_the_process_interprets(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With interpretation on, Triton would have nothing to compile."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OF_A_TEST", "1")
    environment = Path(f"/proc/{value(pool)}/environ").read_bytes()
    assert b"OF_A_TEST=1" in environment and b"TRITON_INTERPRET" not in environment


def test_output_of_libraries_is_not_taken_for_a_reply(pool: Pool) -> None:
    first = value(pool, ("print", "{}\n" * 100_000))
    assert value(pool, ("print", "1pas")) == first


def test_a_worker_that_died_idle_is_replaced_and_leaves_no_zombie() -> None:
    pool = Pool(2, COMMAND)
    pids: set[int] = set()
    threads = [threading.Thread(target=lambda: pids.add(value(pool, ("sleep", 0.3)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert value(pool) not in pids
    assert not any(map(is_there, pids)), "both are reaped though only one gets a request"
    pool.end()


def leaping(monkeypatch: pytest.MonkeyPatch, mark: Path) -> None:
    """Advance the clock by an hour as soon as a worker has created its mark."""
    clock = time.monotonic
    monkeypatch.setattr(workers, "monotonic", lambda: clock() + 3600 * mark.exists())


def test_a_worker_past_its_deadline_is_replaced(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaping(monkeypatch, tmp_path / "done")
    first = value(pool)
    assert value(pool, ("sleep", 3600), once=tmp_path / "done") != first
    assert not is_there(first)


def test_a_job_past_its_deadline_twice_is_reported(pool: Pool) -> None:
    with pytest.raises(WorkerFailure) as raised:
        value(pool, ("sleep", 3600), seconds=0.2)
    assert raised.value.failure is CompilerTimedOut and raised.value.fields == {"seconds": "0.2"}
    value(pool)


def test_a_worker_that_reads_no_request_misses_its_deadline_too(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fills the socket and is never received."""
    first = value(pool)
    os.kill(first, signal.SIGSTOP)
    os.waitid(os.P_PID, first, os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(workers, "STOPPED_SECONDS", 0.0)
    assert value(pool, ("print", "x" * (4 << 20))) != first


def test_a_stopped_worker_is_replaced_before_the_deadline(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STOPPED_SECONDS", 0.0)
    first = value(pool)
    assert value(pool, ("signal", signal.SIGSTOP), once=tmp_path / "done") != first
    assert not is_there(first)
    with pytest.raises(WorkerFailure) as raised:
        value(pool, ("signal", signal.SIGSTOP))
    assert raised.value.failure is CompilerExited and "stopped by a signal" in str(raised.value.fields["how"])


def test_after_ctrl_c_an_abandoned_reply_is_given_to_no_one(pool: Pool) -> None:
    assert threading.current_thread() is threading.main_thread()
    first = value(pool)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            value(pool, ("interrupt parent", None), ("sleep", 3600))
        second = value(pool)
        assert second != first and not is_there(first), "it was killed, and not waited for"
        first = second


def test_ctrl_c_just_before_a_wait_is_not_lost(pool: Pool) -> None:
    """The signal then wakes no wait, as if only Python had noticed it."""

    def interrupt() -> None:
        while not pool._all:
            time.sleep(0.01)
        time.sleep(0.2)
        _thread.interrupt_main()

    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
    serve = pool._serve
    pool._serve = lambda request: (found := serve(request), ends.put(found))[0]  # type: ignore[method-assign]
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        value(pool, ("sleep", 3600), seconds=300.0)
    assert ends.get().failure is ProcessExiting, "it was left, and not waited for until it was late"


def test_files_of_busy_workers_are_removed_even_if_their_threads_have_stopped(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter may exit before the thread that waits for a killed worker notices."""
    asking = threading.Thread(target=lambda: pool.ask(request(0, ("sleep", 3600)), AGES), daemon=True)
    asking.start()
    while not pool._all or pool._all[0]._process is None:
        time.sleep(0.01)
    scratch = pool._all[0]._scratch
    assert scratch is not None and os.path.isdir(scratch)
    go = threading.Event()
    stop = workers.Worker.stop
    monkeypatch.setattr(workers.Worker, "stop", lambda self: (go.wait(), stop(self)))
    pool.end()
    assert not os.path.exists(scratch)
    go.set()


def test_workers_ignore_ctrl_c(pool: Pool) -> None:
    first = value(pool, ("signal", signal.SIGINT))
    assert value(pool) == first and os.getpgid(first) == first != os.getpgid(0)


@pytest.mark.parametrize("size", [1, 3])
def test_concurrent_threads_get_their_own_replies(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, pids, wrong = Pool(size, COMMAND), set[int](), list[BaseException]()

    def work() -> None:
        try:
            pids.update(value(pool, ("sleep", 0.002)) for _ in range(20))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and 1 <= len(pids) <= size
    pool.end()
    assert not any(map(is_there, pids))
    monkeypatch.setattr(subprocess, "Popen", None)  # from now on no process can start
    with pytest.raises(WorkerFailure) as raised:
        value(pool)
    assert raised.value.failure is ProcessExiting


def test_closed_workers_start_again(pool: Pool) -> None:
    first = value(pool)
    pool.close()
    assert not is_there(first) and value(pool) != first


@pytest.mark.parametrize("command", [("/nonexistent/python",), ("",), (None,)])
def test_a_worker_that_cannot_start_is_reported(command: tuple[Any, ...]) -> None:
    pool, before = Pool(1, command), handles()
    with pytest.raises(WorkerFailure) as raised:
        value(pool)
    assert raised.value.failure is CompilerNotStarted and handles() == before


def test_running_out_of_handles_or_threads_is_reported(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", no_more)
        with pytest.raises(WorkerFailure, match="CompilerNotStarted"):
            value(pool)
    value(pool)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        with pytest.raises(WorkerFailure, match="CompilerNotStarted"):
            value(Pool(1, COMMAND))


def test_an_error_before_a_thread_has_a_worker_is_reported(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: object) -> None:
        raise MemoryError

    first = value(pool)
    with monkeypatch.context() as patch:
        patch.setattr(workers.Worker, "reap", no_memory)
        with pytest.raises(MemoryError):
            value(pool)
    assert value(pool) == first


# ---- processes that end ------------------------------------------------------------------------------------------------------

# Not through the package's __init__: nothing here needs torch, and importing it takes longer than all the rest.
SCRIPT = """
import os, signal, sys, threading, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/onepass/runtime"]
import offline_worker
offline_worker.stub_packages()
from onepass.runtime import workers
from onepass.runtime.background import DaemonExecutor
from tests.support.fake_worker import COMMAND, request
def ask(pool, *do, seconds=600.0):
    got = pool.ask(request(7, *do), seconds)["binary"]
    assert got["registers"] == 7
    return got["smem_bytes"]
pool = workers.Pool(1, COMMAND)
"""


def script(lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(SCRIPT + lines, str(ROOT), *arguments)


@pytest.mark.parametrize(
    "thread",
    [
        "threading.Thread(target=ask, args=(pool, *hang), daemon=True).start()",
        "threading.Thread(target=ask, args=(pool, *hang)).start()",
        "DaemonExecutor(1, 'it').submit(ask, pool, *hang); DaemonExecutor(1, 'it').submit(time.sleep, 3600)",
    ],
)
@pytest.mark.parametrize("hang", ["('sleep', 3600)", "('signal', signal.SIGSTOP)"])
def test_a_process_ends_even_if_a_worker_never_replies(thread: str, hang: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = script(
        f"workers.EXIT_SECONDS = 0.2\nhang = ('hold', {str(pipe)!r}), {hang}\n{thread}\n"
        f"os.open({str(pipe)!r}, os.O_RDONLY)\nprint('end')"
    )  # opened once the worker has started the job
    assert done.returncode == 0 and done.stdout == "end\n", done.stderr
    # The output of a daemon thread may be cut off, because the process ends.
    assert "Traceback" not in done.stderr or "ProcessExiting" in done.stderr or "Exception in thread Thread-1 (ask)" in done.stderr


KILLED = """
pipe = sys.argv[2]
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
parent = os.fork()
if parent == 0:
    pool = workers.Pool(1, COMMAND)
    threading.Thread(target=ask, args=(pool, ("hold", pipe), *STATE), daemon=True).start()
    os.close(os.open(pipe, os.O_RDONLY))  # waits until the worker has got so far
    if STATE == STOP:
        os.waitid(os.P_PID, pool._all[0]._process.pid, os.WSTOPPED | os.WNOWAIT)
    if FORKED and os.fork() == 0:
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(parent, 0)
os.set_blocking(reader, True)
assert os.read(reader, 1) == b""  # once no process can write any more
"""


@pytest.mark.parametrize("state", ["()", "(('sleep', 3600),)", "STOP"])
@pytest.mark.parametrize("forked", [False, True])
def test_workers_end_with_a_process_that_is_killed(state: str, forked: bool, tmp_path: Path) -> None:
    """Idle, busy or stopped; also if a fork of the process is still alive."""
    os.mkfifo(tmp_path / "pipe")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    head = f"import tempfile\ntempfile.tempdir = {str(temporary)!r}\nSTOP = (('signal', signal.SIGSTOP),)\n"
    done = script(f"{head}STATE = {state}\nFORKED = {forked}\n{KILLED}", str(tmp_path / "pipe"))
    assert done.returncode == 0, done.stderr
    assert state == "STOP" or not list(temporary.iterdir()), "a stopped process cannot clean up"


def test_a_forked_child_has_its_own_workers() -> None:
    done = script("""
first = ask(pool)
if os.fork() == 0:
    second = ask(workers.Pool(1, COMMAND))
    print(second != first, flush=True)
    sys.exit()
os.wait()
print(ask(pool) == first)
""")
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_dead_worker_is_replaced_whatever_signals_the_process_ignores() -> None:
    """Writing to a worker that died idle must not kill this process by SIGPIPE, and its exit status may already be reaped."""
    done = script("""
for wanted, state in ((signal.SIGPIPE, signal.SIG_DFL), (signal.SIGCHLD, signal.SIG_IGN), (signal.SIGHUP, signal.SIG_IGN)):
    signal.signal(wanted, state)
    first = ask(pool)
    os.kill(first, signal.SIGKILL)
    if wanted == signal.SIGPIPE:
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        poll, workers.subprocess.Popen.poll = workers.subprocess.Popen.poll, lambda self: None  # it died just after that
    print(ask(pool) != first)
    workers.subprocess.Popen.poll = poll
""")
    assert done.stdout.split() == ["True"] * 3 and done.returncode == 0, done.stderr


# ---- threads in the background -----------------------------------------------------------------------------------------------


def test_background_calls_are_run_in_order_by_few_threads() -> None:
    began: list[int] = []
    with DaemonExecutor(2, "it") as threads:
        assert list(threads.map(lambda k: began.append(k) or 2 * k, range(50))) == [2 * k for k in range(50)]
        assert sorted(began) == list(range(50)) and len(threads._threads) <= 2
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 // 0).result()
    with pytest.raises(RuntimeError, match="executor is closed"):
        threads.submit(print)


def test_queued_calls_are_dropped_and_threads_end() -> None:
    go, threads = threading.Event(), DaemonExecutor(1, "it")
    first, second = threads.submit(go.wait), threads.submit(print)
    while not first.running():
        pass
    threads.close()
    assert second.cancelled() and not first.done()
    go.set()
    assert first.result()
    for thread in threads._threads:
        thread.join()


# ---- caching -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_compilers(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure kernels with fake workers, which compile nothing."""
    monkeypatch.setattr(offline, "_pool", lambda process_id: pool)
    monkeypatch.setattr(compat, "triton_toolchain", lambda target: {})


def job(order: str) -> Job:
    return Job("it", order, (), (), 4, 1, None, 90)


def registers(order: str) -> int:
    return offline.measure(job(order), "h200").registers


@pytest.mark.parametrize(
    ("do", "seconds", "expected"),
    [(("exit", 3), AGES, CompilerExited), (("sleep", 3600), 0.3, CompilerTimedOut), (("write", "00"), AGES, CompilerProtocolError)],
)
def test_transient_failures_are_not_cached(
    fake_compilers: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    do: tuple[str, Any],
    seconds: float,
    expected: type[CompilerUnavailable],
) -> None:
    """The same kernel compiles once the cause of the failure is gone."""
    order = text(next(numbers), do, unless=tmp_path / "mended")
    monkeypatch.setenv("ONEPASS_COMPILE_TIMEOUT", str(seconds))
    for _ in range(2):
        with pytest.raises(expected, match=r"ONEPASS-33\d. Kernel it"):
            registers(order)
    (tmp_path / "mended").touch()
    monkeypatch.delenv("ONEPASS_COMPILE_TIMEOUT")
    assert registers(order) == json.loads(order)["value"]


def test_a_full_disk_is_transient_and_a_compile_failure_is_cached(fake_compilers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    full, refused = text(1, reply={"trouble": "OSError: no room"}), text(2, reply={"failure": "too many elements"})
    for _ in range(2):
        with pytest.raises(CompilerUnavailable, match=r"ONEPASS-330.*no room"):
            registers(full)
        with pytest.raises(CompileFailed, match=r"ONEPASS-301.*too many elements"):
            registers(refused)
    kept = []
    monkeypatch.setattr(offline, "_pool", lambda process_id: SimpleNamespace(ask=lambda *_: kept.append(1) or {"trouble": "x"}))
    for order in (full, refused):
        with pytest.raises(CompileFailed):
            registers(order)
    assert len(kept) == 1, "the refusal was not requested again"


@pytest.mark.parametrize("reply", [{}, {"binary": 3}, {"binary": {}}, {"binary": {"registers": 3}}, {"failure": None}])
def test_a_reply_that_is_not_a_binary_is_reported(fake_compilers: None, reply: dict[str, Any]) -> None:
    with pytest.raises(CompilerProtocolError, match="ONEPASS-334"):
        registers(text(next(numbers), reply=reply))


def test_malformed_numbers_in_a_reply_are_reported() -> None:
    counts = dict.fromkeys(("registers", "spill_bytes", "stack_bytes", "smem_bytes", "barriers"), 1)
    good = {**counts, "loads": {"16": 1}, "stores": {}}
    assert offline._binary(good).loads == {16: 1}
    for bad in ({"registers": "18"}, {"loads": {"16": None}}, {"loads": {"wide": 1}}, {"loads": 3}, {"more": 1}):
        with pytest.raises(WorkerFailure, match="CompilerProtocolError"):
            offline._binary({**good, **bad})


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many"), RuntimeError("Cannot find ptxas"), subprocess.CalledProcessError(-9, "ptxas")]
)
def test_an_assembler_that_does_not_run_is_a_transient_failure(
    fake_compilers: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    order = text(next(numbers))
    with monkeypatch.context() as patch:
        patch.setattr(compat, "triton_toolchain", lambda target: (_ for _ in ()).throw(error))
        with pytest.raises(CompilerUnavailable, match="ONEPASS-330"):
            registers(order)
    registers(order)


def chained(cause: Exception, implicit: bool) -> Exception:
    try:
        try:
            raise cause
        except Exception as error:
            raise ValueError("the compiler failed") from (error.__cause__ if implicit else error)
    except ValueError as error:
        if implicit:
            error.__suppress_context__ = False
        return error


@pytest.mark.parametrize(
    ("cause", "ours"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (MemoryError(), True),
        (subprocess.CalledProcessError(-9, "ptxas"), True),
        (subprocess.CalledProcessError(255, "ptxas"), False),
        (TypeError("no such argument"), False),
    ],
)
@pytest.mark.parametrize("implicit", [False, True])
def test_which_failures_are_blamed_on_the_machine(cause: Exception, ours: bool, implicit: bool) -> None:
    assert offline_worker.is_system_error(chained(cause, implicit)) is ours
    assert offline_worker.is_system_error(cause) is ours
