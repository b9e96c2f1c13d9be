"""Every error a user can meet: what happened, where, and what to do.

One class a mistake. The class holds the code and the sentence; the raiser only fills in names. Codes are grouped as the
stages are: 1xx what was captured, 2xx planning, 3xx generating and compiling, 4xx tuning, 5xx stores, 6xx calling, 7xx whole
models under torch.compile, 8xx tools, 9xx what nobody foresaw.
"""

from __future__ import annotations

import logging
import warnings

_LOG = logging.getLogger(__name__)


class OnepassError(Exception):
    """Base of all. `message` is a template over the keyword arguments."""

    code = "ONEPASS-000"
    message = "{detail}"

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(f"[{self.code}] {self.message.format(**fields)}")


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


class BitReinterpretation(OnepassError):
    code = "ONEPASS-110"
    message = ("{op} reads the bits of {given} values as {dtype} (at {where}), and more is computed from them. Do that outside the "
               "fused function, or write .to({dtype}) where values were to be converted.")


class IgnoredArgument(OnepassError):
    code = "ONEPASS-111"
    message = ("{op} was given {argument}={value}, which onepass cannot follow (at {where}). Leave that argument out, leave the op "
               "outside the fused function, or compile the whole model with torch.compile, which hands such ops to Inductor.")


class ResultElsewhere(OnepassError):
    code = "ONEPASS-112"
    message = ("A result is on {device}, and the function's arguments are on {expected} (at {where}). Move that result after the "
               "call, or make tensors inside the function with device=x.device.")


class UnlikeTorch(OnepassError):
    code = "ONEPASS-113"
    message = ("{op} gives {theirs} in torch, and {ours} in onepass (at {where}). Leave that op outside the fused function. This "
               "is a bug in onepass; please report it with `onepass doctor`.")


class HiddenState(OnepassError):
    code = "ONEPASS-120"
    message = ("The function can read {what} ({where}), and onepass cannot tell when that changes; an answer could be out of date. "
               "Pass what is needed of it as an argument: a tensor, a number, a string, or tuples, lists and dicts of them.")


class ChangesState(OnepassError):
    code = "ONEPASS-121"
    message = ("Each run of the function changes what it reads besides its arguments ({where}). Kernels would not, and no trace "
               "would stay valid. Pass the value in, and return the new one.")


class SharedResult(OnepassError):
    code = "ONEPASS-122"
    message = ("The function returns a {kind}, and every call would return the same one. Return tensors, numbers, strings, or "
               "tuples, lists and dicts of them.")


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


class AbsurdShape(OnepassError):
    code = "ONEPASS-605"
    message = "{what} of shape {shape} cannot be handled: {detail}."


class NotReady(OnepassError):
    code = "ONEPASS-606"
    message = ("{function} was called with sizes it has no kernels for yet while a CUDA graph is being captured, "
               "where nothing can be "
               "compiled. Call it once with such inputs before the capture.")


class UnderMode(OnepassError):
    code = "ONEPASS-607"
    message = ("A fused function was called under {mode}, which would see nothing of what kernels do. Leave the mode for this "
               "call, or call the function that was fused.")


class NoPlan(OnepassError):
    code = "ONEPASS-201"
    message = "No kernel can compute {what} on {device}: {detail}."


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


class KernelFault(OnepassError):
    """A generated kernel did, in the model of shared memory, what a GPU need not forgive."""

    code = "ONEPASS-310"
    message = "{where}: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class UseBeforeArrival(KernelFault):
    code = "ONEPASS-311"
    message = "{where}: {slot} is used before its data arrived: {detail}. Wait for its barrier first."


class RefillBeforeDrain(KernelFault):
    code = "ONEPASS-312"
    message = "{where}: {slot} is refilled before it is drained: {detail}. Refill after the last read, and wait before the next."


class WrongPhase(KernelFault):
    code = "ONEPASS-313"
    message = "{where}: {slot} is in phase {phase}, and {detail}. Flip the parity each time round the ring."


class WaitsForever(KernelFault):
    code = "ONEPASS-314"
    message = ("{where}: the wait for {slot} never ends: phase {phase} misses {missing} of {count} arrivals. Expect or arrive "
               "before waiting.")


class ExpectedBytesDiffer(KernelFault):
    code = "ONEPASS-315"
    message = "{where}: {slot} expects {expected} bytes, and copies of {issued} bytes were issued under it. Expect what is copied."


