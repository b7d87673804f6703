from __future__ import annotations

import pytest

from services.cli import observer
from services.cli.failures import Failure


def test_a_key_may_end_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(observer.PAGE_KEY_VARIABLE, raising=False)
    assert observer._page_key() == ""
    monkeypatch.setenv(observer.PAGE_KEY_VARIABLE, "ft-secret\n")
    assert observer._page_key() == "ft-secret"


@pytest.mark.parametrize("key", ["ft-secret\nft-secret", "ft-secr\u00e9t"])
def test_what_can_be_no_key_is_said_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(observer.PAGE_KEY_VARIABLE, key)
    with pytest.raises(Failure, match="holds no key") as caught:
        observer._page_key()
    assert "secr" not in str(caught.value)
