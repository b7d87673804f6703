"""What a request must be, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from router.admission import RequestClass
from services.core.errors import InvalidArgument, PermissionDenied, Violation
from services.core.keys import MAX_SALT_CHARACTERS
from services.core.tenants import ANYBODY, Tenant
from services.core.tokens import BYTES_PER_TOKEN
from services.runtime.protocol import is_batch, sampling_from_proto, tenant_of


class Bounds(NamedTuple):
    # "" while unknown: whoever knows the model checks it.
    model: str
    # Prompt and answer together.
    max_context_tokens: int
    max_text_bytes: int


class Checked(NamedTuple):
    # The field of the request that holds the prompt: "text", "chat" or "token_ids".
    field: str
    tenant: str
    # Whose cached prefixes it may share: the tenant, or the tenant and its salt.
    cache_tenant: str
    request_class: RequestClass


def check_request(
    request: inference_pb2.GenerateRequest,
    metadata: Iterable[tuple[str, str | bytes]] | None,
    bounds: Bounds,
    caller: Tenant = ANYBODY,
) -> Checked:
    """Raises InvalidArgument naming every field that breaks a rule, and PermissionDenied for
    a class above the caller's.

    Who is known by its credentials is that tenant; anybody else may name one.
    """
    violations = [
        *_check_model(request.model, bounds.model),
        *_check_input(request, bounds),
        *sampling_from_proto(request.sampling).violations(
            max_context_tokens=bounds.max_context_tokens
        ),
    ]
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        rule = f"must be at most {MAX_SALT_CHARACTERS} characters"
        violations.append(Violation("cache_salt", f"{rule}; got {len(request.cache_salt)}"))
    tenant = caller.name
    try:
        tenant = tenant or tenant_of(metadata)
    except InvalidArgument as error:
        violations += error.violations
    try:
        is_batch(request.request_class)
    except InvalidArgument as error:
        violations += error.violations
    if violations:
        raise InvalidArgument(violations)
    field = request.WhichOneof("input")
    assert field is not None
    salt = caller.settings.salt
    return Checked(
        field,
        tenant,
        # A tenant's name has no slash.
        f"{tenant}/{salt}" if salt else tenant,
        _class_of(request.request_class, caller),
    )


def class_to_proto(request_class: RequestClass) -> common_pb2.RequestClass.ValueType:
    if request_class is RequestClass.BATCH:
        return common_pb2.REQUEST_CLASS_BATCH
    return common_pb2.REQUEST_CLASS_INTERACTIVE


def _class_of(asked: common_pb2.RequestClass.ValueType, caller: Tenant) -> RequestClass:
    if is_batch(asked):
        return RequestClass.BATCH
    if caller.settings.max_class == RequestClass.INTERACTIVE.value:
        return RequestClass.INTERACTIVE
    if asked == common_pb2.REQUEST_CLASS_INTERACTIVE:
        raise PermissionDenied(
            f"request_class: tenant {caller.name} may ask for batch only"
            f" (tenants.{caller.name}.max_class)",
            reason="CLASS_NOT_ALLOWED",
        )
    return RequestClass.BATCH


def check_length(field: str, num_tokens: int, max_context_tokens: int) -> None:
    """Raises InvalidArgument when the context has no room for prompt and one token more."""
    if num_tokens >= max_context_tokens:
        too_long = _too_long(field, num_tokens, max_context_tokens)
        raise InvalidArgument([too_long], reason="PROMPT_TOO_LONG")


def text_head(request: inference_pb2.GenerateRequest, length: int) -> bytes:
    """What SageMaker's PrefixLength looks at: of a chat, the first `length` characters of its
    messages' text; of text, the first bytes; of ids, the first bytes of those.
    """
    match request.WhichOneof("input"):
        case "text":
            return request.text[:length].encode()[:length]
        case "chat":
            head = ""
            for message in request.chat.messages:
                head += message.content[: length - len(head)]
                if len(head) >= length:
                    break
            return head.encode()
    return request.token_ids[:length]


def _check_model(model: str, served: str) -> Iterator[Violation]:
    if model and served and model != served:
        yield Violation("model", f"must be {served!r}, the model served here; got {model!r}")


def _check_input(request: inference_pb2.GenerateRequest, bounds: Bounds) -> Iterator[Violation]:
    match request.WhichOneof("input"):
        case None:
            yield Violation("input", "must be one of text, chat, token_ids")
        case "text":
            yield from _check_text(request.text, bounds.max_text_bytes)
        case "chat":
            yield from _check_chat(request.chat, bounds.max_text_bytes)
        case "token_ids":
            yield from _check_ids(request.token_ids, bounds.max_context_tokens)


def _check_text(text: str, max_bytes: int) -> Iterator[Violation]:
    if not text:
        yield Violation("text", "must not be empty")
    # Counting is a copy: only where the text might be too long, at 4 bytes a character.
    elif 4 * len(text) > max_bytes and (num_bytes := len(text.encode())) > max_bytes:
        yield Violation("text", f"must be at most {max_bytes} bytes; got {num_bytes}")


def _check_chat(chat: common_pb2.Chat, max_bytes: int) -> Iterator[Violation]:
    if not chat.messages:
        yield Violation("chat.messages", "must not be empty")
    if chat.ByteSize() > max_bytes:
        yield Violation("chat", f"must be at most {max_bytes} bytes; got {chat.ByteSize()}")
    for index, message in enumerate(chat.messages):
        if not message.role:
            yield Violation(f"chat.messages[{index}].role", "must not be empty")


def _check_ids(packed: bytes, max_context_tokens: int) -> Iterator[Violation]:
    num_tokens, rest = divmod(len(packed), BYTES_PER_TOKEN)
    if rest:
        rule = "must be whole little-endian uint32 ids, 4 bytes each"
        yield Violation("token_ids", f"{rule}; got {len(packed)} bytes")
    elif not num_tokens:
        yield Violation("token_ids", "must not be empty")
    elif num_tokens >= max_context_tokens:
        yield _too_long("token_ids", num_tokens, max_context_tokens)


def _too_long(field: str, num_tokens: int, max_context_tokens: int) -> Violation:
    return Violation(
        field,
        # OpenAI's words, by which clients know that they must shorten the prompt.
        f"must be at most {max_context_tokens - 1} tokens: this model's maximum context length is"
        f" {max_context_tokens} tokens, the answer's included; got {num_tokens}",
    )
