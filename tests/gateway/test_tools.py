from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import InvalidArgument
from services.gateway.tool_formats.grammars import ToolFormat
from services.gateway.tool_formats.scanner import SPACE
from services.gateway.tools import (
    MAX_TOOLS,
    Arguments,
    CallBegan,
    Content,
    Event,
    RequestedTools,
    ToolCallParser,
    ToolSupport,
    find_tool_support,
    read_tools,
)

HERMES, MISTRAL, LLAMA, DEEPSEEK = ToolFormat
CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP = (
    f"<｜tool▁{name}｜>"  # noqa: RUF001
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
MARKERS = {
    HERMES: "<tool_call>",
    MISTRAL: "[TOOL_CALLS]",
    LLAMA: "<|python_tag|>",
    DEEPSEEK: CALLS_BEGIN,
}
NAMES = frozenset({"weather", "add"})
ARGUMENTS = {"city": 'Paris } "], </tool_call>', "near": [1, {"x": None}], "é": "\\"}


def new_parser(format: ToolFormat, *, stream: bool = True, parallel: bool = True) -> ToolCallParser:
    numbers = itertools.count()
    tools = RequestedTools(names=NAMES, format=format, parallel=parallel)
    parser = tools.new_parser(stream=stream, new_id=lambda: f"call{next(numbers)}")
    assert parser is not None
    return parser


def read(parser: ToolCallParser, pieces: Iterable[str]) -> list[Event]:
    """Neighbours of one kind joined, so that only what was said can be seen."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    joined: list[Event] = []
    for event in [*events, *parser.finish()]:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            assert event.call_index == last.call_index
            joined[-1] = Arguments(last.call_index, last.text + event.text)
        else:
            joined.append(event)
    assert parser.is_finished
    return joined


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallBegan(index, f"call{index}", name), Arguments(index, arguments)]


def write(format: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """As the model's template shows it to the model."""
    match format:
        case ToolFormat.HERMES:
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
                for name, text in calls
            )
        case ToolFormat.MISTRAL:
            objects = (f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls)
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case ToolFormat.LLAMA3_JSON:
            return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)
        case ToolFormat.DEEPSEEK:
            fenced = (
                f"{CALL_BEGIN}function{SEP}{name}\n```json\n{text}\n```{CALL_END}"
                for name, text in calls
            )
            return CALLS_BEGIN + "\n".join(fenced) + CALLS_END


@pytest.mark.parametrize("format", ToolFormat)
@pytest.mark.parametrize("stream", [True, False])
def test_calls_are_found_with_their_arguments_as_written(format: ToolFormat, stream: bool) -> None:
    arguments = json.dumps(ARGUMENTS, indent=1)
    text = write(format, [("weather", arguments), ("add", "{}")])

    events = read(new_parser(format, stream=stream), [text])

    assert events == [*call(0, "weather", arguments), *call(1, "add", "{}")]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{}'),
        (MISTRAL, '[TOOL_CALLS]weather[CALL_ID]d8f3k2s9a[ARGS]{"a": 1}[TOOL_CALLS]add{}'),
        (
            MISTRAL,
            '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "weather", "id": "d8f3k2s9a"},'
            ' {"name": "add"}]',
        ),
        (
            DEEPSEEK,
            f'{CALLS_BEGIN}{CALL_BEGIN}weather{SEP}{{"a": 1}}{CALL_END}'
            f"{CALL_BEGIN}add{SEP}{{}}{CALL_END}{CALLS_END}",
        ),
        (
            LLAMA,
            '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"a": 1}}'
            '<|python_tag|>{"name": "add", "parameters": null}',
        ),
        (
            HERMES,
            '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>'
            '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        ),
        # The last marker is often the end token's, or cut off.
        (
            HERMES,
            '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
            '<tool_call>{"name": "add", "arguments": {}}\n</tool_',
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_all_spellings_of_a_format_are_read(format: ToolFormat, text: str, stream: bool) -> None:
    expected = [*call(0, "weather", '{"a": 1}'), *call(1, "add", "{}")]

    assert read(new_parser(format, stream=stream), [text]) == expected
    assert read(new_parser(format, stream=stream), text) == expected


@pytest.mark.parametrize("format", [HERMES, MISTRAL, DEEPSEEK])
def test_text_around_calls_is_content(format: ToolFormat) -> None:
    calls = write(format, [("weather", "{}")])

    events = read(new_parser(format), [f"  Let me see.\n\n{calls}\nDone. "])

    assert events == [Content("  Let me see."), *call(0, "weather", "{}"), Content("Done. ")]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "<tool_call>oops</tool_call>"),
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"a": }}\n</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"\\ud800\\": 1}"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {}, "other": 1}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {}} trailing</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "cut of'),
        (HERMES, '<tool_call>{"name": "add", "arguments": %s}</tool_call>' % ("[" * 100_000)),
        (HERMES, "a <tool_call"),
        (HERMES, "<function=add><parameter=a>1</parameter></function>"),
        (MISTRAL, "[TOOL_CALLS] what now?"),
        (MISTRAL, "[TOOL_CALLS]add[ARGS]oops"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {}'),
        (LLAMA, '{"answer": 42}'),
        (LLAMA, '{"name": "Bob", "parameters": {}}'),
        (LLAMA, ' {"name": "add", "age": 3}'),
        (LLAMA, 'See: {"name": "add", "parameters": {}}'),
        (LLAMA, '<|python_tag|>search.call(query="x")'),
        (DEEPSEEK, f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}add\n{{}}{CALL_END}{CALLS_END}"),
    ],
)
def test_what_is_no_call_is_content_as_written(format: ToolFormat, text: str) -> None:
    assert read(new_parser(format, stream=False), [text]) == [Content(text)]
    assert read(new_parser(format, stream=False), text[:500]) == [Content(text[:500])]


