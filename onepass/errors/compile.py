"""Errors of code generation and compilation: ONEPASS-301 to 305 and 330 to 335."""

from __future__ import annotations

from .base import OnepassError


class CompileFailed(OnepassError):
    code = "ONEPASS-301"
    message = "Compiling kernel {kernel} for {device} failed: {detail}"


class DoesNotFit(CompileFailed):
    code = "ONEPASS-304"


class TritonMissing(OnepassError):
    code = "ONEPASS-302"
    message = (
        "Triton is not installed, but onepass needs it to {purpose}. Install the release that pairs with torch {torch}: {advice}."
    )


class IllegalProgram(OnepassError):
    code = "ONEPASS-303"
    message = "The Program is invalid after {stage}: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class UnsupportedOnDevice(OnepassError):
    code = "ONEPASS-305"
    message = (
        "{what} has dtype {dtype}, which {device} cannot convert in hardware; that needs compute capability {needed}. Use "
        "another dtype there, or convert outside the fused function."
    )


class CompilerUnavailable(CompileFailed):
    """A kernel was not compiled for a reason outside the kernel. Such failures are never cached."""

    code = "ONEPASS-330"
    message = (
        "Kernel {kernel} could not be compiled for {device} because of a problem outside the kernel: {detail}. The failure "
        "is not cached: fix the problem and call again."
    )


class CompilerExited(CompilerUnavailable):
    code = "ONEPASS-331"
    message = (
        "Kernel {kernel} could not be compiled for {device}: the compiler process {how}, and the same happened to its "
        "replacement. The failure is not cached: call again. If memory is short, lower ONEPASS_COMPILE_WORKERS. If it "
        "happens every time, please report it with `onepass doctor`."
    )


class CompilerTimedOut(CompilerUnavailable):
    code = "ONEPASS-332"
    message = (
        "Kernel {kernel} could not be compiled for {device}: neither a compiler process nor its replacement answered within "
        "{seconds} s, so both were killed. The failure is not cached: call again. If the machine is busy, raise "
        "ONEPASS_COMPILE_TIMEOUT."
    )


class CompilerNotStarted(CompilerUnavailable):
    code = "ONEPASS-333"
    message = (
        "Kernel {kernel} could not be compiled for {device}: no compiler process could be started ({detail}). Free "
        "memory, processes or file descriptors, and call again."
    )


class CompilerProtocolError(CompilerUnavailable):
    code = "ONEPASS-334"
    message = (
        "Kernel {kernel} could not be compiled for {device}: a compiler process and its replacement both sent invalid "
        "replies ({detail}). If onepass was reinstalled while this process was running, restart the process. Otherwise, "
        "please report it with `onepass doctor`."
    )


class ProcessExiting(CompilerUnavailable):
    code = "ONEPASS-335"
    message = (
        "Kernel {kernel} was not compiled for {device} because this process is exiting. Join all threads that compile "
        "before the main thread ends."
    )
