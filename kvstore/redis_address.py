"""Where Redis is, and who we are there. Passwords never reach a log or an error."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from services.core.settings import KvStoreSettings
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
            return f"unix://{self.path}"
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
    """redis://, rediss:// (TLS) or unix://. Raises StartupError, which does not show the URL:
    a password with a stray "/" or "#" may stand anywhere in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _malformed("host and port cannot be read") from None
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.query or parts.fragment:
        raise _malformed("options after ? or # are settings of their own")
    if parts.scheme == "unix" and parts.path:
        return RedisAddress(path=unquote(parts.path), username=username, password=password)
    db = parts.path.strip("/")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise _malformed("")
    if db and not (db.isascii() and db.isdecimal()):
        raise _malformed("the path must be a database number")
    return RedisAddress(
        host=parts.hostname,
        port=port or DEFAULT_PORT,
        db=int(db or 0),
        tls=parts.scheme == "rediss",
        username=username,
        password=password,
    )


def _malformed(why: str) -> StartupError:
    return StartupError(
        "kvstore.redis_url must be redis://host:port/db, rediss://host:port/db or unix:///path,"
        " with user:password@ before the host if need be and %XX for special characters"
        + (f": {why}" if why else "")
    )


def _read(name: str, path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"kvstore.{name}: {path}: {error}") from None
