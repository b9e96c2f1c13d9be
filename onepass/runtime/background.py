"""Daemon threads that run calls. A process can end whatever they are doing; threads of concurrent.futures are waited for."""

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
    """At most `most` threads, started as calls come in, that run the calls in order.

    Take results before it is closed: calls that still wait then are dropped. So Ctrl-C does not have to wait for them.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._process = most, name, os.getpid()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the three below
        self._threads: list[threading.Thread] = []
        self._unfinished = 0  # calls that wait or run
        self._closed = False

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have it called; RuntimeError if this is closed, or where there is no thread and none can be started."""
        return self._put(Future(), lambda: call(*args, **kwargs))

    def start(self, call: Callable[..., Any], /, *args: Any, dropped: Callable[[], Any]) -> None:
        """The same; `dropped` is called if it is never begun, because this is closed."""
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: dropped() if done.cancelled() else None)
        self._put(future, lambda: call(*args))

    def _put(self, future: Future[Any], call: Callable[[], Any]) -> Future[Any]:
        with self._lock:
            if self._closed:
                raise RuntimeError("no more calls are taken")
            self._grow(self._unfinished + 1)
            self._unfinished += 1
            self._calls.put((future, call))
        return future

    def close(self, seconds: float = 0.0) -> None:
        """Drop calls that wait, and let threads end with what they are doing; wait for that at most so many seconds."""
        if os.getpid() != self._process:
            return  # a forked child has none of the threads, and may have copied a lock while it was held
        with self._lock:
            self._closed = True
            dropped = list(self._waiting())
            for _ in self._threads:
                self._calls.put(None)
        for future in dropped:
            future.cancel()
        end = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What executors call closing; calls that wait are dropped in any case."""
        self.close()

    def _waiting(self) -> Iterator[Future[Any]]:
        """Take the calls that no thread has begun."""
        with suppress(queue.Empty):
            while call := self._calls.get_nowait():
                yield call[0]

    def _grow(self, calls: int) -> None:
        """Start a thread if all are busy. One that never ran, because Ctrl-C came between, does not count."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= min(self._most, calls):
            return
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads to give, or the interpreter is ending
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
            del work, future, call  # what was asked for is not kept until something else is
            with self._lock:
                self._unfinished -= 1
