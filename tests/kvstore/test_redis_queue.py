from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.redis_queue import Write, WriteQueue


def write(key: int, num_bytes: int = 10) -> Write:
    return Write(b"%d" % key, memoryview(bytes(num_bytes)))


def test_first_in_first_out_in_batches_bounded_in_bytes() -> None:
    queue = WriteQueue(1000)
    for key in range(5):
        queue.push(write(key))

    assert [each.key for each in queue.take(25)] == [b"0", b"1"]
    assert [each.key for each in queue.take(30)] == [b"2", b"3", b"4"]
    assert queue.take(30) == []


def test_what_finds_no_room_in_bytes_is_refused() -> None:
    queue = WriteQueue(25)

    queue.push(write(0))
    queue.push(write(1))

    assert not queue.has_room(6)
    assert queue.has_room(5)


def test_one_block_larger_than_a_batch_goes_alone() -> None:
    queue = WriteQueue(1000)
    queue.push(write(1, 100))
    queue.push(write(2, 100))

    assert [each.key for each in queue.take(10)] == [b"1"]


def test_it_knows_what_waits() -> None:
    queue = WriteQueue(1000)
    queue.push(write(1))

    assert b"1" in queue
    assert queue.clear() == 1
    assert b"1" not in queue


@given(st.lists(st.one_of(st.integers(1, 40), st.tuples(st.integers(0, 100)))))
def test_its_books_balance_whatever_happens(steps: list[int | tuple[int]]) -> None:
    queue = WriteQueue(100)
    num_in = num_out = 0
    for key, step in enumerate(steps):
        if isinstance(step, int):
            if queue.has_room(step):
                queue.push(write(key, step))
                num_in += 1
        else:
            num_out += len(queue.take(*step))
        queue.check_integrity()

        assert queue.num_bytes <= 100
        assert len(queue) == num_in - num_out
