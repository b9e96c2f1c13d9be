"""Safe file access: folders and files that only this user and root can have changed, and atomic writes.

The rule is that of OpenSSH's StrictModes: every folder from the root down belongs to this user or to root, and no one else can
write to it. A world-writable folder such as /tmp is allowed above our folder only if it is sticky, so that others cannot
rename our files. Symbolic links are followed only above the last folder, and only where no one else can have created them.
Permissions are never repaired: a folder that was open to others may already hold their files.

Each folder is opened relative to the descriptor of its parent, which was checked before, so that no folder can be swapped during
the walk. Nothing is cached between walks. Compile workers import this module by itself, so it needs only the standard library.
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
MAX_LINKS = 40  # symbolic links in one path; the Linux kernel has the same limit
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC  # O_PATH: works without read permission
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # O_NONBLOCK: do not block on a pipe
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafePath(OSError):
    """Raised for a path that others could have changed, or that is not a plain file or folder. Users see a coded error instead."""

    def __init__(self, detail: str) -> None:
        super().__init__(errno.EPERM, detail)


@dataclass(frozen=True, slots=True)
class _Folder:
    """An opened, checked folder on the path."""

    handle: int
    path: str
    sticky: bool  # world-writable, but users cannot rename each other's files


@contextmanager
def open_folder(folder: Path, *, own: int = 1, create: bool = False) -> Iterator[int]:
    """A descriptor of a folder that passes the ownership rule, for use as `dir_fd`.

    The last `own` parts of the path must not be symbolic links. `create` creates missing folders with mode 0700.
    """
    with ExitStack() as handles:
        yield _walk(folder, own, create, handles)


def _walk(folder: Path, own: int, create: bool, handles: ExitStack) -> int:
    """Open and check every folder from the root down. A relative link is resolved from the folder that holds it."""
    opened = [_root(handles)]
    remaining = [*reversed((folder if folder.is_absolute() else Path.cwd() / folder).parts[1:])]
    links = 0
    while remaining:
        name = remaining.pop()
        if name == "..":
            del opened[max(1, len(opened) - 1) :]
            continue
        handle, path = _open_entry(opened[-1], name, create), os.path.join(opened[-1].path, name)
        handles.callback(os.close, handle)
        status = os.fstat(handle)
        if not stat.S_ISLNK(status.st_mode):
            opened.append(_checked(handle, path, status))
            continue
        links += 1
        target = Path(_link_target(handle, path, status, opened[-1], own=len(remaining) < own, links=links))
        if target.is_absolute():
            del opened[1:]
        remaining += [part for part in reversed(target.parts) if part != target.anchor]
    if opened[-1].sticky:
        raise UnsafePath(f"everybody can write to {opened[-1].path}; use a folder of your own inside it")
    return opened[-1].handle


def _root(handles: ExitStack) -> _Folder:
    handle = os.open("/", _PATH_ONLY | os.O_DIRECTORY)
    handles.callback(os.close, handle)
    return _checked(handle, "/", os.fstat(handle))


def _open_entry(parent: _Folder, name: str, create: bool) -> int:
    """Open an entry of a checked folder, without following it if it is a link."""
    try:
        return os.open(name, _PATH_ONLY, dir_fd=parent.handle)
    except FileNotFoundError:
        if not create:
            raise
    with suppress(FileExistsError):  # another process created it first; the caller checks its owner
        os.mkdir(name, PRIVATE_FOLDER, dir_fd=parent.handle)
    return os.open(name, _PATH_ONLY, dir_fd=parent.handle)


def _checked(handle: int, path: str, status: os.stat_result) -> _Folder:
    """A folder on the path, if it passes the ownership rule."""
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder")
    if status.st_uid not in _trusted():
        raise UnsafePath(f"{path} belongs to another user (uid {status.st_uid})")
    others = bool(status.st_mode & WRITABLE_BY_OTHERS)
    if others and not status.st_mode & stat.S_ISVTX:
        raise UnsafePath(
            f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):o}), so its content is not trusted; "
            "delete it, or, if you know that it holds no files of others, remove their write permission (chmod go-w)"
        )
    return _Folder(handle, path, others)


def _link_target(handle: int, path: str, status: os.stat_result, parent: _Folder, own: bool, links: int) -> str:
    """The target of a link, if only this user or root can have created it."""
    if own:
        raise UnsafePath(f"{path} is a symbolic link; name the folder it points to")
    if parent.sticky or status.st_uid not in _trusted():
        raise UnsafePath(f"{path} is a symbolic link that others can have created")
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return os.readlink("", dir_fd=handle)


def _trusted() -> tuple[int, int]:
    """The owners whose files are trusted: this user, and root, who can change everything anyway."""
    return 0, os.geteuid()


# ---- in an open folder -----------------------------------------------------------------------------------------------------


def read(folder: int, name: str, most: int) -> bytes:
    """Read at most `most` bytes of a file in an open folder. UnsafePath unless it is a plain file that no one else can write."""
    try:
        handle = os.open(name, _READ_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePath("it is a symbolic link") from None
        raise
    try:
        if reason := _why_unsafe(os.fstat(handle), most):
            raise UnsafePath(reason)
        with open(handle, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(handle)


def _why_unsafe(status: os.stat_result, most: int) -> str:
    """Why an open file cannot be used; empty if it can."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a plain file"
    if status.st_uid not in _trusted():
        return "it belongs to another user"
    if status.st_mode & WRITABLE_BY_OTHERS:
        return "others can write to it"
    return "it is too long" if status.st_size > most else ""


def write(folder: int, name: str, content: bytes, mode: int = PRIVATE_FILE, sync: bool = False) -> None:
    """Write a file in an open folder atomically. A link of that name is replaced, not followed.

    `sync` waits for the disk; without it, the file may be truncated after a power failure.
    """
    draft = f".{name[:100]}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
    handle = os.open(draft, _CREATE_FLAGS, mode, dir_fd=folder)
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
    """A descriptor of an open folder that os.listdir accepts."""
    handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


# ---- files that the user names ---------------------------------------------------------------------------------------------


def write_user_file(path: Path, content: bytes, sync: bool = False) -> None:
    """Write a file at a path the user named, atomically, with the permissions of the umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write(folder, path.name, content, mode=0o666, sync=sync)
    finally:
        os.close(folder)


def read_user_file(path: Path, most: int) -> bytes:
    """Read a file at a path the user named. UnsafePath if it is not a plain file, or longer than `most` bytes."""
    handle = os.open(path, _READ_FLAGS & ~os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePath("it is not a plain file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise UnsafePath(f"it is longer than {most >> 20} MiB")
    return content


def slug(name: str, most: int = 100) -> str:
    """A safe file name for any text. A name that had to change gets a digest, so that different names stay different."""
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).lstrip(".-")[:most]
    if safe and safe == name:
        return safe
    return f"{safe or 'unnamed'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


class PrivateFolder:
    """A temporary folder of this process, deleted when the process exits."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child: the parent still uses the folder
        shutil.rmtree(folder, ignore_errors=True)
