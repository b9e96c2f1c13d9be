"""Triton's disk cache with verification: every file's owner and checksum are checked before use.

Triton looks up binaries by a hash of their inputs and loads whatever it finds: cubins onto the GPU, shared objects into this
process. Here each file has a checksum file next to it: a digest of its key, name and content. A file whose checksum is missing or
wrong (truncated by a power failure, changed by a bad disk, copied from elsewhere) counts as absent: it is compiled again.
Whoever can write to the folder can write checksums too; files.py keeps other users out of it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from .. import files
from ..errors import EntryQuarantined, printable, warn

CHECKSUM_SUFFIX = ".sha256"
NOFOLLOW_PARTS = 3  # trailing parts of a path that must not be links: the store, Triton's folder in it, a kernel's folder in that
MAX_BYTES = 1 << 30  # per file: larger than any kernel with debugging information


@cache
def checksummed_cache_manager() -> type[Any]:
    """A subclass of Triton's cache manager that verifies checksums. Created at first use, because Triton is imported lazily."""
    plain: Any = importlib.import_module("triton.runtime.cache").FileCacheManager

    class ChecksummedCacheManager(plain):  # type: ignore[misc]  # Triton has no type annotations
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.own = not override and not dump  # override and dump folders belong to the user
            if not self.own:
                super().__init__(key, override, dump)
                return
            self.key, self.lock_path = key, None
            self.cache_dir = os.path.join(importlib.import_module("triton").knobs.cache.dir, key)

        def get_file(self, filename: str) -> str | None:
            if not self.own:
                theirs: str | None = super().get_file(filename)
                return theirs
            found = read_checksummed(Path(self.cache_dir), filename) is not None
            return str(self._make_path(filename)) if found else None

        def has_file(self, filename: str) -> bool:
            return self.get_file(filename) is not None if self.own else super().has_file(filename)

        def get_group(self, filename: str) -> dict[str, str] | None:
            """All files of a kernel; None if any is missing, because Triton would fail on a partial group."""
            if not self.own:
                theirs: dict[str, str] | None = super().get_group(filename)
                return theirs
            names = group_members(Path(self.cache_dir), f"__grp__{filename}")
            found = {name: path for name in names if (path := self.get_file(name)) is not None}
            return found if names and len(found) == len(names) else None

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            """Write a file and return its path."""
            if not self.own:
                return str(super().put(data, filename, binary))
            content = data if isinstance(data, bytes) else str(data).encode()
            try:
                write_checksummed(Path(self.cache_dir), filename, content)
                return str(self._make_path(filename))
            except OSError:  # a full disk or an unsafe folder: Triton still needs the file
                return write_private(self.key, filename, content)

    return ChecksummedCacheManager


def write_checksummed(folder: Path, name: str, content: bytes) -> None:
    """Write a file and its checksum. A reader that comes in between finds no checksum, so the file counts as absent."""
    with files.open_folder(folder, own=NOFOLLOW_PARTS, create=True) as handle:
        with suppress(FileNotFoundError):
            os.unlink(name + CHECKSUM_SUFFIX, dir_fd=handle)
        files.write(handle, name, content)
        files.write(handle, name + CHECKSUM_SUFFIX, _digest(folder.name, name, content))


def read_checksummed(folder: Path, name: str) -> bytes | None:
    """The content of a file whose checksum matches; None otherwise, or if the file does not exist."""
    try:
        with files.open_folder(folder, own=NOFOLLOW_PARTS) as handle:
            content, found = files.read(handle, name, MAX_BYTES), files.read(handle, name + CHECKSUM_SUFFIX, MAX_BYTES)
        if found == _digest(folder.name, name, content):
            return content
        reason = "its checksum does not match"
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = printable(error.strerror or str(error))
    warn(EntryQuarantined(entry=f"{folder.name}/{name}", folder=folder.parent, detail=reason))
    return None


def write_private(key: str, name: str, content: bytes) -> str:
    """Write a file to a temporary folder of this process and return its path."""
    folder = _private_folder(os.getpid()).path / key
    with files.open_folder(folder, own=2, create=True) as handle:
        files.write(handle, name, content)
    return str(folder / name)


@lru_cache(maxsize=1)
def _private_folder(process: int) -> files.PrivateFolder:
    """The temporary folder of this process. A forked child has its own."""
    return files.PrivateFolder("onepass-")


def group_members(folder: Path, name: str) -> tuple[str, ...]:
    """The file names that a kernel's group file lists. The folders it gives are ignored: all files are in the kernel's folder."""
    try:
        listed = json.loads(read_checksummed(folder, name) or b"{}").get("child_paths", {})
        return tuple(str(each) for each in listed if os.path.basename(each) == each)
    except (ValueError, AttributeError, TypeError):
        return ()


def _digest(key: str, name: str, content: bytes) -> bytes:
    return hashlib.sha256(f"{key}\0{name}\0".encode() + content).hexdigest().encode()
