"""Mutants, one module per part of onepass that they change. The `MUTANTS` of every module are collected automatically."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one line that breaks a promise, and the tests that must fail then."""

    name: str  # unique, in words and dashes
    file: str
    before: str  # text that stands in the file once
    after: str
    promise: str  # what the mutant breaks
    tests: tuple[str, ...]  # arguments of pytest: files, or files::tests
