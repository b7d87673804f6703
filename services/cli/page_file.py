"""--plot: where a benchmark writes its page of charts."""

from __future__ import annotations

import argparse
from pathlib import Path

from services.cli.failures import Failure


def add_plot_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE.html", help="write a page of charts")


def check_writable(path: Path | None) -> None:
    """Before minutes are spent on what it is to hold. Nothing is left there. Raises Failure."""
    if path is None:
        return
    try:
        is_new = not (path.exists() or path.is_symlink())
        path.open("a").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise Failure(f"--plot: cannot write {path}: {reason}") from error
