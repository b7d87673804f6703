from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from services.observer.why import UnknownTrace, explain
from tests.observer.chats import chat, prose, spelling, text
from tests.observer.traffic import Traffic

RULES = prose(1, 300)


def why(traffic: Traffic, trace_id: str, *, show_text: bool = True) -> dict[str, Any]:
    found = explain(
        trace_id, traffic.window, traffic.prompts, spelling=spelling(), show_text=show_text
    )
    json.dumps(found)
    return found


def joined(*parts: range | list[int]) -> list[int]:
    return [token for part in parts for token in part]


def test_a_time_stamp_is_named_with_its_message_and_characters() -> None:
    traffic = Traffic()
    for number in range(6):
        system = f"You sell shoes. It is 2026-11-30T11:{30 + number}:{50 - 7 * number:02}Z. {RULES}"
        trace_id = traffic.ask(chat(system, f"question {prose(50 + number, 8)}"))
    found = why(traffic, trace_id)

    assert found["cause"] == "changing_text"
    assert found["summary"].startswith("a time stamp in message 0 (system), characters 22 to 42 is")
    assert found["lost_tokens"] > 0.8 * found["prompt_tokens"]
    change = found["change"]
    assert change["kind"] == "time stamp"
    assert change["text"] == "2026-11-30T11:35:15Z"
    assert (change["message"], change["role"]) == (0, "system")
    before = len("You sell shoes. It is ")
    assert (change["character"], change["end_character"]) == (before, before + 20)
    assert change["values"] == 6
    assert found["difference"]["here"].startswith("5:15Z")


def test_text_is_not_told_unless_it_may_be() -> None:
    traffic = Traffic()
    for number in range(4):
        trace_id = traffic.ask(chat(f"secret{number} {RULES}", "hello there"))
    told = json.dumps(why(traffic, trace_id, show_text=False))

    assert "secret" not in told
    assert "hello" not in told
    assert "policy" not in told
    assert "changing_text" in told


def test_a_role_that_a_caller_made_up_is_text_of_his() -> None:
    opener = text("<|im_start|>")
    traffic = Traffic()
    for number in range(4):
        made_up = [*opener, *text(f"my secret {30 + number}:15 {prose(2, 9)}"), *chat(RULES, "go")]
        trace_id = traffic.ask(made_up)
    told = why(traffic, trace_id, show_text=False)

    assert told["difference"]["role"] == "other"
    assert "secret" not in json.dumps(told)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("uuid", lambda n: str(uuid.UUID(int=(n + 1) * 0x9E3779B97F4A7C15F39CC060 % 2**128))),
        ("counter", lambda n: f"#{1_040 + 3 * n}"),
        ("random value", lambda n: f"{(n + 3) * 0x9E3779B97F4A7C15 % 2**64:016x}"),
    ],
)
def test_other_values_that_change_have_their_names(kind: str, value: Any) -> None:
    traffic = Traffic()
    for number in range(8):
        trace_id = traffic.ask(chat(f"Session {value(number)}. {RULES}", prose(number, 9)))
    found = why(traffic, trace_id)

    assert found["cause"] == "changing_text"
    assert found["change"]["kind"] == kind


def test_a_value_in_a_later_message_is_found_there() -> None:
    traffic = Traffic()
    for number in range(5):
        turns = (prose(3, 40), prose(4, 40), f"[{number + 100} s] {prose(5, 60)}")
        trace_id = traffic.ask(chat(RULES, *turns))
    found = why(traffic, trace_id)

    assert found["cause"] == "changing_text"
    assert (found["change"]["message"], found["change"]["role"]) == (3, "user")
    assert found["cached_tokens"] > 300


def test_a_new_question_behind_a_cached_prefix_is_the_first_of_its_kind() -> None:
    traffic = Traffic()
    for number in range(5):
        trace_id = traffic.ask(chat(RULES, prose(100 + number, 60)))
    found = why(traffic, trace_id)

    assert found["cause"] == "first_of_its_kind"
    assert found["difference"]["message"] == 1
    assert "change" not in found


