"""The fitted and assumed constants of the compiler's models: a data file, and the frozen records the code reads."""

from .data import SHIPPED, SHIPPED_FILE, BadConstants, Entry, load, parse, read, text_of, with_values
from .records import ClaimConstants, Constants, CostConstants, FloorConstants, HintConstants, InductorConstants, RegisterConstants

# fmt: off
__all__ = ["BadConstants", "ClaimConstants", "Constants", "CostConstants", "Entry", "FloorConstants", "HintConstants",
           "InductorConstants", "RegisterConstants", "SHIPPED", "SHIPPED_FILE", "load", "parse", "read", "text_of", "with_values"]
# fmt: on
