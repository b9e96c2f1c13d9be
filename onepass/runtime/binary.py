"""Resource use of a compiled kernel, parsed from the ptxas log, PTX and SASS. Text in, numbers out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel's resource use: registers, spills and stack per thread, shared memory per CTA.

    `spill_bytes` is the spill stores plus spill loads that ptxas reports. `stack_bytes` also counts local arrays that are not
    spills (the slow path of sin and cos has one).
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    barriers: int  # CTA-wide barrier instructions in the PTX
    loads: Mapping[int, int] = field(hash=False)  # bytes per global load instruction -> number of such instructions
    stores: Mapping[int, int] = field(hash=False)
    spills_in_loop: bool = False
    tma_copies: int = 0  # TMA copy instructions in the PTX
    mbarriers: int = 0  # mbarrier instructions in the PTX

    @property
    def wide_loads(self) -> int:
        """Global load instructions of 128 bits or more (asynchronous copies to shared memory included)."""
        return sum(n for width, n in self.loads.items() if width >= 16)

    @property
    def wide_stores(self) -> int:
        """Global store instructions of 128 bits or more."""
        return sum(n for width, n in self.stores.items() if width >= 16)


@dataclass(frozen=True, slots=True)
class Usage:
    """The resource use that ptxas -v prints for one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int


_LOG_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_LOG_REGISTERS = re.compile(r"Used (\d+) registers")
_GLOBAL_ACCESS = re.compile(r"\b(ld|st)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bufs](\d+)\s")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global(?:\.[\w:]+)*\s*\[[^\]]+\],\s*\[[^\]]+\],\s*(0x[0-9a-f]+|\d+)")
_BARRIER = re.compile(r"\bbar(?:rier\.cta)?\.sync\b|\bbarrier\.sync\b")
_TMA = re.compile(r"\bcp\.async\.bulk\.tensor\.")
_MBARRIER = re.compile(r"\bmbarrier\.(?:init|inval|arrive|try_wait|test_wait)\b")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+);")
_BRANCH = re.compile(r"\bBRA\b[^;]*?0x([0-9a-f]+)")
_LOCAL = re.compile(r"\b(?:LDL|STL)\b")


def parse_log(log: str) -> Usage | None:
    """Parse the output of ptxas -v; None if it does not report resource use."""
    spills, registers = _LOG_SPILLS.search(log), _LOG_REGISTERS.search(log)
    if not spills or not registers:
        return None
    stack, stores, loads = map(int, spills.groups())
    return Usage(int(registers[1]), stack, stores + loads)


def parse_resources(text: str) -> tuple[int, int] | None:
    """Parse (registers, stack bytes) from cuobjdump --dump-resource-usage."""
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    return (int(registers[1]), int(stack[1])) if registers and stack else None


def count_access(ptx: str) -> tuple[dict[int, int], dict[int, int]]:
    """Count global loads and stores in PTX, by the number of bytes each instruction moves."""
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for kind, vector, bits in _GLOBAL_ACCESS.findall(ptx):
        (loads if kind == "ld" else stores)[int(vector or 1) * int(bits) // 8] += 1
    for width in _ASYNC_COPY.findall(ptx):
        loads[int(width, 0)] += 1
    return dict(loads), dict(stores)


def spills_in_loop(sass: str) -> bool:
    """Whether the SASS accesses local memory inside a loop, that is, between a backward branch and its target."""
    code = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(sass)]
    local = [address for address, text in code if _LOCAL.search(text)]
    loops = [(int(target[1], 16), address) for address, text in code if (target := _BRANCH.search(text))]
    # The branch to itself that ends every kernel is not a loop.
    return any(start <= address <= end for start, end in loops if start < end for address in local)


def summarize(usage: Usage, smem_bytes: int, ptx: str, sass: str = "") -> Binary:
    """Build a Binary from its parts. `sass` is needed only for a kernel that spills."""
    loads, stores = count_access(ptx)
    in_loop = usage.spill_bytes > 0 and spills_in_loop(sass)
    barriers = len(_BARRIER.findall(ptx))
    return Binary(
        usage.registers,
        usage.spill_bytes,
        usage.stack_bytes,
        smem_bytes,
        barriers,
        loads,
        stores,
        in_loop,
        len(_TMA.findall(ptx)),
        len(_MBARRIER.findall(ptx)),
    )
