"""Faults of a store: each is a function of a folder and a random generator, and returns what it did.

Damage is done before the store is used. Hooks are active while it is used, and make one system call fail, or all from
one on, as a kill does.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from onepass import files
from onepass.compat.checksums import CHECKSUM_SUFFIX, write_checksummed
from onepass.runtime import cache, serialize

NUMBERS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ESTALE)
CALLS = ("open", "mkdir", "replace", "unlink", "utime", "fstat", "close", "stat", "listdir", "readlink")
OTHERS = 0o022
NOBODY = 65534


class Killed(BaseException):
    """The process counts as dead: nothing it still attempts has an effect."""


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def folders_of(folder: Path) -> list[Path]:
    return [folder, *sorted(p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink())]


# ---- damage: done before use ----------------------------------------------------------------------------------------------


def flip(folder: Path, chance: Random) -> str:
    path = chance.choice(files_of(folder))
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 9))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return path.name


def cut(folder: Path, chance: Random) -> str:
    path = chance.choice(files_of(folder))
    os.truncate(path, chance.choice((0, 1, chance.randrange(path.stat().st_size), path.stat().st_size - 1)))
    return path.name


def lengthen(folder: Path, chance: Random) -> str:
    path = chance.choice(files_of(folder))
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.choice((1, 64, 4096))))
    return path.name


def noise(folder: Path, chance: Random) -> str:
    path = chance.choice(files_of(folder))
    path.write_bytes(chance.randbytes(path.stat().st_size))
    return path.name


def swap(folder: Path, chance: Random) -> str:
    """Swap two files, as a mistaken repair might."""
    one, other = chance.sample(files_of(folder), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.name} and {other.name}"


def remove(folder: Path, chance: Random) -> str:
    path = chance.choice([*files_of(folder), *folders_of(folder)])
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path.name


def reseal(folder: Path, chance: Random) -> str:
    """A file with a valid checksum over other content: of another version, or with values of undeclared types."""
    path = chance.choice(sorted((folder / "entries").iterdir()))
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    nothings: tuple[Any, ...] = ({}, [], [[]], {"a": 1}, "\ud800", "x" * 9, -1.5, [None] * 3)
    spot, wrong = body, chance.choice(nothings)
    while isinstance(spot, (dict, list)) and spot:
        at = chance.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
        if chance.random() < 0.4 or not isinstance(spot[at], (dict, list)) or not spot[at]:
            spot[at] = {"wrong": wrong}  # no declaration has such a field
            break
        spot = spot[at]
    with mock.patch.object(serialize, "SCHEMA", serialize.SCHEMA + chance.randrange(2)):
        path.write_bytes(serialize._with_checksum(path.stem, json.dumps(body).encode()))
    return path.name


def newer(folder: Path, chance: Random) -> str:
    path = chance.choice(sorted((folder / "entries").iterdir()))
    body = path.read_bytes().partition(b"\n")[2]
    head = {"schema": serialize.SCHEMA + chance.randrange(1, 9), "key": path.stem, "sha256": hashlib.sha256(body).hexdigest()}
    path.write_bytes(json.dumps(head).encode() + b"\n" + body)
    return path.name


def open_file(folder: Path, chance: Random) -> str:
    path = chance.choice(files_of(folder))
    path.chmod(0o600 | chance.choice((0o020, 0o002, 0o022, 0o066)))
    return path.name


def shut(folder: Path, chance: Random) -> str:
    """Remove permissions, which has no effect for root."""
    path = chance.choice([*files_of(folder), *folders_of(folder)])
    path.chmod(chance.choice((0o000, 0o200, 0o400, 0o100)))
    return path.name


def open_folder(folder: Path, chance: Random) -> str:
    path = chance.choice([folder.parent, *folders_of(folder)])
    path.chmod(0o700 | chance.choice((0o020, 0o002, 0o077)))
    return path.name


def link(folder: Path, chance: Random) -> str:
    """The same content behind a link."""
    path = chance.choice([*files_of(folder), *folders_of(folder)])
    elsewhere = folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return path.name


def replace_by(folder: Path, chance: Random) -> str:
    """Replace a file by something else."""
    path = chance.choice(files_of(folder))
    path.unlink()
    kind = chance.choice(("pipe", "folder", "full folder", "loop", "dangling", "socket", "device"))
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif "folder" in kind:
        path.mkdir()
        if kind == "full folder":
            (path / "x").write_text("")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, suppress(OSError):  # a path may be too long for one
            made.bind(str(path))
    else:
        path.symlink_to({"loop": path.name, "dangling": "nowhere", "device": "/dev/zero"}[kind])
    return f"{path.name}: {kind}"


def file_for_folder(folder: Path, chance: Random) -> str:
    path = chance.choice(folders_of(folder))
    shutil.rmtree(path)
    path.write_text("")
    return path.name


def drafts(folder: Path, chance: Random) -> str:
    """Leftovers of processes that died: partial files under other names."""
    for path in files_of(folder):
        if chance.random() < 0.5:
            path.with_name(f".{path.name}.{chance.randrange(9999)}.ab.tmp").write_bytes(path.read_bytes()[: chance.randrange(99)])
    return "drafts"


def planted(folder: Path, chance: Random) -> str:
    """A binary without a checksum, or with one made for another key."""
    place = chance.choice(sorted((folder / "triton").iterdir()))
    name = chance.choice([p.name for p in place.iterdir() if not p.name.endswith(CHECKSUM_SUFFIX)])
    if chance.random() < 0.5:
        (place / name).write_bytes(b"planted")
        (place / f"{name}{CHECKSUM_SUFFIX}").unlink()
    else:
        write_checksummed(folder / "triton" / "OTHER", name, b"planted")
        for end in ("", CHECKSUM_SUFFIX):
            os.replace(folder / "triton" / "OTHER" / f"{name}{end}", place / f"{name}{end}")
    return f"{place.name}/{name}"


Damage = Callable[[Path, Random], str]
DAMAGES: dict[str, Damage] = {
    f.__name__: f
    for f in (
        flip,
        cut,
        lengthen,
        noise,
        swap,
        remove,
        reseal,
        newer,
        open_file,
        shut,
        open_folder,
        link,
        replace_by,
        file_for_folder,
        drafts,
        planted,
    )
}


# ---- hooks: in force during use -------------------------------------------------------------------------------------------


@contextmanager
def hooked(before: Callable[[str], None]) -> Iterator[None]:
    """Call `before`, which may raise, before every system call and every write of files.py and cache.py."""
    real = {name: getattr(os, name) for name in CALLS}

    def hook(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            before(name)
            return real[name](*args, **more)

        return call

    class Os:
        """os, with hooks."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    wrapped = Os()
    for name in CALLS:
        setattr(wrapped, name, hook(name))
    with (
        mock.patch.object(files, "os", wrapped),
        mock.patch.object(cache, "os", wrapped),
        mock.patch.object(files, "open", _opener(before), create=True),
    ):
        yield


