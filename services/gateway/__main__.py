"""python -m services.gateway --control HOST:PORT [--listen HOST:PORT]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from services.gateway.node import GatewayNode
from services.runtime.leaving import leave
from services.runtime.process import add_options, read_options, run_node


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.gateway", description="OpenAI-compatible HTTP in front of a mesh."
    )
    add_options(parser)
    options = read_options("gateway", parser.parse_args(arguments))

    def make_node() -> GatewayNode:
        return GatewayNode(control=options.control, listen=options.listen, tls=options.open_tls())

    return run_node(make_node, options)


if __name__ == "__main__":
    leave(main())
