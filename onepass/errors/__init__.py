"""Every error a user can meet: what happened, where, and what to do.

Each class holds an error code and a message template; the code that raises it fills in the fields. Codes are grouped by
stage: 1xx capture, 2xx planning, 3xx code generation and compilation, 4xx tuning, 5xx caches, 6xx calls, 7xx whole models under
torch.compile, 8xx tools, 9xx unexpected exceptions.
"""
from __future__ import annotations

from .base import OnepassError, OnepassWarning, printable, text_of, warn
from .kernel import (
    AccessOutOfBounds,
    BarrierInitTwice,
    BarrierLeftBehind,
    BarrierNotInitialized,
    BlockMismatch,
    CopyLeftBehind,
    CopyOutOfBounds,
    ExpectedBytesDiffer,
    KernelFault,
    MissingFence,
    NeverPublished,
    NotForTma,
    NotModeled,
    OutsideAllocation,
    RefillBeforeDrain,
    SharedMemoryExceeded,
    StagingReused,
    UseBeforeArrival,
    WaitsForever,
    WrongPhase,
)
from .plan import CyclicKernels, IllegalSchedule, NoPlan

__all__ = [
    "AccessOutOfBounds", "BadArgument", "BadResults", "BadSetting", "BadSpec", "BarrierInitTwice", "BarrierLeftBehind",
    "BarrierNotInitialized", "BitReinterpretation", "BlockMismatch", "CalibrationNotSaved", "CannotResume", "CaptureTooLong",
    "ChangesState", "ClosureTensor", "CompileFailed", "CompilerExited", "CompilerNotStarted", "CompilerProtocolError",
    "CompilerTimedOut", "CompilerUnavailable", "CopyLeftBehind", "CopyOutOfBounds", "CyclicKernels", "DataDependent",
    "DoesNotFit", "EntryQuarantined", "ExpectedBytesDiffer", "GpuRequired", "GraphFallback", "IgnoredArgument",
    "IllegalProgram", "IllegalSchedule", "ImplausibleMeasurement", "InputsOverwritten", "IntegerDivisionByZero",
    "InternalError", "InvalidShape", "KernelFault", "MetadataMismatch", "MissingFence", "MixedDevices", "ModelNotTraced",
    "Mutation", "NeedsGrad", "NeverPublished", "NoGpu", "NoPlan", "NoReproducer", "NotDeterministic", "NotForTma",
    "NotMeasured", "NotModeled", "NotTraceable", "NotWarmedUp", "NothingToCompare", "NumberOutOfRange", "OnepassError",
    "OnepassWarning", "OutsideAllocation", "OverlappingElements", "ParseError", "PlanTooLong", "PlotsNeedMatplotlib",
    "ProcessExiting", "PythonWrapperRequired", "Randomness", "RecomputeSkipped", "RefillBeforeDrain", "RegionFallback",
    "ResultOnOtherDevice", "RewriteFailed", "SeededRandom", "SharedMemoryExceeded", "SimplifyTooLong", "SourcesNotKept",
    "StagingReused", "StepFailed", "StoreUnusable", "SymbolicAxis", "TooManyCharts", "TooManySteps", "TritonMissing",
    "UnguardedState", "UnknownDevice", "UnknownSetting", "UnknownWorkload", "UnsupportedDevice", "UnsupportedDtype",
    "UnsupportedLayout", "UnsupportedOnDevice", "UnsupportedOp", "UnsupportedReturn", "UnsupportedTorchMode",
    "UnsupportedView", "UntestedTorch", "UseBeforeArrival", "WaitsForever", "WrongAnswer", "WrongPhase", "printable",
    "text_of", "warn",
]


class UnsupportedOp(OnepassError):
    code = "ONEPASS-101"
    message = ("onepass cannot fuse {op} (at {where}). Move that op out of the fused function, or compile the whole model with "
               "torch.compile, which hands such ops to Inductor.")


class UnsupportedDtype(OnepassError):
    code = "ONEPASS-102"
    message = "{what} has dtype {dtype}, which onepass does not support (at {where}). Convert it first; supported: {supported}."


