"""What Ctrl-C must not leave half done: the first use of a library that imports more of itself then.

A package whose import was interrupted stays broken as long as the process lives: what is imported again lacks the parts that were
whole. Signals interrupt the main thread alone, so another does such work, and Ctrl-C only ends the waiting for it.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

POLL_SECONDS = 0.005  # seconds between looks at whether it is done: locks may stay held where Ctrl-C interrupts their use


class Once:
    """Work of which a process needs to have done one whole run. What it raises is left to whoever does the same in earnest."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = False
        self._process: int | None = None  # in which a thread is at it

    def __call__(self) -> None:
        """Return when it is done."""
        if self._done:
            return
        if threading.current_thread() is not threading.main_thread() or not self._begun():
            self._run()
        while not self._done:
            time.sleep(POLL_SECONDS)

    def _begun(self) -> bool:
        """Whether a thread of this process is at it; a forked child has none of its parent's."""
        if self._process == os.getpid():
            return True
        try:
            _thread.start_new_thread(self._run, ())  # a Thread's start waits, and Ctrl-C may interrupt that
        except RuntimeError:  # there are no more threads to be had
            return False
        self._process = os.getpid()
        return True

    def _run(self) -> None:
        with suppress(Exception):
            self._work()
        self._done = True
