"""Results that several threads wait for while one makes them, or gives up making them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Generic, TypeVar

POLL_SECONDS = 0.1  # seconds between looks at whether a result is there, should nobody say so

Result = TypeVar("Result")


class Promise(Generic[Result]):
    """A result to be. Ctrl-C may reach the main thread at any moment of any method: nobody waits for ever for that.

    Futures have a lock made in Python, which stays held if Ctrl-C comes between taking and leaving it.
    """

    def __init__(self) -> None:
        self._outcome: tuple[Result | None, BaseException | None] | None = None
        self._gate = threading.Lock()  # open once there is an outcome; held for ever by whom Ctrl-C reached inside it
        self._gate.acquire()
        self.abandoned = False  # whoever was to make it stopped for a reason that is no failure of it

    def fulfill(self, made: Result) -> None:
        """Let it be had. The first outcome holds."""
        self._end(made, None)

    def fail(self, error: BaseException) -> None:
        """Have that raised instead."""
        self._end(None, error)

    def abandon(self, error: BaseException) -> None:
        """Say that nobody makes it any more, unless it was made; whoever waits may make it, or have that raised."""
        if self._outcome is None:
            self.abandoned = True
            self.fail(error)

    def result(self) -> Result:
        """The result, as soon as there is one; raises the error where there is none."""
        while self._outcome is None:
            if self._gate.acquire(timeout=POLL_SECONDS):
                self._open()
        made, error = self._outcome
        if error is not None:
            raise error
        return made  # type: ignore[return-value]  # which may be None itself

    def exception(self) -> BaseException | None:
        """The error, or None where there is a result; waits until it is known."""
        try:
            self.result()
        except BaseException as error:
            if self._outcome is None or self._outcome[1] is not error:
                raise  # of somebody who interrupted the waiting
            return error
        return None

    @property
    def done(self) -> bool:
        """Whether there is an outcome."""
        return self._outcome is not None

    @property
    def failed(self) -> bool:
        """Whether there is an error."""
        return self._outcome is not None and self._outcome[1] is not None

    def _end(self, made: Result | None, error: BaseException | None) -> None:
        if self._outcome is None:
            self._outcome = made, error
            self._open()

    def _open(self) -> None:
        with suppress(RuntimeError):  # it is open: two threads came to an outcome at the same time
            self._gate.release()