class UnsupportedView(OnepassError):
    code = "ONEPASS-103"
    message = ("{op} at {where} cannot be expressed by splitting and regrouping axes ({detail}). Call .contiguous() outside the "
               "fused function before it, or end the fused function there.")


class SymbolicAxis(OnepassError):
    code = "ONEPASS-104"
    message = ("{op} needs a fixed size for axis {axis}, but that size varies between calls (at {where}). Use "
               "onepass.fuse(f, dynamic=False), which generates kernels for each size.")


class Mutation(OnepassError):
    code = "ONEPASS-105"
    message = "{op} changes {what} in place (at {where}). Return the new value instead; fused functions must be pure."


class Randomness(OnepassError):
    code = "ONEPASS-106"
    message = "{op} generates random numbers (at {where}). Generate them outside and pass the tensor in."


class ClosureTensor(OnepassError):
    code = "ONEPASS-107"
    message = ("The function reads a tensor of shape {shape} that is not one of its arguments. Tracing would freeze its value "
               "into the kernel. Pass it as an argument.")


class DataDependent(OnepassError):
    code = "ONEPASS-108"
    message = ("The function reads a tensor's value on the host ({detail}). Tracing would freeze that value into the kernel. Use "
               "torch.where instead of branching on values.")


class UnsupportedLayout(OnepassError):
    code = "ONEPASS-109"
    message = "Argument {argument} has layout {layout}, but kernels read strided tensors only. Call .to_dense() first."


class TooManySteps(OnepassError):
    """A loop reached its step budget. Each stage has its own subclass."""

    message = ("{work} stopped after its limit of {most} steps. Fuse a smaller part of the function. Under torch.compile, Inductor "
               "compiles this region instead.")


class CaptureTooLong(TooManySteps):
    code = "ONEPASS-125"


class BitReinterpretation(OnepassError):
    code = "ONEPASS-110"
    message = ("{op} reinterprets the bits of {given} values as {dtype} (at {where}), and the function computes with the result. "
               "Do that outside the fused function, or write .to({dtype}) to convert the values instead.")


class IgnoredArgument(OnepassError):
    code = "ONEPASS-111"
    message = ("onepass does not support {argument}={value} of {op} (at {where}). Remove that argument, move the op out of the "
               "fused function, or compile the whole model with torch.compile, which hands such ops to Inductor.")


class ResultOnOtherDevice(OnepassError):
    code = "ONEPASS-112"
    message = ("A result is on {device}, but the function's arguments are on {expected} (at {where}). Move that result after the "
               "call, or create tensors inside the function with device=x.device.")


class MetadataMismatch(OnepassError):
    code = "ONEPASS-113"
    message = ("{op} returns {theirs} in torch, but {ours} in onepass (at {where}). Move that op out of the fused function. This "
               "is a bug in onepass; please report it with `onepass doctor`.")


class UnguardedState(OnepassError):
    code = "ONEPASS-120"
    message = ("The function can read {what} ({where}), and onepass cannot detect when that changes, so a cached trace could "
               "return an outdated result. Pass the values it needs as arguments: a tensor, a number, a string, or tuples, lists "
               "and dicts of them.")


class ChangesState(OnepassError):
    code = "ONEPASS-121"
    message = ("Each run of the function changes state that it also reads ({where}). Kernels would not change it, and no cached "
               "trace would stay valid. Pass the value in and return the new one.")


class UnsupportedReturn(OnepassError):
    code = "ONEPASS-122"
    message = ("The function returns a {kind}, and every call would return the same object. Return tensors, numbers, strings, or "
               "tuples, lists and dicts of them.")


class NumberOutOfRange(OnepassError):
    code = "ONEPASS-115"
    message = ("{op} cannot represent {number} as {dtype} (at {where}); eager PyTorch refuses it too. Use a number that fits the "
               "dtype, or convert the tensor to a wider dtype first.")


class IntegerDivisionByZero(OnepassError):
    code = "ONEPASS-116"
    message = ("{op} divides integers by the number 0 (at {where}). Divide by another number, or convert to floating point first, "
               "where the result is inf or nan.")


