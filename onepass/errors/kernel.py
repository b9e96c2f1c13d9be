"""What a kernel did wrong with shared memory, barriers and copies, as the functional model of the GPU sees it: 31x and 32x."""

from __future__ import annotations

from .base import OnepassError


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


class BarrierNotInitialized(KernelFault):
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


class NotModeled(KernelFault):
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