def _opener(before: Callable[[str], None]) -> Callable[..., Any]:
    """open() whose writes are cut in half where `before` raises."""

    def opener(handle: Any, mode: str, **more: Any) -> Any:
        file = builtins.open(handle, mode, **more)  # noqa: SIM115, the caller closes it
        if "w" not in mode:
            return file
        whole = file.write

        def write(content: bytes) -> int:
            try:
                before("write")
            except BaseException:
                whole(content[: len(content) // 2])
                file.flush()
                raise
            return whole(content)

        proxy = mock.MagicMock(wraps=file)
        proxy.__enter__.side_effect = lambda: proxy
        proxy.__exit__.side_effect = lambda *_: file.close()
        proxy.write = write
        return proxy

    return opener


def failing(chance: Random) -> tuple[str, Callable[[str], None]]:
    """One call fails, or all of a kind do."""
    number, name, at = chance.choice(NUMBERS), chance.choice((*CALLS, "write", "write", "open", "replace")), chance.randrange(12)
    persistent, seen = chance.random() < 0.4, [0]

    def before(called: str) -> None:
        if called == name and name != "close":
            seen[0] += 1
            if seen[0] == at + 1 or (persistent and seen[0] > at):
                raise OSError(number, os.strerror(number))

    return f"{errno.errorcode[number]} at {name} {at}{' and after' if persistent else ''}", before


def killing(chance: Random) -> tuple[str, Callable[[str], None]]:
    """From one call on, nothing has an effect, not even cleanup; but descriptors close, as they do when a process dies."""
    at, seen = chance.randrange(120), [0]

    def before(called: str) -> None:
        seen[0] += 1
        if seen[0] > at and called != "close":
            raise Killed

    return f"killed at call {at}", before


def swapping(folder: Path, chance: Random) -> tuple[str, Callable[[str], None]]:
    """The store, or a folder in it, is replaced by a link to elsewhere while it is used."""
    at, seen = chance.randrange(60), [0]
    path = chance.choice([p for p in folders_of(folder) if p.parent.name != "triton"])
    (folder.parent / "theirs").mkdir()

    def before(called: str) -> None:
        seen[0] += 1
        if seen[0] == at + 1:
            path.rename(folder.parent / "moved")
            path.symlink_to(folder.parent / "theirs")

    return f"{path.name} becomes a link at call {at}", before


# ---- other processes ------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], None]) -> int:
    """Run something in a forked child, which never returns."""
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            work()
        finally:
            os._exit(0)
    return child


def wait_for(children: list[int], kill_after: float | None = None) -> None:
    """Wait for children, or kill them."""
    if kill_after is not None:
        time.sleep(kill_after)
        for child in children:
            os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
