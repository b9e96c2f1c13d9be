"""Choose which calls of a region are compared with float64 (the `verify` setting)."""

from __future__ import annotations

import threading


class Checks:
    """Checks the first N calls, or one of every N calls (`1/N`) starting with the first.

    Calls are counted, not sampled at random, so every run checks the same calls. While a CUDA graph is being captured no check is
    possible; it is postponed to the next call outside the capture.
    """

    def __init__(self, verify: int | str) -> None:
        """`verify` is the validated setting."""
        self._every = int(verify.removeprefix("1/")) if isinstance(verify, str) else 0
        self._most = verify if isinstance(verify, int) else 0  # checks left to make, if the first N calls are checked
        self._until = 0  # calls until the next check, if one of every N calls is checked
        self._lock = threading.Lock()

    @property
    def waits(self) -> bool:
        """Whether a check is pending."""
        return self._most > 0 or self._every > 0 and self._until == 0

    def due(self) -> bool:
        """Whether to check the call that is about to run. Counts the call if not."""
        if not self._every:
            return self._most > 0
        with self._lock:
            self._until = max(self._until - 1, 0)
            return self._until == 0

    def made(self) -> None:
        """Record that a check was made."""
        with self._lock:
            self._until = self._every
            self._most -= self._most > 0
