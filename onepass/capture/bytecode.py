"""What a code object names: globals, closure variables, attributes, imports."""

from __future__ import annotations

import dis
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType

_CREATE_CLOSURES = frozenset({"LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS"})  # they read no variable
_CONTINUES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NO_OPERATION = frozenset({"EXTENDED_ARG", "CACHE"})
_NAMED, _FREE = frozenset(dis.hasname), frozenset(dis.hasfree)


@dataclass(frozen=True)
class Chain:
    """`root.a.b`: a variable and the attributes read from it at once."""

    root: str
    steps: tuple[str, ...]
    in_cell: bool  # a variable of an enclosing function, or one that inner functions share; else a global or a builtin


@dataclass(frozen=True)
class Mentions:
    """Everything a code object names, except what only its inner functions name."""

    chains: tuple[Chain, ...]
    attributes: tuple[str, ...]
    stored: tuple[str, ...]  # those of the attributes that are set
    imports: tuple[tuple[str, int], ...]  # (module, level), as `from .. import` counts levels
    has_class_patterns: bool  # `case Point(x, y)` reads attributes that are named elsewhere
    makes_text: bool  # of objects, in f-strings
    inner: tuple[CodeType, ...]


@lru_cache(maxsize=1024)
def mentions(code: CodeType) -> Mentions:
    """Read a code object's instructions. An opcode that is not known here counts as reading whatever it names."""
    reader = _Reader()
    for instruction in dis.get_instructions(code):
        if instruction.opname not in _NO_OPERATION:
            reader.read(instruction)
    chains = dict.fromkeys(Chain(root, tuple(steps), in_cell) for root, steps, in_cell in reader.chains)
    inner = tuple(c for c in code.co_consts if isinstance(c, CodeType))
    return Mentions(tuple(chains), tuple(reader.attributes), tuple(reader.stored), tuple(reader.imports),
                    reader.has_class_patterns, reader.makes_text, inner)


@dataclass
class _Reader:
    chains: list[tuple[str, list[str], bool]] = field(default_factory=list)
    attributes: dict[str, None] = field(default_factory=dict)
    stored: dict[str, None] = field(default_factory=dict)
    imports: list[tuple[str, int]] = field(default_factory=list)
    constants: list[object] = field(default_factory=list)
    has_class_patterns: bool = False
    makes_text: bool = False
    open_chain: list[str] | None = None  # the steps of the chain whose end is on top of the stack

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
        """The level of an import: the last constant but one loaded before it."""
        return level if len(self.constants) > 1 and isinstance(level := self.constants[-2], int) else 0
