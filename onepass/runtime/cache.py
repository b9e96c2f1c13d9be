"""The store: what planning and compiling found out, on disk, so that the next process need not find it out again.

    <folder>/entries/<key>.json     one Made each, sealed with a checksum
    <folder>/cards/<key>.json       what was measured on a card (measured.py), sealed the same way
    <folder>/triton/                Triton's own cache of the binaries these entries speak of, sealed too (compat/sealed.py)
    <folder>/quarantine/            entries that were not fit to be used

A key names everything an entry follows from, so an entry is never out of date. Entries hold code, so nobody else may be able to
write to the store (files.py has the rule, SECURITY.md the reasons): whenever it is used, every folder from the root down is
checked, and every file once it is open. A folder that fails is refused as it is; an entry that fails is moved away and made anew.
A store that cannot be used costs time and one warning, never a result.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__, compat, files
from ..errors import EntryQuarantined, StoreUnusable, printable, text_of, warn
from ..knobs import describe, knobs
from .compiled import Artifact
from .counters import count
from .serialize import CorruptEntry, pack, unpack

MAX_BYTES = 512 << 20  # of the whole folder; the least recently used goes first
KEPT_FRACTION = 0.75  # of MOST_BYTES, after something had to go
SWEEP_EVERY = 64  # entries written by a process; the first is one of them
MAX_ENTRY_BYTES = 64 << 20  # bytes: nothing that was written here is longer
SETTLED_SECONDS = 3600.0  # seconds after which nobody is still writing a file, or reading it for the first time
TEMPORARY_SUFFIX = ".tmp"  # the end of the name of a file that is being written
PROBE_BYTES = 1 << 16  # a disk without room for them has none for a kernel

ENTRIES, CARDS, QUARANTINE, TRITON = "entries", "cards", "quarantine", "triton"
# Say something about this process or this moment, and nothing about the file.
TRANSIENT_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})

# ---- keys ------------------------------------------------------------------------------------------------------------------


def key(facts: Mapping[str, object]) -> str:
    """The name of an entry: a digest of what it follows from, of all versions, and of settings that change generated code."""
    settings = {s.variable: s.now for s in describe() if s.in_cache_key}
    everything = {"facts": facts, "versions": versions(), "settings": settings}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@cache
def versions() -> dict[str, str]:
    """The releases that decide what is planned, written and compiled; onepass itself down to the last byte."""
    return {"onepass": f"{__version__} {sources_digest(Path(__file__).resolve().parents[1])}",
            "torch": str(torch.__version__), "triton": _triton_version(), "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}


def _triton_version() -> str:
    """Of the package that is imported as triton, whatever wheel it came in."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return compat.triton_version()


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
    found = _opened(settings.cache_dir) if settings.cache else None
    return found if found is not None and found.usable else None


@cache
def _opened(folder: Path) -> Store:
    found = Store(folder)
    found.check()
    return found


