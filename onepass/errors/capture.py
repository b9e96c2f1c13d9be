"""Errors of capture: ONEPASS-101 to 129."""

from __future__ import annotations

from .base import OnepassError, TooManySteps


class UnsupportedOp(OnepassError):
    code = "ONEPASS-101"
    message = (
        "onepass cannot fuse {op} (at {where}). Move that op out of the fused function, or compile the whole model with "
        "torch.compile, which hands such ops to Inductor."
    )


class UnsupportedDtype(OnepassError):
    code = "ONEPASS-102"
    message = "{what} has dtype {dtype}, which onepass does not support (at {where}). Convert it first; supported: {supported}."


class UnsupportedView(OnepassError):
    code = "ONEPASS-103"
    message = (
        "{op} at {where} cannot be expressed by splitting and regrouping axes ({detail}). Call .contiguous() outside the "
        "fused function before it, or end the fused function there."
    )


class SymbolicAxis(OnepassError):
    code = "ONEPASS-104"
    message = (
        "{op} needs a fixed size for axis {axis}, but that size varies between calls (at {where}). Use "
        "onepass.fuse(f, dynamic=False), which generates kernels for each size."
    )


class Mutation(OnepassError):
    code = "ONEPASS-105"
    message = "{op} changes {what} in place (at {where}). Return the new value instead; fused functions must be pure."


class Randomness(OnepassError):
    code = "ONEPASS-106"
    message = "{op} generates random numbers (at {where}). Generate them outside and pass the tensor in."


class ClosureTensor(OnepassError):
    code = "ONEPASS-107"
    message = (
        "The function reads a tensor of shape {shape} that is not one of its arguments. Tracing would freeze its value "
        "into the kernel. Pass it as an argument."
    )


class DataDependent(OnepassError):
    code = "ONEPASS-108"
    message = (
        "The function reads a tensor's value on the host ({detail}). Tracing would freeze that value into the kernel. Use "
        "torch.where instead of branching on values."
    )


class UnsupportedLayout(OnepassError):
    code = "ONEPASS-109"
    message = "Argument {argument} has layout {layout}, but kernels read strided tensors only. Call .to_dense() first."


class CaptureTooLong(TooManySteps):
    code = "ONEPASS-125"


class BitReinterpretation(OnepassError):
    code = "ONEPASS-110"
    message = (
        "{op} reinterprets the bits of {given} values as {dtype} (at {where}), and the function computes with the result. "
        "Do that outside the fused function, or write .to({dtype}) to convert the values instead."
    )


class IgnoredArgument(OnepassError):
    code = "ONEPASS-111"
    message = (
        "onepass does not support {argument}={value} of {op} (at {where}). Remove that argument, move the op out of the "
        "fused function, or compile the whole model with torch.compile, which hands such ops to Inductor."
    )


class ResultOnOtherDevice(OnepassError):
    code = "ONEPASS-112"
    message = (
        "A result is on {device}, but the function's arguments are on {expected} (at {where}). Move that result after the "
        "call, or create tensors inside the function with device=x.device."
    )


class MetadataMismatch(OnepassError):
    code = "ONEPASS-113"
    message = (
        "{op} returns {theirs} in torch, but {ours} in onepass (at {where}). Move that op out of the fused function. This "
        "is a bug in onepass; please report it with `onepass doctor`."
    )


class UnguardedState(OnepassError):
    code = "ONEPASS-120"
    message = (
        "The function can read {what} ({where}), and onepass cannot detect when that changes, so a cached trace could "
        "return an outdated result. Pass the values it needs as arguments: a tensor, a number, a string, or tuples, lists "
        "and dicts of them."
    )


class ChangesState(OnepassError):
    code = "ONEPASS-121"
    message = (
        "Each run of the function changes state that it also reads ({where}). Kernels would not change it, and no cached "
        "trace would stay valid. Pass the value in and return the new one."
    )


class UnsupportedReturn(OnepassError):
    code = "ONEPASS-122"
    message = (
        "The function returns a {kind}, and every call would return the same object. Return tensors, numbers, strings, or "
        "tuples, lists and dicts of them."
    )


class NumberOutOfRange(OnepassError):
    code = "ONEPASS-115"
    message = (
        "{op} cannot represent {number} as {dtype} (at {where}); eager PyTorch refuses it too. Use a number that fits the "
        "dtype, or convert the tensor to a wider dtype first."
    )


class IntegerDivisionByZero(OnepassError):
    code = "ONEPASS-116"
    message = (
        "{op} divides integers by the number 0 (at {where}). Divide by another number, or convert to floating point first, "
        "where the result is inf or nan."
    )


class OverlappingElements(OnepassError):
    code = "ONEPASS-117"
    message = (
        "Elements of a result would share memory (shape {shape}, strides {strides}, at {where}), because elements of an "
        "argument do. Call .contiguous() on that argument first."
    )


class NotTraceable(OnepassError):
    code = "ONEPASS-118"
    message = "torch can run the function but cannot trace it: {detail} Move that op out of the fused function."
