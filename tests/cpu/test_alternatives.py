"""Alternative plans of one Program: distinct, the default first, and all with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onepass.capture import capture
from onepass.device import device
from onepass.pipeline import generate, optimize
from onepass.plan.alternatives import alternatives, schedule_kind
from onepass.plan.partition import plan
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import Executable, assemble
from onepass.tools.workloads import workload
from tests.support.correctness import assert_right

H200 = device("h200")
CPU = torch.device("cpu")
# Among them: rows shorter than a loop step, unaligned rows, one row, reductions both ways, states kept per thread.
SUBJECTS = [
    ("rms_norm", (7, 1024), torch.bfloat16),
    ("layer_norm_backward", (9, 768), torch.float32),
    ("softmax", (5, 1027), torch.float16),
    ("cross_entropy", (6, 1000), torch.float32),
    ("cross_entropy", (3, 8192), torch.bfloat16),
    ("logsumexp", (1, 5120), torch.float32),
    ("sum_both", (33, 256), torch.float32),
    ("add_rms_norm_backward", (16, 512), torch.bfloat16),
    ("outer_sum_3", (40, 96), torch.float16),
    ("gelu_backward_bias", (12, 512), torch.bfloat16),
    ("qk_norm", (2, 4, 3, 64), torch.bfloat16),
]


def plans_of(name: str, shape: tuple[int, ...], dtype: torch.dtype, most: int) -> tuple[Any, ...]:
    args = workload(name).inputs(shape, dtype, "cpu")
    captured = capture(workload(name).function, args, dynamic=False)
    program, bindings = optimize(captured.program), captured.bind(args)
    assert bindings is not None
    return args, captured, program, bindings, alternatives(program, bindings, H200, most)


@pytest.mark.parametrize("name,shape,dtype", SUBJECTS, ids=[f"{name}-{'x'.join(map(str, s))}" for name, s, _ in SUBJECTS])
def test_every_alternative_plan_gives_the_same_results(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, captured, _, bindings, plans = plans_of(name, shape, dtype, 40)
    for chosen in plans:
        run = assemble(Compiled(chosen, generate(chosen), ()).artifact, CPU, frozenset())

        def planned(*args: torch.Tensor, run: Executable = run) -> Any:
            return captured.result(run(captured.tensors(args), bindings), args)

        try:
            assert_right(planned, workload(name).function, lambda seed: workload(name).inputs(shape, dtype, "cpu", seed))
        except AssertionError as error:
            raise AssertionError(f"{error} with {[str(k.schedule) for k in chosen.kernels]}") from None


@pytest.mark.parametrize("name", ["rms_norm_backward", "softmax", "outer_sum_5"])
def test_the_default_plan_comes_first_and_no_plan_is_listed_twice(name: str) -> None:
    _, _, program, bindings, plans = plans_of(name, (64, 2048), torch.bfloat16, 12)
    assert plans[0] == plan(program, bindings, H200)
    texts = [tuple((k.family, str(k.schedule)) for k in p.kernels) for p in plans]
    assert 3 <= len(plans) <= 12 and len(set(texts)) == len(texts)
    times = [p.predicted_us for p in plans[1:]]
    assert times == sorted(times)


def test_other_families_are_tried_before_neighboring_schedules() -> None:
    *_, plans = plans_of("rms_norm", (64, 4096), torch.bfloat16, 6)
    assert len({schedule_kind(p.kernels[0].schedule) for p in plans}) == len(plans)
