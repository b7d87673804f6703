"""Where Redis is, and who we are there. Passwords never reach a log or an error."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from services.core.settings import REDIS_URL, KvStoreSettings
from services.runtime.startup import StartupError

DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """`path`: of a unix socket, instead of host and port."""

    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    tls: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"unix://{quote(self.path)}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}"

    def credentials(self) -> tuple[str, ...]:
        """The arguments of AUTH; none: no AUTH."""
        if self.username:
            return (self.username, self.password)
        return (self.password,) if self.password else ()

    def ssl_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.ca_file or None) if self.tls else None

    def redis_py_arguments(self) -> dict[str, Any]:
        place: dict[str, Any] = (
            {"path": self.path} if self.path else {"host": self.host, "port": self.port}
        )
        tls = {"ssl_ca_certs": self.ca_file or None} if self.tls else {}
        return {
            **place,
            **tls,
            "db": self.db,
            "username": self.username or None,
            "password": self.password or None,
        }


def address_of(settings: KvStoreSettings) -> RedisAddress:
    """What the settings say, files included. Raises StartupError naming the setting."""
    address = parse_url(settings.redis_url)
    address = replace(
        address,
        username=_read("redis_user_file", settings.redis_user_file) or address.username,
        password=_read("redis_password_file", settings.redis_password_file) or address.password,
        ca_file=settings.redis_ca_file,
    )
    if settings.redis_cluster and (address.path or address.db):
        raise StartupError("kvstore.redis_url: a Redis Cluster has neither a unix socket nor a db")
    try:
        address.ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"kvstore.redis_ca_file: {settings.redis_ca_file}: {error}") from None
    return address


def parse_url(url: str) -> RedisAddress:
    """Of the form REDIS_URL. Raises StartupError, which does not show the URL: a password
    with a stray "/" or "#" may stand anywhere in it."""
    if not url or re.fullmatch(REDIS_URL.pattern, url) is None:
        raise StartupError(f"kvstore.redis_url must be {REDIS_URL.words}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError:
        raise StartupError("kvstore.redis_url: host or port cannot be read") from None
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        return RedisAddress(path=unquote(parts.path), username=username, password=password)
    return RedisAddress(
        host=host,
        port=port,
        db=int(parts.path.strip("/") or 0),
        tls=parts.scheme == "rediss",
        username=username,
        password=password,
    )


def _read(name: str, path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"kvstore.{name}: {path}: {error}") from None
