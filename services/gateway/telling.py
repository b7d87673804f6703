"""From the mesh's answers to a response in OpenAI's form, whole or as events. Pure.

telling = ChatTelling(ask, served, …)
data = telling.events(index, response)   # streamed: what is to be written now
telling.whole()                          # not streamed: after all of them
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from services.gateway.accounts import Usage, add_usage
from services.gateway.logprobs import ChatLogprobs, CompletionLogprobs
from services.gateway.request import Ask
from services.gateway.served import Served
from services.gateway.sse import DONE, event
from services.gateway.tools import Arguments, CallBegan, Content, Event, ToolCallParser

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Telling(ABC):
    """One response. `journeys` holds what the caller asked to be told of each answer's way."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, ask: Ask, served: Served, generation: int) -> None:
        self._ask = ask
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.chunk_name if ask.told.stream else self.object_name,
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": f"fp_{generation}",
        }
        self._texts: list[list[str]] = [[echo] for echo in ask.echoes]
        self._finished: list[common_pb2.Finished | None] = [None] * len(ask.requests)
        self._is_begun = [False] * len(ask.requests)
        self.journeys: list[dict[str, Any]] = []

    @property
    def is_complete(self) -> bool:
        return all(finished is not None for finished in self._finished)

    @property
    def usage(self) -> Usage:
        """Of what is finished."""
        usages = [finished.usage if finished else common_pb2.Usage() for finished in self._finished]
        return add_usage(usages, self._ask.num_choices)

    def events(self, index: int, response: inference_pb2.GenerateResponse) -> bytes:
        """What is to be written now; the last ones end the stream."""
        data = b""
        if not self._is_begun[index]:
            self._is_begun[index] = True
            data += self._beginning(index)
        if response.HasField("chunk"):
            return data + self._chunk_events(index, response.chunk)
        self._finished[index] = response.finished
        data += self._end_events(index, response.finished)
        if self.is_complete:
            data += self._last_events()
        return data

    def collect(self, index: int, response: inference_pb2.GenerateResponse) -> None:
        """Not streamed."""
        if response.HasField("chunk"):
            self._texts[index].append(response.chunk.text)
            if response.chunk.logprobs:
                self._collect_logprobs(index, response.chunk)
        else:
            self._finished[index] = response.finished

    def whole(self) -> dict[str, Any]:
        body = {
            **self._head,
            "choices": [self._whole_choice(index) for index in range(len(self._texts))],
            "usage": self.usage.to_json(),
        }
        return {**body, "firsttoken": self.journeys} if self._ask.told.ledger else body

    def _event(self, *choices: dict[str, Any], **more: Any) -> bytes:
        body = {**self._head, "choices": list(choices), **more}
        if self._ask.told.usage and "usage" not in body:
            body["usage"] = None
        return event(body)

    def _last_events(self) -> bytes:
        told = self._ask.told
        more: dict[str, Any] = {"firsttoken": self.journeys} if told.ledger else {}
        if told.usage:
            more["usage"] = self.usage.to_json()
        return (self._event(**more) if more else b"") + DONE

    def _finish_reason(self, index: int) -> str:
        finished = self._finished[index]
        assert finished is not None
        return _FINISH_REASONS.get(finished.finish_reason, "stop")

    @abstractmethod
    def _beginning(self, index: int) -> bytes: ...

    @abstractmethod
    def _chunk_events(self, index: int, chunk: common_pb2.Chunk) -> bytes: ...

    @abstractmethod
    def _end_events(self, index: int, finished: common_pb2.Finished) -> bytes: ...

    @abstractmethod
    def _collect_logprobs(self, index: int, chunk: common_pb2.Chunk) -> None: ...

    @abstractmethod
    def _whole_choice(self, index: int) -> dict[str, Any]: ...


