"""What the store counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

# Tenants counted by name; those that come later share one name.
MAX_TENANTS = 64
OTHER_TENANTS = "other"


class TenantCounts(NamedTuple):
    num_blocks: int
    num_hits: int
    num_evicted: int


class Counters:
    def __init__(self) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.num_evicted = 0
        # Blocks that did not verify, or were not taken, by reason.
        self.rejected: Counter[str] = Counter()
        self._tenants: set[str] = set()
        self._hits: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()

    def hit(self, tenant: str, num_bytes: int) -> None:
        self.num_hits += 1
        self.bytes_read += num_bytes
        self._hits[self._name(tenant)] += 1

    def evicted(self, by_tenant: Mapping[str, int]) -> None:
        for tenant, number in by_tenant.items():
            self.num_evicted += number
            self._evicted[self._name(tenant)] += number

    def by_tenant(self, num_blocks: Mapping[str, int]) -> dict[str, TenantCounts]:
        """`num_blocks`: what each holds now."""
        held: Counter[str] = Counter()
        for tenant, number in num_blocks.items():
            held[self._name(tenant)] += number
        names = sorted(held.keys() | self._hits.keys() | self._evicted.keys())
        return {
            name: TenantCounts(held[name], self._hits[name], self._evicted[name]) for name in names
        }

    def _name(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant
