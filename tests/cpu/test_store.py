"""The store: it returns what was stored, whatever happens to the disk, and its entries are never out of date."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import warnings
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import onepass
from onepass import compat, files
from onepass.capture.function.trace import capture
from onepass.compat import checksums, kernels
from onepass.device import device
from onepass.errors import BadSpec, OnepassWarning
from onepass.integration import engine
from onepass.integration.build import KernelKey, key_fields, store_key
from onepass.knobs import Knobs, Setting, knobs
from onepass.pipeline import compile, optimize
from onepass.plan.partition import plan
from onepass.plan.schedule import LoopedRows, Outer, Pointwise, ResidentRows, Ring, Schedule, SplitRows, StagedRows, WholeColumns
from onepass.plan.variant import Variant
from onepass.runtime import cache, offline
from onepass.runtime.counters import counts
from onepass.runtime.measured import Calibration
from onepass.runtime.serialize import SCHEMA, CorruptEntry, pack, unpack
from tests.support.artifacts import artifact_of
from tests.support.fixture_types import Anothers
from tests.support.function_cases import CASES
from tests.support.processes import run_python

H200 = device("h200")
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("rms_norm-w-backward", "layer_norm-wb", "softmax-last", "sum-both", "cross_entropy-mean")
KEY = "0" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate store for each test, and no kernels in memory."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "store"))
    engine.forget()
    return tmp_path / "store"


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))


def run_as_new_process() -> Any:
    """softmax of X in a process that finds only the store, and the work it had to do."""
    engine.forget()
    cache._opened.cache_clear()
    before = counts()
    return onepass.fuse(softmax)(X), counts() - before


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "entries").iterdir())


# ---- round trips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_field_round_trips(name: str) -> None:
    kept = artifact_of(name)
    assert unpack(KEY, pack(KEY, kept)) == kept
    assert kept.summary.kernels and kept.summary.floor_bytes and kept.summary.predicted_us and kept.sources


def test_the_output_of_the_compiler_round_trips() -> None:
    """Registers, and rejected plans: the first one is made to spill."""
    inputs = CASES["rms_norm-w-backward"].inputs(64, 1024, torch.bfloat16, "cpu")
    captured = capture(CASES["rms_norm-w-backward"].function, inputs)
    seen: list[str] = []

    def measure(source: Any) -> Any:
        seen.append(source.text)
        binary = offline.compile(source, H200)
        return replace(binary, spill_bytes=64, spills_in_loop=True) if source.text == seen[0] else binary

    kept = compile(plan(optimize(captured.program), captured.bind(inputs) or {}, H200), measure).artifact
    assert kept.rejected and kept.binaries and kept.binaries[0].loads
    back = unpack(KEY, pack(KEY, kept))
    assert back == kept and back.binaries[0].loads == kept.binaries[0].loads


def test_refused_merges_and_temporaries_round_trip() -> None:
    several = [artifact_of(name, 4096, 4096) for name in ("rms_norm-w-backward", "sum-both")]
    assert any(m.temporaries for m in several)
    assert all(unpack(KEY, pack(KEY, m)) == m for m in several)


# ---- damage ----------------------------------------------------------------------------------------------------------------


def test_a_change_of_any_byte_is_detected() -> None:
    content = pack(KEY, artifact_of("softmax-last"))
    for at in range(0, len(content), 7):
        for bit in (0, 5):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptEntry):
                unpack(KEY, bytes(flipped))
    for length in (0, 1, 50, len(content) // 2, len(content) - 1):
        with pytest.raises(CorruptEntry):
            unpack(KEY, content[:length])
    for other in (content + b" ", b"", b"{}", b"null\nnull"):
        with pytest.raises(CorruptEntry):
            unpack(KEY, other)
    with pytest.raises(CorruptEntry):
        unpack("1" * 64, content)


@pytest.mark.parametrize("body", [b"[]", b"{}", b"nothing", b"[" * 100_000, b'{"buffers": []}'])
def test_a_sealed_file_of_another_form_counts_as_damaged(body: bytes) -> None:
    from onepass.runtime import serialize

    with pytest.raises(CorruptEntry):
        unpack(KEY, serialize._with_checksum(KEY, body))


def test_records_with_the_same_fields_are_distinguished() -> None:
    for one in (
        ResidentRows(1, (64,), 2),
        WholeColumns((64,), 1, 2),
        Outer(2, 64, 1),
        Pointwise(2, 64, 1),
        SplitRows(1, 64, 2, 4),
        StagedRows((64,), 1, Ring(2, 3)),
        StagedRows((64,), 1),
    ):
        assert unpack(KEY, pack(KEY, one), Schedule) == one  # type: ignore[arg-type]
        with pytest.raises(CorruptEntry):
            unpack(KEY, pack(KEY, one), LoopedRows)


def test_values_must_be_of_their_declared_types() -> None:
    from onepass.runtime import serialize

    content = json.loads(pack(KEY, artifact_of("softmax-last")).partition(b"\n")[2])
    for path, wrong in (
        (("sources", 0, "warps"), True),
        (("sources", 0, "text"), 3),
        (("buffers", 0, "dtype"), "f99"),
        (("sources", 0, "params", 0, "kind"), "__class__"),
        (("summary", "floor_bytes"), "9"),
        (("summary", "sizes"), [["s0", 1, 2]]),
        (("buffers", 0, "shape"), {}),
        (("rejected",), None),
        (("summary", "unknown"), 1),
    ):
        changed = json.loads(json.dumps(content))
        at: Any = changed
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = wrong
        with pytest.raises(CorruptEntry):
            unpack(KEY, serialize._with_checksum(KEY, json.dumps(changed).encode()))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_another_key(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(path.stem.encode(), b"0" * 64))


def of_another_schema(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(f'"schema": {SCHEMA}'.encode(), b'"schema": 1'))


def a_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere.json"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def group_writable(path: Path) -> None:
    path.chmod(0o620)


def world_writable(path: Path) -> None:
    path.chmod(0o602)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize(
    "damage",
    [truncated, flipped, emptied, of_another_key, of_another_schema, a_link, group_writable, world_writable, a_pipe, a_folder],
    ids=lambda f: f.__name__,
)
def test_a_damaged_entry_is_set_aside_and_made_again(damage: Any, folder: Path) -> None:
    right, work = run_as_new_process()
    assert (work.plans, work.misses) == (1, 1)
    assert run_as_new_process()[1].hits == 1
    (path,) = entries(folder)
    damage(path)
    with pytest.warns(OnepassWarning, match="ONEPASS-502"):
        result, work = run_as_new_process()
    assert torch.equal(result, right) and (work.plans, work.hits, work.misses) == (1, 0, 1)
    assert [p.name.split(".")[0] for p in (folder / "quarantine").iterdir()] == [path.stem]
    result, work = run_as_new_process()
    assert torch.equal(result, right) and (work.plans, work.hits) == (0, 1)


def test_an_entry_of_another_user_is_not_used(folder: Path, anothers: Anothers) -> None:
    right, _ = run_as_new_process()
    anothers(entries(folder)[0])
    with pytest.warns(OnepassWarning, match=r"ONEPASS-502.*another user"):
        result, work = run_as_new_process()
    assert torch.equal(result, right) and work.plans == 1


def test_an_entry_that_cannot_be_opened_for_now_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files are not the fault of the file."""
    right, _ = run_as_new_process()

    def none_left(*_: Any) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(files, "read", none_left)
        result, work = run_as_new_process()
    assert torch.equal(result, right) and work.plans == 1
    assert run_as_new_process()[1].hits == 1 and not (folder / "quarantine").exists()


