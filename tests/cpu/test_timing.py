"""Times from recorded events: which kernels belong to which call, medians, spreads, how often a call runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from onepass.device import device
from onepass.errors import NotMeasured
from onepass.measure import timing
from onepass.measure.timing import (
    MARKER,
    Event,
    Timed,
    anchor_bytes,
    busy_us,
    calls_by_name,
    copies_for,
    interleaved_order,
    run_count,
    split_at_markers,
    summarize_runs,
)
from onepass.runtime import offline
from onepass.runtime.stopwatch import spread as spread_of


def recorded(*calls: tuple[float, ...], flush: float = 60.0) -> list[Event]:
    """Events of calls, each given by its kernels' durations, as a card runs them: flush, mark, kernels, mark."""
    events, at = [], 0.0

    def add(name: str, us: float) -> None:
        nonlocal at
        events.append(Event(name, at, us))
        at += us + 0.5

    add("Memset (Device)", flush)  # before the first call, too
    for kernels in calls:
        add("Memset (Device)", flush)
        add("reduce_kernel", flush)
        add(MARKER, 1.0)
        for k, us in enumerate(kernels):
            add(f"kernel_{k}", us)
        add(MARKER, 1.0)
    return events


def test_kernels_between_markers_belong_to_one_call() -> None:
    events = recorded((10.0, 2.0), (20.0,), ())
    assert [[e.us for e in ran] for ran in split_at_markers(events, 3)] == [[10.0, 2.0], [20.0], []]
    assert split_at_markers(reversed(events), 3) == split_at_markers(events, 3)  # a profiler guarantees no order


@pytest.mark.parametrize("lost", [1, -1])
def test_a_lost_marker_is_an_error(lost: int) -> None:
    events = recorded((10.0,), (20.0,))
    marks = [k for k, e in enumerate(events) if e.name == MARKER]
    with pytest.raises(NotMeasured, match="3 markers instead of 4"):
        split_at_markers(events[: marks[lost]] + events[marks[lost] + 1 :], 2)
    with pytest.raises(NotMeasured, match="instead of 6"):
        split_at_markers(events, 3)


def test_calls_are_identified_by_their_launch_order() -> None:
    found = calls_by_name(recorded((10.0,), (7.0, 1.0), (11.0,), (8.0, 1.0)), ("a", "b", "a", "b"))
    assert {name: [busy_us(ran) for ran in ran_all] for name, ran_all in found.items()} == {"a": [10.0, 11.0], "b": [8.0, 9.0]}


def test_overlapping_kernels_count_once() -> None:
    assert busy_us([Event("a", 0.0, 10.0), Event("b", 8.0, 4.0)]) == 12.0
    assert busy_us([Event("a", 0.0, 10.0), Event("b", 2.0, 4.0), Event("c", 20.0, 1.0)]) == 11.0
    assert busy_us([]) == 0.0


def test_a_time_is_the_median_of_runs_with_the_same_kernels() -> None:
    runs = [[Event("k", 0.0, us)] for us in (10.0, 11.0, 12.0, 13.0, 50.0)]
    found = summarize_runs(runs)
    assert (found.us, found.runs, found.kernels) == (12.0, 5, 1)
    odd = [Event("k", 0.0, 1.0), Event("first call only", 2.0, 99.0)]
    assert summarize_runs([*runs, odd]) == found
    with pytest.raises(NotMeasured, match="not always run the same kernels"):
        summarize_runs([*runs, odd, odd])
    with pytest.raises(NotMeasured, match="ran nothing"):
        summarize_runs([[], []])


def test_spread_is_between_percentiles() -> None:
    assert spread_of([10.0] * 5) == 0.0 and spread_of([3.0]) == 0.0
    assert spread_of([float(n) for n in range(11)]) == pytest.approx((8 - 2) / 5)


def test_long_calls_run_less_often() -> None:
    assert run_count(10.0) == 20 and run_count(10_000.0) == 10 and run_count(1e6) == 5 and run_count(0.0) == 20


def test_calls_alternate_in_a_balanced_order() -> None:
    order = interleaved_order({"a": 3, "b": 3, "c": 1})
    assert order == ("a", "b", "c", "b", "a", "a", "b")
    assert interleaved_order({}) == ()


def test_anchors_span_the_floors_of_a_suite() -> None:
    assert anchor_bytes([100, 40 << 20]) == (1 << 20, 1 << 22, 1 << 24, 1 << 25)
    assert anchor_bytes([1 << 40])[-1] == 1 << 32 and anchor_bytes([]) == ()


def test_at_most_half_of_the_free_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (1000, 2000))
    monkeypatch.setattr(torch, "empty", lambda size, **how: reserved.append((size, how["device"].type)))
    for wanted in (300, 3000):
        timing.reserve_memory(wanted, torch.device("cuda"))
    assert reserved == [(300, "cuda"), (500, "cuda")]


def test_graphs_rotate_over_more_than_a_cache_or_are_not_used() -> None:
    assert copies_for(400 << 20, 60 << 20) == 2 and copies_for(20 << 20, 60 << 20) == 12
    assert copies_for(8192, 60 << 20) is None


class ScriptedClock(timing.Clock):
    """A clock whose sessions return given recordings."""

    def __init__(self, *sessions: list[Event]) -> None:
        self.sessions = list(sessions)

    def _rough_us(self, call: timing.Call) -> float:
        return 1e9  # a long time, for the minimum number of runs

    def _recorded(self, calls: Mapping[str, timing.Call], order: Sequence[str]) -> list[Event]:
        assert order == ("a", "b", "b", "a", "a", "b", "b", "a", "a", "b")
        return self.sessions.pop(0)


CALLS: dict[str, timing.Call] = {"a": lambda: None, "b": lambda: None}
A, B = (10.0,), (4.0, 3.0)
WHOLE = recorded(A, B, B, A, A, B, B, A, A, B)


def test_a_session_that_lost_events_is_repeated() -> None:
    clock = ScriptedClock(WHOLE[4:], WHOLE)
    found = clock.times(CALLS)
    assert found == {"a": Timed(10.0, 0.0, 5, 1), "b": Timed(7.0, 0.0, 5, 2)} and not clock.sessions
    with pytest.raises(NotMeasured, match="markers"):
        ScriptedClock(*[WHOLE[4:]] * timing.MAX_SESSIONS).times(CALLS)


def test_a_call_that_cannot_be_timed_does_not_affect_others() -> None:
    found = ScriptedClock(recorded(A, (), (), A, A, (), (), A, A, ())).times(CALLS)
    assert found["a"] == Timed(10.0, 0.0, 5, 1) and isinstance(found["b"], NotMeasured)


def test_the_marker_kernel_compiles() -> None:
    binary = offline.compile(timing._MARKER_SOURCE, device("h200"))
    assert binary.spill_bytes == 0 and sum(binary.stores.values()) == 1
