from __future__ import annotations

import pytest

from services.core.tickets import KeyMemory, KeyRing, derive_ring, next_change_s

SECRET = bytes(range(32))
LIFETIME_S = 100.0


def ring(now_s: float, secret: bytes = SECRET) -> KeyRing:
    return derive_ring(secret, now_s, LIFETIME_S)


def test_replicas_with_one_secret_have_the_same_keys() -> None:
    assert ring(1000.0) == ring(1099.0)
    assert ring(1000.0) != ring(1100.0)


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_signature_is_good_with_who_heard_of_the_keys_one_lifetime_apart(step: int) -> None:
    signer, verifier = ring(1000.0), ring(1000.0 + step * LIFETIME_S)
    assert verifier.verifies(b"data", signer.current_id, signer.sign(b"data"))


@pytest.mark.parametrize("step", [-2, 2])
def test_a_key_is_forgotten(step: int) -> None:
    signer, verifier = ring(1000.0), ring(1000.0 + step * LIFETIME_S)
    with pytest.raises(LookupError):
        verifier.verifies(b"data", signer.current_id, signer.sign(b"data"))


def test_other_data_another_signature_or_another_key_is_no_good() -> None:
    keys = ring(1000.0)
    signature = keys.sign(b"data")
    assert not keys.verifies(b"date", keys.current_id, signature)
    assert not keys.verifies(b"data", keys.current_id, signature[:-1])
    assert not keys.verifies(b"data", keys.keys[0].id, signature)


def test_keys_of_another_secret_have_other_names() -> None:
    other = ring(1000.0, secret=b"x" * 32)
    assert not {key.id for key in other.keys} & {key.id for key in ring(1000.0).keys}


def test_without_keys_nothing_is_signed() -> None:
    assert not KeyRing().can_sign
    assert ring(1000.0).can_sign
    with pytest.raises(LookupError):
        KeyRing().sign(b"data")


def test_the_keys_change_when_they_are_said_to() -> None:
    change_s = next_change_s(1012.5, LIFETIME_S)
    assert change_s == 1100.0
    assert ring(change_s - 0.01) == ring(1012.5) != ring(change_s)


def test_a_key_is_remembered_for_a_while_after_the_last_ring_with_it() -> None:
    memory = KeyMemory()
    first, second = ring(1000.0), ring(1000.0, secret=b"x" * 32)
    assert memory.recall(first, 0.0, 10.0) == first
    signature = first.sign(b"data")
    for now_s in (500.0, 509.0):
        known = memory.recall(second, now_s, 10.0)
        assert known.verifies(b"data", first.current_id, signature)
        assert known.current_id == second.current_id
    assert memory.recall(second, 511.0, 10.0) == second
