"""Names that a code object uses: globals, closure variables, attributes, imports."""

from __future__ import annotations

import dis
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType

_CREATE_CLOSURES = frozenset({"LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS"})  # these read no variable
_CONTINUES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NO_OPERATION = frozenset({"EXTENDED_ARG", "CACHE"})
_NAMED, _FREE = frozenset(dis.hasname), frozenset(dis.hasfree)


@dataclass(frozen=True)
class Chain:
    """`root.a.b`: a variable and the attributes read from it right away."""

    root: str
    steps: tuple[str, ...]
    in_cell: bool  # True for closure and cell variables; False for globals and builtins


@dataclass(frozen=True)
class Mentions:
    """Every name a code object uses, except those that only its inner functions use."""

    chains: tuple[Chain, ...]
    attributes: tuple[str, ...]
    stored: tuple[str, ...]  # the attributes that are assigned
    imports: tuple[tuple[str, int], ...]  # (module, level); level counts the dots of `from .. import`
    has_class_patterns: bool  # `case Point(x, y)` reads attributes that appear elsewhere
    makes_text: bool  # formats objects in f-strings
    inner: tuple[CodeType, ...]


@lru_cache(maxsize=1024)
def mentions(code: CodeType) -> Mentions:
    """Read a code object's instructions. An unknown opcode counts as reading every name it refers to."""
    reader = _Reader()
    for instruction in dis.get_instructions(code):
        if instruction.opname not in _NO_OPERATION:
            reader.read(instruction)
    chains = dict.fromkeys(Chain(root, tuple(steps), in_cell) for root, steps, in_cell in reader.chains)
    inner = tuple(c for c in code.co_consts if isinstance(c, CodeType))
    return Mentions(
        tuple(chains),
        tuple(reader.attributes),
        tuple(reader.stored),
        tuple(reader.imports),
        reader.has_class_patterns,
        reader.makes_text,
        inner,
    )


@dataclass
class _Reader:
    chains: list[tuple[str, list[str], bool]] = field(default_factory=list)
    attributes: dict[str, None] = field(default_factory=dict)
    stored: dict[str, None] = field(default_factory=dict)
    imports: list[tuple[str, int]] = field(default_factory=list)
    constants: list[object] = field(default_factory=list)
    has_class_patterns: bool = False
    makes_text: bool = False
    open_chain: list[str] | None = None  # the attributes of the chain whose value is on top of the stack

    def read(self, instruction: dis.Instruction) -> None:
        chain, self.open_chain = self.open_chain, None
        name, opname, opcode = instruction.argval, instruction.opname, instruction.opcode
        if opcode in _FREE and opname not in _CREATE_CLOSURES:
            self.start_chain(name, opname, True)
        elif opcode in _NAMED and opname == "IMPORT_NAME":
            self.imports.append((name, self.level()))
        elif opcode in _NAMED and ("ATTR" in opname or "METHOD" in opname or opname == "IMPORT_FROM"):
            self.attributes[name] = None
            if opname.startswith("STORE_"):
                self.stored[name] = None
            if chain is not None and opname in _CONTINUES:
                chain.append(name)
                self.open_chain = chain
        elif opcode in _NAMED:
            self.start_chain(name, opname, False)
        elif opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            self.constants.append(name)
        self.has_class_patterns |= opname == "MATCH_CLASS"
        self.makes_text |= opname.startswith("FORMAT_")

    def start_chain(self, root: str, opname: str, in_cell: bool) -> None:
        steps: list[str] = []
        self.chains.append((root, steps, in_cell))
        self.open_chain = steps if opname.startswith("LOAD_") else None

    def level(self) -> int:
        """The level of an import: the second to last constant loaded before it."""
        return level if len(self.constants) > 1 and isinstance(level := self.constants[-2], int) else 0
