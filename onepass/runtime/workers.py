"""Processes that compile, and how this one asks them: one question at a time each, with a deadline.

No failure of a worker outlives it. An answer is used only if it is whole and bears its question's number; a worker that is late,
dies, or says anything else is killed, and the question goes once to a fresh one. Daemon threads do the asking, because signals
interrupt only the main thread: Ctrl-C leaves a question behind, and the worker at work on it is killed.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import IO, Any

from .. import errors
from . import frames
from .background import DaemonExecutor
from .compiler_message import error_line

POLL_SECONDS = 0.1  # seconds between looks at whether an answer is still wanted
EXIT_SECONDS = 5.0  # for an answer once the main thread has ended: the process must be able to end
STOPPED_SECONDS = 10.0  # for a worker that a signal stopped to be let go on, as when a scheduler stops and continues all of a job
REAPING_SECONDS = 5.0  # for a killed process to be gone; one that is stuck in the system is left alone
OUTPUT_TAIL_BYTES = 4096  # bytes at the end of what a worker printed in which to look for a reason

_numbers = itertools.count(1)  # of questions


class WorkerFailure(Exception):
    """There is no answer, which says nothing about the question. `failure` is what a user gets to see of it."""

    def __init__(self, failure: type[errors.CompilerUnavailable], **fields: object) -> None:
        super().__init__(failure.__name__, fields)
        self.failure, self.fields = failure, fields


@dataclass(frozen=True)
class Request:
    """What a worker is asked, how long it may take, and whether the answer is not wanted any more."""

    request: dict[str, Any]
    seconds: float
    left: Callable[[], bool]


class Pool:
    """Workers, started as questions come in; a question takes whichever is free."""

    def __init__(self, size: int, command: Sequence[str]) -> None:
        """`command` starts a worker; the number of its socket is appended."""
        self._command, self._owner = tuple(command), os.getpid()
        self._threads = DaemonExecutor(size, "onepass-worker")
        self._lock = threading.Lock()
        self._all: list[Worker] = []
        self._free: list[Worker] = []
        self._ended = False
        atexit.register(_if_alive, weakref.WeakMethod(self.end))
        os.register_at_fork(after_in_child=partial(_if_alive, weakref.WeakMethod(self.disown)))

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """A worker's answer, or Trouble. However this is left, nobody else gets the answer."""
        answers: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()  # Ctrl-C leaves no lock of it held
        left = threading.Event()
        question = Request(request, seconds, lambda: self._ended or left.is_set())
        try:
            self._begin(lambda: answers.put(self._served(question)))
            answer = _awaited(answers)
        except BaseException:
            left.set()
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End all workers. Questions that are being answered now, or come later, get fresh ones."""
        if os.getpid() != self._owner:
            return
        for worker in self._all:
            worker.kill()
        with self._lock:
            idle, self._free = self._free, []
            self._all = [worker for worker in self._all if worker not in idle]
        for worker in idle:
            worker.stop()

    def end(self) -> None:
        """End all workers, and answer nothing more: this process is about to end."""
        self._ended = True
        self.close()

    def disown(self) -> None:
        """In a forked child: let go of the parent's workers."""
        for worker in self._all:
            worker.disown()

    def _begin(self, call: Callable[[], None]) -> None:
        try:
            self._threads.submit(call)
        except RuntimeError as error:
            raise WorkerFailure(errors.CompilerNotStarted, detail=str(error)) from None

    def _served(self, question: Request) -> dict[str, Any] | BaseException:
        """What a thread finds out. No signal interrupts it."""
        worker: Worker | None = None
        try:
            worker = self._taken()
            return worker.ask(question)
        except BaseException as error:  # whoever asked waits for this
            return error
        finally:
            if worker is not None:
                with self._lock:
                    self._free.append(worker)

    def _taken(self) -> Worker:
        with self._lock:
            for idle in self._free:
                idle.reap()
            if self._free:
                return self._free.pop()  # the last used, so that one caller starts one process
            worker = Worker(self._command)
            self._all.append(worker)
            return worker


def _awaited(answers: queue.SimpleQueue[Any]) -> Any:
    """The first answer. A signal that comes just before the waiting begins does not end it: so it ends now and then by itself."""
    while True:
        with suppress(queue.Empty):
            return answers.get(timeout=POLL_SECONDS)


