"""Errors of planning: ONEPASS-201 to 209."""

from __future__ import annotations

from .base import OnepassError, TooManySteps


class NoPlan(OnepassError):
    code = "ONEPASS-201"
    message = "No kernel can compute {what} on {device}: {detail}."


class CyclicKernels(OnepassError):
    code = "ONEPASS-204"
    message = (
        "The kernels of {what} depend on each other in a cycle, so they have no valid order. This is a bug in onepass; "
        "please report it with `onepass doctor`."
    )


class IllegalSchedule(OnepassError):
    code = "ONEPASS-205"
    message = (
        "The schedule of kernel {kernel} ({schedule}) cannot run on {device}: {reason}: {detail}. This is a bug in onepass; "
        "please report it with `onepass doctor`."
    )


class PlanTooLong(TooManySteps):
    code = "ONEPASS-202"


class SimplifyTooLong(TooManySteps):
    code = "ONEPASS-203"
