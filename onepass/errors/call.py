"""Errors in how a fused function is called: ONEPASS-601 to 607."""

from __future__ import annotations

from .base import OnepassError


class NeedsGrad(OnepassError):
    code = "ONEPASS-601"
    message = (
        "Argument {argument} requires grad and grad mode is on, but onepass.fuse is forward-only. Call the function under "
        "torch.no_grad(), detach the input, or train through torch.compile."
    )


class MixedDevices(OnepassError):
    code = "ONEPASS-602"
    message = "The arguments are on different devices ({devices}). Move them to the same device."


class UnsupportedDevice(OnepassError):
    code = "ONEPASS-603"
    message = (
        "onepass kernels cannot run on tensors on {device}. Use a CUDA device of compute capability 8.0 or later, or CPU "
        "tensors (interpreted, slow)."
    )


class BadArgument(OnepassError):
    code = "ONEPASS-604"
    message = "{detail}"


class InvalidShape(OnepassError):
    code = "ONEPASS-605"
    message = "onepass cannot handle {what} of shape {shape}: {detail}."


class NotWarmedUp(OnepassError):
    code = "ONEPASS-606"
    message = (
        "{function} has no kernels for these sizes yet, and onepass cannot compile while a CUDA graph is being captured. "
        "Call it once with such inputs before the capture."
    )


class UnsupportedTorchMode(OnepassError):
    code = "ONEPASS-607"
    message = (
        "A fused function was called under {mode}, which cannot see what kernels do. Leave the mode for this call, or call "
        "the original function."
    )
