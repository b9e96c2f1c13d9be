"""`python -m tests.campaign NAME ...`: each campaign is a module with a `main`."""

from __future__ import annotations

import importlib
import sys

CAMPAIGNS = ("edges", "graphs", "opinfo", "store", "workers")


def main() -> int:
    """Hand the arguments to the campaign named first."""
    if len(sys.argv) < 2 or sys.argv[1] not in CAMPAIGNS:
        sys.stderr.write(f"usage: python -m tests.campaign {{{','.join(CAMPAIGNS)}}} [--help]\n")
        return 2
    return int(importlib.import_module(f"tests.campaign.{sys.argv[1]}").main(sys.argv[2:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
