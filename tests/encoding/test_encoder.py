from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from services.core.errors import InvalidArgument
from services.core.keys import root_key
from services.core.settings import MeshSettings, TokenizerSettings
from services.core.tokens import pack
from services.encoding.encoder import EncodedPrompt, Encoder, Prompt
from services.encoding.loading import load_encoder
from services.encoding.prompts import TemplatedPrompts
from services.encoding.template import ChatPrompt

BLOCK_TOKENS = 8
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder(MeshSettings(block_tokens=BLOCK_TOKENS))


def encode(
    encoder: Encoder, prompt: Prompt, *, tenant: str = "", cache_salt: str = "", **settings: Any
) -> EncodedPrompt:
    return encoder.encode(
        prompt, tenant=tenant, cache_salt=cache_salt, settings=TokenizerSettings(**settings)
    )


def chat(*messages: dict[str, Any]) -> ChatPrompt:
    return ChatPrompt(list(messages), None, True, {})


def test_text_is_taken_as_it_is(encoder: Encoder) -> None:
    encoded = encode(encoder, "<|im_start|>user\nHi 42<|im_end|>")

    assert np.frombuffer(encoded.token_ids, "<u4").tolist() == [1, 4093, 198, 26843, 216, 36, 34, 2]


def test_chat_is_its_rendered_text(encoder: Encoder) -> None:
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

    assert encode(encoder, chat({"role": "system", "content": "Be brief."}, USER)) == encode(
        encoder, rendered
    )


def test_ids_pass_unchanged_and_get_the_keys_of_their_text(encoder: Encoder) -> None:
    by_text = encode(encoder, "one two three " * 20)

    assert encode(encoder, by_text.token_ids) == by_text


def test_decoding_gives_the_text_back(encoder: Encoder) -> None:
    text = "<|im_start|>naïve 北京 🙂<|im_end|>"
    ids = encode(encoder, text).token_ids

    assert encoder.decode(ids, skip_special_tokens=False) == text
    assert encoder.decode(ids, skip_special_tokens=True) == "naïve 北京 🙂"
    assert encoder.decode(b"", skip_special_tokens=True) == ""


def test_prefix_has_a_root_and_a_key_per_full_block(encoder: Encoder) -> None:
    ids = np.arange(100, 100 + 2 * BLOCK_TOKENS + 1, dtype="<u4")
    whole = encode(encoder, ids.tobytes()).prefix_keys
    shorter = encode(encoder, ids[: 2 * BLOCK_TOKENS - 1].tobytes()).prefix_keys

    assert len(whole) == 3
    assert shorter == whole[:2]
    assert whole[0] == root_key(model="smollm2-135m-instruct", block_tokens=BLOCK_TOKENS)


def test_tenant_and_salt_change_every_key(encoder: Encoder) -> None:
    text = "one two three " * 20
    keys = [
        encode(encoder, text, tenant=tenant, cache_salt=salt).prefix_keys
        for tenant, salt in (("", ""), ("a", ""), ("", "a"), ("a", "b"))
    ]

    assert len({key for chain in keys for key in chain}) == 4 * len(keys[0])


def test_nfc_is_a_setting(encoder: Encoder) -> None:
    decomposed, composed = "cafe\u0301", "caf\u00e9"

    assert encode(encoder, decomposed, nfc=True) == encode(encoder, composed)
    assert encode(encoder, decomposed, nfc=False) != encode(encoder, composed)


@pytest.mark.parametrize(
    ("prompt", "field", "complaint"),
    [
        ("", "text", "must not be empty"),
        ("é" * 51, "text", "must be at most 100 bytes; got 102"),
        ("\x04\x06", "text", "has nothing that the model has a token for"),
        (b"", "token_ids", "must not be empty"),
        (b"\1\0\0\0\1", "token_ids", "4 bytes each; got 5 bytes"),
        (pack([0, 49152]), "token_ids", "must be below 49152; position 1 has 49152"),
        (chat({"role": "user", "content": "x" * 101}), "chat", "more than 100 bytes"),
        (chat({"role": "system", "content": "é" * 30}), "chat", "must be at most 100 bytes"),
        (chat({"role": "system", "content": "\ud800"}), "chat", "half of a surrogate pair"),
        (chat({"role": "user", "content": None}), "chat.messages[0].content", "must be there"),
    ],
)
def test_bad_prompt_is_refused_by_name(
    encoder: Encoder, prompt: Prompt, field: str, complaint: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode(encoder, prompt, max_text_bytes=100)
    [violation] = caught.value.violations

    assert violation.field == field
    assert complaint in violation.description


def test_ids_to_decode_are_checked(encoder: Encoder) -> None:
    with pytest.raises(InvalidArgument, match=r"^token_ids: ids must be below 49152"):
        encoder.decode(pack([1 << 31]), skip_special_tokens=True)


def test_model_without_a_template_takes_no_chat(encoder: Encoder) -> None:
    plain = Encoder(
        model="base",
        block_tokens=BLOCK_TOKENS,
        vocabulary=encoder.vocabulary,
        prompts=TemplatedPrompts(Tokenizer(models.BPE()), template=None),
    )

    with pytest.raises(InvalidArgument, match="chat: the model has no chat template"):
        encode(plain, chat(USER))


def test_other_threads_run_while_a_long_text_is_encoded(encoder: Encoder) -> None:
    text = "".join(f"The quick brown fox {number}. " for number in range(32_000))
    encoding = threading.Thread(target=encode, args=(encoder, text))
    started_s = time.monotonic()
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    elapsed_s = time.monotonic() - started_s

    # With the GIL held for the whole of it there would be one or two.
    assert turns >= 5, f"{turns} turns in {elapsed_s:.3f} s"