def test_all_cached_is_a_hit() -> None:
    traffic = Traffic()
    traffic.ask(range(100))
    assert why(traffic, traffic.ask(range(100)))["cause"] == "hit"


def test_nothing_of_a_prompt_shorter_than_a_block_can_be_reused() -> None:
    traffic = Traffic(block_tokens=64)
    traffic.ask(range(40))
    found = why(traffic, traffic.ask(range(40)))

    assert found["cause"] == "shorter_than_a_block"
    assert found["lost_tokens"] == 0


def test_a_shared_beginning_may_be_shorter_than_a_block() -> None:
    traffic = Traffic(block_tokens=64)
    traffic.ask(joined(range(40), range(500, 700)))
    found = why(traffic, traffic.ask(joined(range(40), range(800, 1000))))

    assert found["cause"] == "shorter_than_a_block"
    assert "40 tokens" in found["summary"]


def test_another_tenants_prefix_is_not_shared() -> None:
    traffic = Traffic()
    traffic.ask(range(100), tenant="ada")
    found = why(traffic, traffic.ask(range(100), tenant="bob"))

    assert found["cause"] == "other_tenant"
    assert '"ada"' in found["summary"]
    assert found["lost_tokens"] == 96


def test_another_salt_is_not_shared() -> None:
    traffic = Traffic()
    traffic.ask(range(100), cache_salt="x")
    found = why(traffic, traffic.ask(range(100), cache_salt="y"))

    assert found["cause"] == "other_salt"


def test_an_eviction_is_named_with_its_worker_and_time() -> None:
    traffic = Traffic()
    traffic.ask(range(100))
    traffic.ask(range(500, 800))
    traffic.evict("w1", range(100))
    traffic.now_s += 30.0
    found = why(traffic, traffic.ask(range(100)))

    assert found["cause"] == "evicted"
    assert found["summary"].startswith("w1 dropped it 30.0 s before")
    assert "1 requests brought 300 new prompt tokens" in found["evidence"][1]


def test_an_eviction_may_be_told_after_the_request_came() -> None:
    traffic = Traffic()
    traffic.ask(range(100))
    trace_id = traffic.ask(range(100), cached_tokens=0, pause_s=0.5)
    traffic.evict("w1", range(100))
    found = why(traffic, trace_id)

    assert found["cause"] == "evicted"
    assert found["summary"] == "w1 dropped it 0.0 s before"


def test_what_another_worker_dropped_afterwards_was_there() -> None:
    traffic = Traffic()
    traffic.ask(range(100))
    trace_id = traffic.ask(
        range(100), worker_id="w2", predicted_tokens=0, best_elsewhere_tokens=96, pause_s=0.5
    )
    traffic.evict("w1", range(100))

    assert why(traffic, trace_id)["cause"] == "elsewhere"


def test_what_was_computed_again_after_an_eviction_is_there() -> None:
    traffic = Traffic()
    traffic.ask(range(100))
    traffic.evict("w1", range(100))
    traffic.ask(range(100))
    found = why(traffic, traffic.ask(range(100), worker_id="w2", best_elsewhere_tokens=96))

    assert found["cause"] == "elsewhere"


def test_another_worker_had_it_and_was_too_busy() -> None:
    traffic = Traffic()
    traffic.ask(range(100), worker_id="w1")
    for number in range(3):
        traffic.ask(range(1000 * number, 1000 * number + 50), duration_s=60.0, pause_s=0.01)
    trace_id = traffic.ask(range(100), worker_id="w2", predicted_tokens=0, best_elsewhere_tokens=96)
    found = why(traffic, trace_id)

    assert found["cause"] == "elsewhere"
    assert "w1 had it, and was too busy" in found["summary"]
    assert "requests at w1 then: 3" in found["evidence"]
    assert "requests at w2 then: 0" in found["evidence"]


