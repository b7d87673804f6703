"""The client in a process where nothing but grpcio and protobuf can be imported."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

ALLOWED = {"firsttoken", "google", "grpc", "typing_extensions"}

class Nothing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if name.startswith("google.rpc") or (
            top not in ALLOWED and top not in sys.stdlib_module_names
        ):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Nothing())

import grpc
from grpc.aio import AioRpcError, Metadata
from firsttoken.client import MeshClient
from firsttoken._errors import to_mesh_error

error = to_mesh_error(AioRpcError(
    grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(("grpc-status-details-bin", b"x")), "gone"
))
print(MeshClient.__name__, error, error.reason == "")
"""


def test_needs_only_grpcio_and_protobuf() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )

    assert ran.stdout.strip() == "MeshClient UNAVAILABLE: gone True", ran.stderr
