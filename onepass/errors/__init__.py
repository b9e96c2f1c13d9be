"""Every error a user can meet: what happened, where, and what to do.

One class a mistake. The class holds the code and the sentence; the raiser only fills in names. Codes are grouped as the
stages are: 1xx what was captured, 2xx planning, 3xx generating and compiling, 4xx tuning, 5xx stores, 6xx calling, 7xx whole
models under torch.compile, 8xx tools, 9xx what nobody foresaw.
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

__all__ = [
    "ImplausibleMeasurement", "InvalidShape", "AccessOutOfBounds", "BadArgument", "BadResults", "BadSetting", "BadSpec",
    "BarrierInitTwice", "BarrierLeftBehind", "BarrierNotInitialized", "BitReinterpretation", "BlockMismatch", "CaptureTooLong",
    "GpuRequired", "ChangesState", "ClosureTensor", "CompileFailed", "CompilerExited", "CompilerProtocolError", "CompilerNotStarted",
    "CompilerTimedOut", "CompilerUnavailable", "ProcessExiting", "CopyLeftBehind", "CopyOutOfBounds", "DataDependent",
    "DoesNotFit", "EntryQuarantined", "ExpectedBytesDiffer", "GraphFallback", "UnguardedState", "IgnoredArgument", "IllegalProgram",
    "InputsOverwritten", "NotTraceable",
    "InternalError", "KernelFault", "MissingFence", "MixedDevices", "ModelNotTraced", "Mutation", "NeedsGrad", "NeverPublished",
    "NoGpu", "CyclicKernels", "NoPlan", "NoReproducer", "NotForTma", "NotMeasured", "NotModeled", "NotWarmedUp", "NotDeterministic",
    "CalibrationNotSaved", "NothingToCompare", "NumberOutOfRange", "OnepassError", "OnepassWarning", "CannotResume", "OutsideAllocation",
    "ParseError", "PlanTooLong", "PlotsNeedMatplotlib", "Randomness", "RefillBeforeDrain", "RegionFallback", "ResultOnOtherDevice",
    "RewriteFailed", "RecomputeSkipped", "SeededRandom", "OverlappingElements", "SharedMemoryExceeded", "UnsupportedReturn", "SimplifyTooLong",
    "SourcesNotKept", "StagingReused", "StepFailed", "StoreUnusable", "SymbolicAxis", "TooManySteps", "TooManyCharts",
    "TritonMissing", "UnsupportedTorchMode", "UnknownDevice", "UnknownSetting", "UnknownWorkload", "MetadataMismatch", "UnsupportedDevice",
    "UnsupportedDtype", "UnsupportedLayout", "UnsupportedOnDevice", "UnsupportedOp", "UnsupportedView", "UntestedTorch",
    "UseBeforeArrival", "WaitsForever", "PythonWrapperRequired", "WrongAnswer", "WrongPhase", "IntegerDivisionByZero", "printable", "text_of",
    "warn",
]


class UnsupportedOp(OnepassError):
    code = "ONEPASS-101"
    message = ("{op} is not something onepass fuses (at {where}). Leave that op outside the fused function, or compile the "
               "whole model with torch.compile, which hands such ops to Inductor.")


class UnsupportedDtype(OnepassError):
    code = "ONEPASS-102"
    message = ("{what} has dtype {dtype}, which onepass does not compute with (at {where}). Convert it first; supported: "
               "{supported}.")


class UnsupportedView(OnepassError):
    code = "ONEPASS-103"
    message = ("{op} at {where} cannot be said as splitting and regrouping of axes ({detail}). Call .contiguous() "
               "outside the fused "
               "function before it, or end the fused function there.")


class SymbolicAxis(OnepassError):
    code = "ONEPASS-104"
    message = ("{op} needs the size of axis {axis} fixed, but it varies between calls (at {where}). Fix it: call "
               "onepass.fuse(f, dynamic=False), so that each size gets its own kernel.")


class Mutation(OnepassError):
    code = "ONEPASS-105"
    message = "{op} changes {what} in place (at {where}). Return the new value instead; onepass functions are pure."


class Randomness(OnepassError):
    code = "ONEPASS-106"
    message = "{op} draws random numbers (at {where}). Draw them outside and pass the tensor in."


class ClosureTensor(OnepassError):
    code = "ONEPASS-107"
    message = ("The function reads a tensor of shape {shape} that is not among its arguments. Its value would be "
               "frozen into the kernel; "
               "pass it as an argument.")


class DataDependent(OnepassError):
    code = "ONEPASS-108"
    message = ("The function reads a tensor's value on the host ({detail}). Its result would be frozen into the "
               "kernel; use torch.where "
               "instead of branching on values.")


class UnsupportedLayout(OnepassError):
    code = "ONEPASS-109"
    message = "Argument {argument} has layout {layout}; kernels read plain strided memory. Call .to_dense() first."


class TooManySteps(OnepassError):
    """A loop reached its step budget; one subclass a stage."""

    message = ("{work} took more than {most} steps, so it was given up. Fuse a smaller part of the function; under torch.compile "
               "the region is left to Inductor.")


class CaptureTooLong(TooManySteps):
    code = "ONEPASS-125"


class BitReinterpretation(OnepassError):
    code = "ONEPASS-110"
    message = ("{op} reads the bits of {given} values as {dtype} (at {where}), and more is computed from them. Do that outside the "
               "fused function, or write .to({dtype}) where values were to be converted.")


class IgnoredArgument(OnepassError):
    code = "ONEPASS-111"
    message = ("{op} was given {argument}={value}, which onepass cannot follow (at {where}). Leave that argument out, leave the op "
               "outside the fused function, or compile the whole model with torch.compile, which hands such ops to Inductor.")


class ResultOnOtherDevice(OnepassError):
    code = "ONEPASS-112"
    message = ("A result is on {device}, and the function's arguments are on {expected} (at {where}). Move that result after the "
               "call, or make tensors inside the function with device=x.device.")


class MetadataMismatch(OnepassError):
    code = "ONEPASS-113"
    message = ("{op} gives {theirs} in torch, and {ours} in onepass (at {where}). Leave that op outside the fused function. This "
               "is a bug in onepass; please report it with `onepass doctor`.")


class UnguardedState(OnepassError):
    code = "ONEPASS-120"
    message = ("The function can read {what} ({where}), and onepass cannot tell when that changes; an answer could be out of date. "
               "Pass what is needed of it as an argument: a tensor, a number, a string, or tuples, lists and dicts of them.")


class ChangesState(OnepassError):
    code = "ONEPASS-121"
    message = ("Each run of the function changes what it reads besides its arguments ({where}). Kernels would not, and no trace "
               "would stay valid. Pass the value in, and return the new one.")


class UnsupportedReturn(OnepassError):
    code = "ONEPASS-122"
    message = ("The function returns a {kind}, and every call would return the same one. Return tensors, numbers, strings, or "
               "tuples, lists and dicts of them.")


class NumberOutOfRange(OnepassError):
    code = "ONEPASS-115"
    message = ("{number} is no {dtype}: {op} would not hold it (at {where}), and eager PyTorch refuses it too. Use a number that "
               "the type can hold, or convert the tensor to a wider type first.")


class IntegerDivisionByZero(OnepassError):
    code = "ONEPASS-116"
    message = ("{op} divides integers by the number 0 (at {where}), which has no answer. Divide by another number, or convert to "
               "floating point first, where the answer is inf or nan.")


class OverlappingElements(OnepassError):
    code = "ONEPASS-117"
    message = ("Elements of a result would share memory (shape {shape}, strides {strides}, at {where}), because those of an "
               "argument do. Call .contiguous() on that argument first.")


class NotTraceable(OnepassError):
    code = "ONEPASS-118"
    message = "torch computes the function, but cannot trace it: {detail} Leave that op outside the fused function."


class NeedsGrad(OnepassError):
    code = "ONEPASS-601"
    message = ("Argument {argument} requires grad and grad mode is on, but onepass.fuse is forward-only. Call it "
               "under torch.no_grad(), "
               "detach the input, or train through torch.compile.")


class MixedDevices(OnepassError):
    code = "ONEPASS-602"
    message = "The arguments are on different devices ({devices}). Move them to one."


class UnsupportedDevice(OnepassError):
    code = "ONEPASS-603"
    message = ("Tensors on {device} cannot run onepass kernels. Use a CUDA device (compute capability 8.0 or later) or "
               "CPU tensors (interpreted, slow).")


class BadArgument(OnepassError):
    code = "ONEPASS-604"
    message = "{detail}"


class InvalidShape(OnepassError):
    code = "ONEPASS-605"
    message = "{what} of shape {shape} cannot be handled: {detail}."


class NotWarmedUp(OnepassError):
    code = "ONEPASS-606"
    message = ("{function} was called with sizes it has no kernels for yet while a CUDA graph is being captured, "
               "where nothing can be "
               "compiled. Call it once with such inputs before the capture.")


class UnsupportedTorchMode(OnepassError):
    code = "ONEPASS-607"
    message = ("A fused function was called under {mode}, which would see nothing of what kernels do. Leave the mode for this "
               "call, or call the function that was fused.")


class NoPlan(OnepassError):
    code = "ONEPASS-201"
    message = "No kernel can compute {what} on {device}: {detail}."


class PlanTooLong(TooManySteps):
    code = "ONEPASS-202"


class SimplifyTooLong(TooManySteps):
    code = "ONEPASS-203"


class CyclicKernels(OnepassError):
    code = "ONEPASS-204"
    message = ("The kernels of {what} cannot be put in an order: each needs a result of another. This is a bug in onepass; please "
               "report it with `onepass doctor`.")


class CompileFailed(OnepassError):
    code = "ONEPASS-301"
    message = "Compiling kernel {kernel} for {device} failed: {detail}"


class DoesNotFit(CompileFailed):
    code = "ONEPASS-304"


class TritonMissing(OnepassError):
    code = "ONEPASS-302"
    message = "Triton is not installed, and it is needed to {purpose}. Install the release that pairs with torch {torch}: {advice}."


class IllegalProgram(OnepassError):
    code = "ONEPASS-303"
    message = "This Program is not legal after {stage}: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class UnsupportedOnDevice(OnepassError):
    code = "ONEPASS-305"
    message = ("{what} takes {dtype}, to and from which {device} converts nothing in hardware: that begins with compute capability "
               "{needed}. Use another type there, or convert outside the fused function.")


class CompilerUnavailable(CompileFailed):
    """A kernel was not compiled, which says nothing about the kernel. Such failures are never remembered."""

    code = "ONEPASS-330"
    message = ("Kernel {kernel} could not be compiled for {device} because of something outside it: {detail}. Nothing of this is "
               "remembered: put that right and call again.")


class CompilerExited(CompilerUnavailable):
    code = "ONEPASS-331"
    message = ("Kernel {kernel} could not be compiled for {device}: the compiler process {how}, and so it went with a fresh one. "
               "Nothing of this is remembered: call again. If memory is short, set ONEPASS_COMPILE_WORKERS lower; if it always "
               "ends like this, please report it with `onepass doctor`.")


class CompilerTimedOut(CompilerUnavailable):
    code = "ONEPASS-332"
    message = ("Kernel {kernel} could not be compiled for {device}: a compiler process did not answer within {seconds} s, nor did "
               "a fresh one; both were ended. Nothing of this is remembered: call again, with more time in "
               "ONEPASS_COMPILE_TIMEOUT if the machine is busy.")


class CompilerNotStarted(CompilerUnavailable):
    code = "ONEPASS-333"
    message = ("Kernel {kernel} could not be compiled for {device}: no compiler process could be started ({detail}). Free "
               "memory, processes or file descriptors, and call again.")


class CompilerProtocolError(CompilerUnavailable):
    code = "ONEPASS-334"
    message = ("Kernel {kernel} could not be compiled for {device}: what a compiler process answered is not the answer to the "
               "question ({detail}), nor was that of a fresh one. If onepass was installed anew while this process runs, start "
               "it again; otherwise please report it with `onepass doctor`.")


class ProcessExiting(CompilerUnavailable):
    code = "ONEPASS-335"
    message = ("Kernel {kernel} was not compiled for {device}, because this process is ending. Join threads that compile before "
               "the main thread ends.")


class NoGpu(OnepassError):
    code = "ONEPASS-401"
    message = ("{what} needs a CUDA card, and there is none that torch can use ({detail}). Run it where the card is; "
               "`onepass doctor` says what torch sees.")


class ImplausibleMeasurement(OnepassError):
    code = "ONEPASS-402"
    message = ("{what} was measured as {value}, which cannot be (expected is {expected}), so nothing was stored. Something "
               "else may be using the card, or its clocks may be changing: try again when it is idle.")


class CalibrationNotSaved(OnepassError):
    code = "ONEPASS-403"
    message = ("{what} cannot be kept, because the store {detail}. Set ONEPASS_CACHE=1 and name a folder that can be written to in "
               "ONEPASS_CACHE_DIR, or only look at the figures with --dry-run.")


class StoreUnusable(OnepassError):
    code = "ONEPASS-501"
    message = ("The store {folder} cannot be {use}: {detail}. Everything works without it, but each process plans and compiles "
               "anew. Name another folder in ONEPASS_CACHE_DIR, or set ONEPASS_CACHE=0 to silence this.")


class EntryQuarantined(OnepassError):
    code = "ONEPASS-502"
    message = ("The entry {entry} of the store was not used: {detail}. It was set aside and is made anew, so nothing is lost; if "
               "this repeats, remove the folder {folder}.")


class SourcesNotKept(OnepassError):
    code = "ONEPASS-503"
    message = ("Sources of kernels could not be written to {folder}: {detail}. The kernels work; name a folder that can be written "
               "to in ONEPASS_KEEP_SOURCES, or unset it.")


class RegionFallback(OnepassError):
    code = "ONEPASS-701"
    message = ("Region {region} ({lines}) could not be {stage}: {error} Inductor computes it instead, so results are right but "
               "not faster. To report it, attach {repro}. To leave the region out: options={{'skip': ['{region}']}}; to "
               "raise instead: ONEPASS_ON_ERROR=raise.")


class GraphFallback(OnepassError):
    code = "ONEPASS-702"
    message = ("No region of a {phase} graph ({lines}) was claimed, because of {error} The whole graph is left to Inductor, so "
               "results are right but not faster. To report it, attach {repro}. To raise instead: ONEPASS_ON_ERROR=raise.")


class RecomputeSkipped(OnepassError):
    code = "ONEPASS-709"
    message = ("What a training graph saves for its backward stays as Inductor has it, because of {error} Results are right, but "
               "more memory is used and moved. To go without this step: options={{'recompute': False}}; to raise instead: "
               "ONEPASS_ON_ERROR=raise.")


class WrongAnswer(OnepassError):
    code = "ONEPASS-703"
    message = ("Region {region}, output {output}: {detail}. This is a bug in onepass; please report it with {repro}, and "
               "leave the region out until it is mended: options={{'skip': ['{region}']}}.")


class UnknownSetting(OnepassError):
    code = "ONEPASS-704"
    message = "No setting is called {name!r}. Known: {known}."


class BadSetting(OnepassError):
    code = "ONEPASS-705"
    message = "The setting {name} cannot be {given!r}: {detail}."


class UntestedTorch(OnepassError):
    code = "ONEPASS-706"
    message = ("onepass leaves everything to Inductor: {detail}. It is tested with torch {oldest} to {newest}; install one of "
               "these, or use backend=\"inductor\" to silence this.")


class NoReproducer(OnepassError):
    code = "ONEPASS-707"
    message = "No reproducer could be written to {folder}: {detail}. Name another folder in ONEPASS_REPRO_DIR."


class RewriteFailed(OnepassError):
    code = "ONEPASS-708"
    message = "A graph could not be rewritten: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class SeededRandom(OnepassError):
    code = "ONEPASS-710"
    message = ("{op} ({lines}) turns a seed into random numbers, which only Inductor's code generation can: with rest=\"eager\" it "
               "would draw others, and a backward that draws again would not belong to its forward. Set rest to \"inductor\".")


class PythonWrapperRequired(OnepassError):
    code = "ONEPASS-711"
    message = ("No region was claimed of the {phase} graph at {lines}, because it is compiled by {by}, which cannot call the "
               "kernels of onepass yet. Inductor computes all of it, so results are right but not faster, and what is made needs "
               "no onepass. To silence this, call onepass.disable() before, or set ONEPASS_DISABLE=1.")


class NotDeterministic(OnepassError):
    code = "ONEPASS-712"
    message = ("{what} gives other results each time, without any region of onepass: {detail}. So no region can be found guilty. "
               "Make everything it needs inside the function (model, data, optimizer), and draw from seeded generators only.")


class StepFailed(OnepassError):
    code = "ONEPASS-713"
    message = ("{what} could not be run {how}: {error} Nothing can be compared with it; make it work there first. A model may "
               "need other inputs, or options (--option).")


class NothingToCompare(OnepassError):
    code = "ONEPASS-714"
    message = ("{what} gives nothing that can be compared: {detail}. Return a loss or tensors, or (step, inputs), where the step "
               "returns them.")


class InputsOverwritten(OnepassError):
    code = "ONEPASS-715"
    message = ("Region {region} ({lines}) failed at a call after its first: {error} It writes outputs over inputs, which may be "
               "overwritten by now, so nothing else can compute this call. options={{'in_place': False}} keeps the inputs, so that "
               "Inductor can take over; options={{'skip': ['{region}']}} leaves the region out.")


class UnknownDevice(OnepassError):
    code = "ONEPASS-801"
    message = "No device is called {name!r}. Known: {known}."


class UnknownWorkload(OnepassError):
    code = "ONEPASS-802"
    message = "No workload is called {name!r}. Known: {known}. A function of your own is given as file.py:function."


class BadSpec(OnepassError):
    code = "ONEPASS-803"
    message = "{what} {text!r} is not understood: {detail}."


class ParseError(OnepassError):
    code = "ONEPASS-804"
    message = "Line {line} of a Program's text is not understood ({detail}): {text!r}"


class ModelNotTraced(OnepassError):
    code = "ONEPASS-805"
    message = ("{model} could not be traced without running it: {error} If it needs the values of tensors, run it instead under "
               "torch.compile(backend=\"onepass\") and print onepass.report(); otherwise explain its parts one by one.")


class GpuRequired(OnepassError):
    code = "ONEPASS-806"
    message = ("{what} measures on a CUDA card, and {why}. Run it where `onepass doctor` finds one; what kernels are predicted "
               "to take is shown without a card by `onepass explain`.")


class NotMeasured(OnepassError):
    code = "ONEPASS-807"
    message = ("No kernel times could be taken: {detail}. Close other profilers on this card and run again; if it repeats, please "
               "report it with `onepass doctor`.")


class CannotResume(OnepassError):
    code = "ONEPASS-808"
    message = ("{file} holds results that cannot be gone on with: {detail}. Give another file with --out, or --fresh to "
               "measure everything anew and overwrite it.")


class BadResults(OnepassError):
    code = "ONEPASS-811"
    message = "{file} is not a result that can be read: {detail}. Expected is a file that `onepass bench` wrote."


class TooManyCharts(OnepassError):
    code = "ONEPASS-820"
    message = "These results give {found} charts, and at most {most} are drawn at a time. Plot fewer files, or fewer rows, at once."


class PlotsNeedMatplotlib(OnepassError):
    code = "ONEPASS-812"
    message = ("Plots are drawn with matplotlib, which is not installed. Install it with onepass: pip install "
               "\"onepass-torch[plot]\"; or alone: pip install matplotlib.")


class InternalError(OnepassError):
    """An exception that no stage foresaw; it is the cause of this one."""

    code = "ONEPASS-900"
    message = ("onepass failed while {doing} (at {where}): {error}. This is a bug in onepass; please report it with "
               "`onepass doctor`. Until it is mended, leave this function or region out.")
