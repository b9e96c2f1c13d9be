"""Writes generated kernels to a folder: one file each, plus an index with their source lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..codegen.source import Source
from ..errors import BadSpec, printable
from ..pipeline import generate
from .explain import Report
from .model_report import ModelReport
from .rows import KernelRow
from .tables import human_bytes, us

INDEX = "index.md"


@dataclass(frozen=True, slots=True)
class _Section:
    """A section of the index: a region, or the function."""

    title: str
    facts: tuple[str, ...]
    lines: tuple[str, ...]
    prefix: str  # of file names, because kernels of different regions may have the same name
    kernels: tuple[KernelRow, ...]
    sources: tuple[Source, ...]


def write_sources(report: "Report | ModelReport", folder: Path) -> Path:
    """Write every kernel of a report and the index. Returns the path of the index."""
    sections = tuple(_of_function(report) if isinstance(report, Report) else _of_model(report))
    title = report.workload if isinstance(report, Report) else report.model
    index = folder / INDEX
    try:
        for section in sections:
            for source in section.sources:
                files.write_user_file(folder / _file(section, source), source.text.encode(errors="backslashreplace"))
        page = [printable(line) for text in _page(title, report.device.title, sections) for line in text.split("\n")]
        files.write_user_file(index, ("\n".join(page) + "\n").encode())
    except OSError as error:
        raise BadSpec(what="The folder", text=str(folder), detail=error.strerror or str(error)) from None
    return index


def listing(report: "Report | ModelReport") -> Iterator[str]:
    """The text of each kernel, with its region and name as a header."""
    for section in _of_function(report) if isinstance(report, Report) else _of_model(report):
        for source in section.sources:
            yield f"# {'-' * 10} {section.prefix}{source.name}\n{source.text.rstrip()}\n"


def _of_function(report: Report) -> Iterator[_Section]:
    lines = tuple(dict.fromkeys(line for k in report.kernels for line in k.ops))
    yield _Section(report.workload, (f"{us(report.predicted_us)} predicted",), lines, "", report.kernels, report.sources)


def _of_model(report: ModelReport) -> Iterator[_Section]:
    """One section per distinct region, in the phase where it occurs first."""
    first = {r.id: r for r in reversed(report.regions)}
    for r in reversed(first.values()):
        facts = (
            f"{r.count} x in the {r.phase} graph",
            f"{us(r.predicted_us + r.charged_us)} predicted",
            f"{us(r.inductor_us)} by Inductor",
            f"{human_bytes(r.dram_bytes)} moved, {human_bytes(r.floor_bytes)} at least",
        )
        yield _Section(f"{r.id}: {r.name}", facts, r.lines, f"{r.id}_", r.kernels, generate(r.plan))


def _file(section: _Section, source: Source) -> str:
    return files.slug(f"{section.prefix}{source.name}") + ".py"


def _page(title: str, device: str, sections: Iterable[_Section]) -> Iterator[str]:
    yield f"# Kernels of {title} on {device}"
    for section in sections:
        yield f"\n## {section.title}\n"
        yield ", ".join(section.facts) + ".\n"
        yield from (f"- `{line}`" for line in section.lines)
        yield "\n| kernel | family | DRAM | predicted | registers |\n|---|---|---|---|---|"
        for kernel, source in zip(section.kernels, section.sources, strict=True):
            registers = "-" if kernel.registers is None else str(kernel.registers)
            yield (
                f"| [{source.name}]({_file(section, source)}) | {kernel.family} | {human_bytes(kernel.dram_bytes)} | "
                f"{us(kernel.predicted_us)} | {registers} |"
            )
