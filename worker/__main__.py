"""`python -m worker`: one worker, front and engine core."""

from __future__ import annotations

import argparse

from services.runtime.allocator import keep_freed_memory
from services.runtime.leaving import leave
from services.runtime.process import add_options, read_options, run_node
from worker.node import Role, WorkerNode
from worker.own_settings import read_own


def main(arguments: list[str] | None = None) -> int:
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    add_options(parser)
    parser.add_argument(
        "--cores-shared-by",
        type=int,
        default=1,
        metavar="N",
        help="how many workers share this machine's cores",
    )
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.BOTH.value,
        help="which part of a request it serves (default both)",
    )
    parser.add_argument(
        "--direct-listen",
        default="",
        metavar="HOST:PORT",
        help="the port on which callers fetch answers that a router has planned (default: a free"
        " one on the host of --listen)",
    )
    parser.add_argument(
        "--settings",
        default="",
        metavar="JSON",
        help="in which this worker differs from the mesh, as {KEY: VALUE}",
    )
    parsed = parser.parse_args(arguments)
    options = read_options("worker", parsed)
    return run_node(
        lambda: WorkerNode(
            control=options.control,
            listen=options.listen,
            cores_shared_by=parsed.cores_shared_by,
            role=Role(parsed.role),
            tls=options.open_tls(parsed.direct_listen),
            direct_listen=parsed.direct_listen,
            own_settings=read_own(parsed.settings),
        ),
        options,
    )


if __name__ == "__main__":
    leave(main())