def test_a_streamed_call_cannot_be_unsaid() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops'

    assert read(new_parser(HERMES), [text]) == call(0, "add", '{"a": oops')
    assert new_parser(HERMES, stream=False).parse(text).content == text


def test_arguments_stream_as_they_come() -> None:
    parser = new_parser(HERMES)

    assert parser.feed('<tool_call>{"name": "add", ') == []
    assert parser.feed('"arguments": {"a": ') == call(0, "add", '{"a": ')
    assert parser.feed("1}") == [Arguments(0, "1}")]
    assert parser.feed("}</tool_call>") == []
    assert parser.finish() == parser.finish() == []


@pytest.mark.parametrize("format", ToolFormat)
@given(data=st.data())
def test_only_what_may_begin_a_call_is_held_back(format: ToolFormat, data: st.DataObject) -> None:
    marker = MARKERS[format]
    alphabet = st.sampled_from([*marker, "x", " ", "\n", *(marker[:end] for end in (2, 5))])
    pieces = ["x", *data.draw(st.lists(alphabet, max_size=30))]
    parser = new_parser(format)
    come, given = "", ""
    for piece in pieces:
        come += piece
        if marker in come:
            return
        given += "".join(event.text for event in parser.feed(piece) if isinstance(event, Content))
        assert come.startswith(given)
        assert marker.startswith(come[len(given) :].lstrip(SPACE))


FRAGMENTS = [
    *MARKERS.values(),
    *(CALLS_END, CALL_BEGIN, CALL_END, SEP, "</tool_call>", "[ARGS]", "[CALL_ID]", "```json"),
    *("[", "]", "{", "}", ",", ":", ";", '"', "\\", " ", "\n", "é", "x", "<", "function", "```"),
    *('{"name": "add", "arguments": {"a": [1, "}"]}}', '"name"', '"arguments"', "add", "null"),
]
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.text(st.characters(codec="utf-8"), max_size=60),
    st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.sampled_from(["{}", '{"a": "\\"}"}', "{a"])),
        min_size=1,
        max_size=3,
    ).flatmap(lambda calls: st.sampled_from([write(format, calls) for format in ToolFormat])),
)


@pytest.mark.parametrize("format", ToolFormat)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12), stream=st.booleans())
def test_neither_garbage_nor_where_it_is_cut_matters(
    format: ToolFormat, text: str, cuts: list[int], stream: bool
) -> None:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]

    whole = read(new_parser(format, stream=stream), [text])

    assert read(new_parser(format, stream=stream), pieces) == whole
    assert read(new_parser(format, stream=stream), text) == whole
    for event in whole:
        json.dumps(event, ensure_ascii=False).encode()
        if isinstance(event, Arguments) and not stream:
            assert isinstance(json.loads(event.text), dict)
    if not any(isinstance(event, CallBegan) for event in whole):
        assert "".join(event.text for event in whole if isinstance(event, Content)) == text


def test_a_long_call_in_small_pieces_takes_linear_time() -> None:
    """Quadratic, it would take minutes and not a second."""
    arguments = json.dumps({"text": "word " * 200_000})
    text = write(HERMES, [("add", arguments)])
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]

    assert read(new_parser(HERMES), pieces) == call(0, "add", arguments)
    assert read(new_parser(HERMES, stream=False), pieces) == call(0, "add", arguments)


@pytest.mark.parametrize("format", ToolFormat)
@pytest.mark.parametrize("stream", [True, False])
def test_without_parallel_calls_the_first_is_all(format: ToolFormat, stream: bool) -> None:
    text = write(format, [("weather", "{}"), ("add", "{}")]) + " and more"
    parser = new_parser(format, parallel=False, stream=stream)

    assert read(parser, text) == call(0, "weather", "{}")
    assert parser.feed("even more") == []


