"""Reproducers: a standalone Python file for every failure; it needs only onepass.

A region's file holds its Program, sizes and memory layout. Running it plans, compiles and runs the region on seeded inputs, and
compares the results with float64. A graph's file holds the graph's code. Running it claims the graph's regions again.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .. import files
from ..errors import NoReproducer, text_of
from ..ir.expr import BY_TORCH
from ..ir.program import Buffer, Load, Program
from ..ir.size import Bindings, value
from ..ir.text import parse, show
from ..knobs import knobs
from ..pipeline import optimize
from ..runtime.cache import versions
from .region_spec import RegionSpec, encode
from .settings import CallSettings, Settings, resolve

DEFAULT_FOLDER = "onepass_repros"

# Only Python literals, identifiers and one-line comments, all in ASCII, are inserted into these templates, so that the text of a
# program or an error cannot become code.
_REGION = """# Region {region}: {what}
#
# Plans, compiles and runs the region on seeded inputs, and compares with float64. Written by onepass on {machine}.

from onepass.integration.repro import replay

PROGRAM = (
{program})

replay(
    PROGRAM,
    region={name},
    sizes={sizes},
    device={device},
    unaligned={unaligned},  # tensors that did not start at a multiple of 16 bytes
    in_place={in_place},  # (output, input) pairs that shared memory
    seed=0,
    versions={versions},
)
"""

_GRAPH = """# A graph: {what}
#
# Traces the graph again and claims its regions. Written by onepass on {machine}.

import torch
from torch import device, inf, nan  # noqa: F401, the code below may use them

from onepass.integration.repro import replay_graph


class Graph(torch.nn.Module):
{code}


INPUTS = {inputs}

replay_graph(Graph(), INPUTS, phase={phase}, settings={settings}, versions={versions})
"""


@dataclass(frozen=True)
class Layout:
    """The memory layout of the tensors of a call."""

    device: str
    unaligned: tuple[str, ...] = ()
    in_place: tuple[tuple[str, str], ...] = ()  # (output, input) pairs that share memory


def write_region(region: str, what: str, program: Program, bindings: Bindings, layout: Layout) -> str:
    """Write a region's reproducer. Returns its path, or why it could not be written."""
    lines = "".join(f"    {line!a}\n" for line in show(program).splitlines(keepends=True))
    text = _REGION.format(
        region=_comment(region),
        what=_comment(what),
        machine=_comment(platform.platform()),
        program=lines,
        name=ascii(region),
        sizes=ascii(dict(bindings)),
        device=ascii(layout.device),
        unaligned=ascii(layout.unaligned),
        in_place=ascii(layout.in_place),
        versions=ascii(versions()),
    )
    return _write(files.slug(f"repro_{region}") + ".py", text)


