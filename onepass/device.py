"""GPU facts by name. Planning and code generation know a device only through these frozen records."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import UnknownDevice


@dataclass(frozen=True, slots=True)
class Device:
    """Facts of one GPU that the cost model uses. Times are microseconds, rates are bytes per microsecond (1 GB/s = 1e3 B/us)."""

    name: str
    title: str
    capability: tuple[int, int]
    sms: int
    bandwidth: float  # best sustained DRAM rate of a simple kernel
    l2_bandwidth: float
    l2_bytes: int
    latency: float  # latency of a loaded memory system; an SM needs bandwidth * latency / sms bytes in flight
    clock: float  # cycles per microsecond under load
    launch: float  # cost of one more kernel inside a CUDA graph: drain, launch and ramp
    source: str  # how the figures were obtained
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    threads_per_sm: int = 2048
    ctas_per_sm: int = 32
    smem_per_sm: int = 233472
    smem_per_cta: int = 232448
    smem_reserve: int = 1024  # the driver reserves this for every CTA
    corrections: tuple[tuple[str, float], ...] = ()  # (kernel family, measured time / modeled time)

    @property
    def bytes_in_flight(self) -> float:
        """Bytes that every SM must keep outstanding to saturate DRAM."""
        return self.bandwidth * self.latency / self.sms

    def correction(self, family: str) -> float:
        """Factor on the modeled time of a kernel family; 1 if it was never measured."""
        return dict(self.corrections).get(family, 1.0)

    @property
    def target(self) -> int:
        """Triton's architecture number: 90 for sm_90."""
        return self.capability[0] * 10 + self.capability[1]


_DATASHEET = "datasheet bandwidth at 0.93; latency and L2 rate scaled from the H200"

DEVICES = {
    d.name: d
    for d in (
        # 2026-11, torch 2.11, Triton 3.6: `add` of two 128 MiB tensors sustains 4.50 TB/s after a clean L2 flush; a second
        # kernel that sums 132 partial rows costs 2.9 us.
        Device(
            name="h200",
            title="NVIDIA H200 SXM",
            capability=(9, 0),
            sms=132,
            bandwidth=4.50e6,
            l2_bandwidth=5.5e6,
            l2_bytes=60 << 20,
            latency=1.25,
            clock=1830.0,
            launch=2.5,
            source="measured",
        ),
        Device(
            name="h100",
            title="NVIDIA H100 SXM",
            capability=(9, 0),
            sms=132,
            bandwidth=3.12e6,
            l2_bandwidth=5.5e6,
            l2_bytes=50 << 20,
            latency=1.25,
            clock=1755.0,
            launch=2.5,
            source=_DATASHEET,
        ),
        Device(
            name="b200",
            title="NVIDIA B200",
            capability=(10, 0),
            sms=148,
            bandwidth=7.60e6,
            l2_bandwidth=10.0e6,
            l2_bytes=126 << 20,
            latency=1.25,
            clock=1920.0,
            launch=2.5,
            source=_DATASHEET,
        ),
        Device(
            name="a100",
            title="NVIDIA A100 SXM 80GB",
            capability=(8, 0),
            sms=108,
            bandwidth=1.90e6,
            l2_bandwidth=4.0e6,
            l2_bytes=40 << 20,
            latency=1.25,
            clock=1410.0,
            launch=2.5,
            source=_DATASHEET,
            smem_per_sm=167936,
            smem_per_cta=166912,
        ),
        Device(
            name="l40s",
            title="NVIDIA L40S",
            capability=(8, 9),
            sms=142,
            bandwidth=0.80e6,
            l2_bandwidth=5.9e6,
            l2_bytes=96 << 20,
            latency=1.25,
            clock=2520.0,
            launch=2.5,
            source=_DATASHEET,
            threads_per_sm=1536,
            ctas_per_sm=24,
            smem_per_sm=102400,
            smem_per_cta=101376,
        ),
        Device(
            name="rtx4090",
            title="NVIDIA GeForce RTX 4090",
            capability=(8, 9),
            sms=128,
            bandwidth=0.94e6,
            l2_bandwidth=5.3e6,
            l2_bytes=72 << 20,
            latency=1.25,
            clock=2520.0,
            launch=2.5,
            source=_DATASHEET,
            threads_per_sm=1536,
            ctas_per_sm=24,
            smem_per_sm=102400,
            smem_per_cta=101376,
        ),
        Device(
            name="rtx5090",
            title="NVIDIA GeForce RTX 5090",
            capability=(12, 0),
            sms=170,
            bandwidth=1.67e6,
            l2_bandwidth=7.1e6,
            l2_bytes=96 << 20,
            latency=1.25,
            clock=2407.0,
            launch=2.5,
            source=_DATASHEET,
            threads_per_sm=1536,
            ctas_per_sm=24,
            smem_per_sm=102400,
            smem_per_cta=101376,
        ),
    )
}
_BRANDS = re.compile(r"nvidia|geforce|[^a-z0-9]+")


def device(name: "str | Device") -> Device:
    """Look up a device by its name or title, whatever the case and spacing: "h200", "RTX 5090", "NVIDIA A100 SXM 80GB".

    A Device is returned as is.
    """
    if isinstance(name, Device):
        return name
    plain = _plain(name)
    found = next((d for d in DEVICES.values() if plain in (d.name, _plain(d.title))), None)
    if found is None:
        raise UnknownDevice(name=name, known=", ".join(sorted(DEVICES)))
    return found


def listed_as(title: str, sms: int) -> Device | None:
    """The listed device that a driver reports under this title with this many SMs.

    The title alone does not tell: a MIG slice, or a cut-down build of the same chip, has the same name but fewer SMs.
    """
    words = _BRANDS.sub(" ", title.lower()).split()
    spelled = {"".join(words[i:j]) for i in range(len(words)) for j in (i + 1, i + 2)}
    return next((d for d in DEVICES.values() if d.name in spelled and d.sms == sms), None)


def _plain(name: str) -> str:
    return _BRANDS.sub("", name.lower())
