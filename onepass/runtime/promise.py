"""Promise: a result that one thread computes while others wait for it, safe against Ctrl-C at any point."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Generic, TypeVar

POLL_SECONDS = 0.1  # interval at which waiters check for a result, in case a wakeup is lost

Result = TypeVar("Result")


class Promise(Generic[Result]):
    """A future result. Ctrl-C may interrupt the main thread anywhere in any method, and still no thread waits forever.

    concurrent.futures.Future is not safe here: its lock is Python code and stays held if Ctrl-C arrives while it is held.
    """

    def __init__(self) -> None:
        self._outcome: tuple[Result | None, BaseException | None] | None = None
        self._gate = threading.Lock()  # released once there is an outcome; may stay held if Ctrl-C hits a waiter
        self._gate.acquire()
        self.abandoned = False  # the producer stopped for a reason other than a failure of the computation

    def fulfill(self, result: Result) -> None:
        """Set the result. Only the first outcome counts."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """Set an error, which waiters raise."""
        self._end(None, error)

    def abandon(self, error: BaseException) -> None:
        """Give up producing the result, unless there is an outcome. A waiter may produce it instead, or raise `error`."""
        if self._outcome is None:
            self.abandoned = True
            self.fail(error)

    def result(self) -> Result:
        """Wait for the outcome; return the result or raise the error."""
        while self._outcome is None:
            if self._gate.acquire(timeout=POLL_SECONDS):
                self._open()
        result, error = self._outcome
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # None may be the result

    def exception(self) -> BaseException | None:
        """Wait for the outcome; return the error, or None if there is a result."""
        try:
            self.result()
        except BaseException as error:
            if self._outcome is None or self._outcome[1] is not error:
                raise  # an interruption of the wait, such as Ctrl-C
            return error
        return None

    @property
    def done(self) -> bool:
        """Whether there is an outcome."""
        return self._outcome is not None

    @property
    def failed(self) -> bool:
        """Whether the outcome is an error."""
        return self._outcome is not None and self._outcome[1] is not None

    def _end(self, result: Result | None, error: BaseException | None) -> None:
        if self._outcome is None:
            self._outcome = result, error
            self._open()

    def _open(self) -> None:
        with suppress(RuntimeError):  # already open: two threads set an outcome at the same time
            self._gate.release()
