from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.eviction import POLICIES, Lru, S3Fifo
from kvstore.index import LEASE_S, BlockIndex
from kvstore.tier2 import Record
from services.core.kvblocks import Block


def key(name: str, index: int) -> bytes:
    return f"{name} {index}".encode()


def record(name: str, index: int, tenant: str = "") -> Record:
    storage_key = key(name, index)
    return Record(Block(storage_key, b"prefix " + storage_key, b"f", index, 1, 1), tenant, b"")


def put(index: BlockIndex, name: str, length: int, *, tenant: str = "", now_s: float = 0.0) -> int:
    """Blocks of a chain, all of it if there is room; how many went in."""
    chain = [key(name, depth) for depth in range(length)]
    for depth in range(length):
        parent = chain[depth - 1] if depth else b""
        if index.reserve(chain[depth], parent, tenant, now_s, chain) is None:
            return depth
        index.commit([record(name, depth, tenant)])
    return length


def match(index: BlockIndex, name: str, length: int) -> int:
    return index.match([key(name, depth) for depth in range(length)])


def test_a_block_can_be_found_once_it_is_committed() -> None:
    index = BlockIndex(4, Lru)
    slot = index.reserve(key("a", 0), b"", "", 0.0)
    assert key("a", 0) in index
    assert index.find(key("a", 0)) is None
    index.commit([record("a", 0)])

    entry = index.find(key("a", 0))
    assert entry is not None
    assert entry.slot == slot == index.slot_of(key("a", 0))
    assert set(index.prefix_keys) == {b"prefix a 0"}


def test_a_full_index_evicts_the_oldest_chain_from_its_end() -> None:
    index = BlockIndex(8, Lru)
    put(index, "old", 5)
    put(index, "new", 3)
    put(index, "newer", 2)

    assert match(index, "old", 5) == 3
    assert match(index, "new", 3) == 3
    assert list(index.take_changes().evicted) == []
    assert index.take_evicted() == {"": 2}


def test_a_chain_that_was_used_outlives_one_that_was_not() -> None:
    index = BlockIndex(8, Lru)
    put(index, "used", 4)
    put(index, "unused", 4)
    index.touch([key("used", depth) for depth in range(4)])
    put(index, "new", 3)

    assert match(index, "used", 4) == 4
    assert match(index, "unused", 4) == 1


def test_the_shared_head_of_two_chains_goes_last() -> None:
    index = BlockIndex(7, Lru)
    put(index, "head", 2)
    for name in ("left", "right"):
        for depth in range(2):
            parent = key(name, depth - 1) if depth else key("head", 1)
            assert index.reserve(key(name, depth), parent, "", 0.0) is not None
            index.commit([record(name, depth)])
    evicted = []
    for number in range(7):
        put(index, f"new {number}", 1)
        evicted += [each.decode() for each in index.take_changes().evicted]

    assert [each.removeprefix("prefix ") for each in evicted] == [
        *("left 1", "left 0", "right 1", "right 0", "head 1", "head 0")
    ]


def test_a_block_whose_next_is_on_its_way_stays() -> None:
    index = BlockIndex(2, Lru)
    put(index, "a", 1)
    index.reserve(key("a", 1), key("a", 0), "", 0.0)

    assert put(index, "b", 1) == 0
    assert match(index, "a", 1) == 1


def test_a_chain_never_evicts_its_own_beginning() -> None:
    index = BlockIndex(3, Lru)

    assert put(index, "long", 9) == 3
    assert match(index, "long", 9) == 3


def test_a_leased_block_goes_only_when_nothing_else_can() -> None:
    index = BlockIndex(2, Lru)
    put(index, "leased", 1)
    put(index, "other", 1)
    index.lease(key("leased", 0), 0.0)

    put(index, "new", 1, now_s=LEASE_S / 2)
    assert match(index, "leased", 1) == 1
    index.lease(key("new", 0), LEASE_S / 2)

    assert put(index, "newer", 1, now_s=LEASE_S / 2) == 1
    assert match(index, "leased", 1) == 0


