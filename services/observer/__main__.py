"""python -m services.observer --control HOST:PORT [--listen HOST:PORT]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from services.observer.node import ObserverNode
from services.runtime.leaving import leave
from services.runtime.process import add_options, read_options, run_node
from services.runtime.tls import require_private


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.observer",
        description="Where the time to the first token goes: a page, traces, metrics. --listen is"
        " the page's.",
    )
    add_options(parser)
    parser.add_argument(
        "--report-listen",
        default="",
        metavar="HOST:PORT",
        help="gRPC, for the mesh's processes (default: any port of --listen's host)",
    )
    parsed = parser.parse_args(arguments)
    options = read_options("observer", parsed)

    def make_node() -> ObserverNode:
        if options.tls_dir is None and parsed.report_listen:
            require_private(parsed.report_listen, insecure=options.insecure)
        return ObserverNode(
            control=options.control,
            listen=options.listen,
            report_listen=parsed.report_listen,
            tls=options.open_tls(parsed.report_listen),
        )

    return run_node(make_node, options)


if __name__ == "__main__":
    leave(main())
