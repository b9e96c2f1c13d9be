"""Fault injection into the store: `python -m tests.campaign.store --count 2000 --seed 0 --log FILE`.

Each fault hits a fresh copy of a small store: entries, measurements of a card, binaries. The store is then used as a process
uses it, and again as the next process does. Whatever happened: results are right, loaded data is what was written, warnings are
coded, no link leads out of the store, folders that others can write to are neither used nor changed, nothing hangs, and no
descriptor is left open.

The log has one JSON line per fault. A run with the same seed and log resumes where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

import onepass
from onepass import compat
from onepass.errors import OnepassWarning
from onepass.integration import engine
from onepass.runtime import cache
from onepass.runtime.compiled import Artifact
from onepass.runtime.measured import Calibration

from . import store_faults as faults

X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
FUNCTIONS: tuple[Callable[..., Any], ...] = (lambda x: x.softmax(-1), lambda x: (x * x).sum(0))
CARD, CARD_KEY = Calibration(1.0, 2.0, 3.0, 4.0, 5.0, "2026-01-31"), "c" * 64
BINARIES = {
    f"{name}{n}": {f"k.{end}": f"{name}{n}{end}".encode() * 50 for end in ("cubin", "ptx", "json", "so")}
    for name in "A"
    for n in range(2)
}
CODES = ("[ONEPASS-501]", "[ONEPASS-502]")
LONGEST = 600  # seconds a fault may take before it counts as hanging: the machine may be busy
KINDS = (*faults.DAMAGES, *["failing"] * 8, *["killing"] * 6, *["swapping"] * 2, "children killed", "many processes")


@dataclass
class Record:
    """One line of the log."""

    seed: int
    index: int
    kind: str
    detail: str = ""
    outcome: str = ""
    codes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ms: float = 0.0


@dataclass(frozen=True)
class Template:
    """An intact store."""

    folder: Path
    entries: dict[str, Artifact]
    right: tuple[torch.Tensor, ...]


def template(folder: Path) -> Template:
    """Create the store that is copied for every fault."""
    right = tuple(result(f, folder) for f in FUNCTIONS)
    store = cache.Store(folder)
    store.save_measurement(CARD_KEY, CARD)
    for key, group in BINARIES.items():
        with manager(store.kernels, key) as made:
            made.put_group("k.json", {name: made.put(content, name) for name, content in group.items()})
    keys = [p.stem for p in (folder / "entries").iterdir()]
    kept = {key: found for key in keys if (found := store.load(key)) is not None}
    assert len(kept) == len(FUNCTIONS)
    return Template(folder, kept, right)


def result(function: Callable[..., Any], folder: Path) -> torch.Tensor:
    """The result in a new process that finds only the store."""
    os.environ["ONEPASS_CACHE_DIR"] = str(folder)
    engine.forget()
    cache._opened.cache_clear()
    found: torch.Tensor = onepass.fuse(function, dynamic=False)(X)
    return found


@contextmanager
def manager(kernels: Path, key: str) -> Iterator[Any]:
    """Triton's cache manager, as onepass replaces it."""
    with compat.triton_cache_folder(str(kernels), lambda hit: None):
        yield compat.triton("test").knobs.cache.manager_class(key)


# ---- use ------------------------------------------------------------------------------------------------------------------


def use(folder: Path, known: Template, record: Record, steady: bool = True) -> str:
    """Load and save everything, and compare what was loaded with what was written.

    Binaries are given to Triton by path. Unless the store is `steady`, another process may damage them after they were checked.
    """
    store, seen = cache.Store(folder), Counter[str]()
    store.check()
    for key, kept in known.entries.items():
        found = store.load(key)
        seen["found" if found is not None else "missing"] += 1
        if found is not None and found != kept:
            record.wrong.append(f"entry {key[:8]} is not as it was written")
        store.save(key, kept)
    card = store.load_measurement(CARD_KEY, Calibration)
    if card is not None and card != CARD:
        record.wrong.append("the card's facts are not as they were written")
    store.save_measurement(CARD_KEY, CARD)
    for key, group in BINARIES.items():
        seen["found" if binaries_found(store.kernels, key, group, record if steady else Record(0, 0, "")) else "missing"] += 1
    store.sweep()
    return "refused" if not store.usable else "made anew" if seen["missing"] else "found"


