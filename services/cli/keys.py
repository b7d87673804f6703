"""firsttoken keys: API keys and certificates, by which tenants are told apart."""

from __future__ import annotations

import argparse
import json
import re

from services.cli import key_certificate
from services.core.config import NAME_FORM
from services.core.tenants import hash_key, new_key

DEFAULT_TENANT = "default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make an API key, and show how a mesh learns of it")
    new.add_argument(
        "--tenant",
        type=_tenant,
        default=DEFAULT_TENANT,
        metavar="NAME",
        help="whose key it is (default: %(default)s)",
    )
    new.add_argument("--json", action="store_true", help="print one line of JSON")
    new.set_defaults(act=_new)
    key_certificate.add_action(actions)


def run(arguments: argparse.Namespace) -> int:
    status: int = arguments.act(arguments)
    return status


def _new(arguments: argparse.Namespace) -> int:
    key = new_key()
    hashed = hash_key(key)
    setting = f"tenants.{arguments.tenant}.key_hashes"
    toml = f'[tenants.{arguments.tenant}]\nkey_hashes = "{hashed}"'
    command = f"firsttoken config set {setting}={hashed}"
    if arguments.json:
        document = {"tenant": arguments.tenant, "key": key, "hash": hashed}
        print(json.dumps({**document, "toml": toml, "command": command}))
        return 0
    print(
        f"key   {key}\nhash  {hashed}\n\n"
        "The key is shown this once; a mesh knows its hash only. In the configuration file:\n\n"
        f"{toml}\n\nor in a mesh that runs:\n\n{command}\n\n"
        "To change a key without a pause, set both hashes, the old one and this, in quotes\n"
        "with a space between, until all callers have the new key."
    )
    return 0


def _tenant(text: str) -> str:
    if not re.fullmatch(NAME_FORM.pattern, text):
        raise argparse.ArgumentTypeError(f"must be {NAME_FORM.words}; got {text!r}")
    return text
