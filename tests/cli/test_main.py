from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.main import COMMANDS
from tests.cli.running import COMMAND, Endpoints, run_to_end


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
        "print({'grpc', 'numpy', 'orjson', 'asyncio', 'importlib.metadata'} & set(sys.modules))"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert result.stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("up --port abc", "argument --port: invalid port value: 'abc'"),
        ("generate --seed x Hi", "argument --seed: invalid number value: 'x'"),
        ("bench reuse --pairs x", "argument --pairs: invalid count value: 'x'"),
        ("bench reuse --pairs 0 --json", "argument --pairs: must be in [1, 1000000]"),
        ("bench reuse --shared-tokens -1", "argument --shared-tokens: must be in [1, 1000000]"),
        ("generate --deadline nan Hi", "argument --deadline: must be in (0, 31622400]"),
        ("generate --deadline inf Hi", "argument --deadline: must be in (0, 31622400]"),
        ("generate --deadline 1e300 Hi", "argument --deadline: must be in (0, 31622400]"),
        ("generate --router host Hi", "argument --router: must be HOST:PORT; got 'host'"),
        ("status --control :1", "argument --control: must be HOST:PORT; got ':1'"),
        ("config get --control=", "argument --control: must be HOST:PORT; got ''"),
    ],
)
def test_a_bad_option_is_told_as_argparse_tells_it(arguments: str, said: str) -> None:
    result = run_to_end(*arguments.split())

    assert result.status == 2
    assert result.stderr.endswith(f": error: {said}\n")
    assert "Traceback" not in result.stderr


# Interrupts its own process when MODULE is imported. Where tests run in the background,
# the shell has SIGINT ignored.
INTERRUPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, *_):
        if name == "MODULE":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from services.cli.main import main
sys.exit(main(["up", "--config", "/nowhere"]))
"""


@pytest.mark.parametrize("module", ["services.cli.up", "grpc", "tomllib"])
def test_an_interrupt_while_it_loads_ends_it_quietly(module: str) -> None:
    script = INTERRUPT.replace("MODULE", module)

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_an_interrupt_before_anything_has_started_leaves_nothing(tmp_path: Path) -> None:
    """It comes while the first thing is imported that runs in the event loop."""
    script = (
        "import asyncio, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "run = asyncio.run\n"
        "def interrupted(main):\n"
        "    main.close()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "asyncio.run = interrupted\n"
        "from services.cli.main import main\n"
        "sys.exit(main(['up', '--exec', 'true']))\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}

    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (130, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("redirection", "said"),
    [(">&-", "stdout is closed"), (">/dev/full", "cannot write: No space left on device")],
)
@pytest.mark.parametrize(
    "arguments",
    [
        "generate --max-tokens 2 Hello",
        "generate --json --max-tokens 2 Hello",
        "status",
        "config get",
    ],
)
def test_an_output_that_takes_nothing_is_one_line(
    mesh: Endpoints, arguments: str, redirection: str, said: str
) -> None:
    script = f"{shlex.join(COMMAND)} {arguments} {redirection}"
    env = {**os.environ, **mesh.env}

    result = subprocess.run(["/bin/sh", "-c", script], env=env, stderr=subprocess.PIPE, text=True)

    assert (result.returncode, result.stderr) == (1, f"firsttoken: {said}\n")