def binaries_found(kernels: Path, key: str, group: dict[str, bytes], record: Record) -> bool:
    """Whether Triton was given its files; writes them again if not."""
    with manager(kernels, key) as made:
        found = made.get_group("k.json")
        for name, path in (found or {}).items():
            if Path(path).parent != kernels / key or Path(path).read_bytes() != group[name]:
                record.wrong.append(f"{key}/{name} is not as it was written")
        if found is None:
            try:
                again = {name: made.put(content, name) for name, content in group.items()}
            except OSError as error:  # nothing can be written anywhere: compiling fails, and Inductor takes the region
                raise Unmet from error
            record.wrong += [f"{name} was not kept" for name, path in again.items() if Path(path).read_bytes() != group[name]]
            with suppress(OSError):
                made.put_group("k.json", again)
    return found is not None and found.keys() == group.keys()


def exposed(folder: Path) -> dict[str, int]:
    """Folders that others can write to, with their modes."""
    found = [folder.parent, *faults.folders_of(folder)] if folder.is_dir() and not folder.is_symlink() else [folder.parent]
    return {str(p): mode for p in found if (mode := stat.S_IMODE(p.stat().st_mode)) & faults.OTHERS}


def check_use(folder: Path, known: Template, record: Record, hook: Callable[[str], None] | None) -> None:
    """Use the store under a fault, then as the next process does, and inspect what is left."""
    open_before, handles = exposed(folder), len(os.listdir("/proc/self/fd"))
    with suppress(faults.Killed, Unmet), faults.hooked(hook) if hook else nullcontext():
        record.outcome = use(folder, known, record)
    record.outcome = record.outcome or ("killed" if record.kind == "killing" else "no file for Triton")
    for mode in open_before.items():
        if mode not in exposed(folder).items() and Path(mode[0]).exists():
            record.wrong.append(f"the mode of {mode[0]} was changed")
    used = {str(folder / name) for name in ("", "entries", "cards", "triton")} | {str(folder.parent)}
    if used & open_before.keys() and record.outcome != "refused":
        record.wrong.append(f"{sorted(open_before)} can be written by others, but the store was {record.outcome}")
    if (theirs := folder.parent / "theirs").exists() and any(theirs.iterdir()):
        record.wrong.append("something was written where a link led")
    for function, right in zip(FUNCTIONS, known.right, strict=True):
        if not torch.equal(result(function, folder), right):
            record.wrong.append("a result is wrong")
    use(folder, known, record)
    if len(os.listdir("/proc/self/fd")) != handles:
        record.wrong.append("descriptors are left open")


class Unmet(Exception):
    """A fault that must propagate to the user of Triton's cache."""


def children(folder: Path, known: Template, chance: Random, record: Record) -> None:
    """Processes write and read the same store; all are killed, or some of them damage it."""
    damaging = record.kind == "many processes" and chance.random() < 0.6

    def work(seed: int) -> None:
        rng, nothing = Random(seed), Record(0, 0, "")
        for _ in range(3 if record.kind == "many processes" else 1000):
            use(folder, known, nothing, steady=not damaging)
            if damaging and rng.random() < 0.4:
                with suppress(OSError, IndexError, ValueError):
                    rng.choice((faults.flip, faults.cut, faults.swap, faults.newer))(folder, rng)
            if nothing.wrong:
                (folder.parent / f"wrong-{os.getpid()}").write_text("; ".join(nothing.wrong))

    count = chance.randrange(2, 5)
    alive = [faults.forked(partial(work, chance.randrange(1 << 30))) for _ in range(count)]
    faults.wait_for(alive, chance.random() / 10 if record.kind == "children killed" else None)
    record.detail = f"{count} processes" + (" that damage files" if damaging else "")
    record.wrong += [p.read_text() for p in folder.parent.glob("wrong-*")]


