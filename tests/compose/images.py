"""Stand-ins for base images, from Debian's packages: for a machine without an image registry.

They have the names of the real ones, so that Dockerfile and docker-compose.yml are the real ones.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

PYTHON = "python:3.11-slim-bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
# And what the images of others run.
PROGRAMS = ("redis-server", "prometheus", "wget")
# Whom this machine trusts, the image trusts too: registries may be behind a CA of its own.
FINISH = """
mkdir -p "$1/usr/local/share/ca-certificates"
cp -rL /usr/local/share/ca-certificates/. "$1/usr/local/share/ca-certificates/"
chroot "$1" update-ca-certificates
ln -sf python3 "$1/usr/bin/python"
"""
OTHERS = {
    "redis:7-bookworm": f"FROM {PYTHON}",
    "prom/prometheus:v3.5.0": f"""
FROM {PYTHON}
RUN install --directory --owner=nobody /prometheus
USER nobody
ENTRYPOINT ["/bin/prometheus"]
""",
}


def make_base_images(environment: Mapping[str, str]) -> None:
    """In the Docker of `environment`. Takes half a minute; needs root and mmdebstrap."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        archive = Path(name) / "base.tar"
        subprocess.run(
            [
                *("mmdebstrap", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--quiet"),
                f"--include={','.join(PACKAGES + PROGRAMS)}",
                f"--customize-hook={FINISH}",
                *("bookworm", str(archive)),
            ],
            env={**environment, "TMPDIR": name},
            check=True,
        )
        trusted = "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt"
        _docker(environment, "import", "--change", trusted, str(archive), PYTHON)
    for tag, dockerfile in OTHERS.items():
        _docker(environment, "build", "--tag", tag, "-", text=dockerfile)


def _docker(environment: Mapping[str, str], *arguments: str, text: str = "") -> None:
    subprocess.run(["docker", *arguments], env=environment, input=text, text=True, check=True)