def test_a_whole_answer_has_content_and_calls() -> None:
    text = "Wait.\n" + write(HERMES, [("weather", '{"a": 1}')])
    parser = new_parser(HERMES, stream=False)

    answer = parser.parse(text)

    assert answer.content == "Wait."
    assert answer.calls == (("call0", "weather", '{"a": 1}'),)
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"
    alone = new_parser(HERMES, stream=False).parse(write(HERMES, [("add", "{}")]))
    assert alone.content is None
    plain = new_parser(HERMES, stream=False)
    assert plain.parse("Hi") == ("Hi", ())
    assert plain.finish_reason("stop") == "stop"
    assert new_parser(HERMES, stream=False).parse("") == ("", ())


@pytest.mark.parametrize(
    ("format", "pattern"), [(HERMES, "call_[A-Za-z0-9]{24}"), (MISTRAL, "[A-Za-z0-9]{9}")]
)
def test_ids_are_what_the_models_template_takes_back(format: ToolFormat, pattern: str) -> None:
    parsers = [RequestedTools(format=format).new_parser(stream=False) for _ in range(2)]
    text = write(format, [("weather", "{}"), ("add", "{}")])

    ids = [call.call_id for parser in parsers if parser for call in parser.parse(text).calls]

    assert len(set(ids)) == 4
    for call_id in ids:
        assert re.fullmatch(pattern, call_id)


TOOLS_BLOCK = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"


@pytest.mark.parametrize(
    ("template", "support"),
    [
        (TOOLS_BLOCK + "{{ 'answer in <tool_call></tool_call>' }}", (True, HERMES)),
        (TOOLS_BLOCK + "<tool_call><function=x><parameter=y>", (True, None)),
        (TOOLS_BLOCK + "<tool_call>{{ name }}<arg_key>", (True, None)),
        (TOOLS_BLOCK + "{{- '[TOOL_CALLS] [' }}", (True, MISTRAL)),
        (
            TOOLS_BLOCK + '<|start_header_id|>{{ \'{"name": function name, "parameters": x}\' }}',
            (True, LLAMA),
        ),
        (TOOLS_BLOCK + f"{CALLS_BEGIN}{CALL_BEGIN}{SEP}", (True, DEEPSEEK)),
        (TOOLS_BLOCK, (True, None)),
        # Renders calls of earlier turns, and not which tools there are.
        (f"{{{{ message.tool_calls }}}}{CALLS_BEGIN}{SEP}", (False, None)),
        ("{{ 'no tools here' }} tools", (False, None)),
        ("{% generation %}{% for tool in tools %}{% endgeneration %}", (True, None)),
        ("{% broken", (False, None)),
        ("", (False, None)),
    ],
)
def test_the_chat_template_says_what_the_model_can(
    template: str, support: tuple[bool, ToolFormat | None]
) -> None:
    assert find_tool_support(template) == support


SUPPORT = ToolSupport(renders_tools=True, format=HERMES)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_tools_are_read_for_the_template_and_the_parser() -> None:
    tools = read_tools({"tools": [TOOL, named("b")], "parallel_tool_calls": False}, SUPPORT)

    assert [json.loads(text) for text in tools.tools_json] == [TOOL, named("b")]
    assert tools.names == {"add", "b"}
    assert (tools.format, tools.parallel) == (HERMES, False)
    assert not tools.needs_control_tokens
    assert tools.new_parser(stream=True) is not None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
def test_without_tools_nothing_is_rendered_or_searched(body: dict[str, Any]) -> None:
    tools = read_tools(body, SUPPORT)

    assert tools == RequestedTools()
    assert tools.new_parser(stream=True) is None


def test_tools_of_an_unknown_format_are_rendered_and_the_answer_stays_text() -> None:
    tools = read_tools({"tools": [TOOL]}, ToolSupport(renders_tools=True, format=None))

    assert tools.tools_json
    assert tools.new_parser(stream=False) is None


def test_tools_that_the_template_would_drop_are_refused_unless_they_are_not_wanted() -> None:
    support = ToolSupport(renders_tools=False, format=None)

    with pytest.raises(InvalidArgument, match="tools: the model's chat template"):
        read_tools({"tools": [TOOL]}, support)
    assert read_tools({"tools": [TOOL], "tool_choice": "none"}, support) == RequestedTools()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": "add"}, "tools"),
        ({"tools": 3}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [named("")]}, "tools[0].function.name"),
        ({"tools": [named("a b")]}, "tools[0].function.name"),
        ({"tools": [named("a\n")]}, "tools[0].function.name"),
        ({"tools": [named("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 3}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
            "tools[0].function.strict",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": 0}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("add")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 3}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": ""}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": False}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_tools(body, SUPPORT)

    assert [violation.field for violation in caught.value.violations] == [field]
