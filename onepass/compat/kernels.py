"""Private APIs of Triton, and CUDA driver queries."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .checksums import checksummed_cache_manager
from .uninterrupted import Once

Parsed = TypeVar("Parsed")
TRITON_PAIRS = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}


def triton_pair(torch_version: str) -> str | None:
    """The Triton release that a torch release is built and tested with; None if unknown."""
    return TRITON_PAIRS.get(".".join(torch_version.split(".")[:2]))


_import_triton = Once(lambda: importlib.import_module("triton"))


def triton(purpose: str) -> Any:
    """The triton package. TritonMissing names the release to install."""
    _import_triton()
    try:
        return importlib.import_module("triton")
    except ImportError:
        from ..errors import TritonMissing

        version = importlib.metadata.version("torch")
        pair = triton_pair(version)
        advice = f"pip install triton=={pair}" if pair else "pip install triton"
        raise TritonMissing(purpose=purpose, torch=version, advice=advice) from None


def triton_version() -> str:
    """The version of the imported triton package; empty if it cannot be imported."""
    try:
        return str(getattr(importlib.import_module("triton"), "__version__", ""))
    except ImportError:
        return ""


@dataclass(frozen=True)
class InterpreterParts:
    """The pieces of Triton's CPU interpreter that onepass's interpreter builds on."""

    language: Any  # triton.language
    runtime: Any  # triton.runtime.interpreter
    semantic: Any  # the class that turns language calls into builder calls
    jit_types: tuple[Any, ...]  # types that @triton.jit returns, interpreted or not


def triton_interpreter() -> InterpreterParts:
    """Triton's interpreter, whether or not triton was imported with TRITON_INTERPRET."""
    package = triton("interpret kernels on CPU tensors")
    runtime = importlib.import_module("triton.runtime.interpreter")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    kernel_interface = importlib.import_module("triton.runtime.jit").KernelInterface
    return InterpreterParts(package.language, runtime, semantic, (kernel_interface,))


def gluon_language(purpose: str) -> Any:
    """The module triton.experimental.gluon.language; its Hopper parts are under `.nvidia.hopper`."""
    return triton(purpose) and importlib.import_module("triton.experimental.gluon.language")


_GLUON = ("triton.experimental.gluon._runtime", "GluonASTSource")  # the source class of @gluon.jit functions


def triton_compile(function: Any, signature: dict[str, str], aligned: tuple[int, ...], target: int, options: dict[str, Any]) -> Any:
    """Compile one @triton.jit function for sm_`target`, with the pointers at positions `aligned` divisible by 16.

    TRITON_INSTRUMENTATION_MODE (such as Triton's concurrency sanitizer) applies here as it does when Triton launches.
    """
    package = triton("compile kernels")
    instrumented = package.knobs.compilation.instrumentation_mode
    options = {**options, "instrumentation_mode": instrumented} if instrumented else options
    if not hasattr(type(function), "cache_key"):  # on the class: the property of an instance parses, outside of retry_parse
        raise RuntimeError("TRITON_INTERPRET is set, so this process cannot compile kernels; unset it and start again")
    gpu_target = importlib.import_module("triton.backends.compiler").GPUTarget
    is_gluon = getattr(function, "is_gluon", bool)()
    if is_gluon:
        _keep_gluon_names()
    module, name = _GLUON if is_gluon else ("triton.compiler", "ASTSource")
    ast_source = getattr(importlib.import_module(module), name)
    source = ast_source(function, signature, {}, {(i,): [["tt.divisibility", 16]] for i in aligned})
    with _own_toolchain(target):
        return retry_parse(lambda: package.compile(source, target=gpu_target("cuda", target, 32), options=options))


