"""A pool of compile worker processes. Each handles one request at a time, with a deadline.

A worker's failure does not affect later requests. A reply counts only if it is complete and has its request's number. A
worker that times out, dies or replies with anything else is killed, and the request is retried once in a new process. Daemon
threads talk to the workers, because signals interrupt only the main thread: Ctrl-C cancels the request, and its worker is killed.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import queue
import shutil
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
from typing import IO, Any, TypeVar

from .. import errors
from . import frames
from .background import DaemonExecutor
from .compiler_message import error_line

T = TypeVar("T")

POLL_SECONDS = 0.1  # interval of checks whether a request was canceled or its worker died
EXIT_SECONDS = 5.0  # wait for a reply after the main thread has ended, so that the process can exit
STOPPED_SECONDS = 10.0  # wait for a stopped worker (SIGSTOP) to continue, as when a scheduler suspends and resumes a job
REAPING_SECONDS = 5.0  # wait for a killed process to be gone; one that is stuck in the kernel is abandoned
OUTPUT_TAIL_BYTES = 4096  # the end of a worker's output, searched for an error message

_numbers = itertools.count(1)  # request numbers


class WorkerFailure(Exception):
    """A worker gave no valid reply, for a reason unrelated to the request. `failure` is the error class that users see."""

    def __init__(self, failure: type[errors.CompilerUnavailable], **fields: object) -> None:
        super().__init__(failure.__name__, fields)
        self.failure, self.fields = failure, fields


@dataclass(frozen=True)
class Request:
    """A message for a worker, its time limit, and whether the request was canceled."""

    message: dict[str, Any]
    seconds: float
    is_canceled: Callable[[], bool]


class Pool:
    """Workers, started on demand. A request goes to any free worker."""

    def __init__(self, size: int, command: Sequence[str]) -> None:
        """`command` starts a worker; the file descriptor of its socket is appended."""
        self._command, self._owner = tuple(command), os.getpid()
        self._threads = DaemonExecutor(size, "onepass-worker")
        self._lock = threading.Lock()
        self._all: list[Worker] = []
        self._free: list[Worker] = []
        self._ended = False
        atexit.register(_call_if_alive, weakref.WeakMethod(self.end))
        os.register_at_fork(after_in_child=partial(_call_if_alive, weakref.WeakMethod(self.disown)))

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message to a worker and return its reply. WorkerFailure if there is none; any exception cancels the request."""
        replies: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()  # Ctrl-C cannot leave it locked
        canceled = threading.Event()
        request = Request(message, seconds, lambda: self._ended or canceled.is_set())
        try:
            self._submit(lambda: replies.put(self._serve(request)))
            reply = _first(replies)
        except BaseException:
            canceled.set()
            raise
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def close(self) -> None:
        """Stop all workers. Requests in progress, and later ones, get new workers."""
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
        """Stop all workers and fail all further requests: this process is about to exit."""
        self._ended = True
        self.close()
        if os.getpid() == self._owner:
            for worker in self._all:  # the threads that use these may not run again before the interpreter is gone
                worker.remove_files()

    def disown(self) -> None:
        """In a forked child: close the child's copies of the connections to the parent's workers."""
        for worker in self._all:
            worker.disown()

    def _submit(self, call: Callable[[], None]) -> None:
        try:
            self._threads.submit(call)
        except RuntimeError as error:
            raise WorkerFailure(errors.CompilerNotStarted, detail=str(error)) from None

    def _serve(self, request: Request) -> dict[str, Any] | BaseException:
        """The reply to a request, or the exception. Runs on a pool thread, which signals do not interrupt."""
        worker: Worker | None = None
        try:
            worker = self._free_worker()
            return worker.ask(request)
        except BaseException as error:  # the caller waits for this, so pass it on
            return error
        finally:
            if worker is not None:
                with self._lock:
                    self._free.append(worker)

    def _free_worker(self) -> Worker:
        with self._lock:
            for idle in self._free:
                idle.reap()
            if self._free:
                return self._free.pop()  # the last used one, so that a single caller starts a single process
            worker = Worker(self._command)
            self._all.append(worker)
            return worker


def _first(replies: queue.SimpleQueue[T]) -> T:
    """Wait for the first reply. Polls, because a signal that arrives just before `get` blocks would not interrupt it."""
    while True:
        with suppress(queue.Empty):
            return replies.get(timeout=POLL_SECONDS)


