"""What `firsttoken up` shows once its mesh is ready."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from firsttoken.client import MeshError, Options
from services.cli import answers, rpc
from services.cli.prompts import Prompt
from services.cli.snippets import HttpEdge, curl_command, python_lines
from services.core.settings import MeshConfig
from services.runtime.tls import Tls

PROMPT = "Write one sentence about the sea."
OPTIONS = Options(max_tokens=48, deadline_s=120.0)


def describe_openness(config: MeshConfig, tls: Tls | None) -> str:
    """What keeps nobody out of this mesh; "" when it is closed."""
    told_apart, encrypted = bool(config.tenants), tls is not None
    parts = [] if told_apart else ["callers are not told apart ([tenants.NAME])"]
    parts += [] if encrypted else ["nothing is encrypted (--tls)"]
    return f"{' and '.join(parts)}: for this machine alone" if parts else ""


def print_endpoints(
    router: str,
    control: str,
    edge: HttpEdge | None,
    *,
    page: str,
    tls: Tls | None,
    simulated: bool,
) -> None:
    """Where the mesh is, and how to use it."""
    command = _command()
    encrypted = f" --tls-dir {shlex.quote(str(tls.directory))}" if tls else ""
    to_router = "" if router == "127.0.0.1:7100" else f" --router {router}"
    to_control = "" if control == "127.0.0.1:7101" else f" --control {control}"
    lines = [
        "",
        f"  router   {router}   {command} generate{to_router}{encrypted} 'Why is the sky blue?'",
        f"  control  {control}   {command} status{to_control}{encrypted}",
        "",
    ]
    if page:
        lines[-1:] = [f"  page     {page}   where the time to the first token goes", ""]
    if edge is not None:
        lines[-1:] = [f"  http     {edge.url}", "", f"  {curl_command(edge)}", ""]
        lines += [*(f"  {line}" for line in python_lines(edge)), ""]
    if simulated:
        lines += ["  The engine is simulated: its text and its times are made up.", ""]
    print(*lines, sep="\n", flush=True)


async def answer_first_prompt(router: str, tls: Tls | None) -> None:
    """A mesh that cannot answer says why, and goes on running: the logs may tell more."""
    api_key = os.environ.get(rpc.API_KEY_VARIABLE)
    print(f"> {PROMPT}", flush=True)
    prompt = Prompt([{"role": "user", "content": PROMPT}])
    try:
        async with rpc.make_client(router, tls=tls, api_key=api_key) as client:
            answer = await answers.stream_answer(client, prompt, OPTIONS, answers.print_piece)
    except MeshError as error:
        print(f"firsttoken: the first prompt failed: {error}", file=sys.stderr, flush=True)
    else:
        answers.print_answer_end(answer)


def _command() -> str:
    """How to call this command from the shell that it was called from."""
    called = Path(sys.argv[0]).absolute()
    if shutil.which("firsttoken") == str(called):
        return "firsttoken"
    return os.path.relpath(called) if called.name == "firsttoken" else "firsttoken"
