"""The few PTX instructions that kernels bring along, on arrays of 32-bit words: what an interpreter makes of inline assembly."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

WORD = 32

Words = np.ndarray  # of uint32


def multiply_add(a: Words, b: Words, c: Words) -> Words:
    """The lower word of a product, plus a third."""
    return np.asarray(a * b + c)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Any function of three bits: bit 4a + 2b + c of the table is its result."""
    found = np.zeros_like(a)
    for case in range(8):
        if int(table) >> case & 1:
            found |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return found


INSTRUCTIONS: dict[str, Callable[..., Words]] = {"mad.lo.u32": multiply_add, "lop3.b32": lop3}


def run(text: str, inputs: Sequence[Words], outputs: int) -> list[Words]:
    """Carry out instructions on words. Operands are $0 and on, first the outputs and then the inputs, or numbers."""
    words = dict(enumerate(inputs, start=outputs))

    def operand(name: str) -> Words:
        return words[int(name[1:])] if name.startswith("$") else np.array(int(name, 0), dtype=np.uint32)

    for instruction in filter(None, map(str.strip, text.split(";"))):
        name, target, *operands = re.split(r"[\s,]+", instruction)
        words[int(target[1:])] = INSTRUCTIONS[name](*map(operand, operands))
    return [words[k] for k in range(outputs)]


def elementwise(text: str, args: Sequence[np.ndarray], pack: int) -> np.ndarray:
    """Instructions that make one word of every element of some arrays, `pack` elements at a time."""
    shape = np.broadcast_shapes(*(a.shape for a in args))
    count = int(np.prod(shape))
    inputs = [word for a in args for word in _packed(np.broadcast_to(a, shape).reshape(-1), pack)]
    return np.stack(run(text, inputs, pack), axis=1).reshape(-1)[:count].view(np.int32).reshape(shape)


def _packed(elements: np.ndarray, pack: int) -> list[Words]:
    """Elements by groups of `pack`, as words: several narrow ones to a word, the first in its lowest bits."""
    bits = 8 * elements.dtype.itemsize
    groups = np.pad(elements.view(f"u{bits // 8}"), (0, -elements.size % pack)).reshape(-1, pack).astype(np.uint32)
    each = max(1, WORD // bits)
    parts = [[groups[:, k + n] << np.uint32(bits * n) for n in range(min(each, pack - k))] for k in range(0, pack, each)]
    return [reduce(np.bitwise_or, part) for part in parts]
