"""firsttoken drain: a worker takes no new requests and finishes those that it has.

For what is about to stop it: a preStop hook, or a person. Beyond that nothing changes; stop the
worker afterwards, it takes no request again.
"""

from __future__ import annotations

import argparse

import grpc.aio

from firsttoken._errors import to_mesh_error
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.cli import rpc
from services.cli.failures import Failure
from services.runtime.channels import open_channel
from services.runtime.process import add_tls_option
from services.runtime.tls import Tls

MAX_SECONDS = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "worker", metavar="HOST:PORT", type=rpc.parse_address, help="its address, as in `status`"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=60.0,
        metavar="N",
        help="wait so long for its requests to end (default: 60)",
    )
    add_tls_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 when none is left. Raises Failure."""
    tls = rpc.open_tls(arguments.tls_dir)
    left = rpc.run(drain(arguments.worker, arguments.seconds, tls))
    if left:
        raise Failure(
            f"{arguments.worker} still has {left} requests after {arguments.seconds:g} s; it takes"
            " no new ones"
        )
    print(f"{arguments.worker} is drained")
    return 0


async def drain(address: str, seconds: float, tls: Tls | None) -> int:
    async with open_channel(address, tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            drained = await stub.Drain(worker_pb2.DrainRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise rpc.to_failure(
                to_mesh_error(error), nobody=f"no worker answers at {address}"
            ) from None
    return int(drained.num_running)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be above 0, and at most {MAX_SECONDS}; got {text}")
    return seconds