class Worker:
    """One process, started at its first question and again after anything went wrong. One thread at a time asks it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._printed: IO[bytes] | None = None  # all that the process and those it starts print

    def ask(self, question: Request) -> dict[str, Any]:
        """The answer: of this process, or if it comes to grief, of a fresh one."""
        try:
            return self._once(question)
        except WorkerFailure as trouble:
            if trouble.failure in (errors.CompilerNotStarted, errors.ProcessExiting):
                raise
            return self._once(question)

    def reap(self) -> None:
        """Leave no zombie of a process that died while it had nothing to do."""
        if self._process is not None:
            self._process.poll()

    def kill(self) -> None:
        """Kill the process and all it started; another thread may be waiting for its answer."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process, and keep nothing of it."""
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(REAPING_SECONDS)
        self._let_go()

    def disown(self) -> None:
        """In a forked child: close what would keep the parent's worker from noticing that the parent has gone."""
        self._process = None
        self._let_go()

    def _let_go(self) -> None:
        channel, self._channel, printed, self._printed = self._channel, None, self._printed, None
        for each in (channel, printed):
            if each is not None:
                each.close()

    def _once(self, question: Request) -> dict[str, Any]:
        """Ask the process as it is. Whatever is raised meanwhile, it is not asked again."""
        patience, done = _Patience(question), False
        patience.check()
        try:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._start()
            answer = self._exchange(question.request, patience)
            done = True
            return answer
        finally:
            if not done:
                self.stop()

    def _start(self) -> None:
        try:
            with ExitStack() as opened:
                printed = opened.enter_context(tempfile.TemporaryFile(buffering=0))
                fcntl.fcntl(printed, fcntl.F_SETFL, fcntl.fcntl(printed, fcntl.F_GETFL) | os.O_APPEND)
                ours, theirs = (opened.enter_context(end) for end in socket.socketpair())
                self._process = self._spawn(printed, theirs)
                theirs.close()
                opened.pop_all()
        except (OSError, ValueError, TypeError, RuntimeError, subprocess.SubprocessError) as error:
            raise WorkerFailure(errors.CompilerNotStarted, detail=f"{type(error).__name__}: {error}") from None
        ours.settimeout(POLL_SECONDS)
        self._channel, self._printed = ours, printed

    def _spawn(self, printed: IO[bytes], theirs: socket.socket) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        handed = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)  # the first three are taken in the child, if they were free here
        try:
            # A process group of its own: Ctrl-C in a terminal is not for it, and it can be killed with all it started.
            return subprocess.Popen([*self._command, str(handed)], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
                                    pass_fds=(handed,), process_group=0, env=environment)
        finally:
            os.close(handed)

    def _exchange(self, request: dict[str, Any], patience: _Patience) -> dict[str, Any]:
        number = next(_numbers)
        try:
            self._send(frames.pack({**request, "id": number}), patience)
            answer = self._receive(patience)
        except frames.MalformedMessage as garbled:
            raise WorkerFailure(errors.CompilerProtocolError, detail=str(garbled)) from None
        except ConnectionError:
            raise self._ended() from None
        if answer.get("id") != number:
            raise WorkerFailure(errors.CompilerProtocolError, detail=f"question {number} got the answer to {answer.get('id')!r}")
        return answer

    def _send(self, frame: bytes, patience: _Patience) -> None:
        rest = memoryview(frame)
        while rest:
            assert self._channel is not None
            try:
                # Without the flag, a process that asked for the signal's default would be ended by a worker's death.
                rest = rest[self._channel.send(rest, socket.MSG_NOSIGNAL):]
            except TimeoutError:
                self._glance(patience)

    def _receive(self, patience: _Patience) -> dict[str, Any]:
        received = bytearray()
        while True:
            assert self._channel is not None
            try:
                more = self._channel.recv(frames.CHUNK)
            except TimeoutError:
                self._glance(patience)
                continue
            if not more:
                raise self._ended()
            received += more
            answer = frames.unpack(received)
            if answer is not None:
                return answer
            patience.check()

    def _glance(self, patience: _Patience) -> None:
        """What to do while nothing comes: see to it that something still can, and is waited for."""
        assert self._process is not None
        patience.check(_is_stopped(self._process.pid))
        if self._process.poll() is not None:
            raise self._ended()  # and some other process, forked from here, holds the socket

    def _ended(self) -> WorkerFailure:
        """What became of the process."""
        assert self._process is not None and self._printed is not None
        try:
            status = self._process.wait(REAPING_SECONDS)
        except subprocess.TimeoutExpired:
            how = "stopped listening"
        else:
            how = f"ended with status {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"
        size = os.fstat(self._printed.fileno()).st_size
        tail = os.pread(self._printed.fileno(), OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
        said = error_line(tail)
        return WorkerFailure(errors.CompilerExited, how=how + (f" after printing {said!r}" if said else ""))


class _Patience:
    """How long an answer is waited for."""

    def __init__(self, question: Request) -> None:
        self._question = question
        self._end = monotonic() + question.seconds
        self._last: float | None = None  # the end, once the main thread has ended
        self._stopped: float | None = None  # since when the worker is

    def check(self, stopped: bool = False) -> None:
        """Raise if the answer is not wanted any more, late, or not to be expected."""
        if self._question.left():
            raise WorkerFailure(errors.ProcessExiting)
        now = monotonic()
        if self._last is None and not threading.main_thread().is_alive():
            self._last = now + EXIT_SECONDS
        if self._last is not None and now > self._last:
            raise WorkerFailure(errors.ProcessExiting)
        if now > self._end:
            raise WorkerFailure(errors.CompilerTimedOut, seconds=f"{self._question.seconds:g}")
        self._stopped = (self._stopped or now) if stopped else None
        if self._stopped is not None and now > self._stopped + STOPPED_SECONDS:
            raise WorkerFailure(errors.CompilerExited, how=f"was stopped by a signal for {STOPPED_SECONDS:g} s")


def _is_stopped(process_id: int) -> bool:
    """Whether a signal stopped a child. It stays as it is, and as much to be waited for as it was."""
    try:
        return os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    call = method()
    if call is not None:
        call()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
