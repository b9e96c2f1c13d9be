"""Functions that run in turns: each in a thread of its own, one at a time, until it ends or hands over.

CTAs that wait for each other are modelled so. Nothing runs at the same time and the order is fixed, so a model repeats itself.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence

MAX_IDLE_ROUNDS = 128  # times that each may hand over while nothing happens, before it is said that nothing will


class Cancelled(BaseException):
    """Ends a function whose fellow failed. Nobody but `take_turns` sees it."""


class RoundRobin:
    """Whose turn it is. The functions call `hand_over` and `happened`; the rest is for `take_turns`."""

    def __init__(self, count: int, deadlock: Callable[[], Exception]) -> None:
        self.count, self._deadlock = count, deadlock  # what to raise where all wait
        self._gates = [threading.Semaphore(0) for _ in range(count)]
        self._done = threading.Semaphore(0)
        self._running = list(range(count))  # in the order of their turns
        self._idle = 0
        self.now = 0
        self.failure: BaseException | None = None

    def yield_turn(self) -> None:
        """Let the others run until it is this one's turn again. Raises where all do nothing but that."""
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
        """Something that others may be waiting for was done."""
        self._idle = 0

    def _pass_on(self, finished: bool = False) -> None:
        """It is the next one's turn; `ends`: and this one has no further."""
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
        """Run all, the first first. What one raises ends the others, and is raised here."""
        if len(work) == 1:
            work[0]()
            return
        threads = [threading.Thread(target=contextvars.copy_context().run, args=(self._run_one, k, each), daemon=True)
                   for k, each in enumerate(work)]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        self._done.acquire()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
