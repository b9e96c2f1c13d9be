"""The store: what planning and compiling found out, on disk, so that the next process need not find it out again.

    <folder>/entries/<key>.json     one Made each, sealed with a checksum
    <folder>/cards/<key>.json       what was measured on a card (measured.py), sealed the same way
    <folder>/triton/                Triton's own cache of the binaries these entries speak of
    <folder>/quarantine/            entries that were not fit to be used

A key names everything an entry follows from, so an entry is never out of date. The folder is its user's alone. Every entry is
checked before anything in it is used (a plain file, owned by this user, writable by nobody else, every byte as written); one
that fails is moved away and made anew. A store that cannot be used costs time and one warning, never a result.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import EntrySetAside, OnepassWarning, StoreUnusable
from ..knobs import describe, knobs
from .compiled import Made
from .counts import count
from .saved import Damaged, pack, unpack

MOST_BYTES = 512 << 20  # of the whole folder; the least recently used goes first
KEPT_SHARE = 0.75  # of MOST_BYTES, after something had to go
SWEEP_EVERY = 64  # entries written by a process; the first is one of them
LONGEST_ENTRY = 64 << 20  # bytes: nothing that was written here is longer
SETTLED = 3600.0  # seconds after which nobody is still writing a file, or reading it for the first time

# ---- keys ------------------------------------------------------------------------------------------------------------------


def key(facts: Mapping[str, object]) -> str:
    """The name of an entry: a digest of what it follows from, of all versions, and of settings that change generated code."""
    settings = {s.variable: s.now for s in describe() if s.in_cache_key}
    everything = {"facts": facts, "versions": versions(), "settings": settings}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@cache
def versions() -> dict[str, str]:
    """The releases that decide what is planned, written and compiled; onepass itself down to the last byte."""
    found = {"onepass": f"{__version__} {sources_digest(Path(__file__).resolve().parents[1])}"}
    for package in ("torch", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def sources_digest(package: Path) -> str:
    """A digest of all Python files of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# ---- the store of this process ---------------------------------------------------------------------------------------------


def store() -> Store | None:
    """The store as the settings have it now; None where it is turned off or cannot be used."""
    settings = knobs()
    return _opened(settings.cache_dir) if settings.cache else None


@cache
def _opened(folder: Path) -> Store | None:
    try:
        _own(folder)
    except OSError as error:
        _say(StoreUnusable(folder=folder, use="used", detail=_reason(error)))
        return None
    return Store(folder)