class CopyOutOfBounds(KernelFault):
    code = "ONEPASS-316"
    message = ("{where}: the block {block} at {at}, copied for {slot}, leaves the tensor of {extent}. Predicate the copy, or name "
               "the axis as masked where the kernel masks it.")


class OutsideAllocation(KernelFault):
    code = "ONEPASS-317"
    message = "{where}: {detail} is outside {slot}, which has shape {shape}."


class AccessOutOfBounds(KernelFault):
    code = "ONEPASS-318"
    message = "{where}: {count} lanes {use} outside every buffer of the kernel. Mask them."


class SharedMemoryExceeded(KernelFault):
    code = "ONEPASS-319"
    message = "{where}: with {slot}, {taken} bytes of shared memory are taken, and a CTA has {limit}. Use fewer or smaller slots."


class BarrierNotInitialised(KernelFault):
    code = "ONEPASS-320"
    message = "{where}: {slot} is no barrier. Initialise it before it is used, and do not use it once it is invalidated."


class BarrierInitTwice(KernelFault):
    code = "ONEPASS-321"
    message = "{where}: {slot} is a barrier already. Initialise it once, or invalidate it in between."


class MissingFence(KernelFault):
    code = "ONEPASS-322"
    message = "{where}: threads wrote {slot}, and TMA takes it over without a fence. Call fence_async_shared in between."


class StagingReused(KernelFault):
    code = "ONEPASS-323"
    message = ("{where}: {slot} is written while the copy to global memory issued at {issued_at} still reads it. Call store_wait "
               "first.")


class CopyLeftBehind(KernelFault):
    code = "ONEPASS-324"
    message = "{where}: the copy issued at {issued_at}, to or from {slot}, was never waited for. Wait before its memory goes."


class BlockMismatch(KernelFault):
    code = "ONEPASS-325"
    message = "{where}: what meets in {slot} does not fit: {detail}."


class NotForTma(KernelFault):
    code = "ONEPASS-326"
    message = "A tensor of shape {shape} cannot be described to TMA: {detail}. Plan loads of another kind for it."


class NotModelled(KernelFault):
    code = "ONEPASS-327"
    message = "{where}: {what} is real Gluon that the model does not know. Teach the model, or write the kernel without it."


class BarrierLeftBehind(KernelFault):
    code = "ONEPASS-328"
    message = ("{where}: the barrier {slot} was never ended, so the compiler may use its memory for something else after the last "
               "wait. Call mbarrier.invalidate.")


class NeverPublished(KernelFault):
    code = "ONEPASS-329"
    message = ("{where}: a word that is waited for is never written: all CTAs of a group of {count} wait. Publish what each gives "
               "before it waits for what others give.")


class CompilerTrouble(CompileFailed):
    """A kernel was not compiled, which says nothing about the kernel. Such failures are never remembered."""

    code = "ONEPASS-330"
    message = ("Kernel {kernel} could not be compiled for {device} because of something outside it: {detail}. Nothing of this is "
               "remembered: put that right and call again.")


class CompilerEnded(CompilerTrouble):
    code = "ONEPASS-331"
    message = ("Kernel {kernel} could not be compiled for {device}: the compiler process {how}, and so it went with a fresh one. "
               "Nothing of this is remembered: call again. If memory is short, set ONEPASS_COMPILE_WORKERS lower; if it always "
               "ends like this, please report it with `onepass doctor`.")


class CompilerTimedOut(CompilerTrouble):
    code = "ONEPASS-332"
    message = ("Kernel {kernel} could not be compiled for {device}: a compiler process did not answer within {seconds} s, nor did "
               "a fresh one; both were ended. Nothing of this is remembered: call again, with more time in "
               "ONEPASS_COMPILE_TIMEOUT if the machine is busy.")


class CompilerNotStarted(CompilerTrouble):
    code = "ONEPASS-333"
    message = ("Kernel {kernel} could not be compiled for {device}: no compiler process could be started ({detail}). Free "
               "memory, processes or file descriptors, and call again.")


class CompilerGarbled(CompilerTrouble):
    code = "ONEPASS-334"
    message = ("Kernel {kernel} could not be compiled for {device}: what a compiler process answered is not the answer to the "
               "question ({detail}), nor was that of a fresh one. If onepass was installed anew while this process runs, start "
               "it again; otherwise please report it with `onepass doctor`.")


class CompilersStopped(CompilerTrouble):
    code = "ONEPASS-335"
    message = ("Kernel {kernel} was not compiled for {device}, because this process is ending. Join threads that compile before "
               "the main thread ends.")


