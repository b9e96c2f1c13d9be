"""torch.compile(model, backend="onepass"): Inductor, with a pass that claims regions.

Installed, the backend is known by name; from a checkout it is `onepass.backend`. `enable` puts the same pass into Inductor's
own config, for those who keep backend="inductor".
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import compat
from ..capture.effects import is_seeded
from ..capture.source import user_line
from ..errors import SeededRandom, UntestedTorch
from . import failure
from .failure import format_lines
from .settings import current_overrides, resolve, split, validated


class Backend:
    """What torch.compile calls with every graph it captures."""

    __name__ = "onepass"  # torch names a backend by it

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None,
                 options: dict[str, Any] | None = None, **unknown: Any) -> Any:
        """Compile a graph. `options` may hold settings of onepass beside Inductor's."""
        ours, theirs = split({**(options or {}), **unknown})
        patches = compat.inductor_options(mode, theirs)
        overrides = current_overrides(ours)
        settings = resolve(overrides)
        if settings.disable or not _usable() or not _has_supported_tensor(module, inputs, settings.interpret):
            return compat.compile_by_inductor(module, inputs, patches)
        others = tuple(p for p in compat.configured_passes(patches) if not compat.is_our_pass(p))
        patches["post_grad_custom_post_pass"] = compat.combined_passes((*others, _graph_pass(overrides)))
        patches |= _split(overrides, patches)
        if settings.rest == "inductor":
            return compat.compile_by_inductor(module, inputs, patches)
        return compat.compile_by_inductor(module, inputs, {**patches, **_OP_BY_OP}, _run_as_is)

    def reset(self) -> None:
        """Called by torch.compiler.reset."""
        failure.reset_warnings()
        compat.reset_cuda_graphs()

    def __repr__(self) -> str:
        return "onepass.backend"


backend = Backend()

# Where nothing is left to Inductor: its caches hold what it compiled, and here it compiles nothing. Its own random numbers follow
# from seeds that only its code generation reads; torch's ops draw eager's, and AOTAutograd sees to it that a backward that draws
# them again draws the same.
_OP_BY_OP = {"force_disable_caches": True, "fallback_random": True}


def _run_as_is(module: fx.GraphModule, inputs: Sequence[Any], *, is_inference: bool = False, **_: Any) -> Any:
    run = compat.run_without_codegen(module, inputs, is_inference)
    seeded = next((node for node in module.graph.nodes if is_seeded(node)), None)
    if seeded is not None:
        raise SeededRandom(op=seeded.target, lines=format_lines((user_line(seeded.stack_trace),)))
    return run


def _graph_pass(overrides: dict[str, Any]) -> Any:
    from .passes import RegionPass  # all of the compiler, wanted only where something is compiled

    claims = RegionPass(overrides)
    return compat.graph_pass(claims, claims.uuid)


def _split(overrides: dict[str, Any], patches: dict[str, Any]) -> dict[str, Any]:
    from .split import split  # as above

    chosen = split(overrides, patches)
    return {} if chosen is None else {"custom_partitioner_fn": chosen}


def _usable() -> bool:
    """Whether this torch can host the pass; says so once if not."""
    trouble = compat.inductor_incompatibility()
    if trouble is None:
        return True
    oldest, newest = (".".join(map(str, v)) for v in (compat.OLDEST_TORCH, compat.NEWEST_TORCH))
    failure.warn_once(("torch", "untested"), UntestedTorch(detail=trouble, oldest=oldest, newest=newest))
    return False


def _has_supported_tensor(module: fx.GraphModule, inputs: Sequence[Any], interpret: bool) -> bool:
    """Whether any tensor of a captured graph is where kernels can run. A graph that has none goes to Inductor untouched."""
    from .passes import is_supported  # as above

    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    tensors += [v for n in module.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)]
    return any(is_supported(where, interpret) for where in dict.fromkeys(t.device for t in tensors))


# ---- for those who keep backend="inductor" -----------------------------------------------------------------------------------

_enabling = threading.Lock()


def enable(**changes: Any) -> None:
    """From now on every graph Inductor compiles goes through onepass, with these settings; `disable` undoes it."""
    overrides = current_overrides(validated(changes))
    if resolve(overrides).disable or not _usable():
        return
    with _enabling:
        others = tuple(p for p in compat.configured_passes({}) if not compat.is_our_pass(p))
        compat.configure((*others, _graph_pass(overrides)), _split(overrides, {}).get("custom_partitioner_fn"))


def disable() -> None:
    """Undo `enable`; passes of others stay."""
    if compat.inductor_incompatibility() is None:
        with _enabling:
            others = tuple(p for p in compat.configured_passes({}) if not compat.is_our_pass(p))
            compat.configure(others, compat.configured_partitioner({}))
