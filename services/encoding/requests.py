"""An EncodeRequest to the encoder, and what it makes of it to an EncodeResponse."""

from __future__ import annotations

from google.protobuf.message import Message

from firsttoken.tokenizer.v1 import tokenizer_pb2
from services.core.errors import InvalidArgument
from services.core.keys import join_keys
from services.core.settings import TokenizerSettings
from services.encoding.chat import parse_chat
from services.encoding.encoder import BegunPrompt, EncodedPrompt, Encoder, Prompt
from services.runtime.channels import MAX_MESSAGE_BYTES


def begin(
    encoder: Encoder, request: tokenizer_pb2.EncodeRequest, settings: TokenizerSettings
) -> BegunPrompt:
    """Raises InvalidArgument naming the fields of the request."""
    return encoder.begin(
        _prompt(request, settings),
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        settings=settings,
    )


def to_response(
    encoded: EncodedPrompt, encoder: Encoder, request: tokenizer_pb2.EncodeRequest
) -> tokenizer_pb2.EncodeResponse:
    response = tokenizer_pb2.EncodeResponse(
        token_ids=encoded.token_ids,
        prefix_keys=join_keys(encoded.prefix_keys),
        block_tokens=encoder.block_tokens,
    )
    check_size(response, request.WhichOneof("input") or "input")
    return response


def check_model(model: str, encoder: Encoder) -> None:
    if model not in ("", encoder.model):
        rule = f"must be {encoder.model}, the model served; got {model}"
        raise InvalidArgument.of("model", rule)


def check_size(response: Message, field: str) -> None:
    """Raises InvalidArgument for an answer that is too long to be sent."""
    if (num_bytes := response.ByteSize()) > MAX_MESSAGE_BYTES:
        rule = f"must be shorter: the answer has {num_bytes} bytes, of {MAX_MESSAGE_BYTES} at most"
        raise InvalidArgument.of(field, rule)


def _prompt(request: tokenizer_pb2.EncodeRequest, settings: TokenizerSettings) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            return parse_chat(request.chat, settings)
        case "token_ids":
            return request.token_ids
    raise InvalidArgument.of("input", "must be one of text, chat and token_ids")
