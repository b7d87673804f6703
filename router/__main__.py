"""python -m router --control HOST:PORT [--listen HOST:PORT]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from router.node import RouterNode
from services.runtime.process import add_options, read_options, run_node


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m router", description="The way in: which worker serves a request."
    )
    add_options(parser)
    options = read_options("router", parser.parse_args(arguments))
    return run_node(lambda: RouterNode(control=options.control, listen=options.listen), options)


if __name__ == "__main__":
    sys.exit(main())