@cache
def _keep_gluon_names() -> None:
    """Restore the names in Gluon that kernels use and that Triton 3.9 renamed without changing their meaning."""
    copies: Any = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper.tma")
    memory = importlib.import_module("triton.experimental.gluon.language._core").shared_memory_descriptor
    if hasattr(copies, "async_load"):  # since 3.8, where the old name is deprecated; in 3.9 it raises
        copies.async_copy_global_to_shared = copies.async_load
    if not hasattr(memory, "_reinterpret"):
        memory._reinterpret = memory.reinterpret


_PARSER_RACE = "AST constructor recursion depth mismatch"
_MAX_PARSES = 100


def retry_parse(parsing: Callable[[], Parsed]) -> Parsed:
    """Call `parsing`, which calls ast.parse, and retry it if a race between threads made it fail.

    Python 3.11 keeps one recursion depth for the parsers of all threads, and raises if another thread changed it (CPython issue
    106905). A lock cannot prevent that: other libraries parse too.
    """
    for _ in range(_MAX_PARSES - 1):
        try:
            return parsing()
        except Exception as error:
            if not _is_parser_race(error):
                raise
    return parsing()


def _is_parser_race(error: BaseException | None) -> bool:
    while error is not None and not (isinstance(error, SystemError) and _PARSER_RACE in str(error)):
        error = error.__cause__ or error.__context__  # Triton wraps errors raised inside a called function
    return error is not None


_SETTINGS_LOCK = threading.RLock()


@contextmanager
def triton_cache_folder(folder: str | None, on_lookup: Callable[[bool], None]) -> Iterator[None]:
    """Make Triton cache the kernels that this thread compiles in `folder` (None: Triton's default folder).

    `on_lookup` is called for every kernel this thread requests, with whether Triton's cache had it. Triton's settings are global
    to the process, so one thread compiles at a time; a kernel that another library compiles meanwhile may land in `folder`, which
    is harmless. Files in `folder` are verified before use (checksums.py), unless the user configured another cache manager.
    """
    knobs, thread = triton("compile kernels").knobs, threading.get_ident()
    with _SETTINGS_LOCK:
        listener, settings = knobs.compilation.listener, vars(knobs.cache)
        before = {name: settings[name] for name in ("dir", "manager_class") if name in settings}

        def listening(**event: Any) -> None:
            if threading.get_ident() == thread:
                on_lookup(bool(event.get("cache_hit")))
            if listener is not None:
                listener(**event)

        knobs.compilation.listener = listening
        if folder is not None:
            settings["dir"] = folder  # assigning the attribute would also change the environment, which other threads read
            if knobs.cache.manager_class is None:
                settings["manager_class"] = checksummed_cache_manager()
        try:
            yield
        finally:
            knobs.compilation.listener = listener
            for name in ("dir", "manager_class"):
                settings.pop(name, None)
            settings.update(before)


def touch_triton_cache(kernel: Any) -> None:
    """Update the access time of a compiled kernel's files, so that the cache sweep does not remove them."""
    for path in list(getattr(kernel, "metadata_group", {}).values())[:1]:
        with suppress(OSError):
            os.utime(os.path.dirname(path))


def triton_toolchain_key(target: int) -> str:
    """Cache key of everything besides a kernel's text that decides its binary for sm_`target`: ptxas and Triton's variables."""
    instrumented = triton("compile kernels").knobs.compilation.instrumentation_mode
    variables: Any = getattr(importlib.import_module("triton._C.libtriton"), "get_cache_invalidating_env_vars", dict)
    assembler = ptxas(target)
    return f"{assembler} {_version(assembler)} {target} {sorted(variables().items())} {instrumented}"


def ptxas(target: int) -> str:
    """The path of ptxas for sm_`target`: the one in Triton's wheel, or the user's, from TRITON_PTXAS_PATH.

    Inductor sets that variable to a ptxas in torch's wheel when it first compiles. That one is ignored: otherwise a kernel's
    binary and register count would depend on whether Inductor has compiled anything in this process yet.
    """
    named = str(importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(target).path)
    if not Path(named).is_relative_to(_torch_folder()):
        return named
    wheel = Path(triton("compile kernels").__file__).parent / "backends/nvidia/bin"
    own = wheel / ("ptxas-blackwell" if target >= 100 else "ptxas")
    return str(own) if own.exists() else named


