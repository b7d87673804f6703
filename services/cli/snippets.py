"""Ready-made ways to call a mesh over HTTP: for the shell, and for Python. Pure."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

from services.cli.rpc import API_KEY_VARIABLE

QUESTION = "Why is the sky blue?"
# Without it, an answer is as long as the context allows.
MAX_TOKENS = 100


class HttpEdge(NamedTuple):
    """Where the gateway is, and what a caller needs. `ca_file` is empty without TLS."""

    url: str
    model: str
    asks_for_key: bool
    ca_file: str


def curl_command(edge: HttpEdge) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": edge.model, "messages": messages, "max_tokens": MAX_TOKENS}
    parts = ["curl"]
    if edge.ca_file:
        parts += ["--cacert", shlex.quote(edge.ca_file)]
    parts += [f"{edge.url}/v1/chat/completions", "-H", "'content-type: application/json'"]
    if edge.asks_for_key:
        parts += ["-H", f'"authorization: Bearer ${API_KEY_VARIABLE}"']
    return " ".join([*parts, "-d", shlex.quote(json.dumps(body))])


def python_lines(edge: HttpEdge) -> list[str]:
    """With the package `openai`."""
    key = f'os.environ["{API_KEY_VARIABLE}"]' if edge.asks_for_key else '"none"'
    arguments = [f'base_url="{edge.url}/v1"', f"api_key={key}"]
    imports = ["import os"] if edge.asks_for_key else []
    imports += ["from openai import OpenAI"]
    if edge.ca_file:
        imports[-1] = "from openai import DefaultHttpxClient, OpenAI"
        context = f"ssl.create_default_context(cafile={edge.ca_file!r})"
        imports.insert(0, "import ssl")
        arguments.append(f"http_client=DefaultHttpxClient(verify={context})")
    return [
        *imports,
        f"client = OpenAI({', '.join(arguments)})",
        f'messages = [{{"role": "user", "content": "{QUESTION}"}}]',
        f'options = {{"model": "{edge.model}", "max_tokens": {MAX_TOKENS}}}',
        "answer = client.chat.completions.create(messages=messages, **options)",
        "print(answer.choices[0].message.content)",
    ]