def _own(folder: Path) -> None:
    """Create the folder, or make sure that it is this user's alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(0, "it belongs to another user")
    if status.st_mode & 0o077:
        try:
            os.chmod(folder, status.st_mode & 0o700)
        except OSError:  # a read-only disk; others being able to read does no harm
            if status.st_mode & 0o022:
                raise


class Store:
    """Entries by key. Any number of processes and threads may read and write the same folder."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._entries, self._cards, self._quarantine = folder / "entries", folder / "cards", folder / "quarantine"
        self._lock = threading.Lock()
        self._written = 0
        self._full = False  # or read-only: nothing more is written by this process
        self._kernels: Path | None = None
        self._spare: tempfile.TemporaryDirectory[str] | None = None

    def load(self, key: str) -> Made | None:
        """The entry of that key, if there is one fit to be used."""
        made: Made | None = self._fetch(self._path(key), key, Made)
        count(hits=made is not None, misses=made is None)
        if made is not None:
            with suppress(OSError):
                os.utime(self._path(key))  # used just now
        return made

    def save(self, key: str, made: Made) -> None:
        """Keep an entry. Readers see all of it or nothing."""
        if not self._put(self._path(key), key, made):
            return
        with self._lock:
            self._written += 1
            due = self._written % SWEEP_EVERY == 1
        if due:
            self.sweep()

    def recall(self, key: str, declared: type[Any]) -> Any:
        """What was measured on a card, as the dataclass it was kept as; None where there is nothing fit to be used."""
        return self._fetch(self._cards / f"{key}.json", key, declared)

    def remember(self, key: str, measured: Any) -> bool:
        """Keep what was measured on a card until it is forgotten; whether that could be done."""
        return self._put(self._cards / f"{key}.json", key, measured)

    def forget(self, key: str) -> bool:
        """Remove what was measured on a card; whether there was anything."""
        try:
            (self._cards / f"{key}.json").unlink()
        except FileNotFoundError:
            return False
        return True

    def _fetch(self, path: Path, key: str, declared: type[Any]) -> Any:
        try:
            return unpack(key, _read(path), declared)
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as error:
            self._set_aside(path, error)
            return None

    def _put(self, path: Path, key: str, kept: Any) -> bool:
        if self._full:
            return False
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(path, pack(key, kept))
        except OSError as error:
            self._give_up(error)
            return False
        return True

    @property
    def kernels(self) -> Path:
        """Where Triton keeps binaries: in the store, or where that cannot be written, in a folder of this process alone."""
        with self._lock:
            if self._kernels is None:
                self._kernels = self.folder / "triton"
                try:
                    self._kernels.mkdir(mode=0o700, exist_ok=True)
                    probe = self._kernels / f".{secrets.token_hex(8)}.tmp"
                    _write(probe, bytes(1 << 16))
                    probe.unlink()
                except OSError as error:
                    self._give_up(error)
                    self._spare = tempfile.TemporaryDirectory(prefix="onepass-")
                    self._kernels = Path(self._spare.name)
            return self._kernels

    def sweep(self) -> None:
        """Remove what was not used for longest, if the folder has grown too large, and what dead processes left."""
        now = time.time()
        found = sorted(self._contents(), key=lambda item: item.used)
        excess = sum(item.size for item in found)
        excess = excess - int(KEPT_SHARE * self.most_bytes) if excess > self.most_bytes else 0
        for item in found:
            leftover = item.path.suffix == ".tmp"
            if (excess <= 0 and not leftover) or (now - item.used < SETTLED and (leftover or item.path.is_dir())):
                continue
            with suppress(OSError):
                shutil.rmtree(item.path) if item.path.is_dir() and not item.path.is_symlink() else item.path.unlink()
                excess -= item.size

    def _contents(self) -> Iterator[_Item]:
        for folder in (self._entries, self._quarantine, self.folder / "triton"):
            with suppress(OSError):
                yield from filter(None, map(_item, list(os.scandir(folder))))

    def _path(self, key: str) -> Path:
        return self._entries / f"{key}.json"

    def _set_aside(self, path: Path, error: Exception) -> None:
        """Move an entry out of the way; where that cannot be done it is only passed over."""
        with suppress(OSError):
            self._quarantine.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, self._quarantine / f"{path.name}.{secrets.token_hex(4)}")
        _say(EntrySetAside(entry=path.name, folder=self.folder, detail=_reason(error)))

    def _give_up(self, error: OSError) -> None:
        if not self._full:
            self._full = True
            _say(StoreUnusable(folder=self.folder, use="written to", detail=_reason(error)))


@dataclass(frozen=True, slots=True)
class _Item:
    path: Path
    used: float
    size: int


def _item(entry: os.DirEntry[str]) -> _Item | None:
    try:
        status = entry.stat(follow_symlinks=False)
        inside = 0
        if entry.is_dir(follow_symlinks=False):
            inside = sum(e.stat(follow_symlinks=False).st_size for e in os.scandir(entry.path))
        return _Item(Path(entry.path), status.st_mtime, status.st_size + inside)
    except OSError:  # gone meanwhile
        return None


def _read(path: Path) -> bytes:
    """The bytes of a file that this user alone can have written; Damaged if it is anything else."""
    # O_NONBLOCK: a pipe put in its place must not hold us up.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("it is no plain file")
        if status.st_uid != os.getuid():
            raise Damaged("it belongs to another user")
        if status.st_mode & 0o022:
            raise Damaged("others than its owner can write to it")
        if status.st_size > LONGEST_ENTRY:
            raise Damaged("it is far too long")
        return file.read(LONGEST_ENTRY)


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it appears whole or not at all, readable by its owner alone."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _say(error: EntrySetAside | StoreUnusable) -> None:
    warnings.warn(str(error), OnepassWarning, stacklevel=2)
