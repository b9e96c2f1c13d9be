"""torch.compile(backend=onepass.backend): as accurate as eager, as compatible as Inductor, and cached like Inductor."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

import onepass
from onepass import compat
from onepass.device import device
from onepass.errors import BadSetting
from onepass.integration import journal, passes
from onepass.integration.inductor import Backend
from onepass.integration.settings import resolve
from onepass.runtime import card
from tests.support.backend_options import EAGER, INDUCTOR, RESTS, needs_compiler
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(nothing_compiled: None) -> Iterator[None]:
    yield
    onepass.disable()


class Block(nn.Module):
    """A linear layer between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.RMSNorm(16), nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.outer(x + self.linear(self.inner(x))), -1)


def block() -> Block:
    torch.manual_seed(0)
    return Block()


def gradients(run: Any, module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    (run(x) * torch.arange(16.0)).sum().backward()
    return {"x": x.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}  # type: ignore


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", RESTS)
def test_forward_and_backward(options: dict[str, Any]) -> None:
    module, x = block(), torch.randn(6, 16)
    run = torch.compile(module, backend=onepass.backend, options=options, fullgraph=True)
    assert_same(gradients(run, module, x), gradients(module, module, x))
    seen = journal.snapshot()
    assert [g.phase for g in seen.graphs] == ["forward", "backward"]
    assert all(g.regions for g in seen.graphs)
    claimed = {r.id for g in seen.graphs for r in g.regions}
    assert set(seen.calls) == claimed and not seen.fallbacks
    assert all("test_backend.py" in line for g in seen.graphs if g.phase == "forward" for r in g.regions for line in r.lines)


@pytest.mark.parametrize("options", RESTS)
def test_inference_and_autocast(options: dict[str, Any]) -> None:
    module, x = block(), torch.randn(6, 16)
    run = torch.compile(module, backend=onepass.backend, options=options)
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))
        assert journal.snapshot().graphs[-1].phase == "inference" and journal.snapshot().calls
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(run(x), module(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", RESTS)
def test_dynamic_rows_need_one_graph(options: dict[str, Any]) -> None:
    module = block()
    run = torch.compile(module, backend=onepass.backend, options={**options, "verify": 0}, dynamic=True)
    with torch.no_grad():
        for rows in (3, 4, 5, 9, 17):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(x), module(x))
    seen = journal.snapshot()
    assert len(seen.graphs) == 1
    assert {len(r.sizes) for r in seen.regions} == {5}


@pytest.mark.parametrize("options", RESTS)
def test_the_functional_form_is_right(options: dict[str, Any]) -> None:
    module, x = block(), torch.randn(6, 16)
    run = torch.compile(module, backend=onepass.backend, options={**options, "functional": True})
    assert_same(gradients(run, module, x), gradients(module, module, x))
    assert journal.snapshot().calls


def norms(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x * 2, (16,))


def code_of(run: Any, *args: Tensor) -> str:
    from torch._inductor.utils import run_and_get_code

    with torch.no_grad():
        _, code = run_and_get_code(run, *args)
    return "\n".join(code)


@needs_compiler
def test_cpu_tensors_go_to_inductor_untouched() -> None:
    code = code_of(torch.compile(norms, backend=onepass.backend), torch.randn(4, 16))
    assert "onepass" not in code and not journal.snapshot().graphs


@needs_compiler
def test_inductor_allocates_the_outputs_of_regions() -> None:
    code = code_of(torch.compile(norms, backend=onepass.backend, options=INDUCTOR), torch.randn(4, 16))
    assert re.search(r"(onepass_region_\w+|torch\.ops\.onepass\.region\.default)\(\[buf", code)
    assert "clone" not in code.split("def call")[-1]


def test_a_disabled_backend_is_plain_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(compat, "compile_by_inductor", lambda m, i, patches, inner=None: calls.append(patches) or m.forward)
    monkeypatch.setenv("ONEPASS_DISABLE", "1")
    torch.compile(norms, backend=onepass.backend, options=EAGER)(torch.randn(4, 16))
    assert calls == [{}]


def test_regions_are_skipped_by_id_and_by_line() -> None:
    run = torch.compile(norms, backend=onepass.backend, options=EAGER)
    run(torch.randn(4, 16))
    [region] = journal.snapshot().graphs[0].regions
    line = region.lines[0].split(" ")[0]
    for name in (region.id, line):
        torch._dynamo.reset()
        journal.reset()
        run = torch.compile(norms, backend=onepass.backend, options={**EAGER, "skip": [name]})  # type: ignore[dict-item]  # torch's annotation is narrower
        run(torch.randn(4, 16))
        [graph] = journal.snapshot().graphs
        assert not graph.regions and name in graph.declined[0].reason


# ---- modes, options, passes of the user --------------------------------------------------------------------------------------


def patches_of(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
    """The configuration that Inductor would get."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(compat, "compile_by_inductor", lambda m, i, patches, inner=None: given.append(patches) or m.forward)
    with torch.no_grad():
        torch.compile(norms, backend=onepass.backend, **arguments)(torch.randn(4, 16))
    return given[0]


def test_mode_and_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    with onepass.settings(interpret=True):
        patches = patches_of(monkeypatch, mode="max-autotune-no-cudagraphs")
    assert patches["max_autotune"] is True and "post_grad_custom_post_pass" in patches
    torch._dynamo.reset()
    patches = patches_of(monkeypatch, options={"interpret": True, "epilogue-fusion": False})
    assert patches["epilogue_fusion"] is False and "interpret" not in patches


def test_a_backward_has_the_settings_of_its_forward_in_any_thread() -> None:
    module, x = nn.Sequential(nn.LayerNorm(16), nn.Softmax(-1)), torch.randn(6, 16)
    with onepass.settings(**EAGER):
        result = torch.compile(module, backend=onepass.backend)(x)
    assert [g.phase for g in journal.snapshot().graphs] == ["forward"]
    thread = threading.Thread(target=(result * torch.arange(16.0)).sum().backward)
    with onepass.settings(disable=True):  # of this thread only, and too late
        thread.start()
        thread.join()
    backward = journal.snapshot().graphs[1]
    assert backward.phase == "backward" and backward.regions and all(p.grad is not None for p in module.parameters())


def test_unknown_options_are_refused() -> None:
    with pytest.raises(Exception, match="Unexpected optimization option nonsense"):
        torch.compile(norms, backend=onepass.backend, options={"nonsense": 1})(torch.randn(4, 16))
    with pytest.raises(Exception, match=BadSetting.code):
        torch.compile(norms, backend=onepass.backend, options={"rest": 1})(torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="mode"):
        torch.compile(norms, backend=onepass.backend, mode="reduce-overhead", options={"interpret": True})


class _Other:
    """A pass of the user."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append([str(node.target) for node in graph.nodes])

    def uuid(self) -> str:
        return "other"


@pytest.mark.parametrize("lists", [True, False], ids=["list", "one pass, as before torch 2.13"])
def test_passes_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, lists: bool) -> None:
    from torch._inductor import config, custom_graph_pass

    if not lists:
        monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    elif not hasattr(custom_graph_pass, "get_custom_graph_passes"):
        pytest.skip("this torch takes one pass only")
    other = _Other()
    with config.patch(post_grad_custom_post_pass=other), torch.no_grad():
        torch.compile(norms, backend=onepass.backend, options=EAGER)(torch.randn(4, 16))
        assert config.post_grad_custom_post_pass is other
    assert len(other.seen) == 1 and journal.snapshot().calls
    assert not any("onepass" in target for target in other.seen[0]), "passes of others come first"


def test_enabling_and_disabling_keep_passes_set_by_the_user() -> None:
    from torch._inductor import config

    other = _Other()
    with config.patch(post_grad_custom_post_pass=other):
        onepass.enable(interpret=True)
        onepass.enable(interpret=True)
        passes_now = compat.configured_passes({})
        assert passes_now[0] is other and len(passes_now) == 2 and compat.is_our_pass(passes_now[1])
        onepass.disable()
        onepass.disable()
        assert config.post_grad_custom_post_pass is other
    onepass.enable()
    onepass.disable()
    assert config.post_grad_custom_post_pass is None


@needs_compiler
def test_inductor_itself_uses_onepass_once_enabled() -> None:
    onepass.enable(interpret=True, by_cost=False)
    x = torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(norms)(x), norms(x))
    assert journal.snapshot().calls


