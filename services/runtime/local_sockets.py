"""Unix sockets beside a server's port, for peers on the same host: a call costs less there.

They are abstract, so that nothing is left behind. Such names live in a network namespace, and
everybody in it may see them and connect, as to a port on loopback; and elsewhere a stranger
could listen under the same name. So a name says of which host it is, and who is not on that
one uses the port.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from pathlib import Path

from services.core.settings import MeshSettings

_SCHEME = "unix-abstract:"
_FORM = re.compile(r"unix-abstract:firsttoken-([0-9a-f]{16})-[0-9a-f]{32}")
_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
CONNECT_TIMEOUT_S = 0.002


def local_address_for(settings: MeshSettings) -> str:
    """One that nobody has; empty where there is to be none."""
    host = host_id() if settings.unix_sockets else ""
    return f"{_SCHEME}firsttoken-{host}-{secrets.token_hex(16)}" if host else ""


def is_local(local_address: str) -> bool:
    """It is of a process on this host, in the same network namespace."""
    named = _FORM.fullmatch(local_address)
    return named is not None and named[1] == host_id()


def is_reachable(local_address: str) -> bool:
    """Now, for this process: it may have ended, or a policy of the host may forbid it."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)  # it waits only where nobody accepts
        try:
            probe.connect("\0" + local_address.removeprefix(_SCHEME))
        except OSError:
            return False
    return True


@functools.cache
def host_id() -> str:
    """Of this run of the kernel and this network namespace; empty where it does not say."""
    try:
        text = f"{_BOOT_ID.read_text().strip()} {os.stat(_NETWORK).st_ino}"
    except OSError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
