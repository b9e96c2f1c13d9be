"""The torch.compile backend "onepass": Inductor with a graph pass that claims regions.

When the package is installed, torch finds the backend by name. From a checkout, pass `onepass.backend`. `enable` adds the same
graph pass to Inductor's config, for users who keep backend="inductor".
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import compat
from ..errors import UntestedTorch
from . import failure, op_by_op
from .settings import Settings, resolved, split, validated


class Backend:
    """The callable that torch.compile invokes with every captured graph."""

    __name__ = "onepass"  # the name torch shows for the backend

    def __call__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> Any:
        """Compile a graph. `options` may contain settings of onepass and of Inductor."""
        ours, theirs = split({**(options or {}), **unknown})
        patches = compat.inductor_options(mode, theirs)
        settings = resolved(ours)
        if settings.disable or not _usable() or not _has_supported_tensor(module, inputs, settings.interpret):
            return compat.compile_by_inductor(module, inputs, patches)
        others = tuple(p for p in compat.configured_passes(patches) if not compat.is_our_pass(p))
        patches["post_grad_custom_post_pass"] = compat.combined_passes((*others, _graph_pass(settings)))
        patches |= _split(settings, patches)
        if settings.rest == "inductor":
            return compat.compile_by_inductor(module, inputs, patches)
        return compat.compile_by_inductor(module, inputs, {**patches, **op_by_op.OPTIONS}, op_by_op.run_op_by_op)

    def reset(self) -> None:
        """Reset the backend; torch.compiler.reset calls this."""
        failure.reset_warnings()
        compat.reset_cuda_graphs()

    def __repr__(self) -> str:
        return "onepass.backend"


backend = Backend()


def _graph_pass(settings: Settings) -> Any:
    from .passes import RegionPass  # imports the whole compiler, so only when compiling

    claims = RegionPass(settings)
    return compat.graph_pass(claims, claims.uuid)


def _split(settings: Settings, patches: dict[str, Any]) -> dict[str, Any]:
    from .split import split  # as above

    chosen = split(settings, patches)
    return {} if chosen is None else {"custom_partitioner_fn": chosen}


def _usable() -> bool:
    """Whether this version of torch supports the pass. Warns once if not."""
    trouble = compat.inductor_incompatibility()
    if trouble is None:
        return True
    oldest, newest = (".".join(map(str, v)) for v in (compat.OLDEST_TORCH, compat.NEWEST_TORCH))
    failure.warn_once(("torch", "untested"), UntestedTorch(detail=trouble, oldest=oldest, newest=newest))
    return False


def _has_supported_tensor(module: fx.GraphModule, inputs: Sequence[Any], interpret: bool) -> bool:
    """Whether a captured graph has a tensor on a supported device. Other graphs go to Inductor unchanged."""
    from .passes import is_supported  # as above

    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    tensors += [v for n in module.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)]
    return any(is_supported(where, interpret) for where in dict.fromkeys(t.device for t in tensors))


# ---- enable and disable, for backend="inductor" ------------------------------------------------------------------------------

_enabling = threading.Lock()


def enable(**changes: Any) -> None:
    """Run the pass, with these settings, on every graph that Inductor compiles from now on. `disable` undoes this."""
    settings = resolved(validated(changes))
    if settings.disable or not _usable():
        return
    with _enabling:
        others = tuple(p for p in compat.configured_passes({}) if not compat.is_our_pass(p))
        compat.configure((*others, _graph_pass(settings)), _split(settings, {}).get("custom_partitioner_fn"))


def disable() -> None:
    """Undo `enable`. Other custom passes stay."""
    if compat.inductor_incompatibility() is None:
        with _enabling:
            others = tuple(p for p in compat.configured_passes({}) if not compat.is_our_pass(p))
            compat.configure(others, compat.configured_partitioner({}))
