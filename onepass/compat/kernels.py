"""What onepass needs of Triton and of the CUDA driver."""

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
    """The Triton release a torch release is built and tested with, where known."""
    return TRITON_PAIRS.get(".".join(torch_version.split(".")[:2]))


_whole_triton = Once(lambda: importlib.import_module("triton"))


def triton(purpose: str) -> Any:
    """The triton package, or an error that names the release to install."""
    _whole_triton()
    try:
        return importlib.import_module("triton")
    except ImportError:
        from ..errors import TritonMissing

        version = importlib.metadata.version("torch")
        pair = triton_pair(version)
        advice = f"pip install triton=={pair}" if pair else "pip install triton"
        raise TritonMissing(purpose=purpose, torch=version, advice=advice) from None


def triton_version() -> str:
    """The release of the triton package that is imported; empty where there is none."""
    try:
        return str(getattr(importlib.import_module("triton"), "__version__", ""))
    except ImportError:
        return ""


@dataclass(frozen=True)
class InterpreterParts:
    """The pieces of Triton's CPU interpreter that ours is built from."""

    language: Any  # triton.language
    runtime: Any  # triton.runtime.interpreter
    semantic: Any  # the class that turns language calls into builder calls
    jit_types: tuple[Any, ...]  # what @triton.jit returns, interpreted or not


def triton_interpreter() -> InterpreterParts:
    """Triton's interpreter, whichever way triton itself was imported."""
    package = triton("interpret kernels on CPU tensors")
    runtime = importlib.import_module("triton.runtime.interpreter")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    kernel_interface = importlib.import_module("triton.runtime.jit").KernelInterface
    return InterpreterParts(package.language, runtime, semantic, (kernel_interface,))


def gluon_language(purpose: str) -> Any:
    """triton.experimental.gluon.language, with what it has for Hopper under `.nvidia.hopper`."""
    return triton(purpose) and importlib.import_module("triton.experimental.gluon.language")


_GLUON = ("triton.experimental.gluon._runtime", "GluonASTSource")  # what a @gluon.jit function is compiled through


def triton_compile(function: Any, signature: dict[str, str], aligned: tuple[int, ...], target: int,
                   options: dict[str, Any]) -> Any:
    """Compile one @triton.jit function for sm_`target`, with pointers at `aligned` positions divisible by 16.

    What TRITON_INSTRUMENTATION_MODE asks for, such as Triton's concurrency sanitizer, is done here as where Triton launches.
    """
    package = triton("compile kernels")
    instrumented = package.knobs.compilation.instrumentation_mode
    options = {**options, "instrumentation_mode": instrumented} if instrumented else options
    if not hasattr(function, "cache_key"):
        raise RuntimeError("TRITON_INTERPRET is set, so this process cannot compile kernels; unset it and start again")
    gpu_target = importlib.import_module("triton.backends.compiler").GPUTarget
    module, name = _GLUON if getattr(function, "is_gluon", bool)() else ("triton.compiler", "ASTSource")
    ast_source = getattr(importlib.import_module(module), name)
    source = ast_source(function, signature, {}, {(i,): [["tt.divisibility", 16]] for i in aligned})
    with _tools_of_ours(target):
        return retry_parse(lambda: package.compile(source, target=gpu_target("cuda", target, 32), options=options))


_DISTURBED = "AST constructor recursion depth mismatch"
_TRIES = 100


def retry_parse(parsing: Callable[[], Parsed]) -> Parsed:
    """The result of what calls ast.parse. Called again where another thread that parses made it fail.

    Python 3.11 counts how deep the trees of all threads are in one number, and raises where that has changed meanwhile (CPython
    issue 106905). A lock would not do: other libraries parse too.
    """
    for _ in range(_TRIES - 1):
        try:
            return parsing()
        except Exception as error:
            if not _is_disturbance(error):
                raise
    return parsing()


def _is_disturbance(error: BaseException | None) -> bool:
    while error is not None and not (isinstance(error, SystemError) and _DISTURBED in str(error)):
        error = error.__cause__ or error.__context__  # Triton wraps what befalls it within a called function
    return error is not None


_TRITON_FILES = threading.RLock()


@contextmanager
def triton_cache_folder(folder: str | None, heard: Callable[[bool], None]) -> Iterator[None]:
    """Let Triton keep what this thread compiles in `folder` (None: where it always does).

    `heard` is told of every kernel this thread asks for, whether Triton's cache had it. Triton's settings are the process's,
    so one thread compiles at a time; a kernel another library compiles meanwhile may land in `folder`, which does no harm.
    Files in `folder` are checked before they are used (sealed.py), unless the user has a cache manager of their own.
    """
    knobs, thread = triton("compile kernels").knobs, threading.get_ident()
    with _TRITON_FILES:
        listener, settings = knobs.compilation.listener, vars(knobs.cache)
        before = {name: settings[name] for name in ("dir", "manager_class") if name in settings}

        def listening(**event: Any) -> None:
            if threading.get_ident() == thread:
                heard(bool(event.get("cache_hit")))
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
    """Mark the files of a compiled kernel as used just now, for whoever removes old ones."""
    for path in list(getattr(kernel, "metadata_group", {}).values())[:1]:
        with suppress(OSError):
            os.utime(os.path.dirname(path))


