"""Frozen facts of a GPU, by name. Planning and code generation know a device only through these."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnknownDevice


@dataclass(frozen=True, slots=True)
class Device:
    """What the cost model needs to know. Rates are bytes per microsecond (1 GB/s = 1e3 B/us), times microseconds."""

    name: str
    title: str
    capability: tuple[int, int]
    sms: int
    bandwidth: float  # best sustained DRAM rate of a simple kernel
    l2_bandwidth: float
    l2_bytes: int
    latency: float  # of a loaded memory system; bandwidth * latency / sms bytes must be in flight per SM
    clock: float  # cycles per microsecond under load
    launch: float  # what one more kernel costs inside a graph: drain, launch and ramp
    source: str  # how the figures were obtained
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    threads_per_sm: int = 2048
    ctas_per_sm: int = 32
    smem_per_sm: int = 233472
    smem_per_cta: int = 232448
    smem_reserve: int = 1024  # taken by the driver for every CTA
    corrections: tuple[tuple[str, float], ...] = ()  # (family, how many times longer than modelled its kernels take here)

    @property
    def bytes_in_flight(self) -> float:
        """Bytes every SM must have outstanding to keep DRAM busy."""
        return self.bandwidth * self.latency / self.sms

    def correction(self, family: str) -> float:
        """What the modelled time of a family's kernels is multiplied by; 1 where nothing was measured."""
        return dict(self.corrections).get(family, 1.0)

    @property
    def target(self) -> int:
        """The number Triton calls the architecture: 90 for sm_90."""
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
    """The device of that name (case does not matter); a Device is itself."""
    if isinstance(name, Device):
        return name
    found = DEVICES.get(name.lower())
    if found is None:
        raise UnknownDevice(name=name, known=", ".join(sorted(DEVICES)))
    return found