def test_torch_compiler_reset_reaches_the_backend() -> None:
    resets: list[bool] = []

    class Listening(Backend):
        def reset(self) -> None:
            resets.append(True)

    torch.compile(norms, backend=Listening(), options=EAGER)(torch.randn(4, 16))
    torch.compiler.reset()
    assert resets


# ---- cache keys --------------------------------------------------------------------------------------------------------------


def test_the_uuid_depends_on_settings_sources_and_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def uuid(**options: Any) -> str:
        return passes.RegionPass(resolve(options)).uuid()

    base = uuid()
    assert base == uuid() and base == uuid(in_place=True)
    others = [uuid(skip=("a.py:3",)), uuid(functional=True), uuid(interpret=True), uuid(verify=1), uuid(on_error="raise")]
    assert len({base, *others}) == 1 + len(others)
    monkeypatch.setenv("ONEPASS_VERIFY", "2")
    assert uuid() == base, "the environment is read when a region is called"
    monkeypatch.setattr(passes, "versions", lambda: {"onepass": "other sources"})
    assert uuid() != base


def test_the_uuid_depends_on_the_visible_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = set()
    for facts in (device("h200"), device("h100"), replace(device("h200"), corrections=(("inner", 1.1),))):
        monkeypatch.setattr(passes, "local_device", lambda index, facts=facts: facts)
        found.add(passes.RegionPass(resolve({})).uuid())
    assert len(found) == 3


