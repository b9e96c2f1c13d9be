"""The GPU in this machine: its Device record for planning, and what onepass can do here, for `onepass doctor`."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from functools import cache
from typing import Any

import torch

from .. import compat
from ..device import DEVICES, Device, device, listed_as
from ..errors import NoGpu, OnepassError
from .measured import card_of, with_measurements

MIN_CAPABILITY = (8, 0)  # the lowest compute capability that kernels support


@cache
def local_device(index: int = 0) -> Device | None:
    """The Device record of a local GPU: a listed device or one from driver queries, plus measurements of this GPU; None without
    a GPU. The record stays the same for the life of the process, even if new measurements are saved meanwhile."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(index)
    return with_measurements(identify(properties), card_of(properties))


def resolve_device(name: "str | Device") -> Device:
    """The device of a name. `here` is the GPU of this machine, with its measurements."""
    if name != "here":
        return device(name)
    found = local_device()
    if found is None:
        raise NoGpu(what="The device `here`", detail=launch_unavailable_reason())
    return found


def identify(properties: Any) -> Device:
    """The listed device with these properties, or a new Device made from them."""
    return listed_as(properties.name, properties.multi_processor_count) or _from_driver(properties)


def _from_driver(properties: Any) -> Device:
    """A Device from driver queries. Values the driver does not report are scaled from the listed device nearest in generation."""
    capability, sms = (properties.major, properties.minor), properties.multi_processor_count
    like = min(DEVICES.values(), key=lambda d: (abs(d.capability[0] - capability[0]), abs(d.sms - sms)))
    share = sms / like.sms
    clock_khz, bus_bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    # Two transfers per clock; a simple kernel reaches 0.93 of the peak on the listed devices.
    bandwidth = 0.93 * 2 * clock_khz * 1e3 * bus_bits / 8 / 1e6 or like.bandwidth * share
    return Device(
        name=re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-"),
        title=properties.name,
        capability=capability,
        sms=sms,
        bandwidth=bandwidth,
        l2_bandwidth=like.l2_bandwidth * share,
        l2_bytes=properties.L2_cache_size,
        latency=like.latency,
        clock=getattr(properties, "clock_rate", 0) / 1e3 or like.clock,
        launch=like.launch,
        source=f"driver query; latency and L2 rate scaled from {like.name}",
        registers_per_sm=properties.regs_per_multiprocessor,
        threads_per_sm=properties.max_threads_per_multi_processor,
        smem_per_sm=getattr(properties, "shared_memory_per_multiprocessor", like.smem_per_sm),
        smem_per_cta=getattr(properties, "shared_memory_per_block_optin", like.smem_per_cta),
    )


def doctor_facts() -> dict[str, Any]:
    """Versions, GPU, driver, and what is usable (with reasons), as JSON-compatible values for a bug report."""
    pair, launch = compat.triton_pair(torch.__version__), _verdict(launch_unavailable_reason())
    return {
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "triton_pair": pair,
        "triton_is_pair": pair is not None and _version("triton") == pair,
        "torch_cuda": torch.version.cuda,
        "driver_cuda": compat.cuda_driver_level(),
        "card": _card(),
        "ptxas": _ptxas(),
        "usable": {"interpret": _interpreter_usable(), "offline": _offline_usable(), "launch": launch},
    }


_PACKAGES = ("onepass-torch", "torch", "triton", "numpy", "rich", "typer")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _card() -> dict[str, Any] | None:
    found = local_device()
    if found is None:
        return None
    properties = torch.cuda.get_device_properties(0)
    capability = ".".join(map(str, found.capability))
    return {
        "title": properties.name,
        "device": found.name,
        "source": found.source,
        "capability": capability,
        "corrections": [f"{family} x {factor}" for family, factor in found.corrections],
        "sms": found.sms,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cards": torch.cuda.device_count(),
    }


def _ptxas() -> str | None:
    try:
        return compat.ptxas(90)
    except (ImportError, AttributeError, RuntimeError):
        return None


def _verdict(trouble: str | None) -> dict[str, Any]:
    return {"ok": trouble is None, "why": trouble}


def _interpreter_usable() -> dict[str, Any]:
    try:
        compat.triton_interpreter()
    except (OnepassError, ImportError) as error:
        return _verdict(str(error))
    return _verdict(None)


def _offline_usable() -> dict[str, Any]:
    if _version("triton") is None:
        return _verdict("Triton is not installed")
    return _verdict(None if _ptxas() else "Triton's ptxas was not found or does not run on this machine")


def launch_unavailable_reason() -> str | None:
    """Why kernels cannot be launched here; None if they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU (is the driver new enough?)" if torch.version.cuda else "this torch is a CPU build"
    capability = torch.cuda.get_device_capability(0)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is older than {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return None if _version("triton") else "Triton is not installed"
