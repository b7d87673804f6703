"""TLS between processes, from files that are reread when they change.

A directory holds what one process is given: ca.pem, whom it trusts; cert.pem, its
certificate (with the chain, if there is one); key.pem, the certificate's key, not encrypted.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import grpc

from services.runtime.logs import event
from services.runtime.startup import StartupError, parse_listen

CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
# The DNS name that services have in their certificates, and nobody else.
MESH_NAME = "firsttoken.mesh"
TLS_DIR_VARIABLE = "FIRSTTOKEN_TLS_DIR"
# On the request path the files are looked at this often.
CHECK_INTERVAL_S = 1.0

# Who but the owner may do what with a file.
OTHERS = stat.S_IRWXG | stat.S_IRWXO

Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]

logger = logging.getLogger(__name__)


class TlsFiles(NamedTuple):
    """PEM. A caller that is known by a key has no certificate: both are empty then."""

    ca: bytes
    certificate: bytes
    key: bytes

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.certificate or None)


class Tls:
    """What is in `directory` now, or was before somebody broke it.

    `service`: it must hold a certificate with the name MESH_NAME. Otherwise ca.pem is
    enough. Raises StartupError, which names the file and what is wrong with it. May be
    used from several threads: gRPC asks from its own.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        service: bool = True,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self.directory = Path(directory)
        self._service = service
        self._check_interval_s = check_interval_s
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._files = self._read()
        self._credentials = self._files.channel_credentials()
        self._generation = 1
        self._problem = ""
        self._checked_s = time.monotonic()

    @property
    def generation(self) -> int:
        """Goes up when other files are in use; looks at most every `check_interval_s`."""
        if time.monotonic() - self._checked_s >= self._check_interval_s:
            self.refresh()
        return self._generation

    @property
    def files(self) -> TlsFiles:
        return self._files

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now."""
        self.refresh()
        return self._credentials

    def server_credentials(self, *, ask_clients: bool) -> grpc.ServerCredentials:
        """Each new connection meets the files of that moment; those that are there go on.

        `ask_clients`: who has no certificate from our CA does not get in.
        """
        files = self._files
        return grpc.dynamic_ssl_server_credentials(
            files.server_configuration(),
            self._changes_since(files),  # type: ignore[arg-type]  # None: no change
            ask_clients,
        )

    def refresh(self) -> None:
        """Take what has changed. Files that cannot be used are reported, once, and not taken."""
        with self._lock:
            self._checked_s = time.monotonic()
            stamp = self._read_stamp()
            if stamp == self._stamp and not self._problem:
                return
            self._stamp = stamp
            try:
                self._take(self._read())
            except StartupError as error:
                self._report(str(error))

    def _take(self, files: TlsFiles) -> None:
        if files != self._files:
            # First: it is what may fail.
            self._credentials = files.channel_credentials()
            self._files = files
            self._generation += 1
            event(logger, logging.INFO, "TLS files reread", directory=str(self.directory))
        self._problem = ""

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            event(logger, logging.ERROR, "TLS files not taken; those before stay", reason=problem)

    def _changes_since(
        self, files: TlsFiles
    ) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
        current = files

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal current
            self.refresh()
            if self._files is current:
                return None
            current = self._files
            return current.server_configuration()

        return fetch

    def _read_stamp(self) -> Stamp:
        return tuple(
            _stamp(self.directory / name) for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
        )

    def _read(self) -> TlsFiles:
        # Its imports take time that a process without TLS is spared.
        from services.runtime.certificates import check_files

        paths = [self.directory / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
        if not self.directory.is_dir():
            raise StartupError(f"no directory of TLS files: {self.directory}")
        _, certificate, key = paths
        if not self._service and not certificate.exists() and not key.exists():
            files = TlsFiles(_read_file(paths[0]), b"", b"")
        else:
            files = TlsFiles(*map(_read_file, paths))
        check_files(files, self.directory, needed_name=MESH_NAME if self._service else "")
        if files.key and key.stat().st_mode & OTHERS:
            # A warning alone: Kubernetes mounts secrets like that.
            advice = f"others on this machine can read it: chmod 600 {key}"
            event(logger, logging.WARNING, "private key is not private", reason=advice)
        return files


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read_file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    if not content:
        raise StartupError(f"{path} holds no certificate or key in PEM: it is empty")
    return content


def require_private(listen: str, *, insecure: bool) -> None:
    """Without TLS only this machine gets in, unless `insecure`. Raises StartupError."""
    host = parse_listen(listen).host
    if not insecure and not is_loopback(host):
        raise StartupError(
            f"listening on {listen} without TLS would let in whoever reaches it: give"
            f" certificates with --tls-dir DIR ({TLS_DIR_VARIABLE}), or say --insecure"
            " (FIRSTTOKEN_INSECURE=1)"
        )


def is_loopback(host: str) -> bool:
    """Every address that `host` stands for is this machine's own. Looks names up."""
    bare = host.removeprefix("[").removesuffix("]")
    if not bare:  # every interface
        return False
    try:
        found = [bare] if _is_address(bare) else _look_up(bare)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _look_up(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
