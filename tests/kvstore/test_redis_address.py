from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from kvstore.redis_address import RedisAddress, address_of, parse_url
from services.core.settings import KvStoreSettings
from services.runtime.startup import StartupError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", RedisAddress(host="host")),
        ("redis://host:7000/3", RedisAddress(host="host", port=7000, db=3)),
        ("rediss://host:7000/", RedisAddress(host="host", port=7000, tls=True)),
        ("redis://[::1]:7000", RedisAddress(host="::1", port=7000)),
        ("unix:///run/valkey.sock", RedisAddress(path="/run/valkey.sock")),
        ("unix:///tmp/a%20b/valkey.sock", RedisAddress(path="/tmp/a b/valkey.sock")),
        ("redis://:p%2Fw%40@host", RedisAddress(host="host", password="p/w@")),
        ("redis://me:pw@host", RedisAddress(host="host", username="me", password="pw")),
        (
            "unix://me:pw@/run/valkey.sock",
            RedisAddress(path="/run/valkey.sock", username="me", password="pw"),
        ),
    ],
)
def test_urls(url: str, expected: RedisAddress) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "host:7000",
        "http://me:secret@host",
        "redis://",
        "redis://me:se/cret@host:7000",
        "redis://me:se#cret@host",
        "redis://me:se?cret@host",
        "redis://me:secret@host:port",
        "redis://me:secret@host/zero",
        "redis://me:secret@host/0?socket_timeout=1",
        "unix://",
        "redis://me:secret@[::1",
        " redis://me:secret@host",
        "",
    ],
)
def test_a_malformed_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(
        StartupError, match=r"^kvstore\.redis_url must be empty, redis://"
    ) as caught:
        parse_url(url)

    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_port_that_is_none_is_refused_without_being_shown() -> None:
    with pytest.raises(StartupError) as caught:
        parse_url("redis://me:secret@host:70000")

    assert str(caught.value) == "kvstore.redis_url: host or port cannot be read"
    assert caught.value.__cause__ is None


def test_a_password_is_not_shown() -> None:
    address = parse_url("rediss://me:secret@host:7000/3")

    assert str(address) == "rediss://host:7000/3"
    assert "secret" not in repr(address)


def test_addresses_are_shown_as_urls() -> None:
    for url in ("redis://[::1]:7000/0", "unix:///a%20b/valkey.sock", "redis://host:6379/0"):
        assert str(parse_url(url)) == url


def test_user_and_password_come_from_files_as_secrets_are_mounted(tmp_path: Path) -> None:
    user, password = tmp_path / "user", tmp_path / "password"
    user.write_text("me\n")
    password.write_text("two words \n")
    address = address_of(
        KvStoreSettings(
            redis_url="redis://somebody:else@host",
            redis_user_file=str(user),
            redis_password_file=str(password),
        )
    )

    assert (address.username, address.password) == ("me", "two words ")
    assert address.credentials() == ("me", "two words ")


def test_who_has_only_a_password_gives_only_that() -> None:
    assert RedisAddress(password="secret").credentials() == ("secret",)
    assert RedisAddress().credentials() == ()


@pytest.mark.parametrize("name", ["redis_user_file", "redis_password_file", "redis_ca_file"])
def test_a_file_that_is_not_there_is_named_with_its_setting(name: str) -> None:
    changes: dict[str, Any] = {name: "/no/such/file"}
    settings = KvStoreSettings(redis_url="rediss://host", **changes)
    with pytest.raises(StartupError, match=rf"^kvstore\.{name}: /no/such/file: .*No such file"):
        address_of(settings)


def test_a_ca_file_that_is_none_is_named(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("nothing")
    settings = KvStoreSettings(redis_url="rediss://host", redis_ca_file=str(ca))
    with pytest.raises(StartupError, match=r"^kvstore\.redis_ca_file"):
        address_of(settings)


def test_a_cluster_has_neither_databases_nor_unix_sockets() -> None:
    for url in ("redis://host/1", "unix:///run/valkey.sock"):
        with pytest.raises(StartupError, match="Cluster"):
            address_of(KvStoreSettings(redis_url=url, redis_cluster=True))


def test_tls_verifies_certificate_and_host() -> None:
    context = RedisAddress(tls=True).ssl_context()

    assert context is not None
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert RedisAddress().ssl_context() is None
