"""Triton's cache on disk, with every file checked before it is used: whose it is, and that every byte is as it was written.

Triton finds a binary by a key of all it follows from, and loads what it finds: cubins onto the card, shared objects into this
process. Here each file has a seal beside it, a digest of its key, its name and its content. A file without one, or with another
one (cut off by a power cut, changed by a bad disk, from another place), is as good as absent: it is compiled again and replaced.
Whoever can write to the folder can write seals too; keeping others out of it is the business of files.py.
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
OWN = 3  # parts of a path that may not be links: the store, Triton's folder in it, a kernel's in that
MOST_BYTES = 1 << 30  # of one file: more than any kernel, with room for debugging information


@cache
def checksummed_cache_manager() -> type[Any]:
    """The class Triton is given for its cache: its own, with seals. Made at first use, because Triton is imported late."""
    plain: Any = importlib.import_module("triton.runtime.cache").FileCacheManager

    class ChecksummedCacheManager(plain):  # type: ignore[misc]  # of a package without types
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.own = not override and not dump  # the other two are folders the user looks into
            if not self.own:
                super().__init__(key, override, dump)
                return
            self.key, self.lock_path = key, None
            self.cache_dir = os.path.join(importlib.import_module("triton").knobs.cache.dir, key)

        def get_file(self, filename: str) -> str | None:
            if not self.own:
                return super().get_file(filename)
            return self._make_path(filename) if read_checksummed(Path(self.cache_dir), filename) is not None else None

        def has_file(self, filename: str) -> bool:
            return self.get_file(filename) is not None if self.own else super().has_file(filename)

        def get_group(self, filename: str) -> dict[str, str] | None:
            """All files of a kernel; None where one is missing, because Triton would trip over it."""
            if not self.own:
                return super().get_group(filename)
            names = group_members(Path(self.cache_dir), f"__grp__{filename}")
            found = {name: path for name in names if (path := self.get_file(name)) is not None}
            return found if names and len(found) == len(names) else None

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            """Write a file; its path."""
            if not self.own:
                return super().put(data, filename, binary)
            content = data if isinstance(data, bytes) else str(data).encode()
            try:
                write_checksummed(Path(self.cache_dir), filename, content)
                return self._make_path(filename)
            except OSError:  # a full disk, or a folder that is not ours alone: Triton needs the file all the same
                return write_private(self.key, filename, content)

    return ChecksummedCacheManager


def write_checksummed(folder: Path, name: str, content: bytes) -> None:
    """Write a file and its seal. A reader in between finds the one without the other, and so nothing."""
    with files.open_folder(folder, own=OWN, create=True) as handle:
        with suppress(FileNotFoundError):
            os.unlink(name + CHECKSUM_SUFFIX, dir_fd=handle)
        files.write(handle, name, content)
        files.write(handle, name + CHECKSUM_SUFFIX, _digest(folder.name, name, content))


def read_checksummed(folder: Path, name: str) -> bytes | None:
    """What a file holds, if it is as it was written; None otherwise, and where it is not there."""
    try:
        with files.open_folder(folder, own=OWN) as handle:
            content, found = files.read(handle, name, MOST_BYTES), files.read(handle, name + CHECKSUM_SUFFIX, MOST_BYTES)
        if found == _digest(folder.name, name, content):
            return content
        trouble = "it is not as it was written"
    except FileNotFoundError:
        return None
    except OSError as error:
        trouble = printable(error.strerror or str(error))
    warn(EntryQuarantined(entry=f"{folder.name}/{name}", folder=folder.parent, detail=trouble))
    return None


def write_private(key: str, name: str, content: bytes) -> str:
    """Keep a file for this process alone; its path."""
    folder = _private_folder(os.getpid()).path / key
    with files.open_folder(folder, own=2, create=True) as handle:
        files.write(handle, name, content)
    return str(folder / name)


@lru_cache(maxsize=1)
def _private_folder(process: int) -> files.PrivateFolder:
    """A folder of this process; a forked child has one of its own."""
    return files.PrivateFolder("onepass-")


def group_members(folder: Path, name: str) -> tuple[str, ...]:
    """The names a group lists. Where it says that they lie counts for nothing: they lie here."""
    try:
        listed = json.loads(read_checksummed(folder, name) or b"{}").get("child_paths", {})
        return tuple(str(each) for each in listed if os.path.basename(each) == each)
    except (ValueError, AttributeError, TypeError):
        return ()


def _digest(key: str, name: str, content: bytes) -> bytes:
    return hashlib.sha256(f"{key}\0{name}\0".encode() + content).hexdigest().encode()
