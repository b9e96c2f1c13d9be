"""GPU facts by name. Planning and code generation know a device only through these frozen records."""

from __future__ import annotations

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
        Device("h200", "NVIDIA H200 SXM", (9, 0), 132, 4.50e6, 5.5e6, 60 << 20, 1.25, 1830.0, 2.5, "measured"),
        Device("h100", "NVIDIA H100 SXM", (9, 0), 132, 3.12e6, 5.5e6, 50 << 20, 1.25, 1755.0, 2.5, _DATASHEET),
        Device("b200", "NVIDIA B200", (10, 0), 148, 7.60e6, 10.0e6, 126 << 20, 1.25, 1920.0, 2.5, _DATASHEET),
        Device("a100", "NVIDIA A100 SXM 80GB", (8, 0), 108, 1.90e6, 4.0e6, 40 << 20, 1.25, 1410.0, 2.5, _DATASHEET,
               smem_per_sm=167936, smem_per_cta=166912),
    )
}


def device(name: "str | Device") -> Device:
    """Look up a device by name, case-insensitively. A Device is returned as is."""
    if isinstance(name, Device):
        return name
    found = DEVICES.get(name.lower())
    if found is None:
        raise UnknownDevice(name=name, known=", ".join(sorted(DEVICES)))
    return found
