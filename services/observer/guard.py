"""What stands before the page: who may see it, and what browsers may do with it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection
from typing import TypeAlias

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.core.tenants import hash_key
from services.runtime.tls import is_loopback

# Scripts and styles of its own, and nothing from anywhere else; nobody frames it.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; connect-src 'self'; manifest-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# Where the page of another site asks, browsers say so. Following a link is something else.
_FOREIGN = ("cross-site", "same-site")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

# The hashes of the keys that open the page; none: it is open.
KeyHashes: TypeAlias = Callable[[], Collection[str]]


def guarded(app: ASGIApp, key_hashes: KeyHashes, *, host: str) -> ASGIApp:
    """`host`: where it listens. On a loopback address no other name is answered: a page from
    elsewhere could have its own name lead here, and read what it says.
    """
    names = {*_LOOPBACK, host.lower()} if is_loopback(host) else None
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        headers = Headers(scope=scope)
        hashes = key_hashes()
        answer = app
        if names is not None and _name(headers.get("host", "")) not in names:
            answer = _refusal(421, "ask for it by localhost or its address")
        elif headers.get("sec-fetch-site") in _FOREIGN and (
            headers.get("sec-fetch-mode") != "navigate"
        ):
            answer = _refusal(403, "not for pages of other sites")
        elif hashes and hash_key(_key(headers.get("authorization", ""))) not in hashes:
            asking = {"www-authenticate": 'Basic realm="firsttoken", charset="UTF-8"'}
            answer = _refusal(401, "a key is needed (observer.key_hashes)", asking)
        await answer(scope, receive, send_with_headers)

    return serve


def _refusal(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps({"error": text})
    return Response(body, status, headers, media_type="application/json")


def _name(host: str) -> str:
    """Without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()


def _key(authorization: str) -> str:
    """As a bearer token, or as the password that a browser asks for; "" when there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        decoded = base64.b64decode(value, validate=True).decode()
    except ValueError:  # no ASCII, no base64, no UTF-8
        return ""
    return decoded.partition(":")[2]
