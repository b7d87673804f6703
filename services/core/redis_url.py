"""The URL of a Redis: what it may be, and how it is shown to whoever may not see all of it."""

from __future__ import annotations

import re

HIDDEN = "***"

WORDS = (
    "empty, redis://user:password@host:port/db, rediss:// for TLS, or unix:///path;"
    " special characters as %XX"
)

_ENCODED = r"%[0-9A-Fa-f]{2}"
_CHARACTER = rf"(?:(?![/:?#@%\[\]])[!-~]|{_ENCODED})"
# One word before the @ is a user to us, and a password to redis-cli.
_CREDENTIALS = rf"(?:{_CHARACTER}*:)?(?P<secret>(?:{_CHARACTER}|:)*)@"
_HOST = r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])"
_PLACE = rf"{_HOST}(?::[0-9]{{1,5}})?(?:/[0-9]{{0,9}})?"
_PATH = rf"/(?:[^\s\x00-\x1f\x7f?#@%]|{_ENCODED})+"

PATTERN = rf"(?:(?:(?P<unix>unix)|rediss?)://(?:{_CREDENTIALS})?(?(unix){_PATH}|(?a:{_PLACE})))?"


def without_password(url: str) -> str:
    """Hides all of what is no such URL: a password may stand anywhere in it."""
    match = re.fullmatch(PATTERN, url)
    if match is None:
        return HIDDEN
    start, end = match.span("secret")
    return url if start < 0 else url[:start] + HIDDEN + url[end:]


def hides_password(url: str) -> bool:
    """It came from `without_password`."""
    match = re.fullmatch(PATTERN, url)
    return match is not None and match["secret"] == HIDDEN