class OverlappingElements(OnepassError):
    code = "ONEPASS-117"
    message = ("Elements of a result would share memory (shape {shape}, strides {strides}, at {where}), because elements of an "
               "argument do. Call .contiguous() on that argument first.")


class NotTraceable(OnepassError):
    code = "ONEPASS-118"
    message = "torch can run the function but cannot trace it: {detail} Move that op out of the fused function."


class NeedsGrad(OnepassError):
    code = "ONEPASS-601"
    message = ("Argument {argument} requires grad and grad mode is on, but onepass.fuse is forward-only. Call the function under "
               "torch.no_grad(), detach the input, or train through torch.compile.")


class MixedDevices(OnepassError):
    code = "ONEPASS-602"
    message = "The arguments are on different devices ({devices}). Move them to the same device."


class UnsupportedDevice(OnepassError):
    code = "ONEPASS-603"
    message = ("onepass kernels cannot run on tensors on {device}. Use a CUDA device of compute capability 8.0 or later, or CPU "
               "tensors (interpreted, slow).")


class BadArgument(OnepassError):
    code = "ONEPASS-604"
    message = "{detail}"


class InvalidShape(OnepassError):
    code = "ONEPASS-605"
    message = "onepass cannot handle {what} of shape {shape}: {detail}."


class NotWarmedUp(OnepassError):
    code = "ONEPASS-606"
    message = ("{function} has no kernels for these sizes yet, and onepass cannot compile while a CUDA graph is being captured. "
               "Call it once with such inputs before the capture.")


class UnsupportedTorchMode(OnepassError):
    code = "ONEPASS-607"
    message = ("A fused function was called under {mode}, which cannot see what kernels do. Leave the mode for this call, or call "
               "the original function.")


class PlanTooLong(TooManySteps):
    code = "ONEPASS-202"


class SimplifyTooLong(TooManySteps):
    code = "ONEPASS-203"


class CompileFailed(OnepassError):
    code = "ONEPASS-301"
    message = "Compiling kernel {kernel} for {device} failed: {detail}"


class DoesNotFit(CompileFailed):
    code = "ONEPASS-304"


class TritonMissing(OnepassError):
    code = "ONEPASS-302"
    message = ("Triton is not installed, but onepass needs it to {purpose}. Install the release that pairs with torch {torch}: "
               "{advice}.")


class IllegalProgram(OnepassError):
    code = "ONEPASS-303"
    message = "The Program is invalid after {stage}: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class UnsupportedOnDevice(OnepassError):
    code = "ONEPASS-305"
    message = ("{what} has dtype {dtype}, which {device} cannot convert in hardware; that needs compute capability {needed}. Use "
               "another dtype there, or convert outside the fused function.")


class CompilerUnavailable(CompileFailed):
    """A kernel was not compiled for a reason outside the kernel. Such failures are never cached."""

    code = "ONEPASS-330"
    message = ("Kernel {kernel} could not be compiled for {device} because of a problem outside the kernel: {detail}. The failure "
               "is not cached: fix the problem and call again.")


class CompilerExited(CompilerUnavailable):
    code = "ONEPASS-331"
    message = ("Kernel {kernel} could not be compiled for {device}: the compiler process {how}, and the same happened to its "
               "replacement. The failure is not cached: call again. If memory is short, lower ONEPASS_COMPILE_WORKERS. If it "
               "happens every time, please report it with `onepass doctor`.")


class CompilerTimedOut(CompilerUnavailable):
    code = "ONEPASS-332"
    message = ("Kernel {kernel} could not be compiled for {device}: neither a compiler process nor its replacement answered within "
               "{seconds} s, so both were killed. The failure is not cached: call again. If the machine is busy, raise "
               "ONEPASS_COMPILE_TIMEOUT.")


class CompilerNotStarted(CompilerUnavailable):
    code = "ONEPASS-333"
    message = ("Kernel {kernel} could not be compiled for {device}: no compiler process could be started ({detail}). Free "
               "memory, processes or file descriptors, and call again.")


class CompilerProtocolError(CompilerUnavailable):
    code = "ONEPASS-334"
    message = ("Kernel {kernel} could not be compiled for {device}: a compiler process and its replacement both sent invalid "
               "replies ({detail}). If onepass was reinstalled while this process was running, restart the process. Otherwise, "
               "please report it with `onepass doctor`.")


