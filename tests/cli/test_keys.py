from __future__ import annotations

import json
import tomllib

import pytest

from services.cli.main import main
from services.cli.settings import parse_assignments
from services.core import config
from services.core.settings import MeshConfig
from services.core.tenants import Tenants


def make_key(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert main(["keys", "new", "--json", *arguments]) == 0
    document: dict[str, str] = json.loads(capsys.readouterr().out)
    return document


def test_the_lines_it_prints_make_the_key_its_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    made = make_key(capsys, "--tenant", "acme")

    by_file = config.parse(tomllib.loads(made["toml"]))
    changes = parse_assignments(made["command"].split()[3:])
    by_command = config.change(MeshConfig(), changes)
    for each in (by_file, by_command):
        tenant = Tenants(each).by_key(made["key"])
        assert tenant is not None
        assert tenant.name == made["tenant"] == "acme"


def test_no_two_keys_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {make_key(capsys)["key"] for _ in range(20)}

    assert len(keys) == 20
    assert all(len(key) > 40 for key in keys)


def test_it_shows_the_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new"]) == 0
    text = capsys.readouterr().out
    key = text.split()[1]

    assert text.count(key) == 1
    assert "firsttoken config set tenants.default.key_hashes=sha256:" in text
    assert "[tenants.default]" in text


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "é", "a b", "x" * 65, "a\n"])
def test_a_name_that_no_tenant_can_have_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["keys", "new", "--tenant", name])

    assert refusal.value.code == 2
    assert "1 to 64 letters, digits" in capsys.readouterr().err
