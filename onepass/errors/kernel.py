"""Errors of the kernel model in the use of shared memory, barriers and copies: ONEPASS-310 to 329."""

from __future__ import annotations

from .base import OnepassError


class KernelFault(OnepassError):
    """A generated kernel did something in the model of shared memory that is undefined on a GPU."""

    code = "ONEPASS-310"
    message = "{where}: {detail}. This is a bug in onepass; please report it with `onepass doctor`."


class UseBeforeArrival(KernelFault):
    code = "ONEPASS-311"
    message = "{where}: {slot} is used before its data arrived: {detail}. Wait for its mbarrier first."


class RefillBeforeDrain(KernelFault):
    code = "ONEPASS-312"
    message = "{where}: {slot} is refilled before all reads are done: {detail}. Refill after the last read, then wait."


class WrongPhase(KernelFault):
    code = "ONEPASS-313"
    message = "{where}: {slot} is in phase {phase}, and {detail}. Flip the parity each time the ring wraps around."


class WaitsForever(KernelFault):
    code = "ONEPASS-314"
    message = (
        "{where}: the wait for {slot} never ends: phase {phase} lacks {missing} of {count} arrivals. Call expect or arrive "
        "before waiting."
    )


class ExpectedBytesDiffer(KernelFault):
    code = "ONEPASS-315"
    message = "{where}: {slot} expects {expected} bytes, but copies of {issued} bytes were issued on it. Make them equal."


class CopyOutOfBounds(KernelFault):
    code = "ONEPASS-316"
    message = (
        "{where}: the block {block} at {at}, copied to or from {slot}, exceeds the tensor of {extent}. Predicate the copy, "
        "or list the axis in Descriptor.masked if the kernel masks it."
    )


class OutsideAllocation(KernelFault):
    code = "ONEPASS-317"
    message = "{where}: {detail} is outside {slot}, which has shape {shape}."


class AccessOutOfBounds(KernelFault):
    code = "ONEPASS-318"
    message = "{where}: {count} lanes {use} outside all buffers of the kernel. Mask them."


class SharedMemoryExceeded(KernelFault):
    code = "ONEPASS-319"
    message = "{where}: with {slot} the CTA uses {taken} bytes of shared memory, of at most {limit}. Use fewer or smaller slots."


class BarrierNotInitialized(KernelFault):
    code = "ONEPASS-320"
    message = "{where}: {slot} is not an initialized mbarrier. Initialize it before use, and do not use it after invalidation."


class BarrierInitTwice(KernelFault):
    code = "ONEPASS-321"
    message = "{where}: {slot} is already an mbarrier. Initialize it once, or invalidate it first."


class MissingFence(KernelFault):
    code = "ONEPASS-322"
    message = "{where}: threads wrote {slot}, and TMA uses it without a fence. Call fence_async_shared in between."


class StagingReused(KernelFault):
    code = "ONEPASS-323"
    message = (
        "{where}: {slot} is written while the copy to global memory issued at {issued_at} still reads it. Call store_wait first."
    )


class CopyLeftBehind(KernelFault):
    code = "ONEPASS-324"
    message = (
        "{where}: the copy issued at {issued_at}, to or from {slot}, was never waited for. Wait before its mbarrier is "
        "invalidated or the kernel ends."
    )


class BlockMismatch(KernelFault):
    code = "ONEPASS-325"
    message = "{where}: shapes or types do not match in {slot}: {detail}."


class NotForTma(KernelFault):
    code = "ONEPASS-326"
    message = "TMA cannot describe a tensor of shape {shape}: {detail}. Use ordinary loads for it."


class NotModeled(KernelFault):
    code = "ONEPASS-327"
    message = "{where}: the model does not implement {what} of Gluon. Extend the model, or write the kernel without it."


class BarrierLeftBehind(KernelFault):
    code = "ONEPASS-328"
    message = (
        "{where}: the mbarrier {slot} was never invalidated, so the compiler may reuse its memory after the last wait. Call "
        "mbarrier.invalidate."
    )


class NeverPublished(KernelFault):
    code = "ONEPASS-329"
    message = (
        "{where}: deadlock: all CTAs of a group of {count} wait for mailboxes that none of them writes. Publish each CTA's "
        "states before it waits for others."
    )
