"""The floor: a time that no kernel beats which moves given bytes between DRAM and a cold cache.

Reads come at the best rate measured for reads. Writes are slower, but those that fit in L2 need not reach DRAM before the kernel
ends. The constants are the tightest for which no stored measurement lies below the floor (measure/fit_floor.py).
"""

from __future__ import annotations

from ...constants import SHIPPED, FloorConstants
from ...device import Device
from ..footprint import Footprint


def floor_us(moved: Footprint, device: Device, constants: FloorConstants = SHIPPED.floor) -> float:
    """The least time to read and write some bytes, by any kernel; 0 if there are none."""
    if not moved.bytes:
        return 0.0
    held = min(moved.written, device.l2_bytes)
    us = constants.start * device.latency + moved.read / (constants.read_rate * device.bandwidth)
    us += (moved.written - held) / (constants.write_rate * device.bandwidth)
    return us + held / (constants.held_write_rate * device.l2_bandwidth)
