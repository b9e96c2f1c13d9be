"""Which calls of a region are compared with float64."""

from __future__ import annotations

import threading


class Checks:
    """The first calls, as many as were asked for; or one of every so many, the first of them included: `1/1000`.

    Calls are counted, not drawn: the same calls are checked in every run. A check that cannot be made (while a CUDA graph is
    captured) waits for the next call that can.
    """

    def __init__(self, verify: int | str) -> None:
        """`verify` is the setting, checked."""
        self._every = int(verify.removeprefix("1/")) if isinstance(verify, str) else 0
        self._most = verify if isinstance(verify, int) else 0  # checks still to be made, where they are the first calls
        self._until = 0  # calls before the next check, where they are a share
        self._lock = threading.Lock()

    @property
    def waits(self) -> bool:
        """Whether a check is to be made as soon as it can."""
        return self._most > 0 or self._every > 0 and self._until == 0

    def due(self) -> bool:
        """Whether the call that is about to run is to be checked; counts the call if not."""
        if not self._every:
            return self._most > 0
        with self._lock:
            self._until = max(self._until - 1, 0)
            return self._until == 0

    def made(self) -> None:
        """A check was made."""
        with self._lock:
            self._until = self._every
            self._most -= self._most > 0