class NoCard(OnepassError):
    code = "ONEPASS-401"
    message = ("{what} needs a CUDA card, and there is none that torch can use ({detail}). Run it where the card is; "
               "`onepass doctor` says what torch sees.")


class AbsurdMeasurement(OnepassError):
    code = "ONEPASS-402"
    message = ("{what} was measured as {value}, which cannot be (expected is {expected}), so nothing was stored. Something "
               "else may be using the card, or its clocks may be changing: try again when it is idle.")


class NothingKept(OnepassError):
    code = "ONEPASS-403"
    message = ("{what} cannot be kept, because the store {detail}. Set ONEPASS_CACHE=1 and name a folder that can be written to in "
               "ONEPASS_CACHE_DIR, or only look at the figures with --dry-run.")


class StoreUnusable(OnepassError):
    code = "ONEPASS-501"
    message = ("The store {folder} cannot be {use}: {detail}. Everything works without it, but each process plans and compiles "
               "anew. Name another folder in ONEPASS_CACHE_DIR, or set ONEPASS_CACHE=0 to silence this.")


class EntrySetAside(OnepassError):
    code = "ONEPASS-502"
    message = ("The entry {entry} of the store was not used: {detail}. It was set aside and is made anew, so nothing is lost; if "
               "this repeats, remove the folder {folder}.")


class SourcesNotKept(OnepassError):
    code = "ONEPASS-503"
    message = ("Sources of kernels could not be written to {folder}: {detail}. The kernels work; name a folder that can be written "
               "to in ONEPASS_KEEP_SOURCES, or unset it.")


class OnepassWarning(UserWarning):
    """Something went wrong and was worked around; its text is that of a coded error."""


def warn(happened: OnepassError, stacklevel: int = 1) -> None:
    """Tell of an error that was worked around. Unless the user has warnings raised, telling never fails what goes on."""
    try:
        warnings.warn(printable(str(happened)), OnepassWarning, stacklevel=stacklevel + 1)
    except OnepassWarning:
        raise
    except Exception:  # a hook of the user's, or a stream that cannot be written
        _LOG.debug("a warning could not be shown: %s", happened.code, exc_info=True)


def text_of(error: BaseException) -> str:
    """What an error says, whatever its __str__ does."""
    try:
        return str(error)
    except Exception:
        return "it cannot say why"


def printable(text: str) -> str:
    """Text that does to a terminal, a file or a page what it looks like: control characters, surrogates, and marks that turn the
    direction of writing are escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RegionLeft(OnepassError):
    code = "ONEPASS-701"
    message = ("Region {region} ({lines}) could not be {stage}: {error} Inductor computes it instead, so results are right but "
               "not faster. To report it, attach {repro}. To leave the region out: options={{'skip': ['{region}']}}; to "
               "raise instead: ONEPASS_ON_ERROR=raise.")


class GraphLeft(OnepassError):
    code = "ONEPASS-702"
    message = ("No region of a {phase} graph ({lines}) was claimed, because of {error} The whole graph is left to Inductor, so "
               "results are right but not faster. To report it, attach {repro}. To raise instead: ONEPASS_ON_ERROR=raise.")


class SavedLeft(OnepassError):
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


class WithoutPython(OnepassError):
    code = "ONEPASS-711"
    message = ("No region was claimed of the {phase} graph at {lines}, because it is compiled by {by}, which cannot call the "
               "kernels of onepass yet. Inductor computes all of it, so results are right but not faster, and what is made needs "
               "no onepass. To silence this, call onepass.disable() before, or set ONEPASS_DISABLE=1.")


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


class CardNeeded(OnepassError):
    code = "ONEPASS-806"
    message = ("{what} measures on a CUDA card, and {why}. Run it where `onepass doctor` finds one; what kernels are predicted "
               "to take is shown without a card by `onepass explain`.")


class NotMeasured(OnepassError):
    code = "ONEPASS-807"
    message = ("No kernel times could be taken: {detail}. Close other profilers on this card and run again; if it repeats, please "
               "report it with `onepass doctor`.")


class OtherRun(OnepassError):
    code = "ONEPASS-808"
    message = ("{file} holds results that cannot be gone on with: {detail}. Give another file with --out, or --fresh to "
               "measure everything anew and overwrite it.")


class BadResults(OnepassError):
    code = "ONEPASS-811"
    message = "{file} is not a result that can be read: {detail}. Expected is a file that `onepass bench` wrote."


class TooMuchToDraw(OnepassError):
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
