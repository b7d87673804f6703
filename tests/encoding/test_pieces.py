from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.tokens import pack
from services.encoding.metrics import CacheCounts
from services.encoding.pieces import PieceCache, PieceEncoder
from services.models.catalog import find_model
from services.models.loading import load_tokenizer

ROOT, OTHER_ROOT = b"root", b"other"
MAX_BYTES = 1 << 20
TOKENIZER = load_tokenizer(find_model("smollm2-135m-instruct"))[1]
CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"


def whole(text: str) -> bytes:
    return pack(TOKENIZER.encode(text, add_special_tokens=False).ids)


def encode(
    encoder: PieceEncoder, text: str, *, root: bytes = ROOT, max_bytes: int = MAX_BYTES
) -> bytes:
    return encoder.begin(text, root, max_bytes=max_bytes).finish()


def num_new(encoder: PieceEncoder, text: str, *, root: bytes = ROOT) -> int:
    new = encoder.begin(text, root, max_bytes=MAX_BYTES).new
    assert new is not None
    return sum(map(len, new))


def test_chat_that_goes_on_costs_its_new_message() -> None:
    encoder = PieceEncoder(TOKENIZER)
    first, second = (
        CHAT.format("Hi"),
        CHAT.format("Hi") + "<|im_start|>assistant\nHello!<|im_end|>\n",
    )

    assert encode(encoder, first) == whole(first)
    assert num_new(encoder, first) == 0
    assert num_new(encoder, second) == len("assistant\nHello!")
    assert encode(encoder, second) == whole(second)


def test_text_that_grows_costs_its_end() -> None:
    encoder = PieceEncoder(TOKENIZER)
    text = "one two three " * 1000
    encode(encoder, text)

    assert num_new(encoder, text + "four") < 1100
    assert encode(encoder, text + "four") == whole(text + "four")


def test_a_piece_that_comes_twice_is_encoded_once() -> None:
    text = CHAT.format("x" * 100) * 3

    assert num_new(PieceEncoder(TOKENIZER), text) < 2 * 100
    assert encode(PieceEncoder(TOKENIZER), text) == whole(text)


def test_nobody_finds_what_was_kept_under_another_root() -> None:
    encoder = PieceEncoder(TOKENIZER)
    text = CHAT.format("secret")
    encode(encoder, text)

    assert num_new(encoder, text, root=OTHER_ROOT) == num_new(PieceEncoder(TOKENIZER), text)
    assert encode(encoder, text, root=OTHER_ROOT) == whole(text)


def test_without_a_cache_every_text_is_encoded_whole_and_nothing_is_kept() -> None:
    encoder = PieceEncoder(TOKENIZER)
    text = CHAT.format("Hi")
    encode(encoder, text)
    assert encoder.counts.num_bytes > 0

    assert encode(encoder, text, max_bytes=0) == whole(text)
    assert encoder.counts.num_bytes == 0
    assert encoder.begin(text, ROOT, max_bytes=0).new == [text]


def test_text_without_a_token_has_no_ids_however_often_it_comes() -> None:
    encoder = PieceEncoder(TOKENIZER)

    assert [encode(encoder, "\x04\x06") for _ in range(2)] == [b"", b""]


def test_tokens_found_and_encoded_are_counted() -> None:
    encoder = PieceEncoder(TOKENIZER)
    for _ in range(2):
        encode(encoder, "Hello there<|im_end|>")

    assert encoder.counts[:2] == CacheCounts(hit_tokens=2, miss_tokens=2)[:2]


def test_what_was_used_longest_ago_goes_first() -> None:
    cache = PieceCache()
    cache.keep(ROOT, [("a", b"1111"), ("b", b"2222")], max_bytes=MAX_BYTES)
    two_pieces = cache.counts.num_bytes
    cache.find(ROOT, ["a"])
    cache.keep(ROOT, [("c", b"3333")], max_bytes=two_pieces)

    assert cache.find(ROOT, ["a", "b", "c"]) == [b"1111", None, b"3333"]


def test_a_piece_too_large_pushes_no_others_out() -> None:
    cache = PieceCache()
    cache.keep(ROOT, [("a", b"1111")], max_bytes=1000)
    cache.keep(ROOT, [("b" * 1000, b"2222")], max_bytes=1000)

    assert cache.find(ROOT, ["a", "b" * 1000]) == [b"1111", None]


@settings(max_examples=60)
@given(
    kept=st.lists(
        st.tuples(st.sampled_from([ROOT, OTHER_ROOT]), st.text(max_size=3), st.integers(0, 4000))
    )
)
def test_memory_is_bounded_and_counted(kept: list[tuple[bytes, str, int]]) -> None:
    cache = PieceCache()
    for root, piece, max_bytes in kept:
        cache.keep(root, [(piece, piece.encode())], max_bytes=max_bytes)
        assert cache.counts.num_bytes <= max_bytes
        cache.check_integrity()


def test_threads_may_share_it() -> None:
    encoder = PieceEncoder(TOKENIZER)
    texts = [CHAT.format(f"message {n % 7}") for n in range(60)]
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(text for text in texts if encode(encoder, text, max_bytes=4000) != whole(text))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    encoder._cache.check_integrity()


def test_long_new_text_is_encoded_in_parallel_to_the_same_ids() -> None:
    text = "The quick brown fox, caf\u00e9 \U0001f642. " * 1500

    assert encode(PieceEncoder(TOKENIZER), text) == whole(text)
