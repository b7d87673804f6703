"""python -m services.control [--listen HOST:PORT] [--config FILE.toml]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from services.control.configfile import read_config
from services.control.node import ControlNode
from services.core.settings import MeshConfig
from services.runtime.leaving import leave
from services.runtime.process import add_options, read_options, run_node


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.control",
        description="Membership and configuration of the mesh, pushed.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="default: all defaults")
    add_options(parser, control=False)
    parsed = parser.parse_args(arguments)
    options = read_options("control", parsed)

    def make_node() -> ControlNode:
        config = read_config(parsed.config) if parsed.config else MeshConfig()
        return ControlNode(options.listen, config, tls=options.open_tls())

    return run_node(make_node, options)


if __name__ == "__main__":
    leave(main())
