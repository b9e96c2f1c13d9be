"""onepass: a reduction-fusion compiler for PyTorch on NVIDIA GPUs. Every byte crosses DRAM once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .device import DEVICES, Device
from .errors import OnepassError

if TYPE_CHECKING:
    from .integration.fuse import fuse
    from .integration.inductor import backend, disable, enable
    from .integration.settings import settings
    from .tools.explain import Report, explain
    from .tools.process_report import report

__version__ = "0.1.0"
# fmt: off
__all__ = ["backend", "settings", "enable", "disable", "fuse", "explain", "report", "Report", "Device", "DEVICES",
           "OnepassError", "__version__"]
# fmt: on

# Imported at first use, so that `import onepass` stays cheap.
_LAZY = {
    "backend": ".integration.inductor",
    "enable": ".integration.inductor",
    "disable": ".integration.inductor",
    "settings": ".integration.settings",
    "fuse": ".integration.fuse",
    "explain": ".tools.explain",
    "Report": ".tools.explain",
    "report": ".tools.process_report",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'onepass' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