class ProcessExiting(CompilerUnavailable):
    code = "ONEPASS-335"
    message = ("Kernel {kernel} was not compiled for {device} because this process is exiting. Join all threads that compile "
               "before the main thread ends.")


class NoGpu(OnepassError):
    code = "ONEPASS-401"
    message = ("{what} needs a CUDA GPU, and torch cannot use one here ({detail}). Run it on a machine with a GPU; "
               "`onepass doctor` shows what torch finds.")


class ImplausibleMeasurement(OnepassError):
    code = "ONEPASS-402"
    message = ("{what} was measured as {value}, which is implausible (expected: {expected}), so nothing was saved. Another process "
               "may be using the GPU, or its clocks may be changing. Try again when the GPU is idle.")


class CalibrationNotSaved(OnepassError):
    code = "ONEPASS-403"
    message = ("{what} cannot be saved because the cache {detail}. Set ONEPASS_CACHE=1 and a writable folder in ONEPASS_CACHE_DIR, "
               "or use --dry-run to see the figures without saving them.")


class StoreUnusable(OnepassError):
    code = "ONEPASS-501"
    message = ("The cache folder {folder} cannot be {use}: {detail}. onepass works without it, but each process plans and compiles "
               "again. Set another folder in ONEPASS_CACHE_DIR, or set ONEPASS_CACHE=0 to silence this warning.")


class EntryQuarantined(OnepassError):
    code = "ONEPASS-502"
    message = ("The cache entry {entry} was not used: {detail}. onepass quarantined it and builds it again, so nothing is lost. "
               "If this repeats, delete the folder {folder}.")


class SourcesNotKept(OnepassError):
    code = "ONEPASS-503"
    message = ("Kernel sources could not be written to {folder}: {detail}. The kernels still work. Set a writable folder in "
               "ONEPASS_KEEP_SOURCES, or unset it.")


class RegionFallback(OnepassError):
    code = "ONEPASS-701"
    message = ("Region {region} ({lines}) could not be {stage}: {error} Inductor computes it instead: results are correct, but "
               "not faster. To report this, attach {repro}. To skip the region: options={{'skip': ['{region}']}}. To "
               "raise instead: ONEPASS_ON_ERROR=raise.")


class GraphFallback(OnepassError):
    code = "ONEPASS-702"
    message = ("onepass claimed no region of a {phase} graph ({lines}) because of this error: {error} Inductor compiles the whole "
               "graph instead: results are correct, but not faster. To report this, attach {repro}. To raise instead: "
               "ONEPASS_ON_ERROR=raise.")


class RecomputeSkipped(OnepassError):
    code = "ONEPASS-709"
    message = ("onepass did not change what a training graph saves for its backward because of this error: {error} Results are "
               "correct, but more memory is used and moved. To skip this step: options={{'recompute': False}}. To raise instead: "
               "ONEPASS_ON_ERROR=raise.")


class WrongAnswer(OnepassError):
    code = "ONEPASS-703"
    message = ("Region {region}, output {output}: {detail}. This is a bug in onepass; please report it with {repro}. Skip the "
               "region until it is fixed: options={{'skip': ['{region}']}}.")


class UnknownSetting(OnepassError):
    code = "ONEPASS-704"
    message = "There is no setting {name!r}. Known: {known}."


class BadSetting(OnepassError):
    code = "ONEPASS-705"
    message = "The setting {name} cannot be {given!r}: {detail}."


class UntestedTorch(OnepassError):
    code = "ONEPASS-706"
    message = ("onepass leaves everything to Inductor: {detail}. onepass is tested with torch {oldest} to {newest}. Install one of "
               "these, or use backend=\"inductor\" to silence this warning.")


class NoReproducer(OnepassError):
    code = "ONEPASS-707"
    message = "No reproducer could be written to {folder}: {detail}. Set another folder in ONEPASS_REPRO_DIR."


