"""Coroutines that are scheduled round-robin: each runs in its own thread, one at a time, until it ends or yields.

The kernel model runs CTAs that wait for each other this way. The order is fixed, so the model is deterministic.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence

MAX_IDLE_ROUNDS = 128  # yields per coroutine without progress that count as a deadlock


class Cancelled(BaseException):
    """Raised in a coroutine to end it after another one failed. It does not leave `RoundRobin.run`."""


class RoundRobin:
    """The scheduler. Coroutines call `yield_turn` and `made_progress`, their owner calls `run`."""

    def __init__(self, count: int, deadlock: Callable[[], Exception]) -> None:
        self.count, self._deadlock = count, deadlock  # makes the error for a deadlock
        self._gates = [threading.Semaphore(0) for _ in range(count)]
        self._done = threading.Semaphore(0)
        self._running = list(range(count))  # in scheduling order
        self._idle = 0
        self.now = 0
        self.failure: BaseException | None = None

    def yield_turn(self) -> None:
        """Let the others run until it is this coroutine's turn again. Raises if all of them only yield."""
        self._idle += 1
        if self._idle > MAX_IDLE_ROUNDS * len(self._running):
            raise self._deadlock()
        index = self.now
        if len(self._running) > 1:
            self._pass_on()
            self._gates[index].acquire()
            self.now = index
        if self.failure is not None:
            raise Cancelled

    def made_progress(self) -> None:
        """Record that something others may wait for was done."""
        self._idle = 0

    def _pass_on(self, finished: bool = False) -> None:
        """Start the next coroutine's turn. `finished`: remove the current one."""
        at = self._running.index(self.now)
        after = self._running[(at + 1) % len(self._running)]
        if finished:
            del self._running[at]
        self.now = after
        self._gates[after].release()

    def _run_one(self, index: int, work: Callable[[], None]) -> None:
        self._gates[index].acquire()
        self.now = index
        try:
            if self.failure is None:
                work()
        except Cancelled:
            pass
        except BaseException as failure:
            self.failure = failure
        self._idle = 0
        if len(self._running) > 1:
            self._pass_on(finished=True)
        else:
            self._done.release()

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Run all functions, starting with the first. An error in one ends the others and is raised here."""
        if len(work) == 1:
            work[0]()
            return
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(self._run_one, k, each), daemon=True)
            for k, each in enumerate(work)
        ]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        self._done.acquire()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
