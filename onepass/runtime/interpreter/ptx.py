"""An interpreter of the PTX instructions in generated inline assembly, on arrays of 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

WORD = 32

Words = np.ndarray  # of uint32


def multiply_add(a: Words, b: Words, c: Words) -> Words:
    """The low word of a * b, plus c."""
    return np.asarray(a * b + c)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Any bitwise function of three operands: the result is bit 4a + 2b + c of the table."""
    found = np.zeros_like(a)
    for case in range(8):
        if int(table) >> case & 1:
            found |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return found


INSTRUCTIONS: dict[str, Callable[..., Words]] = {"mad.lo.u32": multiply_add, "lop3.b32": lop3}


def run(text: str, inputs: Sequence[Words], outputs: int) -> list[Words]:
    """Run instructions on words. Operands are numbers or $0, $1, ...: first the outputs, then the inputs."""
    words = dict(enumerate(inputs, start=outputs))

    def operand(name: str) -> Words:
        return words[int(name[1:])] if name.startswith("$") else np.array(int(name, 0), dtype=np.uint32)

    for instruction in filter(None, map(str.strip, text.split(";"))):
        name, target, *operands = re.split(r"[\s,]+", instruction)
        words[int(target[1:])] = INSTRUCTIONS[name](*map(operand, operands))
    return [words[k] for k in range(outputs)]


def elementwise(text: str, args: Sequence[np.ndarray], pack: int) -> np.ndarray:
    """Run instructions elementwise on arrays, `pack` elements at a time, with one output word per element."""
    shape = np.broadcast_shapes(*(a.shape for a in args))
    count = int(np.prod(shape))
    inputs = [word for a in args for word in _packed(np.broadcast_to(a, shape).reshape(-1), pack)]
    return np.stack(run(text, inputs, pack), axis=1).reshape(-1)[:count].view(np.int32).reshape(shape)


def _packed(elements: np.ndarray, pack: int) -> list[Words]:
    """Groups of `pack` elements as words. Narrow elements share a word, the first in the low bits."""
    bits = 8 * elements.dtype.itemsize
    groups = np.pad(elements.view(f"u{bits // 8}"), (0, -elements.size % pack)).reshape(-1, pack).astype(np.uint32)
    each = max(1, WORD // bits)
    parts = [[groups[:, k + n] << np.uint32(bits * n) for n in range(min(each, pack - k))] for k in range(0, pack, each)]
    return [reduce(np.bitwise_or, part) for part in parts]