class Worker:
    """One worker process, started at its first request and restarted after any failure. Used by one thread at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._printed: IO[bytes] | None = None  # output of the process and its children
        self._scratch: str | None = None  # the folder for temporary files of the process and its children

    def ask(self, request: Request) -> dict[str, Any]:
        """The reply to a request. If the process fails, the request is retried once in a new process."""
        try:
            return self._once(request)
        except WorkerFailure as first:
            if first.failure in (errors.CompilerNotStarted, errors.ProcessExiting):
                raise
            return self._once(request)

    def reap(self) -> None:
        """Reap the process if it died while idle, so that it does not stay a zombie."""
        if self._process is not None:
            self._process.poll()

    def kill(self) -> None:
        """Kill the process and its children. Another thread may be waiting for its reply."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process and release its resources."""
        self.kill()
        self.remove_files()  # a killed compiler leaves them behind
        self._process = self._scratch = None
        self._close_files()

    def remove_files(self) -> None:
        """Remove the temporary files of a killed process. The thread that uses it does so too, if it still runs."""
        process, scratch = self._process, self._scratch
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(REAPING_SECONDS)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def disown(self) -> None:
        """In a forked child: close the socket, which would keep the worker from noticing that the parent is gone."""
        self._process = self._scratch = None
        self._close_files()

    def _close_files(self) -> None:
        channel, self._channel, printed, self._printed = self._channel, None, self._printed, None
        for each in (channel, printed):
            if each is not None:
                each.close()

    def _once(self, request: Request) -> dict[str, Any]:
        """Send a request and wait for the reply, starting the process if needed. Any exception stops the process."""
        deadline, done = _Deadline(request), False
        deadline.check()
        try:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._start()
            reply = self._exchange(request.message, deadline)
            done = True
            return reply
        finally:
            if not done:
                self.stop()

    def _start(self) -> None:
        try:
            with ExitStack() as opened:
                printed = opened.enter_context(tempfile.TemporaryFile(buffering=0))
                fcntl.fcntl(printed, fcntl.F_SETFL, fcntl.fcntl(printed, fcntl.F_GETFL) | os.O_APPEND)
                ours, theirs = (opened.enter_context(end) for end in socket.socketpair())
                self._scratch = tempfile.mkdtemp(prefix="onepass-compiler-")
                self._process = self._spawn(printed, theirs, self._scratch)
                theirs.close()
                opened.pop_all()
        except (OSError, ValueError, TypeError, RuntimeError, subprocess.SubprocessError) as error:
            raise WorkerFailure(errors.CompilerNotStarted, detail=f"{type(error).__name__}: {error}") from None
        ours.settimeout(POLL_SECONDS)
        self._channel, self._printed = ours, printed

    def _spawn(self, printed: IO[bytes], theirs: socket.socket, scratch: str) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TMPDIR": scratch}
        handed = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)  # 3 or above: the child replaces descriptors 0 to 2
        try:
            # A new process group: Ctrl-C in a terminal does not reach it, and it can be killed together with its children.
            command = (*self._command, str(handed), scratch)
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(handed,),
                process_group=0,
                env=environment,
            )
        finally:
            os.close(handed)

    def _exchange(self, message: dict[str, Any], deadline: _Deadline) -> dict[str, Any]:
        number = next(_numbers)
        try:
            self._send(frames.pack({**message, "id": number}), deadline)
            reply = self._receive(deadline)
        except frames.MalformedMessage as error:
            raise WorkerFailure(errors.CompilerProtocolError, detail=str(error)) from None
        except ConnectionError:
            raise self._ended() from None
        if reply.get("id") != number:
            raise WorkerFailure(errors.CompilerProtocolError, detail=f"request {number} got the reply to {reply.get('id')!r}")
        return reply

    def _send(self, frame: bytes, deadline: _Deadline) -> None:
        rest = memoryview(frame)
        while rest:
            assert self._channel is not None
            try:
                # MSG_NOSIGNAL: in a process that restored the default SIGPIPE action, a dead worker would otherwise kill it.
                rest = rest[self._channel.send(rest, socket.MSG_NOSIGNAL) :]
            except TimeoutError:
                self._check(deadline)

    def _receive(self, deadline: _Deadline) -> dict[str, Any]:
        received = bytearray()
        while True:
            assert self._channel is not None
            try:
                chunk = self._channel.recv(frames.CHUNK)
            except TimeoutError:
                self._check(deadline)
                continue
            if not chunk:
                raise self._ended()
            received += chunk
            reply = frames.unpack(received)
            if reply is not None:
                return reply
            deadline.check()

    def _check(self, deadline: _Deadline) -> None:
        """While no data arrives: raise if the request is canceled or late, or the process is dead or stopped."""
        assert self._process is not None
        deadline.check(_is_stopped(self._process.pid))
        if self._process.poll() is not None:
            raise self._ended()  # the socket is still open because another process, forked from this one, holds it

    def _ended(self) -> WorkerFailure:
        """A WorkerFailure that says how the process ended."""
        assert self._process is not None and self._printed is not None
        try:
            status = self._process.wait(REAPING_SECONDS)
        except subprocess.TimeoutExpired:
            how = "stopped listening"
        else:
            how = f"ended with status {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"
        size = os.fstat(self._printed.fileno()).st_size
        tail = os.pread(self._printed.fileno(), OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
        line = error_line(tail)
        return WorkerFailure(errors.CompilerExited, how=how + (f" after printing {line!r}" if line else ""))


class _Deadline:
    """Limits the wait for a reply: by the request's time limit, cancellation, process exit, and stopped workers."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._end = monotonic() + request.seconds
        self._exit_end: float | None = None  # the deadline after the main thread has ended
        self._stopped_since: float | None = None

    def check(self, stopped: bool = False) -> None:
        """Raise if the request is canceled or late, or if the worker stays stopped."""
        if self._request.is_canceled():
            raise WorkerFailure(errors.ProcessExiting)
        now = monotonic()
        if self._exit_end is None and not threading.main_thread().is_alive():
            self._exit_end = now + EXIT_SECONDS
        if self._exit_end is not None and now > self._exit_end:
            raise WorkerFailure(errors.ProcessExiting)
        if now > self._end:
            raise WorkerFailure(errors.CompilerTimedOut, seconds=f"{self._request.seconds:g}")
        self._stopped_since = (self._stopped_since or now) if stopped else None
        if self._stopped_since is not None and now > self._stopped_since + STOPPED_SECONDS:
            raise WorkerFailure(errors.CompilerExited, how=f"was stopped by a signal for {STOPPED_SECONDS:g} s")


def _is_stopped(process_id: int) -> bool:
    """Whether a signal stopped a child process. WNOWAIT leaves its status for other waits."""
    try:
        return os.waitid(os.P_PID, process_id, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a weakly referenced method if its object still exists."""
    call = method()
    if call is not None:
        call()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
