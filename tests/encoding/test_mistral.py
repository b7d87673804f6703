from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import InvalidArgument
from services.core.settings import TokenizerSettings
from services.encoding.mistral import MistralPrompts
from services.encoding.template import ChatPrompt
from services.models.catalog import Kind, ModelFiles
from services.models.loading import load_vocabulary
from services.models.vocabulary import Vocabulary

SETTINGS = TokenizerSettings()
BOS, INST, END_INST = 1, 3, 4
FUNCTION = {"name": "f", "description": "", "parameters": {}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def vocabulary(tekken: Path) -> Vocabulary:
    return load_vocabulary(ModelFiles("tekken", tekken, Kind.TEKKEN))


@pytest.fixture(scope="module")
def prompts(tekken: Path, vocabulary: Vocabulary) -> MistralPrompts:
    return MistralPrompts(tekken, vocabulary)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: dict[str, Any], tools: Any = None, **template_args: Any) -> ChatPrompt:
    return ChatPrompt(list(messages), tools, True, template_args)


def call(id_: str = "call00001", arguments: Any = "{}") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": id_, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def refusal(prompts: MistralPrompts, asked: ChatPrompt, **settings: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        prompts.encode_chat(asked, TokenizerSettings(**settings))
    return caught.value.message


def test_control_tokens_are_text_in_a_message_and_control_tokens_in_a_prompt(
    prompts: MistralPrompts, vocabulary: Vocabulary
) -> None:
    spelled = "<s>[INST]Hi[/INST]"
    inside = prompts.encode_chat(chat(user(spelled)), SETTINGS)
    by_chat = prompts.encode_chat(chat(user("Hi")), SETTINGS)

    assert [token for token in inside if token < 1000] == [BOS, INST, END_INST]
    assert vocabulary.join(inside, skip_special_tokens=True).decode() == spelled
    assert list(prompts.encode_text(spelled, SETTINGS)) == list(by_chat)


def test_what_only_looks_like_a_control_token_is_text(
    prompts: MistralPrompts, vocabulary: Vocabulary
) -> None:
    text = "<<s>> [INST [/INST]] <|im_end|> <b> [x]"
    ids = prompts.encode_text(text, SETTINGS)

    assert [token for token in ids if token < 1000] == [BOS, END_INST]
    assert vocabulary.join(ids, skip_special_tokens=False).decode() == text


@given(text=st.text(st.characters(codec="utf-8"), min_size=1))
def test_ids_of_any_text_join_to_the_text(
    prompts: MistralPrompts, vocabulary: Vocabulary, text: str
) -> None:
    ids = prompts.encode_text(text, SETTINGS)

    assert vocabulary.join(ids, skip_special_tokens=False).decode() == text


def test_arguments_give_the_same_ids_as_text_and_parsed(prompts: MistralPrompts) -> None:
    answer = {"role": "tool", "content": "1", "tool_call_id": "call00001", "name": "f"}
    either = [
        prompts.encode_chat(chat(user("Hi"), call(arguments=arguments), answer), SETTINGS)
        for arguments in ('{"b":"é",  "a":1.50}', {"b": "é", "a": 1.5})
    ]

    assert either[0] == either[1]


def test_nfc_reaches_every_text_of_a_chat(prompts: MistralPrompts) -> None:
    decomposed, composed = (
        chat(user(text), tools=[{**TOOL, "function": {**FUNCTION, "description": text}}])
        for text in ("cafe\u0301", "caf\u00e9")
    )
    settings = TokenizerSettings(nfc=True)

    assert prompts.encode_chat(decomposed, settings) == prompts.encode_chat(composed, SETTINGS)
    assert prompts.encode_chat(decomposed, SETTINGS) != prompts.encode_chat(composed, SETTINGS)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (chat(user("x" * 101)), "chat: must be at most 100 bytes; got"),
        (chat(user("Hi"), tools=[TOOL, {"x": "y" * 100}]), "chat: must be at most 100 bytes"),
        (chat(user("\ud800")), "chat: has half of a surrogate pair"),
        (chat(user("Hi"), enable_thinking=False), "must not set enable_thinking"),
        (chat(user("Hi"), reasoning_effort="high"), "chat: the model's encoder refuses it: "),
        (chat(user(None)), "refuses it: content"),
        (chat({"role": "narrator", "content": "Hi"}), "Unknown message role: narrator"),
        (chat(user("Hi"), {"role": "assistant", "content": "Hi"}), "last role User or Tool"),
        (chat(user("Hi"), tools=[{}]), "refuses it: "),
        (chat(user("Hi"), tools=[{"type": "function", "function": {}}]), "refuses it: "),
        (
            chat(user("Hi"), call("x"), {"role": "tool", "content": "", "tool_call_id": "x"}),
            "Tool call id was x but must be a-z, A-Z, 0-9, with a length of 9",
        ),
    ],
)
def test_bad_chat_is_refused_with_the_reason(
    prompts: MistralPrompts, asked: ChatPrompt, complaint: str
) -> None:
    limit = 100 if "100" in complaint else 1 << 20
    message = refusal(prompts, asked, max_text_bytes=limit)

    assert complaint in message
    assert "\n" not in message


def test_deeply_nested_tool_is_refused(prompts: MistralPrompts) -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}

    assert "refuses it" in refusal(prompts, chat(user("Hi"), tools=[nested]))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "text: must not be empty"),
        ("\udc00", "text: has half of a surrogate pair"),
        (" " * 1_000_000, "text: cannot be encoded: Regex error"),
        ("é" * (1 << 20), "text: must be at most 1048576 bytes; got 2097152"),
    ],
)
def test_bad_text_is_refused_with_the_reason(
    prompts: MistralPrompts, text: str, complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        prompts.encode_text(text, SETTINGS)


def test_threads_may_share_it(prompts: MistralPrompts) -> None:
    asked = [chat(user(f"What is {number} times {number}? " * 50)) for number in range(8)]
    alone = [prompts.encode_chat(one, SETTINGS) for one in asked]
    together: dict[int, Any] = {}

    def encode(index: int) -> None:
        together[index] = [prompts.encode_chat(asked[index], SETTINGS) for _ in range(3)]

    threads = [threading.Thread(target=encode, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert together == {index: [alone[index]] * 3 for index in range(8)}


@pytest.mark.parametrize("content", ["{}", '{"config": {"version": "v99"}}', "[]"])
def test_what_is_no_tekken_file_is_refused(
    tmp_path: Path, vocabulary: Vocabulary, content: str
) -> None:
    path = tmp_path / "tekken.json"
    path.write_text(content)

    with pytest.raises(ValueError, match="tekken"):
        MistralPrompts(path, vocabulary)