# ---- faults one after another ---------------------------------------------------------------------------------------------


def fault(seed: int, index: int, known: Template) -> Record:
    """One fault, determined by its seed and number."""
    chance = Random(f"{seed}:{index}")
    record = Record(seed, index, KINDS[index % len(KINDS)])
    place = Path(tempfile.mkdtemp(prefix="onepass-fault-"))
    folder, began = place / "store", time.monotonic()
    shutil.copytree(known.folder, folder)
    signal.alarm(LONGEST)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_use(folder, known, record, _prepared(folder, known, chance, record))
        texts = [str(w.message) for w in caught]
        record.wrong += [f"not coded: {t[:200]}" for w, t in zip(caught, texts) if not issubclass(w.category, OnepassWarning)]
        record.wrong += [f"another code: {t[:200]}" for t in texts if t.startswith("[") and not t.startswith(CODES)]
        record.codes = sorted({t[1:12] for t in texts if t.startswith("[")})
    except BaseException as error:
        record.wrong.append(f"{type(error).__name__}: {error}")
        if not isinstance(error, (Exception, faults.Killed)):
            raise
    finally:
        signal.alarm(0)
        _removed(place)
    record.ms = round(1e3 * (time.monotonic() - began), 1)
    return record


def _prepared(folder: Path, known: Template, chance: Random, record: Record) -> Callable[[str], None] | None:
    """Damage the store, or return a hook that is called while it is used."""
    match record.kind:
        case "failing" | "killing":
            record.detail, hook = (faults.failing if record.kind == "failing" else faults.killing)(chance)
            if chance.random() < 0.5:  # also while a damaged entry is quarantined
                record.detail += f", {chance.choice((faults.flip, faults.cut, faults.remove))(folder, chance)}"
            return hook
        case "swapping":
            record.detail, hook = faults.swapping(folder, chance)
            return hook
        case "children killed" | "many processes":
            children(folder, known, chance, record)
        case kind:
            record.detail = faults.DAMAGES[kind](folder, chance)
            if chance.random() < 0.25:
                with suppress(OSError, IndexError, ValueError):  # the first fault may have left nothing for the second
                    record.detail += f", {chance.choice(list(faults.DAMAGES.values()))(folder, chance)}"
    return None


def _removed(place: Path) -> None:
    for path in [place, *place.rglob("*")]:
        with suppress(OSError):
            if not path.is_symlink() and path.is_dir():
                path.chmod(0o700)
    shutil.rmtree(place, ignore_errors=True)


def _hangs(*_: object) -> None:
    raise TimeoutError(f"it takes more than {LONGEST} s")


def run(count: int, seed: int, log: Path) -> Counter[str]:
    """Run all faults that are not in the log yet, and count the outcomes."""
    lines = log.read_text().splitlines() if log.exists() else []
    done = [record for record in map(json.loads, lines) if record["seed"] == seed]
    begun = {record["index"] for record in done}
    signal.signal(signal.SIGALRM, _hangs)
    with tempfile.TemporaryDirectory(prefix="onepass-template-") as folder, log.open("a") as file:
        known = template(Path(folder) / "store")
        for index in range(count):
            if index not in begun:
                record = asdict(fault(seed, index, known))
                done.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
    return Counter(f"{t['kind']}: {'WRONG' if t['wrong'] else t['outcome']}" for t in done if t["index"] < count)


def main() -> int:
    """The command; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = run(given.count, given.seed, given.log)
    for name, number in sorted(found.items()):
        print(f"{number:6} {name}")
    return int(any("WRONG" in name for name in found))


if __name__ == "__main__":
    sys.exit(main())