def test_a_strategy_may_not_ask_where_prefixes_are() -> None:
    traffic = Traffic()
    traffic.ask(range(100), worker_id="w1")
    trace_id = traffic.ask(
        range(100), worker_id="w2", predicted_tokens=None, strategy="round_robin"
    )
    found = why(traffic, trace_id)

    assert found["cause"] == "elsewhere"
    assert "round_robin does not ask" in found["summary"]


def test_a_router_that_does_not_know_says_so() -> None:
    traffic = Traffic()
    traffic.ask(range(100), worker_id="w1")
    found = why(traffic, traffic.ask(range(100), worker_id="w2"))

    assert found["cause"] == "router_did_not_know"


def test_two_that_come_at_once_compute_the_same() -> None:
    traffic = Traffic()
    traffic.ask(range(100), pause_s=0.01)
    found = why(traffic, traffic.ask(range(100), cached_tokens=0))

    assert found["cause"] == "still_computing"


def test_the_order_is_that_of_arrival_whenever_it_was_told() -> None:
    traffic = Traffic()
    for number in range(6):
        late_s = 0.2 if number % 2 else 0.0
        trace_id = traffic.ask(
            range(1000 * number, 1000 * number + 50), pause_s=0.03, tell_s=late_s
        )
    assert why(traffic, trace_id)["compared_prompts"] == 5


def test_a_worker_that_left_took_its_blocks_along() -> None:
    traffic = Traffic()
    traffic.ask(range(100), worker_id="w9")
    traffic.evict("w9", range(200, 300))
    trace_id = traffic.ask(range(100), worker_id="w1")
    found = why(traffic, trace_id)

    assert found["cause"] == "holder_left"


def with_store(*stores: tuple[str, str]) -> Traffic:
    traffic = Traffic()
    traffic.stores = stores or (("kv1", "elsewhere"),)
    return traffic


def test_an_eviction_from_the_kv_store_is_named_beside_the_workers() -> None:
    traffic = with_store()
    traffic.ask(range(100))
    traffic.evict("w1", range(100))
    traffic.now_s += 10.0
    traffic.evict_below(range(100))
    traffic.now_s += 20.0
    found = why(traffic, traffic.ask(range(100)))

    assert found["cause"] == "evicted"
    assert found["summary"] == (
        "w1 dropped it 30.0 s before; the KV store kv1 had it in node memory (L1), and dropped it"
        " 20.0 s before"
    )


def test_where_the_worker_has_left_the_kv_store_would_have_had_it() -> None:
    traffic = with_store()
    traffic.ask(range(100), worker_id="w9")
    traffic.evict_below(range(100))
    traffic.now_s += 20.0
    found = why(traffic, traffic.ask(range(100)))

    assert found["cause"] == "evicted"
    assert found["summary"].startswith("the KV store kv1 had it in node memory (L1), and dropped")
    assert found["evidence"] == ["w9 had it, and has left the mesh"]


def test_what_a_worker_kept_did_not_miss_for_the_kv_store() -> None:
    traffic = with_store()
    traffic.ask(range(100))
    traffic.evict_below(range(100))
    missed = traffic.ask(range(100), cached_tokens=0)
    found = why(traffic, missed)
    elsewhere = why(traffic, traffic.ask(range(100), worker_id="w2", best_elsewhere_tokens=96))

    assert found["cause"] == "unknown"
    assert "KV store" not in found["summary"]
    assert elsewhere["cause"] == "elsewhere"


