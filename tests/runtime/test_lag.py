from __future__ import annotations

import asyncio
import gc
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from services.core.metrics import Labels
from services.runtime.lag import METRICS, PERIOD_S, PROBE_INTERVAL_S, Durations, LoopWatch
from tests.runtime.waiting import eventually


def values(watch: LoopWatch, name: str) -> dict[Labels, float]:
    return {each.labels: each.value for each in watch.read() if each.name == name}


@given(
    st.lists(st.floats(60e-6, 10.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99])
)
def test_quantiles_are_exact_to_a_fifth(durations_s: list[float], share: float) -> None:
    durations = Durations(0.0)
    for duration_s in durations_s:
        durations.add(duration_s, 1.0)
    ordered = sorted(durations_s)
    exact_s = ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
    assert exact_s <= durations.quantile_s(share, 1.0) * (1 + 1e-9)
    assert durations.quantile_s(share, 1.0) <= exact_s * 1.2 * (1 + 1e-9)
    assert durations.quantile_s(1.0, 1.0) == ordered[-1]


def test_what_is_long_ago_is_forgotten() -> None:
    durations = Durations(0.0)
    durations.add(3.0, 1.0)
    durations.add(0.001, PERIOD_S + 1)
    assert durations.longest_s(PERIOD_S + 2) == 3.0
    assert durations.longest_s(2 * PERIOD_S + 2) == 0.001
    assert durations.longest_s(9 * PERIOD_S) == 0.0
    assert durations.quantile_s(0.99, 9 * PERIOD_S) == 0.0


def test_none_is_no_lag() -> None:
    assert Durations(0.0).quantile_s(0.5, 0.0) == 0.0


async def test_a_loop_that_was_held_up_says_so() -> None:
    with LoopWatch() as watch:
        await asyncio.sleep(0)
        time.sleep(PROBE_INTERVAL_S + 0.1)  # noqa: ASYNC251
        await eventually(lambda: watch.lags.longest_s(time.monotonic()) > 0)
        lags_s = values(watch, "firsttoken.process.loop.lag")
    assert lags_s[(("quantile", "1"),)] >= 0.09
    assert lags_s[(("quantile", "0.5"),)] > 0


async def test_a_thread_that_takes_the_gil_is_waited_for() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    with LoopWatch() as watch:
        thread.start()
        try:
            # It gives the GIL back after sys.getswitchinterval(), 5 ms.
            await eventually(lambda: watch.gil_waits.longest_s(time.monotonic()) > 0.002)
        finally:
            stop.set()
            thread.join()
        waits_s = values(watch, "firsttoken.process.gil.wait")
    assert waits_s[(("quantile", "1"),)] > 0.002


async def test_collections_of_garbage_are_counted_while_it_watches() -> None:
    with LoopWatch() as watch:
        before = values(watch, "firsttoken.process.gc.collections")
        gc.collect()
        after = values(watch, "firsttoken.process.gc.collections")
        assert after[(("generation", "2"),)] == before[(("generation", "2"),)] + 1
        [paused_s] = values(watch, "firsttoken.process.gc.pauses").values()
        [longest_s] = values(watch, "firsttoken.process.gc.longest_pause").values()
        assert 0 < longest_s <= paused_s
    gc.collect()
    assert values(watch, "firsttoken.process.gc.collections") == after


async def test_it_tells_what_it_describes() -> None:
    with LoopWatch() as watch:
        assert {each.name for each in watch.read()} == {metric.name for metric in METRICS}
        [memory] = values(watch, "firsttoken.process.memory").values()
    assert memory > 1 << 20
