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
    return run_node(lambda: TokenizerNode(control=options.control, listen=options.listen), options)


if __name__ == "__main__":
    sys.exit(main())