def test_a_lease_ends() -> None:
    index = BlockIndex(2, Lru)
    put(index, "leased", 1)
    put(index, "other", 1)
    index.lease(key("leased", 0), 0.0)
    put(index, "new", 1, now_s=LEASE_S * 2)

    assert match(index, "leased", 1) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_are_each_others_parents_can_be_evicted(policy: str) -> None:
    index = BlockIndex(12, POLICIES[policy])
    for number in range(4):
        ring = [key(f"ring {number}", depth) for depth in range(3)]
        for depth in range(3):
            assert index.reserve(ring[depth], ring[depth - 1], "", 0.0) is not None
            index.commit([record(f"ring {number}", depth)])

    assert put(index, "a", 12) == 12
    index.check_integrity()


def test_a_ring_that_a_chain_leads_into_can_be_evicted() -> None:
    index = BlockIndex(4, Lru)
    put(index, "a", 2)
    for depth, parent in ((2, key("a", 3)), (3, key("a", 2))):
        index.reserve(key("a", depth), parent, "", 0.0)
        index.commit([record("a", depth)])
    index.drop(key("a", 1))
    index.reserve(key("a", 1), key("a", 2), "", 0.0)
    index.commit([record("a", 1)])

    assert put(index, "new", 4) == 4


def test_an_index_of_any_size_is_there_at_once() -> None:
    index = BlockIndex(1 << 60, S3Fifo)

    assert put(index, "a", 3) == 3
    index.check_integrity()


def test_writers_hold_half_of_the_slots_at_most() -> None:
    index = BlockIndex(8, Lru)
    slots = [index.reserve(key("a", depth), b"", "", 0.0) for depth in range(6)]

    assert [slot is not None for slot in slots] == [True] * 4 + [False] * 2


def test_a_slot_given_back_is_used_after_all_others() -> None:
    index = BlockIndex(4, Lru)
    index.reserve(key("a", 0), b"", "", 0.0)
    given_back = index.release(key("a", 0))
    slots = []
    for number in range(4):
        slots.append(index.reserve(key("b", number), b"", "", 0.0))
        index.commit([record("b", number)])

    assert slots[-1] == given_back
    assert len(set(slots)) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_at_its_share_pushes_out_its_own(policy: str) -> None:
    index = BlockIndex(40, POLICIES[policy], max_tenant_share=0.25)
    put(index, "quiet", 10, tenant="quiet")
    for number in range(30):
        put(index, f"loud {number}", 4, tenant="loud")
        index.check_integrity()

    assert index.tenants() == {"quiet": 10, "loud": 10}
    assert index.take_evicted() == {"loud": 110}


def test_a_loud_tenant_does_not_wear_out_what_others_use() -> None:
    """Its evictions leave the others' standing with the policy alone."""
    index = BlockIndex(40, POLICIES["s3fifo"], max_tenant_share=0.5)
    put(index, "used", 10, tenant="quiet")
    put(index, "unused", 10, tenant="quiet")
    index.touch([key("used", depth) for depth in range(10)])
    for number in range(50):
        put(index, f"loud {number}", 4, tenant="loud")
    put(index, "third", 10, tenant="third")

    assert match(index, "used", 10) == 10


def test_a_lowered_share_is_reached_step_by_step() -> None:
    index = BlockIndex(20, Lru)
    put(index, "a", 20, tenant="a")
    index.max_tenant_share = 0.25
    sizes = []
    for number in range(16):
        put(index, f"new {number}", 1, tenant="a")
        sizes.append(index.tenants()["a"])

    assert sizes == [*range(19, 4, -1), 5]


def test_a_raised_share_is_used_at_once() -> None:
    index = BlockIndex(20, Lru, max_tenant_share=0.25)
    put(index, "a", 5, tenant="a")
    put(index, "b", 2, tenant="a")
    index.max_tenant_share = 1.0
    put(index, "c", 10, tenant="a")

    assert index.tenants() == {"a": 15}
    index.check_integrity()


def test_what_has_come_lately_is_known_by_its_age() -> None:
    index = BlockIndex(4, Lru)
    index.reserve(key("a", 0), b"", "", 100.0)

    assert index.came_within(key("a", 0), 10.0, 105.0)
    assert not index.came_within(key("a", 0), 10.0, 111.0)
    assert not index.came_within(key("b", 0), 10.0, 105.0)


class _CountedLru(Lru):
    num_offered = 0

    def candidates(self) -> Iterator[bytes]:
        for each in super().candidates():
            self.num_offered += 1
            yield each