def triton_toolchain_key(target: int) -> str:
    """What beside a kernel's text decides its binary for sm_`target`: the assembler, and variables that Triton heeds."""
    instrumented = triton("compile kernels").knobs.compilation.instrumentation_mode
    heeded: Any = getattr(importlib.import_module("triton._C.libtriton"), "get_cache_invalidating_env_vars", dict)
    assembler = ptxas(target)
    return f"{assembler} {_version(assembler)} {target} {sorted(heeded().items())} {instrumented}"


def ptxas(target: int) -> str:
    """The path of the assembler for sm_`target`: the one Triton brings along, or the user's, named by TRITON_PTXAS_PATH.

    Inductor sets that variable when it first compiles, to an assembler in torch's wheel. That one is passed over: with it, the
    same kernel would be another one, of other registers, before and after something else in the process was compiled.
    """
    named = str(importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(target).path)
    if not Path(named).is_relative_to(_torch_folder()):
        return named
    brought = Path(triton("compile kernels").__file__).parent / "backends/nvidia/bin"
    own = brought / ("ptxas-blackwell" if target >= 100 else "ptxas")
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
    """What this process compiles with for sm_`target`. A worker given this files its kernels where this process looks for them."""
    assembler = ptxas(target)
    return {"assembler": assembler, "version": _version(assembler),
            "libdevice": triton("compile kernels").knobs.nvidia.libdevice_path}


def use_toolchain(assembler: str, version: str, libdevice: str | None) -> None:
    """Compile as a process does whose tools these are, from now on."""
    nvidia: Any = importlib.import_module("triton.backends.nvidia.compiler")
    nvidia.get_ptxas_version = lambda *_: version  # Triton asks once, and a part of every kernel's key would be out of date
    settings = {"ptxas": assembler, "ptxas_blackwell": assembler, "libdevice_path": libdevice}
    vars(triton("compile kernels").knobs.nvidia).update(settings)


@contextmanager
def _tools_of_ours(target: int) -> Iterator[None]:
    """Compile with `triton_tools`; leave Triton's settings as they were: other kernels of the process have tools of their own."""
    nvidia: Any = importlib.import_module("triton.backends.nvidia.compiler")
    with _TRITON_FILES:
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
    """The path of the cubin reader in Triton's wheel."""
    return str(triton("read compiled kernels").knobs.nvidia.cuobjdump.path)


def triton_launcher(kernel: Any) -> Callable[..., None]:
    """Load a compiled kernel on the current CUDA device; the result is called with (grid, stream, *args).

    Triton 3.6 to 3.9 share this call: grid, stream, function and packed metadata, then launch metadata and two hooks, which
    only profilers of Triton need, then the arguments. Pointers may be plain integers.
    """
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata

    def launch(grid: int, stream: int, *args: int) -> None:
        run(grid, 1, 1, stream, function, packed, None, None, None, *args)

    return launch


def compile_launcher_stub(kernel: Any) -> None:
    """Have the C function that launches a compiled kernel in Triton's cache, so that loading it need not wait for a C compiler.

    Triton 3.6 compiles one for every list of argument types; later ones have one for all. It may fail, as it does without a driver
    to link with: then whoever loads the kernel has it compiled, or tells.
    """
    with suppress(Exception):
        driver = importlib.import_module("triton.backends.nvidia.driver")
        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(kernel.src, kernel.metadata)


def is_out_of_resources(error: Exception) -> bool:
    """Did a compiled kernel ask for more than the card has?"""
    return isinstance(error, importlib.import_module("triton.runtime.errors").OutOfResources)


def triton_usage(kernel: Any) -> tuple[int, int, int]:
    """Registers a thread, bytes of local memory a thread and bytes of shared memory of a loaded kernel."""
    return kernel.n_regs, 4 * kernel.n_spills, kernel.metadata.shared  # n_spills counts 32-bit words


def cuda_driver_level() -> str | None:
    """The newest CUDA version the installed driver supports ("13.0"), or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # torch has asked the driver this in several places over the years
    except OSError:
        return None
    level = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(level)) != 0 or not level.value:
        return None
    return f"{level.value // 1000}.{level.value % 1000 // 10}"
