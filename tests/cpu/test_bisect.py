"""Bisecting a step: which regions are bad, alone or together; what a step is; and what cannot be decided."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from onepass.__main__ import app
from onepass.errors import BadSetting, BadSpec, NotDeterministic, NothingToCompare, StepFailed
from onepass.integration import region_op, repro
from onepass.tools import bisect, spec, step
from onepass.tools.bisect import RECOMPUTE, minimal
from onepass.tools.reference import Reference, worst_excess
from onepass.tools.runner import Runner

STEPS = """
import torch
import torch.nn.functional as F
from torch import nn

calls = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        return torch.softmax(self.linear(self.first(x)) * 2, -1).square().sum()


def pair():
    return Net(), (torch.randn(16, 32),)


def closure():
    net = Net()
    return lambda x, scale=1.0: net(x) * scale, torch.randn(16, 32), {"scale": 2.0}


def itself():
    return Net()(torch.randn(16, 32))


def needs(x):
    return (x * 2).sum()


def inputs():
    return torch.randn(4, 8)


def number():
    return F.softmax(torch.arange(8.0), -1).max().item()


def nothing():
    return "done"


def broken():
    return Net(), (torch.randn(16, 31),)


def leaving():
    def step(x):
        raise SystemExit(0)
    return step, (torch.randn(2),)


def another():
    return Net(), (torch.randn(16, 32, generator=torch.Generator().manual_seed(torch.seed() % 2 ** 31)),)
