from __future__ import annotations

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from services.observer.guard import guarded


def client(listens_on: str) -> TestClient:
    return TestClient(guarded(Response("here"), lambda: (), host=listens_on))


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "LOCALHOST", "127.0.0.2", "[::1]", "[0::1]"])
def test_wherever_on_this_machine_alone_it_listens_no_other_name_leads_to_it(
    listens_on: str,
) -> None:
    page = client(listens_on)
    assert page.get("/", headers={"host": "evil.example:7190"}).status_code == 421
    assert page.get("/", headers={"host": f"{listens_on}:7190"}).status_code == 200


@pytest.mark.parametrize("listens_on", ["", "0.0.0.0", "192.0.2.1"])
def test_where_others_reach_it_nobody_knows_by_which_name(listens_on: str) -> None:
    assert client(listens_on).get("/", headers={"host": "mesh.example"}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_may_lead_here_and_make_it_do_nothing(site: str) -> None:
    page = client("127.0.0.1")
    headers = {"host": "127.0.0.1:7190", "sec-fetch-site": site}
    for mode in ("no-cors", "cors"):
        assert page.get("/", headers={**headers, "sec-fetch-mode": mode}).status_code == 403
    assert page.get("/", headers={**headers, "sec-fetch-mode": "navigate"}).status_code == 200
    own = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    assert page.get("/", headers={**headers, **own}).status_code == 200