@cache
def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found and found.origin, "torch is a dependency"
    return Path(found.origin).parent


@cache
def _version(assembler: str) -> str:
    return subprocess.check_output([assembler, "--version"], text=True)


def triton_toolchain(target: int) -> dict[str, Any]:
    """The tools this process compiles with for sm_`target`. A worker that uses them computes the same cache keys."""
    assembler = ptxas(target)
    return {
        "assembler": assembler,
        "version": _version(assembler),
        "libdevice": triton("compile kernels").knobs.nvidia.libdevice_path,
    }


def use_toolchain(assembler: str, version: str, libdevice: str | None) -> None:
    """Compile with these tools (from `triton_toolchain` of another process) from now on."""
    nvidia: Any = importlib.import_module("triton.backends.nvidia.compiler")
    nvidia.get_ptxas_version = lambda *_: version  # Triton caches its answer, and it is part of every kernel's key
    settings = {"ptxas": assembler, "ptxas_blackwell": assembler, "libdevice_path": libdevice}
    vars(triton("compile kernels").knobs.nvidia).update(settings)


@contextmanager
def _own_toolchain(target: int) -> Iterator[None]:
    """Compile with `triton_toolchain`, then restore Triton's settings: other kernels in this process may use other tools."""
    nvidia: Any = importlib.import_module("triton.backends.nvidia.compiler")
    with _SETTINGS_LOCK:
        settings = vars(triton("compile kernels").knobs.nvidia)
        before, version = dict(settings), nvidia.get_ptxas_version
        use_toolchain(**triton_toolchain(target))
        try:
            yield
        finally:
            for name in settings.keys() - before.keys():
                del settings[name]
            settings.update(before)
            nvidia.get_ptxas_version = version


def cuobjdump() -> str:
    """The path of cuobjdump in Triton's wheel."""
    return str(triton("read compiled kernels").knobs.nvidia.cuobjdump.path)


def triton_launcher(kernel: Any) -> Callable[..., None]:
    """Load a compiled kernel on the current CUDA device and return a launcher, called with (grid, stream, *args).

    Triton 3.6 to 3.9 share this signature: grid, stream, function, packed metadata, launch metadata and two hooks (only Triton's
    profiler needs these three), then the arguments. Pointers may be plain integers.
    """
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata

    def launch(grid: int, stream: int, *args: int) -> None:
        run(grid, 1, 1, stream, function, packed, None, None, None, *args)

    return launch


def compile_launcher_stub(kernel: Any) -> None:
    """Compile a kernel's C launcher into Triton's cache, so that loading the kernel does not wait for a C compiler.

    Triton 3.6 compiles one launcher per list of argument types; later releases have one for all. Failures are ignored (there may
    be no driver to link with): loading the kernel then compiles the launcher, or reports the error.
    """
    with suppress(Exception):
        driver = importlib.import_module("triton.backends.nvidia.driver")
        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(kernel.src, kernel.metadata)


def is_out_of_resources(error: Exception) -> bool:
    """Whether Triton reports that a compiled kernel needs more resources than the GPU has."""
    return isinstance(error, importlib.import_module("triton.runtime.errors").OutOfResources)


def triton_usage(kernel: Any) -> tuple[int, int, int]:
    """Registers per thread, bytes of local memory per thread, and bytes of shared memory per CTA of a loaded kernel."""
    return kernel.n_regs, 4 * kernel.n_spills, kernel.metadata.shared  # n_spills counts 32-bit words


def cuda_driver_level() -> str | None:
    """The newest CUDA version the installed driver supports ("13.0"), or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # torch's own API for this changed between releases
    except OSError:
        return None
    level = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(level)) != 0 or not level.value:
        return None
    return f"{level.value // 1000}.{level.value % 1000 // 10}"
