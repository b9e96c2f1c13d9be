"""Files and folders that nobody but this user and root can have changed, and files written whole.

The rule is that of OpenSSH's StrictModes: every folder from the root down belongs to this user or to root, and nobody else can
write to it. A folder everybody may write to, such as /tmp, will do above one of ours only if it is sticky, so that others cannot
rename what is ours. Symbolic links are followed only above the last folder, and only where nobody else can have put them.
Nothing is repaired: what was open to others may hold what they left there.

Folders are walked by descriptors, each opened relative to the one checked before it, so that nothing can be swapped in between.
Nothing is remembered between two walks. Compile workers import this module alone: it needs the standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40  # as the kernel has it
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC  # O_PATH: a folder that may only be passed through
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # O_NONBLOCK: a pipe must not hold us up
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafePath(OSError):
    """A file or folder that others could have changed, or that is no file or folder. Never reaches a user as it is."""

    def __init__(self, detail: str) -> None:
        super().__init__(errno.EPERM, detail)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A folder on the way down."""

    handle: int
    place: str
    sticky: bool  # everybody may write to it, but not rename what others put there


@contextmanager
def open_folder(folder: Path, *, own: int = 1, create: bool = False) -> Iterator[int]:
    """A descriptor of a folder that passes the rule, for openat and its kin.

    The last `own` parts of the path may not be links at all. `create` makes what is missing, with 0700.
    """
    with ExitStack() as handles:
        yield _walk(folder, own, create, handles)


def _walk(folder: Path, own: int, create: bool, handles: ExitStack) -> int:
    """From the root down; a link leads on from where it lies."""
    way = [_root(handles)]
    ahead = [*reversed((folder if folder.is_absolute() else Path.cwd() / folder).parts[1:])]
    links = 0
    while ahead:
        name = ahead.pop()
        if name == "..":
            del way[max(1, len(way) - 1):]
            continue
        handle, place = _step(way[-1], name, create), os.path.join(way[-1].place, name)
        handles.callback(os.close, handle)
        status = os.fstat(handle)
        if not stat.S_ISLNK(status.st_mode):
            way.append(_stage(handle, place, status))
            continue
        links += 1
        target = Path(_link(handle, place, status, way[-1], own=len(ahead) < own, links=links))
        if target.is_absolute():
            del way[1:]
        ahead += [part for part in reversed(target.parts) if part != target.anchor]
    if way[-1].sticky:
        raise UnsafePath(f"everybody can write to {way[-1].place}; name a folder of your own in it")
    return way[-1].handle


def _root(handles: ExitStack) -> _Stage:
    handle = os.open("/", _STEP | os.O_DIRECTORY)
    handles.callback(os.close, handle)
    return _stage(handle, "/", os.fstat(handle))


def _step(above: _Stage, name: str, create: bool) -> int:
    """Open what lies in a checked folder: itself, not what a link leads to."""
    try:
        return os.open(name, _STEP, dir_fd=above.handle)
    except FileNotFoundError:
        if not create:
            raise
    with suppress(FileExistsError):  # another process was first; whose it is, is checked like everything
        os.mkdir(name, PRIVATE_FOLDER, dir_fd=above.handle)
    return os.open(name, _STEP, dir_fd=above.handle)


def _stage(handle: int, place: str, status: os.stat_result) -> _Stage:
    """A folder on the way, if it passes the rule."""
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{place} is no folder")
    if status.st_uid not in _trusted():
        raise UnsafePath(f"{place} belongs to another user (uid {status.st_uid})")
    others = bool(status.st_mode & WRITABLE_BY_OTHERS)
    if others and not status.st_mode & stat.S_ISVTX:
        raise UnsafePath(f"others can write to {place} (mode {stat.S_IMODE(status.st_mode):o}); what they may have left there is not "
                      "used: remove it, or take their right away (chmod go-w) if you know that it holds nothing of theirs")
    return _Stage(handle, place, others)


def _link(handle: int, place: str, status: os.stat_result, above: _Stage, own: bool, links: int) -> str:
    """Where a link leads, if this user or root alone can have made it."""
    if own:
        raise UnsafePath(f"{place} is a symbolic link; name the folder it leads to")
    if above.sticky or status.st_uid not in _trusted():
        raise UnsafePath(f"{place} is a symbolic link that others can have made")
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return os.readlink("", dir_fd=handle)


def _trusted() -> tuple[int, int]:
    """Whose files are as good as one's own: root can change everything anyway."""
    return 0, os.geteuid()


# ---- in an open folder -----------------------------------------------------------------------------------------------------


def read(folder: int, name: str, most: int) -> bytes:
    """The bytes of a file in an open folder, if it is a plain file that nobody else can have written."""
    try:
        handle = os.open(name, _LOOK, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePath("it is a symbolic link") from None
        raise
    try:
        if trouble := _trouble(os.fstat(handle), most):
            raise UnsafePath(trouble)
        with open(handle, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(handle)


def _trouble(status: os.stat_result, most: int) -> str:
    """Why an open file cannot be used; empty where it can."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no plain file"
    if status.st_uid not in _trusted():
        return "it belongs to another user"
    if status.st_mode & WRITABLE_BY_OTHERS:
        return "others than its owner can write to it"
    return "it is far too long" if status.st_size > most else ""


def write(folder: int, name: str, content: bytes, mode: int = PRIVATE_FILE, sync: bool = False) -> None:
    """Write a file in an open folder so that it appears whole or not at all; a link of that name is replaced, not followed.

    After a power cut it may be there with less in it, unless `sync` waits for the disk.
    """
    draft = f".{name[:100]}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
    handle = os.open(draft, _MAKE, mode, dir_fd=folder)
    try:
        try:
            with open(handle, "wb", closefd=False) as file:
                file.write(content)
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


@contextmanager
def listable(folder: int) -> Iterator[int]:
    """The same folder, to be listed."""
    handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


# ---- where the user said ---------------------------------------------------------------------------------------------------


def write_user_file(path: Path, content: bytes, sync: bool = False) -> None:
    """Write a file where the user wants it, whole or not at all and for all that the umask lets read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write(folder, path.name, content, mode=0o666, sync=sync)
    finally:
        os.close(folder)


def read_user_file(path: Path, most: int) -> bytes:
    """The bytes of a plain file the user named; Refused where it is something else, or longer than `most`."""
    handle = os.open(path, _LOOK & ~os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePath("it is no plain file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise UnsafePath(f"it is longer than {most >> 20} MiB")
    return content


def slug(name: str, most: int = 100) -> str:
    """A name as that of a file, in no other folder: names that are not fit for one are told apart by a digest."""
    fit = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).lstrip(".-")[:most]
    if fit and fit == name:
        return fit
    return f"{fit or 'unnamed'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


class PrivateFolder:
    """A fresh folder of this process alone, which leaves with it."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends before its parent
        shutil.rmtree(folder, ignore_errors=True)
