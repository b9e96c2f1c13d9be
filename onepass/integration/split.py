"""Partition a training graph into forward and backward: Inductor's partition, with cheap values recomputed instead of saved."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from .. import compat
from ..capture.graph.recompute import MIN_BYTES, Recomputed, recompute
from ..errors import RecomputeSkipped
from ..runtime.cache import versions
from . import journal
from .failure import describe_error, is_fatal, raise_coded, warn_once
from .passes import copy_graph, device_of, lines_of
from .settings import Settings

_LOG = logging.getLogger(__name__)
Listener: TypeAlias = Callable[[tuple[Recomputed, ...]], None]


@dataclass(frozen=True)
class SplitPass:
    """The change to the partitioned graphs, with its settings. Calls `on_recomputed` with the values that are recomputed."""

    settings: Settings
    on_recomputed: Listener = journal.recomputed

    def __call__(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
        """Save fewer values. The modules get new graphs only if both succeed; errors that are not fatal are reported."""
        settings = self.settings
        try:
            where = device_of(forward.graph, settings.interpret)
            if where is None or compat.non_python_wrapper() is not None:
                return
            graphs = copy_graph(forward.graph), copy_graph(backward.graph)
            made = recompute(*graphs, outputs, where, MIN_BYTES if settings.by_cost else 1)
        except Exception as error:
            if settings.on_error == "raise" or is_fatal(error):
                raise_coded(error, "What a training graph saves", lines_of(forward.graph), "changed")
            warn_once(("split", describe_error(error)), RecomputeSkipped(error=describe_error(error)))
            return
        if made:
            for module, graph in zip((forward, backward), graphs, strict=True):
                module.graph = graph
                module.recompile()
        self.on_recomputed(made)
        _show(made, where)

    def uuid(self) -> str:
        """The cache key: everything besides the graph that the partition depends on."""
        return "onepass " + hashlib.sha256(repr((versions(), self.settings.graph_key)).encode()).hexdigest()


def _show(made: tuple[Recomputed, ...], where: torch.device) -> None:
    rows = [f"{len(made)} values of a forward graph on {where} are recomputed in the backward instead of saved"]
    rows += [f"  {each.name}: {each.nbytes / 1e6:.1f} MB, {each.traffic_saved / 1e6:.1f} MB less memory traffic" for each in made]
    _LOG.info("%s", "\n".join(rows))
    compat.trace_artifact("onepass_saved", lambda: "\n".join(rows) + "\n")


def split(settings: Settings, patches: dict[str, Any], on_recomputed: Listener = journal.recomputed) -> Any:
    """The partitioner to configure: ours around the user's, or just the user's (None for Inductor's) if recomputation is off."""
    theirs = compat.configured_partitioner(patches)
    change = SplitPass(settings, on_recomputed)
    ours = compat.partitioner(change, change.uuid, theirs) if settings.recompute else None
    return ours if ours is not None else theirs