def test_which_cards_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, fine in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(passes, "local_device", lambda index, c=capability: replace(device("h200"), capability=c))
        assert passes.is_supported(torch.device("cuda", 0), False) is fine
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, c=capability: c)
        assert (card.launch_unavailable_reason() is None) is fine


SECOND = """
import json, sys, torch, onepass
from onepass.integration import journal
from onepass.integration.engine import counts

@torch.no_grad()
def main(skip):
    def f(x):
        return torch.softmax(torch.nn.functional.rms_norm(x, (16,)) @ x.t(), -1)
    run = torch.compile(f, backend=onepass.backend, dynamic=True, options={"interpret": True, "by_cost": False, "skip": skip})
    x = torch.randn(8, 16)
    torch.testing.assert_close(run(x), f(x))
    seen, work = journal.snapshot(), counts()
    from torch._dynamo.utils import counters
    print(json.dumps({"graphs": len(seen.graphs), "calls": sum(seen.calls.values()), "plans": work.plans, "hits": work.hits,
                      "inductor": {k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph_cache")},
                      "ids": sorted(seen.calls)}))

main(sys.argv[1:])
"""


@needs_compiler
def test_a_second_process_claims_nothing_and_plans_nothing(tmp_path: Path) -> None:
    script = tmp_path / "second.py"
    script.write_text(SECOND)
    package = shutil.copytree(ROOT / "onepass", tmp_path / "copy" / "onepass", ignore=shutil.ignore_patterns("__pycache__"))

    def process(*skip: str) -> dict[str, Any]:
        env = {
            "PYTHONPATH": str(package.parent),
            "PATH": "/usr/bin:/bin:/usr/local/bin",
            "HOME": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "ONEPASS_CACHE_DIR": str(tmp_path / "store"),
        }
        done = run_python(script, *skip, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = process(), process()
    assert first["graphs"] == 1 and first["plans"] > 0 and first["inductor"].get("fxgraph_cache_miss") == 1
    assert second["graphs"] == 0 and second["plans"] == 0 and second["hits"] > 0
    assert second["inductor"].get("fxgraph_cache_miss") is None and second["ids"] == first["ids"]
    assert second["calls"] == first["calls"] > 0
    third = process(first["ids"][0])
    assert third["graphs"] == 1 and len(third["ids"]) == len(first["ids"]) - 1, "another setting is another key"
    with (package / "errors" / "base.py").open("a") as source:
        source.write("# changed\n")
    fourth = process()
    assert fourth["graphs"] == 1 and fourth["plans"] == first["plans"], "other sources are another key"


def test_importing_is_cheap() -> None:
    code = (
        "import sys, onepass; onepass.backend, onepass.settings; "
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'triton') if m in sys.modules])"
    )
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_logs_and_traces_show_what_was_claimed(tmp_path: Path) -> None:
    code = (
        "import torch, onepass; f = lambda x: torch.softmax(x, -1); torch.compile(f, backend=onepass.backend, "
        "options={'interpret': True, 'rest': 'eager', 'by_cost': False})(torch.randn(4, 16))"
    )
    env = {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ONEPASS_CACHE": "0",
        "TORCH_LOGS": "+onepass",
        "TORCH_TRACE": str(tmp_path / "trace"),
    }
    done = run_python(code, env=env)
    assert done.returncode == 0 and "1 regions claimed" in done.stderr, done.stderr
    traced = "".join(path.read_text() for path in (tmp_path / "trace").glob("*.log"))
    assert "onepass_inference_regions" in traced and "@triton.jit" in traced


def test_the_backend_is_found_by_its_name() -> None:
    from torch._dynamo.backends import registry

    registry.register_backend(onepass.backend, name="onepass_by_name")  # as torch does with the entry point
    x = torch.randn(4, 16)
    torch.testing.assert_close(torch.compile(norms, backend="onepass_by_name", options=EAGER)(x), norms(x))
    assert journal.snapshot().calls


def test_a_region_returns_fresh_tensors_if_torch_cannot_plan_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(argument: str, bases: list[object]) -> None:
        raise ImportError(argument)

    monkeypatch.setattr("onepass.compat.auto_functionalized_call", missing)
    block, x = Block(), torch.randn(4, 16)
    torch.testing.assert_close(torch.compile(block, backend=onepass.backend, options=EAGER)(x), block(x))
    assert any(graph.regions for graph in journal.snapshot().graphs)
