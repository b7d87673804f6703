"""python -m services.tokenizer --control HOST:PORT [--listen HOST:PORT]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from services.runtime.process import add_options, read_options, run_node
from services.tokenizer.node import TokenizerNode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.tokenizer",
        description="Text or chats to token ids and prefix keys.",
    )
    add_options(parser)
    options = read_options("tokenizer", parser.parse_args(arguments))

    def make_node() -> TokenizerNode:
        return TokenizerNode(control=options.control, listen=options.listen, tls=options.open_tls())

    return run_node(make_node, options)


if __name__ == "__main__":
    sys.exit(main())
