"""deploy/kubernetes by the schemas of Kubernetes itself.

FIRSTTOKEN_KUBERNETES is a folder with a Python that has kubernetes-validate:
`make check-kubernetes`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import kubernetes

FOLDER = os.environ.get("FIRSTTOKEN_KUBERNETES", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="FIRSTTOKEN_KUBERNETES names no Python")


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(FOLDER) / "python", kubernetes.__file__, root],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_all_manifests_are_as_kubernetes_wants_them() -> None:
    done = check(kubernetes.ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "right", "wrong", "named"),
    [
        ("base/control.yaml", "  replicas: 3", "  replica: 3", "StatefulSet/control"),
        ("base/router.yaml", "periodSeconds: 5", "periodSeconds: soon", "Deployment/router"),
        ("overlays/gpu/host.yaml", "hostNetwork", "hostNetworks", "DaemonSet/kvstore"),
    ],
)
def test_a_wrong_field_is_found(
    tmp_path: Path, file: str, right: str, wrong: str, named: str
) -> None:
    root = tmp_path / "kubernetes"
    shutil.copytree(kubernetes.ROOT, root)
    text = (root / file).read_text()
    assert right in text
    (root / file).write_text(text.replace(right, wrong))

    done = check(root)

    assert done.returncode == 1
    assert named in done.stdout
