from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from services.cli import observer
from services.cli.failures import Failure
from services.runtime.process import INSECURE_VARIABLE


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


class Keys(http.server.BaseHTTPRequestHandler):
    """An observer's HTTP; it remembers what came."""

    given: list[str | None]

    def do_GET(self) -> None:
        self.given.append(self.headers.get("authorization"))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[http.server.HTTPServer]:
    Keys.given = []
    with http.server.HTTPServer(("127.0.0.1", 0), Keys) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def at(page: http.server.HTTPServer, host: str) -> str:
    return f"{host}:{page.server_port}"


# An address of this machine that does not read as one.
FAR = "0.0.0.0"


def test_a_key_goes_unencrypted_to_this_machine_alone(
    page: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INSECURE_VARIABLE, raising=False)
    monkeypatch.setenv(observer.PAGE_KEY_VARIABLE, "ft-secret")
    for host in ("127.0.0.1", "localhost"):
        assert observer._get(at(page, host), "/", None) == (200, b"{}")
    with pytest.raises(Failure, match=f"{INSECURE_VARIABLE}=1") as caught:
        observer._get(at(page, FAR), "/", None)

    assert "--tls-dir" in str(caught.value)
    assert "ft-secret" not in str(caught.value)
    assert Keys.given == ["Bearer ft-secret"] * 2


@pytest.mark.parametrize(("insecure", "key"), [("1", "ft-secret"), ("0", "")])
def test_another_machine_is_asked_without_a_key_or_by_permission(
    page: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, insecure: str, key: str
) -> None:
    monkeypatch.setenv(INSECURE_VARIABLE, insecure)
    monkeypatch.setenv(observer.PAGE_KEY_VARIABLE, key)

    assert observer._get(at(page, FAR), "/", None).status == 200
    assert Keys.given == [f"Bearer {key}" if key else None]