def write_graph(graph: fx.Graph, what: str, phase: str, name: str, settings: Settings) -> str:
    """Write a graph's reproducer. Returns its path, or why it could not be written."""
    code = graph.python_code("self").src.strip()
    inputs = [_described(node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
    text = _GRAPH.format(
        phase=ascii(phase),
        what=_comment(what),
        machine=_comment(platform.platform()),
        code="\n".join(f"    {line}" for line in code.split("\n")),
        inputs="[\n" + "".join(f"    {each!a},\n" for each in inputs) + "]",
        settings=ascii(settings.changed),
        versions=ascii(versions()),
    )
    return _write(files.slug(f"repro_{name}") + ".py", text)


def _described(val: Any) -> Any:
    """Describe a graph input by plain values: (shape, strides, dtype, device) of a tensor, or the value of a size."""
    if isinstance(val, torch.Tensor):
        shape, strides = ([_hint(n) for n in sizes] for sizes in (val.shape, val.stride()))
        return shape, strides, str(val.dtype).removeprefix("torch."), str(val.device)
    return _hint(val)


def _hint(size: Any) -> Any:
    """The value of a size at trace time; 1 if it is unknown."""
    return size if isinstance(size, int) or size is None else getattr(size.node, "hint", None) or 1


def _write(name: str, text: str) -> str:
    """Write a file that the user may run, in a folder where no other user can replace it."""
    asked = knobs().repro_dir
    try:
        return _written(asked or Path(DEFAULT_FOLDER), name, text)
    except OSError as error:
        folder, trouble = asked, error
    if asked is None:
        try:
            folder = _temporary_folder(os.getpid())
            return _written(folder, name, text)
        except OSError as error:
            trouble = error
    return str(NoReproducer(folder=folder or tempfile.gettempdir(), detail=trouble.strerror or text_of(trouble)))


def _written(folder: Path, name: str, text: str) -> str:
    with files.open_folder(folder, create=True) as handle:
        files.write(handle, name, text.encode(errors="backslashreplace"))
    return str(folder / name)


@lru_cache(maxsize=1)
def _temporary_folder(process: int) -> Path:
    """A new folder with an unpredictable name in the temporary folder. It is not deleted at exit."""
    return Path(tempfile.mkdtemp(prefix=f"{DEFAULT_FOLDER}-"))


def _comment(text: str) -> str:
    """The first line of a message in ASCII, safe to use in a comment."""
    return (text.strip().splitlines() or [""])[0].encode("unicode_escape").decode()


# ---- called by reproducers ---------------------------------------------------------------------------------------------------


def replay(
    text: str,
    *,
    region: str,
    sizes: Bindings,
    device: str,
    unaligned: Sequence[str] = (),
    in_place: Sequence[tuple[str, str]] = (),
    seed: int = 0,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Plan, compile, run and check a region. Raises if anything fails."""
    from . import region_op  # imports this module

    _say_versions(versions)
    if device.startswith("cuda") and not torch.cuda.is_available():
        _say(f"no CUDA device: {device} is interpreted on the CPU")
        device = "cpu"
    program = parse(text)
    tensors = make_inputs(program, sizes, torch.device(device), frozenset(unaligned), seed)
    ins = [tensors[b.name] for b in program.buffers if b.role == "input"]
    taken = dict(in_place)
    outs = [
        _output_over(tensors[taken[b.name]], b, sizes)
        if b.name in taken
        else _empty(b, sizes, torch.device(device), b.name in unaligned)
        for b in program.buffers
        if b.role == "output"
    ]
    spec = RegionSpec(region, program, optimize(program), settings=CallSettings(verify=1, on_error="raise"))
    region_op.run(outs, ins, [sizes[s] for s in program.symbols], encode(spec))
    _say(f"region {region} is correct on these inputs")


def make_inputs(
    program: Program, sizes: Bindings, device: torch.device, unaligned: frozenset[str], seed: int
) -> dict[str, torch.Tensor]:
    """Random inputs with the layout that a Program expects. Integers are small enough to be valid indices."""
    generator = torch.Generator().manual_seed(seed)
    extents = [value(g.extent, sizes) for i in program.of(Load) for g in program.nodes[i].indexed]  # type: ignore[union-attr]
    limit = max(1, min([*extents, 128]))
    made = {}
    for buffer in program.buffers:
        if buffer.role != "input":
            continue
        tensor = _empty(buffer, sizes, device, buffer.name in unaligned)
        span = _span(tensor)
        if buffer.dtype.is_float:
            drawn = torch.randn(span, generator=generator, dtype=torch.float32)
        else:
            drawn = torch.randint(0, 2 if buffer.dtype.kind == "bool" else limit, (span,), generator=generator)
        tensor.as_strided((span,), (1,)).copy_(drawn)
        made[buffer.name] = tensor
    return made


def _empty(buffer: Buffer, sizes: Bindings, device: torch.device, unaligned: bool) -> torch.Tensor:
    shape, strides = ([value(s, sizes) for s in each] for each in (buffer.shape, buffer.strides))
    span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    flat = torch.empty(span + unaligned, dtype=buffer.dtype.torch, device=device)
    return flat.as_strided(shape, strides, int(unaligned))


def _output_over(tensor: torch.Tensor, buffer: Buffer, sizes: Bindings) -> torch.Tensor:
    """An output in the memory of an input, which may have another shape."""
    shape, strides = ([value(s, sizes) for s in each] for each in (buffer.shape, buffer.strides))
    return tensor.as_strided(shape, strides)


def _span(tensor: torch.Tensor) -> int:
    """The number of elements from a tensor's first to its last, including gaps."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


def replay_graph(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    *,
    phase: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
) -> None:
    """Trace a graph's code on fake tensors and claim its regions. Raises if anything fails."""
    from .. import compat  # only needed for graphs
    from . import passes  # imports this module

    _say_versions(versions)
    mode = compat.fake_mode()
    with mode:
        fakes = [
            torch.empty_strided(each[0], each[1], dtype=getattr(torch, each[2]), device=each[3])
            if isinstance(each, tuple)
            else each
            for each in inputs
        ]
    traced = compat.trace_graph(module, fakes, mode)
    claimed = passes.claim_all(traced.graph, passes.claim_options(traced.graph, resolve(settings), phase))
    for each in claimed.declined:
        if each.error is not None:
            raise each.error
    _say(f"{len(claimed.regions)} regions claimed, {len(claimed.declined)} declined")


def _say_versions(then: Mapping[str, str] | None) -> None:
    now = versions()
    for name, version in (then or {}).items():
        if now.get(name) != version:
            _say(f"{name} was {version} and is {now.get(name)} here")


def _say(sentence: str) -> None:
    sys.stdout.write(sentence + "\n")


def layout_of(program: Program, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> Layout:
    """The memory layout of the tensors of a call, for a reproducer."""
    outputs = [b.name for b in program.buffers if b.role == "output"]
    inputs = [b.name for b in program.buffers if b.role == "input"]
    named = [*zip(outputs, outs, strict=True), *zip(inputs, ins, strict=True)]
    unaligned = tuple(name for name, t in named if t.data_ptr() % 16)
    at = {t.data_ptr(): name for name, t in zip(inputs, ins, strict=True) if t.numel() and t.dtype in BY_TORCH}
    taken = tuple((name, at[t.data_ptr()]) for name, t in zip(outputs, outs, strict=True) if t.numel() and t.data_ptr() in at)
    return Layout(str(outs[0].device), unaligned, taken)