"""


@pytest.fixture
def file(tmp_path: Path, nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEPASS_REPRO_DIR", str(tmp_path / "repros"))
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path / "steps.py"


# ---- narrowing down ----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_minimal_group_is_found_wherever_it_is(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 20))
    groups = data.draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1, max_size=4), min_size=1, max_size=3))

    def fails(some: Sequence[str]) -> bool:
        return any({str(k) for k in group} <= set(some) for group in groups)

    found = minimal([str(k) for k in range(count)], fails)
    assert fails(found) and not any(fails([e for e in found if e != one]) for one in found)


def test_one_bad_region_among_many_is_found_in_few_runs() -> None:
    tried: list[int] = []

    def fails(some: Sequence[str]) -> bool:
        tried.append(len(some))
        return "77" in some

    assert minimal([str(k) for k in range(128)], fails) == ("77",) and len(tried) <= 14


class Pretended:
    """A runner whose step is wrong if one of its bad groups is enabled."""

    overrides: dict[str, Any] = {"skip": ("left out by hand",)}  # noqa: RUF012

    def __init__(
        self, count: int, bad_groups: Sequence[Collection[str]], fickle: bool = False, diverges_without_regions: bool = False
    ) -> None:
        self.regions = [f"r{k}" for k in range(count)]
        self.guilty_groups, self.fickle, self.diverges_without_regions, self.runs = bad_groups, fickle, diverges_without_regions, 0

    def journal_position(self) -> tuple[int, int]:
        return 0, 0

    def claimed(self, before: tuple[int, int]) -> tuple[dict[str, Any], bool]:
        tensor = SimpleNamespace(meta={"val": torch.empty(1)})
        part = SimpleNamespace(outputs=[tensor])
        return {r: SimpleNamespace(part=part, lines=(f"m.py:{r}",), program=None, bindings={}) for r in self.regions}, True

    def run(self, how: str, skip: Sequence[str] = (), recompute: bool = True, verify: str = "") -> dict[str, Tensor]:
        assert not skip or "left out by hand" in skip
        self.runs += 1
        on = {*self.regions, RECOMPUTE} - set(skip) - (set() if recompute else {RECOMPUTE})
        wrong = self.diverges_without_regions or any(set(group) <= on for group in self.guilty_groups)
        wrong = wrong and (not self.fickle or self.runs % 2 == 0 or len(on) < 3)
        return {"loss": torch.full((64,), 1.5 if wrong else 1.0)}

    def ends_search(self, error: Exception) -> bool:
        return False


def searched(runner: Pretended) -> tuple[list[set[str]], bool, Any]:
    right = {"loss": torch.full((64,), 1.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repro, "write_region", lambda *args: "file.py")
        search = bisect._Search(runner, Reference(right, right, "float64", ()), 8.0, lambda line: None)  # type: ignore[arg-type]
        bad_groups, diverges_without_regions = search.bad_groups()
    return [{s.region for s in group.suspects} for group in bad_groups], diverges_without_regions, search


@pytest.mark.parametrize(
    "bad_groups", [[], [{"r3"}], [{"r1"}, {"r6"}], [{"r1", "r6"}], [{"r0", "r4", "r5"}, {"r2"}], [{RECOMPUTE}]]
)
def test_every_bad_region_is_found(bad_groups: list[set[str]]) -> None:
    found, diverges_without_regions, search = searched(Pretended(9, bad_groups))
    assert sorted(map(sorted, found)) == sorted(map(sorted, bad_groups)) and not diverges_without_regions
    assert all(trial.line(8.0) for trial in search.trials.values())


def test_an_intermittent_fault_is_found() -> None:
    found, _, search = searched(Pretended(5, [{"r2"}], fickle=True))
    assert found == [{"r2"}] and search.runs == 2 and "vary from run to run" in search.notes[0]


def test_a_fault_outside_of_regions_blames_no_region() -> None:
    assert searched(Pretended(5, [], diverges_without_regions=True))[:2] == ([], True)


# ---- divergence --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "wrong"),
    [
        (torch.ones(64), False),
        (torch.ones(64) * (1 + 1e-7), False),
        (torch.ones(64) * 1.001, True),
        (torch.ones(63), True),
        (torch.full((64,), math.nan), True),
        (torch.ones(64).index_fill(0, torch.tensor(3), 2.0), True),
    ],
)
def test_which_results_diverge(actual: Tensor, wrong: bool) -> None:
    right = {"a": torch.ones(64)}
    reference = Reference({"a": torch.ones(64).double()}, right, "float64", ())
    assert (worst_excess({"a": actual}, reference)[0] > 8.0) == wrong
    assert worst_excess({"a": actual, "b": actual}, reference)[0] == math.inf


def test_integers_are_compared_exactly() -> None:
    right = {"a": torch.arange(4)}
    assert worst_excess({"a": torch.arange(4)}, Reference(right, right, "", ()))[0] == 0.0
    assert worst_excess({"a": torch.arange(4) + 1}, Reference(right, right, "", ()))[0] == math.inf
    unlike = Reference(right, {"a": torch.arange(4) * 3}, "", ())
    assert worst_excess({"a": torch.arange(4) + 1}, unlike)[0] == 0.0, "others differ too"


# ---- what a step is ----------------------------------------------------------------------------------------------------------


def results_of(file: Path, name: str) -> dict[str, Tensor]:
    maker = step.StepFactory.of(f"{file}:{name}", None, 0)
    made = maker()
    return step.results(made, made.call, name)


def test_a_name_in_a_file_is_resolved_to_a_step(file: Path) -> None:
    parameters = {"gradient of first.weight", "gradient of first.bias", "gradient of linear.weight", "gradient of linear.bias"}
    assert results_of(file, "pair").keys() == {"result 0", *parameters}
    assert results_of(file, "closure").keys() == {"result 0", *(name.replace(" of ", " of net.") for name in parameters)}
    assert results_of(file, "itself").keys() == results_of(file, "needs").keys() == {"result 0"}
    assert results_of(file, "number")["result 0"].dtype == torch.float32
    for name in ("pair", "closure", "itself"):
        one, other = results_of(file, name), results_of(file, name)
        assert all(torch.equal(one[key], other[key]) for key in one), "each time it is made anew, from the same seeds"
    with pytest.raises(NothingToCompare, match=r"ONEPASS-714.*returned str"):
        results_of(file, "nothing")


def test_a_step_can_run_in_float64(file: Path) -> None:
    made = step.to_float64(step.StepFactory.of(f"{file}:pair", None, 0)())
    wide = step.results(made, made.call, "pair")
    assert all(t.dtype == torch.float64 for t in wide.values())
    for name, t in results_of(file, "pair").items():
        torch.testing.assert_close(t.double(), wide[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="refers to tensors"):
        step.to_float64(step.StepFactory.of(f"{file}:closure", None, 0)())


def test_options_are_python_values_or_names() -> None:
    assert spec.parse_options(["by_cost=False", "rest=eager", "skip=['a', 'b']"]) == {
        "by_cost": False,
        "rest": "eager",
        "skip": ["a", "b"],
    }
    with pytest.raises(BadSpec, match="name=value"):
        spec.parse_options(["by_cost"])
    with pytest.raises(BadSetting):
        Runner.of(step.StepFactory("", None, 0, True), {"rest": "nobody"})


# ---- the command -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The first region that runs gives results that are a little too large."""
    bound, chosen = region_op._Region._bind_kernels, set[str]()

    def wrongly(self: Any, outs: Any, ins: Any, bindings: Any) -> Callable[..., None]:
        fill = bound(self, outs, ins, bindings)
        if self.id not in chosen and chosen:
            return fill
        chosen.add(self.id)

        def wrong(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
            fill(outs, ins)
            outs[0].mul_(1.01)

        return wrong

    region_op.forget()
    monkeypatch.setattr(region_op._Region, "_bind_kernels", wrongly)
    yield chosen
    region_op.forget()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bisect", *arguments, "--option", "by_cost=False", "--option", "rest=eager"])


def test_a_damaged_region_is_found(file: Path, damaged: set[str]) -> None:
    done = run(f"{file}:pair", "--json")
    assert done.exit_code == 1, done.exception
    found = json.loads(done.stdout)
    (group,) = found["guilty"]
    (region,) = group["regions"]
    assert {region["id"]} == damaged and found["options"] == {"skip": [region["id"]]} and found["reference"] == "float64"
    assert any("steps.py:" in line for line in region["lines"]) and "float64" in region["finding"]
    assert region["id"] in Path(region["repro"]).read_text() and found["regions"] > 1
    assert "DIVERGES with all regions" in done.stderr
    assert len(found["trials"]) == done.stderr.count("times the bound of a single kernel")
    assert not found["trials"][-1]["excess"] > found["slack"], "without the guilty one it agrees"


def test_a_step_that_does_not_diverge_is_reported_as_such(file: Path) -> None:
    done = run(f"{file}:pair")
    assert done.exit_code == 0 and "no result diverges from float64, with" in done.stdout


def test_a_nondeterministic_step_is_refused(file: Path) -> None:
    assert isinstance(run(f"{file}:another").exception, NotDeterministic)


def test_a_step_that_fails_without_regions_is_refused(file: Path) -> None:
    for name in ("broken", "leaving"):
        failed = run(f"{file}:{name}").exception
        assert isinstance(failed, StepFailed) and "ONEPASS-713" in str(failed) and "as it is" in str(failed)
