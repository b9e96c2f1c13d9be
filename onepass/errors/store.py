"""Errors of measuring a card, and of what is kept on disk: ONEPASS-401 to 403 and 501 to 503."""

from __future__ import annotations

from .base import OnepassError


class NoGpu(OnepassError):
    code = "ONEPASS-401"
    message = (
        "{what} needs a CUDA GPU, and torch cannot use one here ({detail}). Run it on a machine with a GPU; "
        "`onepass doctor` shows what torch finds."
    )


class ImplausibleMeasurement(OnepassError):
    code = "ONEPASS-402"
    message = (
        "{what} was measured as {value}, which is implausible (expected: {expected}), so nothing was saved. Another process "
        "may be using the GPU, or its clocks may be changing. Try again when the GPU is idle."
    )


class CalibrationNotSaved(OnepassError):
    code = "ONEPASS-403"
    message = (
        "{what} cannot be saved because the cache {detail}. Set ONEPASS_CACHE=1 and a writable folder in ONEPASS_CACHE_DIR, "
        "or use --dry-run to see the figures without saving them."
    )


class StoreUnusable(OnepassError):
    code = "ONEPASS-501"
    message = (
        "The cache folder {folder} cannot be {use}: {detail}. onepass works without it, but each process plans and compiles "
        "again. Set another folder in ONEPASS_CACHE_DIR, or set ONEPASS_CACHE=0 to silence this warning."
    )


class EntryQuarantined(OnepassError):
    code = "ONEPASS-502"
    message = (
        "The cache entry {entry} was not used: {detail}. onepass quarantined it and builds it again, so nothing is lost. "
        "If this repeats, delete the folder {folder}."
    )


class SourcesNotKept(OnepassError):
    code = "ONEPASS-503"
    message = (
        "Kernel sources could not be written to {folder}: {detail}. The kernels still work. Set a writable folder in "
        "ONEPASS_KEEP_SOURCES, or unset it."
    )
