"""Two processes that train one model: compiled by onepass, sharded or replicated, it has the same gradients as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import onepass
from bench.zoo import ZOO
from onepass.integration import journal
from tests.support.correctness import compared
from tests.support.training_step import in_float64

RANKS = 2
WIDTH = 192  # 3.6 MB of weights
OPTIONS: dict[str, Any] = {"interpret": True, "rest": "eager", "on_error": "raise", "by_cost": False}
Wrap = Callable[[nn.Module, bool], nn.Module]

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")


def sharded(model: Any, fused: bool) -> Any:
    """FSDP2 around every block and the model; every block recomputes its forward and is compiled separately."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, block in list(model.blocks.named_children()):
        block = checkpoint_wrapper(block)
        if fused:
            block.compile(backend=onepass.backend, options=OPTIONS, fullgraph=True)
        fully_shard(block, mesh=mesh)
        model.blocks.register_module(name, block)
    return fully_shard(model, mesh=mesh)


def replicated(model: nn.Module, fused: bool) -> Any:
    """DDP with several buckets: Dynamo breaks the graph where one is full."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    return torch.compile(parallel, backend=onepass.backend, options=OPTIONS) if fused else parallel


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The full gradient of every parameter, by its name in the unwrapped model."""
    model(**inputs).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
            name = name.replace(wrapper, "")
        found[name] = whole.detach().clone()
    return found


def train(rank: int, wrap: Wrap, meeting_point: str) -> None:
    """The work of one process: the same step fused, in eager, and in float64 on the data of both processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS)
    try:
        example = ZOO["seed_transformer_learnable"]("tiny", dim=WIDTH)
        inputs = example.draw(rank)
        eager = gradients(wrap(copy.deepcopy(example.module), False), inputs)
        actual = gradients(wrap(copy.deepcopy(example.module), True), inputs)
        alone = [in_float64(example.module, example, example.draw(k)) for k in range(RANKS)]
        seen = journal.snapshot()
        assert {"forward", "backward"} <= {g.phase for g in seen.graphs if g.regions} and not seen.fallbacks
        wrong = []
        for name, grad in actual.items():
            exact = torch.stack([one[f"gradient of {name}"] for one in alone]).mean(0)
            judged = compared(grad, eager[name], exact, name)
            if not judged.ok:
                wrong.append(f"{name}: {judged.check}")
        assert not wrong, "\n".join(wrong)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [pytest.param(sharded, marks=pytest.mark.long), replicated])
def test_two_ranks_train_as_eager_does(wrap: Wrap, tmp_path: Path) -> None:
    spawn(train, (wrap, str(tmp_path / "meet")), nprocs=RANKS)
