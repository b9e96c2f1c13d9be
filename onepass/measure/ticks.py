"""Where the ticks and labels of a chart go."""

from __future__ import annotations

import math
from collections.abc import Sequence


def labeled_ticks(places: Sequence[int], doubling: float) -> list[int]:
    """The sizes whose labels fit if a doubling is `doubling` inches wide: the ends first, then powers of two."""
    digit, between = 0.078, 0.1  # inches

    def is_separate(a: int, b: int) -> bool:
        return abs(math.log2(a / b)) * doubling >= digit * (len(str(a)) + len(str(b))) / 2 + between

    shown: list[int] = []
    for place in sorted(places, key=lambda p: (p not in (places[0], places[-1]), p & (p - 1) != 0, p)):
        if all(is_separate(place, other) for other in shown):
            shown.append(place)
    return sorted(shown)


def nice_ticks(low: float, high: float) -> list[float]:
    """Round tick values on a logarithmic axis: at least four, if the steps allow it, and few enough to read."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 7, 8)):
        ticks = [t for d in decades for s in steps if low <= (t := float(f"{s * 10.0**d:g}")) <= high]
        if len(ticks) >= 4:
            break
    return ticks


def floor_ticks(high: float) -> list[float]:
    """Ticks of an axis of times the floor, which begins at 1."""
    if high > 6:
        return [t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if t <= high]
    return [t for t in (1, 1.25, 1.5, 2, 3, 4, 5) if t <= high] if high > 2 else [t for t in (1, 1.1, 1.25, 1.5, 1.75) if t <= high]


def spread_out(wished: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions between `low` and `high`, at least `gap` apart, in the order of the wished positions and close to them."""
    order = sorted(range(len(wished)), key=lambda i: wished[i])
    blocks: list[list[float]] = []  # of adjacent positions: the mean start of the block, and its length
    for place, i in enumerate(order):
        blocks.append([wished[i] - place * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append([(a * m + b * n) / (m + n), m + n])
    starts = [start for start, n in blocks for _ in range(int(n))]
    last = max(low, high - (len(wished) - 1) * gap)
    found = [0.0] * len(wished)
    for place, i in enumerate(order):
        found[i] = min(max(starts[place], low), last) + place * gap
    return found
