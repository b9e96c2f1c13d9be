"""Run work that Ctrl-C must not interrupt: the first use of a library that lazily imports more of itself.

A package whose import was interrupted stays broken for the rest of the process. Python delivers signals to the main thread only,
so such work runs on another thread, and Ctrl-C interrupts only the wait for it.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

POLL_SECONDS = 0.005  # polling instead of a lock: a lock may stay held if Ctrl-C interrupts its use


class Once:
    """Work that a process must complete once. Exceptions are ignored: the real call that follows raises them again."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = False
        self._process: int | None = None  # the id of the process whose thread runs the work
        self._runner: int | None = None  # the id of that thread

    def __call__(self) -> None:
        """Run the work if no thread has done so, and return when it is done.

        Returns at once within the work itself: an import may run a user's file that happens to have the name of a library.
        """
        if self._done or self._runner == threading.get_ident():
            return
        if threading.current_thread() is not threading.main_thread() or not self._started():
            self._run()
        while not self._done:
            time.sleep(POLL_SECONDS)

    def _started(self) -> bool:
        """Start a thread for the work unless this process has one; False if none can be started. Threads do not survive a fork."""
        if self._process == os.getpid():
            return True
        try:
            _thread.start_new_thread(self._run, ())  # Thread.start waits, and Ctrl-C may interrupt that
        except RuntimeError:  # the system has no more threads
            return False
        self._process = os.getpid()
        return True

    def _run(self) -> None:
        self._runner = threading.get_ident()
        with suppress(Exception):
            self._work()
        self._done = True
