"""What tests, scripts and benchmarks may import."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest

Rule: TypeAlias = Callable[[str], bool]  # of a dotted name: whether it must not be imported
ROOT = Path(__file__).resolve().parents[2]
TESTS, BENCH, SCRIPTS = (sorted((ROOT / folder).rglob("*.py")) for folder in ("tests", "bench", "scripts"))


def imports(text: str) -> Iterator[tuple[int, str]]:
    """Dotted names that code imports, with the line; also those in strings of code that another process runs."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from ((node.lineno, f"{'.' * level}{module or ''}.{alias.name}") for alias in names)
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Constant(value=str(held)) if "import " in held:
                with suppress(SyntaxError):  # prose
                    yield from ((node.lineno, name) for _, name in imports(held))


def of_a_test_module(name: str) -> bool:
    """Whether a name is in a module that pytest collects or loads itself; a second import would set it up twice."""
    return name.startswith("tests.") and any(part.startswith("test_") or part == "conftest" for part in name.split(".")[:-1])


def private(name: str) -> bool:
    """Whether a name of onepass or of the tests is private to its module."""
    package, *rest = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in rest)
    return hidden and package in ("onepass", "tests", "bench", "")


def violations(files: list[Path], wrong: Rule) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        if path != Path(__file__)
        for line, name in imports(path.read_text())
        if wrong(name)
    ]


def test_no_module_imports_a_test_module() -> None:
    """Code that two test modules need belongs in tests/support."""
    assert not violations([*TESTS, *BENCH, *SCRIPTS], of_a_test_module)


def test_no_module_imports_a_private_name() -> None:
    assert not violations([*TESTS, *BENCH, *SCRIPTS], private)


def test_benchmarks_import_no_tests() -> None:
    assert not violations(BENCH, lambda name: name.split(".")[0] == "tests")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("from tests.cpu.test_plan import planned", of_a_test_module),
        ("from tests.cpu.conftest import Anothers", of_a_test_module),
        ("code = '''\nfrom tests.cpu.test_codegen import KINDS\n'''", of_a_test_module),
        ("def f():\n    import tests.gpu.test_tune.x", of_a_test_module),
        ("from onepass.plan.cost import _rate", private),
        ("from tests.support._hidden import x", private),
        ("from .graph import _made", private),
    ],
)
def test_a_forbidden_import_is_detected(text: str, rule: Rule) -> None:
    assert any(rule(name) for _, name in imports(text))
    allowed = "from tests.support.processes import run_python\nfrom onepass.plan import cost\nimport torch._dynamo"
    assert not any(rule(name) for _, name in imports(allowed))