class RewriteFailed(OnepassError):
    code = "ONEPASS-708"
    message = "A graph could not be rewritten: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class SeededRandom(OnepassError):
    code = "ONEPASS-710"
    message = ("{op} ({lines}) turns a seed into random numbers, which only Inductor's code generation can do. With rest=\"eager\" "
               "the forward and the recomputed backward would draw different numbers. Set rest to \"inductor\".")


class PythonWrapperRequired(OnepassError):
    code = "ONEPASS-711"
    message = ("onepass claimed no region of the {phase} graph at {lines}, because {by} compiles it, and that cannot call onepass "
               "kernels yet. Inductor compiles all of it: results are correct, but not faster, and the compiled code does not need "
               "onepass. To silence this warning, call onepass.disable() first, or set ONEPASS_DISABLE=1.")


class NotDeterministic(OnepassError):
    code = "ONEPASS-712"
    message = ("{what} gives different results each time, even without onepass: {detail}. So bisect cannot blame any region. "
               "Create everything inside the function (model, data, optimizer), and use only seeded random generators.")


class StepFailed(OnepassError):
    code = "ONEPASS-713"
    message = ("{what} could not be run {how}: {error} There is nothing to compare with until it runs there. A model may "
               "need other inputs, or options (--option).")


class NothingToCompare(OnepassError):
    code = "ONEPASS-714"
    message = ("{what} returns nothing to compare: {detail}. Return a loss or tensors, or (step, inputs), where step returns them.")


class InputsOverwritten(OnepassError):
    code = "ONEPASS-715"
    message = ("Region {region} ({lines}) failed after its first call: {error} It writes outputs over inputs, which may already be "
               "overwritten, so no fallback can compute this call. To keep the inputs, so that Inductor can take over: "
               "options={{'in_place': False}}. To skip the region: options={{'skip': ['{region}']}}.")


class UnknownDevice(OnepassError):
    code = "ONEPASS-801"
    message = "There is no device {name!r}. Known: {known}."


class UnknownWorkload(OnepassError):
    code = "ONEPASS-802"
    message = "There is no workload {name!r}. Known: {known}. To use your own function, write file.py:function."


class BadSpec(OnepassError):
    code = "ONEPASS-803"
    message = "{what} {text!r} is invalid: {detail}."


class ParseError(OnepassError):
    code = "ONEPASS-804"
    message = "Line {line} of a Program's text is invalid ({detail}): {text!r}"


class ModelNotTraced(OnepassError):
    code = "ONEPASS-805"
    message = ("{model} could not be traced without running it: {error} If it needs tensor values, run it under "
               "torch.compile(backend=\"onepass\") and print onepass.report(). Otherwise, explain its parts one by one.")


class GpuRequired(OnepassError):
    code = "ONEPASS-806"
    message = ("{what} measures on a CUDA GPU, and {why}. Run it where `onepass doctor` finds one. `onepass explain` shows "
               "predicted kernel times without a GPU.")


class NotMeasured(OnepassError):
    code = "ONEPASS-807"
    message = ("Kernel times could not be measured: {detail}. Close other profilers on this GPU and run again. If it repeats, "
               "please report it with `onepass doctor`.")


class CannotResume(OnepassError):
    code = "ONEPASS-808"
    message = ("The run in {file} cannot be resumed: {detail}. Name another file with --out, or use --fresh to measure everything "
               "again and overwrite it.")


class BadResults(OnepassError):
    code = "ONEPASS-811"
    message = "{file} is not a readable result file: {detail}. Give a file that `onepass bench` wrote."


class TooManyCharts(OnepassError):
    code = "ONEPASS-820"
    message = "These results need {found} charts; at most {most} are drawn at a time. Plot fewer files or fewer rows at once."


class PlotsNeedMatplotlib(OnepassError):
    code = "ONEPASS-812"
    message = ("Plots need matplotlib, which is not installed. Install it with onepass: pip install \"onepass-torch[plot]\". Or "
               "install it alone: pip install matplotlib.")


class InternalError(OnepassError):
    """An unexpected exception inside a stage. The original exception is its cause."""

    code = "ONEPASS-900"
    message = ("onepass failed while {doing} (at {where}): {error}. This is a bug in onepass; please report it with "
               "`onepass doctor`. Until it is fixed, move this function or region out of onepass.")