class Store:
    """Entries by key. Any number of processes and threads may read and write the same folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = folder.absolute(), max_bytes
        self.usable = True  # nothing is read or written any more once it was refused
        self._lock = threading.Lock()
        self._written = 0
        self._read_only = False  # or read-only: nothing more is written by this process
        self._warned = threading.Lock()  # taken by the one warning there is
        self._probed = False
        self._private_kernels: files.PrivateFolder | None = None

    def check(self) -> bool:
        """Create the folder, or see whether it is fit to be used; says so once where it is not."""
        try:
            with files.open_folder(self.folder, create=True):
                return True
        except OSError as error:
            self._disable(error)
            return False

    def load(self, key: str) -> Artifact | None:
        """The entry of that key, if there is one fit to be used."""
        made: Artifact | None = self._load(ENTRIES, key, Artifact)
        count(hits=made is not None, misses=made is None)
        return made

    def save(self, key: str, made: Artifact) -> None:
        """Keep an entry. Readers see all of it or nothing."""
        if not self._save(ENTRIES, key, made):
            return
        with self._lock:
            self._written += 1
            due = self._written % SWEEP_EVERY == 1
        if due:
            self.sweep()

    def load_measurement(self, key: str, declared: type[Any]) -> Any:
        """What was measured on a card, as the dataclass it was kept as; None where there is nothing fit to be used."""
        return self._load(CARDS, key, declared)

    def save_measurement(self, key: str, measured: Any) -> bool:
        """Keep what was measured on a card until it is forgotten; whether that could be done."""
        return self._save(CARDS, key, measured)

    def delete_measurement(self, key: str) -> bool:
        """Remove what was measured on a card; whether there was anything."""
        try:
            with self._subfolder(CARDS) as subfolder:
                os.unlink(f"{key}.json", dir_fd=subfolder)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._stop_writing(error)
            return False
        return True

    @contextmanager
    def _subfolder(self, name: str, create: bool = False) -> Iterator[int]:
        """One of the folders in the store, with everything above it checked anew: whatever it was, it is all right now."""
        with files.open_folder(self.folder / name, own=2, create=create) as handle:
            yield handle

    def _load(self, subfolder: str, key: str, declared: type[Any]) -> Any:
        if not self.usable:
            return None
        try:
            with self._subfolder(subfolder) as handle:
                return self._read_entry(handle, f"{key}.json", key, declared)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._disable(error)
            return None

    def _read_entry(self, subfolder: int, name: str, key: str, declared: type[Any]) -> Any:
        """What a file holds, which is set aside where it is not fit to be used."""
        try:
            found = unpack(key, files.read(subfolder, name, MAX_ENTRY_BYTES), declared)
        except FileNotFoundError:
            return None
        except (OSError, CorruptEntry) as error:
            if getattr(error, "errno", None) not in TRANSIENT_ERRNOS:
                self._quarantine(subfolder, name, error)
            return None
        with suppress(OSError):
            os.utime(name, dir_fd=subfolder, follow_symlinks=False)  # used just now
        return found

    def _save(self, subfolder: str, key: str, kept: Any) -> bool:
        if self._read_only or not self.usable:
            return False
        try:
            with self._subfolder(subfolder, create=True) as handle:
                files.write(handle, f"{key}.json", pack(key, kept))
        except OSError as error:
            self._stop_writing(error)
            return False
        return True

    @property
    def kernels(self) -> Path:
        """Where Triton keeps binaries: in the store, or where that cannot be written, in a folder of this process alone."""
        with self._lock:
            if self._private_kernels is None:
                try:
                    with self._subfolder(TRITON, create=True) as handle:
                        self._probe(handle)
                    return self.folder / TRITON
                except OSError as error:
                    self._stop_writing(error)
                    self._private_kernels = files.PrivateFolder("onepass-")
            return self._private_kernels.path

    def _probe(self, subfolder: int) -> None:
        if not self._probed:
            name = f".{secrets.token_hex(8)}.tmp"
            files.write(subfolder, name, bytes(PROBE_BYTES))
            os.unlink(name, dir_fd=subfolder)
            self._probed = True

    def sweep(self) -> None:
        """Remove what was not used for longest, if the folder has grown too large, and what dead processes left."""
        now = time.time()
        found = sorted(self._contents(), key=lambda item: item.used)
        excess = sum(item.size for item in found)
        excess = excess - int(KEPT_FRACTION * self.max_bytes) if excess > self.max_bytes else 0
        for item in found:
            leftover = item.name.endswith(TEMPORARY_SUFFIX)
            if (excess <= 0 and not leftover) or (now - item.used < SETTLED_SECONDS and (leftover or item.is_folder)):
                continue
            with suppress(OSError), self._subfolder(item.subfolder) as subfolder:
                if item.is_folder:
                    shutil.rmtree(item.name, dir_fd=subfolder)
                else:
                    os.unlink(item.name, dir_fd=subfolder)
                excess -= item.size
        for subfolder_name, folder in ((CARDS, "."), *((item.subfolder, item.name) for item in found if item.is_folder)):
            with suppress(OSError), self._subfolder(subfolder_name) as subfolder:
                _remove_stale_drafts(subfolder, folder, now)

    def _contents(self) -> Iterator[_Item]:
        for name in (ENTRIES, QUARANTINE, TRITON):
            with suppress(OSError), self._subfolder(name) as subfolder, files.listable(subfolder) as handle:
                yield from [_item(name, entry, handle) for entry in os.listdir(handle)]

    def _quarantine(self, subfolder: int, name: str, error: Exception) -> None:
        """Move an entry out of the way; where that cannot be done it is only passed over."""
        with suppress(OSError), self._subfolder(QUARANTINE, create=True) as quarantine:
            os.replace(name, f"{name}.{secrets.token_hex(4)}", src_dir_fd=subfolder, dst_dir_fd=quarantine)
        warn(EntryQuarantined(entry=name, folder=self.folder, detail=_reason(error)))

    def _stop_writing(self, error: OSError) -> None:
        """Write nothing more; a folder that is not ours alone is not read either."""
        if isinstance(error, files.UnsafePath):
            self._disable(error)
        self._read_only = True
        self._warn_once("written to", error)

    def _disable(self, error: OSError) -> None:
        """Leave the store alone from now on, unless the trouble is this process's and may pass."""
        if error.errno not in TRANSIENT_ERRNOS:
            self.usable = False
            self._warn_once("used", error)

    def _warn_once(self, use: str, error: OSError) -> None:
        if self._warned.acquire(blocking=False):
            warn(StoreUnusable(folder=self.folder, use=use, detail=_reason(error)))


@dataclass(frozen=True, slots=True)
class _Item:
    subfolder: str
    name: str
    used: float
    size: int
    is_folder: bool


def _item(subfolder: str, name: str, handle: int) -> _Item:
    """What lies on a shelf, with the sizes of what lies in it; of what is gone meanwhile, nothing."""
    used, size, is_folder = time.time(), 0, False
    with suppress(OSError):
        status = os.stat(name, dir_fd=handle, follow_symlinks=False)
        used, size, is_folder = status.st_mtime, status.st_size, stat.S_ISDIR(status.st_mode)
        if is_folder:
            inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            try:
                size += sum(os.stat(n, dir_fd=inside, follow_symlinks=False).st_size for n in os.listdir(inside))
            finally:
                os.close(inside)
    return _Item(subfolder, name, used, size, is_folder)


def _remove_stale_drafts(subfolder: int, name: str, now: float) -> None:
    """Remove what dead processes left in a folder on a shelf."""
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=subfolder)
    try:
        for draft in os.listdir(inside):
            with suppress(OSError):
                if draft.endswith(TEMPORARY_SUFFIX) and now - os.stat(draft, dir_fd=inside, follow_symlinks=False).st_mtime >= SETTLED_SECONDS:
                    os.unlink(draft, dir_fd=inside)
    finally:
        os.close(inside)


def _reason(error: Exception) -> str:
    return printable((error.strerror if isinstance(error, OSError) else None) or text_of(error) or type(error).__name__)