class ChatTelling(Telling):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, ask: Ask, served: Served, generation: int) -> None:
        super().__init__(ask, served, generation)
        self._logprobs = ChatLogprobs(served.vocabulary)
        self._entries: list[list[dict[str, Any]]] = [[] for _ in ask.requests]
        self._parsers: list[ToolCallParser | None] = [
            ask.tools.new_parser(stream=ask.told.stream) for _ in ask.requests
        ]

    def _beginning(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._delta(index, delta, None)

    def _chunk_events(self, index: int, chunk: common_pb2.Chunk) -> bytes:
        parser = self._parsers[index]
        if parser is not None:
            deltas = [_delta_of(each) for each in parser.feed(chunk.text)]
        else:
            deltas = [{"content": chunk.text}] if chunk.text else []
        entries = self._logprobs.entries(chunk.logprobs) if chunk.logprobs else None
        if entries and not deltas:  # text may lag behind its tokens
            deltas = [{"content": ""}]
        data = b""
        for delta in deltas:
            data += self._delta(index, delta, entries)
            entries = None
        return data

    def _end_events(self, index: int, finished: common_pb2.Finished) -> bytes:
        parser, reason = self._parsers[index], self._finish_reason(index)
        data = b""
        if parser is not None:
            for each in parser.finish():
                data += self._delta(index, _delta_of(each), None)
            reason = parser.finish_reason(reason)
        return data + self._event(
            {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
        )

    def _delta(
        self, index: int, delta: dict[str, Any], entries: list[dict[str, Any]] | None
    ) -> bytes:
        logprobs = {"content": entries, "refusal": None} if entries else None
        return self._event(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        )

    def _collect_logprobs(self, index: int, chunk: common_pb2.Chunk) -> None:
        self._entries[index] += self._logprobs.entries(chunk.logprobs)

    def _whole_choice(self, index: int) -> dict[str, Any]:
        text, reason = "".join(self._texts[index]), self._finish_reason(index)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        parser = self._parsers[index]
        if parser is not None:
            parsed = parser.parse(text)
            message["content"] = parsed.content
            reason = parser.finish_reason(reason)
            if parsed.calls:
                message["tool_calls"] = [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in parsed.calls
                ]
        wanted = self._ask.told.logprobs is not None
        logprobs = {"content": self._entries[index], "refusal": None} if wanted else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


class CompletionTelling(Telling):
    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, ask: Ask, served: Served, generation: int) -> None:
        super().__init__(ask, served, generation)
        wanted = ask.echoes if ask.told.logprobs is not None else ()
        self._logprobs = [CompletionLogprobs(served.vocabulary, len(echo)) for echo in wanted]
        self._lists: list[dict[str, list[Any]]] = [each.lists(()) for each in self._logprobs]

    def _beginning(self, index: int) -> bytes:
        echo = self._ask.echoes[index]
        return self._piece(index, echo, None, None) if echo else b""

    def _chunk_events(self, index: int, chunk: common_pb2.Chunk) -> bytes:
        if not (chunk.text or chunk.logprobs):
            return b""
        lists = self._logprobs[index].lists(chunk.logprobs) if chunk.logprobs else None
        return self._piece(index, chunk.text, lists, None)

    def _end_events(self, index: int, finished: common_pb2.Finished) -> bytes:
        return self._piece(index, "", None, self._finish_reason(index))

    def _piece(
        self, index: int, text: str, lists: dict[str, list[Any]] | None, reason: str | None
    ) -> bytes:
        return self._event(
            {"index": index, "text": text, "logprobs": lists, "finish_reason": reason}
        )

    def _collect_logprobs(self, index: int, chunk: common_pb2.Chunk) -> None:
        for name, values in self._logprobs[index].lists(chunk.logprobs).items():
            self._lists[index][name] += values

    def _whole_choice(self, index: int) -> dict[str, Any]:
        wanted = self._ask.told.logprobs is not None
        return {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": self._lists[index] if wanted else None,
            "finish_reason": self._finish_reason(index),
        }


def _delta_of(found: Event) -> dict[str, Any]:
    """One event of a tool parser as OpenAI streams it."""
    match found:
        case Content(text=text):
            return {"content": text}
        case CallBegan(call_index=index, call_id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Arguments(call_index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
