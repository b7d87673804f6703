from __future__ import annotations

from kvstore.counters import MAX_TENANTS, OTHER_TENANTS, Counters, TenantCounts


def test_hits_and_evictions_count_for_their_tenant() -> None:
    counters = Counters()
    counters.hit("a", 10)
    counters.hit("a", 10)
    counters.hit("b", 5)
    counters.evicted({"b": 3})

    assert (counters.num_hits, counters.bytes_read, counters.num_evicted) == (3, 25, 3)
    assert counters.by_tenant({"a": 7}) == {
        "a": TenantCounts(num_blocks=7, num_hits=2, num_evicted=0),
        "b": TenantCounts(num_blocks=0, num_hits=1, num_evicted=3),
    }


def test_only_so_many_tenants_are_counted_by_name() -> None:
    counters = Counters()
    for number in range(MAX_TENANTS + 5):
        counters.hit(f"tenant {number}", 1)

    by_tenant = counters.by_tenant({f"tenant {number}": 2 for number in range(MAX_TENANTS + 5)})

    assert len(by_tenant) == MAX_TENANTS + 1
    assert by_tenant[OTHER_TENANTS] == TenantCounts(num_blocks=10, num_hits=5, num_evicted=0)