@pytest.mark.parametrize("changes", [{}, {"cached_tokens": 96, "loaded_blocks": 6}])
def test_what_was_written_again_is_not_what_the_kv_store_dropped(changes: dict[str, Any]) -> None:
    traffic = with_store()
    traffic.ask(range(100))
    traffic.evict("w1", range(100))
    traffic.evict_below(range(100))
    traffic.now_s += 5.0
    traffic.ask(range(100), **changes)
    traffic.evict("w1", range(100))
    traffic.now_s += 5.0
    found = why(traffic, traffic.ask(range(100)))

    assert found["summary"].startswith("w1 dropped it 5.0 s before")
    assert "KV store" not in found["summary"]


def test_what_a_worker_used_out_of_its_own_pool_was_not_written_again() -> None:
    traffic = with_store()
    traffic.ask(range(100))
    traffic.evict_below(range(100))
    traffic.now_s += 5.0
    traffic.ask(range(100))
    traffic.evict("w1", range(100))
    traffic.now_s += 5.0
    found = why(traffic, traffic.ask(range(100)))

    assert "the KV store kv1 had it in node memory (L1), and dropped it 11.0 s" in found["summary"]


@pytest.mark.parametrize(
    ("stores", "named"),
    [
        ((("kv1", "h"), ("kv2", "other")), True),
        ((("kv1", "other"), ("kv2", "h")), False),
        ((("kv1", "h"), ("kv2", "h")), False),
        ((("kv2", "h"),), False),
    ],
)
def test_of_several_kv_stores_that_beside_the_worker_counts(
    stores: tuple[tuple[str, str], ...], named: bool
) -> None:
    traffic = with_store(*stores)
    traffic.ask(range(100))
    traffic.evict("w1", range(100))
    traffic.evict_below(range(100))
    traffic.now_s += 5.0
    found = why(traffic, traffic.ask(range(100)))

    assert found["cause"] == "evicted"
    assert ("KV store" in found["summary"]) is named


def test_what_the_kv_store_still_had_was_not_dropped_before() -> None:
    traffic = with_store()
    traffic.ask(range(100), worker_id="w9")
    trace_id = traffic.ask(range(100), pause_s=0.5, expected_load_s=0.2, expected_compute_s=0.1)
    traffic.evict_below(range(100))

    assert why(traffic, trace_id)["cause"] == "holder_left"


def test_computing_may_be_expected_to_be_faster_than_loading() -> None:
    traffic = Traffic()
    traffic.ask(range(100), worker_id="w1")
    trace_id = traffic.ask(range(100), worker_id="w2", expected_load_s=0.4, expected_compute_s=0.1)
    found = why(traffic, trace_id)

    assert found["cause"] == "computed_instead"


def test_what_is_not_known_is_not_guessed() -> None:
    traffic = Traffic()
    traffic.ask(range(100))
    found = why(traffic, traffic.ask(range(100), cached_tokens=32))

    assert found["cause"] == "unknown"
    assert "has not said that it dropped it" in found["evidence"][0]


def test_a_request_whose_tokens_were_not_told_is_not_explained() -> None:
    traffic = Traffic()
    trace_id = traffic.ask(range(100))
    empty = Traffic().prompts
    assert explain(trace_id, traffic.window, empty)["cause"] == "unknown"


def test_an_unknown_id_is_refused_with_what_is_kept() -> None:
    traffic = Traffic()
    trace_id = traffic.ask(range(100))
    with pytest.raises(UnknownTrace, match=r"no request abcdef among the 1 of the last"):
        why(traffic, "abcdef")
    assert why(traffic, f" {trace_id.upper()}")["trace_id"] == trace_id
    traffic.ask(range(100))
    with pytest.raises(UnknownTrace, match="give more digits"):
        why(traffic, "00000000")


def test_without_the_models_vocabulary_places_are_tokens() -> None:
    traffic = Traffic()
    for number in range(4):
        trace_id = traffic.ask(joined(range(40), [9000 + number], range(100, 200)))
    found = explain(trace_id, traffic.window, traffic.prompts)

    assert found["cause"] == "changing_text"
    assert "tokens 40 to 41" in found["summary"]
    assert found["change"]["kind"] is None
