"""The structure of the code: layers, sizes, annotations. Raising a budget takes one line here, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from statistics import median

import pytest

from onepass.ir.expr import OPS
from onepass.ir.monoid import MONOIDS
from onepass.knobs import Knobs
from onepass.plan.staging import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "onepass"
MODULES = sorted(PACKAGE.rglob("*.py"))

MODULE_LINES, MEDIAN_MODULE_LINES = 450, 150
FUNCTION_LINES = 45
# The most lines of each package, as `ruff format` lays them out. These numbers only go down: what needs more room asks for a
# simpler design first.
PACKAGE_LINES = {
    "constants": 310,  # mostly one line per constant: the fields of typed records
    "errors": 915,
    "compat": 1295,  # among them what torch says of transforms, tangents and recorders
    "ir": 2910,
    "capture/lowering": 2695,
    "capture/function": 1810,
    "capture/graph": 1360,
    "plan": 3400,  # with `variations`: tuning varies the fields that candidates do not search
    "plan/cost": 965,
    "plan/staging": 685,  # all that planning knows of the families that stage inputs, one module each
    "plan/schedule": 755,  # one record per family, and everything that a text depends on is a field of it
    "codegen": 4160,  # with what names and docstrings of generated kernels say to their readers
    "runtime": 2850,
    "runtime/interpreter": 1380,
    "integration": 3430,
    "tools": 3265,  # with notes on how to read `explain --why`, and the failures of user code told apart from ours
    "measure": 4860,  # with `fit`, and records of schedules that hold every choice, so that varied ones are told apart
    ".": 1230,  # modules outside of packages, and the __init__ modules of packages of packages
}
TERSE_METHOD = 5  # statements a method may have without a docstring

# Data passes through the stages in this order, and imports go the other way only.
# fmt: off
ORDER = ["errors", "knobs", "files", "device", "constants", "stages", "compat", "ir", "capture", "plan", "codegen", "runtime",
         "pipeline", "integration", "tools", "measure"]
# fmt: on
# Stages that may not import each other although the order would allow it.
BANNED = {
    ("plan", "capture"),
    ("codegen", "capture"),
    ("plan", "compat"),
    ("codegen", "compat"),
    ("capture/function", "capture/graph"),
    ("capture/graph", "capture/function"),
    ("capture/lowering", "capture/function"),
    ("capture/lowering", "capture/graph"),
    ("runtime/interpreter", "runtime/executable"),
}
# Read the environment: settings, and the environment handed on to a worker process.
READS_ENVIRONMENT = {"knobs.py", "runtime/workers.py", "measure/warm.py"}  # the last two hand it to worker processes


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def stage(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def package(path: Path) -> str:
    """The innermost package of a module that has a budget."""
    folders = [f.as_posix() for f in path.relative_to(PACKAGE).parents]  # the innermost first, "." last
    return next(folder for folder in folders if folder in PACKAGE_LINES)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Absolute dotted names a module imports, with the statement; `from . import x` gives each x."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield ".".join([*base, alias.name]), node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node


def functions(path: Path) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    """Every function of a module, with the class it is a method of."""
    module = tree(path)
    owner = {f: c for c in ast.walk(module) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            yield node, owner.get(node)


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_overload(of: ast.FunctionDef | ast.ClassDef) -> bool:
    return "overload" in [ast.unparse(d) for d in of.decorator_list]


def statements(of: ast.FunctionDef) -> int:
    return sum(isinstance(n, ast.stmt) for n in ast.walk(of)) - 1


def test_imports_go_one_way() -> None:
    rank = {s: i for i, s in enumerate(ORDER)}
    wrong = []
    for path in MODULES:
        if stage(path) not in rank:
            continue  # the package's public names and the command line see everything
        for target, node in imported(path):
            parts = target.split(".")
            there = parts[1] if parts[0] == "onepass" and len(parts) > 1 else None
            inside = "/".join(parts[1:3])
            if there and (rank.get(there, -1) > rank[stage(path)] or {(stage(path), there), (package(path), inside)} & BANNED):
                wrong.append(f"{name(path)}:{node.lineno} imports {target}")
    assert not wrong


def test_every_stage_is_in_the_order() -> None:
    assert {stage(p) for p in MODULES} - {"__init__", "__main__"} <= set(ORDER)


def test_modules_are_short() -> None:
    assert not {name(p): n for p in MODULES if (n := len(p.read_text().splitlines())) > MODULE_LINES}


def test_most_modules_are_much_shorter() -> None:
    assert median(len(p.read_text().splitlines()) for p in MODULES) <= MEDIAN_MODULE_LINES


def test_functions_are_short() -> None:
    long = [(p, f) for p in MODULES for f, _ in functions(p) if lines(f) > FUNCTION_LINES]
    assert not [f"{name(p)}:{f.lineno} {f.name}: {lines(f)}" for p, f in long]


def test_packages_are_small() -> None:
    found = dict.fromkeys(PACKAGE_LINES, 0)
    for path in MODULES:
        found[package(path)] += len(path.read_text().splitlines())
    assert not {at: f"{lines} of {PACKAGE_LINES[at]}" for at, lines in found.items() if lines > PACKAGE_LINES[at]}


def test_only_the_command_line_imports_measure() -> None:
    users = {name(p) for p in MODULES for target, _ in imported(p) if target.startswith("onepass.measure")}
    assert {u for u in users if not u.startswith("measure/")} == {"__main__.py"}


def test_modules_have_docstrings() -> None:
    assert not [name(p) for p in MODULES if not ast.get_docstring(tree(p))]


def test_functions_are_annotated() -> None:
    def bare(f: ast.FunctionDef) -> bool:
        if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list):
            return False  # kernel code, where annotations have another meaning
        arguments = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs, f.args.vararg, f.args.kwarg]
        return f.returns is None or any(a.annotation is None for a in arguments if a and a.arg not in ("self", "cls"))

    assert not [f"{name(p)}:{f.lineno} {f.name}" for p in MODULES for f, _ in functions(p) if bare(f)]


def test_public_functions_and_classes_have_docstrings() -> None:
    missing = []
    for path in MODULES:
        tops = [n for n in tree(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not is_overload(n)]
        # An error class has its message.
        tops = [n for n in tops if not (path.parent.name == "errors" and isinstance(n, ast.ClassDef))]
        methods = [f for f, c in functions(path) if c and not c.name.startswith("_") and statements(f) > TERSE_METHOD]
        missing += [
            f"{name(path)}:{n.lineno} {n.name}"
            for n in (*tops, *methods)
            if not n.name.startswith("_") and not ast.get_docstring(n)
        ]
    assert not missing


def test_imports_inside_functions_have_a_reason() -> None:
    silent: list[str] = []
    for path in MODULES:
        if path.parent.name == "compat":
            continue  # lazy throughout, as its first lines say
        text = path.read_text().splitlines()
        inside = {s for f, _ in functions(path) for s in ast.walk(f) if isinstance(s, ast.Import | ast.ImportFrom)}
        silent += [f"{name(path)}:{s.lineno}" for s in inside if "#" not in text[(s.end_lineno or s.lineno) - 1]]
    assert not silent


def texts(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def asks_for_names(code: ast.Module) -> Iterator[ast.expr]:
    """Where code distinguishes reductions by name: comparisons, patterns, prefixes. Names of primitive folds are traits."""
    for node in ast.walk(code):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any("monoid" in side and not side.endswith((".fold", ".primitive", ".stage")) for side in sides) and texts(node):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            about = "monoid" in ast.unparse(node.func.value)
            if about and node.func.attr in ("startswith", "endswith", "isdisjoint", "partition", "split") and texts(node):
                yield node
        elif isinstance(node, ast.MatchClass):
            yield from (
                v.value
                for k, v in zip(node.kwd_attrs, node.kwd_patterns, strict=True)
                if k == "monoid" and isinstance(v, ast.MatchValue)
            )
        elif isinstance(node, ast.Match) and ast.unparse(node.subject).endswith(("monoid", "monoid.name")):
            yield node.subject


def test_reductions_are_distinguished_by_traits() -> None:
    """A new reduction is one record: only the records themselves, and capture, which chooses among them, know its name."""
    knowing = {p for p in MODULES if stage(p) == "capture"} | {PACKAGE / "ir/monoid.py"}
    assert not [f"{name(p)}:{n.lineno} {ast.unparse(n)}" for p in MODULES if p not in knowing for n in asks_for_names(tree(p))]


@pytest.mark.parametrize(
    "text",
    [
        'node.monoid in ("max", "min")',
        '"exp" not in monoid.name',
        'monoid.startswith(("argmax", "argmin"))',
        '"." in monoid',
        'n.monoid.endswith(".merge")',
        'monoids.isdisjoint(("welford",))',
        'monoid.name == "sum"',
        'match node:\n    case Reduce(monoid="sum"):\n        pass',
        'match node.monoid:\n    case "sum":\n        pass',
    ],
)
def test_comparing_a_reductions_name_is_detected(text: str) -> None:
    assert [*asks_for_names(ast.parse(text))]
    assert not [*asks_for_names(ast.parse('MONOIDS[node.monoid].fold == "sum" or monoid.stage is Stage.MERGE or monoid.mufu'))]


def test_ops_and_reductions_are_listed_only_in_their_tables() -> None:
    """Only the table, and capture, which chooses from it, contain a set of ops or reductions."""
    listed = []
    for path in (p for p in MODULES if stage(p) in ("ir", "plan", "codegen", "runtime") and p.name not in ("expr.py", "monoid.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                names = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                if len(names) > 1 and ({*names} <= set(OPS) or {*names} <= set(MONOIDS) - {"max", "min", "sum", "prod"}):
                    listed.append(f"{name(path)}:{node.lineno} {ast.unparse(node)}")
    assert not listed


def test_staged_families_are_named_where_they_are_made() -> None:
    """A new family takes five files, because other code asks `staged_family`, or about roles and sides."""
    names = {f"onepass.plan.schedule.{at}{f.record.__name__}" for f in FAMILIES for at in ("", "families.")}
    knowing = ("plan/staging/", "plan/schedule/check.py", "codegen/emit.py", "codegen/gluon")
    users = {name(p) for p in MODULES for target, _ in imported(p) if target in names}
    assert not {user for user in users if not user.startswith(knowing)}


def private(target: str) -> bool:
    """Whether an import uses a private interface of torch or Triton."""
    first, *rest = target.split(".")
    if first == "triton":
        return bool(rest) and rest[0] != "language"
    return first == "torch" and any(p.startswith("_") for p in rest)


def test_private_torch_and_triton_only_in_compat() -> None:
    wrong = [f"{name(p)}:{n.lineno} {t}" for p in MODULES if p.parent.name != "compat" for t, n in imported(p) if private(t)]
    assert not wrong


@pytest.mark.parametrize("folder", ["plan", "codegen"])
def test_planning_needs_no_gpu(folder: str) -> None:
    uses = [
        f"{name(p)}:{n.lineno}"
        for p in (PACKAGE / folder).rglob("*.py")
        for n in ast.walk(tree(p))
        if isinstance(n, ast.Attribute) and n.attr == "cuda"
    ]
    assert not uses


def test_the_environment_is_read_in_one_place() -> None:
    def reads(path: Path) -> bool:
        return any(isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv") for n in ast.walk(tree(path)))

    assert {name(p) for p in MODULES if reads(p)} <= READS_ENVIRONMENT


def test_every_setting_is_documented_and_used() -> None:
    docs = (ROOT / "docs/architecture.md").read_text()
    assert not [k.name for k in fields(Knobs) if k.metadata["variable"] not in docs]
    elsewhere = "\n".join(p.read_text() for p in MODULES if name(p) != "knobs.py")
    assert not [k.name for k in fields(Knobs) if f".{k.name}" not in elsewhere]