def test_a_folder_that_cannot_be_opened_for_now_is_used_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files are not the fault of the folder."""
    run_as_new_process()
    store = cache.store()

    def none_left(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(files, "open_folder", none_left)
        assert store is not None and store.load(KEY) is None
    assert cache.store() is store and run_as_new_process()[1].hits == 1


# ---- folders that cannot be used -------------------------------------------------------------------------------------------


def works_with_one_warning(match: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache._opened.cache_clear()
        for k in range(3):
            engine.forget()
            assert torch.equal(onepass.fuse(softmax)(X + k), onepass.fuse(softmax)(X + k))
            assert torch.allclose(onepass.fuse(lambda x: x.sum(-1))(X), X.sum(-1))
    coded = [str(w.message) for w in caught if issubclass(w.category, OnepassWarning)]
    assert len(coded) == 1 and "ONEPASS-501" in coded[0] and match in coded[0]


def test_a_folder_of_another_user_is_refused(folder: Path, anothers: Anothers) -> None:
    folder.mkdir()
    anothers(folder)
    works_with_one_warning("another user")
    assert cache.store() is None and not list(folder.iterdir())


@pytest.mark.parametrize("place", ["", "entries", "quarantine/..", ".."])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o777])
def test_a_folder_others_can_write_to_is_refused_and_not_changed(place: str, mode: int, folder: Path) -> None:
    """Someone who could write to it may have left something there, so removing the permission now would be too late."""
    for name in ("entries", "quarantine"):
        (folder / name).mkdir(parents=True)
    (folder / place).chmod(mode)
    before = sorted(p.relative_to(folder) for p in folder.rglob("*"))
    works_with_one_warning("others can write to")
    assert (folder / place).stat().st_mode & 0o777 == mode
    assert sorted(p.relative_to(folder) for p in folder.rglob("*")) == before


def test_a_link_in_place_of_the_store_or_a_folder_in_it_is_refused(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    works_with_one_warning("symbolic link")
    folder.unlink()
    folder.mkdir()
    for name in ("entries", "triton"):
        (folder / name).symlink_to(elsewhere)
    works_with_one_warning("symbolic link")
    store = cache.Store(folder)
    with pytest.warns(OnepassWarning, match="symbolic link"):
        assert store.kernels.stat().st_mode & 0o077 == 0 and not store.kernels.is_relative_to(folder)
    assert not list(elsewhere.iterdir())


def test_binaries_of_another_user_are_not_loaded(folder: Path, anothers: Anothers) -> None:
    (folder / "triton").mkdir(parents=True)
    anothers(folder / "triton")
    with pytest.warns(OnepassWarning, match=r"ONEPASS-501.*triton belongs to another user"):
        assert not cache.Store(folder).kernels.is_relative_to(folder)


def test_a_store_is_checked_at_every_use(folder: Path) -> None:
    """A store that was safe may have been opened to others, or replaced, since."""
    right, _ = run_as_new_process()
    store = cache.store()
    assert store is not None and store.kernels == folder / "triton"
    folder.chmod(0o777)
    with pytest.warns(OnepassWarning, match="ONEPASS-501") as caught:
        engine.forget()
        assert torch.equal(onepass.fuse(softmax)(X), right)
        assert not store.kernels.is_relative_to(folder) and not store.save_measurement(KEY, artifact_of("softmax-last"))
    assert len(caught) == 1 and cache.store() is None


def test_a_store_that_became_a_link_is_not_used(folder: Path) -> None:
    run_as_new_process()
    store = cache.store()
    assert store is not None
    folder.rename(folder.parent / "moved")
    folder.symlink_to(folder.parent / "moved")
    with pytest.warns(OnepassWarning, match="symbolic link"):
        assert store.load(entries(folder.parent / "moved")[0].stem) is None and not store.kernels.is_relative_to(folder)


def test_a_store_that_was_removed_is_created_again(folder: Path) -> None:
    run_as_new_process()
    store = cache.store()
    assert store is not None
    shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(KEY) is None
        store.save(KEY, artifact_of("softmax-last"))
        assert store.load(KEY) is not None and store.kernels.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_the_parent_folder_causes_one_warning(folder: Path) -> None:
    folder.parent.joinpath("file").write_text("")
    os.environ["ONEPASS_CACHE_DIR"] = str(folder.parent / "file" / "store")  # the fixture restores it
    works_with_one_warning("not a folder")
    os.environ["ONEPASS_CACHE_DIR"] = str(folder.parent / "file")
    works_with_one_warning("not a folder")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_cannot_be_written_causes_one_warning(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    opened = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and "dir_fd" in more:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    works_with_one_warning(os.strerror(number))
    assert not entries(folder)


def test_a_disk_that_fills_up_while_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    works_with_one_warning(os.strerror(errno.ENOSPC))
    assert not entries(folder)  # no draft remains


def test_a_warm_store_can_be_read_from_a_read_only_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = run_as_new_process()

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    folder.chmod(0o755)
    for name in ("utime", "chmod", "replace"):
        monkeypatch.setattr(os, name, refused)
    result, work = run_as_new_process()
    assert torch.equal(result, right) and (work.plans, work.hits) == (0, 1)


def test_binaries_go_elsewhere_where_the_store_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    store = cache.Store(folder)
    assert store.kernels == folder / "triton"
    monkeypatch.setattr(files, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    full = cache.Store(folder)
    with pytest.warns(OnepassWarning, match="ONEPASS-501"):
        assert full.kernels != folder / "triton" and full.kernels.is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full.save(KEY, artifact_of("softmax-last"))
        assert full.kernels.is_dir()


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_created_files_are_private_to_the_user(umask: int, folder: Path) -> None:
    before = os.umask(umask)
    try:
        run_as_new_process()
        store = cache.store()
        assert store is not None
        checksums.write_checksummed(store.kernels / "KEY", "f.cubin", b"1")
    finally:
        os.umask(before)
    found = {p.relative_to(folder).parts[0]: p.stat().st_mode & 0o777 for p in [folder, *folder.rglob("*")] if p != folder}
    assert {p.stat().st_mode & 0o777 for p in [folder, *folder.rglob("*")] if p.is_dir()} == {0o700}
    assert {p.stat().st_mode & 0o777 for p in folder.rglob("*") if p.is_file()} == {0o600} and {"entries", "triton"} <= set(found)


def test_the_store_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE", "0")
    assert run_as_new_process()[1].plans == run_as_new_process()[1].plans == 1
    assert not folder.exists()


def test_the_location_of_the_store() -> None:
    assert knobs({"ONEPASS_CACHE_DIR": "/somewhere"}).cache_dir == Path("/somewhere")
    from onepass.knobs import default_cache_folder

    assert default_cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/onepass")
    assert default_cache_folder({"XDG_CACHE_HOME": "caches"}) == default_cache_folder({})  # relative: ignored, as XDG requires
    with pytest.raises(BadSpec, match=r"ONEPASS_CACHE_DIR.*home"):
        knobs({"ONEPASS_CACHE_DIR": "~nobody-is-called-this/x"})
    assert knobs({"ONEPASS_KEEP_SOURCES": "/" + "x" * 5000}).keep_sources  # too long to check; writing reports it
    assert default_cache_folder({}).is_absolute() and knobs({}).cache


# ---- keys ------------------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_facts_versions_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.key({"a": 1})
    assert before == cache.key({"a": 1}) and before != cache.key({"a": 2})
    with monkeypatch.context() as patch:
        patch.setattr(cache, "versions", lambda: {"onepass": "other"})
        assert cache.key({"a": 1}) != before
    seen = set()
    for now in ("1", "2"):
        monkeypatch.setattr(cache, "describe", lambda now=now: (Setting("ONEPASS_EXAMPLE", now, "1", "", True),))
        seen.add(cache.key({"a": 1}))
    assert len(seen | {before}) == 3
    monkeypatch.setattr(cache, "describe", lambda: (Setting("ONEPASS_EXAMPLE", "3", "1", "", False),))
    assert cache.key({"a": 1}) == before


def test_no_environment_setting_changes_generated_code() -> None:
    """None does at present; one that did would be part of the keys."""
    assert not [k.name for k in fields(Knobs) if k.metadata["in_cache_key"]]


def test_every_part_of_a_variant_is_in_the_key() -> None:
    program = optimize(capture(softmax, (X,)).program)
    variant = Variant((), (("s0", 66),), frozenset({"x"}), H200)
    variants = [
        replace(variant, fixed=(("s1", 3),)),
        replace(variant, sizes=(("s0", 67),)),
        replace(variant, aligned=frozenset()),
        replace(variant, device=device("h100")),
        replace(variant, device=replace(H200, sms=131)),
        replace(variant, device=replace(H200, corrections=(("inner", 1.1),))),
    ]
    base = KernelKey(variant, False, False)
    others = [
        *(replace(base, variant=v) for v in variants),
        replace(base, wide=True),
        replace(base, interpreted=True),
        replace(base, tune="on"),
    ]
    assert {f.name for f in fields(Variant)} == {"fixed", "sizes", "aligned", "device"}
    assert {f.name for f in fields(KernelKey)} == {"variant", "wide", "interpreted", "tune"}
    keys = [cache.key(key_fields(program, k)) for k in (base, *others)]
    keys.append(cache.key(key_fields(replace(program, name="other"), base)))
    assert len(set(keys)) == len(keys)


def test_programs_with_the_same_name_have_different_keys() -> None:
    first, second = (optimize(capture(f, (X,)).program) for f in (softmax, lambda x: x.log_softmax(-1)))
    key = KernelKey(Variant((), (("s0", 66),), frozenset({"x"}), H200), False, True)
    assert store_key(first, key) != store_key(replace(second, name=first.name), key)


@pytest.mark.parametrize("part", ["onepass", "torch", "triton", "python"])
def test_every_version_is_in_the_key(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, versions = cache.key({}), cache.versions()
    assert versions[part]
    monkeypatch.setattr(cache, "versions", lambda: {**versions, part: "another"})
    assert cache.key({}) != before


def test_versions_are_those_of_the_imported_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if Triton was installed from a wheel of another name."""

    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    versions = cache.versions()
    assert versions["torch"] == str(torch.__version__)
    assert versions["python"] == ".".join(map(str, sys.version_info[:2]))
    monkeypatch.setattr(metadata, "version", none)
    assert cache._triton_version() == compat.triton_version() != ""


