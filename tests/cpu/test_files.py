"""Files that other users must not have touched: which folders are refused, which files are read, and that writes are atomic."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from onepass import compat, files
from onepass.compat import checksums
from onepass.errors import EntryQuarantined, OnepassWarning, printable, text_of, warn
from tests.support.fixture_types import Anothers


def is_accepted(folder: Path) -> bool:
    try:
        with files.open_folder(folder) as handle:
            status = os.fstat(handle)
        assert (status.st_dev, status.st_ino) == (folder.stat().st_dev, folder.stat().st_ino)
        return True
    except files.UnsafePath:
        return False


def make_folders(*folders: Path, mode: int = 0o700) -> Path:
    for folder in folders:
        folder.mkdir()
        folder.chmod(mode)
    return folders[-1]


# ---- folders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "fine"),
    [
        (0o700, True),
        (0o755, True),
        (0o711, True),
        (0o500, True),
        (0o775, False),
        (0o757, False),
        (0o720, False),
        (0o702, False),
        (0o1777, False),
        (0o1775, False),
    ],
)
def test_write_permissions_on_the_folder_itself(mode: int, fine: bool, tmp_path: Path) -> None:
    assert is_accepted(make_folders(tmp_path / "it", mode=mode)) is fine


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o755, True), (0o300, True), (0o775, False), (0o757, False), (0o777, False), (0o1777, True), (0o1775, True)]
)
def test_write_permissions_on_a_parent_folder(mode: int, fine: bool, tmp_path: Path) -> None:
    """In a sticky folder other users can create files, but not remove ours."""
    above = make_folders(tmp_path / "above")
    deep = make_folders(above / "a", above / "a" / "b")
    above.chmod(mode)
    assert is_accepted(deep) is fine


@pytest.mark.parametrize("level", ["a", "a/b", "a/b/c"])
def test_a_parent_folder_of_another_user_is_refused(level: str, tmp_path: Path, anothers: Anothers) -> None:
    deep = make_folders(tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c")
    assert is_accepted(deep)
    anothers(tmp_path / level)
    assert not is_accepted(deep)


def test_folders_of_root_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_accepted(Path("/usr")) and is_accepted(Path("/"))
    monkeypatch.setattr(files, "_trusted", lambda: (54321,))
    assert not is_accepted(Path("/usr")) and not is_accepted(tmp_path)


def test_links_among_the_parents_are_followed_if_no_other_user_can_have_made_them(tmp_path: Path, anothers: Anothers) -> None:
    deep = make_folders(tmp_path / "real", tmp_path / "real" / "it")
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute/../real")
    ways = [tmp_path / "absolute" / "it", tmp_path / "relative" / "it", tmp_path / "relative" / "it" / ".." / "it"]
    assert all(map(is_accepted, ways))
    anothers(tmp_path / "absolute")
    assert is_accepted(deep) and not any(map(is_accepted, ways))


def test_the_folder_is_not_a_link_and_no_link_lies_in_a_sticky_folder(tmp_path: Path) -> None:
    sticky, real = make_folders(tmp_path / "sticky"), make_folders(tmp_path / "real", tmp_path / "real" / "it")
    (sticky / "link").symlink_to(tmp_path / "real")
    assert is_accepted(sticky / "link" / "it")
    sticky.chmod(0o1777)
    assert not is_accepted(sticky / "link" / "it")
    (tmp_path / "last").symlink_to(real)
    assert not is_accepted(tmp_path / "last")


def test_no_link_among_the_components_that_belong_to_the_store(tmp_path: Path) -> None:
    """Not even a link of this user: the files of a store lie in the folder that was named."""
    make_folders(tmp_path / "real", tmp_path / "real" / "it", tmp_path / "real" / "it" / "deep")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for own, fine in ((1, True), (2, True), (3, False)):
        folder = tmp_path / "link" / "it" / "deep"
        expected = contextlib.nullcontext() if fine else pytest.raises(files.UnsafePath, match="symbolic link")
        with expected, files.open_folder(folder, own=own):
            pass


def test_a_link_to_a_folder_others_can_write_to_is_refused(tmp_path: Path) -> None:
    make_folders(tmp_path / "open", tmp_path / "open" / "it")
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert is_accepted(tmp_path / "link" / "it")
    (tmp_path / "open").chmod(0o777)
    assert not is_accepted(tmp_path / "link" / "it")


def test_cyclic_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        is_accepted(tmp_path / "a" / "it")


def test_missing_folders_are_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with files.open_folder(tmp_path / "a" / "b", create=True):
            pass
        sticky = make_folders(tmp_path / "sticky", mode=0o1777)
        with files.open_folder(sticky / "mine", create=True):
            pass
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a", tmp_path / "a" / "b", sticky / "mine")} == {0o700}
    with pytest.raises(FileNotFoundError):
        is_accepted(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for below in ("file", "file/below"):
        with pytest.raises(NotADirectoryError), files.open_folder(tmp_path / below, create=True):
            pass


def test_a_relative_folder_is_checked_from_the_root_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = make_folders(tmp_path / "above", tmp_path / "above" / "here")
    monkeypatch.chdir(here)
    assert is_accepted(Path()) and is_accepted(Path("../here"))
    (tmp_path / "above").chmod(0o777)
    assert not is_accepted(Path())


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for folder in (tmp_path, tmp_path / "link", tmp_path / "a", Path("/proc/1/nothing")):
        with pytest.MonkeyPatch.context(), warnings.catch_warnings():
            try:
                with files.open_folder(folder) as handle, files.listable(handle):
                    files.write(handle, "x", b"")
                    files.read(handle, "y", 1)
            except OSError:
                pass
    assert len(os.listdir("/proc/self/fd")) == before


# ---- files in them ---------------------------------------------------------------------------------------------------------


def read(path: Path, most: int = 100) -> bytes:
    with files.open_folder(path.parent) as handle:
        return files.read(handle, path.name, most)


def test_only_plain_files_of_this_user_are_read(tmp_path: Path, anothers: Anothers) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    path.chmod(0o644)
    assert read(path) == b"content"
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other, message in (("link", "symbolic link"), ("folder", "not a plain file"), ("pipe", "not a plain file")):
        with pytest.raises(files.UnsafePath, match=message):
            read(tmp_path / other)
    with pytest.raises(files.UnsafePath, match="too long"):
        read(path, 3)
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        with pytest.raises(files.UnsafePath, match="others"):
            read(path)
    path.chmod(0o600)
    anothers(path)
    with pytest.raises(files.UnsafePath, match="another user"):
        read(path)


def test_a_written_file_replaces_a_link_and_follows_none(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    with files.open_folder(tmp_path) as handle:
        files.write(handle, "link", b"new")
    assert victim.read_text() == "precious" and link.read_text() == "new" and not link.is_symlink()
    assert stat.S_IMODE(link.stat().st_mode) == 0o600


@pytest.mark.parametrize("fails", ["open", "write", "replace", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_what_was_there(fails: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    class Full:
        def __init__(self, handle: int, mode: str, closefd: bool) -> None:
            self.file = open(handle, mode, closefd=closefd)  # noqa: SIM115
            self.write = failing

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    with files.open_folder(tmp_path) as handle, monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        if fails == "write":
            patch.setattr(files, "open", Full, raising=False)
        else:
            patch.setattr(os, fails, failing)
        files.write(handle, "f", b"new", sync=True)
    assert (tmp_path / "f").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_files_for_the_user_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_user_file(tmp_path / "new" / "f", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "f").stat().st_mode) == 0o640


def test_user_files_must_be_plain_and_small(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert files.read_user_file(tmp_path / "link", 5) == b"12345"
    for path, most in ((tmp_path / "pipe", 9), (Path("/dev/zero"), 9), (tmp_path / "f", 4), (tmp_path, 9), (tmp_path / "none", 9)):
        with pytest.raises(OSError):
            files.read_user_file(path, most)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/b", ".hidden", "..", "", "a\0b", "a\nb", "\ud800", "w" * 400, "-rf", "é"]
)
def test_names_are_turned_into_valid_file_names(name: str, tmp_path: Path) -> None:
    fit = files.slug(name)
    path = tmp_path / fit
    assert fit and path.parent == tmp_path and fit.isascii() and len(fit) <= 110 and not fit.startswith((".", "-"))
    path.write_text("")
    assert fit != files.slug(name + "?")
    assert files.slug("gbps-by-width-rms_norm_backward-bf16") == "gbps-by-width-rms_norm_backward-bf16"


def test_a_private_folder_survives_a_fork_and_is_removed_with_its_owner() -> None:
    private = files.PrivateFolder("onepass-test-")
    path = private.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files._remove(path, os.getpid() + 1)
    assert path.is_dir()
    del private
    assert not path.exists()


# ---- Triton's files --------------------------------------------------------------------------------------------------------


def test_a_sealed_file_is_used_as_it_was_written_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "KEY"
    checksums.write_checksummed(folder, "f.cubin", b"binary")
    assert checksums.read_checksummed(folder, "f.cubin") == b"binary"
    for damage in (b"binarx", b"bin", b"", b"binary "):
        (folder / "f.cubin").write_bytes(damage)
        with pytest.warns(OnepassWarning, match=r"ONEPASS-502.*KEY/f\.cubin"):
            assert checksums.read_checksummed(folder, "f.cubin") is None
    checksums.write_checksummed(folder, "f.cubin", b"again")
    assert checksums.read_checksummed(folder, "f.cubin") == b"again"
    for other in (tmp_path / "OTHER" / "f.cubin", folder / "g.cubin"):  # a checksum is valid only in its place
        checksums.write_checksummed(other.parent, other.name, b"again")
        for end in ("", checksums.CHECKSUM_SUFFIX):
            os.replace(folder / f"f.cubin{end}", other.with_name(other.name + end))
        with pytest.warns(OnepassWarning, match="checksum does not match"):
            assert checksums.read_checksummed(other.parent, other.name) is None
        checksums.write_checksummed(folder, "f.cubin", b"again")
    (folder / f"f.cubin{checksums.CHECKSUM_SUFFIX}").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checksums.read_checksummed(folder, "f.cubin") is None and checksums.read_checksummed(folder, "none") is None


def test_sealed_files_behind_a_link_are_refused(tmp_path: Path) -> None:
    make_folders(tmp_path / "store", tmp_path / "moved")
    checksums.write_checksummed(
        tmp_path / "moved" / "KEY", "f.cubin", b"1"
    )  # the folder of Triton's files, before it became a link
    (tmp_path / "store" / "triton").symlink_to(tmp_path / "moved")
    with pytest.warns(OnepassWarning, match="symbolic link"):
        assert checksums.read_checksummed(tmp_path / "store" / "triton" / "KEY", "f.cubin") is None
    with pytest.raises(files.UnsafePath, match="symbolic link"):
        checksums.write_checksummed(tmp_path / "store" / "triton" / "KEY", "f.cubin", b"2")
    checksums.write_checksummed(tmp_path / "moved" / "triton" / "KEY", "f.cubin", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "moved")  # the whole store
    with pytest.warns(OnepassWarning, match="symbolic link"):
        assert checksums.read_checksummed(tmp_path / "link" / "triton" / "KEY", "f.cubin") is None
    with pytest.raises(files.UnsafePath, match="symbolic link"):
        checksums.write_checksummed(tmp_path / "link" / "triton" / "KEY", "f.cubin", b"2")


def test_shared_objects_of_other_users_are_not_given_to_triton(tmp_path: Path, anothers: Anothers) -> None:
    with compat.triton_cache_folder(str(tmp_path), lambda hit: None):
        manager = compat.triton("test").knobs.cache.manager_class("KEY")
    (tmp_path / "KEY").mkdir(mode=0o700)
    (tmp_path / "KEY" / "launcher.so").write_bytes(b"planted")
    assert manager.get_file("launcher.so") is None
    path = Path(manager.put(b"mine", "launcher.so"))
    assert path.read_bytes() == b"mine" and manager.get_file("launcher.so") == str(path) and path.parent == tmp_path / "KEY"
    anothers(tmp_path / "KEY")
    with pytest.warns(OnepassWarning, match="another user"):
        assert manager.get_file("launcher.so") is None
    apart = Path(manager.put(b"mine", "launcher.so"))
    assert apart.read_bytes() == b"mine" and not apart.is_relative_to(tmp_path) and apart.parent.stat().st_mode & 0o077 == 0


def test_a_group_of_files_is_complete_or_absent(tmp_path: Path) -> None:
    with compat.triton_cache_folder(str(tmp_path), lambda hit: None):
        manager = compat.triton("test").knobs.cache.manager_class("KEY")
    names = ("k.json", "k.cubin")
    group = {name: manager.put(b"1", name) for name in names}
    manager.put_group("k.json", group)
    assert manager.get_group("k.json") == group
    manager.put_group("k.json", {**group, "../../other": "/etc/passwd"})
    assert manager.get_group("k.json") == group
    (tmp_path / "KEY" / "k.cubin").unlink()
    assert manager.get_group("k.json") is None and manager.get_group("other.json") is None
    for content in (b"[]", b"3", b"{", b'{"child_paths": 3}', b'{"child_paths": {}}'):
        checksums.write_checksummed(tmp_path / "KEY", "__grp__k.json", content)
        assert manager.get_group("k.json") is None


def test_triton_gets_its_files_despite_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with compat.triton_cache_folder(str(tmp_path), lambda hit: None):
        manager = compat.triton("test").knobs.cache.manager_class("KEY")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(checksums, "write_checksummed", full)
    assert Path(manager.put("text", "k.ptx")).read_text() == "text" and not (tmp_path / "KEY").exists()


def test_dump_folders_of_triton_are_not_redirected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = compat.triton("test").knobs
    monkeypatch.setitem(vars(knobs.cache), "dump_dir", str(tmp_path / "dump"))
    with compat.triton_cache_folder(str(tmp_path / "store"), lambda hit: None):
        knobs.cache.manager_class("KEY", dump=True).put("ir", "k.ttir")
    assert [p.name for p in (tmp_path / "dump" / "KEY").iterdir()] == ["k.ttir"]


def test_cache_hits_of_other_threads_are_ignored(tmp_path: Path) -> None:
    hits: list[bool] = []
    with compat.triton_cache_folder(str(tmp_path), hits.append):
        listener: Any = compat.triton("test").knobs.compilation.listener
        listener(cache_hit=True)
        thread = threading.Thread(target=listener, kwargs={"cache_hit": False})
        thread.start()
        thread.join()
    assert hits == [True]


def test_a_cache_manager_set_by_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = compat.triton("test").knobs
    monkeypatch.setitem(vars(knobs.cache), "manager_class", dict)
    with compat.triton_cache_folder(str(tmp_path), lambda hit: None):
        assert knobs.cache.manager_class is dict
    assert knobs.cache.manager_class is dict


# ---- messages --------------------------------------------------------------------------------------------------------------


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("str fails")


def test_unprintable_text_is_printed_escaped() -> None:
    assert text_of(ValueError("x")) == "x" and text_of(Silent())
    assert printable("plain µ × 日本") == "plain µ × 日本"
    for text in ("\x1b[31m", "\x9b31m", "\x07", "a\nb", "\ud800", "\u202e", "\u2028", "\x00", "\x7f"):
        assert printable(text).isprintable() and printable(text).isascii()


def test_a_warning_that_cannot_be_shown_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range")

    happened = EntryQuarantined(entry="\x1b[31m\ud800", folder="/x", detail="é")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", broken)
        warn(happened)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(happened)
    assert "\x1b" not in str(caught[0].message) and caught[0].filename == __file__
    with warnings.catch_warnings(), pytest.raises(OnepassWarning):
        warnings.simplefilter("error")
        warn(happened)
