from __future__ import annotations

import re

import pytest

from services.core.redis_url import HIDDEN, PATTERN, hides_password, without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("redis://host", "redis://host"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://my_host.a-b/", "redis://my_host.a-b/"),
        ("rediss://[::1]:7000/3", "rediss://[::1]:7000/3"),
        ("redis://[fe80::1%eth0]:7000", "redis://[fe80::1%eth0]:7000"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix:///tmp/a%20b/jürgen/redis.sock", "unix:///tmp/a%20b/jürgen/redis.sock"),
        ("redis://bob:s3cret@host:6379/0", "redis://bob:***@host:6379/0"),
        ("redis://bob:s3:cret@host", "redis://bob:***@host"),
        ("redis://:s3^cret!$&'()*+,;=@host", "redis://:***@host"),
        ("rediss://b%20b:s3%2Fcret%40%23@host", "rediss://b%20b:***@host"),
        ("redis://bob:s3cret@[::1]", "redis://bob:***@[::1]"),
        ("unix://bob:s3cret@/run/redis.sock", "unix://bob:***@/run/redis.sock"),
        ("redis://s3cret@host", "redis://***@host"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert re.fullmatch(PATTERN, url)
    assert without_password(url) == without_password(shown) == shown
    assert hides_password(shown) == (HIDDEN in shown)
    assert not hides_password(url)


@pytest.mark.parametrize(
    "url",
    [
        "bob:s3cret@host:6379",
        "host:6379",
        " redis://bob:s3cret@host/0",
        "redis://bob:s3cret@host/0\n",
        "redis://bob:s3\ncret@host/0",
        "redis://bob:s3 cret@host/0",
        "re\tdis://bob:s3cret@host/0",
        "redis://bob:s3cret@ho st",
        "redis://host:6379/0?password=s3cret",
        "unix:///run/redis.sock?password=s3cret",
        "redis://host#s3cret",
        "redis://:s3/cret@host",
        "redis://:s3#cret@host",
        "redis://:s3?cret@host",
        "redis://:s3@cret@host",
        "redis://:s3%cret@host",
        "redis://:s3[cret@host",
        "redis://:s3cret\u2100@host",
        "redis://bo/b:s3cret@host",
        "redis://host/0@s3cret",
        "redis:/bob:s3cret@host",
        "redis:bob:s3cret@host",
        "redis+x://bob:s3cret@host",
        "http://bob:s3cret@host",
        "redis://bob:s3cret@",
        "redis://bob:s3cret@:6379",
        "redis://bob:s3cret@host:port",
        "redis://bob:s3cret@host/s3cret",
        "redis://bob:s3cret@[::1",
        "redis:///run/redis.sock",
        "unix://bob:s3cret@host",
        "unix://bob:s3/cret@/run/redis.sock",
        "unix://host/run/redis.sock",
        "unix:///bob:s3cret@/run/redis.sock",
        "unix:///run/\0",
        "unix://",
        "***",
    ],
)
def test_what_is_no_url_of_a_redis_is_hidden_whole(url: str) -> None:
    assert without_password(url) == HIDDEN
    assert not hides_password(url)


@pytest.mark.parametrize("part", ["a", ":", "a:", "%41", "%", "@", "/", "*", "["])
def test_long_texts_are_hidden_too(part: str) -> None:
    for scheme in ("redis", "unix"):
        assert without_password(f"{scheme}://{part * 100_000}#") == HIDDEN
        assert without_password(f"{scheme}://{part * 100_000}@{part * 100_000}#") == HIDDEN
