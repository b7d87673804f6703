"""Make services/bench/traces/tau_airline_a_qwen3.jsonl.gz: tau-bench's dialogues as prompts.

    .venv/bin/python scripts/tau_trace.py DIALOGUES TOOLS MODEL FILE

DIALOGUES: tau_airline_dialogs_a.jsonl.gz, TOOLS: tau_airline_tools.json (both in
tests/data). MODEL: a folder with tokenizer.json and tokenizer_config.json. Each message
of the assistant is a call whose prompt is all before it, with the tools in it, as the
model's chat template writes them. The first calls of all dialogues come first, then the
second ones, and so on, one a second: tau-bench has no times.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.bench.workload_traces import FORMAT, VERSION
from services.core.settings import MeshSettings, TokenizerSettings
from services.core.tokens import BYTES_PER_TOKEN
from services.encoding.encoder import Encoder
from services.encoding.loading import load_encoder
from services.encoding.template import ChatPrompt

BLOCK_TOKENS = 16
SOURCE = "sierra-research/tau-bench (59a200c), MIT, Copyright (c) 2024 Sierra; Qwen3 tokens"


class Call(NamedTuple):
    prefix_keys: Sequence[bytes]
    prompt_tokens: int
    output_tokens: int


def main(dialogues: str, tools: str, model: str, out: str) -> None:
    encoder = load_encoder(MeshSettings(model=model, block_tokens=BLOCK_TOKENS))
    schemas = json.loads(Path(tools).read_text(encoding="utf-8"))
    with gzip.open(dialogues, "rt", encoding="utf-8") as lines:
        calls = [list(calls_of(json.loads(line)["messages"], schemas, encoder)) for line in lines]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows_of(calls))
    # No time in it: the same input gives the same file.
    Path(out).write_bytes(gzip.compress(text.encode(), mtime=0))


def calls_of(
    messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], encoder: Encoder
) -> Iterator[Call]:
    def encode(before: int, **template_args: Any) -> tuple[int, Sequence[bytes]]:
        prompting = messages[before - 1]["role"] != "assistant"
        chat = ChatPrompt(list(messages[:before]), tools, prompting, template_args)
        encoded = encoder.encode(chat, tenant="", cache_salt="", settings=TokenizerSettings())
        return len(encoded.token_ids) // BYTES_PER_TOKEN, encoded.prefix_keys[1:]

    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt_tokens, keys = encode(index)
            # The template writes an empty thought before the answer, and a line end after it.
            before, _ = encode(index, enable_thinking=False)
            after, _ = encode(index + 1)
            yield Call(keys, prompt_tokens, after - before - 1)


def rows_of(dialogues: Sequence[Sequence[Call]]) -> Iterator[dict[str, Any]]:
    yield {"format": FORMAT, "version": VERSION, "block_tokens": BLOCK_TOKENS, "source": SOURCE}
    numbers: dict[bytes, int] = {}
    at_s = 0
    for turn in range(max(map(len, dialogues))):
        for dialogue in dialogues:
            if turn < len(dialogue):
                call = dialogue[turn]
                ids = [numbers.setdefault(key, len(numbers)) for key in call.prefix_keys]
                yield {
                    "at_s": at_s,
                    "prompt_tokens": call.prompt_tokens,
                    "output_tokens": call.output_tokens,
                    "blocks": _ranges(ids),
                }
                at_s += 1


def _ranges(ids: Sequence[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for each in ids:
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return ranges


if __name__ == "__main__":
    main(*sys.argv[1:])
