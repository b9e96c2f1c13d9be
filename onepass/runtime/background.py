"""An executor with daemon threads. The process can exit while they work; threads of concurrent.futures would block the exit."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from time import monotonic
from typing import Any

_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonExecutor(Executor):
    """At most `max_threads` threads, started on demand, that run calls in order.

    Collect results before closing: calls that are still queued are dropped, so Ctrl-C does not have to wait for them.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name, self._process = max_threads, name, os.getpid()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the three fields below
        self._threads: list[threading.Thread] = []
        self._unfinished = 0  # calls queued or running
        self._closed = False

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call. RuntimeError if the executor is closed, or if no thread exists and none can be started."""
        return self._put(Future(), lambda: call(*args, **kwargs))

    def start(self, call: Callable[..., Any], /, *args: Any, dropped: Callable[[], Any]) -> None:
        """Queue a call without a result. `dropped` runs instead if the executor closes before the call starts."""
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: dropped() if done.cancelled() else None)
        self._put(future, lambda: call(*args))

    def _put(self, future: Future[Any], call: Callable[[], Any]) -> Future[Any]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is closed")
            self._grow(self._unfinished + 1)
            self._unfinished += 1
            self._calls.put((future, call))
        return future

    def close(self, seconds: float = 0.0) -> None:
        """Drop queued calls and stop the threads after their current call. Wait at most `seconds` for them."""
        if os.getpid() != self._process:
            return  # a forked child has none of the threads, and may have a copy of the lock that stays held
        with self._lock:
            self._closed = True
            dropped = list(self._queued())
            for _ in self._threads:
                self._calls.put(None)
        for future in dropped:
            future.cancel()
        end = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close, as the Executor interface names it. Queued calls are always dropped."""
        self.close()

    def _queued(self) -> Iterator[Future[Any]]:
        """Remove and yield the calls that no thread has started."""
        with suppress(queue.Empty):
            while call := self._calls.get_nowait():
                yield call[0]

    def _grow(self, calls: int) -> None:
        """Start a thread if all are busy. A thread that Ctrl-C kept from starting does not count."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= min(self._max_threads, calls):
            return
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads, or the interpreter is shutting down
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        while work := self._calls.get():
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del work, future, call  # free the call and its result now, not when the next call arrives
            with self._lock:
                self._unfinished -= 1
