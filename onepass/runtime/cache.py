"""The store: a disk cache of plans, generated kernels and GPU measurements, shared by all processes of a user.

    <folder>/entries/<key>.json     one Artifact per file, with a checksum
    <folder>/cards/<key>.json       measurements of a GPU (measured.py), with a checksum
    <folder>/triton/                Triton's own cache of compiled binaries, with checksums (compat/checksums.py)
    <folder>/quarantine/            invalid entries, moved out of the way

A key covers everything an entry depends on, so entries never go stale. Entries hold code, so other users must not be able to
write to the store (files.py has the rule, SECURITY.md the reasons). Every access checks all folders from the root down, and every
file after it is opened. A folder that fails the check is not used; an entry that fails is quarantined and built again.
An unusable store costs time and one warning, never a result.
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

MAX_BYTES = 512 << 20  # for the whole folder; the least recently used entries are removed first
KEPT_FRACTION = 0.75  # of MAX_BYTES, kept when a sweep removes entries
SWEEP_EVERY = 64  # entries that a process writes between sweeps; the first write also sweeps
MAX_ENTRY_BYTES = 64 << 20  # longer files were not written by onepass
SETTLED_SECONDS = 3600.0  # after this time, no process is still writing a file or about to read it for the first time
TEMPORARY_SUFFIX = ".tmp"  # of files that are being written
PROBE_BYTES = 1 << 16  # written as a test: a disk without this much space cannot hold a kernel

ENTRIES, CARDS, QUARANTINE, TRITON = "entries", "cards", "quarantine", "triton"
# Errors of this process or this moment, not of the file.
TRANSIENT_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})

# ---- keys ------------------------------------------------------------------------------------------------------------------


def key(facts: Mapping[str, object]) -> str:
    """The name of an entry: a digest of `facts`, all versions, and the settings that change generated code."""
    settings = {s.variable: s.now for s in describe() if s.in_cache_key}
    everything = {"facts": facts, "versions": versions(), "settings": settings}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@cache
def versions() -> dict[str, str]:
    """The versions that determine plans, generated code and binaries. onepass counts with a digest of all its sources."""
    return {
        "onepass": f"{__version__} {sources_digest(Path(__file__).resolve().parents[1])}",
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
    }


def _triton_version() -> str:
    """The version of the package that is imported as triton, whatever its wheel is called."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return compat.triton_version()


def sources_digest(package: Path) -> str:
    """A digest of all Python files in a package, and of the constants that plans follow from."""
    digest = hashlib.sha256()
    for path in sorted((*package.rglob("*.py"), *package.rglob("*.json"))):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# ---- the store of this process ---------------------------------------------------------------------------------------------


def store() -> Store | None:
    """The store that the current settings name; None if it is turned off or unusable."""
    settings = knobs()
    found = _opened(settings.cache_dir) if settings.cache else None
    return found if found is not None and found.usable else None


@cache
def _opened(folder: Path) -> Store:
    found = Store(folder)
    found.check()
    return found


class Store:
    """Cache entries by key. Any number of processes and threads may read and write the same folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = folder.absolute(), max_bytes
        self.usable = True  # False after a failed check: nothing is read or written any more
        self._lock = threading.Lock()
        self._written = 0
        self._read_only = False  # True after a failed write: this process writes nothing more
        self._warned = threading.Lock()  # never released: the thread that acquires it gives the only warning
        self._probed = False
        self._private_kernels: files.PrivateFolder | None = None

    def check(self) -> bool:
        """Create the folder, or check that it is safe to use. Warns once if it is not."""
        try:
            with files.open_folder(self.folder, create=True):
                return True
        except OSError as error:
            self._disable(error)
            return False

    def load(self, key: str) -> Artifact | None:
        """The entry of a key; None if there is no valid one."""
        artifact: Artifact | None = self._load(ENTRIES, key, Artifact)
        count(hits=artifact is not None, misses=artifact is None)
        return artifact

    def save(self, key: str, artifact: Artifact) -> None:
        """Write an entry atomically."""
        if not self._save(ENTRIES, key, artifact):
            return
        with self._lock:
            self._written += 1
            due = self._written % SWEEP_EVERY == 1
        if due:
            self.sweep()

    def load_measurement(self, key: str, declared: type[Any]) -> Any:
        """A measurement of a GPU, as an instance of the dataclass `declared`; None if there is no valid one."""
        return self._load(CARDS, key, declared)

    def save_measurement(self, key: str, measured: Any) -> bool:
        """Write a measurement of a GPU. Sweeps never remove it. False if it could not be written."""
        return self._save(CARDS, key, measured)

    def delete_measurement(self, key: str) -> bool:
        """Delete a measurement of a GPU. False if there was none."""
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
        """Open a folder in the store, after checking it and every folder above it."""
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
        """The content of an entry file; None, and the file is quarantined, if it is invalid."""
        try:
            found = unpack(key, files.read(subfolder, name, MAX_ENTRY_BYTES), declared)
        except FileNotFoundError:
            return None
        except (OSError, CorruptEntry) as error:
            if getattr(error, "errno", None) not in TRANSIENT_ERRNOS:
                self._quarantine(subfolder, name, error)
            return None
        with suppress(OSError):
            os.utime(name, dir_fd=subfolder, follow_symlinks=False)  # mark as recently used
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
        """The folder for Triton's cache: in the store, or, if that cannot be written, a temporary folder of this process."""
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
        """Remove the least recently used entries if the folder is too large, and temporary files of dead processes."""
        now = time.time()
        found = sorted(self._contents(), key=lambda item: item.used)
        excess = sum(item.size for item in found)
        excess = excess - int(KEPT_FRACTION * self.max_bytes) if excess > self.max_bytes else 0
        for item in found:
            stale = item.name.endswith(TEMPORARY_SUFFIX)
            if (excess <= 0 and not stale) or (now - item.used < SETTLED_SECONDS and (stale or item.is_folder)):
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
        """Move an invalid entry to the quarantine folder. If that fails, the entry stays and is only ignored."""
        with suppress(OSError), self._subfolder(QUARANTINE, create=True) as quarantine:
            os.replace(name, f"{name}.{secrets.token_hex(4)}", src_dir_fd=subfolder, dst_dir_fd=quarantine)
        warn(EntryQuarantined(entry=name, folder=self.folder, detail=_reason(error)))

    def _stop_writing(self, error: OSError) -> None:
        """Stop writing to the store. If the folder is unsafe, stop reading as well."""
        if isinstance(error, files.UnsafePath):
            self._disable(error)
        self._read_only = True
        self._warn_once("written to", error)

    def _disable(self, error: OSError) -> None:
        """Stop using the store, unless the error is transient."""
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
    """An entry of a subfolder, with its size; a folder's size is that of its files. Zero if it was deleted meanwhile."""
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
    """Remove temporary files of dead processes from a folder."""
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=subfolder)
    try:
        for draft in os.listdir(inside):
            with suppress(OSError):
                if not draft.endswith(TEMPORARY_SUFFIX):
                    continue
                if now - os.stat(draft, dir_fd=inside, follow_symlinks=False).st_mtime >= SETTLED_SECONDS:
                    os.unlink(draft, dir_fd=inside)
    finally:
        os.close(inside)


def _reason(error: Exception) -> str:
    return printable((error.strerror if isinstance(error, OSError) else None) or text_of(error) or type(error).__name__)
