"""`onepass fit`: fits the data file of constants to the stored measurements, reports how good it is, and writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from .. import files
from ..constants import SHIPPED_FILE, Constants, Entry, parse, read, text_of, with_values
from ..device import Device, device
from ..errors import BadSpec
from ..tools.tables import as_text, table
from .bounded import MAX_BYTES
from .fit import FITTED, Ablation, Fit, Log, ablate, fit, fittable
from .fit_floor import Fastest, beaten, fastest, fit_floor, is_determined
from .fit_judge import Judgement, choice, errors, grouped, judgement
from .fit_samples import Sample, samples
from .observations import Observation, observations
from .results import write_atomically

Entries = Mapping[str, Mapping[str, Entry]]


@dataclass(frozen=True, slots=True)
class FitReport:
    """What a fit found, and the text of the file it gives."""

    observations: int
    samples: int
    fit: Fit
    families: Mapping[str, Judgement]  # of held-out workloads, with the constants of the file
    floor: Mapping[str, float]
    tightest: Sequence[Fastest]  # the measurements nearest to the floor
    ablations: Sequence[Ablation]
    text: str

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        both = {"train": self.fit.train, "held_out": self.fit.held_out}
        return {
            "observations": self.observations,
            "samples": self.samples,
            "taken": self.fit.taken,
            "changed": self.fit.changed,
            "slower_choices": [[asdict(c) for c in pair] for pair in self.fit.slower],
            **{name: {"before": asdict(a), "after": asdict(b)} for name, (a, b) in both.items()},
            "families": {name: asdict(j) for name, j in self.families.items()},
            "floor": dict(self.floor),
            "ablations": [asdict(a) for a in self.ablations],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.samples} of {self.observations} measurements are of kernels that the model can predict\n")
        yield from _judged(self)
        yield from _outcome(self.fit)
        if self.ablations:
            yield from _ablations(self.ablations)

    def __str__(self) -> str:
        return as_text(self)


def fit_constants(folder: Path, path: Path = SHIPPED_FILE, *, with_ablation: bool = False, log: Log = lambda _: None) -> FitReport:
    """Fit the constants of a file to the measurements in a folder."""
    name, entries = read(path)
    target, found = device(name), observations(folder)
    if not found:
        raise BadSpec(what="The folder of results", text=str(folder), detail="it holds no measurement")
    constants, known = parse(name, entries), samples(found, target)
    if not known:
        raise BadSpec(what="The folder of results", text=str(folder), detail="no kernel in it is one that the model can predict")
    if not is_determined(fastest(found), target):
        detail = "it holds too few sizes to fit the floor to; add the results of a whole suite (`onepass bench all`)"
        raise BadSpec(what="The folder of results", text=str(folder), detail=detail)
    log(f"{len(known)} of {len(found)} measurements matched")
    outcome = fit(known, constants.cost, fittable(entries["cost"]), log)
    final, floor = outcome.constants, fit_floor(fastest(found), target)
    ablations = ablate(known, final, entries["cost"]) if with_ablation else ()
    text = text_of(name, _written(entries, constants, outcome, floor, known, found))
    return FitReport(
        len(found),
        len(known),
        outcome,
        by_family([s for s in known if s.held_out], outcome),
        floor,
        _tightest(fastest(found), target, floor, constants),
        ablations,
        text,
    )


def by_family(found: Sequence[Sample], outcome: Fit) -> dict[str, Judgement]:
    """Errors of the schedules of each kernel family, and regrets of the choices that fall on it."""
    chosen = [c for members in grouped(found).values() if (c := choice(members, outcome.constants))]
    judged = {}
    for family in sorted({s.schedule.family for s in found}):
        own = [s for s in found if s.schedule.family == family]
        judged[family] = judgement(errors(own, outcome.constants), [c for c in chosen if c.family == family])
    return judged


def write(report: FitReport, path: Path) -> bool:
    """Write the fitted file. Returns whether it differs from what was there."""
    try:
        changed = files.read_user_file(path, MAX_BYTES) != report.text.encode()
    except OSError:  # it does not exist, or is not a plain file: writing decides what to say
        changed = True
    if changed:
        write_atomically(path, report.text.encode())
    return changed


def _written(
    entries: Entries,
    before: Constants,
    outcome: Fit,
    floor: Mapping[str, float],
    known: Sequence[Sample],
    found: Sequence[Observation],
) -> Entries:
    """The entries with fitted values, and with the files that support each constant."""
    values = with_values(with_values(entries, "cost", outcome.changed_values), "floor", floor)
    support = _support(known, outcome, [n for n, e in entries["cost"].items() if e.basis in FITTED])
    cost = {
        name: _supported(entry, support[name], outcome.taken) if name in support else entry
        for name, entry in values["cost"].items()
    }
    files = tuple(sorted({o.group.split(":")[0] for o in found if o.footprint}))
    return {**values, "cost": cost, "floor": {name: replace(e, basis="fitted", data=files) for name, e in values["floor"].items()}}


def _support(known: Sequence[Sample], outcome: Fit, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The files with measurements that depend on each constant."""
    base = [s.predicted_us(outcome.constants) for s in known]
    support = {}
    for name in names:
        other = replace(outcome.constants, **{name: getattr(outcome.constants, name) * 1.25})
        files = {s.seen.group.split(":")[0] for s, us in zip(known, base, strict=True) if s.predicted_us(other) != us}
        support[name] = tuple(sorted(files))
    return support


