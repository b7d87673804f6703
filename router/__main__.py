"""python -m router --control HOST:PORT [--listen HOST:PORT]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from router.node import RouterNode
from services.runtime.leaving import leave
from services.runtime.process import add_options, read_options, run_node


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m router", description="The way in: which worker serves a request."
    )
    add_options(parser)
    parser.add_argument(
        "--mtls-listen",
        default="",
        metavar="HOST:PORT",
        help="one more port, on which callers are known by their certificates",
    )
    parser.add_argument(
        "--operator-listen",
        default="",
        metavar="HOST:PORT",
        help="the port on which the mesh's operators ask how routing goes (default: a free one on"
        " the host of --listen); with TLS only services of the mesh get in",
    )
    parsed = parser.parse_args(arguments)
    options = read_options("router", parsed)

    def make_node() -> RouterNode:
        return RouterNode(
            control=options.control,
            listen=options.listen,
            tls=options.open_tls(parsed.operator_listen),
            mtls_listen=parsed.mtls_listen,
            operator_listen=parsed.operator_listen,
        )

    return run_node(make_node, options)


if __name__ == "__main__":
    leave(main())
