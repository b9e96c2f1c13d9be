"""Cost model: predicted times, and the terms they are made of."""

from ..traffic import Traffic, traffic
from .case import sustained_rate
from .floor import floor_us
from .model import cost, extra_kernel_us, join_us, last_block_cost, lower_bound
from .terms import Cost, Term

# fmt: off
__all__ = ["Cost", "Term", "Traffic", "cost", "extra_kernel_us", "floor_us", "join_us", "last_block_cost", "lower_bound",
           "sustained_rate", "traffic"]
# fmt: on
