"""Functions that run in turns: each in a thread of its own, one at a time, until it ends or hands over.

CTAs that wait for each other are modelled so. Nothing runs at the same time and the order is fixed, so a model repeats itself.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence

PATIENCE = 128  # times that each may hand over while nothing happens, before it is said that nothing will


class Stopped(BaseException):
    """Ends a function whose fellow failed. Nobody but `take_turns` sees it."""


class Turns:
    """Whose turn it is. The functions call `hand_over` and `happened`; the rest is for `take_turns`."""

    def __init__(self, count: int, stuck: Callable[[], Exception]) -> None:
        self.count, self._stuck = count, stuck  # what to raise where all wait
        self._gates = [threading.Semaphore(0) for _ in range(count)]
        self._done = threading.Semaphore(0)
        self._left = list(range(count))  # in the order of their turns
        self._quiet = 0
        self.now = 0
        self.failure: BaseException | None = None

    def hand_over(self) -> None:
        """Let the others run until it is this one's turn again. Raises where all do nothing but that."""
        self._quiet += 1
        if self._quiet > PATIENCE * len(self._left):
            raise self._stuck()
        me = self.now
        if len(self._left) > 1:
            self._next()
            self._gates[me].acquire()
            self.now = me
        if self.failure is not None:
            raise Stopped

    def happened(self) -> None:
        """Something that others may be waiting for was done."""
        self._quiet = 0

    def _next(self, ends: bool = False) -> None:
        """It is the next one's turn; `ends`: and this one has no further."""
        at = self._left.index(self.now)
        after = self._left[(at + 1) % len(self._left)]
        if ends:
            del self._left[at]
        self.now = after
        self._gates[after].release()

    def _enter(self, me: int, work: Callable[[], None]) -> None:
        self._gates[me].acquire()
        self.now = me
        try:
            if self.failure is None:
                work()
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
        self._quiet = 0
        if len(self._left) > 1:
            self._next(ends=True)
        else:
            self._done.release()

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Run all, the first first. What one raises ends the others, and is raised here."""
        if len(work) == 1:
            work[0]()
            return
        threads = [threading.Thread(target=contextvars.copy_context().run, args=(self._enter, k, each), daemon=True)
                   for k, each in enumerate(work)]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        self._done.acquire()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
