"""The page: its files, its colours, and what a browser makes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from starlette.testclient import TestClient

from services.core.config import Snapshot
from services.core.settings import MeshConfig
from services.observer.books import Books
from services.observer.history import SHARES
from services.observer.http import PAGE, make_app
from services.observer.page_server import PageServer
from services.observer.state_fields import State
from tests.observer.scenes import scene, tell

SCRIPTS = {path.name: path.read_text() for path in PAGE.glob("*.js")}
HTML = (PAGE / "index.html").read_text()
CSS = (PAGE / "style.css").read_text()
BROWSER = Path(__file__).parent / "browser"
CHROMIUM = os.environ.get("FIRSTTOKEN_CHROMIUM", "")
HOSTILE = "<img src=x onerror='window.pwned=1'>"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags() -> list[tuple[str, dict[str, str | None]]]:
    parser = _Tags()
    parser.feed(HTML)
    return parser.tags


def new_books() -> Books:
    return Books(Snapshot(1, MeshConfig()), None)


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for tag, attributes in tags():
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ("src", "href") and value and not value.startswith(("#", "api/")):
                assert (PAGE / value).is_file(), value
    assert not re.search(r"<script(?![^>]* src=)", HTML)
    assert "<style" not in HTML
    for name, text in {**SCRIPTS, "style.css": CSS, "index.html": HTML}.items():
        addresses = re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", text)
        assert [each for each in addresses if "www.w3.org" not in each] == [], name
        for imported in re.findall(r'from "\./(.+?)"', text):
            assert imported in SCRIPTS


def test_values_never_become_markup() -> None:
    for name, text in SCRIPTS.items():
        sinks = "innerHTML|outerHTML|insertAdjacent|document.write|eval\\(|new Function|srcdoc"
        assert not re.search(sinks, text), name
        assert not re.search(r"setAttribute\(\"(style|on)", text), name


def test_scripts_know_only_what_is_there() -> None:
    ids = {attributes["id"] for _, attributes in tags() if "id" in attributes}
    fields = get_type_hints(State).keys()
    for name, text in SCRIPTS.items():
        for asked in re.findall(r'byId\("([\w-]+)"\)', text):
            assert asked in ids, (name, asked)
        for field in re.findall(r"\bstate\.(\w+)", text):
            assert field in fields, (name, field)


def test_every_share_has_its_colour() -> None:
    listed = re.search(r"const SHARES = \[(.*?)\];", SCRIPTS["app.js"], re.DOTALL)
    assert listed is not None
    assert re.findall(r"\w+", listed[1]) == [*SHARES]
    for share in SHARES:
        assert f".{share} {{" in CSS
        assert all(share in theme for theme in themes().values())


# --- colours


def themes() -> dict[str, dict[str, str]]:
    dark, light = re.findall(r":root \{(.*?)\n *\}", CSS, re.DOTALL)
    read = {
        name: dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))
        for name, block in (("dark", dark), ("light", light))
    }
    assert read["dark"].keys() == read["light"].keys()
    return read


def linear(colour: str) -> Any:
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG has it."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(linear(colour) @ weights) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes 2009: nobody's, protanopia, deuteranopia, tritanopia.
EYES = (
    np.eye(3),
    np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
)
# Linear sRGB to OKLab, by way of cones.
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def difference(one: str, other: str) -> float:
    """To the eyes that see the least of it; black and white are 1 apart."""

    def lab(colour: str, eyes: Any) -> Any:
        return TO_LAB @ np.cbrt(TO_CONES @ np.clip(eyes @ linear(colour), 0, 1))

    return min(float(np.linalg.norm(lab(one, eyes) - lab(other, eyes))) for eyes in EYES)


@pytest.mark.parametrize("name", ["dark", "light"])
def test_colours_can_be_read_and_told_apart(name: str) -> None:
    theme = themes()[name]
    for text in ("text", "faint", "link", "critical", "warning", "healthy"):
        assert contrast(theme[text], theme["ground"]) >= 4.5, text
        assert contrast(theme[text], theme["raised"]) >= 4.5, text
    for share in SHARES:
        assert contrast(theme[share], theme["ground"]) >= 3.0, share
    for one, other in pairwise(SHARES):
        assert difference(theme[one], theme[other]) >= 0.12, (one, other)
    for at, one in enumerate(SHARES):
        for other in SHARES[:at]:
            assert difference(theme[one], theme[other]) >= 0.09, (one, other)


# --- served


def test_it_is_served_with_a_strict_policy() -> None:
    client = TestClient(make_app(new_books()))
    for path, kind in (("/", "text/html"), ("/app.js", "javascript"), ("/style.css", "text/css")):
        answer = client.get(path)
        assert answer.status_code == 200
        assert kind in answer.headers["content-type"]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/../http.py").status_code == 404
    state = client.get("/api/state").json()
    assert state.keys() == get_type_hints(State).keys()
    assert state["headline"]["level"] == "idle"


def test_of_a_trace_with_several_requests_the_one_that_is_meant_is_shown() -> None:
    made = scene(2, over_s=20, end_unix_s=time.time())
    first, second = made.requests
    one_trace = tuple(
        dataclasses.replace(
            each,
            trace_id=first.trace_id,
            hops=tuple(dataclasses.replace(hop, trace_id=first.trace_id) for hop in each.hops),
        )
        for each in (first, second)
    )
    books = new_books()
    tell(books, dataclasses.replace(made, requests=one_trace), tenant="ada")
    client = TestClient(make_app(books))
    for each in (first, second):
        span_id = each.hops[0].span_id
        shown = client.get(f"/api/requests/{first.trace_id}?span={span_id}").json()
        assert shown["span_id"] == span_id
        assert shown["prompt_tokens"] == each.prompt_tokens
        explained = client.get(f"/api/why/{first.trace_id}?span={span_id}").json()
        assert explained["prompt_tokens"] == each.prompt_tokens
    other = "0" * 31 + "1"
    assert client.get(f"/api/why/{other}?span={span_id}").status_code == 404
    assert client.get(f"/api/requests/{first.trace_id}").status_code == 200
    assert client.get(f"/api/requests/{first.trace_id}?span=0").status_code == 404


@pytest.mark.skipif(not CHROMIUM, reason="opt-in: FIRSTTOKEN_CHROMIUM=/usr/bin/chromium")
@pytest.mark.timeout(600)
async def test_a_browser_shows_it(tmp_path: Path) -> None:
    node = await _install_browser_driver()
    books = new_books()
    # So many that enough are left of the last minutes when a slow machine has looked at them.
    made = scene(1600, over_s=2400, slow_since_s=250, end_unix_s=time.time())
    tell(books, made, tenant=HOSTILE)
    async with PageServer(make_app(books), "127.0.0.1:0") as server:
        saw = await _look(node, f"http://{server.address}/", tmp_path)
    for kind in ("phone", "desktop"):
        page = saw[kind]
        assert page["problems"] == []
        assert page["elsewhere"] == []
        assert page["overflow"] == 0
        assert page["shift"] < 0.01
        assert page["nameless"] == 0
        assert page["shares"] == len(SHARES) + 1
        assert page["bars"] == len(SHARES)
        assert page["slow"] == 8
        assert page["headline"]
        # What a tenant calls itself is text.
        assert HOSTILE in page["text"]
        assert page["foreign"] == 0
        assert page["pwned"] is None
    trace = saw["trace"]
    assert trace["title"].startswith("First token after")
    assert trace["hops"] == 4
    assert trace["attributes"] > 0
    assert trace["overflow"] == 0
    assert trace["hash"].startswith("#trace=")
    assert trace["closed"]
    assert trace["focusIsBack"]
    assert trace["opensByAddress"]
    assert saw["keys"]["last"] != saw["keys"]["before"]
    assert saw["keys"]["column"] != saw["keys"]["after"] == "now"
    assert not saw["lost"]["before"]
    assert "What you see is from" in saw["lost"]["text"]
    assert not saw["lost"]["after"]


async def _install_browser_driver() -> str:
    """The node program, with playwright-core beside the script."""
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node, "node is not installed"
    assert npm, "npm is not installed"
    if not (BROWSER / "node_modules" / ".package-lock.json").exists():
        await _run(npm, "ci", "--no-audit", "--no-fund", cwd=BROWSER)
    return node


async def _look(node: str, url: str, folder: Path) -> dict[str, Any]:
    script = str(BROWSER / "page.mjs")
    answer: dict[str, Any] = json.loads(await _run(node, script, CHROMIUM, url, str(folder)))
    return answer


async def _run(*command: str, cwd: Path | None = None) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 500)
    assert process.returncode == 0, errors.decode()
    return output
