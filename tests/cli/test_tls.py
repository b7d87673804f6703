"""`--tls` and `--tls-dir` as their user meets them."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.cli.failures import Failure
from services.cli.local_ca import CA_KEY_FILE, LocalCa, complete, make_client_certificate
from services.runtime.certificates import dns_names
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, MESH_NAME, Tls
from tests.cli.running import COMMAND, SERVE, Endpoints, Run, run_to_end
from tests.runtime.certificates import write
from tests.runtime.ports import free_port

FIRSTTOKEN = shlex.join(COMMAND)
FILES = (CA_FILE, CA_KEY_FILE, CERTIFICATE_FILE, KEY_FILE)
SECRET = (CA_KEY_FILE, KEY_FILE)
# The fewest processes that make a mesh, where the others do not matter.
SMALLEST = ("--engine", "simulated", "--workers", "1", "--no-kvstore", "--no-gateway",
    "--no-observer")  # fmt: skip


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# The CA of this machine's own.


def test_it_makes_all_that_tls_needs_and_keeps_keys_to_itself(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "tls"
    complete(directory)

    assert sorted(contents(directory)) == sorted(FILES)
    for name in FILES:
        mode = stat.S_IMODE((directory / name).stat().st_mode)
        assert mode == (0o600 if name in SECRET else 0o644), name
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    made = x509.load_pem_x509_certificate((directory / CERTIFICATE_FILE).read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert dns_names(made) == [MESH_NAME, "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == [
        "127.0.0.1",
        "::1",
    ]
    assert 364 <= (made.not_valid_after_utc - made.not_valid_before_utc).days <= 366
    assert Tls(directory).generation == 1


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    complete(tmp_path)
    before = contents(tmp_path)
    complete(tmp_path)

    assert contents(tmp_path) == before


def test_a_missing_pair_is_made_by_the_ca_that_is_there(tmp_path: Path) -> None:
    complete(tmp_path)
    before = contents(tmp_path)
    (tmp_path / CERTIFICATE_FILE).unlink()
    (tmp_path / KEY_FILE).unlink()
    complete(tmp_path)

    after = contents(tmp_path)
    assert (after[CA_FILE], after[CA_KEY_FILE]) == (before[CA_FILE], before[CA_KEY_FILE])
    assert after[CERTIFICATE_FILE] != before[CERTIFICATE_FILE]
    Tls(tmp_path)


def test_a_directory_without_the_key_of_its_ca_is_used_as_it_is(tmp_path: Path) -> None:
    complete(tmp_path)
    (tmp_path / CA_KEY_FILE).unlink()
    complete(tmp_path)
    Tls(tmp_path)
    (tmp_path / CERTIFICATE_FILE).unlink()
    (tmp_path / KEY_FILE).unlink()

    with pytest.raises(Failure, match=r"ca-key\.pem is not there: without it"):
        complete(tmp_path)


@pytest.mark.parametrize("left", [CERTIFICATE_FILE, KEY_FILE])
def test_half_a_pair_is_no_place_for_a_new_ca(tmp_path: Path, left: str) -> None:
    (tmp_path / left).write_bytes(b"precious")

    with pytest.raises(Failure, match=f"{left} is there already"):
        complete(tmp_path)
    assert contents(tmp_path) == {left: b"precious"}


def test_a_ca_and_a_key_that_do_not_go_together_are_said(tmp_path: Path) -> None:
    complete(tmp_path)
    (tmp_path / CA_KEY_FILE).write_bytes(LocalCa.new().pem.key)

    with pytest.raises(Failure, match=r"ca-key\.pem is not the key of .*ca\.pem"):
        make_client_certificate(tmp_path, "acme")
    (tmp_path / CA_KEY_FILE).write_bytes(b"nonsense")
    with pytest.raises(Failure, match="cannot use the CA in"):
        make_client_certificate(tmp_path, "acme")


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(Failure, match=f"cannot write to {tmp_path / 'file'}"):
        complete(tmp_path / "file")


def test_a_tenant_gets_a_certificate_that_is_no_services(tmp_path: Path) -> None:
    complete(tmp_path)
    certificate_file, key_file = make_client_certificate(tmp_path, "acme")

    made = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    assert dns_names(made) == ["acme"]
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    with pytest.raises(Failure, match="is there already"):
        make_client_certificate(tmp_path, "acme")


@pytest.mark.parametrize("name", [MESH_NAME, MESH_NAME.upper(), f"{MESH_NAME}."])
def test_a_tenant_gets_no_certificate_of_a_service(tmp_path: Path, name: str) -> None:
    complete(tmp_path)

    with pytest.raises(Failure, match="the mesh's own services"):
        make_client_certificate(tmp_path, name)


@pytest.mark.parametrize("name", ["", "é", "x" * 65, "ca", "ca-key", "cert", "key"])
def test_a_name_that_cannot_be_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    complete(tmp_path)
    before = contents(tmp_path)

    with pytest.raises(Failure):
        make_client_certificate(tmp_path, name)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["../../evil", "..", "/etc/evil", "a/b", ".hidden"])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "deep" / "tls"
    complete(directory)
    files = make_client_certificate(directory, name)

    assert all(path.parent == directory and path.exists() for path in files)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_other_tools_take_the_certificates(tmp_path: Path) -> None:
    complete(tmp_path)
    certificate_file, _ = make_client_certificate(tmp_path, "acme")
    for path in (tmp_path / CERTIFICATE_FILE, certificate_file):
        checked = subprocess.run(
            ["openssl", "verify", "-x509_strict", "-CAfile", tmp_path / CA_FILE, path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr


def test_keys_certificate_makes_one_and_says_how_it_is_used(tmp_path: Path) -> None:
    complete(tmp_path)
    call = ("keys", "certificate", "--tls-dir", str(tmp_path))
    made = run_to_end(*call, "acme.example", "--json")
    again = run_to_end(*call, "acme.example")
    other = run_to_end(*call, "other.example")
    nowhere = run_to_end("keys", "certificate", "acme.example", env={"FIRSTTOKEN_TLS_DIR": ""})

    assert made.json["cert_file"] == str(tmp_path / "acme.example.pem")
    assert made.json["key_file"] == str(tmp_path / "acme.example-key.pem")
    assert (again.status, other.status, nowhere.status) == (3, 0, 1)
    assert "is there already" in again.stderr
    assert "config set tenants.NAME.identities=other.example" in other.stdout
    assert "use --tls-dir DIR" in nowhere.stderr


# A mesh that is up.


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates") / "tls"


@pytest.fixture(scope="module")
def encrypted(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """A simulated mesh over TLS."""
    options = ("--engine", "simulated", "--workers", "1", "--tls", str(directory))
    run = Run("up", *options, "--exec", SERVE, directory=tmp_path_factory.mktemp("mesh"))
    try:
        yield run.wait_until_serving()
    finally:
        run.process.terminate()
        run.close()


CALLS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "--max-tokens", "2", "--json", "Hello"),
    "status": ("status", "--json"),
    "config get": ("config", "get", "--json"),
    "config set": ("config", "set", "--json", "telemetry.log_level=info"),
    "config diff": ("config", "diff", "--json"),
    "kv stats": ("kv", "stats", "--json"),
    "kv match": ("kv", "match", "--json", "Hello"),
    "kv evict": ("kv", "evict", "--json", "--all"),
    "bench": ("bench", "reuse", "--pairs", "1", "--shared-tokens", "64", "--json"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_command_works_over_tls(encrypted: Endpoints, directory: Path, call: str) -> None:
    result = run_to_end(*CALLS[call], "--tls-dir", str(directory), env=encrypted.env)

    assert result.status == 0, result.stdout + result.stderr


@pytest.mark.parametrize("call", ["generate", "config get"])
def test_the_environment_gives_a_command_its_certificates(
    encrypted: Endpoints, directory: Path, call: str
) -> None:
    env = {**encrypted.env, "FIRSTTOKEN_TLS_DIR": str(directory)}
    result = run_to_end(*CALLS[call], env=env)

    assert result.status == 0, result.stdout + result.stderr


def test_everything_answers_over_tls(encrypted: Endpoints, directory: Path) -> None:
    members = run_to_end("status", "--json", "--tls-dir", str(directory), env=encrypted.env).json[
        "members"
    ]

    assert all(member["load"] for member in members if member["role"] == "worker")
    assert all(member["kvstore"] for member in members if member["role"] == "kvstore")


@pytest.mark.parametrize("call", ["generate", "status", "config get", "kv stats", "bench"])
def test_a_command_without_tls_says_what_it_needs(encrypted: Endpoints, call: str) -> None:
    result = run_to_end(*CALLS[call], env=encrypted.env)

    assert result.status == 1
    assert result.json["error"]["code"] == "UNAVAILABLE"
    assert "speaks TLS: use --tls-dir DIR (FIRSTTOKEN_TLS_DIR)" in result.stdout


@pytest.mark.parametrize("call", ["generate", "status", "bench"])
def test_a_command_with_tls_says_that_the_mesh_has_none(
    mesh: Endpoints, encrypted: Endpoints, directory: Path, call: str
) -> None:
    result = run_to_end(*CALLS[call], "--tls-dir", str(directory), env=mesh.env)

    assert result.status == 1
    assert "does not speak TLS: leave --tls-dir (FIRSTTOKEN_TLS_DIR) away" in result.stdout


@pytest.mark.parametrize("call", ["generate", "status"])
def test_a_command_says_that_the_ca_is_another_one(
    encrypted: Endpoints, tmp_path: Path, call: str
) -> None:
    complete(tmp_path)
    result = run_to_end(*CALLS[call], "--tls-dir", str(tmp_path), env=encrypted.env)

    assert result.status == 1
    assert f"does not hold by the CA in {tmp_path}" in result.stdout


def test_a_caller_with_a_key_needs_the_ca_alone(
    encrypted: Endpoints, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / CA_FILE).write_bytes((directory / CA_FILE).read_bytes())
    key = ("--api-key", "ft-anything")
    answered = run_to_end(*CALLS["generate"], *key, "--tls-dir", str(tmp_path), env=encrypted.env)
    refused = run_to_end(*CALLS["status"], "--tls-dir", str(tmp_path), env=encrypted.env)

    assert answered.status == 0, answered.stdout
    assert refused.status == 1
    assert f"cannot read {tmp_path / CERTIFICATE_FILE}" in refused.stdout


def test_a_tenants_certificate_operates_no_mesh(
    encrypted: Endpoints, directory: Path, tmp_path: Path
) -> None:
    write(tmp_path, (directory / CA_FILE).read_bytes(), LocalCa.read(directory).client("acme"))
    operated = run_to_end(*CALLS["config get"], "--tls-dir", str(tmp_path), env=encrypted.env)
    asked = run_to_end(*CALLS["generate"], "--tls-dir", str(tmp_path), env=encrypted.env)

    assert operated.status == 1
    assert f"lacks the DNS name {MESH_NAME}" in operated.stdout
    assert asked.status == 0, asked.stdout


def test_a_key_stays_on_this_machine_without_tls(mesh: Endpoints) -> None:
    elsewhere = ("generate", "--json", "--router", "192.0.2.1:7100", "Hello")
    refused = run_to_end(*elsewhere, env={"FIRSTTOKEN_API_KEY": "ft-anything"})
    here = run_to_end(*CALLS["generate"], env={**mesh.env, "FIRSTTOKEN_API_KEY": "ft-anything"})

    assert refused.status == 1
    assert "would cross the network to 192.0.2.1:7100 unencrypted" in refused.stdout
    assert "ft-anything" not in refused.stdout + refused.stderr
    assert here.status == 0, here.stdout


@pytest.mark.parametrize("call", ["generate", "status"])
def test_a_directory_of_no_use_is_said(tmp_path: Path, call: str) -> None:
    result = run_to_end(*CALLS[call], "--tls-dir", str(tmp_path / "none"))

    assert result.status == 1
    assert f"no directory of TLS files: {tmp_path / 'none'}" in result.stdout


# `up` itself.


def test_up_tls_runs_a_command_against_its_mesh(start: Callable[..., Run]) -> None:
    script = "import os, asyncio; from firsttoken.client import MeshClient\n"
    script += "async def main():\n"
    script += "    ca = os.environ['FIRSTTOKEN_TLS_DIR'] + '/ca.pem'\n"
    script += "    async with MeshClient(os.environ['FIRSTTOKEN_ROUTER'], ca_file=ca) as client:\n"
    script += "        print(len((await client.complete('hi', max_tokens=3)).token_ids))\n"
    script += "asyncio.run(main())"
    python = f"{sys.executable} -c {shlex.quote(script)}"
    command = f"{FIRSTTOKEN} status --json && {python} && ls $FIRSTTOKEN_TLS_DIR"
    # Prefill workers too: hand-offs are tried in the warm-up, if at all.
    options = ("--engine", "simulated", "--workers", "1", "--prefill-workers", "1")
    result = start("up", *options, "--tls", "--exec", command).finish()

    assert result.status == 0, result.stderr
    status, tokens, *files = result.stdout.splitlines()
    assert {member["state"] for member in json.loads(status)["members"]} == {"ready"}
    assert tokens == "3"
    assert sorted(files) == sorted(FILES)
    assert "callers are not told apart" in result.stderr
    assert "nothing is encrypted" not in result.stderr
    assert "Handshake" not in result.stderr


def test_up_says_what_is_open_and_how_to_call_it(start: Callable[..., Run], tmp_path: Path) -> None:
    options = (*SMALLEST, "--port", "0", "--control-port", "0")
    where = tmp_path / "a place"
    plain = start("up", *options, "--no-prompt", "--exec", "true").finish()
    with_tls = start("up", *options, "--tls", str(where))
    assert with_tls.process.stdout is not None
    lines: list[str] = []
    while not (lines and "to the first token" in lines[-1]):
        lines.append(with_tls.process.stdout.readline())
        assert lines[-1], with_tls.finish().stderr
    with_tls.process.terminate()

    assert "callers are not told apart" in plain.stderr
    assert "nothing is encrypted (--tls)" in plain.stderr
    quoted = shlex.quote(str(where))
    for call in ("generate --router 127.0.0.1:", "status --control 127.0.0.1:"):
        assert any(call in line and f"--tls-dir {quoted}" in line for line in lines)
    assert "nothing is encrypted" not in with_tls.finish().stderr


def test_up_is_quiet_about_openness_when_closed(start: Callable[..., Run], tmp_path: Path) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text('[tenants.acme]\nidentities = "acme.example"\n')
    options = (*SMALLEST, "--config", str(config))
    result = start("up", *options, "--tls", "--exec", "true").finish()

    assert result.status == 0, result.stderr
    assert "not told apart" not in result.stderr
    assert "nothing is encrypted" not in result.stderr


def test_tenants_are_known_by_their_certificates(start: Callable[..., Run], tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    complete(directory)
    for name in ("acme.example", "other.example"):
        theirs = LocalCa.read(directory).client(name)
        write(tmp_path / name, (directory / CA_FILE).read_bytes(), theirs)
    config = tmp_path / "mesh.toml"
    config.write_text('[tenants.acme]\nidentities = "acme.example"\n')
    calls = "; ".join(
        f"{FIRSTTOKEN} generate --json --max-tokens 2 --router 127.0.0.1:$PORT"
        f" --tls-dir {tmp_path / name} Hello"
        for name in ("acme.example", "other.example")
    )
    port = free_port()
    options = (*SMALLEST, "--config", str(config))
    run = start("up", *options, "--tls", str(directory), "--mtls-port", str(port),
                "--exec", f"PORT={port}; {calls}; true")  # fmt: skip
    result = run.finish()

    assert result.status == 0, result.stderr
    acme, other = (json.loads(line) for line in result.stdout.splitlines())
    assert "error" not in acme
    assert other["error"]["code"] == "UNAUTHENTICATED"


def test_a_port_for_certificates_needs_tls() -> None:
    result = run_to_end("up", "--mtls-port", "0", "--exec", "true")

    assert result.status == 3
    assert "--mtls-port needs --tls" in result.stderr


def test_up_says_what_is_wrong_with_its_certificates(tmp_path: Path) -> None:
    complete(tmp_path)
    (tmp_path / KEY_FILE).unlink()
    result = run_to_end("up", "--engine", "simulated", "--tls", str(tmp_path), "--exec", "true")

    assert result.status == 3
    assert f"cannot read {tmp_path / KEY_FILE}" in result.stderr


def test_the_environment_gives_a_mesh_its_certificates(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    complete(tmp_path / "tls")
    env = {"FIRSTTOKEN_TLS_DIR": str(tmp_path / "tls")}
    result = start("up", *SMALLEST, "--exec", f"{FIRSTTOKEN} status --json", env=env).finish()

    assert result.status == 0, result.stderr
    assert "nothing is encrypted" not in result.stderr
