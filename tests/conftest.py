"""Configuration of all tests."""

from __future__ import annotations

import signal

import torch
from hypothesis import HealthCheck, settings

# Several test processes share the cores, and small tensors gain nothing from threads.
torch.set_num_threads(1)

# The same examples every time: a failure must not depend on the day. The interpreter makes single examples slow.
settings.register_profile("onepass", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("onepass")

# A shell that starts the tests in the background makes them ignore Ctrl-C. Tests that send it would then wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
