from __future__ import annotations

import subprocess
import sys

from services.cli.main import COMMANDS
from tests.cli.running import run_to_end


def test_help_names_every_command() -> None:
    result = run_to_end("--help")

    assert result.status == 0
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


def test_version_is_printed() -> None:
    assert run_to_end("--version").stdout.startswith("firsttoken ")


def test_every_command_has_help() -> None:
    for name in COMMANDS:
        assert run_to_end(name, "--help").stdout.startswith(f"usage: firsttoken {name} ")


def test_an_unknown_command_is_wrong_usage() -> None:
    assert run_to_end("serve").status == 2


def test_help_waits_for_no_heavy_import() -> None:
    script = (
        "import sys; from services.cli import main; main._parser();"
        "print({'grpc', 'numpy', 'orjson', 'asyncio'} & set(sys.modules))"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert result.stdout == "set()\n"
