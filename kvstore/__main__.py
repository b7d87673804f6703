"""python -m kvstore --control HOST:PORT [--listen HOST:PORT]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvstore.node import KvStoreNode
from services.runtime.process import add_options, read_options, run_node


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvstore", description="KV blocks that outlive a worker."
    )
    add_options(parser)
    options = read_options("kvstore", parser.parse_args(arguments))
    return run_node(lambda: KvStoreNode(control=options.control, listen=options.listen), options)


if __name__ == "__main__":
    sys.exit(main())