TOOLCHAIN = {
    "the assembler's path": ("ptxas", lambda target: "/elsewhere/ptxas"),
    "its version": ("_version", lambda assembler: "release 0.0"),
}


@pytest.mark.parametrize("what", [*TOOLCHAIN, "environment of Triton", "instrumentation"])
def test_the_toolchain_is_in_the_key_of_binaries(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = optimize(capture(softmax, (X,)).program)
    key = KernelKey(Variant((), (("s0", 66),), frozenset({"x"}), H200), False, False)
    before = store_key(program, key), store_key(program, replace(key, interpreted=True))
    if what in TOOLCHAIN:
        name, other = TOOLCHAIN[what]
        version = kernels._version(kernels.ptxas(90))
        monkeypatch.setattr(kernels, "_version", lambda assembler: version)
        monkeypatch.setattr(kernels, name, other)
    elif what == "instrumentation":
        monkeypatch.setitem(vars(compat.triton("test").knobs.compilation), "instrumentation_mode", "consan")
    else:
        monkeypatch.setattr("triton._C.libtriton.get_cache_invalidating_env_vars", lambda: {"TRITON_X": "1"})
    now = store_key(program, key), store_key(program, replace(key, interpreted=True))
    assert now[0] != before[0] and now[1] == before[1]


def test_a_key_is_a_full_digest() -> None:
    assert len(bytes.fromhex(cache.key({"a": 1}))) == 32


@pytest.mark.parametrize("name", ["plan/partition.py", "constants/h200.json"])
def test_the_key_depends_on_the_last_byte_of_every_source(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "onepass"
    shutil.copytree(ROOT / "onepass", copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = cache.sources_digest(copy)
    assert before == cache.sources_digest(copy)
    path = copy / name
    path.write_text(path.read_text() + "\n")
    changed = cache.sources_digest(copy)
    path.rename(path.with_stem("renamed"))
    assert len({before, changed, cache.sources_digest(copy)}) == 3


# ---- several processes and threads -----------------------------------------------------------------------------------------

PROCESS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, onepass
from onepass.integration.engine import counts
x = torch.arange(240.0).reshape(6, 40).sin()
y = onepass.fuse(lambda x: (x.softmax(-1), x.sum(0)))(x)
print(json.dumps({"plans": counts().plans, "hits": counts().hits, "bits": [t.tolist() for t in y]}))
"""


def process(package: Path = ROOT) -> dict[str, Any]:
    done = run_python(PROCESS, str(package))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_plans_nothing_unless_the_sources_changed(folder: Path, tmp_path: Path) -> None:
    first, second = process(), process()
    assert (first["plans"], first["hits"]) == (1, 0) and (second["plans"], second["hits"]) == (0, 1)
    assert first["bits"] == second["bits"]
    shutil.copytree(ROOT / "onepass", tmp_path / "onepass", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "onepass" / "plan" / "partition.py"
    changed.write_text(changed.read_text() + "# one more line\n")
    third = process(tmp_path)
    assert (third["plans"], third["hits"]) == (1, 0) and third["bits"] == first["bits"]


def test_writers_and_readers_at_once(folder: Path) -> None:
    folder.mkdir()
    store, kept = cache.Store(folder), [artifact_of(name) for name in NAMES]
    keys = [f"{k:064x}" for k in range(len(kept))]
    wrong: list[object] = []

    def work(seed: int) -> None:
        for turn in range(40):
            k = (seed + turn) % len(kept)
            (cache.Store(folder) if turn % 2 else store).save(keys[k], kept[k])
            found = store.load(keys[(k + seed) % len(kept)])
            if found is not None and found not in kept:
                wrong.append(found)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and [store.load(k) for k in keys] == kept
    assert [p.name for p in entries(folder)] == [f"{k}.json" for k in keys]


# ---- size ------------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_entry_is_removed_first(folder: Path) -> None:
    folder.mkdir()
    kept = artifact_of("softmax-last")
    size = len(pack(KEY, kept))
    store = cache.Store(folder, max_bytes=10 * size)
    keys = [f"{k:064x}" for k in range(12)]
    for age, key in enumerate(reversed(keys)):
        store.save(key, kept)
        os.utime(folder / "entries" / f"{key}.json", times=(0, 1e9 - 100 * age))
    assert store.load(keys[0]) is not None  # now the most recently used
    store.sweep()
    left = {p.stem for p in entries(folder)}
    assert keys[0] in left and 6 <= len(left) <= 8 and left == {keys[0], *keys[13 - len(left) :]}


def test_binaries_alone_can_exceed_the_limit(folder: Path) -> None:
    folder.mkdir()
    store = cache.Store(folder, max_bytes=1 << 20)
    store.save(KEY, artifact_of("softmax-last"))
    binary = store.kernels / "OLD"
    binary.mkdir()
    (binary / "kernel.cubin").write_bytes(bytes(2 << 20))
    os.utime(binary, times=(0, 0))
    store.sweep()
    assert not binary.exists() and entries(folder)


def test_a_process_that_writes_little_removes_old_entries_too(folder: Path) -> None:
    folder.mkdir()
    kept = artifact_of("softmax-last")
    cache.Store(folder).save("0" * 64, kept)
    os.utime(folder / "entries" / f"{'0' * 64}.json", times=(0, 0))
    cache.Store(folder, max_bytes=len(pack(KEY, kept))).save("1" * 64, kept)
    assert "0" * 64 not in {p.stem for p in entries(folder)}


def test_binaries_count_and_stale_drafts_are_removed(folder: Path) -> None:
    folder.mkdir()
    store = cache.Store(folder, max_bytes=10_000)
    store.save(KEY, artifact_of("softmax-last"))
    old, young = (store.kernels / name for name in ("OLD", "YOUNG"))
    for binary in (old, young):
        binary.mkdir()
        (binary / "kernel.cubin").write_bytes(bytes(20_000))
    drafts = [folder / place / ".abc.json.1.tmp" for place in ("entries", "triton", "triton/YOUNG", "cards")]
    assert store.save_measurement(KEY, Calibration(1.0, 2.0, 3.0, 4.0, 5.0, "2026-01-31"))
    for draft in drafts:
        draft.write_bytes(b"half")
        fresh = draft.with_name(".def.json.1.tmp")
        fresh.write_bytes(b"still being written")
        os.utime(draft, times=(0, 0))
    os.utime(old, times=(0, 0))
    os.utime(folder / "cards" / f"{KEY}.json", times=(0, 0))
    store.sweep()
    assert not old.exists() and young.exists() and not any(draft.exists() for draft in drafts)
    assert all(draft.with_name(".def.json.1.tmp").exists() for draft in drafts)
    assert store.load_measurement(KEY, Calibration) is not None, "what was measured on a card is kept, however old"


@pytest.mark.parametrize("call", ["open", "fsync", "close"])
def test_a_file_that_cannot_be_written_leaves_nothing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **more: Any) -> Any:
        if call == "close":
            os_close(*given)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    os_close, handles = os.close, len(os.listdir("/proc/self/fd"))
    (tmp_path / "it").write_bytes(b"old")
    with monkeypatch.context() as patch, files.open_folder(tmp_path) as folder:
        if call == "open":
            patch.setattr(files, "open", full, raising=False)
        elif call == "close":
            patch.setattr(files, "os", SimpleNamespace(**{**vars(os), "close": full}))
        else:
            patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="quota"):
            files.write(folder, "it", b"new", sync=True)
    assert [p.name for p in tmp_path.iterdir()] == ["it"] and (tmp_path / "it").read_bytes() == b"old"
    assert len(os.listdir("/proc/self/fd")) == handles
