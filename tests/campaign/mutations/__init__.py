"""Mutants by the part of onepass they change: a module each, whose `MUTANTS` are found by themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one line that breaks a promise, and the tests that must fail then."""

    name: str  # unique, in words and dashes
    file: str
    before: str  # text that stands in the file once
    after: str
    promise: str  # what is no longer true
    tests: tuple[str, ...]  # arguments of pytest: files, or files::tests