def test_a_tenant_at_its_share_does_not_look_through_what_others_have() -> None:
    policies: list[_CountedLru] = []

    def new_policy(num_blocks: int) -> _CountedLru:
        policies.append(_CountedLru(num_blocks))
        return policies[-1]

    index = BlockIndex(1000, new_policy, max_tenant_share=0.9)
    put(index, "quiet", 800, tenant="quiet")
    index.max_tenant_share = 0.01
    for number in range(300):
        put(index, f"loud {number}", 1, tenant="loud")

    assert index.tenants() == {"quiet": 800, "loud": 10}
    assert sum(policy.num_offered for policy in policies) == 290


@settings(max_examples=40, stateful_step_count=60)
class AnyUse(RuleBasedStateMachine):
    """Writers, readers and an operator, in any order; who follows the changes is never wrong."""

    NAMES = ("a", "b", "c")
    TENANTS = ("x", "y")

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(6, S3Fifo, max_tenant_share=0.5)
        self.reserved: dict[bytes, Record] = {}
        self.followed: set[bytes] = set()
        self.now_s = 0.0

    @rule(
        policy=st.sampled_from(sorted(POLICIES)),
        num_slots=st.integers(1, 8),
        share=st.sampled_from([0.2, 0.5, 1.0]),
    )
    @precondition(lambda self: not self.index.num_blocks and not self.reserved)
    def start_with(self, policy: str, num_slots: int, share: float) -> None:
        self.index = BlockIndex(num_slots, POLICIES[policy], max_tenant_share=share)
        self.followed = set()

    @rule(
        name=st.sampled_from(NAMES),
        depth=st.integers(0, 3),
        tenant=st.sampled_from(TENANTS),
        spare=st.booleans(),
        backwards=st.booleans(),
    )
    def reserve(self, name: str, depth: int, tenant: str, spare: bool, backwards: bool) -> None:
        name = f"{tenant} {name}"
        chain = [key(name, each) for each in range(depth + 1)]
        if backwards:  # two of these may make a ring
            chain = [key(name, each) for each in range(3, depth - 1, -1)]
        if chain[-1] in self.index:
            return
        before = {each for each in chain if self.index.find(each)}
        parent = chain[-2] if len(chain) > 1 else b""
        slot = self.index.reserve(chain[-1], parent, tenant, self.now_s, chain if spare else ())
        if slot is not None:
            self.reserved[chain[-1]] = record(name, depth, tenant)
        else:
            assert self.reserved or spare
        if spare:
            assert before == {each for each in chain if self.index.find(each)}

    @rule(data=st.data())
    @precondition(lambda self: self.reserved)
    def commit(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.reserved)))
        self.index.commit([self.reserved.pop(chosen)])

    @rule(data=st.data())
    @precondition(lambda self: self.reserved)
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[chosen]
        self.index.release(chosen)

    @rule(data=st.data())
    @precondition(lambda self: self.index.num_blocks)
    def drop(self, data: st.DataObject) -> None:
        self.index.drop(data.draw(st.sampled_from(sorted(self.index.keys()))))

    @rule(data=st.data())
    @precondition(lambda self: self.index.num_blocks)
    def lease(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.index.keys())))
        self.index.lease(chosen, self.now_s)

    @rule(name=st.sampled_from(NAMES), tenant=st.sampled_from(TENANTS))
    def touch(self, name: str, tenant: str) -> None:
        self.index.touch([key(f"{tenant} {name}", depth) for depth in range(4)])

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(share=st.sampled_from([0.2, 0.5, 1.0]))
    def set_share(self, share: float) -> None:
        self.index.max_tenant_share = share

    @rule()
    def follow(self) -> None:
        changes = self.index.take_changes()
        assert not self.followed & changes.stored.keys()
        assert self.followed >= changes.evicted.keys()
        self.followed = self.followed - changes.evicted.keys() | changes.stored.keys()
        assert self.followed == set(self.index.prefix_keys)

    @invariant()
    def books_balance(self) -> None:
        self.index.check_integrity()
        assert self.index.num_reserved == len(self.reserved)
        assert self.index.num_blocks + self.index.num_reserved <= self.index.num_slots


TestAnyUse = AnyUse.TestCase