def _supported(entry: Entry, files: tuple[str, ...], taken: bool) -> Entry:
    return replace(entry, basis=("fitted" if taken else "kept") if files else "assumed", data=files)


def _tightest(found: Sequence[Fastest], target: Device, floor: Mapping[str, float], constants: Constants) -> Sequence[Fastest]:
    fitted = replace(constants.floor, **floor)
    assert not beaten(found, target, fitted), "a fitted floor lies below every measurement"
    return beaten(found, target, replace(fitted, **{name: value / 1.005 for name, value in floor.items() if name != "start"}))


def _judged(report: FitReport) -> RenderResult:
    shown = table(
        "on workloads held out",
        ("family", "name"),
        ("samples", "right"),
        ("median error", "right"),
        ("rms", "right"),
        ("choices", "right"),
        ("regret", "right"),
        ("within 5 %", "right"),
        ("worst", "right"),
    )
    rows = {**report.families, "all, before": report.fit.held_out[0], "all, fitted": report.fit.held_out[1]}
    for name, j in rows.items():
        near, worst = (_percent(j.near_best), _percent(j.worst_regret)) if j.choices else ("", "")
        shown.add_row(
            name,
            str(j.samples),
            _percent(j.median_error),
            _percent(j.rms_error),
            str(j.choices),
            _percent(j.mean_regret),
            near,
            worst,
        )
    yield shown


def _outcome(found: Fit) -> RenderResult:
    for name, (before, after) in found.changed.items():
        yield Text(f"  {name}: {before:g} -> {after:g}")
    for old, new in found.slower:
        yield Text(f"  slower: {new.id} ({new.group}), regret {_percent(old.regret)} -> {_percent(new.regret)}")
    if found.taken:
        yield Text("taken: better on held-out workloads, and no measured choice is slower")
    else:
        yield Text(
            "not taken: the constants stay as they were"
            + (
                f", because {len(found.slower)} measured choices would be slower"
                if found.slower
                else ", because nothing got better"
            )
        )


def _ablations(found: Sequence[Ablation]) -> RenderResult:
    shown = table(
        "\nwithout a constant",
        ("constant", "name"),
        ("value", "right"),
        ("samples", "right"),
        ("rms error", "right"),
        ("mean regret", "right"),
        ("choices", "right"),
    )
    for a in found:
        shown.add_row(a.name, f"{a.value:g}", str(a.samples), f"{100 * a.error:+.2f} %", f"{100 * a.regret:+.3f} %", str(a.choices))
    yield shown


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
