from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from services.core.errors import InvalidArgument
from services.encoding.template import ChatPrompt, ChatTemplate
from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import Vocabulary

MODEL = Vocabulary.from_metadata(read_metadata(find_model("smollm2-135m-instruct").gguf_path))


def chat(
    *messages: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_args: Any,
) -> ChatPrompt:
    return ChatPrompt(list(messages), tools, add_generation_prompt, template_args)


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=special_tokens, now=lambda: datetime(2026, 1, 31))


def render(source: str, *messages: dict[str, Any], **arguments: Any) -> str:
    return template(source).render(chat(*messages, **arguments), max_characters=1000)


def refusal(source: str, *messages: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        render(source, *messages, **arguments)
    [violation] = caught.value.violations
    assert violation.field == "chat"
    return violation.description


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi <there> & 'you'"}
ASSISTANT = {"role": "assistant", "content": "Hello."}


def test_model_without_a_system_message_gets_its_own() -> None:
    text = render(MODEL.chat_template, USER)

    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
        "Hi <there> & 'you'<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_system_message_replaces_the_model_s_own() -> None:
    text = render(MODEL.chat_template, SYSTEM, USER, ASSISTANT, USER, add_generation_prompt=False)

    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi <there> & 'you'<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nHi <there> & 'you'<|im_end|>\n"
    )


def test_a_content_that_the_template_cannot_do_without_is_named() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{}]}

    with pytest.raises(InvalidArgument) as caught:
        render(MODEL.chat_template, USER, call, USER, call)

    rule = "must be there: the model's chat template needs it"
    assert caught.value.violations == (
        ("chat.messages[1].content", rule),
        ("chat.messages[3].content", rule),
    )


def test_a_call_without_content_has_an_empty_one_where_the_template_knows_calls() -> None:
    source = (
        "{% for m in messages %}{{ '[' + m.content + ']' }}"
        "{% for call in m.tool_calls or [] %}{{ call.name }}{% endfor %}{% endfor %}"
    )
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}

    assert render(source, ASSISTANT, call) == "[Hello.][]f"
    with pytest.raises(InvalidArgument, match=r"chat\.messages\[0\]\.content: must be there"):
        render(source, {"role": "assistant", "content": None}, call)


def test_a_template_that_takes_null_gets_null() -> None:
    source = "{{ messages[0].content is none }}{{ messages[0].tool_calls | length }}"
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{}]}

    assert render(source, call) == "True1"


@pytest.mark.parametrize("name", ["self", "args", "context"])
def test_a_template_argument_may_have_any_name(name: str) -> None:
    chat = ChatPrompt([USER], None, True, {name: 1, "other": 2})

    assert template("{{ other }}").render(chat, max_characters=9) == "2"


def test_earlier_turns_are_a_prefix_of_later_ones() -> None:
    first = render(MODEL.chat_template, USER, add_generation_prompt=False)

    assert render(MODEL.chat_template, USER, ASSISTANT, USER).startswith(first)


def test_blocks_leave_no_whitespace_behind() -> None:
    source = "{%- if true %}\n  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n{% endif %}"

    assert render(source, SYSTEM, USER) == "system\nuser\n"


def test_json_is_what_models_were_trained_on() -> None:
    source = "{{ tools | tojson }}|{{ tools[0] | tojson(indent=1) }}"
    text = render(source, USER, tools=[{"b": "é<&'", "a": 1}])

    assert text == '[{"b": "é<&\'", "a": 1}]|{\n "b": "é<&\'",\n "a": 1\n}'


def test_arguments_and_special_tokens_are_variables() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ missing is defined }}"
    rendered = template(source, bos_token="<s>").render(
        chat(USER, enable_thinking=False), max_characters=100
    )

    assert rendered == "<s>FalseFalse"


def test_functions_and_tags_of_hugging_face_are_known() -> None:
    source = (
        "{{ strftime_now('%d %b %Y') }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}"
        "{% generation %}[{{ i }}]{% endgeneration %}{% endfor %}"
    )

    assert render(source, USER) == "31 Jan 2026[0][1]"


def test_template_that_refuses_a_chat_says_why() -> None:
    source = "{% if messages[0].role == 'user' %}{{ raise_exception('system first') }}{% endif %}"

    assert refusal(source, USER) == "the chat template refuses it: system first"
    assert render(source, SYSTEM) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[7].content.parts }}", "no element 7"),
        ("{{ 'a' + messages[0].nothing }}", "has no attribute 'nothing'"),
        ("{{ 'a' + none }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_template_that_fails_refuses_the_chat(source: str, reason: str) -> None:
    assert reason in refusal(source, USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(10**30) %}x{% endfor %}",
        "{% for i in range(60000) %}{% for j in range(60000) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for i in range(60000) %}{% for j in range(60000) %}x{% endfor %}"
        "{% endfor %}{% endmacro %}{{ m() }}",
    ],
)
def test_runaway_loop_is_stopped(source: str) -> None:
    assert "the chat template refuses it" in refusal(source, USER)


def test_output_is_bounded_while_it_is_made() -> None:
    source = "{% for m in messages %}{% for n in messages %}{{ m.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 10}] * 10

    assert len(render(source, *messages)) == 1000
    assert refusal(source, *messages, USER) == "renders to more than 1000 bytes of text"


def test_broken_template_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"the model.s chat template is broken: .*endfor"):
        template("{% for m in messages %}")
