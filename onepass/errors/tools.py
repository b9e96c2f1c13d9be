"""Errors of commands: ONEPASS-801 to 820."""

from __future__ import annotations

from .base import OnepassError


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
    message = (
        "{model} could not be traced without running it: {error} If it needs tensor values, run it under "
        'torch.compile(backend="onepass") and print onepass.report(). Otherwise, explain its parts one by one.'
    )


class GpuRequired(OnepassError):
    code = "ONEPASS-806"
    message = (
        "{what} measures on a CUDA GPU, and {why}. Run it where `onepass doctor` finds one. `onepass explain` shows "
        "predicted kernel times without a GPU."
    )


class NotMeasured(OnepassError):
    code = "ONEPASS-807"
    message = (
        "Kernel times could not be measured: {detail}. Close other profilers on this GPU and run again. If it repeats, "
        "please report it with `onepass doctor`."
    )


class CannotResume(OnepassError):
    code = "ONEPASS-808"
    message = (
        "The run in {file} cannot be resumed: {detail}. Name another file with --out, or use --fresh to measure everything "
        "again and overwrite it."
    )


class UsersCodeFailed(OnepassError):
    code = "ONEPASS-809"
    message = "{what} raised {error} onepass runs it to see what it computes: correct it, or what it is called with."


class SystemRefused(OnepassError):
    code = "ONEPASS-810"
    message = "The command ended early, because the system refused something: {detail}. Its output may be incomplete."


class BadResults(OnepassError):
    code = "ONEPASS-811"
    message = "{file} is not a readable result file: {detail}. Give a file that `onepass bench` wrote."


class TooManyCharts(OnepassError):
    code = "ONEPASS-820"
    message = "These results need {found} charts; at most {most} are drawn at a time. Plot fewer files or fewer rows at once."


class PlotsNeedMatplotlib(OnepassError):
    code = "ONEPASS-812"
    message = (
        'Plots need matplotlib, which is not installed. Install it with onepass: pip install "onepass-torch[plot]". Or '
        "install it alone: pip install matplotlib."
    )
