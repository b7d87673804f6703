"""firsttoken keys certificate: a client certificate, by which a tenant is told apart."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

from services.cli.failures import Failure
from services.runtime.tls import CA_FILE, TLS_DIR_VARIABLE


def add_action(actions: Any) -> None:
    """`actions`: what add_subparsers gave."""
    parser = actions.add_parser(
        "certificate", help="make a client certificate, for a port that asks for one"
    )
    parser.add_argument("name", metavar="NAME", help="the DNS name in it, as acme.example")
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get(TLS_DIR_VARIABLE) or None,
        metavar="DIR",
        help=f"of `firsttoken up --tls DIR`, with its CA's key (default: {TLS_DIR_VARIABLE})",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.set_defaults(act=_make)


def _make(arguments: argparse.Namespace) -> int:
    from services.cli.local_ca import make_client_certificate

    if arguments.tls_dir is None:
        raise Failure(
            f"no CA given: use --tls-dir DIR, or {TLS_DIR_VARIABLE}", code="FAILED_PRECONDITION"
        )
    certificate_file, key_file = make_client_certificate(arguments.tls_dir, arguments.name)
    files = {
        "ca_file": str(arguments.tls_dir / CA_FILE),
        "cert_file": str(certificate_file),
        "key_file": str(key_file),
    }
    if arguments.json:
        print(json.dumps({"name": arguments.name, **files}))
        return 0
    for name, path in files.items():
        print(f"{name:<10} {path}")
    setting = shlex.quote(f"tenants.NAME.identities={arguments.name}")
    print(
        "\nThe mesh takes whoever shows it for the tenant that has this identity:\n\n"
        f"firsttoken config set {setting}\n\n"
        "To take it back, take the identity away."
    )
    return 0
